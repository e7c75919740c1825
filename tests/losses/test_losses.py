"""Losses and gradients equal their formulas over all logits, for every option and chunk size."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo import foreign_names, losses
from ligerzoo.kernels.loss import ragged_gemm
from ligerzoo.kernels.loss.chunked_head import DenseHead, RaggedHead
from ligerzoo.kernels.loss.row_kernel import Rows
from ligerzoo.losses import LossOutput, dpo, grpo, kto, objective
from ligerzoo.losses.logps import safe_exp
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.machine import kernel_file
from tests.kernels.oracles import transformed
from tests.losses import oracles
from tests.losses.cases import BATCH, CLASSES, FEATURES, IGNORED, LENGTH, Case, cases, constants, random_inputs

SetTokensPerChunk = Callable[[int], None]
CASES = cases()
each_case = pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])


@pytest.fixture
def set_tokens_per_chunk(monkeypatch: pytest.MonkeyPatch) -> SetTokensPerChunk:
    """Patches the number of tokens whose logits fit the budget, which is in MiB."""

    def set_both(tokens: int) -> None:
        monkeypatch.setattr(objective, "max_rows", lambda *_: tokens)
        monkeypatch.setattr(objective, "rows_per_chunk", lambda *_: tokens)

    return set_both


def value_and_gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs, torch.full_like(loss, 1.7))]


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-11) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert a.isfinite().all()
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * max(1.0, e.abs().max().item() if e.numel() else 1.0))


HEAD: dict[str, Any] = {"softcap": 3.0, "logit_scale": 0.7}
HEAD_AND_TEMPERATURE: dict[str, Any] = {**HEAD, "temperature": 1.3}


@each_case
def test_formula_over_all_logits(index: int, set_tokens_per_chunk: SetTokensPerChunk, device: str) -> None:
    case = cases(device=device)[index]
    hidden, weight, bias, target = random_inputs(device=device)
    inputs = [hidden, weight, bias]
    expected = value_and_gradients(case.oracle(hidden, weight, target, bias, **HEAD_AND_TEMPERATURE), inputs)
    for tokens in (1, LENGTH, 2 * LENGTH, 4 * LENGTH + 3, 1000):
        set_tokens_per_chunk(tokens)
        loss = case.loss(hidden, weight, target, bias=bias, **HEAD_AND_TEMPERATURE).loss
        assert_same(value_and_gradients(loss, inputs), expected)
    with torch.no_grad():
        assert_same([case.loss(hidden, weight, target, bias=bias, **HEAD_AND_TEMPERATURE).loss], expected[:1])


@pytest.mark.slow
@each_case
def test_every_chunk_size(index: int, set_tokens_per_chunk: SetTokensPerChunk, device: str) -> None:
    case = cases(device=device)[index]
    hidden, weight, bias, target = random_inputs(device=device)
    for bias_argument, head in ((None, {}), (bias, HEAD_AND_TEMPERATURE)):
        inputs = [hidden, weight] if bias_argument is None else [hidden, weight, bias]
        expected = value_and_gradients(case.oracle(hidden, weight, target, bias_argument, **head), inputs)
        for tokens in range(1, BATCH * LENGTH + 2):
            set_tokens_per_chunk(tokens)
            assert_same(
                value_and_gradients(case.loss(hidden, weight, target, bias=bias_argument, **head).loss, inputs),
                expected,
            )


@each_case
@pytest.mark.parametrize("head", [{}, HEAD_AND_TEMPERATURE], ids=["plain", "transformed"])
def test_given_logits(index: int, head: dict[str, Any], device: str) -> None:
    """Logits of ignored tokens may be NaN; given logits are not modified."""
    case = cases(device=device)[index]
    hidden, weight, bias, target = random_inputs(device=device)
    logits = F.linear(hidden, weight, bias).detach()
    expected = value_and_gradients(
        case.oracle(logits.requires_grad_(), torch.eye(CLASSES, device=device, dtype=logits.dtype), target, **head),
        [logits],
    )
    metrics = case.loss(hidden, weight, target, bias=bias, **head).metrics
    with_nan = torch.where((target == IGNORED)[..., None], torch.nan, logits.detach()).requires_grad_()
    for x in (logits, with_nan):
        before = x.detach().clone()
        output = case.loss(x, None, target, **head)
        assert_same(value_and_gradients(output.loss, [x]), expected)
        assert torch.equal(before.nan_to_num(), x.detach().nan_to_num())
        assert output.metrics.keys() == metrics.keys()
        assert_same(list(output.metrics.values()), list(metrics.values()))
        with torch.no_grad():
            assert_same([case.loss(x, None, target, **head).loss], expected[:1])


def test_given_logits_compiled() -> None:
    """Compiles to one graph, with plain autograd."""
    logits = torch.randn(BATCH, LENGTH, CLASSES, dtype=torch.float64, requires_grad=True)
    target, advantages = random_inputs()[3], constants()["advantages"]

    def loss_of(logits: Tensor, **options: Any) -> Tensor:
        return losses.grpo_loss(logits, None, target, advantages, **options).loss

    compiled = torch.compile(loss_of, backend="eager", fullgraph=True)
    for options in ({"variant": "gspo"}, {"entropy_coef": 0.1}):
        expected = value_and_gradients(loss_of(logits, **options), [logits])
        assert_same(value_and_gradients(compiled(logits, **options), [logits]), expected)
    for average in (False, True):
        logps = oracles.logps_of(logits, torch.eye(CLASSES, dtype=logits.dtype), target)[0].sum(-1)
        counts = (target != IGNORED).sum(-1) if average else 1
        assert_same([losses.sequence_logps(logits, None, target, average_log_prob=average)], [logps / counts])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_given_logits_of_lower_precision(dtype: torch.dtype, device: str) -> None:
    logits, _, _, target = random_inputs(dtype, device)
    logits = torch.randn(BATCH, LENGTH, CLASSES, device=device).to(dtype).requires_grad_()
    advantages = constants(torch.float32, device)["advantages"]
    loss = losses.grpo_loss(logits, None, target, advantages, num_items=10**6).loss
    truth = logits.detach().double().requires_grad_()
    losses.grpo_loss(truth, None, target, advantages.double(), num_items=10**6).loss.backward()
    (loss * 2.0**20).backward()  # like a loss scaler: rounded to fp16 before, the gradients would underflow
    assert loss.dtype == torch.float32
    assert logits.grad.dtype == dtype
    error = (logits.grad.double() - truth.grad * 2.0**20).abs().max().item()
    assert error <= torch.finfo(dtype).eps * (truth.grad * 2.0**20).abs().max().item() + 1e-7


def test_sweep_computes_each_logit_once(
    set_tokens_per_chunk: SetTokensPerChunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If whole groups fit the budget; otherwise backward computes the logits again."""
    hidden, weight, _, target = random_inputs()
    chunk_sizes = []
    logits = DenseHead.logits
    monkeypatch.setattr(
        DenseHead, "logits", lambda head, chunk: chunk_sizes.append(chunk.stop - chunk.start) or logits(head, chunk)
    )
    n_tokens = int((target != IGNORED).sum())
    for tokens, passes, chunks in ((2 * LENGTH, 1, 3), (4 * LENGTH, 1, 2), (2 * LENGTH - 1, 2, None)):
        chunk_sizes.clear()
        set_tokens_per_chunk(tokens)
        losses.dpo_loss(hidden, weight, target).loss.backward()
        assert sum(chunk_sizes) == passes * n_tokens
        assert chunks in (None, len(chunk_sizes))


@each_case
def test_skipping_head(index: int, set_tokens_per_chunk: SetTokensPerChunk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head for bf16 on Hopper GPUs, with matrix products in plain torch, excludes ignored tokens from them."""
    hidden, weight, bias, target = random_inputs()
    target[2] = target[5] = IGNORED
    inputs = [hidden, weight, bias]
    case = CASES[index]
    expected = value_and_gradients(case.loss(hidden, weight, target, bias=bias).loss, inputs)
    use_skipping_head(monkeypatch)
    for tokens in (2 * LENGTH, 1000):
        set_tokens_per_chunk(tokens)
        found = value_and_gradients(case.loss(hidden, weight, target, bias=bias).loss, inputs)
        assert_same(found[:3], expected[:3])
        assert_same(found[3:], expected[3:], 1e-6)  # the head sums dweight in fp32


def use_skipping_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the skipping head on any machine; memory that it does not write is NaN."""

    def matmul_(out: Tensor, a: Tensor, b: Tensor, rows: Rows, bias: Tensor | None = None) -> None:
        assert rows.end is not None
        order, n_valid = rows.order, max(0, min(int(rows.end) - rows.first, a.shape[0]))
        positions = slice(n_valid) if order is None else order[rows.first : rows.first + n_valid]
        if order is None:
            out.fill_(torch.nan)
        out[positions] = a[:n_valid] @ b if bias is None else torch.addmm(bias, a[:n_valid], b)

    class WeightGradAccumulator:
        def __init__(self, weight: Tensor, n_rows: int, rows: int) -> None:
            self.sum = torch.full_like(weight, torch.nan)

        def add_(self, dlogits: Tensor, x: Tensor, count: Tensor, end: Tensor, first_row: int) -> None:
            n_valid = max(0, min(int(count) - first_row, x.shape[0]))
            assert int(count) <= int(end) or n_valid == 0
            self.sum = (0 if first_row == 0 else self.sum) + dlogits[:n_valid].T @ x[:n_valid]

        def result(self) -> Tensor:
            return self.sum

    monkeypatch.setattr(ragged_gemm, "matmul_", matmul_)
    monkeypatch.setattr(kernel_file("loss.chunked_head"), "WeightGradAccumulator", WeightGradAccumulator)
    monkeypatch.setattr(ragged_gemm, "row_buffer", lambda like, rows, cols: like.new_full((rows, cols), torch.nan))
    for file in (objective, kernel_file("linear_cross_entropy")):
        monkeypatch.setattr(file, "head_type", lambda n_rows, *_: RaggedHead)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen: str) -> None:
    hidden, weight, _, target = random_inputs()
    inputs = {"hidden": hidden, "weight": weight}
    trainable = [t for name, t in inputs.items() if name != frozen]
    expected = torch.autograd.grad(losses.simpo_loss(hidden, weight, target).loss, trainable)
    inputs[frozen] = inputs[frozen].detach()
    assert_same(list(torch.autograd.grad(losses.simpo_loss(**inputs, target=target).loss, trainable)), list(expected))


def test_constants_get_no_gradient() -> None:
    hidden, weight, _, target = random_inputs()
    reference = constants()["ref_logps"].requires_grad_()
    token_logps = constants()["ref"].requires_grad_()
    desirable, advantages = constants()["desirable"], constants()["advantages"]
    for loss, metrics in (
        losses.dpo_loss(hidden, weight, target, ref_logps=reference),
        losses.kto_loss(hidden, weight, target, desirable, ref_logps=reference),
        losses.grpo_loss(hidden, weight, target, advantages, old_logps=token_logps, ref_logps=token_logps, beta=0.1),
    ):
        loss.backward()
        assert reference.grad is None
        assert token_logps.grad is None
        assert not any(m.requires_grad for m in metrics.values())


@pytest.mark.parametrize("tokens", [0, 1000])
def test_constants_of_another_dtype(tokens: int, set_tokens_per_chunk: SetTokensPerChunk) -> None:
    """Rewards are often fp64, like Python's and NumPy's numbers; the loss keeps its dtype."""
    set_tokens_per_chunk(tokens)
    hidden, weight, _, target = random_inputs(torch.float32)
    c = constants()
    for needs_gradient in (True, False):
        with torch.set_grad_enabled(needs_gradient):
            for loss, _ in (
                losses.grpo_loss(hidden, weight, target, c["advantages"], variant="gspo"),
                losses.kto_loss(hidden, weight, target, c["desirable"], weights=c["sequence_weights"]),
                losses.dpo_loss(hidden, weight, target, ref_logps=c["ref_logps"], weights=c["weights"]),
            ):
                assert loss.dtype == torch.float32


LOW_PRECISION_CASES = ["dpo sigmoid", "orpo", "kto with kl", "grpo grpo old_logps", "grpo old_logps entropy_coef gspo"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LOW_PRECISION_CASES)
def test_lower_precision(name: str, dtype: torch.dtype, device: str) -> None:
    index = [case.name for case in CASES].index(name)
    hidden, weight, _, target = random_inputs(dtype, device)
    actual = value_and_gradients(
        cases(torch.float32, device)[index].loss(hidden, weight, target).loss, [hidden, weight]
    )
    inputs64 = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = value_and_gradients(cases(device=device)[index].oracle(*inputs64, target), inputs64)
    assert actual[0].dtype == torch.float32
    for a, e in zip(actual, truth, strict=True):
        error = (a.double() - e).abs().max().item()
        assert error <= 16 * torch.finfo(dtype).eps * max(1.0, e.abs().max().item())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("pattern", ["all", "half", "prompts", "whole sequences"])
@pytest.mark.parametrize("budget", [0, 1, 512])
def test_bf16_on_a_gpu(budget: int, pattern: str) -> None:
    """Uses sizes that the GPU kernels and heads support; the loss never syncs with the host."""
    batch, length, features, classes = 8, 96, 128, 2000
    hidden = torch.randn(batch, length, features, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(classes, features, device="cuda") * features**-0.5).bfloat16().requires_grad_()
    target = torch.randint(classes, (batch, length), device="cuda")
    positions = torch.arange(length, device="cuda")
    if pattern == "half":
        target[torch.rand(target.shape, device="cuda") < 0.5] = IGNORED
    elif pattern == "prompts":
        target[positions < positions[:batch, None] * 12] = IGNORED
    elif pattern == "whole sequences":
        target[[0, 4, 5]] = IGNORED
    advantages = torch.randn(batch, device="cuda")
    logps = oracles.logps_of(hidden.detach(), weight.detach(), target)[0]
    old = logps + 0.1 * torch.randn_like(logps)
    calls: list[Callable[..., LossOutput]] = [
        lambda *head, **o: losses.dpo_loss(*head, target, ref_logps=old.sum(-1), nll_weight=0.3, **o),
        lambda *head, **o: losses.simpo_loss(*head, target, **o),
        lambda *head, **o: losses.kto_loss(*head, target, advantages > 0, ref_logps=old.sum(-1), **o),
        lambda *head, **o: losses.grpo_loss(*head, target, advantages, old_logps=old, **o),
        lambda *head, **o: losses.grpo_loss(*head, target, advantages, old_logps=old, variant="gspo", **o),
        lambda *head, **o: losses.grpo_loss(*head, target, advantages, old_logps=old, entropy_coef=0.1, **o),
    ]
    inputs64 = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    for call in calls:
        truth = value_and_gradients(call(*inputs64, logits_budget=512).loss, inputs64)
        reference = value_and_gradients(call(hidden, weight, backend="torch", logits_budget=512).loss, [hidden, weight])
        call(hidden, weight, logits_budget=budget).loss.backward()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = value_and_gradients(call(hidden, weight, logits_budget=budget).loss, [hidden, weight])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for case in zip(found, reference, truth, strict=True):
            assert_as_exact_as(*case)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_given_logits_on_a_gpu() -> None:
    """The Triton kernels in bf16 never sync with the host, and allocate only the gradient of the logits."""
    batch, length, classes = 8, 96, 2000
    logits = (3 * torch.randn(batch, length, classes, device="cuda")).bfloat16().requires_grad_()
    target = torch.randint(classes, (batch, length), device="cuda")
    target[torch.rand(target.shape, device="cuda") < 0.3] = IGNORED
    advantages = torch.randn(batch, device="cuda")
    logps = oracles.logps_of_logits(logits.detach().double(), target)[0]
    old = (logps + 0.1 * torch.randn_like(logps)).float()
    calls: list[Callable[..., LossOutput]] = [
        lambda x, **o: losses.dpo_loss(x, None, target, ref_logps=old.sum(-1), nll_weight=0.3, **o),
        lambda x, **o: losses.kto_loss(x, None, target, advantages > 0, ref_logps=old.sum(-1), **o),
        lambda x, **o: losses.grpo_loss(x, None, target, advantages, old_logps=old, **o),
        lambda x, **o: losses.grpo_loss(x, None, target, advantages, old_logps=old, variant="gspo", **o),
        lambda x, **o: losses.grpo_loss(x, None, target, advantages, old_logps=old, entropy_coef=0.1, **o),
    ]
    logits64 = logits.detach().double().requires_grad_()
    for call in calls:
        truth = value_and_gradients(call(logits64).loss, [logits64])
        reference = value_and_gradients(call(logits, backend="torch").loss, [logits])
        call(logits).loss.backward()  # compiles
        logits.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = value_and_gradients(call(logits).loss, [logits])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.max_memory_allocated() - before < 1.2 * logits.numel() * logits.element_size()
        for case, ulps in zip(zip(found, reference, truth, strict=True), (64.0, 2.0), strict=True):  # fp32, bf16
            assert_as_exact_as(*case, ulps=ulps)


# Edges


@each_case
def test_sequence_without_targets(index: int, set_tokens_per_chunk: SetTokensPerChunk, device: str) -> None:
    """NaN hidden states of an ignored sequence do not reach the loss, and their gradient is 0."""
    case = cases(device=device)[index]
    set_tokens_per_chunk(2 * LENGTH)
    hidden, weight, _, target = random_inputs(device=device)
    target[2] = IGNORED
    target[5] = IGNORED  # the other sequence of the pair
    expected = (
        value_and_gradients(case.oracle(hidden, weight, target), [hidden, weight]) if "orpo" not in case.name else None
    )
    found = value_and_gradients(case.loss(hidden, weight, target).loss, [hidden, weight])
    assert not found[1][[2, 5]].any()
    if expected is not None:
        assert_same(found, expected)
    with torch.no_grad():
        hidden[2], hidden[5, 0] = torch.nan, torch.inf
    assert_same(value_and_gradients(case.loss(hidden, weight, target).loss, [hidden, weight]), found)


@each_case
def test_all_targets_ignored(index: int) -> None:
    hidden, weight, _, target = random_inputs()
    loss, metrics = CASES[index].loss(hidden, weight, torch.full_like(target, IGNORED))
    assert loss.isfinite()
    assert all(m.isfinite() for m in metrics.values())
    for gradient in torch.autograd.grad(loss, [hidden, weight]):
        assert not gradient.any()


def small_inputs(batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(batch, length, FEATURES, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(CLASSES, (batch, length))


PAIR_LOSSES = [losses.dpo_loss, losses.cpo_loss, losses.simpo_loss, losses.orpo_loss]


@pytest.mark.parametrize("batch, length", [(2, 1), (2, 3), (0, 3), (2, 0), (0, 0)])
def test_single_pair_single_token_and_empty(batch: int, length: int) -> None:
    hidden, weight, target = small_inputs(batch, length)
    zeros = torch.zeros(batch)
    outputs = [function(hidden, weight, target) for function in PAIR_LOSSES]
    outputs += [losses.kto_loss(hidden, weight, target, zeros > 0), losses.grpo_loss(hidden, weight, target, zeros + 1)]
    outputs += [losses.grpo_loss(hidden, weight, target, zeros + 1, variant="gspo", entropy_coef=0.1)]
    for loss, metrics in outputs:
        gradients = torch.autograd.grad(loss, [hidden, weight])
        assert all(t.isfinite().all() for t in (loss, *metrics.values(), *gradients))
        assert loss.dtype == torch.float64
        assert batch * length or not any(g.any() for g in gradients)


def test_completions_beyond_65536_tokens(device: str) -> None:
    length = 65_600
    hidden = torch.randn(2, length, 2, device=device, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, device=device, dtype=torch.float64, requires_grad=True)
    target = torch.randint(3, (2, length), device=device)
    advantages = torch.tensor([1.0, -0.5], device=device)
    logps, _ = oracles.logps_of(hidden, weight, target)
    old = logps.detach() + 0.3 * torch.randn_like(logps)
    ratio = torch.exp(logps - old)
    clipped = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    expected = value_and_gradients(-clipped.mean(-1).mean(), [hidden, weight])
    loss = losses.grpo_loss(hidden, weight, target, advantages, old_logps=old).loss
    assert_same(value_and_gradients(loss, [hidden, weight]), expected)


# Gradient accumulation


def loss_of_subset(case: Case, indices: list[int], items: dict[str, Any], inputs: tuple[Tensor, ...]) -> LossOutput:
    """The loss of some sequences, with their constants."""
    hidden, weight, target = inputs

    def subset(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return value[indices] if value.shape[0] == BATCH else value[[i for i in indices if i < BATCH // 2]]

    function, options = case.loss, {}
    while hasattr(function, "func"):
        options = {**function.keywords, **options}
        function = function.func
    return function(hidden[indices], weight, target[indices], **{k: subset(v) for k, v in options.items()}, **items)


@each_case
def test_gradients_add_up_over_microbatches(index: int) -> None:
    case = CASES[index]
    hidden, weight, _, target = random_inputs()
    counts = {"pairs": BATCH // 2, "sequences": BATCH, "tokens": int((target != IGNORED).sum())}
    items: dict[str, Any] = {"num_items": counts[case.divided_by]}
    if "entropy_coef" in case.name:
        items["num_tokens"] = torch.tensor(counts["tokens"])
    if case.divided_by == "pairs":
        items["num_nll_items"] = int((target[: BATCH // 2] != IGNORED).sum())
    inputs = [hidden, weight]
    whole = value_and_gradients(case.loss(hidden, weight, target).loss, inputs)
    units = (
        [[i, BATCH // 2 + i] for i in range(BATCH // 2)] if case.divided_by == "pairs" else [[i] for i in range(BATCH)]
    )
    for n_batches in (1, 2, 4, 7):
        batches = [sorted(i for unit in units[start::n_batches] for i in unit) for start in range(n_batches)]
        parts = [
            value_and_gradients(loss_of_subset(case, b, items, (hidden, weight, target)).loss, inputs) for b in batches
        ]
        assert_same([torch.stack(column).sum(0) for column in zip(*parts, strict=True)], whole)


# Options and metrics of single losses


def test_orpo_nll_of_prompts(set_tokens_per_chunk: SetTokensPerChunk) -> None:
    hidden, weight, _, target = random_inputs()
    nll_target = target.clone()
    nll_target[0, 0], nll_target[2, 1] = 3, 4
    logps, _ = oracles.logps_of(hidden, weight, target)
    nll = oracles.logps_of(hidden, weight, nll_target)[0], nll_target
    expected = oracles.pairs(logps, target, oracles.orpo_formula(0.1), average=True, nll_weight=1.0, nll=nll)
    set_tokens_per_chunk(2 * LENGTH)
    loss = losses.orpo_loss(hidden, weight, target, nll_target=nll_target).loss
    assert_same(*(value_and_gradients(t, [hidden, weight]) for t in (loss, expected)))


def test_odds_of_certain_completions_are_finite() -> None:
    hidden = torch.full((2, 1, 1), 100.0, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = losses.orpo_loss(hidden, weight, torch.zeros(2, 1, dtype=torch.int64)).loss
    assert all(t.isfinite().all() for t in value_and_gradients(loss, [hidden, weight]))


@pytest.mark.parametrize("variant", oracles.DPO)
@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_large_log_ratios_of_pairs(variant: str, log_ratio: float) -> None:
    """No exponential overflows."""
    hidden, weight, _, target = random_inputs(torch.float32)
    reference = torch.tensor([-log_ratio] * 3 + [log_ratio] * 3)
    e = 0.01 if variant == "exo_pair" else 0.0
    loss = losses.dpo_loss(hidden, weight, target, ref_logps=reference, variant=variant, label_smoothing=e).loss
    assert all(t.isfinite().all() for t in value_and_gradients(loss, [hidden, weight]))


REQUIRED_OPTIONS: dict[str, dict[str, Any]] = {"cispo": {"epsilon_high": 5.0}, "dr_grpo": {"max_length": LENGTH}}


@pytest.mark.parametrize("variant", grpo.VARIANTS)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("log_ratio", [300.0, -300.0])
def test_large_and_small_ratios(variant: str, advantage: float, log_ratio: float) -> None:
    """A token that is clipped or has no advantage gets no gradient, even if its ratio overflows."""
    hidden, weight, _, target = random_inputs(torch.float32)
    old = losses.sequence_logps(hidden, weight, target).detach()[:, None] / LENGTH - log_ratio
    loss = losses.grpo_loss(
        hidden, weight, target, torch.full((BATCH,), advantage), old_logps=old.expand(BATCH, LENGTH), variant=variant,
        **REQUIRED_OPTIONS.get(variant, {}),
    ).loss  # fmt: skip
    value, *gradients = value_and_gradients(loss, [hidden, weight])
    assert all(t.isfinite().all() for t in (value, *gradients))
    if variant not in ("cispo", "vespo") and advantage * log_ratio >= 0:
        assert not any(g.any() for g in gradients)


def test_reference_with_beta_0_only_affects_metrics() -> None:
    hidden, weight, _, target = random_inputs(torch.float32)
    reference = torch.full(target.shape, 200.0)  # far from the model's log-probabilities
    loss, metrics = losses.grpo_loss(hidden, weight, target, torch.ones(BATCH), ref_logps=reference)
    assert loss.isfinite()
    assert metrics["kl"] > 1e13


def test_pair_metrics() -> None:
    hidden, weight, _, target = random_inputs()
    reference = constants()["ref_logps"]
    logps = losses.sequence_logps(hidden, weight, target).detach()
    assert_same([logps], [oracles.logps_of(hidden, weight, target)[0].sum(-1).detach()])
    metrics = losses.dpo_loss(hidden, weight, target, ref_logps=reference, beta=0.3, nll_weight=1.0).metrics
    chosen, rejected = (0.3 * (logps - reference)).chunk(2)
    logits, counts = hidden @ weight.T, target != IGNORED
    expected = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).double().mean(),
        "logps/chosen": logps[:3].mean(),
        "logps/rejected": logps[3:].mean(),
        "logits/chosen": logits[:3][counts[:3]].mean(),
        "logits/rejected": logits[3:][counts[3:]].mean(),
        "nll_loss": -logps[:3].sum() / (target[:3] != IGNORED).sum(),
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert not metrics[name].requires_grad
        assert metrics[name].item() == pytest.approx(value.item(), rel=1e-6)


def test_grpo_metrics() -> None:
    hidden, weight, _, target = random_inputs()
    c = constants()
    options: dict[str, Any] = {"old_logps": c["old"], "ref_logps": c["ref"], "beta": 0.1, "with_entropy": True}
    metrics = losses.grpo_loss(hidden, weight, target, c["advantages"], **options).metrics
    logps, entropy = oracles.logps_of(hidden, weight, target)
    counts = target != IGNORED
    ratio, a = torch.exp(logps - c["old"]), c["advantages"][:, None]
    low, high = ((ratio < 0.8) & (a < 0))[counts].double(), ((ratio > 1.2) & (a > 0))[counts].double()
    kl = torch.exp(c["ref"] - logps) - (c["ref"] - logps) - 1
    expected = {
        "entropy": entropy[counts].mean(),
        "kl": kl[counts].mean(),
        "log_ratio": (logps - c["old"])[counts].abs().mean(),
        "clip_ratio/low": low.mean(),
        "clip_ratio/high": high.mean(),
        "clip_ratio/region": (low + high).mean(),
    }
    assert 0 < expected["clip_ratio/low"] < 1
    assert {name: pytest.approx(m.item(), rel=1e-6) for name, m in metrics.items()} == {
        name: value.item() for name, value in expected.items()
    }


@pytest.mark.parametrize("head", [{"logit_scale": 0.7, "temperature": 2.0}, {"softcap": 3.0}], ids=str)
def test_mean_logits(head: dict[str, Any], device: str) -> None:
    """Includes `logit_scale` but not the temperature, over completions only; absent with a softcap."""
    hidden, weight, bias, target = random_inputs(device=device)
    logits, counts = 0.7 * F.linear(hidden, weight, bias), target != IGNORED
    desirable = constants(device=device)["desirable"]
    with torch.no_grad():
        hidden[0, 0] = torch.nan  # in a prompt
    pair_metrics = losses.simpo_loss(hidden, weight, target, bias=bias, **head).metrics
    kto_metrics = losses.kto_loss(hidden, weight, target, desirable, bias=bias, **head).metrics
    first_half = torch.arange(BATCH, device=device) < BATCH // 2
    for metrics, chosen in ((pair_metrics, first_half), (kto_metrics, desirable)):
        for which, selected in (("chosen", chosen), ("rejected", ~chosen)):
            if "softcap" in head:
                assert f"logits/{which}" not in metrics
            else:
                torch.testing.assert_close(
                    metrics[f"logits/{which}"], logits[selected][counts[selected]].mean().detach()
                )


def test_odds_metrics() -> None:
    hidden, weight, _, target = random_inputs()
    metrics = losses.orpo_loss(hidden, weight, target).metrics
    p = losses.sequence_logps(hidden, weight, target, average_log_prob=True).exp().detach()
    log_odds = (p[:3] / (1 - p[:3])).log() - (p[3:] / (1 - p[3:])).log()
    torch.testing.assert_close(metrics["log_odds_chosen"], log_odds.mean())
    torch.testing.assert_close(metrics["log_odds_ratio"], F.logsigmoid(log_odds).mean())


def test_sequence_ratios_count_once_per_sequence() -> None:
    """Even if completions differ in length."""
    hidden, weight, _, target = random_inputs()
    c = constants()
    counts, a = target != IGNORED, c["advantages"]
    log_ratio = torch.where(counts, oracles.logps_of(hidden, weight, target)[0] - c["old"], 0.0).sum(-1)
    ratio = (log_ratio / counts.sum(-1)).exp().detach()
    low, high = ((ratio < 0.8) & (a < 0)).double().mean(), ((ratio > 1.2) & (a > 0)).double().mean()
    assert 0 < low + high < 1
    metrics = losses.grpo_loss(hidden, weight, target, a, old_logps=c["old"], variant="gspo").metrics
    assert metrics["clip_ratio/low"].item() == pytest.approx(low.item())
    assert metrics["clip_ratio/high"].item() == pytest.approx(high.item())
    assert metrics["clip_ratio/region"].item() == pytest.approx((low + high).item())


def test_kto_with_average_log_prob() -> None:
    hidden, weight, _, target = random_inputs()
    c = constants()
    logps, ref, lengths = oracles.logps_of(hidden, weight, target)[0], c["ref_logps"], (target != IGNORED).sum(-1)
    gain = (logps.sum(-1) - ref) / lengths - 0.2
    expected = torch.where(c["desirable"], torch.sigmoid(-0.3 * gain), torch.sigmoid(0.3 * gain)).mean()
    loss, metrics = losses.kto_loss(
        hidden, weight, target, c["desirable"], ref_logps=ref, kl=ref.new_tensor(0.2), beta=0.3, average_log_prob=True
    )
    assert_same(*(value_and_gradients(t, [hidden, weight]) for t in (loss, expected)))
    rewards = 0.3 * (logps.sum(-1) - ref).detach()
    torch.testing.assert_close(metrics["rewards/chosen"], rewards[c["desirable"]].mean())
    assert (metrics["count/chosen"], metrics["count/rejected"]) == (3, 3)


def metric_weight(name: str, case: Case, target: Tensor, desirable: Tensor) -> Tensor:
    """The number of sequences, pairs or tokens that a metric averages over."""
    tokens, n = (target != IGNORED).sum(), len(target)
    first_half = torch.arange(n) < n // 2
    chosen = desirable if case.name.startswith(("kto", "apo")) else first_half
    if name == "nll_loss":
        return (target[first_half] != IGNORED).sum()
    if name.startswith("logits/"):
        return (target[chosen if name == "logits/chosen" else ~chosen] != IGNORED).sum()
    if case.divided_by == "sequences" and name.startswith(("rewards/", "logps/")):
        return (chosen if name.endswith("chosen") else ~chosen).sum()
    options = getattr(case.loss, "keywords", {})
    level = options.get("level") or grpo.VARIANTS.get(options.get("variant", "grpo"), grpo.VARIANTS["grpo"]).level
    if name in ("kl", "entropy", "log_ratio") or (name.startswith("clip_ratio/") and level == "token"):
        return tokens
    return torch.tensor(n)


@each_case
def test_metrics_of_microbatches(index: int) -> None:
    """Their weighted means equal the metrics of the whole batch, whatever `num_items` is."""
    case = CASES[index]
    hidden, weight, _, target = random_inputs()
    desirable = constants()["desirable"]
    units = [[i, BATCH // 2 + i] for i in range(BATCH // 2)]
    batches = [[*units[0]], sorted(units[1] + units[2])]
    items: dict[str, Any] = {"num_items": 7}
    if "entropy_coef" in case.name:
        items["num_tokens"] = 7
    if case.divided_by == "pairs":
        items["num_nll_items"] = 7
    parts = [loss_of_subset(case, indices, items, (hidden, weight, target)).metrics for indices in batches]
    for name, value in case.loss(hidden, weight, target).metrics.items():
        is_kto = "count/chosen" in parts[0]
        if name.startswith("count/"):
            assert sum(part[name] for part in parts) == value
        elif not (is_kto and name in ("rewards/margins", "kl")):  # a difference of means, and an argument
            counts = [metric_weight(name, case, target[indices], desirable[indices]) for indices in batches]
            mean = sum(part[name] * n for part, n in zip(parts, counts, strict=True)) / sum(counts)
            torch.testing.assert_close(mean.double(), value.double(), rtol=1e-6, atol=1e-9)


# LUSPO


@pytest.mark.parametrize("is_padded", [False, True])
def test_luspo_kl_term(is_padded: bool) -> None:
    """The KL term sums over non-ignored tokens. liger-kernel and TRL before 1.16 average it over T: this weights it by
    |y| / T and includes padding."""
    hidden, weight, _, target = random_inputs()
    if not is_padded:
        target = target.where(target != IGNORED, 0)
    c, beta = constants(), 0.3
    options: dict[str, Any] = {"old_logps": c["old"], "ref_logps": c["ref"], "beta": beta, "variant": "luspo"}
    logps, counts = oracles.logps_of(hidden, weight, target)[0], target != IGNORED
    lengths = counts.sum(-1)
    ratio = (torch.where(counts, logps - c["old"], 0.0).sum(-1) / lengths).exp()
    clipped = -torch.minimum(ratio * c["advantages"], ratio.clamp(0.8, 1.2) * c["advantages"])
    k3 = torch.exp(c["ref"] - logps) - (c["ref"] - logps) - 1
    expected_loss = (lengths * clipped + beta * torch.where(counts, k3, 0.0).sum(-1)).mean()
    other = (lengths * (clipped + beta * k3.mean(-1))).mean()
    loss = losses.grpo_loss(hidden, weight, target, c["advantages"], **options).loss
    assert_same(*(value_and_gradients(t, [hidden, weight]) for t in (loss, expected_loss)))
    if not is_padded:
        assert_same([loss], [other])
        return
    assert (loss - other).abs() > 0.01
    extra = (beta * (lengths * k3.mean(-1) - torch.where(counts, k3, 0.0).sum(-1))).mean()
    assert_same([other - loss], [extra])
    # More padding does not change the loss.
    pad = {name: F.pad(c[name], (0, 3)) for name in ("old", "ref")}
    options |= {"old_logps": pad["old"], "ref_logps": pad["ref"]}
    longer = losses.grpo_loss(
        F.pad(hidden, (0, 0, 0, 3)), weight, F.pad(target, (0, 3), value=IGNORED), c["advantages"], **options
    )
    assert_same([longer.loss], [loss])


# Exponentials


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_safe_exp(dtype: torch.dtype) -> None:
    below = torch.cat([torch.linspace(-2000.0, 30.0, 5001, dtype=dtype), torch.tensor([-torch.inf, 30.0], dtype=dtype)])
    x = below.clone().requires_grad_()
    y = safe_exp(x)
    assert torch.equal(y, below.exp())
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], below.exp())
    beyond = torch.tensor([30.001, 31.0, 100.0, 1000.0, 1e6], dtype=dtype, requires_grad=True)
    y = safe_exp(beyond)
    (slope,) = torch.autograd.grad(y.sum(), beyond)
    top = math.exp(30)
    torch.testing.assert_close(y.detach(), top * (beyond.detach() - 29))
    torch.testing.assert_close(slope, torch.full_like(slope, top))


@pytest.mark.parametrize("is_kl_corrected", [False, True])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1000.0, -1000.0])
@pytest.mark.parametrize("variant", grpo.VARIANTS)
def test_kl_term_far_from_reference(variant: str, log_ratio: float, is_kl_corrected: bool) -> None:
    """In fp32 the KL term is finite, and its gradient points towards the reference."""
    hidden, weight, _, target = random_inputs(torch.float32)
    counts = target != IGNORED
    logps = oracles.logps_of(hidden, weight, target)[0].detach()
    options: dict[str, Any] = {"variant": variant, **REQUIRED_OPTIONS.get(variant, {})}
    loss, metrics = losses.grpo_loss(
        hidden, weight, target, torch.zeros(BATCH), ref_logps=logps + log_ratio, beta=0.1,
        is_kl_corrected=is_kl_corrected, **options,
    )  # fmt: skip
    value, *gradients = value_and_gradients(loss, [hidden, weight])
    assert all(t.isfinite().all() for t in (value, *metrics.values(), *gradients))
    assert gradients[0].norm().isfinite()
    with torch.no_grad():
        stepped = oracles.logps_of(hidden - gradients[0] / gradients[0].abs().max() * 1e-3, weight, target)[0]
        towards = (stepped - logps)[counts].sum() * log_ratio
    assert towards > 0 or is_kl_corrected  # the correction multiplies by a ratio with its own gradient


@pytest.mark.parametrize("variant", ["grpo", "dapo", "gspo", "luspo", "cispo"])
def test_epsilon_high_is_the_same_in_all_variants(variant: str) -> None:
    """Ratios above 1 + epsilon_high are counted as clipped, and clipped to it."""
    hidden, weight, _, target = random_inputs()
    logps, counts = oracles.logps_of(hidden, weight, target)[0], target != IGNORED
    for ratio, is_clipped in ((1.35, False), (1.45, True)):
        _, metrics = losses.grpo_loss(
            hidden, weight, target, torch.ones(BATCH), old_logps=logps.detach() - math.log(ratio), variant=variant,
            epsilon_high=0.4,
        )  # fmt: skip
        assert metrics["clip_ratio/high"] == float(is_clipped)
        loss = losses.grpo_loss(
            hidden, weight, target, torch.ones(BATCH), old_logps=logps.detach() - math.log(ratio), variant="cispo",
            epsilon_high=0.4,
        ).loss  # fmt: skip
        assert_same([loss], [-min(ratio, 1.4) * logps[counts].mean()])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, 1000.0])
def test_large_ratio_with_negative_advantage_has_gradient(log_ratio: float, advantage: float) -> None:
    """Without `delta` the loss of a negative advantage is not clipped above: its gradient must not vanish."""
    hidden, weight, _, target = random_inputs(torch.float32)
    old = oracles.logps_of(hidden, weight, target)[0].detach() - log_ratio
    advantages = torch.full((BATCH,), advantage)
    for variant in ("grpo", "gspo"):
        loss = losses.grpo_loss(hidden, weight, target, advantages, old_logps=old, variant=variant).loss
        value, *gradients = value_and_gradients(loss, [hidden, weight])
        assert all(t.isfinite().all() for t in (value, *gradients))
        assert bool(gradients[0].any()) == (advantage < 0)


@pytest.mark.parametrize("tau", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1000.0, -1000.0, 1e4, -1e4])
def test_discopop_is_finite(log_ratio: float, tau: float) -> None:
    hidden, weight, _, target = random_inputs(torch.float32)
    reference = torch.tensor([-log_ratio] * 3 + [log_ratio] * 3)
    loss = losses.dpo_loss(
        hidden, weight, target, ref_logps=reference, variant="discopop", discopop_tau=tau, beta=1.0
    ).loss
    assert all(t.isfinite().all() for t in value_and_gradients(loss, [hidden, weight]))


@pytest.mark.parametrize("desirable", [False, True])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1000.0, -1000.0])
def test_kto_far_from_reference(log_ratio: float, desirable: bool) -> None:
    hidden, weight, _, target = random_inputs(torch.float32)
    reference, labels = torch.full((BATCH,), -log_ratio), torch.full((BATCH,), desirable)
    loss = losses.kto_loss(hidden, weight, target, labels, ref_logps=reference, beta=1.0).loss
    assert all(t.isfinite().all() for t in value_and_gradients(loss, [hidden, weight]))


def test_sampler_correction_of_extreme_ratios() -> None:
    old, mask = torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    for level in ("token", "sequence"):
        for log_ratio in (1000.0, -1000.0, torch.inf):
            found = losses.sampler_correction(old, old - log_ratio, mask, level=level)
            assert torch.equal(found, torch.full((1, 2), 3.0 if log_ratio > 0 else 0.0))


def test_kto_kl() -> None:
    assert losses.kto_kl(torch.tensor([1.0, 4.0]), torch.tensor([0.0, 1.0])) == 2.0
    assert losses.kto_kl(torch.tensor([1.0]), torch.tensor([3.0])) == 0.0
    assert losses.kto_kl(torch.zeros(0), torch.zeros(0)) == 0.0


@pytest.mark.parametrize("level, mode, expected", [
    ("token", "truncate", [[2.0, 0.5, 1.0, 1.0]]),
    ("token", "mask", [[0.0, 0.5, 1.0, 1.0]]),
    ("sequence", "truncate", [[2.0] * 4]),
    ("sequence", "mask", [[0.0] * 4]),
])  # fmt: skip
def test_sampler_correction(level: Any, mode: Any, expected: list[list[float]]) -> None:
    ratios = torch.tensor([[8.0, 0.5, torch.nan, torch.inf]])
    mask = torch.tensor([[True, True, True, False]])
    found = losses.sampler_correction(ratios.log(), torch.zeros(1, 4), mask, level=level, mode=mode, max_ratio=2.0)
    torch.testing.assert_close(found, torch.tensor(expected))


# Distillation

DIVERGENCES: list[Any] = ["forward_kl", "reverse_kl", "jsd", "tvd", "cosine"]


@pytest.mark.parametrize("inputs_kind", ["hidden", "teacher logits", "both logits"])
@pytest.mark.parametrize("is_transformed", [False, True])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_distillation(
    divergence: Any, is_transformed: bool, inputs_kind: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    hidden, weight, bias, target = random_inputs(device=device)
    teacher_hidden, teacher_weight = (
        torch.randn(*s, device=device, dtype=torch.float64) for s in ((BATCH, LENGTH, 3), (CLASSES, 3))
    )
    head, teacher_head = (HEAD, {"softcap": 2.0, "logit_scale": 1.1}) if is_transformed else ({}, {})
    student, teacher = (
        transformed(F.linear(hidden, weight, bias), **head),
        transformed(teacher_hidden @ teacher_weight.T, **teacher_head),
    )
    counts = target != IGNORED
    soft = oracles.distance(divergence, student, teacher, 0.3, 1.5)[counts].mean()
    options: dict[str, Any] = {"beta": 0.3} if divergence == "jsd" else {}
    options |= {} if divergence == "cosine" else {"temperature": 1.5}
    hard = F.cross_entropy(student[counts], target[counts])
    inputs = [hidden, weight, bias]
    expected = value_and_gradients(0.6 * soft + 0.4 * hard, inputs)
    teacher_arguments: dict[str, Any] = {"teacher_logits": teacher}
    if inputs_kind == "both logits":
        logits = F.linear(hidden, weight, bias)
        with_nan = torch.where(counts[..., None], logits, torch.nan)
        loss, metrics = losses.distillation_loss(
            with_nan, None, target, **teacher_arguments, divergence=divergence, **options,
            soft_weight=0.6, hard_weight=0.4, **head,
        )  # fmt: skip
        assert_same(value_and_gradients(loss, inputs), expected)
        assert_same(list(metrics.values()), [soft.detach(), hard.detach()])
        return
    if inputs_kind == "hidden":
        teacher_arguments = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight.requires_grad_()}
        teacher_arguments |= {f"teacher_{name}": value for name, value in teacher_head.items()}
    for tokens in (1, 4, 1000):
        for file in ("linear_divergence", "linear_cross_entropy"):
            monkeypatch.setattr(kernel_file(file), "rows_per_chunk", lambda *_, tokens=tokens: tokens)
        loss, metrics = losses.distillation_loss(
            hidden, weight, target, **teacher_arguments, divergence=divergence, **options,
            soft_weight=0.6, hard_weight=0.4, bias=bias, **head,
        )  # fmt: skip
        assert_same(value_and_gradients(loss, inputs), expected)
        assert_same(list(metrics.values()), [soft.detach(), hard.detach()])
        assert not any(m.requires_grad for m in metrics.values())
    assert teacher_weight.grad is None


def test_distillation_gradients_add_up_over_microbatches() -> None:
    hidden, weight, _, target = random_inputs()
    teacher = torch.randn(BATCH, LENGTH, CLASSES, dtype=torch.float64)
    whole = value_and_gradients(
        losses.distillation_loss(hidden, weight, target, teacher_logits=teacher, hard_weight=0.5).loss, [hidden, weight]
    )
    for n_batches in (1, 2, 4, 7):
        parts = [
            value_and_gradients(
                losses.distillation_loss(
                    hidden[i::n_batches], weight, target[i::n_batches], teacher_logits=teacher[i::n_batches],
                    hard_weight=0.5, num_items=int((target != IGNORED).sum()),
                ).loss,
                [hidden, weight],
            )
            for i in range(n_batches)
        ]  # fmt: skip
        assert_same([torch.stack(column).sum(0) for column in zip(*parts, strict=True)], whole)


# Errors


@pytest.mark.parametrize("call, message", [
    (lambda h, w, t: losses.dpo_loss(h[:5], w, t[:5]), "got 5 sequences; expected an even number"),
    (lambda h, w, t: losses.dpo_loss(h[0], w, t[0]), r"hidden \(5, 4\) and target \(5,\); expected \(B, T, H\)"),
    (lambda h, w, t: losses.dpo_loss(h, w, t, variant="dpo"), "variant='dpo'; expected one of 'sigmoid'"),
    (lambda h, w, t: losses.dpo_loss(h, w, t, variant="exo_pair"),
     "label_smoothing=0.0 with variant='exo_pair'; expected 0 < label_smoothing < 1"),
    (lambda h, w, t: losses.dpo_loss(h, w, t, variant="hinge", label_smoothing=0.1),
     "label_smoothing=0.1 with variant='hinge'; expected 0: the variant has no label smoothing"),
    (lambda h, w, t: losses.dpo_loss(h, w, t, ref_logps=h[0, 0]), r"ref_logps has shape \(4,\); expected \(6,\)"),
    (lambda h, w, t: losses.cpo_loss(h, w, t, variant="robust"), "cpo_loss: variant='robust'"),
    (lambda h, w, t: losses.kto_loss(h, w, t, t[:, 0] > 0, variant="bco"), "kto_loss: variant='bco'"),
    (lambda h, w, t: losses.cpo_loss(h, w, t, num_items=3), "num_items=3 and num_nll_items=None; expected both"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, 0, 0], num_items=3, entropy_coef=0.1), "num_tokens=None; expected"),
    (lambda h, w, t: losses.sampler_correction(h[..., 0], h[..., 0], t), "mask has dtype torch.int64; expected"),
    (lambda h, w, t: losses.sequence_logps(h[0], w, t[0]), "sequence_logps: got hidden"),
    (lambda h, w, t: losses.kto_loss(h, w, t, t > 0), r"desirable has shape \(6, 5\); expected \(6,\)"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, 0, 0], beta=0.1), r"ref_logps=None with beta=0.1; .* Pass ref_"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, :2, 0]),
     r"advantages has shape \(6, 2\); expected \(6,\) or \(6, 5\)"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, 0, 0], level="row"), "level='row'; expected one of 'token', 'sequ"),
    (lambda h, w, t: losses.sampler_correction(t, t, t > 0, level="row"), "sampler_correction: level='row'"),
    (lambda h, w, t: losses.sampler_correction(t, t, t > 0, mode="clip"), "mode='clip'; expected one of"),
    (lambda h, w, t: losses.distillation_loss(h, w, t, teacher_logits=h, divergence="kl"), "divergence='kl'; expected"),
    (lambda h, w, t: losses.distillation_loss(h, w, t),
     "pass teacher_hidden and teacher_weight, or teacher_logits; got none"),
    (lambda h, w, t: losses.distillation_loss(h, w, t, teacher_logits=h),
     r"teacher_logits has shape \(6, 5, 4\); expected \(6, 5, 13\)"),
    (lambda h, w, t: losses.grpo_loss(h, None, t, h[:, 0, 0], bias=w[:, 0]),
     r"grpo_loss: weight=None with .*bias=None"),
    (lambda h, w, t: losses.dpo_loss(h, None, t + 4), r"dpo_loss: target\[0, 0\] is -96; expected 0 to 3, or"),
    (lambda h, w, t: losses.sequence_logps(t[..., None], None, t), "sequence_logps: hidden has dtype torch.int64"),
    (lambda h, w, t: losses.distillation_loss(h, None, t, teacher_logits=h[..., :3]),
     "the student has 4 classes, the teacher 3"),
    (lambda h, w, t: losses.distillation_loss(h, None, t, teacher_logits=h[:2]), r"teacher \(2, 5, 4\), target"),
    (lambda h, w, t: losses.simpo_loss(h, w[:, :2], t), r"weight \(13, 2\)"),
    (lambda h, w, t: losses.simpo_loss(h.requires_grad_(), w[:, :2], t), r"simpo_loss: .*weight \(13, 2\)"),
])  # fmt: skip
def test_invalid_arguments_raise(call: Callable[..., Any], message: str) -> None:
    """Values of single options are in test_messages."""
    hidden, weight, _, target = random_inputs()
    with pytest.raises(ValueError, match=message):
        call(hidden.detach(), weight, target)


@pytest.mark.parametrize("call, message", [
    (lambda h, t: losses.dpo_loss(h, None, t, variant="sigmoid_norm"),
     r"Use dpo_loss\(variant='sigmoid', average_log_prob=True\) instead of"),
    (lambda h, t: losses.dpo_loss(h, None, t, variant="sft"), "Use nll_weight=... with any variant instead of 'sft'"),
    (lambda h, t: losses.dpo_loss(h, None, t, variant="aot"), "'aot' of other libraries is not supported: it sorts"),
    (lambda h, t: losses.dpo_loss(h, None, t, loss_type="ipo"),
     "dpo_loss: unknown option loss_type='ipo'; .* Use variant instead of 'loss_type' of other libraries$"),
    (lambda h, t: losses.dpo_loss(h, None, t, loss_type="sigmoid_norm"),
     r"Use variant instead of .*. Use dpo_loss.*average.* instead of 'sigmoid_norm'"),
    (lambda h, t: losses.cpo_loss(h, None, t, variant="simpo"), "Use simpo_loss instead of 'simpo'"),
    (lambda h, t: losses.simpo_loss(h, None, t, simpo_gamma=0.5), "Use gamma instead of"),
    (lambda h, t: losses.grpo_loss(h, None, t, h[:, 0, 0], importance_sampling_level="token"), "Use level instead of"),
    (lambda h, t: losses.grpo_loss(h, None, t, h[:, 0, 0], loss_type="dapo"), "Use variant instead of"),
    (lambda h, t: losses.GRPO(loss_type="dapo"),
     "GRPO: unknown option loss_type='dapo'; expected an option of GRPO. Use variant instead"),
    (lambda h, t: losses.DPO(loss_type="sigmoid_norm"), "DPO: unknown option loss_type=.*average_log_prob=True"),
    (lambda h, t: losses.DPO(variant="kto_pair")(h, None, t), r"Use kto_loss\(variant='kto'\)"),
    (lambda h, t: losses.distillation_loss(h, None, t, teacher_logits=h, divergence="cosine_similarity"), "='cosine'"),
])  # fmt: skip
def test_errors_suggest_our_names_for_those_of_other_libraries(call: Callable[..., Any], message: str) -> None:
    hidden, _, _, target = random_inputs()
    with pytest.raises((ValueError, TypeError), match=message):
        call(hidden.detach(), target.clamp(max=FEATURES - 1))


def test_the_loss_says_how_hidden_states_of_the_reference_become_ref_logps() -> None:
    hidden, weight, _, target = random_inputs()
    remedy = r"Use ref_logps, from sequence_logps\(ref_hidden, ref_weight, target\) without gradients"
    for option in ("ref_input", "ref_weight", "ref_bias"):
        with pytest.raises(TypeError, match=remedy):
            losses.dpo_loss(hidden, weight, target, **{option: hidden})


def test_names_of_other_libraries_are_not_ours() -> None:
    modules = (losses.DPO, losses.CPO, losses.SimPO, losses.ORPO, losses.KTO, losses.GRPO, losses.Distillation)
    options = {option for module in modules for option in module.options_type.accepted}
    variants = {*dpo.VARIANTS, *grpo.VARIANTS, *kto.VARIANTS, *DIVERGENCES}
    assert not (options | variants) & {*foreign_names.OURS, *foreign_names.UNSUPPORTED}


def test_number_for_tensor_raises() -> None:
    hidden, weight, _, target = random_inputs()
    with pytest.raises(TypeError, match=r"kto_loss: kl is 0.5; expected a floating-point tensor of shape \(\)"):
        losses.kto_loss(hidden, weight, target, target[:, 0] > 0, kl=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("grad", [False, True])
def test_unknown_arguments_raise(grad: bool) -> None:
    hidden, weight, _, target = random_inputs()
    constant, per_sequence = hidden.detach(), hidden[:, 0, 0].detach()
    with torch.set_grad_enabled(grad):
        for function, args in (
            (losses.dpo_loss, ()), (losses.cpo_loss, ()), (losses.simpo_loss, ()), (losses.orpo_loss, ()),
            (losses.kto_loss, (per_sequence > 0,)), (losses.grpo_loss, (per_sequence,)),
            (losses.distillation_loss, (constant, weight)),
            (losses.ppo_clip_loss, (per_sequence, per_sequence)), (losses.sequence_logps, ()),
        ):  # fmt: skip
            with pytest.raises(TypeError, match=rf"^{function.__name__}: unknown option gama=0.1; expected"):
                function(hidden, weight, target, *args, gama=0.1)

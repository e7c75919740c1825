"""Every loss, option and gradient equals its formula over all logits, at every chunk size."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo import losses
from ligerzoo.kernels.loss import ragged_gemm
from ligerzoo.kernels.loss.chunked_head import DenseHead, RaggedHead
from ligerzoo.losses import LossOutput, distillation, dpo, grpo, kto, modules, names
from ligerzoo.losses import objective as sweep
from ligerzoo.losses.logps import bounded_exp
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.machine import kernel_file
from tests.kernels.oracles import transformed
from tests.losses import oracles
from tests.losses.cases import CLASSES, FEATURES, IGNORED, LENGTH, ROWS, Case, cases, constants, make

SetChunk = Callable[[int], None]
CASES = cases()
each_case = pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])


@pytest.fixture
def tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> SetChunk:
    """Sets how many tokens' logits fit the budget, which itself counts in MiB."""

    def set_both(tokens: int) -> None:
        monkeypatch.setattr(sweep, "max_rows", lambda *_: tokens)
        monkeypatch.setattr(sweep, "rows_per_chunk", lambda *_: tokens)

    return set_both


def exact(device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return make(dtype, device)


def value_and_gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs, torch.full_like(loss, 1.7))]


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-11) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert a.isfinite().all()
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * max(1.0, e.abs().max().item() if e.numel() else 1.0))


HEAD: dict[str, Any] = {"softcap": 3.0, "logit_scale": 0.7}
TEMPERED: dict[str, Any] = {**HEAD, "temperature": 1.3}


@each_case
def test_the_formula_over_all_logits(index: int, tokens_at_a_time: SetChunk, device: str) -> None:
    case = cases(device=device)[index]
    hidden, weight, bias, target = exact(device)
    inputs = [hidden, weight, bias]
    expected = value_and_gradients(case.oracle(hidden, weight, target, bias, **TEMPERED), inputs)
    for tokens in (1, LENGTH, 2 * LENGTH, 4 * LENGTH + 3, 1000):
        tokens_at_a_time(tokens)
        loss = case.loss(hidden, weight, target, bias=bias, **TEMPERED).loss
        assert_same(value_and_gradients(loss, inputs), expected)
    with torch.no_grad():
        assert_same([case.loss(hidden, weight, target, bias=bias, **TEMPERED).loss], expected[:1])


@pytest.mark.slow
@each_case
def test_every_chunk_size(index: int, tokens_at_a_time: SetChunk, device: str) -> None:
    case = cases(device=device)[index]
    hidden, weight, bias, target = exact(device)
    for given, head in ((None, {}), (bias, TEMPERED)):
        inputs = [hidden, weight] if given is None else [hidden, weight, bias]
        expected = value_and_gradients(case.oracle(hidden, weight, target, given, **head), inputs)
        for tokens in range(1, ROWS * LENGTH + 2):
            tokens_at_a_time(tokens)
            assert_same(
                value_and_gradients(case.loss(hidden, weight, target, bias=given, **head).loss, inputs), expected
            )


@each_case
@pytest.mark.parametrize("head", [{}, TEMPERED], ids=["plain", "tempered"])
def test_given_logits(index: int, head: dict[str, Any], device: str) -> None:
    """Of which those of tokens that do not count may be anything; they are not written to."""
    case = cases(device=device)[index]
    hidden, weight, bias, target = exact(device)
    logits = F.linear(hidden, weight, bias).detach()
    expected = value_and_gradients(
        case.oracle(logits.requires_grad_(), torch.eye(CLASSES, device=device, dtype=logits.dtype), target, **head),
        [logits],
    )
    metrics = case.loss(hidden, weight, target, bias=bias, **head).metrics
    spoiled = torch.where((target == IGNORED)[..., None], torch.nan, logits.detach()).requires_grad_()
    for given in (logits, spoiled):
        before = given.detach().clone()
        found = case.loss(given, None, target, **head)
        assert_same(value_and_gradients(found.loss, [given]), expected)
        assert torch.equal(before.nan_to_num(), given.detach().nan_to_num())
        assert found.metrics.keys() == metrics.keys()
        assert_same(list(found.metrics.values()), list(metrics.values()))
        with torch.no_grad():
            assert_same([case.loss(given, None, target, **head).loss], expected[:1])


def test_given_logits_compiled() -> None:
    """In one graph, by autograd alone."""
    logits = torch.randn(ROWS, LENGTH, CLASSES, dtype=torch.float64, requires_grad=True)
    target, advantages = exact("cpu")[3], constants()["advantages"]

    def loss_of(logits: Tensor, **options: Any) -> Tensor:
        return losses.grpo_loss(logits, None, target, advantages, **options).loss

    compiled = torch.compile(loss_of, backend="eager", fullgraph=True)
    for options in ({"variant": "gspo"}, {"entropy_coef": 0.1}):
        expected = value_and_gradients(loss_of(logits, **options), [logits])
        assert_same(value_and_gradients(compiled(logits, **options), [logits]), expected)
    for average in (False, True):
        logps = oracles.logps_of(logits, torch.eye(CLASSES, dtype=logits.dtype), target)[0].sum(-1)
        counts = (target != IGNORED).sum(-1) if average else 1
        assert_same([losses.sequence_logps(logits, None, target, average=average)], [logps / counts])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_given_logits_of_lower_precision(dtype: torch.dtype, device: str) -> None:
    logits, _, _, target = exact(device, dtype)
    logits = torch.randn(ROWS, LENGTH, CLASSES, device=device).to(dtype).requires_grad_()
    advantages = constants(torch.float32, device)["advantages"]
    own = losses.grpo_loss(logits, None, target, advantages, num_items=10**6).loss
    truth = logits.detach().double().requires_grad_()
    losses.grpo_loss(truth, None, target, advantages.double(), num_items=10**6).loss.backward()
    (own * 2.0**20).backward()  # as a loss scaler does: in fp16 they would vanish if they were rounded before
    assert own.dtype == torch.float32
    assert logits.grad.dtype == dtype
    error = (logits.grad.double() - truth.grad * 2.0**20).abs().max().item()
    assert error <= torch.finfo(dtype).eps * (truth.grad * 2.0**20).abs().max().item() + 1e-7


def test_a_sweep_makes_each_logit_once(tokens_at_a_time: SetChunk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where whole groups fit; where they do not, backward makes them again."""
    hidden, weight, _, target = exact("cpu")
    made = []
    logits = DenseHead.logits
    monkeypatch.setattr(
        DenseHead, "logits", lambda head, chunk: made.append(chunk.stop - chunk.start) or logits(head, chunk)
    )
    n_tokens = int((target != IGNORED).sum())
    for tokens, passes, chunks in ((2 * LENGTH, 1, 3), (4 * LENGTH, 1, 2), (2 * LENGTH - 1, 2, None)):
        made.clear()
        tokens_at_a_time(tokens)
        losses.dpo_loss(hidden, weight, target).loss.backward()
        assert sum(made) == passes * n_tokens
        assert chunks in (None, len(made))


@each_case
def test_a_head_that_skips(index: int, tokens_at_a_time: SetChunk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head for bf16 on Hopper GPUs, its products in plain torch: rows that do not count take no part in them."""
    hidden, weight, bias, target = exact("cpu")
    target[2] = target[5] = IGNORED
    inputs = [hidden, weight, bias]
    case = CASES[index]
    expected = value_and_gradients(case.loss(hidden, weight, target, bias=bias).loss, inputs)
    skips(monkeypatch)
    for tokens in (2 * LENGTH, 1000):
        tokens_at_a_time(tokens)
        found = value_and_gradients(case.loss(hidden, weight, target, bias=bias).loss, inputs)
        assert_same(found[:3], expected[:3])
        assert_same(found[3:], expected[3:], 1e-6)  # which that head sums in fp32


def skips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets any machine have that head. What it does not compute is NaN."""

    def matmul_(
        out: Tensor, a: Tensor, b: Tensor, count: Tensor, first_row: int, order: Tensor | None = None, *,
        bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        present = max(0, min(int(count) - first_row, a.shape[0]))
        places = slice(present) if order is None else order[first_row : first_row + present]
        if order is None:
            out.fill_(torch.nan)
        out[places] = a[:present] @ b if bias is None else torch.addmm(bias, a[:present], b)

    class WeightGradAccumulator:
        def __init__(self, weight: Tensor, n_rows: int, rows: int) -> None:
            self.sum = torch.full_like(weight, torch.nan)

        def add_(self, dlogits: Tensor, x: Tensor, count: Tensor, end: Tensor, first_row: int) -> None:
            present = max(0, min(int(count) - first_row, x.shape[0]))
            assert int(count) <= int(end) or present == 0
            self.sum = (0 if first_row == 0 else self.sum) + dlogits[:present].T @ x[:present]

        def result(self) -> Tensor:
            return self.sum

    monkeypatch.setattr(ragged_gemm, "matmul_", matmul_)
    monkeypatch.setattr(kernel_file("loss.chunked_head"), "WeightGradAccumulator", WeightGradAccumulator)
    monkeypatch.setattr(ragged_gemm, "row_buffer", lambda like, rows, cols: like.new_full((rows, cols), torch.nan))
    for file in (sweep, kernel_file("linear_cross_entropy")):
        monkeypatch.setattr(file, "head_type", lambda n_rows, *_: RaggedHead)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    hidden, weight, _, target = exact("cpu")
    inputs = {"hidden": hidden, "weight": weight}
    wanted = [t for name, t in inputs.items() if name != frozen]
    expected = torch.autograd.grad(losses.simpo_loss(hidden, weight, target).loss, wanted)
    inputs[frozen] = inputs[frozen].detach()
    assert_same(list(torch.autograd.grad(losses.simpo_loss(**inputs, target=target).loss, wanted)), list(expected))


def test_constants_get_no_gradient() -> None:
    hidden, weight, _, target = exact("cpu")
    reference = constants()["ref_logps"].requires_grad_()
    of_tokens = constants()["ref"].requires_grad_()
    desirable, advantages = constants()["desirable"], constants()["advantages"]
    for loss, metrics in (
        losses.dpo_loss(hidden, weight, target, ref_logps=reference),
        losses.kto_loss(hidden, weight, target, desirable, ref_logps=reference),
        losses.grpo_loss(hidden, weight, target, advantages, old_logps=of_tokens, ref_logps=of_tokens, beta=0.1),
    ):
        loss.backward()
        assert reference.grad is None
        assert of_tokens.grad is None
        assert not any(m.requires_grad for m in metrics.values())


@pytest.mark.parametrize("tokens", [0, 1000])
def test_constants_of_another_dtype(tokens: int, tokens_at_a_time: SetChunk) -> None:
    """Rewards tend to be fp64, for that is what Python's and NumPy's numbers are: the loss remains what it is."""
    tokens_at_a_time(tokens)
    hidden, weight, _, target = exact("cpu", torch.float32)
    c = constants()
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients):
            for loss, _ in (
                losses.grpo_loss(hidden, weight, target, c["advantages"], variant="gspo"),
                losses.kto_loss(hidden, weight, target, c["desirable"], weights=c["row_weights"]),
                losses.dpo_loss(hidden, weight, target, ref_logps=c["ref_logps"], weights=c["weights"]),
            ):
                assert loss.dtype == torch.float32


SOME = ["dpo sigmoid", "orpo", "kto with kl", "grpo grpo old_logps", "grpo old_logps entropy_coef gspo"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_lower_precision(name: str, dtype: torch.dtype, device: str) -> None:
    index = [case.name for case in CASES].index(name)
    hidden, weight, _, target = exact(device, dtype)
    own = value_and_gradients(cases(torch.float32, device)[index].loss(hidden, weight, target).loss, [hidden, weight])
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = value_and_gradients(cases(device=device)[index].oracle(*wide, target), wide)
    assert own[0].dtype == torch.float32
    for a, e in zip(own, truth, strict=True):
        error = (a.double() - e).abs().max().item()
        assert error <= 16 * torch.finfo(dtype).eps * max(1.0, e.abs().max().item())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("pattern", ["all", "half", "prompts", "whole rows"])
@pytest.mark.parametrize("budget", [0, 1, 512])
def test_bf16_on_a_gpu(budget: int, pattern: str) -> None:
    """Large enough for the kernels and heads that serve a GPU; they never make the host wait."""
    rows, length, features, classes = 8, 96, 128, 2000
    hidden = torch.randn(rows, length, features, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(classes, features, device="cuda") * features**-0.5).bfloat16().requires_grad_()
    target = torch.randint(classes, (rows, length), device="cuda")
    places = torch.arange(length, device="cuda")
    if pattern == "half":
        target[torch.rand(target.shape, device="cuda") < 0.5] = IGNORED
    elif pattern == "prompts":
        target[places < places[:rows, None] * 12] = IGNORED
    elif pattern == "whole rows":
        target[[0, 4, 5]] = IGNORED
    advantages = torch.randn(rows, device="cuda")
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
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    for call in calls:
        truth = value_and_gradients(call(*wide, logits_budget=512).loss, wide)
        torch_made = value_and_gradients(
            call(hidden, weight, backend="torch", logits_budget=512).loss, [hidden, weight]
        )
        call(hidden, weight, logits_budget=budget).loss.backward()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = value_and_gradients(call(hidden, weight, logits_budget=budget).loss, [hidden, weight])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for case in zip(found, torch_made, truth, strict=True):
            assert_as_exact_as(*case)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_given_logits_on_a_gpu() -> None:
    """In bf16 by the Triton kernels: they never make the host wait, and hold one copy of the logits, their gradient."""
    rows, length, classes = 8, 96, 2000
    logits = (3 * torch.randn(rows, length, classes, device="cuda")).bfloat16().requires_grad_()
    target = torch.randint(classes, (rows, length), device="cuda")
    target[torch.rand(target.shape, device="cuda") < 0.3] = IGNORED
    advantages = torch.randn(rows, device="cuda")
    logps = oracles.logps_of_logits(logits.detach().double(), target)[0]
    old = (logps + 0.1 * torch.randn_like(logps)).float()
    calls: list[Callable[..., LossOutput]] = [
        lambda x, **o: losses.dpo_loss(x, None, target, ref_logps=old.sum(-1), nll_weight=0.3, **o),
        lambda x, **o: losses.kto_loss(x, None, target, advantages > 0, ref_logps=old.sum(-1), **o),
        lambda x, **o: losses.grpo_loss(x, None, target, advantages, old_logps=old, **o),
        lambda x, **o: losses.grpo_loss(x, None, target, advantages, old_logps=old, variant="gspo", **o),
        lambda x, **o: losses.grpo_loss(x, None, target, advantages, old_logps=old, entropy_coef=0.1, **o),
    ]
    wide = logits.detach().double().requires_grad_()
    for call in calls:
        truth = value_and_gradients(call(wide).loss, [wide])
        torch_made = value_and_gradients(call(logits, backend="torch").loss, [logits])
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
        for case, ulps in zip(zip(found, torch_made, truth, strict=True), (64.0, 2.0), strict=True):  # fp32, bf16
            assert_as_exact_as(*case, ulps=ulps)


# Edges


@each_case
def test_a_row_in_which_no_token_counts(index: int, tokens_at_a_time: SetChunk, device: str) -> None:
    """It spoils nothing, though its hidden states and what is known of it are no numbers; and it gets no gradient."""
    case = cases(device=device)[index]
    tokens_at_a_time(2 * LENGTH)
    hidden, weight, _, target = exact(device)
    target[2] = IGNORED
    target[5] = IGNORED  # its partner
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
def test_no_token_counts(index: int) -> None:
    hidden, weight, _, target = exact("cpu")
    loss, metrics = CASES[index].loss(hidden, weight, torch.full_like(target, IGNORED))
    assert loss.isfinite()
    assert all(m.isfinite() for m in metrics.values())
    for gradient in torch.autograd.grad(loss, [hidden, weight]):
        assert not gradient.any()


def few(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(rows, length, FEATURES, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(CLASSES, (rows, length))


OF_PAIRS = [losses.dpo_loss, losses.cpo_loss, losses.simpo_loss, losses.orpo_loss]


@pytest.mark.parametrize("rows, length", [(2, 1), (2, 3), (0, 3), (2, 0), (0, 0)])
def test_one_pair_one_token_and_none(rows: int, length: int) -> None:
    hidden, weight, target = few(rows, length)
    known = torch.zeros(rows)
    outputs = [function(hidden, weight, target) for function in OF_PAIRS]
    outputs += [losses.kto_loss(hidden, weight, target, known > 0), losses.grpo_loss(hidden, weight, target, known + 1)]
    outputs += [losses.grpo_loss(hidden, weight, target, known + 1, variant="gspo", entropy_coef=0.1)]
    for loss, metrics in outputs:
        gradients = torch.autograd.grad(loss, [hidden, weight])
        assert all(t.isfinite().all() for t in (loss, *metrics.values(), *gradients))
        assert loss.dtype == torch.float64
        assert rows * length or not any(g.any() for g in gradients)


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


def part_of(case: Case, rows: list[int], items: dict[str, Any], inputs: tuple[Tensor, ...]) -> LossOutput:
    """The loss of some rows with what is known of them."""
    hidden, weight, target = inputs

    def of_rows(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return value[rows] if value.shape[0] == ROWS else value[[row for row in rows if row < ROWS // 2]]

    function, options = case.loss, {}
    while hasattr(function, "func"):
        options = {**function.keywords, **options}
        function = function.func
    return function(hidden[rows], weight, target[rows], **{k: of_rows(v) for k, v in options.items()}, **items)


@each_case
def test_gradients_add_up_over_micro_batches(index: int) -> None:
    case = CASES[index]
    hidden, weight, _, target = exact("cpu")
    counts = {"pairs": ROWS // 2, "rows": ROWS, "tokens": int((target != IGNORED).sum())}
    items: dict[str, Any] = {"num_items": counts[case.divided_by]}
    if "entropy_coef" in case.name:
        items["num_tokens"] = torch.tensor(counts["tokens"])
    if case.divided_by == "pairs":
        items["num_nll_items"] = int((target[: ROWS // 2] != IGNORED).sum())
    wanted = [hidden, weight]
    whole = value_and_gradients(case.loss(hidden, weight, target).loss, wanted)
    units = [[i, ROWS // 2 + i] for i in range(ROWS // 2)] if case.divided_by == "pairs" else [[i] for i in range(ROWS)]
    for pieces in (1, 2, 4, 7):
        batches = [sorted(row for unit in units[start::pieces] for row in unit) for start in range(pieces)]
        parts = [value_and_gradients(part_of(case, b, items, (hidden, weight, target)).loss, wanted) for b in batches]
        assert_same([torch.stack(column).sum(0) for column in zip(*parts, strict=True)], whole)


# What single losses have of their own


def test_orpos_nll_may_count_prompts_too(tokens_at_a_time: SetChunk) -> None:
    hidden, weight, _, target = exact("cpu")
    nll_target = target.clone()
    nll_target[0, 0], nll_target[2, 1] = 3, 4
    logps, _ = oracles.logps_of(hidden, weight, target)
    nll = oracles.logps_of(hidden, weight, nll_target)[0], nll_target
    expected = oracles.pairs(logps, target, oracles.orpo_formula(0.1), average=True, nll_weight=1.0, nll=nll)
    tokens_at_a_time(2 * LENGTH)
    loss = losses.orpo_loss(hidden, weight, target, nll_target=nll_target).loss
    assert_same(*(value_and_gradients(t, [hidden, weight]) for t in (loss, expected)))


def test_odds_of_certain_answers_are_numbers() -> None:
    hidden = torch.full((2, 1, 1), 100.0, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = losses.orpo_loss(hidden, weight, torch.zeros(2, 1, dtype=torch.int64)).loss
    assert all(t.isfinite().all() for t in value_and_gradients(loss, [hidden, weight]))


@pytest.mark.parametrize("variant", oracles.DPO)
@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_pairs_far_apart(variant: str, log_ratio: float) -> None:
    """No exponential overflows."""
    hidden, weight, _, target = exact("cpu", torch.float32)
    reference = torch.tensor([-log_ratio] * 3 + [log_ratio] * 3)
    e = 0.01 if variant == "exo_pair" else 0.0
    loss = losses.dpo_loss(hidden, weight, target, ref_logps=reference, variant=variant, label_smoothing=e).loss
    assert all(t.isfinite().all() for t in value_and_gradients(loss, [hidden, weight]))


@pytest.mark.parametrize("variant", grpo.VARIANTS)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("log_ratio", [300.0, -300.0])
def test_ratios_far_from_one(variant: str, advantage: float, log_ratio: float) -> None:
    """A token that is clipped, or has no advantage, gives no gradient, though its ratio overflows."""
    hidden, weight, _, target = exact("cpu", torch.float32)
    old = losses.sequence_logps(hidden, weight, target).detach()[:, None] / LENGTH - log_ratio
    epsilon_high = 5.0 if variant == "cispo" else 0.2
    loss = losses.grpo_loss(
        hidden, weight, target, torch.full((ROWS,), advantage), old_logps=old.expand(ROWS, LENGTH), variant=variant,
        epsilon_high=epsilon_high, max_length=LENGTH,
    ).loss  # fmt: skip
    value, *gradients = value_and_gradients(loss, [hidden, weight])
    assert all(t.isfinite().all() for t in (value, *gradients))
    if variant not in ("cispo", "vespo") and advantage * log_ratio >= 0:
        assert not any(g.any() for g in gradients)


def test_a_reference_without_weight_is_for_the_metrics_alone() -> None:
    hidden, weight, _, target = exact("cpu", torch.float32)
    reference = torch.full(target.shape, 200.0)  # far from the model's
    loss, metrics = losses.grpo_loss(hidden, weight, target, torch.ones(ROWS), ref_logps=reference)
    assert loss.isfinite()
    assert metrics["kl"] > 1e13


def test_metrics_of_pairs() -> None:
    hidden, weight, _, target = exact("cpu")
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


def test_metrics_of_rollouts() -> None:
    hidden, weight, _, target = exact("cpu")
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
        "clip_ratio/low": low.mean(),
        "clip_ratio/high": high.mean(),
        "clip_ratio/region": (low + high).mean(),
    }
    assert 0 < expected["clip_ratio/low"] < 1
    assert {name: pytest.approx(m.item(), rel=1e-6) for name, m in metrics.items()} == {
        name: value.item() for name, value in expected.items()
    }


@pytest.mark.parametrize("head", [{"logit_scale": 0.7, "temperature": 2.0}, {"softcap": 3.0}], ids=str)
def test_the_mean_of_all_logits(head: dict[str, Any], device: str) -> None:
    """Scaled, but before the temperature, and of answers' tokens only; a softcap has none."""
    hidden, weight, bias, target = exact(device)
    logits, counts = 0.7 * F.linear(hidden, weight, bias), target != IGNORED
    desirable = constants(device=device)["desirable"]
    with torch.no_grad():
        hidden[0, 0] = torch.nan  # of a prompt
    of_pairs = losses.simpo_loss(hidden, weight, target, bias=bias, **head).metrics
    of_rows = losses.kto_loss(hidden, weight, target, desirable, bias=bias, **head).metrics
    first_half = torch.arange(ROWS, device=device) < ROWS // 2
    for metrics, rows in ((of_pairs, first_half), (of_rows, desirable)):
        for which, these in (("chosen", rows), ("rejected", ~rows)):
            if "softcap" in head:
                assert f"logits/{which}" not in metrics
            else:
                torch.testing.assert_close(metrics[f"logits/{which}"], logits[these][counts[these]].mean().detach())


def test_metrics_of_odds() -> None:
    hidden, weight, _, target = exact("cpu")
    metrics = losses.orpo_loss(hidden, weight, target).metrics
    p = losses.sequence_logps(hidden, weight, target, average=True).exp().detach()
    log_odds = (p[:3] / (1 - p[:3])).log() - (p[3:] / (1 - p[3:])).log()
    torch.testing.assert_close(metrics["log_odds_chosen"], log_odds.mean())
    torch.testing.assert_close(metrics["log_odds_ratio"], F.logsigmoid(log_odds).mean())


def test_ratios_of_answers_are_counted_by_answer() -> None:
    """Though the answers differ in length."""
    hidden, weight, _, target = exact("cpu")
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


def test_ktos_averages() -> None:
    hidden, weight, _, target = exact("cpu")
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


def weights_of(name: str, case: Case, target: Tensor, desirable: Tensor) -> Tensor:
    """How many sequences, pairs or tokens a metric is a mean over."""
    tokens, n = (target != IGNORED).sum(), len(target)
    first_half = torch.arange(n) < n // 2
    rows = desirable if case.name.startswith(("kto", "apo")) else first_half
    if name == "nll_loss":
        return (target[first_half] != IGNORED).sum()
    if name.startswith("logits/"):
        return (target[rows if name == "logits/chosen" else ~rows] != IGNORED).sum()
    if case.divided_by == "rows" and name.startswith(("rewards/", "logps/")):
        return (rows if name.endswith("chosen") else ~rows).sum()
    options = getattr(case.loss, "keywords", {})
    level = options.get("level") or grpo.VARIANTS.get(options.get("variant", "grpo"), grpo.VARIANTS["grpo"]).level
    if name in ("kl", "entropy") or (name.startswith("clip_ratio/") and level == "token"):
        return tokens
    return torch.tensor(n)


@each_case
def test_metrics_of_micro_batches(index: int) -> None:
    """Weighted by what they count, they give the whole batch's, whatever the loss is divided by."""
    case = CASES[index]
    hidden, weight, _, target = exact("cpu")
    desirable = constants()["desirable"]
    units = [[i, ROWS // 2 + i] for i in range(ROWS // 2)]
    batches = [[*units[0]], sorted(units[1] + units[2])]
    items: dict[str, Any] = {"num_items": 7}
    if "entropy_coef" in case.name:
        items["num_tokens"] = 7
    if case.divided_by == "pairs":
        items["num_nll_items"] = 7
    parts = [part_of(case, rows, items, (hidden, weight, target)).metrics for rows in batches]
    for name, value in case.loss(hidden, weight, target).metrics.items():
        is_of_rows = "count/chosen" in parts[0]
        if name.startswith("count/"):
            assert sum(part[name] for part in parts) == value
        elif not (is_of_rows and name in ("rewards/margins", "kl")):  # a difference of means, and what was given
            counts = [weights_of(name, case, target[rows], desirable[rows]) for rows in batches]
            mean = sum(part[name] * n for part, n in zip(parts, counts, strict=True)) / sum(counts)
            torch.testing.assert_close(mean.double(), value.double(), rtol=1e-6, atol=1e-9)


# LUSPO


@pytest.mark.parametrize("is_padded", [False, True])
def test_luspos_kl_term(is_padded: bool) -> None:
    """It sums over the tokens that count. Averaged over the batch's length, as by liger-kernel and by TRL before 1.16,
    it would be weighted by |y| / T, and see the padding."""
    hidden, weight, _, target = exact("cpu")
    if not is_padded:
        target = target.where(target != IGNORED, 0)
    c, beta = constants(), 0.3
    options: dict[str, Any] = {"old_logps": c["old"], "ref_logps": c["ref"], "beta": beta, "variant": "luspo"}
    logps, counts = oracles.logps_of(hidden, weight, target)[0], target != IGNORED
    lengths = counts.sum(-1)
    ratio = (torch.where(counts, logps - c["old"], 0.0).sum(-1) / lengths).exp()
    clipped = -torch.minimum(ratio * c["advantages"], ratio.clamp(0.8, 1.2) * c["advantages"])
    k3 = torch.exp(c["ref"] - logps) - (c["ref"] - logps) - 1
    ours = (lengths * clipped + beta * torch.where(counts, k3, 0.0).sum(-1)).mean()
    theirs = (lengths * (clipped + beta * k3.mean(-1))).mean()
    loss = losses.grpo_loss(hidden, weight, target, c["advantages"], **options).loss
    assert_same(*(value_and_gradients(t, [hidden, weight]) for t in (loss, ours)))
    if not is_padded:
        assert_same([loss], [theirs])
        return
    assert (loss - theirs).abs() > 0.01
    extra = (beta * (lengths * k3.mean(-1) - torch.where(counts, k3, 0.0).sum(-1))).mean()
    assert_same([theirs - loss], [extra])
    # More padding changes nothing.
    pad = {name: F.pad(c[name], (0, 3)) for name in ("old", "ref")}
    options |= {"old_logps": pad["old"], "ref_logps": pad["ref"]}
    longer = losses.grpo_loss(
        F.pad(hidden, (0, 0, 0, 3)), weight, F.pad(target, (0, 3), value=IGNORED), c["advantages"], **options
    )
    assert_same([longer.loss], [loss])


# Exponentials


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_bounded_exponential(dtype: torch.dtype) -> None:
    below = torch.cat([torch.linspace(-2000.0, 30.0, 5001, dtype=dtype), torch.tensor([-torch.inf, 30.0], dtype=dtype)])
    x = below.clone().requires_grad_()
    y = bounded_exp(x)
    assert torch.equal(y, below.exp())
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], below.exp())
    beyond = torch.tensor([30.001, 31.0, 100.0, 1000.0, 1e6], dtype=dtype, requires_grad=True)
    y = bounded_exp(beyond)
    (slope,) = torch.autograd.grad(y.sum(), beyond)
    top = math.exp(30)
    torch.testing.assert_close(y.detach(), top * (beyond.detach() - 29))
    torch.testing.assert_close(slope, torch.full_like(slope, top))


@pytest.mark.parametrize("is_kl_corrected", [False, True])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1000.0, -1000.0])
@pytest.mark.parametrize("variant", grpo.VARIANTS)
def test_references_far_away(variant: str, log_ratio: float, is_kl_corrected: bool) -> None:
    """The KL term is finite, and its gradient still leads towards the reference; in fp32."""
    hidden, weight, _, target = exact("cpu", torch.float32)
    counts = target != IGNORED
    logps = oracles.logps_of(hidden, weight, target)[0].detach()
    options: dict[str, Any] = {"variant": variant, "epsilon_high": 0.3, "max_length": LENGTH}
    loss, metrics = losses.grpo_loss(
        hidden, weight, target, torch.zeros(ROWS), ref_logps=logps + log_ratio, beta=0.1,
        is_kl_corrected=is_kl_corrected, **options,
    )  # fmt: skip
    value, *gradients = value_and_gradients(loss, [hidden, weight])
    assert all(t.isfinite().all() for t in (value, *metrics.values(), *gradients))
    assert gradients[0].norm().isfinite()
    with torch.no_grad():
        stepped = oracles.logps_of(hidden - gradients[0] / gradients[0].abs().max() * 1e-3, weight, target)[0]
        towards = (stepped - logps)[counts].sum() * log_ratio
    assert towards > 0 or is_kl_corrected  # times a ratio that moves, too


@pytest.mark.parametrize("variant", ["grpo", "dapo", "gspo", "luspo", "cispo"])
def test_epsilon_high_means_one_thing(variant: str) -> None:
    """Ratios above 1 + epsilon_high count as clipped, and weigh no more than that."""
    hidden, weight, _, target = exact("cpu")
    logps, counts = oracles.logps_of(hidden, weight, target)[0], target != IGNORED
    for ratio, is_clipped in ((1.35, False), (1.45, True)):
        _, metrics = losses.grpo_loss(
            hidden, weight, target, torch.ones(ROWS), old_logps=logps.detach() - math.log(ratio), variant=variant,
            epsilon_high=0.4,
        )  # fmt: skip
        assert metrics["clip_ratio/high"] == float(is_clipped)
        loss = losses.grpo_loss(
            hidden, weight, target, torch.ones(ROWS), old_logps=logps.detach() - math.log(ratio), variant="cispo",
            epsilon_high=0.4,
        ).loss  # fmt: skip
        assert_same([loss], [-min(ratio, 1.4) * logps[counts].mean()])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, 1000.0])
def test_a_ratio_far_above_is_still_lowered(log_ratio: float, advantage: float) -> None:
    """Without a second clip a negative advantage has no upper bound: its gradient must not vanish."""
    hidden, weight, _, target = exact("cpu", torch.float32)
    old = oracles.logps_of(hidden, weight, target)[0].detach() - log_ratio
    advantages = torch.full((ROWS,), advantage)
    for variant in ("grpo", "gspo"):
        loss = losses.grpo_loss(hidden, weight, target, advantages, old_logps=old, variant=variant).loss
        value, *gradients = value_and_gradients(loss, [hidden, weight])
        assert all(t.isfinite().all() for t in (value, *gradients))
        assert bool(gradients[0].any()) == (advantage < 0)


@pytest.mark.parametrize("tau", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1000.0, -1000.0, 1e4, -1e4])
def test_discopop_at_every_temperature(log_ratio: float, tau: float) -> None:
    hidden, weight, _, target = exact("cpu", torch.float32)
    reference = torch.tensor([-log_ratio] * 3 + [log_ratio] * 3)
    loss = losses.dpo_loss(
        hidden, weight, target, ref_logps=reference, variant="discopop", discopop_tau=tau, beta=1.0
    ).loss
    assert all(t.isfinite().all() for t in value_and_gradients(loss, [hidden, weight]))


@pytest.mark.parametrize("desirable", [False, True])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1000.0, -1000.0])
def test_kto_far_from_its_reference(log_ratio: float, desirable: bool) -> None:
    hidden, weight, _, target = exact("cpu", torch.float32)
    reference, which = torch.full((ROWS,), -log_ratio), torch.full((ROWS,), desirable)
    loss = losses.kto_loss(hidden, weight, target, which, ref_logps=reference, beta=1.0).loss
    assert all(t.isfinite().all() for t in value_and_gradients(loss, [hidden, weight]))


def test_the_correction_of_samplers_far_away() -> None:
    old, mask = torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    for level in ("token", "sequence"):
        for far in (1000.0, -1000.0, torch.inf):
            found = losses.sampler_correction(old, old - far, mask, level=level)
            assert torch.equal(found, torch.full((1, 2), 3.0 if far > 0 else 0.0))


def test_ktos_kl() -> None:
    assert losses.kto_kl(torch.tensor([1.0, 4.0]), torch.tensor([0.0, 1.0])) == 2.0
    assert losses.kto_kl(torch.tensor([1.0]), torch.tensor([3.0])) == 0.0
    assert losses.kto_kl(torch.zeros(0), torch.zeros(0)) == 0.0


@pytest.mark.parametrize("level, beyond, expected", [
    ("token", "truncate", [[2.0, 0.5, 1.0, 1.0]]),
    ("token", "mask", [[0.0, 0.5, 1.0, 1.0]]),
    ("sequence", "truncate", [[2.0] * 4]),
    ("sequence", "mask", [[0.0] * 4]),
])  # fmt: skip
def test_the_correction_for_another_sampler(level: Any, beyond: Any, expected: list[list[float]]) -> None:
    ratios = torch.tensor([[8.0, 0.5, torch.nan, torch.inf]])
    mask = torch.tensor([[True, True, True, False]])
    found = losses.sampler_correction(ratios.log(), torch.zeros(1, 4), mask, level=level, beyond=beyond, highest=2.0)
    torch.testing.assert_close(found, torch.tensor(expected))


# Distillation

DIVERGENCES: list[Any] = ["forward_kl", "reverse_kl", "jsd", "tvd", "cosine"]


@pytest.mark.parametrize("given", ["hidden", "logits", "both logits"])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("of", DIVERGENCES)
def test_distillation(of: Any, bounded: bool, given: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    hidden, weight, bias, target = exact(device)
    teacher_hidden, teacher_weight = (
        torch.randn(*s, device=device, dtype=torch.float64) for s in ((ROWS, LENGTH, 3), (CLASSES, 3))
    )
    head, of_teacher = (HEAD, {"softcap": 2.0, "logit_scale": 1.1}) if bounded else ({}, {})
    student, teacher = (
        transformed(F.linear(hidden, weight, bias), **head),
        transformed(teacher_hidden @ teacher_weight.T, **of_teacher),
    )
    counts = target != IGNORED
    soft = oracles.distance(of, student, teacher, 0.3, 1.5)[counts].mean()
    hard = F.cross_entropy(student[counts], target[counts])
    inputs = [hidden, weight, bias]
    expected = value_and_gradients(0.6 * soft + 0.4 * hard, inputs)
    from_teacher: dict[str, Any] = {"teacher_logits": teacher}
    if given == "both logits":
        logits = F.linear(hidden, weight, bias)
        hidden_of_ignored = torch.where(counts[..., None], logits, torch.nan)
        loss, metrics = losses.distillation_loss(
            hidden_of_ignored, None, target, **from_teacher, divergence=of, beta=0.3, temperature=1.5, soft_weight=0.6,
            hard_weight=0.4, **head,
        )  # fmt: skip
        assert_same(value_and_gradients(loss, inputs), expected)
        assert_same(list(metrics.values()), [soft.detach(), hard.detach()])
        return
    if given == "hidden":
        from_teacher = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight.requires_grad_()}
        from_teacher |= {f"teacher_{name}": value for name, value in of_teacher.items()}
    for tokens in (1, 4, 1000):
        for file in ("linear_divergence", "linear_cross_entropy"):
            monkeypatch.setattr(kernel_file(file), "rows_per_chunk", lambda *_, tokens=tokens: tokens)
        loss, metrics = losses.distillation_loss(
            hidden, weight, target, **from_teacher, divergence=of, beta=0.3, temperature=1.5, soft_weight=0.6,
            hard_weight=0.4, bias=bias, **head,
        )  # fmt: skip
        assert_same(value_and_gradients(loss, inputs), expected)
        assert_same(list(metrics.values()), [soft.detach(), hard.detach()])
        assert not any(m.requires_grad for m in metrics.values())
    assert teacher_weight.grad is None


def test_gradients_of_distillation_add_up() -> None:
    hidden, weight, _, target = exact("cpu")
    teacher = torch.randn(ROWS, LENGTH, CLASSES, dtype=torch.float64)
    whole = value_and_gradients(
        losses.distillation_loss(hidden, weight, target, teacher_logits=teacher, hard_weight=0.5).loss, [hidden, weight]
    )
    for pieces in (1, 2, 4, 7):
        parts = [
            value_and_gradients(
                losses.distillation_loss(
                    hidden[i::pieces], weight, target[i::pieces], teacher_logits=teacher[i::pieces], hard_weight=0.5,
                    num_items=int((target != IGNORED).sum()),
                ).loss,
                [hidden, weight],
            )
            for i in range(pieces)
        ]  # fmt: skip
        assert_same([torch.stack(column).sum(0) for column in zip(*parts, strict=True)], whole)


# What does not fit


@pytest.mark.parametrize("call, message", [
    (lambda h, w, t: losses.dpo_loss(h[:5], w, t[:5]), "5 rows; expected an even number"),
    (lambda h, w, t: losses.dpo_loss(h[0], w, t[0]), r"hidden \(5, 4\) and target \(5,\); expected \(B, T, H\)"),
    (lambda h, w, t: losses.dpo_loss(h, w, t, variant="dpo"), "variant='dpo'; expected one of 'sigmoid'"),
    (lambda h, w, t: losses.dpo_loss(h, w, t, variant="exo_pair"), "label_smoothing=0.0; expected more than 0"),
    (lambda h, w, t: losses.dpo_loss(h, w, t, variant="hinge", label_smoothing=0.1), "hinge with label_smoothing"),
    (lambda h, w, t: losses.dpo_loss(h, w, t, ref_logps=h[0, 0]), r"ref_logps has shape \(4,\); expected \(6,\)"),
    (lambda h, w, t: losses.dpo_loss(h, w, t, num_items=0), "num_items=0; expected a number above 0"),
    (lambda h, w, t: losses.dpo_loss(h, w, t, beta=0.0), "beta=0.0"),
    (lambda h, w, t: losses.cpo_loss(h, w, t, variant="robust"), "cpo_loss: variant='robust'"),
    (lambda h, w, t: losses.kto_loss(h, w, t, t[:, 0] > 0, variant="bco"), "kto_loss: variant='bco'"),
    (lambda h, w, t: losses.cpo_loss(h, w, t, num_items=3), "num_items=3 and num_nll_items=None; expected both"),
    (lambda h, w, t: losses.kto_loss(h, w, t, t[:, 0]), "kto_loss: desirable is torch.int64; expected torch.bool"),
    (lambda h, w, t: losses.kto_kl(h[:, 0, 0], h[:, :1, 0]), r"logps \(6,\) and ref_logps \(6, 1\); expected \(B,\)"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, 0, 0], epsilon=1.5), "epsilon=1.5.*expected 0 to less than 1"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, 0, 0], num_items=3, entropy_coef=0.1), "num_tokens=None; expected"),
    (lambda h, w, t: losses.sampler_correction(t, t, t), "mask .*torch.int64; expected"),
    (lambda h, w, t: losses.sequence_logps(h[0], w, t[0]), "sequence_logps: hidden"),
    (lambda h, w, t: losses.kto_loss(h, w, t, t > 0), r"desirable has shape \(6, 5\); expected \(6,\)"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, 0, 0], beta=0.1), "got no ref_logps for the KL term"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, 0, 0], variant="dr_grpo"), "got no max_length for dr_grpo"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, 0, 0], variant="cispo"), "got no epsilon_high for cispo"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, :2, 0]),
     r"advantages has shape \(6, 2\); expected \(6,\) or \(6, 5\)"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, 0, 0], level="row"), "level='row'; expected one of 'token', 'sequ"),
    (lambda h, w, t: losses.grpo_loss(h, w, t, h[:, 0, 0], delta=1.2), "delta=1.2; expected more than 1"),
    (lambda h, w, t: losses.sampler_correction(t, t, t > 0, level="row"), "sampler_correction: level='row'"),
    (lambda h, w, t: losses.sampler_correction(t, t, t > 0, beyond="clip"), "beyond='clip'; expected one of"),
    (lambda h, w, t: losses.distillation_loss(h, w, t, teacher_logits=h, divergence="kl"), "divergence='kl'; expected"),
    (lambda h, w, t: losses.distillation_loss(h, w, t), "give teacher_hidden and teacher_weight, or teacher_logits"),
    (lambda h, w, t: losses.distillation_loss(h, w, t, teacher_logits=h), "teacher's logits"),
    (lambda h, w, t: losses.grpo_loss(h, None, t, h[:, 0, 0], bias=w[:, 0]), r"grpo_loss: weight=None with .*no bias"),
    (lambda h, w, t: losses.dpo_loss(h, None, t, temperature=0.0), "dpo_loss: temperature=0.0"),
    (lambda h, w, t: losses.dpo_loss(h, None, t + 4), "dpo_loss: the target at"),
    (lambda h, w, t: losses.sequence_logps(t[..., None], None, t), "sequence_logps: weight=None with logits"),
    (lambda h, w, t: losses.distillation_loss(h, None, t, teacher_logits=h[..., :3]), "4 classes of the student, 3 of"),
    (lambda h, w, t: losses.distillation_loss(h, None, t, teacher_logits=h[:2]), r"teacher's \(2, 5, 4\), target"),
    (lambda h, w, t: losses.simpo_loss(h, w[:, :2], t), r"weight \(13, 2\)"),
    (lambda h, w, t: losses.simpo_loss(h.requires_grad_(), w[:, :2], t), r"simpo_loss: .*weight \(13, 2\)"),
])  # fmt: skip
def test_what_does_not_fit(call: Callable[..., Any], message: str) -> None:
    hidden, weight, _, target = exact("cpu")
    with pytest.raises(ValueError, match=message):
        call(hidden.detach(), weight, target)


@pytest.mark.parametrize("call, message", [
    (lambda h, t: losses.dpo_loss(h, None, t, variant="sigmoid_norm"), r"dpo_loss\(variant='sigmoid', average"),
    (lambda h, t: losses.dpo_loss(h, None, t, variant="sft"), "is nll_weight=..., which adds the NLL"),
    (lambda h, t: losses.dpo_loss(h, None, t, variant="aot"), "the 'aot' of TRL and liger-kernel is not available"),
    (lambda h, t: losses.dpo_loss(h, None, t, loss_type="ipo"), "'loss_type'; .* is variant$"),
    (lambda h, t: losses.dpo_loss(h, None, t, loss_type="sigmoid_norm"), r"variant; the 'sigmoid_norm' .*average"),
    (lambda h, t: losses.cpo_loss(h, None, t, variant="simpo"), "the 'simpo' of TRL and liger-kernel is simpo_loss"),
    (lambda h, t: losses.simpo_loss(h, None, t, simpo_gamma=0.5), "is gamma$"),
    (lambda h, t: losses.grpo_loss(h, None, t, h[:, 0, 0], importance_sampling_level="token"), "is level$"),
    (lambda h, t: losses.grpo_loss(h, None, t, h[:, 0, 0], loss_type="dapo"), "is variant$"),
    (lambda h, t: losses.GRPO(loss_type="dapo"), "GRPO has no option loss_type; .* is variant$"),
    (lambda h, t: losses.DPO(loss_type="sigmoid_norm"), "DPO has no option loss_type; .*average_log_prob=True"),
    (lambda h, t: losses.DPO(variant="kto_pair")(h, None, t), r"is kto_loss\(variant='kto'\)"),
    (lambda h, t: losses.distillation_loss(h, None, t, teacher_logits=h, divergence="cosine_similarity"), "='cosine'"),
])  # fmt: skip
def test_other_libraries_names_are_answered_with_ours(call: Callable[..., Any], message: str) -> None:
    hidden, _, _, target = exact("cpu")
    with pytest.raises((ValueError, TypeError), match=message):
        call(hidden.detach(), target.clamp(max=FEATURES - 1))


def test_the_names_that_errors_give_are_ours() -> None:
    options = {option for module in (losses.DPO, losses.CPO, losses.SimPO, losses.ORPO, losses.KTO, losses.GRPO,
               losses.Distillation) for option in modules._options_of(module.function)}  # fmt: skip
    for foreign, ours in names.OPTIONS.items():
        assert foreign not in options
        assert ours.split("[")[0].split(",")[0] in options
    variants = {*dpo.VARIANTS, *grpo.VARIANTS, *kto.VARIANTS, *distillation.DIVERGENCES}
    assert not variants & names.CHOICES.keys()


@pytest.mark.parametrize("grad", [False, True])
def test_arguments_that_no_loss_has(grad: bool) -> None:
    hidden, weight, _, target = exact("cpu")
    known, row = hidden.detach(), hidden[:, 0, 0].detach()
    with torch.set_grad_enabled(grad):
        for function, given in (
            (losses.dpo_loss, ()), (losses.cpo_loss, ()), (losses.simpo_loss, ()), (losses.orpo_loss, ()),
            (losses.kto_loss, (row > 0,)), (losses.grpo_loss, (row,)), (losses.distillation_loss, (known, weight)),
            (losses.ppo_clip_loss, (row, row)), (losses.sequence_logps, ()),
        ):  # fmt: skip
            with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'gama'"):
                function(hidden, weight, target, *given, gama=0.1)

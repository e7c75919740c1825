"""`gated_delta_rule` over several chunks and segments, and `gated_delta_step`."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import (
    delta_channel_gradients,
    delta_channels,
    delta_chunk_gradients,
    delta_chunks,
    gated_delta_rule,
    gated_delta_step,
)
from ligerzoo.kernels.chunk_tiles import SEGMENT_PROGRAMS, Launch, chunk_table
from ligerzoo.kernels.delta_rule import reference
from ligerzoo.kernels.delta_tiles import CHUNK, NORMALIZATION_EPS
from tests.covering import long_cases
from tests.kernels.accuracy import assert_as_exact_as, assert_equal, in_fp64, judge, judge_draws
from tests.kernels.compiling import compile_both_passes, layouts_of_sums
from tests.kernels.layouts import sliced
from tests.kernels.machine import HALF_DTYPE, needs_triton, on_gpu_too
from tests.kernels.segments import BACKENDS, BOUNDS, starts_of


def tensors(
    batch: int, tokens: int, heads: tuple[int, int] = (1, 2), dims: tuple[int, int] = (8, 8), *, device: str,
    dtype: torch.dtype = torch.float32, gates: str = "per head",
) -> list[Tensor]:  # fmt: skip
    """q, k, v, g, beta and an initial state, as slowly decaying as trained models are."""
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    inputs = [
        *(torch.randn(batch, tokens, key_heads, key_dim) for _ in range(2)),
        torch.randn(batch, tokens, value_heads, value_dim),
        -0.2 * torch.rand(batch, tokens, value_heads, *([key_dim] if gates == "per channel" else [])),
        torch.rand(batch, tokens, value_heads),
        torch.randn(batch, value_heads, key_dim, value_dim),
    ]
    return [t.to(device, dtype).requires_grad_() for t in inputs]


def rule(**options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        o, final = gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True, **options)
        return o, final.to(v.dtype)

    return run


def oracle(**options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        o, final = reference(q, k, v, g, beta, state, **options)
        return o.to(v.dtype), final.to(v.dtype)

    return run


GATES = ["per head", "per channel"]


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("packed", [False, True])
def test_plain_torch_by_chunks_equals_the_rule_token_by_token(packed: bool, gates: str, device: str) -> None:
    torch.manual_seed(0)
    inputs = tensors(2, 140, (2, 4), (8, 6), device=device, gates=gates)
    segment_start = torch.cat([starts_of(BOUNDS, device), starts_of([0, 77, 140], device)]) if packed else None
    options: dict[str, Any] = {"segment_start": segment_start, "scale": 0.3}
    wide = in_fp64(inputs)
    for by_chunks, by_tokens in zip(rule(**options)(*wide), oracle(**options)(*wide), strict=True):
        torch.testing.assert_close(by_chunks, by_tokens)
    judge(rule(**options, backend="torch"), oracle(**options), inputs)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_weak_decays_between_strong_ones_keep_their_digits(backend: Any, gates: str, device: str) -> None:
    """The sums of g over a chunk reach -300 here; differences of fp32 sums would have errors of 1e-5.

    The exponential of 300 is infinite.
    """
    torch.manual_seed(0)
    inputs = tensors(1, 40, (1, 1), (16, 16), device=device, gates=gates)
    is_strong = torch.rand(inputs[3].shape, device=device) < 0.1
    inputs[3] = torch.where(is_strong, 300 * inputs[3].detach(), inputs[3].detach()).requires_grad_()
    judge(rule(backend=backend), oracle(), inputs)


def test_segments_whose_bounds_python_cannot_read(device: str) -> None:
    inputs = [t.detach() for t in tensors(1, 9, device=device)]
    options: dict[str, Any] = {"segment_start": starts_of([0, 4, 9], device), "backend": "torch"}
    expected = rule(**options)(*inputs)
    compiled = torch.compile(rule(**options), backend="eager", fullgraph=True)(*inputs)
    for actual, like in zip(compiled, expected, strict=True):
        torch.testing.assert_close(actual, like)
    options["segment_start"] = options["segment_start"].to("meta")
    on_meta = rule(**options)(*(t.to("meta") for t in inputs))
    assert [t.shape for t in on_meta] == [t.shape for t in expected]


OPTIONS = {
    "tokens": [1, CHUNK, 150, *on_gpu_too([], [1000])],
    "heads": [(1, 1), (2, 2), (1, 3)],
    "dims": [(16, 16), (5, 40), (40, 5), *on_gpu_too([], [(64, 64), (128, 128), (256, 256)])],
    "dtype": [torch.float32, HALF_DTYPE],
    "packed": ["no", "one row of segments", "segments per row"],
    "normalize": [True, False],
    "scale": [None, 0.3],
    "gates": GATES,
}


@needs_triton
@pytest.mark.parametrize("case", long_cases(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], device: str) -> None:
    torch.manual_seed(0)
    tokens, normalize = case["tokens"], case["normalize"]
    options = {"device": device, "dtype": case["dtype"], "gates": case["gates"]}
    inputs = tensors(2, tokens, case["heads"], case["dims"], **options)
    if not normalize:
        inputs[1] = (inputs[1].detach() / inputs[1].detach().norm(dim=-1, keepdim=True)).requires_grad_()
    segment_start = None
    if case["packed"] != "no":
        rows = [[0, 3, 80], [0, 66]][: 1 if case["packed"] == "one row of segments" else 2]
        bounds = [[*(b for b in row if b < tokens), tokens] for row in rows]
        segment_start = torch.cat([starts_of(b, device) for b in bounds])
    options = {"segment_start": segment_start, "scale": case["scale"], "normalize": normalize}
    ulps = 2 * worst_condition_number(inputs[1]) ** 0.5  # 64 keys of 5 features are far from orthogonal
    judge(rule(**options, backend="triton"), oracle(**options), inputs, ulps=ulps)


@pytest.mark.parametrize("gates, bounds", [("per head", BOUNDS), ("per channel", [0, 3, 69])])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_packed_segment_equals_the_segment_alone_bit_by_bit(
    backend: Any, gates: str, bounds: list[int], device: str
) -> None:
    torch.manual_seed(0)
    inputs = tensors(1, bounds[-1], (1, 2 if gates == "per head" else 1), device=device, gates=gates)
    upstream = torch.randn(inputs[2].shape, device=device)

    def results(first: int, end: int, segment_start: Tensor | None) -> list[Tensor]:
        leaves = [t.detach()[:, first:end].requires_grad_() for t in inputs[:5]]
        o = gated_delta_rule(*leaves, segment_start=segment_start, backend=backend)
        return [o.detach(), *torch.autograd.grad(o, leaves, upstream[:, first:end])]

    packed = results(0, bounds[-1], starts_of(bounds, device))
    for first, end in pairwise(bounds):
        assert_equal([t[:, first:end] for t in packed], results(first, end, None))


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
def test_nan_in_a_segment_stays_there(backend: Any, device: str) -> None:
    """Forward and backward."""
    inputs = tensors(1, BOUNDS[-1], device=device)[:5]
    with torch.no_grad():
        inputs[2][:, 1:6] = torch.nan
    o = gated_delta_rule(*inputs, segment_start=starts_of(BOUNDS, device), backend=backend)
    assert isinstance(o, Tensor)
    for result in (o, *torch.autograd.grad(o.sum(), inputs)):
        assert result[:, :1].isfinite().all()
        assert result[:, 6:].isfinite().all()


@needs_triton
def test_more_segments_than_programs_and_more_chunks_than_slots(device: str) -> None:
    torch.manual_seed(0)
    segment_start = starts_of([*range(SEGMENT_PROGRAMS + 2), 85, 90], device)
    judge(rule(segment_start=segment_start), oracle(segment_start=segment_start), tensors(1, 90, device=device))


def test_no_tokens(device: str) -> None:
    *tokens, state = tensors(2, 0, device=device)
    for segment_start in (None, torch.zeros(1, 0, dtype=torch.int64, device=device)):
        o, final = rule(segment_start=segment_start)(*tokens, state)
        assert o.shape == tokens[2].shape
        assert torch.equal(final, state)
        (gradient,) = torch.autograd.grad(final.sum() + o.sum(), state)
        assert torch.equal(gradient, torch.ones_like(state))


@needs_triton
def test_a_batch_of_packed_rows_equals_each_row_bit_by_bit(device: str) -> None:
    torch.manual_seed(0)
    inputs = [t.detach() for t in tensors(2, 140, device=device)]
    segment_start = torch.cat([starts_of(BOUNDS, device), starts_of([0, 77, 140], device)])
    both = rule(segment_start=segment_start)(*inputs)
    for row in range(2):
        alone = rule(segment_start=segment_start[row : row + 1])(*(t[row : row + 1] for t in inputs))
        assert_equal([t[row : row + 1] for t in both], alone)


@pytest.mark.parametrize("pieces", [[150], [64, 86], [1, 3, 100, 46]], ids=str)
def test_prefill_in_pieces_and_token_by_token(pieces: list[int], device: str) -> None:
    torch.manual_seed(0)
    inputs = [t.detach() for t in tensors(2, 150, (2, 4), (16, 8), device=device)]
    expected, truth = oracle()(*inputs), oracle()(*in_fp64(inputs))
    *tokens, state = inputs
    outputs = []
    for piece in zip(*(t.split(pieces, 1) for t in tokens), strict=True):
        o, state = rule()(*piece, state)
        outputs.append(o)
    for case in zip((torch.cat(outputs, 1), state), expected, truth, strict=True):
        assert_as_exact_as(*case)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pieces", [[1, 1, 1, 1, 1, 1], [1, 2, 3]])
@pytest.mark.parametrize("dims", [(16, 16), (20, 40)])
@pytest.mark.parametrize("gates", GATES)
def test_steps_update_the_state_in_place(
    dims: tuple[int, int], pieces: list[int], normalize: bool, gates: str, device: str
) -> None:
    def judge_draw(seed: int) -> None:
        torch.manual_seed(seed)
        inputs = [t.detach() for t in tensors(3, 6, (2, 4), dims, device=device, gates=gates)]
        expected, truth = oracle(normalize=normalize)(*inputs), oracle(normalize=normalize)(*in_fp64(inputs))
        *tokens, initial = inputs
        buffer = torch.zeros(5, *initial.shape[1:], device=device)  # of a cache with more rows
        state = buffer[1:4].copy_(initial)
        split = zip(*(sliced(t).split(pieces, 1) for t in tokens), strict=True)
        o = torch.cat([gated_delta_step(*piece, state, normalize=normalize) for piece in split], 1)
        assert not buffer[[0, 4]].any()
        for case in zip((o, buffer[1:4]), expected, truth, strict=True):
            assert_as_exact_as(*case)

    judge_draws(judge_draw, seed=0)


def test_padding_leaves_the_state(device: str) -> None:
    inputs = [t.detach() for t in tensors(1, 70, device=device)]
    inputs[3][:, :66] = inputs[4][:, :66] = 0.0
    *tokens, initial = inputs
    o, final = rule()(*tokens, initial)
    expected_o, expected = rule()(*(t[:, 66:] for t in tokens), initial)
    torch.testing.assert_close(final, expected)
    torch.testing.assert_close(o[:, 66:], expected_o)


@pytest.mark.plain
def test_fp32_gates_and_states_with_half_tokens(device: str) -> None:
    torch.manual_seed(0)
    q, k, v, g, beta, state = tensors(1, 100, device=device)
    inputs = [*(t.detach().bfloat16().requires_grad_() for t in (q, k, v)), g, beta, state]
    o, final = gated_delta_rule(*inputs[:5], initial_state=inputs[5], output_final_state=True)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    gradients = torch.autograd.grad([o.float().sum() + final.sum()], inputs)
    assert [t.dtype for t in gradients] == [t.dtype for t in inputs]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = oracle()(*wide)
    wide_gradients = torch.autograd.grad([t.sum() for t in expected], wide)
    for actual, truth in zip((o, final, *gradients), (*expected, *wide_gradients), strict=True):
        assert (actual.double() - truth).norm() <= 0.01 * truth.norm()


@needs_triton
def test_half_precision_gradients_of_fp32_gates(device: str) -> None:
    """The products of half-precision tokens round; g, beta and the state are in fp32."""
    torch.manual_seed(0)
    inputs = tensors(1, 100, dims=(16, 16), device=device)
    inputs = [*(t.detach().to(HALF_DTYPE).requires_grad_() for t in inputs[:3]), *inputs[3:]]
    wide = in_fp64(inputs)
    results, truths = rule(backend="triton")(*inputs), oracle()(*wide)
    upstream = [torch.randn(t.shape, device=device) for t in truths]
    gradients = torch.autograd.grad(results, inputs, [u.to(r.dtype) for u, r in zip(upstream, results, strict=True)])
    wide_gradients = torch.autograd.grad(truths, wide, [u.double() for u in upstream])
    for actual, truth in zip((*results, *gradients), (*truths, *wide_gradients), strict=True):
        assert (actual.double() - truth).norm() <= 4 * torch.finfo(HALF_DTYPE).eps * truth.norm()


@needs_triton
@pytest.mark.parametrize("keys", ["equal", "alternating", "tiny", "zero"])
def test_keys_that_make_the_triangular_system_ill_conditioned(keys: str, device: str) -> None:
    """With equal keys, beta of 1 and no decay, each token replaces what the one before has written.

    A rounding error in an entry of the system reaches all later deltas, so `ulps` grows with the condition number.
    """
    torch.manual_seed(0)
    q, k, v, g, beta, state = (t.detach() for t in tensors(1, 100, (1, 1), (16, 16), device=device))
    k = k[:, :1].expand_as(k).contiguous()
    if keys == "alternating":
        k[:, ::2] *= -1
    k *= {"tiny": 1e-3, "zero": 0.0}.get(keys, 1.0)
    inputs = [t.requires_grad_() for t in (q, k, v, torch.zeros_like(g), torch.ones_like(beta), state)]
    judge(rule(backend="triton"), oracle(), inputs, ulps=2 * condition_number(k.detach()[0, :CHUNK, 0]) ** 0.5)


def condition_number(k: Tensor) -> float:
    """The largest row sum of |L^-1| |L| for the triangular system L of these keys, (C, D), without decay, beta of 1.

    It bounds how much relative changes of the elements of L move the solution (Skeel 1979). Of random changes, as those
    by rounding, the sum is about the square root.
    """
    k = k.double() * (k.double().square().sum(-1, keepdim=True) + NORMALIZATION_EPS).rsqrt()
    system = (k @ k.T).tril(-1) + torch.eye(len(k), dtype=k.dtype, device=k.device)
    return (system.inverse().abs() @ system.abs()).sum(-1).max().item()


def worst_condition_number(k: Tensor) -> float:
    """The largest condition number of the heads' first chunks of (B, T, K, D_k) keys."""
    return max(map(condition_number, k.detach()[:, :CHUNK].transpose(1, 2).flatten(0, 1)))


@needs_triton
@pytest.mark.parametrize("gates", GATES)
def test_a_beta_of_zero_has_its_gradient(gates: str, device: str) -> None:
    torch.manual_seed(0)
    inputs = tensors(1, 70 if gates == "per head" else 20, device=device, gates=gates)
    inputs[4] = torch.zeros_like(inputs[4]).requires_grad_()
    judge(rule(), oracle(), inputs)


def test_strong_decay_underflows_to_zero(device: str) -> None:
    q, k, v, g, beta, _ = tensors(1, 70, device=device)
    g = torch.full_like(g, -300.0).requires_grad_()
    o = gated_delta_rule(q, k, v, g, beta)
    gradients = torch.autograd.grad(o.square().sum(), [q, k, v, g, beta])
    assert all(t.isfinite().all() for t in (o, *gradients))


@needs_triton
def test_chunks_of_packed_rows(device: str) -> None:
    table = chunk_table(torch.cat([starts_of(BOUNDS, device), starts_of([0, 140], device)]), CHUNK)
    assert table.starts is not None
    assert table.segments is not None
    assert table.counts is not None
    assert table.counts.tolist() == [[5, 5], [3, 1]]
    assert table.starts[0, :6].tolist() == [0, 1, 6, 70, 134, 140]
    assert table.segments[0, :6].tolist() == [0, 1, 2, 3, 4, 5]
    assert table.starts[1, :4].tolist() == [0, 64, 128, 140]
    assert table.segments[1, :2].tolist() == [0, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 3, 1, 4)}, r"k \(1, 3, 1, 4\).*expected \(B, T, K, D_k\) twice"),
        ({"v": torch.zeros(1, 3, 2, 8, dtype=torch.long)}, "v has dtype torch.int64"),
        ({"beta": torch.zeros(1, 3)}, "V a multiple of K"),
        (
            {"initial_state": torch.zeros(1, 2, 8, 4)},
            r"shape \(1, 2, 8, 4\); expected \(1, 2, 8, 8\)",
        ),
        ({"segment_start": torch.zeros(3, dtype=torch.long)}, r"segment_start has shape \(3,\); expected \(1, 3\)"),
        ({"backend": "cuda"}, 'expected "auto", "triton" or "torch"'),
    ],
)
def test_messages(change: dict[str, Any], message: str) -> None:
    names = "q", "k", "v", "g", "beta", "initial_state"
    arguments = dict(zip(names, tensors(1, 3, device="cpu"), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**arguments)


@pytest.mark.slow
@pytest.mark.plain
@pytest.mark.parametrize(
    ("dims", "dtype", "packed"),
    [
        ((64, 64), torch.bfloat16, False),
        ((128, 128), torch.bfloat16, True),
        ((96, 192), torch.bfloat16, False),
        ((256, 256), torch.bfloat16, False),
        ((64, 64), torch.float32, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("gates", GATES)
def test_every_head_size_compiles(dims: tuple[int, int], dtype: torch.dtype, packed: bool, gates: str) -> None:
    pytest.importorskip("triton")
    inputs = tensors(1, 70, dims=dims, device="cpu", dtype=dtype, gates=gates)
    segment_start = starts_of([0, 5, 70], "cpu") if packed else None
    compile_both_passes(rule(segment_start=segment_start), inputs)


@pytest.mark.slow
@pytest.mark.plain
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_the_step_compiles(dims: tuple[int, int], gates: str) -> None:
    pytest.importorskip("triton")
    inputs = [t.detach() for t in tensors(2, 1, dims=dims, device="cpu", dtype=torch.bfloat16, gates=gates)]
    inputs[5] = inputs[5].float()
    compile_both_passes(gated_delta_step, inputs)


@pytest.mark.gpu
def test_long_rows_are_addressed_with_64_bits(device: str) -> None:
    torch.manual_seed(0)
    tokens, heads, dim = 40960, 512, 128  # 2.7e9 elements of v
    q, k = (torch.randn(1, tokens, 1, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, tokens, heads, dim, device=device, dtype=torch.bfloat16)
    g, beta = -torch.rand(1, tokens, heads, device=device), torch.rand(1, tokens, heads, device=device)
    o = gated_delta_rule(q, k, v, g, beta)
    last = [t[:, -200:, -1:] if t is not q and t is not k else t[:, -200:] for t in (q, k, v, g, beta)]
    expected = gated_delta_rule(*last)  # g of -0.5 on average: nothing remains after 100 tokens
    torch.testing.assert_close(o[:, -64:, -1:], expected[:, -64:], rtol=2e-2, atol=2e-2)  # type: ignore[index]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_neither_pass_waits_for_the_gpu(device: str) -> None:
    inputs = tensors(1, 200, device=device)
    segment_start = starts_of([0, 70, 200], device)

    def both_passes() -> None:
        o, final = rule(segment_start=segment_start)(*inputs)
        torch.autograd.grad([o, final], inputs, [torch.ones_like(o), torch.ones_like(final)])

    both_passes()  # loads the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        both_passes()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_launch_uses_the_instructions_that_ptxas_miscompiles() -> None:
    """See `delta_chunks`. Triton uses `wgmma` for products with 64 or more rows and a multiple of 4 warps."""
    rows = {"SCAN": "values", "REVERSE_SCAN": "values", "QUERY_GRADIENTS": "part", "KEY_GRADIENTS": "part"}
    rows |= {"PRODUCTS": "block", "BLOCK_GRADIENTS": "block"}
    launches = {
        name: value[2]
        for module in (delta_chunks, delta_chunk_gradients, delta_channels, delta_channel_gradients)
        for name, value in vars(module).items()
        if isinstance(value, dict) and isinstance(value.get(2), Launch)
    }
    assert launches.keys() > rows.keys()
    for name, launch in launches.items():
        sizes = {"values": launch.values, "part": delta_chunk_gradients.ROWS, "block": delta_channels.BLOCK}
        n_rows = sizes.get(rows.get(name, ""), CHUNK)
        assert launch.warps <= 2 or n_rows < 64, name


@pytest.mark.slow
@pytest.mark.plain
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_no_kernel_of_half_precision_has_those_instructions(dims: tuple[int, int], gates: str) -> None:
    pytest.importorskip("triton")
    kernels = compile_both_passes(rule(), tensors(1, 70, dims=dims, device="cpu", dtype=torch.bfloat16, gates=gates))
    assert len(kernels) >= 10
    assert not [kernel.name for kernel in kernels if "wgmma" in kernel.asm["ptx"]]


@pytest.mark.slow
@pytest.mark.plain
@pytest.mark.parametrize("heads", [(1, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_order_of_sums_depends_neither_on_length_nor_on_packing(heads: tuple[int, int], gates: str) -> None:
    """Else a segment would differ from the segment alone."""
    pytest.importorskip("triton")

    def orders(tokens: int, segment_start: Tensor | None) -> dict[str, list[tuple[str, ...]]]:
        inputs = tensors(1, tokens, heads, device="cpu", gates=gates)
        kernels = compile_both_passes(rule(segment_start=segment_start), inputs)
        return {kernel.name: layouts_of_sums(kernel) for kernel in kernels}

    alone, packed = orders(64, None), torch.tensor([[0] * 3 + [3] * 61])
    assert sum(map(len, alone.values())) >= 10
    for tokens, segment_start in ((70, None), (64, packed), (61, packed[:, :61])):
        assert orders(tokens, segment_start).items() >= alone.items()

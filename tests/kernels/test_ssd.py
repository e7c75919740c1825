"""`ssd` over several chunks and segments, and `ssd_step`."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import ssd, ssd_chunk_gradients, ssd_chunks, ssd_gates, ssd_group_gradients, ssd_step
from ligerzoo.kernels.chunk_tiles import SEGMENT_PROGRAMS, Launch
from ligerzoo.kernels.ssd import reference
from ligerzoo.kernels.ssd_chunks import CHUNKS
from ligerzoo.kernels.ssd_gates import reference as reference_gates
from tests.covering import long_cases
from tests.kernels.accuracy import assert_as_exact_as, assert_equal, in_fp64, judge, judge_draws
from tests.kernels.compiling import compile_both_passes, layouts_of_sums
from tests.kernels.layouts import sliced
from tests.kernels.machine import HALF_DTYPE, needs_triton, on_gpu_too
from tests.kernels.segments import BACKENDS, BOUNDS, starts_of

CHUNK = CHUNKS[4]


def tensors(
    batch: int,
    tokens: int,
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (8, 8),
    *,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """x, b, c, g, dt, d and an initial state, as slowly decaying as trained models are. Heads are (groups, heads)."""
    (groups, n_heads), (state_size, head_dim) = heads, dims
    inputs = [
        torch.randn(batch, tokens, n_heads, head_dim),
        *(torch.randn(batch, tokens, groups, state_size) for _ in range(2)),
        -0.2 * torch.rand(batch, tokens, n_heads),
        torch.rand(batch, tokens, n_heads),
        torch.randn(n_heads),
        torch.randn(batch, n_heads, state_size, head_dim),
    ]
    return [t.to(device, dtype).requires_grad_() for t in inputs]


def scan(**options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        *tokens, state = inputs
        y, final = ssd(*tokens, initial_state=state, output_final_state=True, **options)
        return y, final.to(y.dtype)

    return run


def oracle(**options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        y, final = reference(*inputs, **options)
        return y.to(inputs[0].dtype), final.to(inputs[0].dtype)

    return run


@pytest.mark.parametrize("packed", [False, True])
def test_plain_torch_by_chunks_equals_the_recurrence(packed: bool, device: str) -> None:
    torch.manual_seed(0)
    inputs = tensors(2, 140, (2, 4), (8, 6), device=device)
    segment_start = torch.cat([starts_of(BOUNDS, device), starts_of([0, 77, 140], device)]) if packed else None
    wide = in_fp64(inputs)
    expected = oracle(segment_start=segment_start)(*wide)
    for by_chunks, by_tokens in zip(scan(segment_start=segment_start)(*wide), expected, strict=True):
        torch.testing.assert_close(by_chunks, by_tokens)
    judge(scan(segment_start=segment_start, backend="torch"), oracle(segment_start=segment_start), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weak_decays_between_strong_ones_keep_their_digits(backend: Any, device: str) -> None:
    """The sums of g over a chunk reach -300 here; differences of fp32 sums would have errors of 1e-5."""
    torch.manual_seed(0)
    inputs = tensors(1, 66, dims=(16, 16), device=device)
    is_strong = torch.rand(inputs[3].shape, device=device) < 0.1
    inputs[3] = torch.where(is_strong, 300 * inputs[3].detach(), inputs[3].detach()).requires_grad_()
    judge(scan(backend=backend), oracle(), inputs)


OPTIONS = {
    "tokens": [1, CHUNK, 130, *on_gpu_too([], [1000])],
    "heads": [(1, 1), (2, 2), (1, 3), *on_gpu_too([], [(8, 64), (1, 36)])],
    "dims": [(16, 16), (5, 40), (40, 5), *on_gpu_too([], [(64, 64), (128, 64), (256, 128)])],
    "dtype": [torch.float32, HALF_DTYPE],
    "packed": ["no", "one row of segments", "segments per row"],
    "skips": [True, False],
}


@needs_triton
@pytest.mark.parametrize("case", long_cases(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], device: str) -> None:
    torch.manual_seed(0)
    tokens = case["tokens"]
    x, b, c, g, dt, d, state = tensors(2, tokens, case["heads"], case["dims"], device=device, dtype=case["dtype"])
    segment_start = None
    if case["packed"] != "no":
        rows = [[0, 3, 80], [0, 66]][: 1 if case["packed"] == "one row of segments" else 2]
        bounds = [[*(b for b in row if b < tokens), tokens] for row in rows]
        segment_start = torch.cat([starts_of(b, device) for b in bounds])

    def without_skip(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: function(*inputs[:5], None, inputs[5])

    inputs = [x, b, c, g, dt, d, state] if case["skips"] else [x, b, c, g, dt, state]
    functions = scan(segment_start=segment_start, backend="triton"), oracle(segment_start=segment_start)
    judge(*(functions if case["skips"] else map(without_skip, functions)), inputs)


@needs_triton
def test_parts_of_large_groups_are_added_up(device: str) -> None:
    """A program adds up b and c of at most 16 heads."""
    torch.manual_seed(0)
    judge(scan(backend="triton"), oracle(), tensors(1, 3, (1, 18), (5, 5), device=device))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_packed_segment_equals_the_segment_alone_bit_by_bit(backend: Any, device: str) -> None:
    if backend == "torch" and device == "cuda":
        pytest.skip("cuBLAS chooses a kernel by the number of chunks")
    torch.manual_seed(0)
    inputs = tensors(1, BOUNDS[-1], device=device)
    upstream = torch.randn(inputs[0].shape, device=device)

    def results(first: int, end: int, segment_start: Tensor | None) -> list[Tensor]:
        leaves = [t.detach()[:, first:end].requires_grad_() for t in inputs[:5]]
        y = ssd(*leaves, inputs[5].detach(), segment_start=segment_start, backend=backend)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream[:, first:end])]

    packed = results(0, BOUNDS[-1], starts_of(BOUNDS, device))
    for first, end in pairwise(BOUNDS):
        assert_equal([t[:, first:end] for t in packed], results(first, end, None))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_segment_stays_there(backend: Any, device: str) -> None:
    """Forward and backward."""
    inputs = tensors(1, 80, device=device)[:5]
    with torch.no_grad():
        inputs[0][:, 1:6] = torch.nan
    y = ssd(*inputs, segment_start=starts_of([0, 1, 6, 80], device), backend=backend)
    assert isinstance(y, Tensor)
    for result in (y, *torch.autograd.grad(y.sum(), inputs)):
        assert result[:, :1].isfinite().all()
        assert result[:, 6:].isfinite().all()


@needs_triton
def test_more_segments_than_programs_and_more_chunks_than_slots(device: str) -> None:
    torch.manual_seed(0)
    segment_start = starts_of([*range(SEGMENT_PROGRAMS + 2), 85, 90], device)
    inputs = tensors(1, 90, (1, 3), device=device)  # of two heads, D would be judged by many draws
    judge(scan(segment_start=segment_start), oracle(segment_start=segment_start), inputs)


def test_no_tokens(device: str) -> None:
    *tokens, state = tensors(2, 0, device=device)
    for segment_start in (None, torch.zeros(1, 0, dtype=torch.int64, device=device)):
        y, final = scan(segment_start=segment_start)(*tokens, state)
        assert y.shape == tokens[0].shape
        assert torch.equal(final, state)
        (gradient,) = torch.autograd.grad(final.sum() + y.sum(), state)
        assert torch.equal(gradient, torch.ones_like(state))


def test_prefill_in_pieces(device: str) -> None:
    pieces = [1, 3, 100, 26]
    torch.manual_seed(0)
    inputs = [t.detach() for t in tensors(2, 130, (2, 4), (16, 8), device=device)]
    expected, truth = oracle()(*inputs), oracle()(*in_fp64(inputs))
    *tokens, d, state = inputs
    outputs = []
    for piece in zip(*(t.split(pieces, 1) for t in tokens), strict=True):
        y, state = scan()(*piece, d, state)
        outputs.append(y)
    for case in zip((torch.cat(outputs, 1), state), expected, truth, strict=True):
        assert_as_exact_as(*case)


@pytest.mark.parametrize(("dims", "pieces"), [((16, 16), [1, 1, 1, 1, 1, 1]), ((20, 40), [1, 2, 3])])
def test_steps_update_the_state_in_place(dims: tuple[int, int], pieces: list[int], device: str) -> None:
    def judge_draw(seed: int) -> None:
        torch.manual_seed(seed)
        inputs = [t.detach() for t in tensors(3, 6, (2, 4), dims, device=device)]
        expected, truth = oracle()(*inputs), oracle()(*in_fp64(inputs))
        *tokens, d, initial = inputs
        buffer = torch.zeros(5, *initial.shape[1:], device=device)  # of a cache with more rows
        state = buffer[1:4].copy_(initial)
        split = zip(*(sliced(t).split(pieces, 1) for t in tokens), strict=True)
        y = torch.cat([ssd_step(*piece, state, d) for piece in split], 1)
        assert not buffer[[0, 4]].any()
        for case in zip((y, buffer[1:4]), expected, truth, strict=True):
            assert_as_exact_as(*case)

    judge_draws(judge_draw, seed=0)


def test_padding_leaves_the_state(device: str) -> None:
    *tokens, d, initial = [t.detach() for t in tensors(1, 70, device=device)]
    tokens[3][:, :66] = tokens[4][:, :66] = 0.0
    y, final = scan()(*tokens, d, initial)
    expected_y, expected = scan()(*(t[:, 66:] for t in tokens), d, initial)
    torch.testing.assert_close(final, expected)
    torch.testing.assert_close(y[:, 66:], expected_y)


@needs_triton
def test_half_precision_gradients_of_fp32_gates(device: str) -> None:
    """The products of half-precision tokens round; g, dt and the state are in fp32. Over two chunks of 128 tokens."""
    torch.manual_seed(0)
    inputs = tensors(1, 140, dims=(16, 16), device=device)
    inputs = [*(t.detach().to(HALF_DTYPE).requires_grad_() for t in inputs[:3]), *inputs[3:]]
    wide = in_fp64(inputs)
    y, final = ssd(*inputs[:6], initial_state=inputs[6], output_final_state=True, backend="triton")
    assert (y.dtype, final.dtype) == (HALF_DTYPE, torch.float32)
    truths = oracle()(*wide)
    upstream = [torch.randn(t.shape, device=device) for t in truths]
    gradients = torch.autograd.grad([y, final], inputs, [upstream[0].to(HALF_DTYPE), upstream[1]])
    wide_gradients = torch.autograd.grad(truths, wide, [u.double() for u in upstream])
    for actual, like, truth in zip(
        (y, final, *gradients), (y, final, *inputs), (*truths, *wide_gradients), strict=True
    ):
        assert actual.dtype == like.dtype
        assert (actual.double() - truth).norm() <= 4 * torch.finfo(HALF_DTYPE).eps * truth.norm()


def test_strong_decay_underflows_to_zero(device: str) -> None:
    *tokens, d, _ = tensors(1, 70, device=device)
    tokens[3] = torch.full_like(tokens[3], -300.0).requires_grad_()
    y = ssd(*tokens, d)
    gradients = torch.autograd.grad(y.square().sum(), [*tokens, d])
    assert all(t.isfinite().all() for t in (y, *gradients))


LIMITS = [(0.0, float("inf")), (0.5, 0.9)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_gates_and_their_limits(limits: tuple[float, float], backend: Any, device: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, device=device, requires_grad=True) for shape in ((2, 9, 5), (5,), (5,))]
    judge(lambda *t: ssd_gates(*t, *limits, backend=backend), lambda *t: reference_gates(*t, *limits), inputs)
    g, dt = ssd_gates(*inputs, *limits, backend=backend)
    assert (g.dtype, dt.dtype) == (torch.float32, torch.float32)
    assert limits[0] <= dt.min().item() <= dt.max().item() <= limits[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"c": torch.zeros(1, 3, 1, 4)}, r"c \(1, 3, 1, 4\).*expected \(B, T, N, D\), \(B, T, G, S\) twice"),
        ({"x": torch.zeros(1, 3, 2, 8, dtype=torch.long)}, "x has dtype torch.int64"),
        ({"dt": torch.zeros(1, 3)}, "N a multiple of G"),
        ({"d": torch.zeros(3)}, r"d \(3,\)"),
        ({"initial_state": torch.zeros(1, 2, 8, 4)}, r"shape \(1, 2, 8, 4\); expected \(1, 2, 8, 8\)"),
        ({"segment_start": torch.zeros(3, dtype=torch.long)}, r"segment_start has shape \(3,\); expected \(1, 3\)"),
        ({"backend": "cuda"}, 'expected "auto", "triton" or "torch"'),
    ],
)
def test_messages(change: dict[str, Any], message: str) -> None:
    names = "x", "b", "c", "g", "dt", "d", "initial_state"
    arguments = dict(zip(names, tensors(1, 3, device="cpu"), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        ssd(**arguments)


@pytest.mark.slow
@pytest.mark.plain
@pytest.mark.parametrize(
    ("dims", "dtype", "packed"),
    [
        ((128, 64), torch.bfloat16, False),
        ((128, 64), torch.bfloat16, True),
        ((64, 128), torch.float16, False),
        ((256, 128), torch.bfloat16, False),
        ((256, 128), torch.float32, True),
    ],
    ids=str,
)
def test_every_head_size_compiles(dims: tuple[int, int], dtype: torch.dtype, packed: bool) -> None:
    """Without the instructions that ptxas miscompiles, see `delta_chunks`."""
    pytest.importorskip("triton")
    inputs = tensors(1, 70, dims=dims, device="cpu", dtype=dtype)
    segment_start = starts_of([0, 5, 70], "cpu") if packed else None
    kernels = compile_both_passes(scan(segment_start=segment_start), inputs)
    assert len(kernels) >= 12
    assert not [kernel.name for kernel in kernels if "wgmma" in kernel.asm["ptx"]]


@pytest.mark.slow
@pytest.mark.plain
@pytest.mark.parametrize("dims", [(128, 64), (256, 128)], ids=str)
def test_the_step_compiles(dims: tuple[int, int]) -> None:
    pytest.importorskip("triton")
    *tokens, d, state = [t.detach() for t in tensors(2, 1, dims=dims, device="cpu", dtype=torch.bfloat16)]
    compile_both_passes(ssd_step, [*tokens, state.float(), d])


@pytest.mark.slow
@pytest.mark.plain
def test_order_of_sums_depends_neither_on_length_nor_on_packing() -> None:
    """Else a segment would differ from the segment alone, in fp32."""
    pytest.importorskip("triton")

    def orders(tokens: int, segment_start: Tensor | None) -> dict[str, list[tuple[str, ...]]]:
        kernels = compile_both_passes(scan(segment_start=segment_start), tensors(1, tokens, device="cpu"))
        return {kernel.name: layouts_of_sums(kernel) for kernel in kernels}

    alone, packed = orders(64, None), torch.tensor([[0] * 3 + [3] * 61])
    assert sum(map(len, alone.values())) >= 8
    for tokens, segment_start in ((70, None), (64, packed), (61, packed[:, :61])):
        assert orders(tokens, segment_start).items() >= alone.items()


def test_no_launch_uses_the_instructions_that_ptxas_miscompiles() -> None:
    """Triton uses `wgmma` for products with 64 or more rows and a multiple of 4 warps."""
    launches = {
        name: value[2]
        for module in (ssd_chunks, ssd_chunk_gradients, ssd_group_gradients)
        for name, value in vars(module).items()
        if isinstance(value, dict) and isinstance(value.get(2), Launch)
    }
    rows = {name: launches[name].values for name in ("SCAN", "REVERSE_SCAN")}
    rows |= dict.fromkeys(("OUTPUTS", "INPUT_GRADIENTS"), ssd_chunks.OUTPUT_ROWS[2])
    rows |= dict.fromkeys(("PREPARE", "GROUP_GRADIENTS"), ssd_chunks.ROWS)
    rows["PAIR_WEIGHTS"] = ssd_chunk_gradients.PAIR_ROWS[2]
    assert launches.keys() == rows.keys()
    for name, launch in launches.items():
        assert launch.warps <= 2 or rows[name] < 64, name

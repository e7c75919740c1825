"""`causal_conv1d` with states and packed segments, and `causal_conv1d_step`."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels import causal_conv1d, causal_conv1d_step, gated_delta_rule
from ligerzoo.kernels.causal_conv import final_state, reference
from ligerzoo.kernels.recompute import Recompute, recomputing
from tests.covering import covering
from tests.kernels.accuracy import assert_as_exact_as, assert_equal, in_fp64, judge
from tests.kernels.compiling import compile_both_passes
from tests.kernels.layouts import sliced
from tests.kernels.machine import DTYPES, needs_triton
from tests.kernels.oracles import numbers
from tests.kernels.segments import starts_of

OPTIONS = {
    "tokens": [1, 2, 40, 70],
    "channels": [5, 130],
    "taps": [1, 2, 4, 8],
    "has_bias": [True, False],
    "has_state": [True, False],
    "packed": ["no", "one row of segments", "segments per row"],
    "activation": ["silu", None],
    "dtype": DTYPES,
}


@needs_triton
@pytest.mark.parametrize("case", covering(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], device: str) -> None:
    torch.manual_seed(0)
    tokens, channels, taps, dtype = (case[name] for name in ("tokens", "channels", "taps", "dtype"))
    shapes = [(2, tokens, channels), (channels, taps), (channels,), (2, taps - 1, channels)]
    inputs = [numbers(*shape, dtype=dtype, device=device) for shape in shapes]
    segment_start = None
    if case["packed"] != "no":
        rows = [[0, 1, 3, 37], [0, 2, 38]][: 1 if case["packed"] == "one row of segments" else 2]
        segment_start = torch.cat([starts_of([*(b for b in row if b < tokens), tokens], device) for row in rows])

    def arguments(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> tuple[Tensor | None, ...]:
        return x, weight, bias if case["has_bias"] else None, state if case["has_state"] else None

    def function(*inputs: Tensor) -> Any:
        x, weight, bias, state = arguments(*inputs)
        return causal_conv1d(
            x, weight, bias, initial_state=state, segment_start=segment_start, activation=case["activation"],
            output_final_state=True, backend="triton",
        )  # fmt: skip

    def oracle(*inputs: Tensor) -> Any:
        x, weight, bias, state = arguments(*inputs)
        y = reference(x, weight, bias, state, segment_start, case["activation"])
        return y, final_state(x, taps - 1, state, segment_start)

    judge(function, oracle, inputs)


def test_equals_torchs_convolution(device: str) -> None:
    x, weight, bias = (numbers(*shape, dtype=torch.float64) for shape in ((2, 9, 6), (6, 4), (6,)))
    expected = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], bias, groups=6)).mT
    torch.testing.assert_close(causal_conv1d(x, weight, bias, activation="silu"), expected)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
def test_a_packed_segment_equals_the_segment_alone_bit_by_bit(backend: Any, device: str) -> None:
    torch.manual_seed(0)
    bounds = [0, 1, 3, 35, 70]
    x, weight, upstream = (torch.randn(*shape, device=device) for shape in ((1, 70, 6), (6, 4), (1, 70, 6)))

    def results(first: int, end: int, segment_start: Tensor | None) -> list[Tensor]:
        leaf = x[:, first:end].clone().requires_grad_()
        y: Any = causal_conv1d(leaf, weight, segment_start=segment_start, activation="silu", backend=backend)
        return [y.detach(), *torch.autograd.grad(y, leaf, upstream[:, first:end])]

    packed = results(0, 70, starts_of(bounds, device))
    for first, end in pairwise(bounds):
        assert_equal([t[:, first:end] for t in packed], results(first, end, None))


@needs_triton
@pytest.mark.parametrize("level", [Recompute.NOTHING, Recompute.ELEMENTWISE])
def test_backward_recomputes_the_result_instead_of_keeping_it(level: Recompute, device: str) -> None:
    """The gated delta rule would keep views of it: queries, keys and values."""
    torch.manual_seed(0)
    x, weight, state = (numbers(*shape, device=device) for shape in ((1, 40, 24), (24, 4), (1, 3, 24)))
    g, beta = -torch.rand(1, 40, 1, device=device), torch.rand(1, 40, 1, device=device)
    options: Any = {"initial_state": state, "segment_start": starts_of([0, 7, 40], device), "activation": "silu"}

    def gradients(level: Recompute) -> tuple[bool, list[Tensor]]:
        kept: set[int] = set()

        def pack(t: Tensor) -> Tensor:
            kept.add(t.untyped_storage().data_ptr())
            return t.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), recomputing(level):
            y: Any = causal_conv1d(x, weight, **options)
            q, k, v = (t.unflatten(-1, (1, 8)) for t in y.split(8, -1))
            o: Any = gated_delta_rule(q, k, v, g, beta, segment_start=options["segment_start"])
        upstream = torch.ones_like(o).cumsum(1)
        return y.data_ptr() in kept, list(torch.autograd.grad(o, [x, weight, state], upstream))

    keeps, results = gradients(level)
    assert keeps == (level == Recompute.NOTHING)
    assert_equal(results, gradients(Recompute.NOTHING)[1])


@pytest.mark.parametrize("pieces", [[9], [1] * 9, [2, 1, 6]], ids=str)
@pytest.mark.parametrize("taps", [2, 4])
def test_pieces_and_steps(pieces: list[int], taps: int, device: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = (numbers(*shape, device=device).detach() for shape in ((2, 9, 300), (300, taps), (300,)))
    initial = torch.randn(2, taps - 1, 300, device=device)
    expected = reference(x, weight, bias, initial, activation="silu")
    truth = reference(*in_fp64([x, weight, bias, initial]), activation="silu")
    buffer = torch.zeros(3, taps - 1, 300, device=device)
    step_state, state = buffer[1:].copy_(initial), initial
    outputs, step_outputs = [], []
    for piece in x.split(pieces, 1):
        y, state = causal_conv1d(piece, weight, bias, initial_state=state, activation="silu", output_final_state=True)
        outputs.append(y)
        step_outputs.append(causal_conv1d_step(sliced(piece), step_state, weight, bias, activation="silu"))
    assert_as_exact_as(torch.cat(outputs, 1), expected, truth)
    assert_as_exact_as(torch.cat(step_outputs, 1), expected, truth)
    assert_equal([state, buffer[1:]], [x[:, 10 - taps :]] * 2)
    assert not buffer[0].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 4)}, r"weight \(5, 4\); expected \(B, T, C\) and \(C, k\)"),
        ({"bias": torch.zeros(5)}, r"bias has shape \(5,\); expected \(6,\)"),
        ({"activation": "gelu"}, "activation='gelu'; expected \"silu\" or None"),
        ({"initial_state": torch.zeros(1, 4, 6)}, r"initial_state has shape \(1, 4, 6\); expected \(1, 3, 6\)"),
        ({"segment_start": torch.zeros(1, 3)}, "segment_start has dtype torch.float32; expected an integer dtype"),
    ],
)
def test_messages(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(1, 3, 6), "weight": torch.zeros(6, 4), **change}
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**arguments)


@pytest.mark.slow
@pytest.mark.plain
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_kernels_compile(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    shapes = (2, 40, 130), (130, 4), (130,), (2, 3, 130)
    inputs = [numbers(*shape, dtype=dtype) for shape in shapes]
    segment_start = starts_of([0, 3, 40], "cpu")

    def packed(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Any:
        options: Any = {"segment_start": segment_start, "activation": "silu"}
        return causal_conv1d(x, weight, bias, initial_state=state, **options)

    compile_both_passes(packed, inputs)
    x, weight, bias, state = (t.detach() for t in inputs)
    compile_both_passes(causal_conv1d_step, [x[:, :1], state, weight, bias])

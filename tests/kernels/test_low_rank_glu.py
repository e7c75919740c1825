"""Gated linear units that add low-rank terms to gate and up, and the layer that uses them."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.kernels.activation import ACTIVATIONS, Activation
from ligerzoo.kernels.glu import glu_linear, linear_reference
from ligerzoo.kernels.low_rank import LowRank, LowRankTerms
from ligerzoo.kernels.low_rank_glu import MAX_RANK
from ligerzoo.kernels.recompute import Recompute, recomputing
from ligerzoo.kernels.row_sums import split_row_sums
from ligerzoo.layers import GatedMLP, projection
from ligerzoo.layers.adapt import adapt
from ligerzoo.layers.lora import LoRAOptions
from tests.covering import long_cases
from tests.kernels.accuracy import assert_as_exact_as, in_fp64, judge, judge_draws
from tests.kernels.compiling import compile_both_passes
from tests.kernels.layouts import laid_out, offset, padded, sliced, swapped, transposed
from tests.kernels.machine import HALF_DTYPE, ROUNDED_DTYPES, kernel_file, needs_triton, on_gpu_too
from tests.kernels.oracles import numbers

OPTIONS = {
    "dtype": ROUNDED_DTYPES[1:],
    "shape": [(4, 300), (5, 33), (2, 3, 130), (150, 40), *on_gpu_too([], [(1000, 4095), (513, 14336)])],
    "ranks": [(1, 1), (16, 16), (3, 17), (32, 8)],
    "down_rank": [None, 2, 32],
    "b_is_fp32": [False, True],
    "has_bias": [False, True],
    "activation": list(ACTIVATIONS),
    "layout": [torch.clone, padded, transposed, swapped, *on_gpu_too([], [offset, sliced])],
    "frozen": [(), (0,), (1,), (2,), (3,), (4,), (5,), (6, 7), (8,), (0, 1), (4, 5, 6)],
}


def inputs(
    shape: tuple[int, ...], ranks: tuple[int, int], down_rank: int | None, dtype: torch.dtype, b_dtype: torch.dtype,
    device: str,
) -> list[Tensor]:  # fmt: skip
    """Returns gate, up, weight, bias, h and B of gate and up, and A and B of down."""
    columns, outputs = shape[-1], 13
    gate, up = (numbers(*shape, dtype=dtype, device=device) for _ in range(2))
    weight = numbers(outputs, columns, dtype=dtype, device=device, scale=columns**-0.5)
    bias, h = (numbers(*size, dtype=dtype, device=device) for size in ((outputs,), (*shape[:-1], sum(ranks))))
    all_b = [numbers(columns, rank, dtype=b_dtype, device=device, scale=0.3) for rank in ranks]
    down = [] if down_rank is None else [(down_rank, columns), (outputs, down_rank)]
    return [gate, up, weight, bias, h, *all_b, *(numbers(*s, dtype=b_dtype, device=device, scale=0.3) for s in down)]


def applied(
    function: Callable[..., Tensor], activation: Activation, has_bias: bool
) -> Callable[..., Tensor]:  # fmt: skip
    """Returns the function of `inputs`."""

    def apply(
        gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor, h: Tensor, gate_b: Tensor, up_b: Tensor, *down: Tensor
    ) -> Tensor:
        terms, update = LowRankTerms(h, gate_b, up_b, 0.5, -2.0), LowRank(*down, 1.5) if down else None
        z = function(gate, up, weight, bias if has_bias else None, update=update, terms=terms, activation=activation)
        return z if has_bias else z + 0 * bias.sum()

    return apply


@pytest.mark.parametrize("options", long_cases(OPTIONS))
def test_pairs_of_options(options: dict[str, Any], device: str) -> None:
    chosen = dict(options)
    dtype, layout, activation = chosen.pop("dtype"), chosen.pop("layout"), chosen.pop("activation")
    b_dtype = torch.float32 if chosen.pop("b_is_fp32") else dtype
    has_bias, frozen = chosen.pop("has_bias"), chosen.pop("frozen")
    function, reference = (applied(f, activation, has_bias) for f in (glu_linear, linear_reference))

    def judge_draw(seed: int) -> None:
        torch.manual_seed(seed)
        tensors = laid_out(inputs(**chosen, dtype=dtype, b_dtype=b_dtype, device=device), layout)
        for i in frozen:
            if i < len(tensors):
                tensors[i].requires_grad_(False)
        judge(function, reference, tensors, layout)

    judge_draws(judge_draw, seed=0)


@needs_triton
@pytest.mark.parametrize("down_rank", [None, 16])
def test_sums_of_many_programs(down_rank: int | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of rows in each program, and more partial sums than the second kernel reads at once."""
    file = kernel_file("low_rank_glu_gradients")
    monkeypatch.setattr(file, "_MIN_ROWS", 32)
    monkeypatch.setattr(file, "multiprocessors", lambda _: 132)
    tensors = inputs((600, 140), (16, 8), down_rank, HALF_DTYPE, torch.float32, device)
    function, reference = (applied(f, "silu", True) for f in (glu_linear, linear_reference))
    judge(function, reference, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("down_rank", [None, 2])
def test_wide_dtypes(down_rank: int | None, dtype: torch.dtype, device: str) -> None:
    tensors = inputs((5, 33), (3, 17), down_rank, dtype, dtype, device)
    function, reference = (applied(f, "silu", True) for f in (glu_linear, linear_reference))
    judge(function, reference, tensors)


def test_rank_0(device: str) -> None:
    tensors = inputs((5, 33), (0, 2), 2, HALF_DTYPE, HALF_DTYPE, device)
    tensors[5].requires_grad_(False)
    function, reference = (applied(f, "silu", True) for f in (glu_linear, linear_reference))
    judge(function, reference, tensors)


def test_no_rows(device: str) -> None:
    tensors = inputs((0, 7), (4, 2), 3, HALF_DTYPE, torch.float32, device)
    function, reference = (applied(f, "silu", True) for f in (glu_linear, linear_reference))
    judge(function, reference, tensors)


@pytest.mark.plain
@pytest.mark.parametrize("rank", [8, MAX_RANK])
def test_no_product_uses_wgmma(rank: int) -> None:
    """See `delta_chunks.PREPARE` for the reason."""
    pytest.importorskip("triton")
    tensors = inputs((64, 256), (rank, rank), rank, torch.bfloat16, torch.float32, "cpu")
    kernels = compile_both_passes(applied(glu_linear, "silu", True), tensors)
    names = {"_forward_kernel", "_partial_kernel", "_sum_kernel"}
    assert names <= {compiled.metadata.name for compiled in kernels}
    assert not any("wgmma" in compiled.asm["ptx"] for compiled in kernels)


@pytest.mark.parametrize(
    "shapes, problem",
    [
        ({4: (5, 5)}, r"h \(5, 5\)"),
        ({5: (33, 3)}, r"gate_b \(33, 3\)"),
        ({6: (32, 2)}, r"up_b \(32, 2\)"),
        ({4: (5, 42), 5: (33, 40)}, "ranks up to 40; expected at most 32"),
    ],
)
def test_messages(shapes: dict[int, tuple[int, ...]], problem: str) -> None:
    tensors = inputs((5, 33), (4, 2), None, torch.float32, torch.float32, "cpu")
    for i, shape in shapes.items():
        tensors[i] = torch.ones(shape)
    with pytest.raises(ValueError, match=f"glu_linear: .*{problem}"):
        applied(glu_linear, "silu", True)(*tensors)


def test_h_of_another_dtype_is_an_error() -> None:
    tensors = inputs((5, 33), (4, 2), None, torch.float32, torch.float32, "cpu")
    tensors[4] = tensors[4].double()
    with pytest.raises(ValueError, match=r"glu_linear: .* torch.float64"):
        applied(glu_linear, "silu", True)(*tensors)


# The layer


def adapted(
    device: str, dtype: torch.dtype, names: tuple[str, ...], options: dict[str, Any], dora: bool = False,
    bias: bool = False,
) -> GatedMLP:  # fmt: skip
    mlp = GatedMLP(24, 40, bias=bias, device=device, dtype=dtype)
    for name in names:
        adapt(getattr(mlp, name), LoRAOptions(rank=options.get(name, 4)), dora=dora)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.3)
    return mlp


def parts_of(mlp: GatedMLP, x: Tensor) -> tuple[Tensor, Tensor, LowRankTerms] | None:
    inner = projection.Operands.of(mlp.gate_proj, mlp.up_proj)
    if inner is None or inner.updated is None:
        return None
    return projection.low_rank_parts(x, inner.updated, mlp.down_proj, mlp.backend)


def terms_of(mlp: GatedMLP, x: Tensor) -> LowRankTerms | None:
    parts = parts_of(mlp, x)
    return None if parts is None else parts[2]


ALL = ("gate_proj", "up_proj", "down_proj")


@needs_triton
@pytest.mark.parametrize("names", [ALL, ALL[:2]], ids=str)
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES[1:], ids=str)
def test_the_layer_is_as_exact_as_without_terms(
    names: tuple[str, ...], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp = adapted(device, dtype, names, {})
    x = numbers(2, 5, 24, dtype=dtype, device=device)
    upstream = torch.randn(2, 5, 24, device=device, dtype=dtype)
    assert terms_of(mlp, x) is not None

    def results(mlp: GatedMLP, x: Tensor, upstream: Tensor) -> list[Tensor]:
        y = mlp(x)
        return [y, *torch.autograd.grad(y, [x, *(p for p in mlp.parameters() if p.requires_grad)], upstream)]

    actual = results(mlp, x, upstream)
    truth = results(deepcopy(mlp).double(), *in_fp64([x, upstream]))
    monkeypatch.setattr("ligerzoo.layers.projection.low_rank_parts", lambda *_, **__: None)
    for case in zip(actual, results(mlp, x, upstream), truth, strict=True):
        assert_as_exact_as(*case)


@needs_triton
def test_the_layer_has_terms_only_for_plain_updates_of_gate_and_up(device: str) -> None:
    x = torch.randn(3, 24, device=device, dtype=HALF_DTYPE)
    assert terms_of(adapted(device, HALF_DTYPE, ALL, {}), x) is not None
    assert terms_of(adapted(device, torch.float32, ALL, {}), x.float()) is None
    assert terms_of(adapted(device, HALF_DTYPE, ("gate_proj", "down_proj"), {}), x) is None
    assert terms_of(adapted(device, HALF_DTYPE, ALL, {}, dora=True), x) is None
    assert terms_of(adapted(device, HALF_DTYPE, ALL, {}, bias=True), x) is None
    assert terms_of(adapted(device, HALF_DTYPE, ALL, {"up_proj": MAX_RANK + 1}), x) is None
    assert terms_of(adapted(device, HALF_DTYPE, ALL, {"down_proj": MAX_RANK + 1}), x) is None
    mlp = adapted(device, HALF_DTYPE, ALL, {})
    with torch.no_grad():
        assert terms_of(mlp, x) is not None
        with split_row_sums():
            assert terms_of(mlp, x) is None
    mlp.backend = "torch"
    assert terms_of(mlp, x) is None
    mlp = adapted(device, HALF_DTYPE, ALL, {})
    mlp.gate_proj.lora_enabled = False  # type: ignore[assignment]
    assert terms_of(mlp, x) is None
    mlp = adapted(device, HALF_DTYPE, ALL, {})
    mlp.up_proj.register_forward_hook(lambda *_: None)
    assert terms_of(mlp, x) is None


@needs_triton
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_the_layer_under_autocast(weights: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A is rounded once, to the dtype of autocast."""
    mlp = adapted(device, torch.float32, ALL, {})
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        layer.weight.data = layer.weight.data.to(weights)
    x, upstream = numbers(2, 5, 24, dtype=weights, device=device), torch.randn(2, 5, 24, device=device).half()

    def results(is_fused: bool) -> tuple[Tensor, ...]:
        with torch.autocast(x.device.type, dtype=torch.float16):
            assert (terms_of(mlp, x) is not None) == is_fused
            y = mlp(x)
        return y, *torch.autograd.grad(y, [x, mlp.gate_proj.lora_A, mlp.up_proj.lora_B, mlp.down_proj.lora_A], upstream)

    actual = results(True)
    monkeypatch.setattr("ligerzoo.layers.projection.low_rank_parts", lambda *_, **__: None)
    plain = results(False)
    wide = deepcopy(mlp).double()
    y = wide(x.double())
    truth = (
        y,
        *torch.autograd.grad(
            y, [x, wide.gate_proj.lora_A, wide.up_proj.lora_B, wide.down_proj.lora_A], upstream.double()
        ),
    )
    for a, p, t in zip(actual, plain, truth, strict=True):
        assert_as_exact_as(a, p, t.to(t.dtype))


@needs_triton
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64, 65])
def test_recomputed_features_have_the_same_gradients(rows: int, bias: bool, device: str) -> None:
    """Up to 64 rows, a kernel for few rows returns the outputs of several layers as views of one tensor."""
    mlp = adapted(device, torch.float16, ALL[:2], {}, bias=bias)
    x = torch.randn(rows, 24, device=device, dtype=torch.float16, requires_grad=True)
    inputs = [x, mlp.gate_proj.lora_B, mlp.up_proj.lora_A]

    def gradients(level: Recompute) -> tuple[Tensor, ...]:
        with recomputing(level):
            y = mlp(x)
        return torch.autograd.grad(y, inputs, torch.ones_like(y))

    for kept, recomputed in zip(gradients(Recompute.NOTHING), gradients(Recompute.MLP), strict=True):
        assert torch.equal(kept, recomputed)


@needs_triton
def test_the_products_of_the_updates_are_not_written(device: str) -> None:
    """Backward keeps gate and up without them, and as many bytes."""
    mlp = adapted(device, HALF_DTYPE, ALL, {})
    x = torch.randn(6, 24, device=device, dtype=HALF_DTYPE, requires_grad=True)
    parts = parts_of(mlp, x)
    assert parts is not None
    gate, up, _ = parts
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        mlp(x)
    wide = [t for t in saved if t.shape == (6, 40)]
    assert len(wide) == 2
    assert torch.equal(wide[0], gate)
    assert torch.equal(wide[1], up)

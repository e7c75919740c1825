from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import latent_decode_attention
from ligerzoo.kernels.latent_decode_attention import reference
from tests.covering import long_cases
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import ROUNDED_DTYPES, needs_triton, on_gpu_too
from tests.kernels.oracles import numbers


class Shape(NamedTuple):
    batch: int
    heads: int
    keys: int
    rank: int
    rope: int


SHAPES = on_gpu_too(
    [Shape(1, 4, 1, 16, 4), Shape(2, 5, 300, 20, 8), Shape(1, 33, 130, 48, 16), Shape(3, 2, 70, 512, 64)],
    [Shape(1, 128, 4096, 512, 64), Shape(32, 20, 2000, 512, 64), Shape(2, 64, 33000, 512, 64)],
)


def inputs(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    batch, heads, keys, rank, rope = shape
    sizes = [(batch, heads, rank), (batch, heads, rope), (batch, keys, rank), (batch, keys, rope)]
    return [numbers(*size, dtype=dtype, device=device).detach() for size in sizes]


def options(shape: Shape, **bounds: Any) -> dict[str, Any]:
    return {"scale": (shape.rank + shape.rope) ** -0.5, **bounds}


def assert_same(tensors: list[Tensor], **chosen: Any) -> None:
    actual = latent_decode_attention(*tensors, **chosen, backend="triton")
    expected = reference(*tensors, **chosen)
    truth = reference(*(tensor.double() for tensor in tensors), **chosen)
    assert_as_exact_as(actual, expected, truth)


@needs_triton
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: Shape, dtype: torch.dtype, device: str) -> None:
    assert_same(inputs(shape, dtype, device), **options(shape))


@needs_triton
def test_bounds_and_padding(device: str) -> None:
    shape = Shape(3, 5, 200, 24, 8)
    first, last = torch.tensor([0, 3, 150], device=device), torch.tensor([199, 3, 170], device=device)
    padding_mask = torch.rand(3, 200, device=device) < 0.7
    padding_mask[1] = False  # sees its fallback only
    padding_mask[:, 160] = True
    fallback = torch.tensor([-1, 3, -1], device=device)
    bounds = {"first": first, "last": last, "padding_mask": padding_mask, "fallback": fallback}
    assert_same(inputs(shape, torch.float32, device), **options(shape, **bounds))
    shared = {"first": first[:1], "last": last[:1]}
    assert_same(inputs(shape, torch.float32, device), **options(shape, **shared))


@needs_triton
@pytest.mark.parametrize(
    "view",
    [lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2), lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]]],
    ids=["transposed", "strided"],
)
def test_layouts(view: Callable[[Tensor], Tensor], device: str) -> None:
    shape = Shape(2, 3, 40, 16, 8)
    tensors = inputs(shape, torch.float32, device)
    expected = latent_decode_attention(*tensors, **options(shape), backend="triton")
    assert torch.equal(latent_decode_attention(*map(view, tensors), **options(shape), backend="triton"), expected)


@needs_triton
def test_the_capacity_does_not_change_the_result(device: str) -> None:
    shape = Shape(2, 3, 150, 16, 8)
    q, q_rope, latents, k_rope = inputs(shape, torch.float32, device)
    last = torch.tensor([60], device=device)
    shorter = latent_decode_attention(
        q, q_rope, latents[:, :61], k_rope[:, :61], last=last, **options(shape), backend="triton"
    )
    whole = latent_decode_attention(q, q_rope, latents, k_rope, last=last, **options(shape), backend="triton")
    assert torch.equal(shorter, whole)


def test_fp8_caches_are_converted(device: str) -> None:
    shape = Shape(2, 3, 40, 16, 8)
    q, q_rope, *cached = inputs(shape, torch.float32, device)
    cached = [x.to(torch.float8_e4m3fn) for x in cached]
    got = latent_decode_attention(q, q_rope, *cached, **options(shape))
    expected = reference(q, q_rope, *(x.float() for x in cached), **options(shape))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_it_is_attention_to_expanded_keys_and_values(device: str) -> None:
    """With keys U_h c and values V_h c of each head."""
    torch.manual_seed(0)
    batch, heads, keys, rank, rope, nope, value = 2, 3, 9, 6, 4, 5, 7
    q = torch.randn(batch, heads, nope + rope, dtype=torch.float64, device=device)
    latents, k_rope = (torch.randn(batch, keys, n, dtype=torch.float64, device=device) for n in (rank, rope))
    up, down = (torch.randn(heads, n, rank, dtype=torch.float64, device=device) for n in (nope, value))
    k = torch.cat([torch.einsum("bsr,hnr->bhsn", latents, up), k_rope[:, None].expand(-1, heads, -1, -1)], -1)
    probabilities = (torch.einsum("bhn,bhsn->bhs", q, k) * 0.4).softmax(-1)
    expected = torch.einsum("bhs,bsr,hvr->bhv", probabilities, latents, down)
    q_latent = torch.einsum("bhn,hnr->bhr", q[..., :nope], up)
    sums = latent_decode_attention(q_latent, q[..., nope:], latents, k_rope, scale=0.4, backend="torch")
    torch.testing.assert_close(torch.einsum("bhr,hvr->bhv", sums, down), expected)


COMPILED: dict[str, list[Any]] = {
    "shape": [Shape(1, 128, 4096, 512, 64), Shape(2, 20, 64, 512, 64)], "dtype": [torch.float32, torch.bfloat16]
}  # fmt: skip


@pytest.mark.plain
@pytest.mark.parametrize("case", long_cases(COMPILED), ids=str)
def test_it_compiles(case: dict[str, Any]) -> None:
    shape, dtype = case["shape"], case["dtype"]
    with compiling_for_hopper():
        bounds = {"last": torch.zeros(1, dtype=torch.int64), "padding_mask": torch.ones(1, shape.keys) > 0}
        tensors = [torch.zeros_like(x, dtype=dtype) for x in inputs(shape, torch.float32, "cpu")]
        latent_decode_attention(*tensors, **options(shape, **bounds), backend="triton")


@pytest.mark.parametrize("index, shape", [(0, (2, 3, 17)), (1, (2, 4, 8)), (2, (2, 41, 16)), (3, (1, 40, 8))])
def test_shapes_are_checked(index: int, shape: tuple[int, ...]) -> None:
    tensors = inputs(Shape(2, 3, 40, 16, 8), torch.float32, "cpu")
    tensors[index] = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"^latent_decode_attention: q is .*; expected shapes \(B, N, R\)"):
        latent_decode_attention(*tensors, scale=1.0)

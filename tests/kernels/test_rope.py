import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import rope
from ligerzoo.kernels.rope import reference
from tests.kernels.helpers import (
    DTYPES,
    angles,
    assert_as_exact_as,
    differentiate,
    in_fp64,
    judge,
    numbers,
    on_gpu_too,
    transposed,
)

# (B, T, N, K, D, R)
SHAPES = on_gpu_too(
    [
        (1, 1, 1, 1, 2, 2),
        (2, 2, 4, 4, 8, 8),  # as many keys' heads as queries'
        (1, 5, 6, 2, 16, 16),  # grouped queries
        (1, 3, 3, 1, 14, 14),  # one key's head, odd sizes
        (2, 2, 5, 1, 12, 8),  # the last 4 features pass through
        (1, 3, 1, 3, 7, 4),  # 3 of them, an odd number
        (1, 2, 2, 2, 6, 0),  # all of them
    ],
    [(2, 1000, 32, 8, 128, 128), (1, 300, 128, 8, 128, 128), (2, 500, 16, 16, 96, 24), (1, 127, 7, 1, 256, 256)],
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    b, t, n, k, d, r = shape
    queries, keys = (numbers(b, t, heads, d, dtype=dtype, device=device) for heads in (n, k))
    judge(rope, reference, [queries, keys, *angles(1, t, r // 2, device=device)])


@pytest.mark.parametrize("batch", [1, 3])
def test_each_text_of_a_batch_has_positions_of_its_own(batch: int, device: str) -> None:
    q, k = numbers(batch, 3, 4, 10, device=device), numbers(batch, 3, 2, 10, device=device)
    judge(rope, reference, [q, k, *angles(batch, 3, 4, device=device)])


@pytest.mark.parametrize("q_dtype, k_dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_mixed_dtypes(q_dtype: torch.dtype, k_dtype: torch.dtype, device: str) -> None:
    q, k = numbers(2, 3, 4, 8, dtype=q_dtype, device=device), numbers(2, 3, 2, 8, dtype=k_dtype, device=device)
    judge(rope, reference, [q, k, *angles(1, 3, 4, device=device)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_angles_in_the_dtype_of_the_queries(dtype: torch.dtype, device: str) -> None:
    q, k = numbers(2, 3, 4, 8, dtype=dtype, device=device), numbers(2, 3, 2, 8, dtype=dtype, device=device)
    judge(rope, reference, [q, k, *angles(2, 3, 4, dtype=dtype, device=device)])


def test_angles_of_any_layout(device: str) -> None:
    cos, sin = angles(2, 3, 4, device=device)
    inputs = [numbers(2, 3, 4, 8, device=device), numbers(2, 3, 2, 8, device=device), transposed(cos), sin]
    judge(rope, reference, inputs)


def test_the_reference_is_a_rotation_of_complex_numbers(device: str) -> None:
    q, k = in_fp64([numbers(2, 3, 4, 8, device=device), numbers(2, 3, 2, 8, device=device)])
    angle = torch.randn(2, 3, 4, device=device, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angle), angle)[:, :, None]
    for x, y in zip((q, k), reference(q, k, angle.cos(), angle.sin()), strict=True):
        turned = torch.complex(x[..., :4], x[..., 4:]) * turn
        torch.testing.assert_close(y, torch.cat([turned.real, turned.imag], dim=-1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_kept_and_the_inverse_gives_the_input_back(dtype: torch.dtype, device: str) -> None:
    q, k = (numbers(2, 5, 3, 12, dtype=dtype, device=device) for _ in range(2))
    cos, sin = angles(2, 5, 4, device=device)
    ulp = torch.finfo(dtype).eps
    turned = rope(q, k, cos, sin)
    for x, y, back in zip((q, k), turned, rope(*turned, cos, -sin), strict=True):
        norm, turned_norm = x.float().norm(dim=-1), y.float().norm(dim=-1)
        assert (turned_norm - norm).abs().max() <= 2 * ulp * norm.max()
        assert (back - x).abs().max() <= 4 * ulp * x.abs().max()
        assert torch.equal(y[..., 8:], x[..., 8:])
        assert not torch.equal(y[..., :8], x[..., :8])


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_output_is_used(used: int, device: str) -> None:
    inputs = [numbers(2, 3, 4, 8, device=device), numbers(2, 3, 2, 8, device=device), *angles(1, 3, 4, device=device)]

    def one(*inputs: Tensor) -> Tensor:
        return rope(*inputs)[used]

    def reference_one(*inputs: Tensor) -> Tensor:
        return reference(*inputs)[used]

    upstream = [torch.randn_like(inputs[used])]
    _, gradients = differentiate(one, inputs, upstream)
    _, expected = differentiate(reference_one, inputs, upstream)
    _, truth = differentiate(reference_one, in_fp64(inputs), in_fp64(upstream))
    assert_as_exact_as(gradients[used], expected[used], truth[used])
    unused = gradients[1 - used]
    assert unused is None or not unused.any()


Q, K, ANGLE = (2, 3, 4, 8), (2, 3, 2, 8), (1, 3, 4)


@pytest.mark.parametrize(
    "q, k, cos, sin",
    [
        ((3, 4, 8), K, ANGLE, ANGLE),
        (Q, (2, 3, 8), ANGLE, ANGLE),
        (Q, (2, 2, 2, 8), ANGLE, ANGLE),
        (Q, (1, 3, 2, 8), ANGLE, ANGLE),
        (Q, (2, 3, 2, 6), ANGLE, ANGLE),
        (Q, K, (1, 3, 5), (1, 3, 5)),  # more angles than pairs of features
        (Q, K, (1, 2, 4), (1, 2, 4)),
        (Q, K, (3, 3, 4), (3, 3, 4)),
        (Q, K, ANGLE, (1, 3, 3)),
        (Q, K, (3, 4), (3, 4)),
        (Q, K, (2, 3), (2, 3)),
        (Q, K, (1, 3, 1, 4), (1, 3, 1, 4)),
    ],
)
def test_shapes_that_do_not_fit(
    q: tuple[int, ...], k: tuple[int, ...], cos: tuple[int, ...], sin: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"rope: q .* do not fit"):
        rope(*(torch.ones(shape) for shape in (q, k, cos, sin)))

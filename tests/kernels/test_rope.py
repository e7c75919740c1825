from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm import modeling_glm
from transformers.models.qwen2_vl import modeling_qwen2_vl

from ligerzoo.kernels import rope
from ligerzoo.kernels.rope import reference
from tests.kernels.accuracy import assert_as_exact_as, differentiate, in_fp64, judge
from tests.kernels.layouts import transposed
from tests.kernels.machine import ROUNDED_DTYPES, needs_triton, on_gpu_too
from tests.kernels.op_recorder import Recorder, launch_nothing
from tests.kernels.oracles import angles, numbers

# (B, T, N, K, D, R)
SHAPES = on_gpu_too(
    [
        (1, 1, 1, 1, 2, 2),
        (2, 2, 4, 4, 8, 8),  # as many key heads as query heads
        (1, 5, 6, 2, 16, 16),  # grouped-query attention
        (1, 3, 3, 1, 14, 14),  # multi-query attention, odd sizes
        (2, 2, 5, 1, 12, 8),  # the last 4 features are not rotated
        (1, 3, 1, 3, 7, 4),  # the last 3, an odd number
        (1, 2, 2, 2, 6, 0),  # no feature is rotated
        (1, 2, 96, 12, 6, 6),  # head counts that are not powers of 2
    ],
    [(2, 1000, 32, 8, 128, 128), (1, 300, 128, 8, 128, 128), (2, 500, 16, 16, 96, 24), (1, 127, 7, 1, 256, 256)],
)


both_pairings = pytest.mark.parametrize("interleaved", [False, True])


@both_pairings
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool, device: str) -> None:
    b, t, n, k, d, r = shape
    queries, keys = (numbers(b, t, heads, d, dtype=dtype, device=device) for heads in (n, k))
    inputs = [queries, keys, *angles(1, t, r // 2, device=device)]
    judge(partial(rope, interleaved=interleaved), partial(reference, interleaved=interleaved), inputs)


@pytest.mark.parametrize("batch", [1, 3])
def test_angles_per_sequence(batch: int, device: str) -> None:
    q, k = numbers(batch, 3, 4, 10, device=device), numbers(batch, 3, 2, 10, device=device)
    judge(rope, reference, [q, k, *angles(batch, 3, 4, device=device)])


@pytest.mark.parametrize("q_dtype, k_dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_mixed_dtypes(q_dtype: torch.dtype, k_dtype: torch.dtype, device: str) -> None:
    q, k = numbers(2, 3, 4, 8, dtype=q_dtype, device=device), numbers(2, 3, 2, 8, dtype=k_dtype, device=device)
    judge(rope, reference, [q, k, *angles(1, 3, 4, device=device)])


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
def test_angles_in_the_dtype_of_the_queries(dtype: torch.dtype, device: str) -> None:
    q, k = numbers(2, 3, 4, 8, dtype=dtype, device=device), numbers(2, 3, 2, 8, dtype=dtype, device=device)
    judge(rope, reference, [q, k, *angles(2, 3, 4, dtype=dtype, device=device)])


def test_angles_of_any_layout(device: str) -> None:
    cos, sin = angles(2, 3, 4, device=device)
    inputs = [numbers(2, 3, 4, 8, device=device), numbers(2, 3, 2, 8, device=device), transposed(cos), sin]
    judge(rope, reference, inputs)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "first half of repeated angles": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "one of each pair": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "part of a complex number": lambda t: torch.complex(t.float(), t.float()).real.to(t.dtype),
    "one row for all sequences": lambda t: t[:1].expand_as(t),
    "tokens first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
}
"""Views of angles, with the shape of the argument, that models pass."""


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("batch", [1, 2])
def test_views_of_angles(batch: int, view: str, device: str) -> None:
    cos, sin = (VIEWS[view](t) for t in angles(batch, 3, 4, device=device))
    judge(rope, reference, [numbers(2, 3, 4, 10, device=device), numbers(2, 3, 2, 10, device=device), cos, sin])


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_angles_are_not_copied(view: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "rope")
    cos, sin = (VIEWS[view](t) for t in angles(2, 3, 4, device=device))
    q, k = (torch.ones(2, 3, n, 8, device=device, requires_grad=True) for n in (4, 2))
    with Recorder() as recorder:
        torch.autograd.grad(rope(q, k, cos, sin), [q, k], [torch.ones_like(q), torch.ones_like(k)])
    upstream = outputs = gradients = [2 * 3 * n * 8 * 4 for n in (4, 2)]
    assert sorted(recorder.allocated) == sorted(upstream + outputs + gradients)


def test_the_reference_is_a_complex_rotation(device: str) -> None:
    q, k = in_fp64([numbers(2, 3, 4, 8, device=device), numbers(2, 3, 2, 8, device=device)])
    angle = torch.randn(2, 3, 4, device=device, dtype=torch.float64)
    rotation = torch.polar(torch.ones_like(angle), angle)[:, :, None]
    for x, y in zip((q, k), reference(q, k, angle.cos(), angle.sin()), strict=True):
        rotated = torch.complex(x[..., :4], x[..., 4:]) * rotation
        torch.testing.assert_close(y, torch.cat([rotated.real, rotated.imag], dim=-1), rtol=1e-13, atol=1e-13)


def test_interleaved_is_half_split_of_permuted_features(device: str) -> None:
    q, k, (cos, sin) = torch.randn(2, 3, 4, 10), torch.randn(2, 3, 2, 10), angles(1, 3, 4)
    q, k, cos, sin = (t.to(device) for t in (q, k, cos, sin))
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9]
    half_split = rope(q[..., order], k[..., order], cos, sin)
    for x, y in zip(rope(q, k, cos, sin, interleaved=True), half_split, strict=True):
        torch.testing.assert_close(x[..., order], y, rtol=0, atol=1e-6)


def assert_matches_transformers(theirs: Any, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor], **how: Any) -> None:
    """Compares with `theirs`, which takes each angle twice: once per feature of a pair."""
    twice = [torch.cat([t, t], dim=-1) for t in angles]
    for actual, expected, truth in zip(
        rope(q, k, *angles, **how), theirs(q, k, *twice), theirs(*in_fp64([q, k, *twice])), strict=True
    ):
        assert_as_exact_as(actual.detach(), expected.detach(), truth.detach())


@pytest.mark.parametrize("angle_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 13])
def test_interleaved_matches_glm(head_dim: int, angle_dtype: torch.dtype, device: str) -> None:
    q, k = (numbers(2, 5, heads, head_dim, dtype=angle_dtype, device=device) for heads in (6, 2))
    theirs = partial(modeling_glm.apply_rotary_pos_emb, unsqueeze_dim=2)
    assert_matches_transformers(theirs, q, k, angles(2, 5, 4, dtype=angle_dtype, device=device), interleaved=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_concatenated_height_and_width_angles_match_qwen2_vl(dtype: torch.dtype, device: str) -> None:
    height, width = torch.meshgrid(torch.arange(3.0, device=device), torch.arange(5.0, device=device), indexing="ij")
    frequencies = torch.tensor([1.0, 0.3], device=device)
    angle = torch.cat([axis.flatten()[:, None] * frequencies for axis in (height, width)], dim=-1)[None]
    q, k = (numbers(1, 15, 3, 8, dtype=dtype, device=device) for _ in range(2))
    assert_matches_transformers(modeling_qwen2_vl.apply_rotary_pos_emb_vision, q, k, (angle.cos(), angle.sin()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp32_angles_round_once(dtype: torch.dtype) -> None:
    q, k, (cos, sin) = numbers(1, 64, 3, 8, dtype=dtype), numbers(1, 64, 3, 8, dtype=dtype), angles(1, 64, 4)
    exact = reference(q.double(), k.double(), cos.double(), sin.double())
    for y, truth in zip(reference(q, k, cos, sin), exact, strict=True):
        assert ((y.double() - truth).abs() / truth.abs().clamp(min=0.01)).max() <= 0.501 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
def test_rotation_preserves_norms_and_is_invertible(dtype: torch.dtype, device: str) -> None:
    q, k = (numbers(2, 5, 3, 12, dtype=dtype, device=device) for _ in range(2))
    cos, sin = angles(2, 5, 4, device=device)
    ulp = torch.finfo(dtype).eps
    rotated = rope(q, k, cos, sin)
    for x, y, back in zip((q, k), rotated, rope(*rotated, cos, -sin), strict=True):
        norm, rotated_norm = x.float().norm(dim=-1), y.float().norm(dim=-1)
        assert (rotated_norm - norm).abs().max() <= 2 * ulp * norm.max()
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


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_allocate_nothing(frozen: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output for a frozen input does not require grad either."""
    launch_nothing(monkeypatch, "rope")
    heads = (4, 2)
    inputs = [torch.ones(2, 3, n, 8, device=device, requires_grad=i != frozen) for i, n in enumerate(heads)]
    outputs = rope(*inputs, *angles(1, 3, 4, device=device))
    assert [y.requires_grad for y in outputs] == [i != frozen for i in range(2)]
    upstream = torch.ones_like(outputs[1 - frozen])
    with Recorder() as recorder:
        torch.autograd.grad(outputs[1 - frozen], inputs[1 - frozen], upstream)
    assert recorder.allocated == [2 * 3 * heads[1 - frozen] * 8 * 4]


def test_unused_outputs_allocate_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "rope")
    q, k = (torch.ones(2, 3, n, 8, device=device, requires_grad=True) for n in (4, 2))
    rotated, _ = rope(q, k, *angles(1, 3, 4, device=device))
    upstream = torch.ones_like(rotated)
    with Recorder() as recorder:
        gradients = torch.autograd.grad(rotated, [q, k], upstream, allow_unused=True)
    assert recorder.allocated == [2 * 3 * 4 * 8 * 4]
    assert gradients[1] is None


@needs_triton
def test_outputs_whose_consumer_returns_no_gradient(device: str) -> None:
    """The consumer of both outputs returns None as their gradients."""

    class WithoutGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, other: Tensor) -> Tensor:
            return q.sum() + k.sum() + other

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
            return None, None, upstream

    q, k, other = numbers(2, 3, 4, 8, device=device), numbers(2, 3, 2, 8, device=device), numbers(device=device)
    WithoutGradient.apply(*rope(q, k, *angles(1, 3, 4, device=device)), other).backward()
    assert q.grad is None
    assert k.grad is None
    assert other.grad == 1


@needs_triton
@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_and_compiled(frozen: int, device: str) -> None:
    torch._dynamo.reset()
    inputs = [numbers(2, 3, n, 8, device=device).detach() for n in (4, 2)]
    inputs[1 - frozen].requires_grad_()
    rotation = angles(1, 3, 4, device=device)

    def gradient(function: Any) -> Tensor:
        q, k = function(*inputs, *rotation)
        score = (q.mean(2) * k.mean(2)).square().sum()
        return torch.autograd.grad(score, inputs[1 - frozen])[0]

    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled), gradient(rope))


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
def test_mismatched_shapes(q: tuple[int, ...], k: tuple[int, ...], cos: tuple[int, ...], sin: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"rope: q is .*; expected shapes"):
        rope(*(torch.ones(shape) for shape in (q, k, cos, sin)))

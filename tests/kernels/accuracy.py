"""Accuracy checks: the error of outputs and gradients against fp64, compared with the error of plain torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import INTERPRETING


def assert_as_exact_as(
    actual: Tensor | None, reference: Tensor | None, truth: Tensor | None, ulps: float = 2.0
) -> None:
    """Asserts that the error of `actual` is at most twice that of `reference`, plus `ulps` of the largest element.

    Errors are against `truth`. All three have the same shape; `actual` and `reference` have the same dtype and device.
    Where `reference` is not finite, `actual` must be the same infinity or NaN.
    """
    if reference is None or actual is None or truth is None:
        assert reference is None
        assert actual is None
        return
    assert (actual.shape, actual.dtype, actual.device) == (reference.shape, reference.dtype, reference.device)
    finite = reference.isfinite()
    torch.testing.assert_close(actual[~finite], reference[~finite], rtol=0, atol=0, equal_nan=True)
    if not finite.any():
        return
    truth = truth[finite].double()
    error, reference_error = ((t[finite].double() - truth).abs().max().item() for t in (actual, reference))
    floor = ulps * torch.finfo(reference.dtype).eps * truth.abs().max().item()
    assert error <= 2 * reference_error + floor, f"error {error:.3g}; error of the reference {reference_error:.3g}"


def judge_draws(judge_draw: Callable[[int], None], seed: int, repeats: int = 4) -> None:
    """Checks one random draw of inputs. If it fails, all of `repeats` further draws must pass.

    If a result has few large elements, plain torch's error is sometimes near 0 by chance. A defect fails repeatedly.

    Args:
        judge_draw: takes a seed, and raises AssertionError if the results for inputs drawn with it are inaccurate.
        seed: seed of the first draw.
        repeats: number of further draws.
    """
    try:
        judge_draw(seed)
    except AssertionError:
        for repeat in range(1, 1 + repeats):
            judge_draw(seed + repeat)


def assert_as_good_as_a_plain_product(actual: Tensor, a: Tensor, b: Tensor) -> None:
    """Asserts that the error of `actual` against a @ b is at most 1 % above that of plain torch."""
    truth = a.double() @ b.double()
    error, plain = ((t.double() - truth).norm().item() for t in (actual, a @ b))
    assert error <= 1.01 * plain


def assert_equal(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Asserts bitwise equality (NaN equals NaN), and the same Nones."""
    assert [t is None for t in actual] == [t is None for t in expected]
    for a, e in zip(actual, expected, strict=True):
        if a is not None:
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def differentiate(
    function: Callable[..., Any], inputs: Sequence[Tensor], upstream: Sequence[Tensor], is_repeatable: bool = True
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Returns the outputs, and the gradient of each input (None if it does not require one).

    Asserts that neither pass writes to inputs, outputs or upstream gradients, and that a second backward pass returns
    the same gradients, so that saved tensors are not written to either. (The slow interpreter skips the second pass,
    and so do torch's attention kernels with `is_repeatable=False`, which add up gradients in any order.)
    """
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    outputs = as_tuple(function(*leaves))
    trainable = [leaf for leaf in leaves if leaf.requires_grad]
    pairs = [(output, dy) for output, dy in zip(outputs, upstream, strict=True) if output.requires_grad]
    differentiable, upstreams = zip(*pairs, strict=True)
    read_only = [*inputs, *upstream, *outputs]
    before = [t.detach().clone() for t in read_only]
    first, *others = (
        torch.autograd.grad(differentiable, trainable, upstreams, retain_graph=True, allow_unused=True)
        for _ in range(2 if is_repeatable and not INTERPRETING else 1)
    )
    assert_equal([t.detach() for t in read_only], before)
    for second in others:
        assert_equal(second, first)
    gradients = iter(first)
    return outputs, tuple(next(gradients) if leaf.requires_grad else None for leaf in leaves)


def in_fp64(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t.detach() for t in tensors
    ]


def judge(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    layout: Callable[[Tensor], Tensor] = torch.clone,
    ulps: float = 2.0,
    is_repeatable: bool = True,
) -> None:
    """Checks outputs and gradients with `assert_as_exact_as`, for random upstream gradients in the given layout.

    The error of one number or two is luck. So if an input that needs a gradient has so few elements, draws of upstream
    gradients with 16 of them are checked together. See `differentiate` for `is_repeatable`.
    """
    before = [t.detach().clone() for t in inputs]
    draws = []
    few = [t.numel() for t in inputs if t.requires_grad and 1 <= t.numel() <= 2]
    for _draw in range(16 // min(few, default=16)):
        upstream = [layout(torch.randn_like(output)) for output in as_tuple(reference(*inputs))]
        actual = differentiate(function, inputs, upstream, is_repeatable)
        assert_equal([t.detach() for t in inputs], before)
        expected = differentiate(reference, inputs, upstream)
        truth = differentiate(reference, in_fp64(inputs), in_fp64(upstream))
        draws.append((actual, expected, truth))
    for case in zip(*(outputs for outputs, _ in draws[0]), strict=True):
        assert_as_exact_as(*case, ulps)
    for case in zip(*(stacked([draw[i][1] for draw in draws]) for i in range(3)), strict=True):
        assert_as_exact_as(*case, ulps)


def stacked(draws: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Returns the results of all draws as one tensor each."""
    return [None if ts[0] is None else torch.stack(ts) for ts in zip(*draws, strict=True)]

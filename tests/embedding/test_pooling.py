"""Pooling of packed rows against loops over texts."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.layers import Dense, Normalize, Pooling
from ligerzoo.layers.pooling import POOLING_MODES


def pooled(x: Tensor, mode: str, skipped: int) -> Tensor:
    """Pools one text, (T, H) -> (H,)."""
    if len(x) == 0:
        return x.new_zeros(x.shape[1])
    rest, weights = x[skipped:], torch.arange(1.0, len(x) + 1, device=x.device)[skipped:, None]
    match mode:
        case "cls":
            return rest[0] if len(rest) else x[0]
        case "lasttoken":
            return x[-1]
        case "max":
            return rest.amax(0)
        case "mean":
            return rest.mean(0)
        case "mean_sqrt_len_tokens":
            return rest.sum(0) / len(rest) ** 0.5
    return (rest * weights).sum(0) / weights.sum()


@pytest.mark.parametrize("include_prompt", [True, False])
def test_each_mode_is_that_of_each_text_alone(include_prompt: bool, device: str) -> None:
    x, offsets = torch.randn(14, 5, device=device, requires_grad=True), torch.tensor([0, 4, 4, 9, 12], device=device)
    pooling = Pooling(POOLING_MODES, include_prompt=include_prompt)
    got, skipped = pooling(x, offsets, 2), 0 if include_prompt else 2
    texts = [x[start:end] for start, end in pairwise(offsets.tolist())]
    want = torch.stack([torch.cat([pooled(text, mode, skipped) for mode in POOLING_MODES]) for text in texts])
    torch.testing.assert_close(got, want)
    upstream = torch.randn_like(want)
    gradients = [torch.autograd.grad((y * upstream).sum(), x, retain_graph=True)[0] for y in (got, want)]
    torch.testing.assert_close(*gradients)
    assert torch.equal(gradients[0][12:], torch.zeros(2, 5, device=device))  # padding after the last text


def test_a_text_has_the_same_bits_whatever_is_around_it(device: str) -> None:
    x = torch.randn(40, 8, device=device).bfloat16()
    pooling = Pooling(["mean", "weightedmean", "max"])
    packed = pooling(x, torch.tensor([0, 7, 33, 40], device=device))
    alone = pooling(x[7:33], torch.tensor([0, 26], device=device))
    assert packed.dtype == torch.bfloat16
    assert torch.equal(packed[1:2], alone)
    torch.testing.assert_close(packed[1, :8], x[7:33].float().mean(0).bfloat16(), rtol=2**-7, atol=0)  # an ulp


def test_modules_after_pooling() -> None:
    x = torch.randn(3, 6)
    dense = Dense(6, 4, activation="gelu", residual=True)
    want = torch.nn.functional.gelu(dense.linear(x)) + dense.residual(x)
    assert torch.equal(dense(x), want)
    assert torch.equal(Dense(6, 6, activation="identity", residual=True)(x).isfinite().all(), torch.tensor(True))
    torch.testing.assert_close(Normalize()(x).norm(dim=-1), torch.ones(3))


@pytest.mark.parametrize("modes", [[], ["average"], ["mean", 3]])
def test_unknown_modes_are_refused(modes: list[str]) -> None:
    with pytest.raises(LigerzooError, match=r"Pooling: modes=.*; expected one of 'cls'"):
        Pooling(modes)

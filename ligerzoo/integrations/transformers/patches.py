"""Patch embeddings whose weight belongs to a convolution, as in transformers, so that adapters have the same names."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers import PatchEmbedding


class ConvolutionalPatchEmbedding(PatchEmbedding):
    """Patch embedding with a 3-D convolution, which an adapter may replace.

    Attributes:
        proj: the convolution. Its stride equals its kernel size.
        patch: shape of a patch: channels, frames, height, width.
    """

    proj: nn.Module
    patch: tuple[int, ...]

    def forward(self, patches: Tensor) -> Tensor:
        """patches: (N, C * F * P * P), any floating dtype -> (N, E)."""
        weight, bias = self.proj.weight, self.proj.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        patches = patches.to(weight.dtype)
        if type(self.proj) is nn.Conv3d and "forward" not in vars(self.proj):
            return F.linear(patches, weight.flatten(1), bias)  # the same product; faster than a convolution
        return self.proj(patches.view(-1, *self.patch)).flatten(1)

    def extra_repr(self) -> str:
        return ""


def separate_convolution(module: nn.Module) -> None:
    """Moves the weight and the bias of a patch embedding of images and videos to a convolution, in place."""
    assert isinstance(module, PatchEmbedding)
    weight, bias = (module._parameters.pop(name, None) for name in ("weight", "bias"))
    assert isinstance(weight, Tensor)
    features, channels, *kernel = weight.shape
    size: Any = tuple(kernel)
    with torch.device("meta"):
        convolution = nn.Conv3d(channels, features, size, size, bias=bias is not None)
    convolution.weight, convolution.bias = weight, bias
    module.__class__ = ConvolutionalPatchEmbedding
    module.proj, module.patch = convolution, tuple(weight.shape[1:])  # type: ignore[assignment]

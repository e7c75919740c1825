"""Layers with the modules that transformers has: fused projections (Phi-3, GLM), and a convolution for patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.convert.layout import Fused
from ligerzoo.layers import Attention, Context, GatedMLP, PatchEmbedding
from ligerzoo.layers.projection import check_features, gate_and_project


class FusedAttention(Attention):
    """Attention with one projection to queries, keys and values.

    Attributes:
        qkv_proj: the projection; the rows of the queries come first, then those of the keys.
        sizes: numbers of their rows.
    """

    qkv_proj: nn.Module
    sizes: list[int]

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.sizes[1] // self.head_dim

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, H) -> queries, keys and values, (B, T, heads * D) each."""
        check_features(self, x, self.hidden_size)
        return self.qkv_proj(x).split(self.sizes, -1)


class FusedGatedMLP(GatedMLP):
    """Gated MLP with one projection to gate and up features.

    Attributes:
        gate_up_proj: the projection; the rows of the gate come first.
        sizes: numbers of their rows.
    """

    gate_up_proj: nn.Module
    sizes: list[int]

    def forward(self, x: Tensor, _: Context | None = None) -> Tensor:
        """x: (..., H) -> (..., H)."""
        check_features(self, x, self.hidden_size)
        gate, up = self.gate_up_proj(x).split(self.sizes, -1)
        return gate_and_project(gate, up, self.down_proj, self.activation, self.backend)


_CLASSES: Mapping[type, tuple[str, str, type]] = {
    Attention: ("q_proj", "qkv_proj", FusedAttention),
    GatedMLP: ("gate_proj", "gate_up_proj", FusedGatedMLP),
}
"""First projection, fused projection and class with it, by class without it."""

FUSED_NAMES = frozenset(name for _, name, _ in _CLASSES.values())
"""Names of fused projections."""


def fused_path(rule: Fused) -> str:
    """Returns the dotted path of the fused projection, with the name of our class's attribute."""
    parent_path, _, name = rule.paths[0].rpartition(".")
    fused_name = next(fused_name for first, fused_name, _ in _CLASSES.values() if first == name)
    return f"{parent_path}.{fused_name}"


def fuse_projections(model: nn.Module, rule: Fused) -> None:
    """Replaces projections by the fused ones that checkpoints store, in place.

    The weights move to one tensor. The parameters that they came from become views of it.

    Args:
        model: the model.
        rule: which projections to fuse.
    """
    parent_path = rule.paths[0].rpartition(".")[0]
    for name, module in list(model.named_modules()):
        if f".{name}".endswith(f".{parent_path}") and type(module) in _CLASSES:
            _, fused_name, fused_class = _CLASSES[type(module)]
            parts: list[Any] = [module._modules.pop(path.rpartition(".")[2]) for path in rule.paths]
            linear, sizes = _fused_linear(parts)
            module.__class__ = fused_class
            module.sizes = sizes
            module.add_module(fused_name, linear)


def _fused_linear(parts: list[nn.Linear]) -> tuple[nn.Linear, list[int]]:
    sizes = [part.out_features for part in parts]
    with torch.device("meta"):
        linear = nn.Linear(parts[0].in_features, sum(sizes), bias=parts[0].bias is not None)
    for name in [name for name, _ in linear.named_parameters()]:
        pieces = [getattr(part, name) for part in parts]
        whole = nn.Parameter(torch.cat([piece.detach() for piece in pieces]), requires_grad=pieces[0].requires_grad)
        for piece, view in zip(pieces, torch.split(whole.detach(), sizes), strict=True):
            piece.data = view
        setattr(linear, name, whole)
    return linear, sizes


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
        weight, bias = self.proj.get_parameter("weight"), self.proj._parameters["bias"]
        patches = patches.to(weight.dtype)
        if type(self.proj) is nn.Conv3d and "forward" not in vars(self.proj):
            return F.linear(patches, weight.flatten(1), bias)  # the same product; faster than a convolution
        return self.proj(patches.view(-1, *self.patch)).flatten(1)

    def extra_repr(self) -> str:
        return ""


def separate_convolution(module: nn.Module) -> None:
    """Moves the weight and the bias of a patch embedding of images and videos to a convolution, in place."""
    assert isinstance(module, PatchEmbedding)
    weight, bias = module._parameters.pop("weight"), module._parameters.pop("bias", None)
    assert weight is not None
    features, channels, frames, height, width = weight.shape
    size = frames, height, width
    with torch.device("meta"):
        convolution = nn.Conv3d(channels, features, size, size, bias=bias is not None)
    convolution.weight, convolution.bias = weight, bias
    module.__class__ = ConvolutionalPatchEmbedding
    module.proj, module.patch = convolution, tuple(weight.shape[1:])  # type: ignore[assignment]

"""Clipping gradients by their global norm, without a host sync."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.checks import POSITIVE, check_optional
from ligerzoo.train.optimizers.device_optimizer import local

_EPS = 1e-6


@torch.no_grad()
def clip_grad_norm(parameters: nn.Module | Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scales all gradients so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    The norm is the root of the sum of squares of all gradients, in fp32, each tied parameter once. Gradients of sharded
    parameters (DTensors, on any meshes) are summed over their shards, with one all-reduce per mesh dimension. If a
    gradient is infinite or NaN, so is the norm, and all gradients become NaN or 0: see `SkipNonFinite`.

    Args:
        parameters: a model, or parameters.
        max_norm: positive, or None to measure the norm only.

    Returns:
        The norm before clipping, 0-d fp32 on the device of the first gradient, the same in all processes. Reading its
        value is a host sync.

    Raises:
        ValueError: no parameter has a gradient, a gradient is sparse or a partial sum, or `max_norm` is not positive.
    """
    check_optional("clip_grad_norm", POSITIVE, max_norm=None if max_norm == math.inf else max_norm)
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    gradients = [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]
    if not gradients:
        raise ValueError(
            "clip_grad_norm: no parameter has a gradient; expected a call between backward and zero_grad. An optimizer "
            "in backward frees gradients, so their global norm cannot be clipped"
        )
    if any(gradient.is_sparse for gradient in gradients):
        raise ValueError("clip_grad_norm: a gradient is sparse; expected nn.Embedding(sparse=False)")
    norm = _global_norm(gradients)
    if max_norm is not None and max_norm != math.inf:
        factor = (max_norm / (norm + _EPS)).clamp(max=1.0)
        for device, shards in _by_device(gradients).items():
            torch._foreach_mul_(shards, factor.to(device))
    return norm


def _by_device(gradients: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Returns this process's shards of gradients, without empty ones."""
    shards: dict[torch.device, list[Tensor]] = {}
    for gradient in map(local, gradients):
        if gradient.numel():
            shards.setdefault(gradient.device, []).append(gradient)
    return shards


def _global_norm(gradients: list[Tensor]) -> Tensor:
    device = local(gradients[0]).device
    sharded: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        sharded.setdefault(_sharding(gradient), []).append(gradient)
    squares = []
    for (mesh, dimensions), members in sharded.items():
        norms = [
            torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float32)).to(device)
            for shards in _by_device(members).values()
        ]
        square = torch.cat(norms).square().sum() if norms else torch.zeros((), device=device)
        for dimension in dimensions:
            torch.distributed.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _sharding(gradient: Tensor) -> tuple[Any, tuple[int, ...]]:
    """Returns the mesh of a DTensor and the mesh dimensions that it is sharded over; (None, ()) for plain tensors."""
    if local(gradient) is gradient:
        return None, ()
    sharded: Any = gradient
    if any(placement.is_partial() for placement in sharded.placements):
        raise ValueError(
            f"clip_grad_norm: a gradient has placements {sharded.placements}, a partial sum; expected gradients that "
            "are sharded or replicated"
        )
    dimensions = [i for i, placement in enumerate(sharded.placements) if not placement.is_replicate()]
    return sharded.device_mesh, tuple(dimensions)

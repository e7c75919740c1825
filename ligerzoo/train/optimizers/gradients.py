"""Clipping gradients by their global norm, and skipping updates that are infinite or NaN, without a host sync."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.checks import POSITIVE_OR_NONE, check
from ligerzoo.dtensors import is_dtensor, local
from ligerzoo.errors import LigerzooError
from ligerzoo.tensor_checks import require_tensor

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
    check("clip_grad_norm", POSITIVE_OR_NONE, max_norm=None if max_norm == math.inf else max_norm)
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    gradients = [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]
    if not gradients:
        what, expected = "no parameter has a gradient", "a call between backward and zero_grad"
        remedy = "An optimizer in backward frees gradients, so their global norm cannot be clipped."
        raise LigerzooError(what, where="clip_grad_norm", expected=expected, remedy=remedy)
    if any(gradient.is_sparse for gradient in gradients):
        expected = "nn.Embedding(sparse=False)"
        raise LigerzooError("a gradient is sparse", where="clip_grad_norm", expected=expected)
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
    if not is_dtensor(gradient):
        return None, ()
    if any(placement.is_partial() for placement in gradient.placements):
        what, expected = (
            f"a gradient has placements {gradient.placements}, a partial sum",
            "a sharded or replicated one",
        )
        raise LigerzooError(what, where="clip_grad_norm", expected=expected)
    dimensions = [i for i, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return gradient.device_mesh, tuple(dimensions)


class SkipNonFinite:
    """Skips the next step of an optimizer if a norm of the gradients is infinite or NaN, and counts these steps.

        skip = SkipNonFinite(optimizer)
        ...
        norm = clip_grad_norm(model, 1.0)
        skip(norm)
        optimizer.step()
        ...
        skip.count      # a tensor: reading its value is a host sync, so log it now and then

    One NaN in a gradient would else make all weights NaN. A skipped step changes neither weights nor moments nor the
    number of updates. No host sync, except with the low-bit optimizers of torchao.

    Args:
        optimizer: one of `make_optimizer`, or one of torch with `fused=True`.

    Attributes:
        count: 0-d int64, the number of skipped steps.

    Raises:
        ValueError: the optimizer cannot skip steps on the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not (hasattr(optimizer, "found_inf") or getattr(optimizer, "_step_supports_amp_scaling", False)):
            what = f"{type(optimizer).__name__} cannot skip steps on the device"
            expected = "an optimizer of make_optimizer, or one of torch with fused=True"
            raise LigerzooError(what, where="SkipNonFinite", expected=expected)
        self._optimizer: Any = optimizer
        self.count = torch.zeros((), dtype=torch.int64, device=optimizer.param_groups[0]["params"][0].device)

    def __call__(self, norm: Tensor) -> None:
        """Sets whether the next steps are skipped: if `norm`, a 0-d tensor, is infinite or NaN."""
        require_tensor("SkipNonFinite", "norm", norm, "the 0-d tensor that clip_grad_norm returns")
        is_skipped = ~norm.detach().isfinite()
        self._optimizer.found_inf = is_skipped.float()
        self.count += is_skipped

    def state_dict(self) -> dict[str, Tensor]:
        """Returns a copy of the count."""
        return {"count": self.count.clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Loads what `state_dict` has returned."""
        self.count.copy_(state_dict["count"])

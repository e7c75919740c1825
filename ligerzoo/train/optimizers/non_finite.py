"""Skipping updates whose gradients are infinite or NaN, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligerzoo.tensor_checks import require_tensor


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
    number of updates. There is no host sync, except with the low-bit optimizers of torchao.

    Args:
        optimizer: one of `make_optimizer`, or one of torch with `fused=True`.

    Attributes:
        count: 0-d int64, the number of skipped steps.

    Raises:
        ValueError: the optimizer cannot skip steps on the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not (hasattr(optimizer, "found_inf") or getattr(optimizer, "_step_supports_amp_scaling", False)):
            raise ValueError(
                f"SkipNonFinite: {type(optimizer).__name__} cannot skip steps on the device; expected an optimizer of "
                "make_optimizer, or one of torch with fused=True"
            )
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

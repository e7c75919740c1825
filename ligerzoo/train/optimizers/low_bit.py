"""AdamW with moments in 8 or 4 bits, by torchao."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

StateFormat = Literal["8bit", "4bit"]

_CLASSES: dict[StateFormat, str] = {"8bit": "AdamW8bit", "4bit": "AdamW4bit"}


def low_bit_adamw(
    params: ParamsT,
    state_format: StateFormat,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    stochastic_rounding: bool = False,
) -> torch.optim.Optimizer:
    """Returns AdamW of torchao, whose moments are quantized in blocks (Dettmers et al. 2022; 4 bits: Li et al. 2023).

    Moments take 1 byte per weight each (4 bits: half a byte) instead of 4, for parameters of at least 4096 elements
    whose number is a multiple of the block size; others keep the dtype of the parameter. torchao compiles one kernel
    per shape in the first step. lr is a tensor, which `set_lr` fills.

    Stochastic rounding takes its random bits from torch's global generator: continuing a run bit for bit needs its
    state. A device-side skip (`SkipNonFinite`) needs a host sync in each step.

    Args:
        params: parameters, named parameters or groups of either.
        state_format: "8bit" or "4bit".
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        stochastic_rounding: round bf16 weights stochastically.

    Raises:
        ImportError: torchao is not installed.
    """
    optimizer: torch.optim.Optimizer = _skipping_class(_CLASSES[state_format])(
        params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bf16_stochastic_round=stochastic_rounding
    )
    return optimizer


adamw_8bit = partial(low_bit_adamw, state_format="8bit")
adamw_4bit = partial(low_bit_adamw, state_format="4bit")


@cache
def _skipping_class(name: str) -> Any:
    """Returns a subclass of torchao's class that honours `found_inf`."""
    try:
        import torchao.optim
    except ImportError as error:
        raise ImportError(f"torchao is not installed, whose {name} is used; pip install 'ligerzoo[low-bit]'") from error
    base: Any = getattr(torchao.optim, name)

    class SkippingOptimizer(base):  # type: ignore[misc]
        found_inf: Tensor | None = None

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            if self.found_inf is not None and self.found_inf.item() != 0:
                return None if closure is None else closure()
            return super().step(closure)

    SkippingOptimizer.__name__ = SkippingOptimizer.__qualname__ = name
    return SkippingOptimizer

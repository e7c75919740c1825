"""AdamW whose moments are stored in fp8."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ligerzoo.dtensors import local
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels import adamw_update_fp8
from ligerzoo.kernels.adamw_fp8 import scale_count
from ligerzoo.kernels.fp8 import FP8
from ligerzoo.train.optimizers.device_optimizer import DeviceOptimizer, ParamUpdate
from ligerzoo.train.optimizers.groups import Group
from ligerzoo.train.optimizers.stochastic_adamw import (
    AdamWNumbers,
    adamw_defaults,
    adamw_state,
    update_adamw,
)

FEWEST_ELEMENTS = 4096
"""Smaller parameters, such as norms and biases, have moments in fp32."""


class Fp8AdamW(DeviceOptimizer):
    """AdamW (Loshchilov & Hutter 2019) with moments in fp8, in blocks of 256 elements, in one kernel per parameter.

    Moments take 2 bytes per weight, a quarter of bf16 weights with moments in fp32. They are rounded stochastically, as
    are bf16 weights: see `kernels.adamw_fp8`. A step never waits for the device.

    Args:
        params: parameters, named parameters or groups of either.
        lr: learning rate; a number or a 0-d tensor.
        betas: decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay; see `parameter_groups`.
        stochastic_rounding: round bf16 weights stochastically; False rounds them to the nearest.
        seed: of the random bits, from 0 to 2^30.

    Raises:
        ValueError: a number is out of range, or a parameter is neither fp32 nor bf16, is on the meta device or is
            sharded.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        numbers = AdamWNumbers(lr, betas, eps, weight_decay)
        super().__init__(params, adamw_defaults("Fp8AdamW", numbers, torch.float32, seed, stochastic_rounding))

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, as in `torch.optim.Optimizer`.

        Raises:
            ValueError: see the class.
        """
        super().add_param_group(param_group)
        if any(local(parameter) is not parameter for parameter in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            expected = "whole parameters, or StochasticAdamW"
            raise LigerzooError("a parameter is sharded", where="Fp8AdamW", expected=expected)

    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        if parameter.numel() < FEWEST_ELEMENTS:
            return adamw_state(parameter, group)
        state = {}
        for name in ("exp_avg", "exp_avg_sq_root"):
            state[name] = torch.zeros_like(parameter, dtype=FP8, memory_format=torch.contiguous_format)
            state[f"{name}_scales"] = parameter.new_ones(scale_count(parameter), dtype=torch.float32)
        return state

    def update_group(self, group: Group, updates: list[ParamUpdate], lr: Tensor, skip: Tensor | None) -> None:
        for update in updates:
            parameter, gradient, state, key = update
            if "exp_avg_sq" in state:
                update_adamw(group, [update], lr, skip)
                continue
            adamw_update_fp8(
                parameter,
                gradient,
                state["exp_avg"],
                state["exp_avg_scales"],
                state["exp_avg_sq_root"],
                state["exp_avg_sq_root_scales"],
                state["step"],
                lr,
                key=key,
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                stochastic=group["stochastic_rounding"],
                skip=skip,
            )

"""AdamW for bf16 weights, with stochastic rounding."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ligerzoo.checks import FLAG, NOT_NEGATIVE, check, integer, is_list
from ligerzoo.dtensors import local
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels import adamw_update
from ligerzoo.kernels.adamw import BETA
from ligerzoo.kernels.cuda_graph import side_by_side
from ligerzoo.train.optimizers.device_optimizer import DTYPES, DeviceOptimizer, ParamUpdate, first_group
from ligerzoo.train.optimizers.groups import Group

SEED = integer(0, 2**30)


class StochasticAdamW(DeviceOptimizer):
    """AdamW (Loshchilov & Hutter 2019) with fp32 arithmetic, and stochastic rounding of what is stored in bf16.

    bf16 weights have 8 significant bits. Rounded to the nearest, updates below 2^-9 of a weight are lost, and lr=1e-5
    does not change weights above 0.005. Rounded stochastically, every update counts in expectation, at 2 bytes per
    weight and 4 of state instead of 4 and 8, without a copy of the weights in fp32 (Zamirai et al. 2020). bf16 moments
    are rounded stochastically too: rounded to the nearest, the second would never decrease with beta2 = 0.999.

    fp32 parameters, such as norms, are updated as by `torch.optim.AdamW`.

    Args:
        params: parameters, named parameters or groups of either.
        lr: learning rate; a number or a 0-d tensor.
        betas: decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay; see `parameter_groups`.
        state_dtype: dtype of the moments, fp32 or bf16. None for the dtype of each parameter.
        seed: of the random bits, from 0 to 2^30.

    Raises:
        ValueError: a number is out of range, or a parameter is neither fp32 nor bf16 or is on the meta device.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        numbers = AdamWNumbers(lr, betas, eps, weight_decay)
        super().__init__(params, adamw_defaults("StochasticAdamW", numbers, state_dtype, seed))

    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        return adamw_state(parameter, group)

    def update_group(self, group: Group, updates: list[ParamUpdate], lr: Tensor, skip: Tensor | None) -> None:
        update_adamw(group, updates, lr, skip)


def adamw(
    params: ParamsT,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    stochastic_rounding: bool = False,
    state_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Returns torch's fused AdamW, or `StochasticAdamW`; see `make_optimizer`."""
    arguments: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if stochastic_rounding:
        return StochasticAdamW(params, **arguments, state_dtype=state_dtype, seed=seed)
    if state_dtype is not None or seed:
        what = f'state_dtype={state_dtype}, seed={seed} with "adamw"'
        raise LigerzooError(what, where="make_optimizer", expected="stochastic_rounding=True")
    return torch.optim.AdamW(params, **arguments, fused=True)


class AdamWNumbers(NamedTuple):
    """The numbers that AdamW takes."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def check(self, name: str) -> None:
        """Raises unless they are in range."""
        numbers = {"eps": self.eps, "weight_decay": self.weight_decay}
        check(name, NOT_NEGATIVE, **numbers if isinstance(self.lr, Tensor) else {**numbers, "lr": self.lr})
        if not (is_list(self.betas) and len(self.betas) == 2):
            expected = "two numbers from 0 to 1, not 1"
            raise LigerzooError(where=f"{name}: betas", got=repr(self.betas), expected=expected)
        check(name, BETA, **{"betas[0]": self.betas[0], "betas[1]": self.betas[1]})


def adamw_defaults(
    name: str,
    numbers: AdamWNumbers,
    state_dtype: torch.dtype | None = None,
    seed: int = 0,
    stochastic_rounding: bool = True,
) -> Group:
    """Returns the defaults of groups that AdamW updates, after checking them."""
    numbers.check(name)
    check(name, FLAG, stochastic_rounding=stochastic_rounding)
    if state_dtype not in (None, *DTYPES):
        expected = "torch.float32, torch.bfloat16 or None"
        raise LigerzooError(where=f"{name}: state_dtype", got=state_dtype, expected=expected)
    check(name, SEED, seed=seed)
    others = {"state_dtype": state_dtype, "seed": seed, "stochastic_rounding": stochastic_rounding}
    return {**numbers._asdict(), **others}


def adamw_state(parameter: Tensor, group: Group) -> dict[str, Tensor]:
    """Returns the moments of AdamW, zero."""
    dtype = group["state_dtype"] or parameter.dtype
    return {name: torch.zeros_like(parameter, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}


def update_adamw(group: Group, updates: list[ParamUpdate], lr: Tensor, skip: Tensor | None) -> None:
    """Updates parameters by AdamW, with the group's `betas`, `eps`, `weight_decay` and `stochastic_rounding`."""
    side_by_side([partial(_update, group, update, lr, skip) for update in updates])


def _update(group: Group, update: ParamUpdate, lr: Tensor, skip: Tensor | None) -> None:
    parameter, gradient, state, key = update
    adamw_update(
        local(parameter),
        local(gradient),
        local(state["exp_avg"]),
        local(state["exp_avg_sq"]),
        state["step"],
        lr,
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        key=key if group["stochastic_rounding"] else None,
        first_group=first_group(parameter) if group["stochastic_rounding"] else 0,
        skip=skip,
    )

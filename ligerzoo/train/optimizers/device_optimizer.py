"""`DeviceOptimizer`: the base of our optimizers, which count steps and skip them on the device."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligerzoo.dtensors import is_dtensor, shard_at
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.dispatch import cdiv
from ligerzoo.kernels.philox import WORDS
from ligerzoo.kernels.stochastic_rounding import FIRST_KEY
from ligerzoo.train.optimizers.groups import Group

DTYPES = (torch.float32, torch.bfloat16)


class ParamUpdate(NamedTuple):
    """What the update of one parameter needs.

    Attributes:
        parameter: the parameter; a DTensor if it is sharded.
        gradient: its gradient.
        state: its entries in the optimizer's state; `step` is the number of this update.
        key: selects the random bits of its stochastic rounding.
    """

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]
    key: int


class DeviceOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer for fp32 and bf16 parameters whose step never waits for the device.

    Subclasses define the state of a parameter and the update of a group. In addition to `torch.optim.Optimizer`:

    - States keep their dtypes in `load_state_dict`; torch casts them to the dtype of the parameter.
    - `found_inf` skips a step on the device, as for torch's fused optimizers; see `SkipNonFinite`.
    - Random bits depend on the group's `seed`, the parameter's position and the number of its update alone, so a run
      that is loaded continues bit for bit, and shards of a parameter round as the whole does.

    Attributes:
        found_inf: tensor with one element; a step has no effect if it is not 0. None never skips.
    """

    found_inf: Tensor | None = None

    @abc.abstractmethod
    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """Returns the initial state of a parameter, without `step`."""

    @abc.abstractmethod
    def update_group(self, group: Group, updates: list[ParamUpdate], lr: Tensor, skip: Tensor | None) -> None:
        """Updates the parameters of a group and their states, unless `skip` is not 0. `lr` is 0-d fp32."""

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, as in `torch.optim.Optimizer`.

        Raises:
            ValueError: a parameter is neither fp32 nor bf16, is on the meta device, or is on another device than the
                first of its group.
        """
        first = sum(len(group["params"]) for group in self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("first_index", first)
        group["optimizer"] = type(self).__name__
        names = group.get("param_names", range(first, first + len(group["params"])))
        for name, parameter in zip(names, group["params"], strict=True):
            device = group["params"][0].device
            if parameter.dtype not in DTYPES or parameter.is_meta or parameter.device != device:
                self.param_groups.pop()
                what = f"parameter {name} is {parameter.dtype} on {parameter.device}"
                expected = "torch.float32 or torch.bfloat16, not on the meta device, and one device for a group"
                raise LigerzooError(what, where=type(self).__name__, expected=expected)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have gradients.

        Args:
            closure: computes the loss and the gradients again, or None.

        Returns:
            What the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            updates = self._updates(group)
            if updates:
                device = updates[0].parameter.device
                skip = None if self.found_inf is None else self.found_inf.to(device)
                steps = [update.state["step"] for update in updates]
                increment = torch.ones((), device=device) if skip is None else (skip == 0).float().sum()
                torch._foreach_add_(steps, [increment] * len(steps))  # torch reads the value of one on the host
                self.update_group(group, updates, scalar_on(device, group["lr"]), skip)
        return loss

    def _updates(self, group: Group) -> list[ParamUpdate]:
        updates = []
        for index, parameter in enumerate(group["params"], group["first_index"]):
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                where, expected = type(self).__name__, "nn.Embedding(sparse=False)"
                raise LigerzooError("a gradient is sparse", where=where, expected=expected)
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state.update(self.new_state(parameter, group))
            key = FIRST_KEY * (1 + group["seed"]) + 2 * index
            updates.append(ParamUpdate(parameter, parameter.grad, state, key))
        return updates

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` has returned, with the dtypes of the states unchanged."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for index, parameter in zip(saved, self._parameters(), strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                self.state[parameter][name] = value.to(parameter.device, copy=True)

    def _parameters(self) -> Iterable[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)


def scalar_on(device: torch.device, value: float | Tensor) -> Tensor:
    """Returns a 0-d fp32 tensor. A number is passed to the device without a host sync."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32).reshape(())
    return torch.full((), value, dtype=torch.float32, device=device)


def first_group(parameter: Tensor) -> int:
    """Groups of 4 elements before this process's shard of a parameter; 0 if it is whole.

    Random bits belong to groups. So shards along the first dimension round as the whole parameter does, if their
    sizes are multiples of 4.
    """
    if not is_dtensor(parameter):
        return 0
    return cdiv(_first_element(tuple(parameter.shape), parameter.device_mesh, parameter.placements), WORDS)


@lru_cache(maxsize=4096)
def _first_element(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> int:
    index = 0
    for position, size in zip(shard_at(shape, mesh, placements).offset, shape, strict=True):
        index = index * size + position
    return index

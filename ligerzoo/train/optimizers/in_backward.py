"""Updating each parameter within backward, as soon as its gradient is complete, and freeing the gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.train.optimizers.gradients import SkipNonFinite, clip_grad_norm
from ligerzoo.train.optimizers.groups import Group


class StepInBackward:
    """Makes an optimizer update each parameter within backward, so that only few gradients exist at a time.

    Saves the memory of the gradients, 2 bytes per bf16 weight (Lv et al. 2023, LOMO). Nothing else changes: the
    optimizer keeps its state, groups, learning rate and `state_dict`, and the loop calls `loss.backward()` and
    `optimizer.step()`, which then only ends the step.

    What needs all gradients at once is impossible: accumulating gradients over several backwards (refused), and
    clipping their global norm (`clip_grad_norm` finds no gradients and refuses).

    Args:
        optimizer: any optimizer, with all parameters on one device.
        skip: skips the update of each parameter whose gradient is infinite or NaN, and counts parameters, not steps.
            None updates with any gradient.

    Raises:
        ValueError: parameters are on several devices, or have gradients already.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, skip: SkipNonFinite | None = None) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        devices = {parameter.device for parameter in parameters}
        if len(devices) > 1:
            got = ", ".join(sorted(map(str, devices)))
            raise LigerzooError(f"parameters are on {got}", where="StepInBackward", expected="one device")
        if any(parameter.grad is not None for parameter in parameters):
            what = "a parameter has a gradient already; call optimizer.zero_grad() first"
            raise LigerzooError(what, where="StepInBackward")
        self._optimizer = optimizer
        self._skip = skip
        self._updated: set[int] = set()  # indices of parameters since the last optimizer.step()
        self._is_updating = False
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]
        self._handles = [*hooks, optimizer.register_step_post_hook(self._end_step)]

    def remove(self) -> None:
        """Makes the optimizer update in `optimizer.step()` again."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int) -> object:
        return lambda parameter: self._update(index, parameter)

    def _update(self, index: int, parameter: Tensor) -> None:
        if index in self._updated:
            parameter.grad = None
            what, expected = "a second backward before optimizer.step()", "one backward per step"
            remedy = "It cannot accumulate gradients: use larger batches, or no optimizer in backward."
            raise LigerzooError(what, where="StepInBackward", expected=expected, remedy=remedy)
        self._updated.add(index)
        if self._skip is not None:
            self._skip(clip_grad_norm([parameter], None))
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [_group_of(groups, index)]
        self._is_updating = True
        try:
            self._optimizer.step()
        finally:
            self._is_updating = False
            self._optimizer.param_groups = groups
        parameter.grad = None

    def _end_step(self, *_: object) -> None:
        if not self._is_updating:
            self._updated.clear()


def _group_of(groups: Iterable[Group], index: int) -> Group:
    """Returns a group of the parameter with this index over all groups, with the options of its group."""
    for group in groups:
        if index < len(group["params"]):
            one = {**group, "params": [group["params"][index]]}
            if "param_names" in group:
                one["param_names"] = [group["param_names"][index]]
            if "first_index" in group:  # of a DeviceOptimizer
                one["first_index"] = group["first_index"] + index
            return one
        index -= len(group["params"])
    raise AssertionError("the index is that of a parameter")

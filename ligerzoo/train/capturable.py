"""Which models, inputs and optimizers of a training step may be captured in a CUDA graph.

An obstacle is why something cannot be captured, a clause for a message; see `ligerzoo.layers.capture`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType

import torch
from torch import Tensor, nn

from ligerzoo.layers.capture import training_obstacle
from ligerzoo.layers.plain import is_plain_tensor
from ligerzoo.layers.row_parts import WHOLE_ROWS
from ligerzoo.train.optimizers.clipped_step import steps_in_backward
from ligerzoo.train.optimizers.device_optimizer import DeviceOptimizer

_NUMBERS = (int, float, bool, str, NoneType)


def model_obstacle(model: nn.Module, *, trusts_layers: bool) -> str | None:
    """Why forward and backward of the model cannot be captured; see `training_obstacle`."""
    if (obstacle := training_obstacle(model, trusts_layers=trusts_layers)) is not None:
        return obstacle
    if getattr(model, "row_parts", WHOLE_ROWS).count > 1:
        return "several processes divide the rows"
    has_hooks = any(parameter._backward_hooks or steps_in_backward(parameter) for parameter in model.parameters())
    return "parameters have hooks, such as those of an optimizer in backward" if has_hooks else None


def inputs_obstacle(model: nn.Module, inputs: Mapping[str, object]) -> str | None:
    """Why a forward with these inputs cannot be captured."""
    for name, value in inputs.items():
        if name in getattr(model, "modalities", ()):
            return f"{name}: the sizes of images are read on the host"
        if not isinstance(value, (Tensor, *_NUMBERS)):
            return f"{name} is a {type(value).__name__}, not a tensor or a number"
    if inputs.get("use_cache") or inputs.get("past_key_values") is not None:
        return "the inputs have a KV cache"
    return None


def optimizer_obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the update cannot be captured. Forward and backward can be captured without it."""
    name = type(optimizer).__name__
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks"
    if isinstance(optimizer, DeviceOptimizer) or all(
        (group.get("fused") or group.get("capturable")) for group in optimizer.param_groups
    ):
        return None
    return f"{name} may read values on the host; one of make_optimizer, or of torch with fused=True, does not"


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    """Returns what graphs contain as constants: addresses of tensors, and settings of layers and of the optimizer.

    If it changes, graphs must be captured again. It costs the host a few microseconds for each layer.
    """
    state: list[object] = [
        (_address(parameter), parameter.requires_grad, parameter.dtype, parameter.shape)
        for parameter in model.parameters()
    ]
    for module in model.modules():
        settings = vars(module)
        state += bool(module._forward_hooks), bool(module._forward_pre_hooks), "forward" in settings
        state += filter(_is_setting, settings.values())
    if optimizer_obstacle(optimizer) is None:
        state += _state_of_optimizer(optimizer)
    return tuple(state)


def _state_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[object]:
    for values in optimizer.state.values():
        yield from (_address(value) for value in values.values() if isinstance(value, Tensor))
    for group in optimizer.param_groups:
        yield tuple(map(id, group["params"]))
        yield from (value for name, value in group.items() if name not in ("lr", "initial_lr") and _is_setting(value))


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's memory; of the object for a subclass, which may have none."""
    return tensor.data_ptr() if is_plain_tensor(tensor) else id(tensor)


def _is_setting(value: object) -> bool:
    return type(value) in _NUMBERS or (type(value) is tuple and all(isinstance(item, _NUMBERS) for item in value))

"""Finds the reason why a part of a training step cannot be captured in a CUDA graph.

A graph repeats the kernels of one step. So nothing in the step may read values on the host, allocate in another way in
each step, or run Python between the kernels. Each function returns the reason why something cannot be
captured, as a clause for a message, or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import NoneType

import torch
from torch import Tensor, nn

from ligerzoo.kernels.dispatch import DEBUG
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.layers import Decoder
from ligerzoo.layers.capture import capture_obstacle, never_reads_values
from ligerzoo.layers.plain import find_modules, is_plain_tensor
from ligerzoo.train.optimizers.clipped_step import steps_in_backward
from ligerzoo.train.optimizers.device_optimizer import DeviceOptimizer

_NUMBERS = (int, float, bool, str, NoneType)


def reason_against_model(model: nn.Module, *, trusts_layers: bool) -> str | None:
    """Why forward and backward of the model cannot be captured.

    Args:
        model: the model.
        trusts_layers: whether layers of other packages than ligerzoo and torch may be captured.
    """
    parameters = list(model.parameters())
    if (reason := _reason_against_device(parameters)) is not None:
        return reason
    if DEBUG:
        return "LIGERZOO_DEBUG=1 reads values on the host"
    if hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules()):
        return "the model is compiled"
    if not is_plain_tensor(*parameters):
        return "the weights are sharded or quantized"
    if any(parameter._backward_hooks or steps_in_backward(parameter) for parameter in parameters):
        return "parameters have hooks, such as those of an optimizer in backward"
    for name, module in model.named_modules():
        if (reason := _reason_against_module(module, trusts_layers)) is not None:
            return f"{name or 'the model'} ({type(module).__name__}) {reason}"
    if _checkpoints_blocks(model) and any(map(_is_random, model.modules())):
        return "activation checkpointing restores the random numbers of dropout from the host"
    return None


def _reason_against_device(parameters: Iterable[Tensor]) -> str | None:
    devices = {parameter.device for parameter in parameters}
    return None if len(devices) == 1 and devices.pop().type == "cuda" else "the model is not on one GPU"


def _reason_against_module(module: nn.Module, trusts_layers: bool) -> str | None:
    if (obstacle := capture_obstacle(module)) is not None:
        return obstacle
    if not trusts_layers and not never_reads_values(module):
        return 'is not a layer of ligerzoo or torch; capture="on" captures it nevertheless'
    return None


def _checkpoints_blocks(model: nn.Module) -> bool:
    decoders = find_modules(model, Decoder)
    return any(Recompute.BLOCK in decoder.activation_plan for decoder in decoders) or any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )


def _is_random(module: nn.Module) -> bool:
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return module.training and bool(
        is_dropout or getattr(module, "jitter_noise", 0.0) or getattr(module, "lora_dropout", 0.0)
    )


def reason_against_inputs(model: nn.Module, inputs: Mapping[str, object]) -> str | None:
    """Why a forward with these inputs cannot be captured."""
    for name, value in inputs.items():
        if name in getattr(model, "modalities", ()):
            return f"{name}: the sizes of images are read on the host"
        if not isinstance(value, (Tensor, *_NUMBERS)):
            return f"{name} is a {type(value).__name__}, not a tensor or a number"
    if inputs.get("use_cache") or inputs.get("past_key_values") is not None:
        return "the inputs have a KV cache"
    return None


def reason_against_optimizer(optimizer: torch.optim.Optimizer) -> str | None:
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
    if reason_against_optimizer(optimizer) is None:
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

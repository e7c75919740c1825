"""What may be captured in a CUDA graph: the decode steps of a model, and its forward and backward in training.

A graph repeats the kernels of one step. So nothing in the step may read values on the host, allocate in another way in
each step, or run Python between the kernels. An obstacle is why something cannot be captured, a clause for a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import cast

import torch
from torch import Tensor, nn

from ligerzoo.kernels.dispatch import DEBUG, uses_triton
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.layers.attention import Attention
from ligerzoo.layers.decoder import Decoder
from ligerzoo.layers.head import LMHead
from ligerzoo.layers.linear import Linear
from ligerzoo.layers.lora import LoRAHead, LoRALayer, LoRALinear
from ligerzoo.layers.moe import Experts, MoE
from ligerzoo.layers.plain import all_modules, find_modules, is_plain_tensor, is_unmodified
from ligerzoo.layers.quantized import is_quantized

_PACKAGES = ("ligerzoo.", "torch.")


def layer_obstacle(module: nn.Module, *, trusts_layers: bool = False) -> str | None:
    """Why the forward of a layer cannot be captured, without its children; None if it can.

    Args:
        module: the layer.
        trusts_layers: whether layers of other packages, whose forwards may depend on values, may be captured.
    """
    if not is_unmodified(module, type(module)):
        return "has hooks or a replaced forward"
    if isinstance(module, Experts) and not uses_triton(module.down_proj, backend=module.backend):
        return "groups tokens by expert on the host, without Triton"
    if not trusts_layers and not type(module).__module__.startswith(_PACKAGES):
        return 'is not a layer of ligerzoo or torch; capture="on" captures it nevertheless'
    return None


def training_obstacle(model: nn.Module, *, trusts_layers: bool) -> str | None:
    """Why forward and backward of a model cannot be captured, for its layers and weights; None if they can."""
    parameters = list(model.parameters())
    if (obstacle := _device_obstacle(parameters)) is not None:
        return obstacle
    if DEBUG:
        return "LIGERZOO_DEBUG=1 reads values on the host"
    if hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules()):
        return "the model is compiled"
    if not is_plain_tensor(*parameters):
        return "the weights are sharded or quantized"
    for name, module in model.named_modules():
        if (obstacle := layer_obstacle(module, trusts_layers=trusts_layers)) is not None:
            return f"{name or 'the model'} ({type(module).__name__}) {obstacle}"
    if _checkpoints_blocks(model) and any(map(_is_random, model.modules())):
        return "activation checkpointing restores the random numbers of dropout from the host"
    return None


def _device_obstacle(parameters: Iterable[Tensor]) -> str | None:
    devices = {parameter.device for parameter in parameters}
    return None if len(devices) == 1 and devices.pop().type == "cuda" else "the model is not on one GPU"


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


def can_capture(model: nn.Module) -> bool:
    """Whether prefills and decode steps of a model can be captured.

    They can if the model and its weights are on one GPU, all its layers are those of ligerzoo and torch, without hooks,
    wrappers and tensor subclasses except linear layers with weights that torchao has quantized, its experts run in
    Triton, it has text inputs only, see `has_static_decoding`, and neither autocast nor a compiler is active.
    """
    device = getattr(model, "device", None)
    return (
        device is not None
        and device.type == "cuda"
        and not getattr(model, "modalities", ())
        and not DEBUG  # its checks are host syncs
        and not torch.is_autocast_enabled("cuda")
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.compiler.is_compiling()
        and all(map(_can_decode, all_modules(model), repeat(device)))
        and has_static_decoding(model)
    )


def _can_decode(module: nn.Module, device: torch.device) -> bool:
    if isinstance(module, LoRALayer) and (module.lora_dropout or not module.lora_enabled):
        return False  # they are disabled for a while only, see `adapters_disabled`
    if isinstance(module, MoE) and module.training and module.jitter_noise:
        return False
    may_be_quantized = type(module) in (nn.Linear, Linear, LMHead, LoRALinear, LoRAHead)
    for weight in module._parameters.values():
        if not is_plain_tensor(weight) and not (may_be_quantized and is_quantized(weight)):
            return False
        if weight is not None and weight.device != device:
            return False
    return layer_obstacle(module) is None


def has_static_decoding(model: nn.Module) -> bool:
    """Whether a model can decode over caches of fixed size: it can have them, and attention is causal."""
    attentions = (module for module in all_modules(decoder_of(model)) if isinstance(module, Attention))
    is_causal = all(attention.is_causal for attention in attentions)
    return is_causal and hasattr(model, "new_cache") and model.new_cache(1).is_static  # type: ignore[operator]


def decoder_of(model: nn.Module) -> nn.Module:
    """Returns the part of a model whose layers have KV caches: without a vision tower, if it has one."""
    return cast(nn.Module, getattr(model, "model", model))

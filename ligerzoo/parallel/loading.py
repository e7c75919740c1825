"""Loads and initializes sharded models. No process holds the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ligerzoo import hub
from ligerzoo.dtensors import as_shard_of, is_dtensor, shard_of
from ligerzoo.errors import LigerzooError
from ligerzoo.models.building import forget_values, require_values
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.parallel.mesh import MeshSizes, as_mesh, parallelize
from ligerzoo.parallel.processes import device_of

Model = TypeVar("Model", bound=LanguageModel)


def load_sharded(
    name_or_path: str | Path,
    mesh: DeviceMesh | MeshSizes | str | None = None,
    *,
    model_class: type[Model] = CausalLM,  # type: ignore[assignment]
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_after_forward: bool = True,
    prefetch: int | None = None,
    copy_engines: bool = True,
    **options: Any,
) -> Model:
    """Loads a checkpoint in Hugging Face format into a model distributed with `parallelize`, in evaluation mode.

    Each process reads its part of every tensor from the safetensors files, also where a layout stores parameters in
    other tensors (fused projections, one tensor per expert).

    Args:
        name_or_path: directory, or id of a repository on the hub.
        mesh: see `parallelize`; and `shard_model` for `param_dtype`, `reduce_dtype`, `reshard_after_forward`,
            `prefetch` and `copy_engines`.
        model_class: expected class, such as `CausalLM` or `SequenceClassifier`.
        options: see `ligerzoo.hub.load`, without `device`.

    Raises:
        LigerzooError: As `parallelize` and `ligerzoo.hub.load`; or the files lack a parameter, or the class computes
            tensors in its constructor.
    """
    mesh = as_mesh(mesh)
    shard = partial(
        parallelize,
        mesh=mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        prefetch=prefetch,
        copy_engines=copy_engines,
    )
    return hub.load(name_or_path, model_class, device=device_of(mesh), shard=shard, **options)


def initialize_sharded(model: LanguageModel, *, dtype: torch.dtype | None = None) -> None:
    """Initializes a sharded model that was built on the meta device, one module at a time.

    The weights are those of `model.init_weights()` on one device: seed torch equally in all processes.

    Args:
        model: a model that `shard_model` has sharded, such as `AutoModel.from_config(config, device="meta")`.
        dtype: dtype of the weights. Default: that of the model on the meta device.

    Raises:
        LigerzooError: A module with parameters has no `init_weights`, or it does not set all of them.
    """
    initialized: dict[nn.Parameter, nn.Parameter] = {}
    std = model.config.initializer_range
    for module_name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        if not hasattr(module, "init_weights"):
            remedy = "Define init_weights(std) in its class, or initialize the model before sharding it."
            raise LigerzooError("has no init_weights", where=f"{type(module).__name__} {module_name!r}", remedy=remedy)
        for name, weight in own.items():
            device = device_of(weight.device_mesh) if is_dtensor(weight) else weight.device
            whole = torch.empty(weight.shape, dtype=dtype or weight.dtype, device=device)
            module._parameters[name] = nn.Parameter(whole, weight.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
        forget_values(module)
        module.init_weights(std)
        require_values(module_name, module)
        for name, weight in own.items():
            whole, box = module._parameters[name].detach(), shard_of(weight)
            shard = as_shard_of(weight, whole[box.slices].clone(memory_format=torch.contiguous_format))
            initialized[weight] = nn.Parameter(shard, weight.requires_grad)
            module._parameters[name] = weight
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, initialized[weight])

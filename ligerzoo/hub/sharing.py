"""Builds models that share the weights of transformers' model instances."""

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn

from ligerzoo.convert import architecture_of
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse
from ligerzoo.convert.stored_tensors import assemble
from ligerzoo.convert.tensor_slices import Shape, TensorSlice, shapes_of
from ligerzoo.errors import CheckpointError, ConfigError
from ligerzoo.hub.description import naming_source
from ligerzoo.hub.loading import has_tensors_outside_state_dict
from ligerzoo.hub.matching import TensorSource, match_tensors
from ligerzoo.hub.tying import HEAD, tie_if_equal, under_both_names
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.pretrained import LoadedFrom

_WHERE = "hf_model"


def from_transformers(hf_model: nn.Module, *, copy: bool = False) -> CausalLM:
    """Builds a model of ours from an instance of transformers' model, in the same mode (training or evaluation).

    By default both share the weights, so training one trains the other, and nothing is copied. A parameter that both
    have is the same `nn.Parameter`: `requires_grad`, gradients and optimizers are shared too. A parameter that
    transformers fuses, such as Phi3's `qkv_proj`, is a view of its rows: its memory is shared, its gradient is not. So
    use one of the two models in a training step, and its own parameters in the optimizer. Parameters that transformers
    interleaves, as in Qwen3-Next's `in_proj_qkvz`, can be copied only.

    Sharing ends if either model replaces its parameters, as `model.to(...)` does with another dtype, `to_empty`,
    `resize_token_embeddings` and FSDP do. Move and cast `hf_model` first. Hooks, adapters and activation checkpointing
    of `hf_model` do not apply to the new model.

    Args:
        hf_model: a causal or vision-language model of an architecture in ligerzoo.models.
        copy: copy all weights instead. The models are then independent.

    Returns:
        The model, of the class that `hf_model.config.model_type` names. `save_pretrained` writes the hub's layout, the
        other entries of `hf_model.config`, and its generation config.

    Raises:
        ConfigError: The architecture is not supported, or the config has an unsupported value.
        CheckpointError: A parameter is missing, unexpected, of another shape, on another device than the first,
            quantized, sharded, or on the meta device; or cannot be shared without a copy, and `copy` is False.
    """
    raw, architecture, config = read_transformers_config(hf_model)
    tensors: dict[str, Tensor] = hf_model.state_dict(keep_vars=True)
    _check_plain(tensors)
    model = cast("CausalLM", architecture.build(config, device="meta"))
    if has_tensors_outside_state_dict(model):
        model = architecture.build(config, device=next(iter(tensors.values())).device)
    shapes = shapes_of(model.state_dict())
    source = TensorSource(
        tensors,
        where=_WHERE,
        if_missing=f"Pass a {architecture.hf_class} without adapters.",
        if_unexpected=f"Pass a {architecture.hf_class} without adapters.",
    )
    match = match_tensors(source, architecture, config, shapes, strict=True)
    by_parameter = groupby(match.slices, key=lambda part: part.name)
    take = _copied if copy else _shared
    weights = {name: take(list(parts), tensors, shapes) for name, parts in by_parameter}
    weights = under_both_names(weights) if match.tied else weights
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(weights[name].requires_grad)  # load_state_dict sets that of the weight to this
    model.load_state_dict(weights, assign=True)
    raw = tie_if_equal(model, raw)
    tied = frozenset({HEAD} if model.config.tie_word_embeddings else ())
    own = {part.stored_name for part in match.slices}
    extra_names = [name for name in tensors if name not in own and architecture.is_extra_tensor(name)]
    extra_tensors = {name: tensors[name].detach().clone() if copy else tensors[name].detach() for name in extra_names}
    model.origin = LoadedFrom(raw, None, architecture.layouts(config)[0], tied, extra_tensors)
    model.generation_config = _generation_config(hf_model)
    return model.train(hf_model.training)


def read_transformers_config(hf_model: nn.Module) -> tuple[dict[str, object], Architecture, Any]:
    """Returns the entries of the config that are set, the architecture that it names, and our config."""
    config: Any = getattr(hf_model, "config", None)
    if not hasattr(config, "to_dict"):
        what = "not a model of transformers"
        raise ConfigError(what, where=_WHERE, got=type(hf_model).__name__, expected="an instance of PreTrainedModel")
    entries: dict[str, object] = config.to_dict()
    raw = {name: value for name, value in entries.items() if value is not None and not name.startswith("_")}
    with naming_source(f"{_WHERE}.config"):
        refuse(raw, "quantization_config", unless=(None,), remedy="Load the unquantized model.")
        architecture = architecture_of(raw.get("model_type"))
        return raw, architecture, architecture.config_from_hf(entries)


def _check_plain(tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for tensors that another model cannot compute with."""
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        where = f"{_WHERE}, tensor {name!r}"
        if type(tensor) not in (Tensor, nn.Parameter):
            remedy = "Convert the model before it is quantized, sharded or wrapped."
            raise CheckpointError("not a plain tensor", where=where, got=type(tensor).__name__, remedy=remedy)
        if tensor.is_meta:
            raise CheckpointError("a meta tensor has no data", where=where, remedy="Load the weights first.")
        if tensor.device != device:
            expected = f"{device}, that of the first tensor"
            remedy = "Load the model on one device, without device_map."
            raise CheckpointError("on another device", where=where, got=tensor.device, expected=expected, remedy=remedy)


def _shared(parts: list[TensorSlice], tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> Tensor:
    """Returns a parameter: the same object if it is a whole tensor, or else a view of rows."""
    part = parts[0]
    tensor = tensors[part.stored_name]
    whole = tensor if part.is_copy else nn.Parameter(part.select(tensor.detach()), tensor.requires_grad)
    problem = None if whole.is_contiguous() else "not contiguous"
    if len(parts) > 1:
        is_one = all(other.stored_name == part.stored_name for other in parts)
        problem = "stored in another order" if is_one else "stored in several tensors"
    if problem:
        where = f"{_WHERE}, tensor {part.stored_name!r}"
        raise CheckpointError(f"cannot be shared: {problem}", where=where, remedy="Copy the weights with copy=True.")
    return whole


def _copied(parts: list[TensorSlice], tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> Tensor:
    """Returns a parameter with its own memory."""
    first = tensors[parts[0].stored_name]

    def read(part: TensorSlice) -> Tensor:
        return part.select(tensors[part.stored_name].detach()).clone(memory_format=torch.contiguous_format)

    [value] = assemble(parts, shapes, read, dtypes={parts[0].name: first.dtype}, device=first.device).values()
    return nn.Parameter(value, first.requires_grad) if first.is_floating_point() else value


def _generation_config(hf_model: nn.Module) -> dict[str, object]:
    """Returns the content of generation_config.json as transformers writes it."""
    generation_config: Any = getattr(hf_model, "generation_config", None)
    if generation_config is None:
        return {}
    content: dict[str, object] = json.loads(generation_config.to_json_string(use_diff=True))
    return content

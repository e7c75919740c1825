"""Writes an adapter as PEFT does: adapter_config.json and adapter_model.safetensors."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligerzoo.adapters.base_weights import stored_base_weights
from ligerzoo.adapters.module_names import ModuleNames, lora_layers
from ligerzoo.adapters.peft_config import CONFIG_FILE, WEIGHT_FILE
from ligerzoo.adapters.peft_tensors import StoredUpdate, pack_experts, stored_updates
from ligerzoo.adapters.targets import Target, targets_of
from ligerzoo.errors import CheckpointError, LigerzooError
from ligerzoo.files.atomic import replacing_directory
from ligerzoo.files.checkpoint_writer import write_safetensors
from ligerzoo.hub.sharding import full, is_sharded
from ligerzoo.layers.lora import LoRAOptions
from ligerzoo.models import SequenceClassifier
from ligerzoo.models.language_model import LanguageModel


def save_adapter(model: LanguageModel, directory: str | Path, *, base_model: str | Path | None = None) -> None:
    """Writes the updates, and the modules that train in full, as PEFT 0.21 writes and reads them.

    The names are those of transformers' model. Where it fuses weights, such as Phi3's `qkv_proj`, updates of the parts
    become one: if they share A, with the same rank; else with the sum of the ranks, which computes the same. Of the
    base model's weights, the embedding and the head are written if tokens were added, or if a loaded adapter replaced
    them. Other files of the directory are kept.

    If weights are DTensors, as with FSDP2, all processes must call it, and the main process writes.

    Args:
        model: a model with updates, see `add_lora`.
        directory: created if it does not exist.
        base_model: directory or id of the base model, for `base_model_name_or_path`.

    Raises:
        LigerzooError: the model has no updates.
        CheckpointError: PEFT's format cannot express the adapter, such as DoRA for some of the layers.
    """
    layers = lora_layers(model)
    targets = [t for t in targets_of(model) if t.module in layers and t.parameter in layers[t.module].lora]
    if not targets:
        raise LigerzooError("the model has no adapter", where="save_adapter", remedy="Call add_lora(model) first.")
    updates = stored_updates(targets)
    uses_dora = _uses_dora(model, updates, directory)
    tensors: dict[str, Tensor] = {}
    options: dict[str, LoRAOptions] = {}
    for update in updates:
        values, options[update.name] = _merge_parts(model, update)
        tensors |= {name: value for name, value in zip(update.tensor_names, values, strict=True) if value is not None}
    base_tensors, base_entries = stored_base_weights(model, directory)
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if isinstance(model, SequenceClassifier) else "CAUSAL_LM",
        "base_model_name_or_path": None if base_model is None else str(base_model),
        "inference_mode": True,
        "bias": "none",
        "use_dora": uses_dora,
        **_options_entries(updates, options),
        "target_modules": _target_names(updates, model, is_parameter=False),
        "target_parameters": _target_names(updates, model, is_parameter=True) or None,
        **base_entries,
    }
    if is_sharded(dict(model.named_parameters())) and torch.distributed.get_rank() != 0:
        return
    with replacing_directory(directory, keep=lambda name: True) as temporary:
        (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        write_safetensors(temporary / WEIGHT_FILE, {**tensors, **base_tensors})


def _whole(tensor: Tensor) -> Tensor:
    return full(tensor).detach()


def _uses_dora(model: LanguageModel, updates: Sequence[StoredUpdate], directory: str | Path) -> bool:
    dora = {_has_magnitudes(model, target) for update in updates for target in update.targets}
    if len(dora) > 1:
        what = "PEFT's files hold DoRA for all weights of an adapter or for none"
        raise CheckpointError(what, where=directory, remedy="Call add_lora once, for all targets.")
    return dora == {True}


def _has_magnitudes(model: LanguageModel, target: Target) -> bool:
    return getattr(model.get_submodule(target.module), "lora_magnitude_vector", None) is not None


def _merge_parts(model: LanguageModel, update: StoredUpdate) -> tuple[list[Tensor | None], LoRAOptions]:
    """Returns A, B and magnitudes of the update of transformers' weight, and its options."""
    first = update.targets[0]
    layers: list[Any] = [model.get_submodule(target.module) for target in update.targets]
    options: list[LoRAOptions] = [layer.lora[t.parameter] for layer, t in zip(layers, update.targets, strict=True)]
    if first.is_experts:
        a, b = (_whole(getattr(layers[0], f"{first.parameter}_lora_{name}")) for name in "AB")
        return [*pack_experts(a, b, first.is_interleaved), None], options[0]
    if not first.is_part:
        magnitude = layers[0].lora_magnitude_vector
        matrices = [_whole(getattr(layers[0], name)) for name in (layers[0].a_name, layers[0].b_name)]
        return [*matrices, None if magnitude is None else _whole(magnitude)], options[0]
    # Rows of B select the parts, columns the matrices A.
    distinct: list[Tensor] = [_whole(a) for a in {id(layer.lora_A): layer.lora_A for layer in layers}.values()]
    starts = dict(zip(dict.fromkeys(id(layer.lora_A) for layer in layers), _starts(distinct), strict=True))
    b = distinct[0].new_zeros(first.stored_shape[0], sum(map(len, distinct)))
    magnitudes = None
    if layers[0].lora_magnitude_vector is not None:
        magnitudes = _row_norms_of_whole(model, first)
    rank, rslora = b.shape[1], options[0].use_rslora
    scale = options[0].scale
    for layer, target, own in zip(layers, update.targets, options, strict=True):
        start = starts[id(layer.lora_A)]
        part = _whole(layer.lora_B) * (own.scale / scale)
        b[slice(*target.rows), start : start + own.rank] = part
        if magnitudes is not None:
            magnitudes[slice(*target.rows)] = _whole(layer.lora_magnitude_vector)
    alpha = scale * (rank**0.5 if rslora else rank)
    merged = LoRAOptions(rank=rank, alpha=alpha, use_rslora=rslora, dropout=options[0].dropout)
    return [torch.cat(distinct), b, magnitudes], merged


def _starts(matrices: Sequence[Tensor]) -> list[int]:
    ends = torch.tensor([0, *map(len, matrices)]).cumsum(0).tolist()
    return ends[:-1]


def _row_norms_of_whole(model: LanguageModel, part: Target) -> Tensor:
    """Returns the norms of all rows of transformers' weight: the magnitudes of rows without an update."""
    norms = torch.empty(0)
    for target in targets_of(model):
        if target.stored_parameter == part.stored_parameter:
            layer: Any = model.get_submodule(target.module)
            if not len(norms):
                norms = torch.empty(part.stored_shape[0], device=layer.weight.device)
            norms[slice(*target.rows)] = torch.linalg.vector_norm(_whole(layer.weight).float(), dim=1)
    return norms


def _options_entries(updates: Sequence[StoredUpdate], options: dict[str, LoRAOptions]) -> dict[str, object]:
    """Returns the entries of ranks and scaling: the most frequent values, and patterns with the others."""
    rslora = all(o.use_rslora for o in options.values())
    ranks = {name: o.rank for name, o in options.items()}
    alphas = {name: _plain(o.alpha if o.use_rslora == rslora else o.scale * o.rank) for name, o in options.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    # PEFT has no dropout for parameters, and refuses one for a whole adapter that has some.
    dropout = 0.0 if any(u.targets[0].is_parameter for u in updates) else max(o.dropout for o in options.values())
    return {
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "use_rslora": rslora,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
    }


def _plain(number: float) -> int | float:
    return int(number) if float(number).is_integer() else number


def _target_names(updates: Sequence[StoredUpdate], model: LanguageModel, *, is_parameter: bool) -> list[str]:
    """Returns the names of modules or parameters: short ones where these name no other weight, else whole ones."""
    names = {update.name for update in updates if update.targets[0].is_parameter == is_parameter}
    targets = targets_of(model)
    modules = ModuleNames(model)
    weights = {part.stored_name for name in modules.shapes for part in modules.slices(name)}
    others = (weights if is_parameter else {name.rpartition(".")[0] for name in weights}) - names
    # Of models with experts, PEFT takes "gate_proj" for a part of each expert's `gate_up_proj`.
    parts = 2 if is_parameter or any(t.is_experts for t in targets) else 1

    def short(name: str) -> str:
        last = ".".join(name.split(".")[-parts:])
        return name if last.isdecimal() else last  # "0" would also name the first block

    ambiguous = {short(name) for name in others}
    return sorted({name if short(name) in ambiguous else short(name) for name in names})

"""Writes an adapter as PEFT does: adapter_config.json and adapter_model.safetensors."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ligerzoo.adapters.base_weights import stored_base_weights
from ligerzoo.adapters.module_names import ModuleNames, lora_layers
from ligerzoo.adapters.peft_config import CONFIG_FILE, WEIGHT_FILE
from ligerzoo.adapters.peft_tensors import StoredUpdate, pack_experts, stored_updates
from ligerzoo.adapters.targets import Target, targets_of
from ligerzoo.dtensors import full, is_sharded
from ligerzoo.errors import CheckpointError, LigerzooError, first_names
from ligerzoo.files.atomic import replacing_directory
from ligerzoo.files.checkpoint_writer import write_safetensors
from ligerzoo.layers.lora import LoRALayer, LoRAOptions, UpdateTensors
from ligerzoo.models import CausalLM, EmbeddingModel, SequenceClassifier, TokenClassifier
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
    layers, names = lora_layers(model), ModuleNames(model)
    available = targets_of(model, names)
    targets = [t for t in available if t.module in layers and t.parameter in layers[t.module].lora]
    if not targets:
        raise LigerzooError("the model has no adapter", where="save_adapter", remedy="Call add_lora(model) first.")
    updates = stored_updates(targets)
    if others := [update.name for update in updates if "/" in update.name]:
        what, remedy = "PEFT's files cannot name modules after the decoder", "Leave them out of the targets."
        raise CheckpointError(what, where=directory, got=first_names(others), remedy=remedy)
    uses_dora = _uses_dora(layers, targets, directory)
    tensors: dict[str, Tensor] = {}
    options: dict[str, LoRAOptions] = {}
    for update in updates:
        values, options[update.name] = _as_stored(model, update, layers, available)
        tensors |= update.name_tensors(values)
    base_tensors, base_entries = stored_base_weights(model, names, directory)
    config = {
        "peft_type": "LORA",
        "task_type": _task_type(model),
        "base_model_name_or_path": None if base_model is None else str(base_model),
        "inference_mode": True,
        "bias": "none",
        "use_dora": uses_dora,
        **_options_entries(updates, options),
        "target_modules": _target_names(updates, names, available, is_parameter=False),
        "target_parameters": _target_names(updates, names, available, is_parameter=True) or None,
        **base_entries,
    }
    if is_sharded(model.parameters()) and torch.distributed.get_rank() != 0:
        return
    with replacing_directory(directory, keep=lambda name: True) as temporary:
        (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        write_safetensors(temporary / WEIGHT_FILE, {**tensors, **base_tensors})


def _whole(tensor: Tensor) -> Tensor:
    return full(tensor).detach()


def _uses_dora(layers: Mapping[str, LoRALayer], targets: Sequence[Target], directory: str | Path) -> bool:
    dora = {layers[t.module].update_tensors(t.parameter).magnitudes is not None for t in targets}
    if len(dora) > 1:
        what = "PEFT's files hold DoRA for all weights of an adapter or for none"
        raise CheckpointError(what, where=directory, remedy="Call add_lora once, for all targets.")
    return dora == {True}


def _task_type(model: LanguageModel) -> str | None:
    """Returns PEFT's name of what the model does; None if it has none."""
    types = {SequenceClassifier: "SEQ_CLS", TokenClassifier: "TOKEN_CLS", CausalLM: "CAUSAL_LM"}
    types |= {EmbeddingModel: "FEATURE_EXTRACTION"}
    return next((name for cls, name in types.items() if isinstance(model, cls)), None)


def _as_stored(
    model: LanguageModel, update: StoredUpdate, layers: Mapping[str, LoRALayer], available: Sequence[Target]
) -> tuple[UpdateTensors, LoRAOptions]:
    """Returns the tensors and options of the update of transformers' weight, which may fuse several of ours.

    Args:
        model: the model.
        update: the update.
        layers: the model's layers with updates.
        available: all targets of the model.
    """
    parts = [layers[t.module].update_tensors(t.parameter) for t in update.targets]
    options = [layers[t.module].lora[t.parameter] for t in update.targets]
    first = update.targets[0]
    if first.is_part:
        magnitudes = None if parts[0].magnitudes is None else _row_norms(model, first.stored_parameter, available)
        return _fused(update, parts, options, magnitudes)
    [(a, b, magnitudes)] = parts
    if first.is_experts:
        return UpdateTensors(*pack_experts(_whole(a), _whole(b), first.is_interleaved)), options[0]
    return UpdateTensors(_whole(a), _whole(b), None if magnitudes is None else _whole(magnitudes)), options[0]


def _fused(
    update: StoredUpdate, parts: Sequence[UpdateTensors], options: Sequence[LoRAOptions], magnitudes: Tensor | None
) -> tuple[UpdateTensors, LoRAOptions]:
    """Returns one update of all parts: rows of B select the part, columns its matrix A. `magnitudes` are filled."""
    matrices = {id(part.a): _whole(part.a) for part in parts}
    ends = accumulate(map(len, matrices.values()))
    columns = {key: slice(end - len(a), end) for (key, a), end in zip(matrices.items(), ends, strict=True)}
    a, scale, use_rslora = torch.cat(list(matrices.values())), options[0].scale, options[0].use_rslora
    b = a.new_zeros(update.targets[0].stored_shape[0], len(a))
    for target, part, own in zip(update.targets, parts, options, strict=True):
        rows = slice(*target.rows)
        b[rows, columns[id(part.a)]] = _whole(part.b) * (own.scale / scale)
        if magnitudes is not None and part.magnitudes is not None:
            magnitudes[rows] = _whole(part.magnitudes)
    rank = len(a)
    alpha = scale * (rank**0.5 if use_rslora else rank)
    merged = LoRAOptions(rank=rank, alpha=alpha, use_rslora=use_rslora, dropout=options[0].dropout)
    return UpdateTensors(a, b, magnitudes), merged


def _row_norms(model: LanguageModel, stored_parameter: str, available: Sequence[Target]) -> Tensor:
    """Returns the norms of all rows of transformers' weight: the magnitudes of rows without an update."""
    parts = [target for target in available if target.stored_parameter == stored_parameter]
    weights: list[Tensor] = [getattr(model.get_submodule(part.module), part.parameter) for part in parts]
    norms = torch.empty(parts[0].stored_shape[0], device=weights[0].device)
    for part, weight in zip(parts, weights, strict=True):
        norms[slice(*part.rows)] = torch.linalg.vector_norm(_whole(weight).float(), dim=1)
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


def _target_names(
    updates: Sequence[StoredUpdate], modules: ModuleNames, available: Sequence[Target], *, is_parameter: bool
) -> list[str]:
    """Returns the names of modules or parameters: short ones where these name no other weight, else whole ones."""
    names = {update.name for update in updates if update.targets[0].is_parameter == is_parameter}
    weights = {part.stored_name for name in modules.shapes for part in modules.slices(name)}
    others = (weights if is_parameter else {name.rpartition(".")[0] for name in weights}) - names
    # Of models with experts, PEFT takes "gate_proj" for a part of each expert's `gate_up_proj`.
    parts = 2 if is_parameter or any(target.is_experts for target in available) else 1

    def short(name: str) -> str:
        last = ".".join(name.split(".")[-parts:])
        return name if last.isdecimal() else last  # "0" would also name the first block

    ambiguous = {short(name) for name in others}
    return sorted({name if short(name) in ambiguous else short(name) for name in names})

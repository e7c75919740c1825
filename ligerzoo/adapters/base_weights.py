"""Weights of the base model that an adapter's file holds too: trained modules, embeddings, and rows of tokens.

PEFT names the tensors of a module M so:

    modules_to_save                        M.weight; if embeddings are stored, also copies under M.modules_to_save and
                                           M.original_module
    embeddings with added tokens, or with  M.weight, M.base_layer.weight if M has an update, or
    save_embedding_layers                  M.token_adapter.base_layer.weight if M has rows
    trainable_token_indices                M.token_adapter.trainable_tokens_delta, the rows of these tokens

A tied embedding and head are two modules. They stay one weight with `ensure_weight_tying`, or if the same rows of both,
or rows of the embedding only, are stored.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.adapters.module_names import ModuleNames, lora_layers
from ligerzoo.adapters.peft_config import PeftConfig, unmatched
from ligerzoo.adapters.peft_tensors import PREFIX
from ligerzoo.convert.stored_tensors import StoredTensors, assemble
from ligerzoo.convert.tensor_slices import Shape, TensorSlice, shapes_of
from ligerzoo.dtensors import full
from ligerzoo.entries import is_object
from ligerzoo.errors import CheckpointError
from ligerzoo.hub.tying import (
    EMBEDDING,
    EMBEDDING_MODULE,
    HEAD,
    HEAD_MODULE,
    TIED,
    check_equal,
    tied_modules,
    untie,
)
from ligerzoo.models.language_model import LanguageModel

_WRAPPERS = ("", ".base_layer", ".token_adapter.base_layer")


class TokenRows(NamedTuple):
    """Rows of an embedding or head that are stored: the name of their tensor, and their token ids."""

    stored_name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class BaseWeights:
    """The weights of the base model in an adapter's file.

    Attributes:
        trained: slices of modules that were trained in full.
        replaced: slices of embeddings and heads that are not those of the base model.
        rows: by our module.
        redundant: names of further tensors that PEFT may write, and does not read.
        tied: our modules that share a weight.
        untied: those of them that get their own.
        shapes: of the tensors in the file, by name.
    """

    trained: tuple[TensorSlice, ...]
    replaced: tuple[TensorSlice, ...]
    rows: Mapping[str, TokenRows]
    redundant: frozenset[str]
    tied: tuple[str, ...]
    untied: tuple[str, ...]
    shapes: Mapping[str, Shape]

    def check_tied(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """Raises CheckpointError if the file holds different values for an embedding and head that the model ties."""
        if self.tied and HEAD_MODULE not in self.rows:
            names = [f"{PREFIX}{part.stored_name}" for part in self.replaced if part.name in TIED]
            remedy = "Load the base model with tie_word_embeddings=False."
            check_equal({name: tensors[name] for name in names}, path, remedy)


def plan_base_weights(
    model: LanguageModel, config: PeftConfig, config_path: Path, names: ModuleNames, stored: Collection[str]
) -> BaseWeights:
    """Finds the weights of the base model in an adapter's file.

    Args:
        model: the base model.
        config: adapter_config.json.
        config_path: its path.
        names: all names of modules.
        stored: names of the tensors in the file.

    Raises:
        CheckpointError: the config names embeddings or tokens that the model lacks.
    """
    tied = tied_modules(model)
    trained = _trained_slices(config, names, tied)
    trained_names = list(dict.fromkeys(part.name for part in trained))
    replaced = _replaced_slices(names, trained_names, stored)
    rows = _rows(config, names, trained_names, f"{config_path}, trainable_token_indices")
    shapes = {f"{PREFIX}{part.stored_name}": part.stored_shape for part in (*trained, *replaced)}
    redundant = {copy for part in trained for copy in _copies(part.stored_name)}
    embedding = rows.get(EMBEDDING_MODULE)
    if tied and embedding and rows.get(HEAD_MODULE, embedding).token_ids == embedding.token_ids:
        rows.pop(HEAD_MODULE, None)
        redundant.add(_rows_name(names.module_of(HEAD)))
    for module, (name, token_ids) in rows.items():
        shapes[name] = (len(token_ids), names.shapes[f"{module}.weight"][1])
    untied = [] if config.ensure_weight_tying else [name.rpartition(".")[0] for name in trained_names]
    untied += [HEAD_MODULE] if HEAD_MODULE in rows else []
    return BaseWeights(trained, replaced, rows, frozenset(redundant), tied, tuple(untied), shapes)


def _copies(stored_name: str) -> tuple[str, ...]:
    module, _, leaf = stored_name.rpartition(".")
    return tuple(f"{PREFIX}{module}.{copy}.{leaf}" for copy in ("modules_to_save", "original_module"))


def _rows_name(stored_module: str) -> str:
    return f"{PREFIX}{stored_module}.token_adapter.trainable_tokens_delta"


def _trained_slices(config: PeftConfig, names: ModuleNames, tied: Collection[str]) -> tuple[TensorSlice, ...]:
    """Returns the slices of the modules that are stored as a whole. Of tied ones, both with `ensure_weight_tying`."""

    def is_trained(name: str) -> bool:
        is_one = config.ensure_weight_tying and name.rpartition(".")[0] in tied
        same = (name, *(f"{module}.weight" for module in tied)) if is_one else (name,)
        return any(config.has_saved_module(names.all_of(names.module_of(other))) for other in same)

    return tuple(part for name in names.shapes if is_trained(name) for part in names.slices(name))


def _replaced_slices(names: ModuleNames, trained: Collection[str], stored: Collection[str]) -> tuple[TensorSlice, ...]:
    """Returns the slices of embeddings and heads that are stored, but not trained, under the names of wrappers."""
    slices = []
    for name in names.shapes:
        if name.rpartition(".")[0] in (EMBEDDING_MODULE, HEAD_MODULE) and name not in trained:
            part = next(names.slices(name))
            module, _, leaf = part.stored_name.rpartition(".")
            wrapped = (f"{module}{wrapper}.{leaf}" for wrapper in _WRAPPERS)
            slices += [replace(part, stored_name=other) for other in wrapped if f"{PREFIX}{other}" in stored]
    return tuple(slices)


def _rows(config: PeftConfig, names: ModuleNames, trained: Collection[str], where: str) -> dict[str, TokenRows]:
    """Returns the rows of the embedding and the head that are stored."""
    present = [name for name in (EMBEDDING, HEAD) if name in names.shapes]
    modules = {name.removesuffix(".weight"): names.module_of(name) for name in present}
    entry = config.trainable_token_indices
    all_names = [name for module in modules.values() for name in names.all_of(module)]
    if is_object(entry) and (missing := unmatched(entry, all_names)):
        what, expected = "not the embedding or the head", " or ".join(modules.values())
        raise CheckpointError(what, where=where, got=missing, expected=expected)
    rows: dict[str, TokenRows] = {}
    for module, stored_module in modules.items():
        token_ids = config.token_indices(names.all_of(stored_module), is_embedding=module == EMBEDDING_MODULE)
        if not token_ids:
            continue
        if max(token_ids) >= (size := names.shapes[f"{module}.weight"][0]):
            remedy = "If tokens were added, call model.resize_token_embeddings first."
            got, expected = max(token_ids), f"less than {size}"
            raise CheckpointError("not a token id", where=where, got=got, expected=expected, remedy=remedy)
        if f"{module}.weight" in trained:
            raise CheckpointError("the whole module is stored too, as modules_to_save says", where=where, got=module)
        rows[module] = TokenRows(_rows_name(stored_module), token_ids)
    return rows


@torch.no_grad()
def copy_base_weights(model: LanguageModel, plan: BaseWeights, tensors: Mapping[str, Tensor]) -> None:
    """Copies the stored tensors into the model. Modules that were trained in full train again, rows do not."""
    for module in plan.untied:
        untie(model, module)
    state, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    dtypes, device = {name: tensor.dtype for name, tensor in state.items()}, torch.device("cpu")

    def read(part: TensorSlice) -> Tensor:
        return part.select(tensors[f"{PREFIX}{part.stored_name}"])

    values = assemble([*plan.trained, *plan.replaced], shapes_of(state), read, dtypes=dtypes, device=device)
    for part in plan.replaced:
        if not torch.equal(state[part.name], values[part.name].to(state[part.name].device)):
            model.replaced_weights[part.name.rpartition(".")[0]] = None
    for name, value in values.items():
        state[name].copy_(value)
    for part in plan.trained:
        if part.name in parameters:
            parameters[part.name].requires_grad_(True)
    for module, (stored_name, token_ids) in plan.rows.items():
        weight = state[f"{module}.weight"]
        weight[list(token_ids)] = tensors[stored_name].to(weight)
        model.replaced_weights.setdefault(module, token_ids)


def stored_base_weights(
    model: LanguageModel, stored_names: ModuleNames, directory: str | Path
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Returns the tensors of an adapter's file that are not updates, and their config entries.

    These are modules that train in full, and embeddings and heads that are not those of the base model.

    Raises:
        CheckpointError: PEFT's format cannot express them.
    """
    state, updated = model.state_dict(), lora_layers(model)
    shapes = stored_names.shapes
    parts = {name: list(stored_names.slices(name)) for name in shapes}
    modules = _trained_modules(model, {name: stored_names.module_of(name) for name in shapes})
    names = [name for name, (part, *_) in parts.items() if _is_within(part.stored_name, modules)]
    for name in updated:
        if any(other.rpartition(".")[0] == name for other in names):
            what = "PEFT's files hold an update of a weight or the weight itself"
            got = "both, or an update within a module that trains"
            remedy = "Freeze the weight, or save the whole model."
            raise CheckpointError(what, where=f"{directory}, module {name!r}", got=got, remedy=remedy)
    slices = [part for name in names for part in parts[name]]
    stored = StoredTensors(slices, {name: full(state[name]) for name in names})
    tensors = {f"{PREFIX}{name}": tensor for name, tensor in stored.items()}
    rows: dict[str, list[int]] = {}
    for module, indices in model.replaced_weights.items():
        if f"{module}.weight" in names:
            continue
        stored_module, has_update = stored_names.module_of(f"{module}.weight"), module in updated
        if indices is None:
            wrapper = ".base_layer" if has_update else ""
            for name in shapes.keys() & {f"{module}.weight", f"{module}.bias"}:
                leaf = name.rpartition(".")[2]
                tensors[f"{PREFIX}{stored_module}{wrapper}.{leaf}"] = full(state[name])
        elif has_update:
            what, where = "PEFT's files hold an update of a module or rows of it", f"{directory}, module {module!r}"
            remedy = "Leave the module out of the targets, or save the whole model."
            raise CheckpointError(what, where=where, got="both", remedy=remedy)
        else:
            rows[stored_module] = list(indices)
            tensors[_rows_name(stored_module)] = full(state[f"{module}.weight"])[list(indices)]
    is_tied = any(f"{module}.weight" in names for module in tied_modules(model))
    entries: dict[str, object] = {
        "modules_to_save": modules or None,
        "trainable_token_indices": rows or None,
        "ensure_weight_tying": is_tied,
    }
    return tensors, entries


def _trained_modules(model: LanguageModel, stored_modules: Mapping[str, str]) -> list[str]:
    """Returns transformers' modules with parameters that train, except modules within others.

    Args:
        model: the model.
        stored_modules: transformers' module of each of our parameters.
    """
    trained = (name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)
    modules = {stored_modules[name] for name in trained if name in stored_modules}
    return sorted(name for name in modules if not _is_within(name, modules - {name}))


def _is_within(name: str, modules: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in modules for end in range(1, len(parts)))

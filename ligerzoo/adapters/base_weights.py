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
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ligerzoo.adapters.attach import EMBEDDING, HEAD, tied_modules, untie
from ligerzoo.adapters.module_names import ModuleNames, lora_layers
from ligerzoo.adapters.peft_config import PeftConfig, unmatched
from ligerzoo.adapters.peft_tensors import PREFIX
from ligerzoo.convert.stored_tensors import StoredTensors, assemble
from ligerzoo.convert.tensor_slices import Shape, TensorSlice
from ligerzoo.errors import CheckpointError
from ligerzoo.hub.sharding import full
from ligerzoo.models.language_model import LanguageModel

_WRAPPERS = ("", ".base_layer", ".token_adapter.base_layer")


class BaseWeights:
    """The weights of the base model in an adapter's file.

    Args:
        model: the base model.
        config: adapter_config.json.
        config_path: its path.
        names: all names of modules.
        stored: names of the tensors in the file.

    Attributes:
        expected: names and shapes of their tensors.
        redundant: names of further tensors that PEFT may write, and does not read.

    Raises:
        CheckpointError: the config names embeddings or tokens that the model lacks.
    """

    def __init__(
        self, model: LanguageModel, config: PeftConfig, config_path: Path, names: ModuleNames, stored: Collection[str]
    ) -> None:
        self._model, self._config, self._names = model, config, names
        self.tied = tied_modules(model)
        self.expected: dict[str, Shape] = {}
        self.redundant: set[str] = set()
        self._trained: list[TensorSlice] = []
        self._replaced: list[TensorSlice] = []
        for name in self._names.shapes:
            self._add(name, stored)
        self._rows = self._find_rows(f"{config_path}, trainable_token_indices")

    def _is_saved(self, module: str) -> bool:
        return self._config.has_saved_module(self._names.all_of(module))

    def _add(self, name: str, stored: Collection[str]) -> None:
        parts = list(self._names.slices(name))
        ours, (module, _, leaf) = name.rpartition(".")[0], parts[0].stored_name.rpartition(".")
        shared = self.tied if self._config.ensure_weight_tying and ours in self.tied else ()
        if self._is_saved(module) or any(self._is_saved(self._names.module_of(f"{other}.weight")) for other in shared):
            self._trained += parts
            self.expected[f"{PREFIX}{module}.{leaf}"] = parts[0].stored_shape
            self.redundant |= {f"{PREFIX}{module}.{copy}.{leaf}" for copy in ("modules_to_save", "original_module")}
        elif ours in (EMBEDDING, HEAD):
            for stored_name in {f"{PREFIX}{module}{wrapper}.{leaf}" for wrapper in _WRAPPERS} & {*stored}:
                self._replaced.append(replace(parts[0], stored_name=stored_name.removeprefix(PREFIX)))
                self.expected[stored_name] = parts[0].stored_shape

    def _trained_names(self) -> dict[str, None]:
        return dict.fromkeys(part.name for part in self._trained)

    def _find_rows(self, where: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the names of the tensors with rows, and the token ids of these, by our module."""
        present = [module for module in (EMBEDDING, HEAD) if f"{module}.weight" in self._names.shapes]
        modules = {module: self._names.module_of(f"{module}.weight") for module in present}
        entry = self._config.trainable_token_indices
        all_names = [name for module in modules.values() for name in self._names.all_of(module)]
        if isinstance(entry, Mapping) and (missing := unmatched(entry, all_names)):
            what, expected = "not the embedding or the head", " or ".join(modules.values())
            raise CheckpointError(what, where=where, got=missing, expected=expected)
        rows = {
            module: (f"{PREFIX}{name}.token_adapter.trainable_tokens_delta", indices)
            for module, name in modules.items()
            if (indices := self._config.token_indices(self._names.all_of(name), is_embedding=module == EMBEDDING))
        }
        for module, (name, indices) in rows.items():
            size, columns = self._names.shapes[f"{module}.weight"]
            if max(indices) >= size:
                expected = f"less than {size}"
                remedy = "If tokens were added, call model.resize_token_embeddings first."
                raise CheckpointError("not a token id", where=where, got=max(indices), expected=expected, remedy=remedy)
            if f"{module}.weight" in self._trained_names():
                what = "the whole module is stored too, as modules_to_save says"
                raise CheckpointError(what, where=where, got=module)
            self.expected[name] = (len(indices), columns)
        if self.tied and EMBEDDING in rows and rows.get(HEAD, rows[EMBEDDING])[1] == rows[EMBEDDING][1]:
            rows.pop(HEAD, None)
            copy = f"{PREFIX}{modules[HEAD]}.token_adapter.trainable_tokens_delta"
            self.expected.pop(copy, None)
            self.redundant.add(copy)
        return rows

    @property
    def modules_with_rows(self) -> Collection[str]:
        """Our modules of which rows are stored."""
        return self._rows.keys()

    def check(self, tensors: Mapping[str, Tensor], where: Path) -> None:
        """Raises CheckpointError if the file holds different values for an embedding and head that the model ties."""
        weights = [part for part in self._replaced if part.name in (f"{EMBEDDING}.weight", f"{HEAD}.weight")]
        values = [tensors[f"{PREFIX}{part.stored_name}"] for part in weights]
        is_one = self.tied and HEAD not in self._rows and len(values) == 2
        if is_one and not torch.equal(*values):
            what = "head and embedding are stored with different values, but the base model ties them"
            raise CheckpointError(what, where=where, remedy="Load the base model with tie_word_embeddings=False.")

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the stored tensors into the model. Modules that were trained in full train again, rows do not."""
        model = self._model
        for name in self._trained_names():
            if not self._config.ensure_weight_tying:
                untie(model, name.rpartition(".")[0])
        if HEAD in self._rows:
            untie(model, HEAD)
        state, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
        slices = [*self._trained, *self._replaced]
        dtypes, device = {name: tensor.dtype for name, tensor in state.items()}, torch.device("cpu")

        def read(part: TensorSlice) -> Tensor:
            return part.select(tensors[f"{PREFIX}{part.stored_name}"])

        values = assemble(slices, self._names.shapes, read, dtypes=dtypes, device=device)
        for part in self._replaced:
            if not torch.equal(state[part.name], values[part.name].to(state[part.name].device)):
                model.replaced_weights[part.name.rpartition(".")[0]] = None
        for name, value in values.items():
            state[name].copy_(value)
        for name in self._trained_names():
            if name in parameters:
                parameters[name].requires_grad_(True)
        for module, (stored_name, indices) in self._rows.items():
            weight = state[f"{module}.weight"]
            weight[list(indices)] = tensors[stored_name].to(weight)
            model.replaced_weights.setdefault(module, indices)


def stored_base_weights(model: LanguageModel, directory: str | Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Returns the tensors of an adapter's file that are not updates, and their config entries.

    These are modules that train in full, and embeddings and heads that are not those of the base model.

    Raises:
        CheckpointError: PEFT's format cannot express them.
    """
    stored_names, state, updated = ModuleNames(model), model.state_dict(), lora_layers(model)
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
    stored = StoredTensors(slices, {name: full(state[name]).detach() for name in names})
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
                tensors[f"{PREFIX}{stored_module}{wrapper}.{leaf}"] = full(state[name]).detach()
        elif has_update:
            what, where = "PEFT's files hold an update of a module or rows of it", f"{directory}, module {module!r}"
            remedy = "Leave the module out of the targets, or save the whole model."
            raise CheckpointError(what, where=where, got="both", remedy=remedy)
        else:
            rows[stored_module] = list(indices)
            name = f"{PREFIX}{stored_module}.token_adapter.trainable_tokens_delta"
            tensors[name] = full(state[f"{module}.weight"]).detach()[list(indices)]
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

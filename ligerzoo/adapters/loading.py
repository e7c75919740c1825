"""Reads an adapter as PEFT writes it. Nothing is changed before all names and shapes have been checked."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligerzoo.adapters.attach import attach, refuse_adapters, share_a
from ligerzoo.adapters.base_weights import copy_base_weights, plan_base_weights
from ligerzoo.adapters.module_names import ModuleNames, lora_layers
from ligerzoo.adapters.peft_config import CONFIG_FILE, WEIGHT_FILE, PeftConfig, read_adapter_config, unmatched
from ligerzoo.adapters.peft_tensors import PREFIX, StoredUpdate, stored_updates, unpack_experts
from ligerzoo.adapters.targets import Target, targets_of
from ligerzoo.convert.tensor_slices import Shape
from ligerzoo.errors import CheckpointError, first_names, quote
from ligerzoo.files.checkpoint import SafetensorsFile
from ligerzoo.files.locate import locate_files
from ligerzoo.hub.matching import check_stored_tensor
from ligerzoo.layers.lora import LoRALayer, LoRAOptions, UpdateTensors
from ligerzoo.models.language_model import LanguageModel

_TOKENS = {
    re.compile(r".+\.(embed_tokens|lm_head)\.(token_adapter\.)?(base_layer\.)?weight"): 0,
    re.compile(r".+\.lm_head\.lora_B\.weight"): 0,
    re.compile(r".+\.embed_tokens\.lora_embedding_A"): 1,
}
"""Names of tensors with a row or column for each token, and which dimension this is."""
_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")
_OTHER_BASE = "The adapter may be of another base model."


def load_adapter(
    model: LanguageModel, name_or_path: str | Path, *, dtype: torch.dtype = torch.float32, **hub_options: Any
) -> list[str]:
    """Adds the updates and trained modules of a LoRA adapter of PEFT to its base model, and freezes all other weights.

    Parts of a weight that transformers fuses, such as Phi3's `qkv_proj`, share the matrix A, so that training continues
    as in PEFT. An embedding and a head that the adapter holds replace the model's, and rows of them
    (`trainable_token_indices`) those of the model, without training further; `save_adapter` writes them again. Names of
    transformers before 5.0 are read. Only safetensors files are read.

    Args:
        model: the adapter's base model, without adapters. If the adapter was trained with added tokens, call
            `resize_token_embeddings` first.
        name_or_path: directory with adapter_config.json and adapter_model.safetensors, or id of a hub repository.
        dtype: dtype of the updates. Modules that were trained in full get that of the model.
        hub_options: `revision`, `token`, `cache_dir` and `local_files_only`, as in `from_pretrained`.

    Returns:
        The names of the updated weights.

    Raises:
        LigerzooError: the model has adapters.
        CheckpointError: A file is missing or malformed; or adapter_config.json has an unknown or unsupported entry; or
            a tensor is missing, unexpected, or of another shape or dtype than the config and the model imply.
    """
    refuse_adapters(model, "load_adapter")
    directory = locate_files(name_or_path, [CONFIG_FILE, WEIGHT_FILE], **hub_options)
    config = read_adapter_config(directory)
    with SafetensorsFile(directory / WEIGHT_FILE) as file:
        plan = _Plan(model, config, file)
        tensors = {name: file.read(stored_name) for name, stored_name in plan.names.items()}
    plan.base_weights.check_tied(tensors, directory / WEIGHT_FILE)
    model.requires_grad_(False)
    copy_base_weights(model, plan.base_weights, tensors)
    pairs = [(target, options) for update, options in plan.updates for target in update.targets]
    attach(model, pairs, dora=config.use_dora, dtype=dtype)
    layers = lora_layers(model)
    for update, _ in plan.updates:
        _copy_update(layers, update, tensors)
        if update.targets[0].is_part:
            share_a(model, update.targets)
    return [target.name for target, _ in pairs]


def resize_for_adapter(model: LanguageModel, name_or_path: str | Path, **hub_options: Any) -> None:
    """Gives a model as many tokens as an adapter's file has, if it has tensors of the embedding or the head.

    Args:
        model: the adapter's base model, without adapters.
        name_or_path: as in `load_adapter`.
        hub_options: as in `load_adapter`.
    """
    directory = locate_files(name_or_path, [CONFIG_FILE, WEIGHT_FILE], **hub_options)
    read_adapter_config(directory)  # raises if it is not an adapter
    with SafetensorsFile(directory / WEIGHT_FILE) as file:
        sizes = [
            info.shape[dim]
            for name, info in file.tensors.items()
            for pattern, dim in _TOKENS.items()
            if pattern.fullmatch(name) and len(info.shape) == 2
        ]
    if sizes:
        model.resize_token_embeddings(sizes[0])


class _Plan:
    """What to do with each tensor of an adapter's file.

    Attributes:
        names: names of the tensors in the file, by those with today's names of modules.
        updates: updates of transformers' weights, with their options.
        base_weights: weights of the base model that the file holds too.

    Raises:
        CheckpointError: as `load_adapter`.
    """

    def __init__(self, model: LanguageModel, config: PeftConfig, file: SafetensorsFile) -> None:
        self._file, self._config = file, config
        self._config_path = file.path.parent / CONFIG_FILE
        self._module_names = ModuleNames(model)
        self.names = self._current_names()
        targets = targets_of(model, self._module_names)
        if any(target.is_experts for target in targets):
            self._refuse_single_experts()
        self._refuse_unmatched_names(targets)
        self.base_weights = plan_base_weights(model, config, self._config_path, self._module_names, self.names)
        chosen = self._chosen(targets)
        self.updates = [(update, self._options(update)) for update in stored_updates(chosen)]
        expected: dict[str, Shape] = {}
        for update, options in self.updates:
            used = zip(update.tensor_names, update.shapes(options.rank), strict=True)
            expected |= dict(list(used)[: 3 if config.use_dora else 2])
        self._check({**expected, **self.base_weights.shapes})

    def _current_names(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for stored_name in self._file.tensors:
            name = stored_name
            if name.startswith(PREFIX):
                name = PREFIX + self._module_names.current(name.removeprefix(PREFIX))
            if name in names:
                got = first_names([names[name], stored_name])
                raise CheckpointError("one tensor under two names", where=self._file.path, got=got)
            names[name] = stored_name
        return names

    def _chosen(self, targets: list[Target]) -> list[Target]:
        chosen = {target for target in targets if self._is_chosen(target)}
        if self._config.ensure_weight_tying and any(target.module in self.base_weights.tied for target in chosen):
            chosen |= {target for target in targets if target.module in self.base_weights.tied}
        if both := [target.module for target in chosen if target.module in self.base_weights.rows]:
            what, where = "rows of a module that has an update", f"{self._config_path}, trainable_token_indices"
            expected = "modules that target_modules leaves out"
            raise CheckpointError(what, where=where, got=first_names(both), expected=expected)
        return [target for target in targets if target in chosen]

    def _is_chosen(self, target: Target) -> bool:
        update = StoredUpdate((target,))
        names = self._module_names.all_of(update.name)
        if target.is_parameter:
            return self._config.has_parameter(names)
        chosen = self._config.has_module(names)
        return update.tensor_names[0] in self.names if chosen is None else chosen

    def _options(self, update: StoredUpdate) -> LoRAOptions:
        options = self._config.options(self._module_names.all_of(update.name))
        if update.targets[0].is_experts and (self._config.use_dora or options.dropout):
            what, expected = "experts have no DoRA and no dropout", "use_dora=false, lora_dropout=0"
            got = f"use_dora={self._config.use_dora}, lora_dropout={options.dropout}"
            raise CheckpointError(what, where=self._config_path, got=got, expected=expected)
        return options

    def _refuse_single_experts(self) -> None:
        """Raises CheckpointError if gate and up projections of an expert have updates each, with two matrices A.

        Ours, as transformers' since 5.0, are one weight, whose update has one A.
        """
        if found := [name for name in self._file.tensors if _SINGLE_EXPERT.search(name)]:
            what, where = "updates of single experts, as of transformers before 5.0", self._file.path
            got, expected = first_names(found), "updates of `experts.gate_up_proj` and `experts.down_proj`"
            remedy = "Merge them with PEFT and transformers 4: call merge_and_unload, and save the result."
            raise CheckpointError(what, where=where, got=got, expected=expected, remedy=remedy)

    def _refuse_unmatched_names(self, targets: list[Target]) -> None:
        """Raises CheckpointError if the config names a module that the model lacks."""
        modules = [target.stored_module for target in targets if not target.is_parameter]
        parameters = [target.stored_parameter for target in targets if target.is_parameter]
        config = self._config
        for entry, given, candidates in (
            ("target_modules", config.target_modules, modules),
            ("target_parameters", config.target_parameters, parameters),
        ):
            names = [name for candidate in candidates for name in self._module_names.all_of(candidate)]
            if missing := unmatched(given or (), names):
                what, where = "the model has no such weight", f"{self._config_path}, {entry}"
                expected = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in candidates))
                raise CheckpointError(what, where=where, got=missing, expected=expected, remedy=_OTHER_BASE)

    def _check(self, expected: Mapping[str, Shape]) -> None:
        path = self._file.path
        if not self.updates:
            got = first_names(list(self.names)) or None
            raise CheckpointError("no updates of this model's weights", where=path, got=got)
        if unexpected := [name for name in self.names if name not in {*expected, *self.base_weights.redundant}]:
            got = first_names([self.names[name] for name in unexpected], 4)
            implied = f"the tensors that {CONFIG_FILE} and the model imply"
            raise CheckpointError("unexpected tensors", where=path, got=got, expected=implied, remedy=_OTHER_BASE)
        if missing := [name for name in expected if name not in self.names]:
            got, remedy = f"no {first_names(missing, 4)}", f"{CONFIG_FILE} or the base model may be another one."
            raise CheckpointError("tensors are missing", where=path, got=got, remedy=remedy)
        for name, shape in expected.items():
            info = self._file.tensors[self.names[name]]
            is_resized = name in self.base_weights.shapes and info.shape[1:] == shape[1:]
            resize = f"If tokens were added, call model.resize_token_embeddings({info.shape[0]}) first."
            check_stored_tensor(info, shape, f"{path}, tensor {quote(info.name)}", resize if is_resized else None)


def _copy_update(layers: Mapping[str, LoRALayer], update: StoredUpdate, tensors: Mapping[str, Tensor]) -> None:
    """Copies the stored tensors of an update into the layers of its targets."""
    stored, first = update.select(tensors), update.targets[0]
    if first.is_experts:
        stored = UpdateTensors(*unpack_experts(stored.a, stored.b, first.shape[0], first.is_interleaved))
    with torch.no_grad():
        for target in update.targets:
            rows = slice(*target.rows) if target.is_part else slice(None)
            a, b, magnitudes = layers[target.module].update_tensors(target.parameter)
            a.copy_(stored.a)
            b.copy_(stored.b[rows])
            if magnitudes is not None and stored.magnitudes is not None:
                magnitudes.copy_(stored.magnitudes[rows])

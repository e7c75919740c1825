"""Reads an adapter as PEFT writes it. Nothing is changed before all names and shapes have been checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligerzoo.adapters.attach import attach, refuse_adapters, share_a, untie
from ligerzoo.adapters.peft_config import CONFIG_FILE, WEIGHT_FILE, PeftConfig, read_config, unmatched
from ligerzoo.adapters.peft_tensors import PREFIX, StoredUpdate, stored_updates, unpack_experts
from ligerzoo.adapters.targets import Target, base_shapes, targets_of
from ligerzoo.convert import architecture_of_model
from ligerzoo.errors import CheckpointError, first_names, quote
from ligerzoo.files.checkpoint import SafetensorsFile
from ligerzoo.files.locate import locate_files
from ligerzoo.layers.lora import LoRAOptions
from ligerzoo.models.language_model import LanguageModel

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def load_adapter(
    model: LanguageModel, name_or_path: str | Path, *, dtype: torch.dtype = torch.float32, **hub_options: Any
) -> list[str]:
    """Adds the updates and trained modules of a LoRA adapter of PEFT to its base model, and freezes all other weights.

    Parts of a weight that transformers fuses, such as Phi3's `qkv_proj`, share the matrix A, so that training continues
    as in PEFT. Only safetensors files are read.

    Args:
        model: the adapter's base model, without adapters.
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
    config = read_config(directory)
    with SafetensorsFile(directory / WEIGHT_FILE) as file:
        plan = _Plan(model, config, file)
        tensors = {name: file.read(name) for name in file.tensors}
    model.requires_grad_(False)
    for stored_name, name in plan.replaced.items():
        _replace(model, name, tensors[stored_name])
    for stored_name, name in plan.saved.items():
        module, _, _ = name.rpartition(".")
        untie(model, module)
        _replace(model, name, tensors[stored_name]).requires_grad_(True)
    pairs = [(target, options) for update, options in plan.updates for target in update.targets]
    attach(model, pairs, dora=config.use_dora, dtype=dtype)
    for update, _ in plan.updates:
        _copy_update(model, update, tensors)
    return [target.name for target, _ in pairs]


class _Plan:
    """What to do with each tensor of an adapter's file.

    Attributes:
        updates: updates of transformers' weights, with their options.
        saved: our parameters that the adapter trained in full, by the names of stored tensors.
        replaced: our parameters with updates that the file stores too (embeddings, by PEFT's `save_embedding_layers`).

    Raises:
        CheckpointError: as `load_adapter`.
    """

    def __init__(self, model: LanguageModel, config: PeftConfig, file: SafetensorsFile) -> None:
        self._file, self._config = file, config
        self._config_path = file.path.parent / CONFIG_FILE
        targets = targets_of(model)
        chosen = [target for target in targets if self._is_chosen(target)]
        self._refuse_unmatched_names(targets)
        self.updates = [(update, self._options(update)) for update in stored_updates(chosen)]
        layout, shapes = architecture_of_model(model).module_layout, base_shapes(model)
        stored = {
            f"{PREFIX}{part.stored_name}": part for name in shapes for part in layout.slices_of(name, shapes)
            if part.is_copy
        }  # fmt: skip
        adapted = {target.stored_parameter for update, _ in self.updates for target in update.targets}
        self.saved, self.replaced = {}, {}
        expected: dict[str, tuple[int, ...]] = {}
        for update, options in self.updates:
            used = zip(update.tensor_names, update.shapes(options.rank), strict=True)
            expected |= dict(list(used)[: 3 if config.use_dora else 2])
        for name, part in stored.items():
            module, _, parameter = part.stored_name.rpartition(".")
            with_base_layer = f"{PREFIX}{module}.base_layer.{parameter}"
            if part.stored_name in adapted and with_base_layer in file.tensors:
                self.replaced[with_base_layer] = part.name
                expected[with_base_layer] = part.stored_shape
            elif config.has_saved_module(module):
                self.saved[name] = part.name
                expected[name] = part.stored_shape
        self._check(expected)

    def _is_chosen(self, target: Target) -> bool:
        update = StoredUpdate((target,))
        if target.is_parameter:
            return self._config.has_parameter(update.name)
        chosen = self._config.has_module(update.name)
        return update.tensor_names[0] in self._file.tensors if chosen is None else chosen

    def _options(self, update: StoredUpdate) -> LoRAOptions:
        options = self._config.options(update.name)
        if update.targets[0].is_experts and (self._config.use_dora or options.dropout):
            raise CheckpointError(
                "experts have no DoRA and no dropout", where=self._config_path,
                got=f"use_dora={self._config.use_dora}, lora_dropout={options.dropout}",
                expected="use_dora=false, lora_dropout=0",
            )  # fmt: skip
        return options

    def _refuse_unmatched_names(self, targets: list[Target]) -> None:
        """Raises CheckpointError if the config names a module that the model lacks."""
        modules = [target.stored_module for target in targets if not target.is_parameter]
        parameters = [target.stored_parameter for target in targets if target.is_parameter]
        names = self._config.target_modules
        for entry, given, candidates in (
            ("target_modules", () if names is None or isinstance(names, str) else names, modules),
            ("target_parameters", self._config.target_parameters, parameters),
        ):
            if missing := unmatched(given, candidates):
                available = dict.fromkeys(name.rpartition(".")[2] for name in candidates)
                raise CheckpointError(
                    "the model has no such weight", where=f"{self._config_path}, {entry}", got=missing,
                    expected=", ".join(available), remedy="The adapter may be of another base model.",
                )  # fmt: skip

    def _check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        path, found = self._file.path, self._file.tensors
        if not self.updates:
            raise CheckpointError(
                "no updates of this model's weights", where=path, got=first_names(list(found)) or None
            )
        if unexpected := [name for name in found if name not in expected]:
            raise CheckpointError(
                "unexpected tensors", where=path, got=first_names(unexpected, 4),
                expected=f"the tensors that {CONFIG_FILE} and the model imply",
                remedy="The adapter may be of another base model.",
            )  # fmt: skip
        if missing := [name for name in expected if name not in found]:
            raise CheckpointError(
                "tensors are missing", where=path, got=f"no {first_names(missing, 4)}",
                remedy=f"{CONFIG_FILE} or the base model may be another one.",
            )  # fmt: skip
        for name, info in found.items():
            where = f"{path}, tensor {quote(name)}"
            if tuple(info.shape) != expected[name]:
                raise CheckpointError("wrong shape", where=where, got=tuple(info.shape), expected=expected[name])
            if info.dtype not in _DTYPES:
                dtypes = " or ".join(map(str, _DTYPES))
                raise CheckpointError("not a dtype of weights", where=where, got=info.dtype, expected=dtypes)


def _replace(model: LanguageModel, name: str, value: Tensor) -> Tensor:
    parameter = model.get_parameter(name)
    with torch.no_grad():
        parameter.copy_(value)
    return parameter


def _copy_update(model: LanguageModel, update: StoredUpdate, tensors: Mapping[str, Tensor]) -> None:
    """Copies the stored tensors of an update into the layers of its targets."""
    a_name, b_name, magnitude_name = update.tensor_names
    a, b, magnitudes = tensors[a_name], tensors[b_name], tensors.get(magnitude_name)
    first = update.targets[0]
    with torch.no_grad():
        if first.is_experts:
            for name, value in zip("AB", unpack_experts(a, b, first.shape[0], first.is_interleaved), strict=True):
                model.get_parameter(f"{first.module}.{first.parameter}_lora_{name}").copy_(value)
            return
        for target in update.targets:
            layer: Any = model.get_submodule(target.module)
            rows = slice(*target.rows) if target.is_part else slice(None)
            getattr(layer, layer.a_name).copy_(a)
            getattr(layer, layer.b_name).copy_(b[rows])
            if magnitudes is not None:
                layer.lora_magnitude_vector.copy_(magnitudes[rows])
    if first.is_part:
        share_a(model, update.targets)

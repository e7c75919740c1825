"""PEFT's adapter_config.json: which of its entries we read, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerzoo.errors import CheckpointError, did_you_mean, first_names, quote
from ligerzoo.files.locate import ADAPTER_CONFIG_FILE
from ligerzoo.files.untrusted import read_json
from ligerzoo.layers.lora import LoRAOptions

CONFIG_FILE = ADAPTER_CONFIG_FILE
WEIGHT_FILE = "adapter_model.safetensors"

_UNUSED = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip
"""Entries that say nothing about the weights."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other initializations change the weights of the base model.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Entries of which we read some values only. Of an unknown entry we read None, False and empty values."""

_NAME = re.compile(r"\^?(?:\.\*\\\.)?(?:[\w.-]|\\\.|\\-)+")
"""Keys of patterns: a name, or the regular expression that PEFT writes for one, such as `.*\\.gate_up_proj`."""


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """The entries that describe an adapter. The names are PEFT's.

    Attributes:
        r: rank of the updates.
        lora_alpha: scaling of the updates.
        target_modules: names of modules, or their last parts; a regular expression as a string is not evaluated.
        target_parameters: names of parameters, or their last parts.
        exclude_modules: names or last parts of modules without updates.
        layers_to_transform: indices of layers whose `target_modules` have updates; None for all.
        layers_pattern: names of the lists of layers that are counted; None for any.
        modules_to_save: names, or their ends, of modules that are stored as a whole.
        trainable_token_indices: tokens whose rows are stored, by the name or last parts of an embedding or head; a
            sequence means those of the embedding.
        ensure_weight_tying: an embedding and a head that share a weight are stored as one.
        rank_pattern: ranks of modules with others, by name or last parts.
        alpha_pattern: `lora_alpha` of modules with others.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    target_modules: tuple[str, ...] | str | None = None
    target_parameters: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: Mapping[str, tuple[int, ...]] | tuple[int, ...] = ()
    ensure_weight_tying: bool = False
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def options(self, names: Sequence[str]) -> LoRAOptions:
        """Returns the options of the update of a module or parameter of transformers.

        Args:
            names: its names in all versions of transformers, as in the methods below.
        """
        rank = _first_match(self.rank_pattern, names, self.r)
        alpha = _first_match(self.alpha_pattern, names, self.lora_alpha)
        return LoRAOptions(rank=rank, alpha=alpha, use_rslora=self.use_rslora, dropout=self.lora_dropout)

    def has_module(self, names: Sequence[str]) -> bool | None:
        """Whether a module of transformers has an update; None if only a regular expression could say."""
        if isinstance(self.target_modules, str) or isinstance(self.exclude_modules, str):
            return None
        if _ends_with_any(names, self.exclude_modules) or self.has_saved_module(names):
            return False
        if not {*names}.isdisjoint(self.target_modules or ()):
            return True
        if not _ends_with_any(names, self.target_modules or ()):
            return False
        if self.layers_to_transform is None:
            return True
        lists = "|".join(map(re.escape, self.layers_pattern)) or r"[^.]*"
        indices = (re.match(rf"(?:^|.*?\.)(?:{lists})\.(\d+)\.", name) for name in names)
        return any(index is not None and int(index[1]) in self.layers_to_transform for index in indices)

    def has_parameter(self, names: Sequence[str]) -> bool:
        """Whether the config names a parameter of transformers."""
        return _ends_with_any(names, self.target_parameters)

    def has_saved_module(self, names: Sequence[str]) -> bool:
        """Whether a module of transformers, or one that contains it, is stored as a whole."""
        parts = [name.split(".") for name in names]
        parents = [".".join(own[:end]) for own in parts for end in range(1, len(own) + 1)]
        return any(parent.endswith(saved) for saved in self.modules_to_save for parent in parents)

    def token_indices(self, names: Sequence[str], *, is_embedding: bool) -> tuple[int, ...]:
        """Returns the tokens whose rows of an embedding or head are stored."""
        if isinstance(self.trainable_token_indices, Mapping):
            indices: tuple[int, ...] = _first_match(self.trainable_token_indices, names, ())
            return indices
        return self.trainable_token_indices if is_embedding else ()


def _ends_with_any(names: Sequence[str], ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for name in names for end in ends)


def _first_match(pattern: Mapping[str, Any], names: Sequence[str], default: Any) -> Any:
    """Returns the value of the first key that is a name, its last parts or, after ^, the whole name."""
    for key, value in pattern.items():
        if key.removeprefix("^") in names or (not key.startswith("^") and _ends_with_any(names, [key])):
            return value
    return default


def read_adapter_config(directory: Path) -> PeftConfig:
    """Reads adapter_config.json.

    Raises:
        CheckpointError: The file is missing or malformed, or an entry is unknown, invalid or not supported.
    """
    path = directory / CONFIG_FILE
    raw = read_json(path)
    if "peft_type" not in raw:
        raise CheckpointError("no peft_type", where=path, expected='an adapter of PEFT with peft_type "LORA"')
    values: dict[str, Any] = {"rank_pattern": {}, "alpha_pattern": {}}
    for name, value in raw.items():
        where = f"{path}, {quote(name)[1:-1]}"
        if name in _NEUTRAL:
            if not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL[name]):
                expected = " or ".join(map(repr, _NEUTRAL[name]))
                raise CheckpointError("not supported", where=where, got=quote(value), expected=expected)
        elif name in _READERS:
            if value is not None:
                values[name] = _READERS[name](value, where)
        elif name not in _UNUSED and not (value is None or value is False or value == [] or value == {}):
            nearest = did_you_mean(name, [*_READERS, *_NEUTRAL]) if name not in _UNUSED else None
            raise CheckpointError(
                "not a supported entry", where=where, got=quote(value), expected="no entry, or null",
                remedy=nearest or "Train the adapter without this option.",
            )  # fmt: skip
    config = PeftConfig(**values)
    try:
        for rank, alpha in ((config.r, config.lora_alpha), *((r, 1) for r in config.rank_pattern.values()),
                            *((1, a) for a in config.alpha_pattern.values())):  # fmt: skip
            LoRAOptions(rank=rank, alpha=alpha, dropout=config.lora_dropout)
    except ValueError as error:
        raise CheckpointError(str(error).removeprefix("LoRA: "), where=path) from error
    return config


def _refuse(value: object, where: str, expected: str) -> CheckpointError:
    return CheckpointError("invalid value", where=where, got=quote(value), expected=expected)


def _number(value: object, where: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refuse(value, where, "a number")
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise _refuse(value, where, "true or false")
    return value


def _names(value: object, where: str) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(name, str) and name for name in values):
        raise _refuse(value, where, "a list of names")
    return tuple(values)


def _names_or_expression(value: object, where: str) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else _names(value, where)


def _indices(value: object, where: str) -> tuple[int, ...]:
    values = [value] if type(value) is int else value
    if not isinstance(values, list) or not all(type(index) is int for index in values):
        raise _refuse(value, where, "a list of integers")
    return tuple(values)


def _numbers_by_name(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(value, where, "an object of names and numbers")
    for name, number in value.items():
        if not _NAME.fullmatch(name):
            raise CheckpointError(
                "a regular expression is not supported", where=where, got=quote(name),
                expected="names of modules, or their last parts",
            )  # fmt: skip
        _number(number, where)
    return {name.replace(".*\\.", "", 1).replace("\\", ""): number for name, number in value.items()}


def _tokens(value: object, where: str) -> Mapping[str, tuple[int, ...]] | tuple[int, ...]:
    if isinstance(value, dict):
        return {name: _distinct_tokens(indices, where) for name, indices in value.items()}
    return _distinct_tokens(value, where)


def _distinct_tokens(value: object, where: str) -> tuple[int, ...]:
    indices = _indices(value, where)
    if len({*indices}) < len(indices) or min(indices, default=0) < 0:
        raise _refuse(value, where, "distinct token ids")
    return indices


_READERS: Mapping[str, Any] = {
    "r": _number,
    "lora_alpha": _number,
    "lora_dropout": _number,
    "use_rslora": _flag,
    "use_dora": _flag,
    "target_modules": _names_or_expression,
    "target_parameters": _names,
    "exclude_modules": _names_or_expression,
    "layers_to_transform": _indices,
    "layers_pattern": _names,
    "modules_to_save": _names,
    "trainable_token_indices": _tokens,
    "ensure_weight_tying": _flag,
    "rank_pattern": _numbers_by_name,
    "alpha_pattern": _numbers_by_name,
}


def unmatched(names: Iterable[str], candidates: Sequence[str]) -> str | None:
    """Returns the names that end no candidate, for a message; None if all do."""
    return first_names([name for name in names if not _ends_with_any(candidates, [name])]) or None

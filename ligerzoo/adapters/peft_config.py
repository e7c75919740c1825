"""PEFT's adapter_config.json: which of its entries we read, and what they mean."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_type_hints

from ligerzoo.checks import is_text
from ligerzoo.entries import (
    BOOLEAN,
    INTEGER,
    NAME,
    NUMBER,
    OBJECT,
    JsonType,
    Reader,
    is_array,
    is_object,
    is_one_of,
    list_of,
)
from ligerzoo.errors import CheckpointError, did_you_mean, first_names, quote
from ligerzoo.files.layout import ADAPTER_CONFIG_FILE
from ligerzoo.files.untrusted import read_json
from ligerzoo.layers.lora import LoRAOptions

T = TypeVar("T")

CONFIG_FILE = ADAPTER_CONFIG_FILE
WEIGHT_FILE = "adapter_model.safetensors"

_UNUSED = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "inference_mode",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Entries that say nothing about the weights."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other initializations change the weights of the base model.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Entries of which we read some values only. Of an unknown entry we read None, False and empty values."""

_NUMBERS = OBJECT._replace(expected="an object of names and numbers")
_PATTERN = re.compile(r"\^?(?:\.\*\\\.)?(?:[\w.-]|\\\.|\\-)+")
"""Keys of patterns: a name, or the regular expression that PEFT writes for one, such as `.*\\.gate_up_proj`."""


NamesOrExpression: TypeAlias = tuple[str, ...] | None
TokenIndices: TypeAlias = Mapping[str, tuple[int, ...]] | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """The entries that describe an adapter. The names are PEFT's, and the types say how they are read.

    Attributes:
        r: rank of the updates.
        lora_alpha: scaling of the updates.
        target_modules: names of modules, or their last parts; None for a regular expression, which is not evaluated.
        target_parameters: names of parameters, or their last parts.
        exclude_modules: names or last parts of modules without updates; None as for `target_modules`.
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
    target_modules: NamesOrExpression = ()
    target_parameters: tuple[str, ...] = ()
    exclude_modules: NamesOrExpression = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: TokenIndices = ()
    ensure_weight_tying: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

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
        if self.target_modules is None or self.exclude_modules is None:
            return None
        if _ends_with_any(names, self.exclude_modules) or self.has_saved_module(names):
            return False
        if not {*names}.isdisjoint(self.target_modules):
            return True
        if not _ends_with_any(names, self.target_modules):
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
            return _first_match(self.trainable_token_indices, names, ())
        return self.trainable_token_indices if is_embedding else ()


def _ends_with_any(names: Sequence[str], ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for name in names for end in ends)


def _first_match(pattern: Mapping[str, T], names: Sequence[str], default: T) -> T:
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
    values: dict[str, Any] = {}
    for name, value in raw.items():
        where = f"{path}, {quote(name)[1:-1]}"
        if name in _NEUTRAL:
            if not is_one_of(value, _NEUTRAL[name]):
                expected = " or ".join(map(repr, _NEUTRAL[name]))
                raise CheckpointError("not supported", where=where, got=quote(value), expected=expected)
        elif name in _READERS:
            if value is not None:
                values[name] = _READERS[name](value, where)
        elif name not in _UNUSED and not is_one_of(value, (None, False, [], {})):
            what, got, expected = "not a supported entry", quote(value), "no entry, or null"
            remedy = did_you_mean(name, [*_READERS, *_NEUTRAL]) or "Train the adapter without this option."
            raise CheckpointError(what, where=where, got=got, expected=expected, remedy=remedy)
    config = PeftConfig(**values)
    scalings = [(config.r, config.lora_alpha), *((rank, 1) for rank in config.rank_pattern.values())]
    scalings += [(1, alpha) for alpha in config.alpha_pattern.values()]
    try:
        for rank, alpha in scalings:
            LoRAOptions(rank=rank, alpha=alpha, dropout=config.lora_dropout)
    except ValueError as error:
        raise CheckpointError(str(error).removeprefix("LoRA: "), where=path) from error
    return config


_read = Reader(CheckpointError, problem="invalid value").read


def _listed(kind: JsonType[list[T]], value: object, where: str) -> tuple[T, ...]:
    """Returns the values of a list, or a single value."""
    values: list[T] = _read(kind, value if is_array(value) else [value], where)
    return tuple(values)


_number, _flag = partial(_read, NUMBER), partial(_read, BOOLEAN)
_names = partial(_listed, list_of(NAME, "a list of names"))
_indices = partial(_listed, list_of(INTEGER, "a list of integers"))


def _names_or_expression(value: object, where: str) -> NamesOrExpression:
    return None if is_text(value) else _names(value, where)


def _numbers_by_name(value: object, where: str) -> dict[str, float]:
    numbers = {name: _number(number, where) for name, number in _read(_NUMBERS, value, where).items()}
    for name in numbers:
        if not _PATTERN.fullmatch(name):
            what, expected = "a regular expression is not supported", "names of modules, or their last parts"
            raise CheckpointError(what, where=where, got=quote(name), expected=expected)
    return {name.replace(".*\\.", "", 1).replace("\\", ""): number for name, number in numbers.items()}


def _tokens(value: object, where: str) -> TokenIndices:
    if is_object(value):
        return {name: _distinct_tokens(indices, where) for name, indices in value.items()}
    return _distinct_tokens(value, where)


def _distinct_tokens(value: object, where: str) -> tuple[int, ...]:
    indices = _indices(value, where)
    if len({*indices}) < len(indices) or min(indices, default=0) < 0:
        raise CheckpointError("invalid value", where=where, got=quote(value), expected="distinct token ids")
    return indices


_READERS_BY_TYPE: Mapping[object, Callable[[object, str], object]] = {
    int: _number,  # `LoRAOptions` requires an integer
    float: _number,
    bool: _flag,
    tuple[str, ...]: _names,
    NamesOrExpression: _names_or_expression,
    tuple[int, ...] | None: _indices,
    TokenIndices: _tokens,
    Mapping[str, int]: _numbers_by_name,
    Mapping[str, float]: _numbers_by_name,
}
_READERS = {name: _READERS_BY_TYPE[kind] for name, kind in get_type_hints(PeftConfig).items()}


def unmatched(names: Iterable[str], candidates: Sequence[str]) -> str | None:
    """Returns the names that end no candidate, for a message; None if all do."""
    return first_names([name for name in names if not _ends_with_any(candidates, [name])]) or None

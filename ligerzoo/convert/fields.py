"""Reads and writes entries of config.json, in the spellings of transformers 4 and 5."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypedDict, Union, get_args, get_origin

import torch

from ligerzoo.checks import is_text
from ligerzoo.entries import Entries, flag_entry, is_array, is_object, object_entry, shown
from ligerzoo.errors import ConfigError, did_you_mean
from ligerzoo.models.config import DecoderConfig, field_types

_ORIGINAL = "original_max_position_embeddings"
_OTHER_DTYPE_NAMES = {
    **dict.fromkeys(("fp64", "double"), "float64"),
    **dict.fromkeys(("fp32", "float"), "float32"),
    **dict.fromkeys(("fp16", "half"), "float16"),
    "bf16": "bfloat16",
}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}

SEQUENCE_SUFFIX, TOKEN_SUFFIX = "ForSequenceClassification", "ForTokenClassification"
CLASSIFIER_SUFFIXES = SEQUENCE_SUFFIX, TOKEN_SUFFIX
"""Ends of the names of classifiers in transformers."""

ALTERNATIVE_ENTRIES = frozenset(
    {
        "rope_parameters",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "rotary_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "_sliding_window_pattern",
        "text_config",
        "num_labels",
        "problem_type",
    }
)
"""Entries of config.json that, in some version of transformers, hold the value of a config field or of the labels
under another name, or only where it is not None."""


def is_classifier(raw: Entries, suffixes: tuple[str, ...] = CLASSIFIER_SUFFIXES) -> bool:
    """Returns whether config.json names a class of transformers that classifies sequences or tokens."""
    names = raw.get("architectures")
    return is_array(names) and any(str(name).endswith(suffixes) for name in names)


def shared_fields(raw: Entries, config_class: type) -> dict[str, object]:
    """Returns the entries of config.json that have the name of a config field, converted to the field's type.

    A null counts as absent unless the field can be None. Entries without a field are ignored.
    """
    hints = field_types(config_class)
    return {
        field.name: convert_value(raw[field.name], hints[field.name], field.name)
        for field in fields(config_class)
        if field.name in raw and (raw[field.name] is not None or NoneType in get_args(hints[field.name]))
    }


def convert_value(value: object, hint: object, name: str) -> object:
    """Converts a JSON value to a field's type: objects to dataclasses and lists to tuples, if the type hint says so.

    Args:
        value: value of the entry.
        hint: type hint of the field.
        name: name of the field.

    Raises:
        ConfigError: The field is a dataclass, and the value is not an object or has invalid entries.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        if isinstance(kind, type) and is_dataclass(kind) and not (value is None or isinstance(value, kind)):
            return build_config(kind, shared_fields(object_entry({name: value}, name), kind))
        if (get_origin(kind) or kind) is tuple and is_array(value):
            return tuple(value)
    return value


def convert_overrides(overrides: Entries, config_class: type) -> dict[str, object]:
    """Converts values that a user gives for config fields to the types of the fields. All names must be fields."""
    hints = field_types(config_class)
    return {name: convert_value(value, hints[name], name) for name, value in overrides.items()}


def build_config(config_class: type, values: Entries) -> Any:
    """Returns a config with these field values.

    Raises:
        ConfigError: A field without default is missing, or a value is invalid.
    """
    for field in fields(config_class):
        if field.default is field.default_factory is MISSING and field.name not in values:
            raise ConfigError("missing", where=field.name, expected=f"a value: {config_class.__name__} has no default")
    return config_class(**values)


def written_fields(config: Any) -> dict[str, object]:
    """Returns the entries of config.json that have the names of config fields.

    transformers 5 rejects a null `head_dim` or `num_key_value_heads` in most architectures. So a None is omitted if the
    default is None, and written as the resulting number otherwise.

    Raises:
        ConfigError: JSON cannot represent the value of a field.
    """
    entries = asdict(config)
    if isinstance(config, DecoderConfig):
        for name, resolved in (("head_dim", config.head_size), ("num_key_value_heads", config.kv_heads)):
            if entries[name] is None and getattr(type(config), name) is None:
                del entries[name]
            elif entries[name] is None:
                entries[name] = resolved
    for name, value in entries.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            what, got = "cannot be written to config.json", f"{value!r} ({type(value).__name__})"
            expected = "numbers, strings, booleans, None, or lists, tuples, dicts and dataclasses of them"
            raise ConfigError(what, where=name, got=got, expected=expected) from error
    return entries


def first_given(raw: Entries, *names: str) -> object:
    """Returns the first of these entries of config.json, spellings of one value, that is not null, or None if all are.

    Raises:
        ConfigError: Another of the entries has a value of another JSON type.
    """
    return _first_not_null([(name, raw.get(name)) for name in names])


def _first_not_null(spellings: Iterable[tuple[str, object]]) -> object:
    """Returns the first value that is not None, or None. The values, with their names, must have one JSON type."""
    given = [(name, value) for name, value in spellings if value is not None]
    for name, value in given[1:]:
        if _json_type(value) != _json_type(given[0][1]):
            expected = f"no entry or {_json_type(given[0][1])}, as in {given[0][0]}"
            raise ConfigError("invalid value", where=name, got=shown(value), expected=expected)
    return given[0][1] if given else None


def _json_type(value: object) -> str:
    match value:
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
    return "a list"


class RopeFields(TypedDict):
    """Fields of the rotary embedding; `rope_scaling` is None without scaling."""

    rope_theta: object
    rope_scaling: dict[str, object] | None


def rope_fields(raw: Entries, default_theta: float = 10000.0) -> RopeFields:
    """Reads `rope_theta` and `rope_scaling` from either spelling.

    transformers 4 writes `rope_theta` and `rope_scaling` (with `type` or `rope_type`). transformers 5 writes one object
    `rope_parameters` that includes `rope_theta`. A non-empty `rope_scaling` takes precedence over `rope_parameters`,
    and a theta inside the object over the top-level one.

    Raises:
        ConfigError: The object holds an object for each type of layer, or a value of another JSON type.
    """
    scaling = dict(rope_entry(raw))
    rope_type = first_given(scaling, "rope_type", "type")
    if rope_type is None:
        rope_type = "default"
    for name in ("rope_type", "type", *(["partial_rotary_factor"] if rope_type != "proportional" else [])):
        scaling.pop(name, None)
    theta = _first_not_null(("rope_theta", part.get("rope_theta")) for part in (scaling, raw))
    scaling.pop("rope_theta", None)
    original = _first_not_null((_ORIGINAL, part.get(_ORIGINAL)) for part in (raw, scaling))
    if original is not None:
        scaling[_ORIGINAL] = original
    if nested := [name for name, value in scaling.items() if is_object(value)]:
        got, expected = f"an object with {', '.join(map(repr, nested))}", "the parameters of all layers in one object"
        raise ConfigError("not supported", where="rope_parameters", got=got, expected=expected)
    scales = {"rope_type": rope_type, **scaling} if rope_type != "default" else None
    return {"rope_theta": default_theta if theta is None else theta, "rope_scaling": scales}


def partial_rotary_factor(raw: Entries, default: float | None) -> object:
    """Returns the fraction of a head's features that is rotated.

    An entry inside the object of `rope_entry` takes precedence over the top-level one.
    """
    parts = rope_entry(raw), raw
    factor = _first_not_null(("partial_rotary_factor", part.get("partial_rotary_factor")) for part in parts)
    return default if factor is None else factor


def rope_entry(raw: Entries) -> Entries:
    """Returns the object that holds the parameters of the rotary embedding, in either spelling; may be empty."""
    scaling, parameters = object_entry(raw, "rope_scaling"), object_entry(raw, "rope_parameters")
    return scaling or parameters


def switched_window(raw: Entries, default: int = 4096) -> dict[str, object]:
    """Reads `sliding_window` of configs in which it applies only if `use_sliding_window` is true, as in Qwen's."""
    return {"sliding_window": raw.get("sliding_window", default) if flag_entry(raw, "use_sliding_window") else None}


def first_spelling(**spellings: tuple[str, ...]) -> Callable[[Entries], dict[str, object]]:
    """Returns a function that reads fields under other names in config.json.

    Args:
        spellings: for each field, its names in config.json. The first that is given takes precedence.
    """
    return lambda raw: {**raw, **{name: first_given(raw, *names) for name, names in spellings.items()}}


def written_as(**names: str) -> Callable[[object, dict[str, object]], dict[str, object]]:
    """Returns a function that writes fields under other names to config.json, given by field."""
    return lambda config, entries: {
        **{other: entries[name] for name, other in names.items()},
        **{name: value for name, value in entries.items() if name not in names},
    }


def rope_of_layer_types(
    raw: Entries, default_theta: float, local_theta: object, default_local_theta: float
) -> dict[str, object]:
    """Reads `rope_theta`, `rope_scaling` and `rope_local_base_freq`, that of sliding-window layers, which never scale.

    transformers 5 writes `rope_parameters`, an object per layer type, which takes precedence over `rope_theta` and
    `local_theta`, but not over `rope_scaling`.

    Args:
        raw: config.json.
        default_theta: theta of full attention without an entry.
        local_theta: theta of sliding-window layers where `rope_parameters` has none.
        default_local_theta: the same without an entry.

    Raises:
        ConfigError: A value is invalid, or the sliding-window layers scale.
    """
    both = object_entry(raw, "rope_parameters")
    full = {**object_entry(both, "full_attention"), **object_entry(raw, "rope_scaling")}
    sliding = {"rope_scaling": object_entry(both, "sliding_attention"), "rope_theta": local_theta}
    local = rope_fields(sliding, default_local_theta)
    if local["rope_scaling"] is not None:
        where = "rope_parameters, sliding_attention"
        raise ConfigError("not supported", where=where, got=local["rope_scaling"], expected='rope_type "default"')
    rope = rope_fields({"rope_scaling": full, "rope_theta": raw.get("rope_theta")}, default_theta)
    return {**rope, "rope_local_base_freq": local["rope_theta"]}


def stored_dtype(raw: Entries) -> torch.dtype | None:
    """Returns the dtype that config.json names, in the spelling of transformers 5 (`dtype`) or 4 (`torch_dtype`)."""
    name = first_given(raw, "dtype", "torch_dtype")
    return None if name is None else parse_dtype(name, where="dtype")


def parse_dtype(name: object, *, where: str) -> torch.dtype:
    """Returns a dtype from its name, with or without "torch."; accepts a dtype too.

    Raises:
        ConfigError: It is not a dtype that weights can have.
    """
    dtype = _DTYPES.get(name.removeprefix("torch.")) if is_text(name) else name
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    remedy = did_you_mean(_OTHER_DTYPE_NAMES.get(str(name).lower(), name), _DTYPES)
    raise ConfigError(
        "not a dtype of weights", where=where, got=shown(name), expected=" or ".join(_DTYPES), remedy=remedy
    )


def refuse(raw: Entries, name: str, *, unless: tuple[object, ...], remedy: str | None = None) -> None:
    """Raises ConfigError if an entry of config.json asks for something that the model computes differently.

    Args:
        raw: config.json, or an object in it.
        name: name of the entry.
        unless: accepted values; None accepts absent and null entries.
        remedy: what the user can do.
    """
    value = raw.get(name)
    if not any(value == other and (type(value) is bool) is (type(other) is bool) for other in unless):  # 0 == False
        got = f"an object with {', '.join(map(repr, value))}" if is_object(value) else repr(value)
        expected = " or ".join(dict.fromkeys("no entry" if other is None else repr(other) for other in unless))
        raise ConfigError("not supported", where=name, got=got, expected=expected, remedy=remedy)

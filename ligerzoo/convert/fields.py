"""Reading the entries of config.json: the spellings of transformers 4 and 5, one rule each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from types import NoneType
from typing import Any, get_args

import torch

from ligerzoo.errors import ConfigError
from ligerzoo.models.config import DecoderConfig, field_types

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}

OTHER_SPELLINGS = frozenset(
    {
        "rope_parameters", "num_experts", "num_local_experts", "original_max_position_embeddings",
        "partial_rotary_factor", "_sliding_window_pattern", "text_config",
    }
)  # fmt: skip
"""Entries of config.json that tell, in some version, what a field of another name tells in our configs."""


def shared_fields(raw: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    """The entries of config.json that stand under the name of a field of our config.

    A null counts as absent where the field cannot be None. Entries we don't know are left out: most are inert
    leftovers.
    """
    hints = field_types(config_class)
    return {
        field.name: raw[field.name]
        for field in fields(config_class)
        if field.name in raw and (raw[field.name] is not None or NoneType in get_args(hints[field.name]))
    }


def written_fields(config: DecoderConfig) -> dict[str, Any]:
    """The entries of config.json that stand under the names of our config's fields.

    Transformers 5 reads no null for the size and the number of heads, except in a few architectures. So a None there is
    left out where an absent entry means it, and is written as the number that it stands for where absence means
    another.
    """
    entries = asdict(config)
    for name, meant in (("head_dim", config.head_size), ("num_key_value_heads", config.kv_heads)):
        if entries[name] is None and getattr(type(config), name) is None:
            del entries[name]
        elif entries[name] is None:
            entries[name] = meant
    return entries


def first_told(raw: Mapping[str, Any], *names: str) -> Any:
    """The first of these entries of config.json that is neither absent nor null; None where there is none."""
    return next((raw[name] for name in names if raw.get(name) is not None), None)


def object_entry(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An entry of config.json that is an object itself; empty where it is absent or null."""
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError("not an object", where=name, got=repr(value), expected="an object")
    return value


def flag_entry(raw: Mapping[str, Any], name: str) -> bool:
    """An entry of config.json that is true or false; False where it is absent or null."""
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError("not a possible value", where=name, got=repr(value), expected="true or false")
    return bool(value)


def rope_fields(raw: Mapping[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of our config, from either spelling.

    Transformers 4 has `rope_theta` and `rope_scaling` (whose type may be called `type`), transformers 5 one dict
    `rope_parameters` that holds theta too. A `rope_scaling` that is not empty wins; a theta inside the dict wins over
    the one beside it.
    """
    scaling = dict(rope_entry(raw))
    rope_type = first_told(scaling, "rope_type", "type")
    if rope_type is None:
        rope_type = "default"
    for name in ("rope_type", "type", "partial_rotary_factor"):
        scaling.pop(name, None)
    thetas = scaling.pop("rope_theta", None), raw.get("rope_theta"), default_theta
    theta = next(theta for theta in thetas if theta is not None)
    original = raw.get("original_max_position_embeddings")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return {
        "rope_theta": theta,
        "rope_scaling": {"rope_type": rope_type, **scaling} if rope_type != "default" else None,
    }


def partial_rotary_factor(raw: Mapping[str, Any], default: float) -> float:
    """What part of a head's features is rotated; the one inside the dict of `rope_fields` wins over the one beside
    it."""
    given = (rope_entry(raw).get("partial_rotary_factor"), raw.get("partial_rotary_factor"), default)
    return next(factor for factor in given if factor is not None)


def rope_entry(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the rotary embedding, as far as it stands in an object of its own, in either
    spelling."""
    return object_entry(raw, "rope_scaling") or object_entry(raw, "rope_parameters")


def switched_window(raw: Mapping[str, Any], default: int = 4096) -> dict[str, Any]:
    """`sliding_window` of our config where `use_sliding_window` turns it on or off, and off when absent, as in Qwen's
    config.json."""
    return {"sliding_window": raw.get("sliding_window", default) if flag_entry(raw, "use_sliding_window") else None}


def stored_dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that config.json names, under the spelling of transformers 5 (`dtype`) or 4 (`torch_dtype`)."""
    name = first_told(raw, "dtype", "torch_dtype")
    return None if name is None else parse_dtype(name, where="dtype")


def parse_dtype(name: object, *, where: str) -> torch.dtype:
    """A dtype that weights can have: itself, or from its name, with or without "torch." before it."""
    dtype = _DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES.values():
        raise ConfigError("no dtype of weights", where=where, got=repr(name), expected=" or ".join(_DTYPES))
    return dtype


def refuse(raw: Mapping[str, Any], name: str, *, unless: tuple[object, ...], remedy: str | None = None) -> None:
    """Raises ConfigError if an entry of config.json asks for something we would compute differently."""
    value = raw.get(name)
    if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in unless):  # 0 == False
        shown = repr(value) if not isinstance(value, Mapping) else f"an object with {', '.join(map(repr, value))}"
        raise ConfigError(
            "not supported", where=name, got=shown,
            expected=" or ".join("no entry" if v is None else repr(v) for v in unless), remedy=remedy,
        )  # fmt: skip

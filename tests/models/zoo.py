"""The tiny checkpoints of every architecture."""

import dataclasses
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import pytest

from ligerzoo.convert import MODEL_TYPES, architecture_of
from tests.models.tiny import Tiny

CHECKPOINTS: list[Tiny] = [
    row for model_type in MODEL_TYPES for row in import_module(f"tests.models.tiny_{model_type}").CHECKPOINTS
]

TEXT_CHECKPOINTS = [row for row in CHECKPOINTS if "vision_config" not in row.config]


def model_of(row: Tiny) -> tuple[object, ...]:
    """Returns what the model loaded from a checkpoint depends on, except the values of its weights."""
    config = architecture_of(row.config["model_type"]).config_from_hf({**row.config, **row.corrected})
    return type(config), repr(config), row.tokens


def kinds(entries: Mapping[str, Any], tokens: int) -> Iterator[tuple[str, object]]:
    """Yields names and values of a config. Of other numbers than 0 and 1, only whether they are beyond `tokens`."""
    for name, value in entries.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, Mapping):
                yield from kinds(one, tokens)
            elif isinstance(one, int | float) and one not in (0, 1):
                yield name, "beyond the text" if one > tokens else "within the text"
            else:
                yield name, one


def once_per_kind(rows: list[Tiny]) -> list[Any]:
    """Marks `thorough` the checkpoints that add no new kind of model.

    The first checkpoint of each architecture does, and one whose config has a kind of value that no earlier checkpoint
    of any architecture has: another rope type, a window within the text, a single key-value head.
    """
    found: set[object] = set()
    cases = []
    for row in rows:
        config = architecture_of(row.config["model_type"]).config_from_hf({**row.config, **row.corrected})
        entries = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        new = {type(config), *kinds(entries, row.tokens)} - found
        cases.append(row if new else pytest.param(row, marks=pytest.mark.thorough))
        found |= new
    return cases

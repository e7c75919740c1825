"""Which tiny checkpoints add a kind of model, or of layer, to those before them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ligerzoo import AutoModel
from ligerzoo.convert import architecture_of
from tests.models.tiny import Tiny


def kinds(entry: object, tokens: int, name: str = "") -> Iterator[tuple[str, object]]:
    """Yields names and values of a config. Of other numbers than 0 and 1, only whether they are beyond `tokens`."""
    if dataclasses.is_dataclass(entry):
        entry = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    if isinstance(entry, Mapping):
        for key, value in entry.items():
            yield from kinds(value, tokens, key)
    elif isinstance(entry, list | tuple):
        for value in entry:
            yield from kinds(value, tokens, name)
    elif isinstance(entry, int | float) and entry not in (0, 1):
        yield name, "beyond the text" if entry > tokens else "within the text"
    else:
        yield name, entry


def _once(kinds_of: Callable[[Tiny], set[object]]) -> Callable[[Tiny], set[object]]:
    """Keeps the results by the id of the checkpoint, which stays valid with the checkpoint: many tests share them."""
    found: dict[int, tuple[Tiny, set[object]]] = {}

    def of(row: Tiny) -> set[object]:
        if id(row) not in found:
            found[id(row)] = row, kinds_of(row)
        return found[id(row)][1]

    return of


def _config_of(row: Tiny) -> Any:
    return architecture_of(row.config["model_type"]).config_from_hf({**row.config, **row.corrected})


@_once
def of_model(row: Tiny) -> set[object]:
    """Returns the kinds of a model: its architecture, and those of its config."""
    return {row.config["model_type"], *kinds(_config_of(row), row.tokens)}


ATTENTION = {"rope_type", "layer_types", "sliding_window", "attn_logit_softcapping", "use_bidirectional_attention"}
"""Entries of a config with which layers of one class treat other tokens differently."""


@_once
def of_layers(row: Tiny) -> set[object]:
    """Returns the kinds of a model's layers: their classes, and the kinds of attention."""
    config = _config_of(row)
    classes = set(map(type, AutoModel.from_config(config, device="meta").modules()))
    attention = {(name, value) for name, value in kinds(config, row.tokens) if name in ATTENTION}
    return attention | {one for one in classes if one.__module__.startswith("ligerzoo.layers")}


def repeated(rows: Sequence[Tiny], kinds_of: Callable[[Tiny], set[object]]) -> Iterator[Tiny]:
    """Yields the checkpoints that add no new kind.

    `of_model` finds new kinds in the first checkpoint of each architecture, and in one whose config has a kind of value
    that no earlier checkpoint of any architecture has: another rope type, a single key-value head. `of_layers` finds
    them in fewer: with another router, with a window within the text.
    """
    found: set[object] = set()
    for row in rows:
        new = kinds_of(row)
        if new <= found:
            yield row
        found |= new

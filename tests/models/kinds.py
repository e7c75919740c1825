"""Which tiny checkpoints add a kind of model, layer, config or file to those before them."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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


ATTENTION = {"rope_type", "layer_types", "sliding_window", "attn_logit_softcapping", "use_bidirectional_attention"}
"""Entries of a config with which layers of one class treat other tokens differently."""


@_once
def _of_modules(row: Tiny) -> set[object]:
    """Returns the classes of a model's layers, and the names of its weights without numbers."""
    model = architecture_of(row.config["model_type"]).model_class(_config_of(row), device="meta")
    layers = {type(one) for one in model.modules() if type(one).__module__.startswith("ligerzoo.layers")}
    return {*layers, *(re.sub(r"\d+", "", name) for name, _ in model.named_parameters())}


@_once
def of_layers(row: Tiny) -> set[object]:
    """Returns the kinds of a model's layers: their classes, and the kinds of attention."""
    attention = {(name, value) for name, value in kinds(_config_of(row), row.tokens) if name in ATTENTION}
    return attention | {one for one in _of_modules(row) if isinstance(one, type)}


@_once
def of_model(row: Tiny) -> set[object]:
    """Returns the kinds of a model: its architecture, its layers and its weights, and whether the head is tied."""
    tied = {one for one in kinds(_config_of(row), row.tokens) if one[0] == "tie_word_embeddings"}
    return {row.config["model_type"], *of_layers(row), *_of_modules(row), *tied}


@_once
def of_checkpoint(row: Tiny) -> set[object]:
    """Returns the kinds of a checkpoint: of its model, of values in its config, and of files of its architecture."""
    files = getattr(row.tensors, "__code__", row.tensors)  # functions that one function returns share it
    return {(row.config["model_type"], files), *of_model(row), *kinds(_config_of(row), row.tokens)}


def repeated(rows: Sequence[Tiny], kinds_of: Callable[[Tiny], set[object]]) -> Iterator[Tiny]:
    """Yields the checkpoints that add no new kind.

    `of_model` finds new kinds in the first checkpoint of each architecture, and in one with a kind of layer or weight
    that no earlier checkpoint of any architecture has: another router, a window within the text, a bias. `of_layers`
    finds them for layers only. `of_checkpoint` finds them also in a checkpoint whose config has a new kind of value
    (another rope type, a single key-value head), or whose files store the weights of its architecture in a new way.
    """
    found: set[object] = set()
    for row in rows:
        new = kinds_of(row)
        if new <= found:
            yield row
        found |= new

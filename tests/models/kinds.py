"""Which tiny checkpoints add a kind of model to those before them."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

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


_KINDS: dict[int, tuple[Tiny, set[object]]] = {}
"""What `_kinds_of` found, by the id of the checkpoint, which stays valid with the checkpoint: many tests share them."""


def _kinds_of(row: Tiny) -> set[object]:
    if id(row) not in _KINDS:
        model_type = row.config["model_type"]
        config = architecture_of(model_type).config_from_hf({**row.config, **row.corrected})
        _KINDS[id(row)] = row, {model_type, *kinds(config, row.tokens)}
    return _KINDS[id(row)][1]


def repeated(rows: Sequence[Tiny]) -> Iterator[Tiny]:
    """Yields the checkpoints that add no new kind of model.

    The first checkpoint of each architecture does, and one whose config has a kind of value that no earlier checkpoint
    of any architecture has: another rope type, a window within the text, a single key-value head.
    """
    found: set[object] = set()
    for row in rows:
        new = _kinds_of(row)
        if new <= found:
            yield row
        found |= new

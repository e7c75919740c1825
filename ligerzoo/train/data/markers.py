"""Markers of messages that say whether they are trained, under the names that other libraries use."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from ligerzoo.errors import DataError, quote
from ligerzoo.train.data.samples import Source

TRAINED = "train"
"""The field of a checked message that is not trained: False. Other messages lack it."""

_MARKERS = {
    "train": True, "training": True, "trainable": True, "trained": True, "loss": True, "loss_mask": True,
    "weight": True, "masked": False,
}  # fmt: skip
"""The markers, and which value means that the message is trained. `loss_mask` multiplies the loss."""

_WORDS = {"train", "training", "trained", "trainable", "loss", "mask", "masks", "masked", "weight", "weights"}
"""Words of field names that seem to be about training."""


def with_marker(message: Mapping[str, Any], where: str, source: Source) -> dict[str, Any]:
    """Returns a message with one marker, `TRAINED`, if it has any that is false.

    Args:
        message: the message, with a role.
        where: its name for errors.
        source: the record.

    Raises:
        DataError: a marker has another value than true, false, 1 or 0; markers contradict each other; a message that
            is never trained is marked as trained; or a field seems to be a marker but is unknown.
    """
    given = {name: _is_trained(message[name], name, where, source) for name in _MARKERS if name in message}
    others = {name: value for name, value in message.items() if name not in _MARKERS}
    for name in others:
        if _resembles_marker(name):
            raise DataError(
                f"{where}: unknown field {quote(name)}, which seems to say what is trained", where=source,
                expected=f"{', '.join(_MARKERS)}, each true or false", remedy="Remove or rename the field.",
            )  # fmt: skip
    if len({*given.values()}) > 1:
        raise DataError(f"{where}: fields contradict each other", where=source, got=", ".join(given))
    is_trained = all(given.values())
    if given and is_trained and message["role"] != "assistant":
        raise DataError(
            f"{where}: only messages of the assistant are trained", where=source,
            got=f"role {quote(message['role'])} with {', '.join(given)}", remedy="Remove the field.",
        )  # fmt: skip
    return others if is_trained else {**others, TRAINED: False}


def _is_trained(value: Any, name: str, where: str, source: Source) -> bool:
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise DataError(
            f"{where}: {name} has an unsupported value", where=source, got=quote(value), expected="true, false, 1 or 0"
        )
    return bool(value) == _MARKERS[name]


def _resembles_marker(name: str) -> bool:
    words = re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())
    near = (marker for marker in difflib.get_close_matches(name.lower(), _MARKERS, cutoff=0.8))
    return not _WORDS.isdisjoint(words) or any(marker[0] == name[:1].lower() for marker in near)

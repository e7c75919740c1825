"""Batches of token ids: padding, and conversion to tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch

from ligerzoo.errors import TokenizerError
from ligerzoo.text.tokenizer_files import PaddingSide, checked_side

Columns = dict[str, list[list[Any]]]
"""Values per token, by input name: one list per row."""

_FILL: dict[str, Any] = {
    "attention_mask": 0,
    "token_type_ids": 0,
    "special_tokens_mask": 1,
    "offset_mapping": (0, 0),
    "assistant_masks": 0,
}
"""Values at padding positions. That of `input_ids` is the padding token; other inputs are not padded."""


class BatchEncoding(dict[str, Any]):
    """Model inputs by name, also available as attributes: `inputs.input_ids`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: torch.device | str) -> Self:
        """Moves all tensors to a device, in place, and returns the inputs."""
        self.update({name: value.to(device) for name, value in self.items() if isinstance(value, torch.Tensor)})
        return self


class Padding(NamedTuple):
    """How rows become a batch; `Tokenizer.__call__` has the options.

    Attributes:
        padding: True or "longest", "max_length", or False or "do_not_pad"; None for True if tensors are returned.
        max_length: the length for "max_length"; None is an error there.
        multiple: rounds the length up to a multiple of this.
        side: the side that gets padding.
        return_tensors: "pt" for tensors, None for lists.
    """

    padding: bool | str | None
    max_length: int | None
    multiple: int | None
    side: PaddingSide
    return_tensors: str | None

    def length(self, lengths: Sequence[int]) -> int | None:
        """Returns the length to pad rows to, given their numbers of tokens; None for no padding.

        Raises:
            TokenizerError: an option has an unsupported value.
        """
        padding = self.return_tensors is not None if self.padding is None else self.padding
        if padding is False or padding == "do_not_pad":
            return None
        if padding is True or padding == "longest":
            length = max(lengths, default=0)
        elif padding != "max_length":
            expected = 'True, "longest", "max_length", False or "do_not_pad"'
            raise TokenizerError("unsupported value", where="padding", got=repr(self.padding), expected=expected)
        elif self.max_length is None:
            raise TokenizerError('padding="max_length" without a length', where="max_length", remedy="Pass max_length.")
        else:
            length = self.max_length
        return length if self.multiple is None else math.ceil(length / self.multiple) * self.multiple

    def batch(
        self, columns: Columns, padding_id: Callable[[], int], *, is_single: bool, per_row: Mapping[str, object]
    ) -> BatchEncoding:
        """Pads rows and converts them to tensors.

        Args:
            columns: the rows.
            padding_id: returns the padding token. Called only if rows need padding.
            is_single: whether lists are of one row, without the dimension of the batch.
            per_row: inputs with one number per row.

        Raises:
            TokenizerError: an option has an unsupported value, or rows do not fit in tensors.
        """
        if self.return_tensors not in (None, "pt"):
            got, expected = repr(self.return_tensors), '"pt" or None'
            raise TokenizerError("unsupported value", where="return_tensors", got=got, expected=expected)
        side = checked_side(self.side, "padding_side")
        lengths = [len(row) for row in columns["input_ids"]]
        length = self.length(lengths)
        if length is not None and any(row < length for row in lengths):
            columns = pad_columns(columns, length, padding_id(), side)
        inputs: dict[str, Any] = {**columns, **per_row}
        if self.return_tensors is not None:
            return BatchEncoding(as_tensors(inputs))
        return BatchEncoding({name: rows[0] for name, rows in inputs.items()} if is_single else inputs)


def pad_columns(columns: Columns, length: int, padding_id: int, side: PaddingSide) -> Columns:
    """Pads rows to a length. Longer rows, and inputs that are not values per token, are unchanged."""
    fill = {"input_ids": padding_id, **_FILL}
    return {
        name: [_padded(row, length, fill[name], side) for row in rows] if name in fill else rows
        for name, rows in columns.items()
    }


def as_tensors(columns: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Converts rows to int64 tensors, (B, T).

    Raises:
        TokenizerError: the rows of an input have different lengths, or are not numbers.
    """
    return {name: _as_tensor(name, rows) for name, rows in columns.items()}


def _padded(row: list[Any], length: int, value: Any, side: PaddingSide) -> list[Any]:
    padding = [value] * (length - len(row))
    return padding + row if side == "left" else row + padding


def _as_tensor(name: str, rows: Any) -> torch.Tensor:
    try:
        tensor = torch.tensor(rows)
    except (TypeError, ValueError) as error:
        lengths = sorted({len(row) for row in rows if isinstance(row, Sequence)})
        what, expected = "cannot be converted to a tensor", "rows of equal length"
        got = f"rows of {lengths} elements" if lengths else error
        remedy = "Pass padding=True, and truncation=True if rows are too long."
        raise TokenizerError(what, where=name, got=got, expected=expected, remedy=remedy) from error
    if tensor.numel() == 0:  # torch cannot know the other dimensions
        tensor = tensor.view(len(rows), 0) if not name.startswith("offset") else tensor.view(len(rows), 0, 2)
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)

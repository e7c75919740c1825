"""How data is read, encoded and packed, for recipes and for data of your own. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ligerzoo.checks import AT_LEAST_1, Values, integer, one_of
from ligerzoo.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from ligerzoo.text.special_text import SpecialTokens

TooLong = Literal["error", "truncate", "drop"]
TrainAnswers = Literal["all", "last"]

Packing = Literal["auto", "concatenate", "separate", "whole", "none"]
"""How samples share rows, see `PackedBatches`: "auto" concatenates texts, and packs other samples whole. "none" puts
each sample in a row, see `PaddedBatches`."""


class Frame(NamedTuple):
    """The tokens with which each text begins and ends, such as [CLS] and [SEP]."""

    first: tuple[int, ...]
    last: tuple[int, ...]


def check_data_option(name: str, value: object, values: Values) -> None:
    """Raises DataError unless the option is one of the values."""
    if not values.accepts(value):
        remedy = did_you_mean(str(value), values.choices)
        raise DataError("unsupported value", where=name, got=repr(value), expected=values.expected, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class EncodingOptions:
    """How records become samples. The fields are arguments of `open_data`.

    Raises:
        DataError: an option has an unsupported value.
    """

    seq_length: int
    too_long: TooLong = "error"
    train_on_prompt: bool = False
    train_answers: TrainAnswers = "all"
    end_of_answer: str | None = None
    special_tokens: SpecialTokens = "text"
    chat_template: str | None = None
    template_variables: Mapping[str, object] = field(default_factory=dict)
    eos_token_id: int | None = None
    embedding_rows: int | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None

    def __post_init__(self) -> None:
        from ligerzoo.text.special_text import SpecialTokens

        check_data_option("seq_length", self.seq_length, integer(2))
        choices = {"too_long": TooLong, "train_answers": TrainAnswers, "special_tokens": SpecialTokens}
        for name, accepted in choices.items():
            check_data_option(name, getattr(self, name), one_of(get_args(accepted)))

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the samples, compared when training continues."""
        fields = asdict(self)
        del fields["embedding_rows"]  # only refuses tokens
        return fields


@dataclass(frozen=True, kw_only=True)
class ReadOrder:
    """In which order records are read, and how often. The fields are arguments of `open_data`.

    Raises:
        DataError: an option has an unsupported value.
    """

    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None

    def __post_init__(self) -> None:
        check_data_option("epochs", 1 if self.epochs is None else self.epochs, AT_LEAST_1)


ONCE = ReadOrder(shuffle=False, epochs=1)
"""All records once, in the order of the files."""

"""The options of sampling: for each, the values that it accepts, and what the command line and the server offer of it.

`generate`, requests, the command line and the server take them from here. This module does not import torch, so that
the command line starts fast.
"""
# No `from __future__ import annotations`: the values are read from the annotations.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeVar

from ligerzoo.checks import (
    FLAG,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Values,
    as_list,
    instances,
    integer,
    is_list,
    is_number,
    number,
    option_values,
)
from ligerzoo.errors import LigerzooError, warn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

T = TypeVar("T")

SMALLEST_DIVISOR = 1e-30
"""Logits divided by less may exceed fp32."""

_LARGEST = (2 - 2**-23) * 2.0**127  # of fp32
_INT32 = integer(0, 2**31 - 1)
_COUNT = _INT32._replace(expected="an integer, 0 or more")
_DIVISOR = number(f"a number from {SMALLEST_DIVISOR}, finite in fp32", lambda x: SMALLEST_DIVISOR <= x <= _LARGEST)
_TEMPERATURE = _DIVISOR._replace(contains=lambda x: x == 0 or _DIVISOR.contains(x))
_MAX_WORDS, _MAX_WORD_LENGTH, _MAX_NGRAM_SIZE = 256, 32, 64  # of clients, whose requests cost the time of others

LogitsProcessor = Callable[["Tensor", "Tensor"], "Tensor"]
"""A function of `input_ids` (B, T) and `scores` (B, V) that returns new scores, as in transformers."""


class ConstraintState(Protocol):
    """Which tokens may come next in one row, decided on the host."""

    def append(self, token: int) -> None:
        """Receives the next token of the row."""

    def fill(self, bits: "NDArray[np.uint8]") -> None:
        """Writes which tokens may come next: bit i % 8 of byte i // 8 for token i. A row without any is broken."""


class Constraint(Protocol):
    """Restricts the tokens of continuations, as `ligerzoo.generate.Grammar` does."""

    def start(self, eos_token_ids: Sequence[int]) -> ConstraintState:
        """Returns the state of a row before its first new token. Where it may end, the row needs one of these ids."""


class Offer(NamedTuple):
    """What a user may choose on the command line or in a request to the server.

    Attributes:
        client: the values that a client of the server may choose: some bound the time of others.
        values: the values that the command line accepts; None if it has no such option.
        metavar: name of the value in the help.
        help: the help.
    """

    client: Values
    values: Values | None = None
    metavar: str = "N"
    help: str = ""


def _offered(default: T, metavar: str, help: str, values: Values, client: Values | None = None) -> T:
    return field(default=default, metadata={"offer": Offer(client or values, values, metavar, help)})


def _are_ids(value: Sequence[object]) -> bool:
    return is_list(value) and all(map(_INT32.accepts, value))


def _are_words(value: Sequence[Sequence[object]]) -> bool:
    return is_list(value) and all(word and _are_ids(word) for word in value)


def _are_bad_words(value: Sequence[Sequence[object]]) -> bool:
    return _are_words(value) and len(value) <= _MAX_WORDS and all(len(word) <= _MAX_WORD_LENGTH for word in value)


Biases = Mapping[Sequence[int], float] | Sequence[tuple[Sequence[int], float]]


def _pairs(bias: Biases | None) -> list[tuple[Sequence[int], float]]:
    """Returns the sequences of `sequence_bias` with their biases."""
    return list(bias.items() if isinstance(bias, Mapping) else bias or ())


def _is_bias(pair: Sequence[object]) -> bool:
    if not is_list(pair) or len(pair) != 2:
        return False
    ids, bias = pair
    return bool(ids) and _are_ids(ids) and is_number(bias) and abs(bias) <= _LARGEST


_IDS = instances("a list of token ids", _are_ids)
_WORDS = instances("a list of lists of token ids, none of them empty", _are_words)
_ID_OR_IDS = instances("a token id, a list of them", lambda value: _INT32.accepts(value) or _are_ids(value))
_BIASES = instances(
    "a dict of tuples of token ids to numbers, or a list of such pairs",
    lambda value: (is_list(value) or isinstance(value, Mapping)) and all(map(_is_bias, _pairs(value))),
)
_FUNCTIONS = instances(
    "a list of functions of input_ids and scores", lambda value: is_list(value) and all(map(callable, value))
)
_CONSTRAINT = instances(
    "a constraint, such as a ligerzoo.generate.Grammar", lambda value: callable(getattr(value, "start", None))
)
_BAD_WORDS = instances(f"up to {_MAX_WORDS} lists, each with 1 to {_MAX_WORD_LENGTH} token ids", _are_bad_words)
_CLIENT_TEMPERATURE = number(
    f"0, or a number from {SMALLEST_DIVISOR} to 1000", lambda x: x == 0 or SMALLEST_DIVISOR <= x <= 1000
)
_CLIENT_PENALTY = number("a number from 0.001 to 1000", lambda x: 1e-3 <= x <= 1000)
_CLIENT_NGRAM_SIZE = integer(0, _MAX_NGRAM_SIZE)._replace(
    expected=f"an integer from 0 to {_MAX_NGRAM_SIZE}; 0 allows all"
)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next tokens of a row are chosen. Names and meanings are those of transformers.

    logits -> sequence_bias -> repetition penalty -> banned tokens, constraint and forced tokens -> logits_processor
        -> the most likely token (greedy), or temperature -> top-k -> top-p -> min-p -> sample

    Args:
        do_sample: whether to sample each token. Otherwise the most likely token is chosen, and `temperature`, `top_k`,
            `top_p` and `min_p` have no effect; values that would change the distribution cause a warning.
        temperature: see `apply_temperature`.
        top_k: see `keep_top_k`. None or 0 keeps all tokens.
        top_p: see `keep_top_p`. None keeps all tokens.
        min_p: see `keep_min_p`. None keeps all tokens.
        repetition_penalty: see `penalize_repetition`. It applies to the tokens of the prompt and of the continuation.
        min_new_tokens: number of new tokens before which no end-of-sequence token is chosen. None for 0.
        min_length: the same with the tokens of the prompt, padding included. `min_new_tokens` takes precedence.
        bad_words_ids: sequences of token ids. The last token of a sequence is not chosen where the others come before
            it, in the prompt or in the continuation. A sequence of one end-of-sequence token has no effect.
        no_repeat_ngram_size: n tokens in a row that have occurred, in the prompt or in the continuation, do not occur
            again. None or 0 allows all.
        suppress_tokens: token ids that are never chosen.
        begin_suppress_tokens: token ids that are not chosen as the first new token.
        forced_bos_token_id: the token after a prompt of one token.
        forced_eos_token_id: the token or tokens of which one is the last of `max_new_tokens` tokens.
        sequence_bias: added to the logit of the last token of a sequence where the others come before it: a dict of
            tuples of token ids, or a list of pairs of a list of token ids and a number.
        constraint: restricts the tokens, such as a `ligerzoo.generate.Grammar`. The host chooses which tokens may come
            next while the model runs.
        logits_processor: functions `f(input_ids, scores) -> scores`, such as objects of transformers' `LogitsProcessor`
            classes, called one after the other on each step: `input_ids` (B, T) int64 are the prompt and the new
            tokens, `scores` (B, V) fp32. With them, decoding runs eagerly after the model.

    Raises:
        LigerzooError: an option is invalid.
    """

    do_sample: Annotated[bool, FLAG] = False
    temperature: Annotated[float, _TEMPERATURE] = _offered(
        1.0,
        "T",
        "less than 1: more predictable; greater than 1: more varied; 0: the most likely token",
        NOT_NEGATIVE._replace(expected="a number, 0 or more"),
        _CLIENT_TEMPERATURE,
    )
    top_k: Annotated[int, _INT32._replace(expected="a positive integer, or 0 for all tokens")] | None = _offered(
        None, "K", "sample from the K most likely tokens", integer(1, 2**31 - 1)
    )
    top_p: Annotated[float, SHARE] | None = _offered(
        None, "P", "sample from the most likely tokens with total probability P", SHARE
    )
    min_p: Annotated[float, FRACTION] | None = _offered(
        None, "P", "drop tokens less than P times as likely as the most likely one", FRACTION
    )
    repetition_penalty: Annotated[float, _DIVISOR._replace(expected=f"{_DIVISOR.expected}; 1 has no effect")] = (
        _offered(1.0, "R", "greater than 1: make tokens that have occurred less likely", POSITIVE, _CLIENT_PENALTY)
    )
    min_new_tokens: Annotated[int, _COUNT] | None = _offered(
        None, "N", "no end of the sequence before N new tokens", _INT32
    )
    min_length: Annotated[int, _COUNT] | None = None
    bad_words_ids: Annotated[Sequence[Sequence[int]], _WORDS] | None = field(
        default=None, metadata={"offer": Offer(_BAD_WORDS)}
    )
    no_repeat_ngram_size: Annotated[int, _COUNT] | None = _offered(
        None, "N", "never repeat N tokens in a row; 0 allows all", _INT32, _CLIENT_NGRAM_SIZE
    )
    suppress_tokens: Annotated[Sequence[int], _IDS] | None = None
    begin_suppress_tokens: Annotated[Sequence[int], _IDS] | None = None
    forced_bos_token_id: Annotated[int, _INT32._replace(expected="a token id")] | None = None
    forced_eos_token_id: Annotated[int | Sequence[int], _ID_OR_IDS] | None = None
    sequence_bias: Annotated[Biases, _BIASES] | None = None
    constraint: Annotated[Constraint, _CONSTRAINT] | None = None
    logits_processor: Annotated[Sequence[LogitsProcessor], _FUNCTIONS] | None = None

    def __post_init__(self) -> None:
        divisor = {"temperature": _DIVISOR} if self.do_sample else {}
        for name, values in {**_VALUES, **divisor}.items():
            if not values.accepts(value := getattr(self, name)):
                remedy = _REMEDIES.get(name)
                raise LigerzooError(
                    "invalid value", where=name, got=repr(value), expected=values.expected, remedy=remedy
                )
        if self.do_sample:
            return
        unused = {name: value for name, neutral in FILTERS.items() if (value := getattr(self, name)) not in neutral}
        if unused:
            warn(
                f"generate: {', '.join(f'{name}={value!r}' for name, value in unused.items())} has no effect with "
                "do_sample=False, which chooses the most likely token. Pass do_sample=True to sample."
            )

    @property
    def is_filtering(self) -> bool:
        """Whether tokens may be dropped by `top_k`, `top_p` or `min_p`."""
        return self.do_sample and not (self.top_k in (None, 0) and self.top_p in (None, 1) and self.min_p in (None, 0))

    @property
    def is_banning(self) -> bool:
        """Whether tokens may be banned by their ids."""
        words, suppressed = self.bad_words_ids, (self.suppress_tokens, self.begin_suppress_tokens)
        return bool(words or self.min_new_tokens or self.min_length or any(suppressed))

    @property
    def biases(self) -> list[tuple[Sequence[int], float]]:
        """The sequences of `sequence_bias` with their biases."""
        return _pairs(self.sequence_bias)

    @property
    def forced_eos_token_ids(self) -> list[int]:
        """The tokens of `forced_eos_token_id`."""
        ids = self.forced_eos_token_id
        return [] if ids is None else as_list(ids, int)


_VALUES = {one.name: values for one in fields(SamplingOptions) if (values := option_values(one.type))}
_REMEDIES = {
    "temperature": "For the most likely token, leave out temperature and do_sample.",
    "bad_words_ids": "tokenizer.encode(text) returns the token ids of a text, one sequence.",
    "constraint": "Grammar.json_schema(schema, tokenizer) is one.",
    "logits_processor": "Pass logits_processor=[processor].",
}

SAMPLING_OPTIONS = tuple(_VALUES)
"""Names of the options of sampling."""

OFFERS: dict[str, Offer] = {
    one.name: one.metadata["offer"] for one in fields(SamplingOptions) if "offer" in one.metadata
}
"""The options of sampling that the command line or the server has."""

FILTERS: dict[str, tuple[float | None, ...]] = {
    "temperature": (0, 1), "top_k": (None, 0), "top_p": (None, 1), "min_p": (None, 0)
}  # fmt: skip
"""Options that have an effect only if `do_sample` is true, and their values without one."""


def infer_do_sample(options: Mapping[str, Any]) -> dict[str, Any]:
    """Completes options that do not say whether to sample: one of `FILTERS` samples, but a temperature of 0 does not.

    Args:
        options: of `generate`, by name. None counts as left out.
    """
    given = {name: value for name, value in options.items() if value is not None}
    filters = given.keys() & FILTERS.keys()
    if given.get("temperature") == 0:
        return {name: value for name, value in given.items() if name not in filters} | {"do_sample": False}
    return given | {"do_sample": True} if filters else given

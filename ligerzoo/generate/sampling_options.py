"""The options of sampling, validated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ligerzoo.generate.options import is_integer, is_number, require, require_bool, warn

SMALLEST_DIVISOR = 1e-30
"""Logits divided by less may exceed fp32."""

_EXPECTED = f"a number from {SMALLEST_DIVISOR}, finite in fp32"

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""A function of `input_ids` (B, T) and `scores` (B, V) that returns new scores, as in transformers."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next tokens of a row are chosen. Names and meanings are those of transformers.

    logits -> sequence_bias -> repetition penalty -> banned and forced tokens -> logits_processor
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
        logits_processor: functions `f(input_ids, scores) -> scores`, such as objects of transformers' `LogitsProcessor`
            classes, called one after the other on each step: `input_ids` (B, T) int64 are the prompt and the new
            tokens, `scores` (B, V) fp32. With them, decoding runs eagerly after the model.

    Raises:
        LigerzooError: an option is invalid.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    min_new_tokens: int | None = None
    min_length: int | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    no_repeat_ngram_size: int | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    sequence_bias: Mapping[Sequence[int], float] | Sequence[tuple[Sequence[int], float]] | None = None
    logits_processor: Sequence[LogitsProcessor] | None = None

    def __post_init__(self) -> None:
        self._check_filters()
        penalty, expected = self.repetition_penalty, f"{_EXPECTED}; 1 has no effect"
        require(_is_divisor(penalty), "repetition_penalty", repr(penalty), expected)
        for name in ("min_new_tokens", "min_length", "no_repeat_ngram_size"):
            value = getattr(self, name)
            require(value is None or _is_count(value), name, repr(value), "an integer, 0 or more, or None")
        self._check_tokens()
        processors = self.logits_processor
        are_functions = processors is None or (isinstance(processors, list | tuple) and all(map(callable, processors)))
        remedy = "Pass logits_processor=[processor]." if callable(processors) else None
        expected = "a list of functions of input_ids and scores, or None"
        require(are_functions, "logits_processor", repr(processors), expected, remedy)

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
        bias = self.sequence_bias or []
        return list(bias.items() if isinstance(bias, Mapping) else bias)

    @property
    def forced_eos_token_ids(self) -> list[int]:
        """The tokens of `forced_eos_token_id`."""
        ids = self.forced_eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    def _check_filters(self) -> None:
        require_bool("do_sample", self.do_sample)
        temperature, top_k, top_p, min_p = self.temperature, self.top_k, self.top_p, self.min_p
        is_greedy = is_number(temperature) and temperature == 0 and not self.do_sample
        greedy = "For the most likely token, leave out temperature and do_sample."
        is_valid = _is_divisor(temperature) or is_greedy
        require(is_valid, "temperature", repr(temperature), _EXPECTED, greedy)
        is_valid = top_k is None or _is_count(top_k)
        require(is_valid, "top_k", repr(top_k), "a positive integer, or None or 0 for all tokens")
        is_share = top_p is None or (is_number(top_p) and 0 < top_p <= 1)
        require(is_share, "top_p", repr(top_p), "a number greater than 0 and at most 1, or None")
        is_share = min_p is None or (is_number(min_p) and 0 <= min_p <= 1)
        require(is_share, "min_p", repr(min_p), "a number between 0 and 1, or None")
        if self.do_sample:
            return
        neutral = {"temperature": (0, 1), "top_k": (None, 0), "top_p": (None, 1), "min_p": (None, 0)}
        unused = {name: value for name in neutral if (value := getattr(self, name)) not in neutral[name]}
        if unused:
            warn(
                f"generate: {', '.join(f'{name}={value!r}' for name, value in unused.items())} has no effect with "
                "do_sample=False, which chooses the most likely token. Pass do_sample=True to sample."
            )

    def _check_tokens(self) -> None:
        words, remedy = self.bad_words_ids, "tokenizer.encode(text) returns the token ids of a text, one sequence."
        is_valid = words is None or (isinstance(words, list | tuple) and all(word and _are_ids(word) for word in words))
        require(is_valid, "bad_words_ids", repr(words), "a list of lists of token ids, none of them empty", remedy)
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            ids = getattr(self, name)
            require(ids is None or _are_ids(ids), name, repr(ids), "a list of token ids, or None")
        bos, eos = self.forced_bos_token_id, self.forced_eos_token_id
        require(bos is None or _is_count(bos), "forced_bos_token_id", repr(bos), "a token id, or None")
        is_valid = eos is None or _is_count(eos) or _are_ids(eos)
        require(is_valid, "forced_eos_token_id", repr(eos), "a token id, a list of them, or None")
        bias, expected = self.sequence_bias, "a dict of tuples of token ids to numbers, or a list of such pairs"
        is_valid = bias is None or isinstance(bias, Mapping | list | tuple)
        require(is_valid and all(map(_is_bias, self.biases)), "sequence_bias", repr(bias), expected)


SAMPLING_OPTIONS = tuple(field.name for field in fields(SamplingOptions))
"""Names of the options of sampling."""


def _is_divisor(value: object) -> bool:
    return is_number(value) and SMALLEST_DIVISOR <= value <= torch.finfo(torch.float32).max  # type: ignore[operator]


def _are_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_count, value))


def _is_bias(pair: object) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    ids, bias = pair
    return bool(ids) and _are_ids(ids) and is_number(bias) and abs(bias) <= torch.finfo(torch.float32).max


def _is_count(value: object) -> bool:
    return is_integer(value) and 0 <= value < 2**31  # type: ignore[operator]

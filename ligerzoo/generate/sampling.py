"""Chooses the next token from the logits.

logits -> repetition penalty -> the most likely token (greedy)
                             or temperature -> top-k -> top-p -> min-p -> sample
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.generate.options import is_integer, is_number, require, require_bool


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How to choose the next token.

    Attributes:
        do_sample: whether to sample each token. Otherwise the most likely token is chosen, and `temperature`, `top_k`,
            `top_p` and `min_p` have no effect; values that would change the distribution cause a warning.
        temperature: see `apply_temperature`.
        top_k: see `keep_top_k`.
        top_p: see `keep_top_p`.
        min_p: see `keep_min_p`.
        repetition_penalty: see `penalize_repetition`. It applies to the tokens of the prompt and of the continuation.

    Raises:
        LigerzooError: an option is invalid.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _check_filters(self.do_sample, self.temperature, self.top_k, self.top_p, self.min_p)
        penalty = self.repetition_penalty
        is_positive = is_number(penalty) and 0 < penalty < math.inf
        require(is_positive, "repetition_penalty", repr(penalty), "a positive number; 1 has no effect")


class SampledTokens(NamedTuple):
    """The tokens that a sampler chose, and their log-probabilities.

    Attributes:
        tokens: (B,) int64.
        logps: (B,) fp32, under the softmax of the model's logits.
        sampling_logps: (B,) fp32, under the distribution that the tokens were sampled from; 0 for greedy decoding.
    """

    tokens: Tensor
    logps: Tensor
    sampling_logps: Tensor


class Sampler:
    """Chooses the next token of each row.

    Args:
        vocab_size: size of the vocabulary.
        prompts: (B, L) token ids.
        options: how to choose.
        generator: see `generate`.

    Attributes:
        generator: see `generate`.
        is_broken: 0-d bool, whether the largest logit of some row has been NaN or infinite.

    Raises:
        LigerzooError: the generator is invalid.
    """

    def __init__(
        self, vocab_size: int, prompts: Tensor, options: SamplingOptions, generator: torch.Generator | None
    ) -> None:
        if generator is not None:
            _check_generator(generator, prompts.device)
        self._options, self.generator = options, generator
        self.is_broken = torch.zeros((), dtype=torch.bool, device=prompts.device)
        self._occurred: Tensor | None = None
        if options.repetition_penalty != 1:
            # The last column is for ids outside the vocabulary, such as image tokens. They are never generated.
            self._occurred = torch.zeros(len(prompts), vocab_size + 1, dtype=torch.bool, device=prompts.device)
            self._occurred.scatter_(1, prompts.clamp(max=vocab_size), True)

    def choose(self, logits: Tensor) -> SampledTokens:
        """Chooses a token for each row of fp32 logits (B, V)."""
        o, model_logits = self._options, logits
        if self._occurred is not None:
            logits = penalize_repetition(logits, self._occurred[:, :-1], o.repetition_penalty)
        if o.do_sample:
            logits = filter_logits(logits, o.temperature, o.top_k, o.top_p, o.min_p)
            tokens = sample(logits, self.generator)
        else:
            tokens = logits.argmax(-1, keepdim=True)
        self.is_broken |= ~logits.amax(-1).isfinite().all()
        if self._occurred is not None:
            self._occurred.scatter_(1, tokens, True)
        logps = _log_probability(model_logits, tokens)
        sampling_logps = _log_probability(logits, tokens) if o.do_sample else torch.zeros_like(logps)
        return SampledTokens(tokens[:, 0], logps, sampling_logps)


def _log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the log-probability (B,) of tokens (B, 1) under the softmax of logits (B, V)."""
    return logits.gather(1, tokens)[:, 0] - logits.logsumexp(1)


def penalize_repetition(logits: Tensor, occurred: Tensor, penalty: float) -> Tensor:
    """Makes tokens that have occurred less likely: divides positive logits by `penalty` and multiplies negative ones.

    Args:
        logits: (B, V).
        occurred: (B, V) bool, whether the token has occurred.
        penalty: a positive number. 1 has no effect; less than 1 makes these tokens more likely (Keskar et al. 2019).
    """
    return torch.where(occurred, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(
    logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Tensor:
    """Applies the temperature, then each filter that is not None, to logits (..., V)."""
    logits = apply_temperature(logits, temperature)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    return logits


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divides logits by a positive temperature: below 1 sharpens the distribution, above 1 flattens it."""
    return logits / temperature


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Sets all logits to -inf but the `top_k` largest and those equal to the smallest of these (Fan et al. 2018)."""
    smallest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < smallest, -math.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest most likely tokens whose total probability reaches `top_p`; sets the other logits to -inf.

    Ties are broken in favour of the lower token id. `top_p` is in (0, 1]; 1 keeps all tokens (Holtzman et al. 2019).
    """
    if top_p == 1:
        return logits  # rounded probabilities may sum to 1 before the last token
    descending, order = logits.sort(descending=True, stable=True)
    probabilities = descending.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    dropped_in_order = mass_before >= top_p
    dropped_in_order[..., 0] = False  # a tiny top_p may round to 0
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, dropped_in_order)
    return logits.masked_fill(dropped, -math.inf)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Sets the logits of tokens to -inf whose probability is below `min_p` times the largest (Nguyen et al. 2024).

    `min_p` is in [0, 1].
    """
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -math.inf)


def sample(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Samples a token of each row from the softmax of the logits: (B, V) -> (B, 1).

    It draws an exponential variable with the probability as rate for each token, and returns the token of the smallest.
    torch.multinomial does the same with the same random numbers, but it is a host sync.
    """
    times = torch.empty_like(logits).exponential_(generator=generator)
    return (logits.softmax(-1) / times).argmax(-1, keepdim=True)


def check_logits(is_broken: bool, steps: int) -> None:
    """Raises LigerzooError if the largest logit of some row was NaN or infinite.

    An infinite one is an overflow, or -inf, which leaves no token to choose. Other logits may be -inf.

    Args:
        is_broken: `Sampler.is_broken`.
        steps: number of new tokens so far.
    """
    if is_broken:
        raise LigerzooError(
            "no token can be chosen",
            where="logits",
            got=f"NaN, inf or only -inf within {steps} new tokens",
            expected="finite logits; -inf for some tokens only",
            remedy="Check the weights for NaN, use bfloat16 or float32 instead of float16, or a higher temperature.",
        )


def _check_filters(
    do_sample: bool, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    require_bool("do_sample", do_sample)
    is_greedy = is_number(temperature) and temperature == 0 and not do_sample
    is_positive = is_number(temperature) and 0 < temperature < math.inf
    greedy = "For the most likely token, leave out temperature and do_sample."
    require(is_positive or is_greedy, "temperature", repr(temperature), "a positive number", greedy)
    is_count = top_k is None or (is_integer(top_k) and top_k > 0)
    require(is_count, "top_k", repr(top_k), "a positive integer, or None")
    is_share = top_p is None or (is_number(top_p) and 0 < top_p <= 1)
    require(is_share, "top_p", repr(top_p), "a number greater than 0 and at most 1, or None")
    is_share = min_p is None or (is_number(min_p) and 0 <= min_p <= 1)
    require(is_share, "min_p", repr(min_p), "a number between 0 and 1, or None")
    if do_sample:
        return
    neutral = {"temperature": (0, 1), "top_k": (None,), "top_p": (None, 1), "min_p": (None, 0)}
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    if unused := [f"{name}={value!r}" for name, value in given.items() if value not in neutral[name]]:
        warnings.warn(
            f"generate: {', '.join(unused)} has no effect with do_sample=False, which chooses the most likely token. "
            "Pass do_sample=True to sample.",
            stacklevel=2,
        )


def _check_generator(generator: torch.Generator, device: torch.device) -> None:
    is_generator = isinstance(generator, torch.Generator)
    remedy = "Use torch.Generator(model.device).manual_seed(0)."
    require(is_generator, "generator", repr(generator), "a torch.Generator", remedy)
    is_same = generator.device.type == device.type
    require(is_same, "generator", f"one on {generator.device}", f"one on {device}, like input_ids", remedy)

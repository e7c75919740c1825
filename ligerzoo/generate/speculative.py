"""Speculative decoding: drafts of the next tokens, which cost little, and the engine that verifies them together."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ligerzoo.checks import or_none
from ligerzoo.device import upload
from ligerzoo.generate.engine import BatchEngine, Stopping
from ligerzoo.generate.graphs import independent_length
from ligerzoo.generate.options import POSITIVE_INTEGER, SupportsGenerate, check_option, require, type_name
from ligerzoo.generate.prompts import Prompts
from ligerzoo.generate.rows import BatchRows, choose_rows
from ligerzoo.generate.sampling import Sampler
from ligerzoo.kernels.sampling import SampledTokens
from ligerzoo.sampling_options import SamplingOptions


class Drafter(AbstractContextManager["Drafter"]):
    """Guesses the next tokens of one sequence. A context, which frees what the drafts needed.

    Args:
        count: number of tokens to guess at a time.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    @abstractmethod
    def propose(self, tokens: Sequence[int], count: int, sampler: Sampler) -> Tensor:
        """Returns the next tokens, (n,) int64 on the device with n <= `count`, possibly none.

        Args:
            tokens: the tokens so far, prompt included. Those of the last call, then the first of the tokens that it
                returned, maybe none or all, then one more.
            count: largest number of tokens.
            sampler: chooses the token that follows `tokens`. It must not change.
        """


class PromptLookup(Drafter):
    """Guesses that text repeats: looks up where the last tokens have occurred first (Saxena 2023).

    If the tokens that followed then end before the draft does, they are repeated.

    Args:
        count: see `Drafter`.
        largest: largest number of last tokens to look up; smaller ones follow if these have not occurred.
        device: device of the drafts.
    """

    def __init__(self, count: int, largest: int, device: torch.device) -> None:
        super().__init__(count)
        self._largest, self._device = largest, device
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its first occurrence
        self._indexed = 0

    def propose(self, tokens: Sequence[int], count: int, sampler: Sampler) -> Tensor:
        sizes = range(1, self._largest + 1)
        for end in range(self._indexed, len(tokens)):
            for size in sizes[:end]:
                self._next.setdefault(tuple(tokens[end - size : end]), end)
        self._indexed = len(tokens)
        starts = (self._next.get(tuple(tokens[-size:])) for size in reversed(sizes[: len(tokens)]))
        start = next((start for start in starts if start is not None), None)
        if start is None:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        period = len(tokens) - start
        return upload([tokens[start + i % period] for i in range(count)], self._device)

    def __exit__(self, *_: object) -> None:
        pass


class DraftModel(Drafter):
    """A smaller model of the same vocabulary that generates the drafts.

    It draws with the random numbers of the sampler, so that it draws what the large model draws where their
    distributions agree; see `SpeculativeEngine`.

    Args:
        model: the smaller model.
        count: see `Drafter`.
        prompt: (1, L) token ids of the prompt, without padding.
        max_new_tokens: largest number of new tokens.
    """

    def __init__(self, model: SupportsGenerate, count: int, prompt: Tensor, max_new_tokens: int) -> None:
        super().__init__(count)
        prompts = Prompts(model, prompt, None, None, None, {})
        self._rows = choose_rows(model, prompts, max_new_tokens, is_rewindable=True)
        self._longest = independent_length(model)  # type: ignore[arg-type]
        self._has_started = False

    def propose(self, tokens: Sequence[int], count: int, sampler: Sampler) -> Tensor:
        rows, sampler = self._rows, sampler.clone()
        newest = upload([tokens[-1:]], rows.device)
        if self._longest is not None and len(tokens) + count > self._longest:
            return newest[0, :0]
        if self._has_started:
            # Two tokens in each call, so that they have the same shape: whether the large model accepted all drafts,
            # of which the last is not in the cache, or not.
            rows.rewind(rows.length - (len(tokens) - 1))
            logits = rows.score(newest)[:, -1]
        else:
            rows.prefill()
            rows.append(newest)
            logits = rows.decode()
            self._has_started = True
        drafts = [sampler.choose(logits).tokens]
        rows.append(drafts[0][:, None])
        while len(drafts) < count:
            drafts.append(sampler.choose(rows.decode()).tokens)
            rows.append(drafts[-1][:, None])
        return torch.cat(drafts)

    def __enter__(self) -> DraftModel:
        self._rows.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._rows.__exit__(*error)


_DRAFT_TOKENS = 5
_NGRAM_SIZE = 2


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """How draft tokens are guessed, for speculative decoding of one prompt. Names are those of transformers.

    The model verifies the draft tokens in one forward. The result is the one without drafts, up to rounding errors.

    Args:
        prompt_lookup_num_tokens: number of draft tokens, which are those that followed the last tokens when they first
            occurred in the prompt or in the continuation.
        max_matching_ngram_size: how many last tokens are looked up, at most. Default: 2.
        assistant_model: a smaller ligerzoo model of the same vocabulary and device, which generates draft tokens.
        num_assistant_tokens: number of draft tokens of `assistant_model`. Default: 5.

    Raises:
        LigerzooError: an option is invalid, or both kinds of drafts are chosen.
    """

    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    assistant_model: SupportsGenerate | None = None
    num_assistant_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"):
            check_option(name, getattr(self, name), or_none(POSITIVE_INTEGER))
        for name, needed in (
            ("max_matching_ngram_size", "prompt_lookup_num_tokens"),
            ("num_assistant_tokens", "assistant_model"),
        ):
            is_used = getattr(self, name) is None or getattr(self, needed) is not None
            require(is_used, name, f"a value without {needed}", f"it together with {needed}")
        model = self.assistant_model
        is_model = model is None or (callable(model) and hasattr(model, "config") and hasattr(model, "new_cache"))
        require(is_model, "assistant_model", type_name(model), "a ligerzoo.models.CausalLM")
        is_one = model is None or self.prompt_lookup_num_tokens is None
        expected = "one of prompt_lookup_num_tokens and assistant_model"
        require(is_one, "assistant_model", "a model and prompt_lookup_num_tokens", expected)

    @property
    def count(self) -> int:
        """Number of draft tokens in each verification; 0 without speculative decoding."""
        if self.assistant_model is not None:
            return self.num_assistant_tokens or _DRAFT_TOKENS
        return self.prompt_lookup_num_tokens or 0

    def check(self, model: SupportsGenerate, prompts: Prompts, sampling: SamplingOptions, use_cache: object) -> None:
        """Raises LigerzooError if the drafts of these options cannot be verified in this call of `generate`.

        Args:
            model: the model that verifies the drafts.
            prompts: the prompts of the call.
            sampling: its options of sampling.
            use_cache: as given.
        """
        copies, cache = prompts.copies, prompts.cache
        option = "prompt_lookup_num_tokens" if self.assistant_model is None else "assistant_model"
        plain = f"Leave out {option}."
        where = "inputs_embeds" if prompts.inputs.is_floating_point() else "input_ids"
        require(prompts.rows == 1, where, f"{prompts.rows} prompts with {option}", "one prompt", plain)
        require(copies == 1, "num_return_sequences", f"{copies} with {option}", "1", plain)
        got = f"a {type_name(sampling.constraint)} with {option}"
        require(sampling.constraint is None, "constraint", got, "None", plain)
        require(use_cache is not False, "use_cache", f"False with {option}", "True", plain)
        has_cache = hasattr(model, "new_cache")
        expected = f"a ligerzoo.models.CausalLM, with {option}"
        require(has_cache, "model", f"a {type_name(model)} without new_cache", expected, plain)
        for name, one in (("model", model), ("assistant_model", self.assistant_model)):
            is_recurrent = one is not None and one.new_cache().is_recurrent  # type: ignore[attr-defined]
            got = f"a {type_name(one)}, whose recurrent layers cannot remove rejected drafts"
            require(not is_recurrent, name, got, "a model with self-attention only", plain)
        if cache is not None and cache.drops_tokens:
            got = f"a cache whose sliding windows have dropped tokens, with {option}"
            remedy = "Call cache.keep_all_tokens() before the first token."
            require(cache.length == 0, "past_key_values", got, "a cache of all tokens", remedy)
        if self.assistant_model is not None:
            self._check_assistant(self.assistant_model, model, prompts)

    def drafter(self, prompts: Prompts, max_new_tokens: int) -> Drafter | None:
        """Returns what guesses the tokens of a call of `generate`; None without speculative decoding."""
        if self.count == 0:
            return None
        if self.assistant_model is None:
            return PromptLookup(self.count, self.max_matching_ngram_size or _NGRAM_SIZE, prompts.device)
        ids, mask = prompts.ids, prompts.padding_mask
        prompt = ids if mask is None else ids[mask][None]
        return DraftModel(self.assistant_model, self.count, prompt, max_new_tokens)

    def _check_assistant(self, assistant: Any, model: SupportsGenerate, prompts: Prompts) -> None:
        name, remedy = "assistant_model", "Use prompt_lookup_num_tokens, which needs no second model."
        size, expected_size = (getattr(m.config, "vocab_size", None) for m in (assistant, model))
        got = f"a model with a vocabulary of {size} tokens"
        require(size == expected_size, name, got, f"{expected_size} tokens, the vocabulary of the model", remedy)
        device = getattr(assistant, "device", prompts.device)
        is_same = device == prompts.device
        require(is_same, name, f"a model on {device}", f"one on {prompts.device}, like the prompt", "Use .to(device).")
        others = [*prompts.model_inputs, *(["inputs_embeds"] if prompts.inputs.is_floating_point() else [])]
        expected = "token ids only, which assistant_model can read"
        require(not others, (others or [""])[0], "a value, with assistant_model", expected, remedy)


class SpeculativeEngine(BatchEngine):
    """Continues one row by tokens that are verified together: one step appends one, and verifies more if none is left.

    One forward of the model computes the logits after several draft tokens (Leviathan et al. 2023). From them, the
    sampler chooses a token for each position, as it would without drafts. Draft tokens are accepted while they equal
    the chosen ones, and the first chosen token that differs is accepted in place of the draft. So each token is the one
    that plain decoding chooses, with its options and seed: not only the distribution, but the samples are the same.

    The number of accepted tokens is that of rejection sampling if the draft is certain, as greedy ones and those of a
    lookup are: a draft token is accepted with its probability. A draft that is sampled from q, with the random numbers
    that sample from p, is accepted with probability (1 - d) / (1 + d) or more, where d is the total variation distance
    of p and q, and rejection sampling reaches 1 - d. In return, the result does not depend on the drafts (Daliri et al.
    2024).

    The host waits for the device once per verification: the number of accepted tokens decides which are next.

    Args:
        drafter: guesses tokens.
        rows, sampler, stopping, limit, reads: see `BatchEngine`.
    """

    _lag = 0

    def __init__(
        self, drafter: Drafter, rows: BatchRows, sampler: Sampler, stopping: Stopping, limit: int, **reads: bool
    ) -> None:
        super().__init__(rows, sampler, stopping, limit, **reads)
        self._drafter = drafter
        prompts, mask = rows.prompts, rows.prompts_mask
        self._tokens: list[int] = (prompts[0] if mask is None else prompts[0, mask[0]]).tolist()
        self._verified: deque[SampledTokens] = deque()  # chosen tokens that are not appended yet

    def _decode(self) -> None:
        if self._count == 0:
            super()._decode()
            self._tokens += self._rows.continuations[0].tolist()
            return
        if not self._verified:
            self._verify()
        chosen = self._verified.popleft()
        self._append(None, chosen, self._stopping.update(chosen.tokens[:, None]))

    def _verify(self) -> None:
        """Verifies a draft, if there is one."""
        rows = self._rows
        drafts = self._propose()
        if drafts is None or len(drafts) == 0:
            chosen = self._sampler.choose(rows.decode())
            new = chosen.tokens.tolist()
        else:
            length = rows.continuations.shape[1]
            logits = rows.score(drafts[None])[0]
            chosen, new = choose_with_drafts(self._sampler, logits, drafts)
            rows.rewind(len(drafts) + 1 - len(new))
            rows.truncate(length)  # the tokens are appended one after the other
        self._tokens += new
        self._verified.extend(SampledTokens(*(x[i : i + 1] for x in chosen)) for i in range(len(new)))

    def _propose(self) -> Tensor | None:
        """Returns a draft that the model can process, or None."""
        count, placeholders = self._rows.room_for_drafts(self._drafter.count), self._rows.placeholders
        if count == 0:
            return None
        drafts = self._drafter.propose(self._tokens, count, self._sampler)
        if placeholders:
            inputs = [self._tokens[-1], *drafts.tolist()]
            allowed = next((i for i, token in enumerate(inputs) if token in placeholders), len(inputs))
            drafts = drafts[: max(0, allowed - 1)]
        return drafts


def choose_with_drafts(sampler: Sampler, logits: Tensor, drafts: Tensor) -> tuple[SampledTokens, list[int]]:
    """Chooses tokens as if the model had computed the logits of one after the other.

    Functions of the user are called for accepted tokens only, since they may count their calls.

    Args:
        sampler: of one row. Continues after the chosen tokens.
        logits: (n + 1, V), of the first draft token, of the second, ..., and of the token that follows.
        drafts: (n,) int64.

    Returns:
        The chosen tokens, from 1 to n + 1, and their token ids: those of the drafts, except for the last one.
    """
    if sampler.has_functions:
        chosen: list[SampledTokens] = []
        new: list[int] = []
        for row, draft in zip(logits, [*drafts.tolist(), None], strict=True):
            chosen.append(sampler.choose(row[None]))
            new += chosen[-1].tokens.tolist()
            if new[-1] != draft:
                break
        return SampledTokens(*map(torch.cat, zip(*chosen, strict=True))), new
    sampler.branch(drafts)
    sampled = sampler.choose(logits)
    accepted = (sampled.tokens[:-1] == drafts).cumprod(0).sum()
    *new, count = torch.cat([sampled.tokens, accepted[None]]).tolist()  # the host sync
    sampler.keep_branch(count)
    return SampledTokens(*(x[: count + 1] for x in sampled)), new[: count + 1]

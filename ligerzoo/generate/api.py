"""`generate`, `generate_many`, and what they return."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor, nn

from ligerzoo.checks import FLAG
from ligerzoo.generate.engine import BatchEngine, Stopping, StoppingCriterion
from ligerzoo.generate.options import (
    CacheOptions,
    SupportsGenerate,
    check_copies,
    check_option,
    count_new_tokens,
    parse_call,
    refuse_unknown_options,
    require,
    type_name,
)
from ligerzoo.generate.prompts import Prompts
from ligerzoo.generate.rows import BatchRows, check_rows, choose_rows
from ligerzoo.generate.sampling import Sampler
from ligerzoo.generate.scheduler import Scheduler, Update
from ligerzoo.generate.speculative import DraftOptions, SpeculativeEngine
from ligerzoo.generate.streaming import Streamer, SupportsDecode, check_streamer
from ligerzoo.layers import KVCache
from ligerzoo.models.output import ModelOutput
from ligerzoo.sampling_options import SAMPLING_OPTIONS, SamplingOptions


@dataclass
class GenerateOutput(ModelOutput):
    """Output of `generate` with `return_dict_in_generate=True`; see `ModelOutput` for access by name and index.

    R is the number of prompts times `num_return_sequences`.

    Attributes:
        sequences: (R, T + new tokens) int64, what `generate` returns otherwise.
        logps: (R, new tokens) fp32, log-probabilities of the new tokens under the softmax of the model's logits,
            without temperature, filters and penalties; 0 after the end of a row.
        sampling_logps: (R, new tokens) fp32, log-probabilities under the distribution that the tokens were sampled
            from; 0 for greedy decoding, which has no choice, and after the end of a row.
        finish_reasons: why each row ended: "stop" for an end-of-sequence token, a stop string or a stopping criterion,
            "length" for the largest number of new tokens.
        past_key_values: the KV cache that was passed, which holds all tokens but the last; None if none was passed.
    """

    sequences: Tensor
    logps: Tensor
    sampling_logps: Tensor
    finish_reasons: list[str]
    past_key_values: KVCache | None = None


class SupportsNewCache(Protocol):
    """A model that `ConversationCache` accepts."""

    def new_cache(self) -> KVCache: ...


class ConversationCache:
    """The KV cache of a conversation, so that each call of `generate` processes only the tokens that are new.

    Each call receives the token ids of the whole conversation. A chat template may write earlier answers with other
    tokens than the model generated. So the cache keeps only the first tokens that both have in common. A cache of
    recurrent layers cannot drop tokens: it is emptied unless the text extends the cached one.

        cache = ConversationCache(model)
        ids = model.generate(input_ids, past_key_values=cache.shared_with(input_ids), max_new_tokens=100)
        cache.keep(ids)

    Args:
        model: the model.
    """

    def __init__(self, model: SupportsNewCache) -> None:
        self._cache = model.new_cache()
        if not self._cache.is_recurrent:
            self._cache.keep_all_tokens()
        self._tokens = torch.empty(0, dtype=torch.int64)

    def shared_with(self, input_ids: Tensor) -> KVCache:
        """Returns the KV cache of the first tokens that this text shares with it, at most of all but the last.

        Args:
            input_ids: (1, T) token ids of the whole conversation.
        """
        ids = input_ids[0].to("cpu", torch.int64)
        tokens = min(len(ids) - 1, len(self._tokens), self._cache.length)
        is_same = ids[:tokens] == self._tokens[:tokens]
        shared = int(is_same.cumprod(0).sum())
        is_extended = shared == self._cache.length
        self._cache.crop(shared if is_extended or not self._cache.is_recurrent else 0)
        return self._cache

    def keep(self, sequences: Tensor) -> None:
        """Remembers which tokens the cache holds: those that `generate` returned, (1, T), all but the last."""
        self._tokens = sequences[0].to("cpu", torch.int64)


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
        index: index of the prompt.
        tokens: the new tokens, with the end-of-sequence token, without padding.
        logps: their log-probabilities under the softmax of the logits, without temperature and filters.
        finish_reason: "stop" after an end-of-sequence token or stop string, "length" after `max_new_tokens` tokens.
        top_logps: for each token, the `top_logps` most likely token ids at its position and their log-probabilities,
            the most likely first; empty if none were asked for.
        prompt_logps, prompt_top_logps: the same of the tokens of the prompt, without the first one; empty without the
            option `prompt_logps`.
    """

    index: int
    tokens: list[int]
    logps: list[float]
    finish_reason: str
    top_logps: list[dict[int, float]] = field(default_factory=list)
    prompt_logps: list[float] = field(default_factory=list)
    prompt_top_logps: list[dict[int, float]] = field(default_factory=list)


def generate_many(
    model: nn.Module, prompts: Iterable[Tensor | Sequence[int]], *, batch_size: int, **options: Any
) -> Iterator[Completion]:
    """Continues each prompt, as `generate` does alone, and yields the results as they finish.

    Up to `batch_size` prompts run at the same time. When one has finished, the next takes its row of the batch.

    Args:
        model: a causal language model with self-attention only. Text inputs only.
        prompts: token ids of each prompt, without padding. An iterator is read only as rows become free; a list, tuple
            or tensor is checked before anything runs.
        batch_size: largest number of prompts that run at the same time.
        options: those of `Scheduler`, with `max_cache_tokens`, `cache_dtype` and `exact`. Without a limit in
            generation_config.json, `max_new_tokens` is required.

    Returns:
        An iterator of results, in the order in which they finish. To stop early, close it or drop it.

    Raises:
        LigerzooError: an option is unknown or invalid, a prompt is empty, has an unknown token id or is too long, the
            model cannot decode in a `StaticBatch`, or, later, logits are NaN or infinite.
    """
    scheduler = Scheduler(model, batch_size=batch_size, **options)
    scheduler.defaults.require_limit()
    is_iterable = isinstance(prompts, Iterable) and not isinstance(prompts, str | Mapping)
    remedy = "Encode text, and pass its token ids: [tokenizer.encode(text) for text in texts]."
    require(is_iterable, "prompts", type_name(prompts), "an iterable of lists of token ids", remedy)
    if isinstance(prompts, list | tuple | Tensor):
        for index, prompt in enumerate(prompts):
            scheduler.request(prompt, f"prompts[{index}]")
    return _run(scheduler, iter(prompts))


def _run(scheduler: Scheduler, prompts: Iterator[Tensor | Sequence[int]]) -> Iterator[Completion]:
    received: defaultdict[int, list[Update]] = defaultdict(list)
    requests = (scheduler.request(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts))
    has_more = True
    with scheduler:
        while has_more or not scheduler.is_idle:
            free = scheduler.free_rows
            started = list(islice(requests, free))
            has_more = len(started) == free
            for request in started:
                scheduler.add(request)
            for update in scheduler.step():
                received[update.index].append(update)
                if update.finish_reason is not None:
                    yield _completion(received.pop(update.index))


def _completion(updates: Sequence[Update]) -> Completion:
    """Returns what the updates of a request say together."""
    completion = Completion(updates[-1].index, [], [], updates[-1].finish_reason or "")
    for update in updates:
        if update.is_prompt:
            completion.prompt_logps.extend(update.logps)
            completion.prompt_top_logps.extend(update.top_logps)
        else:
            completion.tokens.extend(update.tokens)
            completion.logps.extend(update.logps)
            completion.top_logps.extend(update.top_logps)
    return completion


@overload
def generate(
    model: SupportsGenerate,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    return_dict_in_generate: Literal[True],
    **options: Any,
) -> GenerateOutput: ...


@overload
def generate(
    model: SupportsGenerate, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any
) -> Tensor: ...


@torch.inference_mode(False)  # even within inference_mode: what a model caches must remain usable for training
@torch.no_grad()
def generate(
    model: SupportsGenerate,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    inputs_embeds: Tensor | None = None,
    past_key_values: KVCache | None = None,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    num_return_sequences: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: SupportsDecode | None = None,
    stopping_criteria: Sequence[StoppingCriterion] | None = None,
    generator: torch.Generator | None = None,
    seeds: Tensor | None = None,
    streamer: Streamer | None = None,
    use_cache: bool = True,
    cache_dtype: torch.dtype | None = None,
    exact: bool = False,
    return_dict_in_generate: bool = False,
    use_model_defaults: bool = True,
    **options: Any,
) -> Tensor | GenerateOutput:
    """Continues each prompt by up to `max_new_tokens` tokens.

    A row finishes with its first end-of-sequence token or stop string, or by a stopping criterion, and is padded from
    then on. Generation stops when all rows have finished.

    An option that is None has the value of the model's generation_config.json, as in transformers; many chat models
    sample by default. These are the options of sampling, the lengths, `num_return_sequences` and `stop_strings`, and
    `eos_token_id` and `pad_token_id`, which config.json may have too. Pass a value without effect to ignore one, such
    as `do_sample=False`, `top_k=0` or `suppress_tokens=[]`. If the file has `do_sample=true` and no `top_k`,
    `top_k=50`, transformers' default. Options of the file that are not implemented, such as beam search, cause a
    warning.

    Args:
        model: a causal language model. Its training mode is not changed. Runs uncompiled after `model.compile()`, and
            compiled if it is the result of `torch.compile(model)`.
        input_ids: (B, T) token ids. No prompt may be empty.
        attention_mask: (B, T), 1 for a token and 0 for padding. Padding may be anywhere: each row is continued as if it
            were alone, except with rotary position types longrope and dynamic, which depend on the longest row.
        inputs_embeds: (B, T, H) embeddings of the prompts, which the model reads instead of `input_ids`. Token ids are
            optional then. If they are passed as well, the result starts with them.
        past_key_values: a KV cache from `model.new_cache()`, empty or from earlier calls. Its tokens are the first ones
            of `input_ids`, which hold the whole history. The model processes the other tokens only. The cache is
            extended in place, and in the end holds all tokens but the last. An exception during generation empties it.
            Padding must be on the left; mask the padding after finished rows in later calls.
        max_new_tokens: largest number of new tokens; this or `max_length` is required. Memory grows with the tokens
            generated, not with this.
        max_length: largest number of tokens with the T tokens of the prompt. `max_new_tokens` takes precedence.
        num_return_sequences: sequences per prompt, with `do_sample=True`: prompts a, b become rows a, a, b, b. Each
            prompt is processed once. Default: 1.
        eos_token_id: the token or tokens that finish a row. An empty list means none.
        pad_token_id: fills finished rows. Defaults to the first `eos_token_id` if the model defines no padding token.
        stop_strings: a row finishes when the text of its continuation contains one of these strings.
        tokenizer: decodes the text that is searched for `stop_strings`.
        stopping_criteria: functions that finish rows, such as `MaxTimeCriteria` of transformers; see
            `StoppingCriterion`.
        generator: random number generator on the model's device, which draws one seed for each row. None uses torch's
            default.
        seeds: (R,) int64, the seeds themselves, such as `draw_seeds` returns. A row with a seed draws the same random
            numbers in every batch.
        streamer: receives the prompts, then the tokens of each step.
        use_cache: whether to keep keys and values in a KV cache. Without it, each step recomputes all tokens: slower,
            same result. The result differs only for rotary position types dynamic, and longrope outside Phi-3: as in
            transformers, a cache keeps the keys as they were first rotated. And for bidirectional attention
            (EmbeddingGemma), where a cache keeps the keys as they were before later tokens.
        cache_dtype: torch.float8_e4m3fn keeps keys and values in 8 bits: half the memory, and half the bytes that a
            decode step reads of them, at some loss of accuracy; see `ligerzoo.layers.KVCache`. None for their dtype.
        exact: give the logits of each token, and its log-probability, the bits that one forward of the whole text gives
            them, alone or in any batch: then sampling and training agree exactly. Dense models on Hopper GPUs in bf16,
            see `ligerzoo.layers.exactness`; others are refused. A cache that is passed must be exact itself.
        return_dict_in_generate: whether to return a `GenerateOutput` with log-probabilities and reasons of finishing.
        use_model_defaults: whether to follow generation_config.json. Otherwise an option that is None has the default
            of `SamplingOptions`, so that `do_sample=True` samples from the model's own distribution. Token ids follow
            it in both cases.
        options: how to choose tokens: `do_sample`, `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`,
            `min_new_tokens`, `min_length`, `bad_words_ids`, `no_repeat_ngram_size`, `suppress_tokens`,
            `begin_suppress_tokens`, `forced_bos_token_id`, `forced_eos_token_id`, `sequence_bias`, `constraint` and
            `logits_processor`; see `SamplingOptions`. Speculative decoding of one prompt: `prompt_lookup_num_tokens`,
            `max_matching_ngram_size`, `assistant_model` and `num_assistant_tokens`; see `DraftOptions`. And further
            model inputs for the prompts, such as `pixel_values`, without those for tokens in the cache. Per-token
            inputs (B, T, ...) are padded and sliced like `input_ids`.

    Returns:
        (R, T + new tokens) int64 with R = B * `num_return_sequences`: each prompt unchanged, padding included, followed
        by its continuation; without `input_ids`, the continuations only. Or a `GenerateOutput`.

    Raises:
        LigerzooError: a ValueError. Before the model runs: an option is unknown or invalid, the mask has another shape,
            a prompt is empty, the cache does not fit, or `CausalLM.check_inputs` refuses the inputs. Later: the logits
            are NaN or infinite.
    """
    given = {"max_new_tokens": max_new_tokens, "max_length": max_length, "stop_strings": stop_strings}
    given["num_return_sequences"] = num_return_sequences
    call = parse_call(model, given, options, use_model_defaults=use_model_defaults)
    drafts = DraftOptions(**{name: value for name, value in call.others.items() if name in _DRAFT_OPTIONS})
    model_inputs = {name: value for name, value in call.others.items() if name not in _DRAFT_OPTIONS}
    refuse_unknown_options(model, model_inputs, _OPTIONS)
    check_option("return_dict_in_generate", return_dict_in_generate, FLAG)
    check_streamer(streamer)
    with call.naming_file():
        sampling, copies = call.sampling, call.get("num_return_sequences", 1)
        check_copies(copies, do_sample=sampling.do_sample)
        prompts = Prompts(model, input_ids, attention_mask, inputs_embeds, past_key_values, model_inputs, copies)
        limit = count_new_tokens(call.get("max_new_tokens"), call.get("max_length"), prompts.tokens)
        if drafts.count > 0:
            drafts.check(model, prompts, sampling, use_cache)
        caches = CacheOptions(cache_dtype, exact)
        check_rows(model, prompts, limit, caches, use_cache=use_cache)
        rows = choose_rows(model, prompts, limit, caches if use_cache else None, is_rewindable=drafts.count > 0)
        whole = prompts.given.repeat_interleave(copies, 0)
        stopping = Stopping(
            model,
            whole,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            stop_strings=call.get("stop_strings"),
            tokenizer=tokenizer,
            stopping_criteria=stopping_criteria,
        )
        sampler = Sampler(rows.count, model.config.vocab_size, rows.device, exact=rows.is_exact)
        sampler.assign(
            range(rows.count),
            rows.prompts,
            sampling,
            attention_mask=rows.prompts_mask,
            eos_token_ids=stopping.eos_token_ids,
            generator=generator,
            seeds=_check_seeds(seeds, rows, generator, sampling),
            prompt_length=prompts.tokens,
            max_new_tokens=limit,
        )
    drafter = drafts.drafter(prompts, limit)
    reads = {"streams": streamer is not None, "keeps_logps": return_dict_in_generate}
    if drafter is None:
        engine = BatchEngine(rows, sampler, stopping, limit, **reads)
    else:
        engine = SpeculativeEngine(drafter, rows, sampler, stopping, limit, **reads)
    if streamer is not None:
        streamer.put(whole.cpu())
    with rows, drafter or nullcontext():
        while not engine.is_idle:
            for shown in engine.step():
                if streamer is not None:
                    streamer.put(shown.cpu())
    if streamer is not None:
        streamer.end()
    tokens = torch.cat([whole, stopping.pad(rows.continuations)], 1)
    if not return_dict_in_generate:
        return tokens
    logps, sampling_logps = (stopping.pad(values, 0.0) for values in engine.logps())
    return GenerateOutput(tokens, logps, sampling_logps, stopping.finish_reasons(), past_key_values)


_DRAFT_OPTIONS = [field.name for field in fields(DraftOptions)]
_OPTIONS = [name for name in inspect.signature(generate).parameters if name not in ("model", "options")]
_OPTIONS += [*SAMPLING_OPTIONS, *_DRAFT_OPTIONS]


def _check_seeds(
    seeds: Tensor | None, rows: BatchRows, generator: torch.Generator | None, sampling: SamplingOptions
) -> Tensor | None:
    """Returns the seeds of the rows on their device, after checks."""
    if seeds is None:
        return None
    require(sampling.do_sample and generator is None, "seeds", "seeds", "do_sample=True and no generator with them")
    is_valid = isinstance(seeds, Tensor) and seeds.dtype == torch.int64 and seeds.shape == (rows.count,)
    got = f"{seeds.dtype} {tuple(seeds.shape)}" if isinstance(seeds, Tensor) else type(seeds).__name__
    require(is_valid, "seeds", got, f"an int64 tensor of shape ({rows.count},)")
    return seeds.to(rows.device)

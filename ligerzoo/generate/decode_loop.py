"""The decode loop: prefill, then one decode step per token until all rows have finished."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ligerzoo.generate.cache_options import CacheOptions
from ligerzoo.generate.captured import CapturedStep
from ligerzoo.generate.draft_options import DraftOptions
from ligerzoo.generate.drafts import Drafter
from ligerzoo.generate.generation_config import CallOptions, take_options
from ligerzoo.generate.model import SupportsGenerate
from ligerzoo.generate.options import check_copies, count_new_tokens, refuse_unknown, require, require_bool
from ligerzoo.generate.prompts import Prompts
from ligerzoo.generate.result import GenerateOutput, LogProbs
from ligerzoo.generate.sampling import Sampler
from ligerzoo.generate.sampling_options import SAMPLING_OPTIONS, SamplingOptions
from ligerzoo.generate.sequences import Sequences
from ligerzoo.generate.slot_sequences import SlotSequences, make_sequences
from ligerzoo.generate.speculative import SpeculativeStep
from ligerzoo.generate.states import States
from ligerzoo.generate.step import DecodeStep
from ligerzoo.generate.stopping import Stopping, StoppingCriterion, SupportsDecode
from ligerzoo.generate.streaming import Streamer, check_streamer
from ligerzoo.layers import KVCache


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
            `begin_suppress_tokens`, `forced_bos_token_id`, `forced_eos_token_id`, `sequence_bias` and
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
    require_bool("use_model_defaults", use_model_defaults)
    call = CallOptions(
        {"max_new_tokens": max_new_tokens, "max_length": max_length, "num_return_sequences": num_return_sequences,
         "stop_strings": stop_strings, **take_options(options, SAMPLING_OPTIONS)},
        model.generation_config if use_model_defaults else {},
    )  # fmt: skip
    drafts = DraftOptions(**take_options(options, _DRAFT_OPTIONS))
    refuse_unknown(model, options, _OPTIONS)
    require_bool("return_dict_in_generate", return_dict_in_generate)
    check_streamer(streamer)
    with call.naming_file():
        sampling, copies = call.sampling, call.get("num_return_sequences", 1)
        check_copies(copies, do_sample=sampling.do_sample)
        prompts = Prompts(model, input_ids, attention_mask, inputs_embeds, past_key_values, options)
        limit = count_new_tokens(call.get("max_new_tokens"), call.get("max_length"), prompts.tokens)
        if drafts.count > 0:
            drafts.check(model, prompts, copies, use_cache, past_key_values)
        sequences = make_sequences(
            model, prompts, copies, limit, use_cache, past_key_values,
            CacheOptions(cache_dtype, exact), is_rewindable=drafts.count > 0,
        )  # fmt: skip
        given = prompts.given.repeat_interleave(copies, 0)
        stopping = Stopping(
            model,
            given,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            stop_strings=call.get("stop_strings"),
            tokenizer=tokenizer,
            stopping_criteria=stopping_criteria,
        )
        sampler = Sampler(sequences.rows, model.config.vocab_size, sequences.device, exact=sequences.is_exact)
        sampler.assign(
            range(sequences.rows), sequences.prompts, sampling, attention_mask=sequences.prompts_mask,
            eos_token_ids=stopping.eos_token_ids, generator=generator,
            seeds=_check_seeds(seeds, sequences, generator, sampling),
            prompt_length=prompts.tokens, max_new_tokens=limit,
        )  # fmt: skip
    log_probs = LogProbs() if return_dict_in_generate else None

    if streamer is not None:
        streamer.put(given.cpu())
    drafter = drafts.drafter(prompts, limit)
    with sequences, drafter or nullcontext():
        decode_loop(_make_step(sequences, sampler, stopping, drafter), limit, streamer, log_probs)
    if streamer is not None:
        streamer.end()
    tokens = torch.cat([given, stopping.pad(sequences.continuations)], 1)
    if log_probs is None:
        return tokens
    logps, sampling_logps = (stopping.pad(values, 0.0) for values in log_probs.of(sequences.continuations))
    return GenerateOutput(tokens, logps, sampling_logps, stopping.finish_reasons(), past_key_values)


LAG = 4
"""Steps that the GPU may be ahead of the host. Its queue never runs empty."""

_DRAFT_OPTIONS = [field.name for field in fields(DraftOptions)]
_OPTIONS = [name for name in inspect.signature(generate).parameters if name not in ("model", "options")]
_OPTIONS += [*SAMPLING_OPTIONS, *_DRAFT_OPTIONS]


def _check_seeds(
    seeds: Tensor | None, sequences: Sequences, generator: torch.Generator | None, sampling: SamplingOptions
) -> Tensor | None:
    """Returns the seeds of the rows on their device, after checks."""
    if seeds is None:
        return None
    require(sampling.do_sample and generator is None, "seeds", "seeds", "do_sample=True and no generator with them")
    is_valid = isinstance(seeds, Tensor) and seeds.dtype == torch.int64 and seeds.shape == (sequences.rows,)
    got = f"{seeds.dtype} {tuple(seeds.shape)}" if isinstance(seeds, Tensor) else type(seeds).__name__
    require(is_valid, "seeds", got, f"an int64 tensor of shape ({sequences.rows},)")
    return seeds.to(sequences.device)


def _make_step(sequences: Sequences, sampler: Sampler, stopping: Stopping, drafter: Drafter | None) -> DecodeStep:
    if drafter is not None:
        return SpeculativeStep(sequences, sampler, stopping, drafter)
    step_type = CapturedStep if isinstance(sequences, SlotSequences) else DecodeStep
    return step_type(sequences, sampler, stopping)


def decode_loop(step: DecodeStep, max_new_tokens: int, streamer: Streamer | None, log_probs: LogProbs | None) -> None:
    """Repeats the step until all rows have finished, or `max_new_tokens` times.

    On a GPU the host looks at the state of the rows `LAG` steps late, so that the GPU always has work. Tokens of steps
    after the last row has finished are dropped. The host looks at once for a streamer, stop strings and criteria, if
    the KV cache outlives the call, since a cache may be unable to drop tokens, and if the step waits anyway.
    """
    is_immediate = streamer is not None or step.stopping.is_on_host or step.sequences.keeps_cache or step.is_synchronous
    states = States(step, 0 if is_immediate else LAG)
    for count in range(1, max_new_tokens + 1):
        tokens = step.prefill() if count == 1 else step.decode()
        if log_probs is not None:
            log_probs.append(step.sampled)
        is_last = count == max_new_tokens
        if step.stopping.is_possible or is_last or streamer is not None:
            step.stopping.update_on_host(step.sequences.continuations)
            is_last |= states.is_finished(count, wait=is_last)
        if streamer is not None:
            streamer.put(tokens.cpu())
        if is_last:
            break

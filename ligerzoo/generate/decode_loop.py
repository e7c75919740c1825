"""The decode loop: prefill, then one decode step per token until all rows have finished."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.generate.captured import CapturedStep, can_capture
from ligerzoo.generate.model import SupportsGenerate
from ligerzoo.generate.options import invalid, is_integer, refuse_unknown
from ligerzoo.generate.sampling import Sampler, check_logits
from ligerzoo.generate.sampling_options import LogitsProcessor, SamplingOptions
from ligerzoo.generate.sequences import Sequences
from ligerzoo.generate.slot_sequences import SlotSequences
from ligerzoo.generate.step import DecodeStep
from ligerzoo.generate.stopping import Stopping, SupportsDecode
from ligerzoo.generate.streaming import Streamer, check_streamer


@torch.inference_mode(False)  # even within inference_mode: what a model caches must remain usable for training
@torch.no_grad()
def generate(
    model: SupportsGenerate,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    min_new_tokens: int | None = None,
    bad_words_ids: Sequence[Sequence[int]] | None = None,
    no_repeat_ngram_size: int | None = None,
    logits_processor: Sequence[LogitsProcessor] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: SupportsDecode | None = None,
    generator: torch.Generator | None = None,
    streamer: Streamer | None = None,
    use_cache: bool = True,
    **model_inputs: Any,
) -> Tensor:
    """Continues each prompt by up to `max_new_tokens` tokens.

    A row finishes with its first end-of-sequence token or stop string and is padded from then on. Generation stops when
    all rows have finished. `eos_token_id` and `pad_token_id` default to those of the model's generation_config, else of
    its config. No other option has a default there.

    Args:
        model: a causal language model. Its training mode is not changed. Runs uncompiled after `model.compile()`, and
            compiled if it is the result of `torch.compile(model)`.
        input_ids: (B, T) token ids. No prompt may be empty.
        attention_mask: (B, T), 1 for a token and 0 for padding. Padding may be anywhere: each row is continued as if it
            were alone, except with rotary position types longrope and dynamic, which depend on the longest row.
        max_new_tokens: largest number of new tokens, required. Memory grows with the tokens generated, not with this.
        do_sample, temperature, top_k, top_p, min_p, repetition_penalty, min_new_tokens, bad_words_ids: see
            `SamplingOptions`.
        no_repeat_ngram_size, logits_processor: see `SamplingOptions`.
        eos_token_id: the token or tokens that finish a row. An empty list means none.
        pad_token_id: fills finished rows. Defaults to the first `eos_token_id` if the model defines no padding token.
        stop_strings: a row finishes when the text of its continuation contains one of these strings.
        tokenizer: decodes the text that is searched for `stop_strings`.
        generator: random number generator on the model's device, which draws one seed for each row. None uses torch's
            default.
        streamer: receives the prompts, then the tokens of each step.
        use_cache: whether to keep keys and values in a KV cache. Without it, each step recomputes all tokens: slower,
            same result. The result differs only for rotary position types dynamic, and longrope outside Phi-3: as in
            transformers, a cache keeps the keys as they were first rotated.
        model_inputs: further model inputs for the prompts, such as `pixel_values`. Per-token inputs (B, T, ...) are
            padded and sliced like `input_ids`.

    Returns:
        (B, T + new tokens) int64: each prompt unchanged, padding included, followed by its continuation.

    Raises:
        LigerzooError: a ValueError. Before the model runs: an option is unknown or invalid, the mask has another shape,
            a prompt is empty, or `CausalLM.check_inputs` refuses the inputs. Later: the logits are NaN or infinite.
    """
    refuse_unknown(model, model_inputs, _OPTIONS)
    if max_new_tokens is None or not is_integer(max_new_tokens) or max_new_tokens < 0:
        remedy = "Pass max_new_tokens=20, for example." if max_new_tokens is None else None
        raise invalid("max_new_tokens", repr(max_new_tokens), "an integer, 0 or more", remedy)
    is_captured = use_cache and max_new_tokens > 2 and isinstance(model, nn.Module) and can_capture(model)
    make_sequences = SlotSequences if is_captured else Sequences
    sequences = make_sequences(model, input_ids, attention_mask, model_inputs, max_new_tokens, use_cache)
    options = SamplingOptions(
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens,
        bad_words_ids=bad_words_ids,
        no_repeat_ngram_size=no_repeat_ngram_size,
        logits_processor=logits_processor,
    )
    stopping = Stopping(model, sequences.prompts, eos_token_id, pad_token_id, stop_strings, tokenizer)
    sampler = Sampler(len(input_ids), model.config.vocab_size, input_ids.device)
    sampler.assign(
        range(len(input_ids)), input_ids, options, attention_mask=attention_mask,
        eos_token_ids=stopping.eos_token_ids, generator=generator,
    )  # fmt: skip
    check_streamer(streamer)

    if streamer is not None:
        streamer.put(input_ids.cpu())
    make_step = CapturedStep if is_captured else DecodeStep
    with sequences:
        decode_loop(make_step(sequences, sampler, stopping), max_new_tokens, streamer)
    if streamer is not None:
        streamer.end()
    return torch.cat([input_ids, stopping.pad(sequences.continuations)], 1)


LAG = 4
"""Steps that the GPU may be ahead of the host. Its queue never runs empty."""

_OPTIONS = [name for name in inspect.signature(generate).parameters if name not in ("model", "model_inputs")]


def decode_loop(step: DecodeStep, max_new_tokens: int, streamer: Streamer | None) -> None:
    """Repeats the step until all rows have finished, or `max_new_tokens` times.

    On a GPU without streamer and stop strings, the host looks at the state of the rows `LAG` steps late, so that the
    GPU always has work. Tokens of steps after the last row has finished are dropped.
    """
    states = States(step, 0 if streamer is not None or step.stopping.has_stop_strings else LAG)
    for count in range(1, max_new_tokens + 1):
        tokens = step.prefill() if count == 1 else step.decode()
        is_last = count == max_new_tokens
        if step.stopping.is_possible or is_last or streamer is not None:
            step.stopping.find_stop_strings(step.sequences.continuations)
            is_last |= states.is_finished(count, wait=is_last)
        if streamer is not None:
            streamer.put(tokens.cpu())
        if is_last:
            break


class States:
    """Reads from the device whether rows are running, and whether the logits were valid.

    Args:
        step: the step.
        lag: number of steps after which the host reads the state of a step. Always 0 on a CPU.
    """

    def __init__(self, step: DecodeStep, lag: int) -> None:
        self._step = step
        self._on_gpu = step.stopping.running.is_cuda
        self._lag = lag if self._on_gpu else 0
        self._pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        rows = len(step.stopping.running)
        self._buffers = torch.empty(self._lag + 1, rows + 1, dtype=torch.bool, pin_memory=self._on_gpu)

    def is_finished(self, count: int, *, wait: bool) -> bool:
        """Returns whether all rows have finished, as far as is known, and then drops the tokens after that.

        Releases the rows that have finished.

        Args:
            count: number of steps so far.
            wait: wait for all of them.

        Raises:
            LigerzooError: the logits of a step were NaN or infinite.
        """
        buffer = self._buffers[count % len(self._buffers)]
        state = torch.cat([self._step.stopping.running, self._step.sampler.is_broken[None]])
        buffer.copy_(state, non_blocking=True)
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._pending.append((count, buffer, event))
        while self._pending and (wait or len(self._pending) > self._lag):
            counted, buffer, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            *is_running, is_broken = buffer.tolist()
            check_logits(is_broken, counted)
            if not any(is_running):
                self._step.sequences.truncate(counted)
                return True
            self._step.sequences.release([row for row, runs in enumerate(is_running) if not runs])
        return False

"""Refuses options of `generate` that are unknown or invalid."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError, did_you_mean
from ligerzoo.kernels.fp8 import FP8

_WRAP = "Use the generate method of transformers: ligerzoo.integrations.transformers.wrap(model).generate(...)."
_BEAMS = "Beam search is not implemented. " + _WRAP
_NOT_IMPLEMENTED = "It is not implemented. " + _WRAP
_SPECULATIVE = "Use prompt_lookup_num_tokens=10, or assistant_model=... with num_assistant_tokens=5."
_STOP_STRINGS = "Use stop_strings=[...] with tokenizer=tokenizer."
_STOP_IDS = "Use eos_token_id=..., which may be a list."
_COPIES = "Use num_return_sequences=... with do_sample=True."
_LOG_PROBS = "Use return_dict_in_generate=True, which returns the log-probabilities of the new tokens as .logps."
_FORWARD = "Call the model itself, which returns them: model(sequences, {}=True)."
_OWN_CACHE = "Pass past_key_values=model.new_cache(), or model.new_cache(capacity) for a cache of fixed size."
_PROMPTS = "Pass token ids as input_ids, or embeddings as inputs_embeds."
_NO_COMPILE = "Decode steps run as captured CUDA graphs where the model allows it. Leave it out."

REMEDIES = {
    # other names of our options
    "inputs": _PROMPTS,
    "max_tokens": "Use max_new_tokens.",
    "seed": "Use generator=torch.Generator(model.device).manual_seed(seed).",
    "stop": _STOP_STRINGS,
    "stop_sequences": _STOP_STRINGS,
    "stop_tokens": _STOP_IDS,
    "stop_token_ids": _STOP_IDS,
    "frequency_penalty": "Use repetition_penalty.",
    "presence_penalty": "Use repetition_penalty.",
    "n": _COPIES,
    "best_of": _COPIES,
    "logprobs": _LOG_PROBS,
    "kv_cache_dtype": f"Use cache_dtype={FP8}.",
    "return_dict": "Use return_dict_in_generate=True.",
    "skip_special_tokens": "Pass it to tokenizer.decode, or to TextStreamer.",
    # inputs of `forward` that `generate` computes
    "labels": "Call the model itself to compute a loss: model(input_ids, labels=labels).loss.",
    "position_ids": "They are computed from attention_mask.",
    "cu_seqlens": "Pass one prompt in each row, with padding and an attention_mask.",
    "logits_to_keep": "Only the last logits are computed.",
    # options of transformers
    "max_time": "Use stopping_criteria=[transformers.MaxTimeCriteria(seconds)].",
    "output_scores": _LOG_PROBS,
    "output_logits": _LOG_PROBS,
    "output_attentions": _FORWARD.format("output_attentions"),
    "output_hidden_states": _FORWARD.format("output_hidden_states"),
    "generation_config": "Pass its values as options: generate(input_ids, max_new_tokens=20, do_sample=True).",
    "bos_token_id": "Begin each prompt with it; tokenizers do.",
    "decoder_start_token_id": "Begin each prompt with it; tokenizers do.",
    "synced_gpus": "Run one process per model, or gather the weights of a sharded model first.",
    "transformers_version": "Leave it out.",
    "is_assistant": _SPECULATIVE,
    **dict.fromkeys(
        ("cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"), _OWN_CACHE
    ),
    **dict.fromkeys(("compile_config", "disable_compile", "continuous_batching_config"), _NO_COMPILE),
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "length_penalty", "early_stopping", "diversity_penalty", "constraints",
         "force_words_ids"),
        _BEAMS,
    ),
    **dict.fromkeys(
        ("assistant_tokenizer", "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
         "assistant_lookbehind", "draft_model", "num_assistant_tokens_schedule", "num_speculative_tokens",
         "speculation_type", "speculative_model", "target_lookbehind", "use_mtp"),
        _SPECULATIVE,
    ),
    **dict.fromkeys(
        ("custom_generate", "dola_layers", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
         "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "guidance_scale",
         "negative_prompt_attention_mask", "negative_prompt_ids", "penalty_alpha", "prefix_allowed_tokens_fn",
         "remove_invalid_values", "renormalize_logits", "token_healing", "top_h", "typical_p", "watermarking_config"),
        _NOT_IMPLEMENTED,
    ),
}  # fmt: skip
"""What to do instead, by the name of an option that other libraries have."""

NEUTRAL_VALUES: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "length_penalty", "guidance_scale", "encoder_repetition_penalty", "typical_p"),
        (1,),
    ),
    **dict.fromkeys(
        ("penalty_alpha", "diversity_penalty", "encoder_no_repeat_ngram_size", "early_stopping", "token_healing",
         "output_scores", "output_logits", "output_attentions", "output_hidden_states", "synced_gpus"),
        (0,),
    ),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0, 1)),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits"), (False, True)),
}  # fmt: skip
"""Values without an effect on the result, of options of transformers that are not implemented. They are accepted."""


def refuse_unknown(model: Any, names: Iterable[str], options: Sequence[str]) -> None:
    """Raises LigerzooError unless all names are inputs of the model.

    Args:
        model: the model. Any name is accepted that `REMEDIES` lacks, if the model has no `modalities`.
        names: names of the keyword arguments that are not options.
        options: names of the options, for suggestions.
    """
    modalities: Sequence[str] | None = getattr(model, "modalities", None)
    for name in names:
        if name in (modalities or ()) or (modalities is None and name not in REMEDIES):
            continue
        remedy, inputs = REMEDIES.get(name) or did_you_mean(name, [*options, *(modalities or ())]), None
        if remedy is None:
            inputs = ", ".join(modalities or ()) or "text inputs only, such as input_ids"
            remedy = "help(ligerzoo.generate.generate) lists the options."
        raise LigerzooError(
            f"not an option of generate or input of {type(model).__name__}", where=name, expected=inputs, remedy=remedy
        )


def count_new_tokens(max_new_tokens: int | None, max_length: int | None, prompt_length: int) -> int:
    """Returns the largest number of new tokens from the options of `generate`.

    Args:
        max_new_tokens: takes precedence, with a warning if both are given.
        max_length: largest number of tokens with those of the prompt.
        prompt_length: number of tokens of the padded prompts.

    Raises:
        LigerzooError: a number is invalid, both are None, or the prompt has `max_length` tokens already.
    """
    expected = "an integer, 0 or more"
    if max_length is not None:
        require(is_integer(max_length) and max_length >= 0, "max_length", repr(max_length), expected)
    if max_new_tokens is None and max_length is None:
        raise invalid("max_new_tokens", "None", expected, "Pass max_new_tokens=20, for example.")
    if max_new_tokens is None:
        assert max_length is not None
        expected = f"more than {prompt_length}, the length of the prompts"
        require(max_length > prompt_length, "max_length", max_length, expected, "Use max_new_tokens.")
        return max_length - prompt_length
    require(is_integer(max_new_tokens) and max_new_tokens >= 0, "max_new_tokens", repr(max_new_tokens), expected)
    if max_length is not None:
        warn(f"generate: max_new_tokens={max_new_tokens} takes precedence over max_length={max_length}. Pass only one.")
    return max_new_tokens


def check_copies(num_return_sequences: int, *, do_sample: object) -> None:
    """Raises LigerzooError unless `num_return_sequences` is valid for greedy decoding or sampling."""
    is_count = is_integer(num_return_sequences) and num_return_sequences > 0
    require(is_count, "num_return_sequences", repr(num_return_sequences), "a positive integer")
    got = f"{num_return_sequences} without sampling, which gives equal sequences"
    is_useful = num_return_sequences == 1 or do_sample is not False
    require(is_useful, "num_return_sequences", got, "1", "Pass do_sample=True to sample different ones.")


def check_devices(model: Any, name: str | None = None, inputs: Tensor | None = None) -> None:
    """Raises LigerzooError if the model has no weights or is sharded, or if inputs are on another device than they.

    Args:
        model: the model.
        name: of the inputs, for messages.
        inputs: model inputs, or None.
    """
    device: torch.device | None = getattr(model, "device", None)
    if device is not None and device.type == "meta":
        raise LigerzooError(
            "the weights are on the meta device, which stores no values", where=type(model).__name__,
            remedy="Load them with from_pretrained.",
        )  # fmt: skip
    if hasattr(model, "unshard") and any(hasattr(weight, "device_mesh") for weight in model.parameters()):
        raise LigerzooError(
            "the model is sharded: each token would gather all weights from all processes", where=type(model).__name__,
            remedy="Generate within `with ligerzoo.parallel.unsharded(model):`.",
        )  # fmt: skip
    # Weights on a CPU may be offloaded, so that the model computes elsewhere.
    if inputs is not None and device is not None and device != inputs.device:
        is_offloaded = device.type == "cpu" and inputs.device.type != "meta"
        remedy = f"Use {name}.to(model.device)."
        require(is_offloaded, str(name), f"a tensor on {inputs.device}", f"one on {device}, like the model", remedy)


def warn(message: str) -> None:
    """Warns, with the line of the caller of ligerzoo."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("ligerzoo", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def invalid(name: str, got: object, expected: str, remedy: str | None = None) -> LigerzooError:
    """Returns the error for the value of an option."""
    return LigerzooError("invalid value", where=name, got=got, expected=expected, remedy=remedy)


def require(holds: bool, name: str, got: object, expected: str, remedy: str | None = None) -> None:
    """Raises LigerzooError unless the value of an option is valid."""
    if not holds:
        raise invalid(name, got, expected, remedy)


def require_bool(name: str, value: object) -> None:
    """Raises LigerzooError unless the value of an option is True or False."""
    require(isinstance(value, bool), name, repr(value), "True or False")


def is_number(value: object) -> bool:
    """Returns whether a value is an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Returns whether a value is an int, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def type_name(value: object) -> str:
    """Returns the name of a value's type, or "None", for messages about objects whose repr is long."""
    return "None" if value is None else type(value).__name__

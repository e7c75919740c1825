"""Options that other libraries have: what to do instead, and which values have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from ligerzoo.errors import LigerzooError, did_you_mean
from ligerzoo.kernels.fp8 import FP8

T = TypeVar("T")


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


def _all(names: str, value: T) -> dict[str, T]:
    """Returns the same value for several names."""
    return dict.fromkeys(names.split(), value)


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
    **_all(
        "cache_implementation cache_config max_cache_len prefill_chunk_size low_memory",
        _OWN_CACHE,
    ),
    **_all("compile_config disable_compile continuous_batching_config", _NO_COMPILE),
    **_all(
        "num_beams num_beam_groups length_penalty early_stopping diversity_penalty constraints force_words_ids",
        _BEAMS,
    ),
    **_all(
        "assistant_tokenizer assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight "
        "assistant_lookbehind draft_model num_assistant_tokens_schedule num_speculative_tokens speculation_type "
        "speculative_model target_lookbehind use_mtp",
        _SPECULATIVE,
    ),
    **_all(
        "custom_generate dola_layers encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff "
        "eta_cutoff exponential_decay_length_penalty guidance_scale negative_prompt_attention_mask "
        "negative_prompt_ids penalty_alpha prefix_allowed_tokens_fn remove_invalid_values renormalize_logits "
        "token_healing top_h typical_p watermarking_config",
        _NOT_IMPLEMENTED,
    ),
}
"""What to do instead, by the name of an option that other libraries have."""

NEUTRAL_VALUES: dict[str, tuple[float, ...]] = {
    **_all(
        "num_beams num_beam_groups length_penalty guidance_scale encoder_repetition_penalty typical_p",
        (1,),
    ),
    **_all(
        "penalty_alpha diversity_penalty encoder_no_repeat_ngram_size early_stopping token_healing output_scores "
        "output_logits output_attentions output_hidden_states synced_gpus",
        (0,),
    ),
    **_all("epsilon_cutoff eta_cutoff", (0, 1)),
    **_all("remove_invalid_values renormalize_logits", (False, True)),
}
"""Values without an effect on the result, of options of transformers that are not implemented. They are accepted."""

NOT_IMPLEMENTED = {
    **_all(
        "num_beams num_beam_groups penalty_alpha dola_layers constraints force_words_ids guidance_scale "
        "encoder_repetition_penalty encoder_no_repeat_ngram_size exponential_decay_length_penalty token_healing "
        "watermarking_config max_time",
        False,
    ),
    **_all("typical_p top_h epsilon_cutoff eta_cutoff", True),
}
"""Options that change the tokens and are not implemented, and whether they do so only in sampling."""


def is_neutral(name: str, value: object) -> bool:
    """Returns whether an option of transformers that is not implemented has a value without an effect."""
    is_plain = value is None or isinstance(value, int | float)
    return is_plain and name in NEUTRAL_VALUES and (value is None or value in NEUTRAL_VALUES[name])


def no_such_option(
    name: str, what: str, names: Iterable[str], expected: str, remedy: str | None = None, others: Mapping[str, str] = {}
) -> LigerzooError:
    """Returns the error for an option that does not exist; `others` has further remedies."""
    found = others.get(name) or REMEDIES.get(name) or did_you_mean(name, names)
    return LigerzooError(what, where=name, expected=None if found else expected, remedy=found or remedy)

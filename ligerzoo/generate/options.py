"""Refuses options of `generate` that are unknown or invalid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ligerzoo.errors import LigerzooError, did_you_mean

_WRAP = "Use the generate method of transformers: ligerzoo.integrations.transformers.wrap(model).generate(...)."
_BEAMS = "Beam search is not implemented. " + _WRAP
_NOT_IMPLEMENTED = "It is not implemented. " + _WRAP
_STOP_STRINGS = "Use stop_strings=[...] with tokenizer=tokenizer."
_STOP_IDS = "Use eos_token_id=..., which may be a list."
_REPEAT = "Repeat the prompts: input_ids.repeat_interleave(n, 0)."

REMEDIES = {
    # other names of our options
    "max_tokens": "Use max_new_tokens.",
    "max_length": "Use max_new_tokens, which does not count the tokens of the prompt.",
    "seed": "Use generator=torch.Generator(model.device).manual_seed(seed).",
    "stop": _STOP_STRINGS,
    "stop_sequences": _STOP_STRINGS,
    "stop_tokens": _STOP_IDS,
    "stop_token_ids": _STOP_IDS,
    "frequency_penalty": "Use repetition_penalty.",
    "presence_penalty": "Use repetition_penalty.",
    "n": _REPEAT,
    "num_return_sequences": _REPEAT,
    "skip_special_tokens": "Pass it to tokenizer.decode, or to TextStreamer.",
    # inputs of `forward` that `generate` computes
    "inputs_embeds": "Pass token ids as input_ids.",
    "labels": "Call the model itself to compute a loss: model(input_ids, labels=labels).loss.",
    "position_ids": "They are computed from attention_mask.",
    "cu_seqlens": "Pass one prompt in each row, with padding and an attention_mask.",
    "past_key_values": "A new KV cache is created. Call the model itself to continue with a cache.",
    "cache_implementation": "A KV cache that grows is created.",
    # options of transformers
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "length_penalty", "early_stopping", "diversity_penalty", "constraints",
         "force_words_ids"),
        _BEAMS,
    ),
    **dict.fromkeys(
        ("assistant_model", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
         "forced_bos_token_id", "forced_eos_token_id", "generation_config", "max_time",
         "min_length", "output_attentions", "output_hidden_states",
         "output_logits", "output_scores", "penalty_alpha", "prefix_allowed_tokens_fn", "return_dict_in_generate",
         "stopping_criteria", "suppress_tokens", "typical_p"),
        _NOT_IMPLEMENTED,
    ),
}  # fmt: skip
"""What to do instead, by the name of an option that other libraries have."""


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

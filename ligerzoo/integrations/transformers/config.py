"""Configs and generation configs: ours as transformers', and changes that users made to transformers' as ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from ligerzoo.errors import ConfigError
from ligerzoo.hub.saving import config_entries
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.language_model import LanguageModel

CHANGEABLE = frozenset(
    ("bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "router_aux_loss_coef", "vocab_size")
)
"""Fields of our configs that scripts may change in transformers' config, where the wrapper reads them."""


def hf_config(model: LanguageModel) -> PreTrainedConfig:
    """Returns transformers' config of a model."""
    entries = config_entries(model, model.origin, model.dtype)
    model_type = entries["model_type"]
    try:
        config_class = CONFIG_MAPPING[model_type]  # not `get`, which ignores classes that are imported lazily
    except KeyError:  # a class of the user's own
        config_class = PreTrainedConfig
    config = config_class.from_dict(config_class._decode_special_floats(entries))  # as when it reads config.json
    config.model_type = model_type
    config.dtype = model.dtype
    return config


def with_changes(config: Any, hf: PreTrainedConfig, before: Mapping[str, object]) -> Any:
    """Returns our config with the changes that were made to transformers' config.

    Args:
        config: our config.
        hf: transformers' current config.
        before: what `values` returned when it was made.

    Raises:
        ConfigError: a field was changed that the model read when it was built.
    """
    names = {field.name for field in dataclasses.fields(config)}
    now = values(hf)
    changed = {name: now[name] for name in names & now.keys() if now[name] != before.get(name)}
    own = {name: value for name, value in changed.items() if name in CHANGEABLE}
    new = dataclasses.replace(config, **own) if own else config
    moves = getattr(new, "first_position", None) != getattr(config, "first_position", None)  # RoBERTa's positions
    for name in sorted(changed.keys() - CHANGEABLE | ({"pad_token_id"} if moves else set())):
        what, got, expected = "changed after the model was built, which has no effect", changed[name], before.get(name)
        remedy = "Set it before loading: ligerzoo's from_pretrained takes values of config fields."
        raise ConfigError(what, where=f"config.{name}", got=repr(got), expected=repr(expected), remedy=remedy)
    return new


def values(hf: PreTrainedConfig) -> dict[str, object]:
    """Returns the entries of transformers' config, those of the text model first."""
    return {**hf.to_dict(), **hf.get_text_config().to_dict()}


def hf_generation_config(model: CausalLM, config: PreTrainedConfig) -> GenerationConfig:
    """Returns the defaults of `generate`: generation_config.json's, or token ids of the config."""
    if model.generation_config:
        return GenerationConfig.from_dict(dict(model.generation_config))
    return GenerationConfig.from_model_config(config)


def generation_entries(
    entries: Mapping[str, object], now: GenerationConfig, before: GenerationConfig
) -> dict[str, object]:
    """Returns the entries of generation_config.json.

    Args:
        entries: those of the checkpoint that the model was loaded from.
        now: the generation config.
        before: the generation config when the model was wrapped.
    """
    if not entries:
        return {name: value for name, value in now.to_diff_dict().items() if name != "transformers_version"}
    old, new = before.to_dict(), now.to_dict()
    return {**entries, **{name: value for name, value in new.items() if value != old.get(name)}}

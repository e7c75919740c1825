"""Ligerzoo models as transformers' `PreTrainedModel`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from ligerzoo.convert import architecture_for
from ligerzoo.errors import LigerzooError
from ligerzoo.hub.saving import config_entries
from ligerzoo.integrations.transformers.backbone import Backbone
from ligerzoo.integrations.transformers.head import Head, HeadOptions
from ligerzoo.layers import shifted_labels
from ligerzoo.models.causal_lm import CausalLM


class WrappedCausalLM(PreTrainedModel, GenerationMixin):
    """A ligerzoo model that transformers' trainers, generation and saving accept; see `wrap`.

    Each architecture has a subclass, named as transformers names its class.

    Attributes:
        model: the model without the head.
        lm_head: the head.
    """

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True

    model: Backbone
    lm_head: nn.Module

    def __init__(self, model: CausalLM) -> None:
        super().__init__(hf_config(model))
        self.model = Backbone(model)
        self.head_options = HeadOptions(model.lm_head)
        self.lm_head = Head(self.head_options, model.lm_head.weight)
        self._no_split_modules = sorted(
            {type(block).__name__ for module in self.modules() if isinstance(module, nn.ModuleList) for block in module}
        )
        self._tied_weights_keys = {}
        if model.config.tie_word_embeddings:
            decoder = "model." if self.model.is_text_only else "model.language_model."
            self._tied_weights_keys = {"lm_head.weight": f"{decoder}embed_tokens.weight"}
        self.loss_type = "ForCausalLM"
        if model.generation_config:
            self.generation_config = GenerationConfig.from_dict(model.generation_config)
        self.post_init()
        self.train(model.training)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast:
        # Not parameters: the Trainer takes every parameter with "label" in its name for a required label.
        shift_labels, num_items_in_batch = inputs.pop("shift_labels", None), inputs.pop("num_items_in_batch", None)
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not torch.is_grad_enabled()
        output = self.model(
            input_ids, attention_mask, position_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds,
            use_cache=use_cache, **inputs,
        )  # fmt: skip
        hidden = output.last_hidden_state
        if labels is not None and shift_labels is None:
            shift_labels = shifted_labels(labels)
        has_loss = shift_labels is not None
        logits = loss = None
        if not (has_loss and self.training and logits_to_keep is None):
            kept = slice(-(logits_to_keep or 0), None) if not isinstance(logits_to_keep, Tensor) else logits_to_keep
            logits = self.head_options.logits(self.lm_head(hidden[:, kept]))
        if shift_labels is not None:
            loss = self._loss(hidden, shift_labels, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=output.past_key_values)

    def _loss(self, hidden: Tensor, target: Tensor, num_items: int | Tensor | None) -> Tensor:
        if isinstance(self.lm_head, Head) and "forward" not in vars(self.lm_head):
            return self.lm_head(hidden, target, num_items)
        # Adapters and hooks of others replace the head or its forward: the loss must use what they compute.
        return self.head_options.loss(self.lm_head(hidden), target, num_items)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def initialize_weights(self) -> None:
        """Keeps the weights: they come from the ligerzoo model."""

    # Activation checkpointing

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """Called by `activation_checkpointing_enable` and `gradient_checkpointing_enable` of transformers."""
        if not enable:
            self.model.zoo_model.gradient_checkpointing_disable()
            return
        if every_n_layers != 1:
            raise LigerzooError("checkpoints every layer", where="every_n_layers", got=every_n_layers, expected="1")
        options = getattr(gradient_checkpointing_func, "keywords", {})
        if getattr(gradient_checkpointing_func, "func", checkpoint) is not checkpoint:
            raise LigerzooError("not supported", where="offload", got=True, expected="False")
        self.model.zoo_model.gradient_checkpointing_enable(options)

    # Cache

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.model.new_cache()

    # Weights

    def to_zoo_model(self, state: Mapping[str, Tensor] | None = None) -> CausalLM:
        """Returns a ligerzoo model with these weights: views of this model's if `state` is None."""
        source = self.model.zoo_model
        state = self.state_dict() if state is None else state
        model: CausalLM = architecture_for(type(source)).build_on_meta(source.config, type(source))
        model.load_state_dict({self._to_zoo_name(name): tensor for name, tensor in state.items()}, assign=True)
        model.tie_weights()
        model.origin = source.origin
        return model

    def _to_zoo_name(self, name: str) -> str:
        return self.model.to_zoo_name(name.removeprefix("model.")) if name.startswith("model.") else name

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        names = super().state_dict().keys()
        if names & state_dict.keys() == names or not (state_dict.keys() - names):
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        self.to_zoo_model().load_hf_state_dict(state_dict)
        return nn.modules.module._IncompatibleKeys([], [])

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "5GB",
        **options: Any,
    ) -> None:
        model = self.to_zoo_model(state_dict)
        if is_main_process:
            model.save_pretrained(save_directory, max_shard_size=max_shard_size)
            self.generation_config.save_pretrained(save_directory)


def hf_config(model: CausalLM) -> PreTrainedConfig:
    """Returns transformers' config of a ligerzoo model."""
    entries = config_entries(model, model.origin)
    config_class = CONFIG_MAPPING[entries["model_type"]]
    return config_class.from_dict(entries)


@cache
def wrapper_class(model_class: type[CausalLM]) -> type[WrappedCausalLM]:
    """Returns the wrapper of an architecture, named as transformers names its class."""
    architecture = architecture_for(model_class)
    return type(architecture.hf_class, (WrappedCausalLM,), {})


def wrap(model: CausalLM) -> WrappedCausalLM:
    """Returns a `PreTrainedModel` around a ligerzoo model."""
    return wrapper_class(type(model))(model)

"""Causal language models as `PreTrainedModel` of transformers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ligerzoo.integrations.transformers.backbone import Backbone, BackboneOutput
from ligerzoo.integrations.transformers.cache import GenerationCache
from ligerzoo.integrations.transformers.config import generation_entries, hf_generation_config
from ligerzoo.integrations.transformers.generation import Generation
from ligerzoo.integrations.transformers.head import Head, LogitOptions
from ligerzoo.integrations.transformers.model import WrappedModel
from ligerzoo.integrations.transformers.versions import takes_cache
from ligerzoo.layers import shifted_labels
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.inputs import tokens_or_embeddings
from ligerzoo.models.labels import check_labels

_SHIFTS_LABELS = "LlamaForCausalLM"
"""A class name for which the Trainer shifts labels when it smooths them."""


class WrappedCausalLM(Generation, WrappedModel[CausalLM]):
    """A causal language model of ligerzoo as a `PreTrainedModel`; see `wrap`.

    Each architecture has a subclass with the name of its class in transformers.

    Args:
        model: the model. Its parameters are shared.
        fuses: see `Backbone`.

    Attributes:
        lm_head: the head, without scale and soft cap.
        head_options: scale and soft cap of the logits, and the loss.
    """

    accepts_loss_kwargs = True

    model: Backbone[CausalLM]
    lm_head: nn.Module

    def __init__(self, model: CausalLM, *, fuses: bool = True) -> None:
        super().__init__(model, fuses=fuses)
        self.loss_type = "ForCausalLM"
        self.head_options = LogitOptions(model.lm_head)
        self.lm_head = Head(model.lm_head)
        decoder = "model" if self.backbone.is_text_only else "model.language_model"
        is_tied = model.config.tie_word_embeddings
        self._tied_weights_keys = {"lm_head.weight": f"{decoder}.embed_tokens.weight"} if is_tied else {}
        self._keys_to_ignore_on_save = [*self._tied_weights_keys]  # the Trainer expects that checkpoints lack them
        self.generation_config = hf_generation_config(model, self.config)
        self._generation_config_before = copy.deepcopy(self.generation_config)
        self.post_init()
        self.train(model.training)

    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast | tuple[object, ...]:
        """Computes the logits, the loss if labels are given, or both.

        Args:
            input_ids: see `ligerzoo.models.CausalLM.forward`, as for the other inputs.
            attention_mask: padding mask or attention mask.
            position_ids: position of each token.
            past_key_values: cache that this model returned.
            inputs_embeds: embeddings instead of `input_ids`.
            labels: (B, T), aligned with `input_ids`; this method shifts them.
            use_cache: create a cache if none was passed. Default: the config's, without autograd.
            logits_to_keep: number of last tokens to compute logits for, 0 for all; or a 1-d tensor of token indices.
                Default: all; but none in training if labels are given, since the loss does not need them.
            output_router_logits: return router logits and add the load-balancing loss. Default: the config's.
            return_dict: False returns a tuple.
            inputs: `shift_labels` and `num_items_in_batch`; and inputs of the architecture, such as `pixel_values`.

        Raises:
            TypeError: an input has another type, such as a list instead of a tensor.
            ValueError: the inputs have inconsistent shapes or values, or are missing.
        """
        # Not parameters: the Trainer would wait for every parameter with "label" in its name.
        shift_labels, num_items_in_batch = inputs.pop("shift_labels", None), inputs.pop("num_items_in_batch", None)
        shape = tokens_or_embeddings(input_ids, inputs_embeds).shape[:2]
        check_labels(labels, shift_labels, shape, self.backbone.zoo_model.config.vocab_size, type(self))
        text_config = self.config.get_text_config()
        if use_cache is None:
            use_cache = bool(getattr(text_config, "use_cache", True)) and not torch.is_grad_enabled()
        if output_router_logits is None:
            output_router_logits = getattr(text_config, "output_router_logits", False)
        inputs["output_router_logits"] = output_router_logits
        body: BackboneOutput = self.backbone(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **inputs
        )
        hidden = body.last_hidden_state
        if labels is not None and shift_labels is None:
            shift_labels = shifted_labels(labels, body.segment_start)
        loss = None if shift_labels is None else self._loss(hidden, shift_labels, num_items_in_batch)
        if loss is not None and body.aux_loss is not None:
            loss = loss + text_config.router_aux_loss_coef * body.aux_loss.to(loss.device)
        logits = None
        if loss is None or not self.training or logits_to_keep is not None:
            kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-(logits_to_keep or 0), None)
            logits = self.head_options.logits(self.lm_head(hidden[:, kept]))
        output: CausalLMOutputWithPast | MoeCausalLMOutputWithPast
        if body.router_logits is None:
            output = CausalLMOutputWithPast(loss=loss, logits=logits, **body.layer_fields())
        else:
            routing = {"aux_loss": body.aux_loss, "router_logits": body.router_logits}
            output = MoeCausalLMOutputWithPast(loss=loss, logits=logits, **routing, **body.layer_fields())
        return output.to_tuple() if return_dict is False else output

    def _loss(self, hidden: Tensor, target: Tensor, num_items: int | Tensor | None) -> Tensor:
        if isinstance(self.lm_head, Head) and "forward" not in vars(self.lm_head):
            return self.lm_head(hidden, target, num_items)
        # Adapters and hooks replace the head or its forward: the loss must use what they compute.
        return self.head_options.loss(self.lm_head(hidden), target, num_items)

    def _get_name(self) -> str:
        """Returns the name that the Trainer looks up in its table of models whose labels it shifts."""
        name = type(self).__name__
        return name if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else _SHIFTS_LABELS

    def get_output_embeddings(self) -> nn.Module:
        """Returns the head."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the head."""
        self.lm_head = new_embeddings

    def to_zoo_model(self, state: Mapping[str, Tensor] | None = None) -> CausalLM:
        """See `WrappedModel.to_zoo_model`."""
        model = super().to_zoo_model(state)
        model.generation_config = generation_entries(
            model.generation_config, self.generation_config, self._generation_config_before
        )
        return model

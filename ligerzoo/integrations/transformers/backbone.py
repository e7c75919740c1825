"""The model without its head, as transformers calls it: token ids to final hidden states."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from ligerzoo.integrations.transformers.cache import GenerationCache
from ligerzoo.models.causal_lm import CausalLM

HEADS = ("lm_head", "score")


class Backbone(nn.Module):
    """All of a ligerzoo model but its head, under the names that modules have in transformers.

    A text model's children are those of the decoder: `embed_tokens`, `layers`, `norm`. Otherwise the decoder is
    `language_model`, and other parts, such as the vision tower, keep their names.

    Args:
        model: the model. Its modules are shared, and it keeps working.

    Attributes:
        zoo_model: the model with its head replaced by the identity; not a child. A module that is replaced here, such
            as by PEFT, is replaced there as well.
    """

    zoo_model: CausalLM

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        headless = copy.copy(model)
        headless._modules = {name: module for name, module in model._modules.items() if name not in HEADS}
        headless.lm_head = nn.Identity()  # type: ignore[assignment]
        self.__dict__["zoo_model"] = headless
        self.is_text_only = not [name for name, _ in headless.named_children() if name not in ("model", "lm_head")]
        children = headless.model.named_children() if self.is_text_only else headless.named_children()
        for name, module in children:
            if name != "lm_head":
                super().__setattr__("language_model" if name == "model" else name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            if self.is_text_only:
                setattr(self.zoo_model.model, name, value)
            else:
                setattr(self.zoo_model, "model" if name == "language_model" else name, value)

    def to_zoo_name(self, name: str) -> str:
        """Returns the name of a parameter in the ligerzoo model, from that in this module."""
        if self.is_text_only:
            return f"model.{name}"
        part, _, rest = name.partition(".")
        return f"model.{rest}" if part == "language_model" else name

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether activation checkpointing is enabled."""
        return self.zoo_model.model.gradient_checkpointing

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding of the tokens."""
        return self.zoo_model.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding of the tokens."""
        owner = self if self.is_text_only else self.zoo_model.model
        owner.embed_tokens = value

    def new_cache(self) -> GenerationCache:
        """Returns an empty cache for `past_key_values`."""
        return GenerationCache(self.zoo_model.new_cache())

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **inputs: Any,
    ) -> MoeModelOutputWithPast:
        """Computes the final hidden states.

        Args:
            input_ids: see `ligerzoo.models.CausalLM.forward`, as the other arguments.
            attention_mask: padding mask or attention mask.
            position_ids: position of each token.
            past_key_values: cache of earlier tokens.
            inputs_embeds: embeddings instead of `input_ids`.
            use_cache: create a cache if none was passed.
            inputs: further inputs of the architecture, such as `pixel_values`.
        """
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        output = self.zoo_model(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds,
            past_key_values=None if past_key_values is None else past_key_values.caches, use_cache=False, **inputs,
        )  # fmt: skip
        return MoeModelOutputWithPast(last_hidden_state=output.logits, past_key_values=past_key_values)

"""A model without its head, as transformers calls it: token ids to final hidden states."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput, MoeModelOutputWithPast

from ligerzoo.convert import architecture_of_model
from ligerzoo.convert.layout import Layout
from ligerzoo.errors import LigerzooError
from ligerzoo.integrations.transformers.cache import GenerationCache
from ligerzoo.integrations.transformers.names import apply_names, unfused
from ligerzoo.integrations.transformers.versions import CACHE, takes_cache
from ligerzoo.layers import LatentAttention, LayerNorm, RMSNorm
from ligerzoo.models.encoder import Encoded, EncoderModel
from ligerzoo.models.inputs import tokens_or_embeddings
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.output import layer_outputs

Model = TypeVar("Model", bound=LanguageModel)
Module = TypeVar("Module", bound=nn.Module)

_HEADS = ("lm_head", "score", "head", "pooling")
_UNUSED = ("cache_position", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Inputs that transformers' generation and collators pass and that other inputs imply."""
_OF_ENCODERS = ("cu_seqlens", "output_hidden_states", "output_attentions")


@dataclass
class BackboneOutput(MoeModelOutputWithPast):
    """Output of `Backbone`.

    Attributes:
        aux_loss: 0-d load-balancing loss, if `output_router_logits` was set.
        segment_start: (B or 1, T), index of the first token of each token's segment; None for rows that are not packed.
    """

    aux_loss: Tensor | None = None
    segment_start: Tensor | None = None

    def layer_fields(self) -> dict[str, object]:
        """Returns the cache and what layers returned, by the names of the fields of other outputs."""
        return {name: getattr(self, name) for name in (CACHE, "hidden_states", "attentions")}


class Backbone(nn.Module, Generic[Model]):
    """All of a ligerzoo model but its head, under the names that modules have in transformers.

    A text model's children are those of the decoder: `embed_tokens`, `layers`, `norm`. Otherwise the decoder is
    `language_model`, and other parts, such as the vision tower, keep their names.

    Args:
        model: the model. Its parameters are shared.
        config: transformers' config of the model.
        fuses: fuse projections where transformers does, which copies their weights.

    Attributes:
        zoo_model: the model without its head; not a child. A module that is replaced here, such as by PEFT, is replaced
            there as well.
        prefix: name of this module in the wrapper.
        names: names of the parameters in the wrapper, as the layout of a checkpoint.
    """

    zoo_model: Model
    prefix: str
    names: Layout
    is_text_only: bool

    def __init__(self, model: Model, config: PreTrainedConfig, *, fuses: bool = True) -> None:
        super().__init__()
        self.__dict__["zoo_model"] = headless = sharing_weights(model)
        for name in headless._modules.keys() & _HEADS:
            del headless._modules[name]
        layout = architecture_of_model(model).wrapper_layout(model.config)
        rules = layout.rules if fuses else tuple(unfused(layout.rules))
        apply_names(headless, rules)
        is_encoder = isinstance(model, EncoderModel)
        if not is_encoder:
            _order_as_transformers(headless.model)
        self.config = config
        self.is_text_only = len(headless._modules) == 1
        parts = dict(headless.model.named_children() if self.is_text_only else headless.named_children())
        for name, module in parts.items():
            self.add_module("language_model" if name == "model" else name, module)
        prefixes = [(f"{name}.", f"model.{'language_model' if name == 'model' else name}.") for name in parts]
        self.prefix = layout.prefixes[0][1].removesuffix(".") if is_encoder else "model"
        self.names = Layout(rules, layout.prefixes if is_encoder else () if self.is_text_only else tuple(prefixes))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            owner: nn.Module = self.zoo_model.model if self.is_text_only else self.zoo_model
            setattr(owner, "model" if name == "language_model" else name, value)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether activation checkpointing is enabled."""
        return self.zoo_model.model.gradient_checkpointing

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding of the tokens."""
        return self.zoo_model.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding of the tokens."""
        replace_child(self, self.get_input_embeddings(), value)

    def new_cache(self) -> GenerationCache:
        """Returns an empty cache for `past_key_values`."""
        return GenerationCache(self.zoo_model.new_cache)

    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> BackboneOutput | tuple[object, ...]:
        """Computes the final hidden states.

        The arguments are those of `ligerzoo.models.CausalLM.forward`. False for `return_dict` returns a tuple, and
        `inputs` may have `cu_seq_lens_q` from transformers' padding-free collator.

        Raises:
            LigerzooError: `past_key_values` is a cache of transformers, or an input is unknown.
        """
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        if past_key_values is not None:
            if not isinstance(past_key_values, GenerationCache):
                what, got = "not a cache of this model", type(past_key_values).__name__
                expected = "None, or what this model returned"
                raise LigerzooError(what, where="past_key_values", got=got, expected=expected)
            inputs["past_key_values"] = past_key_values.caches
        if (boundaries := inputs.pop("cu_seq_lens_q", None)) is not None:
            inputs["cu_seqlens"] = boundaries
        inputs |= {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        given = {name: value for name, value in inputs.items() if name not in _UNUSED and value is not None}
        given["output_router_logits"] = bool(output_router_logits)  # False: not the config's
        x, model = tokens_or_embeddings(input_ids, inputs_embeds), self.zoo_model
        hidden, context = model.run_decoder(x, attention_mask, position_ids, **given)
        hidden = context.parts.gather(hidden)
        fields = {**layer_outputs(context), CACHE: past_key_values, "aux_loss": model.aux_loss(context)}
        output = BackboneOutput(last_hidden_state=hidden, segment_start=context.segment_start, **fields)
        return output.to_tuple() if return_dict is False else output


@dataclass
class EncoderOutput(BaseModelOutput):
    """Output of `EncoderBackbone`.

    Attributes:
        encoded: the hidden states without padding; None unless they were asked for.
    """

    encoded: Encoded | None = None


class EncoderBackbone(Backbone[EncoderModel]):
    """All of an encoder but its head, under the names that modules have in transformers."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the inputs other than token ids: the types of tokens, if the encoder has any."""
        return ("token_type_ids",) if self.zoo_model.model.has_token_types else ()

    def forward(  # other inputs
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool | None = None,
        keep_packed: bool = False,
        **inputs: Any,
    ) -> EncoderOutput | tuple[object, ...]:
        """Computes the final hidden states; those of padding are zeros.

        The arguments are those of `ligerzoo.models.encoder.EncoderModel.encode`. False for `return_dict` returns a
        tuple. `keep_packed` returns `encoded` instead of `last_hidden_state`.

        Raises:
            LigerzooError: an input is unknown, or the encoder has no token types.
        """
        if (boundaries := inputs.pop("cu_seq_lens_q", None)) is not None:
            inputs["cu_seqlens"] = boundaries
        given = {name: value for name, value in inputs.items() if name not in _UNUSED and value is not None}
        x, model = tokens_or_embeddings(input_ids, inputs_embeds), self.zoo_model
        model.refuse_unknown({name: value for name, value in given.items() if name not in _OF_ENCODERS})
        encoded = model.encode(x, attention_mask, position_ids, token_type_ids=token_type_ids, **given)
        fields = layer_outputs(encoded.context)
        if keep_packed:
            return EncoderOutput(encoded=encoded, **fields)
        output = EncoderOutput(last_hidden_state=encoded.rows.unpack(encoded.hidden), **fields)
        return output.to_tuple() if return_dict is False else output


def replace_child(root: nn.Module, child: nn.Module, value: nn.Module) -> None:
    """Replaces a module within another."""
    parts = ((parent, name) for parent in root.modules() for name, part in parent.named_children() if part is child)
    setattr(*next(parts), value)


def sharing_weights(module: Module) -> Module:
    """Returns a copy of a module with new modules and the same parameters and buffers."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]})


def _order_as_transformers(decoder: nn.Module) -> None:
    """Moves norms after the other parts of their block, and down projections after gate and up, in place.

    The norms of latent attention stay between its projections.

    Optimizer states and TRL's synchronization of reference models match parameters by their position.
    """
    for module in decoder.modules():
        parts = {} if isinstance(module, LatentAttention) else module._modules
        for name, part in list(parts.items()):
            if isinstance(part, RMSNorm | LayerNorm) or name == "down_proj":
                parts[name] = parts.pop(name)

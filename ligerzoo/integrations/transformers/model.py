"""Ligerzoo models as `PreTrainedModel` of transformers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ligerzoo.convert import MODEL_TYPES, architecture_for, architecture_of, architecture_of_model
from ligerzoo.convert.weights import shapes_of
from ligerzoo.errors import CheckpointError, LigerzooError, first_names
from ligerzoo.integrations.transformers.backbone import Backbone, BackboneOutput
from ligerzoo.integrations.transformers.config import (
    generation_entries,
    hf_config,
    hf_generation_config,
    values,
    with_changes,
)
from ligerzoo.integrations.transformers.generation import Generation
from ligerzoo.integrations.transformers.head import Head, HeadOptions
from ligerzoo.layers import shifted_labels
from ligerzoo.models.causal_lm import CausalLM

_SHIFTS_LABELS = "LlamaForCausalLM"
"""A class name for which the Trainer shifts labels when it smooths them."""


class WrappedCausalLM(Generation, PreTrainedModel):
    """A ligerzoo model as a `PreTrainedModel`; see `wrap`.

    Each architecture has a subclass with the name of its class in transformers.

    Args:
        model: the model. Its parameters are shared.

    Attributes:
        model: the model without its head.
        lm_head: the head, without scale and soft cap.
        head_options: scale and soft cap of the logits, and the loss.
    """

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True

    model: Backbone
    lm_head: nn.Module

    def __init__(self, model: CausalLM) -> None:
        super().__init__(hf_config(model))
        self.loss_type = "ForCausalLM"
        self.model = Backbone(model, self.config)
        self.head_options = HeadOptions(model.lm_head)
        self.lm_head = Head(self.head_options, model.lm_head.weight)
        blocks = {type(block).__name__ for part in self.modules() if isinstance(part, nn.ModuleList) for block in part}
        self._no_split_modules = sorted(blocks)
        decoder = "model" if self.model.is_text_only else "model.language_model"
        is_tied = model.config.tie_word_embeddings
        self._tied_weights_keys = {"lm_head.weight": f"{decoder}.embed_tokens.weight"} if is_tied else {}
        self.generation_config = hf_generation_config(model, self.config)
        self._config_before = copy.deepcopy(values(self.config))
        self._generation_config_before = copy.deepcopy(self.generation_config)
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
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
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
        """
        # Not parameters: the Trainer would wait for every parameter with "label" in its name.
        shift_labels, num_items_in_batch = inputs.pop("shift_labels", None), inputs.pop("num_items_in_batch", None)
        text_config = self.config.get_text_config()
        if use_cache is None:
            use_cache = bool(getattr(text_config, "use_cache", True)) and not torch.is_grad_enabled()
        if output_router_logits is None:
            output_router_logits = getattr(text_config, "output_router_logits", False)
        body: BackboneOutput = self.model(
            input_ids, attention_mask, position_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds,
            use_cache=use_cache, output_router_logits=output_router_logits, **inputs,
        )  # fmt: skip
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
        fields = {
            "loss": loss, "logits": logits, "past_key_values": body.past_key_values,
            "hidden_states": body.hidden_states, "attentions": body.attentions,
        }  # fmt: skip
        output: CausalLMOutputWithPast | MoeCausalLMOutputWithPast
        if body.router_logits is None:
            output = CausalLMOutputWithPast(**fields)
        else:
            output = MoeCausalLMOutputWithPast(**fields, aux_loss=body.aux_loss, router_logits=body.router_logits)
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

    # Embeddings and head

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding of the tokens."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding of the tokens."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """Returns the head."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the head."""
        self.lm_head = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Changes the number of rows of embedding and head, as transformers does.

        Raises:
            LigerzooError: the embedding has rows for more tokens than the head.
        """
        model = self.model.zoo_model
        if model.input_vocab_size != model.config.vocab_size:
            raise LigerzooError(
                "the embedding has more rows than the head", where="resize_token_embeddings",
                got=f"{model.input_vocab_size} and {model.config.vocab_size}", expected="a model without extra tokens",
            )  # fmt: skip
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        model.config = dataclasses.replace(model.config, vocab_size=self.config.get_text_config().vocab_size)  # type: ignore[type-var]
        return embedding

    def initialize_weights(self) -> None:
        """Keeps the weights: they are those of the ligerzoo model."""

    # Activation checkpointing

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Called by transformers' methods that enable or disable activation checkpointing."""
        model = self.model.zoo_model
        if not enable:
            model.gradient_checkpointing_disable()
            return
        is_offloading = getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func) is not checkpoint
        for where, got, expected in (("every_n_layers", every_n_layers, 1), ("offload", is_offloading, False)):
            if got != expected:
                raise LigerzooError("activation checkpointing without it", where=where, got=got, expected=expected)
        model.gradient_checkpointing_enable(getattr(gradient_checkpointing_func, "keywords", None))

    # Weights

    def to_zoo_model(self, state: Mapping[str, Tensor] | None = None) -> CausalLM:
        """Returns a ligerzoo model with these weights: views of them.

        Args:
            state: weights by their names in this model, such as those gathered from all ranks. Default: this model's.

        Raises:
            CheckpointError: `state` has other names than the architecture's, such as those of adapters.
        """
        source = self.model.zoo_model
        config = with_changes(source.config, self.config, self._config_before)
        model: CausalLM = architecture_for(type(source)).build_on_meta(config, type(source))
        given = dict(self.state_dict() if state is None else state)
        for name, other in self.all_tied_weights_keys.items():
            given.setdefault(name, given[other])
        slices = list(self.model.names.slices(shapes_of(model.state_dict())))
        names, expected = given.keys(), {part.stored_name for part in slices}
        if names != expected:
            raise CheckpointError(
                "tensors differ from those of the architecture", where=type(self).__name__,
                got=first_names(sorted(names - expected)) or None,
                expected=first_names(sorted(expected - names)) or None,
                remedy="Merge adapters into the weights first.",
            )  # fmt: skip
        weights = {part.name: given[part.stored_name][part.stored_index] for part in slices}
        model.load_state_dict(weights, assign=True)
        if config.tie_word_embeddings:
            model.tie_weights()
        model.origin = source.origin
        model.generation_config = generation_entries(
            source.generation_config, self.generation_config, self._generation_config_before
        )
        return model.train(self.training)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Loads weights under the names of this model, or under the names and in the layout of a checkpoint.

        Args:
            state_dict: weights. In a checkpoint's layout, all are required, also if `strict` is False.
            strict: see `torch.nn.Module.load_state_dict`. A tied weight may be missing.
            assign: see `torch.nn.Module.load_state_dict`. Weights in a checkpoint's layout are copied.
        """
        names = super().state_dict().keys()
        if state_dict.keys() <= names:
            tied = {name for name in self.all_tied_weights_keys if name not in state_dict}
            result = super().load_state_dict(state_dict, strict=strict and not tied, assign=assign)
            missing = [name for name in result.missing_keys if name not in tied]
            if strict and missing:
                raise CheckpointError("weights are missing", where="state_dict", got=f"no {first_names(missing)}")
            if assign:
                self.tie_weights()
            return type(result)(missing, result.unexpected_keys)
        self.to_zoo_model().load_hf_state_dict(state_dict)
        return nn.modules.module._IncompatibleKeys([], [])

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "5GB",
        safe_serialization: bool = True,
        variant: str | None = None,
        **options: Any,
    ) -> None:
        """Saves the model as ligerzoo does: transformers, vLLM and ligerzoo load it.

        Args:
            save_directory: created if it does not exist. Other files in it, such as the tokenizer's, are kept.
            is_main_process: whether this process writes.
            state_dict: weights under the names of this model. Default: its own.
            push_to_hub: also upload the model, see `ligerzoo.models.CausalLM.push_to_hub`.
            max_shard_size: maximum bytes of tensors per file.
            safe_serialization: True; other formats than safetensors are refused.
            variant: None.
            options: `repo_id`, `token`, `private` and `commit_message` for `push_to_hub`.

        Raises:
            LigerzooError: an option asks for another format.
        """
        if getattr(self, "_hf_peft_config_loaded", False):  # adapters that `add_adapter` added: they alone are saved
            super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict)
            return
        for where, got, expected in (
            ("safe_serialization", safe_serialization, True), ("variant", variant, None),
            ("save_original_format", options.pop("save_original_format", True), True),
            ("distributed_checkpoint", options.pop("distributed_checkpoint", False), False),
        ):  # fmt: skip
            if got != expected:
                raise LigerzooError("not supported", where=where, got=got, expected=expected)
        options.pop("save_peft_format", None)
        if not is_main_process and state_dict is not None:
            return
        model = self.to_zoo_model(state_dict)
        model.save_pretrained(save_directory, max_shard_size=max_shard_size, is_main_process=is_main_process)
        if push_to_hub and is_main_process:
            model.push_to_hub(options.pop("repo_id", Path(save_directory).name), **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **options: Any) -> WrappedCausalLM:
        """See `AutoModelForCausalLM.from_pretrained`."""
        from ligerzoo.integrations.transformers.auto import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **options)


@cache
def wrapper_class(model_class: type[CausalLM]) -> type[WrappedCausalLM]:
    """Returns the wrapper class of a model class, with the name of the architecture's class in transformers."""

    @functools.wraps(WrappedCausalLM.forward)
    def forward(self: WrappedCausalLM, *args: Any, **inputs: Any) -> Any:
        return WrappedCausalLM.forward(self, *args, **inputs)

    # Trainers drop data columns that are not parameters of `forward`, and `generate` refuses other inputs.
    signature = inspect.signature(WrappedCausalLM.forward)
    *parameters, rest = signature.parameters.values()
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in model_class.modalities]
    forward.__signature__ = signature.replace(parameters=[*parameters, *own, rest])  # type: ignore[attr-defined]
    attributes = {"forward": forward, "__module__": __name__, "__doc__": WrappedCausalLM.__doc__}
    return type(architecture_for(model_class).hf_class, (WrappedCausalLM,), attributes)


def __getattr__(name: str) -> type[WrappedCausalLM]:
    """Finds the wrapper classes of the zoo's architectures when they are unpickled."""
    for model_type in MODEL_TYPES:
        architecture = architecture_of(model_type)
        if architecture.hf_class == name:
            return wrapper_class(architecture.model_class)  # type: ignore[arg-type]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def wrap(model: CausalLM) -> WrappedCausalLM:
    """Returns a `PreTrainedModel` around a ligerzoo model, for transformers' Trainer, TRL, PEFT, pipelines and others.

    The wrapper shares the parameters of the model, but not its modules. Where transformers fuses projections (Phi-3,
    GLM), so does the wrapper, and the model's parameters become views of the fused ones. The wrapper's class has the
    name of the architecture's class in transformers, and `config` is transformers' config. Losses and gradients are
    those of transformers' model, with these differences:

    - The embedding of the padding token is trained as any other. transformers never trains it.
    - With label smoothing, the Trainer shifts the labels of vision-language models too. For transformers' own models
      it does not, and so trains them to copy their input.
    - In training, the output has the loss but no logits, unless `logits_to_keep` asks for them.
    - Dropout is never applied, even if the config sets one.
    - Segments of packed rows (`position_ids` that start again) do not predict across their boundaries.

    Args:
        model: a model of ligerzoo.models, of a subclass, or of a registered class.

    Raises:
        ConfigError: the model's class is not registered, or it is not a model of ligerzoo.
    """
    architecture_of_model(model)  # raises for other models
    return wrapper_class(type(model))(model)  # type: ignore[arg-type]

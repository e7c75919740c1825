"""Sequence classifiers as `PreTrainedModel` of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from ligerzoo.convert import architecture_for_config
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.sequence_classifier import classifier_architecture, read_labels
from ligerzoo.errors import ConfigError
from ligerzoo.integrations.transformers.backbone import BackboneOutput
from ligerzoo.integrations.transformers.cache import GenerationCache
from ligerzoo.integrations.transformers.model import WrappedModel
from ligerzoo.integrations.transformers.versions import takes_cache
from ligerzoo.models.inputs import tokens_or_embeddings
from ligerzoo.models.sequence_classifier import (
    Labels,
    SequenceClassifier,
    classification_loss,
    default_problem_type,
    last_tokens,
)


class WrappedSequenceClassifier(WrappedModel[SequenceClassifier]):
    """A sequence classifier of ligerzoo as a `PreTrainedModel`; see `wrap`.

    Each architecture has a subclass with the name of its class in transformers.

    Args:
        model: the model. Its parameters are shared.
        fuses: see `Backbone`.

    Attributes:
        score: the head, final hidden states to logits.
        num_labels: number of labels.
    """

    accepts_loss_kwargs = False
    """The loss is the mean of its batch: the Trainer averages over microbatches."""

    score: nn.Module

    def __init__(self, model: SequenceClassifier, *, fuses: bool = True) -> None:
        super().__init__(model, fuses=fuses)
        self.num_labels, hidden_size = model.score.weight.shape
        self.score = nn.Linear(hidden_size, self.num_labels, bias=False, device="meta")
        self.score.weight = model.score.weight
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
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[object, ...]:
        """Computes one row of logits per sequence, and the loss if labels are given.

        Reads `pad_token_id` and `problem_type` of the config. As in transformers, the first labels set `problem_type`
        if it is None.

        Args:
            input_ids: see `WrappedCausalLM.forward`, as for the arguments that are not listed here.
            labels: indices or numbers, by `problem_type`.
            use_cache: create a cache if none was passed.
            inputs: `output_hidden_states` and `output_attentions`; and `cu_seqlens` or `cu_seq_lens_q`, the boundaries
                of packed sequences.

        Raises:
            ConfigError: `problem_type` is invalid.
            LigerzooError: the end of a sequence is unknown, the labels do not fit, or an input is unknown.
        """
        x = tokens_or_embeddings(input_ids, inputs_embeds)
        boundaries = inputs.get("cu_seqlens", inputs.get("cu_seq_lens_q"))
        last = last_tokens(x, attention_mask, self.config.get_text_config().pad_token_id, boundaries)
        body: BackboneOutput = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **inputs
        )
        logits = self.score(body.last_hidden_state[last])
        loss = None
        if labels is not None:
            if self.config.problem_type is None:
                self.config.problem_type = default_problem_type(logits.shape[1], labels)
            loss = classification_loss(logits, labels, self.config.problem_type)
        output = SequenceClassifierOutputWithPast(loss=loss, logits=logits, **body.layer_fields())
        return output.to_tuple() if return_dict is False else output

    @property
    def labels(self) -> Labels:
        """Names and problem type, by the config. Of `id2label` and `label2id`, one that was changed decides.

        Raises:
            ConfigError: the names are not those of the head's rows, or contradict each other.
        """
        before = self.model.zoo_model.labels
        now = {name: getattr(self.config, name) for name in ("id2label", "label2id")}
        changed = {name: value for name, value in now.items() if value != getattr(before, name)}
        names = read_labels({}, changed).names if changed else before.names
        if len(names) != self.num_labels:
            what, where = "differs from the number of rows of the head", "config.id2label"
            remedy = "Load with from_pretrained(..., num_labels=...)."
            raise ConfigError(what, where=where, got=len(names), expected=self.num_labels, remedy=remedy)
        return Labels(names, self.config.problem_type)

    @property
    def architecture(self) -> Architecture:
        """The architecture of the model with its labels; see `WrappedModel.architecture`."""
        return classifier_architecture(architecture_for_config(type(self.model.zoo_model.config)), self.labels)

    def to_zoo_model(self, state: Mapping[str, Tensor] | None = None) -> SequenceClassifier:
        """See `WrappedModel.to_zoo_model`."""
        model = super().to_zoo_model(state)
        if model.origin is not None and model.labels != self.model.zoo_model.labels:
            model.origin = dataclasses.replace(model.origin, config=None)  # its config.json has other labels
        return model

"""Sequence classifiers as `PreTrainedModel` of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from ligerzoo.integrations.transformers.backbone import BackboneOutput
from ligerzoo.integrations.transformers.cache import GenerationCache
from ligerzoo.integrations.transformers.classifier import WrappedClassifier
from ligerzoo.integrations.transformers.versions import takes_cache
from ligerzoo.models.inputs import tokens_or_embeddings
from ligerzoo.models.sequence_classifier import (
    SequenceClassifier,
    classification_loss,
    default_problem_type,
    last_tokens,
)


class WrappedSequenceClassifier(WrappedClassifier[SequenceClassifier]):
    """A sequence classifier of ligerzoo as a `PreTrainedModel`; see `wrap`.

    Each architecture has a subclass with the name of its class in transformers.

    Args:
        model: the model. Its parameters are shared.
        fuses: see `Backbone`.

    Attributes:
        score: the head, final hidden states to logits.
    """

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
        body: BackboneOutput = self.backbone(
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

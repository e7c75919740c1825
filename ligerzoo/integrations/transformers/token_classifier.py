"""Token classifiers over a decoder as `PreTrainedModel` of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import TokenClassifierOutput

from ligerzoo.integrations.transformers.backbone import BackboneOutput, sharing_weights
from ligerzoo.integrations.transformers.classifier import WrappedClassifier
from ligerzoo.models.inputs import tokens_or_embeddings
from ligerzoo.models.token_classifier import TokenClassifier, check_token_labels, token_loss


class WrappedTokenClassifier(WrappedClassifier[TokenClassifier]):
    """A token classifier of ligerzoo over a decoder as a `PreTrainedModel`; see `wrap`.

    Each architecture has a subclass with the name of its class in transformers.

    Args:
        model: the model. Its parameters are shared.
        fuses: see `Backbone`.

    Attributes:
        score: the head, final hidden states to logits.
    """

    accepts_loss_kwargs = True

    score: nn.Module

    def __init__(self, model: TokenClassifier, *, fuses: bool = True) -> None:
        super().__init__(model, fuses=fuses)
        self.num_labels = model.num_labels
        self.score = sharing_weights(model.score)
        self.post_init()
        self.train(model.training)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> TokenClassifierOutput | tuple[object, ...]:
        """Computes the logits of each token, and the loss if labels are given.

        Args:
            input_ids: see `WrappedCausalLM.forward`, as for the arguments that are not listed here.
            labels: (B, T) label index of each token, and -100 for ignored ones, such as padding.
            inputs: `num_items_in_batch`; and `cu_seqlens` or `cu_seq_lens_q`, the boundaries of packed sequences.

        Raises:
            LigerzooError: the labels have the wrong shape, no label has such an index, or an input is unknown.
        """
        num_items_in_batch = inputs.pop("num_items_in_batch", None)
        check_token_labels(type(self), labels, tokens_or_embeddings(input_ids, inputs_embeds), self.num_labels)
        body: BackboneOutput = self.backbone(input_ids, attention_mask, position_ids, None, inputs_embeds, **inputs)
        logits = self.score(body.last_hidden_state)
        loss = None if labels is None else token_loss(logits, labels, num_items_in_batch)
        layers = {"hidden_states": body.hidden_states, "attentions": body.attentions}
        output = TokenClassifierOutput(loss=loss, logits=logits, **layers)
        return output.to_tuple() if return_dict is False else output

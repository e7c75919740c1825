"""Token classification, such as named entity recognition: a decoder or encoder, and logits of labels for each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers import Decoder, KVCache
from ligerzoo.models.classifier import Classifier, Labels, check_label_indices
from ligerzoo.models.config import LanguageModelConfig
from ligerzoo.models.encoder import EncoderModel
from ligerzoo.models.inputs import tokens_or_embeddings
from ligerzoo.models.output import TokenClassifierOutput, layer_outputs
from ligerzoo.tensor_checks import check_tensor


class TokenClassifier(Classifier):
    """A decoder of any architecture, and a linear layer on each token.

    Reads and writes transformers' checkpoints, such as those of `LlamaForTokenClassification`. Those of encoders are
    `EncoderTokenClassifier`s.

    Args:
        config: config of the architecture.
        model: token ids to final hidden states.
        labels: the names of the labels.
        head: hidden states to those that `score` gets; None for none.

    Attributes:
        score: hidden states to logits.
    """

    def __init__(
        self, config: LanguageModelConfig, model: Decoder, labels: Labels, head: nn.Module | None = None
    ) -> None:
        super().__init__(config, model, labels, bias=True, head=head)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **unknown: object,
    ) -> TokenClassifierOutput:
        """Computes the logits of each token, and the loss if labels are given.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, S) padding mask or (B, 1, T, S) attention mask; see `CausalLM.forward`.
            position_ids: (B or 1, T); see `CausalLM.forward`.
            inputs_embeds: (B, T, H) embeddings, instead of `input_ids`.
            labels: (B, T) label index of each token, and -100 for ignored ones, such as padding.
            num_items_in_batch: divisor of the summed loss. Default: the number of labels that are not ignored.
            past_key_values: KV cache of earlier tokens; extended in place.
            use_cache: create a cache if none was passed.
            cu_seqlens: (n + 1,) int, boundaries of n sequences packed into a single row.
            output_hidden_states: see `CausalLM.forward`.
            output_attentions: see `CausalLM.forward`.
            unknown: refused, with the nearest name.

        Raises:
            LigerzooError: the labels have the wrong shape, no label has such an index, or an input is unknown.
            ValueError: the inputs have inconsistent shapes or values, or are missing.
        """
        self.refuse_unknown(unknown)
        x = tokens_or_embeddings(input_ids, inputs_embeds)
        check_token_labels(type(self), labels, x, self.num_labels)
        hidden, context = self.run_decoder(
            x,
            attention_mask,
            position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            output_router_logits=False,
        )
        logits = self.score(context.parts.gather(hidden))
        loss = None if labels is None else token_loss(logits, labels, num_items_in_batch)
        return TokenClassifierOutput(loss=loss, logits=logits, past_key_values=context.cache, **layer_outputs(context))


class EncoderTokenClassifier(EncoderModel, TokenClassifier):
    """An encoder, a head and a linear layer on each token, such as `BertForTokenClassification` of transformers."""

    def forward(  # type: ignore[override]  # other inputs
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **unknown: object,
    ) -> TokenClassifierOutput:
        """Computes the logits of each token, and the loss if labels are given. Logits of padding are zeros.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: see `EncoderModel.encode`, as for the other inputs.
            position_ids: (B or 1, T).
            inputs_embeds: (B, T, H) embeddings, instead of `input_ids`.
            token_type_ids: (B, T).
            labels: see `TokenClassifier.forward`. Those of padding are ignored.
            num_items_in_batch: divisor of the summed loss. Default: the number of labels that are not ignored.
            cu_seqlens: (n + 1,) int.
            output_hidden_states: see `CausalLM.forward`.
            output_attentions: see `CausalLM.forward`.
            unknown: refused, with the nearest name.

        Raises:
            LigerzooError: the labels have the wrong shape, no label has such an index, or an input is unknown.
            ValueError: the inputs have inconsistent shapes or values, or are missing.
        """
        self.refuse_unknown(unknown)
        x = tokens_or_embeddings(input_ids, inputs_embeds)
        check_token_labels(type(self), labels, x, self.num_labels)
        encoded = self.encode(
            x,
            attention_mask,
            position_ids,
            token_type_ids=token_type_ids,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        logits = self.score(self.head(encoded.hidden))
        loss = None if labels is None else token_loss(logits, encoded.labels(labels), num_items_in_batch)
        logits = encoded.rows.unpack(logits)
        return TokenClassifierOutput(loss=loss, logits=logits, **layer_outputs(encoded.context))


def check_token_labels(model_class: type, labels: Tensor | None, x: Tensor, num_labels: int) -> None:
    """Raises unless there is a label for each token; of its values, see `check_label_indices`.

    Args:
        model_class: the class to which labels were passed.
        labels: (B, T), or None for none.
        x: (B, T) token ids, or (B, T, H) embeddings.
        num_labels: number of labels.
    """
    if labels is not None:
        remedy = "Pass the label of each token, or -100 for an ignored one"
        check_tensor(model_class.__name__, "labels", labels, "integer", [tuple(x.shape[:2])], remedy=remedy)
        check_label_indices(labels, num_labels)


def token_loss(logits: Tensor, labels: Tensor, num_items: int | Tensor | None = None) -> Tensor:
    """Computes the cross entropy of the tokens whose label is not -100, in fp32.

    Args:
        logits: (B, T, N).
        labels: (B, T).
        num_items: divisor of the sum. Default: the number of labels that are not -100, at least 1.

    Returns:
        0-d fp32.
    """
    labels = labels.to(logits.device).flatten()
    count = (labels != -100).sum().clamp(min=1) if num_items is None else num_items
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.long(), reduction="sum")
    return total / torch.as_tensor(count, device=total.device)

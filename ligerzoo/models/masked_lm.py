"""Base class of encoders with a head for masked tokens (Devlin et al. 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers import Decoder, Linear, LMHead
from ligerzoo.layers.input_properties import reads_values
from ligerzoo.models.config import LanguageModelConfig
from ligerzoo.models.encoder import EncoderModel
from ligerzoo.models.inputs import tokens_or_embeddings
from ligerzoo.models.labels import check_labels
from ligerzoo.models.language_model import LanguageModelWithHead
from ligerzoo.models.output import MaskedLMOutput, layer_outputs


class PredictionHead(nn.Module):
    """Final hidden states to those that predict tokens, `norm(gelu(dense(x)))`.

    Args:
        norm: the norm, of H features.
        hidden_size: H.
        bias: add a bias to the projection.
    """

    def __init__(self, norm: nn.Module, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.dense, self.norm = Linear(hidden_size, hidden_size, bias=bias), norm

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., H) -> (..., H)."""
        return self.norm(F.gelu(self.dense(x)))  # type: ignore[no-any-return]


class TanhHead(nn.Module):
    """Hidden states to those from which labels of texts are predicted, `tanh(dense(x))` (BERT's pooler).

    Args:
        hidden_size: H.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., H) -> (..., H)."""
        return torch.tanh(self.dense(x))


class MaskedLM(EncoderModel, LanguageModelWithHead):
    """An encoder and a head that predicts masked tokens.

    A subclass takes a config, builds the parts and passes them to this constructor, as those of `CausalLM` do.

    Args:
        config: config of the architecture.
        model: token ids to final hidden states.
        head: final hidden states to those that predict tokens.
        lm_head: these to logits or loss. Shares the weight of the embedding if the config ties them.
    """

    head: PredictionHead

    def __init__(self, config: LanguageModelConfig, model: Decoder, head: PredictionHead, lm_head: LMHead) -> None:
        super().__init__(config, model, lm_head, head=head)

    def text_head(self) -> nn.Module:
        """Returns a new head of sequence classifiers: pooled hidden states to those from which labels are predicted."""
        raise NotImplementedError

    def token_head(self) -> nn.Module:
        """Returns a new head of token classifiers: hidden states to those from which labels are predicted."""
        return nn.Identity()

    def forward(
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
    ) -> MaskedLMOutput:
        """Computes the logits, or the loss if labels are given. Logits and hidden states of padding are zeros.

        Args:
            input_ids: (B, T) token ids, some of which are the tokenizer's mask token.
            attention_mask: see `EncoderModel.encode`, as for the other inputs.
            position_ids: (B or 1, T).
            inputs_embeds: (B, T, H) embeddings, instead of `input_ids`.
            token_type_ids: (B, T).
            labels: (B, T) the original token of each token to predict, and -100 for the others. Those of padding are
                ignored. They are not shifted.
            num_items_in_batch: divisor of the summed loss. Default: the number of labels that are not ignored.
            cu_seqlens: (n + 1,) int.
            output_hidden_states: see `CausalLM.forward`.
            output_attentions: see `CausalLM.forward`.
            unknown: refused, with the nearest name.

        Raises:
            TypeError: an input has another type, such as a list instead of a tensor.
            ValueError: the inputs have inconsistent shapes or values, or are missing.
            LigerzooError: an input is unknown, or the rows are divided over processes.
        """
        self.refuse_unknown(unknown)
        x = tokens_or_embeddings(input_ids, inputs_embeds)
        check_labels(labels, None, x.shape[:2], self.config.vocab_size, type(self), shifts=False)
        encoded = self.encode(
            x,
            attention_mask,
            position_ids,
            token_type_ids=token_type_ids,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        hidden, out = encoded.hidden, MaskedLMOutput(**layer_outputs(encoded.context))
        if labels is None:
            out.logits = encoded.rows.unpack(self.lm_head(self.head(hidden)))
            return out
        labels = encoded.labels(labels)
        if reads_values() and not labels.is_meta:  # the head computes tokens with labels only; a host sync
            predicted = (labels.flatten() != -100).nonzero()[:, 0]
            hidden, labels = hidden.flatten(0, 1).index_select(0, predicted), labels.flatten()[predicted]
        out.loss = self.lm_head(self.head(hidden), labels, num_items_in_batch)
        return out

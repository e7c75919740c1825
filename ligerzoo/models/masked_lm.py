"""Base class of encoders with a head for masked tokens (Devlin et al. 2019)."""

from __future__ import annotations

from typing import Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.errors import LigerzooError
from ligerzoo.layers import Decoder, Linear, LMHead
from ligerzoo.layers.context import reads_values
from ligerzoo.models.config import LanguageModelConfig
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


class MaskedLM(LanguageModelWithHead):
    """An encoder and a head that predicts masked tokens: tokens attend to earlier and later ones.

    A subclass takes a config, builds the parts and passes them to this constructor, as those of `CausalLM` do. There is
    no dropout, no cache and no generation.

    Args:
        config: config of the architecture.
        model: token ids to final hidden states.
        head: final hidden states to those that predict tokens.
        lm_head: these to logits or loss. Shares the weight of the embedding if the config ties them.
    """

    head: PredictionHead

    def __init__(self, config: LanguageModelConfig, model: Decoder, head: PredictionHead, lm_head: LMHead) -> None:
        super().__init__(config, model, lm_head, head=head)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **unknown: object,
    ) -> MaskedLMOutput:
        """Computes the logits, or the loss if labels are given.

        Texts with a padding mask are packed into one row, so that nothing is computed for padding, whose logits and
        hidden states are zeros. Compiled code, and calls with `position_ids` or `output_attentions`, compute padding.

        Args:
            input_ids: (B, T) token ids, some of which are the tokenizer's mask token.
            attention_mask: (B, T) padding mask, 1 for a token and 0 for padding; or a (B, 1, T, T) attention mask.
            position_ids: (B or 1, T); see `CausalLM.forward`.
            inputs_embeds: (B, T, H) embeddings, instead of `input_ids`.
            labels: (B, T) the original token of each token to predict, and -100 for the others. Those of padding are
                ignored. They are not shifted.
            num_items_in_batch: divisor of the summed loss. Default: the number of labels that are not ignored.
            cu_seqlens: (n + 1,) int, boundaries of n texts packed into a single row; see `CausalLM.forward`.
            output_hidden_states: see `CausalLM.forward`.
            output_attentions: see `CausalLM.forward`.
            unknown: refused, with the nearest name.

        Raises:
            TypeError: an input has another type, such as a list instead of a tensor.
            ValueError: the inputs have inconsistent shapes or values, or are missing.
            LigerzooError: an input is unknown, or the rows are divided over processes.
        """
        self._refuse_unknown(unknown)
        if self.row_parts.count > 1:
            raise self._refusal("context parallelism")
        x = tokens_or_embeddings(input_ids, inputs_embeds)
        check_labels(labels, None, x.shape[:2], self.config.vocab_size, type(self), shifts=False)
        shape, index = x.shape[:2], None
        if position_ids is None and cu_seqlens is None and not output_attentions:
            index = _tokens(attention_mask, shape, x.device)
        if index is not None and attention_mask is not None:
            lengths = attention_mask.to(x.device, torch.bool).sum(1)
            cu_seqlens, attention_mask = F.pad(lengths.cumsum(0), (1, 0)), None
            x = x.flatten(0, 1)[index][None]
            labels = None if labels is None else labels.to(x.device).flatten()[index][None]
        hidden, context = self.run_decoder(
            x,
            attention_mask,
            position_ids,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            output_router_logits=False,
        )
        if context.hidden_states is not None:
            context.outputs.hidden_states = [_padded(states, index, shape) for states in context.hidden_states]
        out = MaskedLMOutput(**layer_outputs(context))
        if labels is None:
            out.logits = _padded(self.lm_head(self.head(hidden)), index, shape)
            return out
        if reads_values():  # the head computes tokens with labels only; a host sync
            is_predicted = labels != -100
            hidden, labels = hidden[is_predicted.to(hidden.device)], labels[is_predicted]
        out.loss = self.lm_head(self.head(hidden), labels.to(hidden.device), num_items_in_batch)
        return out

    def generate(self, *_: object, **__: object) -> Never:
        """Raises LigerzooError: an encoder generates no text."""
        raise self._refusal("generate")

    def generate_many(self, *_: object, **__: object) -> Never:
        """Raises LigerzooError: an encoder generates no text."""
        raise self._refusal("generate_many")

    def new_cache(self, *_: object, **__: object) -> Never:
        """Raises LigerzooError: later tokens change the keys and values of earlier ones."""
        raise self._refusal("a KV cache")

    def _refusal(self, what: str) -> LigerzooError:
        problem = f"an encoder, whose tokens attend to later ones, has no {what}"
        return LigerzooError(problem, where=type(self).__name__, expected="a causal language model")


def _tokens(attention_mask: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor | None:
    """Returns the indices of tokens that are not padding, of all B * T; None if rows are not packed."""
    if attention_mask is None or getattr(attention_mask, "shape", None) != shape or not reads_values():
        return None
    index = attention_mask.to(device, torch.bool).flatten().nonzero()[:, 0]
    return index if 0 < len(index) < shape.numel() else None


def _padded(x: Tensor, index: Tensor | None, shape: torch.Size) -> Tensor:
    """Returns features of tokens, (1, n, F), in rows, (B, T, F), with zeros for padding."""
    if index is None:
        return x
    padded = x.new_zeros(shape.numel(), x.shape[-1])
    padded[index] = x[0]
    return padded.view(*shape, -1)

"""Base class of models over an encoder, in which tokens attend to earlier and later ones."""

from __future__ import annotations

from typing import NamedTuple, Never, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.device import to_device
from ligerzoo.errors import LigerzooError
from ligerzoo.layers import Context
from ligerzoo.layers.input_properties import reads_values
from ligerzoo.models.config import LanguageModelConfig
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.packed_rows import PackedRows


class Encoded(NamedTuple):
    """Final hidden states of texts.

    Attributes:
        hidden: (1, n, H), those of tokens that are not padding; or (B, T, H) if the rows are not packed.
        context: what the layers stored; hidden states are those of all rows.
        rows: how the rows are packed.
        cu_seqlens: (texts + 1,) boundaries of the texts in a packed row; None if each row is a text.
    """

    hidden: Tensor
    context: Context
    rows: PackedRows
    cu_seqlens: Tensor | None

    @property
    def padding_mask(self) -> Tensor | None:
        """(B, T) bool, False for padding in rows that are not packed; None without padding."""
        return self.context.padding_mask

    def labels(self, labels: Tensor) -> Tensor:
        """Returns the labels of the tokens in `hidden`, of (B, T); -100 for padding."""
        labels, mask = self.rows.pack(labels).to(self.hidden.device), self.padding_mask
        return labels if mask is None else labels.masked_fill(~mask, -100)

    def texts(self) -> tuple[Tensor, Tensor]:
        """Returns hidden states of all tokens, (tokens, H), text by text, and the boundaries of the texts.

        Tokens after the last boundary are padding.
        """
        hidden, mask = self.hidden.flatten(0, 1), self.padding_mask
        if self.cu_seqlens is not None:
            return hidden, to_device(self.cu_seqlens, hidden.device).to(torch.int64)
        rows, tokens = self.hidden.shape[:2]
        if mask is None:
            return hidden, torch.arange(rows + 1, device=hidden.device) * tokens
        order = mask.flatten().argsort(descending=True, stable=True)  # a shape that does not depend on the mask
        return hidden[order], F.pad(mask.sum(1).cumsum(0), (1, 0))


class EncoderConfig(LanguageModelConfig, Protocol):
    """Config fields that every encoder reads."""

    @property
    def classifier_pooling(self) -> str: ...


class EncoderModel(LanguageModel):
    """An encoder, to which subclasses add a head. There is no dropout, no cache and no generation."""

    def encode(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> Encoded:
        """Runs the encoder without a head.

        Texts with a padding mask are packed into one row, so that nothing is computed for padding. Compiled code, and
        calls with `position_ids` or `output_attentions`, or masks of more than padding at the ends, compute padding.

        Args:
            x: (B, T) token ids, or (B, T, H) embeddings.
            attention_mask: (B, T) padding mask, 1 for a token and 0 for padding; or a (B, 1, T, T) attention mask.
            position_ids: (B or 1, T); see `CausalLM.forward`.
            token_type_ids: (B, T) type of each token, such as 0 and 1 in the first and second text of a pair.
            cu_seqlens: (n + 1,) int, boundaries of n texts packed into a single row; see `CausalLM.forward`.
            output_hidden_states: see `CausalLM.forward`.
            output_attentions: see `CausalLM.forward`.

        Raises:
            TypeError: an input has another type, such as a list instead of a tensor.
            ValueError: the inputs have inconsistent shapes or values.
            LigerzooError: the encoder has no token types, or the rows are divided over processes.
        """
        if self.row_parts.count > 1:
            raise self._refusal("context parallelism")
        rows = PackedRows(x.shape[:2])
        if position_ids is None and cu_seqlens is None and not output_attentions:
            rows = _packed(attention_mask, x.shape[:2], x.device)
        if rows.tokens is not None:
            x, cu_seqlens, attention_mask = rows.pack(x), rows.cu_seqlens, None
            if token_type_ids is not None and token_type_ids.shape == rows.shape:
                token_type_ids = rows.pack(token_type_ids)
        if token_type_ids is not None and not self.model.has_token_types:
            what, remedy = f"{type(self).__name__} has no token types", "Leave them out."
            raise LigerzooError(what, where="token_type_ids", remedy=remedy)
        hidden, context = self.run_decoder(
            x,
            attention_mask,
            position_ids,
            token_types=token_type_ids,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            output_router_logits=False,
        )
        if context.hidden_states is not None:
            context.outputs.hidden_states = [rows.unpack(states) for states in context.hidden_states]
        return Encoded(hidden, context, rows, cu_seqlens)

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


def _packed(attention_mask: Tensor | None, shape: torch.Size, device: torch.device) -> PackedRows:
    """Returns how rows are packed: not at all without a padding mask, or with one that has holes or no effect."""
    if attention_mask is None or getattr(attention_mask, "shape", None) != shape or not reads_values():
        return PackedRows(shape)
    is_token = attention_mask.to(device, torch.bool)
    rows = PackedRows.of(is_token)
    starts = is_token[:, :1].sum() + (is_token[:, 1:] & ~is_token[:, :-1]).sum()
    has_holes = starts > is_token.any(1).sum()  # whose neighbours are not neighbours of each other
    return PackedRows(shape) if has_holes or rows.tokens is None or len(rows.tokens) in (0, shape.numel()) else rows

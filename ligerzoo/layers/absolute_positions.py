"""Decoder with learned positions: its input is the sum of embeddings of tokens, positions and token types."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.dispatch import DEBUG
from ligerzoo.layers.context import Context
from ligerzoo.layers.decoder import Decoder
from ligerzoo.layers.input_properties import reads_values
from ligerzoo.tensor_checks import check_tensor, explains_options


class AbsolutePositionDecoder(Decoder):
    """`Decoder` with learned positions and token types (Devlin et al. 2019, section 3):
    `norm(token + token type + position)` is the input of the first block.

    A token's default position is its index in its text, wherever the text is in a row. With `padding_id`, indices begin
    at `padding_id + 1`, and tokens of this id within a text have position `padding_id` and no index (RoBERTa).

    Args:
        embed_tokens: token ids to embeddings.
        layers: blocks, called as `PreNormBlock`.
        norm: applied to the output of the last block.
        position_embeddings: positions to embeddings.
        token_type_embeddings: token types to embeddings; type 0 is the default.
        input_norm: applied to the sum.
        padding_id: id of the padding token, see above; None if it is as any other.
    """

    has_token_types = True

    @explains_options
    def __init__(
        self,
        embed_tokens: nn.Module,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        *,
        position_embeddings: nn.Embedding,
        token_type_embeddings: nn.Embedding,
        input_norm: nn.Module | None = None,
        padding_id: int | None = None,
    ) -> None:
        super().__init__(embed_tokens, layers, norm, input_norm=input_norm)
        self.position_embeddings, self.token_type_embeddings = position_embeddings, token_type_embeddings
        self.padding_id, self.first_position = padding_id, 0 if padding_id is None else padding_id + 1

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """See `Decoder.forward`. The context may have `token_types`."""
        context = context if context is not None else Context(x)
        types, positions = context.token_types, self._positions(x, context)
        x = x if x.is_floating_point() else self.embed_tokens(x)
        x = x + (self.token_type_embeddings.weight[0] if types is None else self._embed_types(types, x))
        return super().forward(x + self.position_embeddings(positions), context)

    @property
    def max_tokens(self) -> int:
        """Tokens of a text that have positions."""
        return self.position_embeddings.num_embeddings - self.first_position

    def _positions(self, x: Tensor, context: Context) -> Tensor:
        """Returns the position of each token, (B or 1, T), of token ids or embeddings.

        Raises:
            LigerzooError: a position has no embedding. On a GPU, reads positions only if rows may be too long and the
                host does not know their texts.
        """
        is_default, size = context.has_default_positions, self.position_embeddings.num_embeddings
        positions = context.position_ids
        if is_default:
            positions, mask = context.token_positions() + self.first_position, context.call_padding_mask()
            if self.padding_id is not None and not x.is_floating_point():
                positions = self._without_padding(positions, x == self.padding_id, context)
            positions = positions if mask is None else positions.masked_fill(~mask, self.first_position)
        may_exceed = not is_default or context.tokens + self.first_position > size
        if may_exceed and reads_values() and not positions.is_meta:
            documents = context.documents if is_default else None
            least, most = 0, size
            if documents is not None and documents.rows is not None:
                most = self.first_position + documents.longest - 1
            if most >= size:
                least, most = torch.stack(positions.aminmax()).tolist()
            if least < 0 or most >= size:
                where, got = "position_ids", least if least < 0 else most
                if is_default:
                    where, got, size = "input_ids", most - self.first_position + 1, self.max_tokens
                what = "a text is longer than the table of positions" if is_default else "a position has no embedding"
                expected = f"at most {size} tokens in each text" if is_default else f"0 to {size - 1}"
                remedy = "Truncate the texts, or use a model with more max_position_embeddings."
                raise LigerzooError(what, where=where, got=got, expected=expected, remedy=remedy)
        return positions

    def _without_padding(self, positions: Tensor, is_padding: Tensor, context: Context) -> Tensor:
        """Returns positions that do not count padding tokens, (B, T), which have the position before the first."""
        mask = context.call_padding_mask()
        is_padding = is_padding if mask is None else is_padding & mask
        before = is_padding.cumsum(1)
        if context.segment_start is not None:
            start = context.segment_start.expand(len(before), -1)
            before = before - F.pad(before, (1, 0)).gather(1, start)
        return (positions - before).masked_fill(is_padding, self.first_position - 1)

    def _embed_types(self, types: Tensor, x: Tensor) -> Tensor:
        """Returns embeddings of token types. Values are checked on a CPU only; on a GPU it would be a host sync."""
        size = self.token_type_embeddings.num_embeddings
        check_tensor(type(self).__name__, "token_type_ids", types, "integer", [tuple(x.shape[:2])])
        if reads_values() and (DEBUG or types.device.type == "cpu"):
            least, most = torch.stack(types.aminmax()).tolist()
            if least < 0 or most >= size:
                got, expected = least if least < 0 else most, f"0 to {size - 1}"
                raise LigerzooError("no such token type", where="token_type_ids", got=got, expected=expected)
        return self.token_type_embeddings(types.to(x.device))  # type: ignore[no-any-return]

"""Per-layer embeddings: a further input of each block, from a separate table (Gemma 3n and 4).

    input of block l = (norm(project(x))_l + table(token)_l) / sqrt(2),   x: the embedding of the token

Shapes: B batch, T tokens, H hidden features, L blocks, P features of the input of a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ligerzoo.errors import LigerzooError
from ligerzoo.layers.block import SandwichBlock
from ligerzoo.layers.cache import LayerCache
from ligerzoo.layers.context import Context
from ligerzoo.layers.decoder import Decoder
from ligerzoo.layers.embedding import ScaledEmbedding
from ligerzoo.layers.linear import INIT_STD, Linear, initialize
from ligerzoo.layers.moe import routed
from ligerzoo.layers.norm import RMSNorm
from ligerzoo.layers.projection import gate_and_project
from ligerzoo.layers.row_parts import RowParts


class PerLayerInputs(NamedTuple):
    """Inputs of the blocks in addition to the hidden states.

    Attributes:
        features: (B, T, P) for each block.
    """

    features: tuple[Tensor, ...]

    def of_block(self, block: int) -> Tensor:
        """Returns the input of the block with this index, (B, T, P)."""
        return self.features[block]

    def own(self, parts: RowParts, rows: int, tokens: int) -> Self:
        """Returns those of the tokens of this process."""
        return type(self)(tuple([parts.own(one.reshape(rows, tokens, -1)) for one in self.features]))


class PerLayerDecoder(Decoder):
    """`Decoder` with per-layer embeddings, which `ScaledSandwichBlock` reads.

    Args:
        embed_tokens: token ids to embeddings.
        layers: see `Decoder`.
        norm: see `Decoder`.
        num_embeddings: rows of the table of the inputs.
        features: P.
        eps: of the norm of the projected embeddings.
    """

    def __init__(
        self,
        embed_tokens: nn.Embedding,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        *,
        num_embeddings: int,
        features: int,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_tokens, layers, norm)
        size, all_features = embed_tokens.embedding_dim, len(self.layers) * features
        self.embed_tokens_per_layer = ScaledEmbedding(
            num_embeddings, all_features, features**0.5, device=device, dtype=dtype
        )
        self.per_layer_model_projection = Linear(size, all_features, bias=False, device=device, dtype=dtype)
        self.per_layer_projection_norm = RMSNorm(features, eps, round_before_scale=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """See `Decoder.forward`. With embeddings, the context must have `block_inputs`."""
        context = context if context is not None else Context(x)
        if not x.is_floating_point():
            ids, x = x, self.embed_tokens(x)
            self.set_block_inputs(context, x, ids)
        elif context.block_inputs is None:
            what, expected = "per-layer embeddings need token ids", "input_ids, or a context with block_inputs"
            raise LigerzooError(what, where="inputs_embeds", got="embeddings", expected=expected)
        return super().forward(x, context)

    @property
    def embedding_tables(self) -> tuple[nn.Embedding, ...]:
        """See `Decoder.embedding_tables`."""
        return (self.embed_tokens_per_layer,)

    def set_block_inputs(self, context: Context, x: Tensor, ids: Tensor, is_fixed: Tensor | None = None) -> None:
        """See `Decoder.set_block_inputs`."""
        tokens = self.embed_tokens_per_layer(ids)
        if is_fixed is not None:
            tokens = tokens.detach().where(is_fixed[..., None], tokens)
        context.block_inputs = self.block_inputs(x, tokens)

    def block_inputs(self, x: Tensor, tokens: Tensor) -> PerLayerInputs:
        """Returns the inputs of all blocks.

        Args:
            x: (B, T, H), the embeddings.
            tokens: (B, T, L, P) or (B, T, L * P), the embeddings of the same tokens in the table of the inputs.
        """
        projected = self.per_layer_model_projection(x) * x.shape[-1] ** -0.5
        projected = self.per_layer_projection_norm(projected.view(*x.shape[:2], len(self.layers), -1))
        return PerLayerInputs(((projected + tokens.view_as(projected)) * 2.0**-0.5).unbind(2))


class LayerInput(NamedTuple):
    """The parts of a block that read its input from `PerLayerDecoder`.

    Attributes:
        block: index of the block.
        per_layer_input_gate: (..., H) -> (..., P).
        per_layer_projection: (..., P) -> (..., H).
        post_per_layer_input_norm: norm after the projection.
    """

    block: int
    per_layer_input_gate: nn.Module
    per_layer_projection: nn.Module
    post_per_layer_input_norm: nn.Module


class ParallelMixture(NamedTuple):
    """The parts of a mixture of experts parallel to an MLP.

    Attributes:
        router: see `MoE`.
        experts: see `MoE`.
        post_feedforward_layernorm_1: norm after the MLP.
        pre_feedforward_layernorm_2: norm before the experts; the router reads hidden states without a norm.
        post_feedforward_layernorm_2: norm after the experts.
    """

    router: nn.Module
    experts: nn.Module
    post_feedforward_layernorm_1: nn.Module
    pre_feedforward_layernorm_2: nn.Module
    post_feedforward_layernorm_2: nn.Module


class ScaledSandwichBlock(SandwichBlock):
    """`SandwichBlock` times a number, optionally with a further input and a mixture of experts (Gemma 4).

        x += norm(attention(norm(x)));  x += norm(norm(mlp(norm(x))) + norm(experts(norm(x))))
        x += norm(project(gelu(gate(x)) * input));  x *= layer_scalar

    Args:
        parts: arguments of `SandwichBlock`.
        layer_input: reads the input of the block; None for no input.
        mixture: the mixture parallel to the MLP; None for the MLP alone.

    Attributes:
        layer_scalar: (1,), the number: a buffer, which is not trained.
    """

    layer_scalar: Tensor
    per_layer_input_gate: nn.Module
    per_layer_projection: nn.Module
    post_per_layer_input_norm: nn.Module
    router: nn.Module
    experts: nn.Module
    post_feedforward_layernorm_1: nn.Module
    pre_feedforward_layernorm_2: nn.Module
    post_feedforward_layernorm_2: nn.Module

    def __init__(
        self,
        *parts: nn.Module,
        layer_input: LayerInput | None = None,
        mixture: ParallelMixture | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(*parts)
        self.block = None if layer_input is None else layer_input.block
        self.has_mixture = mixture is not None
        for given in (layer_input, mixture):
            for name, part in ({} if given is None else given._asdict()).items():
                setattr(self, name, part)
        self.register_buffer("layer_scalar", torch.empty(1, device=device, dtype=dtype))
        initialize(self, ScaledSandwichBlock)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Sets the factor to 1, whatever `std` is."""
        nn.init.ones_(self.layer_scalar)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        x = super().forward(x, context, cache)
        if self.block is not None:
            assert context.block_inputs is not None
            gate, own = self.per_layer_input_gate(x), context.block_inputs.of_block(self.block)
            x = x + self.post_per_layer_input_norm(gate_and_project(gate, own, self.per_layer_projection, "gelu_tanh"))
        return x * self.layer_scalar

    def feed_forward(self, normalized: Tensor, x: Tensor, context: Context) -> Tensor:
        """See `SandwichBlock.feed_forward`."""
        y = super().feed_forward(normalized, x, context)
        if not self.has_mixture:
            return y
        tokens = x.flatten(0, -2)
        logits, expert_ids, expert_weights = routed(self.router, tokens)
        mixed = self.experts(self.pre_feedforward_layernorm_2(tokens), expert_ids, expert_weights)
        if context.router_logits is not None:
            context.router_logits.append(logits)
        return self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(mixed).view_as(x)  # type: ignore[no-any-return]

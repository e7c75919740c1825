"""The decoder: embedding, a stack of blocks, a final norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligerzoo.kernels.recompute import Recompute, recomputing
from ligerzoo.kernels.row_sums import split_row_sums
from ligerzoo.layers.cache import KeysAndValues
from ligerzoo.layers.context import Context
from ligerzoo.layers.exactness import check_exact
from ligerzoo.layers.kv_cache import KVCache, new_layer_cache
from ligerzoo.tensor_checks import explains_options


class Decoder(nn.Module):
    """Embedding, blocks and final norm: token ids or embeddings to final hidden states.

    Args:
        embed_tokens: token ids to embeddings.
        layers: blocks, called as `PreNormBlock`.
        norm: applied to the output of the last block.
        input_scale: factor of the embeddings, including those given instead of token ids.
        token_scale: factor of the embeddings of token ids only.
        input_norm: applied to the embeddings, including those given instead of token ids; None for no norm.
        positions_skip_padding: the default positions skip padding. For attention whose scores depend on
            absolute positions: the results of a padded text are then those of the text alone.
        max_valid_cache_length: `max_valid_length` of new caches, see `KVCache`.

    Attributes:
        gradient_checkpointing: save only the inputs of blocks for the backward pass, and recompute the blocks there.
        activation_plan: what backward recomputes of each block, in order; empty for nothing. `gradient_checkpointing`
            takes precedence. See `ligerzoo.memory.apply_activation_plan`.
    """

    has_token_types: ClassVar[bool] = False
    """Whether the input depends on the context's `token_types`."""

    @explains_options
    def __init__(
        self,
        embed_tokens: nn.Module,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        *,
        input_scale: float = 1.0,
        token_scale: float = 1.0,
        input_norm: nn.Module | None = None,
        positions_skip_padding: bool = False,
        max_valid_cache_length: int | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.input_scale, self.token_scale = input_scale, token_scale
        self.input_norm = input_norm
        self.positions_skip_padding = positions_skip_padding
        self.max_valid_cache_length = max_valid_cache_length
        self.gradient_checkpointing = False
        self.activation_plan: tuple[Recompute, ...] = ()

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x: (B, T) token ids, or (B, T, H) embeddings -> (B, T, H); of rows in parts, see `RowParts`, (B, c, H).

        Args:
            x: the new tokens.
            context: positions, mask and cache. Default: positions 0 to T - 1, no padding, no cache.
        """
        if x.ndim != (3 if x.is_floating_point() else 2):
            raise ValueError(
                f"Decoder: x has shape {tuple(x.shape)} and dtype {x.dtype}; expected (B, T) token ids, which are "
                "integers, or (B, T, H) embeddings"
            )
        context = context if context is not None else Context(x)
        if self.positions_skip_padding and context.has_default_positions:
            context = context.replace(position_ids=context.token_positions())
        x, context = context.own(x)
        if not x.is_floating_point():
            x = self.embed_tokens(x) if self.token_scale == 1.0 else self.token_scale * self.embed_tokens(x)
        if self.input_scale != 1.0:
            x = x * self.input_scale
        if self.input_norm is not None:
            x = self.input_norm(x)
        cache = context.cache  # decoding is faster where sums may be split
        keeps_sums = cache is None or cache.exact or torch.compiler.is_compiling()  # which leaves sums to torch
        with nullcontext() if keeps_sums else split_row_sums():
            x = run_blocks(self.layers, x, context, checkpoints=self.gradient_checkpointing, plan=self.activation_plan)
            x = self.norm(x)
        if (states := context.hidden_states) is not None:
            states[-1] = x
        return x

    def set_block_inputs(self, context: Context, x: Tensor, ids: Tensor, is_fixed: Tensor | None = None) -> None:
        """Stores the inputs of blocks in the context that depend on token ids: none, except in a subclass.

        Args:
            context: that of the tokens.
            x: (B, T, H), the embeddings.
            ids: (B, T), the token ids.
            is_fixed: (B, T) bool, tokens whose ids get no gradient, such as placeholders; None for none.
        """

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a text that have learned positions; None if positions are not learned."""
        return None

    @property
    def embedding_tables(self) -> tuple[nn.Embedding, ...]:
        """Embeddings of token ids other than `embed_tokens`."""
        return ()

    def new_cache(
        self, capacity: int | None = None, dtype: torch.dtype | None = None, *, exact: bool = False
    ) -> KVCache:
        """Returns an empty KV cache, with the cache that each layer's `new_cache` returns.

        A layer without `new_cache` gets a cache of all tokens.

        Args:
            capacity: maximum number of tokens. None: caches grow, and those of sliding-window layers keep their window
                only. Caches of cross-attention always grow.
            dtype: float8_e4m3fn for half the memory of bf16, see `KVCache`; None for the dtype of keys and values.
            exact: results of tokens have the bits that a forward of the whole text gives them, see `KVCache`.

        Raises:
            ValueError: another dtype, or the decoder does not support exact caches, see `check_exact`.
        """
        if exact:
            check_exact(self, dtype)
        # A list, since torch.compile cannot reconstruct a generator when it returns the cache.
        cache = KVCache([new_layer_cache(layer, capacity) for layer in self.layers], dtype, exact=exact)
        cache.max_valid_length = self.max_valid_cache_length
        return cache


def run_blocks(
    layers: Iterable[nn.Module], x: Tensor, context: Context, *, checkpoints: bool, plan: Sequence[Recompute] = ()
) -> Tensor:
    """Runs blocks in order, x: (B, T, H) -> (B, T, H).

    Args:
        layers: blocks, called as `PreNormBlock`.
        x: input of the first block.
        context: positions, mask and cache of the tokens. The `hidden_states` of its outputs, if not None, get the input
            and the output of each block that changes them. Its `deepstack`, if not None, is added to the outputs.
        checkpoints: backward recomputes each block from its input; ignored with a cache, which has no backward pass.
        plan: what backward recomputes of each block otherwise, likewise; empty for nothing.
    """
    layers, caches = list(layers), None if context.cache is None else context.cache.layers
    levels = [Recompute.BLOCK] * len(layers) if checkpoints else plan
    if not (levels and torch.is_grad_enabled() and caches is None):
        levels = [Recompute.NOTHING] * len(layers)
    outputs = context.outputs
    x, context = context.divide(x)
    if outputs.hidden_states is not None:
        outputs.hidden_states.append(x)
    for index, (layer, level) in enumerate(zip(layers, levels, strict=True)):
        if level is Recompute.BLOCK:
            x, stored, shared_keys = checkpoint(
                _forward, layer, x, context, use_reentrant=False, preserve_rng_state=not _is_capturing(x)
            )
            context.shared_keys.update(shared_keys)
            for name, tensors in stored.items():
                getattr(outputs, name).extend(tensors)
        elif level is Recompute.NOTHING:
            x = layer(x, context, None if caches is None else caches[index])
        else:
            with recomputing(level):
                x = layer(x, context)
        if outputs.hidden_states is not None and not _is_skipped(layer, context):
            outputs.hidden_states.append(x)
        if context.deepstack is not None:  # not part of the block, which may be recomputed
            x = context.deepstack.add(x, index)
    return context.gather(x)


def _is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is captured, in which the host cannot save the states of random number generators.

    `ligerzoo.train.CapturedStep` refuses to capture dropout in checkpointed blocks.
    """
    return x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def _is_skipped(layer: nn.Module, context: Context) -> bool:
    """Returns whether the layer has nothing to do in this forward, such as cross-attention without images."""
    return hasattr(layer, "is_skipped") and layer.is_skipped(context)  # type: ignore[operator]


class BlockStack(nn.Module):
    """A sequence of blocks, without embedding and norm.

    Args:
        layers: blocks, called as `PreNormBlock`.

    Attributes:
        gradient_checkpointing: see `Decoder`.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.gradient_checkpointing = False

    def forward(
        self, x: Tensor, context: Context, intermediate_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """x: (B, T, E) -> (B, T, E), and the outputs of the blocks with the indices `intermediate_layers`."""
        outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = run_blocks([layer], x, context, checkpoints=self.gradient_checkpointing)
            if index in intermediate_layers:
                outputs[index] = x
        return x, [outputs[index] for index in intermediate_layers]


def _forward(
    layer: nn.Module, x: Tensor, context: Context
) -> tuple[Tensor, dict[str, list[Tensor]], dict[str, KeysAndValues]]:
    """Returns the layer's output and what it stored in the context; leaves `context` unchanged."""
    before, context = context.shared_keys, context.fork()
    with recomputing(Recompute.BLOCK):  # recomputation stops before the MLP, see `kernels.recompute`
        x = layer(x, context)
    return x, context.outputs.stored(), {n: keys for n, keys in context.shared_keys.items() if n not in before}

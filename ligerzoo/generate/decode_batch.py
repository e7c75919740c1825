"""A decode step of a fixed number of rows over a KV cache of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.generate.cache_options import DEFAULT_CACHE, CacheOptions
from ligerzoo.layers import Attention, RotaryEmbedding


class DecodeBatch:
    """A KV cache of fixed size, and the decode step over it: newest tokens in, logits out. It runs eagerly.

    Each row has its own positions, so there is neither padding nor a padding mask.

    Args:
        model: the model.
        rows: P.
        capacity: maximum number of tokens in each row.
        options: of the KV cache.

    Attributes:
        rows, capacity, options: as given.
        cache: the KV cache.
        device: device of the weights.
    """

    def __init__(self, model: nn.Module, rows: int, capacity: int, options: CacheOptions = DEFAULT_CACHE) -> None:
        self.rows, self.capacity, self.options = rows, capacity, options
        self.cache = options.new_cache(model, capacity)
        self.device: torch.device = next(model.parameters()).device

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that the cache has memory for."""
        return self.rows * self.capacity

    def step(self, model: Callable[..., Any], tokens: Tensor) -> Tensor:
        """Runs the model on the newest tokens, (P, T).

        Returns:
            (P * T, V) fp32 logits after each token, row by row, valid until the next step.
        """
        kept = tokens.shape[1]
        output = model(tokens, None, None, past_key_values=self.cache, use_cache=True, logits_to_keep=kept)
        logits: Tensor = output.logits.flatten(0, 1).float()
        return logits


def has_static_decoding(model: nn.Module) -> bool:
    """Whether a model can decode in a `DecodeBatch`: its KV caches can have a fixed size, and attention is causal."""
    attentions = (module for module in getattr(model, "model", model).modules() if isinstance(module, Attention))
    is_causal = all(attention.is_causal for attention in attentions)
    return is_causal and hasattr(model, "new_cache") and model.new_cache(1).is_static  # type: ignore[operator]


def independent_length(model: nn.Module) -> int | None:
    """Returns the length of a sequence up to which no token depends on later ones; None for no limit.

    Beyond it, the rotary frequencies depend on the longest row (rope types dynamic and longrope).
    """
    lengths = [module.max_independent_length for module in model.modules() if isinstance(module, RotaryEmbedding)]
    lengths.append(model.new_cache().max_valid_length)  # type: ignore[operator]
    return min((length for length in lengths if length is not None), default=None)

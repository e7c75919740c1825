"""How many tokens KV caches of fixed size may have in the memory of a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ligerzoo.generate.captured import decode_graphs
from ligerzoo.generate.options import require
from ligerzoo.layers import Attention, GatedDeltaNet, LatentAttention

_MEMORY_SHARE = 3 / 4  # of the free memory; the rest is for the hidden states of a prefill


def default_cache_tokens(model: nn.Module, rows: int, cache_dtype: torch.dtype | None = None) -> int | None:
    """Returns the number of tokens for which the model's GPU has memory now, after the states of recurrent layers.

    None on a CPU, and for a model without `Attention` and `LatentAttention`, whose caches have an unknown size.

    Args:
        model: the model.
        rows: largest number of sequences, each of which has states.
        cache_dtype: see `KVCache`.

    Raises:
        LigerzooError: there is no memory for the states.
    """
    device, bytes_per_token = next(model.parameters()).device, cache_bytes_per_token(model, cache_dtype)
    if device.type != "cuda" or bytes_per_token == 0:
        return None
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free += decode_graphs(model).nbytes  # which make room for others
    room = int(_MEMORY_SHARE * free) - rows * state_bytes_per_row(model)
    expected = (
        f"at most {max(rows + room // max(state_bytes_per_row(model), 1), 0)}: the rest has no memory for its states"
    )
    require(room >= bytes_per_token, "batch_size", rows, expected)
    return room // bytes_per_token


def state_bytes_per_row(model: nn.Module) -> int:
    """Returns the bytes of the states of recurrent layers for one sequence."""
    return sum(module.state_bytes for module in model.modules() if isinstance(module, GatedDeltaNet))


def cache_bytes_per_token(model: nn.Module, cache_dtype: torch.dtype | None = None) -> int:
    """Returns the bytes of the keys and values, or latent vectors, of one token in all layers."""
    features = sum(map(_cached_features, model.modules()))
    dtype = next(model.parameters()).dtype if cache_dtype is None else cache_dtype
    return int(features * dtype.itemsize)


def _cached_features(module: Any) -> int:
    """Returns the numbers that a layer caches for each token."""
    if isinstance(module, Attention):
        return int(module.k_proj.out_features + module.v_proj.out_features)
    return module.kv_rank + module.rope_dim if isinstance(module, LatentAttention) else 0

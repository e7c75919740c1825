"""Checks of what a `Context` is given. Shapes: B batch, T tokens in the call, S keys (cached and new)."""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.layers.kv_cache import KVCache
from ligerzoo.layers.masks import Mask
from ligerzoo.tensor_checks import kind_of, require_tensor


def check_context_inputs(
    x: Tensor,
    attention_mask: Tensor | Mask | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: KVCache | None,
) -> None:
    """Raises TypeError or ValueError unless the arguments of `Context` are consistent."""
    require_tensor("Context", "x", x, "a tensor of (B, T) token ids or (B, T, H) embeddings")
    if x.ndim not in (2, 3) or x.shape[1] == 0:
        raise ValueError(
            f"Context: x has shape {tuple(x.shape)}; expected (B, T) token ids or (B, T, H) embeddings with T > 0"
        )
    if not (cache is None or isinstance(cache, KVCache)):
        raise ValueError(f"cache: got {type(cache).__name__}; expected a KVCache, from the model's new_cache()")
    rows, tokens = x.shape[:2]
    if cache is not None and not cache.is_valid_for(tokens):
        raise ValueError(
            f"cache: got {cache.length} cached and {tokens} new tokens; expected at most "
            f"{cache.max_valid_length} in all, since longer sequences use other rotary frequencies. "
            "Process all tokens with a new cache."
        )
    if cu_seqlens is not None:
        _check_packing(cu_seqlens, x, attention_mask, cache)
    if position_ids is not None:
        _check_position_ids(position_ids, rows, tokens)
    if attention_mask is not None and not isinstance(attention_mask, Mask):
        _check_mask(attention_mask, rows, tokens, cache)


def _check_position_ids(position_ids: Tensor, rows: int, tokens: int) -> None:
    """Raises unless `position_ids` are integers of shape (B or 1, T), or (A, B or 1, T)."""
    require_tensor("Context", "position_ids", position_ids, "a tensor of integers of shape (B or 1, T)")
    shape = tuple(position_ids.shape)
    # Not `shape[-2] in (1, rows)`, see `_check_mask`.
    fits = position_ids.ndim in (2, 3) and shape[-1] == tokens and (shape[-2] == 1 or shape[-2] == rows)
    if not fits or kind_of(position_ids) != "integer":
        rows_expected = "1" if rows == 1 else f"{rows} or 1"
        raise ValueError(
            f"position_ids: got shape {shape} and {position_ids.dtype}; expected integers of shape "
            f"({rows_expected}, {tokens}): one position for each new token"
        )


def _check_packing(cu_seqlens: Tensor, x: Tensor, attention_mask: Tensor | Mask | None, cache: KVCache | None) -> None:
    """Raises unless `cu_seqlens` are segment boundaries of one row.

    Values are checked on a CPU only; on a GPU the check would be a host sync.
    """
    if cache is not None or attention_mask is not None or len(x) != 1:
        given = [name for name, value in (("attention_mask", attention_mask), ("cache", cache)) if value is not None]
        raise ValueError(
            "cu_seqlens needs batch size 1, no attention_mask and no cache; got "
            + " and ".join([f"batch size {len(x)}", *given])
        )
    require_tensor("Context", "cu_seqlens", cu_seqlens, "a tensor of integers of shape (segments + 1,)")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0 or kind_of(cu_seqlens) != "integer":
        got = f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        raise ValueError(f"cu_seqlens: got {got}; expected an integer tensor of shape (segments + 1,)")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > x.shape[1]:
            shown = f"{bounds[:8]}{' and more' if len(bounds) > 8 else ''}"
            raise ValueError(f"cu_seqlens: got {shown}; expected ascending values from 0 to at most {x.shape[1]}")


def _check_mask(attention_mask: Tensor, rows: int, tokens: int, cache: KVCache | None) -> None:
    """Raises unless the mask covers the cached and the new tokens."""
    require_tensor("Context", "attention_mask", attention_mask, "a tensor of shape (B, S) or (B, 1, T, S)")
    shape, keys = tuple(attention_mask.shape), tokens + (cache.length if cache is not None else 0)
    if attention_mask.ndim == 4:
        if shape[2:] != (tokens, keys):
            raise ValueError(f"attention_mask has shape {shape}; expected (batch, 1, {tokens}, {keys})")
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise ValueError(
                f"attention_mask of 4 dimensions: got {attention_mask.dtype}; "
                "expected bool, or a floating dtype to be added to the scores"
            )
        return
    # Not `shape[0] in (1, rows)`: torch.compile finds a static size unequal to every dynamic size in a tuple.
    fits = attention_mask.ndim == 2 and (shape[0] == 1 or shape[0] == rows)
    if not fits or (shape[1] != keys and (cache is None or shape[1] != cache.capacity)):
        raise ValueError(
            f"attention_mask has shape {shape}; expected ({rows}, {keys}): one entry for each cached and new token"
        )

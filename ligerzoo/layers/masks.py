"""Attention masks."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(
    attention_mask: Tensor | None, queries: int, keys: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """What to add to the scores of the last `queries` of `keys` tokens, so that each sees itself and the real tokens
    before it. Hidden scores get the dtype's most negative finite number.

    Padding may have no token to see, and what it makes of that nobody should read. On a CPU its scores are then all
    alike, as in transformers' eager attention. Elsewhere it sees itself: a fused kernel would give a row of equal
    scores of that size gradients many times too large, for it recomputes probabilities as exp(score - lse).

    Args:
        attention_mask: (B, keys), 1 for a token and 0 for padding; or a ready mask (B, 1, queries, keys) whose every
            row sees something, boolean (True: visible) or to be added; or None for no padding.
        queries: T, the number of new tokens.
        keys: S >= T, the number of tokens seen in all.
        dtype: of the scores.
        device: of the scores.

    Returns:
        (B or 1, 1, T, S), or None where `attend` needs none: plain causal attention, or one new token without padding.

    Raises:
        ValueError: the attention mask does not cover the tokens.
    """
    if attention_mask is not None and (attention_mask.ndim not in (2, 4) or attention_mask.shape[-1] != keys):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; expected (batch, {keys}): "
            "one entry for each cached and new token"
        )
    if attention_mask is not None and attention_mask.ndim == 4:
        if attention_mask.shape[2] != queries:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; expected (batch, 1, {queries}, {keys})"
            )
        if attention_mask.dtype == torch.bool:
            return _added(attention_mask, dtype)
        if not attention_mask.is_floating_point():
            raise ValueError(f"a ready attention_mask is boolean or to be added; got {attention_mask.dtype}")
        return attention_mask.to(dtype)
    # Looking at the mask makes the host wait for a GPU once a forward; without padding that buys attention kernels that
    # take no mask.
    if attention_mask is not None and not torch.compiler.is_compiling() and bool(attention_mask.all()):
        attention_mask = None
    if attention_mask is None and (queries == keys or queries == 1):
        return None
    key = torch.arange(keys, device=device)
    query = key[keys - queries :, None]
    visible = (key <= query)[None, None]
    if attention_mask is not None:
        visible = visible & attention_mask.to(device=device, dtype=torch.bool)[:, None, None, :]
        if device.type != "cpu":
            visible = visible | (key == query)
    return _added(visible, dtype)


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=visible.device).where(visible, torch.finfo(dtype).min)

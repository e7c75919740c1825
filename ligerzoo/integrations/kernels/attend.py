"""The attention function of transformers' "sdpa" implementation, with `ligerzoo.layers.attend`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ligerzoo.layers import attend

UNSUPPORTED = ("s_aux", "position_bias", "cache", "softcap", "output_attentions", "head_mask")
"""Arguments with which the function of transformers is called."""


class AttentionFunctions:
    """Replaces transformers' table of attention functions in one attention module."""

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function of an implementation; for "sdpa" one that calls `attend` where it can."""
        theirs = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, default)
        return partial(_attention, theirs) if implementation == "sdpa" else theirs


def _attention(
    theirs: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """query: (B, N, T, D), key and value: (B, K, S, D) -> (B, T, N, D), and None for the weights."""
    tokens, keys = query.shape[2], key.shape[2]
    if (
        dropout
        or query.shape[-1] != value.shape[-1]
        or (attention_mask is None and tokens not in (1, keys))
        or any(options.get(name) is not None and options[name] is not False for name in UNSUPPORTED)
    ):
        return theirs(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = attend(q, k, v, attention_mask, scaling, is_causal=is_causal)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        # As in torch's function. The first token after padding on the left is predicted from such a row.
        sees_nothing = ~attention_mask.any(-1).transpose(1, 2)[..., None]
        out = out.masked_fill(sees_nothing, 0)
    return out, None

"""Log-probabilities of chosen and of the most likely tokens, packed into one tensor that the host reads at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.generate.prompts import MAX_TOP_LOGPS
from ligerzoo.kernels.cross_entropy import cross_entropy

Scored = tuple[list[int], list[float], list[dict[int, float]]]
"""Tokens, their log-probabilities without temperature and filters, and for each the most likely tokens and theirs."""


def packed_logps(tokens: Tensor, logps: Tensor) -> Tensor:
    """Returns tokens and log-probabilities, (n,) each, as (2, n) fp64, which holds token ids exactly."""
    return torch.stack([tokens.double(), logps.double()])


def score(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the packed log-probabilities of given tokens, (n,), under logits (n, V)."""
    logps = -cross_entropy(logits, tokens, reduction="none") if len(tokens) > 0 else logits.new_empty(0)
    return packed_logps(tokens, logps)


def with_top_logps(packed: Tensor, logits: Tensor, given: Tensor | None = None, *, finds_top: bool = True) -> Tensor:
    """Appends the most likely tokens, or given ones, to packed log-probabilities, (2, n), of logits (n, V).

    Args:
        packed: see `packed_logps`.
        logits: (n, V).
        given: (n, K) token ids that replace the most likely ones; -1 where they do not. None for none.
        finds_top: whether the most likely tokens are needed.

    Returns:
        (2 + 2K, n): the packed rows, the ids of K tokens, and their log-probabilities. Tokens with the logit of the
        packed one have its log-probability, to the bit.
    """
    logits = logits.float()
    count = min(MAX_TOP_LOGPS, logits.shape[1]) if finds_top else 0
    ids = logits.topk(count).indices
    if given is not None:
        width = max(count, given.shape[1])
        given = F.pad(given, (0, width - given.shape[1]), value=-1)
        ids = given.where(given >= 0, F.pad(ids, (0, width - count)))
    values, own = logits.gather(1, ids), logits.gather(1, packed[0].long()[:, None])
    logps = torch.where(values == own, packed[1][:, None], (values - logits.logsumexp(-1, keepdim=True)).double())
    return torch.cat([packed, ids.T.double(), logps.T])


def unpack(rows: Sequence[Sequence[float]], columns: Sequence[int], count: int) -> Scored:
    """Returns some columns of what `with_top_logps` or `packed_logps` returned, with `count` tokens of each."""
    tokens, logps, *top = rows
    ids, top_logps = top[: len(top) // 2][:count], top[len(top) // 2 :][:count]
    likely = [{int(a[i]): b[i] for a, b in zip(ids, top_logps, strict=True)} for i in columns] if count else []
    return [int(tokens[i]) for i in columns], [logps[i] for i in columns], likely

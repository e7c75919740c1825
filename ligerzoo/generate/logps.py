"""Log-probabilities of tokens, and of the most likely ones instead of them, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.cross_entropy import cross_entropy

MAX_TOP_LOGPS = 20
"""Number of the most likely tokens that the device finds for each token, if any are asked for."""


class TokenLogps(NamedTuple):
    """Tokens of one sequence and their log-probabilities, without temperature and filters.

    Attributes:
        tokens: the token ids.
        logps: their log-probabilities.
        top_logps: for each token, the most likely token ids at its position and their log-probabilities, the most
            likely first. Empty if none were asked for.
    """

    tokens: list[int]
    logps: list[float]
    top_logps: list[dict[int, float]]


def packed_logps(tokens: Tensor, logps: Tensor) -> Tensor:
    """Returns tokens and log-probabilities, (n,) each, as (2, n) fp64, which holds token ids exactly."""
    return torch.stack([tokens.double(), logps.double()])


def score(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the packed log-probabilities of given tokens, (n,), under logits (n, V)."""
    logps = -cross_entropy(logits, tokens, reduction="none") if len(tokens) > 0 else logits.new_empty(0)
    return packed_logps(tokens, logps)


def with_top_logps(packed: Tensor, logits: Tensor) -> Tensor:
    """Appends the most likely tokens to packed log-probabilities.

    Args:
        packed: (2, n), see `packed_logps`.
        logits: (n, V), which they are of.

    Returns:
        (2 + 2K, n): the packed rows, the ids of the K most likely tokens, and their log-probabilities. Tokens with the
        logit of the given one have its log-probability, to the bit.
    """
    logits = logits.float()
    top, ids = logits.topk(min(MAX_TOP_LOGPS, logits.shape[1]))
    given = logits.gather(1, packed[0].long()[:, None])
    logps = torch.where(top == given, packed[1][:, None], (top - logits.logsumexp(-1, keepdim=True)).double())
    return torch.cat([packed, ids.T.double(), logps.T])


def unpack(rows: Sequence[Sequence[float]], columns: Sequence[int], count: int) -> TokenLogps:
    """Returns the log-probabilities in some columns of what `with_top_logps` or `packed_logps` returned.

    Args:
        rows: the rows, on the host.
        columns: the columns.
        count: number of the most likely tokens.
    """
    tokens, logps, *top = rows
    ids, top_logps = top[: len(top) // 2][:count], top[len(top) // 2 :][:count]
    return TokenLogps(
        [int(tokens[i]) for i in columns],
        [logps[i] for i in columns],
        [{int(a[i]): b[i] for a, b in zip(ids, top_logps, strict=True)} for i in columns] if count else [],
    )

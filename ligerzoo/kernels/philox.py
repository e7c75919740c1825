"""Random bits by Philox 4x32-10 (Salmon et al. 2011): a function of a key and a counter, without a state.

A kernel and its reference compute the same bits, so results can be compared, repeated and continued.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import cdiv
from ligerzoo.kernels.jit import jit, tl

WORDS = 4
"""Random words of one counter."""

WORD_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def random_words(seeds: Tensor, steps: Tensor, columns: int, first_group: int = 0) -> Tensor:
    """Random words of 32 bits by Philox 4x32-10, as `triton.language.randint4x` computes them.

    Column i of a row is word i % 4 for the key `seed` and the counter (first_group + i // 4, step, 0, 0).

    Args:
        seeds: (R,) int64.
        steps: (R,) int64, from 0 to 2^32 - 1.
        columns: number of words of each row.
        first_group: the counter of the first four columns, from 0 to 2^32 - 1.

    Returns:
        (R, columns) int64, from 0 to 2^32 - 1.
    """
    groups = torch.arange(first_group, first_group + cdiv(columns, WORDS), device=seeds.device)
    c0, c1 = groups.expand(len(seeds), -1), steps[:, None].expand(-1, len(groups))
    c2 = c3 = torch.zeros_like(c0)
    key0, key1 = (seeds & WORD_MASK)[:, None], (seeds >> 32 & WORD_MASK)[:, None]
    for _ in range(_ROUNDS):
        # The products wrap around 2^64, which leaves their bits unchanged; the sign enters above them.
        product0, product2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (product2 >> 32 & WORD_MASK) ^ c1 ^ key0, (product0 >> 32 & WORD_MASK) ^ c3 ^ key1
        c1, c3 = product2 & WORD_MASK, product0 & WORD_MASK
        key0, key1 = key0 + _KEY_STEPS[0] & WORD_MASK, key1 + _KEY_STEPS[1] & WORD_MASK
    return torch.stack([c0, c1, c2, c3], -1).flatten(1)[:, :columns]


@jit
def random_block(seed, step, first_group, BLOCK: tl.constexpr):
    """BLOCK adjacent words of a row of `random_words`, uint32; `step` is int64."""
    groups = first_group + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = tl.randint4x(seed, (step << 32) | groups.to(tl.int64))
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))

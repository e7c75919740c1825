"""Embeddings of texts from the hidden states of their tokens: pooling, a projection, a norm.

Shapes: T tokens of n texts, which are adjacent in a row; H features of a token, D of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.checks import FLAG, check, one_of
from ligerzoo.layers.linear import Linear

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Ways to pool, with the names of sentence-transformers."""

DENSE_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
"""Activations of `Dense`."""


class Pooling(nn.Module):
    """Pools the hidden states of each text into one vector.

    Sums are in fp32 at least, and in the order of the tokens, so that a text has the same bits whatever is around it.

    Args:
        modes: how, one or more of `POOLING_MODES`, whose vectors are concatenated:
            - "cls": the first token;
            - "lasttoken": the last token;
            - "max": the maximum of each feature;
            - "mean": the mean;
            - "mean_sqrt_len_tokens": the sum, divided by the square root of the number of tokens;
            - "weightedmean": the mean with weights 1, 2, 3, ... of the first, second, third, ... token (SGPT).
        include_prompt: pool the tokens of the prompt as well.

    Raises:
        LigerzooError: there is no mode, or an unknown one.
    """

    def __init__(self, modes: Sequence[str] = ("mean",), *, include_prompt: bool = True) -> None:
        super().__init__()
        check("Pooling", FLAG, include_prompt=include_prompt)
        for mode in modes or [""]:
            check("Pooling", one_of(POOLING_MODES), modes=mode)
        self.modes, self.include_prompt = tuple(modes), include_prompt

    def forward(self, hidden: Tensor, offsets: Tensor, prompt_tokens: int = 0) -> Tensor:
        """(T, H) -> (n, H times the number of modes).

        Args:
            hidden: hidden states. Tokens after the last boundary are padding.
            offsets: (n + 1,) int64, boundaries of the texts. The vector of a text without tokens is zero.
            prompt_tokens: tokens of the prompt with which each text begins.
        """
        first, last = offsets[:-1], offsets[1:] - 1
        skipped = 0 if self.include_prompt else prompt_tokens
        start = torch.where(offsets.diff() > skipped, first + skipped, first)
        is_empty = (last < first)[:, None]
        sums = _Sums(hidden, offsets, skipped) if {*self.modes} - {"cls", "lasttoken"} else None
        vectors = []
        for mode in self.modes:
            if sums is not None and mode not in ("cls", "lasttoken"):
                vector = sums.pooled(mode)
            else:
                vector = hidden[(start if mode == "cls" else last).clamp(0, len(hidden) - 1)]
            vectors.append(vector.masked_fill(is_empty, 0))
        return torch.cat(vectors, -1)

    def extra_repr(self) -> str:
        return f"{'+'.join(self.modes)}, include_prompt={self.include_prompt}"


class _Sums:
    """Sums and maxima over the tokens of each text, without its first `skipped` tokens."""

    def __init__(self, hidden: Tensor, offsets: Tensor, skipped: int) -> None:
        self.hidden, self.offsets = hidden, offsets
        self.lengths = offsets.diff()
        index = torch.arange(len(hidden), device=hidden.device)
        text = torch.searchsorted(offsets, index, right=True) - 1
        self.position = index - offsets[text]
        if skipped:
            kept = (self.position >= skipped) & (index < offsets[-1])
            self.hidden, self.position = hidden[kept], self.position[kept]
            self.lengths = (self.lengths - skipped).clamp(min=0)
            self.offsets = F.pad(self.lengths.cumsum(0), (1, 0))

    def pooled(self, mode: str) -> Tensor:
        """Returns the vectors, (n, H)."""
        dtype = self.hidden.dtype
        x = self.hidden if mode == "max" else self.hidden.to(torch.promote_types(dtype, torch.float32))
        if mode == "max":
            return torch.segment_reduce(x, "max", offsets=self.offsets, unsafe=True)
        if mode == "weightedmean":
            weights = (self.position + 1).to(x.dtype)[:, None]
            x, divisor = x * weights, torch.segment_reduce(weights, "sum", offsets=self.offsets, unsafe=True)
        else:
            lengths = self.lengths.to(x.dtype)[:, None]
            divisor = lengths if mode == "mean" else lengths.sqrt()
        total = torch.segment_reduce(x, "sum", offsets=self.offsets, unsafe=True)
        return (total / divisor.clamp(min=1e-9)).to(dtype)


class Dense(nn.Module):
    """A projection of embeddings: `activation(x @ W.T + b)`, plus `x` if `residual`.

    Args:
        in_features: D of the embeddings.
        out_features: D of the results.
        bias: add a bias.
        activation: a name in `DENSE_ACTIVATIONS`.
        residual: add the input, projected by a further matrix if the sizes differ.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        activation: str = "tanh",
        residual: bool = False,
    ) -> None:
        super().__init__()
        check("Dense", one_of(tuple(DENSE_ACTIVATIONS)), activation=activation)
        self.linear, self.activation = Linear(in_features, out_features, bias=bias), activation
        if residual:
            is_equal = in_features == out_features
            self.residual = nn.Identity() if is_equal else Linear(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (n, in_features) -> (n, out_features)."""
        y = DENSE_ACTIVATIONS[self.activation](self.linear(x))
        return y + self.residual(x) if hasattr(self, "residual") else y

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


class Normalize(nn.Module):
    """Scales embeddings to length 1. A zero vector stays zero."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (n, D) -> (n, D)."""
        return F.normalize(x, dim=-1)

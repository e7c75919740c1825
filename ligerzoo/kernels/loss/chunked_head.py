"""The matrix products of a loss head, swept in chunks of rows: logits, and what their gradient adds to the head's.

A head makes a chunk's logits (x @ weight.T), and takes their gradient: dx = dlogits @ weight, and dweight, the sum over
the chunks of dlogits.T @ x in at least 24 bits. There are two: `DenseHead` for any device and dtype, and `RaggedHead`
for bf16 on Hopper GPUs, where rows that do not count cost nothing; see `valid_rows` and `weight_sum`.

A head sweeps the rows in an order of its own, unless it is given one: then row i of the sweep is among those of chunk
i // rows, and of the rows of a chunk alone those that count come first. So rows that belong together stay together.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype, cdiv, multiprocessors
from ligerzoo.kernels.loss import ragged_gemm
from ligerzoo.kernels.loss.wgrad_accumulator import COLUMN_MULTIPLE, WeightGradAccumulator


class HeadInputs(NamedTuple):
    """What logits are computed from.

    Attributes:
        hidden: (M, H) hidden states.
        weight: (V, H).
        bias: (V,), added to the logits, or None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


class Needs(NamedTuple):
    """Which gradients to compute. The others have no elements."""

    hidden: bool
    weight: bool
    bias: bool = False


_logits_budget = 512


def set_logits_budget(mebibytes: int) -> None:
    """Sets how many MiB of logits may exist at a time where a call does not say (512 to begin with; one row at least).

    Raises:
        ValueError: `mebibytes` is negative.
    """
    global _logits_budget
    _logits_budget = _check_budget(mebibytes)


def _check_budget(budget: int) -> int:
    if budget < 0:
        raise ValueError(f"logits budget: got {budget} MiB; expected 0 or more")
    return budget


def max_rows(n_classes: int, bytes_per_logit: int, budget: int | None) -> int:
    """How many rows' logits fit the budget; perhaps 0."""
    budget = _logits_budget if budget is None else _check_budget(budget)
    return budget * 2**20 // (max(1, n_classes) * bytes_per_logit)


def rows_per_chunk(hidden: Tensor, n_classes: int, bytes_per_logit: int, budget: int | None) -> int:
    """How many of (M, H) hidden states to take at a time, so that their logits fit the budget.

    Where it allows, a multiple of 128 (a tile of the matrix products), chosen so that few tiles of dhidden, which are
    the longest, wait for the last ones of a chunk.
    """
    n_rows, hidden_size = hidden.shape
    most = max(1, max_rows(n_classes, bytes_per_logit, budget))
    if n_rows <= most or most < 128:
        return max(1, min(n_rows, most))
    tiles_of_128_rows, at_a_time = cdiv(hidden_size, 256), multiprocessors(hidden)

    def waves(rows: int) -> int:
        return cdiv(n_rows, rows) * cdiv(cdiv(rows, 128) * tiles_of_128_rows, at_a_time)

    candidates = range(128, most + 1, 128)
    fewest = min(map(waves, candidates))
    return max(rows for rows in candidates if waves(rows) <= 1.1 * fewest)


def _supports_ragged(*weights: Tensor) -> bool:
    return all(ragged_gemm.supports(weight) and weight.shape[1] % COLUMN_MULTIPLE == 0 for weight in weights)


def gradient_dtype(*weights: Tensor) -> torch.dtype:
    """The dtype in which the head of the first weight hands on the sum of dweight."""
    return weights[0].dtype if _supports_ragged(*weights) else accumulation_dtype(weights[0].dtype)


def head_type(n_rows: int, *weights: Tensor) -> type[DenseHead] | type[RaggedHead]:
    """The head for so many rows; several weights are those of heads that sweep the same rows together."""
    return RaggedHead if n_rows and _supports_ragged(*weights) else DenseHead


class HeadGradients(NamedTuple):
    """The gradients of `HeadInputs`."""

    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor


class DenseHead:
    """Computes all rows alike; on a CPU, where to look costs no wait, those alone that count.

    Attributes:
        chunks: which rows of the sweep each chunk has; none where it has none that valid.
        order: row i of the sweep is row order[i] of `hidden`; None if all are swept as they come.
    """

    def __init__(
        self, inputs: HeadInputs, valid: Tensor, rows: int, needs: Needs, order: Tensor | None = None
    ) -> None:  # fmt: skip
        hidden, weight, bias = inputs
        self.order, self.valid = order, valid if order is None else valid[order]
        if valid.device.type == "cpu":
            self.order = valid.nonzero()[:, 0] if order is None else order[self.valid]
        self.hidden = hidden if self.order is None else hidden[self.order]
        self.chunks = _chunks(self.hidden.shape[0], rows)
        if valid.device.type == "cpu" and order is not None:
            ends = self.valid.cumsum(0)[[chunk.stop - 1 for chunk in _chunks(hidden.shape[0], rows)]].tolist()
            self.chunks = [slice(start, stop) for start, stop in itertools.pairwise([0, *ends])]
        self.weight, self.needs, self.bias, self.shape = weight, needs, bias, hidden.shape
        self.buffer = hidden.new_empty((min(rows, self.hidden.shape[0]), weight.shape[0]))
        self.dhidden = hidden.new_empty(self.hidden.shape if needs.hidden else (0,))
        self.dweight = weight.new_empty(weight.shape if needs.weight else (0,), dtype=accumulation_dtype(weight.dtype))
        self.dbias = weight.new_zeros(weight.shape[:1] if needs.bias else (0,), dtype=accumulation_dtype(weight.dtype))

    def count(self, chunk: slice) -> None:
        """How many rows of the sweep count, up to the end of a chunk; None if that is for the targets to say."""

    def logits(self, chunk: slice) -> Tensor:
        """(rows, V) of a chunk: a buffer that the next call fills anew."""
        self.x = self.hidden[chunk]
        if self.x.device.type != "cpu":  # where NaN of rows that do not count would reach products: 0 * NaN is NaN
            self.x = self.x.masked_fill(~self.valid[chunk, None], 0)
        buffer = self.buffer[: self.x.shape[0]]
        if self.bias is None:
            return torch.mm(self.x, self.weight.T, out=buffer)
        return torch.addmm(self.bias, self.x, self.weight.T, out=buffer)

    def accumulate_gradient(self, chunk: slice, dlogits: Tensor) -> None:
        """To be called for each chunk in turn, with what has become of its logits."""
        if self.needs.hidden:
            torch.mm(dlogits, self.weight, out=self.dhidden[chunk])
        if self.needs.weight:
            _accumulate_(self.dweight, dlogits.T, self.x, first=chunk.start == 0)
        if self.needs.bias:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)

    def gradients(self) -> HeadGradients:
        """dhidden, dweight and dbias."""
        if self.hidden.shape[0] == 0:
            self.dweight.zero_()
        if self.needs.hidden and self.order is not None:
            self.dhidden = self.dhidden.new_zeros(self.shape).index_copy_(0, self.order, self.dhidden)
        return HeadGradients(self.dhidden, self.dweight, self.dbias)


def _chunks(n_rows: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, n_rows)) for start in range(0, n_rows, rows)]


def _accumulate_(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total (+)= a @ b, with the products summed in the dtype of `total`."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


class RaggedHead:
    """Sorts the rows that count to the front and computes those alone, though the host never learns how many.

    At least one row. Its attributes are those of `DenseHead`.
    """

    def __init__(
        self, inputs: HeadInputs, valid: Tensor, rows: int, needs: Needs, order: Tensor | None = None
    ) -> None:  # fmt: skip
        hidden, weight, bias = inputs
        self.hidden, self.weight, self.valid = hidden, weight, valid
        self.rows, self.needs, self.bias = rows, needs, bias
        n_rows = hidden.shape[0]
        self.chunks = _chunks(n_rows, rows)
        places = torch.arange(n_rows, device=hidden.device)
        if order is None:
            self.order = torch.argsort(valid.to(torch.uint8), descending=True, stable=True)
            self.end = valid.sum(dtype=torch.int32).view(1)
            ends = self.end.expand(len(self.chunks))
        else:
            is_last = ~valid[order]
            self.order = order[torch.argsort(places // rows * 2 + is_last, stable=True)]
            starts = places[::rows]
            present = torch.zeros_like(starts).index_add_(0, places // rows, (~is_last).long())
            ends = (starts + present).int()  # a row of the sweep valid if it stands before its chunk's
            self.end = torch.where(present > 0, ends, 0).max().view(1)
        self.ends = ends[:, None].repeat(1, 4)  # one at each multiple of 16 bytes, as kernels like their pointers
        # Where no row stands that valid stands one more copy of one that does: it meets zeros, so it must be finite.
        is_there = places < ends[places // rows]
        first = is_there.byte().argmax().view(1)
        self.source = torch.where(is_there, self.order, self.order[first])
        self.x = hidden.new_empty((min(rows, n_rows), hidden.shape[1]))  # of the present chunk
        self.buffer = ragged_gemm.row_buffer(hidden, min(rows, n_rows), weight.shape[0])
        self.dhidden = hidden.new_empty(hidden.shape if needs.hidden else (0,))
        self.dweight = WeightGradAccumulator(weight, n_rows, rows) if needs.weight else None
        self.dbias = weight.new_zeros(weight.shape[:1] if needs.bias else (0,), dtype=torch.float32)

    def count(self, chunk: slice) -> Tensor:
        return self.ends[chunk.start // self.rows, :1]

    def logits(self, chunk: slice) -> Tensor:
        self.x = self.x[: chunk.stop - chunk.start]  # only the last chunk is shorter
        torch.index_select(self.hidden, 0, self.source[chunk], out=self.x)
        logits = self.buffer[: self.x.shape[0]]
        ragged_gemm.matmul_(logits, self.x, self.weight.T, self.count(chunk), chunk.start, bias=self.bias)
        return logits

    def accumulate_gradient(self, chunk: slice, dlogits: Tensor) -> None:
        count = self.count(chunk)
        if self.needs.hidden:
            ragged_gemm.matmul_(self.dhidden, dlogits, self.weight, count, chunk.start, self.order)
        if self.dweight is not None:
            self.dweight.add_(dlogits, self.x, count, self.end, chunk.start)
        if self.needs.bias:
            valid = torch.arange(chunk.start, chunk.stop, device=dlogits.device)[:, None] < count
            self.dbias += torch.where(valid, dlogits, 0).sum(0, dtype=torch.float32)

    def gradients(self) -> HeadGradients:
        if self.needs.hidden:
            self.dhidden.masked_fill_(~self.valid[:, None], 0)
        dweight = self.weight.new_empty((0,)) if self.dweight is None else self.dweight.result()
        return HeadGradients(self.dhidden, dweight, self.dbias)

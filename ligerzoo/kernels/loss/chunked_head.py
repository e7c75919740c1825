"""The matrix products of a loss head, in chunks of rows: logits, and the gradients of the head's inputs.

A head computes a chunk's logits, x @ weight.T. From their gradient it computes dx = dlogits @ weight, and accumulates
dweight, the sum over the chunks of dlogits.T @ x, in at least 24 bits. There are two: `DenseHead` for any device and
dtype, and `RaggedHead` for bf16 on Hopper GPUs, which computes valid rows only (`ragged_gemm`, `wgrad_accumulator`).

By default a head chooses the order of the rows. A given order keeps row i of that order in chunk i // rows: a head then
only moves valid rows to the front of their chunk. So the rows of one chunk stay together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.checks import check, integer
from ligerzoo.kernels.dispatch import accumulation_dtype, cdiv, multiprocessors
from ligerzoo.kernels.loss import ragged_gemm
from ligerzoo.kernels.loss.row_kernel import Rows
from ligerzoo.kernels.loss.wgrad_accumulator import COLUMN_MULTIPLE, WeightGradAccumulator, low_bytes


class HeadInputs(NamedTuple):
    """The inputs of a head: logits = hidden @ weight.T + bias.

    Attributes:
        hidden: (M, H) hidden states.
        weight: (V, H).
        bias: (V,), added to the logits, or None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


class Needs(NamedTuple):
    """Which gradients to compute. The other gradients are empty tensors."""

    hidden: bool
    weight: bool
    bias: bool = False


def head_flops(hidden: Tensor, weight: Tensor, needs: Needs) -> int:
    """Counts the operations of a head's products, with those of ignored rows: logits, dhidden and dweight."""
    return 2 * hidden.shape[0] * weight.numel() * (1 + needs.hidden + needs.weight)


_logits_budget = 512


def set_logits_budget(mebibytes: int) -> None:
    """Sets the default `logits_budget`: how many MiB of logits exist at a time (initially 512; at least one row).

    Raises:
        TypeError: `mebibytes` is not an integer.
        ValueError: `mebibytes` is negative.
    """
    global _logits_budget
    check("set_logits_budget", integer(0, unit=" of MiB"), mebibytes=mebibytes)
    _logits_budget = mebibytes


def check_budget(name: str, logits_budget: int | None) -> None:
    """Raises unless the budget is None or an integer, 0 or more."""
    if logits_budget is not None:
        check(name, integer(0, unit=" of MiB"), logits_budget=logits_budget)


def max_rows(n_classes: int, bytes_per_logit: int, budget: int | None) -> int:
    """Returns the number of rows whose logits fit the budget; possibly 0."""
    budget = _logits_budget if budget is None else budget
    return budget * 2**20 // (max(1, n_classes) * bytes_per_logit)


def rows_per_chunk(hidden: Tensor, n_classes: int, bytes_per_logit: int, budget: int | None) -> int:
    """Returns the number of rows of (M, H) hidden states per chunk, such that their logits fit the budget.

    If the budget allows 128 rows (a tile of the matrix products), it is a multiple of 128. It minimizes the waves of
    tiles of dhidden, whose programs run longest.
    """
    n_rows, hidden_size = hidden.shape
    most = max(1, max_rows(n_classes, bytes_per_logit, budget))
    if n_rows <= most or most < 128:
        return max(1, min(n_rows, most))
    tiles_per_128_rows, tiles_per_wave = cdiv(hidden_size, 256), multiprocessors(hidden)

    def waves(rows: int) -> int:
        return cdiv(n_rows, rows) * cdiv(cdiv(rows, 128) * tiles_per_128_rows, tiles_per_wave)

    candidates = range(128, most + 1, 128)
    fewest = min(map(waves, candidates))
    return max(rows for rows in candidates if waves(rows) <= 1.1 * fewest)


def _supports_ragged(*weights: Tensor) -> bool:
    return all(ragged_gemm.supports(weight) and weight.shape[1] % COLUMN_MULTIPLE == 0 for weight in weights)


def gradient_dtype(*weights: Tensor) -> torch.dtype:
    """Returns the dtype in which the head of the first weight returns dweight."""
    return weights[0].dtype if _supports_ragged(*weights) else accumulation_dtype(weights[0].dtype)


def head_type(n_rows: int, *weights: Tensor) -> type[DenseHead] | type[RaggedHead]:
    """Returns the class of head for `n_rows` rows. Heads that process the same rows together share a class."""
    return RaggedHead if n_rows and _supports_ragged(*weights) else DenseHead


def head_workspace(hidden: Tensor, weight: Tensor, rows: int, needs: Needs) -> int:
    """Counts the bytes of a chunk's rows and logits on a GPU, and of what accumulates dweight but is not returned."""
    n_rows, (n_classes, width) = len(hidden), weight.shape
    rows = min(rows, n_rows)
    chunk = rows * (cdiv(n_classes, 8) * 8 + width) * hidden.element_size()
    is_ragged = head_type(n_rows, weight) is RaggedHead
    accumulator = low_bytes(weight) if is_ragged and needs.weight and rows < n_rows else 0
    order = 6 * 8 * n_rows if is_ragged else 0  # int64: positions, the order of the rows and its sort, their source
    return chunk + accumulator + order


class HeadGradients(NamedTuple):
    """The gradients of `HeadInputs`; empty tensors where not needed."""

    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor


def gradients_of(inputs: Sequence[Tensor | None], gradients: Sequence[Tensor], needs: Needs) -> list[Tensor | None]:
    """Returns what a backward returns for a head's inputs: the needed gradients in their dtypes, and None."""
    triples = zip(inputs, gradients, needs, strict=True)
    return [g.to(x.dtype) if needed and x is not None else None for x, g, needed in triples]


class _Head:
    """A loss head that processes rows in chunks.

    Args:
        inputs: the hidden states, weight and bias.
        valid: (M,) bool, False for ignored rows.
        rows: rows per chunk.
        needs: which gradients to compute.
        order: (M,) int64, the order of the rows; see the file's docstring. None lets the head choose.

    Attributes:
        chunks: slices of the rows in the head's order; on a CPU with a given order, a chunk may be empty.
        order: row i in the head's order is row order[i] of `hidden`; None for the order of `hidden`.
    """

    chunks: list[slice]
    order: Tensor | None

    def tokens(self, chunk: slice) -> slice | Tensor:
        """Returns the index of a chunk's rows among those of `hidden`."""
        return chunk if self.order is None else self.order[chunk]

    def rows(self, chunk: slice) -> Rows:
        """Returns a chunk's rows for `compute_rows_`."""
        return Rows(chunk.start, self.order)


class DenseHead(_Head):
    """Computes all rows. On a CPU, where reading `valid` needs no host sync, it computes valid rows only."""

    def __init__(self, inputs: HeadInputs, valid: Tensor, rows: int, needs: Needs, order: Tensor | None = None) -> None:
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

    def logits(self, chunk: slice) -> Tensor:
        """Returns a chunk's logits, (rows, V), in a buffer that the next call overwrites."""
        self.x = self.hidden[chunk]
        if self.x.device.type != "cpu":  # NaN in ignored rows would reach dweight: 0 * NaN is NaN
            self.x = self.x.masked_fill(~self.valid[chunk, None], 0)
        buffer = self.buffer[: self.x.shape[0]]
        if self.bias is None:
            return torch.mm(self.x, self.weight.T, out=buffer)
        return torch.addmm(self.bias, self.x, self.weight.T, out=buffer)

    def accumulate_gradient(self, chunk: slice, dlogits: Tensor) -> None:
        """Computes the chunk's part of the gradients. Call it for each chunk in order, after `logits`."""
        if self.needs.hidden:
            torch.mm(dlogits, self.weight, out=self.dhidden[chunk])
        if self.needs.weight:
            _accumulate_(self.dweight, dlogits.T, self.x, first=chunk.start == 0)
        if self.needs.bias:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)

    def gradients(self) -> HeadGradients:
        """Returns the gradients of all rows; those of ignored rows are 0."""
        if self.hidden.shape[0] == 0:
            self.dweight.zero_()
        if self.needs.hidden and self.order is not None:
            self.dhidden = self.dhidden.new_zeros(self.shape).index_copy_(0, self.order, self.dhidden)
        return HeadGradients(self.dhidden, self.dweight, self.dbias)


def _chunks(n_rows: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, n_rows)) for start in range(0, n_rows, rows)]


def _accumulate_(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Adds a @ b to `total`, in the dtype of `total`; the first product overwrites it."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


class RaggedHead(_Head):
    """Moves valid rows to the front and computes only those, without a host sync to count them.

    There must be at least one row.
    """

    order: Tensor

    def __init__(self, inputs: HeadInputs, valid: Tensor, rows: int, needs: Needs, order: Tensor | None = None) -> None:
        hidden, weight, bias = inputs
        self.hidden, self.weight, self.valid = hidden, weight, valid
        self.rows_per_chunk, self.needs, self.bias = rows, needs, bias
        n_rows = hidden.shape[0]
        self.chunks = _chunks(n_rows, rows)
        positions = torch.arange(n_rows, device=hidden.device)
        if order is None:
            self.order = torch.argsort(valid.to(torch.uint8), descending=True, stable=True)
            self.end = valid.sum(dtype=torch.int32).view(1)
            ends = self.end.expand(len(self.chunks))
        else:
            is_ignored = ~valid[order]
            self.order = order[torch.argsort(positions // rows * 2 + is_ignored, stable=True)]
            starts = positions[::rows]
            n_valid = torch.zeros_like(starts).index_add_(0, positions // rows, (~is_ignored).long())
            ends = (starts + n_valid).int()  # one more than the index of the chunk's last valid row
            self.end = torch.where(n_valid > 0, ends, 0).max().view(1)
        self.ends = ends[:, None].repeat(1, 4)  # each aligned to 16 bytes: kernels specialize on alignment
        # Copies of a valid row replace the ignored rows. Products multiply them by zeros, so they must be finite.
        is_valid = positions < ends[positions // rows]
        first = is_valid.byte().argmax().view(1)
        self.source = torch.where(is_valid, self.order, self.order[first])
        self.x = hidden.new_empty((min(rows, n_rows), hidden.shape[1]))  # of the current chunk
        self.buffer = ragged_gemm.row_buffer(hidden, min(rows, n_rows), weight.shape[0])
        self.dhidden = hidden.new_empty(hidden.shape if needs.hidden else (0,))
        self.dweight = WeightGradAccumulator(weight, n_rows, rows) if needs.weight else None
        self.dbias = weight.new_zeros(weight.shape[:1] if needs.bias else (0,), dtype=torch.float32)

    def rows(self, chunk: slice) -> Rows:
        return Rows(chunk.start, self.order, self.count(chunk))

    def count(self, chunk: slice) -> Tensor:
        """Returns the end of the chunk's valid rows, (1,) int32."""
        return self.ends[chunk.start // self.rows_per_chunk, :1]

    def logits(self, chunk: slice) -> Tensor:
        self.x = self.x[: chunk.stop - chunk.start]  # only the last chunk is shorter
        torch.index_select(self.hidden, 0, self.source[chunk], out=self.x)
        logits = self.buffer[: self.x.shape[0]]
        ragged_gemm.matmul_(logits, self.x, self.weight.T, Rows(chunk.start, end=self.count(chunk)), self.bias)
        return logits

    def accumulate_gradient(self, chunk: slice, dlogits: Tensor) -> None:
        count = self.count(chunk)
        if self.needs.hidden:
            ragged_gemm.matmul_(self.dhidden, dlogits, self.weight, self.rows(chunk))
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

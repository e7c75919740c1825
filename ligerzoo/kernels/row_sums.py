"""Whether products of few rows may split their sums among multiprocessors.

cuBLAS computes a product x W^T with one sum per output, over the features in order, unless x has so few rows that some
multiprocessors would be idle. Then it may split the sums and add up the parts. The rounding of a row then depends on
the number of rows in the call: by a few bits, a token has other logits alone than within a text. So sums are split only
where `split_row_sums` allows it, as decoding does: each row of a result then has the same bits in every call.

torch has an option against split sums, for the products that it leaves to cuBLASLt. For others it raises under this
option: those of a single output, a bias with strides, or, in newer versions, a single row. A kernel computes these, and
all products of up to 64 outputs, which cuBLAS sums in an order that depends on the number of rows, however large it is.
So does it where rows of x or of the result are not aligned to 16 bytes: zeros complete the features to a multiple of 8,
and the kernel computes the outputs beyond one.

This holds on Hopper GPUs in bf16. Calls in other dtypes, with tensor subclasses, under autocast or in compiled code are
left to torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.kernels.autograd import FusedContext, FusedFunction
from ligerzoo.kernels.dispatch import as_rows, cdiv, padded_size
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.low_rank_gradients import scaled_product
from ligerzoo.kernels.registration import register

_MIN_FEATURES = 2048  # cuBLAS does not split shorter sums: measured on an H200 for 512 to 4096 outputs
_MAX_ROWS = 2048  # nor those of more rows: for 512 to 14336 outputs of up to 25600 features it stops at 700
_MANY_OUTPUTS = 1024  # with fewer outputs, as many more rows may be split
_FEW_OUTPUTS = 64  # of products that the kernel computes for any number of rows
_FEW_ROWS = 64  # of sums with a low-rank term that the kernel computes for any number of outputs
_ALIGNMENT = 8  # numbers in 16 bytes
_PLAIN = {Tensor, nn.Parameter}
_HAS_CUBLASLT = os.environ.get("DISABLE_ADDMM_CUDA_LT") != "1"  # torch reads it once, too

_SPLITS: ContextVar[bool] = ContextVar("_SPLITS", default=False)
_LOCK = threading.Lock()


@contextmanager
def split_row_sums(allowed: bool = True) -> Iterator[None]:
    """Allows products of few rows to split their sums, within the context of the current thread."""
    token = _SPLITS.set(allowed)
    try:
        yield
    finally:
        _SPLITS.reset(token)


def splits_row_sums() -> bool:
    """Whether products of few rows may split their sums."""
    return torch.compiler.is_compiling() or _SPLITS.get()


def would_split(x: Tensor, weight: Tensor) -> bool:
    """Whether cuBLAS may sum in `x @ weight.T` in an order that depends on the rows, where that is not allowed."""
    if not (x.dtype == torch.bfloat16 == weight.dtype and x.is_cuda) or splits_row_sums():
        return False
    outputs, features = weight.shape
    is_irregular = outputs <= _FEW_OUTPUTS or outputs % _ALIGNMENT != 0 or features % _ALIGNMENT != 0
    return (
        (is_irregular or features > _MIN_FEATURES)
        and (is_irregular or _leaves_multiprocessors_idle(x.numel() // features, outputs))
        and x.numel() > 0
        and {type(x), type(weight)} <= _PLAIN
        and not torch.is_autocast_enabled("cuda")
    )


def _leaves_multiprocessors_idle(n_rows: int, outputs: int) -> bool:
    return n_rows * min(outputs, _MANY_OUTPUTS) < _MAX_ROWS * _MANY_OUTPUTS


def _aligned(t: Tensor) -> Tensor:
    """The tensor in a layout that cuBLASLt reads in every version of torch."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


class LowRankTerm(NamedTuple):
    """An addend, scale * h @ b.T, rounded before it is added.

    Attributes:
        h: (R, r), in the dtype of the sum; None for no addend.
        b: (N, r), contiguous, of any dtype: rounded to that of h.
        scale: factor.
    """

    h: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0

    @property
    def rank(self) -> int | None:
        """r; None for no addend."""
        return None if self.b is None else self.b.shape[1]

    def for_kernel(self) -> _Low:
        """Returns the addend as kernels read it."""
        h = None if self.h is None else as_rows(self.h)
        return _Low(h, self.b, 0 if h is None else h.stride(0), self.scale)


class _Low(NamedTuple):
    h: Tensor | None
    b: Tensor | None
    h_stride: int
    scale: float


@jit
def _rounded_term(low, rows, in_rows, cols, in_cols, RANK: tl.constexpr, INNER: tl.constexpr):
    """A tile of a `LowRankTerm`, rounded, in fp32."""
    inner = tl.arange(0, INNER)
    h_ptrs = low.h + rows[:, None] * low.h_stride + inner[None, :]
    b_ptrs = low.b + cols[None, :] * RANK + inner[:, None]
    dtype = low.h.dtype.element_ty
    h = tl.load(h_ptrs, mask=in_rows[:, None] & (inner < RANK)[None, :], other=0.0)
    b = tl.load(b_ptrs, mask=in_cols[None, :] & (inner < RANK)[:, None], other=0.0).to(dtype)
    term = tl.dot(h, b)
    for start in range(INNER, RANK, INNER):
        in_rank = start + inner < RANK
        h = tl.load(h_ptrs + start, mask=in_rows[:, None] & in_rank[None, :], other=0.0)
        b = tl.load(b_ptrs + start, mask=in_cols[None, :] & in_rank[:, None], other=0.0).to(dtype)
        term = tl.dot(h, b, term)
    return (low.scale * term).to(dtype).to(tl.float32)


@kernel(unspecialized=("n_rows",))
def _product_kernel(
    x_ptr, w_ptr, bias_ptr, low, y_ptr, n_rows, n_outputs, n_features, x_stride, w_stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    col_tiles = tl.cdiv(n_outputs, COLS)
    rows = (tl.program_id(0) // col_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = (tl.program_id(0) % col_tiles).to(tl.int64) * COLS + tl.arange(0, COLS)
    inner = tl.arange(0, INNER)
    in_rows, in_cols = rows < n_rows, cols < n_outputs
    x_ptrs = x_ptr + rows[:, None] * x_stride + inner[None, :]
    w_ptrs = w_ptr + cols[None, :] * w_stride + inner[:, None]
    y = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, n_features, INNER):
        in_row = start + inner < n_features
        x = tl.load(x_ptrs + start, mask=in_rows[:, None] & in_row[None, :], other=0.0)
        w = tl.load(w_ptrs + start, mask=in_cols[None, :] & in_row[:, None], other=0.0)
        y = tl.dot(x, w, y)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=in_cols, other=0.0).to(tl.float32)[None, :]
    if RANK is not None:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        y += _rounded_term(low, rows, in_rows, cols, in_cols, RANK, RANKS)
    y_ptrs = y_ptr + rows[:, None] * n_outputs + cols[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


class _Tiling(NamedTuple):
    rows: int
    outputs: int
    features: int
    warps: int
    stages: int


def _tiling(n_rows: int, n_outputs: int) -> _Tiling:
    """Of few rows, tiles are narrow, so that there are many."""
    if n_rows <= _FEW_ROWS:
        return _Tiling(64, 16, 256, 4, 3) if n_outputs <= _FEW_OUTPUTS else _Tiling(64, 32, 128, 4, 4)
    return _Tiling(64, padded_size(n_outputs), 128, 4, 3) if n_outputs <= _FEW_OUTPUTS else _Tiling(128, 128, 64, 8, 3)


@register(
    "ordered_product",
    fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]),
    flops=lambda x, weight: 2 * x.numel() * len(weight),
)
def _ordered_product(x: Tensor, weight: Tensor, bias: Tensor | None, term: LowRankTerm) -> Tensor:
    """(R, K), (N, K) -> (R, N) in half precision: one sum per number, over the features in order."""
    x, weight, bias = as_rows(x), as_rows(weight), None if bias is None else bias.contiguous()
    y, tiling = x.new_empty(len(x), len(weight)), _tiling(len(x), len(weight))
    _product_kernel[cdiv(len(x), tiling.rows) * cdiv(len(weight), tiling.outputs)](
        x, weight, bias, term.for_kernel(), y, *y.shape, x.shape[1], x.stride(0), weight.stride(0), term.rank,
        _ranks(term), *tiling[:3], num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return y


def _ranks(term: LowRankTerm) -> int:
    """Columns of h that a kernel multiplies at a time."""
    return min(64, padded_size(term.rank or 1))


@kernel(unspecialized=("n_rows",))
def _add_kernel(x_ptr, low, y_ptr, n_rows, n_cols, x_stride, RANK: tl.constexpr, TILE: tl.constexpr):
    RANKS: tl.constexpr = TILE[0]
    ROWS: tl.constexpr = TILE[1]
    COLS: tl.constexpr = TILE[2]
    col_tiles = tl.cdiv(n_cols, COLS)
    rows = (tl.program_id(0) // col_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = (tl.program_id(0) % col_tiles).to(tl.int64) * COLS + tl.arange(0, COLS)
    in_rows, in_cols = rows < n_rows, cols < n_cols
    mask = in_rows[:, None] & in_cols[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    y = x + _rounded_term(low, rows, in_rows, cols, in_cols, RANK, RANKS)
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@register(
    "add_low_rank_term",
    fake=lambda x: x.new_empty(x.shape),
    flops=lambda x, term: 2 * x.numel() * term.b.shape[1],
)
def _add_low_rank_term(x: Tensor, term: LowRankTerm) -> Tensor:
    """x: (R, N) in half precision, plus the term."""
    x = as_rows(x)
    y, rows, cols = x.new_empty(x.shape), 32, 128
    _add_kernel[cdiv(len(x), rows) * cdiv(x.shape[1], cols)](
        x, term.for_kernel(), y, *x.shape, x.stride(0), term.rank, (_ranks(term), rows, cols), num_warps=4
    )
    return y


class _OrderedProduct(FusedFunction):
    """Its backward is of differentiable products, so second derivatives are those of `linear`."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _ordered_product(x, weight, bias, LowRankTerm())

    @staticmethod
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return dy @ weight if needs_x else None, dy.T @ x if needs_weight else None, dy.sum(0) if needs_bias else None


def unsplit_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` that splits sums only where it is allowed."""
    if not would_split(x, weight) or not (bias is None or bias.shape == weight.shape[:1]):
        return F.linear(x, weight, bias)  # which refuses a bias of another length: the kernel would read beyond it
    outputs, features = weight.shape
    in_kernel = outputs <= _FEW_OUTPUTS or x.numel() == features or not _HAS_CUBLASLT
    if not in_kernel and (beyond := outputs % _ALIGNMENT):
        sizes = [outputs - beyond, beyond]
        biases = (None, None) if bias is None else bias.split(sizes)
        parts = zip(weight.split(sizes), biases, strict=True)
        return torch.cat([unsplit_linear(x, *part) for part in parts], -1)
    if not in_kernel and (missing := -features % _ALIGNMENT):
        return unsplit_linear(F.pad(x, (0, missing)), F.pad(weight, (0, missing)), bias)
    rows, shape = x.reshape(-1, features), (*x.shape[:-1], outputs)
    if in_kernel:
        return _OrderedProduct.apply(rows, weight, bias).view(shape)
    if bias is None:  # torch leaves only products with a bias to cuBLASLt
        bias = x.new_zeros(outputs)
    options = torch.backends.cuda.matmul
    with _LOCK:  # the option belongs to the process
        before = (
            options.allow_bf16_reduced_precision_reduction,
            options.allow_bf16_reduced_precision_reduction_split_k,
        )
        options.allow_bf16_reduced_precision_reduction = (False, False)
        try:
            return torch.addmm(_aligned(bias), _aligned(rows), _aligned(weight).T).view(shape)
        finally:
            options.allow_bf16_reduced_precision_reduction = before


def unsplit_linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """`unsplit_linear` of each weight."""
    return tuple([unsplit_linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)])


def unsplit_sum(x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, scale: float) -> Tensor:
    """Computes x @ weight.T + bias + scale * h @ b.T, and splits sums only where it is allowed.

    Where they are not split, the product with the bias and the term of h are rounded, then their sum is: with cuBLAS,
    which adds the term within the product, the bits would depend on the number of rows.

    Args:
        x: (R, K).
        weight: (N, K).
        bias: (N,) or None.
        h: (R, r), in the dtype of x.
        b: (N, r), of any dtype: rounded to that of x.
        scale: factor.
    """
    if not _keeps_order(x, weight):
        b = b.to(h.dtype)
        y = scaled_product(h, b.T, scale) if bias is None else torch.addmm(bias, h, b.T, alpha=scale)
        return torch.addmm(y, x, weight.T, out=y)
    term = LowRankTerm(h, b.contiguous(), scale)
    if len(x) <= _FEW_ROWS:
        return _ordered_product(x, weight, bias, term)
    return _add_low_rank_term(unsplit_linear(x, weight, bias), term)


def _keeps_order(x: Tensor, weight: Tensor) -> bool:
    """Whether sums of these tensors must not be split."""
    return (
        x.dtype == torch.bfloat16 == weight.dtype
        and x.is_cuda
        and x.numel() > 0
        and {type(x), type(weight)} <= _PLAIN
        and not splits_row_sums()
        and not torch.is_autocast_enabled("cuda")
    )

"""Whether products of few rows may split their sums among multiprocessors.

cuBLAS computes a product x W^T with one sum per output, over the features in order, unless x has so few rows that some
multiprocessors would be idle. Then it may split the sums and add up the parts. The rounding of a row then depends on
the number of rows in the call: by a few bits, a token has other logits alone than within a text. So sums are split only
where `split_row_sums` allows it, as decoding does: each row of a result then has the same bits in every call.

This holds on Hopper GPUs in bf16. Calls in other dtypes, under autocast or in compiled code are left to torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

_MIN_FEATURES = 2048  # cuBLAS does not split shorter sums: measured on an H200 for 512 to 4096 outputs
_MAX_ROWS = 2048  # nor those of more rows: for 512 to 14336 outputs of up to 25600 features it stops at 700

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
    """Whether cuBLAS may split the sums of `x @ weight.T`, where that is not allowed."""
    return (
        x.dtype == torch.bfloat16 == weight.dtype
        and x.is_cuda
        and weight.shape[1] > _MIN_FEATURES
        and 0 < x.numel() < _MAX_ROWS * x.shape[-1]
        and not splits_row_sums()
        and not torch.is_autocast_enabled("cuda")
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` that splits sums only where it is allowed."""
    if not would_split(x, weight):
        return F.linear(x, weight, bias)
    if bias is None:  # torch has an option against splits, which only products with a bias accept
        bias = x.new_zeros(len(weight))
    options = torch.backends.cuda.matmul
    with _LOCK:  # the option belongs to the process
        before = (
            options.allow_bf16_reduced_precision_reduction,
            options.allow_bf16_reduced_precision_reduction_split_k,
        )
        options.allow_bf16_reduced_precision_reduction = (False, False)
        try:
            rows = x.reshape(-1, x.shape[-1]).contiguous()  # other strides may be refused
            return torch.addmm(bias, rows, weight.T).view(*x.shape[:-1], -1)
        finally:
            options.allow_bf16_reduced_precision_reduction = before

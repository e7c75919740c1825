"""Writes the keys and values of new tokens to a KV cache of fixed size, in one kernel.

    key_cache[b, :, positions[b, t]] = keys[b, t],  and the same for the values

In place, without a host sync: a captured CUDA graph writes to other positions in each replay. Not differentiable. A
cache in fp8 gets the keys and values rounded, see `fp8`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, next_power_of_2, uses_triton
from ligerzoo.kernels.fp8 import FP8, as_bytes, is_supported, saturated, to_storage
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import needs_dispatch
from ligerzoo.kernels.strided import StridedFeatures, strided_cache
from ligerzoo.tensor_checks import check_floats, check_tensor, shape_or_dtype_error


def reference(key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
    """`write_to_cache` in plain torch: the specification, the CPU path and the test oracle."""
    row = torch.arange(len(keys), device=keys.device)[:, None]
    for cache, new in ((key_cache, keys), (value_cache, values)):
        as_bytes(cache).transpose(1, 2)[row, positions] = as_bytes(to_storage(new, cache.dtype))


@jit
def _copy_heads(x, cache, batch, token, position, n_heads, head_dim, HEADS: tl.constexpr, DIM: tl.constexpr):
    heads = tl.arange(0, HEADS)[:, None].to(tl.int64)
    features = tl.arange(0, DIM)[None, :]
    mask = (heads < n_heads) & (features < head_dim)
    source = x.ptr + batch * x.batch_stride + token * x.token_stride
    target = cache.ptr + batch * cache.batch_stride + position * cache.token_stride
    values = tl.load(source + heads * x.head_stride + features * x.feature_stride, mask=mask)
    if cache.ptr.dtype.element_ty != values.dtype:
        values = saturated(values).to(cache.ptr.dtype.element_ty)
    tl.store(target + heads * cache.head_stride + features, values, mask=mask)


@kernel
def _kernel(
    k, v, key_cache, value_cache, positions_ptr, positions_stride, n_tokens, n_heads, key_dim, value_dim,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // n_tokens, row % n_tokens
    position = tl.load(positions_ptr + batch * positions_stride + token)
    _copy_heads(k, key_cache, batch, token, position, n_heads, key_dim, HEADS, KEY_DIM)
    _copy_heads(v, value_cache, batch, token, position, n_heads, value_dim, HEADS, VALUE_DIM)


def write_to_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Writes new keys and values to a KV cache, in place.

    Args:
        key_cache: (B, K, S, D), adjacent features, in the dtype of `keys` or float8_e4m3fn. The cast saturates. GPUs of
            compute capability below 8.9 cast by the reference.
        value_cache: (B, K, S, E), adjacent features, in the dtype of `key_cache`. E is D, except for latent attention.
        keys: (B, T, K, D), any strides.
        values: (B, T, K, E), any strides, in the dtype of `keys`.
        positions: (B, T) int64, from 0 to S - 1, adjacent tokens; not checked on a GPU.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Raises:
        ValueError: the shapes or dtypes do not match.
    """
    tensors = key_cache, value_cache, keys, values, positions
    check_floats("write_to_cache", key_cache=key_cache, value_cache=value_cache, keys=keys, values=values)
    check_tensor("write_to_cache", "positions", positions, "integer")
    batch, tokens, heads, key_dim = keys.shape if keys.dim() == 4 else (0, 0, 0, 0)
    value_dim = values.shape[-1]
    capacity = key_cache.shape[2:3]
    is_valid = (
        values.shape == (batch, tokens, heads, value_dim)
        and key_cache.shape == (batch, heads, *capacity, key_dim)
        and value_cache.shape == (batch, heads, *capacity, value_dim)
        and positions.shape == (batch, tokens)
        and key_cache.dtype == value_cache.dtype
        and keys.dtype == values.dtype
        and key_cache.dtype in (keys.dtype, FP8)
    )
    if not is_valid:
        expected = (
            "(B, K, S, D), (B, K, S, E), (B, T, K, D) and (B, T, K, E), in one dtype or with caches in float8_e4m3fn, "
            "and (B, T)"
        )
        names = "key_cache", "value_cache", "keys", "values", "positions"
        raise shape_or_dtype_error("write_to_cache", expected, **dict(zip(names, tensors, strict=True)))
    is_read = key_cache.dtype == FP8 and is_supported(key_cache)
    if not uses_triton(*tensors[2 if is_read else 0 : 4], backend=backend) or needs_dispatch(*tensors):
        reference(*tensors)
        return
    new = (StridedFeatures(x, *x.stride()) for x in (keys, values))
    caches = strided_cache(key_cache), strided_cache(value_cache)
    sizes = heads, key_dim, value_dim
    with torch.cuda.device(keys.device if keys.is_cuda else -1):
        _kernel[batch * tokens](
            *new, *caches, positions, positions.stride(0), tokens, *sizes, *map(next_power_of_2, sizes)
        )

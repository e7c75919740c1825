"""Causal attention within the documents of packed rows, by torch's kernels for whole texts.

    y_t = softmax(q_t k_s * scale over s) v_s     for the tokens s <= t of the document of t

Documents of similar length are gathered into batches, with padding on their right (`packing`). A causal kernel gives a
token the same bits whatever follows it, so padding costs time and changes nothing: with cuDNN on Hopper GPUs, each
document has the bits that it has alone. Outputs go back to the rows, and so do gradients in backward. A document of
one token needs no kernel: y = v.

With sinks, see `attention_sinks`: the output and the logsumexp that backward gets are those with the sink.

Saved: q, k, v and y, in rows, and the logsumexp of each query. Backward gathers them again.

Shapes: B rows, T tokens of a row, N query heads, K key heads, D features of a query and a key, V of a value, S slots:
the tokens of all batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.checks import AT_LEAST_1, check, or_none
from ligerzoo.kernels.attention_sinks import add_sinks, sink_gradient, sink_gradients
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable, under_transform
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, cdiv, uses_triton
from ligerzoo.kernels.fused_attention import TorchAttention, attention_kernel, has_windows
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.packing import Packing
from ligerzoo.kernels.registration import register
from ligerzoo.tensor_checks import check_floats, check_optional_floats

_ROWS, _COLS = 4, 1024
"""Tokens and features of a program that moves them."""


def reference(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """`packed_attention` in plain torch, with the scores of all pairs."""
    wide, group = accumulation_dtype(q.dtype), q.shape[2] // k.shape[2]
    slots = packing.slots.flatten()
    document = -1 - torch.arange(len(slots), device=q.device)  # a document each
    sizes = [length for documents, length in packing.batches.tolist() for _ in range(documents)]
    of_slot = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64)).to(q.device)
    in_batch = slots >= 0
    document[in_batch] = of_slot[slots[in_batch]]
    document = document.view(q.shape[:2])
    visible = (document[:, :, None] == document[:, None]).tril()[:, None]
    keys, values = (x.transpose(1, 2).to(wide).repeat_interleave(group, 1) for x in (k, v))
    scores = q.transpose(1, 2).to(wide) @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : q.shape[1]] @ values).transpose(1, 2).to(q.dtype)


class _Moved(NamedTuple):
    """Rows of a matrix, and the matrix to which they go."""

    source: Tensor
    target: Tensor
    source_stride: int
    n_features: int
    blocks: int


@jit
def _copy_rows(x, rows, in_rows, index, block, COLS: tl.constexpr):
    cols = block * COLS + tl.arange(0, COLS)
    in_cols = (cols < x.n_features)[None, :]
    mask = (index >= 0)[:, None] & in_cols
    moved = tl.load(x.source + index[:, None] * x.source_stride + cols[None, :], mask=mask, other=0.0)
    tl.store(x.target + rows[:, None] * x.n_features + cols[None, :], moved, mask=in_rows[:, None] & in_cols)


@kernel(unspecialized=("n_rows",))
def _gather_kernel(first, second, third, index_ptr, n_rows, ROWS: tl.constexpr, COLS: tl.constexpr):
    row_blocks = tl.cdiv(n_rows, ROWS)
    rows = (tl.program_id(0) % row_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) // row_blocks
    in_rows = rows < n_rows
    index = tl.load(index_ptr + rows, mask=in_rows, other=-1).to(tl.int64)
    if block < first.blocks:
        _copy_rows(first, rows, in_rows, index, block, COLS)
    elif block < first.blocks + second.blocks:
        _copy_rows(second, rows, in_rows, index, block - first.blocks, COLS)
    else:
        _copy_rows(third, rows, in_rows, index, block - first.blocks - second.blocks, COLS)


def _gather(tensors: Sequence[Tensor], index: Tensor, triton: bool) -> list[Tensor]:
    """Rows of matrices (R, F): (I, F) each, zeros where the index is negative."""
    if not triton:
        return [x[index.clamp(min=0)].masked_fill((index < 0)[:, None], 0) for x in tensors]
    results = [x.new_empty(len(index), x.shape[1]) for x in tensors]
    pairs = [
        _Moved(x, y, x.stride(0), x.shape[1], cdiv(x.shape[1], _COLS)) for x, y in zip(tensors, results, strict=True)
    ]
    row_blocks = cdiv(len(index), _ROWS)
    for i in range(0, len(pairs), 3):
        part = pairs[i : i + 3]
        programs = row_blocks * sum(pair.blocks for pair in part)
        part += [part[-1]._replace(blocks=0)] * (3 - len(part))
        _gather_kernel[programs](*part, index, len(index), _ROWS, _COLS, num_warps=4)
    return results


def _as_matrix(x: Tensor) -> Tensor:
    """(B, T, N, D) -> (B * T, N * D) with unit strides along rows, a view where the strides allow it."""
    x = x.flatten(2).flatten(0, 1)
    return x if x.stride(1) == 1 else x.contiguous()


def _heads_first(x: Tensor, start: int, documents: int, length: int, heads: int) -> Tensor:
    """The (documents, N, length, D) of a batch among the slots, (S, N * D), from `start` on."""
    features = x.shape[1]
    strides = length * features, features // heads, features, 1
    return x.as_strided((documents, heads, length, features // heads), strides, start * features)


def _to_rows(all_parts: Sequence[Sequence[Tensor]], packing: Packing, triton: bool) -> list[Tensor]:
    """(documents, N, length, D) of each batch -> (B * T, N * D), of several tensors; zeros for a token without slot."""
    matrices = [[x.transpose(1, 2).flatten(0, 1).flatten(1) for x in parts] for parts in all_parts]
    slots = [parts[0].contiguous() if len(parts) == 1 else torch.cat(parts) for parts in matrices]
    return _gather(slots, packing.slots.flatten(), triton)


class _Results(NamedTuple):
    """What backward reads of the results: (B, T, N, V) twice, and (B, N, T)."""

    dout: Tensor
    out: Tensor
    lse: Tensor


class _Alone(NamedTuple):
    """Tokens that see themselves alone, with key heads repeated: y = v without a sink."""

    tokens: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    kv_heads: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> _Alone:
        wide, group = accumulation_dtype(q.dtype), q.shape[2] // k.shape[2]
        q, k, v = (x.flatten(0, 1)[packing.alone].to(wide) for x in (q, k, v))
        return cls(packing.alone, q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), scale, k.shape[1])

    @property
    def scores(self) -> Tensor:
        """(A, N)."""
        return (self.q * self.k).sum(-1) * self.scale

    def gradients(self, results: _Results) -> tuple[Tensor, Tensor, Tensor]:
        """Those of q, k and v: (A, N, D), (A, K, D), (A, K, V)."""
        dout, out = (x.flatten(0, 1)[self.tokens].to(self.q.dtype) for x in results[:2])
        p = torch.exp(self.scores - results.lse.transpose(1, 2).flatten(0, 1)[self.tokens])
        dscores = (p * ((dout * self.v).sum(-1) - (dout * out).sum(-1)) * self.scale)[..., None]
        dk, dv = (x.unflatten(1, (self.kv_heads, -1)).sum(2) for x in (dscores * self.q, p[..., None] * dout))
        return dscores * self.k, dk, dv


def _allocate(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    rows, tokens, heads, _ = q.shape
    lse = q.new_empty((rows, heads, tokens), dtype=accumulation_dtype(q.dtype))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def _flops(q: Tensor, v: Tensor, packing: Packing) -> int:
    """Those of the products of whole texts, as torch counts them."""
    pairs = sum(documents * length * length for documents, length in packing.batches.tolist())
    return 2 * pairs * q.shape[2] * (q.shape[3] + v.shape[3])


def _backward_flops(q: Tensor, v: Tensor, packing: Packing) -> int:
    pairs = sum(documents * length * length for documents, length in packing.batches.tolist())
    return 2 * pairs * q.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])


@register("packed_attention", fake=_allocate, flops=_flops)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, attention: TorchAttention, triton: bool
) -> tuple[Tensor, Tensor]:
    """Returns the output, (B, T, N, V), and the logsumexp, (B, N, T)."""
    attention = attention.chosen(q, k, v)
    rows = _gather([_as_matrix(x) for x in (q, k, v)], packing.source, triton)
    outs, lses, start = [], [], 0
    for documents, length in packing.batches.tolist():
        operands = (
            _heads_first(x, start, documents, length, heads.shape[2]) for x, heads in zip(rows, (q, k, v), strict=True)
        )
        out, lse = attention.forward(*operands)
        outs.append(out)
        lses.append(lse[..., None])
        start += documents * length
    del rows, operands  # memory that the next copies need
    out, lse = _to_rows([outs, lses], packing, triton)
    out = out.view(-1, q.shape[2], v.shape[3])
    alone = _Alone.of(q, k, v, packing, attention.scale)
    out[packing.alone], lse[packing.alone] = alone.v.to(out.dtype), alone.scores
    return out.view(*q.shape[:3], -1), lse.view(q.shape[:3]).transpose(1, 2).contiguous()


def _allocate_backward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@register("packed_attention_backward", fake=_allocate_backward, flops=_backward_flops)
def _backward(
    results: _Results, q: Tensor, k: Tensor, v: Tensor, packing: Packing, attention: TorchAttention, triton: bool
) -> tuple[Tensor, Tensor, Tensor]:
    attention, (dout, out, lse) = attention.chosen(q, k, v), results
    operands = [_as_matrix(x) for x in (dout, q, k, v, out, lse.transpose(1, 2)[..., None])]
    rows = _gather(operands, packing.source, triton)
    heads = [x.shape[2] for x in (dout, q, k, v, out, q)]
    gradients, start = [], 0
    for documents, length in packing.batches.tolist():
        batch = [_heads_first(x, start, documents, length, n) for x, n in zip(rows, heads, strict=True)]
        batch[-1] = batch[-1][..., 0].contiguous()
        gradients.append(attention.backward(*batch))
        start += documents * length
    del operands, rows, batch
    found = _to_rows(list(zip(*gradients, strict=True)), packing, triton)
    dq, dk, dv = (x.view(like.shape) for x, like in zip(found, (q, k, v), strict=True))
    alone = _Alone.of(q, k, v, packing, attention.scale).gradients(results)
    for x, gradient in zip((dq, dk, dv), alone, strict=True):
        x.flatten(0, 1)[packing.alone] = gradient.to(x.dtype)
    return dq, dk, dv


class _PackedAttention(FusedFunction):
    @staticmethod
    def forward(
        ctx: FusedContext,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        packing: Packing,
        attention: TorchAttention,
        triton: bool,
    ) -> Tensor:
        y, lse = _forward(q, k, v, packing, attention, triton)
        if sinks is not None:
            y = add_sinks(y, lse, sinks, triton)
        ctx.save_for_backward(q, k, v, sinks, y, lse, *packing)
        ctx.attention, ctx.triton = attention, triton
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, y, lse, *packing = ctx.saved_tensors
        dsinks = None
        if sinks is not None:
            dlse, lse = sink_gradients(dy, y, lse, sinks, ctx.triton)
            dsinks = sink_gradient(dlse, sinks) if ctx.needs_input_grad[3] else None
        gradients = _backward(_Results(dy, y, lse), q, k, v, Packing(*packing), ctx.attention, ctx.triton)
        return *gradients, dsinks, None, None, None


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Causal attention within the documents of packed rows, by a kernel of torch for whole texts.

    Args:
        q: (B, T, N, D), fp16 or bf16 on a GPU, fp32 or fp64 on a CPU.
        k: (B, T, K, D), K a divisor of N: query heads j*N/K to (j+1)*N/K - 1 share key head j.
        v: (B, T, K, V); V = D but for sizes that cuDNN accepts, such as D = 192 and V = 128.
        packing: from `pack_documents`, for B rows of T tokens.
        scale: factor of the scores; None for D^-0.5.
        window: tokens that a token attends to at most, including itself, with V = D = 64 or 128 in bf16 on a Hopper
            GPU; None for its whole document.
        sinks: (N,), for each head a logit that takes part in the softmax but has no value; None for none.
        backend: moves tokens and adds sinks by "auto" (Triton where supported), "triton" or "torch".

    Returns:
        (B, T, N, V), contiguous. A token of no document attends to itself.

    Raises:
        ValueError: the shapes do not match, or no kernel of torch supports the tensors.
    """
    check_floats("packed_attention", q=q, k=k, v=v)
    check_optional_floats("packed_attention", sinks=sinks)
    check("packed_attention", or_none(AT_LEAST_1), window=window)
    if (
        not q.dim() == k.dim() == v.dim() == 4
        or k.shape[:3] != v.shape[:3]
        or (k.shape[:2], k.shape[3]) != (q.shape[:2], q.shape[3])
        or not k.shape[2]
        or q.shape[2] % k.shape[2]
        or packing.slots.shape != q.shape[:2]
        or (sinks is not None and sinks.shape != q.shape[2:3])
    ):
        raise ValueError(
            f"packed_attention: q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, a packing of "
            f"{tuple(packing.slots.shape)} tokens and sinks {None if sinks is None else tuple(sinks.shape)}; expected "
            "(B, T, N, D), (B, T, K, D), (B, T, K, V), (B, T) tokens and (N,), N a multiple of K"
        )
    if not packing.slots.numel():  # gradients are zeros
        total = q.sum() + k.sum() + v.sum() + (0 if sinks is None else sinks.sum() * 0)
        return total.to(q.dtype).expand(*q.shape[:3], v.shape[3]).clone()
    # Dynamo cannot ask torch which kernel supports the tensors.
    name = "auto" if torch.compiler.is_compiling() else attention_kernel(q, k, v, is_causal=True)
    if name is None or (window is not None and not has_windows(q, v)):
        dtypes = ", ".join(str(dtype) for dtype in dict.fromkeys((q.dtype, k.dtype, v.dtype)))
        transform = " under a transform of torch.func or forward-mode differentiation" if under_transform() else ""
        raise ValueError(
            f"packed_attention: {dtypes} on {q.device} with head sizes {q.shape[-1]} and {v.shape[-1]}, "
            f"window={window}{transform}; expected one dtype, bf16 or fp16 and multiples of 8 on a GPU, or fp32 or "
            "fp64 and equal head sizes on a CPU, and no transform; with a window, bf16 and 64 or 128 on a Hopper GPU. "
            "Use ligerzoo.layers.attend with a mask"
        )
    attention = TorchAttention(name, q.shape[-1] ** -0.5 if scale is None else scale, True, window)
    return _PackedAttention.apply(q, k, v, sinks, packing, attention, uses_triton(q, k, v, backend=backend))

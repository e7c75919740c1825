"""Causal attention within the documents of packed rows, by torch's kernels for whole texts.

    y_t = softmax(q_t k_s * scale over s) v_s     for the tokens s <= t of the document of t

Documents of similar length are gathered into batches, with padding on their right (`packing`). A causal kernel gives a
token the same bits whatever follows it, so padding costs time and changes nothing: with cuDNN on Hopper GPUs, each
document has the bits that it has alone. Outputs go back to the rows, and so do gradients in backward. A document of
one token needs no kernel: y = v.

A batch may be read in place: then the tokens that follow a document in its row replace padding. No token of the
document attends to them, and their outputs are not written. In backward their gradients are 0, and their probabilities,
since their logsumexp is inf.

With sinks, see `attention_sinks`: the output and the logsumexp that backward gets are those with the sink.

Saved: q, k, v and y, in rows, and the logsumexp of each query. Backward gathers them again.

Shapes: B rows, T tokens of a row, N query heads, K key heads, D features of a query and a key, V of a value, S slots:
the tokens of all batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.checks import AT_LEAST_1, check, or_none
from ligerzoo.kernels.attention_sinks import add_sinks, sink_gradient, sink_gradients
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable, under_transform
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, next_power_of_2, uses_triton
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
    document = -1 - torch.arange(packing.rows * packing.tokens, device=q.device)  # a document each
    sizes = [length for documents, length, _ in packing.batches.tolist() for _ in range(documents)]
    of_slot = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64)).to(q.device)
    has_token = packing.source >= 0
    document[packing.source[has_token]] = of_slot[has_token]
    document = document.view(q.shape[:2])
    visible = (document[:, :, None] == document[:, None]).tril()[:, None]
    keys, values = (x.transpose(1, 2).to(wide).repeat_interleave(group, 1) for x in (k, v))
    scores = q.transpose(1, 2).to(wide) @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : q.shape[1]] @ values).transpose(1, 2).to(q.dtype)


class _Moved(NamedTuple):
    """Rows of tokens and of slots, some features of each."""

    tokens: Tensor
    slots: Tensor
    token_stride: int
    n_features: int
    blocks: int


class _MovedLse(NamedTuple):
    """The logsumexp of tokens, (B, N, T), and of slots, (documents, N, length)."""

    tokens: Tensor
    slots: Tensor
    n_heads: int


@jit
def _move_rows(x, rows, tokens, in_rows, block, GATHERS: tl.constexpr, COLS: tl.constexpr):
    cols = block * COLS + tl.arange(0, COLS)
    in_cols = (cols < x.n_features)[None, :]
    slot_ptrs = x.slots + rows[:, None] * x.n_features + cols[None, :]
    token_ptrs = x.tokens + tokens[:, None] * x.token_stride + cols[None, :]
    is_token = (tokens >= 0)[:, None] & in_cols
    if GATHERS:
        tl.store(slot_ptrs, tl.load(token_ptrs, mask=is_token, other=0.0), mask=in_rows[:, None] & in_cols)
    else:
        tl.store(token_ptrs, tl.load(slot_ptrs, mask=is_token, other=0.0), mask=is_token)


@kernel(unspecialized=("n_rows", "length", "n_tokens"))
def _move_kernel(
    first,
    second,
    third,
    lse,
    index_ptr,
    n_rows,
    length,
    n_tokens,
    GATHERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HEADS: tl.constexpr,
):
    row_blocks = tl.cdiv(n_rows, ROWS)
    rows = (tl.program_id(0) % row_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) // row_blocks
    in_rows = rows < n_rows
    tokens = tl.load(index_ptr + rows, mask=in_rows, other=-1).to(tl.int64)
    if block < first.blocks:
        _move_rows(first, rows, tokens, in_rows, block, GATHERS, COLS)
    elif block < first.blocks + second.blocks:
        _move_rows(second, rows, tokens, in_rows, block - first.blocks, GATHERS, COLS)
    elif block < first.blocks + second.blocks + third.blocks:
        _move_rows(third, rows, tokens, in_rows, block - first.blocks - second.blocks, GATHERS, COLS)
    elif lse is not None:
        heads = tl.arange(0, HEADS)
        in_heads = (heads < lse.n_heads)[None, :]
        slots = (rows // length * lse.n_heads * length + rows % length)[:, None] + heads[None, :] * length
        offsets = (tokens // n_tokens * lse.n_heads * n_tokens + tokens % n_tokens)[:, None] + heads[None, :] * n_tokens
        is_token = (tokens >= 0)[:, None] & in_heads
        if GATHERS:
            moved = tl.load(lse.tokens + offsets, mask=is_token, other=float("inf"))
            tl.store(lse.slots + slots, moved, mask=in_rows[:, None] & in_heads)
        else:
            tl.store(lse.tokens + offsets, tl.load(lse.slots + slots, mask=is_token, other=0.0), mask=is_token)


class _Tokens(NamedTuple):
    """A tensor of all tokens: (B * T, N * D) with unit strides along rows, a view of (B, T, N, D) where possible."""

    matrix: Tensor
    n_heads: int
    head_dim: int
    stride: int

    @classmethod
    def of(cls, x: Tensor) -> _Tokens:
        """x: (B, T, N, D)."""
        heads, head_dim = x.shape[2:]
        x = x.flatten(2).flatten(0, 1)
        x = x if x.stride(1) == 1 else x.contiguous()
        return cls(x, heads, head_dim, x.stride(0))

    def moved(self, slots: Tensor) -> _Moved:
        """To or from (documents, length, N, D), contiguous."""
        features = self.n_heads * self.head_dim
        return _Moved(self.matrix, slots, self.stride, features, -(-features // _COLS))


class _Batch(NamedTuple):
    """A batch of documents, see `Packing`."""

    source: Tensor
    documents: int
    length: int
    start: int
    n_tokens: int
    triton: bool

    @property
    def is_in_place(self) -> bool:
        """Whether tokens are read where they are."""
        return self.start >= 0

    def read_in_place(self, x: _Tokens) -> Tensor:
        """Returns (documents, N, length, D)."""
        sizes = self.documents, x.n_heads, self.length, x.head_dim
        strides = self.length * x.stride, x.head_dim, x.stride, 1
        return x.matrix.as_strided(sizes, strides, x.matrix.storage_offset() + self.start * x.stride)

    def gather(self, tensors: Sequence[_Tokens], lse: Tensor | None = None) -> list[Tensor]:
        """Copies tokens to (documents, N, length, D) each.

        The logsumexp, (B, N, T), comes last: (documents, N, length). Slots of padding have zeros, and inf there, so
        that their probabilities are 0 in backward.
        """
        sizes = self.documents, self.length
        slots = [x.matrix.new_empty((*sizes, x.n_heads, x.head_dim)) for x in tensors]
        moved = [x.moved(y) for x, y in zip(tensors, slots, strict=True)]
        found = [x.transpose(1, 2) for x in slots]
        if lse is None:
            self._move(moved, None, gathers=True)
            return found
        moved_lse = _MovedLse(lse, lse.new_empty(self.documents, lse.shape[1], self.length), lse.shape[1])
        self._move(moved, moved_lse, gathers=True)
        return [*found, moved_lse.slots]

    def scatter(self, pairs: Iterable[tuple[Tensor, _Tokens]], lse: tuple[Tensor, Tensor] | None = None) -> None:
        """Copies (documents, N, length, D) to tokens, and (documents, N, length) to a logsumexp, (B, N, T)."""
        moved = [y.moved(x.transpose(1, 2).contiguous()) for x, y in pairs]
        self._move(moved, lse and _MovedLse(lse[1], lse[0].contiguous(), lse[1].shape[1]), gathers=False)

    def _move(self, moved: list[_Moved], lse: _MovedLse | None, gathers: bool) -> None:
        if not self.triton:
            _move_in_torch(moved, lse, self, gathers)
            return
        n_rows = self.documents * self.length
        row_blocks = -(-n_rows // _ROWS)
        for i in range(0, len(moved), 3):
            part, is_last = moved[i : i + 3], i + 3 >= len(moved)
            part_lse = lse if is_last else None
            blocks = sum(one.blocks for one in part) + (part_lse is not None)
            part += [part[-1]._replace(blocks=0)] * (3 - len(part))
            sizes = n_rows, self.length, self.n_tokens
            tile = _ROWS, _COLS, 1 if part_lse is None else next_power_of_2(part_lse.n_heads)
            _move_kernel[row_blocks * blocks](*part, part_lse, self.source, *sizes, gathers, *tile, num_warps=4)


def _move_in_torch(moved: list[_Moved], lse: _MovedLse | None, batch: _Batch, gathers: bool) -> None:
    is_padding, index = (batch.source < 0)[:, None], batch.source.clamp(min=0).long()
    if lse is not None:
        tokens, slots = lse.tokens.transpose(1, 2), lse.slots.transpose(1, 2)
    if gathers:
        for one in moved:
            one.slots.view(-1, one.n_features).copy_(one.tokens[index].masked_fill(is_padding, 0))
        if lse is not None:
            slots.copy_(tokens.flatten(0, 1)[index].masked_fill(is_padding, torch.inf).view(slots.shape))
        return
    kept = ~is_padding[:, 0]
    for one in moved:
        one.tokens[index[kept]] = one.slots.view(-1, one.n_features)[kept]
    if lse is not None:
        row, token = index[kept] // batch.n_tokens, index[kept] % batch.n_tokens
        tokens[row, token] = slots.flatten(0, 1)[kept]


def _batches(packing: Packing, triton: bool) -> Iterator[_Batch]:
    first = 0
    for documents, length, start in packing.batches.tolist():
        source = packing.source[first : first + documents * length]
        yield _Batch(source, documents, length, start, packing.tokens, triton)
        first += documents * length


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

    def write(self, out: Tensor, lse: Tensor) -> None:
        """Writes the output and the logsumexp, (B, T, N, V) and (B, N, T)."""
        out.flatten(0, 1)[self.tokens] = self.v.to(out.dtype)
        lse[self.tokens // lse.shape[2], :, self.tokens % lse.shape[2]] = self.scores

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


def _pairs(packing: Packing) -> int:
    return sum(documents * length * length for documents, length, _ in packing.batches.tolist())


def _flops(q: Tensor, v: Tensor, packing: Packing) -> int:
    """Those of the products of whole texts, as torch counts them."""
    return 2 * _pairs(packing) * q.shape[2] * (q.shape[3] + v.shape[3])


def _backward_flops(q: Tensor, v: Tensor, packing: Packing) -> int:
    return 2 * _pairs(packing) * q.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])


@register("packed_attention", fake=_allocate, flops=_flops)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, attention: TorchAttention, triton: bool
) -> tuple[Tensor, Tensor]:
    """Returns the output, (B, T, N, V), and the logsumexp, (B, N, T)."""
    attention = attention.chosen(q, k, v)
    tensors = [_Tokens.of(x) for x in (q, k, v)]
    out, lse = _allocate(q, v)
    tokens = _Tokens.of(out)
    for batch in _batches(packing, triton):
        x = [batch.read_in_place(x) for x in tensors] if batch.is_in_place else batch.gather(tensors)
        found, found_lse = attention.forward(*x)
        del x  # memory that the next copies need
        batch.scatter([(found, tokens)], (found_lse, lse))
    if len(packing.alone):
        _Alone.of(q, k, v, packing, attention.scale).write(out, lse)
    return out, lse


def _allocate_backward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _batch_gradients(
    batch: _Batch, tensors: Sequence[_Tokens], lse: Tensor, attention: TorchAttention
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v of a batch, heads before tokens."""
    if batch.is_in_place:
        q, k, v, out = (batch.read_in_place(x) for x in tensors[1:])
        dout, batch_lse = batch.gather(tensors[:1], lse)
    else:
        dout, q, k, v, out, batch_lse = batch.gather(tensors, lse)
    return attention.backward(dout, q, k, v, out, batch_lse)


@register("packed_attention_backward", fake=_allocate_backward, flops=_backward_flops)
def _backward(
    results: _Results, q: Tensor, k: Tensor, v: Tensor, packing: Packing, attention: TorchAttention, triton: bool
) -> tuple[Tensor, Tensor, Tensor]:
    attention, gradients = attention.chosen(q, k, v), None
    tensors = [_Tokens.of(x) for x in (results.dout, q, k, v, results.out)]
    for batch in _batches(packing, triton):
        found = _batch_gradients(batch, tensors, results.lse, attention)
        gradients = gradients or _allocate_backward(q, k, v)  # now that the operands of a single batch are freed
        batch.scatter(zip(found, map(_Tokens.of, gradients), strict=True))
    gradients = gradients or _allocate_backward(q, k, v)
    if len(packing.alone):
        alone = _Alone.of(q, k, v, packing, attention.scale).gradients(results)
        for x, gradient in zip(gradients, alone, strict=True):
            x.flatten(0, 1)[packing.alone] = gradient.to(x.dtype)
    return gradients


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
        ctx.save_for_backward(q, k, v, sinks, y, lse, *packing[:3])
        ctx.size, ctx.attention, ctx.triton = packing[3:], attention, triton
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, y, lse, *tensors = ctx.saved_tensors
        packing = Packing(*tensors, *ctx.size)
        dsinks = None
        if sinks is not None:
            dlse, lse = sink_gradients(dy, y, lse, sinks, ctx.triton)
            dsinks = sink_gradient(dlse, sinks) if ctx.needs_input_grad[3] else None
        gradients = _backward(_Results(dy, y, lse), q, k, v, packing, ctx.attention, ctx.triton)
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
        or (packing.rows, packing.tokens) != q.shape[:2]
        or (sinks is not None and sinks.shape != q.shape[2:3])
    ):
        raise ValueError(
            f"packed_attention: q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, a packing of "
            f"{packing[3:]} tokens and sinks {None if sinks is None else tuple(sinks.shape)}; expected "
            "(B, T, N, D), (B, T, K, D), (B, T, K, V), (B, T) tokens and (N,), N a multiple of K"
        )
    if not q.shape[0] * q.shape[1]:  # gradients are zeros
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

"""State-space duality (Dao & Gu 2024, "Transformers are SSMs"), the recurrence of Mamba-2.

For each head, with a state S of shape (d_state, d_head), from token to token:

    S = e^g S + dt b x^T;   y = S^T c + D x

g = A dt is the logarithm of the decay. The heads of a group share b and c.

`ssd_gates` computes g and dt. `ssd_chunks` has the forward pass, `ssd_chunk_gradients` and `ssd_group_gradients` the
backward pass, and `ssd_torch` both in plain torch.

Saved: the inputs. Recomputed in backward: the products of c and b within chunks, and the states between chunks.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ligerzoo.kernels import ssd_chunk_gradients as backward_pass
from ligerzoo.kernels import ssd_chunks as forward_pass
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable
from ligerzoo.kernels.chunk_tiles import total_dtype
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, cdiv, empty_gradient, empty_result, uses_triton
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.ssd_chunk_gradients import EndGradients, SSDGradients
from ligerzoo.kernels.ssd_chunks import SSDInputs
from ligerzoo.kernels.ssd_group_gradients import HEADS, group_gradients
from ligerzoo.kernels.ssd_torch import chunked_ssd
from ligerzoo.kernels.strided import with_adjacent_features
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor, shape_error

MAX_STATE_SIZE = 256
"""Larger states run in plain torch."""


def reference(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    dt: Tensor,
    d: Tensor | None = None,
    initial_state: Tensor | None = None,
    segment_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`ssd` in plain torch, token by token: the specification and the test oracle."""
    dtype = accumulation_dtype(x.dtype)
    batch, tokens, heads, features = x.shape
    skip = torch.zeros_like(x, dtype=dtype) if d is None else d.to(dtype)[:, None] * x.to(dtype)
    x, b, c, g, dt = (t.to(dtype) for t in (x, b, c, g, dt))
    b, c = (t.repeat_interleave(heads // t.shape[2], 2) for t in (b, c))
    decay, written = g.exp(), dt[..., None] * x
    state = x.new_zeros(batch, heads, b.shape[-1], features) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(tokens):
        if segment_start is not None and t > 0:  # not by a decay of 0, since 0 * inf is NaN
            begins = segment_start[:, t] != segment_start[:, t - 1]
            state = state.masked_fill(begins[:, None, None, None], 0.0)
        state = decay[:, t, :, None, None] * state + b[:, t, :, :, None] * written[:, t, :, None, :]
        outputs.append((state * c[:, t, :, :, None]).sum(-2))
    return (torch.stack(outputs, 1) + skip if outputs else skip), state


def _allocate_forward(inputs: SSDInputs, needs_final: bool) -> tuple[Tensor, Tensor]:
    x = inputs.x
    final_shape = state_shape(x, inputs.b) if needs_final else (0,)
    return empty_result(x), x.new_empty(final_shape, dtype=torch.float32)


def _flops(inputs: SSDInputs) -> int:
    """Of the recurrence itself, token by token: writing and reading the state."""
    return 4 * inputs.x.numel() * inputs.b.shape[3]


def _states_bytes(inputs: SSDInputs) -> int:
    """The bytes of the states between chunks, as of their gradients."""
    batch, _, heads, features = inputs.x.shape
    return inputs.x.element_size() * batch * inputs.slots * heads * features * inputs.b.shape[3]


def _prepared_bytes(inputs: SSDInputs) -> int:
    """The bytes of the sums of g, of dt and of the products."""
    x, groups = inputs.x, inputs.b.shape[2]
    rows = x.shape[0] * x.shape[1]
    return rows * (x.shape[2] * (total_dtype(x).itemsize + 4) + groups * inputs.chunk * x.element_size())


def _state_bytes(inputs: SSDInputs) -> int:
    """The bytes of a state in fp32."""
    return 4 * inputs.x.shape[0] * inputs.x.shape[2] * inputs.b.shape[3] * inputs.x.shape[3]


def _forward_peak(inputs: SSDInputs) -> int:
    return inputs.x.nbytes + _state_bytes(inputs) + _prepared_bytes(inputs) + _states_bytes(inputs)


@register("ssd_forward", fake=_allocate_forward, flops=_flops, peak=_forward_peak)
def _forward(inputs: SSDInputs, needs_final: bool) -> tuple[Tensor, Tensor]:
    _, final_state = _allocate_forward(inputs, needs_final)
    rule, chunk = forward_pass.prepare_chunks(inputs), inputs.chunk
    states = forward_pass.scan_states(rule, chunk, inputs.initial_state, final_state if needs_final else None)
    return forward_pass.chunk_outputs(rule, chunk, states), final_state


def _allocate_backward(inputs: SSDInputs, needs_d: bool, needs_initial: bool) -> SSDGradients:
    x, b, c, g, dt, d, initial, _ = inputs
    dd = empty_gradient(x if d is None else d, needs_d)
    dinitial = empty_gradient(x if initial is None else initial, needs_initial)
    dx, db, dc = map(empty_result, (x, b, c))
    return SSDGradients(dx, db, dc, empty_result(g), empty_result(dt), dd, dinitial)


def _backward_flops(inputs: SSDInputs) -> int:
    return 2 * _flops(inputs)


def _backward_peak(inputs: SSDInputs) -> int:
    """At the gradients of groups: results; states and their gradients; squares of products, and of weights by share."""
    x, b, c, g, dt = inputs[:5]
    rows, shares = x.shape[0] * x.shape[1], cdiv(x.shape[2] // b.shape[2], HEADS)
    squares = rows * b.shape[2] * inputs.chunk * x.element_size()
    partial = 4 * rows * b.shape[2] * b.shape[3] * (shares + 1) if shares > 1 else 0
    blocks = cdiv(x.shape[3], backward_pass.REVERSE_SCAN[x.element_size()].values)
    terms = 4 * rows * x.shape[2] * (4 + inputs.chunk // backward_pass.PAIR_ROWS[x.element_size()] + blocks)
    results = sum(t.nbytes for t in (x, b, c, g, dt)) + 2 * _state_bytes(inputs)
    return results + 2 * _states_bytes(inputs) + _prepared_bytes(inputs) + shares * squares + partial + terms


@register("ssd_backward", fake=_allocate_backward, flops=_backward_flops, peak=_backward_peak)
def _backward(dy: Tensor, dfinal: Tensor | None, inputs: SSDInputs, needs_d: bool, needs_initial: bool) -> SSDGradients:
    gradients = _allocate_backward(inputs, needs_d, needs_initial)
    dy = with_adjacent_features(dy)
    dfinal = None if dfinal is None else dfinal.contiguous()
    rule, chunk = forward_pass.prepare_chunks(inputs), inputs.chunk
    states = forward_pass.scan_states(rule, chunk, inputs.initial_state, None)
    ends = EndGradients(dfinal, gradients.dinitial if needs_initial else None)
    terms = backward_pass.GateTerms.of(rule, chunk)
    dstates = backward_pass.scan_gradients(rule, chunk, dy, states, ends, terms)
    backward_pass.input_gradients(rule, chunk, dy, dstates, gradients.dx)
    group_gradients(rule, chunk, dy, states, dstates, terms, gradients)
    backward_pass.step_gradients(rule, chunk, terms, gradients)
    return gradients


class _SSD(FusedFunction):
    """The arguments are that of the op, with the fields of `SSDInputs` last."""

    @staticmethod
    def forward(ctx: FusedContext, needs_final: bool, *fields: Tensor | None) -> tuple[Tensor, Tensor]:
        y, final_state = _forward(SSDInputs._make(fields), needs_final)
        ctx.save_for_backward(*fields)
        ctx.needs_final = needs_final
        if not needs_final:
            ctx.mark_non_differentiable(final_state)
        return y, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        _, *needed = ctx.needs_input_grad
        *_, needs_d, needs_initial, _ = needed
        dfinal = dfinal if ctx.needs_final else None
        gradients = _backward(dy, dfinal, SSDInputs._make(ctx.saved_tensors), needs_d, needs_initial)
        return None, *if_needed((*gradients, None), needed)


def ssd(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    dt: Tensor,
    d: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    segment_start: Tensor | None = None,
    output_final_state: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of Mamba-2, by chunks.

    A token with g = 0 and dt = 0 does not change the state: give padding tokens these values.

    Args:
        x: (B, T, N, D) inputs of N heads, any strides.
        b: (B, T, G, S) input matrices B, N a multiple of G: heads j*N/G to (j+1)*N/G - 1 share group j. Any strides.
        c: (B, T, G, S) output matrices C, any strides.
        g: (B, T, N) logarithm of the decay, at most 0.
        dt: (B, T, N) step sizes.
        d: (N,) factor of the inputs in the outputs; None for 0.
        initial_state: (B, N, S, D) state before the first token; None for zeros.
        segment_start: (B or 1, T) integers, index of the first token of each token's segment in a packed row; the
            state is 0 before a segment, but for the first one, which continues `initial_state`. None for one segment.
        output_final_state: also return the state after the last token.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (B, T, N, D) outputs in the dtype of `x`, and if `output_final_state`, the (B, N, S, D) state in fp32 (fp64 for
        fp64 inputs).

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes or dtypes do not match, or `backend` does not support the tensors.
    """
    check_ssd_tokens("ssd", x, b, c, g, dt, d)
    if initial_state is not None:
        check_tensor("ssd", "initial_state", initial_state, shapes=[state_shape(x, b)])
    if segment_start is not None:
        shapes = [tuple(x.shape[:2]), (1, x.shape[1])]
        check_tensor("ssd", "segment_start", segment_start, "integer", shapes, x.device)
    floats = [t for t in (x, b, c, g, dt, d, initial_state) if t is not None]
    if uses_triton(*floats, backend=backend) and _fits(x, b, backend):
        dtype = functools.reduce(torch.promote_types, (x.dtype, b.dtype, c.dtype))
        tokens = (with_adjacent_features(t.to(dtype)) for t in (x, b, c))
        d, initial_state = (None if t is None else t.contiguous() for t in (d, initial_state))
        segment_start = None if x.shape[1] == 0 else segment_start  # without segments, none would write the state
        y, state = _SSD.apply(
            output_final_state, *tokens, g.contiguous(), dt.contiguous(), d, initial_state, segment_start
        )
    else:
        is_readable = segment_start is None or not (segment_start.is_meta or torch.compiler.is_compiling())
        plain = chunked_ssd if is_readable else reference
        y, state = plain(x, b, c, g, dt, d, initial_state, segment_start)
    y = y.to(x.dtype)
    return (y, state) if output_final_state else y


def _fits(x: Tensor, b: Tensor, backend: Backend) -> bool:
    """Whether the kernels support these sizes.

    Raises:
        ValueError: they do not, and `backend` is "triton".
    """
    if 0 < b.shape[3] <= MAX_STATE_SIZE and x.shape[3] > 0:
        return True
    if backend == "triton":
        raise ValueError(
            f'backend="triton" with S={b.shape[3]} and D={x.shape[3]}; expected S from 1 to {MAX_STATE_SIZE}, or '
            'backend="auto"'
        )
    return False


def state_shape(x: Tensor, b: Tensor) -> tuple[int, int, int, int]:
    """(B, N, S, D)."""
    return len(x), x.shape[2], b.shape[3], x.shape[3]


def check_ssd_tokens(name: str, x: Tensor, b: Tensor, c: Tensor, g: Tensor, dt: Tensor, d: Tensor | None) -> None:
    """Raises unless the tensors are floating-point and their shapes match."""
    check_floats(name, x=x, b=b, c=c, g=g, dt=dt)
    check_optional_floats(name, d=d)
    shapes_match = (
        x.dim() == b.dim() == 4
        and b.shape == c.shape
        and x.shape[:2] == b.shape[:2]
        and b.shape[2] > 0
        and x.shape[2] % b.shape[2] == 0
        and g.shape == dt.shape == x.shape[:3]
        and (d is None or d.shape == x.shape[2:3])
    )
    if not shapes_match:
        expected = "(B, T, N, D), (B, T, G, S) twice, (B, T, N) twice and (N,), N a multiple of G"
        raise shape_error(name, expected, x=x, b=b, c=c, g=g, dt=dt, d=d)

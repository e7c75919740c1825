"""The gated delta rule (Yang et al. 2025, "Gated Delta Networks", eq. 10): linear attention with a decaying state.

For each value head, with a state S of shape (d_k, d_v), from token to token:

    S = e^g S;   delta = beta (v - S^T k);   S = S + k delta^T;   o = scale * S^T q

The gate g is a number, or has one number for each channel of the keys, that is, row of the state (Kimi Team 2025, "Kimi
Linear", eq. 1).

q and k are normalized first, x * rsqrt(sum x^2 + 1e-6), in fp32. Each query/key head serves several value heads.

`delta_chunks` has the forward pass, `delta_chunk_gradients` the backward pass, `delta_channels` and
`delta_channel_gradients` what differs with gates per channel, `delta_tiles` what all load, and `delta_torch` both
passes in plain torch.

Saved: q, k, v, beta and `Prepared`, 66 elements per token and value head and 8 bytes per token and key head, and
D_k + 64 elements more with gates per channel.
Recomputed in backward: W, the errors and the states between chunks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels import delta_chunk_gradients as backward_pass
from ligerzoo.kernels import delta_chunks as forward_pass
from ligerzoo.kernels.autograd import FusedFunction, if_needed, once_differentiable
from ligerzoo.kernels.chunk_tiles import total_dtype
from ligerzoo.kernels.delta_channel_gradients import Given, key_and_gate_gradients
from ligerzoo.kernels.delta_channels import prepare_channels
from ligerzoo.kernels.delta_chunk_gradients import Gradients
from ligerzoo.kernels.delta_chunks import Inputs, Prepared, allocate_prepared, rule_of
from ligerzoo.kernels.delta_tiles import CHUNK, NORMALIZATION_EPS
from ligerzoo.kernels.delta_torch import chunked
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, cdiv, empty_gradient, empty_result, uses_triton
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.strided import strided, with_adjacent_features
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor, shape_error

MAX_KEY_DIM = 256
"""Larger keys run in plain torch."""


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    segment_start: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` in plain torch, token by token: the specification and the test oracle."""
    dtype = accumulation_dtype(v.dtype)
    group = v.shape[2] // k.shape[2]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORMALIZATION_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(group, 2) for x in (q * scale, k))
    decay = g.exp()
    batch, tokens, heads, _ = k.shape
    state = v.new_zeros(batch, heads, k.shape[-1], v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(tokens):
        if segment_start is not None and t > 0:  # not by a decay of 0, since 0 * inf is NaN
            begins = segment_start[:, t] != segment_start[:, t - 1]
            state = state.masked_fill(begins[:, None, None, None], 0.0)
        state = state * (decay[:, t, :, :, None] if decay.dim() == 4 else decay[:, t, :, None, None])
        delta = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, :, None]).sum(-2))
        state = state + k[:, t, :, :, None] * delta[:, :, None, :]
        outputs.append((state * q[:, t, :, :, None]).sum(-2))
    o = torch.stack(outputs, 1) if outputs else torch.zeros_like(v)
    return o, state


class _Output(NamedTuple):
    """Results of the forward pass: outputs, final state (without elements if not needed), and what backward needs."""

    o: Tensor
    final_state: Tensor
    inverse: Tensor
    attention: Tensor
    total: Tensor
    q_factor: Tensor
    k_factor: Tensor


def _allocate_forward(inputs: Inputs, g: Tensor, normalize: bool, needs_final: bool) -> _Output:
    k, v = inputs.k, inputs.v
    final_shape = (len(v), v.shape[2], k.shape[3], v.shape[3]) if needs_final else (0,)
    final_state = v.new_empty(final_shape, dtype=torch.float32)
    return _Output(empty_result(v), final_state, *allocate_prepared(k, v, normalize, g.dim() == 4))


def _flops(inputs: Inputs) -> int:
    """Of the rule itself, token by token: reading, writing and querying the state."""
    return 6 * inputs.v.numel() * inputs.k.shape[3]


def _scan_bytes(inputs: Inputs) -> int:
    """The bytes of the errors and of the states between chunks."""
    k, v = inputs.k, inputs.v
    states = v.shape[0] * v.shape[2] * cdiv(v.shape[1], CHUNK) * k.shape[3] * v.shape[3]
    return v.element_size() * (v.numel() + states)


def _readers_bytes(inputs: Inputs, is_per_channel: bool) -> int:
    """The bytes of W, and with gates per channel of U and L."""
    return (3 if is_per_channel else 1) * (inputs.v.nbytes // inputs.v.shape[3] * inputs.k.shape[3])


def _prepared_bytes(inputs: Inputs, is_per_channel: bool) -> int:
    k, v = inputs.k, inputs.v
    squares, totals = (2, k.shape[3]) if is_per_channel else (1, 1)
    per_head = squares * CHUNK * v.element_size() + totals * total_dtype(v).itemsize
    return v.shape[0] * v.shape[1] * (v.shape[2] * per_head + 8 * k.shape[2])


def _forward_peak(inputs: Inputs, g: Tensor) -> int:
    """At `scan` or `outputs`: results, errors and states, and W or the outputs. With gates per channel also U and L, or
    U; or M alone."""
    v, is_per_channel = inputs.v, g.dim() == 4
    final_state = 4 * v.shape[0] * v.shape[2] * inputs.k.shape[3] * v.shape[3]
    readers = _readers_bytes(inputs, is_per_channel)
    rest = _scan_bytes(inputs) + max(readers, v.nbytes + (readers // 3 if is_per_channel else 0))
    system = 4 * CHUNK * v[..., 0].numel() if is_per_channel else 0
    return final_state + _prepared_bytes(inputs, is_per_channel) + max(rest, system)


@register("delta_rule_forward", fake=_allocate_forward, flops=_flops, peak=_forward_peak)
def _forward(inputs: Inputs, g: Tensor, normalize: bool, needs_final: bool) -> _Output:
    final_state = _allocate_forward(inputs, g, normalize, needs_final).final_state
    prepared = allocate_prepared(inputs.k, inputs.v, normalize, g.dim() == 4)
    rule = rule_of(inputs, prepared)
    prepare = prepare_channels if g.dim() == 4 else forward_pass.prepare
    prepare(rule, g, prepared.inverse)
    rule, readers, errors = forward_pass.solve(rule, prepared.inverse)
    states = forward_pass.scan(rule, readers, errors, inputs.initial_state, final_state if needs_final else None)
    del readers
    rule = rule._replace(writers=None)
    return _Output(forward_pass.outputs(rule, errors, states), final_state, *prepared)


def _allocate_backward(inputs: Inputs, prepared: Prepared, g_dtype: torch.dtype, needs_initial: bool) -> Gradients:
    dq, dk, dv = (empty_result(x) for x in inputs[:3])
    shape = *dv.shape[:3], *prepared.total.shape[3:]
    dg, dbeta = dv.new_empty(shape, dtype=g_dtype), torch.empty_like(inputs.beta)
    initial = inputs.v if inputs.initial_state is None else inputs.initial_state
    return Gradients(dq, dk, dv, dg, dbeta, empty_gradient(initial, needs_initial))


def _backward_flops(inputs: Inputs) -> int:
    return 2 * _flops(inputs)


def _backward_peak(inputs: Inputs, prepared: Prepared, g_dtype: torch.dtype) -> int:
    """At `reverse_scan` or `value_gradients`: results; errors, states, their gradients; a square; W or a second one.
    With gates per channel also U and L."""
    q, k, v = inputs[:3]
    heads, is_per_channel = v.shape[0] * v.shape[2], prepared.total.dim() == 4
    gates = 8 * heads * v.shape[1] + (g_dtype.itemsize * prepared.total.numel() if is_per_channel else 0)
    last_states = (v.element_size() + 4) * heads * k.shape[3] * v.shape[3]  # of the tokens' dtype, and the result
    square = CHUNK * heads * v.shape[1] * v.element_size()
    results = q.nbytes + k.nbytes + v.nbytes + gates
    readers = _readers_bytes(inputs, is_per_channel)
    return results + last_states + 2 * _scan_bytes(inputs) + square + max(square, readers)


@register("delta_rule_backward", fake=_allocate_backward, flops=_backward_flops, peak=_backward_peak)
def _backward(
    do: Tensor,
    dfinal: Tensor | None,
    inputs: Inputs,
    prepared: Prepared,
    g_dtype: torch.dtype,
    needs_initial: bool,
) -> Gradients:
    gradients = _allocate_backward(inputs, prepared, g_dtype, needs_initial)
    do = with_adjacent_features(do)
    dfinal = None if dfinal is None else dfinal.contiguous()
    dinitial = gradients.dinitial if needs_initial else None
    inverse = prepared.inverse
    rule, readers, errors = forward_pass.solve(rule_of(inputs, prepared), inverse)
    states = forward_pass.scan(rule, readers, errors, inputs.initial_state, None)
    ddelta, dattention = backward_pass.local_gradients(rule, errors, do, inverse)
    dstates = backward_pass.reverse_scan(rule, readers, do, ddelta, dfinal, dinitial)
    del readers
    rule = rule._replace(queries=None, writers=None)
    is_per_channel = rule.attention is not None
    dbeta = torch.empty_like(gradients.dbeta, dtype=torch.float32) if is_per_channel else gradients.dbeta
    dsystem = backward_pass.value_gradients(rule, inverse, errors, ddelta, gradients.dv, dbeta)
    del ddelta
    if is_per_channel:
        given = Given(strided(do), errors, gradients.dv, states, dstates, dattention, dsystem, dbeta)
        key_and_gate_gradients(rule, given, gradients)
        return gradients
    dtotals = backward_pass.allocate_dtotals(inputs.v)
    backward_pass.query_gradients(rule, states, do, dattention, gradients, dtotals)
    backward_pass.key_gradients(rule, errors, (states, dstates), (dattention, dsystem), gradients, dtotals)
    backward_pass.gate_gradients(rule.table, dtotals, gradients.dg, CHUNK, CHUNK // backward_pass.ROWS)
    return gradients


class _GatedDeltaRule(FusedFunction):
    """The arguments are those of the op, with the fields of `Inputs` last."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, normalize: bool, needs_final: bool, *fields: Tensor | float | None
    ) -> tuple[Tensor, Tensor]:
        inputs = Inputs._make(fields)
        o, final_state, *prepared = _forward(inputs, g, normalize, needs_final)
        ctx.save_for_backward(*inputs[:6], *prepared)
        ctx.options = inputs.scale, g.dtype, needs_final
        if not needs_final:
            ctx.mark_non_differentiable(final_state)
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        scale, g_dtype, needs_final = ctx.options
        q, k, v, beta, initial_state, segment_start, *prepared = ctx.saved_tensors
        inputs = Inputs(q, k, v, beta, initial_state, segment_start, scale)
        *_, needs_initial, _, _ = ctx.needs_input_grad
        dfinal = dfinal if needs_final else None
        dq, dk, dv, dg, dbeta, dinitial = _backward(do, dfinal, inputs, Prepared(*prepared), g_dtype, needs_initial)
        return if_needed((dg, None, None, dq, dk, dv, dbeta, dinitial, None, None), ctx.needs_input_grad)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_start: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = True,
    output_final_state: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention by the gated delta rule.

    A token with g = 0 and beta = 0 does not change the state: give padding tokens these values.

    Args:
        q: (B, T, K, D_k) queries, any strides.
        k: (B, T, K, D_k) keys, any strides.
        v: (B, T, V, D_v) values, V a multiple of K: value heads j*V/K to (j+1)*V/K - 1 share query and key head j.
        g: (B, T, V), or (B, T, V, D_k) for gates per channel: logarithm of the decay, at most 0. fp32 in the models.
        beta: (B, T, V) writing strength, any float dtype.
        initial_state: (B, V, D_k, D_v) state before the first token; None for zeros.
        segment_start: (B or 1, T) integers, the index of the first token of each token's segment in packed rows, as
            `Context.segment_start`. The state is zero before each segment but the row's first one, which continues
            `initial_state`. A segment's results are those of the segment alone, bit by bit. None for one segment.
        scale: factor of the outputs; None for D_k^-0.5.
        normalize: divides each q and k by its l2 norm, in fp32.
        output_final_state: also returns the state after the last token.
        backend: "auto" (Triton where supported), "triton" or "torch" (by chunks too, see `delta_torch`).

    Returns:
        (B, T, V, D_v) outputs in the dtype of `v`. With `output_final_state`, also the (B, V, D_k, D_v) state in fp32
        (fp64 for fp64 inputs).

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes or dtypes do not match, or `backend` does not support the tensors.
    """
    check_tokens("gated_delta_rule", q, k, v, g, beta)
    check_optional_floats("gated_delta_rule", initial_state=initial_state)
    state_shape = len(v), v.shape[2], k.shape[3], v.shape[3]
    if initial_state is not None:
        check_tensor("gated_delta_rule", "initial_state", initial_state, shapes=[state_shape])
    if segment_start is not None:
        shapes = [tuple(v.shape[:2]), (1, v.shape[1])]
        check_tensor("gated_delta_rule", "segment_start", segment_start, "integer", shapes, v.device)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    floats = (q, k, v, g, beta) if initial_state is None else (q, k, v, g, beta, initial_state)
    if uses_triton(*floats, backend=backend) and _fits(k, v, backend):
        dtype = functools.reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype))
        wide_q, wide_k, wide_v = (with_adjacent_features(x.to(dtype)) for x in (q, k, v))
        initial_state = None if initial_state is None else initial_state.contiguous()
        segment_start = None if v.shape[1] == 0 else segment_start  # without segments, none would write the state
        inputs = Inputs(wide_q, wide_k, wide_v, beta.contiguous(), initial_state, segment_start, scale)
        o, state = _GatedDeltaRule.apply(g.contiguous(), normalize, output_final_state, *inputs)
    else:
        plain = chunked if segment_start is None or _is_readable(segment_start) else reference
        o, state = plain(q, k, v, g, beta, initial_state, segment_start, scale, normalize)
    o = o.to(v.dtype)
    return (o, state) if output_final_state else o


def _is_readable(t: Tensor) -> bool:
    """Whether Python can read the elements."""
    return not (t.is_meta or torch.compiler.is_compiling())


def _fits(k: Tensor, v: Tensor, backend: Backend) -> bool:
    """Whether the kernels support these sizes.

    Raises:
        ValueError: they do not, and `backend` is "triton".
    """
    if 0 < k.shape[3] <= MAX_KEY_DIM and v.shape[3] > 0:
        return True
    if backend == "triton":
        raise ValueError(
            f'backend="triton" with D_k={k.shape[3]} and D_v={v.shape[3]}; expected D_k from 1 to {MAX_KEY_DIM}, or '
            'backend="auto"'
        )
    return False


def check_tokens(name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Raises unless the tokens' tensors are floating-point and their shapes match."""
    check_floats(name, q=q, k=k, v=v, g=g, beta=beta)
    shapes_match = (
        k.dim() == v.dim() == 4
        and q.shape == k.shape
        and k.shape[:2] == v.shape[:2]
        and k.shape[2] > 0
        and v.shape[2] % k.shape[2] == 0
        and beta.shape == v.shape[:3]
        and g.shape in (beta.shape, (*beta.shape, k.shape[3]))
    )
    if not shapes_match:
        expected = "(B, T, K, D_k) twice, (B, T, V, D_v) and (B, T, V) twice, V a multiple of K, or g (B, T, V, D_k)"
        raise shape_error(name, expected, q=q, k=k, v=v, g=g, beta=beta)

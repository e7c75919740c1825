"""State-space duality (Dao & Gu 2024, "Transformers are SSMs"), the recurrence of Mamba-2.

For each head, with a state S of shape (d_state, d_head), from token to token:

    S = e^g S + dt b x^T;   y = S^T c + D x

g = A dt is the logarithm of the decay. The heads of a group share b and c.

`ssd_gates` computes g and dt, and `ssd_torch` the recurrence by chunks in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, accumulation_dtype
from ligerzoo.kernels.ssd_torch import chunked_ssd
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor, shape_error


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
    is_readable = segment_start is None or not (segment_start.is_meta or torch.compiler.is_compiling())
    plain = chunked_ssd if is_readable else reference
    y, state = plain(x, b, c, g, dt, d, initial_state, segment_start)
    y = y.to(x.dtype)
    return (y, state) if output_final_state else y


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

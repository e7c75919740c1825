"""One step of Mamba-2's recurrence, see `ssd`: a few tokens, with the state updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, uses_triton
from ligerzoo.kernels.recurrence_step import RecurrenceOptions, step
from ligerzoo.kernels.registration import needs_dispatch
from ligerzoo.kernels.ssd import check_ssd_tokens, reference, state_shape
from ligerzoo.tensor_checks import check_tensor


def ssd_step(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    dt: Tensor,
    state: Tensor,
    d: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Continues `ssd` by one token or a few, and updates the state in place. Not differentiable.

    It allocates only its result and does not synchronize with the host, so a CUDA graph can capture it.

    Args:
        x: (B, T, N, D) inputs, T small.
        b: (B, T, G, S) input matrices B.
        c: (B, T, G, S) output matrices C.
        g: (B, T, N) logarithm of the decay.
        dt: (B, T, N) step sizes.
        state: (B, N, S, D) any strides, fp32 for the accuracy of `ssd`; overwritten.
        d: (N,) factor of the inputs in the outputs; None for 0.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (B, T, N, D) outputs in the dtype of `x`.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes or dtypes do not match, or `backend` does not support the tensors.
    """
    check_ssd_tokens("ssd_step", x, b, c, g, dt, d)
    check_tensor("ssd_step", "state", state, shapes=[state_shape(x, b)])
    with torch.no_grad():
        floats = [t for t in (x, b, c, g, dt, state, d) if t is not None]
        if not uses_triton(*floats, backend=backend) or needs_dispatch(*floats):
            y, new_state = reference(x, b, c, g, dt, d, state)
            state.copy_(new_state)
            return y.to(x.dtype)
        with torch.cuda.device(x.device if x.is_cuda else -1):
            return step(c, b, x, g, dt, state, None if d is None else d.contiguous(), RecurrenceOptions())

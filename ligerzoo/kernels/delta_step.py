"""One step of the gated delta rule, see `delta_rule`: a few tokens, with the state updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.delta_rule import check_tokens, reference
from ligerzoo.kernels.dispatch import Backend, uses_triton
from ligerzoo.kernels.recurrence_step import RecurrenceOptions, step
from ligerzoo.kernels.registration import needs_dispatch
from ligerzoo.tensor_checks import check_tensor


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Continues `gated_delta_rule` by one token or a few, and updates the state in place. Not differentiable.

    It allocates only its result and does not synchronize with the host, so a CUDA graph can capture it.

    Args:
        q: (B, T, K, D_k) queries, T small.
        k: (B, T, K, D_k) keys.
        v: (B, T, V, D_v) values.
        g: (B, T, V) or (B, T, V, D_k) logarithm of the decay.
        beta: (B, T, V) writing strength.
        state: (B, V, D_k, D_v) any strides, fp32 for the accuracy of `gated_delta_rule`; overwritten.
        scale: see `gated_delta_rule`.
        normalize: see `gated_delta_rule`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (B, T, V, D_v) outputs in the dtype of `v`.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes or dtypes do not match, or `backend` does not support the tensors.
    """
    check_tokens("gated_delta_step", q, k, v, g, beta)
    check_tensor("gated_delta_step", "state", state, shapes=[(len(v), v.shape[2], k.shape[3], v.shape[3])])
    with torch.no_grad():
        if not uses_triton(q, k, v, g, beta, state, backend=backend) or needs_dispatch(q, k, v, g, beta, state):
            o, new_state = reference(q, k, v, g, beta, state, None, scale, normalize)
            state.copy_(new_state)
            return o.to(v.dtype)
        with torch.cuda.device(v.device if v.is_cuda else -1):
            scale = k.shape[-1] ** -0.5 if scale is None else scale
            return step(q, k, v, g, beta, state, None, RecurrenceOptions(scale, normalize, is_delta=True))

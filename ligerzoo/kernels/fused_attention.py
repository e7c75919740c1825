"""Torch's fused attention kernels that `scaled_dot_product_attention` hides.

`TorchAttention` calls them without autograd: forward returns the logsumexp, backward takes it. So an operation around a
kernel can have its own backward: attention with sinks gives the kernel's backward another logsumexp, packed attention
other rows. `attend_within` is differentiable, and has no mask but the boundaries of documents.

Shapes: B batch, T queries, S keys, N query heads, K key heads, D head size. Heads come before tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import under_transform
from ligerzoo.kernels.dispatch import is_hopper
from ligerzoo.kernels.exact_attention import HEAD_SIZES, exact_attention_with_lse
from ligerzoo.kernels.packing import Boundaries

_ALIGNMENT = 8  # head sizes that the kernels of a GPU take are multiples of it

AttentionKernel = Literal["cudnn", "flash", "cpu", "auto"]


class TorchAttention(NamedTuple):
    """How a kernel of torch computes softmax(q k^T * scale) v.

    Attributes:
        kernel: "cudnn", "flash" (both for fp16 and bf16 on a GPU), "cpu" (fp32 and fp64), or "auto", to be `chosen`.
        scale: factor of the scores.
        is_causal: a query attends to the keys up to its own, which requires T = S.
        window: keys that a query attends to at most, including its own, see `has_windows`; None for all. Forward is
            then `exact_attention`, and backward that of "flash".
    """

    kernel: AttentionKernel
    scale: float
    is_causal: bool
    window: int | None = None

    def chosen(self, q: Tensor, k: Tensor, v: Tensor) -> TorchAttention:
        """Returns this with the kernel of `attention_kernel` in place of "auto"."""
        if self.kernel != "auto":
            return self
        kernel = attention_kernel(q, k, v, self.is_causal)
        assert kernel is not None, "compiled code has no kernel for these tensors"
        return self._replace(kernel=kernel)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N, T, D), (B, K, S, D) twice -> the output, (B, N, T, D), and the logsumexp of the scores, (B, N, T)."""
        aten = torch.ops.aten
        if self.window is not None:
            last = torch.arange(q.shape[2], device=q.device)[None]
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out, lse = exact_attention_with_lse(q, k, v, last, self.scale, self.window)
            return out.transpose(1, 2), lse
        if self.kernel == "cudnn":
            out, lse = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, self.is_causal, False, scale=self.scale
            )[:2]
        elif self.kernel == "flash":
            out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.is_causal, False, scale=self.scale)[
                :2
            ]
        else:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, self.is_causal, scale=self.scale)
        return out, lse.view(lse.shape[:3])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        aten, max_q, max_k = torch.ops.aten, q.shape[2], k.shape[2]
        if self.kernel == "cpu":
            heads, group = k.shape[1], q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            dq, *repeated = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, self.is_causal, scale=self.scale
            )
            dk, dv = (x.unflatten(1, (heads, group)).sum(2) for x in repeated)
            return dq, dk, dv
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)  # state of the random numbers
        if self.window is not None:
            heads_last = (x.transpose(1, 2) for x in (dout, q, k, v, out))
            others = lse, None, None, max_q, max_k, 0.0, True, no_dropout, no_dropout
            window = {"window_size_left": self.window - 1, "window_size_right": 0}
            dq, dk, dv = aten._flash_attention_backward(*heads_last, *others, scale=self.scale, **window)
            return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
        if self.kernel == "cudnn":
            gradients = aten._scaled_dot_product_cudnn_attention_backward(
                dout, q, k, v, out, lse[..., None], no_dropout, no_dropout, None, None, None, max_q, max_k, 0.0,
                self.is_causal, scale=self.scale,
            )  # fmt: skip
        else:
            gradients = aten._scaled_dot_product_flash_attention_backward(
                dout, q, k, v, out, lse, None, None, max_q, max_k, 0.0, self.is_causal, no_dropout, no_dropout,
                scale=self.scale,
            )  # fmt: skip
        return gradients


def attention_kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> AttentionKernel | None:
    """Returns the fastest kernel for these tensors, (B, T, N, D) and (B, S, K, D) twice; None if none supports them."""
    if under_transform() or not q.dtype == k.dtype == v.dtype:
        return None
    if q.device.type == "cpu":
        return "cpu" if q.dtype in (torch.float32, torch.float64) and q.shape[-1] == v.shape[-1] else None
    if not q.is_cuda or q.shape[-1] % _ALIGNMENT:
        return None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, is_causal, q.shape[1] != k.shape[1])
    if torch.backends.cuda.can_use_cudnn_attention(params):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(params) else None


def has_windows(q: Tensor, v: Tensor) -> bool:
    """Whether `TorchAttention` computes windows for these tensors with the bits of an exact cache."""
    return is_hopper(q) and q.dtype == torch.bfloat16 and q.shape[-1] == v.shape[-1] and q.shape[-1] in HEAD_SIZES


def has_boundaries(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend_within` computes these tensors, (B, T, N, D) and (B, T, K, D) twice."""
    if not q.is_cuda or under_transform() or q.shape[-1] % _ALIGNMENT or not q.dtype == k.dtype == v.dtype:
        return False
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    return torch.backends.cuda.can_use_flash_attention(params)


def attend_within(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Attention to earlier and later tokens of the same document, by FlashAttention.

    Args:
        q: (B, T, N, D), fp16 or bf16, see `has_boundaries`.
        k: (B, T, K, D).
        v: (B, T, K, D).
        boundaries: of the documents, counted over all B * T tokens.
        scale: factor of the scores; None for D^-0.5.
        window: W; token i attends to those from i - W + 1 to i + W - 1. None for all.

    Returns:
        (B, T, N, D).
    """
    positions, longest = boundaries
    tensors, lengths = [x.flatten(0, 1) for x in (q, k, v)], (positions, positions, longest, longest)
    reach = None if window is None else window - 1
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *tensors, *lengths, 0.0, False, False, scale=scale, window_size_left=reach, window_size_right=reach
    )[0]
    return out.view(q.shape)

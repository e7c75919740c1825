"""The language-model head as an `nn.Linear`, which PEFT, resizing and fused losses of others expect."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.kernels import cross_entropy
from ligerzoo.layers import LMHead
from ligerzoo.layers.head import scaled_and_capped


class Head(LMHead, nn.Linear):  # type: ignore[misc]
    """Language-model head whose `logits` are those before scale and soft cap, as in transformers.

    Args:
        head: the head that it replaces, whose parameters and options it shares.
    """

    def __init__(self, head: LMHead) -> None:
        nn.Linear.__init__(self, head.hidden_size, len(head.weight), bias=head.bias is not None, device="meta")
        self.hidden_size, self.backend, self.logits_budget = head.hidden_size, head.backend, head.logits_budget
        self.softcap, self.logit_scale = head.softcap, head.logit_scale
        self.weight, self.bias = head.weight, head.bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the product with the weight, (..., H) -> (..., V)."""
        return F.linear(hidden, self.weight, self.bias)


class LogitOptions:
    """What follows the linear layer of the head: scale, soft cap, loss.

    Args:
        head: the head of a ligerzoo model.
    """

    def __init__(self, head: LMHead) -> None:
        self.softcap, self.logit_scale = head.softcap, head.logit_scale
        self.of_loss: dict[str, Any] = {name: getattr(head, name) for name in ("softcap", "logit_scale", "backend")}

    def logits(self, product: Tensor) -> Tensor:
        """Returns the logits: the product of hidden states and weight (..., V), scaled and soft-capped."""
        return scaled_and_capped(product, self.logit_scale, self.softcap)

    def loss(self, product: Tensor, target: Tensor, num_items: int | Tensor | None) -> Tensor:
        """Returns the loss, 0-d fp32, of a product (..., V) that exists already; see `Head.loss`."""
        return cross_entropy(product, target, num_items=num_items, **self.of_loss)

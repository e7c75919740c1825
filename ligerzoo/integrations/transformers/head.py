"""The language-model head as an `nn.Linear`, which PEFT, resizing and fused losses of others expect."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ligerzoo.kernels import cross_entropy, linear_cross_entropy
from ligerzoo.layers import LMHead
from ligerzoo.layers.head import scaled_and_capped


class Head(nn.Linear):
    """Linear layer over the vocabulary, without scale and soft cap; given a target, it returns the loss.

    Args:
        options: scale, soft cap and kernel options of the loss.
        head: the head that it replaces, whose parameters it shares.
    """

    def __init__(self, options: LogitOptions, head: LMHead) -> None:
        super().__init__(head.hidden_size, len(head.weight), bias=head.bias is not None, device="meta")
        self.options, self.weight = options, head.weight
        self.register_parameter("bias", head.bias)

    def forward(self, hidden: Tensor, target: Tensor | None = None, num_items: int | Tensor | None = None) -> Tensor:
        """Computes the product with the weight, or the loss if `target` is given.

        Args:
            hidden: hidden states, (..., H).
            target: token ids that the hidden states should predict, (...), already shifted; -100 is ignored.
            num_items: divisor of the summed loss. Default: the number of targets that are not -100.

        Returns:
            (..., V), before scale and soft cap as in transformers; with `target` the loss, 0-d fp32, of the logits
            after them.
        """
        if target is None:
            return super().forward(hidden)
        budget, options = self.options.logits_budget, self.options.of_loss
        return linear_cross_entropy(
            hidden, self.weight, target, self.bias, num_items=num_items, logits_budget=budget, **options
        )


class LogitOptions:
    """What follows the linear layer of the head: scale, soft cap, loss.

    Args:
        head: the head of a ligerzoo model.
    """

    def __init__(self, head: LMHead) -> None:
        self.softcap, self.logit_scale, self.logits_budget = head.softcap, head.logit_scale, head.logits_budget
        self.of_loss: dict[str, Any] = {name: getattr(head, name) for name in ("softcap", "logit_scale", "backend")}

    def logits(self, product: Tensor) -> Tensor:
        """Returns the logits: the product of hidden states and weight (..., V), scaled and soft-capped."""
        return scaled_and_capped(product, self.logit_scale, self.softcap)

    def loss(self, product: Tensor, target: Tensor, num_items: int | Tensor | None) -> Tensor:
        """Returns the loss, 0-d fp32, of a product (..., V) that exists already; see `Head.forward`."""
        return cross_entropy(product, target, num_items=num_items, **self.of_loss)

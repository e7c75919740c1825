"""The language-model head: hidden states to logits, or straight to the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.kernels import linear_cross_entropy
from ligerzoo.kernels.dispatch import Backend, check_backend


class LMHead(nn.Module):
    """A linear layer over the vocabulary that, given a target, returns the loss without making all logits.

    Tie it to an embedding with `head.weight = embedding.weight`.

    Args:
        hidden_size: H.
        vocab_size: V.
        softcap: bounds the logits to softcap * tanh(logit / softcap); None for no bound.
        logit_scale: multiplies the logits, before they are bounded.
        logits_budget: MiB of logits that the loss may hold at a time; None for `ligerzoo.kernels.set_logits_budget`'s.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference).
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_budget: int | None = None,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.softcap, self.logit_scale, self.logits_budget = softcap, logit_scale, logits_budget
        self.backend: Backend = check_backend(backend)
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, 0.02^2)."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(
        self,
        hidden: Tensor,
        target: Tensor | None = None,
        num_items: int | Tensor | None = None,
        objective: Callable[..., Any] | None = None,
    ) -> Any:
        """Logits (..., V) in the dtype of `hidden`; or, given `target`, the loss, 0-d fp32; or whatever an objective
        makes of them.

        Args:
            hidden: (..., H).
            target: (...) token ids, -100 for a token that does not count: what each hidden state should predict
                (already shifted).
            num_items: divides the summed loss in place of the number of tokens that count.
            objective: called in place of `ligerzoo.kernels.linear_cross_entropy`, with hidden states, weight, target
                and this head's softcap, logit_scale, logits_budget and backend: within the hooks of this module, as
                DistributedDataParallel and FSDP2 need it.
        """
        if target is None:
            logits = nn.functional.linear(hidden, self.weight)
            if self.logit_scale != 1.0:
                logits = logits * self.logit_scale
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        if objective is None:
            objective = partial(linear_cross_entropy, num_items=num_items)
        return objective(
            hidden,
            self.weight,
            target,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            logits_budget=self.logits_budget,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"hidden_size={self.weight.shape[1]}, vocab_size={self.weight.shape[0]}"

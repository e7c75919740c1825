"""The losses as modules, which keep their options, and what they are of a whole model.

A model is called as it is, wrapped or not, and computes the loss within its forward: so the hooks of
DistributedDataParallel and FSDP2 run around all that reads a parameter, the head's weight among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligerzoo.kernels import token_logps
from ligerzoo.losses.dpo import dpo_loss
from ligerzoo.losses.grpo import grpo_loss, ppo_clip_loss
from ligerzoo.losses.kto import kto_loss
from ligerzoo.losses.logps import sequence_logps
from ligerzoo.losses.objective import LossOutput
from ligerzoo.losses.reference_free import cpo_loss, orpo_loss, simpo_loss

Model = Callable[..., Any]
"""A `ligerzoo.models.CausalLM`, or what wraps one and passes arguments and results on."""


def _of_model(logps: Callable[..., Tensor], model: Model, input_ids: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
    found: Tensor = model(
        input_ids, labels=labels, objective=lambda *head, **options: (None, logps(*head, **options)), **inputs
    ).details
    return found


def model_token_logps(
    model: Model, input_ids: Tensor, labels: Tensor, *, temperature: float = 1.0, **inputs: Any
) -> Tensor:
    """(B, T) fp32, differentiable: the log-probability of the label that each token should predict, the next one's; 0
    where it is -100, and for the last token.

    Args:
        model: see `Model`.
        input_ids: (B, T) token ids.
        labels: (B, T), the same, -100 for those that do not count.
        temperature: divides the logits.
        inputs: what else the model takes, such as `attention_mask`.
    """
    return _of_model(partial(token_logps, temperature=temperature), model, input_ids, labels, **inputs)


def model_sequence_logps(
    model: Model, input_ids: Tensor, labels: Tensor, *, average: bool = False, **inputs: Any
) -> Tensor:
    """(B,) fp32, differentiable: the sums of `model_token_logps` over the rows, or the means over the tokens that
    count."""
    return _of_model(partial(sequence_logps, average=average), model, input_ids, labels, **inputs)


class HeadLoss(nn.Module):
    """A loss with its options.

    Called with hidden states, the head's weight, targets and the rest of the function's arguments; `of` takes a model
    instead.

    Args:
        options: arguments of the function, given with every call.

    Raises:
        TypeError: the function has no such argument.
    """

    function: ClassVar[Callable[..., LossOutput]]
    """What the module calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        inspect.signature(self.function).bind_partial(**options)
        self.options = options

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, *args: Any, **inputs: Any) -> LossOutput:
        return type(self).function(hidden, weight, target, *args, **self.options, **inputs)

    def of(
        self,
        model: Model,
        input_ids: Tensor,
        labels: Tensor,
        *args: Any,
        model_inputs: dict[str, Any] | None = None,
        attention_mask: Tensor | None = None,
        **inputs: Any,
    ) -> LossOutput:
        """The loss of a model, with the loss of its routers if it has some, and the metrics.

        Args:
            model: see `Model`.
            input_ids: (B, T) token ids.
            labels: (B, T), the same, -100 for those that do not count: prompts and padding. The model shifts them.
            attention_mask: (B, T), 1 for a token and 0 for padding.
            model_inputs: what else the model takes.
            args: arguments of the function after the targets; of (B, T) those, such as log-probabilities, that are in
                the places of the tokens that predict: as `model_token_logps` returns them.
            inputs: likewise by name.
        """
        objective = lambda *head, **options: self(*head, *args, **options, **inputs)  # noqa: E731
        out = model(input_ids, attention_mask, labels=labels, objective=objective, **(model_inputs or {}))
        return LossOutput(out.loss, out.details)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

"""The head of a causal language model, and the logits that it defers.

In training with labels, the head of a replaced model returns `DeferredLogits`: an object that remembers the hidden
states, the scale and the soft cap, and computes the loss from them without materializing all logits.
"""

from __future__ import annotations

import builtins  # `DeferredLogits.float` hides one
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ligerzoo.checks import is_number
from ligerzoo.integrations.kernels.replace import KernelModule, Options, Replacement
from ligerzoo.kernels import cross_entropy, linear_cross_entropy
from ligerzoo.layers.plain import is_plain_tensor

Operation: TypeAlias = Callable[[Tensor], Tensor]


class DeferredLogits:
    """Logits that are computed only when something other than their loss is needed.

    Scaling by numbers, `float()` and one `torch.tanh` are remembered. Any other use computes the logits.

    Args:
        head: the head.
        hidden_states: (..., H), its input.
        operations: applied to the logits so far.
        logit_scale: the factor of the logits, before the soft cap.
        softcap: the soft cap, None without one.
    """

    def __init__(
        self,
        head: KernelHead,
        hidden_states: Tensor,
        operations: tuple[Operation, ...] = (),
        logit_scale: builtins.float = 1.0,
        softcap: builtins.float | None = None,
    ) -> None:
        self.head, self.hidden_states, self.operations = head, hidden_states, operations
        self.logit_scale, self.softcap = logit_scale, softcap

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        return self.hidden_states.device

    def materialize(self) -> Tensor:
        """Returns the logits, (..., V)."""
        return self._operated(self.head.compute(self.hidden_states))

    def loss(self, target: Tensor, vocab_size: int, num_items: int | Tensor | None, ignore_index: int) -> Tensor:
        """Returns the cross entropy, 0-d in fp32.

        Computes logits if the weight of the head is a tensor that no kernel reads (quantized or tensor parallel), or
        has other than `vocab_size` rows.

        Args:
            target: (...), shifted.
            vocab_size: V.
            num_items: divisor of the summed loss; None for the number of valid targets.
            ignore_index: the target of ignored tokens.
        """

        def objective(hidden_states: Tensor, project: Operation) -> Tensor:
            weight, bias = self.head.weight, self.head.bias
            targets = target.to(hidden_states.device)
            if not is_plain_tensor(weight, bias) or weight.shape[0] != vocab_size:
                logits = self._operated(project(hidden_states))
                return loss_of_logits(logits, targets, vocab_size, num_items, ignore_index)
            terms: Options = {"softcap": self.softcap, "logit_scale": self.logit_scale}
            return linear_cross_entropy(
                hidden_states, weight, targets, bias, ignore_index=ignore_index, num_items=num_items, **terms
            )

        return self.head.compute(self.hidden_states, objective)

    def _operated(self, logits: Tensor) -> Tensor:
        for operation in self.operations:
            logits = operation(logits)
        return logits

    def float(self) -> DeferredLogits:
        """The loss is computed in fp32 in any case."""
        return self._then(lambda logits: logits.float(), self.logit_scale, self.softcap)

    def __mul__(self, factor: builtins.float | Tensor) -> DeferredLogits | Tensor:
        if is_number(factor) and (self.softcap is None or factor > 0):
            # c tanh(s l) is a soft cap of c with a scale of s c.
            softcap = None if self.softcap is None else self.softcap * factor
            return self._then(lambda logits: logits * factor, self.logit_scale * factor, softcap)
        return self.materialize() * factor

    __rmul__ = __mul__

    def __truediv__(self, divisor: builtins.float | Tensor) -> DeferredLogits | Tensor:
        if is_number(divisor) and self.softcap is None:
            return self._then(lambda logits: logits / divisor, self.logit_scale / divisor, None)
        return self.materialize() / divisor

    def tanh(self) -> DeferredLogits | Tensor:
        """A soft cap of 1."""
        if self.softcap is not None:
            return self.materialize().tanh()
        return self._then(torch.tanh, self.logit_scale, 1.0)

    def _then(
        self, operation: Operation, logit_scale: builtins.float, softcap: builtins.float | None
    ) -> DeferredLogits:
        return DeferredLogits(self.head, self.hidden_states, (*self.operations, operation), logit_scale, softcap)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        if function is torch.tanh and isinstance(args[0], DeferredLogits):
            return args[0].tanh()
        args, kwargs = torch.utils._pytree.tree_map_only(DeferredLogits, cls.materialize, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)


def _materialized(name: str) -> Callable[..., object]:
    def operation(self: DeferredLogits, *arguments: object) -> object:
        return getattr(self.materialize(), name)(*arguments)

    return operation


for _name in ("add", "radd", "sub", "rsub", "neg", "pow", "rtruediv", "matmul", "getitem", "len", "gt", "lt"):
    setattr(DeferredLogits, f"__{_name}__", _materialized(f"__{_name}__"))


class KernelHead(KernelModule):
    """The head of a causal language model. It computes the loss within the hooks of the module, as FSDP requires.

    Attributes:
        kernel_defers: whether calls return `DeferredLogits`.
    """

    kernel_kind = "loss"
    kernel_defers: bool = False
    weight: Tensor
    bias: Tensor | None

    def __call__(self, input: Tensor) -> Tensor | DeferredLogits:
        """Returns logits, or `DeferredLogits` without running hooks."""
        return DeferredLogits(self, input) if self.kernel_defers else self.compute(input)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Makes calls return `DeferredLogits` within the block."""
        self.kernel_defers = True
        try:
            yield
        finally:
            self.kernel_defers = False

    def compute(self, *arguments: object) -> Tensor:
        """Calls the module, with its hooks. Arguments are those of `forward`."""
        return super().__call__(*arguments)  # type: ignore[no-any-return]

    def forward(self, input: Tensor, objective: Callable[[Tensor, Operation], Tensor] | None = None) -> Tensor:
        """Returns logits, or the loss if an objective is given.

        Args:
            input: hidden states, (..., H).
            objective: called with hidden states and the function that computes their logits.
        """
        project: Operation = super().forward
        return project(input) if objective is None else objective(input, project)


def loss_of_logits(
    logits: Tensor, target: Tensor, vocab_size: int, num_items: int | Tensor | None, ignore_index: int
) -> Tensor:
    """Returns the cross entropy, 0-d; logits: (..., V), target: (...), shifted."""
    return cross_entropy(
        logits.view(-1, vocab_size), target.reshape(-1), ignore_index=ignore_index, num_items=num_items
    )


HEAD = Replacement(KernelHead, "linear_cross_entropy")
"""The replacement of the head of a replaced model."""

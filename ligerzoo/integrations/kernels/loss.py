"""The loss of transformers' causal language models, without materializing all logits.

The forward of a causal language model computes logits with its head, may scale and cap them, and passes them to
`self.loss_function`. In training with labels, the head of a replaced model returns `DeferredLogits` instead: an object
that remembers the hidden states, the scale and the soft cap. The loss function computes the loss from them. The forward
of the model runs unchanged in between, so that its auxiliary losses and its outputs do not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ligerzoo.integrations.kernels.replace import KernelModule, Replacement
from ligerzoo.kernels import cross_entropy, linear_cross_entropy
from ligerzoo.layers.plain import is_plain, is_plain_tensor

Number = float
"""`DeferredLogits.float` hides the builtin."""


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
        operations: tuple[Callable[[Tensor], Tensor], ...] = (),
        logit_scale: Number = 1.0,
        softcap: Number | None = None,
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

        def objective(hidden_states: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
            weight, bias = self.head.weight, self.head.bias
            targets = target.to(hidden_states.device)
            if not is_plain_tensor(weight, bias) or weight.shape[0] != vocab_size:
                return _cross_entropy(
                    self._operated(project(hidden_states)), targets, vocab_size, num_items, ignore_index
                )
            return linear_cross_entropy(
                hidden_states,
                weight,
                targets,
                bias,
                ignore_index=ignore_index,
                softcap=self.softcap,
                logit_scale=self.logit_scale,
                num_items=num_items,
            )

        loss: Tensor = self.head.compute(self.hidden_states, objective)
        return loss

    def _operated(self, logits: Tensor) -> Tensor:
        for operation in self.operations:
            logits = operation(logits)
        return logits

    def float(self) -> DeferredLogits:
        """The loss is computed in fp32 in any case."""
        return self._then(lambda logits: logits.float(), self.logit_scale, self.softcap)

    def __mul__(self, factor: Any) -> Any:
        if not isinstance(factor, float | int):
            return self.materialize() * factor
        if self.softcap is None:
            return self._then(lambda logits: logits * factor, self.logit_scale * factor, None)
        if factor <= 0:
            return self.materialize() * factor
        # c tanh(s l) is a soft cap of c with a scale of s c.
        return self._then(lambda logits: logits * factor, self.logit_scale * factor, self.softcap * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if not isinstance(divisor, float | int):
            return self.materialize() / divisor
        if self.softcap is not None:
            return self.materialize() / divisor
        return self._then(lambda logits: logits / divisor, self.logit_scale / divisor, None)

    def tanh(self) -> DeferredLogits | Tensor:
        """A soft cap of 1."""
        if self.softcap is not None:
            return self.materialize().tanh()
        return self._then(torch.tanh, self.logit_scale, 1.0)

    def _then(
        self, operation: Callable[[Tensor], Tensor], logit_scale: Number, softcap: Number | None
    ) -> DeferredLogits:
        return DeferredLogits(self.head, self.hidden_states, (*self.operations, operation), logit_scale, softcap)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.tanh and isinstance(args[0], DeferredLogits):
            return args[0].tanh()
        args, kwargs = torch.utils._pytree.tree_map_only(DeferredLogits, cls.materialize, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)


def _materialized(name: str) -> Callable[..., Any]:
    def operation(self: DeferredLogits, *arguments: Any) -> Any:
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

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Returns logits, or `DeferredLogits` without running hooks."""
        if self.kernel_defers:
            return DeferredLogits(self, *arguments, **named)
        return super().__call__(*arguments, **named)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Makes calls return `DeferredLogits` within the block."""
        self.kernel_defers = True
        try:
            yield
        finally:
            self.kernel_defers = False

    def compute(self, *arguments: Any) -> Any:
        """Calls the module, with its hooks. Arguments are those of `forward`."""
        return super().__call__(*arguments)

    def forward(self, input: Tensor, objective: Callable[..., Tensor] | None = None) -> Tensor:
        """Returns logits, or the loss if an objective is given.

        Args:
            input: hidden states, (..., H).
            objective: called with hidden states and the function that computes their logits.
        """
        project: Callable[[Tensor], Tensor] = super().forward
        return project(input) if objective is None else objective(input, project)


class KernelCausalLM(KernelModule):
    """The model's own forward, with deferred logits."""

    kernel_kind = "loss"
    get_output_embeddings: Callable[[], nn.Module]

    @classmethod
    def kernel_members(cls, original: Any, **options: Any) -> dict[str, Any]:
        """Returns the forward, with the signature of the original, and the loss function."""
        forward = original.forward
        positions = {name: i for i, name in enumerate(inspect.signature(forward).parameters, start=-1)}

        def argument(name: str, default: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            position = positions.get(name, len(arguments))
            return arguments[position] if position < len(arguments) else named.get(name, default)

        @wraps(forward)
        def deferring_forward(self: Any, *arguments: Any, **named: Any) -> Any:
            labels = argument("labels", None, arguments, named)
            logits_to_keep = argument("logits_to_keep", 0, arguments, named)
            keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
            head = self.get_output_embeddings()
            if (
                labels is None
                or not self.training
                or not keeps_all
                or self.loss_function is not causal_lm_loss  # set by the user
                or not isinstance(head, KernelHead)  # resized or wrapped since
            ):
                return forward(self, *arguments, **named)
            return_dict = named.pop("return_dict", None)
            with head.deferring():
                output = forward(self, *arguments, return_dict=True, **named)
            output = _without_logits(output)
            if return_dict is None:
                return_dict = getattr(self.config, "return_dict", True)
            return output if return_dict else output.to_tuple()

        own_loss_function: property = original.loss_function
        get_loss_function: Any = own_loss_function.fget  # torch.compile cannot trace the property's fget

        def loss_function(self: Any) -> Callable[..., Any]:
            theirs: Callable[..., Any] = get_loss_function(self)
            return causal_lm_loss if theirs is ForCausalLMLoss else theirs

        return {"forward": deferring_forward, "loss_function": property(loss_function, own_loss_function.fset)}

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the head. A new `nn.Linear`, such as that of `resize_token_embeddings`, computes the loss too."""
        if isinstance(self.get_output_embeddings(), KernelHead) and is_plain(new_embeddings, nn.Linear):
            new_embeddings.__class__ = HEAD.class_for(new_embeddings)  # type: ignore[assignment]
        super().set_output_embeddings(new_embeddings)  # type: ignore[misc]

    def kernel_parts(self) -> list[KernelModule]:
        """Returns the head, which may be newer than the call of `apply`."""
        head = self.get_output_embeddings()
        return [head] if isinstance(head, KernelHead) else []


def _without_logits(output: ModelOutput) -> ModelOutput:
    fields = {name: value for name, value in output.items() if name != "logits"}
    return type(output)(**fields)


def causal_lm_loss(
    logits: Tensor | DeferredLogits,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """`transformers.loss.loss_utils.ForCausalLMLoss`, whose arguments it takes, from deferred or given logits."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    if isinstance(logits, DeferredLogits):
        return logits.loss(shift_labels, vocab_size, num_items_in_batch, ignore_index)
    return _cross_entropy(logits, shift_labels.to(logits.device), vocab_size, num_items_in_batch, ignore_index)


def _cross_entropy(
    logits: Tensor, target: Tensor, vocab_size: int, num_items: int | Tensor | None, ignore_index: int
) -> Tensor:
    """logits: (..., V), target: (...) -> 0-d."""
    return cross_entropy(
        logits.view(-1, vocab_size), target.reshape(-1), ignore_index=ignore_index, num_items=num_items
    )


def recognize_causal_lm(module: nn.Module) -> Replacement | str | None:
    """Returns the replacement of a causal language model, or why it has none; None for other modules.

    The caller replaces its head by `HEAD`.
    """
    if not isinstance(module, PreTrainedModel):
        return None
    forward = type(module).forward
    head: Any = module.get_output_embeddings()
    if head is None or "labels" not in inspect.signature(forward).parameters:
        return None
    if "loss_function" not in inspect.unwrap(forward).__code__.co_names:
        return "its forward does not call self.loss_function"
    if module.loss_function is not ForCausalLMLoss:
        return f"its loss is {getattr(module.loss_function, '__name__', module.loss_function)}, not ForCausalLMLoss"
    if isinstance(head, KernelHead):  # of a model within this one, or around it
        return Replacement(KernelCausalLM, HEAD.kernel)
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__module__}.{type(head).__qualname__}, not a torch.nn.Linear"
    if not is_plain(head, nn.Linear):
        return "its head has hooks or another forward"
    return Replacement(KernelCausalLM, HEAD.kernel)


HEAD = Replacement(KernelHead, "linear_cross_entropy")
"""The replacement of the head of a replaced model."""

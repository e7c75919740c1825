"""The loss of transformers' causal language models, without materializing all logits.

The forward of a causal language model computes logits with its head, may scale and cap them, and passes them to
`self.loss_function`. In training with labels, the head of a replaced model returns `DeferredLogits` instead: an object
that remembers the hidden states, the scale and the soft cap. The loss function computes the loss from them. The forward
of the model runs unchanged in between, so that its auxiliary losses and its outputs do not change.
"""

from __future__ import annotations

import builtins  # `DeferredLogits.float` hides one
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ligerzoo.checks import is_number
from ligerzoo.integrations.kernels.replace import KernelModule, Options, Recognized, Replacement
from ligerzoo.kernels import cross_entropy, linear_cross_entropy
from ligerzoo.layers.plain import is_plain, is_plain_tensor

Operation: TypeAlias = Callable[[Tensor], Tensor]
LossFunction: TypeAlias = Callable[..., Tensor]


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
                return _cross_entropy(logits, targets, vocab_size, num_items, ignore_index)
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


def _kernel_head(model: PreTrainedModel) -> KernelHead | None:
    """Returns the head of a model if it is a replaced one."""
    head = model.get_output_embeddings()
    return head if isinstance(head, KernelHead) else None


class KernelCausalLM(KernelModule):
    """The model's own forward, with deferred logits."""

    kernel_kind = "loss"
    get_output_embeddings: Callable[[], nn.Module]

    @classmethod
    def kernel_members(cls, original: type[PreTrainedModel], options: Options) -> dict[str, object]:
        """Returns the forward, with the signature of the original, and the loss function."""
        forward = original.forward
        names = [*inspect.signature(forward).parameters][1:]

        @wraps(forward)
        def deferring_forward(
            self: PreTrainedModel, *arguments: object, **named: object
        ) -> ModelOutput | tuple[object, ...]:
            given = {**dict(zip(names, arguments, strict=False)), **named}
            logits_to_keep = given.get("logits_to_keep", 0)
            head = _kernel_head(self)
            if (
                given.get("labels") is None
                or not self.training
                or not (isinstance(logits_to_keep, int) and logits_to_keep == 0)
                or self.loss_function is not causal_lm_loss  # set by the user
                or head is None  # resized or wrapped since
            ):
                return forward(self, *arguments, **named)
            return_dict = named.pop("return_dict", None)
            with head.deferring():
                output = forward(self, *arguments, return_dict=True, **named)
            output = type(output)(**{name: value for name, value in output.items() if name != "logits"})
            if return_dict is None:
                return_dict = getattr(self.config, "return_dict", True)
            return output if return_dict else output.to_tuple()

        get_loss_function = original.loss_function.fget  # torch.compile cannot trace the property's fget

        def loss_function(self: PreTrainedModel) -> LossFunction:
            theirs: LossFunction = get_loss_function(self)
            return causal_lm_loss if theirs is ForCausalLMLoss else theirs

        return {"forward": deferring_forward, "loss_function": property(loss_function, original.loss_function.fset)}

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the head. A new `nn.Linear`, such as that of `resize_token_embeddings`, computes the loss too."""
        if _kernel_head(self) is not None and is_plain(new_embeddings, nn.Linear):
            new_embeddings = HEAD.replace(new_embeddings)
        super().set_output_embeddings(new_embeddings)  # type: ignore[misc]

    def kernel_parts(self) -> list[KernelModule]:
        """Returns the head, which may be newer than the call of `apply`."""
        head = _kernel_head(self)
        return [] if head is None else [head]


def causal_lm_loss(
    logits: Tensor | DeferredLogits,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **unused: object,
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


def recognize_causal_lm(module: nn.Module) -> Recognized:
    """Recognizes a causal language model. Its head is replaced after it, by `HEAD`."""
    if not isinstance(module, PreTrainedModel):
        return None
    forward = type(module).forward
    head: nn.Module | None = module.get_output_embeddings()
    if head is None or "labels" not in inspect.signature(forward).parameters:
        return None
    if "loss_function" not in inspect.unwrap(forward).__code__.co_names:
        return "its forward does not call self.loss_function"
    if module.loss_function is not ForCausalLMLoss:
        return f"its loss is {getattr(module.loss_function, '__name__', module.loss_function)}, not ForCausalLMLoss"
    if _kernel_head(module) is None:  # else it is of a model within this one, or around it
        if type(head) is not nn.Linear:
            return f"its head is a {type(head).__module__}.{type(head).__qualname__}, not a torch.nn.Linear"
        if not is_plain(head, nn.Linear):
            return "its head has hooks or another forward"
    return Replacement(KernelCausalLM, HEAD.kernel)


HEAD = Replacement(KernelHead, "linear_cross_entropy")
"""The replacement of the head of a replaced model."""

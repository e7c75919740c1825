"""The loss of transformers' causal and masked language models, without materializing all logits.

The forward of a causal language model computes logits with its head, may scale and cap them, and passes them to
`self.loss_function`. In training with labels, the head of a replaced model returns `DeferredLogits` instead, from which
the loss function computes the loss. The forward of the model runs unchanged in between, so that its auxiliary losses
and its outputs do not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ligerzoo.integrations.kernels.head import HEAD, DeferredLogits, KernelHead, loss_of_logits
from ligerzoo.integrations.kernels.replace import KernelModule, Options, Recognized, Replacement
from ligerzoo.layers.plain import is_plain

LossFunction: TypeAlias = Callable[..., Tensor]


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
                or self.loss_function not in LOSSES.values()  # set by the user
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
            return LOSSES.get(theirs, theirs)

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
    return masked_lm_loss(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


def masked_lm_loss(
    logits: Tensor | DeferredLogits,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    **unused: object,
) -> Tensor:
    """`transformers.loss.loss_utils.ForMaskedLMLoss`, whose arguments it takes, from deferred or given logits."""
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    if isinstance(logits, DeferredLogits):
        return logits.loss(labels, vocab_size, num_items_in_batch, ignore_index)
    return loss_of_logits(logits, labels.to(logits.device), vocab_size, num_items_in_batch, ignore_index)


LOSSES: Mapping[LossFunction, LossFunction] = {ForCausalLMLoss: causal_lm_loss, ForMaskedLMLoss: masked_lm_loss}
"""The loss functions of transformers that are replaced."""


class KernelMaskedLM(KernelCausalLM):
    """BERT and relatives, whose forward computes the loss itself: the forward without labels, with deferred logits."""

    @classmethod
    def kernel_members(cls, original: type[PreTrainedModel], options: Options) -> dict[str, object]:
        """Returns the forward, with the signature of the original."""
        forward = original.forward
        names = [*inspect.signature(forward).parameters][1:]

        @wraps(forward)
        def deferring_forward(
            self: PreTrainedModel, *arguments: object, **named: object
        ) -> ModelOutput | tuple[object, ...]:
            given: dict[str, Any] = {**dict(zip(names, arguments, strict=False)), **named}
            head, labels = _kernel_head(self), given.pop("labels", None)
            if labels is None or not self.training or head is None:
                return forward(self, *arguments, **named)
            return_dict = given.pop("return_dict", None)
            with head.deferring():
                output = forward(self, **given, return_dict=True)
            loss = masked_lm_loss(output["logits"], labels, self.config.vocab_size)
            output = type(output)(loss=loss, **{name: value for name, value in output.items() if name != "logits"})
            if return_dict is None:
                return_dict = getattr(self.config, "return_dict", True)
            return output if return_dict else output.to_tuple()

        return {"forward": deferring_forward}


def recognize_causal_lm(module: nn.Module) -> Recognized:
    """Recognizes a causal or masked language model. Its head is replaced after it, by `HEAD`."""
    if not isinstance(module, PreTrainedModel):
        return None
    forward = type(module).forward
    head: nn.Module | None = module.get_output_embeddings()
    if head is None or "labels" not in inspect.signature(forward).parameters:
        return None
    mixin: type[KernelCausalLM] = KernelCausalLM
    called = inspect.unwrap(forward).__code__.co_names
    if type(module).__name__.endswith("ForMaskedLM") and "CrossEntropyLoss" in called:
        mixin = KernelMaskedLM
    elif "loss_function" not in called:
        return "its forward does not call self.loss_function"
    elif module.loss_function not in LOSSES:
        name = getattr(module.loss_function, "__name__", module.loss_function)
        return f"its loss is {name}, not ForCausalLMLoss or ForMaskedLMLoss"
    if _kernel_head(module) is None:  # else it is of a model within this one, or around it
        if type(head) is not nn.Linear:
            return f"its head is a {type(head).__module__}.{type(head).__qualname__}, not a torch.nn.Linear"
        if not is_plain(head, nn.Linear):
            return "its head has hooks or another forward"
    return Replacement(mixin, HEAD.kernel)

"""The losses of `ligerzoo.kernels` over tokens as modules that keep their options.

    loss = LinearCrossEntropyLoss(softcap=30.0)
    loss(hidden, weight, target)  # linear_cross_entropy(hidden, weight, target, softcap=30.0)

`ligerzoo.layers.LMHead` is the module that owns the weight, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligerzoo.kernels import (
    cross_entropy,
    jsd,
    kl_div,
    linear_cross_entropy,
    linear_jsd,
    linear_kl_div,
    linear_tvd,
    tvd,
)
from ligerzoo.tensor_checks import unknown_options


class TokenLoss(nn.Module):
    """Base class of the losses over tokens: a function of `ligerzoo.kernels` with options.

    Args:
        options: keyword arguments of the function, used in every call that does not override them. Tensors, such as
            `class_weight`, are buffers: they move with the module, and are not saved.

    Raises:
        TypeError: the function has no such option.
    """

    function: ClassVar[Callable[..., object]]
    """The function, whose arguments `forward` takes."""

    def __init_subclass__(cls, function: Callable[..., object]) -> None:
        cls.function = staticmethod(function)

        def forward(self: TokenLoss, *inputs: Tensor, **options: object) -> object:
            return TokenLoss.forward(self, *inputs, **options)

        signature = inspect.signature(function)  # which `help` shows
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        forward.__doc__ = function.__doc__
        vars(forward)["__signature__"] = signature.replace(parameters=[own, *signature.parameters.values()])
        cls.forward = forward  # type: ignore[method-assign]

    def __init__(self, **options: object) -> None:
        super().__init__()
        parameters = inspect.signature(self.function).parameters.values()
        accepted = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        if error := unknown_options(type(self).__name__, options, accepted):
            raise error
        self.options = {}
        for name, value in options.items():
            if torch.is_tensor(value):
                self.register_buffer(name, value, persistent=False)
            else:
                self.options[name] = value

    def forward(self, *inputs: Tensor, **options: object) -> Any:
        """Computes the loss.

        Args:
            inputs: the tensors that the function takes by position.
            options: keyword arguments of the function; override the module's options.
        """
        return self.function(*inputs, **{**self.options, **dict(self.named_buffers()), **options})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class CrossEntropyLoss(TokenLoss, function=cross_entropy):
    """Cross entropy of (logits, target): `ligerzoo.kernels.cross_entropy`."""


class LinearCrossEntropyLoss(TokenLoss, function=linear_cross_entropy):
    """Cross entropy of (hidden, weight, target, bias=None), without all logits at once:
    `ligerzoo.kernels.linear_cross_entropy`."""


class KLDivLoss(TokenLoss, function=kl_div):
    """Kullback-Leibler divergence of logits (student, teacher, target=None): `ligerzoo.kernels.kl_div`."""


class JSDLoss(TokenLoss, function=jsd):
    """Jensen-Shannon divergence of logits (student, teacher, target=None): `ligerzoo.kernels.jsd`."""


class TVDLoss(TokenLoss, function=tvd):
    """Total variation distance of logits (student, teacher, target=None): `ligerzoo.kernels.tvd`."""


class LinearKLDivLoss(TokenLoss, function=linear_kl_div):
    """Kullback-Leibler divergence of (student_hidden, student_weight, teacher_hidden, teacher_weight, target=None):
    `ligerzoo.kernels.linear_kl_div`."""


class LinearJSDLoss(TokenLoss, function=linear_jsd):
    """Jensen-Shannon divergence of (student_hidden, student_weight, teacher_hidden, teacher_weight, target=None):
    `ligerzoo.kernels.linear_jsd`."""


class LinearTVDLoss(TokenLoss, function=linear_tvd):
    """Total variation distance of (student_hidden, student_weight, teacher_hidden, teacher_weight, target=None):
    `ligerzoo.kernels.linear_tvd`."""

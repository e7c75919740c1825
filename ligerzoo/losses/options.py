"""Options of a loss: one frozen dataclass, checked once, from which its function and its module take their arguments.

    @dataclass(frozen=True, kw_only=True)
    class HingeOptions(LogpOptions):
        beta: Positive = 0.1

    @takes(HingeOptions)
    def hinge_loss(inputs: LossInputs, options: HingeOptions) -> LossOutput: ...

    hinge_loss(hidden, weight, target, beta=0.2)  # hinge_loss(hidden, weight, target, beta=-1.0) raises

The annotation of a field says which values the option accepts. Options with other values are tensors, which the loss
checks together with the hidden states.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
    get_origin,
    get_type_hints,
)

from torch import Tensor

from ligerzoo.checks import (
    FINITE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Values,
    integer,
    option_values,
    refused,
)
from ligerzoo.errors import LigerzooError, WrongTypeError
from ligerzoo.foreign_names import our_name
from ligerzoo.kernels.dispatch import Backend
from ligerzoo.kernels.loss.token_loss import Terms
from ligerzoo.tensor_checks import unknown_options

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

Finite = Annotated[float, FINITE]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Fraction = Annotated[float, FRACTION]
NumItems = int | Tensor | None
"""A divisor of a sum: a positive number or a 0-d tensor, see `ligerzoo.tensor_checks.check_num_items`."""


class LossInputs(NamedTuple):
    """The tensors of every loss.

    Attributes:
        name: the function that error messages name.
        hidden: (B, T, H) hidden states, or (B, T, V) logits.
        weight: (V, H) weight of the LM head; None if `hidden` holds logits.
        target: (B, T) token ids, already shifted, or `ignore_index`.
    """

    name: str
    hidden: Tensor
    weight: Tensor | None
    target: Tensor

    @property
    def n_classes(self) -> int:
        """V."""
        return self.hidden.shape[-1] if self.weight is None else self.weight.shape[0]


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Options of the LM head, keyword arguments of every loss; the same as those of `ligerzoo.kernels.token_logps`.

    Attributes:
        bias: (V,), added to the logits. Default: None.
        ignore_index: the target of ignored tokens, such as prompts and padding. Default: -100.
        softcap: c, for logits `c tanh(logits / c)`. Default: None.
        logit_scale: multiplies the logits, before the softcap. Default: 1.0.
        logits_budget: MiB of logits that exist at a time. Default: None, the budget of `set_logits_budget`. The loss is
            fastest if the logits of a pair of T tokens fit (of a sequence, for losses over sequences): 4 T V bytes in
            bf16 (2 T V). Otherwise backward computes the logits again, 8MHV operations instead of 6MHV. Ignored for
            given logits.
        backend: "auto" (Triton if it supports the device), "triton" or "torch" (the reference). Default: "auto".
    """

    accepted: ClassVar[dict[str, Values | None]] = {}
    """The values that each option accepts; None for tensors."""

    positional: ClassVar[tuple[str, ...]] = ()
    """Options that a loss also takes by position, after `target`."""

    required: ClassVar[tuple[str, ...]] = ()
    """Those of them without a default."""

    bias: Tensor | None = None
    ignore_index: Annotated[int, integer()] = -100
    softcap: Positive | None = None
    logit_scale: Finite = 1.0
    logits_budget: Annotated[int, integer(0, unit=" of MiB")] | None = None
    backend: Backend = "auto"

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        cls.accepted = {name: option_values(hint) for name, hint in hints.items() if get_origin(hint) is not ClassVar}
        fields = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        cls.positional = tuple(fields)
        cls.required = tuple(name for name, value in fields.items() if value.default is MISSING)

    @classmethod
    def checked(cls, name: str, /, *args: Any, **given: Any) -> Self:
        """Returns options. Raises LigerzooError for unknown ones and invalid values.

        Args:
            name: the function or module that messages name.
            args: positional arguments of the loss after `target`.
            given: its keyword arguments.
        """
        if error := unknown_options(name, given, cls.accepted):
            raise error
        for option, value in given.items():
            values = cls.accepted[option]
            if not (values is None or values.accepts(value)):
                raise refused(name, values, option, value, our_name(value))
        options = cls.unchecked(name, *args, **given)
        options.check(name)
        return options

    @classmethod
    def unchecked(cls, name: str, /, *args: Any, **given: Any) -> Self:
        """Returns options of values that are checked already. Raises WrongTypeError if a required tensor is missing."""
        try:
            return cls(*args, **given)
        except TypeError as error:
            raise WrongTypeError(str(error).replace(f"{cls.__name__}.__init__", name)) from None

    def check(self, name: str) -> None:
        """Raises LigerzooError for values that other options exclude or require; not for tensors."""

    def check_unused(self, name: str, choice: str, *unused: str) -> None:
        """Raises if an option that the choice, such as variant='sapo', does not use differs from its default."""
        for option in unused:
            value = getattr(self, option)
            if value != getattr(type(self), option):
                what = f"{option}={value!r} with {choice}, which does not use it; leave out {option}"
                raise LigerzooError(what, where=name)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with log-probabilities of a reference model."""
        return False

    @property
    def terms(self) -> Terms:
        """The transform of the logits."""
        return Terms(self.logit_scale, self.softcap, ignore_index=self.ignore_index)

    @property
    def of_logits(self) -> dict[str, Any]:
        """The options that `ligerzoo.kernels.cross_entropy` takes of the head, as keyword arguments."""
        return {
            "ignore_index": self.ignore_index,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "backend": self.backend,
        }

    def target_mask(self, target: Tensor) -> Tensor:
        """Returns a bool tensor, True at non-ignored targets."""
        return target != self.ignore_index


@dataclass(frozen=True, kw_only=True)
class LogpOptions(HeadOptions):
    """Options of the LM head, and the temperature of the log-probabilities.

    Attributes:
        temperature: divides the logits, after the softcap. Default: 1.0. Compute the log-probabilities of a reference
            model with the same temperature.
    """

    temperature: Positive = 1.0

    @property
    def terms(self) -> Terms:
        return Terms(self.logit_scale, self.softcap, self.temperature, ignore_index=self.ignore_index)


class Loss(Protocol[P, R]):
    """A loss that takes (hidden, weight, target) and then its options as arguments.

    Attributes:
        options_type: the dataclass of its options.
        evaluate: the loss as a function of its inputs and checked options.
    """

    __name__: str
    options_type: type[HeadOptions]

    @property
    def evaluate(self) -> Callable[[LossInputs, Any], R]: ...

    def __call__(
        self, hidden: Tensor, weight: Tensor | None, target: Tensor, *args: P.args, **given: P.kwargs
    ) -> R: ...


def takes(options: Callable[P, Any]) -> Callable[[Callable[[LossInputs, Any], R]], Loss[P, R]]:
    """Makes a `Loss` of a function of `LossInputs` and a dataclass of options, and documents its arguments."""

    def decorate(loss: Callable[[LossInputs, Any], R]) -> Loss[P, R]:
        checked, name = options.checked, loss.__name__  # type: ignore[attr-defined]

        @functools.wraps(loss)
        def function(hidden: Tensor, weight: Tensor | None, target: Tensor, *args: P.args, **given: P.kwargs) -> R:
            return loss(LossInputs(name, hidden, weight, target), checked(name, *args, **given))

        signature = inspect.signature(function, follow_wrapped=False)
        tensors = list(signature.parameters.values())[:3]
        own = inspect.signature(options).parameters.values()
        function.__doc__ = _documentation(loss.__doc__ or "", options)
        signature = signature.replace(parameters=[*tensors, *own])
        vars(function).update(__signature__=signature, options_type=options, evaluate=loss)
        return cast(Loss[P, R], function)

    return decorate


_TENSORS = """Args:
    hidden: (B, T, H) hidden states, or (B, T, V) logits.
    weight: (V, H) weight of the LM head; None if `hidden` holds logits.
    target: (B, T) token ids, already shifted: `target[b, t]` is the token that `hidden[b, t]` predicts. `ignore_index`
        marks prompts, padding and other ignored tokens."""

_ERRORS = """Raises:
    TypeError: an option is unknown, or an argument has another type.
    ValueError: shapes, dtypes or targets are invalid, or an option is out of range, missing, or unused by the variant.
"""


def _documentation(text: str, options: Any) -> str:
    """Returns the documentation of a loss, with its arguments: those of a dataclass and of the classes it inherits."""
    summary, _, results = inspect.cleandoc(text).partition("\n\nReturns:")
    if "\n\nArgs:" not in summary:
        summary = f"{summary}\n\n{_TENSORS}"
    documentations = (inspect.cleandoc(one.__doc__ or "") for one in inspect.getmro(options))
    attributes = (documentation.partition("Attributes:\n")[2] for documentation in documentations)
    return "\n".join([summary, *filter(None, attributes), "", f"Returns:{results}", "", _ERRORS])

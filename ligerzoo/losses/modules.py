"""The losses as modules that keep their options and compute the loss of a model.

The model computes the loss within its own forward. So the hooks of DistributedDataParallel and FSDP2 run around
everything that reads a parameter, including the weight of the LM head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ligerzoo.errors import LigerzooError, WrongTypeError
from ligerzoo.losses.distillation import distillation_loss
from ligerzoo.losses.dpo import dpo_loss
from ligerzoo.losses.grpo import grpo_loss, ppo_clip_loss
from ligerzoo.losses.kto import kto_loss
from ligerzoo.losses.logps import label_logps, sequence_logps, unpacked
from ligerzoo.losses.objective import LossOutput
from ligerzoo.losses.options import HeadOptions, Loss, LossInputs
from ligerzoo.losses.reference_free import cpo_loss, orpo_loss, simpo_loss
from ligerzoo.tensor_checks import describe_value, unknown_options

Model = Callable[..., Any]
"""A `ligerzoo.models.CausalLM`, or a wrapper that passes arguments and results on."""

_EXPECTED_MODEL = "a ligerzoo.models.CausalLM"
_REMEDY = (
    "AutoModel.from_pretrained returns one; a wrapper around one is fine too. dpo_loss and the other functions take "
    "any model's hidden states and head weight, or its logits"
)


def _check_model(name: str, model: object) -> None:
    """Raises TypeError, before any forward runs, for a module without an `objective` argument in its forward.

    A callable other than a module is checked by its output, see `_ModelCall.run`.
    """
    if torch.compiler.is_compiling() or (callable(model) and not isinstance(model, nn.Module)):
        return
    if not isinstance(model, nn.Module):
        what, remedy = f"got {describe_value(model)} for a model", None
    elif any(_accepts_objective(type(module)) for module in model.modules()):
        return
    else:
        what, remedy = f"got a {type(model).__name__} ({type(model).__module__})", _REMEDY
    raise WrongTypeError(what, where=name, expected=_EXPECTED_MODEL, remedy=remedy)


def _accepts_objective(module: type[nn.Module]) -> bool:
    """Returns whether the forward takes labels and an objective, as that of `ligerzoo.models.CausalLM` does."""
    return inspect.signature(module.forward).parameters.keys() >= {"labels", "objective"}


class _ModelCall(NamedTuple):
    """A forward of a model that computes something of its hidden states, head and shifted labels.

    Attributes:
        name: the function or module that messages name.
        model: the model.
        input_ids, labels: (B, T).
        inputs: other inputs of the model.
        sequences: the sequences of packed rows, see `HeadLoss.of`.
    """

    name: str
    model: Model
    input_ids: Tensor
    labels: Tensor
    inputs: Mapping[str, object]
    sequences: Tensor | None = None

    def run(self, objective: Callable[..., object]) -> Any:
        """Runs the model; raises TypeError if its output is not a `CausalLMOutput`."""
        _check_model(self.name, self.model)

        def of_sequences(hidden: Tensor, weight: Tensor, target: Tensor, **head: Any) -> object:
            if self.sequences is not None:
                hidden, target = unpacked(self.name, hidden, target, self.sequences)
            return objective(hidden, weight, target, **head)

        out = self.model(self.input_ids, labels=self.labels, objective=of_sequences, **self.inputs)
        if not hasattr(out, "details"):
            what = f"got a {type(self.model).__name__}, which returns a {type(out).__name__}"
            raise WrongTypeError(what, where=self.name, expected=_EXPECTED_MODEL, remedy=_REMEDY)
        return out

    def logps(self, logps: Callable[..., Tensor], **head_options: object) -> Tensor:
        """Computes log-probabilities within the forward; `head_options` override those of the model's head."""

        def objective(*head: Tensor, **options: object) -> tuple[None, Tensor]:
            return None, logps(*head, **{**options, **head_options})

        details: Tensor = self.run(objective).details
        return details

    def loss(self, loss_of: Callable[..., LossOutput], aux_loss_share: float) -> LossOutput:
        """Computes a loss within the forward.

        Adds the load-balancing loss of the model's routers times `aux_loss_share`, and reports it as "aux_loss".
        """
        own_loss: object = None

        def objective(*head: Tensor, **options: object) -> LossOutput:
            nonlocal own_loss
            output = loss_of(*head, **options)
            own_loss = output.loss
            return output

        out = self.run(objective)
        if out.aux_loss is None:
            return LossOutput(out.loss, out.details)
        loss = out.loss  # includes the load-balancing loss in full
        if aux_loss_share != 1:
            loss = own_loss + aux_loss_share * (loss - own_loss)
        return LossOutput(loss, {**out.details, "aux_loss": out.aux_loss.detach()})


def model_token_logps(
    model: Model, input_ids: Tensor, labels: Tensor, *, temperature: float = 1.0, **inputs: Any
) -> Tensor:
    """Returns the log-probability of each label under a model, differentiable, without holding all logits.

    Args:
        model: a `ligerzoo.models.CausalLM`, or a wrapper around one (DDP, FSDP2).
        input_ids: (B, T) token ids.
        labels: (B, T) token ids, not shifted; -100 for ignored tokens.
        temperature: divides the logits.
        inputs: other inputs of the model, such as `attention_mask`.

    Returns:
        (B, T) fp32: index t holds the log-probability of `labels[:, t + 1]`. 0 at ignored labels and at the last index.

    Raises:
        TypeError: the model is not a `ligerzoo.models.CausalLM`.
    """
    call = _ModelCall("model_token_logps", model, input_ids, labels, inputs)
    return call.logps(partial(label_logps, temperature=temperature))


def model_sequence_logps(
    model: Model,
    input_ids: Tensor,
    labels: Tensor,
    *,
    average_log_prob: bool = False,
    temperature: float = 1.0,
    sequences: Tensor | None = None,
    **inputs: Any,
) -> Tensor:
    """Returns the log-probability of each sequence of labels under a model, differentiable.

    Args:
        model: a `ligerzoo.models.CausalLM`, or a wrapper around one (DDP, FSDP2).
        input_ids: (B, T) token ids.
        labels: (B, T) token ids, not shifted; -100 for ignored tokens.
        average_log_prob: divide by the number of non-ignored labels.
        temperature: divides the logits.
        sequences: (N, L) int64, the sequences of packed rows, see `HeadLoss.of`. Default: each row is a sequence.
        inputs: other inputs of the model, such as `attention_mask`, or `position_ids` of packed rows.

    Returns:
        (B,) or (N,) fp32: the sum or mean over non-ignored labels; 0 for a sequence without any.

    Raises:
        TypeError: the model is not a `ligerzoo.models.CausalLM`.
    """
    call = _ModelCall("model_sequence_logps", model, input_ids, labels, inputs, sequences)
    return call.logps(partial(sequence_logps, average_log_prob=average_log_prob, temperature=temperature))


class HeadLoss(nn.Module):
    """Base class of the loss modules: a loss function with options.

    Call the module with hidden states, the weight of the LM head and targets, or pass a model to `of`.

    Args:
        options: keyword arguments of the function, used in every call that does not override them. Options of the LM
            head (see `LogpOptions`) override those of a model's own head.

    Raises:
        TypeError: the function has no such argument, or an option has another type.
        ValueError: an option is out of range, or the variant does not use it or requires another one.
    """

    function: ClassVar[Loss[..., LossOutput]]
    """The loss function."""

    options_type: ClassVar[type[HeadOptions]]
    """Its options."""

    def __init_subclass__(cls, function: Loss[..., LossOutput] | None = None) -> None:
        if function is not None:
            cls.function, cls.options_type = function, function.options_type

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._checked(options)
        self.options = options

    def _checked(self, arguments: Mapping[str, object]) -> HeadOptions:
        """Returns the options of a loss; tensors that it requires may be missing. Raises as the function does."""
        optional = dict.fromkeys(self.options_type.required)
        return self.options_type.checked(type(self).__name__, **(optional | dict(arguments)))

    def _given(
        self, method: Callable[..., object], args: Sequence[object], inputs: Mapping[str, object]
    ) -> tuple[HeadOptions, dict[str, Any]]:
        """Returns the options of a call of `of` or `of_teacher`, and those that the module or the call gives.

        Raises before any model runs.
        """
        name, options = type(self).__name__, self.options_type
        given = {**self.options, **dict(zip(options.positional, args, strict=False)), **inputs}
        if torch.compiler.is_compiling():
            return self._checked(given), given
        if len(args) > len(options.positional):
            what = f"got {3 + len(args)} positional arguments"
            expected = ", ".join(("model", "input_ids", "labels", *options.positional))
            remedy = "Pass the others by name, such as attention_mask=..."
            raise WrongTypeError(what, where=f"{name}.of", expected=expected, remedy=remedy)
        remedy = "Other inputs of the model go into model_inputs={...}"
        if error := unknown_options(name, given, options.accepted, remedy, inspect.signature(method).parameters):
            raise error
        for option in options.required:
            if option not in given:
                expected = "a tensor, after labels or by name"
                raise WrongTypeError(f"{option} is missing", where=f"{name}.of", expected=expected)
        checked = self._checked(given)
        if "ignore_index" in given:
            what = f"got ignore_index={given['ignore_index']!r}"
            raise LigerzooError(what, where=name, expected="none, models ignore labels of -100")
        return checked, given

    def _evaluate(self, head: Sequence[Tensor], *args: Tensor, **options: Any) -> LossOutput:
        """Returns the loss of (hidden, weight, target), with options that `_given` has checked or a model gives."""
        function = type(self).function
        name = function.__name__
        return function.evaluate(LossInputs(name, *head), function.options_type.unchecked(name, *args, **options))

    def forward(self, hidden: Tensor, weight: Tensor | None, target: Tensor, *args: Any, **inputs: Any) -> LossOutput:
        """Computes the loss of hidden states, the weight of the LM head (None for logits) and shifted targets.

        Args:
            hidden, weight, target: see the function.
            args: positional arguments of the function after `target`.
            inputs: keyword arguments of the function; override the module's options.
        """
        loss: LossOutput = type(self).function(hidden, weight, target, *args, **{**self.options, **inputs})
        return loss

    def of(
        self,
        model: Model,
        input_ids: Tensor,
        labels: Tensor,
        *args: Any,
        attention_mask: Tensor | None = None,
        model_inputs: Mapping[str, object] | None = None,
        reference: Model | None = None,
        sequences: Tensor | None = None,
        aux_loss_share: float = 1.0,
        **inputs: Any,
    ) -> LossOutput:
        """Computes the loss of a model, within its forward.

        Args:
            model: a `ligerzoo.models.CausalLM`, or a wrapper around one (DDP, FSDP2).
            input_ids: (B, T) token ids.
            labels: (B, T) token ids, not shifted (the model shifts them); -100 for prompts and padding.
            args: positional arguments of the function after `target`. Arguments of shape (B, T) are aligned with the
                shifted labels, as the result of `model_token_logps` is: index t is about `labels[:, t + 1]`.
            attention_mask: (B, T), 1 for a token and 0 for padding.
            model_inputs: other inputs of the model, such as `position_ids` or images.
            reference: the reference model; computes `ref_logps` without gradients.
            sequences: (N, L) int64, for rows that several sequences share: the indices b T + t of the tokens that
                predict the labels of each sequence, then -1. The function then gets N sequences, and all its arguments
                count these. Pass `position_ids` that begin at 0 in each segment as an input of the model.
            aux_loss_share: factor of the load-balancing loss of a mixture of experts: 1 / n for each of n microbatches.
            inputs: keyword arguments of the function; override the module's options.

        Returns:
            The loss and the metrics. The load-balancing loss is added, whatever `num_items` is, and reported as
            "aux_loss".

        Raises:
            TypeError: a model is not a `ligerzoo.models.CausalLM`, the loss has no reference model, or an argument is
                unknown or missing.
            ValueError: both or (if the loss needs it) neither of `reference` and `ref_logps` are given, `ignore_index`
                is given, or the function raises.
        """
        name = type(self).__name__
        _check_model(name, model)  # before the reference runs
        options, given = self._given(self.of, args, inputs)
        has_logps = given.get("ref_logps") is not None
        if reference is None and not has_logps and options.needs_reference:
            remedy = "Pass reference=..., the model before training. SimPO, CPO and ORPO need none"
            what = "got neither reference nor ref_logps"
            raise LigerzooError(what, where=f"{name}.of", expected="one of them", remedy=remedy)
        model_inputs = {"attention_mask": attention_mask, **(model_inputs or {})}
        if reference is not None:
            if has_logps:
                raise LigerzooError("got both reference and ref_logps; pass one of them", where=name)
            if "ref_logps" not in self.options_type.accepted:
                what = f"{name} does not use a reference model; for a teacher use Distillation.of_teacher"
                raise WrongTypeError(what)
            head_options = {option: given[option] for option in ("logits_budget", "backend") if option in given}
            with torch.no_grad():
                call = _ModelCall(name, reference, input_ids, labels, model_inputs, sequences)
                given["ref_logps"] = call.logps(self.reference_logps(given), **head_options)

        def loss_of(*head: Tensor, **of_model: Any) -> LossOutput:
            return self._evaluate(head, **{**of_model, **given})

        return _ModelCall(name, model, input_ids, labels, model_inputs, sequences).loss(loss_of, aux_loss_share)

    def needs_reference(self, arguments: Mapping[str, object]) -> bool:
        """Returns whether `of` needs `reference` or `ref_logps`, with arguments that override the options."""
        return self._checked({**self.options, **arguments}).needs_reference

    def reference_logps(self, arguments: Mapping[str, Any]) -> Callable[..., Tensor]:
        """Returns the function of (hidden, weight, target) that computes `ref_logps`, given the loss's arguments."""
        return partial(sequence_logps, temperature=arguments.get("temperature", 1.0))

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class DPO(HeadLoss, function=dpo_loss):
    """Direct preference optimization and its variants: `dpo_loss`, whose keyword arguments are the options."""


class CPO(HeadLoss, function=cpo_loss):
    """Contrastive preference optimization: `cpo_loss`, whose keyword arguments are the options."""


class SimPO(HeadLoss, function=simpo_loss):
    """Simple preference optimization: `simpo_loss`, whose keyword arguments are the options."""


class ORPO(HeadLoss, function=orpo_loss):
    """Odds ratio preference optimization: `orpo_loss`, whose keyword arguments are the options."""


class KTO(HeadLoss, function=kto_loss):
    """Kahneman-Tversky optimization: `kto_loss`, whose keyword arguments are the options."""


class GRPO(HeadLoss, function=grpo_loss):
    """Group relative policy optimization and its variants: `grpo_loss`, whose keyword arguments are the options."""

    def reference_logps(self, arguments: Mapping[str, Any]) -> Callable[..., Tensor]:
        return partial(label_logps, temperature=arguments.get("temperature", 1.0))


class PPOClip(HeadLoss, function=ppo_clip_loss):
    """The policy loss of proximal policy optimization: `ppo_clip_loss`, whose keyword arguments are the options."""


class Distillation(HeadLoss, function=distillation_loss):
    """Distillation from a teacher: `distillation_loss`, whose keyword arguments are the options. See `of_teacher`."""

    def of_teacher(
        self,
        model: Model,
        teacher: Model,
        input_ids: Tensor,
        labels: Tensor,
        *,
        attention_mask: Tensor | None = None,
        model_inputs: Mapping[str, object] | None = None,
        aux_loss_share: float = 1.0,
        **inputs: Any,
    ) -> LossOutput:
        """Computes the loss of a student model, with a teacher model that reads the same tokens without gradients.

        The teacher runs within the student's forward, and the divergence is computed within both. So FSDP2 has gathered
        the head weights of both.

        Args:
            model: the student, a `ligerzoo.models.CausalLM` or a wrapper around one (DDP, FSDP2).
            teacher: the teacher, likewise, with the same vocabulary.
            input_ids: (B, T) token ids.
            labels: (B, T) token ids, not shifted; -100 for ignored tokens.
            attention_mask: (B, T), 1 for a token and 0 for padding.
            model_inputs: other inputs of both models.
            aux_loss_share: factor of the student's load-balancing loss, see `of`.
            inputs: keyword arguments of `distillation_loss`; override the module's options.

        Returns:
            The loss and the metrics, see `of`.

        Raises:
            TypeError: a model is not a `ligerzoo.models.CausalLM`.
            ValueError: `distillation_loss` raises.
        """
        name = type(self).__name__
        _check_model(name, teacher)  # before the student runs
        shared_inputs = {"attention_mask": attention_mask, **(model_inputs or {})}
        loss_of = self.with_teacher(_ModelCall(name, teacher, input_ids, labels, shared_inputs).run, **inputs)
        return _ModelCall(name, model, input_ids, labels, shared_inputs).loss(loss_of, aux_loss_share)

    def with_teacher(
        self, run_teacher: Callable[[Callable[..., object]], Any], **inputs: object
    ) -> Callable[..., LossOutput]:
        """Returns the loss as a function of a student's (hidden, weight, target) and its head's options.

        The function runs the teacher without gradients, and computes the divergence within the teacher's forward.

        Args:
            run_teacher: runs the teacher with an objective, a function of the hidden states that predict the same
                targets, the weight of the head and its options. Returns the output of the model.
            inputs: keyword arguments of `distillation_loss`; override the module's options.

        Raises:
            TypeError, ValueError: an option is unknown or invalid.
        """
        _, given = self._given(self.of_teacher, (), inputs)
        needs_gradient = torch.is_grad_enabled()

        def loss_of(*student: Tensor, **of_student: object) -> LossOutput:
            def objective(hidden: Tensor, weight: Tensor, _: Tensor, **head: object) -> tuple[None, LossOutput]:
                with torch.set_grad_enabled(needs_gradient):
                    names = head.keys() & {"bias", "softcap", "logit_scale"}
                    of_teacher = {f"teacher_{name}": head[name] for name in names}
                    return None, self._evaluate(student, hidden, weight, **{**of_teacher, **of_student, **given})

            with torch.no_grad():
                output: LossOutput = run_teacher(objective).details
            return output

        return loss_of

"""The losses as modules, which keep their options, and what they are of a whole model.

A model is called as it is, wrapped or not, and computes the loss within its forward: so the hooks of
DistributedDataParallel and FSDP2 run around all that reads a parameter, the head's weight among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligerzoo.kernels import token_logps
from ligerzoo.losses.distillation import distillation_loss
from ligerzoo.losses.dpo import dpo_loss
from ligerzoo.losses.grpo import grpo_loss, ppo_clip_loss
from ligerzoo.losses.kto import kto_loss
from ligerzoo.losses.logps import sequence_logps
from ligerzoo.losses.names import about_option
from ligerzoo.losses.objective import LogpOptions, LossOutput
from ligerzoo.losses.reference_free import cpo_loss, orpo_loss, simpo_loss

Model = Callable[..., Any]
"""A `ligerzoo.models.CausalLM`, or what wraps one and passes arguments and results on."""


def _check_model(model: Any) -> None:
    """Raises TypeError for a module that cannot compute a loss within its forward, before any forward runs. What else
    is callable shows only when it is called."""
    if torch.compiler.is_compiling() or not isinstance(model, nn.Module):
        return
    if not any(_computes_losses(type(module)) for module in model.modules()):
        raise TypeError(
            f"got a {type(model).__name__} ({type(model).__module__}); expected a ligerzoo.models.CausalLM, as "
            "AutoModel.from_pretrained loads it, or what wraps one. The functions, such as dpo_loss, take any model's "
            "hidden states and head, or its logits"
        )


def _computes_losses(module: type[nn.Module]) -> bool:
    """Whether its forward takes labels and an objective, as `ligerzoo.models.CausalLM`'s does."""
    return inspect.signature(module.forward).parameters.keys() >= {"labels", "objective"}


def _output_of(model: Model, *args: Any, **inputs: Any) -> Any:
    _check_model(model)
    out = model(*args, **inputs)
    if not hasattr(out, "details"):
        raise TypeError(
            f"got a {type(model).__name__}, which returns a {type(out).__name__}; expected a ligerzoo.models.CausalLM, "
            "or what wraps one. The functions, such as dpo_loss, take any model's hidden states and head, or its logits"
        )
    return out


def _loss_of(out: Any) -> LossOutput:
    routers = {} if out.aux_loss is None else {"aux_loss": out.aux_loss.detach()}
    return LossOutput(out.loss, {**out.details, **routers})


def _of_model(
    logps: Callable[..., Tensor], model: Model, input_ids: Tensor, labels: Tensor, inputs: Mapping[str, Any],
    head_options: Mapping[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    def objective(*head: Tensor, **options: Any) -> tuple[None, Tensor]:
        return None, logps(*head, **{**options, **(head_options or {})})

    found: Tensor = _output_of(model, input_ids, labels=labels, objective=objective, **inputs).details
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
    return _of_model(partial(token_logps, temperature=temperature), model, input_ids, labels, inputs)


def model_sequence_logps(
    model: Model, input_ids: Tensor, labels: Tensor, *, average: bool = False, temperature: float = 1.0, **inputs: Any
) -> Tensor:
    """(B,) fp32, differentiable: the sums of `model_token_logps` over the rows, or the means over the tokens that
    count."""
    logps = partial(sequence_logps, average=average, temperature=temperature)
    return _of_model(logps, model, input_ids, labels, inputs)


def _options_of(loss: Callable[..., LossOutput]) -> set[str]:
    """What a loss takes besides hidden states, the head's weight and targets."""
    return (inspect.signature(loss).parameters.keys() | LogpOptions.__annotations__.keys()) - {
        "hidden", "weight", "target", "head",
    }  # fmt: skip


class HeadLoss(nn.Module):
    """A loss with its options.

    Called with hidden states, the head's weight (or with logits and None), targets and the rest of the function's
    arguments; `of` takes a model instead.

    Args:
        options: arguments of the function, given with every call that gives no others; also of its head, see
            `LogpOptions`, where a model's are not to be taken.

    Raises:
        TypeError: the function has no such argument.
    """

    function: ClassVar[Callable[..., LossOutput]]
    """What the module calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        if unknown := options.keys() - _options_of(type(self).function):
            first = min(unknown)
            what_it_is = about_option(first, options[first])
            raise TypeError(f"{type(self).__name__} has no option {', '.join(sorted(unknown))}{what_it_is}")
        self.options = options

    def forward(self, hidden: Tensor, weight: Tensor | None, target: Tensor, *args: Any, **inputs: Any) -> LossOutput:
        """The function's result, of hidden states, a head's weight (None for logits) and targets already shifted."""
        loss: LossOutput = type(self).function(hidden, weight, target, *args, **{**self.options, **inputs})
        return loss

    def of(
        self,
        model: Model,
        input_ids: Tensor,
        labels: Tensor,
        *args: Any,
        attention_mask: Tensor | None = None,
        model_inputs: Mapping[str, Any] | None = None,
        reference: Model | None = None,
        **inputs: Any,
    ) -> LossOutput:
        """The loss of a model, and the metrics.

        Args:
            model: see `Model`.
            input_ids: (B, T) token ids.
            labels: (B, T), the same, -100 for those that do not count: prompts and padding. The model shifts them.
            args: arguments of the function after the targets. What they have for each token stands in the place of the
                token that predicts, as `model_token_logps` returns it.
            attention_mask: (B, T), 1 for a token and 0 for padding.
            model_inputs: what else the model takes.
            reference: the reference model, which gives `ref_logps` without gradients.
            inputs: like `args`, by name.

        Returns:
            The loss, with that of the routers (the metric "aux_loss") of a mixture that adds one: whole, whatever
            `num_items` is, so that over micro-batches it adds up to as many times as much.

        Raises:
            TypeError: the loss has no use for a reference model, or a model is none of the zoo's.
            ValueError: there is a reference model, and `ref_logps` as well; or an `ignore_index`, which labels have.
        """
        name, given = type(self).__name__, {**self.options, **inputs}
        _check_model(model)  # before the reference runs
        if "ignore_index" in given:
            raise ValueError(f"{name}: ignore_index={given['ignore_index']!r}; of a model's labels it is always -100")
        model_inputs = {"attention_mask": attention_mask, **(model_inputs or {})}
        if reference is not None:
            if given.get("ref_logps") is not None:
                raise ValueError(f"{name}: give a reference model or ref_logps, not both")
            if "ref_logps" not in _options_of(type(self).function):
                raise TypeError(f"{name} has no use for a reference model; a teacher is for Distillation.of_teacher")
            how: dict[str, Any] = {option: given[option] for option in ("logits_budget", "backend") if option in given}
            with torch.no_grad():
                logps = self.reference_logps(given)
                given["ref_logps"] = _of_model(logps, reference, input_ids, labels, model_inputs, how)

        def objective(*head: Tensor, **options: Any) -> LossOutput:
            loss: LossOutput = self(*head, *args, **{**options, **given})
            return loss

        return _loss_of(_output_of(model, input_ids, labels=labels, objective=objective, **model_inputs))

    def reference_logps(self, given: Mapping[str, Any]) -> Callable[..., Tensor]:
        """What makes `ref_logps` of a head, where the function is given these options."""
        return partial(sequence_logps, temperature=given.get("temperature", 1.0))

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class DPO(HeadLoss):
    """Direct preference optimization and its variants: `dpo_loss`, which has the options."""

    function = staticmethod(dpo_loss)


class CPO(HeadLoss):
    """Contrastive preference optimization: `cpo_loss`, which has the options."""

    function = staticmethod(cpo_loss)


class SimPO(HeadLoss):
    """Simple preference optimization: `simpo_loss`, which has the options."""

    function = staticmethod(simpo_loss)


class ORPO(HeadLoss):
    """Odds ratio preference optimization: `orpo_loss`, which has the options."""

    function = staticmethod(orpo_loss)


class KTO(HeadLoss):
    """Kahneman-Tversky optimization: `kto_loss`, which has the options."""

    function = staticmethod(kto_loss)


class GRPO(HeadLoss):
    """Group relative policy optimization and its variants: `grpo_loss`, which has the options."""

    function = staticmethod(grpo_loss)

    def reference_logps(self, given: Mapping[str, Any]) -> Callable[..., Tensor]:
        return partial(token_logps, temperature=given.get("temperature", 1.0))


class PPOClip(HeadLoss):
    """Proximal policy optimization, the policy's part: `ppo_clip_loss`, which has the options."""

    function = staticmethod(ppo_clip_loss)


class Distillation(HeadLoss):
    """A student's distance from a teacher: `distillation_loss`, which has the options. See `of_teacher`."""

    function = staticmethod(distillation_loss)

    def of_teacher(
        self,
        model: Model,
        teacher: Model,
        input_ids: Tensor,
        labels: Tensor,
        *,
        attention_mask: Tensor | None = None,
        model_inputs: Mapping[str, Any] | None = None,
        **inputs: Any,
    ) -> LossOutput:
        """The student's loss, with a teacher that reads the same tokens, without gradients.

        Args:
            model: the student, see `Model`.
            teacher: the teacher.

        The other arguments, and the result, are those of `of`. The teacher runs within the student's forward, and the
        divergence is computed within both: so that the hooks of both have gathered the heads' weights.
        """
        _check_model(teacher)  # before the student runs
        taught = {"attention_mask": attention_mask, **(model_inputs or {})}
        wants_gradients = torch.is_grad_enabled()

        def objective(*student: Tensor, **options: Any) -> LossOutput:
            def with_teacher(
                hidden: Tensor, weight: Tensor, _: Tensor, *, softcap: float | None, logit_scale: float, **__: Any
            ) -> tuple[None, LossOutput]:  # fmt: skip
                with torch.set_grad_enabled(wants_gradients):
                    teachers = {"teacher_softcap": softcap, "teacher_logit_scale": logit_scale}
                    return None, self(*student, hidden, weight, **{**teachers, **options, **self.options, **inputs})

            with torch.no_grad():
                loss: LossOutput = _output_of(
                    teacher, input_ids, labels=labels, objective=with_teacher, **taught
                ).details
            return loss

        return _loss_of(_output_of(model, input_ids, labels=labels, objective=objective, **taught))

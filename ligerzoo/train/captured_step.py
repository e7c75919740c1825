"""`CapturedStep`: a training step that the host launches as a few CUDA graphs instead of thousands of kernels.

Python takes about 2 ms for the forward and backward of a block, whatever its size. A small model computes faster, so
its GPU waits for the host. A captured step costs the host less than a millisecond, and has the bits of an eager one.

A graph runs for rows with other documents, too. So the attention of packed rows must not depend on them in steps that
are captured, nor in the eager steps before, whose bits are the same: it is FlexAttention. Steps that are never captured
choose the faster way for their documents.

A step of n micro-batches is up to three graphs: forward and backward of the first micro-batch, which creates the
gradients; forward and backward of a later one, which adds to them; and the update: clipping and the optimizer. The
graphs have one pool of memory. Gradients exist within a step only.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.cuda import CUDAGraph

from ligerzoo.checks import AT_LEAST_1, POSITIVE_OR_NONE, check, one_of
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.cuda_graph import capture as capture_graph
from ligerzoo.layers.input_properties import InputProperties, assuming_inputs, begins_segment
from ligerzoo.models.output import CausalLMOutput
from ligerzoo.tensor_checks import check_num_items
from ligerzoo.train.capturable import (
    inputs_obstacle,
    model_obstacle,
    optimizer_obstacle,
    state_of,
)
from ligerzoo.train.optimizers import SkipNonFinite
from ligerzoo.train.optimizers.clipped_step import ClippedStep

Capture = Literal["auto", "on", "off"]

Inputs = Mapping[str, object]
"""The inputs of a model by name."""

ComputeLoss = Callable[[nn.Module, Inputs, Tensor | None, int], Tensor]
"""Called with the model, the inputs of a micro-batch on its device, the divisor of the summed loss (0-d, or None) and
the number of micro-batches of the step. Returns the micro-batch's part of the loss, 0-d. It may not read values."""

WARMUP_STEPS = 2
"""Eager steps before a capture: they compile kernels and create what libraries need, which cannot be captured."""

_MAX_OPERATIONS = 2e13
"""Of a micro-batch with capture="auto": a fast GPU computes it in about 50 ms, and Python launches most models faster.
Larger ones gain nothing, and a graph keeps the memory of their activations."""


def language_model_loss(model: nn.Module, inputs: Inputs, num_items: Tensor | None, micro_batches: int) -> Tensor:
    """Returns a micro-batch's part of the loss of a step: the cross entropy, and the mean load-balancing loss."""
    return part_of_loss(model, model(**inputs, num_items_in_batch=num_items), micro_batches)


def part_of_loss(model: nn.Module, out: CausalLMOutput, micro_batches: int) -> Tensor:
    """Returns the loss of a micro-batch with its share of the load-balancing loss, whose mean the step has."""
    assert out.loss is not None
    if out.aux_loss is None or micro_batches == 1:
        return out.loss
    # the whole one is in the loss of each micro-batch
    return out.loss - (1 - 1 / micro_batches) * model.aux_loss_weight * out.aux_loss  # type: ignore[operator]


@dataclass(frozen=True)
class _StepInputs:
    """What a step reads.

    Attributes:
        batches: the inputs of each micro-batch.
        num_items: the divisor of the loss.
    """

    batches: Sequence[Inputs]
    num_items: int | Tensor | None

    @cached_property
    def properties(self) -> InputProperties:
        """What selects the attention kernels: one answer for all micro-batches. Reads values."""
        masks = (_tensors(inputs).get("attention_mask") for inputs in self.batches)
        padding = any(mask is not None and mask.dim() == 2 and not bool(mask.all()) for mask in masks)
        return InputProperties(padding, any(starts is not None and bool(starts.any()) for starts in self._starts))

    def properties_of(self, index: int) -> InputProperties:
        """What selects the attention kernels of one micro-batch, with the beginnings of its documents."""
        return self.properties._replace(starts=self._starts[index])

    @cached_property
    def _starts(self) -> list[Tensor | None]:
        """Which tokens of each micro-batch begin a segment; None where position ids do not say it."""
        return [_starts(_tensors(inputs)) for inputs in self.batches]

    @cached_property
    def layouts(self) -> tuple[Hashable, ...]:
        """Shapes and dtypes of the tensors of each micro-batch, and its other values."""
        return tuple(map(_layout, self.batches))

    @property
    def signature(self) -> Hashable:
        """What steps that the same graphs run have in common."""
        return self.layouts, self.properties, self.num_items is not None

    @property
    def tokens(self) -> int:
        """Tokens of the first micro-batch."""
        tensors = _tensors(self.batches[0])
        x = tensors.get("input_ids", tensors.get("inputs_embeds"))
        return 0 if x is None else x.shape[0] * x.shape[1]


def _starts(tensors: Mapping[str, Tensor]) -> Tensor | None:
    position_ids = tensors.get("position_ids")
    if position_ids is None or position_ids.dim() != 2 or "attention_mask" in tensors:
        return None
    return begins_segment(position_ids).cpu()


def _layout(inputs: Inputs) -> Hashable:
    tensors = _tensors(inputs)
    shapes = tuple((name, value.shape, value.dtype) for name, value in sorted(tensors.items()))
    return shapes, tuple((name, str(value)) for name, value in sorted(inputs.items()) if name not in tensors)


def _tensors(inputs: Inputs) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


@dataclass
class _Graphs:
    """The graphs of steps of one signature, and the tensors that they read.

    Attributes:
        inputs: the inputs of a micro-batch.
        num_items: the divisor of the loss, 0-d float64; None for none.
        micro_batches: forward and backward of the first micro-batch, and with several of a later one.
        update: the update; None if it runs eagerly.
        gradients: by parameter, for an eager update.
    """

    inputs: Inputs
    num_items: Tensor | None
    micro_batches: list[CUDAGraph] = field(default_factory=list)
    update: CUDAGraph | None = None
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)


class CapturedStep:
    """A training step: forward and backward of one or more micro-batches, clipping, and the optimizer's update.

        step = CapturedStep(model, optimizer, max_norm=1.0)
        for i, batch in enumerate(batches):
            set_lr(optimizer, lr_factor(i))
            loss, norm = step({"input_ids": batch, "labels": batch})

    The first two steps of each shape run eagerly; the third is captured. What cannot be captured runs eagerly, with the
    same results, and `reason` says why: for example images, sharded or compiled models, hooks, or parameters on a CPU.
    A capture that fails gives a warning. Changes of the model and the optimizer, such as `load_state_dict`, are
    noticed: graphs are captured again.

    Pass inputs as CPU tensors, pinned ones if possible. Whether rows have padding or several segments selects the
    attention kernels, so the host reads it; of a tensor on a GPU, this waits for the GPU.

    If the model can be captured, the learning rate of the optimizer's groups becomes a 0-d fp32 tensor on the device,
    which `set_lr` and torch's schedulers fill; a number that replaces it is copied into it.

    Args:
        model: the model.
        optimizer: of `make_optimizer`, or of torch with `fused=True`. The update of others runs eagerly. Or what
            follows backward as a whole, such as the `OptimizerStep` of a run; it has its own `max_norm` and `skip`.
        max_norm: norm to which the gradients are clipped; None for no clipping.
        skip: skips updates whose gradients are infinite or NaN.
        compute_loss: the loss of a micro-batch, see `ComputeLoss`. Default: `language_model_loss`.
        autocast: dtype of `torch.autocast` for the forward; None for no autocast.
        capture: "auto" captures what is known to be capturable and small enough to gain; "on" also large models and
            layers of other packages, and raises if something cannot be captured; "off" runs eagerly.
        max_shapes: number of shapes to capture. Steps of further shapes run eagerly.
        seed: called with the index of each micro-batch before its forward, to seed random numbers.

    Attributes:
        reason: why the last step ran eagerly, in whole or in part; None if all of it ran as graphs.

    Raises:
        TypeError: an argument has another type.
        ValueError: `capture` is unknown, or a number is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | ClippedStep,
        *,
        max_norm: float | None = None,
        skip: SkipNonFinite | None = None,
        compute_loss: ComputeLoss = language_model_loss,
        autocast: torch.dtype | None = None,
        capture: Capture = "auto",
        max_shapes: int = 4,
        seed: Callable[[int], object] | None = None,
    ) -> None:
        check("CapturedStep", one_of(get_args(Capture)), capture=capture)
        check("CapturedStep", POSITIVE_OR_NONE, max_norm=max_norm)
        check("CapturedStep", AT_LEAST_1, max_shapes=max_shapes)
        if isinstance(optimizer, ClippedStep):
            if max_norm is not None or skip is not None:
                raise ValueError("CapturedStep: got max_norm or skip; expected None, since the given step has its own")
            self._step = optimizer
        else:
            self._step = ClippedStep(model, optimizer, max_norm, skip)
        self._model, self._optimizer = model, self._step.optimizer
        self._compute_loss, self._autocast, self._capture = compute_loss, autocast, capture
        self._max_shapes, self._seed = max_shapes, seed
        self._device = next(model.parameters()).device
        self._loss, self._norm = (torch.zeros((), device=self._device) for _ in range(2))
        self._lrs: list[Tensor] = []
        self._graphs: dict[Hashable, _Graphs] = {}
        self._eager_steps: Counter[Hashable] = Counter()
        self._failures: dict[Hashable, str] = {}
        self._state: tuple[object, ...] = ()
        self._state_obstacle: str | None = None
        self._weights = 0
        self.reason: str | None = None

    def __call__(
        self, micro_batches: Inputs | Sequence[Inputs], num_items: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Runs a step. Gradients from before are dropped, and none remain.

        Args:
            micro_batches: the inputs of the model by name, on any device; or a sequence of them, whose gradients are
                added up.
            num_items: divisor of the summed loss, such as the number of trained tokens of the step. None, with one
                micro-batch only, for the number of its labels that are not ignored.

        Returns:
            The loss and the norm of the gradients before clipping, 0-d fp32 on the model's device, not overwritten by
            later steps. Reading a value waits for the GPU. The norm is None with an optimizer in backward, which leaves
            no gradients.

        Raises:
            ValueError: there is no micro-batch, or there are several without `num_items`.
            LigerzooError: with `capture="on"`, the step cannot be captured.
        """
        batches = [micro_batches] if isinstance(micro_batches, Mapping) else list(micro_batches)
        check_num_items("CapturedStep", num_items=num_items)
        if not batches or (len(batches) > 1 and num_items is None):
            what = f"got {len(batches)} micro-batches and num_items={num_items}"
            expected = "one micro-batch, or several and num_items, the number of trained tokens of all"
            raise LigerzooError(what, where="CapturedStep", expected=expected)
        self._notice_changes()
        step = _StepInputs(batches, num_items)
        self.reason = self._obstacle(step)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            if self.reason is None and step.signature not in self._graphs:
                self._capture_graphs(step)
            if self.reason is None:
                self._replay(self._graphs[step.signature], step)
            else:
                self._run_eagerly(step)
                self._eager_steps[step.signature] += 1
        self._step.finish()
        return self._loss.clone(), self._norm.clone() if self._step.has_norm else None

    def release(self) -> None:
        """Frees the graphs and their memory. Later steps are captured again."""
        self._graphs.clear()
        self._eager_steps.clear()
        self._failures.clear()

    # What can be captured

    def _notice_changes(self) -> None:
        """Drops the graphs if the model or the optimizer has changed, and keeps the learning rates on the device."""
        state = state_of(self._model, self._optimizer)
        if state != self._state:
            self.release()
            self._state = state
            self._state_obstacle = model_obstacle(self._model, trusts_layers=self._capture == "on")
            self._weights = sum(parameter.numel() for parameter in self._model.parameters())
        if self._state_obstacle is None and optimizer_obstacle(self._optimizer) is None:
            self._keep_lrs()

    def _obstacle(self, step: _StepInputs) -> str | None:
        """Returns why this step runs eagerly; None if its graphs exist or can be captured now."""
        if self._capture == "off":
            return "capture is off"
        key = step.signature
        reason = self._lasting_obstacle(step) or self._failures.get(key)
        if reason is not None:
            if self._capture == "on":
                remedy = 'Use capture="auto", which runs such steps eagerly.'
                raise LigerzooError("the step cannot be captured", where="CapturedStep", got=reason, remedy=remedy)
            return reason
        if key in self._graphs:
            return None
        if len(self._graphs) >= self._max_shapes:
            return f"steps of {self._max_shapes} other shapes are captured already (max_shapes)"
        if (steps := self._eager_steps[key]) < WARMUP_STEPS:
            return f"eager step {steps + 1} of {WARMUP_STEPS} before steps of this shape are captured"
        return None

    def _lasting_obstacle(self, step: _StepInputs) -> str | None:
        """Returns why steps like this one are never captured, whatever ran before; None if they may be."""
        return self._state_obstacle or self._inputs_obstacle(step)

    def _inputs_obstacle(self, step: _StepInputs) -> str | None:
        if reason := next(filter(None, (inputs_obstacle(self._model, inputs) for inputs in step.batches)), None):
            return reason
        if len(set(step.layouts)) > 1:
            return "the micro-batches of the step have different shapes"
        if torch.is_autocast_enabled(self._device.type):
            return "autocast is enabled around the step; pass the dtype as `autocast`"
        if self._capture != "on" and 6 * self._weights * step.tokens > _MAX_OPERATIONS:
            return "the micro-batches are so large that launching takes little of their time"
        return None

    # The parts of a step, eager or captured

    def _run_eagerly(self, step: _StepInputs) -> None:
        divisor = None if step.num_items is None else self._new_divisor(step.num_items)
        is_never_captured = self._lasting_obstacle(step) is not None
        for index, inputs in self._seeded(step.batches):
            properties = step.properties_of(index) if is_never_captured else step.properties
            self._forward_backward(self._on_device(inputs), divisor, step, properties, is_first=index == 0)
        self._update()
        self._state = state_of(self._model, self._optimizer)  # the first update creates the optimizer's state

    def _seeded(self, batches: Sequence[Inputs]) -> Iterator[tuple[int, Inputs]]:
        """Yields the index of each micro-batch with its inputs, after seeding its random numbers."""
        for index, inputs in enumerate(batches):
            if self._seed is not None:
                self._seed(index)
            yield index, inputs

    def _forward_backward(
        self,
        inputs: Inputs,
        num_items: Tensor | None,
        step: _StepInputs,
        properties: InputProperties,
        *,
        is_first: bool,
    ) -> None:
        """Adds a micro-batch's gradients and loss to those of the ones before."""
        if is_first:
            self._step.drop_gradients()
        with assuming_inputs(properties), self._autocasting():
            loss = self._compute_loss(self._model, inputs, num_items, len(step.batches))
        if not loss.requires_grad:
            remedy = (
                "A vision tower alone trains only if each micro-batch has images: use larger ones, leave "
                "out records without images, or train other parts as well."
            )
            raise LigerzooError("no weight that trains takes part in the loss", where="micro-batch", remedy=remedy)
        loss.backward()  # type: ignore[no-untyped-call]
        if is_first:
            self._loss.copy_(loss.detach())
        else:
            self._loss.add_(loss.detach())

    def _update(self) -> None:
        """Updates the parameters and drops the gradients."""
        if (norm := self._step.update()) is not None:
            self._norm.copy_(norm)

    def _autocasting(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._autocast)

    # Graphs

    def _capture_graphs(self, step: _StepInputs) -> None:
        """Captures the graphs of a signature. If it fails, `reason` says why, and the step runs eagerly."""
        key = step.signature
        if self._device.type == "cuda":  # memory that eager steps have left behind becomes that of the graphs
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
        tensors = {
            name: torch.empty_like(value, device=self._device).copy_(value)
            for name, value in _tensors(step.batches[0]).items()
        }
        divisor = None if step.num_items is None else self._new_divisor(step.num_items).clone()
        graphs = _Graphs({**step.batches[0], **tensors}, divisor)
        pool = next((other.micro_batches[0].pool() for other in self._graphs.values()), None)
        try:
            for is_first in (True, False)[: len(step.batches)]:
                run = partial(self._forward_backward, graphs.inputs, divisor, step, step.properties, is_first=is_first)
                graphs.micro_batches.append(capture_graph(run, pool)[0])
                pool = graphs.micro_batches[0].pool()
            if optimizer_obstacle(self._optimizer) is None:
                with _capturable(self._optimizer):
                    graphs.update, _ = capture_graph(self._update, pool)
            else:
                graphs.gradients = {p: p.grad for p in self._step.parameters if p.grad is not None}
        except RuntimeError as error:
            self.reason = self._failures[key] = f"capturing failed: {str(error).partition(chr(10))[0]}"
            if self._capture == "on":
                raise
            warnings.warn(
                f"CapturedStep: {self.reason}; steps of this shape run eagerly, which is slower", stacklevel=3
            )
            return
        finally:
            self._step.drop_gradients()
        self._graphs[key] = graphs

    def _replay(self, graphs: _Graphs, step: _StepInputs) -> None:
        if graphs.num_items is not None and step.num_items is not None:
            _set(graphs.num_items, step.num_items)
        targets = _tensors(graphs.inputs)
        for index, inputs in self._seeded(step.batches):
            for name, value in _tensors(inputs).items():
                targets[name].copy_(self._pinned(value), non_blocking=True)
            graphs.micro_batches[min(index, 1)].replay()
        if graphs.update is not None:
            graphs.update.replay()
            return
        self.reason = f"the update runs eagerly: {optimizer_obstacle(self._optimizer)}"
        for parameter, gradient in graphs.gradients.items():
            parameter.grad = gradient
        self._update()

    # Tensors on the device

    def _new_divisor(self, num_items: int | Tensor) -> Tensor:
        if isinstance(num_items, Tensor):
            return num_items.to(self._device, torch.float64)
        return torch.full((), num_items, dtype=torch.float64, device=self._device)

    def _on_device(self, inputs: Inputs) -> Inputs:
        tensors = _tensors(inputs).items()
        return {**inputs, **{name: self._pinned(x).to(self._device, non_blocking=True) for name, x in tensors}}

    def _pinned(self, value: Tensor) -> Tensor:
        """Returns a tensor whose copy to the device does not make the host wait."""
        return value.pin_memory() if self._device.type == "cuda" and value.device.type == "cpu" else value

    def _keep_lrs(self) -> None:
        """Makes the learning rates tensors on the device, always the same ones."""
        if len(self._lrs) != len(self._optimizer.param_groups):
            self._lrs = [torch.zeros((), device=self._device) for _ in self._optimizer.param_groups]
        for group, lr in zip(self._optimizer.param_groups, self._lrs, strict=True):
            if group["lr"] is not lr:
                _set(lr, group["lr"])
                group["lr"] = lr


def _set(x: Tensor, value: float | Tensor) -> None:
    x.copy_(value) if isinstance(value, Tensor) else x.fill_(value)


@contextmanager
def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Sets the flag that torch's optimizers check in a capture. Outside of one they would warn of it."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    flags = [group["capturable"] for group in groups]
    try:
        for group in groups:
            group["capturable"] = True
        yield
    finally:
        for group, flag in zip(groups, flags, strict=True):
            group["capturable"] = flag

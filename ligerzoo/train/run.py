"""A training run: what all recipes do before, between and after the steps."""

from __future__ import annotations

import dataclasses
import hashlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ligerzoo import parallel
from ligerzoo.errors import LigerzooError, Problems, SeveralErrors, raise_all
from ligerzoo.memory import ActivationPlan
from ligerzoo.memory.allocator import let_segments_grow
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.models import CausalLM
from ligerzoo.own_code import import_own_code
from ligerzoo.parallel import failing_together
from ligerzoo.parallel.liveness import ending_together
from ligerzoo.train import processes, run_model
from ligerzoo.train.command_line import CONFIG_FILE, write_options
from ligerzoo.train.data.open import check_files
from ligerzoo.train.log import CountedBatch, RunLog
from ligerzoo.train.metrics import num_items
from ligerzoo.train.optimizer_step import OptimizerStep, describe_update
from ligerzoo.train.output_lock import locked_output
from ligerzoo.train.plot import plot_metric
from ligerzoo.train.run_data import RunData, RunPairs, RunPrompts
from ligerzoo.train.run_options import RunOptions
from ligerzoo.train.run_state import RunState, refuse_output
from ligerzoo.train.tracking import check_tracker, open_tracker
from ligerzoo.train.trained_state import TrainedState
from ligerzoo.vision.processor import tokenizer_of


class Run:
    """A run of a recipe: its processes, model, data, optimizer, log, checkpoints and Ctrl-C.

        with Run(options) as run:
            run.prepare(RunData(options, run.processor, run.meta_model, "auto", pin_memory=False))  # prints the plan
            model = run.open_model()  # restored from the last checkpoint, with --resume
            for step in run.steps(evaluate):  # after each step it evaluates, saves and stops, where that is due
                loss, metrics = ...  # forward and backward of step.batches
                norm = run.optimizer_step()
                step.log(loss=loss, grad_norm=norm, metrics=metrics)
        return run.exit_code

    Entering joins the processes of torchrun, if any, locks the output directory, and opens the tokenizer and the shapes
    of the model. A dry run writes nothing.

    Args:
        options: options of the run. `device` is that of a single process, or "cuda" or "cpu" for several; None for a
            GPU if there is one.
        new: whether a config without weights is a new model with random weights.

    Attributes:
        options: the options.
        output: directory of the run.
        device: device of this process.
        processor: the processor of a model that reads images; otherwise the tokenizer.
        tokenizer: the tokenizer.
        meta_model: the model as it is trained, on the meta device.
        problems: what a dry run has found; other runs stop at the first problem.
        model: the model; from `open_model` on.
        optimizer_step: updates the weights; from `open_model` on.
        state: the checkpoints.
        log: the log; from `steps` on.
        exit_code: 0, or 130 if Ctrl-C ended the run.
    """

    model: CausalLM
    optimizer_step: OptimizerStep
    log: RunLog

    def __init__(self, options: RunOptions, *, new: bool = False) -> None:
        self.options, self.output, self._new, self.exit_code = options, Path(options.output), new, 0
        self.problems = Problems(collects=options.dry_run)
        self._step, self._can_plan = 0, True
        self._plan: ActivationPlan | None = None

    def __enter__(self) -> Self:
        options, lock, problems = self.options, None, self.problems
        with problems:
            import_own_code(options.import_ or ())
        with problems:
            check_tracker(options.tracker, self.output)
        let_segments_grow()
        with ExitStack() as stack:
            was_joined = dist.is_initialized()
            self.device = problems.result_or(parallel.start_processes, options.device, "cpu").device
            if not was_joined:
                stack.callback(parallel.stop_processes)
            stack.enter_context(ending_together())
            with problems:
                options.check_device(self.device.type)
            sizes = MeshSizes.parse(options.mesh or "")
            problems.result_or(
                lambda mesh: stack.enter_context(processes.over_mesh(mesh, self.device)), sizes, MeshSizes()
            )
            with problems, failing_together(f"opening {self.output}"):
                refuse_output(self.output)
                if processes.is_main() and not options.dry_run:
                    lock = stack.enter_context(locked_output(self.output))
            self.state = stack.enter_context(RunState(self.output, options, lock=lock, problems=problems))
            problems.result_of(run_model.open_template, options, self.state)  # also if there is no tokenizer to open
            with problems:
                self.processor = run_model.open_processor(options, self.state)
                self.tokenizer = tokenizer_of(self.processor)
            with problems:
                self.meta_model = run_model.open_meta_model(options, self.state, self.device, new=self._new)
            is_open = hasattr(self, "meta_model")
            similar = None if is_open else run_model.similar_meta_model(options)
            self._can_plan = is_open or run_model.lacks_weights(options.model)
            if similar is not None:
                self.meta_model = similar
            if not hasattr(self, "processor") or not hasattr(self, "meta_model"):
                for paths in filter(None, (options.data, options.eval_data)):
                    with problems:
                        check_files(paths)
                self._raise_problems()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._stack.__exit__(kind, error, traceback)  # raises the error of a process that has died
        earlier = self.problems.errors
        match error:
            case SeveralErrors():
                pass
            case LigerzooError() if earlier and error not in earlier:
                raise SeveralErrors([*earlier, error]) from None

    def prepare(self, data: RunData | RunPrompts | RunPairs, *, frozen: CausalLM | None = None) -> None:
        """Plans the steps and their memory, and prints the plan and the first samples. A dry run reads all data.

        Args:
            data: the data that is trained.
            frozen: a second model in memory, such as a reference or a teacher; may be on the meta device.
        """
        options, problems = self.options, self.problems
        data.per_step = self.state.micro_batches or data.per_step  # other processes may continue the run
        with problems:
            data.check_evaluation()
        report = problems.result_of(data.read_all) if options.dry_run else None
        if report is not None:
            problems.errors += report.problems.errors
        processes.say(run_model.describe_model(self.meta_model, self.device))
        is_readable = not options.dry_run or (report is not None and not report.problems.count)
        if is_readable:
            with problems:
                self._data, self._batches, self._steps = data, data.training(), data.count_steps()
                processes.say(f"{data.describe_steps(self._steps)}{self._describe_resume()}")
                if (warning := data.few_steps(self._steps)) is not None:
                    processes.say(warning)
        processes.say(describe_update(options, self.meta_model))
        if self._can_plan:
            images = not options.dry_run and data.has_images if report is None else report.images > 0
            with problems:
                self._plan = run_model.plan_memory(
                    options,
                    self.meta_model,
                    self.device,
                    frozen=frozen,
                    accumulate=data.accumulates,
                    images=images,
                )
                if self._plan is not None:
                    processes.say(self._plan)
        if is_readable:
            data.show()
        if report is not None:
            processes.say(report.summary)
        self._raise_problems()

    def _raise_problems(self) -> None:
        """Raises the problems of a dry run. Other processes than the main one raise those that it does not have.

        Without any, they end with exit code 0: after a failure, torchrun would end the main process before it prints.
        """
        found = [one for error in self.problems.errors for one in error.errors]
        of_main = processes.gather(list(map(str, found)))[0] if self.options.dry_run else []
        raise_all(one for one in found if processes.is_main() or str(one) not in of_main)
        if of_main:
            raise SystemExit(0)

    def _describe_resume(self) -> str:
        done, options = self.state.step, self.options
        if options.resume and not done:
            return f"; --resume found no checkpoint in {self.output}, so step 1 is the first"
        return f"; {done:,} steps are done" if done else ""

    def open_model(self) -> CausalLM:
        """Opens the model and the optimizer, as the last checkpoint has them, if any."""
        self.model = run_model.open_trained_model(self.options, self.state, self.device, self._plan, new=self._new)
        self.optimizer_step = OptimizerStep(self.model, self.options, self._steps)
        step = self.optimizer_step
        self._trained = TrainedState(self.model, self.processor, step.optimizer, self._batches, step.ema)
        self.state.load(self._trained)
        return self.model

    @property
    def dropped(self) -> int:
        """Number of records so far that have no sample, of all epochs and before the run was resumed, too."""
        return self._batches.dropped

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype in which the model computes, if it is not that of its weights."""
        return run_model.compute_dtype(self.options)

    def seed(self, micro_batch: int = 0) -> None:
        """Seeds torch's random numbers, such as those of dropout, for a micro-batch of the step of this process.

        The seed depends on that of the run, the step and the index of the micro-batch among those of all processes, not
        on how many processes divide them.
        """
        index = micro_batch * processes.token_ranks() + processes.token_rank()
        digest = hashlib.blake2b(f"{self.options.seed}, {self._step}, {index}".encode(), digest_size=7).digest()
        torch.manual_seed(int.from_bytes(digest, "little"))

    def autocast(self) -> torch.autocast:
        """Returns the context of a forward: bfloat16 with `mixed_precision`."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.mixed_precision)

    def to_device(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copies tensors to the device, without waiting."""
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}

    def steps(
        self,
        evaluate: Callable[[], Mapping[str, object]],
        *,
        loss_label: str = "loss, nats per token",
        metrics: Sequence[str] = (),
        may_be_zero: bool = False,
    ) -> Iterator[Step]:
        """Yields the steps that remain. After each one it evaluates, saves and stops, where that is due.

        A run evaluates every `eval_every` steps and after the last one, given evaluation data, with averaged weights if
        there are any. It saves every `save_every` steps, after the last one and before stopping. Saving and stopping
        wait for a step whose update is not skipped: otherwise checkpoints of a model that no longer learns would
        replace the last good ones. After the last step it saves the model.

        Args:
            evaluate: returns what the log has of an evaluation, see `evaluate_loss`.
            loss_label: what the loss is, for the plot.
            metrics: metrics that the live line begins with; the first one is drawn.
            may_be_zero: whether a loss of exactly 0 is normal.
        """
        options, state, step, last = self.options, self.state, self.optimizer_step, self._steps
        tracker = open_tracker(options.tracker, self.output, dataclasses.asdict(options))
        with failing_together(f"writing {CONFIG_FILE}"):
            if processes.is_main():
                write_options(self.output, options)
        loop = self._stack.enter_context(ExitStack())
        stop = loop.enter_context(StopRequest())
        log = self.log = RunLog(
            self.output,
            self.model,
            first_step=state.step,
            steps=last,
            report=tracker,
            shown=metrics,
            may_be_zero=may_be_zero,
            finish_saving=state.finish_saving,
        )
        loop.enter_context(log)
        waits_to_save = False
        for number in range(state.step + 1, last + 1):
            self._step = number
            self.seed()
            batches = list(islice(self._batches, self._data.per_step))
            step.set_lr(number)
            yield Step(self, number, batches)
            stops, failures = processes.total(stop.requested, state.has_failed)
            is_last, is_stopped = number == last, stops > 0
            if failures:
                state.wait()  # raises, in all processes
            save = is_last or is_stopped or waits_to_save or number % options.save_every == 0
            waits_to_save = save and any(processes.total(log.is_skipped()))
            if options.eval_data and (is_last or number % options.eval_every == 0):
                with log.paused(), step.averaged():
                    log.evaluation(number, **evaluate())
            if save and not waits_to_save:
                with log.paused():
                    state.save(number, self._trained)
                    for name, unit in (("loss", loss_label), *((name, name) for name in metrics[:1])):
                        plot_metric(self.output, name, unit)
                if is_stopped and not is_last:
                    state.wait()
                    self.exit_code = log.stopped(number, state.checkpoint)
                    return
        loop.close()  # writes the last step
        with step.averaged():
            state.finish(
                self._trained,
                ("log.jsonl", CONFIG_FILE, "samples.jsonl", *(f"{name}.svg" for name in (*metrics[:1], "loss"))),
            )


class Step:
    """A step of a run.

    Attributes:
        number: its number, from 1.
        batches: micro-batches of this process, or samples.
    """

    def __init__(self, run: Run, number: int, batches: list[Any]) -> None:
        self._run, self.number, self.batches = run, number, batches

    @property
    def num_items(self) -> int | Tensor:
        """The divisor of summed losses over tokens, see `num_items`."""
        return num_items(self.batches, self._run.device, where=f"step {self.number}, ")

    def log(
        self,
        *,
        loss: Tensor,
        grad_norm: Tensor | None,
        metrics: Mapping[str, Tensor] | None = None,
        batches: Sequence[CountedBatch] | None = None,
    ) -> None:
        """Logs the step.

        Args:
            loss: 0-d, mean over the trained tokens of all batches; averaged over the processes.
            grad_norm: 0-d, norm of the gradients before clipping; None if it is not known.
            metrics: 0-d, further numbers of the step by name.
            batches: what was trained, if it is not `self.batches`.
        """
        step = self._run.optimizer_step
        values = {"loss": loss, "grad_norm": grad_norm, "skipped": step.skip.count, **(metrics or {})}
        given = self.batches if batches is None else batches
        dropped = self._run.dropped
        self._run.log.step(self.number, values=values, lr=step.lr, batches=given, dropped=dropped)


SIGNALS = (signal.SIGINT, signal.SIGTERM)  # SIGTERM: what job schedulers and `kill` send


class StopRequest:
    """A context manager in which the first Ctrl-C or SIGTERM sets `requested`. The second one has its usual effect.

    Outside the main thread, where Python allows no signal handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            return
        handler = self._handlers[number]
        if callable(handler):
            handler(number, frame)
        elif handler is not signal.SIG_IGN:
            raise KeyboardInterrupt

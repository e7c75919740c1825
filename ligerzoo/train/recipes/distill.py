"""Distillation: a model learns the distributions that a larger one, the teacher, predicts for each token.

`ligerzoo train MODEL --method distill --teacher TEACHER --data FILE --output DIR` runs this file; with --print-recipe
it prints it with these options as defaults. Change what you like and run it with `python`, or with
`torchrun --nproc-per-node N` on several GPUs; options of the command line replace the defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from ligerzoo import Tokenizer
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.losses import Distillation, LossOutput
from ligerzoo.train import processes, run_model
from ligerzoo.train.data import Batch
from ligerzoo.train.due import Schedule
from ligerzoo.train.evaluation import evaluate_method, prompt_of
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.log import RunLog, first_sources
from ligerzoo.train.metrics import forward_backward
from ligerzoo.train.options import Fraction, NotNegative, Positive, run_script
from ligerzoo.train.plot import plot_loss
from ligerzoo.train.run import run_together
from ligerzoo.train.run_data import RunData
from ligerzoo.train.run_options import MAY_CHANGE, BatchOptions
from ligerzoo.train.run_state import RunState
from ligerzoo.train.starting import describe_run, tokenizer_of
from ligerzoo.train.teacher import check_same_tokens, load_teacher
from ligerzoo.train.tracking import open_tracker
from ligerzoo.train.update import Update, describe_update


@dataclass(frozen=True, kw_only=True)
class Options(BatchOptions):
    """Options of this recipe, in addition to those that all recipes have."""

    model: str
    """checkpoint of the student in Hugging Face format: a directory or a hub id; also a config.json, or a
    directory without weights, for random weights"""
    teacher: str
    """checkpoint of the teacher, with the same tokenizer"""
    method: Literal["distill"] = "distill"
    """learns from a teacher, on completions, assistant turns or all tokens of texts"""
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "tvd", "cosine"] = "jsd"
    """divergence of the student from the teacher: forward_kl covers the teacher's modes, reverse_kl seeks
    them, jsd is between"""
    beta: Fraction | None = None
    """share of the teacher in the mixture of jsd (default: 0.5)"""
    temperature: Positive | None = None
    """divides the logits of both models (default: 1)"""
    hard_weight: NotNegative = 0.0
    """weight of the cross entropy with the data's tokens, which is added"""

    def __post_init__(self) -> None:
        super().__post_init__()
        make_loss(self)


def make_loss(options: Options) -> Distillation:
    """Returns the loss. Raises ConfigError for an option that the divergence does not use."""
    given = {"beta": options.beta, "temperature": options.temperature, "hard_weight": options.hard_weight}
    try:
        return Distillation(
            divergence=options.divergence, **{name: value for name, value in given.items() if value is not None}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error), where="options of method distill") from error


def main(options: Options) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    return run_together(train, options, may_change=MAY_CHANGE)


def train(options: Options, run: RunState, device: torch.device) -> int:
    """Trains in this process."""
    processor = run_model.open_processor(options, run)  # or the tokenizer of a model that reads no images
    tokenizer = tokenizer_of(processor)
    check_same_tokens(tokenizer, Tokenizer.from_pretrained(options.teacher), options.teacher)
    outline = run_model.open_outline(options, run, new=True)  # shapes alone, for checks and plans
    dtypes: dict[str, Any] = {"dtype": options.dtype, "param_dtype": run_model.compute_dtype(options)}
    frozen = load_teacher(options.teacher, outline, device=torch.device("meta"), **dtypes)
    data = RunData(options, tokenizer, outline, "auto", pin_memory=device.type == "cuda")
    batches, steps = data.training(), data.count_steps()
    plan = run_model.plan_memory(options, outline, device, frozen=frozen, accumulate=options.accumulate > 1)
    more = (describe_update(options, outline), plan)
    processes.say(describe_run(outline, options, device, first_step=run.step, steps=steps, more=more))
    data.show()
    if options.dry_run:
        data.check()
        return 0

    model = run_model.open_trained_model(options, run, device, plan, new=True)
    teacher = load_teacher(options.teacher, model, device=device, **dtypes)
    update = Update(model, options, steps)
    run.load(model, update.optimizer, batches, update.ema)
    distillation = make_loss(options)

    def loss_of(micro_batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss and metrics of a step; accumulates gradients, if they are enabled."""
        tokens = [batch.trained_tokens for batch in micro_batches]
        (trained_tokens,) = processes.total(sum(tokens))
        if not trained_tokens:
            raise LigerzooError("no token is trained", where=first_sources(micro_batches))
        items = processes.divisor(trained_tokens, device)

        def forward(batch: Batch) -> LossOutput:
            inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.inputs.items()}
            with run_model.autocast(options, device):
                return distillation.of_teacher(
                    model, teacher, inputs["input_ids"], inputs["labels"], num_items=items,
                    model_inputs={"position_ids": inputs["position_ids"]}, aux_loss_share=1 / len(micro_batches),
                )  # fmt: skip

        return forward_backward(forward, micro_batches, tokens, device)

    tracker = open_tracker(options.tracker, run.output, dataclasses.asdict(options))
    with StopRequest() as stop, RunLog(run.output, model, first_step=run.step, steps=steps, report=tracker) as log:
        schedule = Schedule(options, steps, stop, log)
        for step in range(run.step + 1, steps + 1):
            micro_batches = list(islice(batches, options.accumulate))
            update.set_lr(step)
            loss, metrics = loss_of(micro_batches)
            norm = update()
            log.step(
                step, loss=loss, grad_norm=norm, lr=update.lr, batches=micro_batches, skipped=update.skip.count,
                metrics=metrics,
            )  # fmt: skip

            due = schedule.after(step)
            if due.evaluation and options.eval_data:
                with log.paused(), update.averaged():
                    held_out, shown = data.once(options.eval_data), data.first_samples(options.eval_data, 2)
                    log.evaluation(step, **evaluate_method(model, tokenizer, loss_of, held_out, map(prompt_of, shown)))
            if due.save:
                with log.paused():
                    run.save(step, model, processor, update.optimizer, batches, update.ema)
                    plot_loss(run.output, unit=f"{options.divergence} from the teacher")
            if due.stop:
                return log.stopped(step, run.checkpoint)
    with update.averaged():
        run.finish(model, processor, ["log.jsonl", "loss.svg"])
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, Options, __file__))

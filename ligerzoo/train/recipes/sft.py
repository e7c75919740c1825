"""Pretraining and supervised fine-tuning (SFT).

`ligerzoo train MODEL --data FILE --output DIR` runs this file; with --print-recipe it prints it with these options as
defaults. Change what you like and run it with `python`, or with `torchrun --nproc-per-node N` on several GPUs; options
of the command line replace the defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch

from ligerzoo.errors import LigerzooError
from ligerzoo.train import processes, run_model
from ligerzoo.train.captured_step import CapturedStep
from ligerzoo.train.checks import check_capture
from ligerzoo.train.due import Schedule
from ligerzoo.train.evaluation import evaluate
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.log import RunLog, first_sources
from ligerzoo.train.options import run_script
from ligerzoo.train.plot import plot_loss
from ligerzoo.train.run import run_together
from ligerzoo.train.run_data import RunData
from ligerzoo.train.run_options import MAY_CHANGE, BatchOptions
from ligerzoo.train.run_state import RunState
from ligerzoo.train.starting import describe_run, tokenizer_of
from ligerzoo.train.tracking import open_tracker
from ligerzoo.train.update import Update, describe_update


@dataclass(frozen=True, kw_only=True)
class Options(BatchOptions):
    """Options of this recipe, in addition to those that all recipes have."""

    model: str
    """checkpoint in Hugging Face format: a directory or a hub id; with --method pretrain also a
    config.json, or a directory without weights, for random weights"""
    method: Literal["sft", "pretrain"] = "sft"
    """sft trains completions and assistant turns, pretrain all tokens of texts"""
    packing: Literal["auto", "separate", "whole", "none"] = "auto"
    """auto: samples share rows without attending to each other, texts are concatenated; separate: texts
    attend to themselves only; whole: texts are packed like samples; none: one sample in a row"""
    train_answers: Literal["all", "last"] = "all"
    """answers of a conversation that are trained"""
    train_on_prompt: bool = False
    """also train the prompts of completions"""
    capture: Literal["auto", "on", "off"] = "auto"
    """run steps of small models as CUDA graphs; on: of large ones too, or stop; off: run eagerly"""


def main(options: Options) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    return run_together(train, options, may_change={*MAY_CHANGE, "capture"})


def train(options: Options, run: RunState, device: torch.device) -> int:
    """Trains in this process."""
    check_capture(options, device)
    processor = run_model.open_processor(options, run)  # or the tokenizer of a model that reads no images
    tokenizer = tokenizer_of(processor)
    is_new = options.method == "pretrain"
    outline = run_model.open_outline(options, run, new=is_new)  # shapes alone, for checks and plans
    data = RunData(
        options, processor, outline, "text" if is_new else "auto", pin_memory=device.type == "cuda",
        packing=options.packing, train_answers=options.train_answers, train_on_prompt=options.train_on_prompt,
    )  # fmt: skip
    batches, steps = data.training(), data.count_steps()
    plan = run_model.plan_memory(options, outline, device, accumulate=options.accumulate > 1, images=data.has_images)
    more = (describe_update(options, outline), plan)
    processes.say(describe_run(outline, options, device, first_step=run.step, steps=steps, more=more))
    data.show()
    if options.dry_run:
        if data.check().images:
            run_model.refuse_budget_of_images(options)
        return 0

    model = run_model.open_trained_model(options, run, device, plan, new=is_new)
    update = Update(model, options, steps)
    train_step = CapturedStep(
        model, update.optimizer, max_norm=options.max_grad_norm or None, skip=update.skip, capture=options.capture,
        autocast=run_model.compute_dtype(options),
    )  # fmt: skip
    run.load(model, update.optimizer, batches, update.ema)

    tracker = open_tracker(options.tracker, run.output, dataclasses.asdict(options))
    with StopRequest() as stop, RunLog(run.output, model, first_step=run.step, steps=steps, report=tracker) as log:
        schedule = Schedule(options, steps, stop, log)
        for step in range(run.step + 1, steps + 1):
            micro_batches = list(islice(batches, options.accumulate))
            (trained_tokens,) = processes.total(sum(batch.trained_tokens for batch in micro_batches))
            if not trained_tokens:
                where = f"step {step}, {first_sources(micro_batches)}"
                raise LigerzooError("no token is trained", where=where, remedy="Look at the data with --dry-run.")
            update.set_lr(step)
            loss, norm = train_step(  # forward and backward of each micro-batch, clipping, and the optimizer's update
                [batch.inputs for batch in micro_batches], processes.divisor(trained_tokens, device)
            )
            update.average()
            log.step(step, loss=loss, grad_norm=norm, lr=update.lr, batches=micro_batches, skipped=update.skip.count)

            due = schedule.after(step)
            if due.evaluation and options.eval_data:
                with log.paused(), update.averaged():
                    held_out, prompts = data.once(options.eval_data), data.prompts(options.eval_data, 2)
                    log.evaluation(step, **evaluate(model, tokenizer, held_out, prompts))
            if due.save:
                with log.paused():
                    run.save(step, model, processor, update.optimizer, batches, update.ema)
                    plot_loss(run.output)
            if due.stop:
                return log.stopped(step, run.checkpoint)
    with update.averaged():
        run.finish(model, processor, ["log.jsonl", "loss.svg"])
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, Options, __file__))

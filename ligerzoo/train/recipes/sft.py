"""Pretraining and supervised fine-tuning (SFT).

`ligerzoo train MODEL --data FILE --output DIR` runs this file; with --print-recipe it prints it with these options as
defaults. Change what you like and run it with `python`, or with `torchrun --nproc-per-node N` on several GPUs; options
of the command line replace the defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch

from ligerzoo import Tokenizer
from ligerzoo.adapters import add_lora, freeze_all_but
from ligerzoo.errors import LigerzooError
from ligerzoo.memory import apply_activation_plan
from ligerzoo.models import CausalLM
from ligerzoo.train import processes
from ligerzoo.train.captured_step import CapturedStep
from ligerzoo.train.checks import check_combinations, check_model, trains_bfloat16, warn_of_rounding
from ligerzoo.train.data import Kind, PackedBatches, PaddedBatches, SampleStream, check_data, format_sample, open_data
from ligerzoo.train.evaluation import evaluate
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.log import RunLog, first_sources
from ligerzoo.train.optimizers import (
    EMA,
    SkipNonFinite,
    StepInBackward,
    make_optimizer,
    schedule,
    set_lr,
)
from ligerzoo.train.options import Budget, Count, Fraction, NotNegative, Number, Positive, check_options, parse_options
from ligerzoo.train.plot import plot_loss
from ligerzoo.train.run_state import RunState
from ligerzoo.train.starting import (
    checkpoint_directory,
    count_steps,
    describe_images,
    describe_run,
    make_batches,
    open_model,
    open_processor,
    plan_memory,
)
from ligerzoo.train.tracking import open_tracker


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a run. A field's type is checked, and the text below it is its description in `--help`."""

    model: str
    """checkpoint in Hugging Face format: a directory or a hub id; with --method pretrain also a
    config.json, or a directory without weights, for random weights"""
    data: tuple[str, ...]
    """file with training data; several are one data set"""
    output: str
    """directory for checkpoints, the log and the trained model or adapter"""
    method: Literal["sft", "pretrain"] = "sft"
    """sft trains completions and assistant turns, pretrain all tokens of texts"""
    tokenizer: str | None = None
    """checkpoint of the tokenizer (default: MODEL)"""
    seq_length: Count = 2048
    """tokens in a row"""
    packing: Literal["auto", "separate", "whole", "none"] = "auto"
    """auto: samples share rows without attending to each other, texts are concatenated; separate: texts
    attend to themselves only; whole: texts are packed like samples; none: one sample in a row"""
    too_long: Literal["error", "truncate", "drop"] = "error"
    """what happens to samples of more than --seq-length tokens"""
    train_answers: Literal["all", "last"] = "all"
    """answers of a conversation that are trained"""
    train_on_prompt: bool = False
    """also train the prompts of completions"""
    batch_size: Count = 4
    """rows in a micro-batch of a process"""
    accumulate: Count = 1
    """micro-batches in a step, to train large batches in little memory"""
    max_steps: Count | None = None
    """number of steps; the data is repeated as needed (default: as --epochs)"""
    epochs: Count | None = None
    """times that the data is read, without --max-steps (default: 1)"""
    lora_rank: Count | None = None
    """train low-rank updates of this rank (LoRA) of the frozen weights; --output is a PEFT adapter"""
    lora_alpha: Positive | None = None
    """the updates are scaled by this number / rank (default: twice the rank)"""
    lora_dropout: Fraction = 0.0
    """dropout of the updates' inputs"""
    lora_targets: tuple[str, ...] | None = None
    """part of the names of the weights to update, such as q_proj (default: all linear layers of blocks)"""
    dora: bool = False
    """also train the norms of the updated weights' rows (DoRA)"""
    train_only: tuple[str, ...] | None = None
    """part of the names of the parameters to train, such as layers.3 or lm_head; others are frozen"""
    optimizer: Literal["adamw", "adamw-8bit", "adamw-4bit", "adamw-fp8", "muon"] = "adamw"
    """name of the optimizer"""
    stochastic_rounding: Literal["auto", "on", "off"] = "auto"
    """round bfloat16 weights stochastically, so that no update is lost (default: on for such weights)"""
    optimizer_in_backward: bool = False
    """update each weight in backward and free its gradient; needs --max-grad-norm 0"""
    lr: Positive = 1e-5
    """peak learning rate"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """learning rate after the warmup"""
    warmup: Fraction = 0.03
    """share of the steps in which the learning rate rises"""
    weight_decay: NotNegative = 0.0
    """decoupled weight decay"""
    max_grad_norm: NotNegative = 1.0
    """norm to which the gradients of a step are clipped; 0 clips nothing"""
    ema: Fraction | None = None
    """decay of averaged weights, which are evaluated, and saved at the end"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the weights (default: as stored)"""
    mixed_precision: bool = False
    """compute in bfloat16 with weights in float32"""
    activation_budget: Budget = "auto"
    """memory of a step in GiB, within which activations are kept; auto: what the GPU has; none: all are kept"""
    capture: Literal["auto", "on", "off"] = "auto"
    """run steps of small models as CUDA graphs; on: of large ones too, or stop; off: run eagerly"""
    activation_checkpointing: bool = False
    """recompute each block in backward instead of keeping its activations: less memory, more time"""
    eval_data: tuple[str, ...] | None = None
    """file with evaluation data"""
    eval_every: Count = 100
    """steps between evaluations"""
    save_every: Count = 500
    """steps between checkpoints; the last step is always saved"""
    keep: Count = 2
    """number of checkpoints to keep"""
    resume: bool = False
    """continue the run in the output directory, if any, bit for bit"""
    seed: Number = 0
    """seed of the order of the data and of random weights"""
    device: str | None = None
    """cpu, cuda or cuda:1 (default: the first GPU, else cpu)"""
    tracker: Literal["tensorboard", "wandb"] | None = None
    """also send the log to TensorBoard or Weights & Biases"""
    dry_run: bool = False
    """read all data, print the plan and three samples with the trained tokens in colour, and train nothing"""

    def __post_init__(self) -> None:
        check_options(self)
        check_combinations(self)


MAY_CHANGE = {
    "resume", "dry_run", "output", "max_steps", "epochs", "save_every", "keep", "eval_data", "eval_every", "device",
    "tracker", "capture", "activation_checkpointing", "activation_budget",
}  # fmt: skip
"""Options that may differ when a run is resumed."""


def main(options: Options) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    return processes.run_together(lambda device: train(options, device), options.device)


def train(options: Options, device: torch.device) -> int:
    """Trains in this process."""
    run = RunState(options.output, options, resume=options.resume, may_change=MAY_CHANGE, keep=options.keep)

    def adapt(model: CausalLM) -> None:
        if options.lora_rank:
            alpha = options.lora_alpha or 2 * options.lora_rank
            add_lora(
                model, options.lora_rank, alpha, options.lora_targets, dropout=options.lora_dropout, dora=options.dora
            )
        elif options.train_only:
            freeze_all_but(model, options.train_only)

    source = options.model if options.lora_rank else run.checkpoint or options.model
    opening: dict[str, Any] = {
        "dtype": options.dtype, "new": options.method == "pretrain",
        "adapt": adapt if options.lora_rank or options.train_only else None,
    }  # fmt: skip
    outline = open_model(source, device=torch.device("meta"), **opening)  # shapes alone, for checks and plans
    saved = None if options.lora_rank else run.checkpoint
    processor = open_processor(saved or options.tokenizer or checkpoint_directory(options.model), outline)
    tokenizer = processor if isinstance(processor, Tokenizer) else processor.tokenizer
    check_model(outline, tokenizer, options.optimizer)

    kind: Kind | Literal["auto"] = "text" if options.method == "pretrain" else "auto"
    epochs = None if options.max_steps else options.epochs or 1
    encoding: dict[str, Any] = {
        "seq_length": options.seq_length, "too_long": options.too_long, "train_answers": options.train_answers,
        "train_on_prompt": options.train_on_prompt,
    }  # fmt: skip

    sizes: dict[str, Any] = {"batch_size": options.batch_size, "seq_length": options.seq_length}

    def samples(paths: tuple[str, ...], **given: Any) -> SampleStream:
        return open_data(paths, kind, processor, seed=options.seed, **encoding, **given)

    def batched(stream: SampleStream, *, read_images: bool = True) -> PackedBatches | PaddedBatches:
        return make_batches(
            stream, tokenizer, packing=options.packing, pin_memory=device.type == "cuda", read_images=read_images,
            **sizes,
        )  # fmt: skip

    batches = batched(samples(options.data, epochs=epochs))
    steps = options.max_steps or count_steps(
        batched(samples(options.data, epochs=epochs), read_images=False), options.accumulate
    )
    first = list(islice(samples(options.data, epochs=1), 3))
    images = describe_images(first)
    recomputes = options.mixed_precision or options.activation_checkpointing
    plan = plan_memory(
        outline, "none" if recomputes else options.activation_budget, device=device, optimizer=options.optimizer,
        accumulate=options.accumulate, ema=options.ema is not None, images=images is not None, **sizes,
    )  # fmt: skip
    is_stochastic = {"on": True, "off": False, "auto": trains_bfloat16(outline)}[options.stochastic_rounding]
    update = f"{options.optimizer} with {'stochastic rounding' if is_stochastic else 'rounding to the nearest'}"
    processes.say(
        describe_run(
            outline, device=device, first_step=run.step, steps=steps, micro_batches=options.accumulate,
            more=(update, plan, images), **sizes,
        )
    )  # fmt: skip
    for sample in first:
        processes.say(format_sample(sample, tokenizer, max_tokens=500))
    if options.dry_run:
        report = check_data(options.data, kind, processor, **encoding)
        report.raise_if_bad()
        processes.say(report)
        return 0

    torch.manual_seed(options.seed)
    param_dtype = torch.bfloat16 if options.mixed_precision else None
    model = open_model(source, device=device, param_dtype=param_dtype, **opening)
    if options.activation_checkpointing:
        model.gradient_checkpointing_enable()
    elif plan is not None:
        apply_activation_plan(model, plan)
    optimizer = make_optimizer(
        model, options.optimizer, lr=options.lr, weight_decay=options.weight_decay, stochastic_rounding=is_stochastic
    )
    factor = schedule(options.schedule, steps, warmup_steps=int(options.warmup * steps))
    warn_of_rounding(optimizer, options.lr)
    skip = SkipNonFinite(optimizer)  # a gradient that is not finite changes no weight
    if options.optimizer_in_backward:
        StepInBackward(optimizer, skip)
    train = CapturedStep(
        model, optimizer, max_norm=options.max_grad_norm or None, skip=skip, capture=options.capture,
        autocast=torch.bfloat16 if options.mixed_precision else None,
    )  # fmt: skip
    ema = EMA(model, options.ema) if options.ema is not None else None
    averaged = ema.swapped if ema is not None else nullcontext
    run.load(optimizer, batches, model=model, ema=ema)

    tracker = open_tracker(options.tracker, run.output, dataclasses.asdict(options))
    with StopRequest() as stop, RunLog(run.output, model, first_step=run.step, steps=steps, report=tracker) as log:
        for step in range(run.step + 1, steps + 1):
            micro_batches = list(islice(batches, options.accumulate))
            (trained_tokens,) = processes.total(sum(batch.trained_tokens for batch in micro_batches))
            if not trained_tokens:
                where = f"step {step}, {first_sources(micro_batches)}"
                raise LigerzooError("no token is trained", where=where, remedy="Look at the data with --dry-run.")
            set_lr(optimizer, factor(step - 1))
            loss, norm = train(  # forward and backward of each micro-batch, clipping, and the optimizer's update
                [batch.inputs for batch in micro_batches], processes.divisor(trained_tokens, device)
            )
            if ema is not None:
                ema.update()
            lr = options.lr * factor(step - 1)
            log.step(step, loss=loss, grad_norm=norm, lr=lr, batches=micro_batches, skipped=skip.count)

            is_last, is_stopped = step == steps, any(processes.total(stop.requested))
            if options.eval_data and (step % options.eval_every == 0 or is_last):
                with log.paused(), averaged():
                    held_out = partial(samples, options.eval_data, epochs=1, shuffle=False)
                    log.evaluation(step, **evaluate(model, tokenizer, batched(held_out()), held_out()))
            if step % options.save_every == 0 or is_last or is_stopped:
                with log.paused():
                    run.save(step, model, processor, optimizer, batches, ema)
                    plot_loss(run.output)
            if is_stopped and not is_last:
                log.say(f"Stopped after step {step}. --resume continues from {run.checkpoint}.")
                return 130
    with averaged():
        run.finish(model, processor)
    processes.say(f"{run.output} holds the {'adapter' if options.lora_rank else 'model'}, log.jsonl and loss.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, __file__)))

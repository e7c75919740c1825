"""Distillation: a model learns the distributions that a larger one, the teacher, predicts for each token.

`ligerzoo train MODEL --method distill --teacher TEACHER --data FILE --output DIR` runs this file; with --print-recipe
it prints it with these options as defaults. Change what you like and run it with `python`; options of the command line
replace the defaults.
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
from ligerzoo.device import available_device
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.losses import Distillation
from ligerzoo.train import processes
from ligerzoo.train.checks import check_dtype, check_tied_weights, check_vocabulary, warn_of_rounding
from ligerzoo.train.data import Batch, PackedBatches, check_data, format_sample, open_data
from ligerzoo.train.evaluation import continue_prompts, evaluating, prompt_of
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.log import RunLog, first_sources
from ligerzoo.train.metrics import mean_metrics
from ligerzoo.train.optimizers import clip_grad_norm, make_optimizer, schedule, set_lr
from ligerzoo.train.options import Count, Fraction, NotNegative, Number, Positive, check_options, parse_options
from ligerzoo.train.plot import plot_loss
from ligerzoo.train.run_state import RunState
from ligerzoo.train.starting import checkpoint_directory, count_steps, describe_run, load_or_build
from ligerzoo.train.teacher import check_same_tokens, load_teacher
from ligerzoo.train.tracking import open_tracker


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a run. A field's type is checked, and the text below it is its description in `--help`."""

    model: str
    """checkpoint of the student in Hugging Face format: a directory or a hub id; also a config.json, or a
    directory without weights, for random weights"""
    teacher: str
    """checkpoint of the teacher, with the same tokenizer"""
    data: tuple[str, ...]
    """file with training data; several are one data set"""
    output: str
    """directory for checkpoints, the log and the trained model"""
    method: Literal["distill"] = "distill"
    """learns from a teacher, on completions, assistant turns or all tokens of texts"""
    tokenizer: str | None = None
    """checkpoint of the tokenizer (default: MODEL)"""
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "tvd", "cosine"] = "jsd"
    """divergence of the student from the teacher: forward_kl covers the teacher's modes, reverse_kl seeks
    them, jsd is between"""
    beta: Fraction | None = None
    """share of the teacher in the mixture of jsd (default: 0.5)"""
    temperature: Positive | None = None
    """divides the logits of both models (default: 1)"""
    hard_weight: NotNegative = 0.0
    """weight of the cross entropy with the data's tokens, which is added"""
    seq_length: Count = 2048
    """tokens in a row; shorter samples are packed into one row"""
    batch_size: Count = 4
    """rows in a micro-batch"""
    accumulate: Count = 1
    """micro-batches in a step, to train large batches in little memory"""
    max_steps: Count | None = None
    """number of steps; the data is repeated as needed (default: as --epochs)"""
    epochs: Count | None = None
    """times that the data is read, without --max-steps (default: 1)"""
    optimizer: Literal["adamw", "adamw-8bit", "adamw-4bit", "adamw-fp8", "muon"] = "adamw"
    """name of the optimizer"""
    lr: Positive = 1e-5
    """peak learning rate"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """learning rate after the warmup"""
    warmup: Fraction = 0.03
    """share of the steps in which the learning rate rises"""
    weight_decay: NotNegative = 0.0
    """decoupled weight decay"""
    max_grad_norm: Positive = 1.0
    """norm to which the gradients of a step are clipped"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the weights (default: as stored)"""
    mixed_precision: bool = False
    """compute in bfloat16 with weights in float32"""
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
        if self.max_steps and self.epochs:
            raise ConfigError("only one of them may be given", where="options max_steps and epochs")
        if self.mixed_precision and self.dtype != "float32":
            raise ConfigError("needs dtype float32", where="option mixed_precision", got=f"dtype {self.dtype}")
        make_loss(self)


MAY_CHANGE = {
    "resume", "dry_run", "output", "max_steps", "epochs", "save_every", "keep", "eval_data", "eval_every", "device",
    "tracker", "activation_checkpointing",
}  # fmt: skip
"""Options that may differ when a run is resumed."""


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
    """Trains. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    processes.refuse_several()
    torch.manual_seed(options.seed)
    run = RunState(options.output, options, resume=options.resume, may_change=MAY_CHANGE, keep=options.keep)
    tokenizer = Tokenizer.from_pretrained(run.checkpoint or options.tokenizer or checkpoint_directory(options.model))
    check_same_tokens(tokenizer, Tokenizer.from_pretrained(options.teacher), options.teacher)
    device = available_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = load_or_build(run.checkpoint or options.model, dtype=options.dtype, device=device).train()
    if options.activation_checkpointing:
        model.gradient_checkpointing_enable()
    check_dtype(model)
    check_tied_weights(model)
    check_vocabulary(model, tokenizer)

    epochs = None if options.max_steps else options.epochs or 1

    def samples(paths: tuple[str, ...], **given: Any) -> Any:
        return open_data(paths, "auto", tokenizer, seq_length=options.seq_length, seed=options.seed, **given)

    def packed(stream: Any) -> PackedBatches:
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        return PackedBatches(stream, batch_size=options.batch_size, seq_length=options.seq_length, pad_token_id=padding)

    batches = packed(samples(options.data, epochs=epochs))
    steps = options.max_steps or count_steps(packed(samples(options.data, epochs=epochs)), options.accumulate)
    optimizer = make_optimizer(model, options.optimizer, lr=options.lr, weight_decay=options.weight_decay)
    factor = schedule(options.schedule, steps, warmup_steps=int(options.warmup * steps))
    warn_of_rounding(optimizer, options.lr)
    run.load(optimizer, batches)

    sizes = {"batch_size": options.batch_size, "seq_length": options.seq_length}
    print(describe_run(model, first_step=run.step, steps=steps, micro_batches=options.accumulate, **sizes))
    for sample in islice(samples(options.data, epochs=1), 3):
        print(format_sample(sample, tokenizer, max_tokens=500))
    if options.dry_run:
        report = check_data(options.data, "auto", tokenizer, seq_length=options.seq_length)
        report.raise_if_bad()
        print(report)
        return 0

    distillation = make_loss(options)
    teacher = load_teacher(options.teacher, model, dtype=options.dtype, device=device)

    def loss_of(micro_batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss and metrics of a step; accumulates gradients, if they are enabled."""
        trained_tokens = sum(batch.trained_tokens for batch in micro_batches)
        if not trained_tokens:
            raise LigerzooError("no token is trained", where=first_sources(micro_batches))
        loss, metrics = torch.zeros((), device=device), []
        for batch in micro_batches:
            inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.inputs.items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=options.mixed_precision):
                part = distillation.of_teacher(
                    model, teacher, inputs["input_ids"], inputs["labels"], num_items=trained_tokens,
                    model_inputs={"position_ids": inputs["position_ids"]}, aux_loss_share=1 / len(micro_batches),
                )  # fmt: skip
            if torch.is_grad_enabled():
                part.loss.backward()  # type: ignore[no-untyped-call]
            loss += part.loss.detach()
            metrics.append(part.metrics)
        return loss, mean_metrics(metrics, [batch.trained_tokens for batch in micro_batches])

    tracker = open_tracker(options.tracker, run.output, dataclasses.asdict(options))
    with StopRequest() as stop, RunLog(run.output, model, first_step=run.step, steps=steps, report=tracker) as log:
        for step in range(run.step + 1, steps + 1):
            micro_batches = list(islice(batches, options.accumulate))
            loss, metrics = loss_of(micro_batches)
            grad_norm = clip_grad_norm(model.parameters(), options.max_grad_norm)
            set_lr(optimizer, factor(step - 1))
            optimizer.step()
            optimizer.zero_grad()
            lr = options.lr * factor(step - 1)
            log.step(step, loss=loss, grad_norm=grad_norm, lr=lr, batches=micro_batches, metrics=metrics)

            if options.eval_data and (step % options.eval_every == 0 or step == steps):
                with log.paused():
                    with evaluating(model):
                        held_out = list(packed(samples(options.eval_data, epochs=1, shuffle=False)))
                        eval_loss, metrics = loss_of(held_out)
                    prompts = map(prompt_of, islice(samples(options.eval_data, epochs=1, shuffle=False), 2))
                    shown = continue_prompts(model, tokenizer, prompts)
                    values = {f"eval_{name}": value.item() for name, value in metrics.items()}
                    log.evaluation(step, eval_loss=eval_loss.item(), **values, samples=shown)
            if step % options.save_every == 0 or step == steps or stop.requested:
                with log.paused():
                    run.save(step, model, tokenizer, optimizer, batches)
                    plot_loss(run.output, unit=f"{options.divergence} from the teacher")
            if stop.requested and step < steps:
                log.say(f"Stopped after step {step}. --resume continues from {run.checkpoint}.")
                return 130
    run.finish(model, tokenizer)
    print(f"{run.output} holds the model, log.jsonl and loss.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, __file__)))

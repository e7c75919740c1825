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
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from ligerzoo import Tokenizer
from ligerzoo.adapters import add_lora
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.losses import Distillation
from ligerzoo.models import CausalLM
from ligerzoo.train import processes
from ligerzoo.train.checks import check_common_combinations, check_model, trains_bfloat16, warn_of_rounding
from ligerzoo.train.data import Batch, PackedBatches, PaddedBatches, SampleStream, check_data, format_sample, open_data
from ligerzoo.train.evaluation import continue_prompts, evaluating, prompt_of
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.log import RunLog, first_sources
from ligerzoo.train.metrics import mean_metrics
from ligerzoo.train.optimizers import SkipNonFinite, clip_grad_norm, make_optimizer, schedule, set_lr
from ligerzoo.train.options import Count, Fraction, NotNegative, Number, Positive, check_options, parse_options
from ligerzoo.train.plot import plot_loss
from ligerzoo.train.run_state import RunState
from ligerzoo.train.starting import checkpoint_directory, count_steps, describe_run, make_batches, open_model
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
    """directory for checkpoints, the log and the trained model or adapter"""
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
    too_long: Literal["error", "truncate", "drop"] = "error"
    """what happens to samples of more than --seq-length tokens"""
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
    lora_targets: tuple[str, ...] | None = None
    """part of the names of the weights to update, such as q_proj (default: all linear layers of blocks)"""
    optimizer: Literal["adamw", "adamw-8bit", "adamw-4bit", "adamw-fp8", "muon"] = "adamw"
    """name of the optimizer"""
    stochastic_rounding: Literal["auto", "on", "off"] = "auto"
    """round bfloat16 weights stochastically, so that no update is lost (default: on for such weights)"""
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
        check_common_combinations(self)
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
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    return processes.run_together(lambda device: train(options, device), options.device)


def train(options: Options, device: torch.device) -> int:
    """Trains in this process."""
    torch.manual_seed(options.seed)
    run = RunState(options.output, options, resume=options.resume, may_change=MAY_CHANGE, keep=options.keep)
    tokenizer = Tokenizer.from_pretrained(run.checkpoint or options.tokenizer or checkpoint_directory(options.model))
    check_same_tokens(tokenizer, Tokenizer.from_pretrained(options.teacher), options.teacher)

    def adapt(model: CausalLM) -> None:
        if options.lora_rank:
            add_lora(model, options.lora_rank, options.lora_alpha or 2 * options.lora_rank, options.lora_targets)

    source = options.model if options.lora_rank else run.checkpoint or options.model
    opening: dict[str, Any] = {"dtype": options.dtype, "new": True}
    opening["adapt"] = adapt if options.lora_rank else None
    outline = open_model(source, device=torch.device("meta"), **opening)  # shapes alone, for checks
    check_model(outline, tokenizer, options.optimizer)

    epochs = None if options.max_steps else options.epochs or 1
    sizes = {"batch_size": options.batch_size, "seq_length": options.seq_length}
    encoding: dict[str, Any] = {"seq_length": options.seq_length, "too_long": options.too_long}

    def samples(paths: tuple[str, ...], **given: Any) -> SampleStream:
        return open_data(paths, "auto", tokenizer, seed=options.seed, **encoding, **given)

    def packed(stream: SampleStream) -> PackedBatches | PaddedBatches:
        return make_batches(stream, tokenizer, packing="auto", pin_memory=device.type == "cuda", **sizes)

    batches = packed(samples(options.data, epochs=epochs))
    steps = options.max_steps or count_steps(packed(samples(options.data, epochs=epochs)), options.accumulate)
    about: dict[str, Any] = {"first_step": run.step, "steps": steps, "micro_batches": options.accumulate, **sizes}
    processes.say(describe_run(outline, device=device, **about))
    for sample in islice(samples(options.data, epochs=1), 3):
        processes.say(format_sample(sample, tokenizer, max_tokens=500))
    if options.dry_run:
        report = check_data(options.data, "auto", tokenizer, **encoding)
        report.raise_if_bad()
        processes.say(report)
        return 0

    param_dtype = torch.bfloat16 if options.mixed_precision else None
    model = open_model(source, device=device, param_dtype=param_dtype, **opening)
    if options.activation_checkpointing:
        model.gradient_checkpointing_enable()
    is_stochastic = {"on": True, "off": False, "auto": trains_bfloat16(outline)}[options.stochastic_rounding]
    rounding: dict[str, Any] = {"stochastic_rounding": is_stochastic}
    optimizer = make_optimizer(model, options.optimizer, lr=options.lr, weight_decay=options.weight_decay, **rounding)
    factor = schedule(options.schedule, steps, warmup_steps=int(options.warmup * steps))
    warn_of_rounding(optimizer, options.lr)
    skip = SkipNonFinite(optimizer)  # a gradient that is not finite changes no weight
    run.load(optimizer, batches, model=model)

    distillation = make_loss(options)
    teacher = load_teacher(options.teacher, model, device=device, dtype=options.dtype, param_dtype=param_dtype)

    def loss_of(micro_batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss and metrics of a step; accumulates gradients, if they are enabled."""
        (trained_tokens,) = processes.total(sum(batch.trained_tokens for batch in micro_batches))
        if not trained_tokens:
            raise LigerzooError("no token is trained", where=first_sources(micro_batches))
        items = processes.divisor(trained_tokens, device)
        loss, metrics = torch.zeros((), device=device), []
        for batch in micro_batches:
            inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.inputs.items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=options.mixed_precision):
                part = distillation.of_teacher(
                    model, teacher, inputs["input_ids"], inputs["labels"], num_items=items,
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
            norm = clip_grad_norm(model.parameters(), options.max_grad_norm or None)
            skip(norm)
            set_lr(optimizer, factor(step - 1))
            optimizer.step()
            optimizer.zero_grad()
            shown: dict[str, Any] = {"lr": options.lr * factor(step - 1), "batches": micro_batches}
            log.step(step, loss=loss, grad_norm=norm, skipped=skip.count, metrics=metrics, **shown)

            is_last, is_stopped = step == steps, any(processes.total(stop.requested))
            if options.eval_data and (step % options.eval_every == 0 or is_last):
                with log.paused():
                    held_out = partial(samples, options.eval_data, epochs=1, shuffle=False)
                    with evaluating(model):
                        eval_loss, metrics = loss_of(list(packed(held_out())))
                    first: Any = islice(held_out(), 2)
                    prompts = map(prompt_of, first)
                    values = {"loss": processes.mean(eval_loss), **metrics}
                    log.evaluation(
                        step, **{f"eval_{name}": value.item() for name, value in values.items()},
                        samples=continue_prompts(model, tokenizer, prompts),
                    )  # fmt: skip
            if step % options.save_every == 0 or is_last or is_stopped:
                with log.paused():
                    run.save(step, model, tokenizer, optimizer, batches)
                    plot_loss(run.output, unit=f"{options.divergence} from the teacher")
            if is_stopped and not is_last:
                log.say(f"Stopped after step {step}. --resume continues from {run.checkpoint}.")
                return 130
    run.finish(model, tokenizer)
    processes.say(f"{run.output} holds the {'adapter' if options.lora_rank else 'model'}, log.jsonl and loss.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, __file__)))

"""Preference optimization: DPO and its variants, KTO, ORPO, SimPO and CPO.

`ligerzoo train MODEL --method dpo --data FILE --output DIR` runs this file; with --print-recipe it prints it with these
options as defaults. Change what you like and run it with `python`, or with `torchrun --nproc-per-node N` on several
GPUs; options of the command line replace the defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch import Tensor

from ligerzoo import Tokenizer
from ligerzoo.adapters import adapters_disabled, add_lora
from ligerzoo.errors import ConfigError
from ligerzoo.losses import CPO, DPO, KTO, ORPO, HeadLoss, SimPO, model_sequence_logps
from ligerzoo.models import CausalLM
from ligerzoo.train import processes
from ligerzoo.train.checks import check_common_combinations, check_model, trains_bfloat16, warn_of_rounding
from ligerzoo.train.data import Batch, PackedBatches, PaddedBatches, SampleStream, check_data, format_sample, open_data
from ligerzoo.train.evaluation import continue_prompts, evaluating, prompt_of
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.log import RunLog
from ligerzoo.train.metrics import mean_metrics
from ligerzoo.train.optimizers import SkipNonFinite, clip_grad_norm, make_optimizer, schedule, set_lr
from ligerzoo.train.options import Count, Fraction, NotNegative, Number, Positive, check_options, parse_options
from ligerzoo.train.plot import plot_loss
from ligerzoo.train.preferences import (
    ReferenceTable,
    chosen_tokens,
    desirable_of,
    mean_log_ratio,
    mismatched,
    samples_of,
    sequences_of,
)
from ligerzoo.train.run_state import RunState
from ligerzoo.train.starting import count_steps, describe_run, make_batches, open_model
from ligerzoo.train.tracking import open_tracker


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a run. A field's type is checked, and the text below it is its description in `--help`."""

    model: str
    """checkpoint in Hugging Face format: a directory or a hub id"""
    data: tuple[str, ...]
    """file with pairs (prompt, chosen, rejected) or, for kto, with prompt, completion and label; several
    are one data set"""
    output: str
    """directory for checkpoints, the log and the trained model or adapter"""
    method: Literal["dpo", "kto", "orpo", "simpo", "cpo"] = "dpo"
    """the loss, see docs/losses.md; dpo and kto compare with a reference: MODEL before training"""
    variant: str | None = None
    """variant of the loss of dpo, kto or cpo, such as ipo (default: sigmoid; for kto: kto)"""
    beta: NotNegative | None = None
    """strength of the regularization of dpo and kto, weight of the odds ratio of orpo, scale of the
    rewards of simpo and cpo (default: 0.1; for simpo: 2)"""
    gamma: NotNegative | None = None
    """target margin of simpo (default: 1)"""
    label_smoothing: Fraction | None = None
    """probability that the labels of a pair are swapped, for dpo, simpo and cpo (default: 0)"""
    nll_weight: NotNegative | None = None
    """weight of the cross entropy of the chosen completions (default: 0; for orpo and cpo: 1)"""
    desirable_weight: NotNegative | None = None
    """weight of the desirable completions of kto (default: 1)"""
    undesirable_weight: NotNegative | None = None
    """weight of the undesirable completions of kto (default: 1)"""
    precompute_reference: bool = False
    """compute the reference's log-probabilities of all data before the first step, instead of keeping
    the reference in memory"""
    seq_length: Count = 2048
    """tokens in a row; both sequences of a pair share a row, with other pairs if they fit"""
    too_long: Literal["error", "truncate", "drop"] = "error"
    """what happens to pairs or samples of more than --seq-length tokens"""
    batch_size: Count = 4
    """rows in a micro-batch of a process"""
    accumulate: Count = 1
    """micro-batches in a step, to train large batches in little memory"""
    max_steps: Count | None = None
    """number of steps; the data is repeated as needed (default: as --epochs)"""
    epochs: Count | None = None
    """times that the data is read, without --max-steps (default: 1)"""
    lora_rank: Count | None = None
    """train low-rank updates of this rank (LoRA) of the frozen weights; --output is a PEFT adapter, and
    the reference needs no second copy of MODEL"""
    lora_alpha: Positive | None = None
    """the updates are scaled by this number / rank (default: twice the rank)"""
    lora_targets: tuple[str, ...] | None = None
    """part of the names of the weights to update, such as q_proj (default: all linear layers of blocks)"""
    optimizer: Literal["adamw", "adamw-8bit", "adamw-4bit", "adamw-fp8", "muon"] = "adamw"
    """name of the optimizer"""
    stochastic_rounding: Literal["auto", "on", "off"] = "auto"
    """round bfloat16 weights stochastically, so that no update is lost (default: on for such weights)"""
    lr: Positive = 1e-6
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
    """seed of the order of the data"""
    device: str | None = None
    """cpu, cuda or cuda:1 (default: the first GPU, else cpu)"""
    tracker: Literal["tensorboard", "wandb"] | None = None
    """also send the log to TensorBoard or Weights & Biases"""
    dry_run: bool = False
    """read all data, print the plan and three samples with the trained tokens in colour, and train nothing"""

    def __post_init__(self) -> None:
        check_options(self)
        check_common_combinations(self)
        loss = make_loss(self)
        if self.precompute_reference and (not loss.needs_reference({}) or uses_kl(self)):
            reason = "pairs other prompts and completions in each step" if uses_kl(self) else "has no reference"
            raise ConfigError(f"method {self.method} {reason}", where="option precompute_reference")


MAY_CHANGE = {
    "resume", "dry_run", "output", "max_steps", "epochs", "save_every", "keep", "eval_data", "eval_every", "device",
    "tracker", "activation_checkpointing", "precompute_reference",
}  # fmt: skip
"""Options that may differ when a run is resumed."""

LOSSES: dict[str, type[HeadLoss]] = {"dpo": DPO, "kto": KTO, "orpo": ORPO, "simpo": SimPO, "cpo": CPO}
LOSS_OPTIONS = (
    "variant", "beta", "gamma", "label_smoothing", "nll_weight", "desirable_weight", "undesirable_weight",
)  # fmt: skip


def make_loss(options: Options) -> HeadLoss:
    """Returns the loss. Raises ConfigError if an option is out of range, or is not an option of the method."""
    given = {name: getattr(options, name) for name in LOSS_OPTIONS if getattr(options, name) is not None}
    try:
        return LOSSES[options.method](**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error), where=f"options of method {options.method}") from error


def uses_kl(options: Options) -> bool:
    """Returns whether the loss needs an estimate of the KL divergence from the reference."""
    return options.method == "kto" and options.variant in (None, "kto")


def main(options: Options) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    return processes.run_together(lambda device: train(options, device), options.device)


def train(options: Options, device: torch.device) -> int:
    """Trains in this process."""
    torch.manual_seed(options.seed)
    run = RunState(options.output, options, resume=options.resume, may_change=MAY_CHANGE, keep=options.keep)
    tokenizer = Tokenizer.from_pretrained(run.checkpoint or options.model)

    def adapt(model: CausalLM) -> None:
        if options.lora_rank:
            add_lora(model, options.lora_rank, options.lora_alpha or 2 * options.lora_rank, options.lora_targets)

    source = options.model if options.lora_rank else run.checkpoint or options.model
    opening: dict[str, Any] = {"dtype": options.dtype, "adapt": adapt if options.lora_rank else None}
    outline = open_model(source, device=torch.device("meta"), **opening)  # shapes alone, for checks
    check_model(outline, tokenizer, options.optimizer)

    kind: Literal["labelled", "preference"] = "labelled" if options.method == "kto" else "preference"
    epochs = None if options.max_steps else options.epochs or 1
    sizes = {"batch_size": options.batch_size, "seq_length": options.seq_length}
    encoding: dict[str, Any] = {"seq_length": options.seq_length, "too_long": options.too_long}

    def samples(paths: tuple[str, ...], **given: Any) -> SampleStream:
        return open_data(paths, kind, tokenizer, seed=options.seed, **encoding, **given)

    def packed(stream: SampleStream) -> PackedBatches | PaddedBatches:
        return make_batches(stream, tokenizer, packing="auto", pin_memory=device.type == "cuda", **sizes)

    batches = packed(samples(options.data, epochs=epochs))
    steps = options.max_steps or count_steps(packed(samples(options.data, epochs=epochs)), options.accumulate)
    about: dict[str, Any] = {"first_step": run.step, "steps": steps, "micro_batches": options.accumulate, **sizes}
    processes.say(describe_run(outline, device=device, **about))
    for sample in islice(samples(options.data, epochs=1), 3):
        processes.say(format_sample(sample, tokenizer, max_tokens=500))
    if options.dry_run:
        report = check_data(options.data, kind, tokenizer, **encoding)
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

    loss_function = make_loss(options)
    needs_reference = loss_function.needs_reference({})
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=options.mixed_precision)
    reference: CausalLM | None = model  # of adapters: the same weights without them
    base = partial(adapters_disabled, model) if options.lora_rank else nullcontext
    if needs_reference and not options.lora_rank:
        reference = open_model(options.model, device=device, dtype=options.dtype, param_dtype=param_dtype)
        reference.requires_grad_(False).eval()

    def on_device(batch: Batch) -> dict[str, Any]:
        tensors = {**batch.inputs, "sequences": sequences_of(batch)}
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    def reference_logps(batch: Batch) -> Tensor:
        assert reference is not None
        with torch.no_grad(), autocast(), base():
            return model_sequence_logps(reference, **on_device(batch))

    ref_logps_of: Callable[[Batch], Tensor] = reference_logps
    if options.precompute_reference:
        every = [
            packed(samples(paths, epochs=1, shuffle=False)) for paths in (options.data, options.eval_data) if paths
        ]
        ref_logps_of, reference = ReferenceTable(chain(*every), reference_logps), None

    def kl_divergence(micro_batches: Sequence[Batch]) -> Tensor:
        """Estimates KTO's KL divergence of the model from the reference, over all samples of a step."""
        log_ratios = [torch.zeros(0, device=device)]
        for batch in mismatched(micro_batches):
            with torch.no_grad(), autocast():
                logps = model_sequence_logps(model, **on_device(batch))
            log_ratios.append(logps - ref_logps_of(batch).to(device))
        return mean_log_ratio(torch.cat(log_ratios)).clamp(min=0)

    def loss_of(micro_batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss and metrics of a step; accumulates gradients, if they are enabled."""
        sizes = [len(samples_of([batch])) for batch in micro_batches]
        pairs, tokens = processes.total(sum(sizes), chosen_tokens(micro_batches))
        step: dict[str, Any] = {"num_items": processes.divisor(pairs, device)}
        step["aux_loss_share"] = 1 / len(micro_batches)
        if options.method != "kto":
            step["num_nll_items"] = processes.divisor(tokens, device)
        if uses_kl(options):
            step["kl"] = kl_divergence(micro_batches)
        loss, metrics = torch.zeros((), device=device), []
        for batch in micro_batches:
            given = dict(step)
            if needs_reference:
                given["ref_logps"] = ref_logps_of(batch).to(device)
            if options.method == "kto":
                given["desirable"] = desirable_of(batch).to(device)
            inputs = on_device(batch)
            positions = {"position_ids": inputs.pop("position_ids")}
            with autocast():
                part = loss_function.of(model, **inputs, model_inputs=positions, **given)
            if torch.is_grad_enabled():
                part.loss.backward()  # type: ignore[no-untyped-call]
            loss += part.loss.detach()
            metrics.append(part.metrics)
        return loss, mean_metrics(metrics, sizes)

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
                    prompts = (prompt_of(sample.segments[0]) for sample in first)
                    values = {"loss": processes.mean(eval_loss), **metrics}
                    log.evaluation(
                        step, **{f"eval_{name}": value.item() for name, value in values.items()},
                        samples=continue_prompts(model, tokenizer, prompts),
                    )  # fmt: skip
            if step % options.save_every == 0 or is_last or is_stopped:
                with log.paused():
                    run.save(step, model, tokenizer, optimizer, batches)
                    plot_loss(run.output, unit=f"{options.method} loss")
            if is_stopped and not is_last:
                log.say(f"Stopped after step {step}. --resume continues from {run.checkpoint}.")
                return 130
    run.finish(model, tokenizer)
    processes.say(f"{run.output} holds the {'adapter' if options.lora_rank else 'model'}, log.jsonl and loss.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, __file__)))

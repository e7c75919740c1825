"""Preference optimization: DPO and its variants, KTO, ORPO, SimPO and CPO.

`ligerzoo train MODEL --method dpo --data FILE --output DIR` runs this file; with --print-recipe it prints it with these
options as defaults. Change what you like and run it with `python`; options of the command line replace the defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from ligerzoo import AutoModel, Tokenizer
from ligerzoo.device import available_device
from ligerzoo.errors import ConfigError
from ligerzoo.losses import CPO, DPO, KTO, ORPO, HeadLoss, SimPO, kto_kl, model_sequence_logps
from ligerzoo.models import CausalLM
from ligerzoo.train import processes
from ligerzoo.train.checks import check_dtype, check_tied_weights, check_vocabulary, warn_of_rounding
from ligerzoo.train.data import Batch, PackedBatches, check_data, format_sample, open_data
from ligerzoo.train.evaluation import continue_prompts, evaluating, prompt_of
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.log import RunLog
from ligerzoo.train.metrics import mean_metrics
from ligerzoo.train.optimizers import clip_grad_norm, make_optimizer, schedule, set_lr
from ligerzoo.train.options import Count, Fraction, NotNegative, Number, Positive, check_options, parse_options
from ligerzoo.train.plot import plot_loss
from ligerzoo.train.preferences import (
    ReferenceTable,
    chosen_tokens,
    desirable_of,
    mismatched,
    samples_of,
    sequences_of,
)
from ligerzoo.train.run_state import RunState
from ligerzoo.train.starting import count_steps, describe_run
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
    """directory for checkpoints, the log and the trained model"""
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
    lr: Positive = 1e-6
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
    """seed of the order of the data"""
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
        loss = make_loss(self)
        if self.precompute_reference and (not loss.needs_reference({}) or uses_kl(self)):
            reason = "pairs prompts and completions anew in each step" if uses_kl(self) else "has no reference"
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
    """Trains. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    processes.refuse_several()
    torch.manual_seed(options.seed)
    run = RunState(options.output, options, resume=options.resume, may_change=MAY_CHANGE, keep=options.keep)
    tokenizer = Tokenizer.from_pretrained(run.checkpoint or options.model)
    device = available_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = AutoModel.from_pretrained(run.checkpoint or options.model, dtype=options.dtype, device=device).train()
    if options.activation_checkpointing:
        model.gradient_checkpointing_enable()
    check_dtype(model)
    check_tied_weights(model)
    check_vocabulary(model, tokenizer)

    kind: Literal["labelled", "preference"] = "labelled" if options.method == "kto" else "preference"
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    epochs = None if options.max_steps else options.epochs or 1

    def samples(paths: tuple[str, ...], **given: Any) -> Any:
        return open_data(paths, kind, tokenizer, seq_length=options.seq_length, seed=options.seed, **given)

    def packed(stream: Any) -> PackedBatches:
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
        report = check_data(options.data, kind, tokenizer, seq_length=options.seq_length)
        report.raise_if_bad()
        print(report)
        return 0

    loss_function = make_loss(options)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.mixed_precision)
    reference: CausalLM | None = None
    if loss_function.needs_reference({}):
        reference = AutoModel.from_pretrained(options.model, dtype=options.dtype, device=device).requires_grad_(False)

    def on_device(batch: Batch) -> dict[str, Any]:
        tensors = {**batch.inputs, "sequences": sequences_of(batch)}
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    def reference_logps(batch: Batch) -> Tensor:
        assert reference is not None
        with torch.no_grad(), autocast:
            return model_sequence_logps(reference, **on_device(batch))

    ref_logps_of: Callable[[Batch], Tensor] = reference_logps
    if options.precompute_reference:
        every = (batch for paths in (options.data, options.eval_data) if paths
                 for batch in packed(samples(paths, epochs=1, shuffle=False)))  # fmt: skip
        ref_logps_of, reference = ReferenceTable(every, reference_logps), None

    def kl_divergence(micro_batches: Sequence[Batch]) -> Tensor:
        """Estimates KTO's KL divergence of the model from the reference, over all samples of a step."""
        pairs = [torch.zeros(2, 0, device=device)]
        for batch in mismatched(micro_batches, padding):
            with torch.no_grad(), autocast:
                logps = model_sequence_logps(model, **on_device(batch))
            pairs.append(torch.stack([logps, ref_logps_of(batch)]))
        return kto_kl(*torch.cat(pairs, 1))

    def loss_of(micro_batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss and metrics of a step; accumulates gradients, if they are enabled."""
        sizes = [len(samples_of([batch])) for batch in micro_batches]
        step: dict[str, Any] = {"num_items": sum(sizes), "aux_loss_share": 1 / len(micro_batches)}
        if options.method != "kto":
            step["num_nll_items"] = chosen_tokens(micro_batches)
        if uses_kl(options):
            step["kl"] = kl_divergence(micro_batches)
        loss, metrics = torch.zeros((), device=device), []
        for batch in micro_batches:
            given = dict(step)
            if loss_function.needs_reference({}):
                given["ref_logps"] = ref_logps_of(batch).to(device)
            if options.method == "kto":
                given["desirable"] = desirable_of(batch).to(device)
            inputs = on_device(batch)
            positions = {"position_ids": inputs.pop("position_ids")}
            with autocast:
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
            grad_norm = clip_grad_norm(model.parameters(), options.max_grad_norm)
            lr = options.lr * factor(step - 1)
            set_lr(optimizer, factor(step - 1))
            optimizer.step()
            optimizer.zero_grad()
            log.step(step, loss=loss, grad_norm=grad_norm, lr=lr, batches=micro_batches, metrics=metrics)

            if options.eval_data and (step % options.eval_every == 0 or step == steps):
                with log.paused():
                    with evaluating(model):
                        held_out = list(packed(samples(options.eval_data, epochs=1, shuffle=False)))
                        eval_loss, metrics = loss_of(held_out)
                    first = islice(samples(options.eval_data, epochs=1, shuffle=False), 2)
                    shown = continue_prompts(model, tokenizer, (prompt_of(sample.segments[0]) for sample in first))
                    values = {f"eval_{name}": value.item() for name, value in metrics.items()}
                    log.evaluation(step, eval_loss=eval_loss.item(), **values, samples=shown)
            if step % options.save_every == 0 or step == steps or stop.requested:
                with log.paused():
                    run.save(step, model, tokenizer, optimizer, batches)
                    plot_loss(run.output, unit=f"{options.method} loss")
            if stop.requested and step < steps:
                log.say(f"Stopped after step {step}. --resume continues from {run.checkpoint}.")
                return 130
    run.finish(model, tokenizer)
    print(f"{run.output} holds the model, log.jsonl and loss.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, __file__)))

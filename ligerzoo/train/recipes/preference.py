"""Preference optimization: DPO and its variants, KTO, ORPO, SimPO and CPO.

`ligerzoo train MODEL --method dpo --data FILE --output DIR` runs this file; with --print-recipe it prints it with these
options as defaults. Change what you like and run it with `python`, or with `torchrun --nproc-per-node N` on several
GPUs; options of the command line replace the defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch import Tensor

from ligerzoo.errors import ConfigError
from ligerzoo.losses import CPO, DPO, KTO, ORPO, HeadLoss, LossOutput, SimPO, model_sequence_logps
from ligerzoo.models import CausalLM
from ligerzoo.train import processes, run_model
from ligerzoo.train.data import Batch
from ligerzoo.train.due import Schedule
from ligerzoo.train.evaluation import evaluate_method, prompt_of
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.log import RunLog
from ligerzoo.train.metrics import forward_backward
from ligerzoo.train.options import Count, Fraction, NotNegative, Positive, run_script
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

    data: tuple[str, ...]
    """file with pairs (prompt, chosen, rejected) or, for kto, with prompt, completion and label; several
    are one data set"""
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
    lr: Positive = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        loss = make_loss(self)
        if self.precompute_reference and (not loss.needs_reference({}) or uses_kl(self)):
            reason = "pairs other prompts and completions in each step" if uses_kl(self) else "has no reference"
            raise ConfigError(f"method {self.method} {reason}", where="option precompute_reference")


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
    return run_together(train, options, may_change={*MAY_CHANGE, "precompute_reference"})


def train(options: Options, run: RunState, device: torch.device) -> int:
    """Trains in this process."""
    processor = run_model.open_processor(options, run)  # or the tokenizer of a model that reads no images
    tokenizer = tokenizer_of(processor)
    outline = run_model.open_outline(options, run)  # shapes alone, for checks and plans
    kind: Literal["labelled", "preference"] = "labelled" if options.method == "kto" else "preference"
    data = RunData(options, tokenizer, outline, kind, pin_memory=device.type == "cuda")
    batches, steps = data.training(), data.count_steps()
    loss_function = make_loss(options)
    needs_reference = loss_function.needs_reference({})
    needs_copy = needs_reference and not options.lora_rank  # the reference of adapters is the model without them
    frozen = outline if needs_copy and not options.precompute_reference else None
    plan = run_model.plan_memory(options, outline, device, frozen=frozen, accumulate=options.accumulate > 1)
    more = (describe_update(options, outline), plan)
    processes.say(describe_run(outline, options, device, first_step=run.step, steps=steps, more=more))
    data.show()
    if options.dry_run:
        data.check()
        return 0

    model = run_model.open_trained_model(options, run, device, plan)
    update = Update(model, options, steps)
    run.load(model, update.optimizer, batches, update.ema)
    reference: CausalLM | None = run_model.open_reference(options, device) if needs_copy else model

    def on_device(batch: Batch) -> dict[str, Any]:
        tensors = {**batch.inputs, "sequences": sequences_of(batch)}
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    def reference_logps(batch: Batch) -> Tensor:
        assert reference is not None
        with torch.no_grad(), run_model.autocast(options, device), run_model.without_adapters(reference, options):
            return model_sequence_logps(reference, **on_device(batch))

    ref_logps_of: Callable[[Batch], Tensor] = reference_logps
    if options.precompute_reference:
        every = [data.once(paths) for paths in (options.data, options.eval_data) if paths]
        ref_logps_of, reference = ReferenceTable(chain(*every), reference_logps), None

    def kl_divergence(micro_batches: Sequence[Batch]) -> Tensor:
        """Estimates KTO's KL divergence of the model from the reference, over all samples of a step."""
        log_ratios = [torch.zeros(0, device=device)]
        for batch in mismatched(micro_batches):
            with torch.no_grad(), run_model.autocast(options, device):
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

        def forward(batch: Batch) -> LossOutput:
            given = dict(step)
            if needs_reference:
                given["ref_logps"] = ref_logps_of(batch).to(device)
            if options.method == "kto":
                given["desirable"] = desirable_of(batch).to(device)
            inputs = on_device(batch)
            positions = {"position_ids": inputs.pop("position_ids")}
            with run_model.autocast(options, device):
                return loss_function.of(model, **inputs, model_inputs=positions, **given)

        return forward_backward(forward, micro_batches, sizes, device)

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
                    prompts = (prompt_of(one.segments[0]) for one in data.first_samples(options.eval_data, 2))
                    held_out = data.once(options.eval_data)
                    log.evaluation(step, **evaluate_method(model, tokenizer, loss_of, held_out, prompts))
            if due.save:
                with log.paused():
                    run.save(step, model, processor, update.optimizer, batches, update.ema)
                    plot_loss(run.output, unit=f"{options.method} loss")
            if due.stop:
                return log.stopped(step, run.checkpoint)
    with update.averaged():
        run.finish(model, processor, ["log.jsonl", "loss.svg"])
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, Options, __file__))

"""Preference optimization: DPO and its variants, KTO, ORPO, SimPO and CPO.

`ligerzoo train MODEL --method dpo --data FILE --output DIR` runs this file; with --print-recipe it prints it with these
options as defaults. Change what you like and run it with `python`, or with `torchrun --nproc-per-node N` on several
GPUs; options of the command line replace the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from ligerzoo.losses import LossOutput
from ligerzoo.train import processes
from ligerzoo.train.command_line import run_script
from ligerzoo.train.completion_options import PreferenceRunOptions
from ligerzoo.train.data import Batch
from ligerzoo.train.evaluation import evaluate_method
from ligerzoo.train.metrics import forward_backward
from ligerzoo.train.preferences import Reference, chosen_tokens, desirable_of, samples_of, sequences_of
from ligerzoo.train.run import Run
from ligerzoo.train.run_data import RunData

DEFAULTS: dict[str, Any] = {}


def main(options: PreferenceRunOptions) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    loss_function, is_kto = options.loss(), options.method == "kto"
    needs_reference = loss_function.needs_reference({})
    kind: Literal["labelled", "preference"] = "labelled" if is_kto else "preference"
    with Run(options) as run:
        data = RunData(options, run.processor, run.meta_model, kind, pin_memory=run.device.type == "cuda")
        # The reference of adapters is the model without them.
        keeps_copy = needs_reference and not options.lora_rank and not options.precompute_reference
        run.prepare(data, frozen=run.meta_model if keeps_copy else None)
        if options.dry_run:
            return 0
        model = run.open_model()
        reference = Reference(run, options, data) if needs_reference else None

        def loss_of(micro_batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
            """Returns the loss and metrics of a step; accumulates gradients, if they are enabled."""
            sizes = [len(samples_of([batch])) for batch in micro_batches]
            pairs, tokens = processes.total_of_data(sum(sizes), chosen_tokens(micro_batches))
            shared: dict[str, Any] = {"num_items": processes.divisor(pairs, run.device)}
            shared["aux_loss_share"] = 1 / len(micro_batches)
            if not is_kto:
                shared["num_nll_items"] = processes.divisor(tokens, run.device)
            if reference is not None and options.needs_kl:
                shared["kl"] = reference.kl_divergence(micro_batches)

            def forward(batch: Batch) -> LossOutput:
                given = dict(shared)
                if reference is not None:
                    given["ref_logps"] = reference.logps(batch).to(run.device)
                if is_kto:
                    given["desirable"] = desirable_of(batch).to(run.device)
                inputs = run.to_device({**batch.inputs, "sequences": sequences_of(batch)})
                given |= {name: inputs.pop(name) for name in ("input_ids", "labels", "sequences")}
                with run.autocast():
                    return loss_function.of(model, **given, model_inputs=inputs)  # positions, and images

            loss, metrics = forward_backward(forward, micro_batches, sizes, run)
            if is_kto and metrics:  # of all completions of the step: a micro-batch may have none of a kind
                metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
            return loss, metrics

        def evaluate() -> dict[str, Any]:
            return evaluate_method(model, run.tokenizer, loss_of, *data.evaluation())

        for step in run.steps(evaluate, loss_label=f"{options.method} loss"):
            loss, metrics = loss_of(step.batches)
            step.log(loss=loss, grad_norm=run.optimizer_step(), metrics=metrics)
    return run.exit_code


if __name__ == "__main__":
    sys.exit(run_script(main, PreferenceRunOptions, DEFAULTS))

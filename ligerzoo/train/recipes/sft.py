"""Pretraining and supervised fine-tuning (SFT).

`ligerzoo train MODEL --data FILE --output DIR` runs this file; with --print-recipe it prints it with these options as
defaults. Change what you like and run it with `python`, or with `torchrun --nproc-per-node N` on several GPUs; options
of the command line replace the defaults.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from ligerzoo.train.captured_step import CapturedStep, Inputs, part_of_loss
from ligerzoo.train.command_line import run_script
from ligerzoo.train.completion_options import SFTRunOptions
from ligerzoo.train.evaluation import evaluate_loss
from ligerzoo.train.run import Run
from ligerzoo.train.run_data import RunData

DEFAULTS: dict[str, Any] = {}


def loss_of(model: nn.Module, inputs: Inputs, num_items: Tensor | None, micro_batches: int) -> Tensor:
    """The forward: a micro-batch's part of the loss of a step, the sum of the cross entropy over `num_items` tokens."""
    out = model(**inputs, num_items_in_batch=num_items)
    return part_of_loss(model, out, micro_batches)  # of experts, also the mean load-balancing loss


def main(options: SFTRunOptions) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    is_new = options.method == "pretrain"
    with Run(options, new=is_new) as run:
        data = RunData(
            options,
            run.processor,
            run.meta_model,
            "text" if is_new else "auto",
            pin_memory=run.device.type == "cuda",
            packing=options.packing,
        )
        run.prepare(data)
        if options.dry_run:
            return 0
        model = run.open_model()
        train_step = CapturedStep(
            model,
            run.optimizer_step,
            compute_loss=loss_of,
            capture=options.capture,
            autocast=run.compute_dtype,
            seed=run.seed,
        )

        for step in run.steps(lambda: evaluate_loss(model, run.tokenizer, *data.evaluation())):
            # `loss_of` and backward of each micro-batch; then `run.optimizer_step` clips and updates
            loss, norm = train_step([batch.inputs for batch in step.batches], step.num_items)
            step.log(loss=loss, grad_norm=norm)
    return run.exit_code


if __name__ == "__main__":
    sys.exit(run_script(main, SFTRunOptions, DEFAULTS))

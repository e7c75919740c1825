"""Pretraining and supervised fine-tuning (SFT).

`ligerzoo train MODEL --data FILE --output DIR` runs this file; with --print-recipe it prints it with these options as
defaults. Change what you like and run it with `python`, or with `torchrun --nproc-per-node N` on several GPUs; options
of the command line replace the defaults.
"""

from __future__ import annotations

import sys
from typing import Any

from ligerzoo.train.captured_step import CapturedStep
from ligerzoo.train.evaluation import evaluate_loss
from ligerzoo.train.methods import SFTRunOptions
from ligerzoo.train.options import run_script
from ligerzoo.train.run import Run
from ligerzoo.train.run_data import RunData

DEFAULTS: dict[str, Any] = {}


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
            run.optimizer_step.optimizer,
            max_norm=options.max_grad_norm or None,
            skip=run.optimizer_step.skip,
            capture=options.capture,
            autocast=run.compute_dtype,
        )

        for step in run.steps(lambda: evaluate_loss(model, run.tokenizer, *data.evaluation())):
            # forward and backward of each micro-batch, clipping, and the optimizer's update
            loss, norm = train_step([batch.inputs for batch in step.batches], step.num_items)
            run.optimizer_step.average()
            step.log(loss=loss, grad_norm=norm)
    return run.exit_code


if __name__ == "__main__":
    sys.exit(run_script(main, SFTRunOptions, DEFAULTS))

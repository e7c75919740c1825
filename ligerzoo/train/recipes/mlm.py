"""Masked language modeling (MLM): an encoder learns to predict tokens that are masked, from the tokens around them.

`ligerzoo train MODEL --method mlm --data FILE --output DIR` runs this file; with --print-recipe it prints it with these
options as defaults. Change what you like and run it with `python`, or with `torchrun --nproc-per-node N` on several
GPUs; options of the command line replace the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ligerzoo.losses import LossOutput
from ligerzoo.train.command_line import run_script
from ligerzoo.train.data.masking import MaskedBatch
from ligerzoo.train.encoder_options import MLMRunOptions
from ligerzoo.train.evaluation import evaluate_batches
from ligerzoo.train.masked_data import MaskedData
from ligerzoo.train.metrics import forward_backward, num_items
from ligerzoo.train.run import Run

DEFAULTS: dict[str, Any] = {}


def main(options: MLMRunOptions) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    with Run(options, new=True) as run:
        data = MaskedData(options, run.tokenizer, run.meta_model, pin_memory=run.device.type == "cuda")
        run.prepare(data)
        if options.dry_run:
            return 0
        model = run.open_model()

        def loss_of(batches: Sequence[MaskedBatch]) -> tuple[Tensor, dict[str, Tensor]]:
            """Returns the loss of a step, over its masked tokens; accumulates gradients, if they are enabled."""
            items, sizes = num_items(batches, run.device), [batch.trained_tokens for batch in batches]

            def forward(batch: MaskedBatch) -> LossOutput:
                inputs = run.to_device({name: batch.inputs[name] for name in ("input_ids", "labels")})
                with run.autocast():  # the head computes masked tokens only
                    out = model(**inputs, cu_seqlens=batch.cu_seqlens, num_items_in_batch=items)
                return LossOutput(out.loss, {})

            return forward_backward(forward, batches, sizes, run)

        def evaluate() -> dict[str, object]:
            loss = evaluate_batches(model, loss_of, data.held_out())["loss"]
            return {"eval_loss": loss, "samples": data.predictions(model)}

        for step in run.steps(evaluate, loss_label="loss, nats per masked token"):
            step.batches = data.masked(step.batches, step.number)
            loss, _ = loss_of(step.batches)
            step.log(loss=loss, grad_norm=run.optimizer_step())
    return run.exit_code


if __name__ == "__main__":
    sys.exit(run_script(main, MLMRunOptions, DEFAULTS))

"""Distillation: a model learns the distributions that a larger one, the teacher, predicts for each token.

`ligerzoo train MODEL --method distill --teacher TEACHER --data FILE --output DIR` runs this file; with --print-recipe
it prints it with these options as defaults. Change what you like and run it with `python`, or with
`torchrun --nproc-per-node N` on several GPUs; options of the command line replace the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ligerzoo.losses import LossOutput
from ligerzoo.train.command_line import run_script
from ligerzoo.train.data import Batch
from ligerzoo.train.distillation import check_teacher, load_teacher
from ligerzoo.train.evaluation import evaluate_method
from ligerzoo.train.metrics import forward_backward, num_items
from ligerzoo.train.run import Run
from ligerzoo.train.run_data import RunData
from ligerzoo.train.teacher_options import DistillRunOptions

DEFAULTS: dict[str, Any] = {}


def main(options: DistillRunOptions) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    with Run(options, new=True) as run:
        meta_teacher = run.problems.result_of(check_teacher, run, options)
        data = RunData(options, run.tokenizer, run.meta_model, "auto", pin_memory=run.device.type == "cuda")
        run.prepare(data, frozen=meta_teacher)
        if options.dry_run:
            return 0
        model = run.open_model()
        teacher, distillation = load_teacher(run, options), options.loss()

        def loss_of(micro_batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
            """Returns the loss and metrics of a step; accumulates gradients, if they are enabled."""
            items, sizes = num_items(micro_batches, run.device), [batch.trained_tokens for batch in micro_batches]

            def forward(batch: Batch) -> LossOutput:
                inputs = run.to_device(batch.inputs)
                with run.autocast():
                    return distillation.of_teacher(
                        model,
                        teacher,
                        inputs["input_ids"],
                        inputs["labels"],
                        num_items=items,
                        model_inputs={"position_ids": inputs["position_ids"]},
                        aux_loss_share=1 / len(micro_batches),
                    )

            return forward_backward(forward, micro_batches, sizes, run)

        def evaluate() -> dict[str, Any]:
            return evaluate_method(model, run.tokenizer, loss_of, *data.evaluation())

        for step in run.steps(evaluate, loss_label=f"{options.divergence} from the teacher"):
            loss, metrics = loss_of(step.batches)
            step.log(loss=loss, grad_norm=run.optimizer_step(), metrics=metrics)
    return run.exit_code


if __name__ == "__main__":
    sys.exit(run_script(main, DistillRunOptions, DEFAULTS))

"""On-policy distillation: a model learns from a teacher's distributions at the tokens that it samples itself.

`ligerzoo train MODEL --method opd --teacher TEACHER --data PROMPTS --output DIR` runs this file; with --print-recipe it
prints it with these options as defaults. Change what you like and run it with `python`, or with
`torchrun --nproc-per-node N` on several GPUs; options of the command line replace the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ligerzoo.losses import LossOutput
from ligerzoo.train.command_line import run_script
from ligerzoo.train.completion_batches import CompletionBatch, completion_divergence
from ligerzoo.train.completions import sampling_numbers
from ligerzoo.train.distillation import check_teacher, load_teacher
from ligerzoo.train.evaluation import evaluate_batches
from ligerzoo.train.metrics import forward_backward, num_items, on_device
from ligerzoo.train.rollout_options import OPDRunOptions
from ligerzoo.train.rollouts import Rollouts
from ligerzoo.train.run import Run
from ligerzoo.train.run_data import RunPrompts

DEFAULTS: dict[str, Any] = {}


def main(options: OPDRunOptions) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    with Run(options) as run:
        meta_teacher = run.problems.result_of(check_teacher, run, options)
        data = RunPrompts(options, run.tokenizer, run.meta_model)
        run.prepare(data, frozen=meta_teacher)
        model = run.open_model()
        roll_out = Rollouts(run, options)
        if options.dry_run:
            roll_out.show(data)
            return 0
        teacher, distillation = load_teacher(run, options), options.loss()
        name = "kl" if options.divergence.endswith("_kl") else options.divergence

        def loss_of(batches: Sequence[CompletionBatch]) -> tuple[Tensor, dict[str, Tensor]]:
            """Returns the loss and the mean divergence of a step; accumulates gradients, if they are enabled."""
            items, sizes = num_items(batches, run.device), [batch.trained_tokens for batch in batches]

            def forward(batch: CompletionBatch) -> LossOutput:
                with run.autocast():
                    loss, metrics = completion_divergence(
                        model, teacher, batch, distillation, num_items=items, aux_loss_share=1 / len(batches)
                    )
                return LossOutput(loss, {name: metrics["soft_loss"]})

            return forward_backward(forward, batches, sizes, run)

        steps = run.steps(
            lambda: roll_out.evaluate(
                data.held_out, lambda these: evaluate_batches(model, loss_of, roll_out.pack(these))
            ),
            loss_label=f"{options.divergence} from the teacher",
            metrics=(name, "completion_length"),
        )
        for step in steps:
            completions = roll_out(step.batches, step.number)
            roll_out.write(step.number, completions)
            with roll_out.watch.time("update"):
                batches = roll_out.pack(completions)
                loss, metrics = loss_of(batches)
                norm = run.optimizer_step()
            metrics |= on_device({**sampling_numbers(completions), **roll_out.watch.seconds}, run.device)
            step.log(loss=loss, grad_norm=norm, metrics=metrics, batches=batches)
    return run.exit_code


if __name__ == "__main__":
    sys.exit(run_script(main, OPDRunOptions, DEFAULTS))

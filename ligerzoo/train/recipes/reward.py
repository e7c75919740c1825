"""Reward models: a sequence classifier with one label learns which of two completions is preferred.

`ligerzoo train MODEL --method reward --data PAIRS --output DIR` runs this file; with --print-recipe it prints it with
these options as defaults. Change what you like and run it with `python`, or with `torchrun --nproc-per-node N` on
several GPUs; options of the command line replace the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ligerzoo.losses import LossOutput, reward_loss
from ligerzoo.train import processes
from ligerzoo.train.command_line import run_script
from ligerzoo.train.completion_options import RewardRunOptions
from ligerzoo.train.data import Batch
from ligerzoo.train.evaluation import evaluate_batches
from ligerzoo.train.metrics import forward_backward
from ligerzoo.train.preferences import samples_of
from ligerzoo.train.reward_model import margins_of, open_reward_model, reward_model, rewards_of_pairs
from ligerzoo.train.run import Run
from ligerzoo.train.run_data import RunData

DEFAULTS: dict[str, Any] = {}


def main(options: RewardRunOptions) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    with Run(options) as run:
        data = RunData(options, run.tokenizer, reward_model(run.meta_model), "preference", pin_memory=False)
        run.prepare(data)
        if options.dry_run:
            return 0
        model = open_reward_model(run)

        def loss_of(micro_batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
            """Returns the loss and metrics of a step; accumulates gradients, if they are enabled."""
            sizes = [len(samples_of([batch])) for batch in micro_batches]
            (pairs,) = processes.total_of_data(sum(sizes))
            divisor = processes.divisor(pairs, run.device)

            def forward(batch: Batch) -> LossOutput:
                with run.autocast():
                    chosen, rejected = rewards_of_pairs(model, batch)
                margins = margins_of(batch).to(run.device)
                return reward_loss(chosen, rejected, margins, center_weight=options.center_weight, num_items=divisor)

            return forward_backward(forward, micro_batches, sizes, run)

        def evaluate() -> dict[str, float]:
            assert options.eval_data is not None
            numbers = evaluate_batches(run.model, loss_of, [*data.once(options.eval_data)])
            return {f"eval_{name}": number for name, number in numbers.items()}

        for step in run.steps(evaluate, loss_label="reward loss", metrics=("rewards/accuracies",)):
            loss, metrics = loss_of(step.batches)
            step.log(loss=loss, grad_norm=run.optimizer_step(), metrics=metrics)
    return run.exit_code


if __name__ == "__main__":
    sys.exit(run_script(main, RewardRunOptions, DEFAULTS))

"""Group relative policy optimization (GRPO): reinforcement learning with a reward function.

`ligerzoo train MODEL --method grpo --data PROMPTS --reward FILE.py --output DIR` runs this file; with --print-recipe it
prints it with these options as defaults. Change what you like and run it with `python`, or with
`torchrun --nproc-per-node N` on several GPUs; options of the command line replace the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligerzoo.losses import LossOutput
from ligerzoo.losses.grpo import VARIANTS
from ligerzoo.models import CausalLM
from ligerzoo.train import processes
from ligerzoo.train.command_line import run_script
from ligerzoo.train.completion_batches import CompletionBatch, PolicyBatch, completion_loss, policy_batch
from ligerzoo.train.completions import SampledCompletion, without_labels
from ligerzoo.train.metrics import forward_backward, mean_of, on_device
from ligerzoo.train.reward_model import open_reward
from ligerzoo.train.rewards import mean_reward, summarize, with_advantages
from ligerzoo.train.rollout_options import GRPORunOptions
from ligerzoo.train.rollouts import Rollouts
from ligerzoo.train.run import Run
from ligerzoo.train.run_data import RunPrompts
from ligerzoo.train.run_model import open_reference

DEFAULTS: dict[str, Any] = {}


def main(options: GRPORunOptions) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    with Run(options) as run:
        reward = run.problems.result_of(open_reward, options.reward, run.device)
        data = RunPrompts(options, run.processor, run.meta_model)
        needs_copy = options.beta > 0 and not options.lora_rank  # the reference of adapters is the model without them
        run.prepare(data, frozen=run.meta_model if needs_copy else None)
        model = run.open_model()
        roll_out = Rollouts(run, options, reward, data.images)
        if options.dry_run:
            roll_out.show(data)
            return 0
        reference = open_reference(options, run.device) if needs_copy else model if options.beta else None
        steps = run.steps(
            lambda: roll_out.evaluate(data.held_out, mean_reward),
            metrics=("reward", "completion_length"),
            may_be_zero=True,
        )
        for step in steps:
            completions = roll_out(step.batches, step.number)
            completions = with_advantages(completions, options.num_samples, options.scale_rewards)
            numbers = summarize(completions, options.num_samples)
            roll_out.write(step.number, completions)
            if options.mask_truncated:
                completions = [without_labels(one) if one.finish_reason == "length" else one for one in completions]
            with roll_out.watch.time("update"):
                batches, results = train_on(completions, run, roll_out, options, reference)
            loss, norm = results.pop("loss"), results.pop("grad_norm")
            metrics = {**on_device({**numbers, **roll_out.watch.seconds}, run.device), **results}
            step.log(loss=loss, grad_norm=norm, metrics=metrics, batches=batches)
    return run.exit_code


def train_on(
    completions: Sequence[SampledCompletion],
    run: Run,
    roll_out: Rollouts,
    options: GRPORunOptions,
    reference: CausalLM | None,
) -> tuple[list[CompletionBatch], dict[str, Tensor]]:
    """Updates the weights with the completions of a step. Returns the batches, and what the log shows."""
    model, loss_function = run.model, options.loss()
    by_tokens = VARIANTS[options.loss_type].divided_by == "tokens"
    divisor = processes.divisor(
        sum(one.trained_tokens for one in completions) if by_tokens else len(completions), run.device
    )
    # Without a KL term, the gradient of a completion with an advantage of 0 is 0.
    batches = roll_out.pack([one for one in completions if options.beta or one.advantage])
    recomputes = options.old_logps == "recomputed"
    sizes, share = [batch.trained_tokens for batch in batches], 1 / max(1, len(batches))
    with run.autocast():  # the constants of the loss, before the first update with a batch
        given = [
            policy_batch(model, batch, recomputes=recomputes, reference=reference, temperature=options.temperature)
            for batch in batches
        ]

    def loss_of(part: PolicyBatch) -> LossOutput:
        inputs = {"num_items": divisor, **part.constants}
        with run.autocast():
            out = completion_loss(model, part.batch, loss_function, aux_loss_share=share, **inputs)
        return LossOutput(out.loss, {**out.metrics, **part.metrics})

    results: list[dict[str, Any]] = []
    for _ in range(options.iterations if batches else 0):
        loss, metrics = forward_backward(loss_of, given, sizes, run)
        log_ratio = metrics.pop("log_ratio")  # in the first update, how far the model is from sampling
        metrics.setdefault("sampler_difference", results[0]["sampler_difference"] if results else log_ratio)
        results.append({"loss": loss, "grad_norm": run.optimizer_step(), **metrics})
    no_signal = dict.fromkeys(("loss", "grad_norm"), torch.zeros((), device=run.device))
    return batches * options.iterations, mean_of(results or [no_signal])


if __name__ == "__main__":
    sys.exit(run_script(main, GRPORunOptions, DEFAULTS))

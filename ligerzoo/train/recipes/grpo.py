"""Group relative policy optimization (GRPO): reinforcement learning with a reward function.

`ligerzoo train MODEL --method grpo --data PROMPTS --reward FILE.py --output DIR` runs this file; with --print-recipe it
prints it with these options as defaults. Change what you like and run it with `python`, or with
`torchrun --nproc-per-node N` on several GPUs; options of the command line replace the defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from ligerzoo.errors import ConfigError
from ligerzoo.losses import GRPO, LossOutput
from ligerzoo.losses.policy import VARIANTS
from ligerzoo.train import processes, run_model
from ligerzoo.train.completion_batches import CompletionBatch, completion_loss, pack_completions, policy_constants
from ligerzoo.train.completions import (
    CompletionSampler,
    SampledCompletion,
    completion_seeds,
    samples_exactly,
    without_labels,
)
from ligerzoo.train.data import check_data, format_sample, open_data
from ligerzoo.train.due import Schedule
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.log import RunLog
from ligerzoo.train.metrics import forward_backward, mean_of, on_device
from ligerzoo.train.options import Budget, Count, Fraction, NotNegative, Positive, run_script
from ligerzoo.train.plot import plot_loss, plot_metric
from ligerzoo.train.rewards import RewardFunction, summarize, with_advantages
from ligerzoo.train.rollouts import Rollouts
from ligerzoo.train.run import run_together
from ligerzoo.train.run_options import MAY_CHANGE, RunOptions
from ligerzoo.train.run_state import RunState
from ligerzoo.train.sample_log import SampleLog
from ligerzoo.train.sampling_model import SamplingModel
from ligerzoo.train.starting import count_steps, describe_model, padding_token, tokenizer_of
from ligerzoo.train.stopwatch import Stopwatch
from ligerzoo.train.tracking import open_tracker
from ligerzoo.train.update import Update, describe_update


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Options of this recipe, in addition to those that all recipes have."""

    data: tuple[str, ...]
    """file with prompts; several are one data set"""
    reward: str
    """Python file with a function `reward`, or FILE.py:NAME; see ligerzoo.train.rewards"""
    method: Literal["grpo"] = "grpo"
    """name of the recipe"""
    prompts: Count = 8
    """prompts in a step, of all processes"""
    num_samples: Count = 8
    """completions that are sampled of each prompt, at least 2"""
    max_new_tokens: Count = 512
    """largest number of tokens of a completion"""
    temperature: Positive = 1.0
    """temperature of sampling, which the loss takes into account"""
    sampling_batch: Count = 256
    """largest number of completions that a process samples at the same time"""
    exact: Literal["auto", "on", "off"] = "auto"
    """whether sampling computes the log-probabilities of training bit for bit; auto: where the model supports it"""
    old_logps: Literal["sampler", "recomputed"] = "sampler"
    """log-probabilities that ratios refer to: those of sampling, or a forward before the update, with truncated
    importance weights for the difference"""
    loss_type: Literal["dapo", "grpo", "bnpo", "dr_grpo", "gspo", "luspo", "cispo", "sapo", "vespo"] = "dapo"
    """variant of the loss, see ligerzoo.losses.grpo"""
    epsilon: Fraction = 0.2
    """clips ratios below 1 - epsilon"""
    epsilon_high: Positive | None = None
    """clips ratios above 1 + epsilon_high (default: epsilon; 4 for cispo)"""
    beta: NotNegative = 0.0
    """weight of the KL divergence from the model before training, which is multiplied by the ratio as in TRL"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """advantages are divided by the standard deviation of the rewards of a group, or of all completions of the step"""
    mask_truncated: bool = False
    """do not train completions that reach --max-new-tokens"""
    iterations: Count = 1
    """updates with the completions of a step"""
    sample_every: Count = 10
    """steps between samples in samples.jsonl; those of the first step are always there"""
    lr: Positive = 1e-6
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    save_every: Count = 100
    activation_budget: Budget = "none"
    """memory of an update in GiB, within which activations are kept; auto: what the GPU has; none: all are kept"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_samples < 2:
            remedy = "An advantage compares the completions of a prompt."
            raise ConfigError("too few", where="option num_samples", got=1, expected="at least 2", remedy=remedy)
        if self.max_new_tokens + 2 > self.seq_length:
            expected = f"at least {self.max_new_tokens + 2}, for prompts and max_new_tokens={self.max_new_tokens}"
            raise ConfigError("too small", where="option seq_length", got=self.seq_length, expected=expected)
        self.loss()

    def loss(self) -> GRPO:
        """Returns the loss.

        Raises:
            ConfigError: The variant does not use an option.
        """
        given: dict[str, Any] = {"epsilon": self.epsilon, "epsilon_high": self.epsilon_high}
        if self.loss_type == "cispo" and self.epsilon_high is None:
            given["epsilon_high"] = 4.0
        if self.loss_type == "dr_grpo":
            given["max_length"] = self.max_new_tokens
        try:
            return GRPO(
                variant=self.loss_type, temperature=self.temperature, beta=self.beta, is_kl_corrected=self.beta > 0,
                **given,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(str(error), where="option loss_type") from None


def main(options: Options) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    return run_together(train, options, may_change={*MAY_CHANGE, "sample_every"})


def train(options: Options, run: RunState, device: torch.device) -> int:
    """Trains in this process."""
    reward = RewardFunction(options.reward)
    processor = run_model.open_processor(options, run)  # or the tokenizer of a model that reads no images
    tokenizer = tokenizer_of(processor)
    outline = run_model.open_outline(options, run)  # shapes alone, for checks and plans

    epochs = None if options.max_steps else options.epochs or 1
    rows = outline.input_vocab_size
    encoding: dict[str, Any] = {
        "seq_length": options.seq_length - options.max_new_tokens, "special_tokens": options.special_tokens,
        "embedding_rows": rows,
    }  # fmt: skip

    def prompts(paths: tuple[str, ...], **given: Any) -> Any:
        return open_data(paths, "prompt", tokenizer, seed=options.seed, **encoding, **given)

    stream = prompts(options.data, epochs=epochs)
    steps = options.max_steps or count_steps(prompts(options.data, epochs=epochs), options.prompts)
    held_out = list(prompts(options.eval_data, epochs=1, shuffle=False)) if options.eval_data else []
    needs_copy = options.beta > 0 and not options.lora_rank  # the reference of adapters is the model without them
    plan = run_model.plan_memory(options, outline, device, frozen=outline if needs_copy else None, accumulate=True)
    shape = f"{steps:,} steps of {options.prompts} prompts x {options.num_samples} completions"
    for line in (describe_model(outline, device), f"{shape}; {run.step:,} are done", describe_update(options, outline)):
        processes.say(line)
    if plan is not None:
        processes.say(plan)
    for prompt in islice(prompts(options.data, epochs=1), 3):
        processes.say(format_sample(prompt, tokenizer, max_tokens=500))
    if options.dry_run:
        report = check_data(options.data, "prompt", tokenizer, **encoding)
        report.raise_if_bad()
        processes.say(report)

    model = run_model.open_trained_model(options, run, device, plan)
    sampling_model = SamplingModel(model, mixed_precision=options.mixed_precision)
    is_exact = samples_exactly(sampling_model.model, options.exact, options.seq_length)
    reason = "--exact off" if options.exact == "off" else "the device, dtype or model does not support that"
    why = "exact" if is_exact else f"not exact: {reason}"
    processes.say(f"Log-probabilities of sampling are {why}")

    def rollouts(num_samples: int, temperature: float | None) -> Rollouts:
        sample = CompletionSampler(
            sampling_model.model, tokenizer, num_samples=num_samples, max_new_tokens=options.max_new_tokens,
            temperature=temperature, batch_size=options.sampling_batch, exact=is_exact,
        )  # fmt: skip
        return Rollouts(sampling_model, sample, reward, num_samples)

    roll_out, roll_out_greedily = rollouts(options.num_samples, options.temperature), rollouts(1, None)
    samples = SampleLog(run.output, tokenizer)
    if options.dry_run:
        seeds = completion_seeds(options.seed, 1, options.num_samples)
        processes.say(samples.describe(roll_out(list(islice(prompts(options.data, epochs=1), 1)), seeds)))
        return 0

    update = Update(model, options, steps)
    run.load(model, update.optimizer, stream, update.ema)
    reference = run_model.open_reference(options, device) if needs_copy else model if options.beta else None
    grpo = options.loss()

    def constants_of(batch: CompletionBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the constants of the loss before the first update with a batch, and metrics."""
        with run_model.autocast(options, device):
            return policy_constants(
                model, batch, recomputes=options.old_logps == "recomputed", reference=reference,
                temperature=options.temperature,
            )  # fmt: skip

    def train_on(completions: Sequence[SampledCompletion]) -> tuple[list[CompletionBatch], dict[str, Tensor]]:
        """Updates the weights with the completions of a step. Returns the batches, and what the log shows."""
        items = len(completions)
        if VARIANTS[options.loss_type].divided_by == "tokens":
            items = sum(one.trained_tokens for one in completions)
        # Without a KL term, the gradient of a completion with an advantage of 0 is 0.
        used = [one for one in completions if one.trained_tokens and (options.beta or one.advantage)]
        batches = pack_completions(
            used, batch_size=options.batch_size, seq_length=options.seq_length,
            pad_token_id=padding_token(tokenizer, rows), rank=processes.rank(), world_size=processes.world_size(),
        )  # fmt: skip
        step: dict[str, Any] = {
            "num_items": processes.divisor(items, device),
            "aux_loss_share": 1 / max(1, len(batches)),
        }
        given = [(batch, *constants_of(batch)) for batch in batches]

        def loss_of(part: tuple[CompletionBatch, dict[str, Tensor], dict[str, Tensor]]) -> LossOutput:
            batch, constants, differences = part
            with run_model.autocast(options, device):
                out = completion_loss(model, batch, grpo, **{**step, **constants})
            return LossOutput(out.loss, {**out.metrics, **differences})

        results = []
        for _ in range(options.iterations if batches else 0):
            loss, metrics = forward_backward(loss_of, given, [batch.trained_tokens for batch in batches], device)
            norm = update()
            assert norm is not None  # this recipe has no optimizer in backward
            results.append({"loss": loss, "grad_norm": norm, **metrics})
        return batches * options.iterations, mean_of(results)

    tracker = open_tracker(options.tracker, run.output, dataclasses.asdict(options))
    shown: dict[str, Any] = {"shown": ("reward", "completion_length"), "may_be_zero": True}
    with (
        StopRequest() as stop,
        RunLog(run.output, model, first_step=run.step, steps=steps, report=tracker, **shown) as log,
    ):
        samples.cut(run.step)
        schedule = Schedule(options, steps, stop, log)
        for step in range(run.step + 1, steps + 1):
            watch, asked = Stopwatch(device), list(islice(stream, options.prompts))
            seeds = completion_seeds(options.seed, step, len(asked) * options.num_samples)
            completions = with_advantages(roll_out(asked, seeds, watch), options.num_samples, options.scale_rewards)
            numbers = summarize(completions, options.num_samples)
            if step == 1 or step % options.sample_every == 0:
                samples.write(step, completions)
                log.say(samples.describe(completions[: options.num_samples]))
            if options.mask_truncated:
                completions = [without_labels(one) if one.finish_reason == "length" else one for one in completions]
            update.set_lr(step)
            with watch.time("update"):
                batches, results = train_on(completions)
            none = torch.zeros((), device=device)  # if all groups have equal rewards
            loss, norm = results.pop("loss", none), results.pop("grad_norm", none)
            log.step(
                step, loss=loss, grad_norm=norm, lr=update.lr, batches=batches, skipped=update.skip.count,
                metrics={**on_device({**numbers, **watch.seconds}, device), **results},
            )  # fmt: skip

            due = schedule.after(step)
            if due.evaluation and held_out:
                with log.paused(), update.averaged():
                    log.evaluation(step, **roll_out_greedily.evaluate(held_out))
            if due.save:
                with log.paused():
                    run.save(step, model, processor, update.optimizer, stream, update.ema)
                    plot_loss(run.output)
                    plot_metric(run.output, "reward")
            if due.stop:
                return log.stopped(step, run.checkpoint)
    with update.averaged():
        run.finish(model, processor, ["log.jsonl", "samples.jsonl", "reward.svg", "loss.svg"])
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, Options, __file__))

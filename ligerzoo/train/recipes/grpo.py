"""Group relative policy optimization (GRPO): reinforcement learning with a reward function.

`ligerzoo train MODEL --method grpo --data PROMPTS --reward FILE.py --output DIR` runs this file; with --print-recipe it
prints it with these options as defaults. Change what you like and run it with `python`; options of the command line
replace the defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch

from ligerzoo import Tokenizer
from ligerzoo.adapters import add_lora
from ligerzoo.device import available_device
from ligerzoo.errors import ConfigError
from ligerzoo.losses import GRPO
from ligerzoo.losses.policy import VARIANTS
from ligerzoo.models import CausalLM
from ligerzoo.train import processes
from ligerzoo.train.averages import Averages
from ligerzoo.train.checks import check_common_combinations, check_model, trains_bfloat16, warn_of_rounding
from ligerzoo.train.completion_batches import completion_loss, pack_completions, policy_constants
from ligerzoo.train.completions import CompletionSampler, samples_exactly, without_labels
from ligerzoo.train.data import check_data, format_sample, open_data
from ligerzoo.train.interrupt import StopRequest
from ligerzoo.train.log import RunLog
from ligerzoo.train.optimizers import clip_grad_norm, make_optimizer, schedule, set_lr
from ligerzoo.train.options import Count, Fraction, NotNegative, Number, Positive, check_options, parse_options
from ligerzoo.train.plot import plot_loss, plot_metric
from ligerzoo.train.rewards import RewardFunction, summarize, with_advantages
from ligerzoo.train.run_state import RunState
from ligerzoo.train.sample_log import SampleLog
from ligerzoo.train.sampling_copy import SamplingCopy
from ligerzoo.train.starting import checkpoint_directory, count_steps, open_model
from ligerzoo.train.stopwatch import Stopwatch
from ligerzoo.train.tracking import open_tracker


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a run. A field's type is checked, and the text below it is its description in `--help`."""

    model: str
    """checkpoint in Hugging Face format: a directory or a hub id"""
    data: tuple[str, ...]
    """file with prompts; several are one data set"""
    reward: str
    """Python file with a function `reward`, or FILE.py:NAME; see ligerzoo.train.rewards"""
    output: str
    """directory for checkpoints, the log, samples and the trained model or adapter"""
    method: Literal["grpo"] = "grpo"
    """name of the recipe"""
    tokenizer: str | None = None
    """checkpoint of the tokenizer (default: MODEL)"""
    prompts: Count = 8
    """prompts in a step"""
    num_samples: Count = 8
    """completions that are sampled of each prompt, at least 2"""
    max_new_tokens: Count = 512
    """largest number of tokens of a completion"""
    temperature: Positive = 1.0
    """temperature of sampling, which the loss takes into account"""
    sampling_batch: Count = 256
    """largest number of completions that are sampled at the same time"""
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
    seq_length: Count = 2048
    """tokens in a row; prompts with their completions are packed into one row"""
    batch_size: Count = 4
    """rows in a micro-batch"""
    max_steps: Count | None = None
    """number of steps; the prompts are repeated as needed (default: as --epochs)"""
    epochs: Count | None = None
    """times that the prompts are read, without --max-steps (default: 1)"""
    lora_rank: Count | None = None
    """train low-rank updates of this rank (LoRA) of the frozen weights; --output is a PEFT adapter, and
    the reference of --beta needs no second copy of MODEL"""
    lora_alpha: Positive | None = None
    """the updates are scaled by this number / rank (default: twice the rank)"""
    lora_targets: tuple[str, ...] | None = None
    """part of the names of the weights to update, such as q_proj (default: all linear layers of blocks)"""
    dora: bool = False
    """also train the norms of the updated weights' rows (DoRA)"""
    optimizer: Literal["adamw", "adamw-8bit", "adamw-4bit", "adamw-fp8", "muon"] = "adamw"
    """name of the optimizer"""
    stochastic_rounding: Literal["auto", "on", "off"] = "auto"
    """round bfloat16 weights stochastically, so that no update is lost (default: on for such weights)"""
    lr: Positive = 1e-6
    """peak learning rate"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """learning rate after the warmup"""
    warmup: Fraction = 0.03
    """share of the steps in which the learning rate rises"""
    weight_decay: NotNegative = 0.0
    """decoupled weight decay"""
    max_grad_norm: Positive = 1.0
    """norm to which the gradients of an update are clipped"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the weights (default: as stored)"""
    mixed_precision: bool = False
    """compute in bfloat16 with weights in float32; a copy of the weights in bfloat16 samples"""
    activation_checkpointing: bool = False
    """recompute each block in backward instead of keeping its activations: less memory, more time"""
    sample_every: Count = 10
    """steps between samples in samples.jsonl; those of the first step are always there"""
    save_every: Count = 100
    """steps between checkpoints; the last step is always saved"""
    keep: Count = 2
    """number of checkpoints to keep"""
    resume: bool = False
    """continue the run in the output directory, if any, bit for bit"""
    seed: Number = 0
    """seed of the order of the prompts and of sampling"""
    device: str | None = None
    """cpu, cuda or cuda:1 (default: the first GPU, else cpu)"""
    tracker: Literal["tensorboard", "wandb"] | None = None
    """also send the log to TensorBoard or Weights & Biases"""
    dry_run: bool = False
    """read all prompts, print the plan, three prompts and completions with rewards, and train nothing"""

    def __post_init__(self) -> None:
        check_options(self)
        check_common_combinations(self)
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


MAY_CHANGE = {
    "resume", "dry_run", "output", "max_steps", "epochs", "save_every", "keep", "sample_every", "device", "tracker",
    "activation_checkpointing",
}  # fmt: skip
"""Options that may differ when a run is resumed."""


def main(options: Options) -> int:
    """Trains. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    processes.refuse_several()
    torch.manual_seed(options.seed)
    run = RunState(options.output, options, resume=options.resume, may_change=MAY_CHANGE, keep=options.keep)
    reward = RewardFunction(options.reward)
    tokenizer = Tokenizer.from_pretrained(run.checkpoint or options.tokenizer or checkpoint_directory(options.model))
    device = available_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def adapt(model: CausalLM) -> None:
        assert options.lora_rank is not None
        alpha = options.lora_alpha or 2 * options.lora_rank
        add_lora(model, options.lora_rank, alpha, options.lora_targets, dora=options.dora)

    source = options.model if options.lora_rank else run.checkpoint or options.model
    model = open_model(source, dtype=options.dtype, device=device, adapt=adapt if options.lora_rank else None)
    check_model(model, tokenizer, options.optimizer)
    reference = None
    if options.beta and options.lora_rank:
        reference = model  # without its adapters
    elif options.beta:
        reference = open_model(options.model, dtype=options.dtype, device=device).requires_grad_(False)
    if options.activation_checkpointing:
        model.gradient_checkpointing_enable()

    epochs = None if options.max_steps else options.epochs or 1
    longest_prompt = options.seq_length - options.max_new_tokens

    def prompts(epochs: int | None) -> Any:
        return open_data(options.data, "prompt", tokenizer, seq_length=longest_prompt, seed=options.seed, epochs=epochs)

    stream = prompts(epochs)
    steps = options.max_steps or count_steps(prompts(epochs), options.prompts)
    rounding = {"on": True, "off": False, "auto": trains_bfloat16(model)}[options.stochastic_rounding]
    optimizer = make_optimizer(
        model, options.optimizer, lr=options.lr, weight_decay=options.weight_decay, stochastic_rounding=rounding
    )
    factor = schedule(options.schedule, steps, warmup_steps=int(options.warmup * steps))
    warn_of_rounding(optimizer, options.lr)
    run.load(optimizer, stream, model=model)

    sampling_copy = SamplingCopy(model) if options.mixed_precision else None
    sampling_model = sampling_copy.model if sampling_copy else model
    is_exact = samples_exactly(sampling_model, options.exact, options.seq_length)
    sample = CompletionSampler(
        sampling_model, tokenizer, num_samples=options.num_samples, max_new_tokens=options.max_new_tokens,
        temperature=options.temperature, batch_size=options.sampling_batch, exact=is_exact,
    )  # fmt: skip
    grpo = options.loss()
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    rows = {"batch_size": options.batch_size, "seq_length": options.seq_length, "pad_token_id": padding}

    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    total, updated = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    print(f"{type(model).__name__}: {total:,} parameters in {model.dtype}, {updated:,} of them trained, on {device}")
    print(f"{steps:,} steps of {options.prompts} prompts x {options.num_samples} completions; {run.step:,} are done")
    print(f"Log-probabilities of sampling are {'exact' if is_exact else 'not exact: --exact off, or not supported'}")
    for prompt in islice(prompts(1), 3):
        print(format_sample(prompt, tokenizer, max_tokens=500))
    samples = SampleLog(run.output, tokenizer)
    if options.dry_run:
        report = check_data(options.data, "prompt", tokenizer, seq_length=longest_prompt)
        report.raise_if_bad()
        print(report)
        print(samples.describe(reward(sample(list(islice(prompts(1), 1))))))
        return 0

    tracker = open_tracker(options.tracker, run.output, dataclasses.asdict(options))
    shown: dict[str, Any] = {"shown": ("reward", "completion_length"), "may_be_zero": True}
    with (
        StopRequest() as stop,
        RunLog(run.output, model, first_step=run.step, steps=steps, report=tracker, **shown) as log,
    ):
        samples.cut(run.step)
        for step in range(run.step + 1, steps + 1):
            watch, averages = Stopwatch(device), Averages(device)
            with watch.time("sampling"):
                completions = sample(list(islice(stream, options.prompts)))
            with watch.time("reward"):
                completions = with_advantages(reward(completions), options.num_samples, options.scale_rewards)
            averages.update(summarize(completions, options.num_samples))
            if step == 1 or step % options.sample_every == 0:
                samples.write(step, completions)
                log.say(samples.describe(completions[: options.num_samples]))
            if options.mask_truncated:
                completions = [without_labels(one) if one.finish_reason == "length" else one for one in completions]

            with watch.time("update"):
                items = len(completions)
                if VARIANTS[options.loss_type].divided_by == "tokens":
                    items = sum(one.trained_tokens for one in completions)
                # Without a KL term, the gradient of a completion with an advantage of 0 is 0.
                used = [one for one in completions if one.trained_tokens and (options.beta or one.advantage)]
                batches = pack_completions(used, **rows)
                with torch.autocast(device.type, torch.bfloat16, enabled=options.mixed_precision):
                    constants = [
                        policy_constants(
                            model, batch, recomputes=options.old_logps == "recomputed", reference=reference,
                            temperature=options.temperature,
                        )
                        for batch in batches
                    ]  # fmt: skip
                loss, grad_norm = torch.zeros(2, device=device)
                for _ in range(options.iterations if batches else 0):
                    for batch, (given, differences) in zip(batches, constants, strict=True):
                        with torch.autocast(device.type, torch.bfloat16, enabled=options.mixed_precision):
                            part = completion_loss(
                                model, batch, grpo, num_items=items, aux_loss_share=1 / len(batches), **given
                            )
                        torch.autograd.backward(part.loss)
                        loss += part.loss.detach() / options.iterations
                        averages.add({**part.metrics, **differences}, batch.trained_tokens)
                    grad_norm += clip_grad_norm(model.parameters(), options.max_grad_norm) / options.iterations
                    set_lr(optimizer, factor(step - 1))
                    optimizer.step()
                    optimizer.zero_grad()
                if sampling_copy is not None:
                    sampling_copy.update()
            averages.update(watch.seconds)
            log.step(
                step, loss=loss, grad_norm=grad_norm, lr=options.lr * factor(step - 1),
                batches=batches * options.iterations, metrics=averages.means(),
            )  # fmt: skip

            if step % options.save_every == 0 or step == steps or stop.requested:
                with log.paused():
                    run.save(step, model, tokenizer, optimizer, stream)
                    plot_loss(run.output)
                    plot_metric(run.output, "reward")
            if stop.requested and step < steps:
                log.say(f"Stopped after step {step}. --resume continues from {run.checkpoint}.")
                return 130
    run.finish(model, tokenizer)
    trained = "adapter" if options.lora_rank else "model"
    print(f"{run.output} holds the {trained}, log.jsonl, samples.jsonl, reward.svg and loss.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, __file__)))

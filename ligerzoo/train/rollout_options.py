"""Options of the methods that train completions which the model samples. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ligerzoo.errors import ConfigError
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.train.data_options import EncodingOptions
from ligerzoo.train.options import Budget, Count, Fraction, Location, NotNegative, Positive, changeable, option
from ligerzoo.train.run_options import RunOptions, given_options, refuse_options
from ligerzoo.train.teacher_options import TeacherRunOptions

if TYPE_CHECKING:
    from ligerzoo.losses import GRPO


@dataclass(frozen=True, kw_only=True)
class RolloutRunOptions(RunOptions):
    """Sampling."""

    data: tuple[Location, ...] = option("data as for sft, with prompts")
    prompts: Count = option("prompts in a step, of all processes", 8)
    num_samples: Count = option("completions that are sampled of each prompt", 8)
    max_new_tokens: Count = option("largest number of tokens of a completion", 512)
    temperature: Positive = option("temperature of sampling, which the loss takes into account", 1.0)
    sampling_batch: Count = option("largest number of completions that a process samples at the same time", 256)
    exact: Literal["auto", "on", "off"] = option(
        "whether sampling computes the log-probabilities of training bit for bit; auto: where the model supports it",
        "auto",
    )
    sample_every: Count = changeable(
        "steps between samples in samples.jsonl; those of the first step are always there", 10
    )
    lr: Positive = 1e-6
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    save_every: Count = 100
    activation_budget: Budget = changeable(
        "memory of an update in GiB, within which activations are kept; auto: what the GPU has; none: all are kept",
        "none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = MeshSizes.parse(self.mesh or "")
        what = "processes that share experts cannot sample different prompts; needs expert=1"
        refuse_options((sizes.expert > 1, "option mesh", what, sizes))
        if self.max_new_tokens + 2 > self.seq_length:
            expected = f"at least {self.max_new_tokens + 2}, for prompts and max_new_tokens={self.max_new_tokens}"
            raise ConfigError("too small", where="option seq_length", got=self.seq_length, expected=expected)

    def encoding(self, embedding_rows: int) -> EncodingOptions:
        return replace(super().encoding(embedding_rows), seq_length=self.seq_length - self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class OPDRunOptions(RolloutRunOptions, TeacherRunOptions):
    """On-policy distillation."""

    model: Location = option("checkpoint of the student in Hugging Face format: a directory or a hub id")
    method: Literal["opd"] = option("learns from a teacher, on completions that the student samples", "opd")
    divergence: Literal["reverse_kl", "forward_kl", "jsd", "tvd"] = "reverse_kl"
    temperature: Positive = option("temperature of sampling; also divides the logits of both models in the loss", 1.0)


@dataclass(frozen=True, kw_only=True)
class GRPORunOptions(RolloutRunOptions):
    """Group relative policy optimization."""

    reward: Location = option(
        "Python file with a function `reward`, or FILE.py:NAME, see ligerzoo.train.rewards; or the directory of a "
        "reward model, as --method reward trains it"
    )
    method: Literal["grpo"] = option("name of the recipe", "grpo")
    num_samples: Count = option("completions that are sampled of each prompt, at least 2", 8)
    old_logps: Literal["sampler", "recomputed"] = option(
        "log-probabilities that ratios refer to: those of sampling, or a forward before the update, with truncated "
        "importance weights for the difference",
        "sampler",
    )
    loss_type: Literal["dapo", "grpo", "bnpo", "dr_grpo", "gspo", "luspo", "cispo", "sapo", "vespo"] = option(
        "variant of the loss, see ligerzoo.losses.grpo", "dapo"
    )
    epsilon: Fraction = option("clips ratios below 1 - epsilon", 0.2)
    epsilon_high: Positive | None = option("clips ratios above 1 + epsilon_high (default: epsilon; 4 for cispo)", None)
    beta: NotNegative = option(
        "weight of the KL divergence from the model before training, which is multiplied by the ratio as in TRL", 0.0
    )
    scale_rewards: Literal["group", "batch", "none"] = option(
        "advantages are divided by the standard deviation of the rewards of a group, or of all completions of the step",
        "group",
    )
    mask_truncated: bool = option("do not train completions that reach --max-new-tokens", False)
    iterations: Count = option("updates with the completions of a step", 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_samples < 2:
            remedy = "An advantage compares the completions of a prompt."
            raise ConfigError("too few", where="option num_samples", got=1, expected="at least 2", remedy=remedy)
        self.loss()

    def loss(self) -> GRPO:
        """Returns the loss. Raises ConfigError for an option that the variant does not use."""
        from ligerzoo.losses import GRPO

        given = given_options(self, ("temperature", "epsilon", "epsilon_high", "beta"))
        if self.loss_type == "cispo":
            given = {"epsilon_high": 4.0, **given}
        if self.loss_type == "dr_grpo":
            given["max_length"] = self.max_new_tokens
        try:
            return GRPO(variant=self.loss_type, is_kl_corrected=self.beta > 0, **given)
        except ValueError as error:
            raise ConfigError(str(error), where="option loss_type") from None

"""Options of the methods that train the completions of the data. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ligerzoo.errors import ConfigError
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.train.data_options import EncodingOptions, Packing, TrainAnswers
from ligerzoo.train.options import Budget, Count, Fraction, Location, NotNegative, Positive, changeable, option
from ligerzoo.train.run_options import BatchOptions, given_options, refuse_options

if TYPE_CHECKING:
    from ligerzoo.losses import HeadLoss
    from ligerzoo.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class SFTRunOptions(BatchOptions):
    """Pretraining and supervised fine-tuning."""

    model: Location = option(
        "checkpoint in Hugging Face format: a directory or a hub id; with --method pretrain also a config.json, or a "
        "directory without weights, for random weights"
    )
    method: Literal["sft", "pretrain"] = option(
        "sft trains completions and assistant turns, pretrain all tokens of texts", "sft"
    )
    packing: Packing = option(
        "auto: samples share rows without attending to each other, texts as with concatenate; concatenate: texts "
        "attend to those before them in the row; separate: texts attend to themselves only; whole: texts are packed "
        "like samples; none: one sample in a row",
        "auto",
    )
    train_answers: TrainAnswers = option("answers of a conversation that are trained", "all")
    train_on_prompt: bool = option("also train the prompts of completions", False)
    capture: Literal["auto", "on", "off"] = changeable(
        "run steps of small models as CUDA graphs; on: of large ones too, or stop; off: run eagerly", "auto"
    )

    def check_device(self, device_type: str) -> None:
        wrong = self.capture == "on" and device_type != "cuda"
        refuse_options((wrong, "option capture", "needs a GPU", f"device {device_type}"))

    def encoding(self, embedding_rows: int) -> EncodingOptions:
        encoding = super().encoding(embedding_rows)
        return replace(encoding, train_answers=self.train_answers, train_on_prompt=self.train_on_prompt)


@dataclass(frozen=True, kw_only=True)
class PreferenceRunOptions(BatchOptions):
    """Preferences."""

    data: tuple[Location, ...] = option(
        "data as for sft, with pairs (prompt, chosen, rejected) or, for kto, with prompt, completion and label"
    )
    method: Literal["dpo", "kto", "orpo", "simpo", "cpo"] = option(
        "the loss, see docs/losses.md; dpo and kto compare with a reference: MODEL before training", "dpo"
    )
    variant: str | None = option(
        "variant of the loss of dpo, kto or cpo, such as ipo (default: sigmoid; for kto: kto)", None
    )
    beta: NotNegative | None = option(
        "strength of the regularization of dpo and kto, weight of the odds ratio of orpo, scale of the rewards of "
        "simpo and cpo (default: 0.1; for simpo: 2)",
        None,
    )
    gamma: NotNegative | None = option("target margin of simpo (default: 1)", None)
    label_smoothing: Fraction | None = option(
        "probability that the labels of a pair are swapped, for dpo, simpo and cpo (default: 0)", None
    )
    nll_weight: NotNegative | None = option(
        "weight of the cross entropy of the chosen completions (default: 0; for orpo and cpo: 1)", None
    )
    desirable_weight: NotNegative | None = option("weight of the desirable completions of kto (default: 1)", None)
    undesirable_weight: NotNegative | None = option("weight of the undesirable completions of kto (default: 1)", None)
    precompute_reference: bool = changeable(
        "compute the reference's log-probabilities of all data before the first step, instead of keeping the reference "
        "in memory",
        False,
    )
    seq_length: Count = option(
        "tokens in a row; both sequences of a pair share a row, with other pairs if they fit", 2048
    )
    lr: Positive = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_reference = self.loss().needs_reference({})
        if self.precompute_reference and (not needs_reference or self.needs_kl):
            reason = "pairs other prompts and completions in each step" if self.needs_kl else "has no reference"
            raise ConfigError(f"method {self.method} {reason}", where="option precompute_reference")

    @property
    def needs_kl(self) -> bool:
        """Whether the loss needs an estimate of the KL divergence from the reference."""
        return self.method == "kto" and self.variant in (None, "kto")

    def loss(self) -> HeadLoss:
        """Returns the loss. Raises ConfigError if an option is out of range, or is not an option of the method."""
        from ligerzoo.losses import CPO, DPO, KTO, ORPO, SimPO

        losses: dict[str, type[HeadLoss]] = {"dpo": DPO, "kto": KTO, "orpo": ORPO, "simpo": SimPO, "cpo": CPO}
        names = ("variant", "beta", "gamma", "label_smoothing", "nll_weight", "desirable_weight", "undesirable_weight")
        try:
            return losses[self.method](**given_options(self, names))
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error), where=f"options of method {self.method}") from error


@dataclass(frozen=True, kw_only=True)
class RewardRunOptions(BatchOptions):
    """Reward models."""

    model: str = option(
        "checkpoint in Hugging Face format: a directory or a hub id, of a language model, which gets a head, or of a "
        "sequence classifier with one label"
    )
    data: tuple[str, ...] = option(
        "file with pairs (prompt, chosen, rejected, and optionally margin); several are one data set"
    )
    method: Literal["reward"] = option("learns which of two completions is preferred, as a reward model", "reward")
    center_weight: NotNegative = option("weight of the squared sum of a pair's rewards, which keeps them near 0", 0.0)
    seq_length: Count = option(
        "tokens in a row; both sequences of a pair share a row, with other pairs if they fit", 2048
    )
    activation_budget: Budget = changeable("none: the memory of a step is not predicted", "none")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = MeshSizes.parse(self.mesh or "")
        is_divided = max(sizes.context, sizes.tensor, sizes.expert) > 1
        refuse_options((is_divided, "option mesh", "of reward models has the axes replicate and shard only", sizes))

    @property
    def model_class(self) -> type[LanguageModel]:
        from ligerzoo.models import SequenceClassifier

        return SequenceClassifier

    @property
    def model_arguments(self) -> dict[str, Any]:
        return {"num_labels": 1}

    @property
    def new_modules(self) -> tuple[str, ...]:
        return ("score",)

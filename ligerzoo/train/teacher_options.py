"""Options of distillation from a teacher, on the data. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ligerzoo.errors import ConfigError
from ligerzoo.train.options import Fraction, Location, NotNegative, Positive, option
from ligerzoo.train.run_options import BatchOptions, RunOptions, given_options

if TYPE_CHECKING:
    from ligerzoo.losses import Distillation


@dataclass(frozen=True, kw_only=True)
class TeacherRunOptions(RunOptions):
    """Teacher."""

    loss_options: ClassVar[tuple[str, ...]] = ("divergence", "beta", "temperature")

    teacher: Location = option("checkpoint of the teacher, with the same tokenizer")
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "tvd", "cosine"] = option(
        "divergence of the student from the teacher: forward_kl covers the teacher's modes, reverse_kl seeks them, jsd "
        "is between",
        "jsd",
    )
    beta: Fraction | None = option("share of the teacher in the mixture of jsd (default: 0.5)", None)
    temperature: Positive | None = option("divides the logits of both models (default: 1)", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss()

    def loss(self) -> Distillation:
        """Returns the loss. Raises ConfigError for an option that the divergence does not use."""
        from ligerzoo.losses import Distillation

        try:
            return Distillation(**given_options(self, self.loss_options))
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error), where="option divergence") from None


@dataclass(frozen=True, kw_only=True)
class DistillRunOptions(BatchOptions, TeacherRunOptions):
    """Distillation."""

    loss_options: ClassVar[tuple[str, ...]] = (*TeacherRunOptions.loss_options, "hard_weight")

    model: Location = option(
        "checkpoint of the student in Hugging Face format: a directory or a hub id; also a config.json, or a directory "
        "without weights, for random weights"
    )
    method: Literal["distill"] = option(
        "learns from a teacher, on completions, assistant turns or all tokens of texts", "distill"
    )
    hard_weight: NotNegative = option("weight of the cross entropy with the data's tokens, which is added", 0.0)

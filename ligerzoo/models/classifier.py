"""Base class of classifiers of sequences and of tokens, and their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ligerzoo.checks import is_text
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.kernels.autograd import any_true, innermost
from ligerzoo.layers import Decoder, Linear
from ligerzoo.layers.linear import INIT_STD
from ligerzoo.models.config import LanguageModelConfig
from ligerzoo.models.language_model import LanguageModel

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
"""What a sequence classifier predicts; see `Labels`."""


@dataclass(frozen=True)
class Labels:
    """What a classifier predicts.

    Attributes:
        names: the name of each label, in the order of the logits.
        problem_type: "regression" (mean squared error), "single_label_classification" (cross entropy) or
            "multi_label_classification" (binary cross entropy). None, as in transformers: regression for one label,
            else single-label classification if the labels are integers, else multi-label classification.

    Raises:
        ConfigError: there are no names, the problem type is unknown, or a single-label classifier has one label.
    """

    names: Sequence[str] = ("LABEL_0", "LABEL_1")
    problem_type: ProblemType | None = None

    def __post_init__(self) -> None:
        if not self.names or not all(map(is_text, self.names)):
            raise ConfigError("invalid names of labels", where="id2label", got=self.names, expected="one name or more")
        if self.problem_type is not None:
            check_problem_type(self.problem_type, len(self.names))

    @property
    def id2label(self) -> dict[int, str]:
        """The name of each label by its index."""
        return dict(enumerate(self.names))

    @property
    def label2id(self) -> dict[str, int]:
        """The index of each label by its name."""
        return {name: index for index, name in enumerate(self.names)}


class Classifier(LanguageModel):
    """A decoder or encoder of any architecture, and a linear layer that gives the logits of labels.

    Args:
        config: config of the architecture.
        model: token ids to final hidden states.
        labels: what the model predicts.
        bias: add a bias to the linear layer.
        head: hidden states to those that the linear layer gets; None for none.

    Attributes:
        score: hidden states to logits.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        model: Decoder,
        labels: Labels,
        *,
        bias: bool = False,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__(config, model)
        self._labels = labels
        weight: Tensor = model.embed_tokens.weight  # type: ignore[assignment]
        self.score = Linear(weight.shape[1], len(labels.names), bias=bias, device=weight.device, dtype=weight.dtype)
        if head is not None:
            self.head = head
        if config.initializer_range != INIT_STD:
            for module in (self.score, *(() if head is None else head.modules())):
                if hasattr(module, "init_weights"):
                    module.init_weights(config.initializer_range)

    @property
    def labels(self) -> Labels:
        """What the model predicts. Set it with the arguments of `from_pretrained`."""
        return self._labels

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return len(self.labels.names)


def check_problem_type(problem_type: str, num_labels: int) -> None:
    """Raises ConfigError if a problem type is unknown, or has a single label to choose from."""
    if problem_type not in get_args(ProblemType):
        expected = " or ".join(map(repr, get_args(ProblemType)))
        raise ConfigError("unknown", where="problem_type", got=repr(problem_type), expected=expected)
    if problem_type == "single_label_classification" and num_labels == 1:
        remedy = 'A reward model has problem_type="regression" or none.'
        what, got, expected = "a single label leaves nothing to choose", repr(problem_type), "two labels or more"
        raise ConfigError(what, where="problem_type", got=got, expected=expected, remedy=remedy)


def check_label_indices(labels: Tensor, num_labels: int) -> None:
    """Raises LigerzooError (on a CPU only, in eager mode) if no label has one of the indices, and it is not -100."""
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return
    is_wrong = (labels != -100) & ((labels < 0) | (labels >= num_labels))
    if any_true(is_wrong):
        got = innermost(labels)[innermost(is_wrong)][:8].tolist()
        expected = f"0 to {num_labels - 1}, or -100 for an ignored {'token' if labels.ndim > 1 else 'sequence'}"
        remedy = "Load the model with num_labels=..., the number of labels."
        raise LigerzooError("no label has this index", where="labels", got=got, expected=expected, remedy=remedy)

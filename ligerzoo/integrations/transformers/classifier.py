"""What wrapped classifiers of sequences and tokens share: their labels, by transformers' config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from ligerzoo.convert import architecture_for_config
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.classifier import classifier_architecture, read_labels, suffix_of
from ligerzoo.errors import ConfigError
from ligerzoo.integrations.transformers.model import WrappedModel
from ligerzoo.models.classifier import Classifier, Labels

AnyClassifier = TypeVar("AnyClassifier", bound=Classifier)


class WrappedClassifier(WrappedModel[AnyClassifier]):
    """A classifier of ligerzoo as a `PreTrainedModel`; see `wrap`.

    Attributes:
        num_labels: number of labels.
    """

    accepts_loss_kwargs = False
    """The loss is the mean of its batch: the Trainer averages over microbatches."""

    @property
    def labels(self) -> Labels:
        """Names and problem type, by the config. Of `id2label` and `label2id`, one that was changed decides.

        Raises:
            ConfigError: the names are not those of the head's rows, or contradict each other.
        """
        before = self.backbone.zoo_model.labels
        now = {name: getattr(self.config, name) for name in ("id2label", "label2id")}
        changed = {name: value for name, value in now.items() if value != getattr(before, name)}
        names = read_labels({}, changed).names if changed else before.names
        if len(names) != self.num_labels:
            what, where = "differs from the number of rows of the head", "config.id2label"
            remedy = "Load with from_pretrained(..., num_labels=...)."
            raise ConfigError(what, where=where, got=len(names), expected=self.num_labels, remedy=remedy)
        return Labels(names, self.config.problem_type)

    @property
    def architecture(self) -> Architecture:
        """The architecture of the model with its labels; see `WrappedModel.architecture`."""
        model = self.backbone.zoo_model
        base = architecture_for_config(type(model.config))
        return classifier_architecture(base, self.labels, suffix_of(type(model)))

    def to_zoo_model(self, state: Mapping[str, Tensor] | None = None) -> Any:
        """See `WrappedModel.to_zoo_model`."""
        model = super().to_zoo_model(state)
        if model.origin is not None and model.labels != self.backbone.zoo_model.labels:
            model.origin = dataclasses.replace(model.origin, config=None)  # its config.json has other labels
        return model

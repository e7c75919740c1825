"""Auto classes with transformers' names that load ligerzoo models and wrap them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ligerzoo.errors import ConfigError
from ligerzoo.integrations.transformers.causal_lm import WrappedCausalLM
from ligerzoo.integrations.transformers.sequence_classifier import WrappedSequenceClassifier
from ligerzoo.integrations.transformers.wrapping import load_wrapped


class AutoModelForCausalLM:
    """Loads the model of any checkpoint of the zoo, wrapped as transformers' models are."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> WrappedCausalLM:
        """Returns `wrap(ligerzoo.AutoModel.from_pretrained(name_or_path, **options))`.

        Its config names the checkpoint: trainers load the tokenizer and the reference model from there.

        Args:
            name_or_path: directory, or id of a repository on the hub ("org/name").
            options: see `ligerzoo.AutoModel.from_pretrained`.
        """
        return load_wrapped(WrappedCausalLM, name_or_path, **options)


class AutoModelForImageTextToText(AutoModelForCausalLM):
    """`AutoModelForCausalLM` for vision-language models."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> WrappedCausalLM:
        """See `AutoModelForCausalLM.from_pretrained`.

        Raises:
            ConfigError: the checkpoint is of a text model.
        """
        model = super().from_pretrained(name_or_path, **options)
        if not model.model.zoo_model.modalities:
            raise ConfigError(
                "the checkpoint is of a text model", where=name_or_path, got=model.config.model_type,
                expected="a vision-language model", remedy="Load it with AutoModelForCausalLM.",
            )  # fmt: skip
        return model


class AutoModelForSequenceClassification:
    """Loads sequence classifiers and reward models with the decoder of any text architecture, wrapped."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> WrappedSequenceClassifier:
        """Returns `wrap(ligerzoo.AutoModelForSequenceClassification.from_pretrained(name_or_path, **options))`.

        Its config names the checkpoint: trainers load the tokenizer from there.

        Args:
            name_or_path: directory, or id of a repository on the hub ("org/name"), of a classifier or of a causal
                language model.
            options: see `ligerzoo.AutoModelForSequenceClassification.from_pretrained`; such as `num_labels`.
        """
        return load_wrapped(WrappedSequenceClassifier, name_or_path, **options)

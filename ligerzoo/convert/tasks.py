"""Tasks: what loading and saving need to know about models with another head than a language model's.

Such a model has the decoder or encoder of a language model. A task is a row of `TASKS`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.classifier import LABEL_OPTIONS, classifier_architecture, read_classifier
from ligerzoo.convert.embedding import EMBEDDING_OPTIONS, embedding_architecture, read_embedding
from ligerzoo.convert.fields import SEQUENCE_SUFFIX, TOKEN_SUFFIX, is_classifier
from ligerzoo.entries import Entries
from ligerzoo.errors import ConfigError
from ligerzoo.files.layout import EMBEDDING_INPUTS
from ligerzoo.files.modules import ModuleFiles
from ligerzoo.models.classifier import Classifier
from ligerzoo.models.embedding import EmbeddingModel
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.token_classifier import TokenClassifier


class Task(NamedTuple):
    """A task.

    Attributes:
        model_class: base class of its models.
        read: returns the architecture that loads a checkpoint. Its arguments are the architecture that config.json
            names, config.json, arguments of the user, and the files of sentence-transformers.
        derive: returns the architecture of a model, given that of its language model; None where they are the same.
        options: arguments of `from_pretrained` that take precedence over the files.
        files: patterns of the files that are read in addition to config.json and the weights.
    """

    model_class: type[LanguageModel]
    read: Callable[[Architecture, Entries, Entries, ModuleFiles], Architecture]
    derive: Callable[[Architecture, Any], Architecture] | None = None
    options: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def _read_language_model(base: Architecture, raw: Entries, options: Entries, files: ModuleFiles) -> Architecture:
    """Raises ConfigError if the checkpoint is a classifier's."""
    if is_classifier(raw):
        kind = "SequenceClassification" if is_classifier(raw, (SEQUENCE_SUFFIX,)) else "TokenClassification"
        what, where, got = "the checkpoint is a classifier", "architectures", raw["architectures"]
        expected, remedy = "a language model", f"Load it with AutoModelFor{kind}."
        raise ConfigError(what, where=where, got=got, expected=expected, remedy=remedy)
    return base


def _read_embedding(base: Architecture, raw: Entries, options: Entries, files: ModuleFiles) -> Architecture:
    return read_embedding(_read_language_model(base, raw, options, files), raw, options, files)


def _classification(model_class: type[Classifier], suffix: str) -> Task:
    return Task(
        model_class,
        read=lambda base, raw, options, _: read_classifier(base, raw, options, suffix),
        derive=lambda base, model: classifier_architecture(base, model.labels, suffix),
        options=LABEL_OPTIONS,
    )


TASKS = (
    _classification(TokenClassifier, TOKEN_SUFFIX),
    _classification(Classifier, SEQUENCE_SUFFIX),
    Task(
        EmbeddingModel,
        read=_read_embedding,
        derive=lambda base, model: embedding_architecture(base, model.settings, ModuleFiles("", model.files)),
        options=EMBEDDING_OPTIONS,
        files=EMBEDDING_INPUTS,
    ),
    Task(LanguageModel, read=_read_language_model),
)
"""The first whose class is a base class of a model's counts."""


def task_of(model_class: type[LanguageModel]) -> Task:
    """Returns the task of a class of models."""
    return next(task for task in TASKS if issubclass(model_class, task.model_class))

"""Converter for sequence classifiers: the decoder's entries and tensors, the labels, and `score.weight`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import CLASSIFIER_SUFFIX, is_classifier
from ligerzoo.entries import OBJECT, Entries, JsonType, object_entry
from ligerzoo.errors import ConfigError, first_names
from ligerzoo.models.building import building
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.registry import ENCODERS
from ligerzoo.models.sequence_classifier import Labels, SequenceClassifier

LABEL_OPTIONS = ("num_labels", "id2label", "label2id", "problem_type")
"""Entries of config.json about the labels, and arguments of `from_pretrained` that take precedence over them."""

_NUMBER = JsonType[int](
    "1 to 1,000,000", lambda value: type(value) is int and 1 <= value <= 1_000_000, problem="not a number of labels"
)
_EXAMPLES = {"id2label": '{0: "negative", 1: "positive"}', "label2id": '{"negative": 0, "positive": 1}'}
_NAMES = {
    name: OBJECT._replace(expected=f"a dictionary such as {example}", problem="not a dictionary")
    for name, example in _EXAMPLES.items()
}


@dataclass(frozen=True, kw_only=True)
class ClassifierArchitecture(Architecture):
    """Sequence classifiers whose decoder is that of a causal language model.

    Attributes:
        causal_lm: the architecture of the causal language model.
        labels: what the model predicts.
        from_causal_lm: the checkpoint is that of a causal language model, whose head is left out.
    """

    causal_lm: Architecture
    labels: Labels = field(default_factory=Labels)
    from_causal_lm: bool = False

    @property
    def model_class(self) -> type[SequenceClassifier]:
        return SequenceClassifier

    @property
    def optional(self) -> frozenset[str]:
        return frozenset({"score.weight"} if self.from_causal_lm else ())

    @property
    def unused(self) -> frozenset[str]:
        return frozenset({"lm_head.weight", "lm_head.bias"} if self.from_causal_lm else ())

    def describes(self, raw: Entries) -> bool:
        return raw.get("model_type") == self.model_type and is_classifier(raw)

    def build(
        self,
        config: Any,
        model_class: type[LanguageModel] = LanguageModel,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> SequenceClassifier:
        causal_lm = self.causal_lm.build(config, device=device, dtype=dtype)
        names = [name for name in causal_lm.state_dict() if not name.startswith(("model.", "lm_head."))]
        if names or type(causal_lm).embed is not LanguageModel.embed:
            what = "a sequence classifier has a decoder only"
            got = f"parameters outside the decoder, {first_names(names)}" if names else "a method `embed`"
            remedy = "Models that read images cannot be classifiers, nor classes of your own with further parts."
            raise ConfigError(what, where=type(causal_lm).__name__, got=got, remedy=remedy)
        with building(device, dtype):
            return SequenceClassifier(config, causal_lm.model, self.labels)

    def config_to_hf(self, config: object) -> dict[str, object]:
        labels = {"id2label": self.labels.id2label, "label2id": self.labels.label2id}
        if self.labels.problem_type is not None:
            labels["problem_type"] = self.labels.problem_type
        return {**super().config_to_hf(config), **labels}


def classifier_architecture(causal_lm: Architecture, labels: Labels) -> ClassifierArchitecture:
    """Returns the architecture of sequence classifiers with these labels and the decoder of `causal_lm`."""
    if causal_lm.model_type in ENCODERS:
        what, where = "encoders have no sequence classifier here", f"model_type {causal_lm.model_type!r}"
        raise ConfigError(what, where=where, remedy="Load it with AutoModelForMaskedLM, or with transformers.")
    inherited = {field.name: getattr(causal_lm, field.name) for field in fields(Architecture)}
    hf_class = causal_lm.classifier_class or causal_lm.hf_class.removesuffix("ForCausalLM") + CLASSIFIER_SUFFIX
    own = {"class_name": hf_class, "causal_lm": causal_lm, "labels": labels}
    return ClassifierArchitecture(**inherited | own)


def read_classifier(causal_lm: Architecture, raw: Entries, options: Entries) -> ClassifierArchitecture:
    """Returns the architecture that loads a checkpoint as a sequence classifier.

    The checkpoint is a classifier's, which must have a head, or a causal language model's, whose head is left out.

    Args:
        causal_lm: the architecture that config.json names.
        raw: config.json.
        options: arguments of the user, of which those of `LABEL_OPTIONS` count.

    Raises:
        ConfigError: the entries or options are invalid or contradict each other.
    """
    architecture = classifier_architecture(causal_lm, read_labels(raw, options))
    return replace(architecture, from_causal_lm=not is_classifier(raw))


def read_labels(raw: Entries, options: Entries) -> Labels:
    """Returns the labels from config.json, or from options, which take precedence.

    Without names, or if `num_labels` is given and has another value than there are names, they are LABEL_0, LABEL_1 and
    so on; there are two if no entry says otherwise, as in transformers.

    Raises:
        ConfigError: an entry or option is invalid, or the options contradict each other.
    """
    given = {name: options[name] for name in LABEL_OPTIONS if options.get(name) is not None}
    for name, kind in _NAMES.items():
        kind.entry(given, name)
    stored = {name: raw[name] for name in LABEL_OPTIONS if raw.get(name) is not None}
    if given.keys() & {"num_labels", "id2label", "label2id"}:
        stored = {name: value for name, value in stored.items() if name in ("id2label", "problem_type")}
    entries: Mapping[str, Any] = {**stored, **given}
    names = _names(entries)
    number = _NUMBER.entry(entries, "num_labels")
    if number is not None and names is not None and len(names) != number:
        if given.keys() & {"id2label", "label2id"}:
            raise ConfigError("differs from the number of names", where="num_labels", got=number, expected=len(names))
        names = None
    if names is None:
        names = [f"LABEL_{index}" for index in range(2 if number is None else number)]
    return Labels(tuple(names), entries.get("problem_type"))


def _names(entries: Entries) -> list[str] | None:
    """Returns the names of the labels from `id2label`, or else from `label2id`."""
    by_index: dict[str, Any] = {str(index): name for index, name in object_entry(entries, "id2label").items()}
    by_name = {name: str(index) for name, index in object_entry(entries, "label2id").items()}
    if not by_index:
        by_index = {index: name for name, index in by_name.items()}
    expected = [str(index) for index in range(len(by_index))]
    if by_index.keys() != set(expected):
        what = "invalid indices of labels"
        raise ConfigError(what, where="id2label", got=first_names(list(by_index)), expected=f"0 to {len(by_index) - 1}")
    if any(by_index.get(index) != name for name, index in by_name.items()):
        raise ConfigError("contradicts id2label", where="label2id", got=repr(entries["label2id"])[:200])
    return [by_index[index] for index in expected] or None

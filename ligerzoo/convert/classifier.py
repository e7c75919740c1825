"""Converter for classifiers of sequences and tokens: the language model's entries and tensors, labels, and a head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import SEQUENCE_SUFFIX, TOKEN_SUFFIX, is_classifier
from ligerzoo.entries import OBJECT, Entries, JsonType, object_entry
from ligerzoo.errors import ConfigError, first_names
from ligerzoo.models.building import building
from ligerzoo.models.classifier import Classifier, Labels
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.sequence_classifier import EncoderSequenceClassifier, SequenceClassifier
from ligerzoo.models.token_classifier import EncoderTokenClassifier, TokenClassifier

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
    """Classifiers whose decoder or encoder is that of a language model.

    Attributes:
        base: the architecture of the language model.
        suffix: end of the names of the classes in transformers, one of `CLASSIFIER_SUFFIXES`.
        labels: what the model predicts.
        from_base: the checkpoint is that of a language model, whose head is left out.
        left_out: stored tensors of that head.
    """

    base: Architecture
    suffix: str = SEQUENCE_SUFFIX
    labels: Labels = field(default_factory=Labels)
    from_base: bool = False
    left_out: frozenset[str] = frozenset()

    @property
    def model_class(self) -> type[Classifier]:
        return _CLASSES[self.suffix, self.is_encoder]

    @property
    def is_encoder(self) -> bool:
        return self.base.is_encoder

    @property
    def optional(self) -> frozenset[str]:
        """See `Architecture`: the head, which a language model lacks, or of which it has a part."""
        parts = (f"{name}.{kind}" for name in ("score", "head.dense", "head.norm") for kind in ("weight", "bias"))
        return frozenset(parts if self.from_base else ())

    @property
    def unused(self) -> frozenset[str]:
        return self.left_out

    def describes(self, raw: Entries) -> bool:
        return raw.get("model_type") == self.model_type and is_classifier(raw, (self.suffix,))

    def build(
        self,
        config: Any,
        model_class: type[LanguageModel] = LanguageModel,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Classifier:
        base = self.base.build(config, device=device, dtype=dtype)
        inner = ("model.", "lm_head.", *(["head."] if self.is_encoder else []))
        names = [name for name in base.state_dict() if not name.startswith(inner)]
        if names or type(base).embed is not LanguageModel.embed:
            what = "a classifier has a decoder only"
            got = f"parameters outside the decoder, {first_names(names)}" if names else "a method `embed`"
            remedy = "Models that read images cannot be classifiers, nor classes of your own with further parts."
            raise ConfigError(what, where=type(base).__name__, got=got, remedy=remedy)
        with building(device, dtype):
            make: Callable[..., Classifier] = self.model_class
            if not self.is_encoder:
                return make(config, base.model, self.labels)
            head = base.text_head() if self.suffix == SEQUENCE_SUFFIX else base.token_head()
            return make(config, base.model, self.labels, head=head)

    def config_to_hf(self, config: object) -> dict[str, object]:
        labels = {"id2label": self.labels.id2label, "label2id": self.labels.label2id}
        if self.labels.problem_type is not None:
            labels["problem_type"] = self.labels.problem_type
        return {**super().config_to_hf(config), **labels}


_CLASSES: Mapping[tuple[str, bool], type[Classifier]] = {
    (SEQUENCE_SUFFIX, False): SequenceClassifier,
    (SEQUENCE_SUFFIX, True): EncoderSequenceClassifier,
    (TOKEN_SUFFIX, False): TokenClassifier,
    (TOKEN_SUFFIX, True): EncoderTokenClassifier,
}
"""The class of models by the end of its name in transformers, and whether the language model is an encoder."""


def suffix_of(model_class: type[Classifier]) -> str:
    """Returns the end of the names of the classes in transformers, by our class."""
    return TOKEN_SUFFIX if issubclass(model_class, TokenClassifier) else SEQUENCE_SUFFIX


def classifier_architecture(
    base: Architecture, labels: Labels, suffix: str = SEQUENCE_SUFFIX
) -> ClassifierArchitecture:
    """Returns the architecture of classifiers with these labels and the decoder or encoder of `base`."""
    inherited = {field.name: getattr(base, field.name) for field in fields(Architecture)}
    hf_class = base.classifier_class.removesuffix(SEQUENCE_SUFFIX) if base.classifier_class else base.hf_class
    inherited["class_name"] = hf_class.removesuffix("ForCausalLM").removesuffix("ForMaskedLM") + suffix
    if rules := base.classifier_rules(suffix):
        inherited["layouts"] = lambda config: tuple(
            replace(layout, rules=(*rules, *layout.rules)) for layout in base.layouts(config)
        )
    return ClassifierArchitecture(**inherited, base=base, labels=labels, suffix=suffix)


def read_classifier(base: Architecture, raw: Entries, options: Entries, suffix: str) -> ClassifierArchitecture:
    """Returns the architecture that loads a checkpoint as a classifier.

    The checkpoint is a classifier's, which must have a head, or a language model's, whose head is left out.

    Args:
        base: the architecture that config.json names.
        raw: config.json.
        options: arguments of the user, of which those of `LABEL_OPTIONS` count.
        suffix: see `ClassifierArchitecture`.

    Raises:
        ConfigError: the entries or options are invalid or contradict each other, or it is the other kind of classifier.
    """
    architecture = classifier_architecture(base, read_labels(raw, options), suffix)
    if is_classifier(raw, (suffix,)):
        return architecture
    if is_classifier(raw):
        other = "AutoModelForTokenClassification" if suffix == SEQUENCE_SUFFIX else "AutoModelForSequenceClassification"
        what, got = "another kind of classifier", raw["architectures"]
        raise ConfigError(what, where="architectures", got=got, expected=suffix, remedy=f"Load it with {other}.")
    left_out = frozenset(base.stored_heads(base.config_from_hf(raw)))
    return replace(architecture, from_base=True, left_out=left_out)


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

"""`AutoModel`: models of any architecture."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

import torch

from ligerzoo import convert
from ligerzoo.convert import architecture_for_config
from ligerzoo.convert.classifier import classifier_architecture, read_labels, suffix_of
from ligerzoo.convert.embedding import embedding_architecture
from ligerzoo.convert.fields import parse_dtype
from ligerzoo.convert.layout import Rule
from ligerzoo.device import available_device
from ligerzoo.errors import ConfigError, first_names
from ligerzoo.files.layout import MODULES_FILE
from ligerzoo.files.locate import locate_files
from ligerzoo.files.transformers_options import HubOptions
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.classifier import Classifier
from ligerzoo.models.config import LanguageModelConfig
from ligerzoo.models.embedding import EmbeddingModel, EmbeddingSettings
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.masked_lm import MaskedLM
from ligerzoo.models.sequence_classifier import SequenceClassifier
from ligerzoo.models.token_classifier import TokenClassifier

T = TypeVar("T", torch.device, torch.dtype)
Model = TypeVar("Model", bound=LanguageModel)


class AutoModel:
    """Loads and builds models of any architecture, and registers new ones."""

    from_pretrained = CausalLM.from_pretrained

    @staticmethod
    def from_config(
        config: Any, *, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None
    ) -> CausalLM:
        """Builds a model with random weights.

        Args:
            config: config of an architecture in ligerzoo.models, or of a registered class.
            device: device of the weights. Defaults to torch's default device.
            dtype: dtype of the weights, also as a string such as "bfloat16". Defaults to torch's default dtype.

        Raises:
            ConfigError: The config's class belongs to no model class, a device or dtype does not exist, or the class
                sets another one for some of its parameters.
        """
        return _from_config(CausalLM, config, device, dtype)

    @staticmethod
    def register(
        config_class: type, model_class: type[CausalLM], model_type: str, *, layout: tuple[Rule, ...] = ()
    ) -> None:
        """Makes a class of your own save, load and show in `ligerzoo info` like those of ligerzoo.models.

        Registration lasts as long as the process. Register the same classes before you load their checkpoints.

        Args:
            config_class: config of the model: a frozen dataclass with fields that JSON can represent. If it extends
                `ligerzoo.models.config.DecoderConfig`, the types of its values are checked.
            model_class: a subclass of CausalLM that is built as `model_class(config)`.
            model_type: `model_type` in config.json.
            layout: rules of `ligerzoo.convert.layout` for tensors that checkpoints store under other names or shapes.
                Rules combine: each renames its path in the names. A rule without effect is an error when the model is
                saved or loaded. The default stores each parameter under its own name, or as the nearest base class in
                ligerzoo.models.

        Raises:
            ConfigError: An argument is invalid, or the name or a class is in use already.
        """
        convert.register_architecture(config_class, model_class, model_type=model_type, layout=layout)


class AutoModelForEmbedding:
    """Loads and builds models that make an embedding of a text, as those of sentence-transformers."""

    from_pretrained = EmbeddingModel.from_pretrained

    @staticmethod
    def from_config(
        config: LanguageModelConfig,
        settings: EmbeddingSettings | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> EmbeddingModel:
        """Builds a model with random weights.

        Args:
            config: config of a text architecture in ligerzoo.models, or of a registered class.
            settings: pooling, the modules after it, and prompts. Default: the mean of the hidden states.
            device: device of the weights. Defaults to torch's default device.
            dtype: dtype of the weights, also as a string such as "bfloat16". Defaults to torch's default dtype.

        Raises:
            ConfigError: the config's class belongs to no model class, or to one that reads images; or a device or dtype
                does not exist.
        """
        _check_is_config(config)
        base = architecture_for_config(type(config))
        architecture = embedding_architecture(base, EmbeddingSettings() if settings is None else settings)
        return cast(EmbeddingModel, _build(partial(architecture.build, config), device, dtype))


class AutoModelForMaskedLM:
    """Loads and builds encoders with a head for masked tokens."""

    from_pretrained = MaskedLM.from_pretrained

    @staticmethod
    def from_config(
        config: object, *, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None
    ) -> MaskedLM:
        """Builds a model with random weights.

        Args:
            config: config of an encoder in ligerzoo.models.
            device: device of the weights. Defaults to torch's default device.
            dtype: dtype of the weights, also as a string such as "bfloat16". Defaults to torch's default dtype.

        Raises:
            ConfigError: the config's class is not that of an encoder, or a device or dtype does not exist.
        """
        return _from_config(MaskedLM, config, device, dtype)


class AutoModelForSequenceClassification:
    """Loads and builds sequence classifiers and reward models with the decoder or encoder of any architecture."""

    from_pretrained = SequenceClassifier.from_pretrained

    @staticmethod
    def from_config(
        config: Any,
        *,
        num_labels: int | None = None,
        id2label: Mapping[int, str] | None = None,
        label2id: Mapping[str, int] | None = None,
        problem_type: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> SequenceClassifier:
        """Builds a model with random weights.

        Args:
            config: config of a text architecture in ligerzoo.models, or of a registered class.
            num_labels: number of labels; 1 for a reward model. Default: as many as there are names, or 2.
            id2label: the name of each label by its index. Default: LABEL_0, LABEL_1, ...
            label2id: the index of each label by its name.
            problem_type: see `ligerzoo.models.classifier.Labels`.
            device: device of the weights. Defaults to torch's default device.
            dtype: dtype of the weights, also as a string such as "bfloat16". Defaults to torch's default dtype.

        Raises:
            ConfigError: The config's class belongs to no model class, or to one that reads images; or the labels are
                invalid.
        """
        options = {"num_labels": num_labels, "id2label": id2label, "label2id": label2id, "problem_type": problem_type}
        return cast(SequenceClassifier, _classifier(SequenceClassifier, config, options, device, dtype))


class AutoModelForTokenClassification:
    """Loads and builds token classifiers with the decoder or encoder of any architecture."""

    from_pretrained = TokenClassifier.from_pretrained

    @staticmethod
    def from_config(
        config: object,
        *,
        num_labels: int | None = None,
        id2label: Mapping[int, str] | None = None,
        label2id: Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> TokenClassifier:
        """Builds a model with random weights.

        Args:
            config: config of a text architecture in ligerzoo.models, or of a registered class.
            num_labels: number of labels. Default: as many as there are names, or 2.
            id2label: the name of each label by its index. Default: LABEL_0, LABEL_1, ...
            label2id: the index of each label by its name.
            device: device of the weights. Defaults to torch's default device.
            dtype: dtype of the weights, also as a string such as "bfloat16". Defaults to torch's default dtype.

        Raises:
            ConfigError: the config's class belongs to no model class, or to one that reads images; or the labels are
                invalid.
        """
        options = {"num_labels": num_labels, "id2label": id2label, "label2id": label2id}
        return cast(TokenClassifier, _classifier(TokenClassifier, config, options, device, dtype))


def _classifier(
    kind: type[Classifier],
    config: object,
    options: Mapping[str, object],
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
) -> LanguageModel:
    """Builds a classifier of one kind, with the labels of `LABEL_OPTIONS`."""
    _check_is_config(config)
    base = architecture_for_config(type(config))
    architecture = classifier_architecture(base, read_labels({}, options), suffix_of(kind))
    return _build(partial(architecture.build, config), device, dtype)


def has_modules(name_or_path: str | Path, **hub_options: Unpack[HubOptions]) -> bool:
    """Returns whether a checkpoint has modules.json, as the embedding models of sentence-transformers have."""
    return (locate_files(name_or_path, [MODULES_FILE], **hub_options) / MODULES_FILE).exists()


def load_as_saved(
    name_or_path: str | Path, *, dtype: str | torch.dtype = "auto", **hub_options: Unpack[HubOptions]
) -> CausalLM | EmbeddingModel:
    """Loads an embedding model from a checkpoint with modules.json, or else a causal language model."""
    auto = AutoModelForEmbedding if has_modules(name_or_path, **hub_options) else AutoModel
    return auto.from_pretrained(name_or_path, dtype=dtype, **hub_options)


def _from_config(
    kind: type[Model], config: object, device: torch.device | str | None, dtype: torch.dtype | str | None
) -> Model:
    """Builds a model of one kind. Raises ConfigError if the config is that of another kind."""
    _check_is_config(config)
    architecture = architecture_for_config(type(config))
    if not issubclass(architecture.model_class, kind):
        remedy = f"Call {convert.auto_class(architecture)}.from_config."
        what = f"the config of another kind of model than {kind.__name__}"
        raise ConfigError(what, where="config", got=type(config).__name__, remedy=remedy)
    return cast(Model, _build(partial(architecture.build, config), device, dtype))


def _build(
    make: Callable[..., LanguageModel], device: torch.device | str | None, dtype: torch.dtype | str | None
) -> LanguageModel:
    """Builds a model on a device and in a dtype. Raises ConfigError if one does not exist, or a parameter differs."""
    device = None if device is None else torch.empty(0, device=available_device(device)).device
    dtype = None if dtype is None else parse_dtype(dtype, where="argument dtype")
    model = make(device=device, dtype=dtype)
    weights = dict(model.named_parameters())
    if device is not None:
        _check_all_have({name: weight.device for name, weight in weights.items()}, device, type(model), "device")
    if dtype is not None:
        _check_all_have({name: weight.dtype for name, weight in weights.items()}, dtype, type(model), "dtype")
    return model


def _check_is_config(config: object) -> None:
    """Raises ConfigError for a model, the name of a checkpoint or a class in place of a config."""
    got, remedy = type(config).__name__, "To load a checkpoint, call from_pretrained."
    match config:
        case str() | type():
            got = repr(config)
        case LanguageModel():
            remedy = "Pass model.config."
        case _ if dataclasses.is_dataclass(config):
            return
    expected = "a config of ligerzoo.models, such as LlamaConfig(...), or of a registered class"
    raise ConfigError("not a config", where="config", got=got, expected=expected, remedy=remedy)


def _check_all_have(found: Mapping[str, T], given: T, model_class: type, argument: str) -> None:
    """Raises ConfigError unless all parameters have the given dtype or device."""
    others: dict[T, list[str]] = {}
    for name, value in found.items():
        if value != given:
            others.setdefault(value, []).append(name)
    if others:
        what = f"parameters that do not have the given {argument}"
        got = "; ".join(f"{value} in {first_names(names, 4)}" for value, names in others.items())
        remedy = "Do not set it in the constructor: its modules get it without."
        raise ConfigError(what, where=model_class.__name__, got=got, expected=f"{given} in all", remedy=remedy)

"""`wrap`, the classes that it makes, and auto classes that load and wrap: with the names of transformers' classes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

import ligerzoo
from ligerzoo.convert import architecture_of, architecture_of_model
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.classifier import classifier_architecture
from ligerzoo.convert.fields import CLASSIFIER_SUFFIXES
from ligerzoo.convert.tensor_slices import shapes_of
from ligerzoo.errors import ConfigError
from ligerzoo.integrations.transformers.causal_lm import WrappedCausalLM
from ligerzoo.integrations.transformers.distribution import ConfigLike, Placement
from ligerzoo.integrations.transformers.encoder import (
    WrappedEncoderSequenceClassifier,
    WrappedEncoderTokenClassifier,
    WrappedMaskedLM,
)
from ligerzoo.integrations.transformers.model import WrappedModel
from ligerzoo.integrations.transformers.sequence_classifier import WrappedSequenceClassifier
from ligerzoo.integrations.transformers.token_classifier import WrappedTokenClassifier
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.classifier import Labels
from ligerzoo.models.embedding import EmbeddingModel
from ligerzoo.models.encoder import EncoderModel
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.masked_lm import MaskedLM
from ligerzoo.models.registry import MODEL_CLASSES
from ligerzoo.models.sequence_classifier import EncoderSequenceClassifier, SequenceClassifier
from ligerzoo.models.token_classifier import EncoderTokenClassifier, TokenClassifier

AnyWrapped: TypeAlias = WrappedModel[Any]
Wrapper = TypeVar("Wrapper", bound=AnyWrapped)


@cache
def wrapper_class(base: type[Wrapper], name: str, modalities: tuple[str, ...]) -> type[Wrapper]:
    """Returns the wrapper class of an architecture.

    Args:
        base: class of the wrapper.
        name: name of the architecture's class in transformers.
        modalities: names of the inputs other than text.
    """

    @functools.wraps(base.forward)
    def forward(self: Wrapper, *args: object, **inputs: object) -> object:
        return base.forward(self, *args, **inputs)

    @classmethod  # type: ignore[misc]
    def from_pretrained(cls: type[Wrapper], pretrained_model_name_or_path: str | Path, **options: Any) -> Wrapper:
        """Loads a wrapped model, as the auto classes do."""
        return load_wrapped(base, pretrained_model_name_or_path, **options)

    # Trainers drop data columns that are not parameters of `forward`, and `generate` refuses other inputs.
    signature = inspect.signature(base.forward)
    *parameters, rest = signature.parameters.values()
    own = [inspect.Parameter(modality, inspect.Parameter.KEYWORD_ONLY, default=None) for modality in modalities]
    forward.__signature__ = signature.replace(parameters=[*parameters, *own, rest])  # type: ignore[attr-defined]
    members = {"forward": forward, "from_pretrained": from_pretrained, "__module__": __name__, "__doc__": base.__doc__}
    return type(name, (base,), members)


def load_wrapped(
    base: type[Wrapper],
    name_or_path: str | Path,
    *,
    distributed_config: ConfigLike = None,
    tp_plan: object = None,
    tp_size: int | None = None,
    **options: Any,
) -> Wrapper:
    """Loads a model and wraps it. As transformers' models it names its checkpoint, where trainers find the tokenizer.

    Args:
        base: class of the wrapper.
        name_or_path: directory, or id of a repository on the hub ("org/name").
        distributed_config: see `wrap`. Each process reads its part of the weights.
        tp_plan: "auto" for `DistributedConfig(tp_plan="auto", tp_size=tp_size)`.
        tp_size: see `tp_plan`.
        options: see `ligerzoo.AutoModel.from_pretrained`.
    """
    if tp_plan is not None or tp_size is not None:
        if distributed_config is not None:
            where, expected = "arguments distributed_config and tp_plan or tp_size", "the former"
            raise ConfigError("given twice", where=where, expected=expected)
        distributed_config = {"tp_plan": tp_plan, "tp_size": tp_size}
    placement = Placement.of(distributed_config, **options)
    auto = _AUTO[base]
    if placement.meshes is None:
        model: Any = wrap(auto.from_pretrained(name_or_path, **options))
    else:
        parts = _Parts(placement)
        options |= {"device": placement.device, "shard": parts.distribute}
        model = parts.loaded(auto.from_pretrained(name_or_path, **options))
    model.config.name_or_path = model.name_or_path = str(name_or_path)
    return model


class _Parts:
    """A wrapped model of which each process reads its part, under the names of the model.

    Args:
        placement: the processes.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def distribute(self, model: LanguageModel) -> None:
        """Wraps and distributes a model on the meta device; its parameters become those of the wrapper."""
        self._wrapped = _wrapped(model, self._placement)
        slices = self._wrapped.backbone.names.slices(shapes_of(model.state_dict()))
        self._names = {part.name: part.stored_name for part in slices}
        state = self._wrapped.state_dict()
        model.load_state_dict({name: state[own] for name, own in self._names.items()}, assign=True)

    def loaded(self, model: LanguageModel) -> AnyWrapped:
        """Returns the wrapper with the weights that the model has loaded."""
        state = model.state_dict()
        self._wrapped.load_state_dict({own: state[name] for name, own in self._names.items()}, assign=True)
        return self._wrapped.eval()


_AUTO: Mapping[type[AnyWrapped], Any] = {
    WrappedCausalLM: ligerzoo.AutoModel,
    WrappedMaskedLM: ligerzoo.AutoModelForMaskedLM,
    WrappedSequenceClassifier: ligerzoo.AutoModelForSequenceClassification,
    WrappedTokenClassifier: ligerzoo.AutoModelForTokenClassification,
    WrappedEncoderSequenceClassifier: ligerzoo.AutoModelForSequenceClassification,
    WrappedEncoderTokenClassifier: ligerzoo.AutoModelForTokenClassification,
}
"""The class of `ligerzoo` that loads what a wrapper wraps."""

_WRAPPERS: Mapping[type[LanguageModel], type[AnyWrapped]] = {
    MaskedLM: WrappedMaskedLM,
    EncoderSequenceClassifier: WrappedEncoderSequenceClassifier,
    EncoderTokenClassifier: WrappedEncoderTokenClassifier,
    SequenceClassifier: WrappedSequenceClassifier,
    TokenClassifier: WrappedTokenClassifier,
}
"""The wrapper of models of a class and its subclasses, the first that fits; others are causal language models."""


def _wrapped(model: LanguageModel, placement: Placement) -> AnyWrapped:
    architecture = architecture_of_model(model)
    if isinstance(model, EmbeddingModel):
        what, expected = "an embedding model cannot be wrapped", "a causal LM, a masked LM, or a classifier"
        remedy = "Train it by `ligerzoo train --method contrastive`, or save it for sentence-transformers."
        raise ConfigError(what, where="wrap", got=architecture.hf_class, expected=expected, remedy=remedy)
    if isinstance(model, EncoderModel) and placement.meshes is not None:
        what, remedy = "an encoder cannot be distributed so", "Train it by `ligerzoo train --mesh`, or by accelerate."
        raise ConfigError(what, where="distributed_config", got=architecture.hf_class, expected="None", remedy=remedy)
    base = next((wrapper for cls, wrapper in _WRAPPERS.items() if isinstance(model, cls)), WrappedCausalLM)
    wrapped = _class_of(base, architecture)(model, fuses=placement.meshes is None)
    return wrapped.maybe_distribute_model(wrapped, placement.config, placement.meshes)


def _class_of(base: type[AnyWrapped], architecture: Architecture) -> type[AnyWrapped]:
    """Returns the wrapper class of an architecture, whose forward has the parameters of its inputs."""
    modalities = architecture.model_class.modalities
    if architecture.is_encoder:
        modalities = ("token_type_ids",) if hasattr(architecture.config_class, "type_vocab_size") else ()
    elif base is not WrappedCausalLM:
        modalities = ()
    return wrapper_class(base, architecture.hf_class, modalities)  # type: ignore[arg-type]


def __getattr__(name: str) -> type[AnyWrapped]:
    """Finds the wrapper classes of the zoo's architectures when they are unpickled."""
    for model_type in MODEL_CLASSES:
        architecture = architecture_of(model_type)
        models = [architecture, *(classifier_architecture(architecture, Labels(), end) for end in CLASSIFIER_SUFFIXES)]
        for found in models:
            if found.hf_class == name:
                kinds = (wrapper for cls, wrapper in _WRAPPERS.items() if issubclass(found.model_class, cls))
                return _class_of(next(kinds, WrappedCausalLM), found)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@overload
def wrap(model: CausalLM, *, distributed_config: ConfigLike = None) -> WrappedCausalLM: ...


@overload
def wrap(model: LanguageModel, *, distributed_config: ConfigLike = None) -> AnyWrapped: ...


def wrap(model: LanguageModel, *, distributed_config: ConfigLike = None) -> AnyWrapped:
    """Returns a `PreTrainedModel` around a ligerzoo model, for transformers' Trainer, TRL, PEFT, pipelines and others.

    The wrapper shares the parameters of the model, but not its modules. Where transformers fuses projections (Phi-3,
    GLM), so does the wrapper, and the model's parameters become views of the fused ones. The wrapper's class has the
    name of the architecture's class in transformers, and `config` is transformers' config. Losses and gradients are
    those of transformers' model, with these differences:

    - The embedding of the padding token is trained as any other. transformers never trains it.
    - With label smoothing, the Trainer shifts the labels of vision-language models too. For transformers' own models
      it does not, and so trains them to copy their input.
    - In training, the output has the loss but no logits, unless `logits_to_keep` asks for them.
    - Dropout is never applied, even if the config sets one.
    - Segments of packed rows (`position_ids` that start again) do not predict across their boundaries.
    - With gradient accumulation, the loss of a sequence classifier is the mean over its microbatches; that of BERT
      or of a token classifier is the mean over all labels. transformers' own BERT and classifiers add up microbatches.
    - A sequence classifier without `pad_token_id`, or that gets `inputs_embeds`, finds the last token by the padding
      mask. transformers refuses the former and ignores the mask with the latter.

    Args:
        model: a causal or masked language model of ligerzoo.models, of a subclass, or of a registered class; or a
            classifier of sequences or tokens with the decoder or encoder of one.
        distributed_config: `transformers.DistributedConfig`, or a dict of its fields: distributes the model, which all
            processes have with the same weights; needs transformers 5.21. Projections are then not fused, and keep
            ligerzoo's names. None for one process.

    Raises:
        ConfigError: the model's class is not registered, or it is not a model of ligerzoo; or it cannot be distributed
            so.
    """
    return _wrapped(model, Placement.of(distributed_config))


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
        if not model.backbone.zoo_model.modalities:
            what, remedy = "the checkpoint is of a text model", "Load it with AutoModelForCausalLM."
            got, expected = model.config.model_type, "a vision-language model"
            raise ConfigError(what, where=name_or_path, got=got, expected=expected, remedy=remedy)
        return model


class AutoModelForSequenceClassification:
    """Loads sequence classifiers and reward models with the decoder or encoder of any text architecture, wrapped."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> AnyWrapped:
        """Returns `wrap(ligerzoo.AutoModelForSequenceClassification.from_pretrained(name_or_path, **options))`.

        Its config names the checkpoint: trainers load the tokenizer from there.

        Args:
            name_or_path: directory, or id of a repository on the hub ("org/name"), of a classifier or of a causal
                language model.
            options: see `ligerzoo.AutoModelForSequenceClassification.from_pretrained`; such as `num_labels`.
        """
        return load_wrapped(WrappedSequenceClassifier, name_or_path, **options)


class AutoModelForTokenClassification:
    """Loads classifiers of tokens with the decoder or encoder of any text architecture, wrapped."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> AnyWrapped:
        """Returns `wrap(ligerzoo.AutoModelForTokenClassification.from_pretrained(name_or_path, **options))`.

        Args:
            name_or_path: see `AutoModelForSequenceClassification.from_pretrained`.
            options: see `ligerzoo.AutoModelForTokenClassification.from_pretrained`; such as `num_labels`.
        """
        return load_wrapped(WrappedTokenClassifier, name_or_path, **options)


class AutoModelForMaskedLM:
    """Loads encoders with their head for masked tokens, wrapped."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> WrappedMaskedLM:
        """Returns `wrap(ligerzoo.AutoModelForMaskedLM.from_pretrained(name_or_path, **options))`.

        Args:
            name_or_path: directory, or id of a repository on the hub ("org/name").
            options: see `ligerzoo.AutoModelForMaskedLM.from_pretrained`.
        """
        return load_wrapped(WrappedMaskedLM, name_or_path, **options)

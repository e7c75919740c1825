"""`wrap`, the classes that it makes, and auto classes that load and wrap: with the names of transformers' classes."""

from __future__ import annotations

import functools
import inspect
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast, overload

import ligerzoo
from ligerzoo.convert import MODEL_TYPES, architecture_of, architecture_of_model
from ligerzoo.convert.sequence_classifier import classifier_architecture
from ligerzoo.convert.tensor_slices import shapes_of
from ligerzoo.errors import ConfigError
from ligerzoo.integrations.transformers.causal_lm import WrappedCausalLM
from ligerzoo.integrations.transformers.distribution import ConfigLike, Placement
from ligerzoo.integrations.transformers.model import WrappedModel
from ligerzoo.integrations.transformers.sequence_classifier import WrappedSequenceClassifier
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.embedding import EmbeddingModel
from ligerzoo.models.encoder import EncoderModel
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.sequence_classifier import Labels, SequenceClassifier
from ligerzoo.models.token_classifier import TokenClassifier

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
    auto = ligerzoo.AutoModel if base is WrappedCausalLM else ligerzoo.AutoModelForSequenceClassification
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
        slices = self._wrapped.model.names.slices(shapes_of(model.state_dict()))
        self._names = {part.name: part.stored_name for part in slices}
        state = self._wrapped.state_dict()
        model.load_state_dict({name: state[own] for name, own in self._names.items()}, assign=True)

    def loaded(self, model: LanguageModel) -> AnyWrapped:
        """Returns the wrapper with the weights that the model has loaded."""
        state = model.state_dict()
        self._wrapped.load_state_dict({own: state[name] for name, own in self._names.items()}, assign=True)
        return self._wrapped.eval()


def _wrapped(model: LanguageModel, placement: Placement) -> AnyWrapped:
    name = architecture_of_model(model).hf_class
    wrapper: type[AnyWrapped]
    match model:
        case EncoderModel() | TokenClassifier() | EmbeddingModel():
            what = "encoders and token classifiers cannot be wrapped, nor embedding models"
            expected = "a causal LM, or its classifier"
            remedy = "Train it in a loop of your own, or transformers' model with ligerzoo.integrations.kernels.apply."
            raise ConfigError(what, where="wrap", got=name, expected=expected, remedy=remedy)
        case SequenceClassifier():
            wrapper = wrapper_class(WrappedSequenceClassifier, name, ())
        case _:
            wrapper = wrapper_class(WrappedCausalLM, name, type(model).modalities)
    wrapped = wrapper(model, fuses=placement.meshes is None)
    return wrapper.maybe_distribute_model(wrapped, placement.config, placement.meshes)


def __getattr__(name: str) -> type[AnyWrapped]:
    """Finds the wrapper classes of the zoo's architectures when they are unpickled."""
    for model_type in MODEL_TYPES:
        architecture = architecture_of(model_type)
        if architecture.hf_class == name:
            return wrapper_class(WrappedCausalLM, name, architecture.model_class.modalities)
        if classifier_architecture(architecture, Labels()).hf_class == name:
            return wrapper_class(WrappedSequenceClassifier, name, ())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@overload
def wrap(model: CausalLM, *, distributed_config: ConfigLike = None) -> WrappedCausalLM: ...


@overload
def wrap(model: SequenceClassifier, *, distributed_config: ConfigLike = None) -> WrappedSequenceClassifier: ...


def wrap(
    model: CausalLM | SequenceClassifier, *, distributed_config: ConfigLike = None
) -> WrappedCausalLM | WrappedSequenceClassifier:
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
    - With gradient accumulation, the loss of a sequence classifier is the mean over its microbatches. transformers'
      own classifiers add them up.
    - A sequence classifier without `pad_token_id`, or that gets `inputs_embeds`, finds the last token by the padding
      mask. transformers refuses the former and ignores the mask with the latter.

    Args:
        model: a model of ligerzoo.models, of a subclass, or of a registered class; or a sequence classifier with the
            decoder of one.
        distributed_config: `transformers.DistributedConfig`, or a dict of its fields: distributes the model, which all
            processes have with the same weights; needs transformers 5.21. Projections are then not fused, and keep
            ligerzoo's names. None for one process.

    Raises:
        ConfigError: the model's class is not registered, or it is not a model of ligerzoo; or it cannot be distributed
            so.
    """
    wrapped = _wrapped(model, Placement.of(distributed_config))
    return cast(WrappedCausalLM | WrappedSequenceClassifier, wrapped)


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
            what, remedy = "the checkpoint is of a text model", "Load it with AutoModelForCausalLM."
            got, expected = model.config.model_type, "a vision-language model"
            raise ConfigError(what, where=name_or_path, got=got, expected=expected, remedy=remedy)
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

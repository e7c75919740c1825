"""Converters between Hugging Face checkpoints and our models: config.json to our configs, stored tensors to ours.

Only this package knows the names that other libraries use.
"""

import dataclasses
import inspect
from functools import partial
from importlib import import_module

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.families import FAMILIES
from ligerzoo.convert.layout import Rule
from ligerzoo.convert.sequence_classifier import classifier_architecture
from ligerzoo.errors import ConfigError
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import REQUIRED_FIELDS
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.registry import ALIASES, ARCHITECTURES
from ligerzoo.models.sequence_classifier import SequenceClassifier

MODEL_TYPES = tuple(ARCHITECTURES)
"""Every `model_type` of the zoo. Each is in `families`, or has a module of this name here, imported when needed."""

_REGISTERED: dict[str, Architecture] = {}
"""Architectures of users' own classes, by `model_type`."""


def architecture_of(model_type: object) -> Architecture:
    """Returns the architecture that config.json's `model_type` names.

    Raises:
        ConfigError: No architecture has this name.
    """
    if isinstance(model_type, str):
        if model_type in _REGISTERED:
            return _REGISTERED[model_type]
        model_type = ALIASES.get(model_type, model_type)
        if model_type in FAMILIES:
            return FAMILIES[model_type]
    if model_type not in MODEL_TYPES:
        what = "no such architecture"
        expected = " or ".join((*MODEL_TYPES, *_REGISTERED))
        remedy = "If it is a class of your own, call AutoModel.register first."
        raise ConfigError(what, where="model_type", got=repr(model_type), expected=expected, remedy=remedy)
    architecture: Architecture = import_module(f"{__name__}.{model_type}").ARCHITECTURE
    return architecture


def architecture_of_model(model: LanguageModel) -> Architecture:
    """Returns the architecture of a model.

    Raises:
        ConfigError: Its class, or the config class of a sequence classifier, is neither registered nor part of
            ligerzoo.models; or it is not a model of ligerzoo.
    """
    if not isinstance(model, LanguageModel):
        what = "not a model of ligerzoo"
        expected = "a model that AutoModel.from_pretrained or AutoModel.from_config returns"
        remedy = "ligerzoo.from_transformers converts models of transformers."
        raise ConfigError(what, where="model", got=type(model).__name__, expected=expected, remedy=remedy)
    if isinstance(model, SequenceClassifier):
        return classifier_architecture(architecture_for_config(type(model.config)), model.labels)
    return architecture_for(type(model))


def architecture_for(model_class: type) -> Architecture:
    """Returns the architecture of a model class, or of the nearest base class that has one.

    Raises:
        ConfigError: Neither the class nor a base class is registered or part of ligerzoo.models.
    """
    for base in model_class.__mro__:
        if architecture := _find("model_class", base):
            return architecture
    what = "the class is not registered, so it cannot be saved or loaded"
    expected = "a class of ligerzoo.models, a subclass of one, or a registered class"
    remedy = f'Call AutoModel.register(<config class>, {model_class.__name__}, model_type="...").'
    raise ConfigError(what, where=model_class.__name__, expected=expected, remedy=remedy)


def architecture_for_config(config_class: type) -> Architecture:
    """Returns the architecture of a config class.

    Raises:
        ConfigError: The class is neither registered nor part of ligerzoo.models.
    """
    if architecture := _find("config_class", config_class):
        return architecture
    what = "no model class is known for this config class"
    expected = "the config class of a model in ligerzoo.models, or a registered one"
    remedy = f'Call AutoModel.register({config_class.__name__}, <model class>, model_type="...").'
    raise ConfigError(what, where=config_class.__name__, expected=expected, remedy=remedy)


def _find(attribute: str, cls: type) -> Architecture | None:
    """Returns the architecture whose `model_class` or `config_class` is this class, importing only its converter."""
    package, _, module = cls.__module__.rpartition(".")
    own = [architecture_of(module)] if package == "ligerzoo.models" and module in MODEL_TYPES else []
    return next((found for found in (*_REGISTERED.values(), *own) if getattr(found, attribute) is cls), None)


def register_architecture(
    config_class: type, model_class: type[CausalLM], model_type: str, *, layout: tuple[Rule, ...] = ()
) -> None:
    """Adds an architecture for a user's own classes, see `ligerzoo.AutoModel.register`."""
    _check_order(config_class, model_class, model_type)
    if not _is_model_class(model_class):
        raise ConfigError("not a model class", where="model_class", got=model_class, expected="a subclass of CausalLM")
    _check_config_class(config_class)
    if not isinstance(layout, tuple | list) or not all(_is_rule(rule) for rule in layout):
        expected = "a tuple of Rename, Fused, FusedByHead, PerExpert and ModuleRules from ligerzoo.convert.layout"
        raise ConfigError("not a tuple of rules", where="layout", got=repr(layout), expected=expected)
    _check_unused(config_class, model_class, model_type)
    base = next((found for cls in model_class.__mro__[1:] if (found := _find("model_class", cls))), None)
    classes: tuple[type[CausalLM], type] = (model_class, config_class)
    own = Architecture(model_type, model_class.__name__, classes=classes)
    if base is not None and issubclass(config_class, base.config_class):
        own = dataclasses.replace(base, model_type=model_type, hf_class=own.hf_class, classes=classes)
    if layout:
        inherited, give = own.layouts, partial(dataclasses.replace, rules=tuple(layout), is_own=True)
        own = dataclasses.replace(own, layouts=lambda config: tuple(dict.fromkeys(map(give, inherited(config)))))
    _REGISTERED[model_type] = own


def _check_order(*arguments: object) -> None:
    """Raises ConfigError if the arguments of `register` are all valid, but in another order."""

    def kind(value: object) -> str | None:
        if _is_model_class(value):
            return "model_class"
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            return "config_class"
        return "model_type" if isinstance(value, str) else None

    expected, got = ("config_class", "model_class", "model_type"), tuple(map(kind, arguments))
    if got != expected and {*got} == {*expected}:
        by_kind = dict(zip(got, arguments, strict=True))
        config_class, model_class, model_type = (
            getattr(by_kind[name], "__name__", repr(by_kind[name])) for name in expected
        )
        what = "the arguments are in another order"
        where = "AutoModel.register"
        remedy = f"Call AutoModel.register({config_class}, {model_class}, model_type={model_type})."
        raise ConfigError(what, where=where, got=", ".join(map(str, got)), expected=", ".join(expected), remedy=remedy)


def _is_model_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, CausalLM)


def _is_rule(value: object) -> bool:
    return isinstance(value, Rule) and not isinstance(value, type)


def _check_config_class(config_class: object) -> None:
    remedy = "Decorate the class with @dataclass(frozen=True, kw_only=True)."
    if not (
        isinstance(config_class, type)
        and dataclasses.is_dataclass(config_class)
        and config_class.__dataclass_params__.frozen  # type: ignore[attr-defined]
    ):
        expected = "a frozen dataclass"
        raise ConfigError(
            "not a config class", where="config_class", got=config_class, expected=expected, remedy=remedy
        )
    names = {field.name for field in dataclasses.fields(config_class)}
    forgotten = [name for name in inspect.get_annotations(config_class) if name not in names]
    missing = [name for name in REQUIRED_FIELDS if name not in names and not hasattr(config_class, name)]
    where = f"config_class {config_class.__name__}"
    if forgotten:
        raise ConfigError("attributes are not fields", where=where, got=", ".join(forgotten), remedy=remedy)
    if missing:
        remedy = "Extend ligerzoo.models.config.DecoderConfig, or add them."
        raise ConfigError("fields are missing", where=where, got=f"no {', '.join(missing)}", remedy=remedy)


def _check_unused(config_class: type, model_class: type, model_type: object) -> None:
    """Raises ConfigError if the name or a class is in use already.

    A class that is defined again under the same name replaces the earlier one: running a notebook's cell twice does so.
    """
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError("not a name", where="model_type", got=repr(model_type), expected="a non-empty string")
    if model_type in MODEL_TYPES or model_type in ALIASES:
        what = "the name belongs to an architecture of ligerzoo.models"
        raise ConfigError(what, where="model_type", got=repr(model_type), remedy="Choose another name.")
    registered = _REGISTERED.get(model_type)
    for attribute, cls in (("model_class", model_class), ("config_class", config_class)):
        previous = getattr(registered, attribute, cls)
        if (previous.__module__, previous.__qualname__) != (cls.__module__, cls.__qualname__):
            what, remedy = f"model_type {model_type!r} is registered with another class", "Choose another name."
            got, expected = cls.__qualname__, previous.__qualname__
            raise ConfigError(what, where=attribute, got=got, expected=expected, remedy=remedy)
        owner = _find(attribute, cls)
        if owner and owner is not registered:
            what = f"the class belongs to model_type {owner.model_type!r}"
            raise ConfigError(what, where=attribute, got=cls.__qualname__, remedy="Register a subclass.")

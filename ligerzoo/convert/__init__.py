"""Converters between Hugging Face checkpoints and our models: config.json to our configs, stored tensors to ours.

Only this package knows the names that other libraries use.
"""

import dataclasses
from functools import partial
from importlib import import_module

from ligerzoo.checks import is_text
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.families import FAMILIES
from ligerzoo.convert.layout import Rule
from ligerzoo.convert.registration import check_arguments, check_unused
from ligerzoo.convert.tasks import task_of
from ligerzoo.entries import Entries
from ligerzoo.errors import ConfigError, did_you_mean
from ligerzoo.files.modules import ModuleFiles
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.registry import ALIASES, ARCHITECTURES, ENCODERS, MODEL_CLASSES, module_of

MODEL_TYPES = tuple(ARCHITECTURES)
"""Every `model_type` of the zoo but encoders'. Each is in `families`, or has a module here, imported when needed."""

OTHER_ARCHITECTURE = "the checkpoint has another architecture"
"""The problem of a checkpoint that is not of the class that loads it."""

_REGISTERED: dict[str, Architecture] = {}
"""Architectures of users' own classes, by `model_type`."""


def architecture_of(model_type: object) -> Architecture:
    """Returns the architecture that config.json's `model_type` names.

    Raises:
        ConfigError: No architecture has this name.
    """
    if is_text(model_type):
        if model_type in _REGISTERED:
            return _REGISTERED[model_type]
        model_type = ALIASES.get(model_type, model_type)
        if model_type in FAMILIES:
            return FAMILIES[model_type]
    if model_type not in tuple(MODEL_CLASSES):  # which may not be hashable
        accepted = (*MODEL_CLASSES, *_REGISTERED)
        own = "a class of your own after AutoModel.register, which a file of --import may call"
        expected = f"one of {len(accepted)} types, such as 'llama', or {own}"
        remedy = did_you_mean(model_type, accepted) or "docs/architectures.md has all types."
        raise ConfigError(
            "no such architecture", where="model_type", got=repr(model_type), expected=expected, remedy=remedy
        )
    architecture: Architecture = import_module(f"{__name__}.{module_of(model_type)}").ARCHITECTURE
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
    derive = task_of(type(model)).derive
    if derive is None:
        return architecture_for(type(model))
    return derive(architecture_for_config(type(model.config)), model)


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
    if config_class.__module__.startswith("transformers."):
        remedy = "Convert a model of transformers by ligerzoo.from_transformers(model)."
    raise ConfigError(what, where=config_class.__name__, expected=expected, remedy=remedy)


def _find(attribute: str, cls: type) -> Architecture | None:
    """Returns the architecture whose `model_class` or `config_class` is this class, importing only its converter."""
    package, _, module = cls.__module__.rpartition(".")
    types = MODEL_CLASSES if package == "ligerzoo.models" else ()
    own = [architecture_of(model_type) for model_type in types if module_of(model_type) == module]
    return next((found for found in (*_REGISTERED.values(), *own) if getattr(found, attribute) is cls), None)


def architecture_to_load(
    raw: Entries, model_class: type[LanguageModel], options: Entries, files: ModuleFiles
) -> tuple[Architecture, type]:
    """Returns the architecture of a checkpoint, and the class of its config.

    The latter is the architecture's, or that of a registered subclass of its model class.

    Args:
        raw: config.json.
        model_class: expected class of the model, or a subclass of the user.
        options: arguments of the user, of which a task reads its own.
        files: the files of sentence-transformers, which an embedding model reads.

    Raises:
        ConfigError: No architecture has the name in config.json, or `model_class` is unrelated to it.
    """
    architecture = task_of(model_class).read(architecture_of(raw.get("model_type")), raw, options, files)
    if issubclass(architecture.model_class, model_class):
        return architecture, architecture.config_class
    if issubclass(model_class, architecture.model_class):
        config_class = architecture_for(model_class).config_class
        if issubclass(config_class, architecture.config_class):
            return architecture, config_class
    what, got = OTHER_ARCHITECTURE, repr(architecture.model_type)
    loaders = (f"{name}.from_pretrained" for name in (architecture.model_class.__name__, auto_class(architecture)))
    remedy = f"Load it with {' or '.join(loaders)}."
    raise ConfigError(what, where="model_type", got=got, expected=model_class.__name__, remedy=remedy)


def auto_class(architecture: Architecture) -> str:
    """Returns the name of the class of `ligerzoo` that loads and builds models of an architecture."""
    return "AutoModelForMaskedLM" if architecture.model_type in ENCODERS else "AutoModel"


def register_architecture(
    config_class: type, model_class: type[CausalLM], model_type: str, *, layout: tuple[Rule, ...] = ()
) -> None:
    """Adds an architecture for a user's own classes, see `ligerzoo.AutoModel.register`."""
    check_arguments(config_class, model_class, model_type, layout)
    registered = _REGISTERED.get(model_type)
    for attribute, cls in (("model_class", model_class), ("config_class", config_class)):
        check_unused(attribute, cls, registered, owner=_find(attribute, cls))
    base = next((found for cls in model_class.__mro__[1:] if (found := _find("model_class", cls))), None)
    classes: tuple[type[CausalLM], type] = (model_class, config_class)
    own = Architecture(model_type, model_class.__name__, classes=classes)
    if base is not None and issubclass(config_class, base.config_class):
        own = dataclasses.replace(
            base,
            model_type=model_type,
            class_name=own.class_name,
            accepted=base.accepted_entries,
            classes=classes,
        )
    if layout:
        inherited, give = own.layouts, partial(dataclasses.replace, rules=tuple(layout), is_own=True)
        own = dataclasses.replace(own, layouts=lambda config: tuple(dict.fromkeys(map(give, inherited(config)))))
    _REGISTERED[model_type] = own

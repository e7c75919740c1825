"""Checks of the arguments of `ligerzoo.AutoModel.register`."""

import dataclasses
import inspect

from ligerzoo.checks import TEXT, is_list, is_text
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.layout import Rule
from ligerzoo.errors import ConfigError
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import REQUIRED_FIELDS
from ligerzoo.models.registry import ALIASES, MODEL_CLASSES


def check_arguments(config_class: object, model_class: object, model_type: object, layout: object) -> None:
    """Raises ConfigError unless the arguments are a config class, a model class, a new name and rules."""
    _check_order(config_class, model_class, model_type)
    if not _is_model_class(model_class):
        raise ConfigError("not a model class", where="model_class", got=model_class, expected="a subclass of CausalLM")
    _check_config_class(config_class)
    if not is_list(layout) or not all(isinstance(rule, Rule) for rule in layout):
        expected = "a tuple of Rename, Fused, FusedByHead, PerExpert and ModuleRules from ligerzoo.convert.layout"
        raise ConfigError("not a tuple of rules", where="layout", got=repr(layout), expected=expected)
    if not TEXT.accepts(model_type):
        raise ConfigError("not a name", where="model_type", got=repr(model_type), expected="a non-empty string")
    if model_type in MODEL_CLASSES or model_type in ALIASES:
        what = "the name belongs to an architecture of ligerzoo.models"
        raise ConfigError(what, where="model_type", got=repr(model_type), remedy="Choose another name.")


def _check_order(*arguments: object) -> None:
    """Raises ConfigError if the arguments of `register` are all valid, but in another order."""

    def kind(value: object) -> str | None:
        if _is_model_class(value):
            return "model_class"
        if inspect.isclass(value) and dataclasses.is_dataclass(value):
            return "config_class"
        return "model_type" if is_text(value) else None

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
    return inspect.isclass(value) and issubclass(value, CausalLM)


def _check_config_class(config_class: object) -> None:
    remedy = "Decorate the class with @dataclass(frozen=True, kw_only=True)."
    if not (
        inspect.isclass(config_class)
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


def check_unused(attribute: str, cls: type, registered: Architecture | None, owner: Architecture | None) -> None:
    """Raises ConfigError if a class or the name is in use already.

    A class that is defined again under the same name replaces the earlier one: running a notebook's cell twice does so.

    Args:
        attribute: "model_class" or "config_class".
        cls: the class.
        registered: the architecture that is registered under the name.
        owner: the architecture that has the class.
    """
    previous = getattr(registered, attribute, cls)
    if (previous.__module__, previous.__qualname__) != (cls.__module__, cls.__qualname__):
        assert registered is not None
        what, remedy = f"model_type {registered.model_type!r} is registered with another class", "Choose another name."
        got, expected = cls.__qualname__, previous.__qualname__
        raise ConfigError(what, where=attribute, got=got, expected=expected, remedy=remedy)
    if owner and owner is not registered:
        what = f"the class belongs to model_type {owner.model_type!r}"
        raise ConfigError(what, where=attribute, got=cls.__qualname__, remedy="Register a subclass.")

"""Typed reading of untrusted JSON: config.json, adapter_config.json, indices of weights, files of tokenizers.

    BOOLEAN.read(value, where)         # the value, as a bool
    BOOLEAN.entry(raw, "use_dora")     # the same of an entry; None if it is absent or null

Every other value is an error of one form, with the entry, the value and what is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar, cast

from ligerzoo.checks import FLAG, Values, is_integer, is_number, is_text
from ligerzoo.errors import ConfigError, LigerzooError, quote

T = TypeVar("T")

Entries = Mapping[str, object]
"""Entries of a JSON object, or values of config fields, by name."""


def shown(value: object) -> str:
    """Returns a value from a file for a message: escaped and shortened."""
    return quote(value) if is_text(value) else repr(value)[:200]


class JsonType(Values, Generic[T]):
    """Values that an entry may have, which are read from it: an error names the file."""

    def read(self, value: object, where: object) -> T:
        """Returns the value. Raises ConfigError, which names the file and entry in `where`, unless it is accepted."""
        return Reader(ConfigError, shown, self.problem).read(self, value, where)

    def entry(self, raw: Entries, name: str) -> T | None:
        """Returns an entry, or None if it is absent or null. Raises ConfigError unless it is accepted."""
        value = raw.get(name)
        return None if value is None else self.read(value, name)


class Reader(NamedTuple):
    """How values of another type are refused, where not as entries of a config.

    Attributes:
        error: what is raised.
        show: returns a value for the message.
        problem: what is wrong with the value.
    """

    error: type[LigerzooError]
    show: Callable[[object], str] = quote
    problem: str = "wrong type"

    def read(self, kind: JsonType[T], value: object, where: object) -> T:
        """Returns the value. Raises the error unless it is accepted."""
        if not kind.accepts(value):
            raise self.error(self.problem, where=where, got=self.show(value), expected=kind.expected)
        return cast("T", value)


def is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Returns whether a value is an object of JSON."""
    return isinstance(value, Mapping)


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Returns whether a value is an array of JSON."""
    return isinstance(value, list)


def list_of(items: JsonType[T], expected: str, problem: str = "invalid value") -> JsonType[list[T]]:
    """Lists of values."""
    return JsonType(expected, is_array, lambda value: all(map(items.accepts, value)), problem=problem)


BOOLEAN = JsonType[bool]("true or false", FLAG.has_type)
NUMBER = JsonType[float]("a number", is_number)
INTEGER = JsonType[int]("an integer", is_integer)
STRING = JsonType[str]("a string", is_text)
NAME = JsonType[str]("a name", is_text, bool)
LIST = JsonType[list[object]]("a list", is_array)
OBJECT = JsonType[Entries]("an object", is_object, problem="not an object")


def object_entry(raw: Entries, name: str) -> Entries:
    """Returns an entry that must be an object; an empty one if it is absent or null."""
    return OBJECT.entry(raw, name) or {}


def flag_entry(raw: Entries, name: str) -> bool:
    """Returns an entry that must be true or false; False if it is absent or null."""
    return BOOLEAN.entry(raw, name) or False


def is_one_of(value: object, accepted: Iterable[object]) -> bool:
    """Returns whether JSON writes a value like an accepted one: 1 is not true, and 128.0 is not 128."""
    return any(type(value) is type(other) and repr(value) == repr(other) for other in accepted)


def check_one_of(value: object, accepted: Iterable[object], where: object, remedy: str | None = None) -> None:
    """Raises ConfigError unless a value `is_one_of` the accepted ones."""
    if not is_one_of(value, accepted):
        expected = " or ".join(map(repr, accepted))
        raise ConfigError("not supported", where=where, got=shown(value), expected=expected, remedy=remedy)

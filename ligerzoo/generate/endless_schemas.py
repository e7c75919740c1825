"""JSON schemas that no text matches, because a definition refers to itself without end.

llguidance accepts them, and offers no token when it comes to the definition. A part of a schema has texts if all of its
needs have some; a part that needs itself never has. So a part is found to have texts after all of its needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote

from ligerzoo.checks import is_integer, is_text
from ligerzoo.entries import Entries, is_array, is_object
from ligerzoo.errors import LigerzooError

Pointer = tuple[str, ...]
"""The keys from a schema to a part of it."""

_SINGLE = ("additionalProperties", "items")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties")


class _Need(NamedTuple):
    """What a part needs: one of several parts that has texts."""

    pointer: Pointer
    number: int


def refuse_endless(schema: Entries, where: object) -> None:
    """Raises LigerzooError if a part of the schema refers to itself without end.

    Args:
        schema: the JSON schema.
        where: its name, for the message.
    """
    found: dict[Pointer, Entries] = {(): schema}
    pending, have_texts = list[Pointer]([()]), list[Pointer]()
    users, unmet = defaultdict[Pointer, list[_Need]](list), dict[Pointer, set[int]]()
    targets = list[Pointer]()
    while pending:
        part = found[pointer := pending.pop()]
        needs = list(_needs(part, pointer, schema))
        unmet[pointer] = {*range(len(needs))}
        have_texts += [] if needs else [pointer]
        for number, choices in enumerate(needs):
            for choice in choices:
                users[choice].append(_Need(pointer, number))
        parts = list(_parts(part, pointer))
        if (target := _target(part, schema)) is not None:
            targets.append(target)
            parts.append((target, _value(schema, target)))
        for one, value in parts:
            if one not in found and is_object(value):
                found[one] = value
                pending.append(one)
    while have_texts:
        for user, number in users[have_texts.pop()]:
            if number in unmet[user]:
                unmet[user].remove(number)
                have_texts += [] if unmet[user] else [user]
    endless = next((pointer for pointer in targets if unmet[pointer]), None)
    if endless is not None:
        got = f"{_written(endless)}, which refers to itself without end"
        raise LigerzooError("no text can end", where=where, got=got, expected="a definition that may end")


def _needs(part: Entries, pointer: Pointer, schema: Entries) -> Iterator[list[Pointer]]:
    """Yields what each text of a part needs: of each list, a part that has texts."""
    if "enum" in part or "const" in part:
        return
    target = _target(part, schema)
    if target is not None:
        yield [target]
    for name in ("anyOf", "oneOf", "allOf"):
        if is_array(members := part.get(name)) and members:
            choices = [(*pointer, name, str(index)) for index in range(len(members))]
            if all(map(is_object, members)):
                yield from [choices] if name != "allOf" else ([one] for one in choices)
    if part.get("type") in ("object", ["object"]):
        yield from _needs_of_object(part, pointer)
    if part.get("type") in ("array", ["array"]):
        yield from _needs_of_array(part, pointer)


def _needs_of_object(part: Entries, pointer: Pointer) -> Iterator[list[Pointer]]:
    properties, required = part.get("properties"), part.get("required")
    for name in filter(is_text, required if is_array(required) else ()):
        if is_object(properties) and name in properties:
            if is_object(properties[name]):
                yield [(*pointer, "properties", name)]
        elif is_object(part.get("additionalProperties")) and not part.get("patternProperties"):
            yield [(*pointer, "additionalProperties")]


def _needs_of_array(part: Entries, pointer: Pointer) -> Iterator[list[Pointer]]:
    least, first = part.get("minItems"), part.get("prefixItems")
    count, prefix = least if is_integer(least) else 0, first if is_array(first) else []
    for index, item in enumerate(prefix[:count]):
        if is_object(item):
            yield [(*pointer, "prefixItems", str(index))]
    if count > len(prefix) and is_object(part.get("items")):
        yield [(*pointer, "items")]


def _parts(part: Entries, pointer: Pointer) -> Iterator[tuple[Pointer, object]]:
    """Yields the parts of a part, each with its pointer."""
    for name in _SINGLE:
        yield (*pointer, name), part.get(name)
    for name in _LISTS:
        if is_array(members := part.get(name)):
            yield from (((*pointer, name, str(index)), member) for index, member in enumerate(members))
    for name in _MAPS:
        if is_object(members := part.get(name)):
            yield from (((*pointer, name, str(key)), member) for key, member in members.items())


def _target(part: Entries, schema: Entries) -> Pointer | None:
    """Returns the part to which `$ref` refers; None if there is no object."""
    reference = part.get("$ref")
    if not is_text(reference) or not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    keys = tuple(key.replace("~1", "/").replace("~0", "~") for key in unquote(reference).split("/")[1:])
    return keys if is_object(_value(schema, keys)) else None


def _value(schema: object, pointer: Pointer) -> object:
    """Returns what a schema has at a pointer; None for nothing."""
    for key in pointer:
        if is_array(schema) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        elif is_object(schema):
            schema = schema.get(key)
        else:
            return None
    return schema


def _written(pointer: Pointer) -> str:
    return "#" + "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in pointer)

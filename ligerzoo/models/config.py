"""The checks that every architecture's config has in common."""

from __future__ import annotations

import sys
from types import NoneType
from typing import Any, get_args, get_type_hints

from ligerzoo.errors import ConfigError

_LARGEST_SIZE = 2**31 - 1


def check_fields(config: Any) -> None:
    """Raises ConfigError unless every field of a config dataclass holds what its annotation and name say.

    A whole number is a size, from 1 to 2^31 - 1, unless its name ends in `_token_id`; a float is finite and not
    negative (and may be given as a whole number); None is allowed where the annotation says so.
    """
    for name, hint in get_type_hints(type(config)).items():
        value, kinds = getattr(config, name), get_args(hint) or (hint,)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None and NoneType in kinds:
            continue
        if name.endswith("_token_id"):
            ids = value if isinstance(value, list) and len(kinds) > 2 else [value]
            right, expected = (
                all(type(i) is int and abs(i) <= _LARGEST_SIZE for i in ids),
                "a token id" + (" or a list of them" if len(kinds) > 2 else ""),
            )
        elif bool in kinds:
            right, expected = isinstance(value, bool), "true or false"
        elif int in kinds:
            right, expected = type(value) is int and 1 <= value <= _LARGEST_SIZE, "a positive whole number"
        elif float in kinds:
            right, expected = number and 0 <= value <= sys.float_info.max, "a finite number that is not negative"
        else:
            continue  # a structured field is checked by the part that reads it
        if not right:
            raise ConfigError("not a possible value", where=name, got=repr(value), expected=expected)

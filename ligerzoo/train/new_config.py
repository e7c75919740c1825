"""Makes the config.json of a new model, to pretrain it from random weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligerzoo.convert import architecture_of
from ligerzoo.convert.fields import convert_overrides
from ligerzoo.errors import ConfigError, first_names, unknown_names
from ligerzoo.files.atomic import replace_files
from ligerzoo.text.tokenizer import Tokenizer

CONFIG_FILE = "config.json"


def new_config(model_type: str, tokenizer: Tokenizer, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of config.json for a new model with the vocabulary of a tokenizer.

    Args:
        model_type: an architecture, such as "llama".
        tokenizer: gives `vocab_size` and the ids of the beginning, end-of-sequence and padding tokens.
        fields: other fields of the architecture's config, such as `{"hidden_size": 256}`. The rest have the defaults of
            the config class, which are those of a large model.

    Raises:
        ConfigError: the architecture or a field does not exist, a value is invalid, or `vocab_size` is less than the
            tokenizer has tokens.
    """
    architecture = architecture_of(model_type)
    config_class = architecture.config_class
    names = [field.name for field in dataclasses.fields(config_class)]
    for name, nearest in unknown_names(fields, names):
        expected = f"a field of {config_class.__name__}: {first_names(names, 50)}"
        raise ConfigError("unknown field", where=name, expected=expected, remedy=nearest)
    ids = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    values = {**{name: value for name, value in ids.items() if name in names}, **fields}
    if values.get("vocab_size", len(tokenizer)) < len(tokenizer):
        what = "the tokenizer has more tokens"
        raise ConfigError(what, where="vocab_size", got=values["vocab_size"], expected=f"at least {len(tokenizer)}")
    config = config_class(**convert_overrides(values, config_class))
    return {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        **architecture.config_to_hf(config),
    }


def write_config(directory: str | Path, config: Mapping[str, Any]) -> None:
    """Writes config.json, in one step."""
    replace_files(Path(directory), {CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode()}, [CONFIG_FILE])


def parse_field(text: str) -> tuple[str, Any]:
    """Parses `NAME=VALUE`; a value that is not JSON is a string.

    Raises:
        ConfigError: there is no name or no value.
    """
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ConfigError("not a field", where="FIELD", got=repr(text), expected="NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value

"""The tiny checkpoints of every architecture that the installed transformers has."""

from importlib import import_module

import pytest
from transformers import CONFIG_MAPPING, __version__

from ligerzoo.convert import MODEL_TYPES, architecture_of
from tests.models.tiny import Tiny

COMPARED_TYPES = [model_type for model_type in MODEL_TYPES if model_type in CONFIG_MAPPING]

_ELSEWHERE = pytest.mark.skip(reason=f"not in transformers {__version__}")
every_type = pytest.mark.parametrize(
    "model_type",
    [name if name in COMPARED_TYPES else pytest.param(name, marks=_ELSEWHERE) for name in MODEL_TYPES],
)
"""Parametrizes a test that compares each architecture with transformers."""

CHECKPOINTS: list[Tiny] = [
    row for model_type in COMPARED_TYPES for row in import_module(f"tests.models.tiny_{model_type}").CHECKPOINTS
]

TEXT_CHECKPOINTS = [row for row in CHECKPOINTS if "vision_config" not in row.config]


def model_of(row: Tiny) -> tuple[object, ...]:
    """Returns what the model loaded from a checkpoint depends on, except the values of its weights."""
    config = architecture_of(row.config["model_type"]).config_from_hf({**row.config, **row.corrected})
    return type(config), repr(config), row.tokens

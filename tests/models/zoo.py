"""The tiny checkpoints of every architecture."""

from importlib import import_module

from ligerzoo.convert import MODEL_TYPES
from tests.models.tiny import Tiny

CHECKPOINTS: list[Tiny] = [
    row for model_type in MODEL_TYPES for row in import_module(f"tests.models.tiny_{model_type}").CHECKPOINTS
]

TEXT_CHECKPOINTS = [row for row in CHECKPOINTS if "vision_config" not in row.config]

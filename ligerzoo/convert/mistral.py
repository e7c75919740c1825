"""Converter for Mistral checkpoints. Tensor names match ours.

A missing `sliding_window` means 4096; null means full attention. `layer_types` selects the window per layer, as in
Ministral; so does transformers' AutoConfig. A `layer_types` of None is not written.
"""

from __future__ import annotations

from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.mistral import Mistral, MistralConfig


def write_entries(config: MistralConfig, entries: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json from those named like the fields of the config."""
    return {name: value for name, value in entries.items() if name != "layer_types" or value is not None}


ARCHITECTURE = Architecture("mistral", "MistralForCausalLM", Mistral, MistralConfig, write_entries=write_entries)

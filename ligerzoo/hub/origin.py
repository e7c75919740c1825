"""`Origin`: what a model remembers of the checkpoint that it was loaded from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.layout import Layout


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model was loaded from. Saving uses it to write the same names and entries again.

    Attributes:
        raw_config: content of config.json.
        config: our config as read from it; None if `from_pretrained` changed some fields.
        layout: names and shapes of the stored tensors.
        tied: the parameter that the files omit because it is tied to a stored one; empty if they store both.
        extra_tensors: tensors that are not part of the model but are saved again, such as rotary frequencies.
        missing: names of the parameters that the files lack, after `strict=False`. They keep their initialization.
        unexpected: names of the stored tensors that the model lacks, after `strict=False`. They are left out.
    """

    raw_config: Mapping[str, Any]
    config: Any
    layout: Layout
    tied: frozenset[str]
    extra_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def is_of(origin: Origin | None, architecture: Architecture) -> bool:
    """Returns whether a model was loaded from a checkpoint of the same architecture."""
    return origin is not None and architecture.describes(origin.raw_config)

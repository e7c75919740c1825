"""The stages of a normalizer, pre-tokenizer, post-processor or decoder, as tokenizer.json writes them."""

import json
from collections.abc import Mapping
from typing import Any

Stage = Mapping[str, Any]

_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
"""The entry of a sequence that has its stages."""


def stages_of(section: Stage | None) -> list[Stage]:
    """Returns the stages of a section of tokenizer.json, with those of nested sequences."""
    if section is None:
        return []
    if section["type"] != "Sequence":
        return [section]
    return [stage for name in _LISTS for inner in section.get(name, ()) for stage in stages_of(inner)]


def stages_of_component(component: Any) -> list[Stage]:
    """Returns the stages of a component of a tokenizer of the tokenizers library; none of None."""
    return [] if component is None else stages_of(json.loads(component.__getstate__()))

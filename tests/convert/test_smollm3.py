"""Tests of config.json for SmolLM3: layers with a rotary embedding, and with a sliding window."""

from typing import Any

import pytest

from ligerzoo.convert import architecture_of
from ligerzoo.errors import ConfigError
from tests.models.tiny_smollm3 import SMOLLM3


@pytest.mark.parametrize(
    "entries, rotates",
    [
        ({"no_rope_layers": [0, 1, 0, 1]}, [False, True, False, True]),
        ({"no_rope_layers": [1, 1, 0, 1, 0, 0]}, [True, True, False, True]),
        ({"no_rope_layers": None}, [True, True, True, False]),
        ({"no_rope_layers": None, "no_rope_layer_interval": 3}, [True, True, False, True]),
        ({"no_rope_layers": None, "no_rope_layer_interval": 1}, [False] * 4),
        ({"no_rope_layers": [1, 0, 1, 1], "no_rope_layer_interval": 1}, [True, False, True, True]),
    ],
)
def test_layers_with_and_without_rotary_embedding(entries: dict[str, Any], rotates: list[bool]) -> None:
    config = architecture_of("smollm3").config_from_hf({**SMOLLM3, **entries, "layer_types": None, "sliding_window": 7})
    assert [config.rotates(layer) for layer in range(4)] == rotates
    assert [config.window(layer) for layer in range(4)] == [None] * 4
    config = architecture_of("smollm3").config_from_hf(
        {**SMOLLM3, **entries, "layer_types": None, "sliding_window": 7, "use_sliding_window": True}
    )
    assert [config.window(layer) for layer in range(4)] == [None if with_rope else 7 for with_rope in rotates]


@pytest.mark.parametrize(
    "flags", [[], [1, 1, 1], [1, 1, 1, 2], [1, 1, 1, -1], [1, 1, 1, True], [1, 1, 1, None], "1110", 4]
)
def test_invalid_flags(flags: object) -> None:
    with pytest.raises(ConfigError, match=r"no_rope_layers: invalid per-layer flags; .* a list of at least 4 flags"):
        architecture_of("smollm3").config_from_hf({**SMOLLM3, "no_rope_layers": flags})


def test_invalid_interval() -> None:
    with pytest.raises(ConfigError, match="no_rope_layer_interval"):
        architecture_of("smollm3").config_from_hf({**SMOLLM3, "no_rope_layers": None, "no_rope_layer_interval": 0})

"""Tests of config.json for EXAONE 4: which layers have a sliding window and rotary positions."""

from typing import Any

import pytest

from ligerzoo.convert.exaone4 import ARCHITECTURE
from ligerzoo.errors import ConfigError
from tests.models.tiny_exaone4 import EXAONE4


@pytest.mark.parametrize(
    "entries, windows, rotates",
    [
        ({"layer_types": None}, [7, 7, 7, None], [True, True, True, False]),
        ({"layer_types": None, "sliding_window_pattern": "LG"}, [7, None, 7, None], [True, False, True, False]),
        ({"layer_types": None, "sliding_window_pattern": "GLL"}, [None, 7, 7, None], [False, True, True, False]),
        ({"layer_types": None, "sliding_window_pattern": 3}, [7, 7, None, 7], [True, True, False, True]),
        ({"layer_types": None, "sliding_window_pattern": None}, [None] * 4, [False] * 4),
        ({"layer_types": None, "sliding_window": None}, [None] * 4, [True] * 4),
        ({"sliding_window_pattern": 1}, [7, 7, 7, None], [True, True, True, False]),
    ],
)
def test_layers(entries: dict[str, Any], windows: list[int | None], rotates: list[bool]) -> None:
    config = ARCHITECTURE.config_from_hf({**EXAONE4, **entries})
    assert [config.window(layer) for layer in range(4)] == windows
    assert [config.rotates(layer) for layer in range(4)] == rotates
    assert ARCHITECTURE.config_from_hf(ARCHITECTURE.config_to_hf(config)) == config


@pytest.mark.parametrize("pattern", ["", "LLX", 0, -1, True, 1.5])
def test_invalid_patterns(pattern: object) -> None:
    with pytest.raises(ConfigError, match="sliding_window_pattern: invalid"):
        ARCHITECTURE.config_from_hf({**EXAONE4, "sliding_window_pattern": pattern})

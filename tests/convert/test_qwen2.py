"""Tests of config.json for Qwen2: layers with a sliding window."""

from typing import Any

import pytest

from ligerzoo.convert import architecture_of
from ligerzoo.errors import ConfigError
from tests.models.tiny_qwen2 import QWEN2

ON = {"use_sliding_window": True}
TYPES = ["sliding_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize(
    "entries, windows",
    [
        ({}, [None, None, None]),
        (ON, [None, 7, 7]),
        ({**ON, "max_window_layers": 0}, [7, 7, 7]),
        ({**ON, "max_window_layers": 2}, [None, None, 7]),
        ({**ON, "max_window_layers": None}, [None, None, None]),
        ({**ON, "sliding_window": None}, [None, None, None]),
        ({**ON, "layer_types": TYPES}, [7, None, None]),
    ],
)
def test_windows(entries: dict[str, Any], windows: list[int | None]) -> None:
    config = architecture_of("qwen2").config_from_hf({**QWEN2, **entries})
    assert [config.window(layer) for layer in range(3)] == windows


@pytest.mark.parametrize(
    "entry, named",
    [
        (
            {"max_window_layers": -1},
            "max_window_layers: invalid value; got -1; expected an integer, 0 or more",
        ),
        ({"max_window_layers": 1.0}, "max_window_layers"),
        ({"use_sliding_window": 1}, "use_sliding_window: .* expected true or false"),
        ({"sliding_window": 0}, "sliding_window: .* expected an integer, 1 or more"),
        ({"layer_types": ["full_attention"]}, "layer_types: .* a list of 3"),
    ],
)
def test_refusals(entry: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        architecture_of("qwen2").config_from_hf({**QWEN2, **entry})

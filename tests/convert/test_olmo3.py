"""Tests of config.json for OLMo 3: rotary embeddings of the two layer types."""

from typing import Any

import pytest

from ligerzoo.convert.olmo3 import ARCHITECTURE
from ligerzoo.errors import ConfigError
from tests.models.tiny_olmo3 import OLMO3, YARN


@pytest.mark.parametrize(
    "entries, full_theta, local_theta",
    [
        ({"rope_theta": 300.0}, 300.0, None),  # as in transformers 4; version 5 takes 500000 for sliding-window layers
        ({"rope_theta": None}, 500000.0, None),
        ({"rope_theta": 300.0, "rope_parameters": {"full_attention": {"rope_theta": 70.0}}}, 70.0, None),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 70.0}}}, 500000.0, 70.0),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 500000.0}}}, 500000.0, None),
    ],
)
def test_thetas(entries: dict[str, Any], full_theta: float, local_theta: float | None) -> None:
    config = ARCHITECTURE.config_from_hf({**OLMO3, **entries})
    assert (config.rope_theta, config.rope_local_base_freq) == (full_theta, local_theta)
    written = ARCHITECTURE.config_to_hf(config)
    assert "rope_local_base_freq" not in written
    assert ARCHITECTURE.config_from_hf(written) == config


def test_scaled_sliding_window_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="rope_parameters, sliding_attention: not supported"):
        ARCHITECTURE.config_from_hf({**OLMO3, "rope_parameters": {"sliding_attention": YARN}})

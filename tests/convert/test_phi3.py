"""Tests of config.json for Phi-3: names of rope types, and precedence of entries."""

from typing import Any

import pytest

from ligerzoo.convert.phi3 import ARCHITECTURE
from ligerzoo.errors import ConfigError
from tests.models.tiny_phi3 import FACTORS, PHI3

LONGROPE = {"rope_type": "longrope", **FACTORS}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_all_rope_types_are_longrope(key: str, name: str) -> None:
    config = ARCHITECTURE.config_from_hf({**PHI3, "rope_scaling": {key: name, **FACTORS}})
    assert config.rope_scaling == LONGROPE
    # transformers 4 rejects any other entry.
    assert ARCHITECTURE.config_to_hf(config)["rope_scaling"] == {"type": "longrope", **FACTORS}


@pytest.mark.parametrize("top_level, counts", [({}, 4096), ({"original_max_position_embeddings": 100}, 100)])
def test_top_level_original_context_takes_precedence(top_level: dict[str, int], counts: int) -> None:
    raw = {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 7}, "head_dim": 8, **top_level}
    config = ARCHITECTURE.config_from_hf(raw)
    assert (config.original_max_position_embeddings, config.rope_scaling) == (counts, LONGROPE)
    written = ARCHITECTURE.config_to_hf(config)
    assert written["original_max_position_embeddings"] == counts
    assert "original_max_position_embeddings" not in written["rope_scaling"]


@pytest.mark.parametrize(
    "entry, named",
    [
        (
            {"partial_rotary_factor": 1.25},
            "partial_rotary_factor: invalid value; got 1.25; expected at most 1",
        ),
        ({"partial_rotary_factor": 1e300}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.0}, "head_dim: invalid number of rotated features; got 0"),
        ({"partial_rotary_factor": 0.9}, "head_dim: invalid number of rotated features; got 7"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.75, "rope_scaling": LONGROPE}, "short_factor .* a list of 3 positive numbers"),
        ({"rope_scaling": {"type": "su"}}, "rope_scaling: invalid short_factor of rope type longrope"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act: not supported; got 'gelu'"),
    ],
)
def test_refusals(entry: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ARCHITECTURE.config_from_hf({**PHI3, **entry})

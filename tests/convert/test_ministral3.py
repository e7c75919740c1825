"""Tests of config.json for Ministral 3, whose rope entries include the query scaling."""

from typing import Any

import pytest

from ligerzoo.convert.ministral3 import ARCHITECTURE
from ligerzoo.errors import ConfigError
from ligerzoo.models import Ministral3Config

GROWING = {"original_max_position_embeddings": 9, "llama_4_scaling_beta": 0.3}
YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize("raw", [{}, {"rope_scaling": None}, {"rope_parameters": None, "rope_theta": 5.0}])
def test_no_rope_entry(raw: dict[str, Any]) -> None:
    config = ARCHITECTURE.config_from_hf(raw)
    assert (config.rope_theta, config.rope_scaling) == (1e6, Ministral3Config().rope_scaling)
    assert config.query_growth == 0.1


@pytest.mark.parametrize(
    "rope, scaling, theta",
    [
        ({}, {"rope_type": "default"}, 1e4),
        ({"rope_theta": 7.0, **GROWING}, {"rope_type": "default", **GROWING}, 7.0),
        ({**YARN, **GROWING, "type": "yarn"}, {**YARN, **GROWING}, 1e4),
        (YARN, YARN, 1e4),
    ],
)
def test_missing_rope_entries_get_defaults(rope: dict[str, Any], scaling: dict[str, Any], theta: float) -> None:
    config = ARCHITECTURE.config_from_hf({"rope_parameters": rope, "max_position_embeddings": 80})
    of_queries = {"original_max_position_embeddings": 80, "llama_4_scaling_beta": 0.0}
    assert (config.rope_theta, config.rope_scaling) == (theta, {**of_queries, **scaling})
    assert ARCHITECTURE.config_from_hf(ARCHITECTURE.config_to_hf(config)) == config


def test_no_scaling_round_trip() -> None:
    config = ARCHITECTURE.config_from_hf(ARCHITECTURE.config_to_hf(Ministral3Config(rope_scaling=None)))
    assert config.rope_scaling is not None
    assert (config.rope_scaling["rope_type"], config.query_growth) == ("default", 0)


@pytest.mark.parametrize("growth", [-1, "0.1", True, float("inf"), [0.1]])
def test_invalid_query_scaling(growth: object) -> None:
    with pytest.raises(ConfigError, match="llama_4_scaling_beta: invalid value"):
        Ministral3Config(rope_scaling={"rope_type": "default", "llama_4_scaling_beta": growth})

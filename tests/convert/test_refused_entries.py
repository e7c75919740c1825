"""Entries of config.json that transformers ignores or that change the head: refused by name."""

import pytest

from ligerzoo.convert import architecture_of
from ligerzoo.errors import ConfigError


@pytest.mark.parametrize(
    "model_type, name, value",
    [
        ("apertus", "post_norm", True), ("apertus", "qk_norm", False), ("apertus", "mlp_bias", True),
        ("ernie4_5", "compression_ratio", 2.0), ("ernie4_5_moe", "moe_gate", "top2_fused"),
        ("ernie4_5_moe", "moe_use_aux_free", False),
    ],
)  # fmt: skip
def test_refused_by_name(model_type: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: not supported"):
        architecture_of(model_type).config_from_hf({name: value})

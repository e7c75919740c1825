"""Tests of Hunyuan: refused entries of config.json, the fixed theta of `alpha`, and absolute positions."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import AutoModel
from ligerzoo.convert.families import FAMILIES
from ligerzoo.errors import ConfigError
from tests.models.comparing import assert_close
from tests.models.tiny_hunyuan_v1_dense import CHECKPOINTS, HUNYUAN

ARCHITECTURE = FAMILIES["hunyuan_v1_dense"]


@pytest.mark.parametrize(
    "name, value",
    [
        ("use_cla", True), ("use_qk_norm", False), ("use_rotary_pos_emb", False), ("mlp_bias", True),
        ("norm_type", "layer"), ("num_experts", 8), ("attention_head_dim", 16),
    ],
)  # fmt: skip
def test_entries_that_transformers_ignores_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: not supported"):
        ARCHITECTURE.config_from_hf({**HUNYUAN, name: value})


def test_alpha_fixes_theta() -> None:
    config = ARCHITECTURE.config_from_hf(HUNYUAN)
    rotary = config.rotary()
    assert rotary.rope_type == "default"
    assert rotary.theta == pytest.approx(1e4 * 1000 ** (12 / 10))
    scaling: dict[str, Any] = {**config.rope_scaling, "alpha": None}
    assert dataclasses.replace(config, rope_scaling=scaling).rotary().rope_type == "dynamic"


@pytest.mark.parametrize("alpha", [0, -1.0, "8", True, 1e-9, 1e7, 1e200, 10**400])
def test_invalid_alpha(alpha: object) -> None:
    with pytest.raises(ConfigError, match="rope_scaling, alpha: invalid value"):
        ARCHITECTURE.config_from_hf({**HUNYUAN, "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": alpha}})


@torch.no_grad()
def test_padding_does_not_shift_positions_but_the_caller_may(tmp_path: Path) -> None:
    CHECKPOINTS[0].write(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    text = torch.randint(101, (1, 20))
    alone = model(text).logits
    padded, mask = torch.cat([torch.zeros(1, 7, dtype=torch.int64), text], 1), torch.ones(1, 27, dtype=torch.int64)
    mask[:, :7] = 0
    assert_close(model(padded, attention_mask=mask).logits[:, 7:], alone, "left padding")
    packed = torch.cat([text[:, :9], text], 1)
    assert_close(model(packed, cu_seqlens=torch.tensor([0, 9, 29])).logits[:, 9:], alone, "packed")
    shifted = model(text, position_ids=torch.arange(7, 27)[None]).logits
    assert (shifted - alone).abs().max() > 0.05

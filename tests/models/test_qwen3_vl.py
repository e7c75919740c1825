"""Tower, DeepStack, positions and expert layouts of Qwen3-VL; test_vision_lm.py tests what it shares with Qwen2-VL."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from ligerzoo import AutoModel
from ligerzoo.convert.qwen3_vl import ARCHITECTURE
from ligerzoo.convert.qwen3_vl_moe import ARCHITECTURE as MOE
from ligerzoo.errors import ConfigError
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.models import Qwen3VL
from tests.models import tiny_qwen3_vl, tiny_qwen3_vl_moe
from tests.models.comparing import all_gradients, assert_close, raw_bytes, stored_tensors
from tests.models.prompts import PROMPTS, image, prompt
from tests.models.variants import variant

DENSE, VISION = tiny_qwen3_vl.CHECKPOINTS[0], tiny_qwen3_vl.VISION
M = VISION["spatial_merge_size"]

sides = st.integers(1, 7).map(lambda tokens: M * tokens)
grids = st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=3).map(torch.tensor)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> tuple[Qwen3VL, Any]:
    path = tmp_path_factory.mktemp("checkpoint")
    DENSE.write(path)
    theirs = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    return Qwen3VL.from_pretrained(path, dtype=torch.float32, device=device), theirs.to(device).eval()


@settings(max_examples=40, deadline=None)
@given(grid=grids)
@torch.no_grad()
def test_tower_on_random_grids(models: tuple[Qwen3VL, Any], device: str, grid: Tensor) -> None:
    """Grids smaller and larger than the learned positions; embeddings, then DeepStack features."""
    ours, theirs = models
    patches = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, device=device)
    expected = theirs.model.visual(patches, grid.to(device))
    got = ours.visual(patches, grid)
    assert len(got) == 1 + len(expected.deepstack_features) == 3
    for one, other in zip(got, [expected.pooler_output, *expected.deepstack_features], strict=True):
        assert_close(one, other, "features")


@torch.no_grad()
def test_hidden_states_are_those_before_the_addition(models: tuple[Qwen3VL, Any], device: str) -> None:
    """As in transformers, the output of a block, to which the next block's input adds the DeepStack features."""
    ours, theirs = models
    p = prompt(PROMPTS["images of one size"], VISION)
    ids, vision = p.ids.to(device), {name: tensor.to(device) for name, tensor in p.vision.items()}
    got = ours(ids, **vision, output_hidden_states=True).hidden_states
    inputs: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for layer in ours.model.layers]
    ours(ids, **vision)
    for hook in hooks:
        hook.remove()
    types = p.types.to(device)
    expected = theirs(input_ids=ids, **vision, mm_token_type_ids=types, output_hidden_states=True).hidden_states
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, "hidden states")
    features = ours.visual(vision["pixel_values"], vision["image_grid_thw"])[1:]
    for i, feature in enumerate(features):
        assert_close((inputs[1 + i] - got[1 + i])[types == 1], feature, "DeepStack features")
        assert torch.equal(inputs[1 + i][types == 0], got[1 + i][types == 0])


@pytest.mark.parametrize("level", [Recompute.MLP, Recompute.BLOCK])
def test_activation_plans(models: tuple[Qwen3VL, Any], device: str, level: Recompute) -> None:
    """The features are added outside of recomputed blocks."""
    ours, _ = models
    p = prompt([[3, image(2, 3), 9]], VISION)
    inputs = {"input_ids": p.ids.to(device), "labels": p.ids.to(device)}
    inputs |= {name: tensor.to(device) for name, tensor in p.vision.items()}
    expected = all_gradients(ours, **inputs)
    ours.model.activation_plan = (level,) * len(ours.model.layers)
    try:
        got = all_gradients(ours, **inputs)
    finally:
        ours.model.activation_plan = ()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient)


def test_frame_interval_is_refused(models: tuple[Qwen3VL, Any]) -> None:
    ours, _ = models
    with pytest.raises(ValueError, match="frame_interval: got a value; expected None"):
        ours(torch.ones(1, 4, dtype=torch.long, device=ours.device), frame_interval=torch.ones(1))


# Experts


@pytest.mark.parametrize("features", [16, 32], ids=["2I = H", "I = H"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_square_experts(tmp_path: Path, features: int, is_transposed: bool) -> None:
    """The tensor that is not square decides for both; transformers takes each tensor for itself, and misreads one."""
    text = {**tiny_qwen3_vl_moe.TEXT, "moe_intermediate_size": features}
    tiny = variant(tiny_qwen3_vl_moe.TOP, "with square experts", {"text_config": text})
    tiny.write(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path)
    if is_transposed:
        tensors = load_file(tmp_path / "model.safetensors")
        experts = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".mlp.experts." in name}
        save_file({**tensors, **experts}, tmp_path / "model.safetensors", {"format": "pt"})
    ours = AutoModel.from_pretrained(tmp_path)
    ids = torch.arange(9)[None]
    assert_close(ours(ids).logits, theirs(ids).logits, "logits")
    ours.save_pretrained(tmp_path / "saved")
    assert raw_bytes(stored_tensors(tmp_path / "saved")) == raw_bytes(stored_tensors(tmp_path))


# Refusals and defaults


def test_default_sections() -> None:
    config = ARCHITECTURE.config_from_hf(tiny_qwen3_vl.CHECKPOINTS[-1].config)
    assert config.mrope_section == [24, 20, 20]
    with pytest.raises(ConfigError, match=r"mrope_section: .* add up to 6, half of the rotated features"):
        ARCHITECTURE.config_from_hf({**DENSE.config, "text_config": {**tiny_qwen3_vl.TEXT, "rope_scaling": None}})


def test_only_the_top_level_ties(tmp_path: Path) -> None:
    text = {**tiny_qwen3_vl.TEXT, "tie_word_embeddings": True}
    variant(tiny_qwen3_vl.TOP, "tied", {"text_config": text}).write(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "part, changes, named",
    [
        ("vision_config", {"deepstack_visual_indexes": 7}, "deepstack_visual_indexes: .* got 7; expected a list"),
        ("vision_config", {"deepstack_visual_indexes": [1, 1]}, "a list of different integers, 0 or more"),
        ("vision_config", {"deepstack_visual_indexes": [-1]}, "deepstack_visual_indexes"),
        ("vision_config", {"num_position_embeddings": 24}, "num_position_embeddings: .* got 24; expected a square"),
        ("vision_config", {"hidden_act": "silu"}, "hidden_act"),
        ("vision_config", {"model_type": "siglip"}, "model_type"),
        ("text_config", {"rope_scaling": {"mrope_section": [0, 3, 3]}}, "mrope_section: .* at most a third of 6"),
        ("text_config", {"rope_scaling": {"mrope_interleaved": False}}, "mrope_interleaved: .* got False"),
        ("text_config", {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_invalid_configs(part: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ARCHITECTURE.config_from_hf({**DENSE.config, part: {**DENSE.config[part], **changes}})


def test_experts_weights_must_be_renormalized() -> None:
    text = {**tiny_qwen3_vl_moe.TEXT, "norm_topk_prob": False}
    with pytest.raises(ConfigError, match="norm_topk_prob: not supported by Qwen3-VL-MoE; got False; expected True"):
        MOE.config_from_hf({**tiny_qwen3_vl_moe.TOP, "text_config": text})

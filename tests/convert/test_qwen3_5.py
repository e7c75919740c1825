"""Hybrids of Qwen: entries of config.json, weights that stay in fp32, and projections that checkpoints interleave."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ligerzoo import AutoModel
from ligerzoo.convert import architecture_of, architecture_of_model
from ligerzoo.convert.layout import FusedByHead, Layout
from ligerzoo.convert.stored_tensors import StoredTensors, assemble
from ligerzoo.convert.tensor_slices import Box, shapes_of, within
from ligerzoo.errors import CheckpointError, ConfigError
from ligerzoo.models import Qwen3_5, Qwen3_5Text, Qwen3Next, Qwen3NextConfig
from tests.models.tiny_qwen3_5 import CHECKPOINTS as VISION_CHECKPOINTS
from tests.models.tiny_qwen3_5 import TOP as VISION
from tests.models.tiny_qwen3_5_moe_text import QWEN3_5_MOE
from tests.models.tiny_qwen3_5_text import CHECKPOINTS, QWEN3_5
from tests.models.tiny_qwen3_next import QWEN3_NEXT


def config_of(raw: dict[str, Any], **entries: Any) -> Any:
    return architecture_of(raw["model_type"]).config_from_hf({**raw, **entries})


def test_layer_types_take_precedence() -> None:
    linear, full = "linear_attention", "full_attention"
    for entries, expected in (
        ({"layer_types": [full, linear]}, [False, True]),
        ({"layer_types": None}, [True, False]),
        ({"layer_types": None, "full_attention_interval": 1}, [False, False]),
        ({"layer_types": None, "full_attention_interval": None, "num_hidden_layers": 4}, [True, True, True, False]),
    ):
        config = config_of(QWEN3_5, **entries)
        assert [config.is_linear(layer) for layer in range(config.num_hidden_layers)] == expected


@pytest.mark.parametrize(
    "raw, entries, message",
    [
        (QWEN3_5, {"attn_output_gate": False}, "attn_output_gate: not supported; got False; expected no entry or True"),
        (QWEN3_5, {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: not supported; got 'bfloat16'"),
        (QWEN3_5, {"output_gate_type": "sigmoid"}, "output_gate_type: not supported; got 'sigmoid'"),
        (QWEN3_5, {"hidden_act": "gelu"}, "hidden_act: not supported; got 'gelu'"),
        (QWEN3_5, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types: .* a list of 2 entries"),
        (QWEN3_5, {"layer_types": ["full_attention"]}, "layer_types: .* a list of 2 entries"),
        (QWEN3_5, {"linear_num_value_heads": 3}, "linear_num_value_heads: .* a multiple of linear_num_key_heads, 2"),
        (QWEN3_5, {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: .* expected an integer, 1 or more"),
        (QWEN3_5, {"sliding_window": 5}, "sliding_window: not supported; got 5"),
        (QWEN3_5_MOE, {"use_sliding_window": True}, "use_sliding_window: not supported; got True"),
        (QWEN3_5_MOE, {"norm_topk_prob": False}, "norm_topk_prob: not supported; got False"),
        (QWEN3_5_MOE, {"mlp_only_layers": [1]}, r"mlp_only_layers: not supported; got \[1\]"),
        (QWEN3_5_MOE, {"sliding_window": 5}, "sliding_window: not supported; got 5"),
        (QWEN3_NEXT, {"use_sliding_window": True}, "use_sliding_window: not supported; got True"),
        (QWEN3_NEXT, {"sliding_window": 5}, "sliding_window: not supported; got 5"),
    ],
)
def test_refusals(raw: dict[str, Any], entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(raw, **entries)


@pytest.mark.parametrize(
    "part, entries, message",
    [
        ("text_config", {"attn_output_gate": False}, "attn_output_gate: not supported; got False"),
        ("text_config", {"sliding_window": 5}, "sliding_window: not supported; got 5"),
        ("text_config", {"model_type": "qwen3_vl_text"}, "model_type: .* expected no entry or 'qwen3_5_text'"),
        ("text_config", {"rope_parameters": {"mrope_interleaved": False}}, "mrope_interleaved: not supported"),
        ("text_config", {"rope_parameters": {"mrope_section": [2, 2, 1]}}, "mrope_section: .* that add up to 6, half"),
        ("vision_config", {"deepstack_visual_indexes": [0]}, r"deepstack_visual_indexes: not supported; got \[0\]"),
        ("vision_config", {"num_position_embeddings": 24}, "num_position_embeddings: .* a square"),
    ],
)
def test_refusals_of_vision_language_models(part: str, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(VISION, **{part: {**VISION[part], **entries}})


def test_a_text_model_refuses_the_checkpoint_of_a_vision_language_model(tmp_path: Path) -> None:
    VISION_CHECKPOINTS[0].write(tmp_path)
    message = r"the checkpoint has another architecture; got 'qwen3_5'.* Load it with Qwen3_5.from_pretrained"
    with pytest.raises(ConfigError, match=message):
        Qwen3_5Text.from_pretrained(tmp_path)
    assert type(AutoModel.from_pretrained(tmp_path)) is Qwen3_5


def test_sections_of_mrope_have_no_effect_on_text() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e7}
    mrope = {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    config = config_of(QWEN3_5, rope_parameters={**yarn, **mrope})
    assert config == config_of(QWEN3_5, rope_parameters=yarn)
    assert config.partial_rotary_factor == 0.25


def dtypes(directory: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize("dtype", ["auto", torch.float16, torch.float32])
def test_decay_rates_stay_in_fp32(dtype: Any, tmp_path: Path) -> None:
    """Through loading and saving, in any dtype of the model."""
    [tiny] = [row for row in CHECKPOINTS if row.name.endswith("decay rates in fp32")]
    tiny.write(tmp_path / "stored")
    stored = load_file(tmp_path / "stored" / "model.safetensors")
    wide = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert {name.rpartition("linear_attn.")[2] for name in wide} == {"A_log", "dt_bias", "norm.weight"}
    stored["model.layers.0.linear_attn.A_log"] += 1e-5  # no bf16 number
    save_file(stored, tmp_path / "stored" / "model.safetensors", {"format": "pt"})
    model = AutoModel.from_pretrained(tmp_path / "stored", dtype=dtype)
    narrow = torch.bfloat16 if dtype == "auto" else dtype
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in wide else narrow), name
    assert torch.equal(
        model.get_parameter("model.layers.0.linear_attn.A_log"), stored["model.layers.0.linear_attn.A_log"]
    )
    logits = model(torch.arange(9)[None]).logits
    assert logits.dtype == narrow
    model.save_pretrained(tmp_path / "saved")
    assert dtypes(tmp_path / "saved") == {name: torch.float32 if name in wide else narrow for name in stored}
    again = AutoModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(torch.arange(9)[None]).logits, logits)


def test_weights_of_one_dtype_are_cast_together(tmp_path: Path) -> None:
    CHECKPOINTS[0].write(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


SIZES: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 4, "partial_rotary_factor": 0.5, "linear_num_key_heads": 3,
    "linear_num_value_heads": 6, "linear_key_head_dim": 2, "linear_value_head_dim": 5,
}  # fmt: skip


def test_rows_of_heads_are_interleaved() -> None:
    """The stored rows are q, k, v, z of the first key head, then of the second; each v and z has two value heads."""
    model = Qwen3Next(Qwen3NextConfig(**SIZES))
    layer = model.model.layers[0].linear_attn
    stored = model.hf_state_dict()["model.layers.0.linear_attn.in_proj_qkvz.weight"].view(3, 2 + 2 + 10 + 10, 8)
    q, k, v, z = stored.split([2, 2, 10, 10], 1)
    assert torch.equal(layer.in_proj_qkv.weight, torch.cat([part.flatten(0, 1) for part in (q, k, v)]))
    assert torch.equal(layer.in_proj_z.weight, z.flatten(0, 1))
    b, a = model.hf_state_dict()["model.layers.0.linear_attn.in_proj_ba.weight"].view(3, 4, 8).split(2, 1)
    assert torch.equal(layer.in_proj_b.weight, b.flatten(0, 1))
    assert torch.equal(layer.in_proj_a.weight, a.flatten(0, 1))
    other = Qwen3Next(Qwen3NextConfig(**SIZES))
    other.load_hf_state_dict(model.hf_state_dict())
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), other.parameters(), strict=True))


def test_interleaved_projections_have_no_adapters() -> None:
    """PEFT's files could not describe them."""
    from ligerzoo.adapters import add_lora
    from ligerzoo.errors import LigerzooError

    model = Qwen3Next(Qwen3NextConfig(**SIZES))
    with pytest.raises(LigerzooError, match=r"add_lora, targets: matches nothing; got 'in_proj_qkv'"):
        add_lora(model, targets="in_proj_qkv")
    names = add_lora(model)
    assert not any("in_proj" in name for name in names)
    assert any("linear_attn.out_proj" in name for name in names)


def test_more_heads_than_rows(tmp_path: Path) -> None:
    """A malicious config.json cannot make loading list more slices than the files have rows."""
    model = Qwen3Next(Qwen3NextConfig(**SIZES))
    model.save_pretrained(tmp_path)
    text = (
        (tmp_path / "config.json").read_text().replace('"linear_num_key_heads": 3', '"linear_num_key_heads": 3000000')
    )
    (tmp_path / "config.json").write_text(
        text.replace('"linear_num_value_heads": 6', '"linear_num_value_heads": 6000000')
    )
    with pytest.raises(CheckpointError, match="wrong shape"):
        AutoModel.from_pretrained(tmp_path)


def test_fused_by_head_is_one_to_one() -> None:
    rule = FusedByHead("qk", (("q", 2, 0), ("k", 1, 0), ("q", 1, 6)), 3)
    tensors: dict[str, Tensor] = {"x.q": torch.randn(9, 2), "x.k": torch.randn(3, 2)}
    slices = list(Layout((rule,)).slices(shapes_of(tensors)))
    stored = StoredTensors(slices, tensors)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {"x.qk": (12, 2)}
    expected = [0, 1, "k0", 6, 2, 3, "k1", 7, 4, 5, "k2", 8]
    rows = [tensors["x.k"][int(row[1])] if isinstance(row, str) else tensors["x.q"][row] for row in expected]
    assert torch.equal(stored["x.qk"], torch.stack(rows))
    again = assemble(
        slices, shapes_of(tensors), lambda part: stored[part.stored_name][part.stored_index],
        dtypes=dict.fromkeys(tensors, torch.float32), device=torch.device("cpu"),
    )  # fmt: skip
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    model = Qwen3Next(Qwen3NextConfig(**SIZES))
    assert architecture_of_model(model).interleaves(model.config, "model.layers.0.linear_attn.in_proj_b")


@pytest.mark.parametrize("first, rows", [(0, 9), (0, 4), (4, 4), (8, 1), (3, 5)])
def test_shards_of_interleaved_rows(first: int, rows: int) -> None:
    """Each process reads the rows of its shard only."""
    rule = FusedByHead("qk", (("q", 2, 0), ("k", 1, 0), ("q", 1, 6)), 3)
    tensors: dict[str, Tensor] = {"x.q": torch.randn(9, 2), "x.k": torch.randn(3, 2)}
    slices = list(Layout((rule,)).slices(shapes_of(tensors)))
    stored = StoredTensors(slices, tensors)
    box = Box((first, 0), (rows, 2))
    own = [part for whole in slices if whole.name == "x.q" and (part := within(whole, box)) is not None]
    shard = assemble(
        own, {"x.q": box.shape}, lambda part: stored[part.stored_name][part.stored_index],
        dtypes={"x.q": torch.float32}, device=torch.device("cpu"),
    )  # fmt: skip
    assert torch.equal(shard["x.q"], tensors["x.q"][first : first + rows])

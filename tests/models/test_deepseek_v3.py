"""DeepSeek-V3 and its siblings: what parity with transformers does not cover."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligerzoo import AutoModel
from ligerzoo.adapters import add_lora, merge_lora
from ligerzoo.convert import architecture_of
from ligerzoo.errors import CheckpointError, ConfigError
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.layers.kv_cache import cache_size
from ligerzoo.models import DeepseekV3, DeepseekV3Config, Glm4MoeLite, Glm4MoeLiteConfig
from tests.covering import every_backend
from tests.files.test_quantized import dequantized_by_block, random_fp8
from tests.models.comparing import all_gradients, assert_close, raw_bytes, stored_tensors
from tests.models.tiny import Tiny
from tests.models.tiny_deepseek_v3 import CHECKPOINTS, DEEPSEEK_V3, with_mtp_on_the_hub
from tests.models.tiny_glm4_moe import GLM4_MOE
from tests.models.tiny_glm4_moe_lite import GLM4_MOE_LITE
from tests.models.tiny_gpt_oss import GPT_OSS
from tests.models.tiny_minimax_m2 import MINIMAX_M2
from tests.models.tiny_minimax_m2 import ON_THE_HUB as MINIMAX_ON_THE_HUB

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    CHECKPOINTS[1].write(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_biases_of_routers_stay_in_fp32(directory: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Their bits too: bf16 would round them."""
    stored = stored_tensors(directory)[BIAS]
    assert not torch.equal(stored, stored.to(dtype).float())
    model = AutoModel.from_pretrained(directory, dtype=dtype)
    loaded = model.state_dict()
    assert {name: t.dtype for name, t in loaded.items() if t.dtype != dtype} == {BIAS: torch.float32}
    model.save_pretrained(tmp_path / "saved")
    saved = stored_tensors(tmp_path / "saved")
    for tensor in (loaded[BIAS], saved[BIAS], model.hf_state_dict()[BIAS]):
        assert torch.equal(tensor, stored)
    again = AutoModel.from_config(model.config, dtype=dtype)
    again.load_hf_state_dict(saved)
    assert torch.equal(again.state_dict()[BIAS], stored)


FP8_SIZES = {
    "hidden_size": 160, "q_lora_rank": 136, "kv_lora_rank": 132, "qk_nope_head_dim": 40, "qk_rope_head_dim": 12,
    "v_head_dim": 36, "moe_intermediate_size": 144, "intermediate_size": 150,
}  # fmt: skip
FP8_ENTRY = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip


@pytest.mark.parametrize("base", [DEEPSEEK_V3, MINIMAX_M2], ids=lambda base: base["model_type"])
def test_fp8_checkpoints(base: dict[str, Any], tmp_path: Path) -> None:
    """Loads the weights of the same checkpoint in bf16, which saving writes; MTP layers and fp32 biases included."""
    sizes = FP8_SIZES if base is DEEPSEEK_V3 else {"hidden_size": 160, "intermediate_size": 144, "head_dim": 40}
    hub = with_mtp_on_the_hub if base is DEEPSEEK_V3 else MINIMAX_ON_THE_HUB
    config = {**base, **sizes, "torch_dtype": "bfloat16"}
    Tiny("fp8", config, hub, stored_dtype=torch.bfloat16).write(tmp_path / "random")
    quantized, plain = {}, {}
    for seed, (name, tensor) in enumerate(sorted(stored_tensors(tmp_path / "random").items())):
        quantized[name] = plain[name] = tensor
        if tensor.ndim == 2 and ".gate." not in name and name.startswith("model.layers."):
            values, scales = random_fp8(tuple(tensor.shape), seed)
            quantized |= {name: values, f"{name}_scale_inv": scales}
            plain[name] = dequantized_by_block(values, scales)
    assert any(name.startswith("model.layers.2.") for name in quantized) == (base is DEEPSEEK_V3)
    for folder, tensors, entries in (("fp8", quantized, {"quantization_config": FP8_ENTRY}), ("bf16", plain, {})):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors", {"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **entries}))
    loaded = {folder: AutoModel.from_pretrained(tmp_path / folder) for folder in ("fp8", "bf16")}
    tokens = torch.randint(101, (1, 20))
    assert torch.equal(*(model(tokens).logits for model in loaded.values()))
    for folder, model in loaded.items():
        model.save_pretrained(tmp_path / "saved" / folder)
        assert raw_bytes(stored_tensors(tmp_path / "saved" / folder)) == raw_bytes(plain)
        assert json.loads((tmp_path / "saved" / folder / "config.json").read_text()) == config


def test_training_leaves_biases_of_routers_alone(directory: Path) -> None:
    model = AutoModel.from_pretrained(directory).train()
    before = model.state_dict()[BIAS].clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.randint(101, (1, 20))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert torch.equal(model.state_dict()[BIAS], before)


def test_lora_updates_decode_and_merge(directory: Path) -> None:
    """An update of `kv_b_proj` is not absorbed: decoding expands keys and values."""
    model, tokens = AutoModel.from_pretrained(directory), torch.randint(101, (2, 12))
    add_lora(model, rank=4)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert "model.layers.1.self_attn.kv_b_proj.lora_A" in trained
    assert "model.layers.1.mlp.shared_experts.up_proj.lora_B" in trained
    assert not any("mlp.gate." in name for name in trained)
    with torch.no_grad():
        for weight in trained.values():
            weight.normal_(std=0.1)
        whole, cache = model(tokens).logits, model.new_cache()
        parts = [model(part, past_key_values=cache).logits for part in tokens.split([9, 1, 1, 1], 1)]
        assert_close(torch.cat(parts, 1), whole, "logits from a cache")
        merge_lora(model)
        assert_close(model(tokens).logits, whole, "logits of merged weights")


@pytest.mark.parametrize("level", [Recompute.ELEMENTWISE, Recompute.MLP, Recompute.BLOCK])
def test_recomputed_activations_give_the_same_gradients(directory: Path, level: Recompute) -> None:
    model, tokens = AutoModel.from_pretrained(directory).train(), torch.randint(101, (2, 12))
    expected = all_gradients(model, input_ids=tokens, labels=tokens)
    model.model.activation_plan = (level, level)
    got = all_gradients(model, input_ids=tokens, labels=tokens)
    assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())


@every_backend
def test_compiled_in_one_graph(directory: Path, backend: str) -> None:
    model, tokens = AutoModel.from_pretrained(directory), torch.randint(101, (2, 12))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(tokens, labels=tokens).loss, model(tokens, labels=tokens).loss)


def test_router_logits_are_returned_and_add_no_loss(directory: Path) -> None:
    model, tokens = AutoModel.from_pretrained(directory), torch.randint(101, (1, 20))
    plain, with_logits = (model(tokens, labels=tokens, output_router_logits=flag) for flag in (False, True))
    assert plain.loss == with_logits.loss
    assert with_logits.aux_loss is None
    assert [logits.shape for logits in with_logits.router_logits] == [(20, 8)]


def test_kimi_k2_is_read_as_deepseek_v3(directory: Path, tmp_path: Path) -> None:
    expected = AutoModel.from_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (directory / "config.json").write_text(json.dumps(config))
    model, tokens = AutoModel.from_pretrained(directory), torch.randint(101, (1, 20))
    assert type(model) is DeepseekV3
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config
    assert raw_bytes(stored_tensors(tmp_path / "saved")) == raw_bytes(stored_tensors(directory))


def test_another_number_of_layers_does_not_drop_layers_silently(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.layers.1\."):
        AutoModel.from_pretrained(directory, num_hidden_layers=1)


def test_a_missing_bias_is_refused(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors[BIAS]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"no '{BIAS}'"):
        AutoModel.from_pretrained(directory)


@pytest.mark.parametrize("base", [DEEPSEEK_V3, GLM4_MOE, GLM4_MOE_LITE], ids=lambda base: base["model_type"])
@pytest.mark.parametrize(
    "entry, value",
    [("scoring_func", "softmax"), ("topk_method", "greedy"), ("topk_method", "group_limited_greedy"),
     ("moe_layer_freq", 2), ("norm_topk_prob", None), ("rope_interleave", None)],
)  # fmt: skip
def test_other_routers_are_refused(base: dict[str, Any], entry: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{entry}: not supported"):
        architecture_of(base["model_type"]).config_from_hf({**base, entry: value})


@pytest.mark.parametrize(
    "entry, value",
    [("attn_type_list", [1, 0]), ("attn_type_list", 1), ("shared_intermediate_size", 64), ("use_qk_norm", False),
     ("qk_norm_type", "per_head"), ("use_routing_bias", False), ("scoring_func", "softmax"), ("rotary_dim", 13),
     ("rotary_dim", 0), ("rotary_dim", 6.0)],
)  # fmt: skip
def test_other_layers_of_minimax_are_refused(entry: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{entry}: "):
        architecture_of("minimax_m2").config_from_hf({**MINIMAX_M2, entry: value})


def test_rotated_features_of_minimax() -> None:
    config = {name: value for name, value in MINIMAX_M2.items() if name != "partial_rotary_factor"}
    read = architecture_of("minimax_m2").config_from_hf
    assert read({**config, "rotary_dim": 6}).rotary_size == 6
    assert read({**config, "rotary_dim": None}).rotary_size == 12
    assert read({**config, "rotary_dim": 6, "partial_rotary_factor": 1.0}).rotary_size == 12


@pytest.mark.parametrize(
    "changes, field",
    [({"head_dim": 12}, "head_dim"), ({"num_key_value_heads": 2}, "num_key_value_heads"), ({"n_group": 3}, "n_group"),
     ({"n_group": 8, "topk_group": 4}, "n_group"), ({"topk_group": 5}, "topk_group"),
     ({"topk_group": 1}, "topk_group"), ({"num_experts_per_tok": 9}, "num_experts_per_tok")],
)  # fmt: skip
def test_sizes_are_checked(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        architecture_of("deepseek_v3").config_from_hf({**DEEPSEEK_V3, **changes})


def test_a_scale_of_scores_needs_the_scaling_factor() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "mscale_all_dim": 1.0}
    with pytest.raises(ConfigError, match=r"^rope_scaling: mscale_all_dim of rope type longrope without factor"):
        architecture_of("deepseek_v3").config_from_hf({**DEEPSEEK_V3, "rope_scaling": scaling})


@pytest.mark.parametrize("base", [DEEPSEEK_V3, GLM4_MOE_LITE, GPT_OSS], ids=lambda base: base["model_type"])
@pytest.mark.parametrize("where", ["top level", "rope_scaling"])
def test_partial_rotation_is_refused(base: dict[str, Any], where: str) -> None:
    """transformers fails when it rotates; ignoring the entry would give other numbers."""
    scaling = {**(base.get("rope_scaling") or {}), "partial_rotary_factor": 0.5}
    entries = {"partial_rotary_factor": 0.5} if where == "top level" else {"rope_scaling": scaling}
    with pytest.raises(ConfigError, match=r"^partial_rotary_factor: not supported; got 0.5"):
        architecture_of(base["model_type"]).config_from_hf({**base, **entries})


def test_layer_types_of_glm_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"^mlp_layer_types: .* a list of 2 entries, each dense or sparse"):
        architecture_of("glm4_moe_lite").config_from_hf({**GLM4_MOE_LITE, "mlp_layer_types": ["dense"]})


def test_dense_layers_of_a_new_glm_are_written_as_types() -> None:
    """transformers ignores `first_k_dense_replace`."""
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2}
    architecture = architecture_of("glm4_moe_lite")
    config = Glm4MoeLiteConfig(**sizes, first_k_dense_replace=2)
    assert architecture.config_to_hf(config)["mlp_layer_types"] == ["dense", "dense", "sparse"]
    assert issubclass(Glm4MoeLite, DeepseekV3)


def test_the_default_sizes_are_those_of_deepseek_v3() -> None:
    model = DeepseekV3(DeepseekV3Config(), device="meta", dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 671_026_404_352
    assert set(cache_size(model).per_token.values()) == {61 * 1152}

"""Adapters of PEFT on transformers' models: the same results, gradients, files and merged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("peft")

import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from ligerzoo import AutoModel, adapters
from tests.adapters.models import randomize
from tests.models.tiny import well_conditioned

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),  # as it should
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    # transformers 5.23 renamed an attribute that PEFT 0.21 reads.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Gemma2": {"head_dim": 8, "sliding_window": 8},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 3},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                 "shared_expert_intermediate_size": 24, "tie_word_embeddings": False},
    "Qwen3_5": {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6},
    "NemotronH": {"head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8,
                  "n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6},
}  # fmt: skip
EAGER = {"attn_implementation": "eager"}  # in transformers 5.17, sdpa ignores Gemma 2's soft cap
PATTERNS = {"rank_pattern": {"o_proj": 6}, "alpha_pattern": {"layers.1.self_attn.q_proj": 5}}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]}),
    "embedding and head": ("Llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head", "o_proj"]}),
    "llama, DoRA": ("Llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head", "down_proj"], "use_dora": True}),
    "patterns, rsLoRA": ("Llama", {"target_modules": ["q_proj", "o_proj"], "use_rslora": True, **PATTERNS,
                                   "modules_to_save": ["lm_head", "model.norm"]}),
    "qwen3": ("Qwen3", {"target_modules": "all-linear"}),
    "some layers": ("Qwen3", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}),
    "regular expression": ("Qwen3", {"target_modules": r".*layers\.0\..*(q|k)_proj"}),
    "gemma2, DoRA": ("Gemma2", {"target_modules": ["q_proj", "k_proj", "o_proj"], "use_dora": True}),
    "gemma2, embedding": ("Gemma2", {"target_modules": ["q_proj", "embed_tokens"]}),
    "phi3": ("Phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
    "phi3, DoRA": ("Phi3", {"target_modules": ["qkv_proj", "down_proj"], "use_dora": True}),
    "mixtral": ("Mixtral", {"target_modules": ["q_proj"], **EXPERTS}),
    "mixtral, down": ("Mixtral", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
    "qwen3_moe": ("Qwen3Moe", {"target_modules": "all-linear"}),
    "qwen3_5": ("Qwen3_5", {"target_modules": "all-linear"}),
    "gpt_oss": ("GptOss", {"target_modules": ["q_proj"], **EXPERTS}),
    "nemotron_h": ("NemotronH", {"target_modules": ["in_proj", "q_proj", "mixer.up_proj"],
                                 "target_parameters": ["mixer.experts.up_proj", "mixer.experts.down_proj"]}),
    "qwen2_moe": ("Qwen2Moe", {"target_modules": ["q_proj", "shared_expert.down_proj"], **EXPERTS}),
}  # fmt: skip


def their_model(name: str) -> Any:
    config = getattr(transformers, f"{name}{'Text' if name == 'Qwen3_5' else ''}Config")(
        **SIZES, **MODELS[name], **EAGER
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if name == "Qwen3_5":
        for parameter_name, parameter in model.named_parameters():
            values = well_conditioned(parameter_name, torch.randn_like(parameter), adds_one=True)
            parameter.data = parameter.data if values is None else values
    return model


def their_class(name: str) -> Any:
    return getattr(transformers, f"{name}ForCausalLM")


def adapted(model: Any, **options: Any) -> Any:
    """Returns a model of PEFT with random updates."""
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM", **options)).eval()
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            noise = 0.2 * torch.randn_like(parameter)
            parameter.data = parameter + noise.abs() if "magnitude" in name else noise
    return peft_model


def stored(directory: Path) -> dict[str, Tensor]:
    """Returns the tensors of an adapter, without the embeddings that PEFT stores in addition."""
    tensors = load_file(directory / "adapter_model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(".base_layer.weight")}


def close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    hf_model = their_model(name)
    hf_model.save_pretrained(tmp_path / "base")
    theirs = adapted(hf_model, **options)
    theirs.save_pretrained(tmp_path / "theirs")
    ids = torch.randint(3, 64, (2, 11))
    expected = theirs(input_ids=ids, labels=ids)
    expected.loss.backward()

    ours = AutoModel.from_pretrained(tmp_path / "base")
    adapters.load_adapter(ours, tmp_path / "theirs")
    logits, loss = ours(ids).logits, ours(ids, labels=ids).loss
    assert close(logits, expected.logits, 1e-5)
    assert close(loss, expected.loss, 1e-5)

    adapters.save_adapter(ours, tmp_path / "ours")
    tensors = stored(tmp_path / "ours")
    assert tensors.keys() == stored(tmp_path / "theirs").keys()
    assert all(torch.equal(tensors[key], value) for key, value in stored(tmp_path / "theirs").items())
    loaded = PeftModel.from_pretrained(
        their_class(name).from_pretrained(tmp_path / "base", **EAGER), tmp_path / "ours"
    ).eval()
    assert torch.equal(loaded(input_ids=ids).logits, expected.logits)

    loss.backward()
    for parameter in ours.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.grad
    adapters.save_adapter(ours, tmp_path / "gradients")
    gradients = stored(tmp_path / "gradients")
    for key, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            key = key.replace(".default", "").replace("modules_to_save.", "")
            key = key.replace("magnitude_vector.weight", "magnitude_vector")
            assert close(gradients.pop(key), parameter.grad, 1e-5), key
    assert not gradients

    adapters.fuse(tmp_path / "base", tmp_path / "theirs", tmp_path / "fused")
    fused = their_class(name).from_pretrained(tmp_path / "fused", **EAGER).eval()
    assert close(fused(input_ids=ids).logits, expected.logits, 1e-5)
    if case != "gemma2, embedding":  # PEFT adds the update to the tied head too
        merged = theirs.merge_and_unload().state_dict()
        for key, value in fused.state_dict().items():
            ulp = torch.finfo(value.dtype).eps * merged[key].abs().max()
            assert (value - merged[key]).abs().max() <= 2 * ulp, key


@pytest.mark.parametrize("name, targets", [
    ("Phi3", ["q_proj", "v_proj", "up_proj"]), ("Phi3", None), ("Qwen2Moe", None), ("Gemma2", ["lm_head", "mlp"]),
])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"dora": True}], ids=str)
def test_our_adapters_in_peft(name: str, targets: Any, options: Any, tmp_path: Path) -> None:
    """Updates of parts of Phi3's fused weights become one update of a higher rank."""
    if name == "Qwen2Moe" and "dora" in options:
        pytest.skip("experts have no DoRA")
    their_model(name).save_pretrained(tmp_path / "base")
    ids = torch.randint(3, 64, (2, 11))
    ours = AutoModel.from_pretrained(tmp_path / "base")
    adapters.add_lora(ours, rank=3, alpha=5, targets=targets, **options)
    randomize(ours)
    adapters.save_adapter(ours, tmp_path / "adapter", base_model=tmp_path / "base")
    expected = ours(ids).logits
    theirs = PeftModel.from_pretrained(
        their_class(name).from_pretrained(tmp_path / "base", **EAGER), tmp_path / "adapter"
    )
    assert close(theirs.eval()(input_ids=ids).logits, expected, 1e-5)
    again = AutoModel.from_pretrained(tmp_path / "base")
    adapters.load_adapter(again, tmp_path / "adapter")
    assert close(again(ids).logits, expected, 1e-5)

"""Adapters of PEFT that hold weights of the base model: embeddings, added tokens, trained modules, rows of tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from ligerzoo import AutoModel, adapters
from tests.adapters.test_peft import SIZES, close

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:ensure_weight_tying=True but the model does not have tied:UserWarning"),
    pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

RESIZED: dict[str, Any] = {"tokens": 67}
TIED: dict[str, Any] = {"ensure_weight_tying": True}
BOTH = ["embed_tokens", "lm_head"]
EMBEDDING, HEAD = {"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}
BIAS = {"model": "Ernie4_5_Moe"}
Q = {"target_modules": ["q_proj"]}
CASES: dict[str, dict[str, Any]] = {
    "added tokens": RESIZED,
    "fewer tokens": {"tokens": 61},
    "embedding layers": {"save_embedding_layers": True},
    "embedding": EMBEDDING,
    "head": HEAD,
    "both": {"modules_to_save": BOTH},
    "embedding, added tokens": {**EMBEDDING, **RESIZED},
    "head, added tokens": {**HEAD, **RESIZED},
    "both, added tokens": {"modules_to_save": BOTH, **RESIZED},
    "embedding as one": {**EMBEDDING, **TIED},
    "head as one": {**HEAD, **TIED},
    "both as one, added tokens": {"modules_to_save": BOTH, **RESIZED, **TIED},
    "updated as one": {"target_modules": ["q_proj", "lm_head"], **TIED},
    "updated head, added tokens": {"target_modules": ["q_proj", "lm_head"], **RESIZED},
    "updated as one, added tokens": {"target_modules": ["q_proj", *BOTH], **RESIZED, **TIED},
    "rows": {"trainable_token_indices": [3, 60]},
    "rows as one": {"trainable_token_indices": {"embed_tokens": [60, 3], "lm_head": [60, 3]}, **TIED},
    "rows of the head": {"trainable_token_indices": {"lm_head": [7]}},
    "other rows of both": {"trainable_token_indices": {"model.embed_tokens": [5, 9, 7], "lm_head": [7]}},
    "rows, added tokens": {"trainable_token_indices": [64, 66], **RESIZED},
    "norms and MLPs": {"modules_to_save": ["norm", "layers.1.mlp"]},
    "a block": {"modules_to_save": ["layers.0", "lm_head"], "target_modules": r".*layers\.1\..*q_proj"},
    "fused": {"modules_to_save": ["qkv_proj", "layers.0.mlp"], "target_modules": ["o_proj"], "model": "Phi3"},
    "experts": {"modules_to_save": ["mlp", "norm"], "target_modules": ["o_proj"], "model": "Mixtral"},
    "renamed norms": {"modules_to_save": ["post_attention_layernorm", "post_mlp_layernorm"], "model": "Glm4"},
    "interleaved": {"modules_to_save": ["experts", "router", "self_attn"], "target_modules": ["lm_head"],
                    "model": "GptOss"},
    "bias, embedding layers": {"save_embedding_layers": True, **BIAS},
    "bias, head": {**HEAD, **BIAS},
    "bias, updated head, added tokens": {"target_modules": ["q_proj", "lm_head"], "use_dora": True, **RESIZED, **BIAS},
}  # fmt: skip


def their_base(directory: Path, tokens: int | None) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if tokens:
        model.resize_token_embeddings(tokens)
    return model


def changed(model: Any) -> Any:
    """Returns PEFT's model with other values of everything that trains."""
    with torch.no_grad():
        for parameter in {p.data_ptr(): p for p in model.parameters() if p.requires_grad}.values():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


MODULES = ("norms and MLPs", "a block", "fused", "experts", "renamed norms", "interleaved")
"""Cases in which the embedding does not matter."""


@pytest.mark.parametrize(
    "case, tied", [(case, tied) for case in CASES for tied in (True, False) if not (tied and case in MODULES)]
)
def test_parity(case: str, tied: bool, tmp_path: Path) -> None:
    options = {**Q, **CASES[case]}
    tokens, layers = options.pop("tokens", None), options.pop("save_embedding_layers", "auto")
    name = options.pop("model", "Llama")
    more = {"num_local_experts": 3} if name in ("Mixtral", "GptOss") else {}
    more |= {"head_dim": 8, "num_experts_per_tok": 2} if name == "GptOss" else {}
    more |= {"use_bias": True} if name == "Ernie4_5_Moe" else {}
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "tie_word_embeddings": tied, **more})
    base, model = tmp_path / "base", getattr(transformers, f"{name}ForCausalLM")(config)
    if model.lm_head.bias is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(base)
    theirs = changed(get_peft_model(their_base(base, tokens), LoraConfig(r=4, init_lora_weights=False, **options)))
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=layers)
    ids = torch.arange(1, 61)[None]
    expected = theirs(ids).logits

    ours = AutoModel.from_pretrained(base)
    if tokens:
        ours.resize_token_embeddings(tokens)
    adapters.load_adapter(ours, tmp_path / "theirs")
    assert close(ours(ids).logits, expected, 1e-5)

    adapters.fuse(base, tmp_path / "theirs", tmp_path / "fused")
    assert close(their_base(tmp_path / "fused", None).eval()(ids).logits, expected, 1e-5)

    ours(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    trained = ours(ids).logits
    adapters.save_adapter(ours, tmp_path / "ours")
    loaded = PeftModel.from_pretrained(their_base(base, tokens), tmp_path / "ours").eval()
    assert close(loaded(ids).logits, trained, 1e-5)
    again = AutoModel.from_pretrained(base)
    if tokens:
        again.resize_token_embeddings(tokens)
    adapters.load_adapter(again, tmp_path / "ours")
    assert close(again(ids).logits, trained, 1e-5)

"""Adapter files that do not fit: each is refused with one error that names the entry or tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ligerzoo import adapters
from ligerzoo.errors import CheckpointError, LigerzooError
from tests.adapters.models import llama, mixtral, randomize

Q = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model = llama()
    adapters.add_lora(model, rank=4, targets=["q_proj", "lm_head"], trained="model.norm")
    adapters.save_adapter(model, tmp_path / "adapter")
    return tmp_path / "adapter"


def change_config(directory: Path, **entries: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(directory: Path, message: str) -> None:
    """Asserts that loading fails with this message, and leaves the model unchanged."""
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        adapters.load_adapter(model, directory)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"peft_type": "IA3"}, "peft_type: not supported; got 'IA3'; expected 'LORA'"),
        ({"bias": "all"}, "bias: not supported; got 'all'; expected 'none'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: not supported; got 'pissa'"),
        ({"init_lora_weights": 1}, "init_lora_weights: not supported; got '1'"),
        ({"trainable_token_indices": [3]}, "tensors are missing; got no '.*embed_tokens.token_adapter"),
        ({"trainable_token_indices": [64]}, "trainable_token_indices: not a token id; got 64; expected less than 64"),
        ({"trainable_token_indices": [3, 3]}, "trainable_token_indices: invalid value.*expected distinct token ids"),
        ({"trainable_token_indices": {"wte": [3]}}, "not the embedding or the head; got 'wte'"),
        ({"trainable_token_indices": {"lm_head": [3]}}, "rows of a module that has an update; got 'lm_head'"),
        ({"modules_to_save": ["norm", "embed_tokens"]}, "tensors are missing; got no '.*embed_tokens.weight'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: not a supported entry"),
        ({"ensure_weight_tying": 1}, "ensure_weight_tying: invalid value; got '1'; expected true or false"),
        ({"something_new": 3}, "something_new: not a supported entry"),
        ({"use_dor": True}, "use_dor: not a supported entry.*Did you mean 'use_dora'"),
        ({"r": "4"}, "r: invalid value; got '4'; expected a number"),
        ({"r": 4.5}, "rank=4.5; expected an integer"),
        ({"r": 10**30}, "wrong shape"),
        ({"r": 5}, r"q_proj.lora_A.weight': wrong shape; got \(4, 32\); expected \(5, 32\)"),
        ({"lora_alpha": float("nan")}, "alpha=nan"),
        ({"lora_dropout": 2}, r"dropout=2; expected a number from 0 to 1, not 1"),
        ({"use_dora": True}, "tensors are missing; got no '.*lora_magnitude_vector'"),
        ({"use_dora": "yes"}, "use_dora: invalid value; got 'yes'"),
        ({"target_modules": {"q_proj": 1}}, "target_modules: invalid value"),
        ({"target_modules": ["q_proj"]}, "unexpected tensors.*lm_head"),
        (
            {"target_modules": ["q_proj", "lm_head", "query"]},
            "target_modules: the model has no such weight; got 'query'",
        ),
        ({"target_modules": ["q_proj", "lm_head", "v_proj"]}, "tensors are missing; got no '.*v_proj.lora_A.weight'"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters: the model has no such weight"),
        ({"layers_to_transform": [0]}, "unexpected tensors"),
        ({"layers_to_transform": "0"}, "layers_to_transform: invalid value"),
        ({"modules_to_save": None}, "unexpected tensors; got 'base_model.model.model.norm.weight'"),
        ({"rank_pattern": {"(a+)+$": 4}}, r"rank_pattern: a regular expression is not supported; got '\(a\+\)\+\$'"),
        ({"rank_pattern": {"q_proj": -1}}, "rank=-1"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern: invalid value"),
    ],
    ids=str,
)
def test_config(entries: dict[str, Any], message: str, directory: Path) -> None:
    change_config(directory, **entries)
    refused(directory, message)


def test_a_slow_regular_expression_is_not_evaluated(directory: Path) -> None:
    change_config(directory, target_modules="(((a+)+)+)+$|.*")
    adapters.load_adapter(llama(), directory)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(f"{Q}.lora_B.weight"), f"tensors are missing; got no '{Q}.lora_B.weight'"),
        (lambda t: t.update({"extra": torch.ones(2)}), "unexpected tensors; got 'extra'"),
        (
            lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(4, 32)}),
            r"wrong shape; got \(4, 32\); expected \(32, 4\)",
        ),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 32).int()}),
            "not a dtype of weights; got torch.int32",
        ),
        (lambda t: t.update({f"{Q}.base_layer.weight": torch.ones(3)}), "unexpected tensors"),
        (
            lambda t: t.update({f"{EMBEDDING}.weight": torch.ones(70, 32)}),
            r"wrong shape; got \(70, 32\); expected \(64, 32\).*call model.resize_token_embeddings\(70\) first",
        ),
        (lambda t: t.update({f"{EMBEDDING}.modules_to_save.weight": torch.ones(64, 32)}), "unexpected tensors"),
        (lambda t: t.clear(), "tensors are missing"),
    ],
)
def test_tensors(change: Any, message: str, directory: Path) -> None:
    change_tensors(directory, change)
    refused(directory, message)


@pytest.mark.parametrize("name", ["block_sparse_moe.experts.3.w1", "mlp.experts.0.gate_proj"])
@pytest.mark.parametrize("targets", [["q_proj", "w1"], ["gate_proj"], ".*"])
def test_updates_of_single_experts(name: str, targets: Any, tmp_path: Path) -> None:
    model = mixtral()
    adapters.add_lora(model, rank=4, targets="q_proj")
    adapters.save_adapter(model, tmp_path)
    change_config(tmp_path, target_modules=targets)
    stored = f"base_model.model.model.layers.0.{name}.lora_A.weight"
    change_tensors(tmp_path, lambda t: t.update({stored: torch.ones(4, 32)}))
    with pytest.raises(CheckpointError, match=f"updates of single experts.*got '{stored}'.*merge_and_unload"):
        adapters.load_adapter(mixtral(), tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x08\0\0\0\0\0\0\0garbage!", b"version https://git-lfs\n"])
def test_damaged_files(content: bytes, directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(content)
    refused(directory, "adapter_model.safetensors: not a valid safetensors file")
    (directory / "adapter_config.json").write_bytes(content[:1] + b"[")
    refused(directory, "adapter_config.json")


def test_missing_files(directory: Path) -> None:
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    refused(directory, "1 of 1 weight files missing.*loading a pickle runs code")
    (directory / "adapter_config.json").unlink()
    refused(directory, "adapter_config.json: no such file")


def test_different_values_of_a_tied_weight(tmp_path: Path) -> None:
    tied = llama(tie_word_embeddings=True)
    adapters.add_lora(tied, rank=4, targets="q_proj")
    adapters.save_adapter(tied, tmp_path)
    weights = {f"{EMBEDDING}.weight": torch.ones(64, 32), "base_model.model.lm_head.weight": torch.zeros(64, 32)}
    change_tensors(tmp_path, lambda t: t.update(weights))
    with pytest.raises(CheckpointError, match=r"tied weights have different values.*tie_word_embeddings=False"):
        adapters.load_adapter(llama(tie_word_embeddings=True), tmp_path)
    model = llama()
    adapters.load_adapter(model, tmp_path)
    assert not model.lm_head.weight.any()


def test_another_base_model(directory: Path) -> None:
    model = llama(hidden_size=64)
    with pytest.raises(CheckpointError, match="wrong shape"):
        adapters.load_adapter(model, directory)


def test_the_files_are_replaced_together_and_others_kept(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine")
    model = llama()
    adapters.add_lora(model, rank=2, targets="v_proj")
    adapters.save_adapter(model, directory)
    assert sorted(path.name for path in directory.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "notes.txt"
    ]  # fmt: skip
    adapters.load_adapter(llama(), directory)


def test_what_peft_cannot_express(tmp_path: Path) -> None:
    with pytest.raises(LigerzooError, match="save_adapter: the model has no adapter"):
        adapters.save_adapter(llama(), tmp_path)
    model = llama()
    adapters.add_lora(model, targets="q_proj")
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"an update of a weight or the weight itself.*Freeze the weight"):
        adapters.save_adapter(model, tmp_path)


def test_adapters_in_bf16(tmp_path: Path) -> None:
    model = mixtral()
    adapters.add_lora(model, dtype=torch.bfloat16)
    randomize(model)
    adapters.save_adapter(model, tmp_path / "adapter")
    assert {t.dtype for t in load_file(tmp_path / "adapter/adapter_model.safetensors").values()} == {torch.bfloat16}
    other = mixtral()
    adapters.load_adapter(other, tmp_path / "adapter")
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    adapters.save_adapter(other, tmp_path / "again")
    again = load_file(tmp_path / "again/adapter_model.safetensors")
    first = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert all(torch.equal(first[name].float(), tensor) for name, tensor in again.items())

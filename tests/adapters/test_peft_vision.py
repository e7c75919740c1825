"""Adapters of vision-language models: PEFT and we read each other's files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("peft")

import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from ligerzoo import AutoModel, adapters
from ligerzoo.adapters.targets import targets_of
from tests.adapters.models import randomize
from tests.train.tiny_vision import KINDS, write_vision_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    # transformers 5.23 renamed an attribute that PEFT 0.21 reads.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

TOWERS = {
    **dict.fromkeys(["gemma3", "gemma4", "mistral3", "muse_glimmer"], "vision_tower"),
    "gemma4_unified": "embed_vision",  # instead of a tower
    "mllama": "vision_model",
}
"""Names of the vision towers; others are named "visual"."""


OLD_PREFIXES: dict[str, list[dict[str, str]]] = {
    "gemma3": [
        {"model.language_model.": "language_model.model.", "lm_head": "language_model.lm_head",
         "model.vision_tower.": "vision_tower.vision_model.", "model.multi_modal_projector.": "multi_modal_projector."},
        {"model.vision_tower.": "model.vision_tower.vision_model."},
    ],
    "mistral3": [
        {"model.language_model.": "language_model.model.", "lm_head": "language_model.lm_head",
         "model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector."},
    ],
    "mllama": [
        {"model.language_model.": "language_model.model.", "lm_head": "language_model.lm_head",
         "model.vision_model.": "vision_model.", "model.multi_modal_projector.": "multi_modal_projector."},
    ],
    "qwen2_vl": [{"model.language_model.": "model.", "model.visual.": "visual."}],
    "qwen2_5_vl": [{"model.language_model.": "model.", "model.visual.": "visual."}],
}  # fmt: skip
"""Prefixes of transformers before 4.52 and 5.0, by those of today."""


@pytest.fixture(params=[*KINDS, "glm4v"])
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def base(kind: str, tmp_path: Path) -> Path:
    return write_vision_checkpoint(tmp_path / "base", kind)


def their_model(base: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 1e-4 * expected.abs().max())


def test_names_are_those_of_transformers(kind: str, base: Path) -> None:
    theirs = {name for name, _ in their_model(base).named_parameters(remove_duplicate=False)}
    assert {target.stored_parameter for target in targets_of(AutoModel.from_pretrained(base))} <= theirs


def test_peft_reads_our_adapters(kind: str, base: Path, tmp_path: Path) -> None:
    ours = AutoModel.from_pretrained(base).eval()
    targets = ["layers.0", TOWERS.get(kind, "visual")]
    if kind == "glm4v_moe":  # PEFT takes every "gate_proj" of these models for a part of experts
        targets = ["self_attn", "visual*attn", "experts.gate_up_proj", "experts.down_proj"]
    adapters.add_lora(ours, 2, 4.0, targets)
    randomize(ours)
    adapters.save_adapter(ours, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(their_model(base), tmp_path / "adapter").eval()  # a missing tensor is a warning
    updates = {name: p for name, p in theirs.named_parameters() if "lora_B" in name}
    assert updates
    assert all(parameter.any() for parameter in updates.values())
    ids = torch.randint(3, 200, (2, 9))
    with torch.no_grad():
        assert close(theirs(input_ids=ids).logits, ours(ids).logits)


def test_we_read_adapters_of_peft(base: Path, tmp_path: Path) -> None:
    theirs = get_peft_model(their_model(base), LoraConfig(r=2, target_modules=r".*language_model.*\.(q|down)_proj"))
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = AutoModel.from_pretrained(base).eval()
    adapters.load_adapter(ours, tmp_path / "adapter")
    ids = torch.randint(3, 200, (2, 9))
    with torch.no_grad():
        assert close(ours(ids).logits, theirs.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("whole_names", [True, False])
def test_names_of_old_versions(kind: str, base: Path, whole_names: bool, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(base)
    towers = TOWERS.get(kind, "visual")
    adapters.add_lora(
        model,
        2,
        4.0,
        ["layers.*q_proj", towers if kind == "gemma4_unified" else f"{towers}*mlp", "lm_head"],
        trained=["model.norm"],
    )
    randomize(model)
    adapters.save_adapter(model, tmp_path / "new")
    for old in OLD_PREFIXES.get(kind, []):

        def renamed(name: str, old: dict[str, str] = old) -> str:
            path = name.removeprefix("base_model.model.")
            prefix = next((prefix for prefix in old if path.startswith(prefix)), "")
            return name.replace(prefix, old.get(prefix, ""), 1)

        tensors = load_file(tmp_path / "new/adapter_model.safetensors")
        config = json.loads((tmp_path / "new/adapter_config.json").read_text())
        if whole_names:
            updates = {name.partition(".lora_")[0] for name in tensors if ".lora_A" in name}
            config["target_modules"] = [renamed(name).removeprefix("base_model.model.") for name in updates]
        config["modules_to_save"] = list(map(renamed, config["modules_to_save"]))
        (tmp_path / "old").mkdir(exist_ok=True)
        (tmp_path / "old/adapter_config.json").write_text(json.dumps(config))
        save_file({renamed(name): value for name, value in tensors.items()}, tmp_path / "old/adapter_model.safetensors")
        loaded = AutoModel.from_pretrained(base)
        adapters.load_adapter(loaded, tmp_path / "old")
        expected = model.state_dict()
        assert all(torch.equal(tensor, expected.pop(name)) for name, tensor in loaded.state_dict().items())
        assert not expected

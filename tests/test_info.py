"""The description of a checkpoint, without its weights, and of all architectures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ligerzoo import cli, info, models
from ligerzoo.convert import MODEL_TYPES, architecture_of
from ligerzoo.errors import ConfigError
from ligerzoo.layers.kv_cache import cache_size
from ligerzoo.models import (
    Gemma2,
    Gemma2Config,
    Llama,
    LlamaConfig,
    Qwen3_5Text,
    Qwen3_5TextConfig,
    Qwen3Moe,
    Qwen3MoeConfig,
)
from ligerzoo.models.moe import RoutedConfig
from tests.models.tiny import Tiny
from tests.models.zoo import TEXT_CHECKPOINTS

ROOT = Path(__file__).parent.parent


def config_class(tiny: Tiny) -> type:
    return architecture_of(tiny.config["model_type"]).config_class


def test_every_architecture_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--architectures"]) == 0
    out = capsys.readouterr().out
    for model_type in MODEL_TYPES:
        name = architecture_of(model_type).model_class.__name__
        heading = f"{name} ({model_type})\n  "
        assert heading in out
    assert max(map(len, out.splitlines())) <= 100
    assert "Distinctive" not in out


def test_architectures_are_described_in_15_words() -> None:
    too_long = {a.model_type: a.distinctive for a in info.architectures() if len(a.distinctive.split()) > 15}
    assert not too_long


def test_the_page_has_the_same_table() -> None:
    subprocess.run([sys.executable, "-m", "tools.architectures", "--check"], cwd=ROOT, check=True)


def test_a_docstring_without_what_is_distinctive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.llama, "__doc__", "Llama 2.\n\nA decoder.")
    message = "docstring of ligerzoo.models.llama: no paragraph on what is distinctive; expected a first line that"
    with pytest.raises(ConfigError, match=f"^{message}.*'Distinctive: '$"):
        info.architectures()


def test_experts_and_windows(tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(
        **sizes, num_hidden_layers=2, head_dim=4, intermediate_size=24, moe_intermediate_size=8, num_experts=4,
        num_experts_per_tok=1,
    )  # fmt: skip
    Qwen3Moe(config).save_pretrained(tmp_path / "mixture")
    text = info.describe(tmp_path / "mixture")
    expert = 3 * 16 * 8
    parameters = sum(p.numel() for p in Qwen3Moe(config).parameters())
    assert "experts       4 of width 8, 1 per token" in text
    assert f"{parameters - 2 * 3 * expert:,} (" in text

    Gemma2(Gemma2Config(**sizes, num_hidden_layers=3, head_dim=4, sliding_window=7)).save_pretrained(tmp_path / "gemma")
    text = info.describe(tmp_path / "gemma")
    assert "windows       2 of 3 layers attend to the last 7 tokens" in text
    assert "64 B per token of context, up to 896 B for windows" in text


@pytest.mark.parametrize(
    "tiny", [tiny for tiny in TEXT_CHECKPOINTS if issubclass(config_class(tiny), RoutedConfig)], ids=str
)
def test_dense_mlps_and_experts_only_where_a_layer_has_them(tmp_path: Path, tiny: Tiny) -> None:
    tiny.write(tmp_path)
    architecture = architecture_of(tiny.config["model_type"])
    model = architecture.build(architecture.config_from_hf({**tiny.config, **tiny.corrected}), device="meta")
    names = [name for name, _ in model.named_parameters() if ".layers." in name]
    entries = {line.split()[0]: line for line in reversed(info.describe(tmp_path).splitlines())}
    is_dense = any(".mlp.down_proj" in name for name in names)
    assert ("feed-forward" in entries["shape"]) == is_dense
    is_alone = "shared" in entries and "experts" not in entries  # Granite's MLPs without experts have this name
    assert ("feed-forward" in entries or is_alone) == is_dense  # in the list of parameters
    assert ("width" in entries.get("experts", "")) == any(".experts." in name for name in names)


@pytest.mark.parametrize("model_type", ["unheard-of", None, 5, ["llama"]])
def test_an_unknown_architecture_is_described_by_its_weight_files(tmp_path: Path, model_type: object) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = Llama(LlamaConfig(**sizes, num_attention_heads=4), dtype=None)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": "nonsense"}))
    lines = [" ".join(line.split()) for line in info.describe(tmp_path).splitlines()]
    parameters = sum(p.numel() for p in model.parameters())
    neither = "neither in ligerzoo.models nor registered in this process"
    assert lines[1].startswith("architecture model_type ")
    assert lines[1].endswith(neither)
    assert any(line.startswith(f"parameters {parameters:,} (") for line in lines)
    assert "dtype float32" in lines
    assert f"generation {4 * parameters / 1000:.3g} kB for the weights" in lines
    assert any(line.startswith("model.safetensors ") for line in lines)
    assert not any(line.startswith(("shape", "context")) for line in lines)


def test_states_of_linear_attention(tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 3,
    }
    model = Qwen3_5Text(Qwen3_5TextConfig(**sizes, **heads, num_hidden_layers=4, intermediate_size=24))
    model.save_pretrained(tmp_path)
    text = info.describe(tmp_path)
    assert "states        3 of 4 layers use linear attention, whose state has a fixed size" in text
    assert "linear attention" in text
    cache = model.new_cache()
    model(torch.tensor([[1, 2]]), past_key_values=cache)
    states = [buffer for layer in cache.layers[:3] for buffer in (layer._keys, layer._values)]
    nbytes = sum(state.nbytes for state in states if state is not None)
    assert cache_size(model).states == nbytes
    assert f"128 B per token of context, {nbytes / 1000:.3g} kB per sequence for states" in text

"""`ligerzoo fuse`: merged checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import AutoModel, Tokenizer, adapters, cli
from tests.adapters.models import gemma2, llama, mixtral, phi3, randomize, token_ids
from tests.train.data_helpers import CHATML, tokenizer

MODELS: dict[str, Any] = {"llama": llama, "mixtral": mixtral, "phi3": phi3, "gemma2": gemma2}


def write(name: str, directory: Path, dtype: torch.dtype) -> None:
    """Writes a base model and an adapter."""
    model = MODELS[name]().to(dtype)
    model.save_pretrained(directory / "base")
    adapters.add_lora(model, targets=["self_attn", "mlp", "embed_tokens"])
    randomize(model, 0.05)
    adapters.save_adapter(model, directory / "adapter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_command_writes_what_merging_and_saving_write(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write(name, tmp_path, dtype)
    arguments = [str(tmp_path / part) for part in ("base", "adapter", "fused")]
    assert cli.main(["fuse", *arguments, "--max-shard-size", "20KB"]) == 0
    model = AutoModel.from_pretrained(tmp_path / "base")
    adapters.load_adapter(model, tmp_path / "adapter")
    expected = model(ids := token_ids()).logits
    adapters.merge_lora(model)
    model.save_pretrained(tmp_path / "merged", max_shard_size="20KB")
    files = sorted(path.name for path in (tmp_path / "merged").iterdir())
    assert len(files) > 3
    assert files == sorted(path.name for path in (tmp_path / "fused").iterdir())
    for file in files:
        assert (tmp_path / "merged" / file).read_bytes() == (tmp_path / "fused" / file).read_bytes(), file
    fused = AutoModel.from_pretrained(tmp_path / "fused")
    assert {parameter.dtype for parameter in fused.parameters()} == {dtype}
    error = (fused(ids).logits - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.1)


def test_each_weight_is_merged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, when it is written: also experts, which checkpoints store one by one."""
    from ligerzoo.layers.lora import LoRAExperts

    merged: list[str] = []
    original = LoRAExperts.merged_weight

    def recording(self: LoRAExperts, parameter: str) -> torch.Tensor:
        merged.append(parameter)
        return original(self, parameter)

    write("mixtral", tmp_path, torch.float32)
    monkeypatch.setattr(LoRAExperts, "merged_weight", recording)
    adapters.fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "fused")
    assert sorted(merged) == ["down_proj"] * 2 + ["gate_up_proj"] * 2


def test_the_tokenizer_and_the_template_are_the_adapters(tmp_path: Path) -> None:
    write("llama", tmp_path, torch.float32)
    own = "{{ messages[0].content }}"
    base, adapter = tokenizer(CHATML), tokenizer(own)
    base.save_pretrained(tmp_path / "base")
    paths = [str(tmp_path / part) for part in ("base", "adapter")]
    for expected, name in ((CHATML, "one"), (own, "two")):
        assert cli.main(["fuse", *paths, str(tmp_path / name)]) == 0
        templates = Tokenizer.from_pretrained(tmp_path / name).chat_templates
        assert [template.source for template in templates.values()] == [expected]
        adapter.save_pretrained(tmp_path / "adapter")


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("llama", tmp_path, torch.float32)
    base, adapter = str(tmp_path / "base"), str(tmp_path / "adapter")
    assert cli.main(["fuse", base, adapter, adapter]) == 1
    assert "already exists; expected a new or empty directory" in capsys.readouterr().err
    assert cli.main(["fuse", base, base, str(tmp_path / "new")]) == 1
    error = capsys.readouterr().err
    assert "adapter_config.json: no such file" in error
    assert error.endswith("Pass the directory of an adapter in Hugging Face format.\n")
    assert not (tmp_path / "new").exists()

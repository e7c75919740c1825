"""The commands `embed` and `serve` with embedding models."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo
from safetensors import safe_open
from safetensors.torch import load_file

from ligerzoo import AutoModelForEmbedding, adapters, cli, info
from ligerzoo.info import describe
from tests.embedding.test_embedding_model import write_new_model
from tests.train.tiny_run import write_checkpoint

TEXTS = ["liger", "a tiger and a lion", "", "cats"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embedding")
    write_new_model(directory)
    return directory


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    return tmp_path / "texts.txt"


def test_a_tensor_of_the_lines(directory: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = texts.with_name("out.safetensors")
    command = ["embed", str(directory), "--input", str(texts), "--output", str(output), "--device", "cpu"]
    assert cli.main(command) == 0
    assert f"{output}: 4 embeddings of 24 features, " in capsys.readouterr().out
    model = AutoModelForEmbedding.from_pretrained(directory)
    torch.testing.assert_close(load_file(output)["embeddings"], model.encode(TEXTS))
    assert cli.main(command) == 1
    assert f"{output}: already exists; expected a new file" in capsys.readouterr().err
    output.unlink()
    assert cli.main([*command, "--prompt-name", "query", "--dimensions", "5", "--normalize", "--batch-size", "3"]) == 0
    want = model.encode(TEXTS, prompt_name="query", truncate_dim=5, normalize=True)
    torch.testing.assert_close(load_file(output)["embeddings"], want)
    assert sorted(path.name for path in texts.parent.iterdir()) == ["out.safetensors", "texts.txt"]


def test_lines_of_json(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    source.write_text('"liger"\n{"question": "a tiger", "id": 7}\n')
    command = ["embed", str(directory), "--input", str(source), "--output", str(output), "--device", "cpu"]
    assert cli.main([*command, "--field", "question"]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["line"], line.get("id")) for line in lines] == [(1, None), (2, 7)]
    want = AutoModelForEmbedding.from_pretrained(directory).encode(["liger", "a tiger"])
    torch.testing.assert_close(torch.tensor([line["embedding"] for line in lines]), want)
    output.unlink()
    capsys.readouterr()
    for content, problem in (
        (
            '"a"\n[1]\n',
            f"{source}, line 2: invalid line; got '[1]'; expected a JSON string, or an object with",
        ),
        ("{", f"{source}, line 1: not valid JSON"),
        ("", f"{source}: no texts"),
    ):
        source.write_text(content)
        assert cli.main(command) == 1
        assert problem in capsys.readouterr().err
        assert not output.exists()


def test_an_interrupted_command_leaves_nothing(directory: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ligerzoo.cli.embed.write_embeddings", interrupt)
    command = ["embed", str(directory), "--input", str(texts), "--output", str(texts.with_name("out.jsonl"))]
    assert cli.main(command) == 130
    assert [path.name for path in texts.parent.iterdir()] == ["texts.txt"]


def test_a_fresh_process_reads_standard_input(directory: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    command = [sys.executable, "-m", "ligerzoo", "embed", str(directory), "--input", "-", "--output", str(output)]
    result = subprocess.run(command, input="liger\r\ncats", capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    want = AutoModelForEmbedding.from_pretrained(directory).encode(["liger", "cats"])
    torch.testing.assert_close(load_file(output)["embeddings"].cpu(), want, rtol=1e-4, atol=1e-4)


def test_adapters_and_plain_checkpoints(directory: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForEmbedding.from_pretrained(directory)
    adapters.add_lora(model, rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapters.save_adapter(model, texts.with_name("adapter"), base_model=directory)
    output = texts.with_name("out.safetensors")
    given = ["--input", str(texts), "--output", str(output), "--device", "cpu"]
    assert cli.main(["embed", str(texts.with_name("adapter")), *given]) == 0
    torch.testing.assert_close(load_file(output)["embeddings"], model.encode(TEXTS))
    output.unlink()
    write_checkpoint(texts.with_name("plain"))
    assert cli.main(["embed", str(texts.with_name("plain")), *given]) == 1
    assert "it is unknown how to pool" in capsys.readouterr().err
    assert (
        cli.main(["embed", str(texts.with_name("plain")), *given, "--pooling", "lasttoken", "--max-length", "9"]) == 0
    )
    plain = AutoModelForEmbedding.from_pretrained(texts.with_name("plain"), pooling="lasttoken", max_length=9)
    torch.testing.assert_close(load_file(output)["embeddings"], plain.encode(TEXTS))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["embed", str(directory), "--input", str(texts), "--output", "out.txt"])
    assert "got 'out.txt'; expected a name that ends with .safetensors or .jsonl" in capsys.readouterr().err


def test_converting_and_merging_keep_the_modules(directory: Path, tmp_path: Path) -> None:
    assert cli.main(["convert", str(directory), str(tmp_path / "copy")]) == 0
    model = AutoModelForEmbedding.from_pretrained(directory)
    torch.testing.assert_close(
        AutoModelForEmbedding.from_pretrained(tmp_path / "copy").encode(TEXTS), model.encode(TEXTS)
    )
    adapters.add_lora(model, rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapters.save_adapter(model, tmp_path / "adapter")
    assert cli.main(["fuse", str(directory), str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    merged = AutoModelForEmbedding.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged.encode(TEXTS), model.encode(TEXTS), rtol=1e-4, atol=1e-5)


def test_serving_an_embedding_model(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = pytest.importorskip("ligerzoo.serve.server")
    services = []
    monkeypatch.setattr(server.Server, "run_until_stopped", lambda self: services.append(self._engine))
    assert cli.main(["serve", str(directory), "--port", "0", "--batch-size", "3", "--max-context", "20"]) == 0
    assert type(services[0]).__name__ == "EmbeddingThread"
    assert services[0]._model.max_length == 20
    for flag, value in (("--max-cache-tokens", "9"), ("--cache-dtype", "float8_e4m3fn")):
        assert cli.main(["serve", str(directory), "--port", "0", flag, value]) == 1
        assert (
            f"{flag}: not supported; got {value}; expected no such option for an embedding" in capsys.readouterr().err
        )


def test_info_names_the_modules(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "embeddings    mean+max, dense 24 (tanh), normalize; cosine; prompts 'query'" in describe(directory)
    page, model = describe(directory), AutoModelForEmbedding.from_pretrained(directory)
    dense = sum(weight.numel() for weight in model.stages.parameters())
    assert re.search(rf"dense modules +{dense:,} ", page)
    assert re.search(r"2_Dense/model\.safetensors  \S+ kB", page)
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    headers = {}
    for file in ("model.safetensors", "2_Dense/model.safetensors"):
        with safe_open(copy / file, "pt") as opened:
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        tensors = {name: TensorInfo(dtype="F32", shape=shape, data_offsets=(0, 0)) for name, shape in shapes.items()}
        headers[file] = SafetensorsFileMetadata(metadata={}, tensors=tensors)
        (copy / file).unlink()
    root = SafetensorsRepoMetadata(None, False, {}, {"model.safetensors": headers["model.safetensors"]})
    monkeypatch.setattr(info, "locate_files", lambda *_, **__: copy)
    monkeypatch.setattr(HfApi, "get_safetensors_metadata", lambda *_, **__: root)
    monkeypatch.setattr(HfApi, "parse_safetensors_file_metadata", lambda _, repo, file, **__: headers[file])
    assert describe("some/embedder").splitlines()[1:] == page.splitlines()[1:]
    (copy / "1_Pooling/config.json").write_text('{"pooling_mode": "attention"}')
    assert "embeddings    cannot be loaded: " in describe("some/embedder")

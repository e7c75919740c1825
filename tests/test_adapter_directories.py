"""Commands that are given an adapter's directory: they run its base model with the adapter, or say what to do."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from ligerzoo import AutoModel, Tokenizer, adapters, cli
from ligerzoo.errors import CheckpointError
from tests.adapters.models import randomize

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASSETS = Path(__file__).parent.parent / "ligerzoo" / "demo" / "assets" / "tiny-python-llama"


def write_adapter(directory: Path, base: Any, added_tokens: int = 0) -> None:
    model = AutoModel.from_pretrained(ASSETS)
    if added_tokens:
        model.resize_token_embeddings(model.config.vocab_size + added_tokens)
    adapters.add_lora(model, rank=2, targets=["q_proj", "down_proj"])
    torch.manual_seed(0)
    randomize(model)
    adapters.save_adapter(model, directory, base_model=base)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ASSETS, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def repositories(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """A fake hub with the directories of `hub/org`. Returns the list of downloaded repositories and revisions."""
    calls: list[tuple[str, str | None]] = []

    def snapshot_download(
        repo_id: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool, **_: Any
    ) -> str:
        calls.append((repo_id, revision))
        source, snapshot = workplace / "hub" / repo_id, workplace / "cache" / repo_id / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in source.iterdir()]
        for name in huggingface_hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(source / name, snapshot / name)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def output(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.main(list(map(str, arguments))) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("base", [pytest.param("base", marks=pytest.mark.thorough), "../base", "absolute"])
def test_generate_and_evaluate(workplace: Path, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The path of the base may be relative to the working directory or to the adapter."""
    write_adapter(Path("adapter"), workplace / "base" if base == "absolute" else base)
    adapters.fuse("base", "adapter", "fused")
    Tokenizer.from_pretrained(ASSETS).save_pretrained("fused")
    Path("data.txt").write_text("def add(a, b):\n    return a + b\n" * 20)
    options = ["--dtype", "float32", "--max-new-tokens", 8, "--prompt", "def "]
    texts = [output(["generate", model, *options], capsys) for model in ("adapter", "fused", "base")]
    assert texts[0] == texts[1] != texts[2]
    options = ["--dtype", "float32", "--json", "--data", "data.txt", "--seq-length", 64]
    models = (["adapter"], ["base", "--adapter", "adapter"], ["base"])
    losses = [json.loads(output(["evaluate", *model, *options], capsys))["loss"] for model in models]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "embed"])
def test_the_adapter_is_an_option(
    command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """BASE --adapter DIR runs as DIR alone, with the adapter's tokenizer."""
    write_adapter(Path("adapter"), "base")
    Tokenizer.from_pretrained(ASSETS).save_pretrained("adapter")
    (Path("adapter") / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    Path("texts.txt").write_text("def f\n")
    if command == "serve":
        pytest.importorskip("uvicorn")
        from ligerzoo.serve.server import Server

        monkeypatch.setattr(Server, "run_until_stopped", lambda self: None)
    loaded: list[str] = []
    load_adapter = adapters.load_adapter

    def spy(model: Any, directory: str) -> list[str]:
        loaded.append(directory)
        return load_adapter(model, directory)

    monkeypatch.setattr(adapters, "load_adapter", spy)
    options = {
        "generate": ["--chat", "--max-new-tokens", 6, "--prompt", "def "],
        "chat": ["--max-new-tokens", 6],
        "serve": ["--port", 0, "--device", "cpu"],
        "embed": ["--pooling", "mean", "--input", "texts.txt", "--output"],
    }[command]
    printed = []
    for index, model in enumerate((["adapter"], ["base", "--adapter", "adapter"])):
        monkeypatch.setattr("sys.stdin", io.StringIO("def \n"))
        more = [f"{index}.jsonl"] if command == "embed" else []
        printed.append(output([command, *model, "--dtype", "float32", *options, *more], capsys))
    assert loaded == ["adapter", "adapter"]
    if command == "embed":
        assert Path("0.jsonl").read_text() == Path("1.jsonl").read_text()
    elif command != "serve":
        assert printed[0] == printed[1] != ""


def test_an_adapter_with_added_tokens(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(workplace / "adapter", "base", added_tokens=3)
    Tokenizer.from_pretrained(ASSETS).save_pretrained(workplace / "adapter")
    (workplace / "base" / "tokenizer.json").unlink()
    options = ["--dtype", "float32", "--max-new-tokens", 8, "--prompt", "def "]
    text = output(["generate", "adapter", *options], capsys)
    adapters.fuse("base", "adapter", "fused")
    assert (
        AutoModel.from_pretrained("fused").config.vocab_size == AutoModel.from_pretrained(ASSETS).config.vocab_size + 3
    )
    Tokenizer.from_pretrained(ASSETS).save_pretrained("fused")
    assert output(["generate", "fused", *options], capsys) == text


@pytest.mark.parametrize("base", ["org/base", "base"])
def test_adapters_on_the_hub(
    workplace: Path, repositories: list[Any], base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base is on the hub too, or a directory here; --revision is the adapter's."""
    write_adapter(workplace / "hub/org/adapter", base, added_tokens=2)
    Tokenizer.from_pretrained(ASSETS).save_pretrained(workplace / "hub/org/adapter")
    path = workplace / "hub/org/adapter/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "revision": "v7"}))
    shutil.copytree(ASSETS, workplace / "hub/org/base")
    (workplace / "hub/org/base/tokenizer.json").unlink()
    Path("data.txt").write_text("def add(a, b):\n    return a + b\n" * 20)
    for command in (
        ["generate", "--max-new-tokens", 8, "--prompt", "def "],
        ["evaluate", "--json", "--data", "data.txt", "--seq-length", 64],
    ):
        options = [*command[1:], "--dtype", "float32"]
        expected = output([command[0], "hub/org/adapter", *options], capsys) if base == "base" else None
        got = output([command[0], "org/adapter", "--revision", "v2", *options], capsys)
        assert expected is None or got == expected
    assert {*repositories} == {
        ("org/adapter", "v2"), ("org/adapter", COMMIT),
        *([("org/base", "v7"), ("org/base", COMMIT)] if base == "org/base" else []),
    }  # fmt: skip


def test_repositories_without_the_base_model(
    workplace: Path, repositories: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(workplace / "hub/org/adapter", "/no/such")
    assert cli.main(["generate", "org/adapter", "--prompt", "a"]) == 1
    error = capsys.readouterr().err
    assert "org/adapter, base_model_name_or_path: the base model of the adapter is not here; got '/no/such'" in error
    assert "`ligerzoo fuse BASE org/adapter OUTPUT`" in error
    with pytest.raises(CheckpointError, match=r"config.json: no such file.*an adapter.*ligerzoo fuse.*load_adapter"):
        AutoModel.from_pretrained("org/adapter")
    assert cli.main(["info", "org/adapter"]) == 1
    assert "ligerzoo fuse BASE ADAPTER OUTPUT" in capsys.readouterr().err


@pytest.mark.parametrize("base", [None, "", "./no/such/base", "/no/such", "gone", 3])
@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_a_base_model_that_is_not_found(
    workplace: Path, base: Any, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(Path("adapter"), "base")
    path = Path("adapter/adapter_config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base}))
    assert cli.main([command, "adapter", "--data" if command == "evaluate" else "--prompt", "x.txt"]) == 1
    error = capsys.readouterr().err
    assert "adapter, base_model_name_or_path" in error
    assert "`ligerzoo fuse BASE adapter OUTPUT`" in error


def test_loading_an_adapter_as_a_model(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(Path("adapter"), "base")
    with pytest.raises(CheckpointError, match=r"config.json: no such file.*an adapter.*ligerzoo fuse.*load_adapter"):
        AutoModel.from_pretrained("adapter")
    assert cli.main(["info", "adapter"]) == 1
    assert "ligerzoo fuse BASE ADAPTER OUTPUT" in capsys.readouterr().err
    assert cli.main(["evaluate", "adapter", "--adapter", "adapter", "--data", "x.txt"]) == 1
    assert "the base model is an adapter too" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["fuse lora base out", "generate lora --adapter base --prompt x"])
def test_a_base_and_an_adapter_that_are_swapped(workplace: Path, call: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(Path("lora"), "base")
    assert cli.main(call.split()) == 1
    error = capsys.readouterr().err
    assert "error: lora: the base model and the adapter are swapped; got an adapter as the model" in error
    assert "Exchange them: `ligerzoo fuse base lora OUTPUT`, or for other commands `base --adapter lora`." in error


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("model.Q4_K_M.gguf", "gguf_file="),
        ("model.GGUF", "gguf_file="),
        ("consolidated.00.pth", "convert_llama_weights_to_hf.py"),
        ("consolidated.safetensors", "convert_mistral_weights_to_hf.py"),
        ("consolidated-00001-of-00002.safetensors", "convert_mistral_weights_to_hf.py"),
        ("pytorch_model.bin", "loading a pickle runs code"),
        ("model.ckpt", "loading a pickle runs code"),
    ],
)
def test_other_formats(tmp_path: Path, name: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(b"x")
    for given in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=remedy):
            AutoModel.from_pretrained(given)
        assert cli.main(["generate", str(given), "--prompt", "a"]) == 1
        assert remedy in capsys.readouterr().err or given == tmp_path  # the tokenizer is missing first
    (tmp_path / "config.json").write_bytes((ASSETS / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=f"1 of 1 weight files missing.*{remedy}"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "config.json"])
def test_a_file_of_a_checkpoint(name: str) -> None:
    for load in (AutoModel.from_pretrained, Tokenizer.from_pretrained):
        with pytest.raises(CheckpointError, match=rf"{name}: a file; expected a directory.*Pass its directory"):
            load(ASSETS / name)
    with pytest.raises(CheckpointError, match=r"no such file.*gguf_file="):
        AutoModel.from_pretrained("no-such-model.gguf")


def test_byte_order_marks(workplace: Path) -> None:
    write_adapter(workplace / "adapter", "base")
    expected = AutoModel.from_pretrained("base")
    expected.save_pretrained("base", max_shard_size="100KB")
    (workplace / "base/model.safetensors").unlink(missing_ok=True)
    (workplace / "base/generation_config.json").write_text('{"max_new_tokens": 3}')
    for file in [*Path("base").glob("*.json"), *Path("adapter").glob("*.json")]:
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    model = AutoModel.from_pretrained("base")
    assert model.generation_config == {"max_new_tokens": 3}
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())
    adapters.load_adapter(model, "adapter")
    assert Tokenizer.from_pretrained("base").encode("def") == Tokenizer.from_pretrained(ASSETS).encode("def")

"""Tests of loading, saving and uploading models: invalid checkpoints, sources of the files, round trips."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ligerzoo import AutoModel, Tokenizer, hub
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError
from ligerzoo.models import CausalLM, Llama, LlamaConfig, Qwen2VL, Qwen2VLConfig, Qwen2VLVisionConfig
from ligerzoo.text import tokenizer
from tests.models.tiny import EMBEDDING, HEAD, Tensors, Tiny, random_model, write_shards
from tests.models.tiny_llama import LLAMA

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "ligerzoo" / "demo" / "assets" / "tiny-python-llama"
NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Writes a tiny Llama in the format of the hub, in three shards."""
    path = tmp_path / "tiny"
    Tiny("llama", LLAMA, shards=3).write(path)
    return path


def edit_config(directory: Path, **entries: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def edit_tensors(directory: Path, change: Callable[[Tensors], Any]) -> None:
    """Replaces the shards by one file with changed tensors."""
    tensors = dict(random_model(LLAMA).state_dict())
    change(tensors)
    for file in directory.glob("model*"):
        file.unlink()
    write_shards(directory, tensors)


def stored(directory: Path) -> Tensors:
    return {name: tensor for file in directory.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


# Loading


def test_class_from_model_type(directory: Path) -> None:
    for model in (AutoModel.from_pretrained(directory), Llama.from_pretrained(str(directory))):
        assert type(model) is Llama
        assert isinstance(model.config, LlamaConfig)
        assert same(model.state_dict(), stored(directory))
        assert not model.training
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_device_and_dtype(directory: Path, device: str) -> None:
    for dtype in (torch.bfloat16, "bfloat16", "torch.bfloat16"):
        model = Llama.from_pretrained(directory, dtype=dtype, device=device)
        assert {(p.device.type, p.dtype) for p in model.parameters()} == {(device, torch.bfloat16)}
    with torch.device(device):
        assert Llama.from_pretrained(directory).device.type == device
    assert Llama.from_pretrained(directory, device="meta").device.type == "meta"


@pytest.mark.parametrize(
    "entries, file_dtype, expected",
    [
        ({}, torch.float16, torch.float16),
        ({"torch_dtype": "bfloat16"}, torch.float16, torch.bfloat16),
        ({"torch_dtype": "bfloat16", "dtype": "float32"}, torch.float16, torch.float32),
        ({"torch_dtype": "bfloat16", "dtype": None}, torch.float16, torch.bfloat16),
        ({}, torch.float64, torch.float64),
    ],
)
def test_dtype_of_config_json_takes_precedence_over_the_files(
    directory: Path, entries: dict[str, str], file_dtype: torch.dtype, expected: torch.dtype
) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({name: t.to(file_dtype) for name, t in tensors.items()}))
    edit_config(directory, **{"torch_dtype": None, **entries})
    assert Llama.from_pretrained(directory).dtype == expected


@pytest.mark.parametrize("dtype", ["int8", "nonsense", None, 16, torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_invalid_dtypes(directory: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"dtype: not a dtype of weights; got .*; expected float32 or"):
        Llama.from_pretrained(directory, dtype=dtype)


def test_loading_keeps_the_random_state(directory: Path) -> None:
    before = torch.get_rng_state()
    Llama.from_pretrained(directory)
    assert torch.equal(torch.get_rng_state(), before)


def test_generation_config_is_loaded_and_saved(directory: Path, tmp_path: Path) -> None:
    content = {"eos_token_id": [2, 7], "do_sample": True, "_from_model_config": True}
    (directory / "generation_config.json").write_text(json.dumps(content))
    model = Llama.from_pretrained(directory)
    assert model.generation_config == content
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text()) == content


def test_no_progress_bar_without_a_terminal(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Llama.from_pretrained(directory).save_pretrained(directory)
    assert capfd.readouterr() == ("", "")


def test_loading_a_directory_imports_nothing_heavy(directory: Path) -> None:
    heavy = {"torch._dynamo", "sympy", "triton", "transformers", "huggingface_hub"}
    script = "import sys; from ligerzoo.models import Llama; before = set(sys.modules); "
    script += "Llama.from_pretrained(sys.argv[1]); print(*set(sys.modules) - before)"
    command = [sys.executable, "-c", script, str(directory)]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert heavy & set(run.stdout.split()) == set()


MEMORY = """
import sys, torch
from ligerzoo.models import Llama, LlamaConfig

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

warm_up, directory = sys.argv[1:]
Llama.from_pretrained(warm_up)(torch.zeros(1, 8, dtype=torch.int64))
before = anonymous()
model = Llama.from_pretrained(directory)
loaded = anonymous() - before
size = sum(p.nbytes for p in model.parameters())
total = sum(float(p.detach().sum()) for p in model.parameters())
touched = anonymous() - before
print(size, loaded, touched)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_loading_on_a_cpu_copies_nothing(directory: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 20000, "hidden_size": 256, "intermediate_size": 4000, "num_attention_heads": 4}
    Llama(LlamaConfig(**sizes, num_hidden_layers=4)).save_pretrained(tmp_path / "large", max_shard_size="30MB")
    command = [sys.executable, "-c", MEMORY, str(directory), str(tmp_path / "large")]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    size, loaded, touched = map(int, run.stdout.split())
    assert size > 90e6
    assert loaded < 5e6
    assert touched < 10e6


# Invalid checkpoints are refused before a weight is read, and the error names file, field or tensor


@pytest.fixture
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(hub.loading.Checkpoint, "_read_stored", read)


def assert_refused(directory: Path, message: str, load: Callable[..., CausalLM] = Llama.from_pretrained) -> None:
    with pytest.raises(LigerzooError, match=message) as caught:
        load(directory)
    assert str(directory) in str(caught.value)


@pytest.mark.usefixtures("no_weight_is_read")
@pytest.mark.parametrize(
    "entries, message",
    [
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "config.json, quantization_config: .* quant_method 'gptq'; expected no entry.*unquantized",
        ),
        ({"is_causal": False}, "config.json, is_causal: not supported; got False"),
        ({"is_causal": None}, "config.json, is_causal: not supported; got None; expected True"),
        ({"quantization_config": {}}, "config.json, quantization_config: not supported"),
        ({"model_type": "gpt9"}, "config.json, model_type: no such architecture; got 'gpt9'; .* 'llama'"),
        ({"model_type": "evil/../llama"}, "config.json, model_type: no such architecture"),
        ({"model_type": None}, "config.json, model_type: no such architecture"),
        ({"hidden_act": "gelu"}, "config.json, hidden_act: not supported; got 'gelu'; expected .*'silu'"),
        ({"rope_scaling": {"type": "unheard of"}}, "config.json, rope_scaling: unknown rope type; got 'unheard of'"),
        ({"rope_scaling": {"type": "llama3"}}, "config.json, rope_scaling: invalid factor of rope type llama3"),
        ({"rope_scaling": "linear"}, "config.json, rope_scaling: not an object; got 'linear'"),
        ({"hidden_size": -32}, "config.json, hidden_size: invalid value; got -32; expected an integer, 1 or more"),
        ({"hidden_size": "32"}, "config.json, hidden_size: invalid value; got '32'"),
        ({"hidden_size": True}, "config.json, hidden_size: invalid value; got True"),
        ({"rms_norm_eps": float("nan")}, "config.json, rms_norm_eps: invalid value; got nan"),
        ({"rope_theta": float("inf")}, "config.json, rope_theta: invalid value; got inf"),
        ({"num_key_value_heads": 3}, "config.json, num_key_value_heads: .* got 3; expected a divisor of .* 4"),
        ({"num_attention_heads": 10**30}, "config.json, num_attention_heads: invalid value"),
        ({"tie_word_embeddings": "yes"}, "config.json, tie_word_embeddings: .* got 'yes'; expected true or false"),
        # Valid configs that contradict the files
        ({"vocab_size": 100}, r"tensor '.*': wrong shape; got \(101, 32\); expected \(100, 32\)"),
        (
            {"num_hidden_layers": 3},
            "tensors are missing; got no 'model.layers.2.input_layernorm.weight', .* and 4 more",
        ),
        ({"attention_bias": True}, "tensors are missing; got no 'model.layers.0.self_attn.q_proj.bias'"),
        ({"num_key_value_heads": 4}, r"k_proj.weight': wrong shape; got \(16, 32\); expected \(32, 32\)"),
        ({"head_dim": 16}, r"k_proj.weight': wrong shape; got \(16, 32\); expected \(32, 32\)"),
        ({"dtype": "int4"}, "config.json, dtype: not a dtype of weights; got 'int4'; expected float32 or"),
        ({"torch_dtype": 16}, "config.json, dtype: not a dtype of weights; got 16"),
    ],
)
def test_invalid_config_json(directory: Path, entries: dict[str, Any], message: str) -> None:
    edit_config(directory, **entries)
    assert_refused(directory, message)


@pytest.mark.usefixtures("no_weight_is_read")
@pytest.mark.parametrize("content", ["", "garbage", "[]", "null", '{"model_type": "llama"', "\xff", '{"a": 1, "a": 2}'])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_malformed_json(directory: Path, file: str, content: str) -> None:
    (directory / file).write_bytes(content.encode("latin-1"))
    assert_refused(directory, f"{file}: (not a valid JSON file|is not a JSON object)")


@pytest.mark.usefixtures("no_weight_is_read")
def test_missing_config_json(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert_refused(directory, "config.json: no such file")


@pytest.mark.usefixtures("no_weight_is_read")
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(NORM), f"tensors are missing; got no '{NORM}'. Compare config.json with the files"),
        (lambda t: t.pop(HEAD), f"tensors are missing; got no '{HEAD}'"),
        (lambda t: t.update({"model.layers.1.x": torch.ones(2)}), "model.safetensors, tensor '.*1.x': unexpected"),
        (lambda t: t.update({"visual.patch": torch.ones(2)}), "tensor 'visual.patch': unexpected tensor"),
        (lambda t: t.update({"model.layers." + "9" * 5000 + ".x": torch.ones(2)}), "unexpected tensor"),
        (lambda t: t.update({NORM: torch.ones(31)}), rf"{NORM}': wrong shape; got \(31,\); expected \(32,\)"),
        (lambda t: t.update({NORM: torch.ones(1, 32)}), r"got \(1, 32\); expected \(32,\)"),
        (lambda t: t.update({UP: t[UP].to(torch.int8)}), f"{UP}': .* got torch.int8; expected torch.bfloat16 or"),
        (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), f"{UP}': .* got torch.float8_e4m3fn; expected"),
        (lambda t: t.update({UP: t[UP].to(torch.bool)}), f"{UP}': .* got torch.bool; expected"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_match_the_config(directory: Path, change: Callable[[Tensors], None], message: str) -> None:
    edit_tensors(directory, change)
    assert_refused(directory, message)


def edit_index(directory: Path, change: Callable[[dict[str, str]], Any]) -> None:
    """Changes which file the index names for tensors."""
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


MTP, BEYOND = "mtp.fc.weight", "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("names", [[MTP], [BEYOND], ["lm_head.bias", BEYOND, "rotary"]])
def test_index_lists_tensors_that_the_model_lacks(directory: Path, names: list[str], strict: bool) -> None:
    expected = Llama.from_pretrained(directory).state_dict()
    edit_index(directory, lambda index: index.update(dict.fromkeys(names, min(index.values()))))
    assert same(Llama.from_pretrained(directory, strict=strict).state_dict(), expected)


def test_index_lists_a_tied_head_that_no_file_has(tmp_path: Path) -> None:
    Tiny("tied", {**LLAMA, "tie_word_embeddings": True}, lambda t: t.pop(HEAD) is None or t, shards=3).write(tmp_path)
    edit_index(tmp_path, lambda index: index.update({HEAD: max(index.values())}))
    model = Llama.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("overlay", [True, False])
def test_index_names_one_of_several_copies(directory: Path, overlay: bool) -> None:
    expected = Llama.from_pretrained(directory).state_dict()
    first, *_, last = sorted(directory.glob("model*.safetensors"))
    tensors = load_file(first)
    name = next(iter(tensors))
    if overlay:  # the newer copy is in another file, else the stale one in the last shard
        save_file({name: tensors[name]}, directory / "model-overlay.safetensors")
        save_file({**tensors, name: tensors[name] * 0}, first)
        edit_index(directory, lambda index: index.update({name: "model-overlay.safetensors"}))
    else:
        save_file({**load_file(last), name: tensors[name] * 0}, last)
    assert same(Llama.from_pretrained(directory).state_dict(), expected)


@pytest.mark.usefixtures("no_weight_is_read")
def test_index_and_files_disagree_about_what_the_model_needs(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    right = path.read_text()
    edit_index(directory, lambda index: index.update({UP: next(f for f in index.values() if f != index[UP])}))
    assert_refused(directory, f"tensor '{UP}': the index lists this tensor, but the file lacks it")
    path.write_text(right)
    edit_index(directory, lambda index: index.pop(UP))
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=f"tensor '{UP}': the index does not list this tensor"):
            Llama.from_pretrained(directory, strict=strict)


def test_unlisted_tensor(directory: Path) -> None:
    file = min(directory.glob("model*.safetensors"))
    save_file({**load_file(file), "extra": torch.ones(2), BEYOND: torch.ones(2)}, file)
    assert_refused(directory, "tensor 'extra': the index does not list this tensor")
    with pytest.warns(UserWarning, match="that Llama lacks.*'extra'"):
        model = Llama.from_pretrained(directory, strict=False)
    assert model.origin is not None
    assert model.origin.unexpected == ("extra",)


def test_subclass_loads_as_itself(directory: Path) -> None:
    class MyLlama(Llama):
        pass

    assert type(MyLlama.from_pretrained(directory)) is MyLlama


def test_checkpoint_of_another_architecture(directory: Path) -> None:
    class Mistral(CausalLM):
        pass

    message = "config.json, model_type: the checkpoint has another architecture; got 'llama'; expected Mistral. Load it"
    assert_refused(directory, message, Mistral.from_pretrained)


ENORMOUS = """
import json, resource, sys, time
from pathlib import Path
from ligerzoo.errors import LigerzooError
from ligerzoo.models import Llama

path = Path(sys.argv[1]) / "config.json"
config = json.loads(path.read_text())
Llama.from_pretrained(path.parent)
for name in ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]:
    for value in [10**5, 2**30, 2**31 - 2, 2**40]:
        path.write_text(json.dumps(config | {"num_key_value_heads": None, name: value}))
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            Llama.from_pretrained(path.parent)
        except LigerzooError as error:
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            print(json.dumps([name, value, str(error), time.process_time() - start, grown]))
"""


def test_enormous_sizes_are_refused_quickly(directory: Path) -> None:
    command = [sys.executable, "-c", ENORMOUS, str(directory)]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    refusals = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(refusals) == 24
    for name, value, message, seconds, kilobytes in refusals:
        assert seconds < 2, (name, value)
        assert kilobytes < 20_000, (name, value)
        assert len(message) < 500


# Sources of the files


@pytest.mark.parametrize(
    "name",
    ["./nowhere", "/nowhere/at/all", "a/b/c", "../up", "~", "with space", "", "a\nb", "\0", "org/.."],
)
def test_invalid_names(name: str) -> None:
    with pytest.raises(
        CheckpointError, match=r'no such directory, and not a repository id; expected a directory or "org/name"'
    ):
        Llama.from_pretrained(name)


@pytest.mark.parametrize("options", [{}, {"local_files_only": True}])
def test_unreachable_repository(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"no-one/nothing: no such directory, .* from the hub; got .*Check the name, the network",
    ):
        Llama.from_pretrained("no-one/nothing", cache_dir=tmp_path, **options)
    with pytest.raises(CheckpointError, match="cannot be downloaded from the hub"):  # too long for a name of either
        Llama.from_pretrained("x" * 5000, cache_dir=tmp_path, **options)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def repository(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A fake hub with the tiny Llama and other files. Returns the list of calls."""
    calls: list[dict[str, Any]] = []
    for name in (
        "consolidated.safetensors",
        "original/model.safetensors",
        "pytorch_model.bin",
        "model.safetensors.bak",
    ):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"not to be touched")
    (directory / "modeling.py").write_text("raise SystemExit")

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], **options: Any) -> str:
        calls.append({"repo_id": repo_id, "allow_patterns": allow_patterns, **options})
        snapshot = tmp_path / "snapshots" / COMMIT
        files = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
        for file in huggingface_hub.utils.filter_repo_objects(files, allow_patterns=allow_patterns):
            (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(directory / file, snapshot / file)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_only_the_files_of_the_model_are_downloaded(
    repository: list[dict[str, Any]], directory: Path, tmp_path: Path
) -> None:
    options = {"revision": "v2", "token": "hf_secret", "cache_dir": tmp_path / "cache", "local_files_only": False}
    model = AutoModel.from_pretrained("org/tiny-1.0", **options)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert same(model.state_dict(), {k: v for file in shards for k, v in load_file(directory / file).items()})
    assert sorted(path.name for path in (tmp_path / "snapshots" / COMMIT).iterdir()) == [
        "config.json",
        *shards,
        "model.safetensors.index.json",
    ]
    # First the configs and the index, then the weights of the same commit.
    assert repository == [
        {
            "repo_id": "org/tiny-1.0",
            "allow_patterns": [
                "config.json",
                "adapter_config.json",
                "generation_config.json",
                "model.safetensors.index.json",
            ],
            **options,
        },
        {"repo_id": "org/tiny-1.0", "allow_patterns": shards, **options, "revision": COMMIT},
    ]


def test_repository_with_one_weight_file(repository: list[dict[str, Any]], directory: Path) -> None:
    edit_tensors(directory, lambda tensors: None)
    Llama.from_pretrained("gpt-like")
    assert repository[1]["allow_patterns"] == ["model.safetensors"]


def test_an_index_cannot_ask_for_other_files(repository: list[dict[str, Any]], directory: Path) -> None:
    index = {"weight_map": {"a": "*.safetensors", "b": "[a-z]?????dated.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weight files missing"):
        Llama.from_pretrained("org/name")
    assert not list((Path(directory).parent / "snapshots" / COMMIT).glob("*.safetensors"))


def test_errors_of_the_hub_client_are_shortened_to_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class ProxyError(Exception):
        """An error of an HTTP library, not an OSError."""

    def snapshot_download(*_: object, **__: object) -> str:
        raise ProxyError("the proxy\nsays no")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        CheckpointError,
        match=r"org/name: .* cannot be downloaded from the hub; got ProxyError: the proxy. Check",
    ):
        Llama.from_pretrained("org/name")


def test_hub_cache_works_without_network(directory: Path, tmp_path: Path) -> None:
    """Uses the actual huggingface_hub."""
    home = tmp_path / "cache" / "models--org--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    shutil.copytree(directory, home / "snapshots" / COMMIT)
    model = Llama.from_pretrained("org/tiny", cache_dir=tmp_path / "cache", local_files_only=True)
    assert same(model.state_dict(), stored(directory))


def test_directory_takes_precedence_over_repository(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent)
    assert same(Llama.from_pretrained("tiny").state_dict(), stored(directory))


# Concurrent saves

# Saves versions in an endless loop. All weights and an entry of both configs equal the number of the version.
WRITER = """
import sys, time
from itertools import count
from ligerzoo.models import Llama, LlamaConfig

for version in count(1):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=version, tie_word_embeddings=version % 2 == 0, attention_bias=version % 3 == 0,
    )
    model = Llama(config)
    for parameter in model.parameters():
        parameter.data.fill_(version)
    model.generation_config = {"max_length": version}
    model.save_pretrained(sys.argv[1], max_shard_size=10_000 if version % 5 else "5GB")
    if version == 3:
        print("started", flush=True)
"""

READER = """
import collections, json, sys, time, torch
from ligerzoo import AutoModel
from ligerzoo.errors import LigerzooError

directory, seconds = sys.argv[1], float(sys.argv[2])
end, seen, versions = time.monotonic() + seconds, collections.Counter(), set()
while (left := end - time.monotonic()) > 0 or (seen["loaded"] <= 5 or len(versions) <= 2) and left > -60:
    try:
        model = AutoModel.from_pretrained(directory)
    except LigerzooError as error:
        seen[str(error)] += 1
        continue
    version = model.config.max_position_embeddings
    weights = {int(value) for weight in model.parameters() for value in weight.flatten()[[0, -1]]}
    seen["loaded" if (weights, model.generation_config) == ({version}, {"max_length": version}) else "mixed"] += 1
    versions.add(version)
print(json.dumps([seen, len(versions)]))
"""


@pytest.mark.parametrize("seconds, number", [(0.5, 1), pytest.param(60, 2, marks=pytest.mark.slow)])
def test_readers_get_one_version_while_a_writer_saves(tmp_path: Path, seconds: float, number: int) -> None:
    directory = tmp_path / "model"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(script: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, str(directory), str(seconds)]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    with start(WRITER) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == "started\n"
        readers = [start(READER) for _ in range(number)]
        outputs = [reader.communicate()[0] for reader in readers]
        assert writer.poll() is None
        writer.kill()
    for output in outputs:
        seen, versions = json.loads(output)
        assert seen.keys() <= {"loaded", f"{directory}: was replaced while it was read. Load it again."}
        assert seen["loaded"] > 5
        assert versions > 2
    Llama.from_pretrained(directory).save_pretrained(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # no leftover of the save that was killed


def test_tokenizer_files_are_of_one_version(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "tokenizer.json").write_bytes((ASSETS / "tokenizer.json").read_bytes())
    model, read_files = Llama.from_pretrained(directory), tokenizer.read_tokenizer_files

    def read_slowly(path: Path) -> dict[str, bytes]:
        model.save_pretrained(path)
        return read_files(path)

    assert len(Tokenizer.from_pretrained(directory)) > 0
    monkeypatch.setattr(tokenizer, "read_tokenizer_files", read_slowly)
    with pytest.raises(CheckpointError, match=r"tiny: was replaced while it was read. Load it again"):
        Tokenizer.from_pretrained(directory)


# Saving


@pytest.fixture
def new() -> Llama:
    return Llama(
        LlamaConfig(vocab_size=70, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_new_model_is_saved_and_loaded(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=70,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        eos_token_id=[3, 4],
    )
    model = Llama(config, dtype=dtype)
    model.save_pretrained(tmp_path / "saved")
    assert (HEAD in stored(tmp_path / "saved")) != tied
    again = AutoModel.from_pretrained(tmp_path / "saved")
    assert (again.config, again.dtype) == (config, dtype)
    assert same(again.state_dict(), model.state_dict())
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLM"]
    assert raw["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_changed_weights_are_saved_and_other_files_kept(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    edit_config(directory, unknown={"kept": [1, None]}, name="é\ud800")
    raw, before = json.loads((directory / "config.json").read_text()), stored(directory)
    model = Llama.from_pretrained(directory)
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(directory)  # over the files it is mapped to
    after = stored(directory)
    assert torch.equal(after.pop(NORM), before.pop(NORM) + 1)
    assert same(after, before)
    assert json.loads((directory / "config.json").read_text()) == raw
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_changed_config_is_written(directory: Path, tmp_path: Path) -> None:
    edit_config(directory, unknown="kept", rope_parameters={"rope_type": "linear", "factor": 9.0})
    model = Llama.from_pretrained(directory, dtype="bfloat16")
    changes = {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_theta": 77.0, "max_position_embeddings": 5}
    model.config = LlamaConfig(**{**vars(model.config), **changes})
    model.save_pretrained(tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (raw["unknown"], raw["torch_dtype"], "rope_parameters" in raw) == ("kept", "bfloat16", False)
    again = AutoModel.from_pretrained(tmp_path / "saved")
    assert (again.config, again.dtype) == (model.config, torch.bfloat16)


def test_changed_dtype_is_written(directory: Path, tmp_path: Path) -> None:
    edit_config(directory, dtype="float32")
    Llama.from_pretrained(directory).to(torch.float16).save_pretrained(tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (raw["torch_dtype"], "dtype" in raw) == ("float16", False)
    assert Llama.from_pretrained(tmp_path / "saved").dtype == torch.float16


@pytest.mark.parametrize("on_disk", [{EMBEDDING}, {HEAD}, {EMBEDDING, HEAD}])
def test_tied_weight_is_saved_under_its_stored_names(directory: Path, tmp_path: Path, on_disk: set[str]) -> None:
    def tie(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        for name in {EMBEDDING, HEAD} - on_disk:
            del tensors[name]

    edit_tensors(directory, tie)
    edit_config(directory, tie_word_embeddings=True)
    model = Llama.from_pretrained(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "tied")
    saved = stored(tmp_path / "tied")
    assert saved.keys() & {EMBEDDING, HEAD} == on_disk
    assert all(torch.equal(saved[name], model.lm_head.weight) for name in on_disk)

    # When the weights are untied, both are saved.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.save_pretrained(tmp_path / "untied")
    again = Llama.from_pretrained(tmp_path / "untied")
    assert same(again.state_dict(), model.state_dict())
    assert not again.config.tie_word_embeddings


def test_tied_weight_with_nan(directory: Path) -> None:
    """A diverged model loads too: NaN does not equal itself, but the weight is tied."""
    edit_tensors(
        directory, lambda tensors: tensors.update({EMBEDDING: torch.full((101, 32), torch.nan)}) or tensors.pop(HEAD)
    )
    edit_config(directory, tie_word_embeddings=True)
    model = Llama.from_pretrained(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_bare_decoder_and_native_names(directory: Path, tmp_path: Path) -> None:
    def bare(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(directory, bare)
    model = Llama.from_pretrained(directory)
    model.save_pretrained(tmp_path / "as it was")
    assert same(stored(tmp_path / "as it was"), stored(directory))
    hub.save(model, tmp_path / "native", native=True)
    assert stored(tmp_path / "native").keys() == model.state_dict().keys()


def test_shared_weights_that_the_config_does_not_tie(tmp_path: Path, new: Llama) -> None:
    assert not new.config.tie_word_embeddings
    new.lm_head.weight = new.model.embed_tokens.weight
    new.model.layers[1].mlp = new.model.layers[0].mlp
    new.save_pretrained(tmp_path / "saved")
    again, theirs = (kind.from_pretrained(tmp_path / "saved") for kind in (Llama, AutoModelForCausalLM))
    tokens = torch.arange(10)[None]
    assert torch.equal(again(tokens).logits, new(tokens).logits)
    torch.testing.assert_close(theirs(tokens).logits, new(tokens).logits, rtol=0, atol=1e-6)


def test_shards_of_an_earlier_save_are_deleted(directory: Path) -> None:
    model = Llama.from_pretrained(directory)
    model.save_pretrained(directory, max_shard_size=20_000)
    assert len(list(directory.glob("model-*"))) > 3
    model.save_pretrained(directory, max_shard_size="1MB")
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]


def test_unregistered_class_is_not_saved(tmp_path: Path, new: Llama) -> None:
    new.__class__ = CausalLM  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="the class is not registered"):
        new.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_model_with_adapters_is_not_saved(tmp_path: Path, new: Llama) -> None:
    layer = new.model.layers[0].self_attn
    layer.q_proj = torch.nn.Sequential(layer.q_proj)
    with pytest.raises(CheckpointError, match=r"q_proj\.0\.weight.*q_proj\.weight.*Merge adapters"):
        new.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_meta_model_is_not_saved(tmp_path: Path, new: Llama) -> None:
    with pytest.raises(CheckpointError, match=f"{EMBEDDING}'.* not a dense tensor"):
        new.to("meta").save_pretrained(tmp_path / "saved")


# Uploading


class FakeHub:
    """Fakes the part of huggingface_hub's API that the upload uses."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.calls = files, []

    def __call__(self, token: object = None) -> "FakeHub":
        self.calls.append(("token", token))
        return self

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> SimpleNamespace:
        self.calls.append(("create", repo_id, private, exist_ok))
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def file_exists(self, repo_id: str, name: str) -> bool:
        assert repo_id == "me/tiny"
        return name in self.files

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, commit_message: str, delete_patterns: list[str]
    ) -> SimpleNamespace:
        self.calls.append(("upload", repo_id, commit_message))
        for stale in huggingface_hub.utils.filter_repo_objects(list(self.files), allow_patterns=delete_patterns):
            del self.files[stale]
        paths = [path for path in folder_path.rglob("*") if path.is_file()]
        self.files |= {str(path.relative_to(folder_path)): path.read_bytes() for path in paths}
        return SimpleNamespace(commit_url="https://the.hub/commit")


def test_upload(new: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"consolidated.safetensors": b"other model", "tokenizer.json": b"{}"}
    stale = {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"{}"}
    fake = FakeHub({**kept, **stale})
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    assert new.push_to_hub("tiny", private=True, token="hf_x", commit_message="Mine") == "https://the.hub/commit"
    assert fake.calls == [("token", "hf_x"), ("create", "tiny", True, True), ("upload", "me/tiny", "Mine")]
    assert fake.files.keys() == kept.keys() | {"README.md", "config.json", "model.safetensors"}
    card = fake.files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: ligerzoo\npipeline_tag: text-generation\n---\n")
    assert 'Llama.from_pretrained("me/tiny")' in card
    parameters = sum(parameter.numel() for parameter in new.parameters())
    assert re.search(rf"{parameters:,} parameters in float32", card)
    (tmp_path / "downloaded").mkdir()
    for name, content in fake.files.items():
        (tmp_path / "downloaded" / name).write_bytes(content)
    assert same(Llama.from_pretrained(tmp_path / "downloaded").state_dict(), new.state_dict())

    fake.files["README.md"] = b"written by hand"
    new.push_to_hub("tiny")
    assert fake.files["README.md"] == b"written by hand"


def test_tokenizer_is_uploaded_in_the_same_commit(new: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = {"chat_template.jinja": b"{{ messages }}", "additional_chat_templates/tool.jinja": b"{{ tools }}"}
    ours = Tokenizer({"tokenizer.json": (ASSETS / "tokenizer.json").read_bytes(), **templates}, "here")
    stale = ["special_tokens_map.json", "preprocessor_config.json", "additional_chat_templates/old.jinja"]
    fake = FakeHub({"tokenizer.json": b"{}", "notes.json": b"{}", **dict.fromkeys(stale, b"{}")})
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    new.push_to_hub("tiny", processor=ours)
    assert [call[0] for call in fake.calls] == ["token", "create", "upload"]
    expected = {"notes.json", "README.md", "config.json", "model.safetensors", "tokenizer.json", *templates}
    assert fake.files.keys() == expected
    for name, content in fake.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert same(Llama.from_pretrained(tmp_path).state_dict(), new.state_dict())
    assert Tokenizer.from_pretrained(tmp_path).encode("def f():") == ours.encode("def f():")
    card = fake.files["README.md"].decode()
    assert "from ligerzoo import Tokenizer\nfrom ligerzoo.models import Llama\n" in card
    assert 'tokenizer = Tokenizer.from_pretrained("me/tiny")\nmodel = Llama.from_pretrained("me/tiny")\n' in card


def test_processor_is_uploaded_with_its_tokenizer(new: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    class Processor:
        def save_pretrained(self, directory: str | Path) -> None:
            for name in ("preprocessor_config.json", "tokenizer.json"):
                (Path(directory) / name).write_text("{}")

    fake = FakeHub({})
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    new.push_to_hub("tiny", processor=Processor())
    assert {"preprocessor_config.json", "tokenizer.json", "config.json", "model.safetensors"} <= fake.files.keys()
    assert 'processor = Processor.from_pretrained("me/tiny")' in fake.files["README.md"].decode()


def test_card_of_a_vision_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub({})
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    vision = Qwen2VLVisionConfig(depth=1, embed_dim=8, hidden_size=16, num_heads=1)
    config = Qwen2VLConfig(
        vocab_size=40, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, mrope_section=[2, 3, 3], vision_config=vision, image_token_id=1, video_token_id=2,
    )  # fmt: skip
    Qwen2VL(config).push_to_hub("tiny")
    card = fake.files["README.md"].decode()
    assert "\npipeline_tag: image-text-to-text\n" in card
    assert 'Qwen2VL.from_pretrained("me/tiny")' in card


@pytest.mark.parametrize(
    "device",
    [
        "gpu",
        "cuda:99",
        pytest.param("cuda:0", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
    ],
)
def test_devices_that_do_not_exist(device: str) -> None:
    with pytest.raises(ConfigError, match=f"argument device: no such device; got {device}; expected cpu"):
        AutoModel.from_pretrained(ASSETS, device=device)

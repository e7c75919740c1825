"""Tests of checkpoint directories: round trips, invalid files, and killed saves."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import ligerzoo
from ligerzoo.errors import CheckpointError, LigerzooError
from ligerzoo.files import checkpoint, checkpoint_writer
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.files.checkpoint_writer import write_checkpoint
from ligerzoo.files.untrusted import read_json

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def various_tensors() -> dict[str, Tensor]:
    """Returns tensors of every dtype with random bits, including NaN, and with various strides."""
    generator = torch.Generator().manual_seed(0)

    def bits(dtype: torch.dtype) -> Tensor:
        high = 2 if dtype == torch.bool else 256
        return torch.randint(high, (3, 8 * dtype.itemsize), generator=generator, dtype=torch.uint8).view(dtype)

    base = torch.randn(6, 5, generator=generator)
    return {f"dtype.{dtype}": bits(dtype) for dtype in DTYPES} | {
        "base": base,
        "tied": base,
        "view": base[2:4],
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": base[0, 0].expand(4, 3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "scalar": torch.tensor(7, dtype=torch.int8),
        "one": torch.tensor([2.5]),
        "nothing": torch.zeros(0, 4, dtype=torch.bfloat16),
        "nom é 模 \U0001f600 \n\0": torch.arange(3),
    }


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        (a[name].dtype, a[name].shape, raw(a[name])) == (b[name].dtype, b[name].shape, raw(b[name])) for name in a
    )


def read_all(directory: Path) -> dict[str, Tensor]:
    with Checkpoint(directory) as opened:
        return {name: opened.read(name) for name in opened.tensors}


def safetensors_file(path: Path, header: object, data: bytes = b"") -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Writes three shards with two tensors each: a and b, c and d, e and f."""
    directory = tmp_path / "sharded"
    write_checkpoint(directory, {name: torch.full((4,), ord(name)) for name in "abcdef"}, {}, max_shard_size=64)
    return directory


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00003.safetensors"


def edit_index(directory: Path, **weight_map: object) -> None:
    path = directory / checkpoint.INDEX_FILE
    index = json.loads(path.read_text())
    index["weight_map"] |= weight_map
    path.write_text(json.dumps(index))


# Writing, and reading back


@pytest.mark.parametrize("max_shard_size", [1, 100, 1000, "5GB"])
def test_tensors_are_read_back_byte_for_byte(tmp_path: Path, max_shard_size: int | str) -> None:
    tensors = various_tensors()
    write_checkpoint(tmp_path / "new", tensors, {}, max_shard_size=max_shard_size)
    assert same(read_all(tmp_path / "new"), tensors)
    assert same(
        {k: v for path in (tmp_path / "new").glob("*.safetensors") for k, v in load_file(path).items()}, tensors
    )


def test_headers_have_names_shapes_and_dtypes(tmp_path: Path) -> None:
    tensors = various_tensors()
    write_checkpoint(tmp_path / "new", tensors, {})
    infos = Checkpoint(tmp_path / "new").tensors
    assert infos.keys() == tensors.keys()
    for name, info in infos.items():
        tensor = tensors[name]
        found = (info.name, info.file, info.shape, info.dtype, info.nbytes)
        assert found == (name, "model.safetensors", tensor.shape, tensor.dtype, tensor.nbytes)


def test_file_format(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    write_checkpoint(directory, various_tensors(), {"config.json": '{"name": "é"}', "raw.bin": b"\xff\r\n"})
    assert sorted(os.listdir(directory)) == ["config.json", "model.safetensors", "raw.bin"]
    assert (directory / "config.json").read_bytes() == '{"name": "é"}'.encode()
    assert (directory / "raw.bin").read_bytes() == b"\xff\r\n"
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    for tensor in read_all(directory).values():
        assert tensor.data_ptr() % tensor.itemsize == 0


def test_shards_are_filled_in_order_and_indexed(tmp_path: Path) -> None:
    sizes = {"big": 100, "z": 20, "bigger": 60, "y": 30, "x": 20, "w": 1, "empty": 0}
    tensors = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    write_checkpoint(tmp_path / "new", tensors, {}, max_shard_size=100)
    files = [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    assert sorted(os.listdir(tmp_path / "new")) == [*files, "model.safetensors.index.json"]
    big, z, bigger, yx, rest = files
    assert read_json(tmp_path / "new" / "model.safetensors.index.json") == {
        "metadata": {"total_parameters": 231, "total_size": 462},
        "weight_map": {"big": big, "z": z, "bigger": bigger, "y": yx, "x": yx, "w": rest, "empty": rest},
    }


@pytest.mark.parametrize(
    "size, expected",
    [
        (7, 7),
        ("1KB", 10**3),
        ("500MB", 5 * 10**8),
        ("5GB", 5 * 10**9),
        ("2TB", 2 * 10**12),
        ("3 KiB", 3 * 2**10),
        ("2MiB", 2**21),
        ("1GiB", 2**30),
        ("1TiB", 2**40),
    ],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert checkpoint_writer._number_of_bytes(size) == expected


@pytest.mark.parametrize(
    "size", [0, -1, 1.5, None, "", "0GB", "5", "GB", "-5GB", "1.5GB", "5Gb", "5gb", "5GBs", "5 G B"]
)
def test_invalid_sizes(tmp_path: Path, size: Any) -> None:
    with pytest.raises(CheckpointError, match=r'max_shard_size: invalid size; got .*; expected .*"5GB"'):
        write_checkpoint(tmp_path / "new", {"a": torch.zeros(1)}, {}, max_shard_size=size)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"__metadata__": torch.zeros(1)}, "'__metadata__': not a valid tensor name"),
        ({"half\ud800": torch.zeros(1)}, r"'half\\ud800': not a valid tensor name"),
        ({"c": torch.zeros(1, dtype=torch.complex64)}, "'c': dtype is not supported; got torch.complex64"),
        ({"s": torch.zeros(2, 2).to_sparse()}, "'s': not a dense tensor with data; got torch.sparse_coo"),
        ({"m": torch.zeros(1, device="meta")}, "'m': not a dense tensor with data; got torch.strided on meta"),
    ],
)
def test_tensors_that_cannot_be_written(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "new", {"good": torch.zeros(1)} | tensors, {})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "/x",
        "a/b/c",
        "a/../b",
        "a/model.safetensors",
        "a\\b",
        "a\0",
        "model.safetensors",
        shard(1),
        "model.safetensors.index.json",
    ],
)
def test_files_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="invalid file name; got"):
        write_checkpoint(tmp_path / "new", {"a": torch.zeros(1)}, {"good": "", name: ""})
    assert os.listdir(tmp_path) == []


def test_later_save_deletes_old_weights_and_keeps_other_files(sharded: Path) -> None:
    users = ["README.md", "tokenizer.json", "pytorch_model.bin", "consolidated.safetensors", "model.safetensors.bak"]
    for name in users:
        (sharded / name).write_text(name)
    (sharded / "logs").mkdir()
    (sharded / "logs" / "model.safetensors").write_text("the user's")
    for size, weights in (
        (100, [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]),
        ("5GB", ["model.safetensors"]),
    ):
        tensors = {name: torch.rand(16) for name in "ab"}
        write_checkpoint(sharded, tensors, {"config.json": "{}"}, max_shard_size=size)
        index = ["model.safetensors.index.json"] if len(weights) > 1 else []
        assert sorted(os.listdir(sharded)) == sorted([*users, "logs", "config.json", *weights, *index])
        assert same(read_all(sharded), tensors)
    assert [(sharded / name).read_text() for name in users] == users
    assert (sharded / "logs" / "model.safetensors").read_text() == "the user's"


def test_checkpoint_is_saved_over_itself(sharded: Path) -> None:
    expected = {name: tensor.clone() for name, tensor in read_all(sharded).items()}
    for size in (32, "5GB"):
        mapped = read_all(sharded)
        write_checkpoint(sharded, mapped, {}, max_shard_size=size)
        assert same(mapped, expected)
        assert same(read_all(sharded), expected)


def test_failing_save_keeps_the_old_checkpoint(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in sharded.iterdir()}
    write, written = checkpoint_writer._write_safetensors, []

    def failing_write(path: Path, *arguments: Any) -> None:
        if len(written) == 2:
            raise OSError("no space left on device")
        written.append(path)
        write(path, *arguments)

    monkeypatch.setattr(checkpoint_writer, "_write_safetensors", failing_write)
    with pytest.raises(OSError, match="no space"):
        write_checkpoint(sharded, {name: torch.rand(16) for name in "abc"}, {}, max_shard_size=64)
    assert {path.name: path.read_bytes() for path in sharded.iterdir()} == before
    assert os.listdir(sharded.parent) == ["sharded"]


def test_no_progress_bar_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "new", {"a": torch.zeros(9)}, {})
    assert capfd.readouterr() == ("", "")


def test_transformers_loads_the_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        dtype="bfloat16",
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    config.architectures = ["LlamaForCausalLM"]
    write_checkpoint(
        tmp_path / "new",
        model.state_dict(),
        {"config.json": config.to_json_string(use_diff=False)},
        max_shard_size="2KB",
    )
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not any(report.values())
    assert same(loaded.state_dict(), model.state_dict())


# Memory and views


def test_tensor_is_a_private_view_of_the_file(sharded: Path) -> None:
    before = (sharded / shard(1)).read_bytes()
    tensor = read_all(sharded)["a"]  # the checkpoint is closed again
    tensor += 1
    assert tensor.tolist() == [98] * 4
    assert (sharded / shard(1)).read_bytes() == before
    assert read_all(sharded)["a"].tolist() == [97] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_on_a_cpu_allocates_no_memory(tmp_path: Path) -> None:
    def resident(kind: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(kind)) // 1024

    size, count = 30 * 2**20, 10
    header = {f"t{i}": entry("U8", [size], i * size, (i + 1) * size) for i in range(count)}
    safetensors_file(tmp_path / "model.safetensors", header)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) + count * size)  # 300 MiB of zeros that occupy no disk blocks
    of_files, separate = resident("RssFile"), resident("RssAnon")
    tensors = read_all(tmp_path)
    assert sum(int(tensor[::1024].sum()) for tensor in tensors.values()) == 0
    assert resident("RssFile") - of_files > 250  # every page has been touched
    assert resident("RssAnon") - separate < 8


def test_reading_after_closing_is_an_error(sharded: Path) -> None:
    with Checkpoint(sharded) as opened:
        pass
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.safetensors, tensor 'a': cannot be read"):
        opened.read("a")


def test_unknown_tensor_is_an_error(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match=r"sharded: no tensor 'x\\n'"):
        Checkpoint(sharded).read("x\n")


@pytest.mark.gpu
def test_tensors_on_a_gpu(tmp_path: Path) -> None:
    tensors = various_tensors()
    write_checkpoint(tmp_path / "cpu", tensors, {})
    with Checkpoint(tmp_path / "cpu") as opened:
        on_gpu = {name: opened.read(name, "cuda") for name in opened.tensors}
    assert all(tensor.is_cuda for tensor in on_gpu.values())
    write_checkpoint(tmp_path / "gpu", on_gpu, {}, max_shard_size=100)
    assert same(read_all(tmp_path / "gpu"), tensors)


# Which files are read


def test_only_the_named_files_are_read(sharded: Path) -> None:
    for name in ("consolidated.safetensors", "model.safetensors", "model-00009-of-00003.safetensors"):
        (sharded / name).write_bytes(b"garbage")
    assert sorted(read_all(sharded)) == list("abcdef")
    (sharded / checkpoint.INDEX_FILE).unlink()
    save_file({"single": torch.zeros(1)}, sharded / "model.safetensors")
    assert sorted(read_all(sharded)) == ["single"]


def test_files_may_be_links_into_a_cache(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(f"../blobs/{number}")
    assert sorted(read_all(sharded)) == list("abcdef")


def test_checkpoint_replaced_while_opened_is_an_error(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_weight_map = checkpoint.read_weight_map

    def slow_read(path: Path) -> dict[str, str]:
        weight_map = read_weight_map(path)
        write_checkpoint(sharded, {name: torch.zeros(4, dtype=torch.int64) for name in "abcdef"}, {}, max_shard_size=64)
        return weight_map

    monkeypatch.setattr(checkpoint, "read_weight_map", slow_read)
    with pytest.raises(CheckpointError, match=r"sharded: was replaced while it was read. Load it again"):
        Checkpoint(sharded)


# Invalid directories


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"missing: no such directory"):
        Checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"file: is not a directory"):
        Checkpoint(tmp_path / "file")


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"missing; got an empty directory; expected 'model.safetensors'. Download"
    ):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"missing; got 'config.json'; expected 'model.safetensors'. Download"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"'pytorch_model.bin'.*Only safetensors files are read.*convert it"):
        Checkpoint(tmp_path)


def test_the_directory_of_a_run_that_has_not_finished(tmp_path: Path) -> None:
    message = "the directory of a run that has not finished; got {}; expected a model. {}ontinue the run with --resume."
    for load in (ligerzoo.Tokenizer, ligerzoo.AutoModel):
        (tmp_path / "log.jsonl").touch()
        with pytest.raises(CheckpointError, match=message.format("'log.jsonl'", "C")):
            load.from_pretrained(tmp_path)
        for step in (900, 1000):
            (tmp_path / f"checkpoint-{step}").mkdir(exist_ok=True)
        with pytest.raises(
            CheckpointError, match=message.format(".*", f"Load {tmp_path / 'checkpoint-1000'}, its .*c")
        ):
            load.from_pretrained(tmp_path)
        (tmp_path / "config.json").touch()
        with pytest.raises(LigerzooError, match=r"tokenizer\.json|not a valid JSON"):
            load.from_pretrained(tmp_path)
        for name in ("checkpoint-900", "checkpoint-1000"):
            (tmp_path / name).rmdir()
        (tmp_path / "config.json").unlink()


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / shard(2)).unlink()
    with pytest.raises(CheckpointError, match=f"1 of 3 weight files missing.*expected '{shard(2)}'"):
        Checkpoint(sharded)


def test_broken_link_is_missing(sharded: Path) -> None:
    (sharded / shard(2)).unlink()
    (sharded / shard(2)).symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=f"1 of 3 weight files missing.*expected '{shard(2)}'"):
        Checkpoint(sharded)
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "model.safetensors.index.json").symlink_to("nowhere")
    save_file({"a": torch.zeros(1)}, sharded / "model.safetensors")  # the index comes first, even a broken one
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json: no such file"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    "make, kind",
    [
        (os.mkfifo, "a named pipe"),
        (os.mkdir, "a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (lambda path: path.symlink_to("/dev/null"), "a device"),
        (lambda path: path.symlink_to("pipe"), "a named pipe"),
    ],
)
def test_other_kinds_of_files_are_refused_unopened(sharded: Path, make: Callable[[Path], None], kind: str) -> None:
    os.mkfifo(sharded / "pipe")
    for file in (shard(2), checkpoint.INDEX_FILE):
        (sharded / file).unlink()
        make(sharded / file)
        with pytest.raises(CheckpointError, match=f"{file}: not a regular file; got {kind}; expected a regular"):
            Checkpoint(sharded)
        with pytest.raises(CheckpointError, match=f"{file}: not a regular file; got {kind}"):
            read_json(sharded / file)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), RuntimeError("unable to open file")])
def test_file_that_cannot_be_opened_is_named(sharded: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "safe_open", fail)
    with pytest.raises(CheckpointError, match=f"{shard(1)}: cannot be read; got .*(Permission denied|unable to open)"):
        Checkpoint(sharded)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_read_permission_is_named(sharded: Path) -> None:
    for file in (shard(2), checkpoint.INDEX_FILE):
        (sharded / file).chmod(0)
        with pytest.raises(CheckpointError, match=f"{file}: cannot be read; got Permission denied"):
            Checkpoint(sharded)


# The index


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/outside.safetensors",
        "deep/inside.safetensors",
        "..\\outside.safetensors",
        "a\0.safetensors",
        "pytorch_model.bin",
        "..",
        "",
        3,
        None,
        ["model.safetensors"],
    ],
)
def test_index_cannot_leave_its_directory(sharded: Path, name: object) -> None:
    (sharded / "deep").mkdir()
    if name == "/outside.safetensors":
        name = f"{sharded.parent}{name}"
    for path in (sharded.parent / "outside.safetensors", sharded / "deep" / "inside.safetensors"):
        save_file({"x": torch.zeros(1)}, path)
    edit_index(sharded, x=name)
    with pytest.raises(CheckpointError, match=r"index.json, tensor 'x': invalid file name.*same directory"):
        Checkpoint(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": None}, {"weight_map": ["a"]}, {"weight_map": {}}])
def test_index_without_weight_map(sharded: Path, index: object) -> None:
    (sharded / checkpoint.INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index.json: no weight_map"):
        Checkpoint(sharded)


def test_tensor_of_the_index_is_missing(sharded: Path) -> None:
    edit_index(sharded, x=shard(2))
    with pytest.raises(
        CheckpointError, match=rf"{shard(2)}, tensor 'x': the index lists this tensor, but the file lacks it"
    ):
        Checkpoint(sharded)


def test_tensor_is_in_another_file_than_in_the_index(sharded: Path) -> None:
    edit_index(sharded, a=shard(2))
    with pytest.raises(CheckpointError, match=rf"{shard(2)}, tensor 'a': .*but the file lacks it"):
        Checkpoint(sharded)


@pytest.mark.parametrize("file", [shard(2), "model-overlay.safetensors"])
def test_the_index_says_which_of_several_copies_is_read(sharded: Path, file: str) -> None:
    stale = {"a": torch.full((3,), 7), "f": torch.zeros(1)}  # also of other shapes
    save_file({**load_file(sharded / shard(2)), **stale}, sharded / shard(2))
    save_file({"e": torch.ones(2), **(load_file(sharded / file) if file == shard(2) else {})}, sharded / file)
    edit_index(sharded, e=file)
    tensors = read_all(sharded)
    assert sorted(tensors) == list("abcdef")
    assert [tensors[name].tolist() for name in "aef"] == [[97] * 4, [1] * 2, [102] * 4]


def test_tensor_is_not_in_the_index(sharded: Path) -> None:
    save_file({"c": torch.ones(1), "d": torch.ones(1), "x": torch.ones(1)}, sharded / shard(2))
    with pytest.raises(CheckpointError, match=rf"{shard(2)}, tensor 'x': the index does not list this tensor"):
        Checkpoint(sharded)


# Damaged files


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("good")
    write_checkpoint(directory / "new", {"w": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}, {})
    return (directory / "new" / "model.safetensors").read_bytes()


def test_truncated_file(tmp_path: Path, good_file: bytes) -> None:
    path = tmp_path / "model.safetensors"
    for length in range(len(good_file)):
        path.write_bytes(good_file[:length])
        with pytest.raises(CheckpointError, match=r"model.safetensors: not a valid safetensors file") as caught:
            Checkpoint(tmp_path)
        assert caught.value.__cause__ is not None
    path.write_bytes(good_file + b"\0")
    with pytest.raises(CheckpointError, match=r"model.safetensors: not a valid safetensors file"):
        Checkpoint(tmp_path)


def test_flipped_bit_in_header(tmp_path: Path, good_file: bytes) -> None:
    path = tmp_path / "model.safetensors"
    end_of_header = 8 + int.from_bytes(good_file[:8], "little")
    refused = 0
    for bit in range(8 * end_of_header):
        flipped = bytearray(good_file)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            tensors = read_all(tmp_path)
        except CheckpointError:
            refused += 1
        else:  # another name, other metadata: the header is still true to the data
            assert {raw(tensor) for tensor in tensors.values()} == {good_file[end_of_header:-10], good_file[-10:]}
    assert refused > 0.6 * 8 * end_of_header


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "header too small"),
        (b"\xff" * 8, "header too large"),
        (b"\xff\xff\xff\x00\0\0\0\0", "invalid header length"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
            "got a git-lfs pointer. Run `git lfs pull`",
        ),
        (b"\n<!doctype html><html>", "got a web page. Download the file again"),
        (b"\x02\0\0\0\0\0\0\0[]", "invalid JSON in header"),
    ],
)
def test_other_file_formats(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"model.safetensors: not a valid safetensors file; .*{message}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry("F32", [1], 4, 8)},
        {"a": entry("F32", [1], -4, 0)},
        {"a": entry("F32", [1], 0, 2**63)},
        {"a": entry("F32", [2], 0, 4)},
        {"a": entry("F32", [2**40, 2**40], 0, 8)},
        {"a": entry("F32", [-1], 0, 8)},
        {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)},
        {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)},
        {"a": entry("F32", [1], 0, 4)},
        {"a": entry("X\x1b[2J" * 10**5, [2], 0, 8)},
        {"a": {"dtype": "F32", "shape": [2]}},
        pytest.param(b'{"a":' + b"[" * 10**6, id="deep"),
    ],
)
def test_inconsistent_headers(tmp_path: Path, header: object) -> None:
    safetensors_file(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=r"model.safetensors: not a valid safetensors file") as caught:
        Checkpoint(tmp_path)
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


def test_unsupported_dtypes_are_refused_when_read(tmp_path: Path) -> None:
    header = {"four": entry("F4", [2, 4], 0, 4), "complex": entry("C64", [1], 4, 12), "good": entry("U8", [3], 12, 15)}
    safetensors_file(tmp_path / "model.safetensors", header, bytes(range(15)))
    opened = Checkpoint(tmp_path)
    assert opened.read("good").tolist() == [12, 13, 14]
    for name, stored in (("four", "F4"), ("complex", "C64")):
        message = rf"model.safetensors, tensor '{name}': dtype is not supported; got {stored}"
        for use in (opened.read, lambda name: opened.tensors[name].dtype, lambda name: opened.tensors[name].nbytes):
            with pytest.raises(CheckpointError, match=message):
                use(name)


def test_shape_with_too_many_elements(tmp_path: Path) -> None:
    safetensors_file(tmp_path / "model.safetensors", {"huge": entry("F32", [2**63, 0], 0, 0)})
    with pytest.raises(CheckpointError, match=r"model.safetensors, tensor 'huge': cannot be read"):
        Checkpoint(tmp_path).read("huge")


numbers = st.integers(-2, 20) | st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63, 2**64, 0.5, None, True])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "F6_E2M3", "C64", "I64", "BOOL", "F128", 3]),
        "shape": st.lists(numbers, max_size=4),
        "data_offsets": st.lists(numbers, min_size=1, max_size=3),
    }
)
headers = st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), entries, max_size=3)


@given(st.binary(max_size=200) | headers.map(lambda header: json.dumps(header).encode()), st.binary(max_size=20))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_garbage_is_refused_or_read_unchanged(header: bytes, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        safetensors_file(Path(directory, "model.safetensors"), header, data)
        try:
            tensors = read_all(Path(directory))
        except CheckpointError:
            return
        assert sum(tensor.nbytes for tensor in tensors.values()) == len(data)
        for name, tensor in tensors.items():
            begin, end = json.loads(header)[name]["data_offsets"]
            assert raw(tensor) == data[begin:end]


# JSON


def test_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes('{"a": [1, 2.5, null, "é", {"a": true}]}'.encode())
    assert (
        read_json(tmp_path / "x.json") == read_json(str(tmp_path / "x.json")) == {"a": [1, 2.5, None, "é", {"a": True}]}
    )


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "not a valid JSON file"),
        ('{"a": 1', "not a valid JSON file; .*delimiter.*damaged or incomplete"),
        ('{"a": 1, "b": {"x": 1, "x": 1}}', "not a valid JSON file; .*duplicate key 'x'"),
        ("[1]", "is not a JSON object; got list"),
        ("null", "is not a JSON object; got NoneType"),
        ("version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        ("<!DOCTYPE html>", "web page"),
    ],
)
def test_json_that_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"x.json: .*{message}"):
        read_json(tmp_path / "x.json")


def test_hostile_json_is_refused(tmp_path: Path) -> None:
    million = 10**6
    long_key = b'"' + b"a" * million + b'": 1'
    for content, message in (
        (b'{"a": "\xff"}', "not a valid JSON file; .*utf-8"),
        (b'{"a": ' + b"[" * million + b"]" * million + b"}", "not a valid JSON file; .*recursion"),
        (b'{"a": ' + b"9" * million + b"}", "not a valid JSON file; .*digits"),
        (b"{" + long_key + b", " + long_key + b"}", "duplicate key 'aaa"),
        (b" " * (32 * 2**20) + b"{}", "file is too large"),
    ):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=f"x.json: .*{message}") as caught:
            read_json(tmp_path / "x.json")
        assert len(str(caught.value)) < 1000


def test_json_path_that_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such file; got an empty directory. Pass the directory of a whole"):
        read_json(tmp_path / "missing.json")
    with pytest.raises(CheckpointError, match="not a regular file; got a directory"):
        read_json(tmp_path)


# Killed while saving

# For every "VERSION NUMBER" that it reads, saves this version in a child that is killed at this operation on files.
KILLED_SAVES = """
import os, signal, sys
import torch
from ligerzoo.files.checkpoint_writer import write_checkpoint

def save(version):
    tensors = {f"t{i}": torch.full((1024,), 10 * version + i) for i in range(10)}
    write_checkpoint(sys.argv[1], tensors, {"config.json": str(version)}, max_shard_size="16KiB")

def kill_at(number):
    operations = 0

    def count(event, arguments):
        nonlocal operations
        if event.startswith(("open", "os.", "shutil.")):
            operations += 1
            if operations == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)

save(0)
print("ready", flush=True)
for line in sys.stdin:
    version, number = map(int, line.split())
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # should the test die first
        kill_at(number)
        save(version)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture
def killed_saver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", "-c", KILLED_SAVES, str(tmp_path / "new")]
    environment = os.environ | {"PYTHONPATH": str(Path(ligerzoo.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as saver:
        yield saver


def stored_version(directory: Path) -> int:
    return int((directory / "config.json").read_text())


def test_killed_save_leaves_old_or_new_checkpoint(tmp_path: Path, killed_saver: subprocess.Popen[str]) -> None:
    """Killed at each operation on files in turn, until a save comes to its end."""
    assert killed_saver.stdin
    assert killed_saver.stdout
    directory = tmp_path / "new"
    shards = [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    assert killed_saver.stdout.readline() == "ready\n"
    number, version, status, outcomes = 0, 0, -1, set()
    while status:
        number += 1
        killed_saver.stdin.write(f"{version + 1} {number}\n")
        killed_saver.stdin.flush()
        status = int(killed_saver.stdout.readline())
        assert sorted(os.listdir(directory)) == ["config.json", *shards, "model.safetensors.index.json"]
        before, version = version, stored_version(directory)
        assert same(read_all(directory), {f"t{i}": torch.full((1024,), 10 * version + i) for i in range(10)})
        outcomes.add((status, version - before))
    assert outcomes == {(signal.SIGKILL, 0), (signal.SIGKILL, 1), (0, 1)}
    assert number > 30
    write_checkpoint(directory, {"a": torch.zeros(1)}, {})
    assert os.listdir(tmp_path) == ["new"]

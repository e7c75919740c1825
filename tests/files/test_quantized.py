"""Tests of quantized tensors in checkpoints: their values, slices, and files and configs that are refused."""

import contextlib
import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ligerzoo.errors import CheckpointError, ConfigError
from ligerzoo.files import quantized
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.files.quantized import Quantization, QuantizedCheckpoint, find_quantized, read_quantization
from ligerzoo.files.quantized_formats import FORMATS

Tensors = dict[str, Tensor]

MXFP4, FP8 = Quantization("mxfp4"), Quantization("fp8")
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def write(directory: Path, tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


def random_mxfp4(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns random blocks and scales of stacked matrices of (..., rows, columns)."""
    *stack, rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*stack, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 253, (*stack, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


def random_fp8(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns random values that are not NaN, and scales of blocks of 128 x 128."""
    *stack, rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, shape, dtype=torch.uint8, generator=generator)
    codes += 128 * torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator)
    scales = torch.rand((*stack, math.ceil(rows / 128), math.ceil(columns / 128)), generator=generator) * 0.01
    return codes.view(torch.float8_e4m3fn), scales.to(dtype)


def dequantized_by_block(values: Tensor, scales: Tensor) -> Tensor:
    """Dequantizes one FP8 matrix, block by block."""
    result = torch.empty(values.shape, dtype=torch.bfloat16)
    for i, row in enumerate(scales.tolist()):
        for j, scale in enumerate(row):
            block = values[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].float()
            scaled = [[struct.unpack("f", struct.pack("f", value * scale))[0] for value in r] for r in block.tolist()]
            result[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = torch.tensor(scaled)
    return result


# Values


def test_mxfp4_has_the_values_of_transformers(tmp_path: Path) -> None:
    blocks, scales = random_mxfp4((3, 40, 96))
    write(tmp_path, {"x_blocks": blocks, "x_scales": scales})
    x = QuantizedCheckpoint(tmp_path, MXFP4).read("x")
    assert x.shape == (3, 96, 40)
    assert torch.equal(bits(x), bits(convert_moe_packed_tensors(blocks, scales)))


def test_mxfp4_is_exact_for_every_scale_and_byte(tmp_path: Path) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(253, 16, 16)
    scales = torch.arange(253, dtype=torch.uint8)[:, None].expand(253, 16)
    write(tmp_path, {"x_blocks": blocks, "x_scales": scales})
    x = QuantizedCheckpoint(tmp_path, MXFP4).read("x").mT.double().tolist()
    for scale in range(253):
        for byte in range(256):
            for nibble, got in zip((byte & 15, byte >> 4), x[scale][2 * byte : 2 * byte + 2], strict=True):
                expected = math.ldexp(FP4_VALUES[nibble & 7], scale - 127) * (-1 if nibble & 8 else 1)
                assert (got, math.copysign(1, got)) == (expected, math.copysign(1, expected))


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (144, 300), (256, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks(tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
    values, scales = random_fp8(shape, dtype=dtype)
    write(tmp_path, {"w": values, "w_scale_inv": scales})
    w = QuantizedCheckpoint(tmp_path, FP8).read("w")
    assert torch.equal(bits(w), bits(dequantized_by_block(values, scales)))


def test_stacked_fp8_matrices(tmp_path: Path) -> None:
    values, scales = random_fp8((2, 3, 130, 140))
    write(tmp_path, {"w": values, "w_scale_inv": scales})
    w = QuantizedCheckpoint(tmp_path, FP8).read("w")
    for i in range(2):
        for j in range(3):
            assert torch.equal(bits(w[i, j]), bits(dequantized_by_block(values[i, j], scales[i, j])))


def test_nan_stays_nan(tmp_path: Path) -> None:
    values = torch.tensor([[0x7F, 0xFF, 0x7E]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    write(tmp_path, {"w": values, "w_scale_inv": torch.ones(1, 1)})
    w = QuantizedCheckpoint(tmp_path, FP8).read("w")
    assert w.isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize("piece", [1, 100, 2**30])
@pytest.mark.parametrize("method", FORMATS)
def test_the_size_of_pieces_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, piece: int
) -> None:
    opened = QuantizedCheckpoint(written(tmp_path, method, (2, 300, 160)), Quantization(method))
    expected = opened.read("x")
    monkeypatch.setattr(quantized, "_CACHED_BYTES", piece)
    assert torch.equal(bits(opened.read("x")), bits(expected))


def test_other_tensors_are_unchanged(tmp_path: Path) -> None:
    blocks, scales = random_mxfp4((4, 32))
    others = {"a": torch.rand(3), "b.bias": torch.rand(2, 2).bfloat16()}
    write(tmp_path, {"x_blocks": blocks, "x_scales": scales, **others})
    with QuantizedCheckpoint(tmp_path, MXFP4) as opened:
        assert opened.tensors.keys() == {"x", "a", "b.bias"}
        assert (opened.tensors["x"].shape, opened.tensors["x"].dtype) == ((32, 4), torch.bfloat16)
        assert all(torch.equal(opened.read(name), tensor) for name, tensor in others.items())
        assert torch.equal(opened.read_slice("a", (slice(1, 2),)), others["a"][1:2])
        with pytest.raises(CheckpointError, match="no tensor 'x_blocks'"):
            opened.read("x_blocks")


def test_values_and_scales_in_different_files(tmp_path: Path) -> None:
    blocks, scales = random_mxfp4((4, 32))
    save_file({"x_blocks": blocks}, tmp_path / "a.safetensors")
    save_file({"x_scales": scales}, tmp_path / "b.safetensors")
    weight_map = {"x_blocks": "a.safetensors", "x_scales": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    x = QuantizedCheckpoint(tmp_path, MXFP4).read("x")
    assert torch.equal(bits(x.mT[None]), bits(convert_moe_packed_tensors(blocks[None], scales[None]).mT))


# Slices


def written(directory: Path, method: str, shape: tuple[int, ...]) -> Path:
    make = {"mxfp4": random_mxfp4, "fp8": random_fp8}[method]
    first, second = FORMATS[method].values_suffix, FORMATS[method].scales_suffix
    values, scales = make(shape)
    return write(directory, {f"x{first}": values, f"x{second}": scales})


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, QuantizedCheckpoint]:
    return {
        method: QuantizedCheckpoint(
            written(tmp_path_factory.mktemp("written"), method, (3, 300, 160)), Quantization(method)
        )
        for method in FORMATS
    }


@given(st.sampled_from(list(FORMATS)), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_slices(opened: dict[str, QuantizedCheckpoint], method: str, data: st.DataObject) -> None:
    whole = opened[method].read("x")
    index = []
    for size in whole.shape[: data.draw(st.integers(0, 3))]:
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        index.append(slice(start, stop, data.draw(st.sampled_from([None, 1, 2, 3]))))
    part = opened[method].read_slice("x", tuple(index))
    assert part.shape == whole[tuple(index)].shape
    assert torch.equal(bits(part), bits(whole[tuple(index)]))


@pytest.mark.parametrize("method", FORMATS)
def test_a_slice_reads_only_its_blocks(opened: dict[str, QuantizedCheckpoint], method: str) -> None:
    copied = []

    def copy(tensor: Tensor) -> Tensor:
        copied.append(tensor.nbytes)
        return tensor

    opened[method].read_slice("x", (slice(1, 2), slice(130, 140), slice(32, 64)), copy)
    assert sum(copied) <= {"mxfp4": 32 * (32 // 32) * 17, "fp8": 128 * 128 + 4}[method]


@pytest.mark.parametrize("method", FORMATS)
def test_meta_device(opened: dict[str, QuantizedCheckpoint], method: str) -> None:
    x = opened[method].read("x", "meta")
    assert x.is_meta
    assert x.shape == opened[method].tensors["x"].shape


# Invalid values


@pytest.mark.parametrize("scale", [253, 254, 255])
def test_mxfp4_scales_that_overflow(tmp_path: Path, scale: int) -> None:
    blocks, scales = random_mxfp4((2, 4, 64))
    scales[1, 2, 1] = scale
    write(tmp_path, {"x_blocks": blocks, "x_scales": scales})
    opened = QuantizedCheckpoint(tmp_path, MXFP4)
    opened.read_slice("x", (slice(0, 1),))
    with pytest.raises(CheckpointError, match=r"model.safetensors, tensor 'x_scales': invalid scale; expected at most"):
        opened.read("x")


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 1e36, 3e38])
def test_fp8_scales_that_are_invalid(tmp_path: Path, scale: float) -> None:
    values, scales = random_fp8((200, 200))
    scales[1, 0] = scale
    write(tmp_path, {"w": values, "w_scale_inv": scales})
    with pytest.raises(CheckpointError, match=r"model.safetensors, tensor 'w_scale_inv': invalid scale; expected fin"):
        QuantizedCheckpoint(tmp_path, FP8).read("w")


def test_largest_and_smallest_fp8_scales(tmp_path: Path) -> None:
    values = torch.full((129, 1), 448.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([[7.5e35], [0.0]])
    write(tmp_path, {"w": values, "w_scale_inv": scales})
    w = QuantizedCheckpoint(tmp_path, FP8).read("w")
    assert torch.equal(bits(w), bits(dequantized_by_block(values, scales)))
    assert w.isfinite().all()


# Tensors that do not fit


def stored_mxfp4() -> Tensors:
    blocks, scales = random_mxfp4((2, 8, 64))
    return {"layers.0.mlp.x_blocks": blocks, "layers.0.mlp.x_scales": scales, "norm": torch.ones(3).bfloat16()}


def stored_fp8() -> Tensors:
    values, scales = random_fp8((130, 256))
    return {"layers.0.mlp.w": values, "layers.0.mlp.w_scale_inv": scales, "norm": torch.ones(3).bfloat16()}


BLOCKS, SCALES, WEIGHT, SCALE_INV = (
    "layers.0.mlp.x_blocks", "layers.0.mlp.x_scales", "layers.0.mlp.w", "layers.0.mlp.w_scale_inv"
)  # fmt: skip


def replaced(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(
    "quantization, change, message",
    [
        (MXFP4, lambda t: t.pop(SCALES), rf"'{BLOCKS}': quantized values without scales; expected .*'{SCALES}'"),
        (MXFP4, lambda t: t.pop(BLOCKS), rf"'{SCALES}': scales without quantized values; got no .*'{BLOCKS}'"),
        (MXFP4, replaced(SCALES, lambda s: s[:, :-1]), rf"'{SCALES}': wrong shape of scales; got \(2, 7, 2\); .*8, 2"),
        (MXFP4, replaced(SCALES, lambda s: s[..., None]), rf"'{SCALES}': wrong shape of scales; got \(2, 8, 2, 1\)"),
        (MXFP4, replaced(SCALES, Tensor.float), rf"'{SCALES}': wrong dtype of scales; got F32; expected U8"),
        (MXFP4, replaced(SCALES, Tensor.char), rf"'{SCALES}': wrong dtype of scales; got I8"),
        (MXFP4, replaced(BLOCKS, lambda b: b[..., :-1]), rf"'{BLOCKS}': wrong shape of quantized values; got .*15\)"),
        (MXFP4, replaced(BLOCKS, lambda b: b.flatten()), rf"'{BLOCKS}': wrong shape of quantized values"),
        (MXFP4, replaced(BLOCKS, lambda b: b[:0]), rf"'{BLOCKS}': wrong shape of quantized values; got \(0, 8"),
        (MXFP4, replaced(BLOCKS, Tensor.short), rf"'{SCALES}': scales without quantized values"),
        (MXFP4, lambda t: t.update({"layers.0.mlp.x": torch.ones(2)}), "'layers.0.mlp.x': stored twice; .*x_blocks"),
        (MXFP4, lambda t: t.update({"y": torch.ones(2, dtype=torch.uint8)}), r"'y': not a tensor of weights: U8"),
        (FP8, lambda t: t.pop(SCALE_INV), rf"'{WEIGHT}': quantized values without scales; .*'{SCALE_INV}' .*\(2, 2\)"),
        (FP8, lambda t: t.pop(WEIGHT), rf"'{SCALE_INV}': scales without quantized values; got no such tensor"),
        (FP8, replaced(SCALE_INV, lambda s: s[:1]), rf"'{SCALE_INV}': wrong shape of scales; got \(1, 2\); .*\(2, 2\)"),
        (FP8, replaced(SCALE_INV, lambda s: s.mT[:, :1]), rf"'{SCALE_INV}': wrong shape of scales; got \(2, 1\)"),
        (FP8, replaced(SCALE_INV, lambda s: s[0, 0]), rf"'{SCALE_INV}': wrong shape of scales; got \(\)"),
        (FP8, replaced(SCALE_INV, Tensor.half), rf"'{SCALE_INV}': wrong dtype of scales; got F16; expected F32 or BF1"),
        (FP8, replaced(WEIGHT, lambda w: w.to(torch.bfloat16)), rf"'{SCALE_INV}': scales without quantized values"),
        (FP8, replaced(WEIGHT, lambda w: w.to(torch.float8_e5m2)), rf"'{SCALE_INV}': scales without quantized values"),
        (FP8, replaced(WEIGHT, lambda w: w[0]), rf"'{WEIGHT}': wrong shape of quantized values; got \(256,\)"),
        (FP8, lambda t: t.pop(WEIGHT) is t.pop(SCALE_INV), "no quantized tensor, but .* quant_method 'fp8'"),
        (MXFP4, lambda t: t.pop(BLOCKS) is t.pop(SCALES), "no quantized tensor, but config.json has a quantization_c"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    tmp_path: Path, quantization: Quantization, change: Callable[[Tensors], Any], message: str
) -> None:
    tensors = {"mxfp4": stored_mxfp4, "fp8": stored_fp8}[quantization.method]()
    QuantizedCheckpoint(write(tmp_path / "good", tensors), quantization)
    change(tensors)
    write(tmp_path / "bad", tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        QuantizedCheckpoint(tmp_path / "bad", quantization)
    assert str(tmp_path / "bad") in str(caught.value)


@pytest.mark.parametrize("make, name", [(stored_mxfp4, BLOCKS), (stored_fp8, WEIGHT)])
def test_quantized_tensors_without_an_entry(tmp_path: Path, make: Callable[[], Tensors], name: str) -> None:
    message = f"model.safetensors, tensor '{name}': quantized tensor, but config.json has no quantization_config"
    with pytest.raises(CheckpointError, match=message):
        QuantizedCheckpoint(write(tmp_path, make()), None)


@pytest.mark.parametrize(
    "module, is_excluded",
    [
        ("layers.0.mlp", True), ("layers.*.mlp", True), ("mlp", True), ("layers.0", True), ("*.0.mlp.w", True),
        ("layers.0.mlp.w", True), ("layers.0.mlp.w.weight", False), ("layers.1.mlp", False), ("ml", False),
        ("lp.w", False), ("layers.*.mlp.router", False), ("lm_head", False), ("layer*", False), ("0.w", False),
    ],
)  # fmt: skip
def test_excluded_modules(tmp_path: Path, module: str, is_excluded: bool) -> None:
    quantization = Quantization("fp8", ("lm_head", module))
    write(tmp_path, stored_fp8())
    if not is_excluded:
        QuantizedCheckpoint(tmp_path, quantization)
        return
    message = f"tensor '{WEIGHT}': quantized tensor of a module that config.json excludes; got {module!r} in"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        QuantizedCheckpoint(tmp_path, quantization)


def test_refused_files_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(Checkpoint, "close", lambda self: closed.append(self))
    with pytest.raises(CheckpointError):
        QuantizedCheckpoint(write(tmp_path, stored_fp8()), None)
    assert len(closed) == 1


# Hostile headers


def write_header(directory: Path, header: object, data: bytes) -> None:
    encoded = json.dumps(header).encode()
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


dimensions = st.integers(-1, 17) | st.sampled_from([2**31, 2**62, 2**63, 0.5, None])
dtypes = st.sampled_from(["U8", "F8_E4M3", "F8_E5M2", "F32", "BF16", "F4"])


@given(st.sampled_from(list(FORMATS)), st.lists(st.tuples(dtypes, st.lists(dimensions, max_size=4)), max_size=3))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_random_headers(tmp_path_factory: pytest.TempPathFactory, method: str, entries: list[Any]) -> None:
    """Either an error, or tensors of the size that the header claims."""
    directory = tmp_path_factory.mktemp("random")
    names = [f"x{FORMATS[method].values_suffix}", f"x{FORMATS[method].scales_suffix}", "y"]
    header, end = {}, 0
    for name, (dtype, shape) in zip(names, entries, strict=False):
        itemsize = {"F32": 4, "BF16": 2}.get(dtype, 1)
        elements = math.prod(size if isinstance(size, int) and size < 2**20 else 1 for size in shape)
        begin, end = end, end + max(0, elements * itemsize)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    write_header(directory, header, bytes(min(end, 2**20)))
    with contextlib.suppress(CheckpointError), QuantizedCheckpoint(directory, Quantization(method)) as opened:
        for name, info in opened.tensors.items():
            assert opened.read(name).shape == info.shape


@pytest.mark.parametrize("shape", [[2**40, 2**20, 0, 16], [2**62, 0, 4, 16], [0, 2**60, 1, 16], [1, 0, 2**59, 16]])
def test_claims_of_enormous_sizes(tmp_path: Path, shape: list[int]) -> None:
    """Empty tensors may claim any size."""
    empty = {"dtype": "U8", "data_offsets": [0, 0]}
    header = {"x_blocks": {**empty, "shape": shape}, "x_scales": {**empty, "shape": shape[:-1]}}
    write_header(tmp_path, header, b"")
    with pytest.raises(CheckpointError, match=r"model.safetensors, tensor 'x_blocks': wrong shape of quantized val"):
        QuantizedCheckpoint(tmp_path, MXFP4)


def test_truncated_files(tmp_path: Path) -> None:
    path = write(tmp_path, stored_mxfp4()) / "model.safetensors"
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model.safetensors: not a valid safetensors file"):
            QuantizedCheckpoint(tmp_path, MXFP4)


# config.json

BLOCK_SIZE = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "entry, expected",
    [
        (None, None),
        ({"quant_method": "mxfp4"}, MXFP4),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
            Quantization("mxfp4", ("model.layers.*.self_attn", "lm_head")),
        ),
        ({"quant_method": "mxfp4", "modules_to_not_convert": None}, MXFP4),
        (BLOCK_SIZE, FP8),
        ({**BLOCK_SIZE, "activation_scheme": "dynamic", "fmt": "e4m3"}, FP8),  # DeepSeek-V3
        ({**BLOCK_SIZE, "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"}, FP8),  # DeepSeek-V3.1
        (
            {**BLOCK_SIZE, "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "lm_head"]},  # MiniMax-M2
            Quantization("fp8", ("gate", "lm_head")),
        ),
        ({**BLOCK_SIZE, "ignored_layers": ["gate"]}, Quantization("fp8", ("gate",))),
        ({**BLOCK_SIZE, "ignored_layers": ["a", "b"], "modules_to_not_convert": ["b", "a"]}, ("b", "a")),
        (
            {**BLOCK_SIZE, "dequantize": False, "modules_to_convert": None, "scale_fmt": "float"},
            FP8,
        ),  # transformers
    ],
)  # fmt: skip
def test_accepted_entries(entry: object, expected: object) -> None:
    if isinstance(expected, tuple):
        expected = Quantization("fp8", expected)
    assert read_quantization({"quantization_config": entry}, FORMATS) == expected
    assert read_quantization({}, ()) is None


@pytest.mark.parametrize(
    "entry, message",
    [
        ({}, "quantization_config: not supported; got quant_method None; expected no entry or quant_method 'fp8' or"),
        ([], r"quantization_config: not supported; got \[\]"),
        (False, "quantization_config: not supported; got False"),
        ("mxfp4", "quantization_config: not supported; got 'mxfp4'"),
        ({"quant_method": "gptq"}, "got quant_method 'gptq'.*Load the repository's unquantized original"),
        ({"quant_method": ["mxfp4"]}, "quantization_config: not supported"),
        ({"quant_method": "MXFP4"}, "quantization_config: not supported"),
        ({"quant_method": "mxfp4", "fmt": "e4m3"}, "quantization_config, fmt: unknown entry; got 'e4m3'"),
        ({"quant_method": "mxfp4", "weight_block_size": [128, 128]}, "weight_block_size: unknown entry"),
        ({"quant_method": "mxfp4", "module_to_not_convert": []}, "Did you mean 'modules_to_not_convert'"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert: not a list of mod"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": [1]}, "modules_to_not_convert: not a list of modules"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": [""]}, "modules_to_not_convert: not a list of modules"),
        ({"quant_method": "fp8"}, r"weight_block_size: missing; expected \[128, 128\]"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size: missing"),
        ({**BLOCK_SIZE, "weight_block_size": [64, 128]}, r"weight_block_size: not supported; got \[64, 128\]"),
        ({**BLOCK_SIZE, "weight_block_size": [128.0, 128]}, "weight_block_size: not supported"),
        ({**BLOCK_SIZE, "weight_block_size": [-128, -128]}, "weight_block_size: not supported"),
        ({**BLOCK_SIZE, "weight_block_size": 128}, "weight_block_size: not supported; got 128"),
        ({**BLOCK_SIZE, "fmt": "e5m2"}, "fmt: not supported; got 'e5m2'; expected 'e4m3' or 'float8_e4m3fn'"),
        ({**BLOCK_SIZE, "activation_scheme": "static"}, "activation_scheme: not supported; got 'static'"),
        ({**BLOCK_SIZE, "scale_fmt": "int"}, "scale_fmt: not supported"),
        ({**BLOCK_SIZE, "expert_dtype": "fp4"}, "expert_dtype: not supported; got 'fp4'"),
        ({**BLOCK_SIZE, "dequantize": 1}, "dequantize: not supported; got 1"),
        ({**BLOCK_SIZE, "modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert: not supported"),
        ({**BLOCK_SIZE, "kv_cache_scheme": {}}, "kv_cache_scheme: unknown entry"),
        ({**BLOCK_SIZE, "ignored_layers": ["a"], "modules_to_not_convert": ["b"]}, "ignored_layers: contradicts mod"),
    ],
)
def test_refused_entries(entry: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_quantization({"quantization_config": entry}, FORMATS)


def test_a_format_that_the_architecture_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"got quant_method 'mxfp4'; expected .* 'fp8'. Load"):
        read_quantization({"quantization_config": {"quant_method": "mxfp4"}}, {"fp8"})


def test_headers_alone(tmp_path: Path) -> None:
    """As `ligerzoo info` has them from the hub."""
    infos = Checkpoint(write(tmp_path, stored_mxfp4())).tensors
    [(name, pair)] = find_quantized(infos, MXFP4, tmp_path).items()
    assert (name, pair.info.shape, pair.info.nbytes) == ("layers.0.mlp.x", (2, 64, 8), 2 * 64 * 8 * 2)

"""Models loaded from quantized checkpoints, compared with those of the same weights in bfloat16."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ligerzoo import AutoModel, AutoModelForSequenceClassification, cli, convert, hub, info
from ligerzoo.convert import architecture_of
from ligerzoo.convert.layout import Layout
from ligerzoo.convert.tensor_slices import Box, shapes_of
from ligerzoo.errors import LigerzooError
from ligerzoo.files.quantized import QuantizedCheckpoint, read_quantization
from ligerzoo.hub import loading
from ligerzoo.models import CausalLM, Qwen3Moe, Qwen3MoeConfig
from tests.files.test_quantized import (
    FORMATS,
    Tensors,
    bits,
    convert_moe_packed_tensors,
    dequantized_by_block,
    random_fp8,
    random_mxfp4,
    write,
)


class Toy(Qwen3Moe):
    """Experts that are stored as the parameters are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(Qwen3MoeConfig):
    pass


TOY = dataclasses.replace(
    architecture_of("qwen3_moe"), model_type="toy", class_name="Toy", classes=(Toy, ToyConfig),
    layouts=lambda config: (Layout(),), quantized_formats=frozenset({"mxfp4"}),
)  # fmt: skip

SIZES = {
    "vocab_size": 50, "hidden_size": 160, "intermediate_size": 96, "moe_intermediate_size": 144, "num_experts": 3,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 40,
}  # fmt: skip
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
EXCLUDED = ["lm_head", "model.embed_tokens", "model.layers.*.mlp.gate"]
ENTRIES: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": [*EXCLUDED, "model.layers.*.self_attn"]},
    "fp8": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": EXCLUDED,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(convert._REGISTERED, "toy", TOY)


def quantized_and_not(method: str, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Returns the tensors with random values in some, quantized and in bfloat16."""
    quantized, plain = {}, {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        if method == "mxfp4" and ".experts." in name:
            stack, columns, rows = tensor.shape
            blocks, scales = random_mxfp4((stack, rows, columns), seed)
            scales = 118 + scales % 8
            quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales)
        elif method == "fp8" and name.endswith("_proj.weight"):
            values, scales = random_fp8(tuple(tensor.shape), seed)
            quantized |= {name: values, f"{name}_scale_inv": scales}
            plain[name] = dequantized_by_block(values, scales)
        else:
            quantized[name] = plain[name] = tensor
    return quantized, plain


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Writes, per format, a quantized checkpoint and one with the same weights in bfloat16."""
    written = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(convert._REGISTERED, "toy", TOY)
        for method, model in (("mxfp4", Toy(ToyConfig(**SIZES))), ("fp8", Qwen3Moe(Qwen3MoeConfig(**SIZES)))):
            folder = tmp_path_factory.mktemp(method)
            model.bfloat16().save_pretrained(folder / "random")
            raw = json.loads((folder / "random" / "config.json").read_text())
            quantized, plain = quantized_and_not(method, load_file(folder / "random" / "model.safetensors"))
            for name, tensors, entry in (("quantized", quantized, ENTRIES[method]), ("plain", plain, None)):
                write(folder / name, tensors)
                content = {**raw, "quantization_config": entry} if entry else raw
                (folder / name / "config.json").write_text(json.dumps(content))
            written[method] = folder / "quantized", folder / "plain"
    return written


@pytest.fixture
def editable(directories: dict[str, tuple[Path, Path]], tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes a changed copy of a quantized checkpoint."""

    def edit(method: str, change: Callable[[Tensors], Any] = lambda tensors: None, **entries: Any) -> Path:
        directory, _ = directories[method]
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        write(tmp_path / "edited", tensors)
        raw = json.loads((directory / "config.json").read_text()) | entries
        raw = {name: value for name, value in raw.items() if value is not ...}
        (tmp_path / "edited" / "config.json").write_text(json.dumps(raw))
        return tmp_path / "edited"

    return edit


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def same_weights(a: CausalLM, b: CausalLM) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


every_format = pytest.mark.parametrize("method", FORMATS)


@every_format
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_weights_and_logits(directories: dict[str, tuple[Path, Path]], method: str, dtype: str) -> None:
    quantized, plain = (AutoModel.from_pretrained(directory, dtype=dtype) for directory in directories[method])
    assert {weight.dtype for weight in quantized.parameters()} == {torch.bfloat16 if dtype == "auto" else torch.float32}
    assert all(weight.is_contiguous() for weight in quantized.parameters())
    assert same_weights(quantized, plain)
    assert torch.equal(quantized(IDS).logits, plain(IDS).logits)


@every_format
def test_engines_cannot_read_them(directories: dict[str, tuple[Path, Path]], method: str) -> None:
    quantized, plain = directories[method]
    assert all(weight.is_meta for weight in hub.load_on_meta(plain, CausalLM).parameters())
    with pytest.raises(LigerzooError, match="quantized: tensors are quantized; expected dense tensors"):
        hub.load_on_meta(quantized, CausalLM)


@every_format
def test_the_saved_checkpoint_is_not_quantized(
    directories: dict[str, tuple[Path, Path]], tmp_path: Path, method: str
) -> None:
    for directory, name in zip(directories[method], ("quantized", "plain"), strict=True):
        AutoModel.from_pretrained(directory).save_pretrained(tmp_path / name)
    assert files(tmp_path / "quantized") == files(tmp_path / "plain")
    assert cli.main(["convert", str(directories[method][0]), str(tmp_path / "converted")]) == 0
    assert files(tmp_path / "converted") == files(tmp_path / "plain")


def test_a_null_entry_is_kept(tmp_path: Path, directories: dict[str, tuple[Path, Path]]) -> None:
    _, plain = directories["fp8"]
    raw = json.loads((plain / "config.json").read_text()) | {"quantization_config": None}
    write(tmp_path / "null", load_file(plain / "model.safetensors"))
    (tmp_path / "null" / "config.json").write_text(json.dumps(raw))
    AutoModel.from_pretrained(tmp_path / "null").save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == raw


@every_format
@pytest.mark.parametrize("dimension", [0, 1])
def test_each_process_reads_its_part(
    directories: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch, method: str, dimension: int
) -> None:
    """Three processes, whose boundaries are within blocks."""
    directory, _ = directories[method]
    model = AutoModel.from_pretrained(directory)
    architecture, processes, device = convert.architecture_of_model(model), 3, torch.device("cpu")
    raw = json.loads((directory / "config.json").read_text())
    expected = model.state_dict()

    def box(parameter: Tensor, rank: int) -> Box:
        sharded = min(dimension, parameter.ndim - 1)
        rows = -(-parameter.shape[sharded] // processes)
        offset = [0] * parameter.ndim
        shape = list(parameter.shape)
        offset[sharded] = min(rank * rows, shape[sharded])
        shape[sharded] = min(rows, shape[sharded] - offset[sharded])
        return Box(tuple(offset), tuple(shape))

    with QuantizedCheckpoint(directory, read_quantization(raw, FORMATS)) as opened:
        shapes = shapes_of(expected)
        slices = list(architecture.layout_of(None, shapes_of(opened.tensors), shapes).slices(shapes))
        for rank in range(processes):
            monkeypatch.setattr(loading, "shard_of", lambda parameter, rank=rank: box(parameter, rank))
            parts = loading._read(opened, slices, expected, device)
            for name, parameter in expected.items():
                its = box(parameter, rank)
                chosen = tuple(slice(o, o + s) for o, s in zip(its.offset, its.shape, strict=True))
                assert torch.equal(bits(parts[name]), bits(parameter[chosen]))


def test_a_classifier_with_a_quantized_decoder(directories: dict[str, tuple[Path, Path]]) -> None:
    with pytest.warns(UserWarning, match=r"score.weight"):
        quantized, plain = map(AutoModelForSequenceClassification.from_pretrained, directories["fp8"])
    ours, theirs = quantized.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_layers_beyond_the_last_may_be_quantized(
    directories: dict[str, tuple[Path, Path]], editable: Callable[..., Path]
) -> None:
    """Such as those for multi-token prediction."""

    def add_layer(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            tensors[name.replace(".1.", ".2.", 1)] = tensors[name].clone()

    edited = AutoModel.from_pretrained(editable("fp8", add_layer))
    assert same_weights(edited, AutoModel.from_pretrained(directories["fp8"][1]))


@every_format
def test_info(directories: dict[str, tuple[Path, Path]], method: str, capsys: pytest.CaptureFixture[str]) -> None:
    quantized, plain = ([*map(str.strip, info.describe(d).splitlines())] for d in directories[method])
    [line] = (line for line in quantized if line.startswith("quantization"))
    assert re.fullmatch(
        rf"quantization  \d+ tensors in {method}, \S+ kB; loading dequantizes them to bfloat16, \S+ [kM]B", line
    )
    stored = ("quantization", "files", "model.safetensors")
    assert [x for x in quantized[1:] if not x.startswith(stored)] == [x for x in plain[1:] if not x.startswith(stored)]
    size = sum(tensor.nbytes for tensor in load_file(directories[method][0] / "model.safetensors").values())
    assert next(x for x in quantized if x.startswith("files")).endswith(f" in 1 file, {info._bytes(size)}")
    pages = []
    for directory in directories[method]:
        assert cli.main(["info", str(directory), "--train"]) == 0
        pages.append(capsys.readouterr().out.splitlines()[1:])
    assert pages[0] == pages[1]


def test_info_of_a_format_that_is_refused(editable: Callable[..., Path]) -> None:
    directory = editable("fp8", quantization_config={"quant_method": "gptq"})
    text = info.describe(directory)
    assert "quantization  cannot be loaded: quantization_config: not supported; got quant_method 'gptq'" in text
    with pytest.raises(LigerzooError, match="quantization_config: not supported"):
        info.plan_checkpoint(directory)


WEIGHT = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    "method, change, entries, message",
    [
        ("fp8", dict, {"quantization_config": ...}, r"tensor '.*': quantized tensor, but config.json has no quantiza"),
        ("mxfp4", dict, {"quantization_config": ...}, r"tensor '.*_blocks': quantized tensor, but config.json has no"),
        ("fp8", dict, {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: .* expected .* 'fp8'"),
        ("mxfp4", dict, {"quantization_config": ENTRIES["fp8"]}, "quantization_config: .* expected .* 'mxfp4'. Load"),
        ("fp8", dict, {"quantization_config": {"quant_method": "fp8"}}, "config.json, quantization_config, weight_blo"),
        ("fp8", lambda t: t.pop(f"{WEIGHT}_scale_inv"), {}, f"model.safetensors, tensor '{WEIGHT}': .*without scales"),
        ("fp8", lambda t: t.pop(WEIGHT), {}, f"tensor '{WEIGHT}_scale_inv': scales without quantized values"),
        ("mxfp4", lambda t: t.pop(f"{EXPERT}_scales"), {}, f"tensor '{EXPERT}_blocks': quantized values without sca"),
        ("fp8", dict, {"num_attention_heads": 2}, r"tensors '.*_proj.weight' and '.*_scale_inv': wrong shape; got \("),
        ("mxfp4", dict, {"moe_intermediate_size": 160}, r"'.*_blocks' and .*: wrong shape; got \(3, 160, 144\)"),
        ("fp8", lambda t: t.update(x=torch.ones(2).to(torch.int8)), {}, "tensor 'x': unexpected tensor"),
        ("fp8", lambda t: t.update({"lm_head.weight": t["lm_head.weight"].char()}), {}, "not a dtype of weights; got"),
        (
            "fp8", lambda t: t.update({WEIGHT: t[WEIGHT].to(torch.float8_e5m2)}), {},
            f"'{WEIGHT}_scale_inv': scales without quantized values; got F8_E5M2; expected F8_E4M3",
        ),
        (
            "fp8", dict, {"quantization_config": {**ENTRIES["fp8"], "modules_to_not_convert": ["model.layers.0"]}},
            "quantized tensor of a module that config.json excludes; got 'model.layers.0' in modules_to_not_convert",
        ),
    ],
)  # fmt: skip
def test_refused_before_a_weight_is_read(
    editable: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    change: Callable[[Tensors], Any],
    entries: dict[str, Any],
    message: str,
) -> None:
    def read(*_: object) -> Tensor:
        raise AssertionError("a weight was read")

    directory = editable(method, change, **entries)
    monkeypatch.setattr(hub.loading.Checkpoint, "_read_stored", read)
    with pytest.raises(LigerzooError, match=message) as caught:
        AutoModel.from_pretrained(directory)
    assert str(directory) in str(caught.value)


def test_an_override_that_contradicts_the_files(directories: dict[str, tuple[Path, Path]]) -> None:
    with pytest.raises(LigerzooError, match=r"argument num_hidden_layers=1, .*: .*The files have num_hidden_layers=2"):
        AutoModel.from_pretrained(directories["fp8"][0], num_hidden_layers=1)

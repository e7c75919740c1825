"""gpt-oss checkpoints as OpenAI publishes them: experts in MXFP4, which transformers reads as bfloat16."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GptOssForCausalLM

from ligerzoo import AutoModel
from ligerzoo.convert.layout import Interleaved, Layout, Transposed
from ligerzoo.convert.stored_tensors import StoredTensors, assemble
from ligerzoo.convert.tensor_slices import Box, TensorSlice, within
from ligerzoo.errors import ConfigError
from ligerzoo.models import GptOss, GptOssConfig
from tests.files.test_quantized import convert_moe_packed_tensors, random_mxfp4, write
from tests.models.tiny import random_model
from tests.models.tiny_gpt_oss import GPT_OSS

SIZES = {"hidden_size": 64, "intermediate_size": 96, "experts_per_token": 2}
ENTRY = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and one with the same weights in bfloat16."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    config = {**GPT_OSS, **SIZES, "torch_dtype": "bfloat16"}
    quantized, plain = {}, {}
    for seed, (name, tensor) in enumerate(random_model(config).bfloat16().state_dict().items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            blocks, scales = random_mxfp4((experts, rows, columns), seed)
            scales = 121 + scales % 4
            quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales)
            assert plain[name].shape == tensor.shape
        else:
            quantized[name] = plain[name] = tensor.contiguous()
    for name, tensors, entry in (("quantized", quantized, ENTRY), ("plain", plain, None)):
        write(folder / name, tensors)
        content = {**config, "quantization_config": entry} if entry else config
        (folder / name / "config.json").write_text(json.dumps(content))
    return folder / "quantized", folder / "plain"


def test_mxfp4_gives_the_weights_and_logits_of_bfloat16(directories: tuple[Path, Path], tmp_path: Path) -> None:
    quantized, plain = (AutoModel.from_pretrained(directory) for directory in directories)
    assert isinstance(quantized, GptOss)
    expected = plain.state_dict()
    assert all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in quantized.state_dict().values())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in quantized.state_dict().items())

    ids = torch.randint(GPT_OSS["vocab_size"], (2, 40))
    theirs = GptOssForCausalLM.from_pretrained(directories[1], dtype=torch.float32, attn_implementation="eager")
    truth = theirs(ids).logits
    assert (quantized.float()(ids).logits - truth).abs().max() <= 2e-5 * truth.abs().max()

    AutoModel.from_pretrained(directories[0]).save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    saved, stored = load_file(tmp_path / "model.safetensors"), load_file(directories[1] / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())


def test_other_quantization_is_refused(directories: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((directories[0] / name).read_bytes())
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="quantization_config: not supported; got quant_method 'fp8'"):
        AutoModel.from_pretrained(tmp_path)


SHAPES = {
    "experts.gate_up_proj": (3, 8, 5),
    "experts.gate_up_proj_bias": (3, 8),
    "experts.down_proj": (3, 5, 4),
}
RULES = (
    Interleaved("experts.gate_up_proj", True),
    Interleaved("experts.gate_up_proj_bias"),
    Transposed("experts.down_proj"),
)


def slices() -> list[TensorSlice]:
    return list(Layout(RULES).slices(SHAPES))


def test_the_layout_interleaves_and_transposes() -> None:
    parameters = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    stored = {name: tensor.clone() for name, tensor in StoredTensors(slices(), parameters).items()}
    gate_up, bias = stored["experts.gate_up_proj"], stored["experts.gate_up_proj_bias"]
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {
        "experts.gate_up_proj": (3, 5, 8), "experts.gate_up_proj_bias": (3, 8), "experts.down_proj": (3, 4, 5),
    }  # fmt: skip
    assert torch.equal(gate_up[:, :, ::2], parameters["experts.gate_up_proj"][:, :4].mT)
    assert torch.equal(gate_up[:, :, 1::2], parameters["experts.gate_up_proj"][:, 4:].mT)
    assert torch.equal(bias[:, 1::2], parameters["experts.gate_up_proj_bias"][:, 4:])

    def read(part: TensorSlice) -> torch.Tensor:
        return part.select(stored[part.stored_name])

    again = assemble(slices(), SHAPES, read, dtypes=dict.fromkeys(SHAPES, torch.float32), device=torch.device("cpu"))
    assert all(torch.equal(again[name], tensor) and again[name].is_contiguous() for name, tensor in parameters.items())


@pytest.mark.parametrize("name", SHAPES)
def test_every_box_of_a_parameter_is_read(name: str) -> None:
    """The shards of FSDP2, in any dimension."""
    parameters = {key: torch.randn(shape) for key, shape in SHAPES.items()}
    stored = dict(StoredTensors(slices(), parameters))
    shape = SHAPES[name]
    for dimension in range(len(shape)):
        for size in range(1, shape[dimension] + 1):
            for start in range(shape[dimension] - size + 1):
                offset = tuple(start if i == dimension else 0 for i in range(len(shape)))
                box = Box(offset, tuple(size if i == dimension else n for i, n in enumerate(shape)))
                own = [part for s in slices() if s.name == name and (part := within(s, box)) is not None]
                got = assemble(
                    own, {name: box.shape}, lambda part: part.select(stored[part.stored_name]),
                    dtypes={name: torch.float32}, device=torch.device("cpu"),
                )  # fmt: skip
                assert torch.equal(got[name], parameters[name].narrow(dimension, start, size))


def test_default_layers_alternate() -> None:
    config = GptOssConfig(num_hidden_layers=5)
    assert [config.window(i) for i in range(5)] == [128, None, 128, None, 128]


@pytest.mark.parametrize("name", ["swiglu_limit", "swiglu_alpha"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf])
def test_invalid_numbers(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        GptOssConfig(**{name: value})  # type: ignore[arg-type]

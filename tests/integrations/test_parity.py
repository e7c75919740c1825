"""`ligerzoo parity`: models equal those of transformers, and a difference is found in its module."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ligerzoo import AutoModel, cli
from ligerzoo.cli.parity import DEFAULT_TEXT
from ligerzoo.errors import LigerzooError
from ligerzoo.integrations import parity
from ligerzoo.integrations.parity import models as parity_models
from ligerzoo.integrations.parity.models import _errors
from ligerzoo.layers import RMSNorm
from ligerzoo.models import CausalLM
from tests.integrations.clients import write
from tests.models import tiny_qwen2_5_vl, tiny_qwen2_vl, tiny_qwen3_vl
from tests.models.comparing import load_both
from tests.models.prompts import PROMPTS, prompt
from tests.models.tiny import Tiny
from tests.models.zoo import TEXT_CHECKPOINTS

LLAMA = next((Path(cli.__file__).parents[1]).rglob("tiny-python-llama"))

pytestmark = pytest.mark.filterwarnings("ignore:.*rope_(scaling|parameters).*:FutureWarning")


def text_of(tiny: Tiny) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 60, (1, tiny.tokens))}


@pytest.mark.every_layer
@pytest.mark.parametrize("tiny", TEXT_CHECKPOINTS, ids=str)
def test_text_models_are_equal(tiny: Tiny, tmp_path: Path, device: str) -> None:
    tiny.write(tmp_path)
    found = parity.compare(tmp_path, text_of(tiny), device=device)
    assert found.first is None, found
    assert {one.name for one in found.layers} >= {"model.embed_tokens", "model.layers.0", "lm_head"}
    # transformers' Llama 4 gives all experts all tokens.
    others = ".mlp.experts (its " if tiny.config["model_type"] == "llama4_text" else "tokens, not reached"
    assert all("tokens, not reached" in one or others in one for one in found.skipped)


@pytest.mark.parametrize("family", [tiny_qwen2_vl, tiny_qwen2_5_vl, tiny_qwen3_vl])
def test_models_of_images_are_equal(family: Any, tmp_path: Path, device: str) -> None:
    family.CHECKPOINTS[0].write(tmp_path)
    vision_config = AutoModel.from_pretrained(tmp_path, device="meta").config.vision_config
    p = prompt(PROMPTS["images of one size"], vars(vision_config))
    found = parity.compare(tmp_path, {"input_ids": p.ids, **p.vision}, device=device)
    assert found.first is None, found
    # Of other layouts: hidden states before the merger, and embeddings of the corners of each patch.
    assert set(found.skipped) <= {"visual (its output)", "visual.pos_embed (its output)"}
    assert any(one.name.startswith("visual.blocks.1.self_attn") for one in found.modules)
    without_image = parity.compare(tmp_path, {"input_ids": torch.randint(3, 60, (1, 20))}, device=device)
    assert without_image.first is None
    assert without_image.skipped == ("visual",)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_half_precision(model_type: str, dtype: torch.dtype, tmp_path: Path, device: str) -> None:
    found = parity.compare(write(model_type, tmp_path), {"input_ids": torch.randint(3, 60, (1, 40))}, dtype=dtype)
    assert found.first is None, found
    assert all(one.rounding >= torch.finfo(dtype).eps for one in found.modules)


WRONG_WEIGHTS = {
    "embedding": ("llama", "model.embed_tokens.weight", "model.embed_tokens"),
    "norm": ("llama", "model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm"),
    "projection": ("llama", "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj"),
    "down projection": ("llama", "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj"),
    "head": ("llama", "lm_head.weight", "lm_head"),
    "expert": ("mixtral", "model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts"),
    "router": ("mixtral", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate"),
    "part of a fused projection": ("phi3", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS.values(), ids=list(WRONG_WEIGHTS))
def test_a_wrong_weight_is_found_in_its_module(case: tuple[str, str, str], tmp_path: Path, device: str) -> None:
    model_type, weight, module = case
    ours, theirs = load_both(write(model_type, tmp_path), torch.float32, device, AutoModelForCausalLM)
    with torch.no_grad():
        ours.get_parameter(weight).view(-1)[::7] += 0.01
    found = parity.compare_models(ours, theirs, {"input_ids": torch.arange(3, 80, device=device)[None]})
    assert found.first is not None
    assert found.first.name == module
    assert found.first.error > 1e-4 > found.first.rounding
    changed = {one.name for one in found.modules if not one.is_explained and one.what == "output"}
    assert changed <= {module, f"{module.rpartition('.')[0]}.experts"}  # no later module is blamed
    assert f"different, of {len({one.name for one in found.modules})} modules on 77 tokens: {module}: " in str(found)


def wrong_rotation(model: CausalLM) -> None:
    attention = model.model.layers[1].self_attn
    attention.rotary = copy.deepcopy(attention.rotary)  # all layers share it
    attention.rotary._frequencies_on = {key: f * 1.001 for key, f in attention.rotary._frequencies_on.items()}


def wrong_epsilon(model: CausalLM) -> None:
    norm = model.model.layers[1].post_attention_layernorm
    assert isinstance(norm, RMSNorm)
    norm.eps = 1e-2


def wrong_activation(model: CausalLM) -> None:
    model.model.layers[0].mlp.activation = "gelu"


WRONG_CODE: dict[Callable[[CausalLM], None], tuple[str, str]] = {
    wrong_rotation: ("model.layers.1.self_attn", "o_proj"),
    wrong_epsilon: ("model.layers.1.post_attention_layernorm", "output"),
    wrong_activation: ("model.layers.0.mlp", "down_proj"),
}


@pytest.mark.parametrize("mistake", WRONG_CODE, ids=lambda mistake: mistake.__name__)
def test_wrong_code_is_found(mistake: Callable[[CausalLM], None], tmp_path: Path, device: str) -> None:
    ours, theirs = load_both(write("llama", tmp_path), torch.float32, device, AutoModelForCausalLM)
    mistake(ours)
    found = parity.compare_models(ours, theirs, {"input_ids": torch.arange(3, 80, device=device)[None]})
    assert found.first is not None
    assert (found.first.name, found.first.what) == WRONG_CODE[mistake]


@pytest.mark.parametrize("tokens", [slice(-16, None), slice(0, 16), slice(30, 31)], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_few_wrong_tokens_are_found_in_half_precision(
    model_type: str, tokens: slice, tmp_path: Path, device: str
) -> None:
    ours, theirs = load_both(write(model_type, tmp_path), torch.bfloat16, device, AutoModelForCausalLM)

    def wrong(_: nn.Module, __: object, y: Tensor) -> Tensor:
        y = y.clone()
        y[:, tokens] = 0
        return y

    ours.model.layers[0].mlp.register_forward_hook(wrong)
    found = parity.compare_models(ours, theirs, {"input_ids": torch.randint(3, 60, (1, 163), device=device)})
    assert found.first is not None
    assert found.first.name == "model.layers.0.mlp"


def test_the_worst_token_counts() -> None:
    mean, worst = {"error": 1e-3, "rounding": 1e-3}, {"worst": 0.3, "worst_rounding": 2e-3}
    one = parity.Difference("model.norm", "output", **mean, **worst)
    assert not one.is_explained
    assert "a relative error of 3.0e-01 in a token; rounding explains 2.0e-03" in str(one)


def test_tokens_in_other_experts_count_up_to_a_tenth() -> None:
    expected = torch.ones(40, 8, dtype=torch.bfloat16)
    actual = expected.clone()
    actual[:6] = 0
    rerouted = torch.arange(40) < 5
    assert _errors(actual, expected, None) == pytest.approx(((6 / 40) ** 0.5, 1))
    assert _errors(actual, expected, rerouted) == pytest.approx(((2 / 36) ** 0.5, 1))
    assert _errors(actual[:4], expected[:4], rerouted[:4])[1] == 1
    assert _errors(actual.float(), expected.float(), rerouted) == pytest.approx(((6 / 40) ** 0.5, 1))


def test_swapped_tokens_are_found_in_their_experts(tmp_path: Path, device: str) -> None:
    ours, theirs = load_both(write("mixtral", tmp_path), torch.float32, device, AutoModelForCausalLM)
    ours.model.layers[0].mlp.experts.register_forward_hook(lambda _, __, y: y.flip(0))
    found = parity.compare_models(ours, theirs, {"input_ids": torch.arange(3, 80, device=device)[None]})
    assert found.first is not None
    assert (found.first.name, found.first.what) == ("model.layers.0.mlp.experts", "output")


def test_an_image_makes_a_wrong_tower_visible(tmp_path: Path, device: str) -> None:
    ours, theirs = load_both(write("qwen2_vl", tmp_path), torch.float32, device, AutoModelForImageTextToText)
    with torch.no_grad():
        ours.get_parameter("visual.blocks.1.mlp.fc2.bias")[3] += 0.1
    p = prompt(PROMPTS["images of one size"], vars(ours.config.vision_config))
    inputs = {name: tensor.to(device) for name, tensor in {"input_ids": p.ids, **p.vision}.items()}
    found = parity.compare_models(ours, theirs, inputs)
    assert found.first is not None
    assert found.first.name == "visual.blocks.1.mlp.fc2"


SHORT = {
    "mistral-sliding-window": (7, "a window of 7 tokens, not reached"),
    "llama-longrope,-one-token-longer": (44, "longrope RoPE beyond 44 tokens, not reached"),
    "llama-dynamic,-within-the-context": (128, "dynamic RoPE beyond 128 tokens, not reached"),
    "qwen3-yarn": (32, "yarn RoPE beyond 32 tokens, not reached"),
    "llama-plain": (1, "RoPE and attention: the text has one token"),
}


@pytest.mark.parametrize("tiny", [one for one in TEXT_CHECKPOINTS if str(one) in SHORT], ids=str)
def test_what_the_text_is_too_short_for(tiny: Tiny, tmp_path: Path) -> None:
    tokens, what = SHORT[str(tiny)]
    tiny.write(tmp_path)
    for length, skipped in ((tokens, (what,)), (tokens + 1, ())):
        assert parity.compare(tmp_path, {"input_ids": torch.randint(3, 60, (1, length))}).skipped == skipped


def test_modules_that_ours_does_not_call(tmp_path: Path, device: str) -> None:
    ours, theirs = load_both(write("llama", tmp_path), torch.float32, device, AutoModelForCausalLM)
    ours.model.layers[0].mlp.forward = lambda x, *_, **__: torch.zeros_like(x)  # type: ignore[method-assign]
    found = parity.compare_models(ours, theirs, {"input_ids": torch.arange(3, 80, device=device)[None]})
    names = [
        f"model.layers.0.mlp.{part}_proj (its {side})"
        for part in ("gate", "up", "down")
        for side in ("input", "output")
    ]
    assert sorted(found.skipped) == sorted(names)
    assert f"not compared: {found.skipped[0]}" in str(found)


def test_nan_is_a_difference(tmp_path: Path, device: str) -> None:
    ours, theirs = load_both(write("llama", tmp_path), torch.float32, device, AutoModelForCausalLM)
    with torch.no_grad():
        ours.get_parameter("model.layers.0.mlp.up_proj.weight")[0, 0] = torch.nan
    found = parity.compare_models(ours, theirs, {"input_ids": torch.arange(3, 30, device=device)[None]})
    assert found.first is not None
    assert found.first.name == "model.layers.0.mlp.up_proj"
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["first"]["error"] is None


def test_no_hooks_stay(tmp_path: Path, device: str) -> None:
    models = load_both(write("llama", tmp_path), torch.float32, device, AutoModelForCausalLM)
    parity.compare_models(*models, {"input_ids": torch.arange(3, 30, device=device)[None]})
    assert not any(part._forward_hooks or part._forward_pre_hooks for model in models for part in model.modules())


def test_transformers_lacks_the_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("does not recognize this architecture\nlong advice")

    monkeypatch.setattr(parity_models.AutoConfig, "from_pretrained", fails)
    with pytest.raises(LigerzooError, match="does not have the architecture; got does not recognize"):
        parity.compare(write("llama", tmp_path), {"input_ids": torch.ones(1, 3, dtype=torch.int64)})


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    assert cli.main(["parity", str(LLAMA), "--device", device]) == 0
    shown = capsys.readouterr()
    assert "equal up to rounding: " in shown.out
    assert not shown.err
    assert cli.main(["parity", str(LLAMA), "--json", "--text", "def f(x):", "--dtype", "bfloat16"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"]
    assert report["first"] is None
    assert report["tokens"] < len(DEFAULT_TEXT)
    assert {"name", "what", "error", "rounding", "worst", "worst_rounding", "explained"} == report["modules"][0].keys()


def test_command_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TEXT_CHECKPOINTS[0].write(tmp_path)
    assert cli.main(["parity", str(tmp_path), "--device", "cpu"]) == 0
    assert "64 tokens" in capsys.readouterr().out


def test_command_finds_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = parity_models.AutoModel.from_pretrained

    def load_wrong(*args: Any, **options: Any) -> nn.Module:
        model = load(*args, **options)
        with torch.no_grad():
            model.get_parameter("model.layers.2.self_attn.o_proj.weight")[:] *= 1.01
        return model

    monkeypatch.setattr(parity_models.AutoModel, "from_pretrained", load_wrong)
    assert cli.main(["parity", str(LLAMA), "--device", "cpu"]) == 1
    assert "model.layers.2.self_attn.o_proj: its output has a relative error of 1.0e-02" in capsys.readouterr().out


def test_command_without_transformers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("ligerzoo.integrations.parity")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["parity", str(LLAMA)]) == 1
    message = "--reference: the comparison needs the package transformers, which is not installed. Run `pip install"
    assert message in capsys.readouterr().err

"""Every tiny checkpoint against transformers: logits, loss, every gradient, padding, and the way back to the files."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ligerzoo import AutoModel
from ligerzoo.models import CausalLM
from tests.models.tiny import CHECKPOINTS, Tiny

logging.disable_progress_bar()
logging.set_verbosity_error()

TOLERANCE = 2e-5  # of the largest magnitude


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


@pytest.fixture(scope="module")
def directory(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tiny.write(path)
    return path


def load_both(directory: Path, dtype: torch.dtype, device: str) -> tuple[CausalLM, PreTrainedModel]:
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return AutoModel.from_pretrained(directory, dtype=dtype, device=device), theirs.to(device)


def random_tokens(tiny: Tiny, device: str) -> Tensor:
    return torch.randint(tiny.config["vocab_size"], (2, tiny.tokens), device=device)


def assert_close(ours: Tensor, theirs: Tensor, what: str) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), what
    error, scale = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    assert error <= TOLERANCE * scale, f"{what}: off by {error / scale:.1e} of the largest"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return {name: tensor for file in files for name, tensor in load_file(directory / file).items()}


def raw_bytes(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {name: (t.dtype, t.shape, t.flatten().view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


def test_logits_loss_and_gradients(tiny: Tiny, directory: Path, device: str) -> None:
    ours, theirs = load_both(directory, torch.float32, device)
    tokens = random_tokens(tiny, device)
    labels = tokens.masked_fill(torch.rand(tokens.shape, device=device) < 0.3, -100)
    expected, loss = theirs(tokens, labels=labels), ours(tokens, labels=labels).loss
    assert_close(ours(tokens).logits, expected.logits, "logits")
    assert_close(loss, expected.loss, "loss")

    loss.backward()
    expected.loss.backward()
    got, wanted = gradients(ours), gradients(theirs)
    assert got.keys() == wanted.keys() == dict(theirs.named_parameters()).keys()
    for name, gradient in wanted.items():
        assert_close(got[name], gradient, f"gradient of {name}")


def test_bf16_logits(tiny: Tiny, directory: Path, device: str) -> None:
    ours, theirs = load_both(directory, torch.bfloat16, device)
    tokens = random_tokens(tiny, device)
    got, expected = ours(tokens).logits, theirs(tokens).logits
    assert got.dtype == expected.dtype == torch.bfloat16
    if device == "cpu":
        ulp = 2.0 ** (math.floor(math.log2(expected.abs().max().item())) - 7)
        assert (got.float() - expected.float()).abs().max().item() <= 2 * ulp
    # Fused kernels round less often than transformers' eager steps, so what they must not do is stray further from
    # the same weights in fp32.
    truth = theirs.float()(tokens).logits
    assert (got - truth).norm() <= 1.05 * (expected - truth).norm()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(tiny: Tiny, directory: Path, device: str, side: str) -> None:
    ours, theirs = load_both(directory, torch.float32, device)
    tokens = random_tokens(tiny, device)
    mask = torch.ones_like(tokens)
    mask[1, slice(None, 7) if side == "left" else slice(-7, None)] = 0
    if device == "cpu":  # even padding that sees nothing: the last of it is asked for the first token's loss
        read, labels = torch.ones_like(mask), tokens.masked_fill(mask == 0, -100)
    else:
        read, labels = mask, tokens.masked_fill((mask == 0) | (mask.roll(1, dims=1) == 0), -100)
    with torch.no_grad():
        got, expected = (model(tokens, attention_mask=mask).logits for model in (ours, theirs))
    assert got.isfinite().all()
    assert_close(got[read == 1], expected[read == 1], "logits")

    for model in (ours, theirs):
        model(tokens, attention_mask=mask, labels=labels).loss.backward()
    got, wanted = gradients(ours), gradients(theirs)
    for name, gradient in wanted.items():
        assert_close(got[name], gradient, f"gradient of {name}")


def test_saving_gives_the_files_back(tiny: Tiny, directory: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == theirs.dtype
    original, config = stored_tensors(directory), json.loads((directory / "config.json").read_text())
    size = sum(tensor.nbytes for tensor in original.values())
    model.save_pretrained(tmp_path / "saved", max_shard_size=size // tiny.shards + 1)

    expected = {
        name: tensor if "inv_freq" in name else tensor.to(model.dtype)
        for name, tensor in original.items()
        if ".layers.12." not in name
    }
    assert raw_bytes(stored_tensors(tmp_path / "saved")) == raw_bytes(expected)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config | tiny.corrected

    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()), report
    tokens = random_tokens(tiny, "cpu")
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)

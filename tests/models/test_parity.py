"""Every tiny checkpoint of text alone against transformers: logits, loss, every gradient, padding, and the way back."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ligerzoo import AutoModel
from ligerzoo.layers import Attention
from ligerzoo.models import CausalLM
from tests.models.comparing import (
    assert_as_exact,
    assert_close,
    gradients,
    load_both,
    raw_bytes,
    stored_tensors,
    under_their_names,
)
from tests.models.tiny import Tiny
from tests.models.zoo import TEXT_CHECKPOINTS

logging.disable_progress_bar()
logging.set_verbosity_error()


@pytest.fixture(scope="module", params=TEXT_CHECKPOINTS, ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


@pytest.fixture(scope="module")
def models(directory: Path, device: str) -> tuple[CausalLM, PreTrainedModel]:
    """Ours and theirs in fp32, whose gradients a test clears before it makes its own."""
    return load_both(directory, torch.float32, device, AutoModelForCausalLM)


def random_tokens(tiny: Tiny, device: str) -> Tensor:
    return torch.randint(tiny.config["vocab_size"], (2, tiny.tokens), device=device)


def assert_same_gradients(ours: CausalLM, theirs: PreTrainedModel) -> None:
    wanted = gradients(theirs)
    got = under_their_names(ours, gradients(ours), wanted)
    assert got.keys() == wanted.keys() == dict(theirs.named_parameters()).keys()
    for name, gradient in wanted.items():
        assert_close(got[name], gradient, f"gradient of {name}")


def test_logits_loss_and_gradients(tiny: Tiny, models: tuple[CausalLM, PreTrainedModel], device: str) -> None:
    ours, theirs = models
    tokens = random_tokens(tiny, device)
    labels = tokens.masked_fill(torch.rand(tokens.shape, device=device) < 0.3, -100)
    expected, loss = theirs(tokens, labels=labels), ours(tokens, labels=labels).loss
    assert_close(ours(tokens).logits, expected.logits, "logits")
    assert_close(loss, expected.loss, "loss")

    for model in models:
        model.zero_grad()
    loss.backward()
    expected.loss.backward()
    assert_same_gradients(ours, theirs)


def test_bf16_logits(tiny: Tiny, directory: Path, device: str) -> None:
    ours, theirs = load_both(directory, torch.bfloat16, device, AutoModelForCausalLM)
    tokens = random_tokens(tiny, device)
    got, expected = ours(tokens).logits, theirs(tokens).logits
    assert got.dtype == expected.dtype == torch.bfloat16
    if device == "cpu":
        ulp = 2.0 ** (math.floor(math.log2(expected.abs().max().item())) - 7)
        assert (got.float() - expected.float()).abs().max().item() <= 2 * ulp
    truth = theirs.float()(tokens).logits
    assert_as_exact(got, expected, truth)


def sees_nothing_behind(model: CausalLM, padding: int) -> bool:
    """Whether the last of so many tokens of padding are further from the text than the window of a layer reaches."""
    windows = (module.window for module in model.modules() if isinstance(module, Attention))
    return any(window is not None and window <= padding for window in windows)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(tiny: Tiny, models: tuple[CausalLM, PreTrainedModel], device: str, side: str) -> None:
    """At every position, and with labels that count padding: on a GPU, wherever it sees something."""
    ours, theirs = models
    tokens = random_tokens(tiny, device)
    mask = torch.ones_like(tokens)
    mask[1, slice(None, 7) if side == "left" else slice(-7, None)] = 0
    read, labels = torch.ones_like(mask), tokens
    if device != "cpu" and (side == "left" or sees_nothing_behind(ours, 7)):  # there such padding sees itself
        read, labels = mask, tokens.masked_fill((mask == 0) | (mask.roll(1, dims=1) == 0), -100)
    with torch.no_grad():
        got, expected = (model(tokens, attention_mask=mask).logits for model in models)
    assert got.isfinite().all()
    assert_close(got[read == 1], expected[read == 1], "logits")

    for model in models:
        model.zero_grad()
        model(tokens, attention_mask=mask, labels=labels).loss.backward()
    assert_same_gradients(ours, theirs)


@torch.no_grad()
def test_greedy_generation(tiny: Tiny, models: tuple[CausalLM, PreTrainedModel], device: str) -> None:
    """Token for token, past every window, also beside padding on the left; and from caches of any kind, in chunks, the
    logits are those of computing all anew."""
    ours, theirs = models
    tokens = random_tokens(tiny, device)
    mask = torch.ones_like(tokens)
    # Or else padding changes what a text gives, and a cache keeps old angles, or tokens that have not seen all.
    is_simple = not (tiny.depends_on_places or tiny.config.get("use_bidirectional_attention"))
    if is_simple:
        mask[1, :7] = 0
    got = ours.generate(tokens, mask, max_new_tokens=10, eos_token_id=[], use_cache=is_simple)
    # Without a cache, for theirs follows entries of config.json that the model itself does not.
    options = {"attention_mask": mask, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": False}
    assert torch.equal(got, theirs.generate(tokens, max_new_tokens=10, **options))

    if not is_simple:
        return
    whole = ours(got[:1]).logits
    for cache in (ours.new_cache(), ours.new_cache(capacity=80)):
        chunks = [9, 1, 1, 7, 1, got.shape[1] - 19]
        pieces = [ours(piece, past_key_values=cache).logits for piece in got[:1].split(chunks, 1)]
        assert_close(torch.cat(pieces, 1), whole, "logits from a cache")


def test_packed(tiny: Tiny, models: tuple[CausalLM, PreTrainedModel], device: str) -> None:
    """[A | B | padding] gives the logits, the loss and the gradients of A and B alone."""
    model, _ = models
    a, b, padding = random_tokens(tiny, device)[:1].split([17, 16, tiny.tokens - 33], 1)
    tokens, bounds = torch.cat([a, b, padding], 1), torch.tensor([0, 17, 33], device=device)
    if tiny.depends_on_places:
        return  # a long neighbour changes the rotations
    logits = model(tokens, cu_seqlens=bounds).logits
    for part, text in zip(logits.split([17, 16, tiny.tokens - 33], 1), (a, b), strict=False):
        assert_close(part, model(text).logits, "logits")

    labels = torch.cat([a, b, torch.full_like(padding, -100)], 1)
    packed = model(tokens, labels=labels, cu_seqlens=bounds).loss
    if getattr(model.config, "output_router_logits", False):
        return  # balance is that of the whole batch
    model.zero_grad()
    packed.backward()
    got = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    alone = sum(model(text, labels=text, num_items_in_batch=16 + 15).loss for text in (a, b))
    assert_close(packed, alone, "loss")
    alone.backward()
    for name, gradient in gradients(model).items():
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

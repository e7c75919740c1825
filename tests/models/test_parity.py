"""Every tiny text checkpoint against transformers: logits, loss, gradients, padding, generation, packing, saving."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ligerzoo import AutoModel
from ligerzoo.convert.architecture import is_beyond_last_layer
from ligerzoo.layers import Attention, Mamba2Mixer
from ligerzoo.layers.capture import has_static_decoding
from ligerzoo.layers.delta_net import DeltaNet
from ligerzoo.models import CausalLM
from tests.models.comparing import (
    assert_close,
    assert_errors_as_small,
    assert_same_bf16,
    assert_same_gradients,
    gradients,
    load_both,
    raw_bytes,
    rounding_as_eager,
    stored_tensors,
)
from tests.models.tiny import Tiny, stays_fp32
from tests.models.zoo import TEXT_CHECKPOINTS

logging.disable_progress_bar()
logging.set_verbosity_error()


KEPT_IN_FP32 = (
    "inv_freq",
    "e_score_correction_bias",
    "linear_attn.A_log",
    "linear_attn.dt_bias",
    "linear_attn.norm.weight",
    "linear_attn.o_norm.weight",
    *(f"{mixer}.{name}" for mixer in ("mamba", "mixer") for name in ("A_log", "D", "dt_bias", "norm.weight")),
    "self_attn.A_log",
    "self_attn.dt_bias",
    "self_attn.o_norm.weight",
)
"""Ends of the names of tensors that loading and saving leave in fp32."""

BIASES_OF_STATES = "mamba_proj_bias", "projectors_bias", "use_bias"
"""Entries with which Mamba-2 in transformers sees the biases of padding, or adds them to it."""

ROUNDED_OTHERWISE = (
    "flint",
    "gemma4_text",
    "granite_swa",
    "granitemoe_swa",
    "kolibri1",
    "lfm2_moe",
    "llama4_text",
    "muse_glimmer_text",
)
"""Types whose sinks, experts, routers or factors of queries transformers rounds elsewhere in half precision."""


@pytest.fixture(scope="module", params=TEXT_CHECKPOINTS, ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


@pytest.fixture(scope="module")
def models(directory: Path, device: str) -> tuple[CausalLM, PreTrainedModel]:
    """Our model and the transformers model in fp32. A test clears their gradients before it computes its own."""
    return load_both(directory, torch.float32, device, AutoModelForCausalLM)


def random_tokens(tiny: Tiny, device: str, rows: int = 2) -> Tensor:
    return torch.randint(tiny.config["vocab_size"], (rows, tiny.tokens), device=device)


def assert_same_training_gradients(ours: CausalLM, theirs: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    """Compares the gradients of all parameters with `assert_same_gradients`."""
    expected = gradients(theirs)
    # Biases that only select experts have no gradients; in ERNIE they are parameters.
    trainable = {name for name, _ in theirs.named_parameters() if not name.endswith("e_score_correction_bias")}
    assert expected.keys() == trainable
    # The gradient of one number may be a small difference of large sums.
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    numbers = {name: largest for name, gradient in expected.items() if gradient.numel() == 1}
    assert_same_gradients(ours, expected, inputs, numbers)


@pytest.mark.every_checkpoint
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
    assert_same_training_gradients(ours, theirs, {"input_ids": tokens, "labels": labels})


@pytest.mark.every_layer
def test_bf16_logits(tiny: Tiny, directory: Path, device: str) -> None:
    ours, theirs = load_both(directory, torch.bfloat16, device, AutoModelForCausalLM)
    is_recurrent = any(isinstance(module, DeltaNet | Mamba2Mixer) for module in ours.modules())
    exact = copy.deepcopy(theirs).float()

    @torch.no_grad()
    def draw(rows: int = 16) -> tuple[Tensor, Tensor, Tensor]:
        tokens = random_tokens(tiny, device, rows)
        got, expected = (model(tokens).logits for model in (ours, theirs))
        assert got.dtype == torch.bfloat16
        return got, expected.bfloat16(), exact(tokens).logits

    # transformers rounds convolutions and gates of recurrent layers more often, and elsewhere in some types.
    rounds_otherwise = is_recurrent or tiny.config["model_type"] in ROUNDED_OTHERWISE
    if device == "cpu" and not rounds_otherwise:
        with rounding_as_eager():
            assert_same_bf16(*draw(rows=2)[:2])
    assert_errors_as_small(draw, device)


def counts_padding(tiny: Tiny) -> bool:
    """Whether queries of transformers grow with positions in the row, padding included."""
    return tiny.config["model_type"] == "llama4_text"


def window_is_within(model: CausalLM, padding: int) -> bool:
    """Whether the sliding window of a layer is at most `padding` tokens, so that padding may attend to no text."""
    windows = (module.window for module in model.modules() if isinstance(module, Attention))
    return any(window is not None and window <= padding for window in windows)


@pytest.mark.every_layer
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(tiny: Tiny, models: tuple[CausalLM, PreTrainedModel], device: str, side: str) -> None:
    """On a CPU, compares padding positions too. On a GPU, excludes those that attend to no text."""
    ours, theirs = models
    tokens = random_tokens(tiny, device)
    mask = torch.ones_like(tokens)
    mask[1, slice(None, 7) if side == "left" else slice(-7, None)] = 0
    # transformers' layers see the biases of padding, or count it.
    if any(map(tiny.config.get, ("conv_bias", *BIASES_OF_STATES))) or counts_padding(tiny):
        with torch.no_grad():
            rows = ours(tokens, attention_mask=mask).logits
            for row, text, is_token in zip(rows, tokens, mask == 1, strict=True):
                assert_close(row[is_token], theirs(text[is_token][None]).logits[0], "logits")
        return
    compared, labels = torch.ones_like(mask), tokens
    # Such padding attends to itself, or is not 0 after transformers' linear attention, whose gate is a sigmoid.
    is_other = device != "cpu" and (side == "left" or window_is_within(ours, 7))
    if is_other or tiny.config["model_type"] == "kimi_linear":
        compared, labels = mask, tokens.masked_fill((mask == 0) | (mask.roll(1, dims=1) == 0), -100)
    with torch.no_grad():
        got = ours(tokens, attention_mask=mask).logits
        expected = theirs(tokens, attention_mask=mask, **tiny.positions(mask)).logits
    assert got.isfinite().all()
    assert_close(got[compared == 1], expected[compared == 1], "logits")

    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    for model, positions in ((ours, {}), (theirs, tiny.positions(mask))):
        model.zero_grad()
        model(**inputs, **positions).loss.backward()
    assert_same_training_gradients(ours, theirs, inputs)


@pytest.mark.every_layer
@torch.no_grad()
def test_greedy_generation(tiny: Tiny, models: tuple[CausalLM, PreTrainedModel], device: str) -> None:
    """Compares tokens generated beyond every sliding window, after left padding, and logits computed with a cache.

    A growing and a fixed-size cache, filled in chunks, must give the logits of one forward without a cache. Rows with
    different positions must give the tokens of the padded batch.
    """
    ours, theirs = models
    tokens = random_tokens(tiny, device)
    mask = torch.ones_like(tokens)
    # Otherwise padding changes the logits of a text, and cached keys are outdated once the text is longer.
    is_simple = not (tiny.rotation_depends_on_length or tiny.config.get("use_bidirectional_attention"))
    if is_simple and not (any(map(tiny.config.get, BIASES_OF_STATES)) or counts_padding(tiny)):
        mask[1, :7] = 0
    got = ours.generate(tokens, mask, max_new_tokens=10, eos_token_id=[], use_cache=is_simple)
    # Without a cache: theirs is chosen by entries of config.json that the model itself ignores.
    options = {"attention_mask": mask, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": False}
    assert torch.equal(got, theirs.generate(tokens, max_new_tokens=10, **options))

    if not is_simple:
        return
    whole = ours(got[:1]).logits
    for cache in (ours.new_cache(), ours.new_cache(capacity=80)):
        chunks = [9, 1, 1, 7, 1, got.shape[1] - 19]
        pieces = [ours(piece, past_key_values=cache).logits for piece in got[:1].split(chunks, 1)]
        assert_close(torch.cat(pieces, 1), whole, "logits from a cache")
    if has_static_decoding(ours):
        prompts = [row[is_token == 1] for row, is_token in zip(tokens, mask, strict=True)]
        many = ours.generate_many(prompts, batch_size=2, max_new_tokens=10, eos_token_id=[])
        results = {one.index: one for one in many}
        assert [results[i].tokens for i in range(len(tokens))] == got[:, tokens.shape[1] :].tolist()


@pytest.mark.every_layer
def test_packed(tiny: Tiny, models: tuple[CausalLM, PreTrainedModel], device: str) -> None:
    """Segments A and B of [A | B | padding] have the logits, loss and gradients of separate sequences."""
    model, _ = models
    a, b, padding = random_tokens(tiny, device)[:1].split([17, 16, tiny.tokens - 33], 1)
    tokens, bounds = torch.cat([a, b, padding], 1), torch.tensor([0, 17, 33], device=device)
    if tiny.rotation_depends_on_length:
        return  # the length of the row changes the rotation of both segments
    logits = model(tokens, cu_seqlens=bounds).logits
    for part, text in zip(logits.split([17, 16, tiny.tokens - 33], 1), (a, b), strict=False):
        assert_close(part, model(text).logits, "logits")

    labels = torch.cat([a, b, torch.full_like(padding, -100)], 1)
    packed = model(tokens, labels=labels, cu_seqlens=bounds).loss
    if getattr(model.config, "output_router_logits", False):
        return  # the load-balancing loss is that of the whole batch
    model.zero_grad()
    packed.backward()
    got = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    alone = sum(model(text, labels=text, num_items_in_batch=16 + 15).loss for text in (a, b))
    assert_close(packed, alone, "loss")
    alone.backward()
    largest = max(gradient.abs().max().item() for gradient in gradients(model).values())
    for name, gradient in gradients(model).items():
        # One number, for all tokens and features, is a sum of terms that cancel.
        assert_close(got[name], gradient, f"gradient of {name}", largest if gradient.numel() == 1 else None)


def test_saving_writes_what_was_loaded(tiny: Tiny, directory: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == theirs.dtype
    original, config = stored_tensors(directory), json.loads((directory / "config.json").read_text())
    size = sum(tensor.nbytes for tensor in original.values())
    model.save_pretrained(tmp_path / "saved", max_shard_size=size // tiny.shards + 1)

    expected = {
        name: tensor if name.endswith(KEPT_IN_FP32) or stays_fp32(name, config) else tensor.to(model.dtype)
        for name, tensor in original.items()
        if ".layers.12." not in name
    }
    assert raw_bytes(stored_tensors(tmp_path / "saved")) == raw_bytes(expected)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config | tiny.corrected

    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    layers = getattr(model.config, "num_hidden_layers", None)
    report["unexpected_keys"] = {  # transformers leaves out MTP layers of some sizes without a report
        name for name in report["unexpected_keys"] if layers is None or not is_beyond_last_layer(name, layers)
    }
    assert not any(report.values()), report
    tokens = random_tokens(tiny, "cpu")
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)

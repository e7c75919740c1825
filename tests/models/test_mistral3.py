"""Mistral Small 3.1 and Ministral 3 with images against transformers: text, images of several sizes, padded batches."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from ligerzoo import AutoModel
from ligerzoo.convert import architecture_of
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError
from ligerzoo.info import describe
from ligerzoo.layers.input_properties import InputProperties, assuming_inputs
from ligerzoo.models import Mistral3, Mistral3Config
from tests.covering import every_backend
from tests.models.comparing import (
    all_gradients,
    assert_close,
    assert_errors_as_small,
    assert_same_vision_training,
    gradients,
    load_both,
    raw_bytes,
    stored_tensors,
)
from tests.models.tiny import Tiny
from tests.models.tiny_mistral3 import (
    CHECKPOINTS,
    IMAGE,
    MINISTRAL3,
    MISTRAL3,
    PROMPTS,
    TEXT,
    VISION,
    Prompt,
    Row,
    prompt,
)

logging.disable_progress_bar()
logging.set_verbosity_error()


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


@pytest.fixture(scope="module")
def models(directory: Path, device: str) -> tuple[Mistral3, PreTrainedModel]:
    return load_both(directory, torch.float32, device)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, device: str) -> Any:
    """A model with the decoder of Ministral 3 and squares of 3 x 3 patches."""
    path = tmp_path_factory.mktemp("checkpoint")
    CHECKPOINTS[2].write(path)
    return AutoModel.from_pretrained(path, dtype=torch.float32, device=device)


def prompt_for(model: Mistral3, rows: list[Row], side: str = "left") -> Prompt:
    p = prompt(rows, model.config, side)
    images = {name: tensor.to(model.device) for name, tensor in p.images.items()}
    return Prompt(p.ids.to(model.device), p.mask.to(model.device), images)


def theirs_on(theirs: PreTrainedModel, p: Prompt, **options: Any) -> Any:
    """transformers' queries of Ministral 3 would count padding."""
    positions = (p.mask.cumsum(1) - 1).clamp(min=0)
    return theirs(input_ids=p.ids, attention_mask=p.mask, position_ids=positions, **p.images, **options)


def labels_for(p: Prompt) -> Tensor:
    """Labels of text tokens, except the first, which padding would predict."""
    has_label = (p.mask == 1) & (p.mask.roll(1, 1) == 1) & (p.ids < 88)
    return p.ids.masked_fill(~has_label, -100)


@pytest.mark.every_layer
@pytest.mark.parametrize("name", ["text", "an image", "images of one size"])
def test_logits_loss_and_gradients(models: tuple[Mistral3, PreTrainedModel], name: str) -> None:
    assert_same_training(*models, PROMPTS[name])


@pytest.mark.every_checkpoint
def test_logits_loss_and_gradients_of_every_checkpoint(models: tuple[Mistral3, PreTrainedModel]) -> None:
    assert_same_training(*models, PROMPTS["a padded batch"])


def assert_same_training(ours: Mistral3, theirs: PreTrainedModel, rows: list[Row]) -> None:
    p = prompt_for(ours, rows)
    labels = labels_for(p)
    expected = theirs_on(theirs, p, labels=labels)
    assert_same_vision_training(ours, theirs, (p.ids, p.mask), p.images, labels, expected)


@pytest.mark.every_layer
@torch.no_grad()
def test_bf16_logits(directory: Path, device: str) -> None:
    ours, theirs = load_both(directory, torch.bfloat16, device)
    exact = copy.deepcopy(theirs).float()

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        p = prompt_for(ours, PROMPTS["a padded batch"])
        found = (ours(p.ids, p.mask, **p.images).logits, theirs_on(theirs, p).logits, theirs_on(exact, p).logits)
        return tuple(logits[p.mask == 1] for logits in found)  # type: ignore[return-value]

    assert_errors_as_small(draw, device, draws=4)


@torch.no_grad()
def test_greedy_generation(models: tuple[Mistral3, PreTrainedModel]) -> None:
    ours, theirs = models
    p = prompt_for(ours, PROMPTS["a padded batch"])
    got = ours.generate(p.ids, p.mask, max_new_tokens=8, eos_token_id=[], **p.images)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    assert torch.equal(got, theirs.generate(p.ids, attention_mask=p.mask, **p.images, **options))


def test_saving_reproduces_the_files(tiny: Tiny, directory: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(directory)
    assert type(model) is Mistral3
    theirs, report = AutoModelForImageTextToText.from_pretrained(directory, output_loading_info=True)
    assert model.dtype == theirs.dtype
    assert not any(report.values()), report
    original, config = stored_tensors(directory), json.loads((directory / "config.json").read_text())
    size = sum(tensor.nbytes for tensor in original.values())
    model.save_pretrained(tmp_path / "saved", max_shard_size=size // tiny.shards + 1)
    assert raw_bytes(stored_tensors(tmp_path / "saved")) == raw_bytes(original)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config | tiny.corrected
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert raw_bytes(again.state_dict()) == raw_bytes(theirs.state_dict())


# Caches, packed rows and padding


@torch.no_grad()
def test_conversation_with_a_cache(model: Mistral3) -> None:
    """Chunks, with images in a later one, a row without images, and padding: as in one forward."""
    rows: list[list[Row]] = [[[4, (6, 7), 2], [9]], [[3], [3]], [[2, (4, 3), 4], [1, (3, 6), 4]]]
    chunks = [prompt_for(model, chunk) for chunk in rows]
    ids, mask = (torch.cat([getattr(chunk, name) for chunk in chunks], 1) for name in ("ids", "mask"))
    sizes = torch.cat([chunk.images["image_sizes"] for chunk in chunks if chunk.images])
    pixels = torch.zeros(len(sizes), 3, *sizes.amax(0).tolist(), device=model.device)
    every = [image for chunk in chunks if chunk.images for image in chunk.images["pixel_values"]]
    for padded, image in zip(pixels, every, strict=True):
        padded[:, : image.shape[1], : image.shape[2]] = image
    whole = model(ids, mask, pixel_values=pixels, image_sizes=sizes).logits
    for cache in (model.new_cache(), model.new_cache(capacity=64)):
        end, pieces = 0, []
        for chunk in chunks:
            end += chunk.ids.shape[1]
            pieces.append(model(chunk.ids, mask[:, :end], past_key_values=cache, **chunk.images).logits)
        assert_close(torch.cat(pieces, 1)[mask == 1], whole[mask == 1], "logits from a cache")


@torch.no_grad()
def test_padding_changes_nothing(model: Mistral3) -> None:
    """On either side, in a cache and without one, though the queries of Ministral 3 grow with positions."""
    options: dict[str, Any] = {"max_new_tokens": 6, "bad_words_ids": [[IMAGE]]}
    for side in ("left", "right"):
        p = prompt_for(model, PROMPTS["a padded batch"], side)
        logits, text = model(p.ids, p.mask, **p.images).logits[1, p.mask[1] == 1], p.ids[1:2, p.mask[1] == 1]
        assert_close(logits, model(text).logits[0], "logits")
    p = prompt_for(model, PROMPTS["a padded batch"])
    got = [model.generate(p.ids, p.mask, use_cache=use, **options, **p.images) for use in (True, False)]
    assert torch.equal(*got)
    text = p.ids[1:2, p.mask[1] == 1]
    assert torch.equal(model.generate(text, **options)[0], got[0][1, p.mask[1].argmax() :])


@pytest.mark.parametrize("by_positions", [False, True])
def test_packed(model: Mistral3, by_positions: bool) -> None:
    """[A | B] gives the same logits, loss and gradients as A and B alone, each with an image."""
    both = prompt_for(model, [[3, (6, 7), 8, (3, 3), 4, (5, 6), 7]])
    lengths = [3 + 6 + 8, both.ids.shape[1] - 17]
    first, rest = ({n: x[part] for n, x in both.images.items()} for part in (slice(1), slice(1, None)))
    a, b = {"input_ids": both.ids[:, :17], **first}, {"input_ids": both.ids[:, 17:], **rest}
    packing: dict[str, Tensor] = {"cu_seqlens": torch.tensor([0, 17, sum(lengths)])}
    if by_positions:
        packing = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    packing = {name: tensor.to(model.device) for name, tensor in packing.items()}
    with torch.no_grad():
        got = model(both.ids, **packing, **both.images).logits.split(lengths, 1)
        for part, alone in zip(got, (a, b), strict=True):
            assert_close(part, model(**alone).logits, "logits")

    packed = all_gradients(model, input_ids=both.ids, labels=both.ids, **packing, **both.images)
    items = sum(lengths) - 2
    separate = [all_gradients(model, **x, labels=x["input_ids"], num_items_in_batch=items) for x in (a, b)]
    for name, gradient in packed.items():
        assert_close(gradient, separate[0][name] + separate[1][name], f"gradient of {name}")


@torch.no_grad()
def test_images_have_segments_where_texts_have_none(model: Mistral3) -> None:
    """The trainer knows that packed rows have no padding. Images of several sizes share a row all the same."""
    p = prompt_for(model, [[4, (6, 7), 5, (3, 4), 9]])
    expected = model(p.ids, **p.images).logits
    with assuming_inputs(InputProperties(has_padding=False, has_segments=False)):
        assert_close(model(p.ids, **p.images).logits, expected, "logits")


@torch.no_grad()
def test_pixels_beyond_an_image_are_not_read(model: Mistral3) -> None:
    p = prompt_for(model, [[4, (6, 7), 5, (3, 4), 9]])
    noise = torch.randn_like(p.images["pixel_values"])
    for own, image, (height, width) in zip(
        noise, p.images["pixel_values"], p.images["image_sizes"].tolist(), strict=True
    ):
        own[:, :height, :width] = image[:, :height, :width]
    wider = nn.functional.pad(noise, (0, 3, 0, 9), value=float("nan"))
    expected = model(p.ids, **p.images).logits
    assert torch.equal(model(p.ids, pixel_values=wider, image_sizes=p.images["image_sizes"]).logits, expected)


# Training


def test_gradient_checkpointing(model: Mistral3) -> None:
    p = prompt_for(model, PROMPTS["a padded batch"])
    inputs = {"input_ids": p.ids, "attention_mask": p.mask, "labels": labels_for(p), **p.images}
    blocks = [*model.vision_tower.transformer.layers, *model.model.layers]
    calls: list[nn.Module] = []
    hooks = [block.register_forward_pre_hook(lambda block, _: calls.append(block)) for block in blocks]
    found, counts = [], []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        calls.clear()
        found.append(all_gradients(model, **inputs))
        counts.append([calls.count(block) for block in blocks])
    model.gradient_checkpointing_disable()
    for hook in hooks:
        hook.remove()
    once = [1, 1, 0, 1, 1]  # the last block of the tower does not run
    assert counts == [once, [2 * count for count in once]]
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


@pytest.mark.thorough
@every_backend
def test_compiled(model: Mistral3, backend: str) -> None:
    """Full graph, for images of several sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for name in ("images of one size", "a padded batch"):
        p = prompt_for(model, PROMPTS[name])
        inputs = {"input_ids": p.ids, "attention_mask": p.mask, "labels": labels_for(p), **p.images}
        expected = all_gradients(model, **inputs)
        compiled(**inputs).loss.backward()
        got = gradients(model)
        assert got.keys() == expected.keys()
        for parameter, gradient in expected.items():
            torch.testing.assert_close(got[parameter], gradient, rtol=1e-4, atol=2e-5 * gradient.abs().max().item())
        model.zero_grad()
        if backend == "eager":  # a compiled graph cannot raise an error
            for wrong in (p.images["image_sizes"] + 16, p.images["image_sizes"] - 16, -p.images["image_sizes"]):
                with torch.no_grad():
                    assert compiled(p.ids, p.mask, **{**p.images, "image_sizes": wrong}).logits[0, -1].isnan().all()


@pytest.mark.parametrize("text", [TEXT, MINISTRAL3], ids=["mistral", "ministral3"])
def test_new_model(text: dict[str, Any], tmp_path: Path) -> None:
    """Initializes all weights, tower included, and saves in the format of the hub."""
    raw = {**MISTRAL3, "text_config": text, "multimodal_projector_bias": True, "tie_word_embeddings": False}
    config = dataclasses.replace(architecture_of("mistral3").config_from_hf(raw), initializer_range=0.3)
    model = Mistral3(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == float(not name.endswith("bias"))).all(), name
        else:
            assert 0.2 < parameter.std().item() < 0.4, name
    model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config == config
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["model_type"] == text["model_type"]
    theirs, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    names = stored_tensors(tmp_path).keys()
    assert {"language_model.lm_head.weight", "vision_tower.transformer.layers.1.attention.q_proj.weight"} <= names
    p = prompt_for(model, PROMPTS["an image"])
    assert_close(model(p.ids, **p.images).logits, theirs_on(theirs, p).logits, "logits")


# config.json


def test_missing_parts_have_the_defaults_of_transformers() -> None:
    """Missing entries of an object have other defaults than a missing object."""
    convert = architecture_of("mistral3").config_from_hf
    assert convert({}) == Mistral3Config()
    assert convert({"text_config": {}}).sliding_window == 4096
    assert convert({"text_config": {"model_type": "ministral3"}}).rope_scaling["factor"] == 16.0
    assert convert({"vision_config": {}}).vision_config.patch_size == 16
    assert convert({"vision_feature_layer": [-2]}).vision_feature_layer == -2
    whole = convert({"vision_config": None, "text_config": None})
    assert (whole.vision_config.patch_size, whole.rope_theta, whole.sliding_window) == (14, 1e9, None)


@pytest.mark.parametrize(
    "part, changes, named",
    [
        ("vision_config", {"model_type": "siglip_vision_model"}, "model_type: .* 'pixtral'"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ("vision_config", {"head_dim": 8}, "head_dim: not supported; got 8; expected no entry or 12"),
        ("vision_config", {"hidden_act": "gelu_pytorch_tanh"}, "vision_config, hidden_act: .* 'gelu' or 'silu'"),
        ("vision_config", {"hidden_size": 28}, "vision_config, hidden_size: .* a multiple of 4 times num_attention"),
        ("vision_config", {"patch_size": [4, 4]}, "patch_size"),
        ("vision_config", {"rope_theta": 0.5}, "rope_theta"),
        ("text_config", {"model_type": "llama"}, "model_type: .* 'mistral' or 'ministral3'"),
        ("text_config", {"layer_types": ["full_attention"] * 2}, "layer_types: not supported"),
        ("text_config", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta: not supported"),
        ("text_config", {"hidden_act": "gelu"}, "hidden_act"),
        ("text_config", {"vocab_size": 80}, "image_token_id: .* a token id, 0 to 79"),
        ("", {"vision_config": "large"}, "vision_config: not an object"),
        ("", {"text_config": 5}, "text_config: not an object"),
        ("", {"vision_feature_layer": [-1, -2]}, "vision_feature_layer: .* an integer"),
        ("", {"vision_feature_layer": 3}, "vision_feature_layer: .* an integer, -3 to 2"),
        ("", {"projector_hidden_act": "relu"}, "projector_hidden_act: .* 'gelu' or 'silu'"),
        ("", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("", {"spatial_merge_size": 2**31 - 1}, "spatial_merge_size: .* fewer than 2\\^63 features"),
    ],
)
def test_invalid_configs(part: str, changes: dict[str, Any], named: str) -> None:
    entries = {"text_config": TEXT, "vision_config": VISION}
    raw = {**MISTRAL3, part: {**entries[part], **changes}} if part else {**MISTRAL3, **changes}
    with pytest.raises(ConfigError, match=named):
        architecture_of("mistral3").config_from_hf(raw)


# Refusals


def test_inconsistent_inputs(model: Mistral3) -> None:
    p = prompt_for(model, [[5, (6, 9), 20]])
    pixels, sizes = p.images["pixel_values"], p.images["image_sizes"]

    def refused(match: str, ids: Tensor = p.ids, **changes: Any) -> None:
        with pytest.raises(ValueError, match=match):
            model(ids, **{**p.images, **changes})

    one_less, apart = p.ids.clone(), p.ids.clone()
    one_less[0, 5] = 7
    apart[0, [0, 5]] = apart[0, [5, 0]]
    refused("got 6 embeddings of images or videos; expected 5, the number of image", one_less)
    refused(r"not adjacent; expected runs of \[3, 3\] tokens", apart)
    twice = sizes.repeat(2, 1)
    refused(r"pixel_values and image_sizes do not match; got \(1, 3, 24, 36\) and \(2, 2\)", image_sizes=twice)
    refused(r"do not match; got .*; expected \(n, 3, height, width\) and \(n, 2\)", pixel_values=pixels[:, :1])
    refused("do not match", pixel_values=pixels[0])
    for wrong in (sizes + 1, sizes - 20, -sizes, sizes + 2**40):
        refused(r"image_sizes: got .*; expected .* at least 12 and at most \(24, 36\)", image_sizes=wrong)
    refused("images need pixels, sizes and token ids; got pixel_values and input_ids", image_sizes=None)
    refused("got image_sizes and input_ids", p.ids.clamp(max=9), pixel_values=None)
    with pytest.raises(ValueError, match=r"got pixel_values and image_sizes and inputs_embeds; expected .* input_ids"):
        model(inputs_embeds=model.model.embed_tokens(p.ids), **p.images)


@torch.no_grad()
def test_placeholders_without_their_input(model: Mistral3) -> None:
    """Refused in a prompt, but read like any token if generation sampled it."""
    p = prompt_for(model, [[5, (6, 9), 20], [9]])
    with pytest.raises(LigerzooError, match=rf"input_ids: placeholder tokens of .* got {IMAGE}; expected pixel_values"):
        model.generate(p.ids, p.mask, max_new_tokens=1)
    cache = model.new_cache()
    model(p.ids, p.mask, past_key_values=cache, **p.images)
    model(p.ids.new_full((2, 1), IMAGE), past_key_values=cache)


def test_more_blocks_than_tensors(tmp_path: Path) -> None:
    CHECKPOINTS[0].write(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["vision_config"]["num_hidden_layers"] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="fewer tensors than layers"):
        AutoModel.from_pretrained(tmp_path)


def test_info(tmp_path: Path) -> None:
    CHECKPOINTS[0].write(tmp_path)
    page = describe(tmp_path)
    assert "Mistral3 (Mistral3ForConditionalGeneration)" in page
    assert "vision tower" in page
    assert "projector" in page

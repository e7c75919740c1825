"""Gemma 4 with images and videos against transformers: every tiny checkpoint on text, images and padded batches."""

import copy
import dataclasses
import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from ligerzoo import AutoModel
from ligerzoo.convert import architecture_of
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError
from ligerzoo.info import describe
from ligerzoo.layers.input_properties import InputProperties, assuming_inputs
from ligerzoo.models import CausalLM, Gemma4
from tests.covering import every_backend
from tests.models import tiny_gemma4, tiny_gemma4_unified
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
from tests.models.prompts import IMAGE, VIDEO, Prompt, Row, image, prompt, video
from tests.models.tiny import Tiny
from tests.models.tiny_gemma4 import AUDIO, GEMMA4

logging.disable_progress_bar()
logging.set_verbosity_error()

FAMILIES = (tiny_gemma4, tiny_gemma4_unified)
PROMPTS: dict[str, list[Row]] = {
    "text": [[40]],
    "images": [[4, image(2, 3), image(1, 4), 5, image(1, 1), 19]],
    "a padded batch": [
        [3, image(1, 3), 25],
        [22],
        [image(3, 2), 5, video(2, 2, 2), 1, image(2, 1), 3, video(3, 1, 1), 17],
    ],
}


@pytest.fixture(scope="module", params=[row for family in FAMILIES for row in family.CHECKPOINTS], ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


@pytest.fixture(scope="module")
def models(directory: Path, device: str) -> tuple[CausalLM, PreTrainedModel]:
    return load_both(directory, torch.float32, device)


ON_THE_HUB = [*tiny_gemma4.CHECKPOINTS[:2], tiny_gemma4_unified.CHECKPOINTS[1]]


@pytest.fixture(scope="module", params=ON_THE_HUB, ids=str)
def hub_row(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


@pytest.fixture(scope="module")
def model(hub_row: Tiny, tmp_path_factory: pytest.TempPathFactory, device: str) -> Any:
    path = tmp_path_factory.mktemp("checkpoint")
    hub_row.write(path)
    return AutoModel.from_pretrained(path, dtype=torch.float32, device=device)


def prompt_for(model: CausalLM, rows: list[Row], side: str = "left") -> Prompt:
    p = prompt(rows, vars(model.config.vision_config), side)
    vision = {name: tensor.to(model.device) for name, tensor in p.vision.items()}
    return Prompt(p.ids.to(model.device), p.mask.to(model.device), vision)


def vision_of(theirs: PreTrainedModel, p: Prompt) -> dict[str, Tensor]:
    """Returns the images and videos for transformers; that before 5.23 expects as many frames of each video."""
    if not p.vision.keys() & {"num_frames_per_video"} or "num_frames_per_video" in signature(theirs.forward).parameters:
        return p.vision
    rest = {name: value for name, value in p.vision.items() if name != "num_frames_per_video"}
    return {name: value[None] if "video" in name else value for name, value in rest.items()}


def theirs_on(theirs: PreTrainedModel, p: Prompt, **options: Any) -> Any:
    """Images see themselves in sliding-window layers only, as in transformers' `generate` and in Gemma 4 31B.

    Without the masks of `generate`, transformers lets them see themselves in all layers of Gemma 4 12B.
    """
    mask: Any = p.mask
    if p.vision and theirs.config.model_type == "gemma4_unified":
        x = theirs.get_input_embeddings()(p.ids.clamp(max=IMAGE))
        mask = theirs.create_masks_for_generate(theirs.config, x, p.mask, None, None, mm_token_type_ids=p.types)
    return theirs(input_ids=p.ids, attention_mask=mask, mm_token_type_ids=p.types, **vision_of(theirs, p), **options)


def labels_for(p: Prompt) -> Tensor:
    """Labels of text tokens, except the first, which padding would predict."""
    has_label = (p.mask == 1) & (p.mask.roll(1, 1) == 1) & (p.types == 0)
    return p.ids.masked_fill(~has_label, -100)


@pytest.mark.every_layer
@pytest.mark.parametrize("name", ["text", "images"])
def test_logits_loss_and_gradients(models: tuple[CausalLM, PreTrainedModel], name: str) -> None:
    assert_same_training(*models, PROMPTS[name])


@pytest.mark.every_checkpoint
def test_logits_loss_and_gradients_of_every_checkpoint(models: tuple[CausalLM, PreTrainedModel]) -> None:
    assert_same_training(*models, PROMPTS["a padded batch"])


def assert_same_training(ours: CausalLM, theirs: PreTrainedModel, rows: list[Row]) -> None:
    p = prompt_for(ours, rows)
    labels = labels_for(p)
    expected = theirs_on(theirs, p, labels=labels)
    assert_same_vision_training(ours, theirs, (p.ids, p.mask), p.vision, labels, expected)


@torch.no_grad()
def test_bf16_logits(hub_row: Tiny, tmp_path: Path, device: str) -> None:
    hub_row.write(tmp_path)
    ours, theirs = load_both(tmp_path, torch.bfloat16, device)
    exact = copy.deepcopy(theirs).float()

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        p = prompt_for(ours, PROMPTS["a padded batch"])
        found = (ours(p.ids, p.mask, **p.vision).logits, theirs_on(theirs, p).logits, theirs_on(exact, p).logits)
        return tuple(logits[p.mask == 1] for logits in found)  # type: ignore[return-value]

    assert_errors_as_small(draw, device, draws=4)


@torch.no_grad()
def test_greedy_generation(models: tuple[CausalLM, PreTrainedModel]) -> None:
    ours, theirs = models
    p = prompt_for(ours, PROMPTS["a padded batch"])
    got = ours.generate(p.ids, p.mask, max_new_tokens=8, eos_token_id=[], **p.vision)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    vision = vision_of(theirs, p)
    expected = theirs.generate(p.ids, attention_mask=p.mask, mm_token_type_ids=p.types, **vision, **options)
    assert torch.equal(got, expected)


def test_saving_reproduces_the_files(tiny: Tiny, directory: Path, tmp_path: Path) -> None:
    """Audio included."""
    model = AutoModel.from_pretrained(directory)
    assert type(model) is architecture_of(tiny.config["model_type"]).model_class
    theirs, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert model.dtype == theirs.dtype
    original, config = stored_tensors(directory), json.loads((directory / "config.json").read_text())
    assert any("audio" in name for name in original) == (config.get("audio_config") is not None)
    size = sum(tensor.nbytes for tensor in original.values())
    model.save_pretrained(tmp_path / "saved", max_shard_size=size // tiny.shards + 1)
    assert raw_bytes(stored_tensors(tmp_path / "saved")) == raw_bytes(original)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config

    again, report_again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert report_again == report
    assert raw_bytes(again.state_dict()) == raw_bytes(theirs.state_dict())


# Caches and packed rows


@torch.no_grad()
def test_conversation_with_a_cache(model: CausalLM) -> None:
    """Chunks, with images in a later one, a row without images, and padding: as in one forward."""
    rows: list[list[Row]] = [
        [[4, image(2, 3), 3, video(3, 1, 1), 2], [9]],
        [[3], [3]],
        [[2, image(3, 1), 4], [1, image(2, 2), 4]],
    ]
    chunks = [prompt_for(model, chunk) for chunk in rows]
    names = {name for chunk in chunks for name in chunk.vision}
    ids, mask = (torch.cat([getattr(chunk, name) for chunk in chunks], 1) for name in ("ids", "mask"))
    length = max(chunk.vision["pixel_values"].shape[1] for chunk in chunks if chunk.vision)

    def joined(name: str) -> Tensor:
        parts = [chunk.vision[name] for chunk in chunks if name in chunk.vision]
        if name == "num_frames_per_video":
            return torch.cat(parts)
        value = -1 if "position" in name else 0
        return torch.cat([nn.functional.pad(x, (0, 0, 0, length - x.shape[1]), value=value) for x in parts])

    whole = model(ids, mask, **{name: joined(name) for name in names}).logits
    for cache in (model.new_cache(), model.new_cache(capacity=64)):
        end, pieces = 0, []
        for chunk in chunks:
            end += chunk.ids.shape[1]
            pieces.append(model(chunk.ids, mask[:, :end], past_key_values=cache, **chunk.vision).logits)
        assert_close(torch.cat(pieces, 1)[mask == 1], whole[mask == 1], "logits from a cache")


@torch.no_grad()
def test_generation_with_and_without_a_cache(model: CausalLM) -> None:
    p = prompt_for(model, PROMPTS["a padded batch"])
    options: dict[str, Any] = {"max_new_tokens": 6, "bad_words_ids": [[token] for token in model.placeholders]}
    got = [model.generate(p.ids, p.mask, use_cache=use, **options, **p.vision) for use in (True, False)]
    assert torch.equal(*got)
    right = prompt_for(model, [[22]])
    ids = p.ids[1:2, p.mask[1] == 1]
    assert ids.shape == right.ids.shape
    assert torch.equal(model.generate(ids, **options)[0], got[0][1, p.mask[1].argmax() :])


@pytest.mark.parametrize("by_positions", [False, True])
def test_packed(model: CausalLM, by_positions: bool) -> None:
    """[A | B] gives the same logits, loss and gradients as A and B alone; images of A and B are adjacent."""
    both = prompt_for(model, [[3, image(2, 3), image(3, 1), 4, video(3, 1, 2), 7]])
    lengths = [9, both.ids.shape[1] - 9]
    names = ("pixel_values", "image_position_ids")
    first, rest = ({name: both.vision[name][part] for name in names} for part in (slice(1), slice(1, None)))
    a = {"input_ids": both.ids[:, :9], **first}
    b = {**both.vision, "input_ids": both.ids[:, 9:], **rest}
    packing: dict[str, Tensor] = {"cu_seqlens": torch.tensor([0, 9, sum(lengths)])}
    if by_positions:
        packing = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    packing = {name: tensor.to(model.device) for name, tensor in packing.items()}
    with torch.no_grad():
        got = model(both.ids, **packing, **both.vision).logits.split(lengths, 1)
        for part, alone in zip(got, (a, b), strict=True):
            assert_close(part, model(**alone).logits, "logits")

    labels = both.ids.masked_fill(both.types > 0, -100)
    packed = all_gradients(model, input_ids=both.ids, labels=labels, **packing, **both.vision)
    items = int((labels != -100).sum()) - 1
    separate = [
        all_gradients(model, **x, labels=its, num_items_in_batch=items)
        for x, its in zip((a, b), labels.split(lengths, 1), strict=True)
    ]
    for name, gradient in packed.items():
        assert_close(gradient, separate[0][name] + separate[1][name], f"gradient of {name}")


@torch.no_grad()
def test_images_see_later_patches_within_windows_only(tmp_path: Path, device: str) -> None:
    """A change of the last patch reaches earlier tokens of its image if a layer has a window, and none without."""
    row = tiny_gemma4_unified.CHECKPOINTS[1]
    for kind, is_seen in (("sliding_attention", True), ("full_attention", False)):
        text = {**row.config["text_config"], "layer_types": [kind] * 3 + ["full_attention"]}
        dataclasses.replace(row, config={**row.config, "text_config": text}).write(tmp_path)
        model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32, device=device)
        p = prompt_for(model, [[5, image(1, 4), 8]])
        logits = model(p.ids, **p.vision).logits
        p.vision["pixel_values"][0, 3] += torch.rand_like(p.vision["pixel_values"][0, 3])
        differs = (logits != model(p.ids, **p.vision).logits).any(-1)[0].tolist()
        assert differs == [False] * 5 + [is_seen] * 3 + [True] * 9


@torch.no_grad()
def test_images_have_padding_where_texts_have_none(model: CausalLM) -> None:
    """The trainer knows that packed rows have no padding. Images have some all the same."""
    p = prompt_for(model, PROMPTS["images"])
    expected = model(p.ids, **p.vision).logits
    with assuming_inputs(InputProperties(has_padding=False, has_segments=False)):
        assert_close(model(p.ids, **p.vision).logits, expected, "logits")


# Training


def test_gradient_checkpointing(model: CausalLM) -> None:
    p = prompt_for(model, PROMPTS["a padded batch"])
    inputs = {"input_ids": p.ids, "attention_mask": p.mask, "labels": labels_for(p), **p.vision}
    tower = model.vision_tower.encoder.layers if isinstance(model, Gemma4) else []
    calls: list[nn.Module] = []
    hooks = [b.register_forward_pre_hook(lambda block, _: calls.append(block)) for b in (*tower, *model.model.layers)]
    found, counts = [], []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        calls.clear()
        found.append(all_gradients(model, **inputs))
        counts.append([calls.count(block) for block in (*tower, *model.model.layers)])
    model.gradient_checkpointing_disable()
    for hook in hooks:
        hook.remove()
    once = [2] * len(tower) + [1] * len(model.model.layers)  # the tower runs for images and for videos
    assert counts == [once, [2 * count for count in once]]
    assert found[0].keys() == found[1].keys() == dict(model.named_parameters()).keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


@pytest.mark.thorough
@every_backend
def test_compiled(model: CausalLM, backend: str) -> None:
    """Full graph."""
    p = prompt_for(model, PROMPTS["a padded batch"])
    inputs = {"input_ids": p.ids, "attention_mask": p.mask, "labels": labels_for(p), **p.vision}
    expected = all_gradients(model, **inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(**inputs).loss.backward()
    got = gradients(model)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=2e-5 * gradient.abs().max().item())
    model.zero_grad()
    if backend == "eager":  # a compiled graph cannot raise an error
        wrong = {**p.vision, "image_position_ids": p.vision["image_position_ids"] + 1}
        assert compiled(p.ids, p.mask, **wrong).logits[0, -1].isnan().all()


def test_new_model(hub_row: Tiny, tmp_path: Path) -> None:
    """Initializes all weights, tower included, and saves in the format of the hub."""
    architecture = architecture_of(hub_row.config["model_type"])
    config = dataclasses.replace(architecture.config_from_hf(hub_row.config), initializer_range=0.3)
    model: Any = architecture.model_class(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == float(not name.endswith("bias"))).all(), name
        else:
            assert 0.2 < parameter.std().item() < 0.4, name
    model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config == config
    theirs, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    names = "vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight", "model.vision_embedder.pos_embedding"
    assert any(name.endswith(names) for name in stored_tensors(tmp_path))
    p = prompt_for(model, PROMPTS["images"])
    assert_close(model(p.ids, **p.vision).logits, theirs_on(theirs, p).logits, "logits")


@pytest.mark.parametrize("row", [tiny_gemma4.CHECKPOINTS[0], tiny_gemma4_unified.CHECKPOINTS[0]], ids=str)
def test_a_model_without_images(row: Tiny, tmp_path: Path, device: str) -> None:
    """`vision_config` may be null."""
    raw = {**row.config, "vision_config": None, "audio_config": None, "torch_dtype": "float32"}
    dataclasses.replace(row, config=raw, by_transformers=True, shards=1, stored_dtype=torch.float32).write(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, device=device)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").to(device)
    ids = torch.randint(3, 89, (2, 20), device=device)
    assert_close(model(ids).logits, theirs(ids).logits, "logits")
    model.save_pretrained(tmp_path / "saved")
    assert raw_bytes(stored_tensors(tmp_path / "saved")) == raw_bytes(stored_tensors(tmp_path))
    patches = {"pixel_values": torch.rand(1, 4, 48), "image_position_ids": torch.zeros(1, 4, 2)}
    with pytest.raises(LigerzooError, match=r"pixel_values: images need .* a vision_config"):
        model(ids, **patches)


# Refusals


def test_inconsistent_inputs(model: CausalLM) -> None:
    p = prompt_for(model, [[5, image(2, 3), 20]])
    pixels, positions = p.vision["pixel_values"], p.vision["image_position_ids"]

    def refused(match: str, ids: Tensor = p.ids, **changes: Any) -> None:
        with pytest.raises(ValueError, match=match):
            model(ids, **{**p.vision, **changes})

    first = int((p.ids[0] == IMAGE).nonzero()[0])
    one_less, apart = p.ids.clone(), p.ids.clone()
    one_less[0, first] = 7
    apart[0, [0, first]] = apart[0, [first, 0]]
    refused("got 6 embeddings of images or videos; expected 5, the number of image", one_less)
    refused(r"not adjacent; expected runs of \[6\] tokens", apart)
    refused("images: patches and their positions do not match; got", pixel_values=pixels[:, :-1])
    refused("images: patches and their positions do not match; got", pixel_values=pixels[..., :-1])
    for wrong in (positions.flip(1), positions + 40):
        refused("images: invalid positions of patches; expected columns and rows", image_position_ids=wrong)
    if isinstance(model, Gemma4):
        refused("images: patches cannot be pooled; expected .* 2 x 2", image_position_ids=positions.clamp(max=2))
        cut = {name: p.vision[name][:, :-1] for name in ("pixel_values", "image_position_ids")}
        refused("images: patches cannot be pooled; .* padding to a multiple of 4", **cut)
    refused("pixel_values: images need patches, their positions", image_position_ids=None)
    model(p.ids, **p.vision, mm_token_type_ids=p.types)
    with pytest.raises(LigerzooError, match="pixel_values: images need token ids; got inputs_embeds"):
        model(inputs_embeds=model.model.embed_tokens(p.ids.clamp(max=89)), **p.vision)


@torch.no_grad()
def test_placeholders_without_their_input(model: CausalLM) -> None:
    """Refused in a prompt, but read like padding if generation sampled it, as in transformers."""
    for token, name in ((IMAGE, "pixel_values"), (VIDEO, "pixel_values_videos"), (AUDIO, "audio")):
        ids = torch.randint(3, 89, (2, 12), device=model.device)
        ids[0, 3] = token
        message = "audio, which is not supported" if token == AUDIO else f"expected {name} as well"
        with pytest.raises(LigerzooError, match=f"input_ids: placeholder tokens of .*{message}"):
            model.generate(ids, max_new_tokens=1)
        logits = []
        for sampled in (token, 0):
            cache = model.new_cache()
            model(ids.clamp(max=89), past_key_values=cache)
            logits.append(model(ids.new_full((2, 1), sampled), past_key_values=cache).logits)
        assert torch.equal(*logits)
    with pytest.raises(LigerzooError, match=r"input_features: audio is not supported. Pass text, images and videos"):
        model(ids.clamp(max=89), input_features=torch.zeros(1))


@pytest.mark.parametrize(
    "part, changes, named",
    [
        ("vision_config", {"model_type": "siglip_vision_model"}, "model_type: .* 'gemma4_vision'"),
        ("vision_config", {"rope_parameters": {"rope_theta": 3.0}}, "rope_theta"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ("vision_config", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("vision_config", {"attention_bias": True}, "attention_bias"),
        ("vision_config", {"num_key_value_heads": 3}, "num_key_value_heads: .* a divisor of num_attention_heads, 4"),
        ("vision_config", {"head_dim": 10}, "head_dim: .* a multiple of 4"),
        ("vision_config", {"patch_size": [4, 4]}, "patch_size"),
        ("text_config", {"model_type": "gemma4_unified_text"}, "model_type: .* 'gemma4_text'"),
        ("text_config", {"pad_token_id": 101}, "pad_token_id: .* a token id, 0 to 100"),
        ("", {"vision_config": "large"}, "vision_config: not an object"),
        ("", {"text_config": 5}, "text_config: not an object"),
        ("", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("", {"image_token_id": [5]}, "image_token_id: .* expected a token id"),
    ],
)
def test_invalid_configs(part: str, changes: dict[str, Any], named: str) -> None:
    raw = {**GEMMA4, part: {**GEMMA4[part], **changes}} if part else {**GEMMA4, **changes}
    with pytest.raises(ConfigError, match=named):
        architecture_of("gemma4").config_from_hf(raw)


@pytest.mark.parametrize(
    "part, changes",
    [
        ("text_config", {"hidden_size_per_layer_input": 8}),
        ("text_config", {"enable_moe_block": True}),
        ("vision_config", {"output_proj_dims": 29}),
    ],
)
def test_entries_that_gemma4_unified_ignores(part: str, changes: dict[str, Any]) -> None:
    raw = {**tiny_gemma4_unified.UNIFIED, part: {**tiny_gemma4_unified.UNIFIED[part], **changes}}
    with pytest.raises(ConfigError, match=f"{next(iter(changes))}: not supported"):
        architecture_of("gemma4_unified").config_from_hf(raw)


def test_more_blocks_than_tensors(tmp_path: Path) -> None:
    tiny_gemma4.CHECKPOINTS[0].write(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["vision_config"]["num_hidden_layers"] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="fewer tensors than layers"):
        AutoModel.from_pretrained(tmp_path)


def test_info(hub_row: Tiny, tmp_path: Path) -> None:
    hub_row.write(tmp_path)
    page = describe(tmp_path)
    architecture = architecture_of(hub_row.config["model_type"])
    assert f"{architecture.model_class.__name__} ({architecture.hf_class})" in page
    assert ("vision tower" in page) == (architecture.model_class is Gemma4)
    assert "projector" in page

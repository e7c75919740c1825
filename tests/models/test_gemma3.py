"""Gemma 3 with images against transformers: every tiny checkpoint on text, images and padded batches of them."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from ligerzoo import AutoModel, Processor
from ligerzoo.convert.gemma3 import ARCHITECTURE
from ligerzoo.errors import CheckpointError, ConfigError
from ligerzoo.info import describe
from ligerzoo.models import Gemma3, Gemma3Config, Gemma3VisionConfig
from tests.covering import every_backend
from tests.models.comparing import (
    TOLERANCE,
    all_gradients,
    assert_close,
    assert_errors_as_small,
    assert_same_bf16,
    gradients,
    load_both,
    raw_bytes,
    rounding_as_eager,
    stored_tensors,
    under_their_names,
)
from tests.models.tiny import Tiny
from tests.models.tiny_gemma3 import CHECKPOINTS, GEMMA3, IMAGE, PROMPTS, TEXT, VISION, Prompt, Row, prompt
from tests.vision.test_processor import checkpoint as processor_files

logging.disable_progress_bar()
logging.set_verbosity_error()


def prompts(*names: str) -> pytest.MarkDecorator:
    rows = [PROMPTS[name] for name in names]
    return pytest.mark.parametrize("rows", rows, ids=[name.replace(" ", "-") for name in names])


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


@pytest.fixture(scope="module")
def models(directory: Path, device: str) -> tuple[Gemma3, PreTrainedModel]:
    return load_both(directory, torch.float32, device)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, device: str) -> Gemma3:
    path = tmp_path_factory.mktemp("checkpoint")
    CHECKPOINTS[0].write(path)
    return Gemma3.from_pretrained(path, dtype=torch.float32, device=device)


def prompt_for(model: Gemma3, rows: list[Row], side: str = "left") -> Prompt:
    cpu_prompt = prompt(rows, model.config, side)
    pixels = None if cpu_prompt.pixels is None else cpu_prompt.pixels.to(model.device)
    return Prompt(
        cpu_prompt.ids.to(model.device), cpu_prompt.mask.to(model.device), cpu_prompt.types.to(model.device), pixels
    )


def theirs_on(theirs: PreTrainedModel, p: Prompt, **options: Any) -> Any:
    return theirs(input_ids=p.ids, attention_mask=p.mask, token_type_ids=p.types, **p.images, **options)


def labels_for(p: Prompt) -> Tensor:
    """Labels of text tokens, except the first, which padding would predict."""
    has_label = (
        (p.mask == 1) & (p.mask.roll(1, 1) == 1) & (p.types == 0) & (torch.rand(p.ids.shape) < 0.8).to(p.ids.device)
    )
    return p.ids.masked_fill(~has_label, -100)


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        # This bias shifts all scores of a query equally, so its exact gradient is zero.
        if "vision_tower" in name and name.endswith("k_proj.bias"):
            largest = TOLERANCE * expected[name.replace("bias", "weight")].abs().max()
            assert max(got[name].abs().max(), gradient.abs().max()) <= largest, name
        else:
            assert_close(got[name], gradient, f"gradient of {name}")


@prompts(*PROMPTS)
@pytest.mark.every_checkpoint
@pytest.mark.long
def test_logits_loss_and_gradients(models: tuple[Gemma3, PreTrainedModel], rows: list[Row]) -> None:
    ours, theirs = models
    p = prompt_for(ours, rows)
    labels = labels_for(p)
    expected = theirs_on(theirs, p, labels=labels)
    with torch.no_grad():
        logits = ours(p.ids, p.mask, **p.images).logits
    assert_close(logits[p.mask == 1], expected.logits[p.mask == 1], "logits")

    for model in models:
        model.zero_grad()
    loss = ours(p.ids, p.mask, labels=labels, **p.images).loss
    assert_close(loss, expected.loss, "loss")
    loss.backward()
    expected.loss.backward()
    their_gradients = gradients(theirs)
    got = under_their_names(ours, gradients(ours), their_gradients)
    assert any("vision_tower" in name for name in their_gradients) == bool(p.images)
    assert_same_gradients(got, their_gradients)


@prompts("images, two of them side by side", "a padded batch")
@pytest.mark.every_layer
@pytest.mark.long
@torch.no_grad()
def test_bf16_logits(directory: Path, device: str, rows: list[Row]) -> None:
    ours, theirs = load_both(directory, torch.bfloat16, device)
    exact = copy.deepcopy(theirs).float()

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        p = prompt_for(ours, rows)
        got, expected = (x[p.mask == 1] for x in (ours(p.ids, p.mask, **p.images).logits, theirs_on(theirs, p).logits))
        assert got.dtype == expected.dtype == torch.bfloat16
        return got, expected, theirs_on(exact, p).logits[p.mask == 1]

    if device == "cpu":
        with rounding_as_eager():
            assert_same_bf16(*draw()[:2])
    assert_errors_as_small(draw, device, draws=4)


@prompts("images, two of them side by side", "a padded batch")
@torch.no_grad()
def test_greedy_generation(models: tuple[Gemma3, PreTrainedModel], rows: list[Row]) -> None:
    ours, theirs = models
    p = prompt_for(ours, rows)
    got = ours.generate(p.ids, p.mask, max_new_tokens=12, eos_token_id=[], **p.images)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}
    expected = theirs.generate(p.ids, attention_mask=p.mask, token_type_ids=p.types, **p.images, **options)
    assert torch.equal(got, expected)


def test_saving_reproduces_the_files(tiny: Tiny, directory: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(directory)
    assert type(model) is Gemma3
    theirs, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert model.dtype == theirs.dtype
    original, config = stored_tensors(directory), json.loads((directory / "config.json").read_text())
    size = sum(tensor.nbytes for tensor in original.values())
    model.save_pretrained(tmp_path / "saved", max_shard_size=size // tiny.shards + 1)
    assert raw_bytes(stored_tensors(tmp_path / "saved")) == raw_bytes(original)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config | tiny.corrected

    again, report_again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert report_again == report
    assert all(".head." in name for names in report.values() for name in names)
    p = prompt_for(model, PROMPTS["images, two of them side by side"])
    p = Prompt(p.ids, p.mask, p.types, p.pixels.to(theirs.dtype) if p.pixels is not None else None)
    assert torch.equal(theirs_on(again.eval(), p).logits, theirs_on(theirs.eval(), p).logits)


# Attention mask


@torch.no_grad()
def test_image_mask_from_ids_or_token_types(model: Gemma3) -> None:
    """`token_type_ids` of 0 make image tokens causal, as in transformers without `token_type_ids`."""
    p = prompt_for(model, PROMPTS["a padded batch"])
    logits = model(p.ids, p.mask, **p.images).logits
    assert torch.equal(model(p.ids, p.mask, token_type_ids=p.types, **p.images).logits, logits)
    embeddings = model.model.embed_tokens(p.ids.clone())
    embeddings[p.types == 1] = model.multi_modal_projector(model.vision_tower(p.pixels)).flatten(0, 1)
    assert torch.equal(model(None, p.mask, inputs_embeds=embeddings, token_type_ids=p.types).logits, logits)
    causal = model(p.ids, p.mask, token_type_ids=torch.zeros_like(p.types), **p.images).logits
    assert not torch.allclose(causal[p.mask == 1], logits[p.mask == 1], atol=0.1)
    assert torch.equal(model(None, p.mask, inputs_embeds=embeddings).logits, causal)


@torch.no_grad()
def test_image_affects_only_visible_tokens(model: Gemma3) -> None:
    """Its last pixel affects its first token and none before; text is causal."""
    p = prompt_for(model, [[5, "image", 8]])
    assert p.pixels is not None
    other = p.pixels.clone()
    other[..., 23, 23] += 5  # pixels beyond the last patch are ignored
    logits, changed = (model(p.ids, pixel_values=pixels).logits for pixels in (p.pixels, other))
    differs = (logits != changed).any(-1)[0]
    assert differs.tolist() == [False] * 5 + [True] * 17
    shorter = model(p.ids[:, :-3], pixel_values=p.pixels).logits
    assert_close(shorter, logits[:, :-3], "logits")


# Caches and packed rows


@torch.no_grad()
def test_conversation_with_a_cache(model: Gemma3) -> None:
    """Chunks, with a new image in a later one, a row without images, and padding: as in one forward."""
    rows: list[list[Row]] = [[[4, "image", 3], [9]], [[3], [3]], [[2, "image", 4], ["image", 2]], [[1], [1]]]
    chunks = [prompt_for(model, chunk) for chunk in rows]
    ids, mask = (torch.cat([getattr(chunk, name) for chunk in chunks], 1) for name in ("ids", "mask"))
    first, _, *others = chunks
    # All images in order: by row, then by chunk.
    pixels = torch.cat([*(chunk.pixels[:1] for chunk in (first, others[0]) if chunk.pixels is not None),
                        *(chunk.pixels[1:] for chunk in others if chunk.pixels is not None)])  # fmt: skip
    whole = model(ids, mask, pixel_values=pixels).logits
    for cache in (model.new_cache(), model.new_cache(capacity=64)):
        end, pieces = 0, []
        for chunk in chunks:
            end += chunk.ids.shape[1]
            pieces.append(model(chunk.ids, mask[:, :end], past_key_values=cache, **chunk.images).logits)
        assert_close(torch.cat(pieces, 1)[mask == 1], whole[mask == 1], "logits from a cache")


@torch.no_grad()
def test_generation_with_token_type_ids(model: Gemma3) -> None:
    """Token types of processors, aligned with the prompts, with and without a cache."""
    left, rows = prompt_for(model, PROMPTS["a padded batch"]), PROMPTS["a padded batch"]
    expected = model.generate(left.ids, left.mask, max_new_tokens=6, **left.images)[:, left.ids.shape[1] :]
    ids, mask, types = (torch.zeros_like(left.ids) for _ in range(3))
    for i in range(len(rows)):
        not_padding = left.mask[i] == 1
        for ours, theirs in ((ids, left.ids), (mask, left.mask), (types, left.types)):
            ours[i, : int(not_padding.sum())] = theirs[i, not_padding]
    for use_cache in (True, False):
        for p in (left, Prompt(ids, mask, types, left.pixels)):
            got = model.generate(
                p.ids, p.mask, token_type_ids=p.types, max_new_tokens=6, use_cache=use_cache, **p.images
            )
            assert torch.equal(got[:, p.ids.shape[1] :], expected)
    with pytest.raises(
        ValueError, match=r"token_type_ids: .* got \(3, 30\); expected .* the shape \(3, 34\) of input_ids"
    ):
        model.generate(ids, mask, token_type_ids=types[:, :30], max_new_tokens=1)


@torch.no_grad()
def test_padding_may_equal_the_image_token(model: Gemma3) -> None:
    """`generate` pads with the last token of the prompts, which may be an image token."""
    p = prompt_for(model, [[3, "image"], [20]])
    got = model.generate(p.ids, p.mask, max_new_tokens=4, **p.images)
    alone = model.generate(p.ids[:1, p.mask[0] == 1], max_new_tokens=4, **p.images)
    assert torch.equal(got[0, -4:], alone[0, -4:])


@pytest.mark.parametrize("by_positions", [False, True])
def test_packed(model: Gemma3, by_positions: bool) -> None:
    """[A | B] gives the same logits, loss and gradients as A and B alone; the image tokens of A and B are adjacent."""
    both = prompt_for(model, [[3, "image", "image", 4, "image", 7]])
    assert both.pixels is not None
    lengths = [12, 29]
    a = {"input_ids": both.ids[:, :12], "pixel_values": both.pixels[:1]}
    b = {"input_ids": both.ids[:, 12:], "pixel_values": both.pixels[1:]}
    packing: dict[str, Tensor] = {"cu_seqlens": torch.tensor([0, 12, 41])}
    if by_positions:
        packing = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    packing = {name: tensor.to(model.device) for name, tensor in packing.items()}
    with torch.no_grad():
        got = model(both.ids, **packing, **both.images).logits.split(lengths, 1)
        for part, alone in zip(got, (a, b), strict=True):
            assert_close(part, model(**alone).logits, "logits")

    labels = both.ids.masked_fill(both.types == 1, -100)
    packed = all_gradients(model, input_ids=both.ids, labels=labels, **packing, **both.images)
    items = 2 + (4 + 7)  # all text tokens but the first of each segment
    separate = [
        all_gradients(model, **x, labels=its, num_items_in_batch=items)
        for x, its in zip((a, b), labels.split(lengths, 1), strict=True)
    ]
    assert_same_gradients(packed, {name: separate[0][name] + separate[1][name] for name in packed})


# Training


def test_gradient_checkpointing(model: Gemma3) -> None:
    p = prompt_for(model, PROMPTS["a padded batch"])
    inputs = {"input_ids": p.ids, "attention_mask": p.mask, "labels": labels_for(p), **p.images}
    calls: list[nn.Module] = []
    blocks = [*model.vision_tower.encoder.layers, *model.model.layers]
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
    assert counts == [[1] * 5, [2] * 5]
    assert found[0].keys() == found[1].keys() == dict(model.named_parameters()).keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_frozen_tower(model: Gemma3) -> None:
    p = prompt_for(model, PROMPTS["an image"])
    inputs = {"input_ids": p.ids, "labels": labels_for(p), **p.images}
    whole = all_gradients(model, **inputs)
    model.vision_tower.requires_grad_(False)
    try:
        assert not model.vision_tower(p.pixels).requires_grad
        got = all_gradients(model, **inputs)
    finally:
        model.vision_tower.requires_grad_(True)
    assert got.keys() == {name for name in whole if not name.startswith("vision_tower.")}
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, whole[name])


@pytest.mark.thorough
@every_backend
def test_compiled(model: Gemma3, backend: str) -> None:
    """Full graph."""
    p = prompt_for(model, PROMPTS["a padded batch"])
    inputs = {"input_ids": p.ids, "attention_mask": p.mask, "labels": labels_for(p), **p.images}
    expected = all_gradients(model, **inputs)
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(**inputs).loss.backward()
    got = gradients(model)
    model.zero_grad()
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=2e-5 * gradient.abs().max().item())


def test_new_model(tmp_path: Path) -> None:
    """Initializes all weights, tower included, and saves in the format of the hub."""
    vision = Gemma3VisionConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8
    )
    config = Gemma3Config(
        vocab_size=99, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vision_config=vision, mm_tokens_per_image=4, image_token_id=98,
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    model = Gemma3(config)
    for name, parameter in model.named_parameters():
        std = parameter.std().item()
        if name.endswith("bias") or parameter.ndim == 1:
            is_layer_norm = "layernorm" in name and name.startswith("vision_tower.")
            one = not name.endswith("bias") and is_layer_norm  # RMSNorm stores its scale minus 1
            assert (parameter == one).all(), name
        else:
            assert 0.2 < std < 0.4, name
    model.save_pretrained(tmp_path)
    assert Gemma3.from_pretrained(tmp_path).config == config
    theirs, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    names = {"language_model.model.norm.weight", "language_model.lm_head.weight"}
    names |= {"vision_tower.vision_model.encoder.layers.0.layer_norm1.weight"}
    assert names <= stored_tensors(tmp_path).keys()
    p = prompt_for(model, [["image", 20]])
    assert_close(model(p.ids, **p.images).logits, theirs_on(theirs, p).logits, "logits")


def test_messages_to_answer(tmp_path: Path, device: str) -> None:
    """An image file and a conversation without images: the model accepts the processor's inputs."""
    vision = Gemma3VisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=9
    )
    config = Gemma3Config(
        vocab_size=264, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=8, vision_config=vision, mm_tokens_per_image=9, image_token_id=263,
        initializer_range=0.3, eos_token_id=257, pad_token_id=258,
    )  # fmt: skip
    processor_files(tmp_path, "gemma3")
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_length": 9}))
    Gemma3(config).save_pretrained(tmp_path)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 90, 3), dtype=np.uint8)).save(tmp_path / "it.png")
    parts = [{"type": "image", "path": str(tmp_path / "it.png")}, {"type": "text", "text": "What is it?"}]
    conversations = [[{"role": "user", "content": content}] for content in (parts, parts[1:])]

    model = AutoModel.from_pretrained(tmp_path, device=device)
    inputs = {name: x.to(device) for name, x in Processor.from_pretrained(tmp_path)(conversations).items()}
    assert inputs["pixel_values"].shape == (1, 3, 56, 56)
    assert inputs["token_type_ids"].sum(1).tolist() == [9, 0]
    got = model.generate(**inputs, max_new_tokens=8)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path).to(device)
    assert torch.equal(got, theirs.generate(**inputs, max_new_tokens=8, do_sample=False))


# Refusals and config.json


def test_placeholders_without_images(model: Gemma3) -> None:
    ids = torch.arange(3, 23, device=model.device)[None].index_fill(
        1, torch.arange(4, 8, device=model.device), model.config.image_token_id
    )
    for call in (model.check_inputs, lambda ids: model.generate(ids, max_new_tokens=1)):
        with pytest.raises(
            ValueError, match=r"input_ids: placeholder tokens of images .* expected pixel_values as well"
        ):
            call(ids)


def test_inconsistent_inputs(model: Gemma3) -> None:
    p = prompt_for(model, PROMPTS["an image"])
    with pytest.raises(ValueError, match="got 9 embeddings of images or videos; expected 8, the number of image"):
        model(p.ids.index_fill(1, torch.tensor([5], device=p.ids.device), 7), **p.images)
    with pytest.raises(ValueError, match=r"pixel_values has shape \(1, 3, 26, 25\); expected \(images, 3, 26, 26\)"):
        model(p.ids, pixel_values=torch.zeros(1, 3, 26, 25, device=p.ids.device))
    with pytest.raises(ValueError, match="got images with inputs_embeds; expected input_ids"):
        model(inputs_embeds=model.model.embed_tokens(p.ids), **p.images)
    with pytest.raises(ValueError, match=r"token_type_ids has shape \(1, 39\); expected \(1, 38\), one per token"):
        model(p.ids, token_type_ids=F.pad(p.types, (1, 0)), **p.images)


@pytest.mark.parametrize(
    "part, changes, named",
    [
        (
            "",
            {"mm_tokens_per_image": 8},
            "mm_tokens_per_image: .* got 8 tokens for 6 x 6 patches; expected a perfect",
        ),
        ("", {"mm_tokens_per_image": 16}, "got 16 tokens for 6 x 6 patches"),
        ("", {"vision_config": None}, "got 9 tokens for 14 x 14 patches.* text-only .* model_type gemma3_text"),
        ("", {"vision_config": "large"}, "vision_config: not an object"),
        ("", {"text_config": 5}, "text_config: not an object"),
        ("", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("", {"image_token_index": [5]}, "image_token_id: .* expected a token id"),
        ("text_config", {"model_type": "llama"}, "model_type: .* 'gemma3_text'"),
        ("text_config", {"hidden_activation": "relu"}, "hidden_activation"),
        ("text_config", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("text_config", {"rope_scaling": {"rope_type": "unheard of"}}, "unknown rope type"),
        ("vision_config", {"model_type": "clip_vision_model"}, "model_type: .* 'siglip_vision_model'"),
        ("vision_config", {"hidden_act": "gelu"}, "hidden_act"),
        ("vision_config", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("vision_config", {"patch_size": [4, 4]}, "patch_size"),
        ("vision_config", {"patch_size": 27}, "got 9 tokens for 0 x 0 patches"),
        ("vision_config", {"hidden_size": 25}, "hidden_size: .* a multiple of num_attention_heads, 2"),
    ],
)
def test_invalid_configs(part: str, changes: dict[str, Any], named: str) -> None:
    raw = {**GEMMA3, part: {**GEMMA3[part], **changes}} if part else {**GEMMA3, **changes}
    with pytest.raises(ConfigError, match=named):
        ARCHITECTURE.config_from_hf(raw)


def test_precedence_of_entries() -> None:
    top = {"image_token_id": 91, "tie_word_embeddings": None, "initializer_range": 0.5}
    read = ARCHITECTURE.config_from_hf(
        {**GEMMA3, **top, "text_config": {**TEXT, "eos_token_id": 5, "tie_word_embeddings": False}}
    )
    assert (read.image_token_id, read.eos_token_id, read.initializer_range) == (91, [1, 87], 0.5)
    assert read.tie_word_embeddings  # transformers reads the top level only
    for raw in (GEMMA3, {**GEMMA3, "image_token_id": None}):
        assert ARCHITECTURE.config_from_hf(raw).image_token_id == IMAGE
    nothing = ARCHITECTURE.config_from_hf({"vision_config": {"image_size": 256}})
    assert nothing == Gemma3Config(vision_config=Gemma3VisionConfig(image_size=256))


def test_more_blocks_than_tensors(tmp_path: Path) -> None:
    CHECKPOINTS[0].write(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["vision_config"]["num_hidden_layers"] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="fewer tensors than layers"):
        AutoModel.from_pretrained(tmp_path)


def test_classification_head_is_kept(tmp_path: Path) -> None:
    """Also if config.json does not mention it."""
    head = CHECKPOINTS[2]
    assert head.config["vision_config"] == {**VISION, "vision_use_head": True}
    head.write(tmp_path / "read")
    raw = json.loads((tmp_path / "read" / "config.json").read_text())
    raw["vision_config"]["vision_use_head"] = False
    (tmp_path / "read" / "config.json").write_text(json.dumps(raw))
    AutoModel.from_pretrained(tmp_path / "read").save_pretrained(tmp_path / "saved")
    saved = stored_tensors(tmp_path / "saved")
    assert raw_bytes(saved) == raw_bytes(stored_tensors(tmp_path / "read"))
    assert any(".head." in name for name in saved)


def test_info(tmp_path: Path) -> None:
    CHECKPOINTS[0].write(tmp_path)
    page = describe(tmp_path)
    assert "Gemma3 (Gemma3ForConditionalGeneration)" in page
    assert "2 of 3 layers attend to the last 12 tokens" in page
    assert "vision tower" in page
    assert "projector                   792" in page

"""Llama 3.2 Vision against transformers: every tiny checkpoint on text, tiled images and padded batches."""

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
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from ligerzoo import AutoModel, Processor
from ligerzoo.convert.mllama import ARCHITECTURE
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError
from ligerzoo.info import describe
from ligerzoo.integrations.transformers.versions import CACHE
from ligerzoo.models import Mllama, MllamaConfig, MllamaVisionConfig
from tests.models.comparing import (
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
from tests.models.tiny_mllama import CHECKPOINTS, MLLAMA, PROMPTS, TEXT, VISION, Prompt, Row, mllama, prompt
from tests.vision.test_processor import checkpoint as processor_files
from tests.vision.test_processor import text, user

logging.disable_progress_bar()
logging.set_verbosity_error()

# transformers 5.17 uses a deprecated name of its tower.
pytestmark = pytest.mark.filterwarnings("ignore:.hidden_state. is deprecated:FutureWarning")
IMAGES, BATCH = PROMPTS["images of several tilings"], PROMPTS["a padded batch"]


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


@pytest.fixture(scope="module")
def models(directory: Path, device: str) -> tuple[Mllama, PreTrainedModel]:
    return load_both(directory, torch.float32, device)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, device: str) -> tuple[Mllama, PreTrainedModel]:
    """One checkpoint, for tests that do not need all."""
    path = tmp_path_factory.mktemp("checkpoint")
    CHECKPOINTS[0].write(path)
    return load_both(path, torch.float32, device)


@pytest.fixture
def model(pair: tuple[Mllama, PreTrainedModel]) -> Mllama:
    return pair[0]


def prompt_for(model: Mllama, rows: list[Row], side: str = "left") -> Prompt:
    cpu_prompt = prompt(rows, vars(model.config.vision_config), side)
    vision = {name: tensor.to(model.device) for name, tensor in cpu_prompt.vision.items()}
    return Prompt(cpu_prompt.ids.to(model.device), cpu_prompt.mask.to(model.device), vision)


def labels_for(p: Prompt, vocab_size: int) -> Tensor:
    """Labels of text tokens, except the first, which padding would predict."""
    has_label = (p.mask == 1) & (p.mask.roll(1, 1) == 1) & (p.ids < vocab_size)
    return p.ids.masked_fill(~has_label | (torch.rand(p.ids.shape) < 0.2).to(p.ids.device), -100)


@pytest.mark.parametrize("rows", PROMPTS.values(), ids=[name.replace(" ", "-") for name in PROMPTS])
@pytest.mark.every_checkpoint
@pytest.mark.long
def test_logits_loss_and_gradients(models: tuple[Mllama, PreTrainedModel], rows: list[Row]) -> None:
    ours, theirs = models
    p = prompt_for(ours, rows)
    labels = labels_for(p, ours.config.vocab_size)
    expected = theirs(input_ids=p.ids, attention_mask=p.mask, labels=labels, **p.vision)
    with torch.no_grad():
        logits = ours(p.ids, p.mask, **p.vision).logits
    assert_close(logits[p.mask == 1], expected.logits[p.mask == 1], "logits")

    for model in models:
        model.zero_grad()
    loss = ours(p.ids, p.mask, labels=labels, **p.vision).loss
    assert_close(loss, expected.loss, "loss")
    loss.backward()
    expected.loss.backward()
    expected_gradients = gradients(theirs)
    got = under_their_names(ours, gradients(ours), expected_gradients)
    assert got.keys() == expected_gradients.keys()
    assert (len(expected_gradients) == len(list(theirs.parameters()))) == bool(p.vision)
    gates = [name for name, gradient in expected_gradients.items() if gradient.shape == (1,)]
    for name in expected_gradients.keys() - gates:
        assert_close(got[name], expected_gradients[name], f"gradient of {name}")
    if gates:  # sums over all features and tokens, which nearly cancel: compared to the largest
        assert_close(
            torch.cat([got[name] for name in gates]), torch.cat([expected_gradients[name] for name in gates]), "gates"
        )


@pytest.mark.every_layer
@torch.no_grad()
def test_bf16_logits(directory: Path, device: str) -> None:
    ours, theirs = load_both(directory, torch.bfloat16, device)
    exact = copy.deepcopy(theirs).float()

    def logits(model: Any, prompts: list[Any]) -> Tensor:
        outputs = [model(input_ids=p.ids, attention_mask=p.mask, **p.vision).logits[p.mask == 1] for p in prompts]
        return torch.cat(outputs)

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        prompts = [prompt_for(ours, rows) for rows in PROMPTS.values()]
        got, expected = (logits(model, prompts) for model in (ours, theirs))
        assert got.dtype == expected.dtype == torch.bfloat16
        return got, expected, logits(exact, prompts)

    if device == "cpu":
        with rounding_as_eager():
            assert_same_bf16(*draw()[:2])
    assert_errors_as_small(draw, device, draws=4)


@pytest.mark.parametrize("rows", [PROMPTS["text"], BATCH], ids=["text", "a-padded-batch"])
@torch.no_grad()
def test_greedy_generation(models: tuple[Mllama, PreTrainedModel], rows: list[Row]) -> None:
    ours, theirs = models
    p = prompt_for(ours, rows)
    got = ours.generate(p.ids, p.mask, max_new_tokens=8, eos_token_id=[], **p.vision)
    # Their cache counts the image states in the first layer as tokens.
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    options["use_cache"] = 0 not in ours.config.cross_attention_layers
    assert torch.equal(got, theirs.generate(p.ids, attention_mask=p.mask, **p.vision, **options))


def test_saving_reproduces_the_files(tiny: Tiny, directory: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(directory)
    assert type(model) is Mllama
    theirs = AutoModelForImageTextToText.from_pretrained(directory)
    assert model.dtype == theirs.dtype
    original, config = stored_tensors(directory), json.loads((directory / "config.json").read_text())
    size = sum(tensor.nbytes for tensor in original.values())
    model.save_pretrained(tmp_path / "saved", max_shard_size=size // tiny.shards + 1)
    assert raw_bytes(stored_tensors(tmp_path / "saved")) == raw_bytes(original)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config | tiny.corrected

    again, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()), report
    p = prompt_for(model, IMAGES)
    logits = [theirs.eval()(input_ids=p.ids, **p.vision).logits for theirs in (again, theirs)]
    assert torch.equal(*logits)


# The tower


@pytest.mark.parametrize("tiles", [[(1, 1)], [(1, 4)], [(2, 2), (3, 1), (1, 1), (1, 2)]])
@torch.no_grad()
def test_tiles_of_an_image(pair: tuple[Mllama, PreTrainedModel], tiles: list[tuple[int, int]]) -> None:
    """Padding attends to tiles and vice versa: pixels of padding tiles affect the output."""
    ours, theirs = pair
    vision = prompt_for(ours, [[tile, 1] for tile in tiles] + [[2]]).vision
    inputs = [vision[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")]
    for _ in range(2):
        expected = theirs.model.vision_model(*inputs).last_hidden_state
        got = ours.vision_model(*(tensor.flatten(0, 1) for tensor in inputs)).view_as(expected)
        assert_close(got, expected, "features")
        inputs[0] = torch.randn_like(inputs[0])


def test_large_images(tmp_path: Path, device: str) -> None:
    """Uses block masks on a GPU, in the tower and in the decoder."""
    large = {"hidden_size": 32, "vision_output_dim": 96, "image_size": 64, "num_hidden_layers": 3}
    mllama("large", {"hidden_size": 64}, large).write(tmp_path)
    ours, theirs = load_both(tmp_path, torch.float32, device)
    p = prompt_for(ours, [[300, (1, 2), 730]])
    labels = labels_for(p, ours.config.vocab_size)
    expected = theirs(input_ids=p.ids, labels=labels, **p.vision)
    with torch.no_grad():
        assert_close(ours(p.ids, **p.vision).logits, expected.logits, "logits")
    expected.loss.backward()
    got, expected_gradients = all_gradients(ours, input_ids=p.ids, labels=labels, **p.vision), gradients(theirs)
    for name, gradient in under_their_names(ours, got, expected_gradients).items():
        if gradient.numel() > 1:
            assert_close(gradient, expected_gradients[name], f"gradient of {name}")


# Cross-attention masks


@pytest.mark.parametrize("kind", ["at random", "by default", "of no image", "as one number"])
@torch.no_grad()
def test_cross_attention_masks(pair: tuple[Mllama, PreTrainedModel], kind: str) -> None:
    ours, theirs = pair
    p = prompt_for(ours, [[(2, 2), 30], [(2, 2), 30]] if kind == "as one number" else BATCH)
    mask = p.vision.pop("cross_attention_mask")
    if kind != "by default":
        at_random = (torch.rand(mask.shape).to(mask.device) < 0.3) & (mask.cummax(1).values > 0)  # of images before
        shown = {"at random": at_random, "of no image": mask < 0, "as one number": mask >= 0}[kind]
        shown[0, 5:9] = False
        p.vision["cross_attention_mask"] = shown.to(mask)
    got = ours(p.ids, p.mask, **p.vision).logits
    expected = theirs(input_ids=p.ids, attention_mask=p.mask, **p.vision).logits
    assert_close(got[p.mask == 1], expected[p.mask == 1], "logits")


@torch.no_grad()
def test_cross_attention_states_replace_pixels(pair: tuple[Mllama, PreTrainedModel]) -> None:
    ours, theirs = pair
    p = prompt_for(ours, BATCH)
    mask = p.vision["cross_attention_mask"]
    tiles, length = mask.shape[2] * mask.shape[3], ours.vision_model.tile_length
    states = torch.randn(len(p.ids), tiles * length, ours.config.hidden_size, device=p.ids.device)
    inputs = {"input_ids": p.ids, "attention_mask": p.mask, "cross_attention_mask": mask}
    got, expected = (model(**inputs, cross_attention_states=states).logits for model in (ours, theirs))
    assert_close(got[p.mask == 1], expected[p.mask == 1], "logits")


# Caches


@pytest.mark.parametrize("capacity", [None, 64])
@torch.no_grad()
def test_conversation_with_a_cache(pair: tuple[Mllama, PreTrainedModel], capacity: int | None) -> None:
    """As in transformers, a new image is appended to those in the cache; earlier tokens do not attend to it."""
    ours, theirs = pair
    chunks: list[list[Row]] = [[[4, (1, 2), 3], [8]], [[3], [3]], [[2, (2, 1), 4], [3, (1, 1), 3]]]
    first, second, third = (prompt_for(ours, chunk) for chunk in chunks)
    before = first.vision["cross_attention_mask"]
    before = torch.cat([before, before[:, -1:].expand(-1, 3, -1, -1)], 1)
    after = torch.cat([before[:, -1:].expand(-1, 7, -1, -1), third.vision["cross_attention_mask"]], 2)
    third.vision["cross_attention_mask"] = torch.cat([F.pad(before, (0, 0, 0, 1)), after], 1)
    cache, theirs_cache = ours.new_cache(capacity), None
    for p, mask in ((first, {}), (second, {"cross_attention_mask": before}), (third, {})):
        got = ours(
            p.ids, past_key_values=cache, **p.vision
        ).logits  # the cache stores the mask that transformers needs as input
        expected = theirs(input_ids=p.ids, **{CACHE: theirs_cache}, use_cache=True, **p.vision, **mask)
        theirs_cache = expected[CACHE]
        assert_close(got, expected.logits, "logits from a cache")
    assert (cache.length, cache.cross_attention_length) == (18, 2 * 4 * ours.vision_model.tile_length)


@pytest.mark.parametrize("capacity", [None, 60])
@torch.no_grad()
def test_chunks_and_single_tokens(model: Mllama, capacity: int | None) -> None:
    p = prompt_for(model, BATCH)
    whole = model(p.ids, p.mask, **p.vision).logits
    mask = p.vision["cross_attention_mask"]
    assert (mask[:, 20:] == mask[:, 20:21]).all()
    for remembers in (True, False):  # a mask of all tokens, or only of the first, which the rest repeat
        cache, pieces, end, vision = model.new_cache(capacity), [], 0, p.vision
        for size in (9, 1, 7, 1, 1, 1, 6, p.ids.shape[1] - 26):
            start, end = end, end + size
            sees = {"cross_attention_mask": mask[:, : min(end, 21)]} if end < 26 or not remembers else {}
            inputs = {**vision, **sees}
            pieces.append(model(p.ids[:, start:end], p.mask[:, :end], past_key_values=cache, **inputs).logits)
            vision = {}
        assert_close(torch.cat(pieces, 1)[p.mask == 1], whole[p.mask == 1], "logits from a cache")


@torch.no_grad()
def test_static_cache_keeps_its_memory(model: Mllama) -> None:
    """Decode steps keep shapes and addresses, so that a CUDA graph can capture them."""
    p, cache = prompt_for(model, IMAGES), model.new_cache(capacity=60)
    model(p.ids, past_key_values=cache, **p.vision)
    buffers = [(layer._keys.shape, layer._keys.data_ptr()) for layer in cache.layers if layer._keys is not None]
    for _ in range(3):
        model(p.ids[:, :1], past_key_values=cache)
    assert buffers == [(layer._keys.shape, layer._keys.data_ptr()) for layer in cache.layers if layer._keys is not None]
    assert len(buffers) == 4


@torch.no_grad()
def test_generation(model: Mllama) -> None:
    """The cache and padding do not change the result, and the repetition penalty ignores tokens without a logit."""
    p = prompt_for(model, BATCH)
    ids, mask, sees = p.ids, p.mask, p.vision.pop("cross_attention_mask")
    right = [torch.zeros_like(x) for x in (ids, mask, sees)]
    for i, row in enumerate(mask):
        for padded_right, padded_left in zip(right, (ids, mask, sees), strict=True):
            padded_right[i, : int(row.sum())] = padded_left[i, row == 1]
    wider = [torch.cat([torch.zeros_like(x[:, :2]), x], 1) for x in (ids, mask, sees)]
    options: dict[str, Any] = {"max_new_tokens": 6, "repetition_penalty": 1.3, **p.vision}
    expected = model.generate(ids, mask, cross_attention_mask=sees, **options)[:, -6:]
    assert len(set(expected.flatten().tolist())) > 3
    for prompts in ((ids, mask, sees), right, wider):
        for use_cache in (True, False):
            got = model.generate(*prompts[:2], cross_attention_mask=prompts[2], use_cache=use_cache, **options)
            assert torch.equal(got[:, -6:], expected)
    with pytest.raises(LigerzooError, match=r"cross_attention_mask: .* got \(3, 4, 3, 4\); expected"):
        model.generate(ids, mask, cross_attention_mask=sees[:, :4], **options)


# Packed rows


@pytest.mark.parametrize("by_positions", [False, True])
def test_packed(model: Mllama, by_positions: bool) -> None:
    """[A | text | B | padding] gives the same logits, loss and gradients as each alone, with its own images."""
    sequences: list[Row] = [[3, (1, 2), 8], [9], [4, (2, 1), (1, 1), 6]]
    parts = [prompt_for(model, [row]) for row in sequences]
    lengths = [part.ids.shape[1] for part in parts]
    ids = torch.cat(
        [part.ids for part in parts] + [] if by_positions else [*(part.ids for part in parts), parts[1].ids], 1
    )
    seeing = [part.vision for part in parts if part.vision]
    vision = {name: torch.cat([v[name] for v in seeing], 1) for name in seeing[0] if name != "cross_attention_mask"}
    sees = torch.zeros(1, ids.shape[1], 3, 4, device=ids.device)
    sees[:, : lengths[0], :1] = seeing[0]["cross_attention_mask"]
    sees[:, sum(lengths[:2]) : sum(lengths), 1:] = seeing[1]["cross_attention_mask"]
    vision["cross_attention_mask"] = sees
    packing = {"cu_seqlens": torch.tensor([0, *np.cumsum(lengths).tolist()])}
    if by_positions:
        packing = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    packing = {name: tensor.to(ids.device) for name, tensor in packing.items()}
    with torch.no_grad():
        logits = model(ids, **packing, **vision).logits
    for got, part in zip(logits.split([*lengths, ids.shape[1] - sum(lengths)], 1), parts, strict=False):
        assert_close(got, model(part.ids, **part.vision).logits, "logits")

    vocab_size = model.config.vocab_size
    labels = ids.masked_fill(ids >= vocab_size, -100)
    labels[:, sum(lengths) :] = -100
    packed = all_gradients(model, input_ids=ids, labels=labels, num_items_in_batch=20, **packing, **vision)
    alone: dict[str, Tensor] = {}
    for part in parts:
        of_text = part.ids.masked_fill(part.ids >= vocab_size, -100)
        found = all_gradients(model, input_ids=part.ids, labels=of_text, num_items_in_batch=20, **part.vision)
        alone = {name: alone.get(name, 0) + found.get(name, 0) for name in {**alone, **found}}
    assert packed.keys() == alone.keys()
    for name, gradient in packed.items():
        assert_close(gradient, alone[name], f"gradient of {name}")

    del vision["cross_attention_mask"]
    with pytest.raises(ValueError, match="cross_attention_mask: got None for packed sequences"):
        model(ids, **packing, **vision)
    assert model(labels.clamp(min=0), **packing).logits.isfinite().all()


# Training


def test_gradient_checkpointing(model: Mllama) -> None:
    p = prompt_for(model, IMAGES)
    inputs = {"input_ids": p.ids, "labels": labels_for(p, model.config.vocab_size), **p.vision}
    calls: list[nn.Module] = []
    tower = model.vision_model
    blocks = [*tower.transformer.layers, *tower.global_transformer.layers, *model.model.layers]
    hooks = [block.register_forward_pre_hook(lambda block, _: calls.append(block)) for block in blocks]
    found, counts = [], []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        calls.clear()
        found.append(all_gradients(model, **inputs))
        counts.append({calls.count(block) for block in blocks})
    model.gradient_checkpointing_disable()
    for hook in hooks:
        hook.remove()
    assert counts == [{1}, {2}]
    assert found[0].keys() == found[1].keys() == dict(model.named_parameters()).keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_frozen_tower(model: Mllama) -> None:
    p = prompt_for(model, IMAGES)
    inputs = {"input_ids": p.ids, "labels": labels_for(p, model.config.vocab_size), **p.vision}
    whole = all_gradients(model, **inputs)
    model.vision_model.requires_grad_(False)
    kept: list[bool] = []
    hook = model.vision_model.register_forward_hook(lambda _, __, features: kept.append(features.requires_grad))
    try:
        got = all_gradients(model, **inputs)
    finally:
        model.vision_model.requires_grad_(True)
        hook.remove()
    assert kept == [False]
    assert got.keys() == {name for name in whole if not name.startswith("vision_model.")}
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, whole[name])


def small() -> Mllama:
    """A new model with one layer of each kind."""
    vision = MllamaVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_global_layers=1, attention_heads=2, intermediate_size=64,
        vision_output_dim=64, image_size=16, patch_size=4, intermediate_layers_indices=[0],
    )  # fmt: skip
    return Mllama(
        MllamaConfig(
            vocab_size=101, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, cross_attention_layers=[1], vision_config=vision, initializer_range=0.3,
            image_token_index=101, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


@pytest.mark.thorough
def test_compiled(device: str) -> None:
    """Full graph, also with recomputation of blocks."""
    model = small().to(device)
    for name, parameter in model.named_parameters():
        nn.init.ones_(parameter) if name.endswith("gate") else None
    p = prompt_for(model, BATCH)
    inputs = {"input_ids": p.ids, "attention_mask": p.mask, "labels": labels_for(p, 101), **p.vision}
    expected = all_gradients(model, **inputs)
    torch._dynamo.reset()
    model.gradient_checkpointing_enable()
    torch.compile(model, backend="eager", fullgraph=True)(**inputs).loss.backward()
    got = gradients(model)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


def test_new_model(tmp_path: Path) -> None:
    """Initializes all weights, tower included, with image gates of 0, and saves in the format of the hub."""
    model = small()
    for name, parameter in model.named_parameters():
        if name.startswith("vision_model.global_transformer.") and name.endswith("_gate"):
            assert parameter.any(), name
        elif name.endswith(("bias", "gate")):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert 0.2 < parameter.std().item() < 0.4, name
    model.save_pretrained(tmp_path)
    assert Mllama.from_pretrained(tmp_path).config == model.config
    theirs, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    names = {"language_model.lm_head.weight", "language_model.model.layers.1.cross_attn_mlp_gate"}
    assert names <= stored_tensors(tmp_path).keys()
    p = prompt_for(model, IMAGES)
    assert_close(model(p.ids, **p.vision).logits, theirs(input_ids=p.ids, **p.vision).logits, "logits")
    blank = p.vision | {"pixel_values": torch.zeros_like(p.vision["pixel_values"])}
    assert torch.equal(model(p.ids, **p.vision).logits, model(p.ids, **blank).logits)


# From an image file to an answer


def test_image_to_answer(tmp_path: Path, device: str) -> None:
    config = {**MLLAMA, "text_config": {**TEXT, "vocab_size": 256 + 4}}  # the image token of the processor has no logit
    config |= {"vision_config": {**VISION, "image_size": 56, "patch_size": 14}, "image_token_index": 256 + 4}
    Tiny("whole", config, tensors=CHECKPOINTS[0].tensors).write(tmp_path)
    written = (tmp_path / "config.json").read_text()
    processor_files(tmp_path, "mllama")
    (tmp_path / "config.json").write_text(written)
    Image.fromarray(np.arange(40 * 90 * 3, dtype=np.uint8).reshape(40, 90, 3)).save(tmp_path / "cat.png")

    process, model = Processor.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path, device=device)
    pictured = user({"type": "image", "path": str(tmp_path / "cat.png")}, text("What is it?"))
    inputs = process([pictured, user(text("Hello"))], add_generation_prompt=True)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path).to(device)
    expected = theirs.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    got = model.generate(**inputs, max_new_tokens=8, eos_token_id=[])
    assert torch.equal(got, expected)
    blank = {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}
    assert not torch.equal(model.generate(**blank, max_new_tokens=8, eos_token_id=[]), got)


# Refusals


def test_inconsistent_inputs(model: Mllama) -> None:
    p = prompt_for(model, BATCH)
    vision = p.vision
    tiles, mask = vision["aspect_ratio_mask"], vision["cross_attention_mask"]
    states = torch.zeros(3, 12 * model.vision_model.tile_length, model.config.hidden_size, device=model.device)
    alone = {"pixel_values": vision["pixel_values"], "aspect_ratio_ids": vision["aspect_ratio_ids"]}
    for wrong, message in (
        ({**vision, "cross_attention_states": states}, "need aspect_ratio_ids and aspect_ratio_mask, and no"),
        (alone, "pixel_values need aspect_ratio_ids and aspect_ratio_mask"),
        (
            {**vision, "aspect_ratio_ids": vision["aspect_ratio_ids"][:, :1]},
            r"\(3, 1\).*; expected \[\(3, 3, 4, 3, 12, 12\), \(3, 3\), \(3, 3, 4\)\]",
        ),
        ({**vision, "pixel_values": vision["pixel_values"][..., :8]}, "pixel_values, aspect_ratio_ids and"),
        (
            {**vision, "aspect_ratio_mask": tiles.flip(2)},
            "contradicts aspect_ratio_ids|expected rows of at least one 1",
        ),
        ({**vision, "aspect_ratio_mask": tiles * 0}, "contradicts aspect_ratio_ids|expected rows of at least one 1"),
        ({**vision, "cross_attention_mask": mask[:, :, :2]}, r"\(3, \d+, 2, 4\); expected .* with 12 tiles in all"),
        ({**vision, "cross_attention_mask": mask[0]}, "cross_attention_mask has shape"),
        ({**vision, "cross_attention_mask": torch.cat([mask, mask], 1)}, "cross_attention_mask has shape"),
        ({"cross_attention_mask": mask}, "with 0 tiles in all"),
    ):
        ids = p.ids if "pixel_values" in wrong else p.ids.clamp(max=100)
        with pytest.raises(ValueError, match=message):
            model(ids, p.mask, **wrong)


def test_inconsistent_values(model: Mllama) -> None:
    """Errors in the values of inputs, which `generate` also checks on a GPU."""
    p = prompt_for(model, BATCH)
    vision, token = p.vision, model.config.image_token_index
    model.check_inputs(p.ids, p.mask == 1, **vision)
    arrangement, tiles, sees = (
        vision[name] for name in ("aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask")
    )
    image_too_many = p.ids.index_fill(1, torch.tensor([-1], device=p.ids.device), token)
    for ids, wrong, message in (
        (p.ids, {"aspect_ratio_ids": arrangement + 90}, r"unknown tile arrangement.* 1 to 8, or 0 for no image"),
        (p.ids, {"aspect_ratio_ids": arrangement - 1}, "aspect_ratio_ids: unknown tile arrangement"),
        (p.ids, {"aspect_ratio_ids": (arrangement > 0).long()}, "aspect_ratio_mask: contradicts aspect_ratio_ids"),
        (p.ids, {"aspect_ratio_mask": torch.ones_like(tiles)}, "aspect_ratio_mask: contradicts aspect_ratio_ids"),
        (
            p.ids,
            {"cross_attention_mask": sees | (p.mask[..., None, None] == 1)},
            "1 for tiles that an image",
        ),
        (p.ids, {"cross_attention_mask": sees.flip(1)}, "cross_attention_mask: 1 for "),
        (p.ids.masked_fill(p.ids == token, 5), {}, "1 for tokens before the image token"),
        (image_too_many, {}, r"more image tokens than images; got \[2, 1, 4\]; expected at most \[1, 0, 3\]"),
        (p.ids, {"pixel_values": None, "aspect_ratio_ids": None}, "expected pixel_values as well"),
        (p.ids + 10, {}, "token ids outside the vocabulary"),
        (p.ids, {"images": []}, "images: not an .*input of Mllama; expected pixel_values, aspect_ratio_ids, "),
    ):
        assert isinstance(wrong, dict)
        with pytest.raises(LigerzooError, match=message):
            model.generate(ids, p.mask, max_new_tokens=1, **{**vision, **wrong})
        if model.device.type == "cpu":
            with pytest.raises(LigerzooError, match=message):
                model(ids, p.mask, **{**vision, **wrong})


@pytest.mark.parametrize(
    "part, changes, named",
    [
        (
            "text_config",
            {"cross_attention_layers": [0, 1, 2, 3, 9]},
            "cross_attention_layers: .* at least one layer without",
        ),
        ("text_config", {"cross_attention_layers": [-1]}, "cross_attention_layers"),
        ("text_config", {"cross_attention_layers": "all"}, "cross_attention_layers"),
        ("text_config", {"hidden_act": "gelu"}, "hidden_act"),
        ("vision_config", {"hidden_act": "quick_gelu"}, "hidden_act"),
        ("vision_config", {"intermediate_layers_indices": [0, 3]}, "intermediate_layers_indices: .* from 0 to 2"),
        ("vision_config", {"intermediate_layers_indices": [True, 2]}, "intermediate_layers_indices"),
        ("vision_config", {"vision_output_dim": 96}, "vision_config, vision_output_dim: .* got 96; expected 72"),
        ("vision_config", {"attention_heads": 5}, "vision_config, hidden_size: .* a multiple of attention_heads, 5"),
        ("vision_config", {"patch_size": 5}, "vision_config, image_size: .* a multiple of patch_size, 5"),
        ("vision_config", {"image_size": [12, 12]}, "image_size"),
        ("vision_config", {"supported_aspect_ratios": [[1, 1], [1, 5]]}, "supported_aspect_ratios: .* at most 4 tiles"),
        ("vision_config", {"supported_aspect_ratios": [1, 2]}, "supported_aspect_ratios"),
        ("vision_config", {"max_num_tiles": 2}, "supported_aspect_ratios"),
        ("vision_config", {"num_global_layers": 0}, "num_global_layers"),
        ("vision_config", "large", "vision_config: not an object"),
        ("text_config", 5, "text_config: not an object"),
    ],
)
def test_invalid_configs(part: str, changes: Any, named: str) -> None:
    changed = {**MLLAMA[part], **changes} if isinstance(changes, dict) else changes
    with pytest.raises(ConfigError, match=named):
        ARCHITECTURE.config_from_hf({**MLLAMA, part: changed})


def test_head_cannot_be_tied() -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        MllamaConfig(tie_word_embeddings=True)


@torch.no_grad()
def test_tied_head_in_config_json_is_ignored(tmp_path: Path) -> None:
    row = mllama("tied in name", {"tie_word_embeddings": True}, top={"tie_word_embeddings": True})
    row.write(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
    ours, ids = AutoModel.from_pretrained(tmp_path, device="cpu"), torch.randint(3, 89, (1, 40))
    assert_close(ours(ids).logits, theirs(input_ids=ids).logits, "logits")


def test_alternative_names_of_entries() -> None:
    vision = {name: value for name, value in VISION.items() if name != "attention_heads"}
    raw = {**MLLAMA, "vision_config": {**vision, "num_attention_heads": 4}, "image_token_id": 7}
    del raw["image_token_index"]
    config = ARCHITECTURE.config_from_hf(raw)
    assert (config.vision_config.attention_heads, config.image_token_index) == (4, 7)
    null = {**raw, "vision_config": {**raw["vision_config"], "attention_heads": None}, "image_token_index": None}
    assert ARCHITECTURE.config_from_hf(null) == config
    both = {**raw, "vision_config": {**raw["vision_config"], "attention_heads": 2}, "image_token_index": 5}
    assert ARCHITECTURE.config_from_hf(both) == config  # as transformers reads them


def test_more_blocks_than_tensors(tmp_path: Path) -> None:
    CHECKPOINTS[0].write(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["vision_config"]["num_global_layers"] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="fewer tensors than layers"):
        AutoModel.from_pretrained(tmp_path)


def test_info(tmp_path: Path) -> None:
    CHECKPOINTS[0].write(tmp_path)
    page = describe(tmp_path)
    for expected in ("Mllama (MllamaForConditionalGeneration)", "vision tower", "projector", "2 of 4 layers attend"):
        assert expected in page

"""Models of images of any size against transformers: every tiny checkpoint on text, images, videos, padded batches."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from ligerzoo import AutoModel
from ligerzoo.convert import architecture_of
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError
from ligerzoo.info import describe
from ligerzoo.layers import Context, GatedDeltaNet, GateProjectionAttention
from ligerzoo.models import Glm4v, MuseGlimmer, Qwen2_5VL, Qwen3_5, Qwen3VL
from ligerzoo.models.vision_lm import VisionLM
from tests.models import (
    tiny_glm4v,
    tiny_glm4v_moe,
    tiny_muse_glimmer,
    tiny_qwen2_5_vl,
    tiny_qwen2_vl,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_vl,
    tiny_qwen3_vl_moe,
)
from tests.models.comparing import (
    all_gradients,
    assert_close,
    assert_errors_as_small,
    assert_same_bf16,
    assert_same_vision_training,
    gradients,
    load_both,
    raw_bytes,
    rounding_as_eager,
    stored_tensors,
)
from tests.models.prompts import IMAGE, PROMPTS, VIDEO, Prompt, Row, apart, image, prompt, video
from tests.models.tiny import Tiny, random_model

logging.disable_progress_bar()
logging.set_verbosity_error()

DENSE = (tiny_qwen2_vl, tiny_qwen2_5_vl, tiny_qwen3_vl, tiny_qwen3_5, tiny_muse_glimmer, tiny_glm4v)
FAMILIES = (*DENSE, tiny_qwen3_vl_moe, tiny_qwen3_5_moe, tiny_glm4v_moe)
ON_THE_HUB = [family.CHECKPOINTS[0] for family in DENSE]  # the MoEs differ in the MLPs only
SECTIONED = [*ON_THE_HUB[:4], ON_THE_HUB[5]]  # with positions on three axes
# Qwen3.5 has the tower and the positions of Qwen3-VL.
ONCE_PER_TOWER = [*ON_THE_HUB[:3], pytest.param(ON_THE_HUB[3], marks=pytest.mark.thorough)]
THOROUGH = [pytest.param(row, marks=pytest.mark.thorough) for row in (ON_THE_HUB[0], *ON_THE_HUB[4:])]
LATER_ON_THE_HUB = [*THOROUGH, *ONCE_PER_TOWER[1:]]
FIRST_ON_THE_HUB = [ON_THE_HUB[0], *(pytest.param(row, marks=pytest.mark.thorough) for row in ON_THE_HUB[1:])]

every_prompt = pytest.mark.parametrize("rows", PROMPTS.values(), ids=[name.replace(" ", "-") for name in PROMPTS])


@pytest.fixture(scope="module", params=[row for family in FAMILIES for row in family.CHECKPOINTS], ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


@pytest.fixture(scope="module")
def models(directory: Path, device: str) -> tuple[VisionLM, PreTrainedModel]:
    return load_both(directory, torch.float32, device)


@pytest.fixture(scope="module")
def bf16_models(directory: Path, device: str) -> tuple[VisionLM, PreTrainedModel]:
    return load_both(directory, torch.bfloat16, device)


@pytest.fixture(scope="module", params=ON_THE_HUB, ids=lambda row: row.config["model_type"])
def hub_row(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


@pytest.fixture(scope="module")
def model(hub_row: Tiny, tmp_path_factory: pytest.TempPathFactory, device: str) -> Any:
    path = tmp_path_factory.mktemp("checkpoint")
    hub_row.write(path)
    return AutoModel.from_pretrained(path, dtype=torch.float32, device=device)


@pytest.fixture(scope="module")
def reference(hub_row: Tiny) -> Any:
    return random_model(hub_row.config).model


def prompt_for(model: VisionLM, rows: list[Row], side: str = "left") -> Prompt:
    cpu_prompt = prompt(rows, vars(model.config.vision_config), side)
    vision = {name: tensor.to(model.device) for name, tensor in cpu_prompt.vision.items()}
    return Prompt(cpu_prompt.ids.to(model.device), cpu_prompt.mask.to(model.device), vision)


def types_for(theirs: PreTrainedModel, p: Prompt) -> dict[str, Tensor]:
    """Returns the input from which transformers' models with positions on three axes compute these."""
    return {"mm_token_type_ids": p.types} if p.vision and hasattr(theirs.model, "get_rope_index") else {}


def theirs_on(theirs: PreTrainedModel, p: Prompt, **options: Any) -> Any:
    types = types_for(theirs, p)
    if getattr(theirs.config.get_text_config(), "output_router_logits", False):
        options = {"output_router_logits": True, **options}  # transformers 5.17 does not read the config's entry
    return theirs(input_ids=p.ids, attention_mask=p.mask, **p.vision, **types, **options)


def labels_for(p: Prompt) -> Tensor:
    """Labels of text tokens, except the first, which padding would predict."""
    has_label = (
        (p.mask == 1) & (p.mask.roll(1, 1) == 1) & (p.types == 0) & (torch.rand(p.ids.shape) < 0.8).to(p.ids.device)
    )
    return p.ids.masked_fill(~has_label, -100)


@pytest.mark.every_layer
@every_prompt
def test_logits_loss_and_gradients(models: tuple[VisionLM, PreTrainedModel], rows: list[Row]) -> None:
    assert_same_training(*models, rows)


@pytest.mark.every_checkpoint
def test_logits_loss_and_gradients_of_every_checkpoint(models: tuple[VisionLM, PreTrainedModel]) -> None:
    assert_same_training(*models, PROMPTS["a padded batch"])


def assert_same_training(ours: VisionLM, theirs: PreTrainedModel, rows: list[Row]) -> None:
    p = prompt_for(ours, rows)
    labels = labels_for(p)
    expected = theirs_on(theirs, p, labels=labels)
    assert_same_vision_training(ours, theirs, (p.ids, p.mask), p.vision, labels, expected)


@pytest.mark.every_layer
@torch.no_grad()
def test_padding_on_the_right(models: tuple[VisionLM, PreTrainedModel]) -> None:
    ours, theirs = models
    if getattr(ours.config, "sliding_window", None):
        return  # may hide text from padding
    p = prompt_for(ours, PROMPTS["a padded batch"], "right")
    assert_close(ours(p.ids, p.mask, **p.vision).logits, theirs_on(theirs, p).logits, "logits")


@pytest.mark.every_layer
@pytest.mark.long
@every_prompt
@torch.no_grad()
def test_bf16_logits(bf16_models: tuple[VisionLM, PreTrainedModel], device: str, rows: list[Row]) -> None:
    ours, theirs = bf16_models
    exact = copy.deepcopy(theirs).float()
    # transformers rounds convolutions and gates, and scaled queries, more often.
    rounds_otherwise = any(isinstance(m, GatedDeltaNet | GateProjectionAttention) for m in ours.modules())

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        p = prompt_for(ours, rows)
        got, expected = (x[p.mask == 1] for x in (ours(p.ids, p.mask, **p.vision).logits, theirs_on(theirs, p).logits))
        assert got.dtype == expected.dtype == torch.bfloat16
        return got, expected, theirs_on(exact, p).logits[p.mask == 1]

    if device == "cpu" and not rounds_otherwise:
        with rounding_as_eager():
            assert_same_bf16(*draw()[:2])
    assert_errors_as_small(draw, device, draws=4)


@pytest.mark.every_layer
@pytest.mark.parametrize("name", ["a long video", "a padded batch"])
@torch.no_grad()
def test_greedy_generation(models: tuple[VisionLM, PreTrainedModel], name: str) -> None:
    ours, theirs = models
    p = prompt_for(ours, PROMPTS[name])
    got = ours.generate(p.ids, p.mask, max_new_tokens=8, eos_token_id=[], **p.vision)
    types = types_for(theirs, p)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    if hasattr(ours.config, "output_router_logits"):
        options["output_router_logits"] = False  # transformers cannot compute the loss of new tokens with padding
    assert torch.equal(got, theirs.generate(p.ids, attention_mask=p.mask, **p.vision, **types, **options))


def test_saving_reproduces_the_files(tiny: Tiny, directory: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(directory)
    assert type(model) is architecture_of(tiny.config["model_type"]).model_class
    theirs = AutoModelForImageTextToText.from_pretrained(directory)
    assert model.dtype == theirs.dtype
    original, config = stored_tensors(directory), json.loads((directory / "config.json").read_text())
    size = sum(tensor.nbytes for tensor in original.values())
    model.save_pretrained(tmp_path / "saved", max_shard_size=size // tiny.shards + 1)
    assert raw_bytes(stored_tensors(tmp_path / "saved")) == raw_bytes(original)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config | tiny.corrected

    again, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()), report
    p = prompt_for(model, PROMPTS["a padded batch"])
    assert raw_bytes(again.state_dict()) == raw_bytes(theirs.state_dict())
    # Not equal: products on a CPU depend on the alignment of the weights, which are views of the files.
    assert_close(theirs_on(again.eval(), p).logits, theirs_on(theirs.eval(), p).logits, "logits")


# Positions


def rows_of(longest: int = 6) -> st.SearchStrategy[list[Row]]:
    """Texts with images and videos, never adjacent, since transformers would merge them."""
    sizes = st.integers(1, 3)
    vision = st.one_of(st.builds(image, sizes, sizes), st.builds(video, st.integers(1, 5), sizes, sizes))
    pieces = st.lists(st.tuples(vision, st.integers(1, longest)), min_size=0, max_size=3)

    def row(first: int, rest: list[Any]) -> Row:
        pieces = [first, *(piece for pair in rest for piece in pair)]
        return [piece for piece in pieces if piece != 0] or [1]

    return st.lists(st.builds(row, st.integers(0, longest), pieces), min_size=1, max_size=3)


def positions(model: VisionLM, p: Prompt) -> tuple[Tensor, Tensor]:
    """Returns the positions on three axes, and the offset of future positions."""
    context = Context(p.ids, p.mask, cache=model.new_cache())
    with torch.no_grad():
        model.embed(p.ids, context, **p.vision)
    assert context.cache is not None
    offset = context.cache.position_offset
    assert offset is not None
    return context.position_ids, offset


def position_inputs(p: Prompt) -> dict[str, Any]:
    """Returns the inputs that determine the positions."""
    return {name: value for name, value in p.vision.items() if "pixel" not in name}


@pytest.mark.parametrize(
    "hub_row", [*ONCE_PER_TOWER, ON_THE_HUB[5]], indirect=True, ids=lambda row: row.config["model_type"]
)
@settings(max_examples=60, deadline=None)
@given(rows=rows_of(), side=st.sampled_from(["left", "right"]))
def test_positions(model: VisionLM, reference: Any, rows: list[Row], side: str) -> None:
    p = prompt_for(model, rows, side)
    if not p.vision:
        return
    expected, _ = reference.get_rope_index(p.ids, p.types, attention_mask=p.mask, **position_inputs(p))
    got, got_offset = positions(model, p)
    assert torch.equal(got[:, p.mask == 1], expected[:, p.mask == 1])
    for row, mask, offset in zip(expected.unbind(1), p.mask == 1, got_offset[:, 0].tolist(), strict=True):
        assert row[:, mask][:, -1].tolist() == 3 * [offset + int(mask.sum()) - 1]  # the text continues after it


@pytest.mark.parametrize("hub_row", ONCE_PER_TOWER, indirect=True, ids=lambda row: row.config["model_type"])
@settings(max_examples=60, deadline=None)
@given(rows=rows_of())
def test_positions_as_in_transformers_4(model: VisionLM, rows: list[Row]) -> None:
    """Positions after an image or video continue from the largest one before."""
    p = prompt_for(model, rows)
    if not p.vision:
        return
    if "second_per_grid_ts" in p.vision:
        p.vision["second_per_grid_ts"] *= torch.rand(())
    speed = getattr(model.config.vision_config, "tokens_per_second", 1)
    intervals = (speed * seconds.item() for seconds in p.vision.get("second_per_grid_ts", []))
    expected: list[list[tuple[int, int, int]]] = []
    for row in rows:
        row_positions: list[tuple[int, int, int]] = []
        for piece in apart(row, vars(model.config.vision_config)):
            start = max(map(max, row_positions), default=-1) + 1
            if isinstance(piece, int):
                row_positions += [(i, i, i) for i in range(start, start + piece)]
            else:
                kind, (t, h, w) = piece
                interval = next(intervals, 1) if kind == VIDEO else 1
                times = [start + int(i * interval) for i in range(t)]
                row_positions += [(time, start + j, start + k) for time in times for j in range(h) for k in range(w)]
        expected.append(row_positions)
    model.frames_advance = True
    try:
        got, offset = positions(model, p)
    finally:
        del model.frames_advance
    for i, row_positions in enumerate(expected):
        assert got[:, i, p.mask[i] == 1].T.tolist() == [list(position) for position in row_positions]
        assert offset[i].item() == max(map(max, row_positions)) + 1 - len(row_positions)


@pytest.mark.parametrize("hub_row", SECTIONED, indirect=True, ids=lambda row: row.config["model_type"])
@torch.no_grad()
def test_adjacent_images(model: VisionLM) -> None:
    """Grids separate them."""
    p = prompt_for(model, [[2, image(2, 1), image(1, 2), 1]])
    got, _ = positions(model, p)
    assert got[:, 0].T.tolist() == [[0] * 3, [1] * 3, [2] * 3, [2, 3, 2], [4] * 3, [4, 4, 5], [6] * 3]


@pytest.mark.parametrize("hub_row", SECTIONED, indirect=True, ids=lambda row: row.config["model_type"])
@torch.no_grad()
def test_given_position_ids(model: VisionLM) -> None:
    p = prompt_for(model, PROMPTS["a padded batch"])
    expected = model(p.ids, p.mask, **p.vision).logits
    own, _ = positions(model, p)
    assert torch.equal(model(p.ids, p.mask, own, **p.vision).logits, expected)
    plain = model(
        p.ids, p.mask, p.mask.cumsum(1) - 1, **p.vision
    ).logits  # token positions, which the model extends to three axes
    assert torch.equal(plain, expected)
    with pytest.raises(ValueError, match=r"position_ids has shape \(4, .*expected \(B, T\) or \(3, B, T\)"):
        model(p.ids, p.mask, own[[0, 0, 1, 2]], **p.vision)


@torch.no_grad()
def test_under_another_default_device(model: VisionLM) -> None:
    p = prompt_for(model, PROMPTS["a padded batch"])
    expected = model(p.ids, p.mask, **p.vision).logits
    with torch.device("meta"):
        assert torch.equal(model(p.ids, p.mask, **p.vision).logits, expected)


# Caches and packed rows


@torch.no_grad()
def test_conversation_with_a_cache(model: VisionLM) -> None:
    """Chunks give the same as one forward.

    The first ends with a video of more frames than rows and columns, a later one has a new image, and one row has
    padding and no image.
    """
    rows: list[list[Row]] = [
        [[4, image(2, 3), 3, video(7, 1, 1)], [9]],
        [[3], [3]],
        [[2, image(3, 1), 4], [1, image(2, 2), 4]],
    ]
    chunks = [prompt_for(model, chunk) for chunk in rows]
    names = {name for chunk in chunks for name in chunk.vision}
    whole = Prompt(
        torch.cat([chunk.ids for chunk in chunks], 1),
        torch.cat([chunk.mask for chunk in chunks], 1),
        {name: torch.cat([chunk.vision[name] for chunk in chunks if name in chunk.vision]) for name in names},
    )
    in_order = model(whole.ids, whole.mask, **whole.vision).logits
    for cache in (model.new_cache(), model.new_cache(capacity=64)):
        end, pieces = 0, []
        for chunk in chunks:
            end += chunk.ids.shape[1]
            pieces.append(model(chunk.ids, whole.mask[:, :end], past_key_values=cache, **chunk.vision).logits)
        assert_close(torch.cat(pieces, 1)[whole.mask == 1], in_order[whole.mask == 1], "logits from a cache")


@torch.no_grad()
def test_generation_with_and_without_a_cache(model: VisionLM) -> None:
    p = prompt_for(model, PROMPTS["a padded batch"])
    options: dict[str, Any] = {"max_new_tokens": 6, "bad_words_ids": [[token] for token in model.placeholders]}
    got = [model.generate(p.ids, p.mask, use_cache=use, **options, **p.vision) for use in (True, False)]
    assert torch.equal(*got)
    alone = prompt_for(model, [[22]])
    ids = p.ids[1:2, p.mask[1] == 1]
    assert alone.ids.shape == ids.shape
    assert torch.equal(model.generate(ids, **options)[0], got[0][1, p.mask[1].argmax() :])


@pytest.mark.parametrize("by_positions", [False, True])
def test_packed(model: VisionLM, by_positions: bool) -> None:
    """[A | B] gives the same logits, loss and gradients as A and B alone, each with an image."""
    row_a, row_b = [3, image(2, 3), 8], [image(3, 1), 4, video(3, 1, 2), 7]
    both = prompt_for(model, [[*row_a, *row_b]])
    lengths = [3 + 6 + 8, both.ids.shape[1] - 17]
    pixels, grid = both.vision["pixel_values"], both.vision["image_grid_thw"]
    cut = int(grid[0].prod())
    a = {"input_ids": both.ids[:, : lengths[0]], "pixel_values": pixels[:cut], "image_grid_thw": grid[:1]}
    b = {
        **both.vision,
        "input_ids": both.ids[:, lengths[0] :],
        "pixel_values": pixels[cut:],
        "image_grid_thw": grid[1:],
    }
    packing: dict[str, Tensor] = {"cu_seqlens": torch.tensor([0, lengths[0], sum(lengths)])}
    if by_positions:
        packing = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    packing = {name: tensor.to(model.device) for name, tensor in packing.items()}
    with torch.no_grad():
        context = Context(both.ids, **packing)
        model.embed(both.ids, context, **both.vision)
        assert (context.position_ids[..., 0, [0, lengths[0]]] == 0).all()
        got = model(both.ids, **packing, **both.vision).logits.split(lengths, 1)
        for part, alone in zip(got, (a, b), strict=True):
            assert_close(part, model(**alone).logits, "logits")

    packed = all_gradients(model, input_ids=both.ids, labels=both.ids, **packing, **both.vision)
    items = sum(lengths) - 2
    separate = [all_gradients(model, **x, labels=x["input_ids"], num_items_in_batch=items) for x in (a, b)]
    for name, gradient in packed.items():
        assert_close(gradient, separate[0][name] + separate[1][name], f"gradient of {name}")


# Training


def test_gradient_checkpointing(model: VisionLM) -> None:
    p = prompt_for(model, PROMPTS["a padded batch"])
    inputs = {"input_ids": p.ids, "labels": labels_for(p), **p.vision}
    calls: list[nn.Module] = []
    blocks = [*model.tower.blocks, *model.model.layers]
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
    once = [2] * len(model.tower.blocks) + [1] * len(model.model.layers)  # the tower runs for images and for videos
    assert counts == [once, [2 * count for count in once]]
    assert found[0].keys() == found[1].keys() == dict(model.named_parameters()).keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_frozen_tower(model: VisionLM) -> None:
    p = prompt_for(model, [[5, image(2, 3), 20]])
    inputs = {"input_ids": p.ids, "labels": labels_for(p), **p.vision}
    whole = all_gradients(model, **inputs)
    model.tower.requires_grad_(False)
    try:
        assert not model.tower(p.vision["pixel_values"], p.vision["image_grid_thw"]).requires_grad
        got = all_gradients(model, **inputs)
    finally:
        model.tower.requires_grad_(True)
    assert got.keys() == {name for name in whole if not name.startswith(f"{model.tower_name}.")}
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, whole[name])


@pytest.mark.parametrize("hub_row", LATER_ON_THE_HUB, indirect=True, ids=lambda row: row.config["model_type"])
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")  # used by Inductor
@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param("aot_eager", marks=pytest.mark.thorough),
        pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow]),
    ],
)
def test_compiled(model: VisionLM, backend: str) -> None:
    """Full graph: images of one size, then of others; after Qwen2-VL, a padded batch with videos."""
    batches = [PROMPTS["images of one size"], [[3, image(1, 2), 4, image(3, 2), 2]]]
    if isinstance(model, Qwen2_5VL | Qwen3VL | Qwen3_5 | MuseGlimmer | Glm4v):
        batches = [PROMPTS["a padded batch"]]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for rows in batches:
        p = prompt_for(model, rows)
        inputs = {"input_ids": p.ids, "attention_mask": p.mask, "labels": labels_for(p), **p.vision}
        expected = all_gradients(model, **inputs)
        compiled(**inputs).loss.backward()
        got = gradients(model)
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=2e-5 * gradient.abs().max().item())
        model.zero_grad()


@pytest.mark.parametrize("hub_row", FIRST_ON_THE_HUB, indirect=True, ids=lambda row: row.config["model_type"])
@torch.no_grad()
def test_inconsistent_inputs_give_nan_when_compiled(model: VisionLM) -> None:
    """A compiled graph cannot raise an error."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    p = prompt_for(model, [[5, image(2, 3), 20]])
    assert not compiled(p.ids, **p.vision).logits.isnan().any()
    first = int((p.ids[0] == model.config.image_token_id).nonzero()[0])
    one_less, apart = p.ids.clone(), p.ids.clone()
    one_less[0, first] = 7
    apart[0, [0, first]] = apart[0, [first, 0]]
    grid = p.vision["image_grid_thw"]
    for ids, wrong in (
        (one_less, {}),
        (apart, {}),
        (p.ids, {"image_grid_thw": grid + 2}),
        (p.ids, {"image_grid_thw": -grid}),
    ):
        assert compiled(ids, **{**p.vision, **wrong}).logits[0, -1].isnan().all()


def test_new_model(hub_row: Tiny, tmp_path: Path) -> None:
    """Initializes all weights, tower included, and saves in the format of the hub."""
    architecture = architecture_of(hub_row.config["model_type"])
    config = dataclasses.replace(architecture.config_from_hf(hub_row.config), initializer_range=0.3)
    model: Any = architecture.model_class(config)
    for name, parameter in model.named_parameters():
        std = parameter.std().item()
        if name.endswith("A_log"):
            assert (parameter.exp() <= 16).all(), name
        elif name.endswith("bias") and not name.endswith("dt_bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 1:
            offset = getattr(model.get_submodule(name.rpartition(".")[0]), "weight_offset", 0.0)
            assert (parameter + offset == 1).all(), name
        else:
            assert 0.2 < std < 0.4, name
    model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config == config
    theirs, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    names = "visual.blocks.0.attn.qkv.weight", "vision_tower.layers.0.attn.q_proj.weight"
    assert any(name.endswith(names) for name in stored_tensors(tmp_path))
    ids = torch.arange(9)[None]
    assert_close(model(ids).logits, theirs(ids).logits, "logits")


# Refusals


def test_inconsistent_inputs(model: VisionLM) -> None:
    p = prompt_for(model, [[5, image(2, 3), 20]])
    pixels, grid = p.vision["pixel_values"], p.vision["image_grid_thw"]
    with pytest.raises(ValueError, match="got 6 embeddings of images or videos; expected 5, the number of image"):
        model(p.ids.index_fill(1, torch.tensor([5], device=p.ids.device), 7), **p.vision)
    with pytest.raises(ValueError, match=r"got 23 patches with grids \[\[1, 4, 6\]\]; expected the sum of t \* h \* w"):
        model(p.ids, pixel_values=pixels[:-1], image_grid_thw=grid)
    for sizes in ([0, 2, 2], [1, 0, 0], [1, -4, -6], [1, 2**33, 2**33]):
        with pytest.raises(ValueError, match="got 24 patches with grids"):
            model(p.ids, pixel_values=pixels, image_grid_thw=torch.tensor([sizes, [1, 4, 6]]))
    with pytest.raises(ValueError, match=r"grid_thw has shape \(3,\); expected \(images, 3\)"):
        model(p.ids, pixel_values=pixels, image_grid_thw=grid[0])
    with pytest.raises(ValueError, match="multiples of 2"):
        model(p.ids, pixel_values=pixels, image_grid_thw=torch.tensor([[1, 3, 8]]))
    with pytest.raises(ValueError, match=r"need patches \(pixel_values\*\), their grids"):
        model(p.ids, pixel_values=pixels)
    first = int((p.ids[0] == model.config.image_token_id).nonzero()[0])
    between = torch.cat([p.ids[:, : first + 2], p.ids[:, :1], p.ids[:, first + 2 :]], 1)
    for ids in (between, p.ids[:, : 2 * first + 6].view(2, -1)):  # split within a row, and across two rows
        with pytest.raises(ValueError, match=r"not adjacent; expected runs of \[6\] tokens"):
            model(ids, pixel_values=pixels, image_grid_thw=grid)
    model(p.ids, **p.vision, mm_token_type_ids=p.types)
    with pytest.raises(ValueError, match="and input_ids; got only some of them"):
        model(inputs_embeds=model.model.embed_tokens(p.ids), **p.vision)


@torch.no_grad()
def test_placeholders_without_their_input(model: VisionLM) -> None:
    """Refused in a prompt, but read like any token if generation sampled it."""
    for piece, name in ((image(2, 3), "pixel_values"), (video(2, 1, 1), "pixel_values_videos")):
        p = prompt_for(model, [[5, piece, 20], [9]])
        is_marked = isinstance(model, Glm4v) and piece[0] == VIDEO  # frames are marked as images
        token_id = IMAGE if is_marked else piece[0]
        message = rf"input_ids: placeholder tokens of images .* got {token_id}; expected {name} as well"
        for kept in ({}, {n: t for n, t in p.vision.items() if n.endswith("thw")}):
            with pytest.raises(LigerzooError, match=message):
                model.generate(p.ids, p.mask, max_new_tokens=1, **kept)
            if model.device.type == "cpu":
                with pytest.raises(LigerzooError, match=message):
                    model(p.ids, p.mask, **kept)
        model.check_inputs(p.ids.where(p.ids > 3, piece[0]), p.mask == 1, **p.vision)  # padding may be a placeholder
        cache = model.new_cache()
        model(p.ids, p.mask, past_key_values=cache, **p.vision)
        model(p.ids.new_full((2, 1), piece[0]), past_key_values=cache)
    assert model.modalities[-1] == "mm_token_type_ids"
    with pytest.raises(
        LigerzooError, match=r"images: not an option of generate or input of (Qwen|Muse|Glm).*; expected .*pixel_values"
    ):
        model.generate(p.ids, p.mask, max_new_tokens=1, images=[])


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"mrope_section": [2, 3, 4]}, "mrope_section: .* three integers, 0 or more, that add up to [468], half of the"),
    ({"mrope_section": [4, 4]}, "mrope_section"),
    ({"mrope_section": 8}, "mrope_section"),
    ({"hidden_size": 24, "mrope_section": [2, 0, 1]}, "vision_config: .* got (64|48|32); expected hidden_size, 24"),
    (
        {"vision_config": {"num_heads": 16}},
        "vision_config, num_heads: .* got 16 for (32|16) features; expected",
    ),
    ({"vision_config": {"depth": 0}}, "depth"),
    ({"vision_config": {"spatial_merge_size": 2**31 - 1}}, "spatial_merge_size: invalid value; .* fewer than 2\\^63"),
    ({"vision_config": {"patch_size": [4, 4]}}, "patch_size"),
    ({"vision_config": {"hidden_act": "gelu"}}, "hidden_act"),
    ({"vision_config": {"rope_parameters": {"rope_theta": 3.0}}}, "rope_theta"),
    ({"vision_config": []}, "vision_config: not an object"),
    ({"vision_config": "large"}, "vision_config: not an object"),
    ({"text_config": 5}, "text_config: not an object"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
]


@pytest.mark.parametrize("changes, named", INVALID)
@pytest.mark.parametrize("hub_row", SECTIONED, indirect=True, ids=lambda row: row.config["model_type"])
def test_invalid_configs(hub_row: Tiny, changes: dict[str, Any], named: str) -> None:
    text = {name: value for name, value in changes.items() if name in ("hidden_size", "mrope_section")}
    if "mrope_section" in text:
        text["rope_scaling"] = {"rope_type": "default", "mrope_section": text.pop("mrope_section")}
    raw = {**hub_row.config, **changes, **text}
    if "text_config" in hub_row.config and text:
        raw["text_config"] = {**hub_row.config["text_config"], **text}
    if isinstance(changes.get("vision_config"), dict):
        raw["vision_config"] = {**hub_row.config["vision_config"], **changes["vision_config"]}
    with pytest.raises(ConfigError, match=named):
        architecture_of(hub_row.config["model_type"]).config_from_hf(raw)


def test_more_blocks_than_tensors(hub_row: Tiny, tmp_path: Path) -> None:
    hub_row.write(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for name in raw["vision_config"].keys() & {"depth", "num_hidden_layers"}:
        raw["vision_config"][name] = 10**9
    raw["vision_config"].pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="fewer tensors than layers"):
        AutoModel.from_pretrained(tmp_path)


def test_info(hub_row: Tiny, tmp_path: Path) -> None:
    hub_row.write(tmp_path)
    page = describe(tmp_path)
    architecture = architecture_of(hub_row.config["model_type"])
    assert f"{architecture.model_class.__name__} ({architecture.hf_class})" in page
    assert "vision tower" in page

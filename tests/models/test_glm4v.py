"""GLM-4.1V and GLM-4.5V: older files, entries that transformers ignores, and the marks around videos."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ligerzoo.convert import architecture_of
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.layers import BicubicPositionEmbedding
from ligerzoo.models import Glm4v, Glm4vConfig, Glm4vMoeConfig
from tests.models import tiny_glm4v, tiny_glm4v_moe
from tests.models.prompts import IMAGE, VIDEO, VIDEO_END, VIDEO_START


def test_decoders_at_the_top_level() -> None:
    """As in the first files of GLM-4.1V, which transformers 5.23 reads as a model of the default sizes."""
    for family in (tiny_glm4v, tiny_glm4v_moe):
        raw = family.CHECKPOINTS[0].config
        model_type, text = raw["model_type"], raw["text_config"]
        flat = {name: value for name, value in {**text, **raw}.items() if name != "text_config"}
        read = architecture_of(model_type).config_from_hf
        assert read(flat) == read(raw)
        stale = {"hidden_size": 4096, "num_hidden_layers": 40, "rope_theta": 3.0}
        assert read({**raw, **stale}) == read(raw)


@pytest.mark.parametrize(
    "model_type, changes, named",
    [
        ("glm4v", {"attention_bias": False}, "attention_bias: not supported; got False"),
        ("glm4v", {"head_dim": 17}, "head_dim: invalid value; got 17; expected hidden_size / num_attention_heads"),
        ("glm4v", {"partial_rotary_factor": 1.0}, "mrope_section: invalid sections"),
        ("glm4v_moe", {"use_qk_norm": True}, "use_qk_norm: not supported; got True"),
        ("glm4v_moe", {"scoring_func": "softmax"}, "scoring_func: not supported"),
        ("glm4v_moe", {"model_type": "glm4v_text"}, "model_type: not supported; got 'glm4v_text'"),
    ],
)
def test_refused_entries(model_type: str, changes: dict[str, Any], named: str) -> None:
    raw = {"glm4v": tiny_glm4v, "glm4v_moe": tiny_glm4v_moe}[model_type].TOP
    with pytest.raises(ConfigError, match=named):
        architecture_of(model_type).config_from_hf({**raw, "text_config": {**raw["text_config"], **changes}})


def test_defaults_are_valid() -> None:
    assert Glm4vConfig().rotary_size == Glm4vMoeConfig(head_dim=128).rotary_size == 64
    vision = {**tiny_glm4v.VISION, "image_size": 3}
    with pytest.raises(ConfigError, match="vision_config, image_size"):
        architecture_of("glm4v").config_from_hf({**tiny_glm4v.TOP, "vision_config": vision})


@pytest.fixture(scope="module")
def model() -> Glm4v:
    architecture = architecture_of("glm4v")
    return Glm4v(architecture.config_from_hf(tiny_glm4v.TOP), device="meta")


def test_marks_of_videos(model: Glm4v) -> None:
    """A video that does not end, as in a truncated text, does not reach into the next text of a packed row."""
    ids = torch.tensor([[VIDEO_END, IMAGE, VIDEO_START, IMAGE, 5, IMAGE, VIDEO_END, IMAGE, VIDEO_START, IMAGE, IMAGE]])
    start = torch.tensor([[0] * 10 + [10]])
    in_video, after = [3, 5, 9, 10], [3, 5, 9]
    for segment_start, expected in ((None, in_video), (start, after)):
        masks = model.placeholder_masks(ids, segment_start=segment_start)
        assert masks["pixel_values_videos"].nonzero()[:, 1].tolist() == expected
        assert torch.equal(masks["pixel_values"] | masks["pixel_values_videos"], ids == IMAGE)
    types = 2 * (ids == IMAGE).int()[:, :8]  # tokens after its end are text
    assert model.placeholder_masks(ids, types)["pixel_values_videos"].nonzero()[:, 1].tolist() == [1, 3, 5, 7]
    with pytest.raises(LigerzooError, match=r"mm_token_type_ids has shape \(1, 12\); expected \(1, 11\)"):
        model.placeholder_masks(ids, F.pad(types, (0, 4)))
    assert model.placeholder_masks(torch.tensor([[VIDEO]]))["pixel_values_videos"].all()  # not read by the processor


@pytest.mark.parametrize("side, height, width", [(5, 4, 6), (3, 3, 3), (1, 2, 2), (4, 9, 1)])
def test_positions_are_those_of_grid_sample(side: int, height: int, width: int) -> None:
    embedding = BicubicPositionEmbedding(side, 8)
    with torch.no_grad():
        embedding.weight.normal_()
    positions = torch.cartesian_prod(torch.arange(height), torch.arange(width)).T
    sizes = torch.tensor([[height], [width]]).expand_as(positions)
    grid = ((positions + 0.5) / sizes * 2 - 1).flip(0).T[None, :, None]
    table = embedding.weight.T.view(1, 8, side, side)
    expected = F.grid_sample(table, grid, mode="bicubic", padding_mode="border", align_corners=False)
    torch.testing.assert_close(embedding(positions, sizes), expected[0, :, :, 0].T)

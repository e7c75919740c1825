"""Windows and temporal positions of Qwen2.5-VL; test_vision_lm.py tests what it shares with Qwen2-VL."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.vision_utils import get_vision_window_index

from ligerzoo.convert.qwen2_5_vl import ARCHITECTURE
from ligerzoo.errors import ConfigError
from ligerzoo.layers import Context
from ligerzoo.layers.vision import patch_positions, window_order
from ligerzoo.models import Qwen2_5VL
from tests.models.comparing import assert_close
from tests.models.prompts import Prompt, Row, prompt, video
from tests.models.tiny import Tiny
from tests.models.tiny_qwen2_5_vl import CHECKPOINTS, VISION
from tests.models.variants import variant
from tests.models.vision_lms import on_the_hub

MANY_BLOCKS: Tiny = variant(
    CHECKPOINTS[0].config,
    "of many blocks",
    {"vision_config": {**VISION, "depth": 4, "fullatt_block_indexes": [1, 3, 7]}},
    tensors=on_the_hub(),
)
M = VISION["spatial_merge_size"]
WINDOW = 2 * M  # in patches, from `window_size` of VISION

sides = st.integers(1, 7).map(lambda tokens: M * tokens)
grids = st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=3).map(torch.tensor)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> tuple[Qwen2_5VL, Any]:
    path = tmp_path_factory.mktemp("checkpoint")
    MANY_BLOCKS.write(path)
    theirs = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    return Qwen2_5VL.from_pretrained(path, dtype=torch.float32, device=device), theirs.to(device).model


def frames_of(grid: Tensor) -> Tensor:
    return (grid[:, 1] * grid[:, 2]).repeat_interleave(grid[:, 0])


@given(grid=grids, side=st.integers(1, 4))
def test_windows(grid: Tensor, side: int) -> None:
    """transformers orders tokens, ligerzoo their patches."""
    expected, bounds = get_vision_window_index(grid, spatial_merge_size=M, window_size=side * M * 14, patch_size=14)
    is_first, positions = patch_positions(grid, int(grid.prod(1).sum()), M)
    assert is_first.nonzero()[:, 0].tolist() == F.pad(frames_of(grid).cumsum(0), (1, -1)).tolist()
    order, is_first = window_order(is_first, positions, side * M)
    sizes = F.pad(is_first.nonzero()[:, 0], (0, 1), value=len(order)).diff()
    assert order.tolist() == [M * M * token + i for token in expected.tolist() for i in range(M * M)]
    assert sizes.tolist() == bounds.diff().tolist()


@settings(max_examples=40, deadline=None)
@given(grid=grids)
@torch.no_grad()
def test_tower_on_random_grids(models: tuple[Qwen2_5VL, Any], device: str, grid: Tensor) -> None:
    ours, theirs = models
    patches = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, device=device)
    assert_close(ours.visual(patches, grid), theirs.visual(patches, grid.to(device)).pooler_output, "embeddings")


@pytest.mark.parametrize(
    "grid, frames_are_rows, windows_are_rows",
    [
        ([[2, WINDOW, 2 * WINDOW], [1, WINDOW, 2 * WINDOW]], True, True),
        ([[2, WINDOW, 2 * WINDOW], [1, WINDOW, WINDOW]], False, True),
        ([[3, WINDOW, WINDOW + M]], True, False),
        ([[1, WINDOW, WINDOW + M], [1, WINDOW, WINDOW]], False, False),
    ],
)
def test_segments_of_equal_size_need_no_mask(
    models: tuple[Qwen2_5VL, Any], grid: list[list[int]], frames_are_rows: bool, windows_are_rows: bool
) -> None:
    """They are the rows of a batch; segments of different sizes share one row."""
    calls: list[tuple[int, bool]] = []
    tower, sizes = models[0].visual, torch.tensor(grid)

    def look(attention: Any, inputs: tuple[Tensor, Context]) -> None:
        x, context = inputs[:2]
        calls.append((len(x), context.mask(x.shape[1], is_causal=False) is None))

    hooks = [block.self_attn.register_forward_pre_hook(look) for block in tower.blocks]  # type: ignore[union-attr]
    tower(torch.randn(int(sizes.prod(1).sum()), 96, device=models[0].device), sizes)
    for hook in hooks:
        hook.remove()
    frames = (int(sizes[:, 0].sum()), True) if frames_are_rows else (1, False)
    windows = sum(t * -(-h // WINDOW) * -(-w // WINDOW) for t, h, w in grid)
    assert calls == 2 * [(windows, True) if windows_are_rows else (1, False), frames]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by torch.compile
@torch.no_grad()
def test_large_images_on_a_gpu(models: tuple[Qwen2_5VL, Any]) -> None:
    """Same as on a CPU, without an N x N matrix."""
    tower, grid = models[0].visual, torch.tensor([[1, 130, 126], [1, 20, 18]])
    patches = torch.randn(int(grid.prod(1).sum()), 96)
    expected = copy.deepcopy(tower).cpu()(patches, grid)
    patches = patches.cuda()
    tower(patches, grid)  # compiles, which needs memory too
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = tower(patches, grid)
    assert torch.cuda.max_memory_allocated() - before < len(patches) ** 2 / 4
    assert (got.cpu() - expected).norm() <= 2e-3 * expected.norm()


# Temporal positions


def positions(model: Qwen2_5VL, p: Prompt, seconds: Any) -> Tensor:
    context = Context(p.ids)
    with torch.no_grad():
        model.embed(p.ids, context, **{**p.vision, "second_per_grid_ts": seconds})
    return context.position_ids


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.18"), reason="it rounds seconds down to whole ones")
@settings(max_examples=60, deadline=None)
@given(videos=st.lists(st.tuples(st.integers(1, 6), st.floats(0, 5)), min_size=1, max_size=4), kind=st.integers(0, 2))
@example([(38, 2 / 37)], 0)  # fp32 would round to another position
def test_temporal_positions_in_seconds(
    models: tuple[Qwen2_5VL, Any], device: str, videos: list[tuple[int, float]], kind: int
) -> None:
    """As a list, as a tensor, or by default."""
    ours, theirs = models
    row: Row = [1, *(piece for frames, _ in videos for piece in (video(frames, 1, 2), 1))]
    p = prompt([row], VISION)
    p = Prompt(p.ids.to(device), p.mask.to(device), {name: tensor.to(device) for name, tensor in p.vision.items()})
    seconds = [seconds for _, seconds in videos]
    given = [seconds, torch.tensor(seconds), None][kind]
    grid = p.vision["video_grid_thw"]
    expected, _ = theirs.get_rope_index(p.ids, p.types, video_grid_thw=grid, second_per_grid_ts=given)
    assert torch.equal(positions(ours, p, given), expected)


def test_second_per_grid_ts_needs_one_value_per_video(models: tuple[Qwen2_5VL, Any]) -> None:
    ours, _ = models
    ids = torch.ones(1, 4, dtype=torch.long, device=ours.device)
    with pytest.raises(ValueError, match=r"second_per_grid_ts has shape \(1,\); expected \(2,\), one value per video"):
        ours(ids, video_grid_thw=torch.ones(2, 3, dtype=torch.long), second_per_grid_ts=[0.5])
    with pytest.raises(ValueError, match=r"shape \(1,\); expected \(0,\)"):
        ours(ids, second_per_grid_ts=[0.5])


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"window_size": 7}, "vision_config, window_size: .* got 7; expected at least .*, 8"),
        ({"fullatt_block_indexes": 7}, "vision_config, fullatt_block_indexes: .* got 7; expected a list"),
        ({"fullatt_block_indexes": [-1]}, "fullatt_block_indexes"),
        ({"fullatt_block_indexes": ["1"]}, "fullatt_block_indexes"),
        ({"hidden_act": "quick_gelu"}, "hidden_act"),
        ({"tokens_per_second": 0}, "tokens_per_second"),
    ],
)
def test_invalid_configs(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ARCHITECTURE.config_from_hf({**CHECKPOINTS[0].config, "vision_config": {**VISION, **changes}})

"""Attention of large heads against softmax over all scores, in plain torch and in fp64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import large_head_attention
from ligerzoo.layers import attend
from tests.kernels.accuracy import judge
from tests.kernels.machine import ROUNDED_DTYPES, kernel_file, on_gpu_too
from tests.kernels.oracles import numbers

FILE = kernel_file("large_head_attention")


def inputs(
    batch: int, tokens: int, keys: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    shapes = (tokens, heads), (keys, kv_heads), (keys, kv_heads)
    return [numbers(batch, *shape, size, dtype=dtype, device=device) for shape in shapes]


@pytest.mark.parametrize("scores", [2**25, 600])
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    on_gpu_too([(1, 1, 1, 1, 1, 8), (2, 37, 37, 4, 2, 24), (1, 50, 50, 3, 3, 264)], [(2, 2500, 2500, 8, 2, 512)]),
    ids=str,
)
def test_causal_attention(
    shape: tuple[int, ...], dtype: torch.dtype, scores: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block and in several, which end within a row of keys."""
    monkeypatch.setattr(FILE, "_MAX_SCORES", max(scores, 2**20) if shape[1] > 1000 else scores)
    judge(partial(large_head_attention, scale=0.3), partial(FILE.reference, scale=0.3), inputs(*shape, dtype, device))


@pytest.mark.parametrize("shape", [(2, 5, 31, 4, 2, 24), (1, 31, 5, 2, 1, 24)], ids=str)
def test_attention_to_all_keys(shape: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FILE, "_MAX_SCORES", 200)
    options = {"is_causal": False}
    tensors = inputs(*shape, torch.float32, device)
    judge(partial(large_head_attention, **options), partial(FILE.reference, **options), tensors)


def test_more_columns_than_a_program_reads_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FILE, "_COLUMNS", 16)
    judge(large_head_attention, FILE.reference, inputs(1, 70, 70, 2, 1, 16, torch.float32, device))


def test_large_scores(device: str) -> None:
    """Scores of some hundreds, whose exponentials overflow."""
    q, k, v = inputs(1, 20, 20, 2, 1, 32, torch.float32, device)
    judge(partial(large_head_attention, scale=60.0), partial(FILE.reference, scale=60.0), [q, k, v])


def test_layouts(device: str) -> None:
    joint = numbers(2, 20, 8, 24, dtype=torch.float16, device=device)
    q, k, v = (part.detach().requires_grad_() for part in joint.detach().split([4, 2, 2], 2))
    heads_first = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    for tensors in ([q, k, v], heads_first):
        judge(large_head_attention, FILE.reference, tensors)


@pytest.mark.parametrize("size, is_fused", [(256, False), (264, True)])
def test_attend_takes_it_for_heads_beyond_256_features(size: int, is_fused: bool, device: str) -> None:
    q, k, v = inputs(1, 6, 6, 2, 1, size, torch.float32, device)
    y = attend(q, k, v)
    assert y.grad_fn is not None
    assert ("_LargeHeadAttention" in y.grad_fn.name()) == is_fused
    torch.testing.assert_close(y, FILE.reference(q, k, v), rtol=1e-4, atol=1e-5)


def test_messages() -> None:
    q, k = torch.zeros(1, 3, 4, 8), torch.zeros(1, 5, 2, 8)
    with pytest.raises(ValueError, match=r"^large_head_attention: q is \(1, 3, 4, 8\), k .*; expected \(B, T, N, D\)"):
        large_head_attention(q, k, k)

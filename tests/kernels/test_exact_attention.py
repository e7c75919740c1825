from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import exact_attention
from ligerzoo.kernels.exact_attention import exact_attention_with_lse, reference
from ligerzoo.kernels.fused_attention import TorchAttention
from tests.covering import long_cases
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import HALF_DTYPE, needs_triton, on_gpu_too
from tests.kernels.oracles import numbers

OPTIONS = {
    "batch": [1, 2],
    "tokens": [1, 5, 70],
    "heads": [(4, 4), (6, 2), (20, 1)],
    "head_dim": [64, 128, 256],
    "keys": on_gpu_too([70, 130, 300], [2048]),
    "scale": [None, 0.2],
    "last": ["shared", "each row"],
    "window": [None, 1, 20, 129, 1000],
}


def tensors(batch: int, tokens: int, heads: tuple[int, int], head_dim: int, keys: int, device: str) -> list[Tensor]:
    """Returns queries, and keys and values of different layouts."""
    dtype = torch.bfloat16 if device != "cpu" else HALF_DTYPE
    q = numbers(batch, tokens, heads[0], head_dim, dtype=dtype, device=device).detach()
    k = numbers(batch, keys, heads[1], head_dim, dtype=dtype, device=device).detach()
    v = numbers(batch, heads[1], keys, head_dim, dtype=dtype, device=device).detach().transpose(1, 2)
    return [q, k, v]


@needs_triton
@pytest.mark.parametrize("case", long_cases(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, object], device: str) -> None:
    torch.manual_seed(0)
    scale, kind, window, sizes = case.pop("scale"), case.pop("last"), case.pop("window"), case
    inputs = tensors(**sizes, device=device)  # type: ignore[arg-type]
    batch, tokens, keys = inputs[0].shape[0], inputs[0].shape[1], inputs[1].shape[1]
    first = torch.randint(0, keys - tokens + 1, (batch if kind == "each row" else 1, 1), device=device)
    last = first + torch.arange(tokens, device=device)
    options: Any = (last, scale, window)
    actual, lse = exact_attention_with_lse(*inputs, *options, "triton")
    expected, truth = reference(*inputs, *options), reference(*(x.double() for x in inputs), *options)
    assert_as_exact_as(actual, expected[0], truth[0])
    assert_as_exact_as(lse, expected[1], truth[1])
    assert torch.equal(exact_attention(*inputs, last, scale=scale, window=window, backend="triton"), actual)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper")
@pytest.mark.parametrize("scale", [None, 0.07])
@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 2), 64), ((8, 8), 128), ((6, 2), 128), ((14, 2), 64)])
def test_equals_cudnn_to_the_bit(heads: tuple[int, int], head_dim: int, spread: float, scale: float | None) -> None:
    torch.manual_seed(0)
    batch, length = 3, 1700
    q, k, v = (
        torch.randn(batch, length, n, head_dim, dtype=torch.bfloat16, device="cuda") * s
        for n, s in ((heads[0], spread), (heads[1], 1), (heads[1], 1))
    )
    attention = TorchAttention("cudnn", head_dim**-0.5 if scale is None else scale, is_causal=True)
    whole, whole_lse = attention.forward(*(x.transpose(1, 2) for x in (q, k, v)))
    whole = whole.transpose(1, 2)
    positions = torch.arange(length, device="cuda")[None]
    out, lse = exact_attention_with_lse(q, k, v, positions, scale)
    assert torch.equal(out, whole)
    assert torch.equal(lse, whole_lse)
    for start, tokens in ((0, 1), (1, 1), (127, 1), (128, 1), (1000, 3), (1699, 1), (517, 130)):
        part, last = slice(start, start + tokens), positions[:, start : start + tokens]
        assert torch.equal(exact_attention(q[:, part], k, v, last, scale=scale), whole[:, part])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper")
@pytest.mark.parametrize("window", [1, 100, 128, 129, 1000])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_query_does_not_depend_on_others(head_dim: int, window: int) -> None:
    length = 1500
    q, k, v = (torch.randn(2, length, n, head_dim, dtype=torch.bfloat16, device="cuda") for n in (8, 2, 2))
    positions = torch.arange(length, device="cuda")[None]
    whole = exact_attention_with_lse(q, k, v, positions, window=window)
    within = exact_attention_with_lse(q, k, v, positions)
    for start, tokens in ((0, 1), (0, window), (127, 1), (1000, 1), (1499, 1), (517, 130)):
        part = slice(start, start + tokens)
        out, lse = exact_attention_with_lse(q[:, part], k, v, positions[:, part], window=window)
        assert torch.equal(out, whole[0][:, part])
        assert torch.equal(lse, whole[1][..., part])
    assert torch.equal(within[0][:, :window], whole[0][:, :window])
    assert torch.equal(within[1][..., :window], whole[1][..., :window])


@pytest.mark.plain
@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_compiles_for_hopper(tokens: int, head_dim: int) -> None:
    q = torch.zeros(2, tokens, 8, head_dim, dtype=torch.bfloat16)
    keys = torch.zeros(2, 50, 2, head_dim, dtype=torch.bfloat16)
    with compiling_for_hopper():
        for window in (None, 20):
            exact_attention(q, keys, keys, torch.zeros(1, tokens, dtype=torch.int64), window=window, backend="triton")


@pytest.mark.parametrize(("head_dim", "tokens"), [(32, 1), (64, 2)])
def test_shapes_are_checked(head_dim: int, tokens: int) -> None:
    q, keys = torch.ones(1, 1, 2, head_dim), torch.ones(1, 5, 2, head_dim)
    with pytest.raises(ValueError, match=r"^exact_attention: q is .*; expected shapes \(B, T, N, D\)"):
        exact_attention(q, keys, keys, torch.zeros(1, tokens, dtype=torch.int64))

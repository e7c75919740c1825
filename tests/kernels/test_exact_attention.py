import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligerzoo.kernels import exact_attention
from ligerzoo.kernels.exact_attention import reference
from tests.covering import covering
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import HALF_DTYPE, needs_triton, on_gpu_too
from tests.kernels.oracles import numbers

OPTIONS = {
    "batch": [1, 2],
    "tokens": [1, 5, 70],
    "heads": [(4, 4), (6, 2), (20, 1)],
    "head_dim": [64, 128],
    "keys": on_gpu_too([70, 130, 300], [2048]),
    "scale": [None, 0.2],
    "last": ["shared", "each row"],
}


def tensors(batch: int, tokens: int, heads: tuple[int, int], head_dim: int, keys: int, device: str) -> list[Tensor]:
    """Returns queries, and keys and values of different layouts."""
    dtype = torch.bfloat16 if device != "cpu" else HALF_DTYPE
    q = numbers(batch, tokens, heads[0], head_dim, dtype=dtype, device=device).detach()
    k = numbers(batch, keys, heads[1], head_dim, dtype=dtype, device=device).detach()
    v = numbers(batch, heads[1], keys, head_dim, dtype=dtype, device=device).detach().transpose(1, 2)
    return [q, k, v]


@needs_triton
@pytest.mark.parametrize("case", covering(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, object], device: str) -> None:
    torch.manual_seed(0)
    scale, kind, sizes = case.pop("scale"), case.pop("last"), case
    inputs = tensors(**sizes, device=device)  # type: ignore[arg-type]
    batch, tokens, keys = inputs[0].shape[0], inputs[0].shape[1], inputs[1].shape[1]
    first = torch.randint(0, keys - tokens + 1, (batch if kind == "each row" else 1, 1), device=device)
    last = first + torch.arange(tokens, device=device)
    actual = exact_attention(*inputs, last, scale=scale, backend="triton")  # type: ignore[arg-type]
    truth = reference(*(x.double() for x in inputs), last, scale)  # type: ignore[arg-type]
    assert_as_exact_as(actual, reference(*inputs, last, scale), truth)  # type: ignore[arg-type]


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
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        whole = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
        ).transpose(1, 2)
    positions = torch.arange(length, device="cuda")[None]
    assert torch.equal(exact_attention(q, k, v, positions, scale=scale), whole)
    for start, tokens in ((0, 1), (1, 1), (127, 1), (128, 1), (1000, 3), (1699, 1), (517, 130)):
        part, last = slice(start, start + tokens), positions[:, start : start + tokens]
        assert torch.equal(exact_attention(q[:, part], k, v, last, scale=scale), whole[:, part])


@pytest.mark.plain
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiles_for_hopper(tokens: int, head_dim: int) -> None:
    q = torch.zeros(2, tokens, 8, head_dim, dtype=torch.bfloat16)
    keys = torch.zeros(2, 50, 2, head_dim, dtype=torch.bfloat16)
    with compiling_for_hopper():
        exact_attention(q, keys, keys, torch.zeros(1, tokens, dtype=torch.int64), backend="triton")


@pytest.mark.parametrize(("head_dim", "tokens"), [(32, 1), (64, 2)])
def test_shapes_are_checked(head_dim: int, tokens: int) -> None:
    q, keys = torch.ones(1, 1, 2, head_dim), torch.ones(1, 5, 2, head_dim)
    with pytest.raises(ValueError, match=r"^exact_attention: q is .*; expected shapes \(B, T, N, D\)"):
        exact_attention(q, keys, keys, torch.zeros(1, tokens, dtype=torch.int64))

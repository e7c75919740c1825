import pytest
import torch

from ligerzoo.kernels.lora import lora_linears
from ligerzoo.kernels.low_rank import LowRank
from ligerzoo.kernels.row_sums import split_row_sums
from ligerzoo.layers import GatedMLP, Linear
from ligerzoo.layers.adapt import adapt
from ligerzoo.layers.lora import LoRAOptions
from ligerzoo.layers.projection import project
from tests.kernels.machine import HALF_DTYPE, needs_triton


@needs_triton
def test_the_gradient_of_each_a_is_rounded_to_its_own_dtype(device: str) -> None:
    x = torch.randn(40, 24, device=device, dtype=HALF_DTYPE)
    weights = [torch.randn(16, 24, device=device, dtype=HALF_DTYPE) for _ in range(2)]

    def gradient(first: torch.dtype) -> torch.Tensor:
        torch.manual_seed(0)
        matrices = [torch.randn(shape, device=device) for shape in ((4, 24), (16, 4), (4, 24), (16, 4))]
        matrices = [m.to(d).requires_grad_() for m, d in zip(matrices, 2 * [first] + 2 * [torch.float64], strict=True)]
        updates = [LowRank(*matrices[:2], 1.0), LowRank(*matrices[2:], 1.0)]
        outputs = lora_linears(x, weights, [None, None], updates)
        return torch.autograd.grad(sum(y.float().sum() for y in outputs), matrices[2])[0]

    assert gradient(torch.float64).dtype == torch.float64
    assert torch.equal(gradient(torch.float64), gradient(torch.bfloat16))


@needs_triton
@pytest.mark.parametrize("rank", [4, 40])
@pytest.mark.parametrize(
    "adapted",
    [("gate_proj", "up_proj"), ("down_proj",), ("gate_proj", "up_proj", "down_proj"), ("gate_proj",)],
    ids=str,
)
def test_layers_compute_the_same_bits_without_gradients(adapted: tuple[str, ...], rank: int, device: str) -> None:
    mlp = GatedMLP(48, 80, device=torch.device(device), dtype=HALF_DTYPE)
    layers = [mlp.get_submodule(name) for name in adapted]
    query, key = (Linear(48, 70, bias=bias, device=device, dtype=HALF_DTYPE) for bias in (True, False))
    for layer in (*layers, query):
        adapt(layer, LoRAOptions(rank=rank))
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    x = torch.randn(5, 48, device=device, dtype=HALF_DTYPE)

    def compute() -> tuple[torch.Tensor, ...]:
        return mlp(x), *project(x, query, key), query(x)

    trained = compute()
    with torch.no_grad():
        for got, expected in zip(compute(), trained, strict=True):
            assert torch.equal(got, expected)
        for got, expected in zip(project(x, query, key), (query(x), key(x)), strict=True):
            assert torch.equal(got, expected)
        with split_row_sums():
            for got, expected in zip(compute(), trained, strict=True):
                torch.testing.assert_close(got, expected, rtol=0.01, atol=0.01)

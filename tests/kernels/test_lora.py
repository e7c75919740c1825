import torch

from ligerzoo.kernels.lora import LowRank, lora_linears
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

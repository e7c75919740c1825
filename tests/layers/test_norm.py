import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ligerzoo.layers import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_llama_s(dtype: torch.dtype, device: str) -> None:
    theirs = LlamaRMSNorm(33, eps=1e-5).to(device, dtype)
    torch.nn.init.normal_(theirs.weight, mean=1)
    ours = RMSNorm(33, eps=1e-5, device=device, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 33, device=device, dtype=dtype) * 3
    tolerance = 2e-6 if dtype == torch.float32 else 0 if device == "cpu" else 2**-7
    torch.testing.assert_close(ours(x), theirs(x), rtol=tolerance, atol=0)


def test_eps_keeps_zeros_finite(device: str) -> None:
    assert torch.equal(RMSNorm(4, device=device)(torch.zeros(3, 4, device=device)), torch.zeros(3, 4, device=device))


def test_it_says_what_it_is() -> None:
    assert repr(RMSNorm(12, 1e-5)) == "RMSNorm(12, eps=1e-05)"

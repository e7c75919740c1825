import pytest
import torch

from ligerzoo.layers import Linear
from ligerzoo.layers.adapt import adapt
from ligerzoo.layers.lora import LoRAOptions


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dropout_keeps_one_byte_per_element(device: str) -> None:
    """As on a GPU, whose memory steps on meta predict."""
    layer = Linear(24, 40, bias=False, device=device)
    adapt(layer, LoRAOptions(rank=4, dropout=0.5))
    layer.weight.requires_grad_(False)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(6, 24, device=device, requires_grad=True))
    kept = [t.dtype for t in saved if t.shape == (6, 24)]
    assert sorted(kept, key=str) == [torch.bool, torch.float32]  # the mask, and x after dropout

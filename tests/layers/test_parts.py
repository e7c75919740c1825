"""All layers: device and dtype, initialization, autocast and derivatives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.layers import (
    MLP,
    Attention,
    Context,
    Decoder,
    Embedding,
    GatedMLP,
    LayerNorm,
    LMHead,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
)

H = 8


def block(**factory_kwargs: Any) -> PreNormBlock:
    return PreNormBlock(
        RMSNorm(H, **factory_kwargs),
        Attention(H, 2, 1, rotary=RotaryEmbedding(4), **factory_kwargs),
        RMSNorm(H, **factory_kwargs),
        GatedMLP(H, 12, **factory_kwargs),
    )


class Part(nn.Module):
    """A layer as a function of one tensor."""

    def __init__(self, part: nn.Module, *, in_context: bool = False) -> None:
        super().__init__()
        self.part, self.in_context = part, in_context

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x, Context(x)) if self.in_context else self.part(x)  # type: ignore[no-any-return]


PARTS: dict[str, Callable[..., Part]] = {
    "RMSNorm": lambda **factory_kwargs: Part(RMSNorm(H, **factory_kwargs)),
    "LayerNorm": lambda **factory_kwargs: Part(LayerNorm(H, **factory_kwargs)),
    "GatedMLP": lambda **factory_kwargs: Part(GatedMLP(H, 12, bias=True, **factory_kwargs)),
    "Attention": lambda **factory_kwargs: Part(
        Attention(H, 2, 1, rotary=RotaryEmbedding(4), qkv_bias=True, output_bias=True, **factory_kwargs),
        in_context=True,
    ),
    "LMHead": lambda **factory_kwargs: Part(LMHead(H, 30, **factory_kwargs)),
    "PreNormBlock": lambda **factory_kwargs: Part(block(**factory_kwargs), in_context=True),
}
EVERY_PART = pytest.mark.parametrize("make", PARTS.values(), ids=PARTS.keys())


@EVERY_PART
def test_device_and_dtype(make: Callable[..., Part]) -> None:
    part = make(device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in part.parameters()} == {("meta", torch.bfloat16)}
    with torch.device("meta"):
        assert all(p.is_meta for p in make().parameters())
    out = part(torch.empty(2, 5, H, device="meta", dtype=torch.bfloat16))
    assert (out.device.type, out.dtype) == ("meta", torch.bfloat16)


@EVERY_PART
def test_init_weights_replaces_all_parameters(make: Callable[..., Part]) -> None:
    part = make()
    means = [parameter.mean().item() for parameter in part.parameters()]
    for parameter in part.parameters():
        nn.init.constant_(parameter, float("nan"))
    for module in part.modules():
        if hasattr(module, "init_weights"):
            module.init_weights()
    for parameter, mean in zip(part.parameters(), means, strict=True):
        assert parameter.isfinite().all()
        assert (parameter == 1).all() or abs(parameter.mean().item() - mean) < 1


@EVERY_PART
def test_derivatives(make: Callable[..., Part], device: str) -> None:
    """First and second derivatives by finite differences; torch's fused attention has no second."""
    part = make(device=device, dtype=torch.float64)
    x = torch.randn(1, 5, H, device=device, dtype=torch.float64, requires_grad=True)
    inputs = (x, *part.parameters())

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return part(x)

    assert torch.autograd.gradcheck(function, inputs)
    if not any(isinstance(module, Attention) for module in part.modules()):
        assert torch.autograd.gradgradcheck(function, inputs)


@EVERY_PART
def test_autocast(make: Callable[..., Part], device: str) -> None:
    part, x = make(device=device), torch.randn(2, 5, H, device=device, requires_grad=True)
    expected = part(x)
    with torch.autocast(device, torch.bfloat16):
        out = part(x)
    assert out.dtype == (torch.float32 if isinstance(part.part, RMSNorm | LayerNorm | PreNormBlock) else torch.bfloat16)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in (x, *part.parameters()))


def decoder() -> Decoder:
    return Decoder(nn.Embedding(30, H), [block() for _ in range(3)], RMSNorm(H))


def test_decoder_accepts_tokens_or_embeddings() -> None:
    model, tokens = decoder(), torch.randint(30, (2, 9))
    assert torch.equal(model(tokens), model(model.embed_tokens(tokens)))


def test_decoder_continues_positions_from_the_cache() -> None:
    model, tokens, cache = decoder(), torch.randint(30, (2, 9)), decoder().new_cache()
    model(tokens[:, :4], Context(tokens[:, :4], cache=cache))
    rest = model(tokens[:, 4:], Context(tokens[:, 4:], cache=cache))
    torch.testing.assert_close(rest, model(tokens)[:, 4:], rtol=0, atol=1e-5)
    given = model(tokens, Context(tokens, position_ids=torch.arange(9)[None] + 5))
    torch.testing.assert_close(given, model(tokens), rtol=0, atol=1e-5)  # rotations are relative
    stretched = Context(tokens, torch.ones(2, 9), position_ids=torch.arange(9)[None] * 3)
    assert not torch.allclose(model(tokens, stretched), model(tokens), atol=1e-4)


def test_custom_decoder_learns() -> None:
    """Composed of layers only: a block of no architecture, and nothing of ligerzoo.models."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = RMSNorm(32), GatedMLP(32, 64)
            self.attention = Attention(32, 4, 1, rotary=RotaryEmbedding(8))

        def forward(self, x: Tensor, *rest: Any) -> Tensor:
            normed = self.norm(x)
            return x + self.attention(normed, *rest) + self.mlp(normed)  # type: ignore[no-any-return]

    model = Decoder(nn.Embedding(20, 32), [Parallel(), Parallel()], RMSNorm(32))
    head = LMHead(32, 20)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-2)
    tokens = torch.arange(64).remainder(20).view(4, 16)
    losses = []
    for _ in range(20):
        loss = head(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < 2 < losses[0]


# Inputs of another size


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layer", [Attention(H, 2), GatedMLP(H, 12), MLP(H, 12), LMHead(H, 20)], ids=repr)
def test_inputs_with_another_number_of_features(layer: nn.Module, compiled: bool) -> None:
    x = torch.randn(2, 3, H + 1)
    inputs = (x, Context(x)) if isinstance(layer, Attention) else (x,)
    name = type(layer).__name__
    message = rf"{name}: the input has shape \(2, 3, 9\); expected 8 features in the last dimension, the layer's hid"
    with pytest.raises(ValueError, match=message):
        layer(*inputs)
    if compiled:
        valid = tuple(Context(x[..., :H]) if isinstance(t, Context) else t[..., :H] for t in inputs)
        expected = layer(*valid)
        torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(*valid), expected)


def test_a_decoder_refuses_floats_without_features() -> None:
    decoder = Decoder(Embedding(20, H), [], RMSNorm(H))
    for x in (torch.rand(2, 3), torch.zeros(2, 3, H).long()):
        with pytest.raises(ValueError, match=r"Decoder: x has shape \(2, 3.* expected \(B, T\) token ids, which"):
            decoder(x)


@pytest.mark.parametrize("options, message", [
    ({"logits_budget": "256"}, "LMHead: logits_budget='256'; expected an integer of MiB, 0 or more"),
    ({"softcap": 0.0}, "LMHead: softcap=0.0; expected a positive number, or None"),
    ({"logit_scale": None}, "LMHead: logit_scale=None; expected a finite number"),
    ({"backend": "tritn"}, "backend='tritn'; expected .* Did you mean 'triton'"),
])  # fmt: skip
def test_options_of_the_head(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        LMHead(H, 20, **options)

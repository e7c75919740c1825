from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ligerzoo.errors import LigerzooError, WrongTypeError
from ligerzoo.layers import (
    Attention,
    Context,
    GatedMLP,
    GatedPreNormBlock,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
    SandwichBlock,
    ScaledPreNormBlock,
)
from tests.kernels.op_recorder import Recorder, launch_nothing


class Scaled(nn.Module):
    """Replaces attention and the MLP of a block."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x * 2.0


def scaled_block(pattern: str) -> nn.Module:
    parts = [RMSNorm(8), Scaled(), RMSNorm(8), Scaled()]
    match pattern:
        case "scaled":
            return ScaledPreNormBlock(0.5, *parts)
        case "gated":
            return GatedPreNormBlock(*parts)
        case "sandwich":
            return SandwichBlock(RMSNorm(8), Scaled(), RMSNorm(8), RMSNorm(8), Scaled(), RMSNorm(8))
    return PreNormBlock(*parts)


@pytest.mark.parametrize("pattern", ["pre-norm", "scaled", "gated", "sandwich"])
def test_kernels_add_the_gradients_of_the_residual(pattern: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rms_norm", "tiling"):
        launch_nothing(monkeypatch, name)
    block = scaled_block(pattern).to(device)
    x = torch.ones(2, 3, 8, device=device, requires_grad=True)
    y = block(x, Context(x))
    upstream = torch.ones_like(y)
    with Recorder() as recorder:
        torch.autograd.grad(y, x, upstream)
    assert not {"add", "add_"} & {*recorder.names}


class OwnMLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("block, message", [
    (lambda norm, attention: PreNormBlock(norm, attention, norm, OwnMLP()),
     r"^PreNormBlock: mlp is an OwnMLP, .*forward\(x: .*; expected a module called as mlp\(x, context\)"),
    (lambda norm, attention: PreNormBlock(attention, norm, norm, GatedMLP(8, 8)),
     r"input_layernorm is an Attention, .* PreNormBlock\(input_layernorm, self_attn, post_attention_layernorm, mlp"),
    (lambda norm, attention: SandwichBlock(norm, attention, norm, GatedMLP(8, 8), norm, norm),
     r"^SandwichBlock: mlp is a RMSNorm.* SandwichBlock\(.*, mlp, post_feedforward_layernorm"),
])  # fmt: skip
def test_parts_that_a_block_cannot_call_are_refused(block: Callable[..., object], message: str) -> None:
    with pytest.raises(WrongTypeError, match=message):
        block(RMSNorm(8), Attention(8, 2))


def test_a_subclass_with_a_forward_calls_its_parts_as_it_likes() -> None:
    class OwnBlock(PreNormBlock):
        def forward(self, x: Tensor, context: Context, cache: object = None) -> Tensor:
            return self.mlp(x)  # type: ignore[no-any-return]

    OwnBlock(RMSNorm(8), Attention(8, 2), RMSNorm(8), OwnMLP())


def test_attention_refuses_more_rotated_features_than_a_head_has() -> None:
    with pytest.raises(LigerzooError, match=r"^Attention: rotary is a RotaryEmbedding of 8 features; expected at most"):
        Attention(8, 2, rotary=RotaryEmbedding(8))


def test_matches_transformers_llama(device: str) -> None:
    config = LlamaConfig(hidden_size=24, intermediate_size=50, num_attention_heads=4, num_key_value_heads=2)
    config._attn_implementation = "sdpa"
    theirs = LlamaDecoderLayer(config, layer_idx=0).to(device)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    ours = PreNormBlock(RMSNorm(24), Attention(24, 4, 2, rotary=RotaryEmbedding(6)), RMSNorm(24), GatedMLP(24, 50)).to(
        device
    )
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(2, 40, 24, device=device), torch.arange(40, device=device)[None]
    expected = theirs(x, position_embeddings=LlamaRotaryEmbedding(config).to(device)(x, positions))
    torch.testing.assert_close(ours(x, Context(x)), expected, rtol=0, atol=1e-5)

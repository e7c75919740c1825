import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ligerzoo.layers import Attention, Context, GatedMLP, PreNormBlock, RMSNorm, RotaryEmbedding


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

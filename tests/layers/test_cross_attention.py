"""Cross-attention: its inputs against plain loops, and the layers alone."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from ligerzoo.layers import (
    Attention,
    Context,
    CrossAttention,
    CrossAttentionBlock,
    CrossAttentionInputs,
    CrossAttentionLayerCache,
    Decoder,
    GatedMLP,
    KVCache,
    PreNormBlock,
    RMSNorm,
    TileMask,
    TokenCache,
    tile_cross_attention_inputs,
)
from ligerzoo.layers.attention_call import AttentionCall
from ligerzoo.layers.plain_attention import reference

H = 32


# Tile masks


@pytest.mark.parametrize("length, tiles", [(7, 3), (130, 3), (512, 2)])
@pytest.mark.parametrize("queries", [1, 300])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_tile_mask_as_matrix_and_block_mask(length: int, tiles: int, queries: int, device: str) -> None:
    tile_visible = torch.rand(2, queries, tiles, device=device) < 0.6
    tile_visible[:, : queries // 2] = tile_visible[:, :1]  # whole blocks of equal rows
    tile_visible[..., 0] |= ~tile_visible.any(-1)
    mask = TileMask(tile_visible, length)
    visible = mask.visible()
    assert visible.shape == (2, 1, queries, length * tiles)
    for tile in range(tiles):
        keys = visible[:, 0, :, tile * length : (tile + 1) * length]
        assert (keys == tile_visible[..., tile, None]).all()

    blocks = mask.block_mask()
    computed = blocks.to_dense()[:, 0].bool()
    for b, q, k in product(range(2), range(computed.shape[1]), range(computed.shape[2])):
        block = visible[b, 0, q * 128 : (q + 1) * 128, k * 128 : (k + 1) * 128]
        assert computed[b, q, k] == block.any()
        in_full = blocks.full_kv_indices[b, 0, q, : blocks.full_kv_num_blocks[b, 0, q]].tolist()
        assert (k in in_full) == (block.all().item() and block.shape[1] == 128)
    q = torch.randn(2, queries, 2, 16, device=device)
    k, v = (torch.randn(2, length * tiles, 2, 16, device=device) for _ in "kv")
    out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks)
    torch.testing.assert_close(
        out.transpose(1, 2), reference(AttentionCall(q, k, v, mask.additive(q.dtype))), atol=1e-5, rtol=0
    )


# Inputs


def attended_tiles(inputs: CrossAttentionInputs | None) -> Tensor:
    assert inputs is not None
    assert inputs.mask is not None
    return inputs.mask.visible_tiles


def test_tokens_without_visible_tiles_attend_to_all() -> None:
    visible = torch.rand(2, 9, 3, 2) < 0.2
    visible[0, 3:5], visible[1, 1] = False, False
    inputs = tile_cross_attention_inputs(Context(torch.zeros(2, 9)), torch.zeros(2, 30, H), visible.long(), 5)
    assert inputs is not None
    assert inputs.no_states is not None
    assert inputs.bypass is None
    for b, t in product(range(2), range(9)):
        sees_none = not visible[b, t].any()
        assert inputs.no_states[b, t].item() == sees_none
        assert torch.equal(attended_tiles(inputs)[b, t], visible[b, t].flatten() | sees_none)


@pytest.mark.parametrize("bounds", [[0, 4, 9, 12], [0, 4, 9, 10], [0, 12]])
def test_segments_attend_to_their_own_images(bounds: list[int]) -> None:
    segments = [range(12)[slice(*ends)] for ends in zip(bounds, [*bounds[1:], 12], strict=True)]
    visible = torch.zeros(1, 12, 3, 2, dtype=torch.bool)
    visible[0, 2, 0, 0] = visible[0, 7:9, 1] = visible[0, 8, 2, 1] = True
    context = Context(torch.zeros(1, 12), cu_seqlens=torch.tensor(bounds))
    inputs = tile_cross_attention_inputs(context, torch.zeros(1, 30, H), visible, 5)
    assert inputs is not None
    assert inputs.bypass is not None
    for segment in segments:
        own = torch.stack([visible[0, segment, image].any() for image in range(3)])
        for t in segment:
            assert inputs.bypass[0, t].item() == (not own.any())
            if own.any():
                expected = visible[0, t] if visible[0, t].any() else own[:, None].expand(3, 2)
                assert torch.equal(attended_tiles(inputs)[0, t], expected.flatten())


def test_no_mask_if_all_tiles_are_visible() -> None:
    states = torch.zeros(2, 30, H)
    for mask in (None, torch.ones(2, 9, 3, 2)):
        inputs = tile_cross_attention_inputs(Context(torch.zeros(2, 9)), states, mask, 5)
        assert inputs is not None
        assert (inputs.mask, inputs.no_states, inputs.bypass) == (None, None, None)
    assert tile_cross_attention_inputs(Context(torch.zeros(2, 9)), None, None, 5) is None


# Layers


def cross_block() -> CrossAttentionBlock:
    attention = CrossAttention(H, 4, 2, q_norm=RMSNorm(8), k_norm=RMSNorm(8))
    block = CrossAttentionBlock(RMSNorm(H), attention, RMSNorm(H), GatedMLP(H, 48))
    nn.init.constant_(block.attn_gate, 0.7)
    nn.init.constant_(block.mlp_gate, -0.4)
    return block


def test_block_computes_its_equations() -> None:
    block, x, states = cross_block(), torch.randn(2, 5, H), torch.randn(2, 11, H)
    attention, context = block.cross_attn, Context(x)
    assert block(x, context) is x
    no_states = torch.zeros(2, 5, 1, dtype=torch.bool).index_fill(1, torch.tensor([1, 4]), True)
    context.cross_attention_inputs = CrossAttentionInputs(
        states=states, no_states=no_states, bypass=no_states.logical_and(no_states.cumsum(1) > 1)
    )

    normalized = block.input_layernorm(x)
    q = attention.q_norm(attention.q_proj(normalized).view(2, 5, 4, 8)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(states).view(2, 11, 2, 8)).transpose(1, 2).repeat_interleave(2, 1)
    v = attention.v_proj(states).view(2, 11, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
    attended = ((q @ k.mT * 8**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    expected = x + torch.tanh(torch.tensor(0.7)) * attention.o_proj(attended)
    mlp_out = block.mlp(block.post_attention_layernorm(expected)) * ~no_states
    expected = expected + torch.tanh(torch.tensor(-0.4)) * mlp_out
    expected[:, 4] = x[:, 4]
    torch.testing.assert_close(block(x, context), expected)


@torch.no_grad()
def test_decoder_with_cross_attention_uses_its_cache() -> None:
    """The first layer is cross-attention: its cache does not count tokens."""
    self_attention_block = PreNormBlock(RMSNorm(H), Attention(H, 4), RMSNorm(H), GatedMLP(H, 48))
    decoder = Decoder(nn.Embedding(50, H), [cross_block(), self_attention_block, cross_block()], RMSNorm(H))
    tokens, states = torch.randint(50, (2, 9)), torch.randn(2, 6, H)
    context = Context(tokens)
    context.cross_attention_inputs = CrossAttentionInputs(states=states)
    expected = decoder(tokens, context)
    for capacity in (None, 9):
        cache, pieces = decoder.new_cache(capacity), []
        for piece in tokens.split([4, 1, 1, 3], 1):
            context = Context(piece, cache=cache)
            context.cross_attention_inputs = CrossAttentionInputs(states=None if pieces else states)
            pieces.append(decoder(piece, context))
        assert (cache.length, cache.cross_attention_length, cache.capacity) == (9, 6, capacity)
        torch.testing.assert_close(torch.cat(pieces, 1), expected)
    assert not torch.allclose(decoder(tokens), expected)


def test_length_counts_tokens_and_cross_attention_length_counts_states() -> None:
    keys = torch.randn(2, 70, 1, 4)
    of_images, of_tokens = CrossAttentionLayerCache(), TokenCache()
    cache = KVCache([of_images, of_tokens])
    of_images.append(keys[:, :64], keys[:, :64])
    of_images.append(keys[:, 64:], keys[:, 64:])
    of_tokens.append(keys[:, :3], keys[:, :3])
    assert (cache.cross_attention_length, cache.length, cache.positions(2, keys.device).tolist()) == (70, 3, [[3, 4]])
    assert all(torch.equal(cached, keys) for cached in of_images.read())


def test_cross_attention_without_states_fails() -> None:
    x, attention = torch.randn(1, 2, H), CrossAttention(H, 4)
    context = Context(x)
    with pytest.raises(ValueError, match=r"context\.cross_attention_inputs is None"):
        attention(x, context)
    context.cross_attention_inputs = x  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"is a tensor of shape .* and dtype .*; expected CrossAttentionInputs$"):
        attention(x, context)
    context.cross_attention_inputs = CrossAttentionInputs()
    for cache in (None, TokenCache(), CrossAttentionLayerCache()):
        with pytest.raises(ValueError, match="got no states; expected new ones, or a cache that holds some"):
            attention(x, context, cache)


def test_inputs_with_another_number_of_features() -> None:
    attention = CrossAttention(H, 4)
    for features, states in ((H + 1, H), (H, H + 1)):
        x = torch.randn(1, 2, features)
        context = Context(x)
        context.cross_attention_inputs = CrossAttentionInputs(states=torch.randn(1, 3, states))
        with pytest.raises(ValueError, match=rf"CrossAttention: the input has shape .*{H + 1}\); expected {H} feat"):
            attention(x, context)

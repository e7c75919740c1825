"""Cross-attention: what tokens look at, against loops that know the words only; and the layers alone."""

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
    LayerCache,
    PreNormBlock,
    RMSNorm,
    TileMask,
    tile_cross_attention_inputs,
)
from ligerzoo.layers.attention import reference

H = 32


# Masks of pieces


@pytest.mark.parametrize("length, pieces", [(7, 3), (130, 3), (512, 2)])
@pytest.mark.parametrize("queries", [1, 300])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_pieces_are_seen_whole(length: int, pieces: int, queries: int, device: str) -> None:
    """As a matrix and in blocks."""
    sees = torch.rand(2, queries, pieces, device=device) < 0.6
    sees[:, : queries // 2] = sees[:, :1]  # whole blocks that see the same
    sees[..., 0] |= ~sees.any(-1)
    mask = TileMask(sees, length)
    visible = mask.visible()
    assert visible.shape == (2, 1, queries, length * pieces)
    for piece in range(pieces):
        here = visible[:, 0, :, piece * length : (piece + 1) * length]
        assert (here == sees[..., piece, None]).all()

    blocks = mask.blocks()
    seen = blocks.to_dense()[:, 0].bool()
    for b, q, k in product(range(2), range(seen.shape[1]), range(seen.shape[2])):
        block = visible[b, 0, q * 128 : (q + 1) * 128, k * 128 : (k + 1) * 128]
        assert seen[b, q, k] == block.any()
        in_full = blocks.full_kv_indices[b, 0, q, : blocks.full_kv_num_blocks[b, 0, q]].tolist()
        assert (k in in_full) == (block.all().item() and block.shape[1] == 128)
    q = torch.randn(2, queries, 2, 16, device=device)
    k, v = (torch.randn(2, length * pieces, 2, 16, device=device) for _ in "kv")
    out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks)
    torch.testing.assert_close(out.transpose(1, 2), reference(q, k, v, mask.added(q.dtype)), atol=1e-5, rtol=0)


# What tokens look at


def looked_at(memory: CrossAttentionInputs | None) -> Tensor:
    assert memory is not None
    assert memory.mask is not None
    return memory.mask.sees


def test_blind_tokens_look_at_everything() -> None:
    sees = torch.rand(2, 9, 3, 2) < 0.2
    sees[0, 3:5], sees[1, 1] = False, False
    memory = tile_cross_attention_inputs(Context(torch.zeros(2, 9)), torch.zeros(2, 30, H), sees.long(), 5)
    assert memory is not None
    assert memory.blind is not None
    assert memory.outside is None
    for b, t in product(range(2), range(9)):
        sees_none = not sees[b, t].any()
        assert memory.blind[b, t].item() == sees_none
        assert torch.equal(looked_at(memory)[b, t], sees[b, t].flatten() | sees_none)


@pytest.mark.parametrize("bounds", [[0, 4, 9, 12], [0, 4, 9, 10], [0, 12]])
def test_packed_texts_look_at_their_own_images(bounds: list[int]) -> None:
    texts = [range(12)[slice(*ends)] for ends in zip(bounds, [*bounds[1:], 12], strict=True)]
    sees = torch.zeros(1, 12, 3, 2, dtype=torch.bool)
    sees[0, 2, 0, 0] = sees[0, 7:9, 1] = sees[0, 8, 2, 1] = True
    context = Context(torch.zeros(1, 12), cu_seqlens=torch.tensor(bounds))
    memory = tile_cross_attention_inputs(context, torch.zeros(1, 30, H), sees, 5)
    assert memory is not None
    assert memory.outside is not None
    for text in texts:
        own = torch.stack([sees[0, text, image].any() for image in range(3)])
        for t in text:
            assert memory.outside[0, t].item() == (not own.any())
            if own.any():
                expected = sees[0, t] if sees[0, t].any() else own[:, None].expand(3, 2)
                assert torch.equal(looked_at(memory)[0, t], expected.flatten())


def test_no_mask_where_all_is_visible() -> None:
    states = torch.zeros(2, 30, H)
    for mask in (None, torch.ones(2, 9, 3, 2)):
        memory = tile_cross_attention_inputs(Context(torch.zeros(2, 9)), states, mask, 5)
        assert memory is not None
        assert (memory.mask, memory.blind, memory.outside) == (None, None, None)
    assert tile_cross_attention_inputs(Context(torch.zeros(2, 9)), None, None, 5) is None


# Layers


def cross_block() -> CrossAttentionBlock:
    attention = CrossAttention(H, 4, 2, q_norm=RMSNorm(8), k_norm=RMSNorm(8))
    block = CrossAttentionBlock(RMSNorm(H), attention, RMSNorm(H), GatedMLP(H, 48))
    nn.init.constant_(block.cross_attn_attn_gate, 0.7)
    nn.init.constant_(block.cross_attn_mlp_gate, -0.4)
    return block


def test_the_block_is_its_equations() -> None:
    block, x, states = cross_block(), torch.randn(2, 5, H), torch.randn(2, 11, H)
    attention, context = block.cross_attn, Context(x)
    assert block(x, context) is x
    blind = torch.zeros(2, 5, 1, dtype=torch.bool).index_fill(1, torch.tensor([1, 4]), True)
    context.cross_attention_inputs = CrossAttentionInputs(
        states=states, blind=blind, outside=blind.logical_and(blind.cumsum(1) > 1)
    )

    normalized = block.input_layernorm(x)
    q = attention.q_norm(attention.q_proj(normalized).view(2, 5, 4, 8)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(states).view(2, 11, 2, 8)).transpose(1, 2).repeat_interleave(2, 1)
    v = attention.v_proj(states).view(2, 11, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
    attended = ((q @ k.mT * 8**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    expected = x + torch.tanh(torch.tensor(0.7)) * attention.o_proj(attended)
    fed = block.mlp(block.post_attention_layernorm(expected)) * ~blind
    expected = expected + torch.tanh(torch.tensor(-0.4)) * fed
    expected[:, 4] = x[:, 4]
    torch.testing.assert_close(block(x, context), expected)


@torch.no_grad()
def test_a_decoder_that_looks_at_what_came_before() -> None:
    """The first layer, too, may be one of cross-attention: it does not count the text's tokens."""
    own = PreNormBlock(RMSNorm(H), Attention(H, 4), RMSNorm(H), GatedMLP(H, 48))
    decoder = Decoder(nn.Embedding(50, H), [cross_block(), own, cross_block()], RMSNorm(H))
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


def test_a_memory_s_length_is_not_the_text_s() -> None:
    keys = torch.randn(2, 70, 1, 4)
    of_memory, of_text = CrossAttentionLayerCache(), LayerCache()
    cache = KVCache([of_memory, of_text])
    of_memory.append(keys[:, :64], keys[:, :64])
    of_memory.append(keys[:, 64:], keys[:, 64:])
    of_text.append(keys[:, :3], keys[:, :3])
    assert (cache.cross_attention_length, cache.length, cache.positions(2, keys.device).tolist()) == (70, 3, [3, 4])
    assert all(torch.equal(held, keys) for held in of_memory.held())


def test_nothing_to_attend_to() -> None:
    x, attention = torch.randn(1, 2, H), CrossAttention(H, 4)
    context = Context(x)
    with pytest.raises(ValueError, match="no memory to attend to"):
        attention(x, context)
    context.cross_attention_inputs = CrossAttentionInputs()
    for cache in (None, LayerCache(), CrossAttentionLayerCache()):
        with pytest.raises(ValueError, match="without states, and none in the cache"):
            attention(x, context, cache)

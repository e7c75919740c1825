"""Gated delta networks, Mamba-2 and gated attention: packing, padding, and caches that say what they cannot do."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.layers import (
    Attention,
    Context,
    Decoder,
    Embedding,
    GatedAttention,
    GatedDeltaNet,
    GatedMLP,
    KimiDeltaAttention,
    KVCache,
    Linear,
    LinearAttentionBlock,
    Mamba2Mixer,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
    SeparateDeltaNet,
)
from ligerzoo.layers.cache import LayerCache
from ligerzoo.layers.recurrent import RecurrentMixer

HIDDEN = 24


def delta_net(kernel_size: int = 4) -> GatedDeltaNet:
    return GatedDeltaNet(HIDDEN, 2, 4, 6, 5, conv_kernel_size=kernel_size)


def mamba() -> Mamba2Mixer:
    return Mamba2Mixer(HIDDEN, 4, 5, 6, num_groups=2, in_bias=True)


def kda() -> KimiDeltaAttention:
    return KimiDeltaAttention(HIDDEN, 4, 6)


def with_exact_projections(net: RecurrentMixer) -> RecurrentMixer:
    """Makes each projection select features, which rounds nothing: BLAS sums in an order that depends on the rows."""
    for module in net.modules():
        if isinstance(module, Linear):
            rows, columns = module.weight.shape
            module.weight.data = torch.eye(columns)[torch.arange(rows) * 7 % columns]
    return net


def hybrid(*kinds: str) -> Decoder:
    """A decoder of "linear", "mamba" and "full" layers."""

    def block(kind: str) -> PreNormBlock:
        norms, mlp = (RMSNorm(HIDDEN), RMSNorm(HIDDEN)), GatedMLP(HIDDEN, 32)
        if kind != "full":
            return LinearAttentionBlock(norms[0], delta_net() if kind == "linear" else mamba(), norms[1], mlp)
        return PreNormBlock(norms[0], GatedAttention(HIDDEN, 4, 2, rotary=RotaryEmbedding(6)), norms[1], mlp)

    return Decoder(Embedding(50, HIDDEN), map(block, kinds), RMSNorm(HIDDEN))


@pytest.fixture
def decoder(device: str) -> Decoder:
    return hybrid("linear", "full", "mamba").to(device, torch.float64).eval()


def tokens(device: str, rows: int = 2, length: int = 20) -> Tensor:
    return torch.randint(50, (rows, length), device=device)


def packed_context(x: Tensor, lengths: list[int], given: str) -> Context:
    """The context of a row of segments, whose bounds are given in one of two ways."""
    if given == "cu_seqlens":
        return Context(x, cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=x.device))
    return Context(x, position_ids=torch.cat([torch.arange(n, device=x.device) for n in lengths])[None])


@pytest.mark.parametrize("lengths", [[64, 128, 64], [1, 70, 2, 1, 130]], ids=str)
@pytest.mark.parametrize("kernel_size, kind", [(1, "delta"), (2, "delta"), (4, "delta"), (4, "mamba"), (4, "kda")])
@pytest.mark.parametrize("given", ["cu_seqlens", "position_ids"])
def test_packed_segments_are_those_of_each_alone(
    lengths: list[int], kernel_size: int, kind: str, given: str, device: str
) -> None:
    """Bit by bit: neither the state nor the convolution sees other segments. Those of one and two tokens are shorter
    than it."""
    options = {"conv_kernel_size": kernel_size}
    delta, channels = GatedDeltaNet(HIDDEN, 2, 16, 8, 4, **options), KimiDeltaAttention(HIDDEN, 16, 4, **options)
    ssd = Mamba2Mixer(HIDDEN, 16, 4, 8, num_groups=2, **options)
    nets: dict[str, RecurrentMixer] = {"delta": delta, "mamba": ssd, "kda": channels}
    net = with_exact_projections(nets[kind]).to(device)
    x = torch.randn(1, sum(lengths), HIDDEN, device=device, requires_grad=True)
    packed = net(x, packed_context(x, lengths, given))
    weights = torch.randn_like(packed)
    gradients = torch.autograd.grad((packed * weights).sum(), [x, *net.parameters()])
    parts = zip(x.detach().split(lengths, 1), packed.split(lengths, 1), weights.split(lengths, 1), strict=True)
    found, total = [], [torch.zeros_like(parameter) for parameter in net.parameters()]
    for index, (part, got, weight) in enumerate(parts):
        part.requires_grad_()
        alone = net(part, Context(part))
        assert torch.equal(got, alone)
        others = [part if i == index else torch.randn_like(old) for i, old in enumerate(x.split(lengths, 1))]
        among_others = net(torch.cat(others, 1), packed_context(x, lengths, given))
        assert torch.equal(among_others.split(lengths, 1)[index], got)
        own = torch.autograd.grad((alone * weight).sum(), [part, *net.parameters()])
        found.append(own[0])
        total = [a + b for a, b in zip(total, own[1:], strict=True)]
    torch.testing.assert_close(gradients[0], torch.cat(found, 1))
    for got, expected in zip(gradients[1:], total, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


class OwnBlock(nn.Module):
    """A user's block around parts that get the cache, without `new_cache`."""

    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(mixers)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        for mixer in self.mixers:
            x = x + mixer(x, context, cache)
        return x


@torch.no_grad()
@pytest.mark.parametrize("capacity", [None, 20])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_of_users_need_no_new_cache(capacity: int | None, nested: bool, device: str) -> None:
    blocks = [OwnBlock(delta_net()), OwnBlock(Attention(HIDDEN, 4, rotary=RotaryEmbedding(6)))]
    layers = [OwnBlock(block) for block in blocks] if nested else blocks
    decoder = Decoder(Embedding(50, HIDDEN), layers, RMSNorm(HIDDEN)).to(device, torch.float64)
    cache, ids = decoder.new_cache(capacity), tokens(device)
    parts = [decoder(part, Context(part, cache=cache)) for part in ids.split([11, 1, 8], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), decoder(ids))
    assert (cache.is_recurrent, cache.is_static) == (True, capacity is not None)


@pytest.mark.parametrize(
    "other", [delta_net, lambda: Attention(HIDDEN, 4, rotary=None)], ids=["recurrence", "attention"]
)
def test_a_block_with_several_kinds_of_caches_must_choose(other: Any) -> None:
    decoder = Decoder(Embedding(50, HIDDEN), [OwnBlock(delta_net(), other())], RMSNorm(HIDDEN))
    with pytest.raises(
        ValueError, match=r"^OwnBlock: no method new_cache, .*mixers\.0 \(GatedDeltaNet\), mixers\.1 \("
    ):
        decoder.new_cache()


MASKS = [
    "####################",
    "......##############",
    "##############......",
    "...######..####..###",
    ".#..................",
]


@pytest.mark.parametrize("new", [delta_net, mamba, kda])
def test_padding_anywhere_has_no_effect(new: Callable[[], RecurrentMixer], device: str) -> None:
    net = new().to(device)
    mask = torch.tensor([[c == "#" for c in row] for row in MASKS], device=device)
    x = torch.randn(len(MASKS), 20, HIDDEN, device=device)
    got = net(x, Context(x, attention_mask=mask))
    assert (got[~mask] == 0).all()
    for row, is_token in enumerate(mask):
        alone = x[row : row + 1, is_token]
        torch.testing.assert_close(got[row : row + 1, is_token], net(alone, Context(alone)))


@torch.no_grad()
@pytest.mark.parametrize("capacity", [None, 64])
@pytest.mark.parametrize("chunks", [[20], [1] * 20, [2, 9, 1, 1, 7], [19, 1]], ids=str)
def test_any_chunks_give_the_outputs_of_the_whole(
    decoder: Decoder, capacity: int | None, chunks: list[int], device: str
) -> None:
    ids, cache = tokens(device), decoder.new_cache(capacity)
    whole = decoder(ids)
    parts = [decoder(part, Context(part, cache=cache)) for part in ids.split(chunks, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert (cache.length, cache.rows) == (20, 2)


@torch.no_grad()
@pytest.mark.parametrize("capacity", [None, 64])
@pytest.mark.parametrize("chunks", [[20], [1] * 20, [3, 2, 9, 1, 5]], ids=str)
def test_padded_chunks(decoder: Decoder, capacity: int | None, chunks: list[int], device: str) -> None:
    """Padding on either side, in chunks of padding only, too, does not change the states."""
    ids, cache = tokens(device, len(MASKS[:3])), decoder.new_cache(capacity)
    mask = torch.tensor([[c == "#" for c in row] for row in MASKS[:3]], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    parts, start = [], 0
    for part in ids.split(chunks, 1):
        end = start + part.shape[1]
        context = Context(part, attention_mask=mask[:, :end], position_ids=positions[:, start:end], cache=cache)
        parts.append(decoder(part, context))
        start = end
    got = torch.cat(parts, 1)
    for row, is_token in enumerate(mask):
        torch.testing.assert_close(got[row, is_token], decoder(ids[row : row + 1, is_token])[0])


@torch.no_grad()
@pytest.mark.parametrize("capacity", [None, 64])
def test_rows_are_copied_reordered_and_reset(decoder: Decoder, capacity: int | None, device: str) -> None:
    ids, cache = tokens(device, 3), decoder.new_cache(capacity)
    first, rest = ids[:, :9], ids[:, 9:]
    decoder(first, Context(first, cache=cache))
    clone = cache.clone()
    index = torch.tensor([2, 0, 0])
    cache.reorder(index)
    expected = decoder(torch.cat([first[index], rest], 1))[:, 9:]
    torch.testing.assert_close(decoder(rest, Context(rest, cache=cache)), expected)
    torch.testing.assert_close(decoder(rest, Context(rest, cache=clone)), decoder(ids)[:, 9:])
    cache.reset()
    torch.testing.assert_close(decoder(ids, Context(ids, cache=cache)), decoder(ids))


@torch.no_grad()
def test_states_stay_in_place(decoder: Decoder, device: str) -> None:
    """As a captured CUDA graph needs it, from the first token on, also after `reset`."""
    cache = decoder.new_cache(64)
    ids = tokens(device)
    decoder(ids, Context(ids, cache=cache))
    buffers = [(layer._keys, layer._values) for layer in cache.layers]
    cache.reset()
    for part in ids.split([9, 1, 1, 9], 1):
        decoder(part, Context(part, cache=cache))
    for layer, (keys, values) in zip(cache.layers, buffers, strict=True):
        assert layer._keys is keys
        assert layer._values is values


@torch.no_grad()
def test_rows_that_move_to_another_cache_continue(decoder: Decoder, device: str) -> None:
    ids, index = tokens(device, 3), torch.tensor([2, 0], device=device)
    expected = decoder(ids, Context(ids))[index, 15:]
    cache, other = decoder.new_cache(24), decoder.new_cache(40)
    decoder(ids[:, :15], Context(ids[:, :15], cache=cache))
    other.copy_rows_from(cache, index, torch.arange(2, device=device), 2, 24)
    other.set_lengths(torch.full((2,), 15, device=device), 15)
    assert [layer.length for layer in other.layers] == [15] * len(other.layers)
    rest = ids[index, 15:]
    torch.testing.assert_close(decoder(rest, Context(rest, cache=other)), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("capacity", [None, 64])
def test_tokens_cannot_be_removed(decoder: Decoder, capacity: int | None, device: str) -> None:
    cache, ids = decoder.new_cache(capacity), tokens(device)
    assert cache.is_recurrent
    decoder(ids, Context(ids, cache=cache))
    cache.remove_last(0)
    cache.crop(20)
    for remove in (lambda: cache.remove_last(1), lambda: cache.crop(19)):
        with pytest.raises(ValueError, match=r"cannot remove the last 1 of 20 tokens.*Use clone\(\) before"):
            remove()
    assert cache.length == 20
    with pytest.raises(ValueError, match=r"^remove_last: the model has recurrent layers"):
        cache.remove_last(torch.tensor([1, 2]))
    cache.crop(0)
    assert cache.length == 0
    with pytest.raises(ValueError, match=r"^keep_all_tokens: the model has recurrent layers"):
        cache.keep_all_tokens()
    with pytest.raises(ValueError, match=r"^exact cache: .*; expected "):
        decoder.new_cache(exact=True)


@torch.no_grad()
def test_other_batches_and_models_are_refused(decoder: Decoder, device: str) -> None:
    cache, ids = decoder.new_cache(), tokens(device, 3)
    decoder(ids[:2], Context(ids[:2], cache=cache))
    with pytest.raises(ValueError, match=r"^RecurrentLayerCache: got tokens of batch size 3; expected 2$"):
        decoder(ids, Context(ids, cache=cache))
    static = decoder.new_cache(19)
    with pytest.raises(ValueError, match=r"^StaticRecurrentLayerCache: cannot append 20 tokens to the 0 in the cache"):
        decoder(ids, Context(ids, cache=static))


@torch.no_grad()
@pytest.mark.parametrize("start, too_many", [(8, 4), (10, 1)])
def test_tokens_that_do_not_fit_leave_the_states(decoder: Decoder, start: int, too_many: int, device: str) -> None:
    ids, cache = tokens(device), decoder.new_cache(10)
    decoder(ids[:, :start], Context(ids[:, :start], cache=cache))
    states = cache.layers[0].clone()
    part = ids[:, start : start + too_many]
    with pytest.raises(ValueError, match=f"cannot append {too_many} tokens to the {start} in the cache"):
        decoder(part, Context(part, cache=cache))
    for name in ("_keys", "_values"):
        assert torch.equal(getattr(cache.layers[0], name), getattr(states, name))


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 20, 20, dtype=torch.bool)])
def test_attention_masks_are_refused(mask: Any) -> None:
    net, x = delta_net(), torch.randn(1, 20, HIDDEN)
    with pytest.raises(ValueError, match=r"^attention_mask: got a mask of 4 dimensions.*since GatedDeltaNet"):
        net(x, Context(x, attention_mask=mask))


@pytest.mark.parametrize("key_heads, value_heads", [(2, 3), (0, 2)])
def test_impossible_sizes(key_heads: int, value_heads: int) -> None:
    message = f"GatedDeltaNet: num_key_heads={key_heads}, num_value_heads={value_heads}, key_head_dim=6"
    with pytest.raises(ValueError, match=re.escape(message)):
        GatedDeltaNet(HIDDEN, key_heads, value_heads, 6, 5)


def test_keys_cannot_be_appended_to_states() -> None:
    cache: KVCache = hybrid("linear").new_cache()
    with pytest.raises(
        TypeError, match=r"^RecurrentLayerCache: holds no keys and values; expected a cache of attention"
    ):
        cache.layers[0].append(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3))


@torch.no_grad()
def test_separate_projections_compute_what_one_projection_does() -> None:
    fused, separate = delta_net().double(), SeparateDeltaNet(HIDDEN, 2, 4, 6, 5).double()
    state = {name: value for name, value in fused.state_dict().items() if "." not in name or "conv1d" in name}
    q, k, v = fused.in_proj_qkv.weight.split([12, 12, 20])
    state |= {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "o_norm.weight": fused.norm.weight}
    state |= {"a_proj.weight": fused.in_proj_a.weight, "b_proj.weight": fused.in_proj_b.weight}
    separate.load_state_dict(state | {"g_proj.weight": fused.in_proj_z.weight, "o_proj.weight": fused.out_proj.weight})
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(separate(x, Context(x)), fused(x, Context(x)))
    separate.max_strength = 2.0
    assert not torch.allclose(separate(x, Context(x)), fused(x, Context(x)))


@pytest.mark.parametrize("bias", [False, True])
def test_gated_attention_is_attention_times_a_gate(bias: bool) -> None:
    """With queries and gates of a head next to each other in `q_proj`."""
    gated = GatedAttention(HIDDEN, 4, 2, rotary=RotaryEmbedding(6), qkv_bias=bias)
    plain = Attention(HIDDEN, 4, 2, rotary=RotaryEmbedding(6), qkv_bias=bias)
    rows = torch.arange(48).view(4, 2, 6)
    state = gated.state_dict()
    own = {name: value[rows[:, 0].flatten()] if "q_proj" in name else value for name, value in state.items()}
    plain.load_state_dict({**own, "o_proj.weight": torch.eye(HIDDEN)})
    x = torch.randn(2, 9, HIDDEN)
    gate = gated.q_proj(x)[..., rows[:, 1].flatten()]
    expected = (plain(x, Context(x)) * gate.sigmoid()) @ gated.o_proj.weight.T
    torch.testing.assert_close(gated(x, Context(x)), expected)


@torch.no_grad()
@pytest.mark.parametrize("new", [delta_net, mamba, kda])
def test_bytes_of_the_states(new: Callable[[], RecurrentMixer]) -> None:
    net = new().bfloat16()
    x = torch.randn(3, 5, HIDDEN, dtype=torch.bfloat16)
    cache = net.new_cache()
    net(x, Context(x, cache=KVCache([cache])), cache)
    conv_state, state = cache.read_states(3, 1)
    assert conv_state is not None
    assert state is not None
    assert (conv_state.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert conv_state.nbytes + state.nbytes == 3 * net.state_bytes

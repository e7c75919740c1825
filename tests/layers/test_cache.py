"""Key-value caches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.kernels.fp8 import FP8, to_storage
from ligerzoo.layers import (
    Attention,
    Context,
    CrossAttention,
    CrossAttentionBlock,
    CrossAttentionLayerCache,
    Decoder,
    GatedMLP,
    KVCache,
    LayerCache,
    PostNormBlock,
    PreNormBlock,
    RMSNorm,
    RollingLayerCache,
    RotaryEmbedding,
    SandwichBlock,
    StaticLayerCache,
    TokenCache,
)
from ligerzoo.layers.static_cache import DECODE_TOKENS

STEPS = [(0, 5), (5, 6), (6, 64), (64, 65), (65, 65), (65, 300)]


def random_tokens() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 300, 3, 4), torch.randn(2, 300, 3, 4)


def test_growing_cache_returns_all_tokens() -> None:
    cache, (keys, values) = TokenCache(), random_tokens()
    for start, end in STEPS:
        got = cache.append(keys[:, start:end], values[:, start:end])
        assert torch.equal(got[0], keys[:, :end])
        assert torch.equal(got[1], values[:, :end])
        assert (cache.length, cache.offset) == (end, 0)


@pytest.mark.parametrize("window", [1, 2, 3, 30, 64, 1000])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_rolling_cache_returns_the_window(window: int, one_by_one: bool) -> None:
    cache, (keys, values) = RollingLayerCache(window), random_tokens()
    for start, end in [(i, i + 1) for i in range(300)] if one_by_one else STEPS:
        got = cache.append(keys[:, start:end], values[:, start:end])
        first = max(0, start - window + 1)
        assert torch.equal(got[0], keys[:, first:end])
        assert torch.equal(got[1], values[:, first:end])
        assert (cache.length, cache.offset) == (end, first)
        assert cache._keys is not None
        assert cache._keys.shape[2] == 2 * window


@pytest.mark.parametrize("tokens", [1, 3])
def test_static_cache_keeps_its_memory(tokens: int) -> None:
    cache, (keys, values) = StaticLayerCache(299), random_tokens()
    pointers = set()
    for start in range(0, 297, tokens):
        end = start + tokens
        positions = cache.positions(tokens, keys.device)
        assert positions.tolist() == [list(range(start, end))] * len(positions)
        got = cache.append(keys[:, start:end], values[:, start:end])
        for whole, x in zip(got, (keys, values), strict=True):
            assert torch.equal(whole[:, :end], x[:, :end])
            assert whole.shape[1] == (299 if tokens <= DECODE_TOKENS else end)
            assert not whole[:, end:].any()
        pointers.add(got[0].data_ptr())
    assert len(pointers) == 1
    with pytest.raises(ValueError, match="cannot append 3 tokens to the 297 in the cache; expected at most 299 in all"):
        cache.append(keys[:, :3], values[:, :3])
    assert cache.length == 297


@pytest.mark.parametrize("new_layer", [TokenCache, lambda: StaticLayerCache(20)], ids=["growing", "static"])
@pytest.mark.parametrize("new", [1, 3])
def test_tokens_replace_removed_ones(new_layer: Callable[[], LayerCache], new: int) -> None:
    keys, values = random_tokens()
    cache = KVCache([new_layer() for _ in range(2)])

    def append(start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        return [layer.append(keys[:, start:end], values[:, start:end]) for layer in cache.layers]

    append(0, 9)
    cache.remove_last(4)
    assert cache.length == 5
    positions = cache.positions(new, keys.device)
    assert positions.tolist() == [list(range(5, 5 + new))] * len(positions)
    for got in append(20, 20 + new):
        for part, x in zip(got, (keys, values), strict=True):
            assert torch.equal(part[:, : 5 + new], torch.cat([x[:, :5], x[:, 20 : 20 + new]], 1))
    with pytest.raises(ValueError, match=f"cannot remove 9 tokens; expected 0 to {5 + new}"):
        cache.remove_last(9)


LAYERS: dict[str, Callable[[], list[LayerCache]]] = {
    "growing": lambda: [TokenCache(), TokenCache()],
    "rolling": lambda: [RollingLayerCache(6), TokenCache()],  # the second counts tokens
    "static": lambda: [StaticLayerCache(40), StaticLayerCache(40)],
}
KINDS = [*LAYERS, *(f"fp8 {kind}" for kind in LAYERS)]


def empty(kind: str) -> KVCache:
    return KVCache(LAYERS[kind.removeprefix("fp8 ")](), FP8 if kind.startswith("fp8") else None)


def filled(kind: str, keys: Tensor, values: Tensor) -> KVCache:
    cache = empty(kind)
    extend(cache, keys, values)
    return cache


def extend(cache: KVCache, keys: Tensor, values: Tensor, start: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Appends the tokens one by one, and returns the last ones that each layer returns."""
    got: list[tuple[Tensor, Tensor]] = []
    for index in range(start, keys.shape[1]):
        got = [layer.append(keys[:, index : index + 1], values[:, index : index + 1]) for layer in cache.layers]
    return got


def assert_equal_after(cache: KVCache, expected: KVCache, keys: Tensor, values: Tensor) -> None:
    """Checks that both caches return the same for more tokens."""
    assert (cache.length, cache.rows) == (expected.length, expected.rows)
    assert torch.equal(cache.positions(3, keys.device), expected.positions(3, keys.device))
    for got, reference in zip(extend(cache, keys, values), extend(expected, keys, values), strict=True):
        for x, y in zip(got, reference, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x[:, : cache.length].float(), y[:, : cache.length].float())


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_caches_return_what_others_return_of_rounded_tokens(kind: str) -> None:
    keys, values = (500 * x[:, :25] for x in random_tokens())
    stored = [to_storage(x, FP8).float() for x in (keys, values)]
    cache, expected = filled(kind, keys, values), filled(kind.removeprefix("fp8 "), *stored)
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        if kind.startswith("fp8"):
            for x, y in zip(layer.read(), other.read(), strict=True):
                assert x.dtype == FP8
                assert torch.equal(x.float(), y)
    if kind == "fp8 static":
        assert cache.nbytes * 4 == expected.nbytes


def test_other_dtypes_of_caches_are_refused() -> None:
    for dtype in (torch.bfloat16, torch.float8_e5m2, "fp8"):
        with pytest.raises(ValueError, match=rf"KV cache: dtype={dtype!r}; expected torch.float8_e4m3fn, or None"):
            Decoder(nn.Embedding(20, 8), [], RMSNorm(8)).new_cache(dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, 6, 9, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cropped_cache_is_one_of_fewer_tokens(kind: str, length: int) -> None:
    keys, values = (x[:, :11] for x in random_tokens())
    cache = filled(kind, keys, values)
    cache.crop(length)
    expected = filled(kind, keys[:, :length], values[:, :length])
    assert cache.length == length
    if kind.endswith("static") and length == 0:
        assert cache.rows == 2  # the memory stays allocated
        expected = filled(kind, keys, values)
        expected.reset()
    assert_equal_after(cache, expected, *(x[:, 20:40] for x in random_tokens()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_crop_that_is_refused_changes_nothing(kind: str) -> None:
    keys, values = (x[:, :25] for x in random_tokens())
    cache, expected = filled(kind, keys, values), filled(kind, keys, values)
    for length, remedy in ((26, ""), (-1, r". remove_last\(n\) removes the last n tokens")):
        with pytest.raises(ValueError, match=rf"KVCache.crop: got length={length}; expected 0 to 25{remedy}$"):
            cache.crop(length)
    if kind.endswith("rolling"):
        cache.layers.reverse()  # the layer that can crop comes first
        with pytest.raises(ValueError, match=r"RollingLayerCache: without the last 20 .*KVCache.keep_all_tokens\(\)"):
            cache.crop(5)
        cache.layers.reverse()
    assert_equal_after(cache, expected, *(x[:, 30:40] for x in random_tokens()))


@pytest.mark.parametrize("kind", ["rolling", "fp8 rolling"])
def test_a_rolling_cache_that_keeps_all_tokens_can_be_cropped(kind: str) -> None:
    keys, values = (x[:, :25] for x in random_tokens())
    cache = empty(kind)
    cache.keep_all_tokens()
    extend(cache, keys, values)
    cache.crop(5)
    assert_equal_after(cache, filled(kind.replace("rolling", "growing"), keys[:, :5], values[:, :5]), *random_tokens())


@pytest.mark.parametrize("kind", KINDS)
def test_reordered_rows_are_those_of_reordered_tokens(kind: str) -> None:
    keys, values = (x[:, :9] for x in random_tokens())
    cache, index = filled(kind, keys, values), torch.tensor([1, 1, 0])
    cache.reorder(index)
    expected = filled(kind, keys[index], values[index])
    assert_equal_after(cache, expected, *(x[index, 20:30] for x in random_tokens()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_clone_is_independent(kind: str) -> None:
    keys, values = (x[:, :9] for x in random_tokens())
    cache, expected = filled(kind, keys, values), filled(kind, keys, values)
    cache.position_offset = torch.ones(2, 1, dtype=torch.int64)
    clone, other = cache.clone(), cache.clone()
    extend(cache, keys + 1, values + 1)
    other.crop(7)
    assert (cache.length, clone.length, other.length) == (18, 9, 7)
    assert clone.position_offset is cache.position_offset
    assert_equal_after(clone, expected, *(x[:, 20:30] for x in random_tokens()))
    assert KVCache([TokenCache()]).clone().length == 0
    assert CrossAttentionLayerCache().clone().rows is None


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_static_caches_take_over_tokens_of_others_and_give_them_back(kind: str) -> None:
    keys, values = (x[:, :25] for x in random_tokens())
    source, static = filled(kind, keys, values), empty("fp8 static" if kind.startswith("fp8") else "static")
    columns = [torch.arange(25), torch.cat([torch.arange(3, 11), torch.arange(13, 25)])]  # the second has padding
    if kind.endswith("rolling"):  # there, padding may only come first
        columns[1] = torch.arange(3, 25)
    for row, index in enumerate(columns):
        static.copy_tokens_from(source, row, index, 1 - row, 2)
    lengths = [len(index) for index in columns]
    static.set_lengths(torch.tensor(lengths[::-1]), max(lengths))
    for layer, other in zip(static.layers, source.layers, strict=True):
        for buffer, x in zip((layer._keys, layer._values), (keys, values), strict=True):
            for row, index in enumerate(columns):
                kept = index[index >= other.first]
                assert buffer is not None
                got = buffer.transpose(1, 2)[1 - row, len(index) - len(kept) : len(index)]
                assert torch.equal(got.float(), to_storage(x[row, kept], got.dtype).float())
    new = [x[:, 30:33] for x in random_tokens()]
    extend(static, *(x.flip(0) for x in new))
    positions = torch.tensor([[length, length + 1, length + 2] for length in lengths])
    static.append_tokens_to(source, torch.tensor([1, 0]), positions)
    whole = [torch.cat(pair, 1) for pair in zip((keys, values), new, strict=True)]
    assert_equal_after(source, filled(kind, *whole), *(x[:, 34:40] for x in random_tokens()))


def test_buffers_double() -> None:
    cache, token = TokenCache(), torch.ones(1, 1, 2, 4)
    pointers = {cache.append(token, token)[0].untyped_storage().data_ptr() for _ in range(1000)}
    assert len(pointers) <= 5  # 64, 128, 256, 512, 1024


def test_kv_cache_has_one_cache_per_layer() -> None:
    cache, token = KVCache(TokenCache() for _ in range(3)), torch.ones(1, 1, 2, 4)
    assert (len(cache.layers), cache.length, cache.get_seq_length(), cache.capacity) == (3, 0, 0, None)
    for layer in cache.layers:
        layer.append(token, token)
    assert (cache.length, cache.get_seq_length()) == (1, 1)
    assert cache.positions(2, token.device).tolist() == [[1, 2]]
    assert KVCache([]).length == 0
    assert KVCache([StaticLayerCache(7)]).capacity == 7


@pytest.mark.parametrize(
    "cache", [TokenCache(), RollingLayerCache(3), StaticLayerCache(9)], ids=lambda c: type(c).__name__
)
def test_other_batch_sizes_and_heads_are_refused_and_change_nothing(cache: LayerCache) -> None:
    cache.append(torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 4))
    for rows in (1, 3):
        with pytest.raises(ValueError, match=f"got keys of batch size {rows}; expected 2"):
            cache.append(torch.randn(rows, 1, 1, 4), torch.randn(rows, 1, 1, 4))
    for heads, dim in ((2, 4), (1, 3)):
        with pytest.raises(
            ValueError, match=rf"got keys of {heads} heads of size {dim}; expected 1 heads of size 4, l"
        ):
            cache.append(torch.randn(2, 1, heads, dim), torch.randn(2, 1, heads, dim))
    assert cache.length == 5
    cache.append(torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4))
    assert cache.length == 6


# Caches that layers create


def attention(window: int | None = None) -> Attention:
    return Attention(8, 2, rotary=RotaryEmbedding(4), window=window)


def blocks(window: int | None) -> list[nn.Module]:
    norms, mlp = [RMSNorm(8) for _ in range(4)], GatedMLP(8, 8)
    return [
        PreNormBlock(norms[0], attention(window), norms[1], mlp),
        PostNormBlock(attention(window), norms[0], mlp, norms[1]),
        SandwichBlock(norms[0], attention(window), norms[1], norms[2], mlp, norms[3]),
    ]


@pytest.mark.parametrize("layer", range(4))
def test_layers_create_their_caches(layer: int) -> None:
    full, windowed = ([attention(window), *blocks(window)][layer] for window in (None, 5))
    assert type(full.new_cache()) is TokenCache  # type: ignore[operator]
    rolling = windowed.new_cache()  # type: ignore[operator]
    assert isinstance(rolling, RollingLayerCache)
    assert rolling.window == 5
    for module in (full, windowed):
        static = module.new_cache(7)  # type: ignore[operator]
        assert isinstance(static, StaticLayerCache)
        assert static.capacity == 7


def test_cross_attention_creates_its_cache() -> None:
    layer = CrossAttention(8, 2)
    block = CrossAttentionBlock(RMSNorm(8), layer, RMSNorm(8), GatedMLP(8, 8))
    for module in (layer, block):
        for capacity in (None, 7):
            assert type(module.new_cache(capacity)) is CrossAttentionLayerCache


class MLPBlock(nn.Module):
    """A user's block without attention and without `new_cache`."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = GatedMLP(8, 8)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]


class CustomBlock(nn.Module):
    """A user's block with attention under another name and without `new_cache`."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = attention(window=3)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        return x + self.mixer(x, context, cache)  # type: ignore[no-any-return]


@pytest.mark.parametrize("capacity", [None, 12])
@torch.no_grad()
def test_layers_without_new_cache_get_a_cache_of_all_tokens(capacity: int | None) -> None:
    decoder = Decoder(nn.Embedding(20, 8), [MLPBlock(), CustomBlock(), *blocks(3)], RMSNorm(8))
    tokens = torch.randint(20, (2, 12))
    cache, outputs = decoder.new_cache(capacity), []
    assert type(cache.layers[1]) is (TokenCache if capacity is None else StaticLayerCache)
    for start, end in [(0, 6), (6, 7), (7, 8), (8, 12)]:
        chunk = tokens[:, start:end]
        assert cache.length == start
        outputs.append(decoder(chunk, Context(chunk, cache=cache)))
    torch.testing.assert_close(torch.cat(outputs, 1), decoder(tokens), rtol=0, atol=1e-5)

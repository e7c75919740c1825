import pytest
import torch
from torch import Tensor

from ligerzoo.layers import KVCache, LayerCache, RollingLayerCache, StaticLayerCache

STEPS = [(0, 5), (5, 6), (6, 64), (64, 65), (65, 65), (65, 300)]


def random_tokens() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 300, 3, 4), torch.randn(2, 300, 3, 4)


def test_what_goes_in_comes_out() -> None:
    cache, (keys, values) = LayerCache(), random_tokens()
    for start, end in STEPS:
        got = cache.append(keys[:, start:end], values[:, start:end])
        assert torch.equal(got[0], keys[:, :end])
        assert torch.equal(got[1], values[:, :end])
        assert (cache.length, cache.offset) == (end, 0)


@pytest.mark.parametrize("window", [1, 2, 3, 30, 64, 1000])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_rolling_cache_returns_what_the_new_tokens_see(window: int, one_by_one: bool) -> None:
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
def test_a_static_cache_keeps_its_place(tokens: int) -> None:
    cache, (keys, values) = StaticLayerCache(299), random_tokens()
    places = set()
    for start in range(0, 297, tokens):
        end = start + tokens
        assert cache.positions(tokens, keys.device).tolist() == list(range(start, end))
        got = cache.append(keys[:, start:end], values[:, start:end])
        for whole, x in zip(got, (keys, values), strict=True):
            assert torch.equal(whole[:, :end], x[:, :end])
            assert whole.shape[1] == (299 if tokens == 1 else end)
            assert not whole[:, end:].any()
        places.add(got[0].data_ptr())
    assert len(places) == 1
    with pytest.raises(ValueError, match="cannot append 3 tokens to the 297 in the cache; expected at most 299 in all"):
        cache.append(keys[:, :3], values[:, :3])
    assert cache.length == 297


def test_room_is_doubled() -> None:
    cache, token = LayerCache(), torch.ones(1, 1, 2, 4)
    places = {cache.append(token, token)[0].untyped_storage().data_ptr() for _ in range(1000)}
    assert len(places) <= 5  # 64, 128, 256, 512, 1024


def test_a_cache_has_a_part_for_each_layer() -> None:
    cache, token = KVCache(LayerCache() for _ in range(3)), torch.ones(1, 1, 2, 4)
    assert (len(cache.layers), cache.length, cache.get_seq_length(), cache.capacity) == (3, 0, 0, None)
    for layer in cache.layers:
        layer.append(token, token)
    assert (cache.length, cache.get_seq_length()) == (1, 1)
    assert cache.positions(2, token.device).tolist() == [1, 2]
    assert KVCache([]).length == 0
    assert KVCache([StaticLayerCache(7)]).capacity == 7


@pytest.mark.parametrize(
    "cache", [LayerCache(), RollingLayerCache(3), StaticLayerCache(9)], ids=lambda c: type(c).__name__
)
def test_another_batch_is_refused_and_changes_nothing(cache: LayerCache) -> None:
    cache.append(torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 4))
    for rows in (1, 3):
        with pytest.raises(ValueError, match=f"got keys of batch size {rows}; expected 2"):
            cache.append(torch.randn(rows, 1, 1, 4), torch.randn(rows, 1, 1, 4))
    assert cache.length == 5
    cache.append(torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4))
    assert cache.length == 6

import pytest
import torch

from ligerzoo.layers import KVCache, LayerCache


def test_what_goes_in_comes_out() -> None:
    cache, keys, values = LayerCache(), torch.randn(2, 300, 3, 4), torch.randn(2, 300, 3, 4)
    for start, end in [(0, 5), (5, 6), (6, 64), (64, 65), (65, 65), (65, 300)]:
        got = cache.append(keys[:, start:end], values[:, start:end])
        assert torch.equal(got[0], keys[:, :end])
        assert torch.equal(got[1], values[:, :end])
        assert cache.length == end


def test_room_is_doubled() -> None:
    cache, token = LayerCache(), torch.ones(1, 1, 2, 4)
    places = {cache.append(token, token)[0].untyped_storage().data_ptr() for _ in range(1000)}
    assert len(places) <= 5  # 64, 128, 256, 512, 1024


def test_a_cache_has_a_part_for_each_layer() -> None:
    cache, token = KVCache(3), torch.ones(1, 1, 2, 4)
    assert (len(cache.layers), cache.length, cache.get_seq_length()) == (3, 0, 0)
    for layer in cache.layers:
        layer.append(token, token)
    assert (cache.length, cache.get_seq_length()) == (1, 1)
    assert KVCache(0).length == 0


def test_another_batch_is_refused_and_changes_nothing() -> None:
    cache = LayerCache()
    keys, _ = cache.append(torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 4))
    for rows in (1, 3):
        with pytest.raises(ValueError, match=f"holds 2 rows, and {rows} are to be added"):
            cache.append(torch.randn(rows, 1, 1, 4), torch.randn(rows, 1, 1, 4))
    assert cache.length == 5
    more, _ = cache.append(torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4))
    assert torch.equal(more[:, :5], keys)

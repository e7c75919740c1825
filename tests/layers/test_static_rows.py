"""Rows of static caches hold different numbers of tokens: each row computes what it computes alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.layers import KVCache, StaticLayerCache, TokenCache
from ligerzoo.models import Gemma2, Gemma2Config, Llama, LlamaConfig, Mistral, MistralConfig, Qwen3Moe, Qwen3MoeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4,
}  # fmt: skip
MOE: dict[str, Any] = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LENGTHS = [5, 1, 11]


@pytest.fixture(params=["llama", "mistral", "gemma2", "qwen3_moe"])
def model(request: pytest.FixtureRequest, device: str) -> Any:
    torch.manual_seed(0)
    built: nn.Module = {
        "llama": lambda: Llama(LlamaConfig(**SIZES)),
        "mistral": lambda: Mistral(MistralConfig(**SIZES, sliding_window=4)),
        "gemma2": lambda: Gemma2(Gemma2Config(**SIZES, sliding_window=4)),
        "qwen3_moe": lambda: Qwen3Moe(Qwen3MoeConfig(**MOE)),
    }[request.param]()
    built.init_weights(0.3)  # type: ignore[operator]
    return built.to(device, torch.float64).eval()


def filled(model: Any, tokens: Tensor, capacity: int = 24) -> KVCache:
    """Returns a cache with the first LENGTHS[r] tokens of each row, after a forward padded on the right."""
    cache: KVCache = model.new_cache(capacity)
    model(tokens[:, : max(LENGTHS)], past_key_values=cache)
    cache.set_lengths(torch.tensor(LENGTHS, device=tokens.device), max(LENGTHS))
    return cache


def alone(model: Any, tokens: Tensor, row: int, start: int, new: int) -> Tensor:
    """Returns the logits of the `new` tokens that follow the row's first tokens, without a cache."""
    own = torch.cat([tokens[row : row + 1, : LENGTHS[row]], tokens[row : row + 1, start : start + new]], 1)
    return model(own).logits[0, LENGTHS[row] :]  # type: ignore[no-any-return]


@pytest.fixture
def tokens(device: str) -> Tensor:
    return torch.randint(31, (3, 24), device=device)


@pytest.mark.parametrize("new", [[1, 1, 1, 1], [3, 1, 2], [6]])
@torch.no_grad()
def test_rows_of_different_lengths_continue_as_if_alone(model: Any, tokens: Tensor, new: list[int]) -> None:
    cache, start, parts = filled(model, tokens), 12, []
    for count in new:
        lengths = [length + start - 12 for length in LENGTHS]
        positions = cache.positions(count, tokens.device)
        assert positions.tolist() == [list(range(length, length + count)) for length in lengths]
        parts.append(model(tokens[:, start : start + count], past_key_values=cache).logits)
        start += count
    got = torch.cat(parts, 1)
    for row in range(3):
        torch.testing.assert_close(got[row], alone(model, tokens, row, 12, sum(new)), rtol=0, atol=1e-9)


@torch.no_grad()
def test_each_row_may_lose_another_number_of_tokens(model: Any, tokens: Tensor) -> None:
    cache = filled(model, tokens)
    removed = torch.tensor([2, 0, 3], device=tokens.device)
    model(tokens[:, 12:15], past_key_values=cache)
    cache.remove_last(removed)
    got = model(tokens[:, 20:22], past_key_values=cache).logits
    for row, kept in enumerate((3 - removed).tolist()):
        own = torch.cat([tokens[row, : LENGTHS[row]], tokens[row, 12 : 12 + kept], tokens[row, 20:22]])[None]
        torch.testing.assert_close(got[row], model(own).logits[0, -2:], rtol=0, atol=1e-9)


@torch.no_grad()
def test_rows_are_prefilled_while_others_keep_their_tokens(model: Any, tokens: Tensor) -> None:
    """In chunks: rows leave when their prompt has ended."""
    cache, device = model.new_cache(24), tokens.device
    long, short = (torch.tensor(rows, device=device) for rows in ([2, 0], [1]))
    part = cache.prefill_rows(long, 3)
    model(tokens[long, :5], past_key_values=part)
    part.select_rows(torch.tensor([0], device=device))
    assert part.rows == 1
    model(tokens[2:, 5:11], past_key_values=part)
    assert (part.length, cache.length) == (11, 0)
    model(tokens[short, :1], past_key_values=cache.prefill_rows(short, 3))
    cache.set_lengths(torch.tensor(LENGTHS, device=device), max(LENGTHS))
    got = model(tokens[:, 12:14], past_key_values=cache).logits
    for row in range(3):
        torch.testing.assert_close(got[row], alone(model, tokens, row, 12, 2), rtol=0, atol=1e-9)


@pytest.mark.parametrize("capacity", [13, 40])
@torch.no_grad()
def test_rows_are_copied(model: Any, tokens: Tensor, capacity: int) -> None:
    device = tokens.device
    old, new = filled(model, tokens), model.new_cache(capacity)
    zero_to_three = torch.arange(4, device=device)
    new.copy_rows_from(old, torch.tensor([2, 1], device=device), zero_to_three[:2], rows=4, tokens=13)
    new.copy_rows_from(new, slice(1, 2), zero_to_three[3:], rows=4, tokens=1)
    new.set_lengths(torch.tensor([11, 1, 0, 1], device=device), 11)
    newest = tokens[[2, 1, 0, 1], 12:14]
    got = model(newest, past_key_values=new).logits
    for row, source in ((0, 2), (1, 1), (3, 1)):
        torch.testing.assert_close(got[row], alone(model, tokens, source, 12, 2), rtol=0, atol=1e-9)
    torch.testing.assert_close(got[2], model(newest[2:3]).logits[0], rtol=0, atol=1e-9)


@torch.no_grad()
def test_selected_rows_keep_their_lengths(model: Any, tokens: Tensor) -> None:
    cache = filled(model, tokens)
    cache.select_rows(torch.tensor([2, 0], device=tokens.device))
    got = model(tokens[[2, 0], 12:13], past_key_values=cache).logits
    for row, source in enumerate((2, 0)):
        torch.testing.assert_close(got[row], alone(model, tokens, source, 12, 1), rtol=0, atol=1e-9)


@torch.no_grad()
def test_logits_of_other_tokens_in_each_row(model: Any, tokens: Tensor) -> None:
    index = torch.tensor([[4, 0], [0, 23], [10, 10]], device=tokens.device)
    everything = model(tokens).logits
    got = model(tokens, logits_to_keep=index).logits
    torch.testing.assert_close(got, everything.gather(1, index[..., None].expand_as(got)), rtol=0, atol=1e-12)
    got = model(tokens, logits_to_keep=index[0]).logits
    torch.testing.assert_close(got, everything[:, [4, 0]], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"logits_to_keep has shape \(2, 2\); expected \(n,\), or \(3, n\)"):
        model(tokens, logits_to_keep=index[:2])


def test_numbers_for_each_row_need_static_caches() -> None:
    for cache in (KVCache([TokenCache()]), KVCache([StaticLayerCache(3)])):
        with pytest.raises(ValueError, match="got a tensor; expected an int, since the caches are empty or not static"):
            cache.remove_last(torch.tensor([1]))

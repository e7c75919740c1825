"""Phi-3's cache: beyond the original context, keys rotated within it are invalid."""

import pytest
import torch

from ligerzoo.models import Phi3, Phi3Config
from tests.models.tiny_phi3 import FACTORS

ORIGINAL = 12


@pytest.fixture
def model(device: str) -> Phi3:
    config = Phi3Config(
        vocab_size=101, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, original_max_position_embeddings=ORIGINAL, initializer_range=0.2,
        rope_scaling={"rope_type": "longrope", **FACTORS},
    )  # fmt: skip
    return Phi3(config, device=device)


@pytest.mark.parametrize("prompt", [1, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1])
@pytest.mark.parametrize("padded", [False, True])
def test_generation_beyond_the_original_context(model: Phi3, device: str, prompt: int, padded: bool) -> None:
    tokens = torch.randint(101, (3, prompt + 4), device=device)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    mask[1, : prompt // 2] = 0
    tokens, mask = (tokens, mask) if padded else (tokens[:, 4:], None)
    got = model.generate(tokens, mask, max_new_tokens=ORIGINAL + 5)
    assert torch.equal(got, model.generate(tokens, mask, max_new_tokens=ORIGINAL + 5, use_cache=False))


@torch.no_grad()
def test_a_cache_longer_than_the_original_context(model: Phi3, device: str) -> None:
    tokens = torch.randint(101, (2, 20), device=device)
    cache = model.new_cache()
    model(tokens[:, :5], past_key_values=cache)
    model(tokens[:, 5:ORIGINAL], past_key_values=cache)
    with pytest.raises(ValueError, match=r"got 12 cached and 1 new tokens; expected at most 12 in all, .* Process all"):
        model(tokens[:, ORIGINAL:13], past_key_values=cache)

    cache = model.new_cache()
    model(tokens[:, :13], past_key_values=cache)
    logits = model(tokens[:, 13:], past_key_values=cache).logits
    torch.testing.assert_close(logits, model(tokens).logits[:, 13:], rtol=0, atol=2e-5)


def test_a_cache_without_longrope_serves_any_length() -> None:
    config = Phi3Config(vocab_size=101, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=8)
    cache = Phi3(config, device="meta").new_cache()
    cache.layers[0].length = 4096
    assert cache.is_valid_for(1)

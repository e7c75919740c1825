"""Latent attention: its definition, caches of every kind, and refusals."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels.fp8 import FP8
from ligerzoo.layers import Context, Decoder, Embedding, GatedMLP, KVCache, LatentAttention, PreNormBlock, RMSNorm
from ligerzoo.layers.attention_paths import attend_unequal
from ligerzoo.layers.rotary import RotaryEmbedding

HIDDEN, HEADS, RANK, NOPE, ROPE, VALUE = 24, 3, 10, 6, 4, 5


def layer(**options: Any) -> LatentAttention:
    torch.manual_seed(0)
    rotary = RotaryEmbedding(ROPE, interleaved=True)
    attention = LatentAttention(HIDDEN, HEADS, RANK, NOPE, VALUE, rotary, dtype=torch.float64, **options)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.4)
    return attention


@pytest.fixture(params=[None, 7], ids=["one projection", "two projections"])
def attention(request: pytest.FixtureRequest) -> LatentAttention:
    return layer(q_rank=request.param)


def decoder() -> Decoder:
    torch.manual_seed(0)
    norms = [RMSNorm(HIDDEN) for _ in range(5)]
    blocks = [PreNormBlock(norms[2 * i], layer(q_rank=7), norms[2 * i + 1], GatedMLP(HIDDEN, 16)) for i in range(2)]
    return Decoder(Embedding(50, HIDDEN), blocks, norms[4]).double()


def by_definition(attention: LatentAttention, x: Tensor) -> Tensor:
    """Causal attention with keys and values of each head, one head at a time."""
    context = Context(x)
    if attention.q_rank is None:
        q = attention.q_proj(x)
    else:
        q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
    compressed = attention.kv_a_proj_with_mqa(x)
    expanded = attention.kv_b_proj(attention.kv_a_layernorm(compressed[..., :RANK]))
    cos, sin = (t[0] for t in context.rotation(attention.rotary, x.dtype))

    def rotate(t: Tensor) -> Tensor:
        pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
        return torch.view_as_real(pairs).flatten(-2)

    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    outputs = []
    for head in range(HEADS):
        q_nope, q_rope = q.chunk(HEADS, -1)[head].split([NOPE, ROPE], -1)
        k_nope, v = expanded.chunk(HEADS, -1)[head].split([NOPE, VALUE], -1)
        scores = q_nope @ k_nope.mT + rotate(q_rope) @ rotate(compressed[..., RANK:]).mT
        scores = (scores * (NOPE + ROPE) ** -0.5).masked_fill(future, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
    return attention.o_proj(torch.cat(outputs, -1))


def test_it_is_its_definition(attention: LatentAttention) -> None:
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(attention(x, Context(x)), by_definition(attention, x), rtol=1e-6, atol=1e-8)


def chunks(tokens: Tensor, sizes: list[int]) -> Iterator[Tensor]:
    yield from tokens.split(sizes, 1)


@torch.no_grad()
@pytest.mark.parametrize("capacity", [None, 40], ids=["growing", "static"])
@pytest.mark.parametrize("sizes", [[12, 1, 1, 1], [1] * 15, [3, 5, 7], [15]], ids=str)
def test_calls_with_a_cache_are_one_call(capacity: int | None, sizes: list[int]) -> None:
    model, tokens = decoder(), torch.randint(50, (2, 15))
    cache = model.new_cache(capacity)
    got = torch.cat([model(part, Context(part, cache=cache)) for part in chunks(tokens, sizes)], 1)
    torch.testing.assert_close(got, model(tokens), rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_the_cache_holds_latent_vectors_and_one_rotated_key() -> None:
    model, tokens = decoder(), torch.randint(50, (2, 15))
    for cache in (model.new_cache(), model.new_cache(20)):
        model(tokens, Context(tokens, cache=cache))
        latents, k_rope = cache.layers[0].read()
        assert (latents.shape, k_rope.shape) == ((2, 15, 1, RANK), (2, 15, 1, ROPE))
    assert cache.nbytes == 2 * 2 * 20 * (RANK + ROPE) * 8


@torch.no_grad()
@pytest.mark.parametrize("capacity", [None, 40], ids=["growing", "static"])
def test_caches_are_cropped_reordered_and_cloned(capacity: int | None) -> None:
    model, tokens = decoder(), torch.randint(50, (2, 12))
    expected = model(tokens)

    def step(cache: KVCache, part: Tensor) -> Tensor:
        return model(part, Context(part, cache=cache))

    cache = model.new_cache(capacity)
    step(cache, tokens[:, :10])
    clone = cache.clone()
    cache.crop(7)
    torch.testing.assert_close(step(cache, tokens[:, 7:8])[:, 0], expected[:, 7])
    clone.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(step(clone, tokens.flip(0)[:, 10:11])[:, 0], expected.flip(0)[:, 10])


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[6, 1, 1, 1], [2, 3, 4]], ids=str)
def test_fp8_caches_do_not_depend_on_the_calls(sizes: list[int]) -> None:
    model, tokens = decoder(), torch.randint(50, (2, 9))
    results = []
    for split in (sizes, [1] * 9):
        cache = model.new_cache(dtype=FP8)
        results.append(torch.cat([model(p, Context(p, cache=cache)) for p in chunks(tokens, split)], 1))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    error = (results[0] - model(tokens)).abs().max()
    assert 1e-6 < error < 1


def test_exact_caches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^exact cache: "):
        decoder().new_cache(exact=True)


def test_probabilities_are_stored_on_request(attention: LatentAttention) -> None:
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    context = Context(x)
    context.attentions = []
    torch.testing.assert_close(attention(x, context), attention(x, Context(x)))
    assert context.attentions[0].shape == (2, HEADS, 9, 9)


@torch.no_grad()
def test_a_modified_projection_is_not_absorbed(attention: LatentAttention) -> None:
    """Such as one with an adapter: decoding expands keys and values with its forward."""
    x = torch.randn(1, 6, HIDDEN, dtype=torch.float64)
    attention.kv_b_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    context, cache = Context(x), KVCache([attention.new_cache()])
    expected = attention(x, context)
    got = [attention(part, Context(part, cache=cache), cache.layers[0]) for part in x.split([5, 1], 1)]
    torch.testing.assert_close(torch.cat(got, 1), expected)


def test_values_narrower_than_keys() -> None:
    q, k, v = (torch.randn(2, 7, 3, n, requires_grad=True) for n in (8, 8, 5))
    out = attend_unequal(q, k, v)
    expected = attend_unequal(q, k, torch.nn.functional.pad(v, (0, 3)))
    assert out.shape == (2, 7, 3, 5)
    torch.testing.assert_close(out, expected[..., :5])


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"^LatentAttention: .*num_heads=0.*expected positive numbers"):
        LatentAttention(8, 0, 4, 4, 4, RotaryEmbedding(4))

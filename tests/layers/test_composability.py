"""Random decoders composed of the layers give the same results from a cache, packed, saved and compiled."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from ligerzoo.layers import (
    Attention,
    Context,
    Decoder,
    Experts,
    GatedMLP,
    GateProjectionAttention,
    KVCache,
    LayerNorm,
    LMHead,
    MoE,
    NormalizedEmbedding,
    PostNormBlock,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
    Router,
    SandwichBlock,
    ScaledEmbedding,
    ScaledPreNormBlock,
    SharedExpertMoE,
    StaticLayerCache,
    TokenCache,
    shifted_labels,
)

H, V = 16, 31
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


class Model(nn.Module):
    def __init__(self, decoder: Decoder, head: LMHead, is_tied: bool) -> None:
        super().__init__()
        self.decoder, self.head = decoder, head
        if is_tied:
            head.weight = decoder.embed_tokens.weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        return self.head(self.decoder(tokens, context))  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        context = Context(tokens, cu_seqlens=cu_seqlens)
        hidden = self.decoder(tokens, context)
        return self.head(hidden, shifted_labels(labels, context.segment_start))  # type: ignore[no-any-return]


@st.composite
def models(draw: st.DrawFn, fewest: int = 2, most: int = 3) -> Model:
    """Layers with random attention, MLP and window each."""
    heads, kv_heads, head_dim = draw(st.sampled_from([(4, 4, 4), (4, 2, 6), (4, 1, 8), (3, 3, 10)]))
    interleaved, partial = draw(st.booleans()), draw(st.booleans())
    rotary = RotaryEmbedding(head_dim // 2 // 2 * 2 if partial else head_dim, 100.0, interleaved=interleaved)
    make_norm = draw(
        st.sampled_from([RMSNorm, LayerNorm, lambda n: RMSNorm(n, weight_offset=1.0, round_before_scale=False)])
    )
    make_block = draw(st.sampled_from([pre_norm, scaled_pre_norm, post_norm, sandwich]))

    def attention() -> Attention:
        with_norms = draw(st.booleans())
        return draw(st.sampled_from([Attention, GateProjectionAttention]))(
            H, heads, kv_heads, head_dim, draw(st.sampled_from([rotary, rotary, None])),
            q_norm=make_norm(head_dim) if with_norms else None, k_norm=make_norm(head_dim) if with_norms else None,
            window=draw(st.sampled_from([None, 1, 3, 8])), softcap=draw(st.sampled_from([None, 2.0])),
            scale=draw(st.sampled_from([None, 0.3])), qkv_bias=draw(st.booleans()), output_bias=draw(st.booleans()),
        )  # fmt: skip

    def feed_forward() -> nn.Module:
        kind = draw(st.sampled_from(["gated", "mixture", "shared"]))
        if kind == "gated":
            return GatedMLP(H, 20, activation=draw(st.sampled_from(["silu", "gelu_tanh", "gelu"])))
        routed = Router(H, 4, 2, renormalize=draw(st.booleans())), Experts(H, 8, 4)
        return MoE(*routed) if kind == "mixture" else SharedExpertMoE(*routed, GatedMLP(H, 8), nn.Linear(H, 1))

    embeddings = ScaledEmbedding(V, H, 4.0), NormalizedEmbedding(V, H, RMSNorm(H)), nn.Embedding(V, H)
    embedding = draw(st.sampled_from(embeddings))
    layers = [
        make_block(lambda: make_norm(H), attention(), feed_forward()) for _ in range(draw(st.integers(fewest, most)))
    ]
    head = LMHead(H, V, softcap=draw(st.sampled_from([None, 5.0])), logit_scale=draw(st.sampled_from([1.0, 0.25])))
    decoder = Decoder(embedding, layers, make_norm(H), input_scale=draw(st.sampled_from([1.0, 3.0])))
    model = Model(decoder, head, is_tied=draw(st.booleans()))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    return model.double()  # rounding must not change the selected experts


def pre_norm(norm: Any, attention: nn.Module, mlp: nn.Module) -> nn.Module:
    return PreNormBlock(norm(), attention, norm(), mlp)


def scaled_pre_norm(norm: Any, attention: nn.Module, mlp: nn.Module) -> nn.Module:
    return ScaledPreNormBlock(0.5, norm(), attention, norm(), mlp)


def post_norm(norm: Any, attention: nn.Module, mlp: nn.Module) -> nn.Module:
    return PostNormBlock(attention, norm(), mlp, norm())


def sandwich(norm: Any, attention: nn.Module, mlp: nn.Module) -> nn.Module:
    return SandwichBlock(norm(), attention, norm(), norm(), mlp, norm())


def random_tokens(rows: int, length: int) -> Tensor:
    return torch.randint(V, (rows, length))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9 * max(1.0, expected.abs().max().item()))


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_near(got[name], gradient)


@seed(1)
@EXAMPLES
@given(models())
def test_forward_and_backward(model: Model) -> None:
    """The loss matches the logits, every parameter has a gradient, and recomputation gives the same."""
    tokens = random_tokens(2, 12)
    loss = model.loss(tokens, tokens)
    logits = model(tokens)
    assert_near(loss, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
    loss.backward()
    plain = gradients(model)
    assert plain.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.isfinite().all() for gradient in plain.values())
    model.decoder.gradient_checkpointing = True
    model.loss(tokens, tokens).backward()
    assert_same_gradients(gradients(model), plain)


def caches(model: Model) -> Iterator[KVCache]:
    yield model.decoder.new_cache()
    yield model.decoder.new_cache(capacity=25)
    yield KVCache([TokenCache(), *(StaticLayerCache(30) for _ in model.decoder.layers[1:])])


@seed(2)
@EXAMPLES
@given(models())
@torch.no_grad()
def test_cached_decoding(model: Model) -> None:
    """In chunks and token by token, past every window; also with left padding."""
    tokens = random_tokens(2, 24)
    padding_mask = torch.ones_like(tokens)
    padding_mask[1, :5] = 0
    for mask in (None, padding_mask):
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        whole = model(tokens, Context(tokens, mask, positions))
        for cache in caches(model):
            pieces = []
            for start, end in [(0, 9), (9, 10), (10, 11), (11, 15), (15, 16), (16, 23), (23, 24)]:
                piece, piece_mask = tokens[:, start:end], None if mask is None else mask[:, :end]
                at = None if positions is None else positions[:, start:end]
                pieces.append(model(piece, Context(piece, piece_mask, at, cache=cache)))
            got = torch.cat(pieces, 1)
            assert_near(
                got[padding_mask == 1] if mask is not None else got,
                whole[padding_mask == 1] if mask is not None else whole,
            )


@seed(3)
@EXAMPLES
@given(models(), st.integers(1, 9), st.integers(1, 9))
def test_packed(model: Model, first: int, second: int) -> None:
    """[A | B | padding] gives the same logits, loss and gradients as A and B alone."""
    a, b, padding = random_tokens(1, first), random_tokens(1, second), random_tokens(1, 4)
    tokens = torch.cat([a, b, padding], 1)
    bounds = torch.tensor([0, first, first + second])
    expected = [model(sequence) for sequence in (a, b)]
    restarting = torch.cat([torch.arange(n) for n in (first, second, 4)])[None]
    for packing in ({"cu_seqlens": bounds}, {"position_ids": restarting}):
        got = model(tokens, Context(tokens, **packing))
        for alone, part in zip(expected, got.split([first, second, 4], 1), strict=False):
            assert_near(part, alone)

    labels = torch.cat([a, b, torch.full_like(padding, -100)], 1)
    model.loss(tokens, labels, bounds).backward()
    packed = gradients(model)
    count = first + second - 2
    if count > 0:
        for sequence in (a, b):
            loss = model.loss(sequence, sequence)
            (loss * (sequence.shape[1] - 1) / count).backward()
        assert_same_gradients(packed, gradients(model))


@seed(4)
@EXAMPLES
@given(models())
def test_saved_and_loaded(tmp_path_factory: pytest.TempPathFactory, model: Model) -> None:
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    save_model(model, str(path))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_model(other, path)
    for (name, ours), (_, again) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(ours, again), name
    tokens = random_tokens(1, 9)
    assert torch.equal(model(tokens), other(tokens))
    second = path.with_name("again.safetensors")
    save_model(other, str(second))
    assert path.read_bytes() == second.read_bytes()


@seed(5)
@settings(EXAMPLES, max_examples=2)
@given(models(1, 1))
def test_compiled(model: Model) -> None:
    assert_compiled_is_eager(model)


@pytest.mark.thorough
@seed(5)
@settings(EXAMPLES, max_examples=6)
@given(models())
def test_more_models_compiled(model: Model) -> None:
    assert_compiled_is_eager(model)


def assert_compiled_is_eager(model: Model) -> None:
    torch._dynamo.reset()
    tokens = random_tokens(2, 12)
    expected = model.loss(tokens, tokens)
    expected.backward()
    required = gradients(model)
    loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager")(tokens, tokens)
    loss.backward()
    assert_near(loss, expected)
    assert_same_gradients(gradients(model), required)

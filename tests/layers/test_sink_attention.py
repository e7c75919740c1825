"""Attention with sinks in every way that `attend` and a layer compute it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from ligerzoo.kernels.dispatch import HOPPER, simulated_gpu
from ligerzoo.kernels.fp8 import FP8
from ligerzoo.layers import Attention, Context, KVCache, RotaryEmbedding, SinkAttention, attend
from ligerzoo.layers import flex_attention as attention_file
from ligerzoo.layers.attention_call import AttentionCall
from ligerzoo.layers.masks import Mask
from ligerzoo.layers.plain_attention import reference


def tensors(tokens: int, dtype: torch.dtype, device: str, head_dim: int = 16) -> list[Tensor]:
    """Queries, keys, values and sinks."""
    shapes = [(2, tokens, heads, head_dim) for heads in (4, 2, 2)]
    return [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for shape in (*shapes, (4,))]


def masks(tokens: int, x: Tensor) -> dict[str, Any]:
    """Arguments of a `Context` and of its mask."""
    padding = torch.ones(2, tokens, device=x.device)
    padding[1, :3] = 0
    positions = torch.arange(tokens, device=x.device) % (tokens // 2)
    return {
        "none": ({}, {}),
        "window": ({}, {"window": 5}),
        "padding": ({"attention_mask": padding}, {}),
        "packed, window": ({"position_ids": positions[None]}, {"window": 5}),
        "bidirectional": ({}, {"is_causal": False}),
    }


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float64, 1e-11)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", ["none", "window", "padding", "packed, window", "bidirectional"])
def test_attend(name: str, softcap: float | None, dtype: torch.dtype, tolerance: float, device: str) -> None:
    inputs = tensors(12, dtype, device)
    of_context, of_mask = masks(12, inputs[0])[name]
    mask = Context(inputs[0].flatten(2), **of_context).mask(12, **of_mask)
    is_causal = of_mask.get("is_causal", True)
    upstream = torch.randn(2, 12, 4, 16, dtype=dtype, device=device)
    out = attend(*inputs[:3], mask, softcap=softcap, is_causal=is_causal, sinks=inputs[3])
    got = [out, *torch.autograd.grad(out, inputs, upstream)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    additive = mask.additive(torch.float64) if isinstance(mask, Mask) else None
    out = reference(AttentionCall(*exact[:3], additive, None, softcap, is_causal, exact[3]))
    expected = [out, *torch.autograd.grad(out, exact, upstream.double())]
    for actual, truth in zip(got, expected, strict=True):
        assert actual.dtype == dtype
        assert (actual.double() - truth).abs().max() <= tolerance * truth.abs().max()


def test_the_sum_of_probabilities_is_less_than_one(device: str) -> None:
    q, k, v, sinks = (t.detach() for t in tensors(6, torch.float64, device))
    ones = torch.ones_like(v)
    total = attend(q, k, ones, sinks=sinks)
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(2, 1).mT / 4).masked_fill(
        torch.ones(6, 6, device=device).triu(1) > 0, -torch.inf
    )
    expected = 1 - torch.sigmoid(sinks[:, None] - scores.logsumexp(-1))
    torch.testing.assert_close(total[..., 0], expected.transpose(1, 2))
    torch.testing.assert_close(attend(q, k, v, sinks=torch.full_like(sinks, -torch.inf)), attend(q, k, v))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", ["window", "packed, window"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_with_sinks(name: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked attention on a GPU: FlexAttention, here in eager mode, and the sinks through its logsumexp."""
    monkeypatch.setattr(attention_file, "_compiled_flex_attention", lambda: flex_attention)
    inputs = tensors(12, torch.float32, "cpu")
    of_context, of_mask = masks(12, inputs[0])[name]
    mask = Context(inputs[0].flatten(2), **of_context).mask(12, force=True, **of_mask)
    assert isinstance(mask, Mask)
    upstream = torch.randn(2, 12, 4, 16)
    q, k, v, sinks = (t.detach() for t in inputs)
    forward = attention_file.run_flex_attention(AttentionCall(q, k, v, mask, 0.3, softcap, True, sinks))
    expected = reference(AttentionCall(*inputs[:3], mask.additive(torch.float32), 0.3, softcap, True, inputs[3]))
    torch.testing.assert_close(forward, expected, rtol=0, atol=1e-5)
    # Torch's FlexAttention has no backward on a CPU: what reaches it are the gradients of its output and logsumexp.
    q, k, v = (t.transpose(1, 2).repeat_interleave(4 // t.shape[2], 1) for t in inputs[:3])
    scores = q @ k.mT * 0.3
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)) + mask.additive(torch.float32)
    plain = (scores.softmax(-1) @ v).transpose(1, 2)
    out = attention_file.apply_sinks(plain, scores.logsumexp(-1), inputs[3])
    for got, truth in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (out, expected)), strict=True):
        torch.testing.assert_close(got, truth, rtol=0, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [200, 3000])
@pytest.mark.parametrize("name", ["none", "window", "padding", "packed, window"])
def test_long_sequences_on_a_gpu(name: str, tokens: int) -> None:
    inputs = tensors(tokens, torch.bfloat16, "cuda", 64)
    of_context, of_mask = masks(tokens, inputs[0])[name]
    mask = Context(inputs[0].flatten(2), **of_context).mask(tokens, **of_mask)
    upstream = torch.randn_like(inputs[0])
    additive = None if mask is None else mask.additive(torch.float32)  # type: ignore[union-attr]
    results = []
    for given, dtype in ((mask, torch.bfloat16), (additive, torch.float32)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        call = AttentionCall(*leaves[:3], given, sinks=leaves[3])
        out = attend(*call) if dtype == torch.bfloat16 else reference(call)
        results.append([out, *torch.autograd.grad(out, leaves, upstream.to(dtype))])
    is_text = torch.ones(2, tokens, dtype=torch.bool, device="cuda")
    if name == "padding":
        is_text[1, :3] = False  # attends to itself on a GPU
    for i, (got, truth) in enumerate(zip(*results, strict=True)):
        if i < 2:
            got, truth = got[is_text], truth[is_text]
        assert (got.float() - truth).abs().max() <= 3e-2 * truth.abs().max()


OPTIONS: dict[str, Any] = {"head_dim": 8, "qkv_bias": True, "output_bias": True}


def layer(window: int | None, device: str) -> SinkAttention:
    attention = SinkAttention(24, 4, 2, rotary=RotaryEmbedding(8), window=window, device=device, **OPTIONS)
    torch.nn.init.normal_(attention.sinks)
    return attention


@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_caches(window: int | None, device: str) -> None:
    attention, x = layer(window, device), torch.randn(2, 11, 24, device=device)
    whole = attention(x, Context(x))
    plain = Attention(24, 4, 2, rotary=RotaryEmbedding(8), window=window, device=device, **OPTIONS)
    plain.load_state_dict(attention.state_dict(), strict=False)
    assert (plain(x, Context(x)) - whole).abs().max() > 1e-3
    for cache in (attention.new_cache(), attention.new_cache(capacity=16)):
        pieces = [
            attention(piece, Context(piece, cache=KVCache([cache])), cache) for piece in x.split([5, 1, 1, 3, 1], 1)
        ]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-5)


def test_probabilities(device: str) -> None:
    attention, x = layer(4, device), torch.randn(2, 7, 24, device=device)
    context = Context(x)
    context.attentions = []
    torch.testing.assert_close(attention(x, context), attention(x, Context(x)), rtol=0, atol=1e-5)
    total = context.attentions[0].sum(-1)
    assert ((total > 0) & (total < 1)).all()


@pytest.mark.parametrize("window", [None, 100])
def test_memory_of_a_step_on_meta(window: int | None) -> None:
    """On a GPU a fused backward with sinks keeps what it keeps without; masked attention keeps its output as well."""
    kept = []
    for sinks in (None, torch.empty(4, device="meta", requires_grad=True)):
        shapes = [(1, 2048, heads, 64) for heads in (4, 2, 2)]
        q, k, v = (torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        saved: dict[int, int] = {}

        def keep(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            return t

        with simulated_gpu(HOPPER), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = attend(q, k, v, Context(q.flatten(2)).mask(2048, window=window), sinks=sinks)
        assert out.shape == q.shape
        out.backward(torch.empty_like(out))
        assert sinks is None or sinks.grad is not None or window is None
        kept.append(sum(saved.values()))
    assert 0 <= kept[1] - kept[0] <= 4 * 4


def test_fp8_is_a_dtype_of_caches(device: str) -> None:
    q, k, v, sinks = (t.detach() for t in tensors(9, torch.bfloat16, device))
    k8, v8 = k.to(FP8), v.to(FP8)
    expected = attend(q[:, -1:], k8.bfloat16(), v8.bfloat16(), sinks=sinks)
    torch.testing.assert_close(attend(q[:, -1:], k8, v8, sinks=sinks), expected)

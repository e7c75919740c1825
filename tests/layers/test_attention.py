import copy
import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from ligerzoo.layers import (
    Attention,
    Context,
    Decoder,
    GatedMLP,
    GateProjectionAttention,
    KVCache,
    LayerOutputs,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
    TokenCache,
    attend,
    fused_sdpa,
)  # fmt: skip
from ligerzoo.layers.attention_call import AttentionCall
from ligerzoo.layers.masks import Mask
from ligerzoo.layers.plain_attention import reference


def brute_force(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Computes attention one element at a time, in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for b, t, n in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        scores = (k[b, :, n // group].double() @ q[b, t, n].double()) * scale
        weights = scores.masked_fill(~visible[b, t], -math.inf).softmax(-1)
        out[b, t, n] = weights @ v[b, :, n // group].double()
    return out


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("head_dim", [6, 16])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_attend(
    kv_heads: int, head_dim: int, scale: float | None, dtype: torch.dtype, tolerance: float, device: str
) -> None:
    q = torch.randn(2, 7, 6, head_dim, dtype=dtype, device=device)
    k, v = (torch.randn(2, 7, kv_heads, head_dim, dtype=dtype, device=device) for _ in "kv")
    visible = torch.ones(2, 7, 7, dtype=torch.bool).tril()
    expected = brute_force(q.cpu(), k.cpu(), v.cpu(), visible, scale or head_dim**-0.5)
    out = attend(q, k, v, scale=scale)
    assert (out.dtype, out.shape) == (dtype, q.shape)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=tolerance)

    visible[1, :, :2] = False
    visible[1, :2, :2] = torch.eye(2, dtype=torch.bool)
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[:, None].to(device)
    expected = brute_force(q.cpu(), k.cpu(), v.cpu(), visible, scale or head_dim**-0.5)
    torch.testing.assert_close(attend(q, k, v, mask, scale).cpu().double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_query_attends_to_all_keys(dtype: torch.dtype, device: str) -> None:
    q, k, v = (torch.randn(2, 9, 4, 8, dtype=dtype, device=device) for _ in "qkv")
    torch.testing.assert_close(attend(q[:, -1:], k, v), attend(q, k, v)[:, -1:], rtol=0, atol=1e-2)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_gradients_through_padding(dtype: torch.dtype, tolerance: float, device: str) -> None:
    """Includes rows without visible keys, for which a fused kernel gives gradients many times too large."""
    attention_mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], device=device)
    exact = [torch.randn(4, 5, heads, 8, dtype=torch.float64, device=device) for heads in (4, 2, 2, 4)]
    exact = [tensor.to(dtype).double() for tensor in exact]
    results = []
    for function, of in ((attend, dtype), (reference, torch.float64)):
        q, k, v, upstream = (tensor.to(of, copy=True).requires_grad_() for tensor in exact)
        mask = Context(q.flatten(2), attention_mask).mask(5)
        assert isinstance(mask, Mask)
        call = AttentionCall(q, k, v, mask.additive(of))
        out = attend(*call) if function is attend else reference(call)
        results.append([out, *torch.autograd.grad(out, (q, k, v), upstream)])
    for got, expected in zip(*results, strict=True):
        scale = expected.abs().max().item()
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_matches_transformers_llama(kv_heads: int, bias: bool, device: str) -> None:
    config = LlamaConfig(
        hidden_size=24, num_attention_heads=3, num_key_value_heads=kv_heads, head_dim=10, attention_bias=bias
    )
    config._attn_implementation = "eager"
    theirs = LlamaAttention(config, layer_idx=0).to(device)
    ours = Attention(24, 3, kv_heads, 10, RotaryEmbedding(10), qkv_bias=bias, output_bias=bias, device=device)
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(2, 11, 24, device=device), torch.arange(11, device=device)[None]
    mask = torch.full((11, 11), torch.finfo(torch.float32).min, device=device).triu(1)[None, None]
    expected, _ = theirs(x, LlamaRotaryEmbedding(config).to(device)(x, positions), mask)
    torch.testing.assert_close(ours(x, Context(x)), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours(x, Context(x, mask.expand(2, -1, -1, -1))), expected, rtol=0, atol=1e-5)


def test_default_sizes() -> None:
    attention = Attention(24, 4)
    assert attention.head_dim == 6
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (24, 24)
    assert attention.q_proj.bias is None
    assert attention.o_proj.bias is None


def test_head_counts_must_divide() -> None:
    with pytest.raises(ValueError, match="num_heads=6; expected a multiple of num_kv_heads=4"):
        Attention(24, 6, 4)


@pytest.mark.parametrize("wrong", [{"num_heads": 0}, {"num_kv_heads": 0}, {"head_dim": 0}, {"window": 0}])
def test_sizes_of_zero_are_refused(wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(ValueError, match=f"Attention: {name}=0; expected an integer, 1 or more"):
        Attention(**{"hidden_size": 24, "num_heads": 4, **wrong})


def test_cache_is_extended() -> None:
    attention, x, cache = Attention(24, 4, 2, rotary=RotaryEmbedding(6)), torch.randn(2, 9, 24), TokenCache()
    whole = attention(x, Context(x))
    parts = []
    for start, end in [(0, 4), (4, 5), (5, 9)]:
        piece = x[:, start:end]
        parts.append(attention(piece, Context(piece, cache=KVCache([cache])), cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-6)
    assert cache.length == 9


def test_backend_is_passed_to_the_rotation() -> None:
    attention = Attention(16, 2, rotary=RotaryEmbedding(8), backend="triton", dtype=torch.float64)
    x = torch.randn(1, 3, 16, dtype=torch.float64)  # not supported by the kernel
    with pytest.raises(ValueError, match='backend="triton"'):
        attention(x, Context(x))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by torch.compile
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("kind", ["plain", "padded on the left", "padded on the right", "packed"])
def test_long_sequences_on_a_gpu(kind: str, window: int | None, softcap: float | None) -> None:
    """FlexAttention without a T x S matrix: outputs and gradients match the reference, also for padding."""
    rows, tokens = 2 if "padded" in kind else 1, 2500
    options: dict[str, Tensor] = {}
    if "padded" in kind:
        options["attention_mask"] = torch.ones(rows, tokens, device="cuda")
        options["attention_mask"][1, slice(-400, None) if "right" in kind else slice(400)] = 0
    if kind == "packed":
        options["cu_seqlens"] = torch.tensor([0, 700, 710, 2400], device="cuda")
    q, k, v = (torch.randn(rows, tokens, heads, 64, device="cuda", requires_grad=True) for heads in (4, 2, 2))
    context = Context(q.flatten(2), **options)
    mask = context.mask(tokens, window=window, force=True)
    assert isinstance(mask, Mask)
    upstream = torch.randn_like(q)
    attend(q, k, v, mask, softcap=softcap).sum().backward()  # compiles, which needs memory too
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attend(q, k, v, mask, softcap=softcap)
    got = [out, *torch.autograd.grad(out, (q, k, v), upstream)]
    assert torch.cuda.max_memory_allocated() - before < 8 * q.nbytes
    expected = reference(AttentionCall(q, k, v, mask.additive(q.dtype), softcap=softcap))
    required = [expected, *torch.autograd.grad(expected, (q, k, v), upstream)]
    for a, b in zip(got, required, strict=True):
        assert (a - b).norm() <= 2e-3 * b.norm()  # tf32


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by torch.compile
@pytest.mark.parametrize("tokens", [300, 1500])
def test_heads_larger_than_those_of_fused_kernels_on_a_gpu(tokens: int) -> None:
    """Heads of 512 features, without the scores of all heads."""
    layer = Attention(64, 8, 2, 512, scale=1.0, q_norm=RMSNorm(512), k_norm=RMSNorm(512)).to("cuda", torch.bfloat16)
    exact = copy.deepcopy(layer).float()
    x = torch.randn(1, tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wide = x.detach().float().requires_grad_()
    record: list[Tensor] = []
    y, expected = layer(x, Context(x)), exact(wide, Context(wide, outputs=LayerOutputs(attentions=record)))
    assert (y - expected).norm() <= 0.02 * expected.norm()
    dy = torch.randn_like(y)
    got, truth = torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, wide, dy.float())[0]
    assert (got - truth).norm() <= 0.05 * truth.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_grows_with_the_tokens_on_a_gpu(dtype: torch.dtype) -> None:
    """Forward and backward of grouped queries keep no T x S matrix."""
    tokens, heads = 4096, 8
    q, k, v = (
        torch.randn(1, tokens, n, 64, device="cuda", dtype=dtype, requires_grad=True) for n in (heads, 2, 2)
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(q, k, v).sum().backward()
    scores = heads * tokens * tokens * dtype.itemsize
    assert torch.cuda.max_memory_allocated() - before < scores / 4


@pytest.mark.gpu
def test_decode_step_in_a_cuda_graph() -> None:
    """A step with a static cache is captured once and replayed for the next tokens."""
    torch.manual_seed(0)
    blocks = [
        PreNormBlock(
            RMSNorm(64), Attention(64, 4, 2, rotary=RotaryEmbedding(16), window=w), RMSNorm(64), GatedMLP(64, 96)
        )
        for w in (None, 6)
    ]
    model = Decoder(nn.Embedding(50, 64), blocks, RMSNorm(64)).cuda()
    tokens = torch.randint(50, (2, 20), device="cuda")
    with torch.no_grad():
        expected = model(tokens)
        cache = model.new_cache(capacity=20)
        model(tokens[:, :5], Context(tokens[:, :5], cache=cache))
        token = tokens[:, 5:6].clone()
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            outputs = [model(token, Context(token, cache=cache))]
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(token, Context(token, cache=cache))
        for i in range(6, 20):
            token.copy_(tokens[:, i : i + 1])
            graph.replay()
            outputs.append(out.clone())
    torch.testing.assert_close(torch.cat(outputs, 1), expected[:, 5:], rtol=0, atol=2e-3)


@pytest.mark.gpu
def test_other_models_keep_the_kernels_that_torch_chooses() -> None:
    """torch orders its kernels at the first attention of a process, here ours."""
    script = """
import sys, torch
from ligerzoo.layers.attention_paths import attend
q = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
if "ours" in sys.argv:
    attend(q, q, q)
x = q.transpose(1, 2)
print(torch._fused_sdp_choice(x, x, x, is_causal=True), torch._C._get_sdp_priority_order())
"""
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    alone, after_ours = (run([sys.executable, "-c", script, first]).stdout for first in ("theirs", "ours"))
    assert alone == after_ours


def kernels_of_torch() -> tuple[list[bool], list[int]]:
    return [is_enabled() for is_enabled, _ in fused_sdpa._SWITCHES], torch._C._get_sdp_priority_order()


def test_the_fastest_kernel_comes_first_as_in_torch() -> None:
    """Within the context as within torch's own, which takes ten times as long, and afterwards as before."""

    before = kernels_of_torch()
    with sdpa_kernel(fused_sdpa._FASTEST_FIRST, set_priority=True):
        expected = kernels_of_torch()
    assert kernels_of_torch() == before != expected
    with fused_sdpa._FastestFirst():
        assert kernels_of_torch() == expected
    assert kernels_of_torch() == before


def test_threads_leave_the_choice_of_kernels_as_it_was() -> None:
    fastest, before, meet = fused_sdpa._FastestFirst(), kernels_of_torch(), threading.Barrier(2, timeout=30)

    def overlap(first: bool) -> None:
        if not first:
            meet.wait()
        with fastest:
            if first:
                meet.wait()
            meet.wait()
        meet.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(overlap, (True, False)))
    assert kernels_of_torch() == before


@pytest.mark.parametrize("gate_size", [None, 1])
def test_the_output_of_attention_times_a_projected_gate(gate_size: int | None) -> None:
    """For each feature of a head, or one for all of them; the gate has no bias where the others have one."""
    options = {"rotary": RotaryEmbedding(6), "qkv_bias": True}
    gated, plain = GateProjectionAttention(24, 4, 2, gate_size=gate_size, **options), Attention(24, 4, 2, **options)
    plain.load_state_dict({**plain.state_dict(), **gated.state_dict(), "o_proj.weight": torch.eye(24)}, strict=False)
    x = torch.randn(2, 9, 24)
    gate = gated.gate_proj(x).sigmoid()
    expected = plain(x, Context(x)) * (gate if gate_size is None else gate.repeat_interleave(6, -1))
    torch.testing.assert_close(gated(x, Context(x)), gated.o_proj(expected))


@torch.no_grad()
@pytest.mark.parametrize("capacity", [None, 40])
def test_tokens_attend_within_chunks_of_their_text(capacity: int | None, device: str) -> None:
    """Padding anywhere does not count, each packed segment begins with a chunk, and caches keep what chunks need."""
    layer = Attention(24, 4, 2, chunk=5).to(device, torch.float64)
    plain = Attention(24, 4, 2).to(device, torch.float64)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 30, 24, device=device, dtype=torch.float64)

    def alone(text: Tensor) -> Tensor:
        return torch.cat([plain(part[None], Context(part[None]))[0] for part in text.split(5)])

    expected = torch.stack([alone(text) for text in x])
    torch.testing.assert_close(layer(x, Context(x)), expected)
    cache = KVCache([layer.new_cache(capacity)])
    pieces = [layer(part, Context(part, cache=cache), cache.layers[0]) for part in x.split([8, 1, 1, 13, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected)

    mask = torch.tensor([[c == "#" for c in row * 3] for row in ("##########", "..########", "###..##.##")])
    got = layer(x, Context(x, attention_mask=mask.to(device)))
    for row, text, is_token in zip(got, x, mask.to(device), strict=True):
        torch.testing.assert_close(row[is_token], alone(text[is_token]))
    packed = layer(x[:1], Context(x[:1], cu_seqlens=torch.tensor([0, 12, 13, 30], device=device)))
    torch.testing.assert_close(packed[0], torch.cat([alone(text) for text in x[0].split([12, 1, 17])]))

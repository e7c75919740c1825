"""Attention sinks against softmax over scores and sinks, in plain torch and in fp64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import apply_sinks, sink_attention
from ligerzoo.kernels.attention_sinks import attention_kernel, reference
from ligerzoo.layers.attention_call import AttentionCall
from ligerzoo.layers.plain_attention import reference as attention_reference
from tests.kernels.accuracy import differentiate, judge
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import INTERPRETING, ON_GPU, ROUNDED_DTYPES, on_gpu_too
from tests.kernels.oracles import numbers


def results(
    batch: int, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: str, spread: float = 3.0
) -> list[Tensor]:
    """An output, its logsumexp and sinks."""
    wide = torch.promote_types(dtype, torch.float32)
    return [
        numbers(batch, tokens, heads, head_dim, dtype=dtype, device=device),
        numbers(batch, heads, tokens, dtype=wide, device=device, scale=spread),
        numbers(heads, dtype=dtype, device=device, scale=spread),
    ]


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", on_gpu_too([(1, 1, 1, 1), (2, 5, 3, 10), (1, 70, 4, 64), (2, 130, 2, 33)], [(2, 4099, 64, 64)]), ids=str
)
def test_apply_sinks(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    judge(apply_sinks, reference, results(*shape, dtype, device))


@pytest.mark.parametrize("spread", [30.0, 80.0])
def test_sinks_far_from_the_logsumexp(spread: float, device: str) -> None:
    inputs = results(2, 20, 3, 16, torch.float32, device, spread)
    judge(apply_sinks, reference, inputs)
    outputs, gradients = differentiate(apply_sinks, inputs, [torch.randn_like(inputs[0])])
    assert all(t is not None and t.isfinite().all() for t in (*outputs, *gradients))


def test_layouts(device: str) -> None:
    out, lse, sinks = results(2, 40, 6, 24, torch.float16, device)
    heads_first = out.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    wider = torch.randn(2, 40, 6, 48, device=device).half()[..., ::2].requires_grad_()
    for layout in (heads_first, wider):
        judge(apply_sinks, reference, [layout, lse.detach().mT.contiguous().mT.requires_grad_(), sinks])


@pytest.mark.parametrize("trainable", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_frozen_inputs(trainable: tuple[int, ...], device: str) -> None:
    inputs = [
        t.detach().requires_grad_(i in trainable) for i, t in enumerate(results(2, 9, 3, 8, torch.float32, device))
    ]
    judge(apply_sinks, reference, inputs)


@pytest.mark.parametrize("lse_shape, n_sinks", [((2, 5, 3), 3), ((2, 3, 5), 4)])
def test_shapes_are_checked(lse_shape: tuple[int, ...], n_sinks: int, device: str) -> None:
    with pytest.raises(ValueError, match=r"^apply_sinks: out is \(2, 5, 3, 8\), lse .*; expected shapes"):
        apply_sinks(torch.ones(2, 5, 3, 8), torch.ones(lse_shape), torch.ones(n_sinks))


def attention_inputs(
    batch: int, tokens: int, keys: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    n_heads, n_kv_heads = heads
    return [
        numbers(batch, tokens, n_heads, head_dim, dtype=dtype, device=device),
        numbers(batch, keys, n_kv_heads, head_dim, dtype=dtype, device=device),
        numbers(batch, keys, n_kv_heads, head_dim, dtype=dtype, device=device),
        numbers(n_heads, dtype=dtype, device=device, scale=2.0),
    ]


def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float | None = None, is_causal: bool = True) -> Tensor:
    return attention_reference(AttentionCall(q, k, v, None, scale, None, is_causal, sinks))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("tokens, keys, is_causal", [(40, 40, True), (9, 33, False), (1, 17, False)])
def test_sink_attention(
    tokens: int, keys: int, is_causal: bool, heads: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    """The fused backward, called with the output and the logsumexp of attention with sinks."""
    inputs = attention_inputs(2, tokens, keys, heads, 16, dtype, device)
    for scale in (None, 0.4):
        options = {"scale": scale, "is_causal": is_causal}
        function, oracle = partial(sink_attention, **options), partial(plain, **options)
        if ON_GPU:
            judge(function, oracle, inputs, is_repeatable=False)
            continue
        # Torch's fused kernel for a CPU approximates exp: in fp32 it is less exact than plain torch, without sinks too.
        upstream = [torch.randn_like(inputs[0])]
        got, expected = (differentiate(f, inputs, upstream) for f in (function, oracle))
        for actual, truth in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
            assert actual is not None
            assert truth is not None
            tolerance = 1e-5 if dtype == torch.float32 else 1e-13
            assert (actual - truth).abs().max() <= tolerance * truth.abs().max()


@pytest.mark.skipif(ON_GPU or INTERPRETING, reason="fp64 runs in plain torch on a CPU")
def test_gradients_of_sink_attention() -> None:
    inputs = attention_inputs(2, 9, 9, (4, 2), 8, torch.float64, "cpu")
    assert torch.autograd.gradcheck(sink_attention, inputs, fast_mode=False)
    assert torch.autograd.gradcheck(apply_sinks, results(2, 5, 3, 4, torch.float64, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_kernel_of_a_gpu(kernel: str, dtype: torch.dtype, head_dim: int, device: str) -> None:
    inputs = attention_inputs(2, 1024, 1024, (16, 2), head_dim, dtype, device)
    judge(partial(sink_attention, kernel=kernel), plain, inputs, is_repeatable=False)


@pytest.mark.gpu
def test_the_kernel_of_a_gpu(device: str) -> None:
    q, k, v, _ = attention_inputs(1, 256, 256, (8, 2), 64, torch.bfloat16, device)
    assert attention_kernel(q, k, v, True) == "cudnn"
    assert attention_kernel(*(x[..., :60] for x in (q, k, v)), True) is None
    assert attention_kernel(q.float(), k.float(), v.float(), True) is None


@pytest.mark.plain
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_it_compiles(head_dim: int, dtype: torch.dtype) -> None:
    inputs = results(2, 100, 8, head_dim, dtype, "cpu")
    with compiling_for_hopper():
        apply_sinks(*inputs, backend="triton").sum().backward()
        q, k, v, sinks = attention_inputs(1, 100, 100, (8, 2), head_dim, torch.float32, "cpu")
        sink_attention(q, k, v, sinks, kernel="cpu", backend="triton").sum().backward()


def test_unsupported_tensors_are_refused() -> None:
    inputs = attention_inputs(1, 4, 4, (2, 2), 8, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match=r"^sink_attention: torch.bfloat16 on cpu with head size 8; expected bf16 or"):
        sink_attention(*inputs)
    with pytest.raises(ValueError, match=r"^sink_attention: q is .*; expected .* T = S with is_causal=True"):
        sink_attention(*attention_inputs(1, 4, 6, (2, 2), 8, torch.float32, "cpu"))

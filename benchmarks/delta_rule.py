"""The layers of Qwen3.5's linear attention: gated delta rule, causal convolution, gated norm, and the gates.

    python -m benchmarks.delta_rule --out benchmarks/results/delta_rule.json
    python -m benchmarks.delta_rule --device cpu --quick --out /tmp/delta_rule.json

Shapes of Qwen3.5-4B and 27B (16 key heads, 32 and 48 value heads of 128) at 8192 tokens, as one text and packed from
texts of several lengths. flash-linear-attention and causal-conv1d run where they are installed. `benchmarks.row`
describes the method. fla shares key heads among value heads itself, which is faster than transformers' repeated heads.
It compiles and tunes its kernels for 100 s or more per shape where Triton's cache is empty: `--patience`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations import EPS, normal, ours, plain, upcast
from benchmarks.row import OURS, Floor, Function, Goal, Provider, Row
from benchmarks.suite import Size, suite_command

KEY_HEADS, HEAD_DIM, TAPS = 16, 128, 4
VALUE_HEADS = {"4B": 32, "27B": 48}
TEXTS = (3000, 1500, 1200, 900, 700, 500, 392)
"""Tokens of packed texts; 8192 in all."""


def segment_bounds(tokens: int) -> list[int]:
    """Bounds of the packed texts, in proportion to `TEXTS`."""
    bounds = [0]
    for length in TEXTS[:-1]:
        bounds.append(bounds[-1] + max(1, length * tokens // sum(TEXTS)))
    return [*(b for b in bounds if b < tokens), tokens]


def segment_start_of(tokens: int) -> Tensor:
    bounds = segment_bounds(tokens)
    lengths = torch.tensor([end - start for start, end in pairwise(bounds)])
    return torch.tensor(bounds[:-1]).repeat_interleave(lengths)[None]


def cu_seqlens_of(segment_start: Tensor) -> Tensor:
    starts = segment_start[0].unique()
    return torch.cat([starts, starts.new_tensor([segment_start.shape[1]])])


# The gated delta rule


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segment_start: Tensor | None = None
) -> Tensor:
    """By chunks of 64 tokens in plain torch; see `ligerzoo.kernels.delta_chunks`."""
    tokens = v.shape[1]
    starts = [0] * tokens if segment_start is None else segment_start[0].tolist()
    bounds = [*(t for t in range(tokens) if (t - starts[t]) % 64 == 0), tokens]
    q, k = (upcast(x) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (q * q.shape[-1] ** -0.5, k))
    wide_v, total, wide_beta = (upcast(x).transpose(1, 2) for x in (v, g[..., None], beta[..., None]))
    state = wide_v.new_zeros(*wide_v.shape[:2], k.shape[-1], wide_v.shape[-1])
    outputs = []
    for first, end in pairwise(bounds):
        if first == starts[first]:
            state = torch.zeros_like(state)
        now = slice(first, end)
        q_now, k_now, sums = q[:, :, now], k[:, :, now], total[:, :, now].cumsum(2)
        decay = (sums - sums.mT).tril().exp().tril()
        system = (wide_beta[:, :, now] * decay * (k_now @ k_now.mT)).tril(-1)
        residual = wide_beta[:, :, now] * (wide_v[:, :, now] - sums.exp() * (k_now @ state))
        identity = torch.eye(end - first, dtype=system.dtype, device=system.device)
        delta = torch.linalg.solve_triangular(identity + system, residual, upper=False, unitriangular=True)
        outputs.append(sums.exp() * (q_now @ state) + (decay * (q_now @ k_now.mT)) @ delta)
        last = sums[:, :, -1:]
        state = last.exp() * state + k_now.mT @ ((last - sums).exp() * delta)
    return torch.cat(outputs, 2).transpose(1, 2).to(v.dtype)


def fla_rule() -> Function:
    chunk: Any = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segment_start: Tensor | None = None) -> Tensor:
        bounds = None if segment_start is None else cu_seqlens_of(segment_start)
        result: Tensor = chunk(q, k, v, g, beta, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True)[0]
        return result

    return run


def our_rule() -> Function:
    function = importlib.import_module("ligerzoo.kernels").gated_delta_rule
    return lambda *inputs: function(*inputs[:5], segment_start=inputs[5] if len(inputs) > 5 else None)


def rule_row(variant: str, tokens: int, key_heads: int, value_heads: int, packed: bool) -> Row:
    def make_inputs() -> dict[str, Tensor]:
        inputs = {
            "q": normal(1, tokens, key_heads, HEAD_DIM),
            "k": normal(1, tokens, key_heads, HEAD_DIM),
            "v": normal(1, tokens, value_heads, HEAD_DIM),
            "g": (-0.1 * torch.rand(1, tokens, value_heads)).requires_grad_(),
            "beta": torch.rand(1, tokens, value_heads).bfloat16().requires_grad_(),
        }
        return {**inputs, "segment_start": segment_start_of(tokens)} if packed else inputs

    # Per value head: read, write and query the state token by token; the chunked form needs about as many.
    flops = 6 * tokens * value_heads * HEAD_DIM**2
    return Row(
        "gated_delta_rule",
        (tokens, key_heads, value_heads, HEAD_DIM),
        make_inputs,
        gated_delta_rule,
        {
            OURS: Provider(our_rule),
            "eager": Provider(lambda: gated_delta_rule),
            "flash-linear-attention": Provider(fla_rule, needs_gpu=True),
        },
        Floor(flops, 3 * flops, "FLOPs"),
        Goal(),
        variant=variant,
        outputs=("o",),
        shared=frozenset({"segment_start"}),
    )


# The convolution


def causal_conv(x: Tensor, weight: Tensor, segment_start: Tensor | None = None) -> Tensor:
    tokens = x.shape[1]
    y = torch.zeros_like(upcast(x))
    for j in range(weight.shape[1]):
        shifted = F.pad(upcast(x), (0, 0, j, 0))[:, :tokens]
        if segment_start is not None:
            hidden = torch.arange(tokens, device=x.device) - j < segment_start
            shifted = shifted.masked_fill(hidden[..., None], 0.0)
        y = y + shifted * upcast(weight)[:, weight.shape[1] - 1 - j]
    return F.silu(y).to(x.dtype)


def causal_conv1d_package() -> Function:
    function: Any = importlib.import_module("causal_conv1d").causal_conv1d_fn

    def run(x: Tensor, weight: Tensor, segment_start: Tensor | None = None) -> Tensor:
        index = None if segment_start is None else segment_start.to(torch.int32).expand(len(x), -1).contiguous()
        result: Tensor = function(x.mT, weight, None, seq_idx=index, activation="silu").mT
        return result

    return run


def our_conv() -> Function:
    function = importlib.import_module("ligerzoo.kernels").causal_conv1d
    return lambda x, weight, segment_start=None: function(x, weight, segment_start=segment_start, activation="silu")


def conv_row(variant: str, tokens: int, channels: int, packed: bool) -> Row:
    def make_inputs() -> dict[str, Tensor]:
        inputs = {"x": normal(1, tokens, channels), "weight": normal(channels, TAPS, scale=0.3)}
        return {**inputs, "segment_start": segment_start_of(tokens)} if packed else inputs

    size = 2 * tokens * channels
    return Row(
        "causal_conv1d",
        (tokens, channels),
        make_inputs,
        causal_conv,
        {
            OURS: Provider(our_conv),
            **plain(causal_conv),
            "causal-conv1d": Provider(causal_conv1d_package, needs_gpu=True),
        },
        Floor(2 * size, 5 * size),
        Goal(),
        variant=variant,
        outputs=("y",),
        shared=frozenset({"weight", "segment_start"}),
    )


# The gated norm and the gates


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    normalized = (upcast(x) * torch.rsqrt(upcast(x).square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return (weight * normalized * F.silu(upcast(z))).to(x.dtype)


def fla_gated_norm() -> Function:
    norm: Any = importlib.import_module("fla.modules.fused_norm_gate").rms_norm_gated
    return lambda x, z, weight: norm(x, z, weight, None, activation="silu", eps=EPS)


def gated_norm_row(variant: str, tokens: int, value_heads: int) -> Row:
    size = 2 * tokens * value_heads * HEAD_DIM
    return Row(
        "gated_rms_norm",
        (tokens, value_heads, HEAD_DIM),
        lambda: {
            "x": normal(1, tokens, value_heads, HEAD_DIM),
            "z": normal(1, tokens, value_heads, HEAD_DIM),
            "weight": normal(HEAD_DIM, scale=0.1, shift=1.0),
        },
        gated_rms_norm,
        {
            OURS: ours("gated_rms_norm", EPS),
            **plain(gated_rms_norm),
            "flash-linear-attention": Provider(fla_gated_norm, needs_gpu=True),
        },
        Floor(3 * size, 8 * size),
        Goal(),
        variant=variant,
        outputs=("y",),
        shared=frozenset({"weight"}),
    )


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    return -upcast(a_log).exp() * F.softplus(upcast(a) + upcast(dt_bias)), b.sigmoid()


def gates_row(variant: str, tokens: int, value_heads: int) -> Row:
    size = tokens * value_heads
    return Row(
        "delta_gates",
        (tokens, value_heads),
        lambda: {
            "a": normal(1, tokens, value_heads),
            "b": normal(1, tokens, value_heads),
            "a_log": torch.rand(value_heads).requires_grad_(),
            "dt_bias": normal(value_heads),
        },
        delta_gates,
        {OURS: ours("delta_gates"), **plain(delta_gates)},
        Floor(10 * size, 24 * size),
        Goal(),
        variant=variant,
        outputs=("g", "beta"),
        shared=frozenset({"a_log", "dt_bias"}),
    )


def rows(size: Size) -> Iterator[Row]:
    tokens, key_heads = size(8192), size(KEY_HEADS)
    for name, heads in VALUE_HEADS.items():
        value_heads = key_heads * heads // KEY_HEADS
        channels = (2 * key_heads + value_heads) * HEAD_DIM
        for packed in (False, True):
            variant = f"{name}, packed" if packed else name
            yield rule_row(variant, tokens, key_heads, value_heads, packed)
            yield conv_row(variant, tokens, channels, packed)
        yield gated_norm_row(name, tokens, value_heads)
        yield gates_row(name, tokens, value_heads)


if __name__ == "__main__":
    suite_command(rows, what=__doc__, out=Path("benchmarks/results/delta_rule.json"), seconds=0.8)

"""The layers of Mamba-2: state-space duality with its gates, and the grouped gated norm.

    python -m benchmarks.state_space --out benchmarks/results/state_space.json
    python -m benchmarks.state_space --device cpu --quick --out /tmp/state_space.json

Shapes of Nemotron-H and Falcon-H1 at 8192 tokens, also in batches of 4 and packed from texts of several lengths.
mamba-ssm runs where it is installed, with the chunks of the models' configs. `benchmarks.row` describes the method.
flash-linear-attention has no groups, and refuses its backward pass on Hopper with Triton before 3.7.1.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.delta_rule import segment_start_of
from benchmarks.operations import EPS, normal, ours, plain, upcast
from benchmarks.row import OURS, Floor, Function, Provider, Row
from benchmarks.suite import Size, suite_command
from benchmarks.tuning import compile_in_parallel
from ligerzoo.kernels.dispatch import Backend


class Shape(NamedTuple):
    """Sizes of a model's Mamba-2 layers."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    chunk: int


MODELS = {
    "Nemotron-H-8B": Shape(128, 64, 8, 128, 128),
    "Nemotron-3-Nano-30B": Shape(64, 64, 8, 128, 128),
    "Nemotron-Nano-9B-v2": Shape(128, 80, 8, 128, 128),
    "Falcon-H1-7B": Shape(24, 128, 1, 256, 256),
}
TOKENS = 8192


def mamba_ssm(name: str) -> Any:
    """A module of mamba_ssm.ops.triton, whose kernels are tuned."""
    module = importlib.import_module(f"mamba_ssm.ops.triton.{name}")
    compile_in_parallel()
    return module


# State-space duality


def our_ssd(backend: Backend = "auto") -> Function:
    kernels: Any = importlib.import_module("ligerzoo.kernels")

    def run(
        x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, dt_bias: Tensor, d: Tensor, *start: Tensor
    ) -> Tensor:
        g, steps = kernels.ssd_gates(dt, a_log, dt_bias, backend=backend)
        y: Tensor = kernels.ssd(x, b, c, g, steps, d, segment_start=start[0] if start else None, backend=backend)
        return y

    return run


def mamba_ssd(chunk: int) -> Function:
    scan: Any = mamba_ssm("ssd_combined").mamba_chunk_scan_combined

    def run(
        x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, dt_bias: Tensor, d: Tensor, *start: Tensor
    ) -> Tensor:
        index = start[0].to(torch.int32).expand(len(x), -1).contiguous() if start else None
        y: Tensor = scan(x, dt, -a_log.exp(), b, c, chunk, D=d, dt_bias=dt_bias, dt_softplus=True, seq_idx=index)
        return y

    return run


def ssd_row(model: str, batch: int, tokens: int, shape: Shape, packed: bool = False) -> Row:
    heads, head_dim, groups, state_size, chunk = shape

    def make_inputs() -> dict[str, Tensor]:
        step = torch.empty(heads).uniform_(0.001, 0.1)  # of an input of 0
        inputs = {
            "x": normal(batch, tokens, heads, head_dim),
            "dt": normal(batch, tokens, heads),
            "b": normal(batch, tokens, groups, state_size),
            "c": normal(batch, tokens, groups, state_size),
            "a_log": torch.empty(heads).uniform_(1, 16).log_().requires_grad_(),
            "dt_bias": step.expm1_().log_().requires_grad_(),
            "d": torch.ones(heads).requires_grad_(),
        }
        return {**inputs, "segment_start": segment_start_of(tokens)} if packed else inputs

    eager = our_ssd("torch")
    # Forward reads x, dt, b and c, and writes y. Backward reads the same and dy, and writes four gradients.
    rows = 2 * batch * tokens
    x_bytes, dt_bytes, bc_bytes = rows * heads * head_dim, rows * heads, 2 * rows * groups * state_size
    return Row(
        "ssd",
        (batch, tokens, *shape[:4]),
        make_inputs,
        eager,
        {
            OURS: Provider(our_ssd),
            "eager": Provider(lambda: eager),
            "mamba-ssm": Provider(lambda: mamba_ssd(chunk), needs_gpu=True),
        },
        Floor(2 * x_bytes + dt_bytes + bc_bytes, 5 * x_bytes + 3 * dt_bytes + 3 * bc_bytes),
        variant=f"{model}, packed" if packed else model,
        shared=frozenset({"a_log", "dt_bias", "d", "segment_start"}),
        tokens_at_once=1,  # one text: the first dimension is the batch
    )


# The norm


def grouped_norm(x: Tensor, z: Tensor, weight: Tensor, group_size: int) -> Tensor:
    groups = (upcast(x) * F.silu(upcast(z))).unflatten(-1, (-1, group_size))
    normalized = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + EPS)
    return weight * normalized.flatten(-2).to(x.dtype)


def mamba_norm(group_size: int) -> Function:
    norm: Any = mamba_ssm("layernorm_gated").rmsnorm_fn
    return lambda x, z, weight: norm(x, weight, None, z, EPS, group_size, norm_before_gate=False)


def norm_row(model: str, tokens: int, shape: Shape) -> Row:
    inner = shape.heads * shape.head_dim
    group_size, size = inner // shape.groups, 2 * tokens * inner

    def formula(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return grouped_norm(x, z, weight, group_size)

    return Row(
        "grouped_gated_rms_norm",
        (tokens, inner, shape.groups),
        lambda: {
            "x": normal(tokens, inner), "z": normal(tokens, inner), "weight": normal(inner, scale=0.1, shift=1.0)
        },
        formula,
        {
            OURS: ours("gated_rms_norm", EPS, group_size=group_size, norm_before_gate=False),
            **plain(formula),
            "mamba-ssm": Provider(lambda: mamba_norm(group_size), needs_gpu=True),
        },
        Floor(3 * size, 8 * size),
        variant=model,
        shared=frozenset({"weight"}),
    )  # fmt: skip


def rows(size: Size) -> Iterator[Row]:
    """Those first that need no other tuning than the row before."""
    tokens = size(TOKENS)
    main, shape = next(iter(MODELS.items()))
    yield ssd_row(main, 1, tokens, shape)
    yield ssd_row(main, 4, tokens, shape)
    yield norm_row(main, tokens, shape)
    for model, other in list(MODELS.items())[1:]:
        yield ssd_row(model, 1, tokens, other)
    yield ssd_row(main, 1, tokens, shape, packed=True)


if __name__ == "__main__":
    suite_command(rows, what=__doc__, out=Path("benchmarks/results/state_space.json"), seconds=0.5)

"""The linear attention of Kimi Linear: the gated delta rule with a gate per channel, with its gates.

    python -m benchmarks.delta_channels --out benchmarks/results/delta_channels.json
    python -m benchmarks.delta_channels --device cpu --quick --out /tmp/delta_channels.json

The shape of Kimi-Linear-48B-A3B (32 heads of 128) at 8192 tokens, as one text and packed from texts of several lengths.
flash-linear-attention, which computes the gates in its kernels, runs where it is installed, but not on packed texts:
it would compile and tune for minutes again. `benchmarks.row` describes the method.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.delta_rule import HEAD_DIM, segment_start_of
from benchmarks.operations import normal
from benchmarks.row import OURS, Floor, Function, Provider, Row
from benchmarks.suite import Size, suite_command
from benchmarks.tuning import compile_in_parallel
from ligerzoo.kernels.dispatch import Backend

HEADS, TOKENS = 32, 8192


def our_rule(backend: Backend = "auto") -> Function:
    kernels: Any = importlib.import_module("ligerzoo.kernels")

    def run(
        q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *start: Tensor
    ) -> Tensor:
        g, beta = kernels.delta_gates(a, b, a_log, dt_bias, backend=backend)
        segment_start = start[0] if start else None
        o: Tensor = kernels.gated_delta_rule(q, k, v, g, beta, segment_start=segment_start, backend=backend)
        return o

    return run


def fla_rule() -> Function:
    chunks: Any = importlib.import_module("fla.ops.kda").chunk_kda
    compile_in_parallel()
    in_kernel = {f"use_{what}_in_kernel": True for what in ("qk_l2norm", "gate", "beta_sigmoid")}

    def run(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        o: Tensor = chunks(q, k, v, a, b, A_log=a_log, dt_bias=dt_bias.flatten(), **in_kernel)[0]
        return o

    return run


def rule_row(variant: str, batch: int, tokens: int, heads: int, packed: bool) -> Row:
    def make_inputs() -> dict[str, Tensor]:
        step = torch.empty(heads, HEAD_DIM).uniform_(0.001, 0.1)  # of an input of 0
        inputs = {
            **{name: normal(batch, tokens, heads, HEAD_DIM) for name in "qkva"},
            "b": normal(batch, tokens, heads),
            "a_log": torch.empty(heads).uniform_(1, 16).log_().requires_grad_(),
            "dt_bias": step.expm1_().log_().requires_grad_(),
        }
        return {**inputs, "segment_start": segment_start_of(tokens)} if packed else inputs

    eager = our_rule("torch")
    flops = 6 * batch * tokens * heads * HEAD_DIM**2  # as `benchmarks.delta_rule`
    return Row(
        "gated_delta_rule_per_channel",
        (batch, tokens, heads, HEAD_DIM),
        make_inputs,
        eager,
        {
            OURS: Provider(our_rule),
            "eager": Provider(lambda: eager),
            **({} if packed else {"flash-linear-attention": Provider(fla_rule, needs_gpu=True)}),
        },
        Floor(flops, 3 * flops, "FLOPs"),
        variant=variant,
        outputs=("o",),
        shared=frozenset({"a_log", "dt_bias", "segment_start"}),
        tokens_at_once=1,  # one text: the first dimension is the batch
    )


def rows(size: Size) -> Iterator[Row]:
    tokens, heads = size(TOKENS), size(HEADS)
    yield rule_row("Kimi-Linear-48B", 1, tokens, heads, packed=False)
    yield rule_row("Kimi-Linear-48B, packed", 1, tokens, heads, packed=True)


if __name__ == "__main__":
    suite_command(rows, what=__doc__, out=Path("benchmarks/results/delta_channels.json"), seconds=0.5)

"""Random products of the shapes, segments and dtypes of `gated_delta_rule`, judged against the token-by-token rule."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ligerzoo.kernels import gated_delta_rule
from ligerzoo.kernels.dispatch import INTERPRETING
from tests.kernels.accuracy import assert_equal, judge_draws
from tests.kernels.accuracy import judge as judge_accuracy
from tests.kernels.layouts import sliced
from tests.kernels.machine import HALF_DTYPE, ON_GPU
from tests.kernels.segments import starts_of
from tests.kernels.test_delta_rule import oracle, rule, tensors, worst_condition_number

BACKEND: Any = "triton" if ON_GPU or INTERPRETING else "torch"


@dataclass(frozen=True)
class Case:
    """A call of `gated_delta_rule`.

    Attributes:
        rows: lengths of the segments of each row. One row of lengths describes all `batch` rows.
    """

    batch: int
    rows: tuple[tuple[int, ...], ...]
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    is_packed: bool
    is_sliced: bool
    normalize: bool
    scale: float | None
    decay: float
    gates: str
    seed: int

    def inputs(self, device: str) -> list[Tensor]:
        options: dict[str, Any] = {"device": device, "dtype": self.dtype, "gates": self.gates}
        inputs = tensors(self.batch, sum(self.rows[0]), self.heads, self.dims, **options)
        inputs[3] = inputs[3].detach() * self.decay
        if not self.normalize:
            inputs[1] = torch.nn.functional.normalize(inputs[1].detach(), dim=-1)
        return [(sliced(t.detach()) if self.is_sliced else t.detach()).requires_grad_() for t in inputs]

    def options(self, device: str) -> dict[str, Any]:
        options: dict[str, Any] = {"scale": self.scale, "normalize": self.normalize}
        if self.is_packed:
            bounds = [[sum(row[:i]) for i in range(len(row) + 1)] for row in self.rows]
            options["segment_start"] = torch.cat([starts_of(b, device) for b in bounds])
        return options


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch, group, key_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    lengths = st.lists(st.sampled_from([1, 2, 5, 31, 63, 64, 65, 97]), min_size=1, max_size=5)
    first = draw(lengths)
    total = sum(first)
    rows = [first]
    for _ in range(batch - 1 if draw(st.booleans()) else 0):
        cuts = sorted(draw(st.sets(st.integers(1, total), max_size=4)) | {total})
        rows.append([end - start for start, end in zip([0, *cuts], cuts, strict=False)])
    dim = st.sampled_from([5, 8, 16, 17, 32, 40])  # torch has other code for vectors
    return Case(
        batch=batch,
        rows=tuple(tuple(row) for row in rows),
        heads=(key_heads, key_heads * group),
        dims=(draw(dim), draw(dim)),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, HALF_DTYPE])),
        is_packed=draw(st.booleans()),
        is_sliced=draw(st.booleans()),
        normalize=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3])),
        decay=draw(st.sampled_from([0.0, 1.0, 30.0])),
        gates=draw(st.sampled_from(["per head", "per channel"])),
        seed=draw(st.integers(0, 2**16)),
    )


def thoroughly(examples: int) -> Any:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.thorough
@thoroughly(200)
@given(case=cases())
def test_outputs_and_gradients(case: Case) -> None:
    device = "cuda" if ON_GPU else "cpu"

    def judge_draw(seed: int) -> None:
        torch.manual_seed(seed)
        options, inputs = case.options(device), case.inputs(device)
        ulps = 2 * worst_condition_number(inputs[1]) ** 0.5
        judge_accuracy(rule(**options, backend=BACKEND), oracle(**options), inputs, ulps=ulps)

    judge_draws(judge_draw, case.seed)


@pytest.mark.thorough
@thoroughly(100)
@given(case=cases())
def test_a_packed_segment_equals_the_segment_alone_bit_by_bit(case: Case) -> None:
    assume(BACKEND == "triton" or case.batch == 1)  # in another row, products on a CPU have other alignments
    device = "cuda" if ON_GPU else "cpu"
    torch.manual_seed(case.seed)
    inputs, options = case.inputs(device)[:5], case.options(device)
    upstream = torch.randn(inputs[2].shape, device=device, dtype=case.dtype)

    def results(row: slice, first: int, end: int, segment_start: Tensor | None) -> list[Tensor]:
        leaves = [t.detach()[row, first:end].requires_grad_() for t in inputs]
        o: Any = gated_delta_rule(*leaves, **{**options, "segment_start": segment_start}, backend=BACKEND)
        return [o.detach(), *torch.autograd.grad(o, leaves, upstream[row, first:end])]

    total = sum(case.rows[0])
    starts = torch.zeros(1, total, dtype=torch.int64) if not case.is_packed else options["segment_start"].cpu()
    together = results(slice(None), 0, total, options.get("segment_start"))
    for row in range(case.batch):
        bounds = [*starts[row % len(starts)].unique().tolist(), total]
        for first, end in pairwise(bounds):
            alone = results(slice(row, row + 1), first, end, None)
            assert_equal([t[row : row + 1, first:end] for t in together], alone)

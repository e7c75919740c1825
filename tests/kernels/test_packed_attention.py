"""Packed attention against softmax over the scores of each document, and against the documents alone."""

import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels import packed_attention, packing
from ligerzoo.kernels.packed_attention import reference
from ligerzoo.kernels.packing import DocumentBatch, as_packing, pack_documents
from tests.kernels.accuracy import differentiate, judge
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import INTERPRETING, ON_GPU, needs_hopper, on_gpu_too
from tests.kernels.oracles import numbers

DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def compare(
    inputs: list[Tensor], plan: packing.Packing, join: Callable[..., tuple[Tensor, ...]] = lambda *x: x
) -> None:
    """Compares outputs and gradients with the reference; `join` makes q, k, v and sinks of the inputs."""

    def call(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        q, k, v, *sinks = join(*inputs)
        return function(q, k, v, plan, scale=0.3, sinks=sinks[0] if sinks else None)

    functions = partial(call, packed_attention), partial(call, reference)
    if ON_GPU:
        judge(*functions, inputs, is_repeatable=False)
        return
    # Torch's fused kernel for a CPU approximates exp: in fp32 it is less exact than plain torch.
    upstream = [torch.randn_like(functions[1](*inputs))]
    got, expected = (differentiate(function, inputs, upstream) for function in functions)
    for actual, truth in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert actual is not None
        assert truth is not None
        assert (actual - truth).abs().max() <= 1e-5 * truth.abs().max()


def spans(lengths: list[int]) -> list[tuple[int, int]]:
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def operands(rows: int, tokens: int, heads: int, kv_heads: int, head_dim: int, device: str) -> list[Tensor]:
    return [numbers(rows, tokens, n, head_dim, dtype=DTYPE, device=device) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.long
@pytest.mark.parametrize(
    "lengths, tokens",
    on_gpu_too(
        [
            ([[7]], 7),
            ([[1, 1, 60]], 62),
            ([[3, 70, 9], [100]], 100),
            ([[], [50]], 60),
            ([[0, 40, 0]], 40),
            ([[1, 1]], 3),
        ],
        [([[2000, 48], [30, 1999]], 2048)],
    ),
    ids=str,
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_equals_the_reference(lengths: list[list[int]], tokens: int, with_sinks: bool, device: str) -> None:
    inputs = operands(len(lengths), tokens, 4, 2, 16, device)
    if with_sinks:
        inputs.append(numbers(4, dtype=DTYPE, device=device))
    compare(inputs, pack_documents([spans(row) for row in lengths], tokens, device))


def test_strided_inputs(device: str) -> None:
    joint = numbers(1, 40, 8, 16, dtype=DTYPE, device=device)
    compare(
        [joint], pack_documents([[(2, 30), (32, 7)]], 40, device), lambda x: (x[:, :, :4], x[:, :, 4:6], x[:, :, 6:])
    )


@pytest.mark.parametrize(
    "rows, tokens, batches",
    [
        (1, 130, [DocumentBatch([(5, 50)], 64, True), DocumentBatch([(69, 60)], 64, False)]),
        (2, 64, [DocumentBatch([(0, 32), (32, 32), (64, 32), (96, 32)], 32, True)]),
        (2, 32, [DocumentBatch([(0, 30), (32, 32)], 32, True)]),
    ],
    ids=["one", "all", "padded"],
)
def test_documents_in_place(rows: int, tokens: int, batches: list[DocumentBatch], device: str) -> None:
    """One document before others, some that fill the rows, and some with padding between them."""
    inputs = [*operands(rows, tokens, 3, 1, 16, device), numbers(3, dtype=DTYPE, device=device)]
    compare(inputs[:3], as_packing(batches, rows, tokens, device))
    compare(inputs, as_packing(batches, rows, tokens, device))


def test_large_scores_of_other_documents(device: str) -> None:
    """Their exponentials overflow where they are in place of padding."""
    factors = torch.ones(128, 1, 1, device=device)
    factors[50:] = 60
    plan = as_packing([DocumentBatch([(0, 50)], 128, True)], 1, 128, device)
    compare(operands(1, 128, 2, 1, 16, device), plan, lambda q, k, v: ((q * factors).to(q.dtype), k, v))


@pytest.mark.skipif(ON_GPU or INTERPRETING, reason="fp64 runs in plain torch on a CPU")
def test_gradients() -> None:
    q, k, v = (numbers(2, 9, n, 8, dtype=torch.float64) for n in (4, 2, 2))
    sinks, plan = numbers(4, dtype=torch.float64), pack_documents([[(0, 3), (3, 1), (4, 4)], [(2, 6)]], 9)
    assert torch.autograd.gradcheck(
        lambda q, k, v, sinks: packed_attention(q, k, v, plan, sinks=sinks), (q, k, v, sinks)
    )


def test_plans_hold_each_token_once() -> None:
    random.seed(0)
    for _ in range(50):
        tokens = random.choice([1, 100, 4096])
        lengths = []
        for _ in range(random.randint(1, 3)):
            row, left = [], tokens
            while left and random.random() < 0.95:
                row.append(min(left, random.choice([1, random.randint(1, 300), random.randint(1, tokens)])))
                left -= row[-1]
            lengths.append(row)
        plan = pack_documents([spans(row) for row in lengths], tokens)
        sizes = [torch.tensor(row, dtype=torch.int64) for row in lengths]
        longer = [size.repeat_interleave(size) > 1 for size in sizes]
        inside = torch.cat([F.pad(row, (0, tokens - len(row))) for row in longer])
        assert torch.equal(plan.alone, (~inside).nonzero()[:, 0])
        assert torch.equal(plan.source[plan.source >= 0].sort().values, inside.nonzero()[:, 0])
        table = plan.batches.tolist()
        assert len(plan.source) == sum(documents * length for documents, length, *_ in table)
        parts = plan.source.split([documents * length for documents, length, *_ in table])
        for source, (_, _, start) in zip(parts, table, strict=True):
            if start >= 0:  # in place
                slots = (source >= 0).nonzero()[:, 0]
                assert torch.equal(source[slots], start + slots)
                assert start + len(source) <= len(inside)


def test_plans_cost_least(monkeypatch: pytest.MonkeyPatch) -> None:
    def best(documents: list[tuple[int, int]], end: int) -> int:
        """The least cost of all ways to split documents, the longest first."""
        if not documents:
            return 0
        start, size = documents[0][0], packing.padded_length(documents[0][1])
        counts = range(1, len(documents) + 1)
        ways = [packing.batch_cost(n, size, in_place=False) + best(documents[n:], end) for n in counts]
        if start + size <= end:
            ways.append(packing.batch_cost(1, size, in_place=True) + best(documents[1:], end))
        return min(ways)

    monkeypatch.setattr(packing, "_LONG", 0)
    for lengths in ([600, 4000, 1000, 2500], [9000, 300, 200, 100, 10], [900] * 5, [1], [70, 64, 3]):
        batches = packing.plan([spans(lengths)], sum(lengths))
        expected = sorted(filter(lambda span: span[1] > 1, spans(lengths)), key=lambda span: -span[1])
        assert [document for batch in batches for document in batch.documents] == expected
        assert sum(batch.cost for batch in batches) == best(expected, sum(lengths))


@pytest.mark.parametrize(
    "lengths, distance", [([[512] * 5], 512), ([[1024], [1000], [3]], 1024), ([[128, 100], [2, 0]], 128)], ids=str
)
def test_documents_at_equal_distances_stay_in_place(lengths: list[list[int]], distance: int) -> None:
    rows = [[(i * distance, length) for i, length in enumerate(row)] for row in lengths]
    [batch] = packing.plan(rows, distance * len(lengths[0]))
    assert (batch.in_place, batch.length) == (True, distance)
    assert [length for _, length in batch.documents] == [length for row in lengths for length in row if length > 1]


def test_cudnn_plans_few_lengths() -> None:
    for rows in ([spans([1000] * 8)], [[(0, 1000)]] * 4):
        assert not any(batch.in_place and batch.length == 1000 for batch in packing.plan(rows, 8000))


@pytest.mark.parametrize("row", [[(0, 6), (5, 2)], [(8, 3)], [(-1, 2)], [(2, -1)]], ids=str)
def test_documents_that_do_not_fit(row: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"^pack_documents: rows\[1\] has a document .* within 10 tokens$"):
        pack_documents([[(0, 10)], row], 10)


@pytest.mark.skipif(INTERPRETING, reason="compiles to the same ops without the interpreter")
def test_compiled(device: str) -> None:
    """In one graph, which serves other documents and lengths."""
    compiled = torch.compile(packed_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    sinks = numbers(4, dtype=torch.float32, device=device)
    for lengths in ([20, 1, 15], [30, 8]):
        inputs, plan = [*operands(1, 40, 4, 2, 16, device), sinks], pack_documents([spans(lengths)], 40, device)
        results = []
        for function in (compiled, packed_attention):
            y = function(*inputs[:3], plan, sinks=sinks)
            results.append([y.detach(), *torch.autograd.grad(y.sum(), inputs)])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.plain
def test_compiles_for_a_gpu() -> None:
    q, k, v = (numbers(1, 70, n, 64, dtype=torch.float32) for n in (4, 2, 2))
    plan = pack_documents([[(0, 66), (66, 1), (67, 3)]], 70)
    with compiling_for_hopper() as compiled:
        packed_attention(q, k, v, plan, sinks=numbers(4, dtype=torch.float32), backend="triton").sum().backward()
    assert len(compiled) == 7  # tokens to and from the batches, in both passes, and sinks


def test_wrong_shapes(device: str) -> None:
    q, k, v = operands(1, 10, 4, 2, 16, device)
    for plan in (pack_documents([[(0, 5)]], 9, device), pack_documents([[(0, 5)]] * 2, 5, device)):
        with pytest.raises(ValueError, match=r"\(B, T\) tokens"):
            packed_attention(q, k, v, plan)
    with pytest.raises(ValueError, match="N a multiple of K"):
        packed_attention(q, k[:, :, :0], v[:, :, :0], pack_documents([[(0, 5)]], 10, device))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_no_tokens(shape: tuple[int, int], with_sinks: bool, device: str) -> None:
    inputs = operands(*shape, 4, 2, 16, device)
    if with_sinks:
        inputs.append(numbers(4, dtype=DTYPE, device=device))
    plan = pack_documents([[]] * shape[0], shape[1], device)
    y = packed_attention(*inputs[:3], plan, sinks=inputs[3] if with_sinks else None)
    assert y.shape == (*shape, 4, 16)
    for x, gradient in zip(inputs, torch.autograd.grad(y.sum(), inputs), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


def test_the_message_names_transforms_and_dtypes(device: str) -> None:
    q, k, v = operands(1, 10, 4, 2, 16, device)
    plan = pack_documents([[(0, 10)]], 10, device)
    with pytest.raises(ValueError, match=r"under a transform of torch\.func"):
        torch.func.grad(lambda q: packed_attention(q, k, v, plan).sum())(q)
    with pytest.raises(ValueError, match=r"torch\.float32, torch\.float64 on .*; expected one dtype"):
        packed_attention(q.float(), k.double(), v.double(), plan)


@pytest.mark.parametrize("span", [(0.0, 5), (0, 5.0)], ids=str)
def test_spans_of_floats(span: Any) -> None:
    with pytest.raises(ValueError, match=r"^pack_documents: rows\[0\] has the span .* as int$"):
        pack_documents([[span]], 10)


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_documents_have_the_bits_that_they_have_alone(head_dim: int) -> None:
    from ligerzoo.layers import attend

    lengths = [[2048, 700, 1, 333, 1000], [50, 4000]]
    q, k, v = operands(2, 4096, 32, 8, head_dim, "cuda")
    y = packed_attention(q, k, v, pack_documents([spans(row) for row in lengths], 4096, "cuda"))
    for row, found in enumerate(lengths):
        start = 0
        for length in found:
            segment = slice(row, row + 1), slice(start, start + length)
            assert torch.equal(y[segment], attend(q[segment], k[segment], v[segment])), (row, length)
            start += length

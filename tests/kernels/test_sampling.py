"""`sample_tokens`: the kernel draws the reference's tokens, which follow the softmax, in any batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import sample_tokens
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.philox import random_words
from ligerzoo.kernels.sampling import gumbel_noise, reference
from tests.covering import covering, long_cases
from tests.kernels import compiling
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import ROUNDED_DTYPES, needs_triton, on_gpu_too

OPTIONS: dict[str, list[Any]] = {
    "dtype": list(ROUNDED_DTYPES),
    "rows": [1, 3],
    "columns": on_gpu_too([1, 33, 2048, 5003], [128256]),
    "scores": [False, True],
    "drawing": ["greedy", "sampled", "both"],
    "threshold": [None, "some", "all but one"],
    "strided": [False, True],
}


def arguments(case: dict[str, Any], device: str) -> dict[str, Tensor]:
    rows, columns = case["rows"], case["columns"]

    def logits() -> Tensor:
        values = 3 * torch.randn(rows, (1 + case["strided"]) * columns, device=device)
        return values[:, :: 1 + case["strided"]].to(case["dtype"])

    tensors = {"logits": logits()}
    if case["scores"]:
        tensors["scores"] = logits()
    if case["drawing"] != "greedy":
        temperature = torch.rand(rows, device=device) + 0.5
        if case["drawing"] == "both":
            temperature[::2] = 0
        tensors |= {
            "seeds": torch.randint(2**62, (rows,), device=device),
            "steps": torch.randint(2**20, (rows,), device=device),
            "temperature": temperature,
        }
    if case["threshold"]:
        share = 0.3 if case["threshold"] == "some" else 1
        scores = tensors.get("scores", tensors["logits"]).float()
        threshold = scores.quantile(share, dim=1, interpolation="nearest")
        tensors |= {"threshold": threshold, "last_token": torch.full((rows,), columns, device=device)}
    return tensors


@needs_triton
@pytest.mark.parametrize("case", covering(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], device: str) -> None:
    tensors = arguments(case, device)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    actual = sample_tokens(**tensors, backend="triton")
    expected = reference(**tensors)
    assert torch.equal(actual.tokens, expected.tokens)
    logits = tensors["logits"].double()
    assert_as_exact_as(actual.logps, expected.logps, logits.log_softmax(-1).gather(1, expected.tokens[:, None])[:, 0])
    torch.testing.assert_close(actual.sampling_logps, expected.sampling_logps, rtol=1e-6, atol=4e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


@kernel
def _words_kernel(seeds_ptr, steps_ptr, words_ptr, n_groups, GROUPS: tl.constexpr):
    row = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    offsets = (tl.load(steps_ptr + row) << 32) | groups.to(tl.int64)
    words = tl.randint4x(tl.load(seeds_ptr + row), offsets)
    for i in tl.static_range(4):
        tl.store(words_ptr + (row * n_groups + groups) * 4 + i, words[i].to(tl.int64), mask=groups < n_groups)


@needs_triton
def test_random_words_are_those_of_triton(device: str) -> None:
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, 2**32], device=device)
    steps = torch.tensor([0, 1, 77, 2**31, 2**32 - 1], device=device)
    expected = torch.empty(5, 13, 4, dtype=torch.int64, device=device)
    _words_kernel[5](seeds, steps, expected, 13, 16, num_warps=1)
    assert torch.equal(random_words(seeds, steps, 50), expected.flatten(1)[:, :50])


def test_random_words_equal_a_published_vector() -> None:
    """Counter and key 0, from the known answers of the Random123 library."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert random_words(zero, zero, 4).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]


def test_gumbel_noise_is_finite_and_has_gumbel_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = gumbel_noise(torch.arange(40), torch.arange(40), 10_001).double()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    extremes = torch.tensor([[0, 1, 2**31, 2**32 - 2, 2**32 - 1]])
    monkeypatch.setattr("ligerzoo.kernels.sampling.random_words", lambda *_: extremes)
    noise = gumbel_noise(torch.zeros(1), torch.zeros(1), 5)
    assert noise.isfinite().all()
    assert (noise.diff() < 0)[0, :-1].all()
    assert noise[0, 0] == pytest.approx(33 * math.log(2), rel=1e-6)  # u = 1 - 2^-33


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature: float, device: str) -> None:
    draws = 20_000
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 1.5, -math.inf, 0.5]], device=device)
    steps = torch.arange(draws, device=device) % 100
    seeds = torch.arange(draws, device=device) // 100
    tokens = reference(
        logits.expand(draws, -1), None, seeds, steps, torch.full((draws,), temperature, device=device)
    ).tokens
    expected = draws * (logits[0].double() / temperature).softmax(-1)
    counts = tokens.bincount(minlength=7).double()
    assert counts[5] == 0
    chi_square = ((counts - expected) ** 2 / expected)[expected > 0].sum()
    assert chi_square < 22.5  # 0.001 of the distribution with 5 degrees of freedom is above 20.5


@needs_triton
def test_a_row_has_the_same_bits_in_any_batch(device: str) -> None:
    rows, columns = 5, 5003
    logits, seeds = torch.randn(rows, columns, device=device), torch.arange(rows, device=device)
    tensors = [logits, 2 * logits, seeds, 3 * seeds, 0.3 * seeds.float()]
    together = sample_tokens(*tensors, backend="triton")
    for row in range(rows):
        alone = sample_tokens(*(t[row : row + 1] for t in tensors), backend="triton")
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("in_scores", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("columns", [7, 2100])
def test_broken_rows_have_nan(
    backend: Any, value: float, in_scores: bool, filtered: bool, columns: int, device: str
) -> None:
    logits = torch.randn(4, columns, device=device)
    broken = logits.clone()
    broken[1, slice(None) if value == -math.inf else 3] = value
    broken[3, 2:] = -math.inf  # valid
    scores = broken if in_scores else None
    index = torch.arange(4, device=device)
    temperature = torch.tensor([1.0, 0.0, 0.5, 1.0], device=device)
    bounds = (torch.full((4,), -math.inf, device=device), index) if filtered else (None, None)
    if filtered:
        bounds = (broken.masked_fill(broken.isnan(), 0).amin(-1), index + columns)
    for drawing in ((None, None, None), (index, index, temperature), (index, index, 1 - 0.5 * temperature)):
        sampled = sample_tokens(logits if in_scores else broken, scores, *drawing, *bounds, backend=backend)
        assert (sampled.sampling_logps.isnan() | sampled.logps.isnan()).tolist() == [False, True, False, False]
        assert ((sampled.tokens >= 0) & (sampled.tokens < columns)).all()
        assert sampled.tokens[3] < 2


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
def test_the_lower_token_id_of_equal_logits_is_chosen(backend: Any, device: str) -> None:
    logits = torch.zeros(2, 4200, device=device)
    logits[0, [2050, 2047, 4199]] = 1.0
    logits[1, [4100, 3000]] = 1.0
    assert sample_tokens(logits, backend=backend).tokens.tolist() == [2047, 3000]


COMPILED: dict[str, list[Any]] = {"columns": [97, 128256, 262144], "dtype": [torch.float32, torch.bfloat16]}


@pytest.mark.plain
@pytest.mark.parametrize("case", long_cases(COMPILED), ids=str)
def test_it_compiles(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    columns, dtype = case["columns"], case["dtype"]
    logits, index, numbers = torch.ones(3, columns, dtype=dtype), torch.arange(3), torch.ones(3)
    monkeypatch.setattr(compiling, "MAX_SHARED_MEMORY", 101376)  # of smaller GPUs
    with compiling_for_hopper():
        sample_tokens(logits, backend="triton")
        sample_tokens(logits, None, index, index, numbers, backend="triton")
        sample_tokens(logits, logits.float(), index, index, numbers, numbers, index, backend="triton")


def test_arguments_that_belong_together() -> None:
    with pytest.raises(TypeError, match=r"^sample_tokens: steps is None; expected an integer tensor of shape \(2,\)"):
        sample_tokens(torch.ones(2, 3), seeds=torch.arange(2))
    with pytest.raises(TypeError, match=r"^sample_tokens: last_token is None"):
        sample_tokens(torch.ones(2, 3), threshold=torch.ones(2))
    with pytest.raises(ValueError, match=r"^sample_tokens: scores has shape \(2, 4\); expected \(2, 3\)"):
        sample_tokens(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"^sample_tokens: logits has shape \(3,\); expected \(R, V\)"):
        sample_tokens(torch.ones(3))

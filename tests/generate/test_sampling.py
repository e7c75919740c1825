"""Logit filters agree with loops over one row and with transformers; samples follow the distribution."""

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ligerzoo.generate import filter_logits, keep_min_p, keep_top_k, keep_top_p, penalize_repetition
from tests.generate.models import VOCAB, prompts, tiny_llama


def test_samples_follow_the_filtered_distribution(device: str) -> None:
    model, ids = tiny_llama(device, std=0.1), prompts(device, 1, 3)
    filters: dict[str, Any] = {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_p": 0.1}
    draws = 5000
    out = model.generate(ids.expand(draws, -1), max_new_tokens=1, do_sample=True, **filters)
    counts = out[:, -1].bincount(minlength=VOCAB).double()
    expected = draws * filter_logits(model(ids).logits[0, -1].double(), **filters).softmax(-1)
    kept = expected > 0
    freedom = int(kept.sum()) - 1
    assert freedom >= 8
    assert counts[~kept].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


ROWS = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12)


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(x - max(row)) for x in row]
    return [weight / sum(weights) for weight in weights]


def kept_by(filtered: Tensor, row: list[float]) -> set[int]:
    """Returns the tokens that are kept; checks that their logits are unchanged and the others are -inf."""
    kept = {i for i, x in enumerate(filtered.tolist()) if x != -math.inf}
    assert all(filtered[i] == row[i] for i in kept)
    return kept


@given(ROWS, st.integers(1, 15))
def test_top_k_by_loop(row: list[float], top_k: int) -> None:
    better = [sum(other > x for other in row) for x in row]
    assert kept_by(keep_top_k(torch.tensor(row), top_k), row) == {i for i, n in enumerate(better) if n < top_k}


@given(ROWS, st.floats(0.01, 1))
@example([-1e-10, 0.0], 0.25)  # so close that their probabilities round to one value
def test_top_p_by_loop(row: list[float], top_p: float) -> None:
    probabilities, expected, mass = softmax(row), set(), 0.0
    for i in sorted(range(len(row)), key=lambda i: (-row[i], i)):
        assume(top_p == 1 or abs(mass - top_p) > 1e-5)  # closer values depend on rounding
        if mass >= top_p and top_p < 1:
            break
        expected.add(i)
        mass += probabilities[i]
    assert kept_by(keep_top_p(torch.tensor(row), top_p), row) == expected


def test_top_p_of_one_keeps_all() -> None:
    logits = 5 * torch.randn(50, 1000)
    assert torch.equal(keep_top_p(logits, 1.0), logits)


def test_a_tiny_top_p_keeps_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert keep_top_p(logits, 1e-320).tolist() == [[-math.inf, 2.0, -math.inf]]


@given(ROWS, st.floats(0, 1))
def test_min_p_by_loop(row: list[float], min_p: float) -> None:
    probabilities = softmax(row)
    floor = min_p * max(probabilities)
    assume(all(p == max(probabilities) or abs(p - floor) > 1e-5 * floor for p in probabilities))
    assert kept_by(keep_min_p(torch.tensor(row), min_p), row) == {i for i, p in enumerate(probabilities) if p >= floor}


@settings(deadline=None)  # the first `assert_close` of a process takes half a second
@given(ROWS, st.sets(st.integers(0, 11)), st.floats(0.1, 5))
def test_repetition_penalty_by_loop(row: list[float], occurred: set[int], penalty: float) -> None:
    expected = [(x / penalty if x > 0 else x * penalty) if i in occurred else x for i, x in enumerate(row)]
    mask = torch.tensor([[i in occurred for i in range(len(row))]])
    torch.testing.assert_close(penalize_repetition(torch.tensor([row]), mask, penalty), torch.tensor([expected]))


@given(ROWS, st.floats(0.05, 5), st.integers(1, 15), st.floats(0.001, 1), st.floats(0, 1))
def test_the_most_likely_token_is_always_kept(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    filtered = filter_logits(torch.tensor(row), temperature, top_k, top_p, min_p)
    assert max(filtered.tolist()) == pytest.approx(max(row) / temperature, rel=1e-6)


@given(st.integers(0, 2**32), st.floats(0.1, 3), st.integers(1, 60), st.floats(0.05, 0.99), st.floats(0, 0.5))
@settings(max_examples=50)
def test_the_chain_of_filters_equals_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = 3 * torch.randn(3, 50, generator=torch.Generator().manual_seed(seed))
    processors = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(temperature),
            transformers.TopKLogitsWarper(top_k),
            transformers.TopPLogitsWarper(top_p),
            transformers.MinPLogitsWarper(min_p),
        ]
    )
    assert torch.equal(filter_logits(logits, temperature, top_k, top_p, min_p), processors(None, logits))


def test_the_penalty_equals_transformers() -> None:
    logits, ids = torch.randn(3, 50), torch.randint(50, (3, 20))
    occurred = torch.zeros(3, 50, dtype=torch.bool).scatter_(1, ids, True)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.3)(ids, logits)
    assert torch.equal(penalize_repetition(logits, occurred, 1.3), theirs)

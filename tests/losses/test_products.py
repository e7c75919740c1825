"""Combinations of the losses' options: loss, metrics and gradients equal the naive formulas in fp64."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ligerzoo.losses import objective
from tests.covering import covering
from tests.kernels.machine import kernel_file
from tests.losses.products import OPTIONS, build_case

ULPS = {torch.float64: 2.0**20, torch.float32: 2.0**7}


@contextlib.contextmanager
def set_tokens_per_chunk(tokens: int | None) -> Iterator[None]:
    """Patches the number of tokens whose logits fit the budget, which is in MiB; None keeps it."""
    with contextlib.ExitStack() as stack:
        if tokens is not None:
            stack.enter_context(mock.patch.object(objective, "max_rows", return_value=tokens))
            for file in (objective, kernel_file("linear_divergence"), kernel_file("linear_cross_entropy")):
                stack.enter_context(mock.patch.object(file, "rows_per_chunk", return_value=tokens))
        yield


def gradients_of(loss: Tensor, inputs: list[Tensor | None]) -> list[Tensor]:
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    return list(torch.autograd.grad(loss, leaves, torch.full_like(loss, 1.7))) if leaves else []


def compare(name: str, choice: dict[str, Any], seed: int, device: str) -> None:
    case = build_case(name, choice, seed, device)
    with set_tokens_per_chunk(choice["tokens_per_chunk"]):
        loss, metrics = case.loss(*case.inputs)
        found = [loss.detach(), *gradients_of(loss, case.inputs)]
    results = []
    for dtype in (choice["dtype"], torch.float64):  # the error of plain torch is the scale of the tolerance
        inputs = [
            None if t is None else t.detach().cpu().to(dtype).requires_grad_(t.requires_grad) for t in case.inputs
        ]
        value, expected = case.oracle(*inputs)
        results.append(([value.detach(), *gradients_of(value, inputs)], expected))
    (plain, plain_metrics), (truth, true_metrics) = results
    assert_as_exact(found, plain, truth, "loss and gradients", choice["dtype"])
    assert metrics.keys() == true_metrics.keys()
    for metric, value in metrics.items():
        assert not value.requires_grad
        assert_as_exact([value], [plain_metrics[metric]], [true_metrics[metric]], metric, choice["dtype"])


def assert_as_exact(
    found: list[Tensor], plain: list[Tensor], truth: list[Tensor], what: str, dtype: torch.dtype
) -> None:  # fmt: skip
    """Allows twice the error of plain torch, plus ULPS ulps of the largest true element, at least of 1."""
    for a, p, t in zip(found, plain, truth, strict=True):
        assert a.shape == t.shape
        error, plain_error = ((x.detach().double().cpu() - t).abs().max().item() for x in (a, p))
        tolerance = ULPS[dtype] * torch.finfo(dtype).eps * max(1.0, t.abs().max().item())
        assert error <= 2 * plain_error + tolerance, f"{what}: error {error:.3g}, plain torch {plain_error:.3g}"


PAIRWISE_CHOICES = {name: covering(options) for name, options in OPTIONS.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_pair_of_options(name: str, device: str) -> None:
    for seed, choice in enumerate(PAIRWISE_CHOICES[name]):
        try:
            compare(name, choice, seed, device)
        except Exception as error:
            error.add_note(f"compare({name!r}, {choice}, {seed}, {device!r})")
            raise


@pytest.mark.slow
@settings(
    max_examples=1000, deadline=None, database=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    st.sampled_from(list(OPTIONS)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.fixed_dictionaries({option: st.sampled_from(values) for option, values in OPTIONS[name].items()}),
            st.integers(0, 2**31),
        )
    )
)
def test_random_combinations(device: str, combination: tuple[str, dict[str, Any], int]) -> None:
    compare(*combination, device)

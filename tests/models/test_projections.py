"""Linear layers of the sizes of published models: every architecture has some, and on a GPU each one is computed."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.convert import MODEL_TYPES
from ligerzoo.layers import Linear
from tests.models.published import PUBLISHED, projections

ROWS = (1, 2, 64, 65, 700, 2047, 2048)
CHUNK = 8192
"""Outputs of a product in fp32 at a time."""


def test_every_architecture_has_published_sizes() -> None:
    assert set(PUBLISHED) == set(MODEL_TYPES)


@pytest.mark.parametrize("model_type, linear", [("qwen2_moe", (1, 3584, False)), ("gpt_oss", (32, 2880, True))])
def test_projections_include_gates_and_routers(model_type: str, linear: tuple[int, int, bool]) -> None:
    assert linear in {found for fields in PUBLISHED[model_type] for found in projections(model_type, fields)}


_judged: set[tuple[int, int, bool]] = set()


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_linear_layer_of_published_models(model_type: str) -> None:
    """The errors of results and gradients are at most those of plain torch, and rows do not depend on their number."""
    for fields in PUBLISHED[model_type]:
        new = sorted({*projections(model_type, fields)} - _judged)
        _judged.update(new)
        for outputs, features, has_bias in new:
            judge_linear(outputs, features, has_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("outputs", [1, 2, 5, 63])
def test_heads_of_few_labels(outputs: int) -> None:
    for features in (896, 2048, 3072, 3584, 4096, 5120, 8192, 16384):
        judge_linear(outputs, features, has_bias=outputs == 1)


def judge_linear(outputs: int, features: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    layer = Linear(features, outputs, bias=has_bias, **options)
    layer.init_weights(std=features**-0.5)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    x, dy = torch.randn(max(ROWS), features, **options), torch.randn(max(ROWS), outputs, **options)
    with torch.no_grad():
        whole = layer(x)
    failures = []
    for rows in ROWS:
        inputs = x[:rows].requires_grad_(), layer.weight, *([] if layer.bias is None else [layer.bias])
        y, plain = layer(inputs[0]), F.linear(*inputs)
        with torch.no_grad():
            without_gradients = layer(inputs[0])
        if not torch.equal(y, without_gradients) or not torch.equal(y, whole[:rows]):
            failures.append(f"{rows} rows: other bits than with {max(ROWS)} rows or without gradients")
        results = y.detach(), *torch.autograd.grad(y, inputs, dy[:rows])
        expected = plain.detach(), *torch.autograd.grad(plain, inputs, dy[:rows])
        for name, error, allowed in errors(inputs, dy[:rows], results, expected):
            if not error <= allowed:  # also NaN
                failures.append(f"{name} of {rows} rows: error {error:.3g}, allowed {allowed:.3g}")
    assert not failures, f"Linear({features}, {outputs}, bias={has_bias}): {'; '.join(failures)}"


@torch.no_grad()
def errors(
    inputs: tuple[Tensor, ...], dy: Tensor, results: tuple[Tensor, ...], expected: tuple[Tensor, ...]
) -> Iterator[tuple[str, float, float]]:
    """Yields the relative errors of the output and the gradients against fp32, and those that are allowed: one and a
    half times that of plain torch, and the rounding of a number."""
    x, weight, *bias = inputs
    wide_x, dx = x.float(), torch.zeros_like(x, dtype=torch.float32)
    squares = {name: torch.zeros(3, device=x.device) for name in ("y", "dweight", "dx", "dbias")}

    def add(name: str, got: Tensor, plain: Tensor, truth: Tensor) -> None:
        squares[name] += torch.stack([(t.float() - truth).square().sum() for t in (got, plain, torch.zeros_like(got))])

    for start in range(0, len(weight), CHUNK):
        part = slice(start, start + CHUNK)
        wide_weight, wide_dy = weight[part].float(), dy[:, part].float()
        shift = bias[0][part].float() if bias else 0.0
        add("y", results[0][:, part], expected[0][:, part], wide_x @ wide_weight.T + shift)
        add("dweight", results[2][part], expected[2][part], wide_dy.T @ wide_x)
        dx += wide_dy @ wide_weight
        if bias:
            add("dbias", results[3][part], expected[3][part], wide_dy.sum(0))
    add("dx", results[1], expected[1], dx)
    for name, (error, plain, norm) in zip(squares, torch.stack([*squares.values()]).sqrt().tolist(), strict=True):
        yield name, error, 1.5 * plain + torch.finfo(x.dtype).eps / 2 * norm

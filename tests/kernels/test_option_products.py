"""Products of the options of `cross_entropy` and `linear_cross_entropy`: every pair of options, and 1000 random
products in the thorough run. Outputs and all gradients are judged against fp64.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ligerzoo.kernels import TokenStatistics, cross_entropy, linear_cross_entropy
from ligerzoo.kernels.dispatch import INTERPRETING
from tests.covering import covering
from tests.kernels.accuracy import assert_as_exact_as, in_fp64, judge_draws
from tests.kernels.compiling import compile_both_passes
from tests.kernels.layouts import sliced
from tests.kernels.machine import ROUNDED_DTYPES, kernel_file
from tests.kernels.oracles import cross_entropy_oracle, linear_cross_entropy_oracle, numbers, targets, transformed

FACTORS: dict[str, list[Any]] = {
    "entry": ["given logits", "linear"],
    "dtype": list(ROUNDED_DTYPES),
    "backend": ["auto"] if INTERPRETING else ["auto", "torch"],
    "reduction": ["mean", "sum", "none", "num_items", "num_items tensor"],
    "ignored": ["none", "some", "all", "some, index 4"],
    "bias": ["none", "constant", "trained"],
    "class_weight": ["none", "fp32", "strided, of the logits' dtype"],
    "token_weight": ["none", "constant", "trained"],
    "label_smoothing": [0.0, 0.1],
    "z_loss": [0.0, 0.01],
    "softcap": [None, 3.0],
    "logit_scale": [1.0, 0.7],
    "temperature": [1.0, 1.3],
    "return_statistics": [False, True],
    "trained": ["hidden and weight", "hidden", "weight", "neither"],
    "strided": [False, True],
    "rows": [1, 37, 64],
    "classes": [33, 1000],
    "chunks": [1, 3],
}
"""With "given logits", `hidden` means the logits, and weight, bias and chunks have no effect."""

PAIRS = covering(FACTORS)
AMOUNTS = ("label_smoothing", "z_loss", "softcap", "logit_scale", "temperature")


@dataclass
class Case:
    """The inputs and options of a call of the function and of its oracle."""

    function: Callable[..., Any]
    oracle: Callable[..., Tensor]
    inputs: dict[str, Tensor]
    options: dict[str, Any]
    backend: str
    return_statistics: bool

    def run(self, *inputs: Tensor) -> tuple[Tensor, TokenStatistics | None]:
        options = {**self.options, "backend": self.backend, "return_statistics": self.return_statistics}
        result = self.function(**dict(zip(self.inputs, inputs, strict=True)), **options)
        return result if self.return_statistics else (result, None)

    def expected(self, *inputs: Tensor, reduction: dict[str, Any] | None = None) -> tuple[Tensor, ...]:
        """Returns the oracle's loss and, with `return_statistics`, log-probabilities, entropies and logsumexps."""
        named, options = dict(zip(self.inputs, inputs, strict=True)), self.options
        if reduction is not None:
            options = {**{k: v for k, v in options.items() if k not in ("reduction", "num_items")}, **reduction}
        loss = self.oracle(**named, **options)
        if not self.return_statistics:
            return (loss,)
        logps, valid = self._logits(named).log_softmax(-1), named["target"] != self.options["ignore_index"]
        results = (
            logps.gather(-1, named["target"].where(valid, 0)[:, None])[:, 0],
            -(logps.exp() * logps).sum(-1),
            self._logits(named).logsumexp(-1),
        )
        return loss, *(torch.where(valid, t, 0.0).detach() for t in results)

    def _logits(self, named: Mapping[str, Tensor]) -> Tensor:
        logits = named.get("logits")
        if logits is None:
            logits = F.linear(named["hidden"], named["weight"], named.get("bias"))
        return transformed(logits, **{k: self.options[k] for k in ("softcap", "logit_scale", "temperature")})

    def check_most_likely(self, found: TokenStatistics) -> None:
        """Checks that `argmax` is the most likely token, up to rounding of the logits."""
        exact = self._logits(dict(zip(self.inputs, in_fp64(list(self.inputs.values())), strict=True))).detach()
        error = (self._logits(self.inputs).detach() - exact).abs().amax(-1)
        valid = self.inputs["target"] != self.options["ignore_index"]
        largest = exact.amax(-1)
        reached = exact.gather(-1, found.argmax[:, None])[:, 0]
        assert (reached >= largest - 4 * error - 1e-6 * largest.abs())[valid].all()
        assert not found.argmax[~valid].any()
        hits = (found.argmax == self.inputs["target"])[valid]
        torch.testing.assert_close(found.accuracy, hits.float().sum() / max(1, int(valid.sum())))


def case_of(choice: Mapping[str, Any], device: str, features: int = 64) -> Case:
    dtype, rows, classes = choice["dtype"], choice["rows"], choice["classes"]
    is_linear = choice["entry"] == "linear"

    def trained(name: str, t: Tensor) -> Tensor:
        t = sliced(t.detach()) if choice["strided"] else t.detach()
        return t.requires_grad_(name in choice["trained"])

    inputs: dict[str, Tensor] = {}
    if is_linear:
        inputs["hidden"] = trained("hidden", numbers(rows, features, dtype=dtype, device=device))
        weight = numbers(classes, features, dtype=dtype, device=device, scale=features**-0.5)
        inputs["weight"] = trained("weight", weight)
    else:
        inputs["logits"] = trained("hidden", numbers(rows, classes, dtype=dtype, device=device, scale=2.0))
    ignore_index = 4 if choice["ignored"] == "some, index 4" else -100
    share = {"none": 0.0, "all": 1.0}.get(choice["ignored"], 0.3)
    inputs["target"] = targets(rows, classes=classes, device=device, ignored=share, ignore_index=ignore_index)
    if is_linear and choice["bias"] != "none":
        inputs["bias"] = numbers(classes, dtype=dtype, device=device).detach()
        inputs["bias"].requires_grad_(choice["bias"] == "trained")
    options = {name: choice[name] for name in AMOUNTS}
    options["ignore_index"] = ignore_index
    if choice["class_weight"] != "none":
        weights = torch.rand(classes, device=device) + 0.5
        options["class_weight"] = weights if choice["class_weight"] == "fp32" else sliced(weights.to(dtype))
    match choice["reduction"]:
        case "num_items":
            options["num_items"] = 5
        case "num_items tensor":
            options["num_items"] = torch.tensor(7, device=device)
        case reduction:
            options["reduction"] = reduction
    if choice["token_weight"] != "none":
        weights = torch.rand(rows, device=device) + 0.5
        # In a weighted mean their gradient is a difference, whose rounding error exceeds what is allowed here.
        is_mean = choice["reduction"] == "mean"
        inputs["token_weight"] = weights.requires_grad_(choice["token_weight"] == "trained" and not is_mean)
    function, oracle = (
        (linear_cross_entropy, linear_cross_entropy_oracle) if is_linear else (cross_entropy, cross_entropy_oracle)
    )
    return Case(function, oracle, inputs, options, choice["backend"], choice["return_statistics"])


def judge_case(case: Case, upstream_scale: float = 1.0) -> None:
    inputs = list(case.inputs.values())
    exact_inputs = in_fp64(inputs)
    (loss, found), expected, truth = case.run(*inputs), case.expected(*inputs), case.expected(*exact_inputs)
    trained = [i for i, t in enumerate(inputs) if t.requires_grad]
    assert loss.requires_grad == bool(trained)
    if loss.dim():
        assert_as_exact_as(loss.detach(), expected[0].detach(), truth[0].detach())
    else:
        judge_sum(case, loss.detach(), inputs, exact_inputs)
    if found is not None:
        case.check_most_likely(found)
        for results in zip((found.logps, found.entropy, found.logsumexp), expected[1:], truth[1:], strict=True):
            assert not any(t.requires_grad for t in results)
            assert_as_exact_as(*results)
    if not trained:
        return
    upstream = torch.randn_like(loss) * upstream_scale
    gradients = [
        torch.autograd.grad(of, [leaves[i] for i in trained], upstream.to(of.dtype))
        for of, leaves in ((loss, inputs), (expected[0], inputs), (truth[0], exact_inputs))
    ]
    for gradient in zip(*gradients, strict=True):
        assert_as_exact_as(*gradient)


def judge_sum(case: Case, actual: Tensor, inputs: list[Tensor], exact_inputs: list[Tensor]) -> None:
    """A sum may have twice the error of plain torch's terms, assuming that their errors do not cancel."""
    (expected, *_), (truth, *_) = (
        case.expected(*some, reduction={"reduction": "none"}) for some in (inputs, exact_inputs)
    )
    total = case.expected(*exact_inputs)[0]
    assert (actual.shape, actual.dtype) == ((), torch.float32)
    if not truth.any():
        assert actual == total == 0
        return
    error, divisor = (expected - truth).abs().sum(), truth.sum() / total
    floor = 2 * torch.finfo(actual.dtype).eps * truth.abs().sum()
    assert (actual - total).abs() <= (2 * error + floor) / divisor


def identity(choice: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in choice.values())


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Any]], None]:
    """Sets the rows per chunk for a choice; `logits_budget` is in MiB."""

    def set_chunks(choice: Mapping[str, Any]) -> None:
        rows = -(-choice["rows"] // choice["chunks"])
        monkeypatch.setattr(kernel_file("linear_cross_entropy"), "rows_per_chunk", lambda *_: rows)

    return set_chunks


def test_the_products_cover_every_pair() -> None:
    for one, other in combinations(FACTORS, 2):
        found = {(str(choice[one]), str(choice[other])) for choice in PAIRS}
        assert len(found) == len(FACTORS[one]) * len(FACTORS[other])


@pytest.mark.parametrize("choice", PAIRS, ids=identity)
def test_every_pair_of_options(choice: dict[str, Any], in_chunks: Callable[..., None], device: str) -> None:
    in_chunks(choice)
    judge_case(case_of(choice, device))


KNOWN_CRASH = {"label_smoothing": 0.1, "class_weight": "fp32", "backend": "auto", "classes": 1000, "rows": 64}
"""Crashed Triton's OptimizeThreadLocality, in every dtype."""


@pytest.mark.plain
@pytest.mark.parametrize(
    "choice",
    [
        {**PAIRS[0], **KNOWN_CRASH, "entry": "given logits", "trained": "hidden"},
        {**PAIRS[0], **KNOWN_CRASH, "entry": "linear", "bias": "trained", "trained": "hidden and weight"},
        *(pytest.param(choice, marks=pytest.mark.slow) for choice in PAIRS),
    ],
    ids=identity,
)
def test_every_pair_of_options_compiles(choice: dict[str, Any], in_chunks: Callable[..., None]) -> None:
    pytest.importorskip("triton")
    in_chunks(choice)
    case = case_of({**choice, "backend": "auto"}, "cpu")
    compile_both_passes(lambda *inputs: case.run(*inputs)[0], list(case.inputs.values()))


COMPILED = {
    name: FACTORS[name]
    for name in (
        "entry", "dtype", "bias", "class_weight", "token_weight", "label_smoothing", "z_loss", "softcap",
        "return_statistics", "trained", "strided",
    )
}  # fmt: skip
"""Options that kernels specialize on, as they do on sizes of 1 and multiples of 16. Only some products of these are
drawn, because compiling takes most of the time. Everything else is drawn freely."""

ROWS = {"1": st.just(1), "odd": st.integers(1, 60).map(lambda n: 2 * n + 1), "multiple of 16": st.just(64)}
CLASSES = {"few": st.integers(16, 31).map(lambda n: 2 * n + 1), "block": st.just(1024), "many": st.just(8197)}


@cache
def structures() -> list[dict[str, Any]]:
    return covering({**COMPILED, "rows": list(ROWS), "classes": list(CLASSES)}, strength=3)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    choice = dict(draw(st.sampled_from(structures())))
    choice |= {name: draw(st.sampled_from(FACTORS[name])) for name in ("backend", "reduction", "ignored", "chunks")}
    choice |= {"rows": draw(ROWS[choice["rows"]]), "classes": draw(CLASSES[choice["classes"]])}
    if not torch.cuda.is_available() and choice["classes"] > 1024:
        choice["chunks"] = 1  # on a CPU, torch's product of one row with thousands of classes is less accurate
    amounts = {"label_smoothing": (0.01, 1.0), "z_loss": (1e-4, 0.1), "softcap": (1.0, 50.0)}
    for name, bounds in amounts.items():
        if choice[name]:
            choice[name] = draw(st.floats(*bounds))
    return choice | {"logit_scale": draw(st.floats(0.1, 3.0)), "temperature": draw(st.floats(0.3, 5.0))}


@pytest.mark.slow
@pytest.mark.plain
@settings(
    max_examples=1000, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(choice=choices(), seed=st.integers(0, 2**31), upstream_scale=st.floats(0.1, 10.0))
def test_a_thousand_random_products(
    choice: dict[str, Any], seed: int, upstream_scale: float, in_chunks: Callable[..., None], device: str
) -> None:
    in_chunks(choice)

    def judge_draw(seed: int) -> None:
        torch.manual_seed(seed)
        judge_case(case_of(choice, device), upstream_scale)

    judge_draws(judge_draw, seed)

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels import linear_jsd, linear_kl_div, linear_tvd
from ligerzoo.kernels.linear_divergence import LinearDivergenceOptions
from tests.kernels.accuracy import assert_as_exact_as, assert_equal, differentiate, in_fp64, judge
from tests.kernels.machine import ON_GPU, ROUNDED_DTYPES, kernel_file, on_gpu_too
from tests.kernels.op_recorder import Recorder, launch_nothing
from tests.kernels.operations import DIVERGENCES, one_divergence
from tests.kernels.oracles import divergence_oracle, linear_divergence_oracle, numbers, targets

SetChunk = Callable[[int], None]


@pytest.fixture
def rows_per_chunk(monkeypatch: pytest.MonkeyPatch) -> SetChunk:
    """Sets the rows per chunk; `logits_budget` is in MiB."""
    return lambda rows: monkeypatch.setattr(kernel_file("linear_divergence"), "rows_per_chunk", lambda *_: rows)


def head(rows: int, features: int, classes: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    weight = numbers(classes, features, dtype=dtype, device=device, scale=2 * features**-0.5)
    return [numbers(rows, features, dtype=dtype, device=device), weight]


def make(
    rows: int, features: int, classes: int, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
) -> list[Tensor]:
    """Returns the student's hidden and weight, the teacher's (with twice the features), and target."""
    teacher = (t.detach() for t in head(rows, 2 * features, classes, dtype, device))
    target = targets(rows, classes=classes, device=device, **options)
    return [*head(rows, features, classes, dtype, device), *teacher, target]


def function_of(of: str, **options: Any) -> Callable[..., Tensor]:
    return partial(DIVERGENCES[of][1], **options)


def judge_with(of: str, inputs: list[Tensor], **options: Any) -> None:
    judge(function_of(of, **options), partial(linear_divergence_oracle, of, **options), inputs)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "temperature": 2.0},
    {"num_items": 5, "ignore_index": 4},
    {"reduction": "none"},
]


@one_divergence
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rows", [1, 8, 23])
def test_options(
    options: dict[str, Any], ignored: float, rows: int, of: str, rows_per_chunk: SetChunk, device: str
) -> None:
    rows_per_chunk(rows)
    ignore_index = options.get("ignore_index", -100)
    inputs = make(23, 17, 33, device=device, ignored=ignored, ignore_index=ignore_index)
    judge_with(of, inputs, **options)
    judge_with(of, inputs[:4], **options)  # without targets every token is valid


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.9, 1.0])
def test_beta(beta: float, device: str) -> None:
    judge_with("jsd", make(7, 17, 33, device=device), beta=beta)


# rows, features, classes
SHAPES = on_gpu_too(
    [(1, 1, 1), (40, 7, 2), (5, 127, 130), (7, 16, 33)],
    [(513, 1023, 2_003), (100, 64, 262_147), (1000, 512, 32_003)],
)


@one_divergence
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape: tuple[int, int, int], dtype: torch.dtype, of: str, device: str) -> None:
    judge_with(of, make(*shape, dtype=dtype, device=device))


@pytest.mark.parametrize("leading", [(), (2,), (2, 1, 3)], ids=str)
def test_leading_dimensions(leading: tuple[int, ...], device: str) -> None:
    student, teacher = (
        [numbers(*leading, 17, device=device), numbers(33, 17, device=device, scale=0.3)] for _ in range(2)
    )
    target = targets(*leading, classes=33, device=device, ignored=0.0)
    judge_with("jsd", [*student, *(t.detach() for t in teacher), target])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("whose", ["student", "teacher", "both"])
def test_biases(whose: str, dtype: torch.dtype, rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(3)
    inputs = make(7, 17, 33, dtype=dtype, device=device)
    biases = {
        f"{who}_bias": numbers(33, dtype=dtype, device=device)
        for who in ("student", "teacher")
        if whose in (who, "both")
    }
    if "teacher_bias" in biases:
        biases["teacher_bias"] = biases["teacher_bias"].detach()

    def with_biases(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: function(*args[:5], **dict(zip(biases, args[5:], strict=True)))

    oracle = with_biases(partial(linear_divergence_oracle, "jsd"))
    judge(with_biases(linear_jsd), oracle, [*inputs, *biases.values()])


@pytest.mark.parametrize("student, teacher", [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_a_teacher_of_another_dtype(student: torch.dtype, teacher: torch.dtype, device: str) -> None:
    inputs = make(7, 17, 33, device=device)
    inputs[:4] = [t.detach().to(dtype) for t, dtype in zip(inputs, (student, student, teacher, teacher), strict=False)]
    judge_with("kl_div", [t.requires_grad_(i < 2) if i < 4 else t for i, t in enumerate(inputs)])


@one_divergence
def test_results_do_not_depend_on_the_chunks(of: str, rows_per_chunk: SetChunk, device: str) -> None:
    inputs = make(9, 17, 33, device=device)
    upstream = [torch.randn((), device=device)]
    truth = differentiate(function_of(of), in_fp64(inputs), in_fp64(upstream))
    reference = differentiate(function_of(of), inputs, upstream)
    for rows in (1, 2, 4, 5, 8, 9, 100):
        rows_per_chunk(rows)
        outputs, gradients = differentiate(function_of(of), inputs, upstream)
        for case in zip((*outputs, *gradients), (*reference[0], *reference[1]), (*truth[0], *truth[1]), strict=True):
            assert_as_exact_as(*case)


@pytest.mark.plain
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES[1:], ids=str)
def test_the_weights_gradient_is_accumulated_in_fp32(dtype: torch.dtype, rows_per_chunk: SetChunk, device: str) -> None:
    rows, features, classes = (8192, 512, 1000) if ON_GPU else (256, 16, 33)
    inputs = make(rows, features, classes, dtype=dtype, device=device)
    upstream = [torch.tensor(0.5, device=device)]
    oracle = partial(linear_divergence_oracle, "jsd", reduction="sum")
    truth = differentiate(oracle, in_fp64(inputs), in_fp64(upstream))

    def error(chunks: int) -> float:
        rows_per_chunk(rows // chunks)
        _, (_, dweight, *_) = differentiate(partial(linear_jsd, reduction="sum"), inputs, upstream)
        assert dweight is not None
        assert dweight.dtype == dtype
        return float((dweight.double() - truth[1][1]).norm())

    unchunked = error(1)
    for chunks in (16, 128):
        assert error(chunks) <= 1.5 * unchunked


def test_the_upstream_gradient_is_not_rounded(device: str) -> None:
    hidden, *others = make(7, 17, 33, dtype=torch.float16, device=device)
    loss = linear_jsd(hidden, *others, reduction="sum")
    one = torch.ones((), device=device)
    factor = 1.0004 * one  # fp16 rounds it to 1
    dhidden, scaled = (torch.autograd.grad(loss, hidden, g, retain_graph=True)[0] for g in (one, factor))
    assert torch.equal(scaled, (dhidden.float() * factor).half())
    assert not torch.equal(scaled, dhidden)


# Cost


def run_of(inputs: list[Tensor], **options: Any) -> Recorder:
    """Records the operations and allocations of a forward and a backward pass."""
    with Recorder() as recorder:
        loss = linear_jsd(*inputs, **options)
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, 0.5))
    return recorder


@pytest.mark.plain
def test_the_logits_of_both_fit_the_budget_together(device: str) -> None:
    inputs = make(9, 2, 2**16, device=device, ignored=0.0)  # 2.25 MiB of logits each
    sizes = run_of(inputs, logits_budget=2).allocated
    assert max(sizes) == 2**16 * 4 * 4  # 4 rows of 512 KiB (both heads); on a CPU also copies of a chunk
    assert sizes.count(max(sizes)) >= 2
    assert max(run_of(inputs).allocated) == 9 * 2**16 * 4


def test_a_frozen_head_costs_nothing(rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(4)
    hidden, weight, *others = make(8, 64, 130, device=device)
    frozen = run_of([hidden, weight.detach(), *others])
    assert 130 * 64 * 4 not in frozen.allocated
    assert "addmm" not in frozen.names
    trained = run_of([hidden, weight, *others])
    assert 130 * 64 * 4 in trained.allocated
    assert trained.names.count("addmm") == 2
    assert 130 * 128 * 4 not in trained.allocated  # the teacher's


def test_frozen_hidden_states_cost_nothing(rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(5)
    hidden, weight, *others = make(9, 64, 33, device=device)
    frozen = run_of([hidden.detach(), weight, *others])
    assert 9 * 64 * 4 not in frozen.allocated
    assert frozen.names.count("mm") == 4
    trained = run_of([hidden, weight, *others])
    assert 9 * 64 * 4 in trained.allocated
    assert trained.names.count("mm") == 6


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_evaluation_computes_no_gradients(mode: Any, rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(4)
    inputs = make(8, 16, 130, device=device, ignored=0.0)
    expected = linear_jsd(*inputs)
    with mode():
        recorder = run_of(inputs)
        loss = linear_jsd(*inputs)
    assert (recorder.names.count("mm"), recorder.names.count("addmm")) == (4, 0)
    assert max(recorder.allocated) <= 4 * 130 * 4
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)


def test_no_tokens(device: str) -> None:
    inputs = make(0, 17, 33, device=device)
    bias = numbers(33, device=device)
    loss = linear_jsd(*inputs, student_bias=bias)
    assert loss == 0
    for t, gradient in zip((*inputs[:2], bias), torch.autograd.grad(loss, (*inputs[:2], bias)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(t))


def test_non_finite_hidden_states_do_not_affect_other_rows(rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(2)
    for changed in (0, 2):  # the student's, the teacher's
        inputs = make(7, 17, 33, device=device, ignored=0.0)
        with torch.no_grad():
            inputs[changed][2, 3], inputs[changed][5, 0] = torch.nan, torch.inf
        (dhidden,) = torch.autograd.grad(linear_jsd(*inputs, reduction="sum"), inputs[0])
        assert dhidden[[2, 5]].isnan().any(-1).all()
        assert dhidden[[0, 1, 3, 4, 6]].isfinite().all()


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("changed", ["student", "teacher", "both"])
def test_non_finite_ignored_hidden_states_have_zero_loss_and_gradient(
    changed: str, dtype: torch.dtype, reduction: str, rows_per_chunk: SetChunk, device: str
) -> None:
    """In dhidden, and in dweight, which sums over all rows."""
    rows_per_chunk(4)
    inputs = make(7, 64, 32, dtype=dtype, device=device, ignored=0.0)  # RaggedHead on a Hopper GPU in bf16
    inputs[4][[1, 2, 6]] = -100
    bias = numbers(32, dtype=dtype, device=device)
    clean = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    with torch.no_grad():
        for index, who in ((0, "student"), (2, "teacher")):
            if changed in (who, "both"):
                inputs[index][1], inputs[index][6, 3] = torch.nan, torch.inf

    def results(inputs: list[Tensor], backend: Any) -> list[Tensor | None]:
        loss = linear_jsd(*inputs, student_bias=bias, reduction=reduction, backend=backend)
        upstream = torch.linspace(0.5, 1.5, loss.numel(), device=device).view_as(loss)
        return [loss.detach(), *torch.autograd.grad(loss, [*inputs[:2], bias], upstream)]

    for backend in ("auto", "torch"):
        assert_equal(results(inputs, backend), results(clean, backend))


TRANSFORMS: list[dict[str, Any]] = [
    {"student_softcap": 3.0},
    {"teacher_softcap": 2.0},
    {"student_logit_scale": 0.7, "teacher_logit_scale": 1.7},
    {"student_softcap": 3.0, "student_logit_scale": 2.0, "teacher_softcap": 2.5, "teacher_logit_scale": -0.5},
]


@one_divergence
@pytest.mark.parametrize("options", TRANSFORMS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_softcaps_and_scales(
    options: dict[str, Any], reduction: str, of: str, rows_per_chunk: SetChunk, device: str
) -> None:
    rows_per_chunk(3)
    judge_with(of, make(7, 17, 33, device=device), temperature=1.5, reduction=reduction, **options)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES[1:], ids=str)
def test_softcaps_round_nothing(dtype: torch.dtype, device: str) -> None:
    """Only the matrix products round to the dtype of the hidden states."""
    inputs = make(40, 17, 33, dtype=dtype, device=device)
    options = {"student_softcap": 3.0, "student_logit_scale": 0.7, "teacher_softcap": 2.0}
    losses = linear_jsd(*inputs, reduction="none", **options)
    student, teacher = (F.linear(*inputs[i : i + 2]).double() for i in (0, 2))
    expected = divergence_oracle(
        "jsd", 3.0 * torch.tanh(0.7 * student / 3.0), 2.0 * torch.tanh(teacher / 2.0), inputs[4], reduction="none"
    )
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)


def test_softcaps_cost_no_copy_of_the_logits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "divergence")
    launch_nothing(monkeypatch, "loss.divergence_kernels")
    launch_nothing(monkeypatch, "linear_divergence")
    inputs = make(8, 2, 4096, device=device, ignored=0.0)
    plain, transformed = (run_of(inputs, **options).allocated for options in ({}, TRANSFORMS[-1]))
    assert transformed == plain


@one_divergence
def test_each_token_has_its_upstream_gradient(of: str, rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(4)
    inputs = make(9, 17, 33, device=device)
    losses = function_of(of, reduction="none")(*inputs)
    gradients = torch.autograd.grad(losses, inputs[:2], torch.eye(9, device=device)[5] * 3, retain_graph=True)
    alone = [t[5:6] if i != 1 and i != 3 else t for i, t in enumerate(t.detach() for t in inputs)]
    alone[:2] = [t.requires_grad_() for t in alone[:2]]
    expected = torch.autograd.grad(
        function_of(of, reduction="sum")(*alone), alone[:2], torch.tensor(3.0, device=device)
    )
    torch.testing.assert_close(gradients[0][5:6], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[1], expected[1], rtol=1e-5, atol=1e-6)
    assert not gradients[0][[0, 1, 2, 3, 4, 6, 7, 8]].any()
    total = function_of(of, reduction="sum")(*inputs)
    torch.testing.assert_close(losses.sum(), total, rtol=1e-5, atol=1e-6)


def test_autocast_casts_hidden_states_and_weight_alike(device: str) -> None:
    def with_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Tensor) -> Any:
            with torch.autocast(device, torch.float16):
                return function(*inputs)

        return run

    oracle = partial(linear_divergence_oracle, "jsd")
    judge(with_autocast(linear_jsd), with_autocast(oracle), make(7, 17, 33, device=device))


def test_the_meta_device() -> None:
    assert linear_jsd(*(t.to("meta") for t in make(7, 17, 33))).shape == ()


# Errors


@pytest.mark.parametrize("option", ["student_softcap", "teacher_softcap"])
def test_a_softcap_that_is_not_positive(option: str) -> None:
    with pytest.raises(ValueError, match=rf"linear_tvd: {option}=0.0; expected a positive number, or None"):
        linear_tvd(*make(7, 17, 33), **{option: 0.0})


@pytest.mark.parametrize("part", ["teacher_hidden", "teacher_weight", "teacher_bias"])
def test_a_teacher_that_requires_a_gradient(part: str) -> None:
    names = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight", "teacher_bias")
    arguments = dict(zip(names, [*make(7, 17, 33)[:4], torch.zeros(33)], strict=True))
    arguments[part].requires_grad_()
    with pytest.raises(ValueError, match=rf"linear_jsd: {part} requires a gradient.*pass {part}\.detach"):
        linear_jsd(**arguments)
    with torch.no_grad():
        linear_jsd(**arguments)


@pytest.mark.parametrize("function", [linear_kl_div, linear_jsd, linear_tvd])
def test_the_signature_lists_the_options_and_unknown_ones_are_refused(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert set(LinearDivergenceOptions.__annotations__) < set(parameters)
    assert not any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    inputs, name = make(7, 17, 33), function.__name__
    defaults = {option: parameters[option].default for option in LinearDivergenceOptions.__annotations__}
    assert torch.equal(function(*inputs, **defaults), function(*inputs))
    hints = {"temprature": r"\. Did you mean 'temperature'\?", "jsd_beta": r"\. Use beta instead", "power": "$"}
    for wrong, hint in hints.items():
        expected = rf"^{name}: unknown option {wrong}=2.0; expected an option of {name}{hint}"
        with pytest.raises(TypeError, match=expected):
            function(*inputs, **{wrong: 2.0})


def test_an_unknown_reduction() -> None:
    with pytest.raises(ValueError, match="linear_kl_div: reduction='average' with num_items=None; expected"):
        linear_kl_div(*make(7, 17, 33), reduction="average")


SHAPES_THAT_FIT: dict[str, tuple[int, ...]] = {
    "student_hidden": (2, 17), "student_weight": (33, 17), "student_bias": (33,),
    "teacher_hidden": (2, 16), "teacher_weight": (33, 16), "teacher_bias": (33,), "target": (2,),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, shape",
    [
        ("student_hidden", (2, 16)), ("student_hidden", (3, 17)), ("student_weight", (17,)), ("student_bias", (1, 33)),
        ("student_weight", (1, 33, 17)), ("teacher_hidden", (3, 16)), ("teacher_hidden", (2, 17)),
        ("teacher_weight", (34, 16)), ("teacher_bias", (32,)), ("target", (3,)), ("target", (2, 33)),
    ],
)  # fmt: skip
def test_invalid_shapes(name: str, shape: tuple[int, ...]) -> None:
    shapes = SHAPES_THAT_FIT | {name: shape}
    with pytest.raises(ValueError, match=r"linear_jsd: (student_hidden|teacher_hidden|target) .*; expected"):
        linear_jsd(
            **{
                name: torch.zeros(shape, dtype=torch.long if name == "target" else None)
                for name, shape in shapes.items()
            }
        )


@pytest.mark.parametrize("name", ["student_weight", "student_bias", "teacher_weight", "teacher_bias"])
def test_mixed_dtypes_of_one_head(name: str) -> None:
    arguments = {name: torch.zeros(shape) for name, shape in SHAPES_THAT_FIT.items() if name != "target"}
    arguments[name] = arguments[name].half()
    with pytest.raises(ValueError, match=rf"{name} .*torch.float16.*of one dtype"):
        linear_jsd(**arguments)


@pytest.mark.gpu
def test_peak_memory_on_a_gpu() -> None:
    rows, features, classes, mib = 8192, 1024, 128_256, 2**20
    inputs = make(rows, features, classes, dtype=torch.bfloat16, device="cuda")
    linear_jsd(*make(8, features, classes, dtype=torch.bfloat16, device="cuda")).backward()  # workspaces

    def peak_of(function: Callable[[], Any]) -> tuple[Any, int]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return function(), torch.cuda.max_memory_allocated() - before

    loss, forward_peak = peak_of(lambda: linear_jsd(*inputs, logits_budget=256))
    _, backward_peak = peak_of(loss.backward)
    dhidden, dweight = 2 * rows * features, 2 * classes * features  # in bf16; dweight is accumulated in fp32
    slack = 16 * mib
    assert forward_peak <= 256 * mib + dhidden + 2 * dweight + slack
    assert backward_peak <= dhidden + dweight + slack

"""Combinations of a kernel's options: each pair at least once, and random combinations, in every dtype.

A kernel may work for each option alone and fail, or not compile, for two together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ligerzoo import kernels, losses
from ligerzoo.kernels.activation import ACTIVATIONS
from ligerzoo.kernels.dispatch import INTERPRETING
from ligerzoo.kernels.gating import gating
from tests.covering import covering
from tests.kernels.accuracy import judge, judge_draws
from tests.kernels.layouts import laid_out, offset, padded, swapped, transposed
from tests.kernels.machine import ON_GPU, ROUNDED_DTYPES, kernel_file
from tests.kernels.operations import DIVERGENCES, GEMMA
from tests.kernels.oracles import angles, divergence_oracle, linear_divergence_oracle, numbers, targets

LAYOUTS: list[Callable[[Tensor], Tensor]] = [torch.clone, offset, padded, transposed, swapped]


@dataclass(frozen=True)
class Case:
    """A function, its reference, and the inputs of both. For a loss head also the number of rows per chunk."""

    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: list[Tensor]
    rows: int | None = None


@dataclass(frozen=True)
class Kernel:
    """`case` takes a dtype, a device, and one value of each option, except two that `judge_combination` applies.

    These are "layout", the memory layout of inputs and upstream gradients, and "frozen", the index of the frozen one of
    the differentiable inputs, or None.
    """

    name: str
    case: Callable[..., Case]
    options: dict[str, list[Any]]


def judge_combination(kernel: Kernel, dtype: torch.dtype, device: str, combination: dict[str, Any]) -> None:
    options = dict(combination)
    layout, frozen = options.pop("layout"), options.pop("frozen", None)
    case = kernel.case(dtype, device, **options)
    inputs = laid_out(case.inputs, layout)
    differentiable = [t for t in inputs if t.requires_grad]
    if frozen is not None and len(differentiable) > 1:
        differentiable[frozen % len(differentiable)].requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        if case.rows is not None:
            for name in ("linear_divergence", "contrastive"):
                patch.setattr(kernel_file(name), "rows_per_chunk", lambda *_: case.rows)
        judge(case.function, case.reference, inputs, layout)


# Divergences. Student and teacher differ clearly: for almost equal probabilities, rounding decides the sign of the
# gradient of tvd.

DIVERGENCE_OPTIONS: dict[str, list[Any]] = {
    "of": [("kl_div", {}), ("kl_div-reverse", {}), ("jsd", {"beta": 0.1}), ("jsd", {"beta": 1.0}), ("tvd", {})],
    "temperature": [1.0, 2.0],
    "reduction": [{"reduction": "mean"}, {"reduction": "sum"}, {"reduction": "none"}, {"num_items": 7}],
    "ignore_index": [None, -100, 5],  # None: no targets
    "teacher_is_fp32": [False, True],
    "layout": LAYOUTS,
}


def apart(n_classes: int, device: str) -> Tensor:
    return torch.tensor([2.0, -2.0], device=device).repeat(n_classes)[:n_classes]


def targets_and_ignore_index(ignore_index: int | None, *shape: int, device: str) -> tuple[list[Tensor], dict[str, Any]]:
    if ignore_index is None:
        return [], {}
    return [targets(*shape, classes=33, device=device, ignore_index=ignore_index)], {"ignore_index": ignore_index}


def divergence(
    dtype: torch.dtype, device: str, *, of: tuple[str, dict[str, Any]], temperature: float, reduction: dict[str, Any],
    ignore_index: int | None, teacher_is_fp32: bool, classes: int,
) -> Case:  # fmt: skip
    name, beta = of
    student, teacher = (
        (sign * apart(classes, device) + 0.5 * torch.randn(3, 4, classes, device=device)).to(dtype) for sign in (1, -1)
    )
    target, ignoring = targets_and_ignore_index(ignore_index, 3, 4, device=device)
    inputs = [student.requires_grad_(), teacher.float() if teacher_is_fp32 else teacher, *target]
    options = {"temperature": temperature, **reduction, **ignoring, **beta}
    return Case(partial(DIVERGENCES[name][0], **options), partial(divergence_oracle, name, **options), inputs)


def head(features: int, classes: int, sign: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Hidden states and weight of student or teacher. The first feature keeps their logits apart.

    The logits are multiples of 1/32 below 8, which are exact in every dtype and for every order of summation. So the
    losses depend only on what the kernel does with the logits, and are checked in fp32.
    """
    hidden = torch.randint(-2, 3, (3, 4, features), device=device) / 2
    weight = torch.randint(-1, 2, (classes, features), device=device) / 16
    hidden[..., 0], weight[:, 0] = 1.0, sign * apart(classes, device)
    return [hidden.to(dtype), weight.to(dtype)]


def linear_divergence(
    dtype: torch.dtype, device: str, *, of: tuple[str, dict[str, Any]], temperature: float, reduction: dict[str, Any],
    ignore_index: int | None, teacher_is_fp32: bool, sizes: tuple[int, int, int], student: dict[str, Any],
    teacher: dict[str, Any], biases: tuple[str, ...],
) -> Case:  # fmt: skip
    (name, beta), (features, classes, rows) = of, sizes
    teacher_dtype = torch.float32 if teacher_is_fp32 else dtype
    student_head = [t.requires_grad_() for t in head(features, classes, 1, dtype, device)]
    teacher_head = head(2 * features, classes, -1, teacher_dtype, device)
    target, ignoring = targets_and_ignore_index(ignore_index, 3, 4, device=device)
    bias_tensors = {
        f"{side}_bias": torch.randint(-8, 9, (classes,), device=device).div(32).to(side_dtype)
        for side, side_dtype in (("student", dtype), ("teacher", teacher_dtype))
    }
    bias_tensors["student_bias"].requires_grad_()
    options = {"temperature": temperature, **reduction, **ignoring, **beta, **student, **teacher}

    def with_biases(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*inputs: Tensor) -> Tensor:
            n = len(inputs) - len(biases)
            return function(*inputs[:n], **dict(zip(biases, inputs[n:], strict=True)), **options)

        return run

    return Case(
        with_biases(DIVERGENCES[name][1]),
        with_biases(partial(linear_divergence_oracle, name)),
        [*student_head, *teacher_head, *target, *(bias_tensors[bias] for bias in biases)],
        rows,
    )


# Similarities


def contrastive_loss(
    dtype: torch.dtype, device: str, *, softmaxes: tuple[str, tuple[str, ...]], negatives: tuple[int, ...] | None,
    ids: tuple[str, ...], margin: float | None, learns_temperature: bool, features: int, rows: int,
) -> Case:  # fmt: skip
    """Embeddings of -1/2, 0 and 1/2 have equal similarities in every dtype: the margin excludes the same candidates."""
    mode, directions = softmaxes
    shapes = [(13, features)] * 2 + ([] if negatives is None else [(*negatives, features)])
    inputs = [(torch.randint(-1, 2, shape, device=device) / 2).to(dtype).requires_grad_() for shape in shapes]
    of = {"query_ids": (13,), "positive_ids": (13,), "negative_ids": negatives}
    given = {name: torch.randint(9, of[name], device=device) for name in ids if of[name] is not None}
    options = {"similarity": "dot", "directions": directions, "partition_mode": mode, "margin": margin, **given}
    temperature = [torch.tensor(0.6, device=device, requires_grad=True)] * learns_temperature

    def with_options(function: Callable[..., Any]) -> Callable[..., Tensor]:
        def run(*tensors: Tensor) -> Tensor:
            embeddings, number = tensors[: len(inputs)], tensors[len(inputs) :]
            result = function(*embeddings, temperature=number[0] if number else 0.6, **options)
            return result.loss if isinstance(result, losses.LossOutput) else result  # type: ignore[no-any-return]

        return run

    functions = with_options(losses.contrastive_loss), with_options(losses.contrastive.reference)
    return Case(*functions, [*inputs, *temperature], rows)


# Normalizations


SHAPES = [(5, 33), (2, 3, 4, 64), (3, 4100)]


def norm_inputs(
    shape: tuple[int, ...], has_residual: bool, residual_is_fp32: bool, dtype: torch.dtype, device: str
) -> Any:
    residual = numbers(*shape, dtype=torch.float32 if residual_is_fp32 else dtype, device=device)
    return [numbers(*shape, dtype=dtype, device=device), *([residual] if has_residual else [])]


def rms_norm(
    dtype: torch.dtype, device: str, *, has_residual: bool, residual_is_fp32: bool, weight: torch.dtype | str | None,
    order: dict[str, Any], eps: float, shape: tuple[int, ...],
) -> Case:  # fmt: skip
    file = kernel_file("rms_norm")
    function, reference = (
        (kernels.add_rms_norm, file.add_reference) if has_residual else (kernels.rms_norm, file.reference)
    )
    inputs, options = norm_inputs(shape, has_residual, residual_is_fp32, dtype, device), {"eps": eps, **order}
    if weight is None:
        options |= {"weight": None, "weight_offset": 0.0}
    else:
        inputs += [numbers(shape[-1], dtype=dtype if weight == "same" else torch.float32, device=device)]
    return Case(partial(function, **options), partial(reference, **options), inputs)


def gated_rms_norm(
    dtype: torch.dtype, device: str, *, weight_is_fp32: bool, groups: int, norm_before_gate: bool, eps: float, rows: int
) -> Case:
    options = {"group_size": 11 if groups > 1 else None, "norm_before_gate": norm_before_gate, "eps": eps}
    inputs = [numbers(rows, 11 * groups, dtype=dtype, device=device) for _ in "xz"]
    inputs += [numbers(11 * groups, dtype=torch.float32 if weight_is_fp32 else dtype, device=device)]
    functions = kernels.gated_rms_norm, kernel_file("gated_rms_norm").reference
    return Case(*(partial(function, **options) for function in functions), inputs)


def layer_norm(
    dtype: torch.dtype, device: str, *, weight_is_fp32: bool, bias: bool, eps: float, shape: tuple[int, ...]
) -> Case:
    vectors = [
        numbers(shape[-1], dtype=torch.float32 if weight_is_fp32 else dtype, device=device) for _ in range(1 + bias)
    ]

    def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernel_file("layer_norm").reference(x, weight, bias, eps)

    inputs = [numbers(*shape, dtype=dtype, device=device), *vectors]
    return Case(partial(kernels.layer_norm, eps=eps), reference, inputs)


# Feed-forwards


def glu(dtype: torch.dtype, device: str, *, activation: Any, shape: tuple[int, ...]) -> Case:
    function, reference = (partial(f, activation=activation) for f in (kernels.glu, kernel_file("glu").reference))
    return Case(function, reference, [numbers(*shape, dtype=dtype, device=device) for _ in range(2)])


def linear(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], n_inputs: int, dtype: torch.dtype, device: str,
    *, activation: Any, weight_is_fp32: bool, bias: bool, shape: tuple[int, ...],
) -> Case:  # fmt: skip
    inner, weight_dtype = shape[-1], torch.float32 if weight_is_fp32 else dtype
    inputs = [numbers(*shape, dtype=dtype, device=device) for _ in range(n_inputs)]
    inputs += [numbers(17, inner, dtype=weight_dtype, device=device, scale=inner**-0.5)]
    inputs += [numbers(17, dtype=weight_dtype, device=device)] * bias
    return Case(partial(function, activation=activation), partial(reference, activation=activation), inputs)


def experts(
    dtype: torch.dtype, device: str, *, activation: Any, slots: int, id_dtype: torch.dtype, weights_are_fp32: bool,
    sizes: tuple[int, int],
) -> Case:  # fmt: skip
    features, inner = sizes
    tokens = 100  # enough for the largest errors of both to be similar
    weights = torch.rand(tokens, slots, device=device).to(torch.float32 if weights_are_fp32 else dtype)
    inputs = [
        numbers(tokens, features, dtype=dtype, device=device),
        torch.rand(tokens, 4, device=device).argsort(-1)[:, :slots].to(id_dtype),
        weights.requires_grad_(),
        numbers(4, gating(activation).parts * inner, features, dtype=dtype, device=device, scale=features**-0.5),
        numbers(4, features, inner, dtype=dtype, device=device, scale=inner**-0.5),
    ]
    function, reference = (
        partial(f, activation=activation) for f in (kernels.experts_mlp, kernel_file("experts").reference)
    )
    return Case(function, reference, inputs)


# Others


def rope(
    dtype: torch.dtype, device: str, *, interleaved: bool, head_dim: int, heads: tuple[int, int], each_batch: bool,
    angles_are_fp32: bool,
) -> Case:  # fmt: skip
    states = [numbers(2, 3, n, head_dim, dtype=dtype, device=device) for n in heads]
    angle = angles(2 if each_batch else 1, 3, 4, dtype=torch.float32 if angles_are_fp32 else dtype, device=device)
    function, reference = (partial(f, interleaved=interleaved) for f in (kernels.rope, kernel_file("rope").reference))
    return Case(function, reference, [*states, *angle])


def softmax(dtype: torch.dtype, device: str, *, shape: tuple[int, ...]) -> Case:
    return Case(kernels.softmax, kernel_file("softmax").reference, [numbers(*shape, dtype=dtype, device=device)])


KERNELS = [
    Kernel("divergence", divergence, {**DIVERGENCE_OPTIONS, "classes": [33, 4100]}),
    Kernel(
        "linear_divergence",
        linear_divergence,
        {
            **DIVERGENCE_OPTIONS,
            # Features, classes, rows per chunk. Not few rows with many classes: torch is less exact for those.
            "sizes": [(17, 33, 5), (64, 40, 5), (64, 40, 100), (64, 4104, 100)],
            "student": [
                {},
                {"student_softcap": 3.0},
                {"student_logit_scale": 0.7},
                {"student_softcap": 3.0, "student_logit_scale": 0.7},
            ],
            "teacher": [{}, {"teacher_softcap": 2.5}, {"teacher_softcap": 2.5, "teacher_logit_scale": 1.3}],
            "biases": [(), ("student_bias",), ("teacher_bias",), ("student_bias", "teacher_bias")],
            "frozen": [None, 0, 1],
        },
    ),
    Kernel(
        "contrastive_loss",
        contrastive_loss,
        {
            "softmaxes": [
                ("joint", ("query_to_doc",)),
                ("per_direction", ("query_to_doc", "doc_to_query")),
                ("joint", ("query_to_doc", "doc_to_query")),
                ("joint", ("query_to_doc", "query_to_query")),
                ("joint", ("query_to_doc", "query_to_query", "doc_to_doc")),
                ("joint", ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")),
            ],
            "negatives": [None, (13, 2), (7,)],
            "ids": [(), ("query_ids",), ("positive_ids",), ("query_ids", "positive_ids", "negative_ids")],
            "margin": [None, 0.1],
            "learns_temperature": [False, True],
            "features": [16, 33],
            "rows": [5, 100],
            "layout": LAYOUTS,
            "frozen": [None, 0, 1, 2],
        },
    ),
    Kernel(
        "rms_norm",
        rms_norm,
        {
            "has_residual": [False, True],
            "residual_is_fp32": [False, True],
            "weight": ["same", torch.float32, None],
            "order": [{}, GEMMA, {"round_before_scale": False}],
            "eps": [1e-6, 0.1],
            "shape": SHAPES,
            "layout": LAYOUTS,
            "frozen": [None, 0, -1],
        },
    ),
    Kernel(
        "gated_rms_norm",
        gated_rms_norm,
        {
            "weight_is_fp32": [False, True],
            "groups": [1, 3],
            "norm_before_gate": [True, False],
            "eps": [1e-5, 0.1],
            "rows": [0, 1, 9],
            "layout": LAYOUTS,
            "frozen": [None, 0, 1, 2],
        },
    ),
    Kernel(
        "layer_norm",
        layer_norm,
        {
            "weight_is_fp32": [False, True],
            "bias": [False, True],
            "eps": [1e-5, 0.1],
            "shape": SHAPES,
            "layout": LAYOUTS,
            "frozen": [None, 0, 1, -1],
        },
    ),
    Kernel("glu", glu, {"activation": list(ACTIVATIONS), "shape": SHAPES, "layout": LAYOUTS, "frozen": [None, 0, 1]}),
    *(
        Kernel(
            name,
            partial(linear, function, reference, n_inputs),
            {
                "activation": list(ACTIVATIONS),
                "weight_is_fp32": [False, True],
                "bias": [False, True],
                "shape": SHAPES,
                "layout": LAYOUTS,
                "frozen": [None, *range(n_inputs + 1), -1],
            },
        )
        for name, function, reference, n_inputs in (
            ("glu_linear", kernels.glu_linear, kernel_file("glu").linear_reference, 2),
            ("activation_linear", kernels.activation_linear, kernel_file("activation").reference, 1),
        )
    ),
    Kernel(
        "experts_mlp",
        experts,
        {
            "activation": [*ACTIVATIONS, kernels.Ungated()],
            "slots": [1, 3],
            "id_dtype": [torch.int64, torch.int32],
            "weights_are_fp32": [False, True],
            "sizes": [(33, 129), (64, 256)],
            "layout": LAYOUTS,
            "frozen": [None, 0, 1, 2, 3],
        },
    ),
    Kernel(
        "rope",
        rope,
        {
            "interleaved": [False, True],
            "head_dim": [8, 10],  # of which 8 features are rotated
            "heads": [(4, 2), (3, 1)],
            "each_batch": [False, True],
            "angles_are_fp32": [False, True],
            "layout": LAYOUTS,
            "frozen": [None, 0, 1],
        },
    ),
    Kernel("softmax", softmax, {"shape": [*SHAPES, (2, 33_000)], "layout": LAYOUTS}),
]


def combinations() -> list[Any]:
    """All pairs in all dtypes on a GPU, a part of those of each kernel on a CPU, where they are slow."""
    stride = 1 if ON_GPU else 61 if INTERPRETING else 7
    found = []
    for kernel in KERNELS:
        cases = [*enumerate(product(covering(kernel.options), ROUNDED_DTYPES))]
        found += [
            pytest.param(kernel, dtype, combination, id=f"{kernel.name}-{dtype}-{i}")
            for i, (combination, dtype) in cases[len(cases) // 2 % stride :: stride]
        ]
    return found


@pytest.mark.parametrize("kernel, dtype, combination", combinations())
def test_pairs(kernel: Kernel, dtype: torch.dtype, combination: dict[str, Any], device: str) -> None:
    judge_combination(kernel, dtype, device, combination)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_random_combinations(device: str, data: st.DataObject) -> None:
    kernel = data.draw(st.sampled_from(KERNELS))
    dtype = data.draw(st.sampled_from(ROUNDED_DTYPES))
    combination = {name: data.draw(st.sampled_from(values), label=name) for name, values in kernel.options.items()}

    def judge_draw(seed: int) -> None:
        torch.manual_seed(seed)
        judge_combination(kernel, dtype, device, combination)

    judge_draws(judge_draw, data.draw(st.integers(0, 2**31 - 1), label="seed"))

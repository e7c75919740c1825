"""The table of operations that the general tests run on, with small inputs for each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo import kernels, losses
from ligerzoo.kernels import LowRank, LowRankTerms
from ligerzoo.losses import contrastive
from tests.kernels.machine import DTYPES, ROUNDED_DTYPES, kernel_file, on_gpu_too
from tests.kernels.oracles import (
    angles,
    cross_entropy_oracle,
    divergence_oracle,
    linear_cross_entropy_oracle,
    linear_divergence_oracle,
    numbers,
    statistics,
    statistics_oracle,
    targets,
)

DIVERGENCES = {
    "kl_div": (kernels.kl_div, kernels.linear_kl_div),
    "kl_div-reverse": (partial(kernels.kl_div, reverse=True), partial(kernels.linear_kl_div, reverse=True)),
    "jsd": (kernels.jsd, kernels.linear_jsd),
    "tvd": (kernels.tvd, kernels.linear_tvd),
}
"""Functions of logits, and of hidden states and heads."""


@dataclass(frozen=True)
class Operation:
    """A public function with fixed options. `inputs(batch, dtype, device)` returns small inputs for it."""

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[int, torch.dtype, str], list[Tensor]]
    always_fused: bool = False
    """Whether it uses an autograd.Function on a CPU too."""


def _softmax_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device)]


def _divergence_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    logits = [numbers(batch, 3, 33, dtype=dtype, device=device) for _ in range(2)]
    return [logits[0], logits[1].detach(), targets(batch, 3, classes=33, device=device)]


def _linear_divergence_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    student, teacher = (_linear_cross_entropy_inputs(batch, dtype, device) for _ in range(2))
    return [*student[:2], *(t.detach() for t in teacher)]


def _rms_norm_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device), numbers(33, dtype=dtype, device=device)]


def _weightless(inputs: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    return lambda *args: inputs(*args)[:-1]


def _rope_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    heads = [numbers(batch, 2, n, 10, dtype=dtype, device=device) for n in (4, 2)]
    return [*heads, *angles(1, 2, 4, device=device)]


def _rope_inputs_of_transformers(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    q, k, *_ = _rope_inputs(batch, dtype, device)
    repeated = (torch.cat([t, t], -1) for t in angles(batch, 2, 4, dtype=dtype, device=device))
    return [q, k, *(t[..., :4] for t in repeated)]


def _glu_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device) for _ in range(2)]


def _glu_linear_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    weights = [numbers(17, 33, dtype=dtype, device=device), numbers(17, dtype=dtype, device=device)]
    return _glu_inputs(batch, dtype, device) + weights


def _linears(
    x: Tensor, first: Tensor, second: Tensor, bias: Tensor, function: Callable[..., Any] = kernels.linears
) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = function(x, [first, second], [bias, None])
    return result


def _linears_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    x = numbers(batch, 3, 33, dtype=dtype, device=device)
    return [x, *(numbers(*shape, dtype=dtype, device=device) for shape in ((17, 33), (8, 33), (17,)))]


def _lora_linears(
    x: Tensor, first: Tensor, second: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor,
    function: Callable[..., Any] = kernels.lora_linears,
) -> tuple[Tensor, ...]:  # fmt: skip
    updates = [LowRank(a, b, 0.5), LowRank(c, d, 2.0)]
    result: tuple[Tensor, ...] = function(x, [first, second], [bias, None], updates)
    return result


def _multiplied(dtype: torch.dtype) -> torch.dtype:
    """The dtype, or fp16 if kernels of this machine cannot multiply matrices in it."""
    return torch.float16 if dtype in DTYPES and dtype not in ROUNDED_DTYPES else dtype


def _lora_linears_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    dtype = _multiplied(dtype)
    shapes = (4, 33), (17, 4), (2, 33), (8, 2)
    updates = [numbers(*shape, dtype=dtype, device=device) for shape in shapes]
    return [*_linears_inputs(batch, dtype, device), *updates]


def _lora_glu_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor,
    function: Callable[..., Any] = kernels.glu_linear,
) -> Tensor:  # fmt: skip
    result: Tensor = function(gate, up, weight, bias, update=LowRank(a, b, 0.5))
    return result


def _lora_glu_linear_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    dtype = _multiplied(dtype)
    updates = [numbers(*shape, dtype=dtype, device=device) for shape in ((4, 33), (17, 4))]
    return [*_glu_linear_inputs(batch, dtype, device), *updates]


def _glu_linear_with_terms(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor, h: Tensor, gate_b: Tensor,
    up_b: Tensor, function: Callable[..., Any] = kernels.glu_linear,
) -> Tensor:  # fmt: skip
    update, terms = LowRank(a, b, 0.5), LowRankTerms(h, gate_b, up_b, 0.5, 2.0)
    result: Tensor = function(gate, up, weight, bias, update=update, terms=terms)
    return result


def _glu_linear_with_terms_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    shapes = (batch, 3, 6), (33, 4), (33, 2)
    terms = [numbers(*shape, dtype=_multiplied(dtype), device=device, scale=0.3) for shape in shapes]
    return [*_lora_glu_linear_inputs(batch, dtype, device), *terms]


def _lora_experts(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, a: Tensor, b: Tensor,
    c: Tensor, d: Tensor, function: Callable[..., Any] = kernels.lora_experts_mlp,
) -> Tensor:  # fmt: skip
    updates = {"gate_up_update": LowRank(a, b, 0.5), "down_update": LowRank(c, d, 2.0)}
    result: Tensor = function(x, expert_ids, expert_weights, gate_up, down, **updates)
    return result


def _lora_experts_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    inputs = _experts_inputs(batch, dtype, device)
    shapes = (3, 4, 17), (3, 18, 4), (3, 2, 9), (3, 17, 2)
    updates = [numbers(*shape, dtype=inputs[0].dtype, device=device, scale=0.3) for shape in shapes]
    return [*inputs[:3], *(weight.detach() for weight in inputs[3:]), *updates]


def _biased_experts_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    inputs = _experts_inputs(batch, dtype, device)
    return [*inputs, *(numbers(3, size, dtype=inputs[0].dtype, device=device) for size in (18, 17))]


def _apply_sinks_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    lse = numbers(batch, 4, 3, dtype=torch.promote_types(dtype, torch.float32), device=device)
    return [numbers(batch, 3, 4, 10, dtype=dtype, device=device), lse, numbers(4, dtype=dtype, device=device)]


def _large_head_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 5, heads, 40, dtype=_multiplied(dtype), device=device) for heads in (4, 2, 2)]


def _activation_linear_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    x, _, weight, bias = _glu_linear_inputs(batch, dtype, device)
    return [x, weight, bias]


def _cross_entropy_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device), targets(batch, 3, classes=33, device=device)]


def _experts_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    dtype = _multiplied(dtype)
    return [
        numbers(8 * batch, 17, dtype=dtype, device=device),
        torch.rand(8 * batch, 3, device=device).argsort(-1)[:, :2],
        torch.rand(8 * batch, 2, device=device).to(dtype).requires_grad_(),
        numbers(3, 18, 17, dtype=dtype, device=device, scale=0.3),
        numbers(3, 17, 9, dtype=dtype, device=device, scale=0.3),
    ]


def _linear_cross_entropy_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    features = [
        numbers(batch, 3, 17, dtype=dtype, device=device),
        numbers(33, 17, dtype=dtype, device=device, scale=0.3),
    ]
    return [*features, targets(batch, 3, classes=33, device=device)]


def _contrastive(
    queries: Tensor, positives: Tensor, negatives: Tensor, function: Callable[..., Any] = losses.contrastive_loss,
    **options: Any,
) -> Tensor:  # fmt: skip
    # Products of other numbers, such as normalized ones, would be rounded to other results.
    result = function(queries, positives, negatives, temperature=2.0, similarity="dot", **options)
    return result.loss if isinstance(result, losses.LossOutput) else result  # type: ignore[no-any-return]


def _contrastive_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [
        numbers(*shape, dtype=dtype, device=device) for shape in ((3 * batch, 17), (3 * batch, 17), (5 * batch, 17))
    ]


OPTIONS: dict[str, Any] = {
    "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3, "reduction": "none",
}  # fmt: skip
"""Options of `cross_entropy` that enable all terms of its formula."""


def _weighted_linear_cross_entropy_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    token_weight = torch.rand(batch, 3, device=device) + 0.5
    return [*_linear_cross_entropy_inputs(batch, dtype, device), token_weight.requires_grad_()]


def _weighted_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor) -> Tensor:
    return kernels.linear_cross_entropy(hidden, weight, target, token_weight=token_weight, **OPTIONS)


def _weighted_linear_cross_entropy_oracle(
    hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor
) -> Tensor:
    return linear_cross_entropy_oracle(hidden, weight, target, None, token_weight, **OPTIONS)


def _add_rms_norm_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device), *_rms_norm_inputs(batch, dtype, device)]


def _residual_rms_norm_oracle(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return kernel_file("rms_norm").reference(x, weight, 1e-6), x.clone()


def _layer_norm_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [*_rms_norm_inputs(batch, dtype, device), numbers(33, dtype=dtype, device=device)]


def _delta_rule_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    dtype = _multiplied(dtype)
    return [
        *(numbers(batch, 3, 1, 8, dtype=dtype, device=device) for _ in range(2)),
        numbers(batch, 3, 2, 5, dtype=dtype, device=device),
        (-torch.rand(batch, 3, 2, device=device)).to(dtype).requires_grad_(),
        torch.rand(batch, 3, 2, device=device).to(dtype).requires_grad_(),
    ]


def _delta_rule_oracle(*inputs: Tensor) -> Tensor:
    return kernel_file("delta_rule").reference(*inputs)[0].to(inputs[2].dtype)  # type: ignore[no-any-return]


def _delta_gates_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    rows = [numbers(batch, 3, 5, dtype=dtype, device=device) for _ in range(2)]
    return [*rows, *(numbers(5, dtype=dtype, device=device) for _ in range(2))]


def _ssd_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    dtype = _multiplied(dtype)
    return [
        numbers(batch, 3, 3, 5, dtype=dtype, device=device),
        *(numbers(batch, 3, 1, 8, dtype=dtype, device=device) for _ in range(2)),
        (-torch.rand(batch, 3, 3, device=device)).to(dtype).requires_grad_(),
        torch.rand(batch, 3, 3, device=device).to(dtype).requires_grad_(),
        numbers(3, dtype=dtype, device=device),  # `judge` checks a gradient of one number or two with 16 draws
    ]


def _ssd_oracle(*inputs: Tensor) -> Tensor:
    return kernel_file("ssd").reference(*inputs)[0].to(inputs[0].dtype)  # type: ignore[no-any-return]


def _ssd_gates_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 5, dtype=dtype, device=device), *(numbers(5, dtype=dtype, device=device) for _ in "ab")]


def _delta_channel_gates_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    shapes = (batch, 3, 5, 7), (batch, 3, 5), (5,), (5, 7)
    return [numbers(*shape, dtype=dtype, device=device) for shape in shapes]


def _causal_conv_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    shapes = (batch, 7, 33), (33, 4), (33,)
    return [numbers(*shape, dtype=dtype, device=device) for shape in shapes]


def _xielu_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    constants = (torch.tensor(number, dtype=dtype, device=device) for number in (0.5, -1e-6))
    return [numbers(batch, 3, 33, dtype=dtype, device=device), *(numbers(1, dtype=dtype, device=device) for _ in "ab"),
            *constants]  # fmt: skip


def _gated_rms_norm_inputs(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [numbers(batch, 3, 33, dtype=dtype, device=device), *_rms_norm_inputs(batch, dtype, device)]


GEMMA = {"weight_offset": 1.0, "round_before_scale": False}
"""The options of `rms_norm` for Gemma."""


OPERATIONS = [
    *(
        Operation(
            name,
            partial(kernels.rms_norm, **options),
            partial(kernel_file("rms_norm").reference, eps=1e-6, **options),
            inputs,
        )
        for name, options, inputs in (
            ("rms_norm", {}, _rms_norm_inputs),
            ("rms_norm-gemma", GEMMA, _rms_norm_inputs),
            ("rms_norm-weightless", {"weight": None}, _weightless(_rms_norm_inputs)),
        )
    ),
    *(
        Operation(
            name,
            partial(kernels.add_rms_norm, **options),
            partial(kernel_file("rms_norm").add_reference, eps=1e-6, **options),
            inputs,
        )
        for name, options, inputs in (
            ("add_rms_norm", {}, _add_rms_norm_inputs),
            ("add_rms_norm-gemma", GEMMA, _add_rms_norm_inputs),
            ("add_rms_norm-weightless", {"weight": None}, _weightless(_add_rms_norm_inputs)),
        )
    ),
    Operation("gated_delta_rule", kernels.gated_delta_rule, _delta_rule_oracle, _delta_rule_inputs),
    Operation("ssd", kernels.ssd, _ssd_oracle, _ssd_inputs),
    Operation("ssd_gates", kernels.ssd_gates, kernel_file("ssd_gates").reference, _ssd_gates_inputs),
    Operation(
        "delta_gates",
        partial(kernels.delta_gates, max_strength=1.5),
        partial(kernel_file("delta_gates").reference, max_strength=1.5),
        _delta_gates_inputs,
    ),
    Operation(
        "delta_gates-channels", kernels.delta_gates, kernel_file("delta_gates").reference, _delta_channel_gates_inputs
    ),
    *(
        Operation(
            name,
            partial(kernels.causal_conv1d, activation=activation),
            partial(kernel_file("causal_conv").reference, activation=activation),
            _causal_conv_inputs,
        )
        for name, activation in (("causal_conv1d", None), ("causal_conv1d-silu", "silu"))
    ),
    *(
        Operation(
            name,
            partial(kernels.gated_rms_norm, **options),
            partial(kernel_file("gated_rms_norm").reference, **options),
            _gated_rms_norm_inputs,
        )
        for name, options in (
            ("gated_rms_norm", {}),
            ("gated_rms_norm-groups", {"group_size": 11, "norm_before_gate": False}),
            ("gated_rms_norm-sigmoid", {"activation": "sigmoid"}),
        )
    ),
    Operation("xielu", kernels.xielu, kernel_file("xielu").reference, _xielu_inputs),
    Operation("residual_rms_norm", kernels.residual_rms_norm, _residual_rms_norm_oracle, _rms_norm_inputs),
    Operation(
        "layer_norm", kernels.layer_norm, partial(kernel_file("layer_norm").reference, eps=1e-5), _layer_norm_inputs
    ),
    Operation("linears", _linears, partial(_linears, function=kernel_file("linears").reference), _linears_inputs),
    Operation(
        "lora_linears",
        _lora_linears,
        partial(_lora_linears, function=kernel_file("lora").reference),
        _lora_linears_inputs,
    ),
    Operation(
        "lora_glu_linear",
        _lora_glu_linear,
        partial(_lora_glu_linear, function=kernel_file("glu").linear_reference),
        _lora_glu_linear_inputs,
    ),
    Operation(
        "glu_linear-terms",
        _glu_linear_with_terms,
        partial(_glu_linear_with_terms, function=kernel_file("glu").linear_reference),
        _glu_linear_with_terms_inputs,
    ),
    Operation(
        "lora_experts_mlp",
        _lora_experts,
        partial(_lora_experts, function=kernel_file("experts").reference),
        _lora_experts_inputs,
        always_fused=True,
    ),
    Operation("experts_mlp", kernels.experts_mlp, kernel_file("experts").reference, _experts_inputs, always_fused=True),
    Operation(
        "experts_mlp-clamped",
        partial(kernels.experts_mlp, activation=kernels.ClampedSwiGLU(0.8, 1.5)),
        partial(kernel_file("experts").reference, activation=kernels.ClampedSwiGLU(0.8, 1.5)),
        _biased_experts_inputs,
        always_fused=True,
    ),
    Operation(
        "apply_sinks",
        kernels.apply_sinks,
        kernel_file("attention_sinks").reference,
        _apply_sinks_inputs,
        always_fused=True,
    ),
    Operation(
        "large_head_attention",
        kernels.large_head_attention,
        kernel_file("large_head_attention").reference,
        _large_head_inputs,
    ),
    Operation("rope", kernels.rope, kernel_file("rope").reference, _rope_inputs),
    Operation("rope-views", kernels.rope, kernel_file("rope").reference, _rope_inputs_of_transformers),
    Operation(
        "rope-interleaved",
        partial(kernels.rope, interleaved=True),
        partial(kernel_file("rope").reference, interleaved=True),
        _rope_inputs,
    ),
    *(
        Operation(
            f"{name}-{activation}",
            partial(function, activation=activation),
            partial(reference, activation=activation),
            inputs,
        )
        for name, function, reference, inputs in (
            ("glu", kernels.glu, kernel_file("glu").reference, _glu_inputs),
            ("glu_linear", kernels.glu_linear, kernel_file("glu").linear_reference, _glu_linear_inputs),
            (
                "activation_linear",
                kernels.activation_linear,
                kernel_file("activation").reference,
                _activation_linear_inputs,
            ),
        )
        for activation in kernel_file("activation").ACTIVATIONS
    ),
    *(
        Operation(
            f"cross_entropy-{reduction}",
            partial(kernels.cross_entropy, reduction=reduction),
            partial(cross_entropy_oracle, reduction=reduction),
            _cross_entropy_inputs,
        )
        for reduction in ("mean", "none")
    ),
    *(
        Operation(
            f"linear_cross_entropy-{reduction}",
            partial(kernels.linear_cross_entropy, reduction=reduction),
            partial(linear_cross_entropy_oracle, reduction=reduction),
            _linear_cross_entropy_inputs,
            always_fused=True,
        )
        for reduction in ("mean", "none")
    ),
    Operation(
        "linear_cross_entropy-options",
        _weighted_linear_cross_entropy,
        _weighted_linear_cross_entropy_oracle,
        _weighted_linear_cross_entropy_inputs,
        always_fused=True,
    ),
    Operation(
        "cross_entropy-options",
        partial(kernels.cross_entropy, **OPTIONS),
        partial(cross_entropy_oracle, **OPTIONS),
        _cross_entropy_inputs,
    ),
    *(
        Operation(
            name,
            partial(_contrastive, **options),
            partial(_contrastive, function=contrastive.reference, **options),
            _contrastive_inputs,
            always_fused=True,
        )
        for name, options in (
            ("contrastive", {}),
            (
                "contrastive-symmetric",
                {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
            ),
        )
    ),
    Operation("token_statistics", statistics, statistics_oracle, _linear_cross_entropy_inputs, always_fused=True),
    Operation("softmax", kernels.softmax, kernel_file("softmax").reference, _softmax_inputs),
    *(
        Operation(name, function, partial(divergence_oracle, name), _divergence_inputs)
        for name, (function, _) in DIVERGENCES.items()
    ),
    *(
        Operation(
            f"linear_{name}",
            function,
            partial(linear_divergence_oracle, name),
            _linear_divergence_inputs,
            always_fused=True,
        )
        for name, (_, function) in DIVERGENCES.items()
    ),
]

_TYPICAL = {
    "rms_norm", "rms_norm-weightless", "add_rms_norm", "residual_rms_norm", "layer_norm", "experts_mlp", "rope",
    "glu-silu", "glu_linear-silu", "activation_linear-gelu", "cross_entropy-mean", "linear_cross_entropy-none",
    "gated_delta_rule", "delta_gates", "delta_gates-channels", "ssd_gates", "causal_conv1d-silu",
    "gated_rms_norm-groups", "xielu",
    "token_statistics", "softmax", "contrastive-symmetric", "jsd", "linear_jsd", "lora_linears", "lora_experts_mlp",
    "glu_linear-terms",
    "apply_sinks", "large_head_attention",
}  # fmt: skip
"""One operation of each kernel, and of each autograd function that returns an input; of the linear recurrences the
gated delta rule."""

every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
KERNELS = on_gpu_too(
    [operation for operation in OPERATIONS if operation.name in _TYPICAL],
    [operation for operation in OPERATIONS if operation.name not in _TYPICAL],
)
"""For tests that hardly depend on options: one operation per kernel on a CPU, where tests are slow, all on a GPU."""

every_kernel = pytest.mark.parametrize("operation", KERNELS, ids=lambda operation: operation.name)

every_divergence = pytest.mark.parametrize("of", DIVERGENCES)
one_divergence = pytest.mark.parametrize("of", on_gpu_too(["jsd"], [name for name in DIVERGENCES if name != "jsd"]))
"""One divergence on a CPU, all on a GPU."""

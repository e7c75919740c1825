"""Error messages about arguments of the public functions: what is wrong, where, what was given and expected."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ligerzoo import kernels
from ligerzoo.kernels.fp8 import FP8

X, W = torch.randn(4, 6), torch.randn(6)
HIDDEN, HEAD, TARGET = torch.randn(4, 6), torch.randn(9, 6), torch.randint(9, (4,))
Q, ANGLES = torch.randn(2, 3, 2, 4), torch.randn(1, 3, 2)
LOGITS = torch.randn(4, 9)
SSD = {
    "x": torch.randn(2, 3, 2, 5), "b": torch.randn(2, 3, 1, 4), "c": torch.randn(2, 3, 1, 4), "g": torch.zeros(2, 3, 2),
    "dt": torch.ones(2, 3, 2), "d": torch.ones(2),
}  # fmt: skip
DELTA = {
    "q": torch.randn(2, 3, 1, 4), "k": torch.randn(2, 3, 1, 4), "v": torch.randn(2, 3, 2, 5),
    "g": -torch.rand(2, 3, 2), "beta": torch.rand(2, 3, 2),
}  # fmt: skip

ARGUMENTS: dict[str, dict[str, Tensor]] = {
    "activation_linear": {"x": X, "weight": HEAD, "bias": torch.randn(9)},
    "adamw_update": {
        "parameter": X.clone(), "gradient": X, "exp_avg": torch.zeros(4, 6), "exp_avg_sq": torch.zeros(4, 6),
    },
    "adamw_update_fp8": {
        "parameter": X.clone(), "gradient": X, "exp_avg": torch.zeros(4, 6, dtype=FP8),
        "exp_avg_scales": torch.ones(1), "root": torch.zeros(4, 6, dtype=FP8), "root_scales": torch.ones(1),
    },
    "add_rms_norm": {"x": X, "residual": X, "weight": W},
    "apply_sinks": {"out": torch.randn(2, 3, 4, 8), "lse": torch.randn(2, 4, 3), "sinks": torch.randn(4)},
    "causal_conv1d": {
        "x": torch.randn(2, 5, 6), "weight": torch.randn(6, 4), "bias": W, "initial_state": torch.randn(2, 3, 6),
        "segment_start": torch.zeros(2, 5).long(),
    },
    "causal_conv1d_step": {
        "x": torch.randn(2, 1, 6), "state": torch.randn(2, 3, 6), "weight": torch.randn(6, 4), "bias": W,
    },
    "cross_entropy": {"logits": LOGITS, "target": TARGET, "class_weight": torch.ones(9), "token_weight": torch.ones(4)},
    "experts_mlp": {
        "x": X, "expert_ids": torch.zeros(4, 2).long(), "expert_weights": torch.ones(4, 2),
        "gate_up": torch.randn(3, 4, 6), "down": torch.randn(3, 6, 2), "gate_up_bias": torch.randn(3, 4),
        "down_bias": torch.randn(3, 6),
    },
    "decode_attention": {
        "q": torch.randn(2, 4, 16), "keys": torch.randn(2, 2, 5, 16), "values": torch.randn(2, 2, 5, 16),
        "first": torch.tensor([0, 1]), "last": torch.tensor([4, 3]), "fallback": torch.tensor([-1, 2]),
        "sinks": torch.randn(4),
    },
    "exact_attention": {
        "q": torch.randn(2, 1, 4, 64), "keys": torch.randn(2, 5, 2, 64), "values": torch.randn(2, 5, 2, 64),
        "last": torch.tensor([[4], [3]]),
    },
    "decode_experts": {
        "x": X, "gate_up": torch.randn(3, 4, 6), "down": torch.randn(3, 6, 2), "residual": X,
        "gate_up_bias": torch.randn(3, 4), "down_bias": torch.randn(3, 6),
    },
    "delta_gates": {"a": X, "b": X, "a_log": W, "dt_bias": W},
    "filter_bounds": {
        "logits": LOGITS, "temperature": torch.ones(4), "top_k": torch.ones(4).long(), "top_p": torch.ones(4),
        "min_p": torch.ones(4),
    },
    "gated_delta_rule": DELTA | {
        "initial_state": torch.zeros(2, 2, 4, 5), "segment_start": torch.zeros(2, 3).long(),
    },
    "gated_delta_step": {name: x[:, :1] for name, x in DELTA.items()} | {"state": torch.zeros(2, 2, 4, 5)},
    "gated_rms_norm": {"x": X, "z": X, "weight": W},
    "geglu": {"gate": X, "up": X},
    "glu": {"gate": X, "up": X},
    "glu_linear": {"gate": X, "up": X, "weight": HEAD, "bias": torch.randn(9)},
    "jsd": {"student": LOGITS, "teacher": LOGITS, "target": TARGET},
    "kl_div": {"student": LOGITS, "teacher": LOGITS, "target": TARGET},
    "large_head_attention": {name: torch.randn(2, 3, 4, 8) for name in ("q", "k", "v")},
    "latent_decode_attention": {
        "q": torch.randn(2, 4, 16), "q_rope": torch.randn(2, 4, 8), "latents": torch.randn(2, 5, 16),
        "k_rope": torch.randn(2, 5, 8), "first": torch.tensor([0, 1]), "last": torch.tensor([4, 3]),
        "fallback": torch.tensor([-1, 2]),
    },
    "layer_norm": {"x": X, "weight": W, "bias": W},
    "linear_cross_entropy": {
        "hidden": HIDDEN, "weight": HEAD, "target": TARGET, "bias": torch.randn(9), "class_weight": torch.ones(9),
        "token_weight": torch.ones(4),
    },
    **{
        f"linear_{divergence}": {
            "student_hidden": HIDDEN, "student_weight": HEAD, "teacher_hidden": HIDDEN, "teacher_weight": HEAD,
            "target": TARGET, "student_bias": torch.randn(9), "teacher_bias": torch.randn(9),
        }
        for divergence in ("jsd", "kl_div", "tvd")
    },
    "linear_glu": {
        "x": X, "gate": HEAD, "up": HEAD, "gate_bias": torch.randn(9), "up_bias": torch.randn(9),
    },
    "linears": {"x": X},
    "lora_experts_mlp": {
        "x": X, "expert_ids": torch.zeros(4, 2).long(), "expert_weights": torch.ones(4, 2),
        "gate_up": torch.randn(3, 4, 6), "down": torch.randn(3, 6, 2), "gate_up_bias": torch.randn(3, 4),
        "down_bias": torch.randn(3, 6),
    },
    "lora_linears": {"x": X},
    "packed_attention": {**{name: torch.randn(2, 3, 4, 8) for name in ("q", "k", "v")}, "sinks": torch.randn(4)},
    "residual_rms_norm": {"x": X, "weight": W},
    "rms_norm": {"x": X, "weight": W},
    "rope": {"q": Q, "k": Q, "cos": ANGLES, "sin": ANGLES},
    "round_stochastically": {"source": X},
    "route": {"logits": LOGITS},
    "route_sigmoid": {"logits": LOGITS, "bias": torch.zeros(9)},
    "sample_tokens": {
        "logits": LOGITS, "scores": LOGITS, "seeds": torch.arange(4), "steps": torch.arange(4),
        "temperature": torch.ones(4), "threshold": torch.zeros(4), "last_token": torch.arange(4),
    },
    "sink_attention": {**{name: torch.randn(2, 3, 4, 8) for name in ("q", "k", "v")}, "sinks": torch.randn(4)},
    "softmax": {"x": X},
    "ssd": SSD | {"initial_state": torch.zeros(2, 2, 4, 5), "segment_start": torch.zeros(2, 3).long()},
    "ssd_gates": {"x": X, "a_log": W, "dt_bias": W},
    "ssd_step": {name: x[:, :1] if x.dim() > 1 else x for name, x in SSD.items()} | {"state": torch.zeros(2, 2, 4, 5)},
    "swiglu": {"gate": X, "up": X},
    "xielu": {"x": X, **{name: torch.ones(1) for name in ("positive", "negative", "beta", "eps")}},
    "token_logps": {"hidden": HIDDEN, "weight": HEAD, "target": TARGET, "bias": torch.randn(9)},
    "token_statistics": {"hidden": HIDDEN, "weight": HEAD, "target": TARGET, "bias": torch.randn(9)},
    "tvd": {"student": LOGITS, "teacher": LOGITS, "target": TARGET},
    "write_to_cache": {
        "key_cache": torch.zeros(2, 3, 8, 4), "value_cache": torch.zeros(2, 3, 8, 4), "keys": torch.randn(2, 1, 3, 4),
        "values": torch.randn(2, 1, 3, 4), "positions": torch.tensor([[5], [2]]),
    },
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "adamw_update": {"step": torch.ones(()), "lr": torch.ones(())},
    "adamw_update_fp8": {"step": torch.ones(()), "lr": torch.ones(()), "key": 2**32},
    "decode_experts": {"routing": kernels.route(torch.randn(4, 3), 2)},
    "latent_decode_attention": {"scale": 1.0},
    "linears": {"weights": [HEAD]},
    "lora_linears": {"weights": [HEAD], "biases": [None], "updates": [None]},
    "packed_attention": {"packing": kernels.pack_documents([[(0, 3)], [(0, 2)]], 3)},
    "round_stochastically": {"target": X.bfloat16(), "step": torch.ones(()), "key": 2**32},
    "route": {"num_experts_per_token": 2},
    "route_sigmoid": {"num_experts_per_token": 2},
}
"""Required arguments that are not tensors."""
INTEGERS = (
    "target", "expert_ids", "first", "last", "fallback", "positions", "top_k", "seeds", "steps", "last_token",
    "segment_start",
)  # fmt: skip
NAMED_BY = {"swiglu": "glu", "geglu": "glu"}
"""Functions that are another function with one option."""


def test_every_public_function_with_tensors_is_listed() -> None:
    functions = {name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))}
    assert functions == {*ARGUMENTS, "set_logits_budget", "linears", "pack_documents"}  # see test_linears


@pytest.mark.parametrize("name, argument", [(name, argument) for name in ARGUMENTS for argument in ARGUMENTS[name]])
def test_arguments_of_another_type_or_dtype(name: str, argument: str) -> None:
    function: Callable[..., Any] = getattr(kernels, name)
    arguments = ARGUMENTS[name] | OTHERS.get(name, {})
    function(**arguments)
    valid, where = ARGUMENTS[name][argument], f"{NAMED_BY.get(name, name)}: {argument}"
    other_dtype = valid.float() if argument in INTEGERS else valid.long()
    array = np.asarray(valid.tolist())  # numpy has no fp8
    for wrong, error, message in (
        (valid.tolist(), TypeError, r" is a list; expected a.* tensor.*\. Convert it with torch\.tensor$"),
        (array, TypeError, r" is a ndarray; expected a.* tensor.*\. Convert it with torch\.from_numpy$"),
        (0.5, TypeError, r" is 0\.5; expected a.* tensor"),
        (other_dtype, ValueError, rf" has dtype {other_dtype.dtype}; expected .* dtype$"),
    ):
        with pytest.raises(error, match=f"^{where}{message}"):
            function(**(arguments | {argument: wrong}))


@pytest.mark.parametrize("budget", ["256", 256.0, None, True])
def test_a_logits_budget_of_another_type(budget: Any) -> None:
    with pytest.raises(TypeError, match=r"^set_logits_budget: mebibytes=.*; expected an integer of MiB, 0 or more$"):
        kernels.set_logits_budget(budget)
    if budget is not None:
        with pytest.raises(TypeError, match=r"^token_logps: logits_budget=.*; expected an integer of MiB, 0 or more$"):
            kernels.token_logps(HIDDEN, HEAD, TARGET, logits_budget=budget)


@pytest.mark.parametrize("name, options, message", [
    ("linear_cross_entropy", {"temperature": "1"}, "linear_cross_entropy: temperature='1'; expected a positive number"),
    ("cross_entropy", {"label_smoothing": 1.5}, "cross_entropy: label_smoothing=1.5; expected a number from 0 to 1"),
    ("cross_entropy", {"softcap": 0}, "cross_entropy: softcap=0; expected a positive number, or None"),
    ("cross_entropy", {"z_loss": None}, "cross_entropy: z_loss=None; expected a finite number"),
    ("cross_entropy", {"num_items": TARGET}, r"cross_entropy: num_items is a tensor of shape \(4,\) and dtype .*0-d"),
    ("linear_kl_div", {"teacher_logit_scale": "2"}, "linear_kl_div: teacher_logit_scale='2'; expected a finite number"),
    ("kl_div", {"backend": "cuda"}, 'backend=\'cuda\'; expected "auto", "triton" or "torch"$'),
    ("glu", {"activation": "slu"}, r"activation='slu'; expected one of .*\. Did you mean 'silu'\?"),
])  # fmt: skip
def test_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        getattr(kernels, name)(**ARGUMENTS[name], **options)

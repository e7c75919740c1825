"""Mamba-2 against the mixers of transformers, in all forms that they have."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.kernels.ssd import reference, ssd
from ligerzoo.layers import Context, KVCache, Mamba2Mixer, Mamba2Scales
from tests.models.tiny_bamba import NORMS_GROUPS

HIDDEN, HEADS, SIZE, STATE = 48, 6, 16, 8
EXPAND = HEADS * SIZE // HIDDEN

SHARED = {"hidden_size": HIDDEN, "num_hidden_layers": 1}
MAMBA = {"mamba_n_heads": HEADS, "mamba_d_head": SIZE, "mamba_d_state": STATE, "mamba_chunk_size": 32}


def nemotron_h() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"mamba_num_heads": HEADS, "mamba_head_dim": SIZE, "ssm_state_size": STATE, "n_groups": 3}
    config = _config("NemotronHConfig", **sizes, chunk_size=32, use_bias=True, layers_block_type=["mamba"])
    limit = (config.time_step_min, math.inf)
    options = {"num_groups": 3, "in_bias": True, "out_bias": True, "time_step_limit": limit}
    return _mixer("nemotron_h", "NemotronHMamba2Mixer", config), options


def falcon_h1(norm: bool, before_gate: bool) -> tuple[nn.Module, dict[str, Any]]:
    scales = Mamba2Scales(0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
    ours = {"num_groups": 2, "in_bias": True, "norm": norm, "norm_before_gate": before_gate, "scales": scales}
    norms = {"mamba_rms_norm": norm, "mamba_norm_before_gate": before_gate}
    multipliers = {"ssm_in_multiplier": scales.input, "ssm_multipliers": list(scales[1:])}
    sizes = {**MAMBA, "mamba_n_groups": 2, "mamba_d_ssm": HEADS * SIZE}
    config = _config("FalconH1Config", **sizes, mamba_proj_bias=True, **norms, **multipliers)
    mixer, module = _mixer("falcon_h1", "FalconH1Mixer", config), _module("falcon_h1")
    mixer.register_buffer("mup_vector", module.compute_mup_vector(config), persistent=False)
    return mixer, ours


def bamba() -> tuple[nn.Module, dict[str, Any]]:
    limit = (0.1, 0.4)
    config = _config("BambaConfig", **MAMBA, mamba_n_groups=1, mamba_expand=EXPAND, time_step_limit=limit)
    return _mixer("bamba", "BambaMixer", config), {"time_step_limit": limit}


def granitemoehybrid() -> tuple[nn.Module, dict[str, Any]]:
    groups = 3 if NORMS_GROUPS else 1
    options = {"mamba_n_groups": groups, "mamba_expand": EXPAND, "mamba_conv_bias": False}
    config = _config("GraniteMoeHybridConfig", **MAMBA, **options)
    return _mixer("granitemoehybrid", "GraniteMoeHybridMambaLayer", config), {
        "num_groups": groups,
        "conv_bias": False,
        "eps": config.rms_norm_eps,
    }


def _config(name: str, **options: Any) -> Any:
    return getattr(importlib.import_module("transformers"), name)(**SHARED, **options)


def _module(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _mixer(family: str, name: str, config: Any) -> nn.Module:
    """Their mixer, with a state that neither explodes nor vanishes."""
    mixer: nn.Module = getattr(_module(family), name)(config, 0)
    with torch.no_grad():
        for key, parameter in mixer.named_parameters():
            std = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.4
            parameter.normal_({"A_log": -1.0, "norm.weight": 1.0}.get(key, 0.0), std)
    return mixer


FAMILIES = {
    "nemotron_h": nemotron_h,
    "falcon_h1-plain": lambda: falcon_h1(False, True),
    "falcon_h1-norm-gate": lambda: falcon_h1(True, True),
    "falcon_h1-gate-norm": lambda: falcon_h1(True, False),
    "bamba": bamba,
    "granitemoehybrid": granitemoehybrid,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_of_transformers(family: str) -> None:
    """With caches: in chunks and token by token, with equal limits of the step size in both forms."""
    theirs, options = FAMILIES[family]()
    ours = Mamba2Mixer(HIDDEN, HEADS, SIZE, STATE, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 70, HIDDEN)
    expected, got = theirs(x), ours(x, Context(x))
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    weights = torch.randn_like(got)
    for a, b in zip(_gradients(ours, got * weights), _gradients(theirs, expected * weights), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 * b.abs().max().item())
    with torch.no_grad():
        cache = ours.new_cache()
        parts = [ours(part, Context(part, cache=KVCache([cache])), cache) for part in x.split([60, 1, 1, 8], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), got, rtol=2e-5, atol=2e-5)


def _gradients(layer: nn.Module, y: Tensor) -> list[Tensor]:
    gradients = torch.autograd.grad(y.sum(), list(layer.parameters()))
    named = dict(zip(dict(layer.named_parameters()), gradients, strict=True))
    return [named[name] for name in sorted(named)]


def _inputs(tokens: int) -> dict[str, Tensor]:
    x, b, c = torch.randn(2, tokens, 4, 5), torch.randn(2, tokens, 2, 6), torch.randn(2, tokens, 2, 6)
    gates = {"g": -torch.rand(2, tokens, 4), "dt": torch.rand(2, tokens, 4), "d": torch.randn(4)}
    inputs = {"x": x, "b": b, "c": c, **gates, "initial_state": torch.randn(2, 4, 6, 5)}
    return {name: t.double().requires_grad_() for name, t in inputs.items()}


@pytest.mark.parametrize("starts", [None, [0, 40, 41]])
def test_chunks_are_the_recurrence(starts: list[int] | None) -> None:
    """With an initial state, which only the first segment continues."""
    inputs = _inputs(70)
    segments = None
    if starts is not None:
        segments = torch.tensor([max(s for s in starts if s <= t) for t in range(70)])[None]
    got = ssd(**inputs, segment_start=segments, output_final_state=True)
    expected = reference(**inputs, segment_start=segments)
    torch.testing.assert_close(got, expected)
    weights = [torch.randn_like(t) for t in expected]
    gradients = [
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(outputs, weights, strict=True)), list(inputs.values()))
        for outputs in (got, expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "options", [{"num_heads": 0}, {"num_groups": 4}, {"time_step_limit": (1.0, 0.5)}], ids=lambda o: next(iter(o))
)
def test_impossible_sizes(options: dict[str, Any]) -> None:
    sizes = {"num_heads": HEADS, "head_dim": SIZE, "state_size": STATE} | options
    with pytest.raises(ValueError, match=r"^Mamba2Mixer: num_heads=\d, .*; expected positive numbers, num_heads a mul"):
        Mamba2Mixer(HIDDEN, **sizes)


def test_initial_decay_rates_and_step_sizes() -> None:
    """As in Mamba-2, and of a layer whose inputs are 0."""
    layer = Mamba2Mixer(HIDDEN, 64, 4, STATE)
    steps, rates = nn.functional.softplus(layer.dt_bias), layer.A_log.exp()
    assert 0.00099 < steps.min().item() < 0.01 < steps.max().item() < 0.101
    assert 1 <= rates.min().item() < 4 < 12 < rates.max().item() <= 16
    assert (layer.D == 1).all()

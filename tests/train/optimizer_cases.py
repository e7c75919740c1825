"""Models, gradients and plain references for the tests of optimizers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.models import Llama, LlamaConfig, Qwen3Moe, Qwen3MoeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def tiny_llama(*, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    return Llama(LlamaConfig(**{**SIZES, **options})).to(dtype)


def tiny_moe() -> nn.Module:
    return Qwen3Moe(Qwen3MoeConfig(**SIZES, moe_intermediate_size=12, num_experts=3, num_experts_per_tok=2))


def set_gradients(parameters: Sequence[Tensor], step: int) -> None:
    """Sets gradients that depend on the step and the position of the parameter alone."""
    for index, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(1000 * step + index)
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad = (noise * 10.0 ** (index % 3 - 1)).to(parameter.dtype).to(parameter.device)


def train(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], steps: Sequence[int]) -> None:
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()
        optimizer.zero_grad()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the plain tensors of a state dict, in order; quantized ones as their parts."""
    if isinstance(value, Tensor):
        if type(value) in (Tensor, nn.Parameter):
            return [value]
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, dict):
        return [tensor for entry in value.values() for tensor in tensors_in(entry)]
    return [tensor for entry in value for tensor in tensors_in(entry)] if isinstance(value, list | tuple) else []


Rule = Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]


def adamw_rule(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Rule:
    """AdamW in plain fp64 torch: the updated parameter of (parameter, gradient, state, step)."""

    def update(p: Tensor, g: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        m = state["m"] = betas[0] * state.get("m", torch.zeros_like(p)) + (1 - betas[0]) * g
        v = state["v"] = betas[1] * state.get("v", torch.zeros_like(p)) + (1 - betas[1]) * g * g
        m, v = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
        return p - lr * weight_decay * p - lr * m / (v.sqrt() + eps)

    return update


def newton_schulz(matrix: Tensor) -> Tensor:
    """Five iterations of one matrix in the given dtype, without transposing it."""
    x = matrix / max(matrix.norm().item(), 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def muon_rule(lr: float, momentum: float, weight_decay: float, scale: str, blocks: int = 1) -> Rule:
    """Muon in plain fp64 torch, one matrix after the other."""

    def update(p: Tensor, g: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        m = state["m"] = momentum * state.get("m", torch.zeros_like(p)) + (1 - momentum) * g
        direction = (1 - momentum) * g + momentum * m
        rows, columns = p.shape[-2] // blocks, p.shape[-1]
        matrices = [newton_schulz(matrix) for matrix in direction.reshape(-1, rows, columns)]
        s = 0.2 * math.sqrt(max(rows, columns)) if scale == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
        return (1 - lr * weight_decay) * p - lr * s * torch.stack(matrices).reshape(p.shape)

    return update


def reference_run(parameters: Sequence[Tensor], rules: Sequence[Rule], steps: Sequence[int]) -> list[Tensor]:
    """Returns the parameters in fp64 after updates by the rules, with the gradients of `set_gradients`."""
    doubles = [parameter.detach().double() for parameter in parameters]
    states: list[dict[str, Tensor]] = [{} for _ in parameters]
    for number, step in enumerate(steps, 1):
        set_gradients(parameters, step)
        for i, rule in enumerate(rules):
            gradient = parameters[i].grad
            assert gradient is not None
            doubles[i] = rule(doubles[i], gradient.double(), states[i], number)
            parameters[i].grad = None
    return doubles

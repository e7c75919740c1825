"""Muon for the matrices of a model, and AdamW for its other parameters, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ligerzoo.checks import FLAG, check, one_of
from ligerzoo.dtensors import as_shard_of, full, local, shard_like
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels import round_stochastically
from ligerzoo.kernels.adamw import BETA
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.kernels.stochastic_rounding import store
from ligerzoo.layers import Experts, LMHead
from ligerzoo.layers.plain import find_modules
from ligerzoo.train.optimizers.device_optimizer import DeviceOptimizer, ParamUpdate, first_group
from ligerzoo.train.optimizers.groups import Group, embedding_tables, parameter_groups
from ligerzoo.train.optimizers.stochastic_adamw import AdamWNumbers, adamw_defaults, adamw_state, update_adamw

LearningRateScale = Literal["match_rms_adamw", "original"]

_MAX_BATCH = 2**26
"""Elements of matrices of one shape that are orthogonalized together, to save launches. Larger ones need none."""


COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b and c of Jordan et al. 2024: the largest slope at 0 for which the iteration stays near 1."""

STEPS = 5
_EPS = 1e-7


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replaces the singular values of matrices by numbers near 1: U S V^T becomes about U V^T (Jordan et al. 2024).

    Scales each matrix X to Frobenius norm 1 and iterates five times in bf16

        A = X X^T,   X <- a X + (b A + c A^2) X,

    which maps each singular value s to a s + b s^3 + c s^5. Values from 0.01 to 1 end between 0.65 and 1.25; the
    smallest remain small. Matrices with more rows than columns are transposed, so that A is small.

    Args:
        matrices: (..., m, n), any floating-point dtype.

    Returns:
        (..., m, n) bf16. Zero matrices stay zero.
    """
    a, b, c = COEFFICIENTS
    x = matrices.reshape(-1, *matrices.shape[-2:])
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=accumulation_dtype(x.dtype))
    x = (x / norm.clamp_min(_EPS)).bfloat16()
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape)


class Muon(DeviceOptimizer):
    """Muon (Jordan et al. 2024): momentum whose matrices are orthogonalized, and AdamW for what is not a matrix.

    For a matrix W of shape (m, n) with gradient G, momentum M and `orthogonalize` as O,

        M <- mu M + (1 - mu) G,   W <- (1 - lr wd) W - lr s O((1 - mu) G + mu M),

    where s is 0.2 sqrt(max(m, n)): updates get the root mean square of those of AdamW, so that lr and weight decay are
    those of AdamW (Liu et al. 2025, Moonlight). With `scale="original"`, s is sqrt(max(1, m / n)) (Jordan), which needs
    a larger lr than the AdamW groups.

    Parameters of 3 or more dimensions are batches of matrices. `matrices_per_row_block` of a group cuts each into
    matrices of equally many rows, such as the gate and up projections of experts.

    Sharded parameters (FSDP2) are gathered and orthogonalized by every process: each does all the work.

    Args:
        params: groups with a flag `muon`; `muon_groups` makes them of a model.
        lr: learning rate; a number or a 0-d tensor.
        betas: decay of the moments of AdamW.
        eps: of AdamW.
        weight_decay: decoupled weight decay.
        momentum: mu.
        scale: "match_rms_adamw" or "original".
        state_dtype: dtype of momentum and moments, fp32 or bf16. None for the dtype of each parameter.
        stochastic_rounding: round bf16 weights stochastically, see `StochasticAdamW`. bf16 moments of AdamW too.
        seed: of the random bits, from 0 to 2^30.

    Raises:
        ValueError: a number is out of range, a group has no flag `muon` or has parameters that are not matrices, or a
            parameter is neither fp32 nor bf16 or is on the meta device.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        momentum: float = 0.95,
        scale: LearningRateScale = "match_rms_adamw",
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        check("Muon", BETA, momentum=momentum)
        check("Muon", one_of(get_args(LearningRateScale)), scale=scale)
        adamw = adamw_defaults(
            "Muon", AdamWNumbers(lr, betas, eps, weight_decay), state_dtype, seed, stochastic_rounding
        )
        super().__init__(params, {**adamw, "momentum": momentum, "scale": scale, "matrices_per_row_block": 1})

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group with a flag `muon`, as in `torch.optim.Optimizer`.

        Raises:
            ValueError: the flag is missing, or a parameter has the wrong shape, dtype or device.
        """
        if not FLAG.accepts(param_group.get("muon")):
            what, remedy = 'a group has no flag "muon"', "`muon_groups(model)` makes such groups."
            expected = '{"params": [...], "muon": True} for matrices and False for parameters that AdamW updates'
            raise LigerzooError(what, where="Muon", expected=expected, remedy=remedy)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        blocks = group["matrices_per_row_block"]
        for parameter in group["params"] if group["muon"] else ():
            if parameter.dim() < 2 or parameter.shape[-2] % blocks:
                self.param_groups.pop()
                what = f"a parameter of shape {tuple(parameter.shape)} in a group with muon=True"
                expected = f"(..., m, n), m a multiple of matrices_per_row_block={blocks}"
                raise LigerzooError(what, where="Muon", expected=expected)

    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        if not group["muon"]:
            return adamw_state(parameter, group)
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=group["state_dtype"] or parameter.dtype)}

    def update_group(self, group: Group, updates: list[ParamUpdate], lr: Tensor, skip: Tensor | None) -> None:
        if not group["muon"]:
            update_adamw(group, updates, lr, skip)
            return
        for batch in _batches(updates):
            directions = [self._direction(update, group["momentum"], skip) for update in batch]
            blocks = [_matrices(direction, group["matrices_per_row_block"]) for direction in directions]
            orthogonal = torch.split(orthogonalize(torch.cat(blocks)), [len(block) for block in blocks])
            factor = lr * _scale(group["scale"], *blocks[0].shape[-2:])
            for update, matrices in zip(batch, orthogonal, strict=True):
                change = local(shard_like(update.parameter, matrices.reshape(update.parameter.shape)))
                _apply(group, update, change, lr, factor, skip)

    @staticmethod
    def _direction(update: ParamUpdate, momentum: float, skip: Tensor | None) -> Tensor:
        """Updates the momentum buffer, and returns Nesterov's momentum of the whole matrix."""
        buffer, gradient = update.state["momentum_buffer"], update.gradient
        local_gradient = local(gradient).to(buffer.dtype)
        averaged = local(buffer).lerp(local_gradient, 1 - momentum)
        store(local(buffer), averaged, skip)
        return full(as_shard_of(update.parameter, local_gradient.lerp(averaged, momentum)))


def _batches(updates: list[ParamUpdate]) -> Iterator[list[ParamUpdate]]:
    """Yields updates of parameters of one shape and dtype, with at most `_MAX_BATCH` elements or one parameter."""
    by_shape = sorted(updates, key=lambda update: (str(update.parameter.dtype), tuple(update.parameter.shape)))
    for _, group in groupby(by_shape, key=lambda update: (update.parameter.dtype, update.parameter.shape)):
        same = list(group)
        size = max(1, _MAX_BATCH // max(1, same[0].parameter.numel()))
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _matrices(direction: Tensor, blocks: int) -> Tensor:
    """(..., m, n) -> (matrices, m / blocks, n)."""
    rows, columns = direction.shape[-2:]
    return direction.reshape(-1, rows // blocks, columns)


def _scale(scale: LearningRateScale, rows: int, columns: int) -> float:
    if scale == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _apply(group: Group, update: ParamUpdate, change: Tensor, lr: Tensor, factor: Tensor, skip: Tensor | None) -> None:
    parameter = local(update.parameter)
    updated = parameter.float() * (1 - lr * group["weight_decay"]) - factor * change
    if group["stochastic_rounding"] and parameter.dtype == torch.bfloat16:
        offset = first_group(update.parameter)
        step = update.state["step"]
        round_stochastically(updated, parameter, step, key=update.key, first_group=offset, skip=skip)
    else:
        store(parameter, updated, skip)


def muon_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Returns the trainable parameters in groups for `Muon`, with and without weight decay.

    Muon updates matrices: linear layers, routers, adapters, and each expert's gate, up and down projection. AdamW
    updates the embeddings and the head, whose rows belong to tokens, and all that is not a matrix: norms, biases, patch
    projections.

    Raises:
        ValueError: the model has no trainable parameter.
    """
    by_tokens = {id(parameter) for parameter in embedding_tables(model)}
    by_tokens |= {id(head.weight) for head in find_modules(model, LMHead)}
    experts = find_modules(model, Experts)
    batched = {id(weight) for module in experts for weight in module.weights}
    fused = {id(module.weights[0]) for module in experts if module.projections[0] == "gate_up_proj"}

    def kind(parameter: nn.Parameter) -> tuple[bool, int]:
        is_matrix = (parameter.dim() == 2 or id(parameter) in batched) and id(parameter) not in by_tokens
        return is_matrix, 2 if id(parameter) in fused else 1

    groups: list[Group] = []
    for group in parameter_groups(model, weight_decay):
        parameters = group["params"]
        for key in dict.fromkeys(kind(parameter) for _, parameter in parameters):
            is_matrix, blocks = key
            chosen = [(name, parameter) for name, parameter in parameters if kind(parameter) == key]
            groups.append({**group, "params": chosen, "muon": is_matrix, "matrices_per_row_block": blocks})
    return groups

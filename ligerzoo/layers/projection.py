"""Linear layers and gated MLPs: the only file that knows which kernel computes them.

Layers call `project`, `gated_mlp` and `activate_and_project` with modules. A linear layer says in `terms()` what it
computes, or None where its own `forward` must run: it is of another class, or has hooks or a wrapper, which
parallelism, adapters and profilers may add at any time. So each call asks each layer once. What then runs:

    layers                with gradients                                 without
    --------------------  ---------------------------------------------  ------------------------------------------
    floating point        `linears`: the gradients of x accumulate       `linears`: one kernel for few rows
      gated MLP           `glu_linear`: keeps gate and up only           `linear_glu`: one kernel for few rows
    LoRA                  `lora_linears`: one product with all A         the same
      gated MLP           `glu_linear`: adds the update of down          the same
      no bias, no DoRA    `low_rank_glu`: adds gate's and up's too       the same
      unequal dropouts    each alone: `lora_linears` of one layer        the same
      sums may be split                                                  each alone: `linear` plus the update
    int8 (torchao)        each alone, in torch                           as floating point; in torch for many rows
    other weights, hooks  each alone                                     each alone

A layer whose input drops features for its update is not part of `glu_linear`: it runs alone. Layers with LoRA compute
the same bits with gradients and without, unless sums may be split, as in decoding by default (`kernels.row_sums`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.kernels import activation_linear
from ligerzoo.kernels.activation import ACTIVATIONS, Activation
from ligerzoo.kernels.dispatch import Backend, dtype_of_products, uses_triton
from ligerzoo.kernels.few_rows import FEW_ROWS_DTYPES, gate_few_rows, project_few_rows, uses_few_rows
from ligerzoo.kernels.glu import compute_glu, compute_glu_linear
from ligerzoo.kernels.linears import compute_linears
from ligerzoo.kernels.lora import compute_lora_linears, stacked_a
from ligerzoo.kernels.low_rank import LowRank, LowRankTerms, low_rank_product
from ligerzoo.kernels.low_rank_glu import MAX_RANK
from ligerzoo.kernels.recompute import Recompute, is_recording, recomputable, recomputed
from ligerzoo.kernels.row_sums import splits_row_sums, would_split
from ligerzoo.layers.plain import is_plain_tensor, is_unmodified
from ligerzoo.layers.quantized import as_int8


class Adapter(Protocol):
    """A layer with a low-rank update, as `LoRALinear`."""

    @property
    def lora_dropout(self) -> float:
        """Probability of dropping an input feature of A in this call."""

    def dropped(self, x: Tensor) -> Tensor | None:
        """Returns x after dropout; None without dropout."""

    def row_factors(self) -> Tensor | None:
        """Returns DoRA's factors of the outputs; None without DoRA."""


class LinearTerms(NamedTuple):
    """What a linear layer computes: y = x W^T + b, with an update y = x W^T + b + s x' A^T B^T.

    Attributes:
        weight: W, (O, H), maybe quantized.
        bias: b, (O,) or None.
        update: A, B and s; None without an active update.
        adapter: computes x', which is x after dropout; None for a layer without matrices A and B.
        rescales: y = f (x W^T + s x' A^T B^T) + b, with DoRA's factors f.
    """

    weight: Tensor
    bias: Tensor | None
    update: LowRank | None = None
    adapter: Adapter | None = None
    rescales: bool = False

    @property
    def inner_bias(self) -> Tensor | None:
        """The bias that is added before `rescale`."""
        return None if self.rescales else self.bias

    @property
    def has_plain_tensors(self) -> bool:
        """Whether a kernel may read all tensors."""
        return is_plain_tensor(self.weight, self.bias, *(self.update or ())[:2])

    @property
    def drops(self) -> bool:
        """Whether x' is not x."""
        return self.adapter is not None and self.adapter.lora_dropout > 0

    @property
    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """DoRA's factors of the outputs, and the bias that is added after them."""
        return None if self.adapter is None else self.adapter.row_factors(), self.bias

    def rescale(self, y: Tensor) -> Tensor:
        """Multiplies y, (..., O), by DoRA's factors and adds the bias."""
        return _rescale(y, *self.factors) if self.rescales else y


def _rescale(y: Tensor, factors: Tensor | None, bias: Tensor | None) -> Tensor:
    assert factors is not None
    y = (y * factors).to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def terms_of(layer: nn.Module) -> LinearTerms | None:
    """Returns what a linear layer computes in this call; None if its `forward` must run."""
    if type(layer) is nn.Linear:
        return LinearTerms(layer.weight, layer.bias) if is_unmodified(layer, nn.Linear) else None
    return layer.terms() if hasattr(layer, "terms") else None  # type: ignore[operator]


def check_features(layer: nn.Module, x: Tensor, features: int) -> None:
    """Raises ValueError unless an input of a layer has this many features in its last dimension."""
    if x.shape[-1] != features:
        raise ValueError(
            f"{type(layer).__name__}: the input has shape {tuple(x.shape)}; expected {features} features in the last "
            "dimension, the layer's hidden_size"
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; by a kernel for few rows where it is faster, or sums must not be split."""
    operands = None
    if x.dtype in FEW_ROWS_DTYPES and (not torch.is_grad_enabled() or would_split(x, weight)):
        operands = Operands.read([LinearTerms(weight, bias)])
    outputs = None if operands is None else operands.products(x, "auto")
    return F.linear(x, weight, bias) if outputs is None else outputs[0]


class Operands(NamedTuple):
    """What kernels read of several linear layers of one input.

    Attributes:
        weights: in floating point, or in int8 with scales.
        biases: those that are added before DoRA's factors.
        scales: of the rows of int8 weights; None for weights in floating point.
        updated: the terms of all layers, if one has matrices A and B; else None.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    scales: Sequence[Tensor] | None = None
    updated: Sequence[LinearTerms] | None = None

    @classmethod
    def of(cls, *layers: nn.Module) -> Operands | None:
        """Asks each layer once. None if one must run its `forward`, or has tensors that kernels do not read."""
        terms = []
        for layer in layers:
            if (found := terms_of(layer)) is None:
                return None
            terms.append(found)
        return cls.read(terms)

    @classmethod
    def read(cls, terms: Sequence[LinearTerms]) -> Operands | None:
        """Returns the operands of layers with these terms; None for tensors that kernels do not read."""
        weights, biases, _, adapters, _ = zip(*terms, strict=True)
        if not is_plain_tensor(*biases):
            return None
        if any(adapters):
            if not all(one.has_plain_tensors for one in terms):
                return None
            return cls(weights, [one.inner_bias for one in terms], None, terms)
        if is_plain_tensor(*weights):
            return cls(weights, biases)
        int8 = [parts for weight in weights if (parts := as_int8(weight)) is not None]
        if len(int8) < len(weights):
            return None
        return cls([weight.data for weight in int8], biases, [weight.scale for weight in int8])

    def products(self, x: Tensor, backend: Backend, level: Recompute | None = None) -> tuple[Tensor, ...] | None:
        """Returns the outputs of the layers; None where each must run alone, see the table above."""
        weights, biases, scales, updated = self
        if updated is not None:
            return self._updated_products(x, updated, backend, level) if _trains_or_is_exact() else None
        if scales is not None:
            is_fused = uses_few_rows(x, weights, biases, backend, scales)
            return project_few_rows(x, weights, biases, scales) if is_fused else None
        outputs = compute_linears(x, weights, biases, backend)
        if level is not None and is_recording():
            again = partial(_products, backend, len(weights))
            recomputable(outputs, again, x, *weights, *biases, level=level)
        return outputs

    def _updated_products(
        self, x: Tensor, updated: Sequence[LinearTerms], backend: Backend, level: Recompute | None
    ) -> tuple[Tensor, ...] | None:
        """`lora_linears`; None if the dropouts differ."""
        adapters = [one.adapter for one in updated if one.adapter is not None]
        if len({adapter.lora_dropout for adapter in adapters}) != 1:
            return None
        dropped, updates = adapters[0].dropped(x), [one.update for one in updated]
        matrices = [matrix for update in updates if update is not None for matrix in update[:2]]
        parameters = *self.weights, *self.biases, *matrices

        def compute(x: Tensor, dropped: Tensor | None, *_: Tensor | None) -> tuple[Tensor, ...]:
            return compute_lora_linears(x, self.weights, self.biases, updates, dropped, backend)

        outputs = recomputed(compute, x, dropped, *parameters, level=level)
        return tuple(
            recomputed(_rescale, y, *one.factors, level=level) if one.rescales else y
            for y, one in zip(outputs, updated, strict=True)
        )


def _products(backend: Backend, count: int, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Computes products again: of `count` weights, and biases, or none."""
    biases = parameters[count:] or [None] * count
    return compute_linears(x, parameters[:count], biases, backend)


def project(
    x: Tensor, *layers: nn.Module, backend: Backend = "auto", level: Recompute | None = None
) -> tuple[Tensor, ...]:
    """Returns the outputs of several linear layers for one input, (..., H) -> (..., O) each.

    Args:
        x: (..., H).
        layers: linear layers, with or without updates.
        backend: see `ligerzoo.kernels.linears`.
        level: the lowest level of an activation plan that recomputes the outputs in backward; None to keep them. Those
            of quantized weights, and of layers with hooks or wrappers, are kept.
    """
    operands = Operands.of(*layers)
    outputs = None if operands is None else operands.products(x, backend, level)
    return tuple(layer(x) for layer in layers) if outputs is None else outputs


def project_alone(x: Tensor, terms: LinearTerms) -> Tensor:
    """Returns the output of one layer with matrices A and B, (..., H) -> (..., O)."""
    operands = Operands.read([terms]) if _trains_or_is_exact() else None
    if operands is not None and (outputs := operands.products(x, "auto")) is not None:
        return outputs[0]
    dropped = None if terms.adapter is None else terms.adapter.dropped(x)
    y = linear(x, terms.weight, terms.inner_bias)  # which reads quantized weights too
    if terms.update is not None:
        y = y + low_rank_product((x if dropped is None else dropped).to(y.dtype), terms.update)
    return terms.rescale(y)


def gated_mlp(
    x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, activation: Activation, backend: Backend = "auto"
) -> Tensor:
    """Returns down(activation(gate(x)) * up(x)), (..., H) -> (..., O); see the table above."""
    inner, outputs = Operands.of(gate, up), None
    if inner is not None:
        weights, biases, scales, updated = inner
        is_glu = updated is None and len(weights[0]) == len(weights[1])
        if is_glu and uses_few_rows(x, weights, biases, backend, scales):
            return down(gate_few_rows(x, weights, biases, scales, activation))  # type: ignore[no-any-return]
        if updated is not None and (parts := low_rank_parts(x, updated, down, backend)) is not None:
            return gate_and_project(*parts[:2], down, activation, backend, parts[2])
        outputs = inner.products(x, backend, Recompute.MLP)
    gate_y, up_y = (gate(x), up(x)) if outputs is None else outputs
    return gate_and_project(gate_y, up_y, down, activation, backend)


def gate_and_project(
    gate: Tensor, up: Tensor, down: nn.Module, activation: Activation, backend: Backend = "auto",
    terms: LowRankTerms | None = None,
) -> Tensor:  # fmt: skip
    """Returns down(activation(gate) * up), (..., I) each -> (..., O); with `terms`, adds them to gate and up first."""
    if (outer := _fusible(down, terms is not None)) is not None:
        weight, bias, update = outer.weight, outer.inner_bias, outer.update
        return outer.rescale(compute_glu_linear(gate, up, weight, bias, update, terms, activation, backend))
    return down(recomputed(compute_glu, gate, up, activation, backend))  # type: ignore[no-any-return]


def _fusible(layer: nn.Module, has_terms: bool) -> LinearTerms | None:
    """Returns the terms of a layer that may be part of `glu_linear`.

    None for other layers; without gradients, if its input has no low-rank terms, or sums may be split.
    """
    is_fused = torch.is_grad_enabled() or (has_terms and not splits_row_sums())
    terms = terms_of(layer) if is_fused else None
    return None if terms is None or terms.drops or not terms.has_plain_tensors else terms


def _trains_or_is_exact() -> bool:
    """Whether layers with an adapter run as in training: with gradients, and where sums must not be split."""
    return torch.is_grad_enabled() or not splits_row_sums()


def low_rank_parts(
    x: Tensor, inner: Sequence[LinearTerms], down: nn.Module, backend: Backend
) -> tuple[Tensor, Tensor, LowRankTerms] | None:
    """Returns the products of x and the weights of gate and up, and their low-rank updates as terms.

    None if `ligerzoo.kernels.glu_linear` does not add the terms in registers: without the kernels, in fp32 or fp64,
    with a rank above `MAX_RANK`, or if `gate` or `up` has a bias, no update, dropout or DoRA.

    Args:
        x: (..., H).
        inner: the terms of gate and up.
        down: the down projection.
        backend: see `gated_mlp`.
    """
    outer, updates = _fusible(down, True), [one.update for one in inner if one.update is not None]
    if outer is None or len(updates) < 2 or any(one.drops or one.rescales or one.bias is not None for one in inner):
        return None
    weights, dtype = [one.weight for one in inner], dtype_of_products(x)
    ranks = [len(update.a) for update in (*updates, outer.update) if update is not None]
    if max(ranks) > MAX_RANK or dtype.itemsize != 2 or dtype != dtype_of_products(outer.weight):
        return None
    if not uses_triton(x, *weights, backend=backend):
        return None
    first, second = updates
    a = stacked_a(dtype, first.a, second.a)
    gate_y, up_y, h = compute_linears(x, [*weights, a], [None] * 3, backend)
    recomputable((gate_y, up_y), partial(_products, backend, 2), x, *weights, level=Recompute.MLP)
    recomputable((h,), partial(_products, backend, 1), x, a, level=Recompute.BLOCK)
    return gate_y, up_y, LowRankTerms(h, first.b, second.b, first.scale, second.scale)


def activate_and_project(x: Tensor, activation: Activation, layer: nn.Module, backend: Backend = "auto") -> Tensor:
    """Returns layer(activation(x)), (..., I) -> (..., O): one operation that saves only `x` if the layer is plain."""
    terms = terms_of(layer)
    if terms is not None and terms.adapter is None and terms.has_plain_tensors:
        return activation_linear(x, terms.weight, terms.bias, activation=activation, backend=backend)
    return layer(ACTIVATIONS[activation](x))  # type: ignore[no-any-return]

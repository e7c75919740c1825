"""Linear layers and gated MLPs: the only file that knows which kernel computes them.

Layers call `project`, `gated_mlp` and `activate_and_project` with modules. A linear layer says in `terms()` what it
computes, or None where its own `forward` must run: it is of another class, or has hooks or a wrapper, which
parallelism, adapters and profilers may add at any time. So each call asks each layer once. What then runs:

    layers                with gradients                                 without
    --------------------  ---------------------------------------------  ------------------------------------------
    floating point        `linears`: the gradients of x accumulate       `linears`: one kernel for few rows
      gated MLP           `glu_linear`: keeps gate and up only           `linear_glu`: one kernel for few rows
    LoRA                  `lora_linears`: one product with all A         each alone: `linear` plus the update
      gated MLP           `glu_linear`: adds the update of down          each alone
      no bias, no DoRA    `low_rank_glu`: adds gate's and up's too       each alone
      unequal dropouts    each alone: `lora_linears` of one layer        each alone
    int8 (torchao)        each alone, in torch                           as floating point; in torch for many rows
    other weights, hooks  each alone                                     each alone

A layer whose input drops features for its update is not part of `glu_linear`: it runs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ligerzoo.kernels import activation_linear, glu, glu_linear
from ligerzoo.kernels.activation import ACTIVATIONS, Activation
from ligerzoo.kernels.dispatch import Backend, dtype_of_products, uses_triton
from ligerzoo.kernels.few_rows import gate_few_rows, uses_few_rows
from ligerzoo.kernels.linears import compute_linears, product
from ligerzoo.kernels.lora import LowRank, compute_lora_linears, low_rank_product, stacked_a
from ligerzoo.kernels.low_rank_glu import MAX_RANK, LowRankTerms
from ligerzoo.kernels.recompute import Recompute, recomputable, recomputed
from ligerzoo.kernels.row_sums import would_split
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

    def rescale(self, y: Tensor, level: Recompute | None = None) -> Tensor:
        """Multiplies y, (..., O), by DoRA's factors and adds the bias; `level` as in `project`."""
        if not self.rescales or self.adapter is None:
            return y
        return recomputed(_rescale, y, self.adapter.row_factors(), self.bias, level=level)


def _rescale(y: Tensor, factors: Tensor, bias: Tensor | None) -> Tensor:
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
    if not torch.is_grad_enabled() or would_split(x, weight):
        readable = _readable(x, [LinearTerms(weight, bias)], "auto")
        if readable is not None:
            return compute_linears(x, *readable, "auto")[0]
    return product(x, weight, bias)


class _Readable(NamedTuple):
    """What a kernel reads of linear layers: weights in floating point, or int8 ones with scales."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    scales: Sequence[Tensor] | None


def _readable(x: Tensor, terms: Sequence[LinearTerms | None], backend: Backend) -> _Readable | None:
    """Returns plain weights; int8 ones of torchao where the kernel for few rows runs.

    None for other weights, and if a layer has matrices A and B or must run its `forward`.
    """
    plain = [one for one in terms if one is not None and one.adapter is None]
    weights, biases = [one.weight for one in plain], [one.bias for one in plain]
    if len(plain) < len(terms) or not is_plain_tensor(*biases):
        return None
    if is_plain_tensor(*weights):
        return _Readable(weights, biases, None)
    int8 = [parts for weight in weights if (parts := as_int8(weight)) is not None]
    if len(int8) < len(weights):
        return None
    found = _Readable([weight.data for weight in int8], biases, [weight.scale for weight in int8])
    return found if uses_few_rows(x, *found[:2], backend, found.scales) else None


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
    return _project(x, layers, [terms_of(layer) for layer in layers], backend, level)


def _project(
    x: Tensor,
    layers: Sequence[nn.Module],
    terms: Sequence[LinearTerms | None],
    backend: Backend,
    level: Recompute | None,
) -> tuple[Tensor, ...]:
    outputs = None
    if (readable := _readable(x, terms, backend)) is not None:
        outputs = recomputed(
            lambda x, *_: compute_linears(x, *readable, backend), x, *readable.weights, *readable.biases,
            level=level if readable.scales is None else None,
        )  # fmt: skip
    elif torch.is_grad_enabled():
        outputs = _with_updates(x, terms, backend, level)
    return tuple(layer(x) for layer in layers) if outputs is None else outputs


def project_alone(x: Tensor, terms: LinearTerms) -> Tensor:
    """Returns the output of one layer with matrices A and B, (..., H) -> (..., O)."""
    if torch.is_grad_enabled() and (outputs := _with_updates(x, [terms], "auto", None)) is not None:
        return outputs[0]
    dropped = None if terms.adapter is None else terms.adapter.dropped(x)
    y = linear(x, terms.weight, terms.inner_bias)  # which reads quantized weights too
    if terms.update is not None:
        y = y + low_rank_product((x if dropped is None else dropped).to(y.dtype), terms.update)
    return terms.rescale(y)


def _with_updates(
    x: Tensor, terms: Sequence[LinearTerms | None], backend: Backend, level: Recompute | None
) -> tuple[Tensor, ...] | None:
    """`lora_linears`, with gradients.

    None without updates, if their dropouts differ, if a layer must run its `forward`, and for weights of other types.
    """
    found = [one for one in terms if one is not None and one.has_plain_tensors]
    adapters = [one.adapter for one in found if one.adapter is not None]
    if len(found) < len(terms) or len({adapter.lora_dropout for adapter in adapters}) != 1:
        return None
    weights, biases, updates = ([getattr(one, name) for one in found] for name in ("weight", "inner_bias", "update"))
    dropped = adapters[0].dropped(x)
    matrices = [matrix for update in updates if update is not None for matrix in update[:2]]
    outputs = recomputed(
        lambda x, dropped, *_: compute_lora_linears(x, weights, biases, updates, dropped, backend),
        x, dropped, *weights, *biases, *matrices, level=level,
    )  # fmt: skip
    return tuple(one.rescale(y, level) for y, one in zip(outputs, found, strict=True))


def gated_mlp(
    x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, activation: Activation, backend: Backend = "auto"
) -> Tensor:
    """Returns down(activation(gate(x)) * up(x)), (..., H) -> (..., O); see the table above."""
    inner = terms_of(gate), terms_of(up)
    readable = None if torch.is_grad_enabled() else _readable(x, inner, backend)
    if readable is not None:
        weights, biases, scales = readable
        if len(weights[0]) == len(weights[1]) and uses_few_rows(x, weights, biases, backend, scales):
            return down(gate_few_rows(x, weights, biases, scales, activation))  # type: ignore[no-any-return]
    if (parts := low_rank_parts(x, gate, up, down, backend)) is not None:
        return gate_and_project(*parts[:2], down, activation, backend, parts[2])
    gate_y, up_y = _project(x, (gate, up), inner, backend, Recompute.MLP)
    return gate_and_project(gate_y, up_y, down, activation, backend)


def gate_and_project(
    gate: Tensor, up: Tensor, down: nn.Module, activation: Activation, backend: Backend = "auto",
    terms: LowRankTerms | None = None,
) -> Tensor:  # fmt: skip
    """Returns down(activation(gate) * up), (..., I) each -> (..., O); with `terms`, adds them to gate and up first."""
    outer = _trainable(down)
    if outer is None:
        y = recomputed(partial(glu, activation=activation, backend=backend), gate, up)
        return down(y)  # type: ignore[no-any-return]
    options: Any = {"update": outer.update, "terms": terms, "activation": activation, "backend": backend}
    return outer.rescale(glu_linear(gate, up, outer.weight, outer.inner_bias, **options))


def _trainable(layer: nn.Module) -> LinearTerms | None:
    """Returns the terms of a layer that may be part of `glu_linear`; None without gradients, and for other layers."""
    terms = terms_of(layer) if torch.is_grad_enabled() else None
    return None if terms is None or terms.drops or not terms.has_plain_tensors else terms


def low_rank_parts(
    x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, backend: Backend
) -> tuple[Tensor, Tensor, LowRankTerms] | None:
    """Returns the products of x and the weights of `gate` and `up`, and their low-rank updates as terms.

    None if `ligerzoo.kernels.glu_linear` does not add the terms in registers: without gradients, without the kernels,
    in fp32 or fp64, with a rank above `MAX_RANK`, or if `gate` or `up` has a bias, no update, dropout, DoRA or hooks.
    """
    inner = [one for one in map(_trainable, (gate, up)) if one is not None and one.update is not None]
    if len(inner) < 2 or any(one.rescales or one.bias is not None for one in inner):
        return None
    if (outer := _trainable(down)) is None:
        return None
    weights, dtype = [one.weight for one in inner], dtype_of_products(x)
    ranks = [len(one.update.a) for one in (*inner, outer) if one.update is not None]
    if max(ranks) > MAX_RANK or dtype.itemsize != 2 or not uses_triton(x, *weights, backend=backend):
        return None
    first, second = (one.update for one in inner if one.update is not None)
    a = stacked_a(dtype, first.a, second.a)
    gate_y, up_y, h = compute_linears(x, [*weights, a], [None] * 3, None, backend)
    again = partial(_products, backend)
    recomputable((gate_y, up_y), again, x, *weights, level=Recompute.MLP)
    recomputable((h,), again, x, a, level=Recompute.BLOCK)
    return gate_y, up_y, LowRankTerms(h, first.b, second.b, first.scale, second.scale)


def _products(backend: Backend, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return compute_linears(x, weights, [None] * len(weights), None, backend)


def activate_and_project(x: Tensor, activation: Activation, layer: nn.Module, backend: Backend = "auto") -> Tensor:
    """Returns layer(activation(x)), (..., I) -> (..., O): one operation that saves only `x` if the layer is plain."""
    terms = terms_of(layer)
    if terms is not None and terms.adapter is None and terms.has_plain_tensors:
        return activation_linear(x, terms.weight, terms.bias, activation=activation, backend=backend)
    return layer(ACTIVATIONS[activation](x))  # type: ignore[no-any-return]

"""Layers whose frozen weights have low-rank updates: LoRA (Hu et al. 2021), rsLoRA (Kalajdzievski 2023), DoRA.

    LoRA:  W' = W + s B A,  s = alpha / r  (rsLoRA: alpha / sqrt(r))
    DoRA:  W' = m * (W + s B A) / ||W + s B A||,  norms of rows, which are constants for the gradient (Liu et al. 2024)

`adapt.adapt` adds an update to a layer in place: as FSDP2's `fully_shard`, it changes the layer's class. So the layer
stays the same module with the same parameters, ties and names, and `state_dict()` has the matrices of the update in
addition: `q_proj.weight`, `q_proj.lora_A`, `q_proj.lora_B`. They are fp32 by default, for weights of any dtype, since
steps of a typical size would vanish in bf16. Products run in the dtype of the input.

In bf16, the products are those of `kernels.lora` in training and in exact decoding, with the same bits: updates are not
merged to sample, since W' rounded to bf16 would be another policy than the one that trains.

Dropout applies to the input of A. Layers that project one input, such as q, k and v, share its mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.checks import AT_LEAST_1, POSITIVE, PROBABILITY, check
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.kernels.lora_experts import lora_experts_mlp
from ligerzoo.kernels.low_rank import LowRank, low_rank_product, row_norms
from ligerzoo.kernels.row_sums import unsplit_linear
from ligerzoo.layers.embedding import Embedding, ScaledEmbedding
from ligerzoo.layers.exactness import Obstacle
from ligerzoo.layers.head import LMHead
from ligerzoo.layers.linear import INIT_STD, Linear
from ligerzoo.layers.moe import Experts
from ligerzoo.layers.plain import dequantized, is_unmodified
from ligerzoo.layers.projection import LinearTerms, linear, project_alone
from ligerzoo.layers.routers import Router

_HEAD_MULTIPLE = 64
"""The kernels of the loss head are fastest for a multiple of this number of features."""


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """Options of one low-rank update.

    Attributes:
        rank: r, number of rows of A and of columns of B.
        alpha: the update is multiplied by alpha / rank.
        use_rslora: multiply it by alpha / sqrt(rank) instead, which suits high ranks.
        dropout: probability with which training drops input features of A.

    Raises:
        ValueError: a value is out of range.
    """

    rank: int = 16
    alpha: float = 32
    use_rslora: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check("LoRA", AT_LEAST_1, rank=self.rank)
        check("LoRA", POSITIVE, alpha=self.alpha)
        check("LoRA", PROBABILITY, dropout=self.dropout)

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class UpdateTensors(NamedTuple):
    """The tensors of an update: A, B and, with DoRA, magnitudes of rows."""

    a: Tensor
    b: Tensor
    magnitudes: Tensor | None = None


class LoRALayer(nn.Module):
    """Base class of layers with low-rank updates; `adapt.adapt` makes them.

    Attributes:
        lora: options by the name of the updated parameter.
        lora_enabled: False computes without the updates, see `adapters_disabled`.
    """

    plain_class: ClassVar[type[nn.Module]]
    lora: dict[str, LoRAOptions]
    lora_enabled: bool

    def add_update(self, parameter: str, options: LoRAOptions, *, dora: bool, dtype: torch.dtype) -> None:
        """Adds matrices A and B, initialized so that the layer computes what it did before."""
        raise NotImplementedError

    def init_update(self, parameter: str) -> None:
        """Initializes A and B, of which one is 0, and the magnitudes of DoRA."""
        raise NotImplementedError

    def init_weights(self, std: float = INIT_STD) -> None:
        """Initializes the weights and the updates."""
        super().init_weights(std)  # type: ignore[misc]
        for parameter in self.lora:
            self.init_update(parameter)

    def update_tensors(self, parameter: str) -> UpdateTensors:
        """Returns the parameters of an update."""
        raise NotImplementedError

    def merged_weight(self, parameter: str) -> Tensor:
        """Returns W' in the dtype of W: computed in fp32 (fp64 for fp64) and rounded once."""
        raise NotImplementedError

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """Yields what prevents that sampling computes the bits of training, see `layers.exactness`."""
        yield "", "low-rank updates of linear layers only", f"is a {type(self).__name__}"

    def update_parameters(self) -> dict[str, nn.Parameter]:
        """Returns A, B and magnitudes by name."""
        return {name: p for name, p in self._parameters.items() if "lora_" in name and p is not None}

    def remove_updates(self) -> None:
        """Makes the layer plain again, with the unchanged weights."""
        for name in [name for name in self._parameters if "lora_" in name]:
            del self._parameters[name]
        del self.lora, self.lora_enabled
        self.__class__ = self.plain_class  # type: ignore[assignment]

    @property
    def lora_dropout(self) -> float:
        """Probability of dropping an input feature of A in this call."""
        dropout = max(options.dropout for options in self.lora.values())
        return dropout if self.training and self.lora_enabled else 0.0

    def extra_repr(self) -> str:
        updates = ", ".join(f"{name}: rank {o.rank}, alpha {o.alpha:g}" for name, o in self.lora.items())
        return f"{super().extra_repr()}, lora=({updates})"


class LoRAMatrixLayer(LoRALayer):
    """Base class of layers with one weight matrix (O, K), whose names are `lora_A` (r, K) and `lora_B` (O, r)."""

    a_name: ClassVar[str] = "lora_A"
    b_name: ClassVar[str] = "lora_B"
    weight: Any
    lora_magnitude_vector: nn.Parameter | None

    @property
    def matrix(self) -> Tensor:
        """The weight, (O, K), dequantized."""
        return dequantized(self.weight)

    def add_update(self, parameter: str, options: LoRAOptions, *, dora: bool, dtype: torch.dtype) -> None:
        device, (rows, columns) = self.weight.device, self.matrix_shape
        self.lora = {parameter: options}
        self.register_parameter(
            self.a_name, nn.Parameter(torch.empty(options.rank, columns, device=device, dtype=dtype))
        )
        self.register_parameter(self.b_name, nn.Parameter(torch.empty(rows, options.rank, device=device, dtype=dtype)))
        magnitude = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if dora else None
        self.register_parameter("lora_magnitude_vector", magnitude)
        self.init_update(parameter)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(O, K)."""
        rows, columns = self.weight.shape
        return rows, columns

    def init_update(self, parameter: str) -> None:
        a, b = getattr(self, self.a_name), getattr(self, self.b_name)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        nn.init.zeros_(b)
        self._init_magnitude()

    def _init_magnitude(self) -> None:
        if self.lora_magnitude_vector is not None and not self.lora_magnitude_vector.is_meta:
            with torch.no_grad():
                self.lora_magnitude_vector.copy_(row_norms(self.matrix, self._update))

    @property
    def _update(self) -> LowRank:
        [options] = self.lora.values()
        return LowRank(getattr(self, self.a_name), getattr(self, self.b_name), options.scale)

    @property
    def update(self) -> LowRank | None:
        """A, B and s; None if the updates are disabled."""
        return self._update if self.lora_enabled else None

    @property
    def rescales(self) -> bool:
        """Whether DoRA's factors apply to the rows of W + s B A, but not to the bias."""
        return self.lora_enabled and self.lora_magnitude_vector is not None

    def row_factors(self) -> Tensor | None:
        """Returns DoRA's factors of the rows of W + s B A, (O,) in at least fp32; None without DoRA."""
        if self.lora_magnitude_vector is None or not self.lora_enabled:
            return None
        factors: Tensor = self.lora_magnitude_vector / row_norms(self.matrix, self._update)
        return factors

    def dropped(self, x: Tensor) -> Tensor | None:
        """Returns x after dropout; None without dropout."""
        # On a CPU and on meta, F.dropout keeps a mask in the dtype of x. This one is bool everywhere, as on a GPU.
        return torch.native_dropout(x, self.lora_dropout, True)[0] if self.lora_dropout else None

    def update_tensors(self, parameter: str) -> UpdateTensors:
        return UpdateTensors(getattr(self, self.a_name), getattr(self, self.b_name), self.lora_magnitude_vector)

    def merged_weight(self, parameter: str) -> Tensor:
        with torch.no_grad():
            return self._merged_matrix().to(self.weight.dtype)

    def _merged_matrix(self) -> Tensor:
        dtype = accumulation_dtype(self.weight.dtype)
        a, b, scale = self._update.to(dtype)
        matrix = torch.addmm(self.matrix.to(dtype), b, a, alpha=scale)
        if self.lora_magnitude_vector is None:
            return matrix
        factors: Tensor = self.lora_magnitude_vector.to(dtype) / torch.linalg.vector_norm(matrix, dim=1)
        return matrix * factors[:, None]


class LoRALinear(LoRAMatrixLayer, Linear):
    """`Linear` with a low-rank update."""

    plain_class = Linear

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., K) -> (..., O)."""
        return project_alone(x, self._terms())

    def exact_obstacles(self) -> Iterator[Obstacle]:
        """See `LoRALayer.exact_obstacles`."""
        if dropout := max(options.dropout for options in self.lora.values()):
            yield "lora", "no dropout, which only training has", f"drops {dropout} of the features"

    def terms(self) -> LinearTerms | None:
        """See `Linear.terms`."""
        return self._terms() if is_unmodified(self, LoRALinear) else None

    def _terms(self) -> LinearTerms:
        return LinearTerms(self.weight, self.bias, self.update, self, self.rescales)


class LoRARouter(LoRAMatrixLayer, Router):
    """`Router` with a low-rank update."""

    plain_class = Router

    def logits(self, x: Tensor) -> Tensor:
        """x: (T, H) -> (T, E)."""
        if self.bias is None or not self.rescales:
            return add_update_product(super().logits(x), x, self)
        y = add_update_product(unsplit_linear(x, self.weight), x, self)
        return y + self.bias.to(y.dtype)


def add_update_product(y: Tensor, x: Tensor, layer: LoRAMatrixLayer) -> Tensor:
    """Adds the update's product with x to y = x @ W.T, and applies DoRA's factors, which y may have no bias for."""
    update, factors, dropped = layer.update, layer.row_factors(), layer.dropped(x)
    if update is None:
        return y
    y = y + low_rank_product(x if dropped is None else dropped, update).to(y.dtype)
    return y if factors is None else (y * factors).to(y.dtype)


class LoRAHead(LoRAMatrixLayer, LMHead):
    """`LMHead` with a low-rank update.

    The loss computes logits as [h, s h A^T] [W, B]^T: as exact as the logits without update, and without the matrix
    W + s B A, whose rounding to bf16 would lose small updates. [W, B] is a copy of the weight that exists during the
    loss, and so does its gradient, of which only the columns of B are kept.
    """

    plain_class = LMHead

    def product(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., V)."""
        y = add_update_product(linear(hidden, self.weight), hidden, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def loss_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns hidden states and a weight whose product, plus the bias, are the logits."""
        hidden, weight = super().loss_inputs(hidden)
        update, factors = self.update, self.row_factors()
        if update is None:
            return hidden, weight
        a, b, scale = update.to(weight.dtype)
        dropped, padding = self.dropped(hidden), -len(a) % _HEAD_MULTIPLE
        inner = scale * F.linear(hidden if dropped is None else dropped, a)
        weight = torch.cat([weight, F.pad(b, (0, padding))], 1)
        weight = weight if factors is None else (weight * factors[:, None]).to(weight.dtype)
        return torch.cat([hidden, F.pad(inner, (0, padding)).to(hidden.dtype)], -1), weight


class LoRAEmbedding(LoRAMatrixLayer, Embedding):
    """`Embedding` with a low-rank update of the transposed weight, (H, V), as in PEFT."""

    plain_class: ClassVar[type[nn.Module]] = Embedding
    a_name = "lora_embedding_A"
    b_name = "lora_embedding_B"

    @property
    def matrix(self) -> Tensor:
        """The transposed weight, (H, V)."""
        transposed: Tensor = self.weight.T
        return transposed

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(H, V)."""
        rows, columns = self.weight.shape
        return columns, rows

    def init_update(self, parameter: str) -> None:
        nn.init.zeros_(getattr(self, self.a_name))
        nn.init.normal_(getattr(self, self.b_name))
        self._init_magnitude()

    def forward(self, input: Tensor) -> Tensor:
        """input: token ids, (...) -> (..., H)."""
        embeddings, update, factors = super().forward(input), self.update, self.row_factors()
        if update is None:
            return embeddings
        delta = update.scale * (F.embedding(input, update.a.T, self.padding_idx) @ update.b.T)
        embeddings = embeddings + delta.to(embeddings.dtype)
        return embeddings if factors is None else (embeddings * factors).to(embeddings.dtype)

    def merged_weight(self, parameter: str) -> Tensor:
        with torch.no_grad():
            return self._merged_matrix().T.to(self.weight.dtype, memory_format=torch.contiguous_format)


class LoRAScaledEmbedding(ScaledEmbedding, LoRAEmbedding):
    """`ScaledEmbedding` with a low-rank update, which is scaled too."""

    plain_class: ClassVar[type[nn.Module]] = ScaledEmbedding


class LoRAExperts(LoRALayer, Experts):
    """`Experts` with low-rank updates of one or both projections: one pair of matrices for each expert.

    Parameters are named `gate_up_proj_lora_A` (E, r, H) and `gate_up_proj_lora_B` (E, 2I, r), and in the same way for
    `up_proj` and `down_proj`. No matrix of the size of the weights is computed. Dropout and DoRA are not supported.
    """

    plain_class = Experts

    def add_update(self, parameter: str, options: LoRAOptions, *, dora: bool, dtype: torch.dtype) -> None:
        if dora or options.dropout:
            raise ValueError(
                f"LoRA: experts with {'dora=True' if dora else f'dropout={options.dropout}'}; expected dora=False and "
                "dropout=0. Leave the experts out of the targets, or train without it"
            )
        weight = getattr(self, parameter)
        experts, rows, columns = weight.shape
        self.lora = {**getattr(self, "lora", {}), parameter: options}
        for name, shape in (("A", (options.rank, columns)), ("B", (rows, options.rank))):
            matrices = torch.empty(experts, *shape, device=weight.device, dtype=dtype)
            self.register_parameter(f"{parameter}_lora_{name}", nn.Parameter(matrices))
        self.init_update(parameter)

    def init_update(self, parameter: str) -> None:
        a, b = (getattr(self, f"{parameter}_lora_{name}") for name in "AB")
        bound = a.shape[-1] ** -0.5  # as kaiming_uniform_ with a = sqrt(5), of each matrix
        nn.init.uniform_(a, -bound, bound)
        nn.init.zeros_(b)

    def update(self, parameter: str) -> LowRank | None:
        """Returns A, B and s of a parameter; None if it has no update, or updates are disabled."""
        if parameter not in self.lora or not self.lora_enabled:
            return None
        a, b = (getattr(self, f"{parameter}_lora_{name}") for name in "AB")
        return LowRank(a, b, self.lora[parameter].scale)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x: (T, H), expert_ids: (T, k), expert_weights: (T, k) -> (T, H)."""
        if not self.lora_enabled:
            return super().forward(x, expert_ids, expert_weights)
        first, last = map(dequantized, self.weights)
        first_update, last_update = map(self.update, self.projections)
        tensors = x, expert_ids, expert_weights, first, last, first_update, last_update, *self.biases
        return lora_experts_mlp(*tensors, activation=self.activation, backend=self.backend)

    def update_tensors(self, parameter: str) -> UpdateTensors:
        return UpdateTensors(*(getattr(self, f"{parameter}_lora_{name}") for name in "AB"))

    def merged_weight(self, parameter: str) -> Tensor:
        weight, options = dequantized(getattr(self, parameter)), self.lora[parameter]
        dtype, merged = accumulation_dtype(weight.dtype), torch.empty_like(weight)
        a, b = (getattr(self, f"{parameter}_lora_{name}").detach() for name in "AB")
        for expert in range(len(weight)):  # one at a time, for the memory of the fp32 copy
            product = b[expert].to(dtype), a[expert].to(dtype)
            merged[expert] = torch.addmm(weight[expert].detach().to(dtype), *product, alpha=options.scale)
        return merged

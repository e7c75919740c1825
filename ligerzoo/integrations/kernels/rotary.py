"""Functions of transformers that rotate queries and keys, recognized by their results, with the fused kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from ligerzoo.integrations.kernels.compare import difference_of, first_match
from ligerzoo.kernels import rope

Angles = Literal["complex", "once", "halves", "pairs"]
RotaryFunction: TypeAlias = Callable[..., Tensor | tuple[Tensor, ...]]
Layout = Literal["unsqueeze_dim", "heads first", "tokens first"]

HEAD_DIM = 8
"""Features of the random heads with which functions are compared."""


@dataclass(frozen=True)
class Rotation:
    """What a function of transformers computes. R features of each head are rotated, by R/2 angles.

    Args:
        angles: how the angles are passed. "complex": cosines and sines as complex numbers, (..., R/2). "once": cosines,
            (..., R/2). "halves": cosines, (..., R), the second half equal to the first. "pairs": cosines, (..., R),
            features 2i and 2i + 1 equal.
        layout: of the queries. "heads first": (B, N, T, D). "tokens first": (B, T, N, D) or (T, N, D), rotated in fp32,
            in vision towers. "unsqueeze_dim": (B, T, N, D) if this argument is 2, else (B, N, T, D).
        interleaved: whether the pairs are features 2i and 2i + 1, or i and i + R/2.
        deinterleaves: returns the first features of all pairs, then the second ones.
        trailing: rotates the last R features instead of the first.
        single: rotates one tensor instead of queries and keys.
    """

    angles: Angles
    layout: Layout
    interleaved: bool
    deinterleaves: bool = False
    trailing: bool = False
    single: bool = False

    def function(self) -> RotaryFunction:
        """Returns the function with the kernel. It takes the arguments of the function of transformers."""
        if self.angles == "complex":
            return partial(_rotate_by_complex_angles, self)
        return partial(_rotate_one if self.single else _rotate, self)

    def accepts(self, cos: Tensor) -> bool:
        """Whether cosines repeat as this function assumes."""
        match self.angles:
            case "halves":
                first, second = cos.chunk(2, dim=-1)
                return torch.equal(first, second)
            case "pairs":
                return torch.equal(cos[..., ::2], cos[..., 1::2])
        return cos.is_complex() == (self.angles == "complex")


def _rotate(
    rotation: Rotation,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys. `position_ids` is unused, as in transformers."""
    if rotation.layout == "tokens first":
        cos, sin = cos.float(), sin.float()
    if q.ndim == 3:
        q, k = _rotate_heads(rotation, q[None], k[None], cos, sin, heads_first=False)
        return q[0], k[0]
    heads_first = rotation.layout == "heads first" or (rotation.layout == "unsqueeze_dim" and unsqueeze_dim != 2)
    return _rotate_heads(rotation, q, k, cos, sin, heads_first)


def _rotate_one(rotation: Rotation, x: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1) -> Tensor:
    no_heads = x.narrow(2 if unsqueeze_dim == 2 else 1, 0, 0)
    return _rotate(rotation, x, no_heads, cos, sin, unsqueeze_dim=unsqueeze_dim)[0]


def _rotate_by_complex_angles(
    rotation: Rotation, q: Tensor, k: Tensor, angles: Tensor | None = None, **named: Tensor
) -> tuple[Tensor, Tensor]:
    """`named` is `angles` under the name of transformers' function."""
    if angles is None:
        (angles,) = named.values()
    cos, sin = torch.view_as_real(angles).unbind(-1)
    return _rotate_heads(rotation, q, k, cos, sin, rotation.layout == "heads first")


def _rotate_heads(
    rotation: Rotation, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool
) -> tuple[Tensor, Tensor]:
    match rotation.angles:
        case "halves":
            cos, sin = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
        case "pairs":
            cos, sin = cos[..., ::2], sin[..., ::2]
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    if heads_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    unrotated = (q, k)
    features = 2 * cos.shape[-1]
    if rotation.trailing:
        q, k = q[..., -features:], k[..., -features:]
    if rotation.deinterleaves:
        q, k = (torch.cat([x[..., ::2], x[..., 1::2]], -1) for x in (q, k))
    q, k = rope(q, k, cos, sin, interleaved=rotation.interleaved and not rotation.deinterleaves)
    if rotation.trailing:
        q, k = (torch.cat([x[..., :-features], y], -1) for x, y in zip(unrotated, (q, k), strict=True))
    return (q.transpose(1, 2), k.transpose(1, 2)) if heads_first else (q, k)


@cache
def recognize_rotation(function: RotaryFunction) -> Rotation | None:
    """Returns what a function of transformers computes; None if the kernel does not compute it."""
    parameters = list(inspect.signature(function).parameters)
    return first_match(_candidates(parameters), partial(_computes, function))


def _candidates(parameters: list[str]) -> Iterator[Rotation]:
    layouts: tuple[Layout, ...] = ("heads first", "tokens first")
    if "cos" not in parameters:
        yield from (Rotation("complex", layout, True) for layout in layouts)
        return
    if "unsqueeze_dim" in parameters:
        layouts = ("unsqueeze_dim",)
    single = parameters.index("cos") == 1
    angles: tuple[Angles, ...] = ("once", "halves", "pairs")
    for layout, repeats, interleaved, trailing in product(layouts, angles, (False, True), (False, True)):
        for deinterleaves in (False, True) if interleaved else (False,):
            yield Rotation(repeats, layout, interleaved, deinterleaves, trailing, single)


def _computes(function: RotaryFunction, rotation: Rotation) -> bool:
    """Whether `function` computes `rotation`, for whole heads and, if it can, for parts of heads."""
    unsqueeze_dims = (1, 2) if rotation.layout == "unsqueeze_dim" else (None,)
    for unsqueeze_dim, features in product(unsqueeze_dims, (HEAD_DIM, HEAD_DIM // 2)):
        arguments = _random_arguments(rotation, features, rotation.layout == "tokens first" or unsqueeze_dim == 2)
        options = {} if unsqueeze_dim is None else {"unsqueeze_dim": unsqueeze_dim}
        try:
            expected = function(*arguments, **options)
        except (RuntimeError, ValueError, IndexError):
            if features == HEAD_DIM:
                return False
        else:
            if difference_of(rotation.function()(*arguments, **options), expected) is not None:
                return False
    return True


def _random_arguments(rotation: Rotation, features: int, tokens_first: bool) -> tuple[Tensor, ...]:
    """Queries, keys and angles of a function that rotates `features` of each head."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(2, 5, features // 2, generator=generator)
    match rotation.angles:
        case "halves":
            angles = torch.cat([angles, angles], -1)
        case "pairs":
            angles = angles.repeat_interleave(2, -1)
    heads = [
        torch.randn(2, 5, number, HEAD_DIM, generator=generator) for number in ((3,) if rotation.single else (3, 2))
    ]
    passed = (torch.polar(torch.ones(()), angles),) if rotation.angles == "complex" else (angles.cos(), angles.sin())
    return (*(x if tokens_first else x.transpose(1, 2) for x in heads), *passed)


def cosines_of(model: nn.Module, attention: str) -> list[Tensor]:
    """Returns the cosines (or complex angles) that the rotary embeddings around an attention module compute.

    Calls the embeddings that are siblings of the nearest module around the attention that has some, for positions on
    one, two and three axes, and for each type of layer.

    Args:
        model: the model.
        attention: the name of the attention module in `model`.

    Returns:
        One tensor for each call that succeeded.
    """
    name = attention
    while name:
        name = name.rpartition(".")[0]
        parent = model.get_submodule(name)
        rotary = [child for child in parent.children() if "Rotary" in type(child).__name__]
        if rotary:
            configured = getattr(getattr(parent, "config", None), "layer_types", None)
            return [cos for module in rotary for cos in _cosines(module, configured or ())]
    return []


def _cosines(rotary: nn.Module, layer_types: Iterable[str]) -> Iterator[Tensor]:
    layer_types = sorted({*layer_types, *(getattr(rotary, "layer_types", None) or ())})
    buffer = next(rotary.buffers(), torch.zeros(0))
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(1, 5, 1, device=buffer.device)
    for axes, layer_type in product(((1,), (2,), (3, 1)), (None, *layer_types)):
        position_ids = torch.randint(8, (*axes, 5), generator=generator).to(buffer.device)
        options = {} if layer_type is None else {"layer_type": layer_type}
        try:
            with torch.no_grad():
                result = rotary(x, position_ids, **options)
        except (RuntimeError, TypeError, AttributeError, LookupError, ValueError):
            continue
        yield result[0] if isinstance(result, tuple) else result

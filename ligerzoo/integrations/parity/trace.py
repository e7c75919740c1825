"""Runs a model and records the inputs and outputs of its modules, which it may replace or change by rounding."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

HEAD = "lm_head"
"""Name of the module whose output are the logits, after scales and soft caps that may be part of it or not."""

DECODER = re.compile(r"model\.|lm_head")
"""Start of the names of the modules of our decoders; others are parts of a vision tower."""

Side = Literal["input", "output", "experts"]


class Point(NamedTuple):
    """Where in a forward a tensor is compared.

    Attributes:
        module: our module's name.
        side: the first input of the module, its first output, or the sorted ids of the experts of each token.
        call: index of the module's call.
    """

    module: str
    side: Side
    call: int


Trace = dict[Point, Tensor]
"""The tensors of a forward, in order."""


@dataclass(frozen=True)
class TracedModel:
    """A model with its inputs, and the modules whose inputs and outputs are recorded, by our names."""

    model: nn.Module
    modules: Mapping[str, nn.Module]
    inputs: Mapping[str, Tensor]

    def only(self, names: Collection[str]) -> TracedModel:
        """The run that records these modules alone: others may run in fused kernels."""
        return TracedModel(self.model, {name: self.modules[name] for name in names}, self.inputs)

    def trace(self, expected: Trace | None = None, *, change: bool = False) -> Trace:
        """Runs the model.

        Args:
            expected: what modules get as input and give as output, after what they would is recorded; None for that.
            change: change all inputs of modules by up to an ulp.
        """
        trace: Trace = {}
        calls: Counter[str] = Counter()
        generator = torch.Generator(next(iter(self.inputs.values())).device).manual_seed(0)

        def record(name: str, side: Side, x: Tensor) -> Tensor:
            """Records a tensor, and returns what replaces it."""
            point = Point(name, side, calls[name])
            trace[point] = x.clone()
            other = None if expected is None else expected.get(point)
            new = x if other is None or other.numel() != x.numel() else nearest(other, x, name)
            if change and side == "input":
                noise = torch.rand(new.shape, generator=generator, device=new.device) * 2 - 1
                new = new + new * torch.finfo(new.dtype).eps * noise
            return new.to(x.dtype)

        def before(name: str, arguments: object) -> object:
            x = _first_tensor(arguments)
            if x is not None and (ids := _expert_ids(arguments, x)) is not None:
                trace[Point(name, "experts", calls[name])] = ids.sort().values
            return None if x is None else _swapped(arguments, x, record(name, "input", x))

        def after(name: str, output: object) -> object:
            y = None if name == HEAD else _output_tensor(output)
            new = None if y is None else _swapped(output, y, record(name, "output", y))
            calls[name] += 1
            return new

        with ExitStack() as hooks:
            for name, module in self.modules.items():
                hooks.enter_context(_hooked(module, partial(before, name), partial(after, name)))
            trace[Point(HEAD, "output", 0)] = self.model(**self.inputs, use_cache=False).logits
        return trace


@contextmanager
def _hooked(module: nn.Module, before: Callable[[object], object], after: Callable[[object], object]) -> Iterator[None]:
    handles = (
        module.register_forward_pre_hook(lambda _, *arguments: before(arguments), with_kwargs=True),
        module.register_forward_hook(lambda _, __, output: after(output)),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(values: object) -> Tensor | None:
    """The first floating-point tensor among nested values."""
    return next((one for one in tree_leaves(values) if isinstance(one, Tensor) and one.is_floating_point()), None)


def _output_tensor(values: object) -> Tensor | None:
    """`_first_tensor`; of matrices of one shape the last, since Llama 4's router returns scores before its logits."""
    first = _first_tensor(values)
    if first is None or first.dim() != 2:
        return first
    same = (one for one in tree_leaves(values) if isinstance(one, Tensor) and one.is_floating_point())
    return [one for one in same if one.shape == first.shape][-1]


def _expert_ids(values: object, x: Tensor) -> Tensor | None:
    """The ids of the experts, (T, k), among the arguments of experts; None for other modules."""
    found = (one for one in tree_leaves(values) if isinstance(one, Tensor) and not one.is_floating_point())
    return next((one for one in found if x.dim() == one.dim() == 2 and len(one) == len(x)), None)


def _swapped(values: object, old: Tensor, new: Tensor) -> object:
    """Nested values with another tensor for one of them."""
    return tree_map(lambda one: new if one is old else one, values)


def nearest(x: Tensor, like: Tensor, module: str) -> Tensor:
    """x in the shape of another tensor with as many numbers, in the order of its heads, tokens or patches.

    The order is that of the nearer one: heads before or after tokens, and in a vision tower rows in the order of their
    norms.
    """
    layouts = [x.reshape(like.shape)]
    if x.dim() == 4 and like.dim() == 4:
        layouts.append(x.transpose(1, 2).reshape(like.shape))
    if like.dim() == 2 and not DECODER.match(module):  # patches of images
        rows = torch.empty_like(layouts[0])
        rows[like.norm(dim=-1).argsort()] = layouts[0][layouts[0].norm(dim=-1).argsort()]
        layouts.append(rows)
    return min(layouts, key=lambda one: (one - like).abs().sum().nan_to_num(float("inf")).item())

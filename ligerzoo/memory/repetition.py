"""Equal blocks of a decoder, of which a simulated step runs a few: each further one adds the same.

Of n equal repeats, a step runs the first three and the last, and holds the memory of the others between them: a gap.
Their gradients, work and collectives are those of the second repeat. What the step counts of the second and the third
must agree; else all blocks run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from operator import add, itemgetter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ligerzoo.dtensors import local
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.layers import Decoder
from ligerzoo.memory.tracker import Collective, Work

T = TypeVar("T")

_RUN = 4
"""Repeats that run: the first, whose input may need no gradient, two that are compared, and the last."""

_MAX_PERIOD = 8
_MODULE_STATE = frozenset(vars(nn.Module()))


class Gap(NamedTuple):
    """Repeats of blocks that do not run.

    Attributes:
        block: index of the first block after the gap, among those that run.
        period: blocks of a repeat.
        repeats: their number.
    """

    block: int
    period: int
    repeats: int

    @property
    def omitted(self) -> int:
        """Blocks that do not run."""
        return self.period * self.repeats


class Boundary(NamedTuple):
    """What was counted when a block began, in forward, or had the gradient of its input, in backward.

    Attributes:
        live: bytes that existed, without those of gaps.
        moments: number of moments that have ended.
        work: all work.
        collectives: their number.
    """

    live: int
    moments: int
    work: Work
    collectives: int


class Moment(NamedTuple):
    """The most memory between two gradients.

    Attributes:
        dynamic: bytes that exist, without weights and finished gradients.
        activations: those that blocks keep for backward.
        gradients: bytes of finished gradients before they are sharded.
        of_experts: those of experts that are divided over processes.
    """

    dynamic: int
    activations: int
    gradients: int
    of_experts: int


def kinds_of(blocks: Sequence[nn.Module]) -> list[int]:
    """Returns a number for each block, equal for blocks that compute the same of other weights."""
    owners = Counter(id(parameter) for block in blocks for parameter in block.parameters())
    if any(count > 1 for count in owners.values()):
        return list(range(len(blocks)))
    kinds: dict[object, int] = {}
    return [kinds.setdefault(_signature(block), len(kinds)) for block in blocks]


def find_gaps(kinds: Sequence[int], levels: Sequence[Recompute]) -> list[Gap]:
    """Returns the repeats of equal blocks with equal levels that a step can leave out, in the order of the blocks.

    Args:
        kinds: from `kinds_of`.
        levels: what backward recomputes of each block.
    """
    keys = [*zip(kinds, levels, strict=True)]
    gaps: list[Gap] = []
    start = omitted = 0
    while start < len(keys):
        tried = [Gap(start - omitted + (_RUN - 1) * n, n, _omitted(keys[start:], n)) for n in range(1, _MAX_PERIOD + 1)]
        best = max(tried, key=lambda gap: gap.omitted)
        if best.repeats:
            gaps.append(best)
            omitted += best.omitted
            start += best.omitted + _RUN * best.period
        else:
            start += 1
    return gaps


def _omitted(keys: Sequence[tuple[int, Recompute]], period: int) -> int:
    """Returns how many repeats of the first blocks need not run."""
    equal = next((i for i, (a, b) in enumerate(zip(keys, keys[period:], strict=False)) if a != b), len(keys) - period)
    return max(0, equal // period + 1 - _RUN)


@contextmanager
def leaving_out(decoder: Decoder, gaps: Sequence[Gap]) -> Iterator[None]:
    """Within this context, a decoder has the blocks that run only."""
    blocks = decoder.layers
    decoder.layers = nn.ModuleList(run_values(list(blocks), gaps))
    try:
        yield
    finally:
        decoder.layers = blocks


def run_values(values: Sequence[T], gaps: Sequence[Gap]) -> list[T]:
    """Returns the values of the blocks that run, from those of all blocks."""
    kept = list(values)
    for gap in gaps:
        del kept[gap.block : gap.block + gap.omitted]
    return kept


def _signature(block: nn.Module) -> tuple[object, ...]:
    """Returns all that determines what a block computes, but the values of its tensors."""
    names = {id(module): name for name, module in block.named_modules()}
    return tuple((name, type(module), *_state(module, names)) for name, module in block.named_modules())


def _state(module: nn.Module, names: Mapping[int, str]) -> Iterator[object]:
    yield module.training
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        yield name, None if tensor is None else (type(tensor), tensor.shape, local(tensor).shape, *_options(tensor))
    for name, value in vars(module).items():
        if name not in _MODULE_STATE or name.endswith("_hooks"):
            yield name, _key(value, names)


def _options(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.requires_grad, str(getattr(tensor, "placements", None))


def _key(value: object, names: Mapping[int, str]) -> object:
    """Returns what equal values have in common; of unknown types, their identity."""

    def keys(values: Iterable[object]) -> tuple[object, ...]:
        return type(value), *(_key(one, names) for one in values)

    match value:
        case None | bool() | int() | float() | str() | Enum() | torch.dtype() | torch.device() | type():
            return type(value), value
        case list() | tuple():
            return keys(value)
        case dict():
            return keys(value.items())
        case partial():
            return keys((value.func, value.args, value.keywords))
        case nn.Module() if id(value) in names:
            return names[id(value)]
    if is_dataclass(value):
        return keys(getattr(value, field.name) for field in fields(value))
    return id(value)


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """A training step of one process, before FSDP2 shards its weights.

    Attributes:
        moments: the most memory between gradients.
        kept: what each block keeps for backward, its input included.
        forward: work of the forward, and of the fused loss head with its gradients.
        backward: work of the backward.
        collectives: those of divided layers.
    """

    moments: tuple[Moment, ...]
    kept: tuple[int, ...]
    forward: Work
    backward: Work
    collectives: tuple[Collective, ...]


def filled(
    count: StepCount, gaps: Sequence[Gap], entered: Sequence[Boundary], left: Mapping[int, Boundary]
) -> StepCount | None:
    """Returns what a step counts whose repeats all run; None if those that ran differ.

    Args:
        count: what the step with gaps counts.
        gaps: in the order of the blocks.
        entered: boundaries of the blocks that ran and of the end, in forward.
        left: boundaries around gaps, in backward.
    """
    moments, kept, forward, backward = list(count.moments), list(count.kept), count.forward, count.backward
    sent: list[tuple[int, tuple[Collective, ...]]] = []
    for gap in gaps:  # the moments of later ones come first, and keep their indices
        around = gap.block - 2 * gap.period, gap.block - gap.period, gap.block
        if not left.keys() >= {*around}:
            return None
        second, third = (_between(count, entered[a], entered[b]) for a, b in pairwise(around))
        third_back, second_back = (_between(count, left[a], left[b]) for a, b in pairwise(reversed(around)))
        own, later = (moments[part.moments] for part in (second_back, third_back))
        pairs = [*zip(own, later, strict=False)]
        steps = {b.dynamic - a.dynamic for a, b in pairs[1:]} | {b.activations - a.activations for a, b in pairs[1:]}
        grown = {(a.gradients - b.gradients, a.of_experts - b.of_experts) for a, b in pairs}
        are_equal = second.counted == third.counted and second_back.counted[1:] == third_back.counted[1:]
        if not are_equal or len(own) != len(later) or len(steps) > 1 or len(grown) > 1:
            return None
        gradients, of_experts = next(iter(grown), (0, 0))
        freed = next(iter(steps), second.kept)  # by a repeat; the rest after all of backward
        stays = gap.repeats * (second.kept - freed)

        def moved(moment: Moment, above: int, done: int, freed: int = freed, stays: int = stays) -> Moment:
            """Moment of another repeat, with more repeats before it and more finished ones after it."""
            kept = above * freed + stays
            return Moment(*map(add, moment, (kept, kept, done * gradients, done * of_experts)))  # noqa: B023

        inserted = [moved(one, above, gap.repeats - above) for above in range(gap.repeats + 1, 0, -1) for one in own]
        rest = [moved(one, 0, gap.repeats) for one in moments[third_back.moments.stop :]]
        moments = [*moments[: third_back.moments.start], *inserted, *rest]
        forward += _times(second.work, gap.repeats)
        backward += _times(second_back.work, gap.repeats)
        sent += [(entered[gap.block].collectives, second.collectives * gap.repeats)]
        sent += [(left[gap.block].collectives, second_back.collectives * gap.repeats)]
    collectives = list(count.collectives)
    for index, chunk in sorted(sent, key=itemgetter(0), reverse=True):
        collectives[index:index] = chunk
    for gap in reversed(gaps):
        kept[gap.block : gap.block] = kept[gap.block - gap.period : gap.block] * gap.repeats
    return StepCount(
        moments=tuple(moments),
        kept=tuple(kept),
        forward=forward,
        backward=backward,
        collectives=tuple(collectives),
    )


class _Part(NamedTuple):
    """What a repeat counts."""

    kept: int
    work: Work
    collectives: tuple[Collective, ...]
    moments: slice

    @property
    def counted(self) -> tuple[object, ...]:
        return self.kept, self.work, self.collectives


def _between(count: StepCount, start: Boundary, end: Boundary) -> _Part:
    collectives = count.collectives[start.collectives : end.collectives]
    return _Part(end.live - start.live, end.work - start.work, collectives, slice(start.moments, end.moments))


def _times(work: Work, count: int) -> Work:
    return Work(*(count * value for value in work))

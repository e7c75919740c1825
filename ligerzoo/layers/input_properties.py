"""What a forward knows of the values of its inputs: it reads them, which is a host sync, or its caller says it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.autograd import any_true, under_transform


class InputProperties(NamedTuple):
    """What the caller of a model knows of the values of its inputs.

    Attributes:
        has_padding: whether `attention_mask` masks a token.
        has_segments: whether a row of `position_ids` has several segments, see `begins_segment`.
        starts: which tokens begin a segment, (B or 1, T) bool, on the CPU; None if attention may not depend on it, as
            in a graph that runs for other rows, too.
    """

    has_padding: bool
    has_segments: bool
    starts: Tensor | None = None


_ASSUMED: ContextVar[InputProperties | None] = ContextVar("_ASSUMED", default=None)


@contextmanager
def assuming_inputs(properties: InputProperties) -> Iterator[None]:
    """Within this context of the current thread, a `Context` does not read its inputs' values, which is a host sync."""
    token = _ASSUMED.set(properties)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def reads_values() -> bool:
    """Whether a context may read the values of its inputs."""
    return not (torch.compiler.is_compiling() or under_transform()) and _ASSUMED.get() is None


def masks_any(padding_mask: Tensor) -> bool:
    """Whether a padding mask masks a token. Not in compiled code, which cannot know it."""
    assumed = _ASSUMED.get()
    return any_true(~padding_mask) if assumed is None else assumed.has_padding


def known_starts() -> Tensor | None:
    """Which tokens begin a segment, as the caller of the model says, see `InputProperties`; None if it does not."""
    assumed = None if torch.compiler.is_compiling() else _ASSUMED.get()
    return None if assumed is None else assumed.starts


def begins_segment(position_ids: Tensor) -> Tensor:
    """Returns whether each token, (B or 1, T), begins a segment; False for the first one."""
    return F.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0), value=False)


def any_begins_segment(is_start: Tensor) -> bool:
    """Whether a token begins a segment; in compiled code, whether one may."""
    if torch.compiler.is_compiling():
        return True
    assumed = _ASSUMED.get()
    return any_true(is_start) if assumed is None else assumed.has_segments

"""The interface of `ligerzoo.generate.Scheduler`, which decodes many requests together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Update(Protocol):
    """New tokens of one request.

    Attributes:
        index: what `Scheduler.add` returned for the request.
        tokens: the new tokens, with the end-of-sequence token.
        logps: their log-probabilities under the untempered distribution.
        finish_reason: "stop" after an end-of-sequence token, "length" after `max_new_tokens`, None while it runs.
    """

    @property
    def index(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def logps(self) -> list[float]: ...
    @property
    def finish_reason(self) -> str | None: ...


class Scheduler(Protocol):
    """Decodes requests together. One thread drives it."""

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""

    def add(self, prompt: Tensor | Sequence[int], **options: Any) -> int:
        """Adds a request and returns its index."""

    def step(self) -> Sequence[Update]:
        """Starts waiting requests and decodes one step of the running ones."""

    def cancel(self, index: int) -> None:
        """Removes a request."""

    def close(self) -> None:
        """Removes all requests and frees their memory. The scheduler is not used afterwards."""


def scheduler_factory(model: Any, batch_size: int) -> Callable[[], Scheduler]:
    """Returns a function that makes a scheduler for the model."""
    from ligerzoo.generate import Scheduler as ContinuousBatching  # type: ignore[attr-defined]

    return partial(ContinuousBatching, model, batch_size=batch_size)

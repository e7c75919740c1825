"""The thread that drives the scheduler for asynchronous callers.

The scheduler belongs to one thread. Callers on the event loop put commands into its inbox. After each step, the thread
hands the new tokens of all requests to the event loop in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import BrokenLogitsError, Request, Scheduler, Update
from ligerzoo.serve.metrics import Metrics

log = logging.getLogger("ligerzoo.serve")

SEE_LOG = "The log of the server says more."
"""Clients do not see the messages of unexpected errors, which may name files."""


class OverloadedError(Exception):
    """Too many requests wait or run."""


class GenerationError(Exception):
    """The model failed during a step, or the engine stopped."""


class ComputeThread(Protocol):
    """What the server needs of a thread that computes."""

    @property
    def is_running(self) -> bool: ...

    def start(self) -> None:
        """Starts the thread."""

    def stop(self) -> None:
        """Ends the thread."""

    def metrics_text(self) -> str:
        """Returns the counters in the format of Prometheus."""

    def abort(self, reason: str) -> None:
        """Ends all requests with a GenerationError."""


class Job:
    """Requests that were submitted together. `EngineThread.submit` makes it; it belongs to the event loop.

    Iterating yields (position of the request in the job, its update) until all requests have finished, and raises
    GenerationError if the engine fails.

    Attributes:
        requests: as submitted.
        accepted: done when the scheduler has all requests.
        unfinished: positions of the requests whose last token does not exist yet. Only these count for
            `EngineThread.max_requests`: others do not wait for a caller that does not read its results.
        waiting: positions of the unfinished requests without a token.
    """

    def __init__(self, engine: EngineThread, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.unfinished, self.waiting = set(range(len(requests))), set(range(len(requests)))
        self._submitted = time.monotonic()
        self._results: asyncio.Queue[tuple[int, Update] | GenerationError] = asyncio.Queue()
        self._engine = engine
        self._unread = set(range(len(requests)))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        while self._unread:
            result = await self._results.get()
            if isinstance(result, GenerationError):
                raise result
            position, update = result
            if position in self._unread:
                if update.finish_reason is not None:
                    self._unread.discard(position)
                yield result

    def put(self, result: tuple[int, Update] | GenerationError) -> None:
        """Adds a result for the caller."""
        if isinstance(result, GenerationError):
            self._finish(self.unfinished, "error")
        else:
            position, update = result
            if position in self.unfinished and not update.is_prompt:
                self._count_tokens(position, len(update.tokens))
            if update.finish_reason is not None:
                self._finish({position}, update.finish_reason)
        self._results.put_nowait(result)

    def _count_tokens(self, position: int, number: int) -> None:
        metrics = self._engine.metrics
        metrics.new_tokens += number
        if position in self.waiting:
            self.waiting.discard(position)
            metrics.first_tokens += 1
            metrics.first_token_seconds += time.monotonic() - self._submitted

    def _finish(self, positions: set[int], reason: str) -> None:
        ended, metrics = positions & self.unfinished, self._engine.metrics
        metrics.finished[reason] += len(ended)
        metrics.request_seconds += len(ended) * (time.monotonic() - self._submitted)
        self.unfinished, self.waiting = self.unfinished - ended, self.waiting - ended

    def cancel(self, position: int) -> None:
        """Ends a request, whose text is complete. Does nothing if it has finished."""
        self._unread.discard(position)
        if position in self.unfinished:
            self._finish({position}, "stop")
            self._engine.cancel(self, [position])

    def close(self) -> None:
        """Ends all requests of the job, and makes room for others."""
        self._engine.cancel(self, self.unfinished)
        self._finish(self.unfinished, "abort")
        self._unread = set()
        self._engine.release(self)


class EngineThread:
    """Runs the requests of callers on one event loop on one scheduler in one thread.

    Args:
        make_scheduler: makes a scheduler. It is called now, and again after a step has failed.
        max_requests: largest number of requests that wait or run.

    Attributes:
        max_requests: as given.
        request: returns a request for `submit`, see `Scheduler.request`; in any thread.
        device: device of the model.
        metrics: counters of the requests; of the event loop.
    """

    def __init__(self, make_scheduler: Callable[[], Scheduler], *, max_requests: int) -> None:
        self.max_requests, self.metrics = max_requests, Metrics()
        self._jobs: set[Job] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ligerzoo-engine", daemon=True)
        self._make_scheduler = make_scheduler
        self._scheduler: Scheduler | None = make_scheduler()  # used by the thread only, as `_active`
        self.request, self.device = self._scheduler.request, self._scheduler.device
        self._active: dict[int, tuple[Job, int]] = {}

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    # On the event loop

    async def submit(self, requests: Sequence[Request]) -> Job:
        """Adds requests to the scheduler. The caller must close the job.

        Raises:
            OverloadedError: with these requests, more than `max_requests` would wait or run.
            LigerzooError: the scheduler refuses a request now.
            GenerationError: the scheduler cannot be made.
        """
        if self._unfinished() + len(requests) > self.max_requests:
            raise OverloadedError
        self._loop = asyncio.get_running_loop()
        job = Job(self, requests)
        self._jobs.add(job)
        self._inbox.put(partial(self._add, job))
        try:
            await job.accepted
        except BaseException:
            job.close()
            raise
        self.metrics.prompt_tokens += sum(len(request.prompt) for request in requests)
        return job

    def metrics_text(self) -> str:
        """Returns the counters in the format of Prometheus."""
        waiting = sum(len(job.waiting) for job in self._jobs)
        return self.metrics.text(waiting=waiting, running=self._unfinished() - waiting)

    def _unfinished(self) -> int:
        return sum(len(job.unfinished) for job in self._jobs)

    def cancel(self, job: Job, positions: Iterable[int]) -> None:
        """Removes requests of a job from the scheduler."""
        self._inbox.put(partial(self._cancel, job, frozenset(positions)))

    def release(self, job: Job) -> None:
        """Forgets a job."""
        self._jobs.discard(job)

    def abort(self, reason: str) -> None:
        """Ends all jobs with a GenerationError."""
        for job in self._jobs:
            job.put(GenerationError(reason))

    # In the thread

    def _run(self) -> None:
        while True:
            while self._scheduler is None or self._scheduler.is_idle or not self._inbox.empty():
                command = self._inbox.get()
                if command is None:
                    self._close_scheduler()
                    return
                command()
            try:
                updates = self._scheduler.step()
            except BrokenLogitsError as error:
                self._end(error.requests, error)
            except Exception as error:
                self._end(list(self._active), error)
                self._close_scheduler()  # its state is unknown
            else:
                self._deliver(updates)

    def _add(self, job: Job) -> None:
        added: list[int] = []
        refusal: Exception | None = None
        try:
            self._scheduler = scheduler = self._scheduler or self._make_scheduler()
            for position, request in enumerate(job.requests):
                index = scheduler.add(request)
                self._active[index] = job, position
                added.append(index)
        except Exception as error:
            for index in added:
                self._remove(index)
            refusal = error if isinstance(error, LigerzooError) else failure_of(error)
        self._call(_resolve, job.accepted, refusal)

    def _cancel(self, job: Job, positions: frozenset[int]) -> None:
        for index, (other, position) in list(self._active.items()):
            if other is job and position in positions:
                self._remove(index)

    def _remove(self, index: int) -> None:
        del self._active[index]
        if self._scheduler is not None:
            self._scheduler.cancel(index)

    def _deliver(self, updates: Iterable[Update]) -> None:
        results: list[tuple[Job, tuple[int, Update]]] = []
        for update in updates:
            job, position = self._active[update.index]
            if update.finish_reason is not None:
                del self._active[update.index]
            results.append((job, (position, update)))
        self._call(_put, results)

    def _end(self, indices: Sequence[int], error: Exception) -> None:
        """Ends the jobs of some requests, which the scheduler does not have any more."""
        ended = failure_of(error)
        self._call(_put, [(job, ended) for job in {self._active.pop(index)[0] for index in indices}])

    def _close_scheduler(self) -> None:
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            try:
                scheduler.close()
            except Exception as error:
                log.error("cannot close the scheduler", exc_info=error)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls a function on the event loop, unless it is closed."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _resolve(accepted: asyncio.Future[None], refusal: Exception | None) -> None:
    if accepted.done():  # cancelled
        return
    if refusal is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(refusal)


def _put(results: Sequence[tuple[Job, tuple[int, Update] | GenerationError]]) -> None:
    for job, result in results:
        job.put(result)


def failure_of(error: Exception) -> GenerationError:
    """Logs an error of the model, and returns the one for clients."""
    log.error("generation failed", exc_info=error)
    return GenerationError(str(error) if isinstance(error, LigerzooError) else f"{type(error).__name__}. {SEE_LOG}")

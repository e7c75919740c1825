"""Prepares Triton in a thread, while the caller waits for something else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def preparing_triton() -> Iterator[None]:
    """Does in a thread what the first launch of a kernel in a process takes most of a second for.

    That is the import of triton, the hash of its files, which keys its cache of compiled kernels, and the connection to
    the driver. An error is left to the first launch.
    """
    thread = threading.Thread(target=_prepare, name="ligerzoo-prepare-triton")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _prepare() -> None:
    with contextlib.suppress(Exception):
        from triton.runtime import driver
        from triton.runtime.cache import triton_key

        triton_key()
        driver.active  # noqa: B018  # connects

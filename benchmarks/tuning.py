"""Faster tuning of other libraries' kernels."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any


@functools.cache
def compile_in_parallel() -> None:
    """Makes Triton's autotuner compile all configurations of a kernel at once, before it times them one by one.

    Changes the process. Configurations that fail to compile fail again, with their error, when they are timed. Each is
    timed for a fifth of the usual time.
    """
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    prune = Autotuner.prune_configs

    def prune_and_compile(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configs = prune(self, kwargs)
        self._do_bench = self._do_bench or functools.partial(do_bench, warmup=5, rep=20)
        launch = {**kwargs, "warmup": True}
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
                for config in configs:
                    self.fn.run(*self.nargs.values(), **launch, **config.all_kwargs())
        finally:  # the mode stays active if a time limit interrupts it
            active_mode.set(None)
        return configs

    Autotuner.prune_configs = prune_and_compile

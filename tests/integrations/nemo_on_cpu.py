"""Makes NeMo AutoModel run on CPUs. It supports GPUs only."""

from types import SimpleNamespace

import torch


class _Torch:
    """torch, whose current GPU is the CPU."""

    cuda = SimpleNamespace(current_device=lambda: torch.device("cpu"), is_available=lambda: False)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    @staticmethod
    def device(*args: object) -> torch.device:
        return torch.device("cpu")


def prepare() -> None:
    """Call it before a recipe runs."""
    from nemo_automodel._transformers import auto_model

    auto_model.torch = _Torch()
    torch.cuda.reset_peak_memory_stats = lambda: None
    torch.cuda.max_memory_allocated = lambda: 0

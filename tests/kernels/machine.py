"""What the machine that runs the kernel tests supports: device, dtypes, markers."""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from ligerzoo.kernels.dispatch import INTERPRETING

ON_GPU = torch.cuda.is_available() and not INTERPRETING
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDED_DTYPES = tuple(d for d in DTYPES if not (INTERPRETING and d == torch.bfloat16))
"""The dtypes that this machine rounds to correctly. The interpreter truncates to bf16, and its `tl.dot` treats bf16 as
integers."""
HALF_DTYPE = ROUNDED_DTYPES[1]

needs_triton = pytest.mark.skipif(not (ON_GPU or INTERPRETING), reason="needs a GPU or TRITON_INTERPRET=1")
needs_hopper = pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)


def on_gpu_too(small: Sequence[Any], large: Sequence[Any]) -> list[Any]:
    """The small cases, and on a GPU also the large ones."""
    return [*small, *(large if ON_GPU else ())]


def kernel_file(name: str) -> ModuleType:
    """The module `ligerzoo.kernels.<name>`. The attribute of that name of the package is the function."""
    return import_module(f"ligerzoo.kernels.{name}")

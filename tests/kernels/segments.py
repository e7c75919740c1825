"""Segments of packed rows, for tests of recurrences."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels.machine import needs_triton

BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]

BOUNDS = [0, 1, 6, 70, 134, 140]
"""Segments of 1, 5, 64, 64 and 6 tokens."""


def starts_of(bounds: list[int], device: str) -> Tensor:
    lengths = torch.tensor([end - start for start, end in pairwise(bounds)])
    return torch.tensor(bounds[:-1]).repeat_interleave(lengths)[None].to(device)

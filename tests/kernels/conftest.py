"""The interpreter computes with NumPy, which warns where a GPU silently overflows to infinity."""

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _silent_overflow() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield

"""The interpreter computes with NumPy, which warns where a GPU silently gives infinities and NaN."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _silent_numpy() -> Iterator[None]:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
        yield

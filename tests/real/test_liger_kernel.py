"""The public names of liger-kernel in its wheel: each has an answer, and a line in docs/coming-from.md."""

import pytest

from tests.liger_kernel import NAMES, VERSION, public_names
from tests.real.packages import pip_package

pytestmark = pytest.mark.real


def test_the_list_has_the_names_of_the_wheel() -> None:
    """tests/test_foreign_names.py checks each name of the list."""
    package = pip_package("liger-kernel", VERSION, "") / "liger_kernel"
    assert sorted(public_names(package)) == NAMES.read_text(encoding="utf-8").split()

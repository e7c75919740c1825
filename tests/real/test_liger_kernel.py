"""The list of liger-kernel's public names has those of its wheel."""

import pytest

from tests.liger_kernel import NAMES, VERSION, public_names
from tests.real.packages import pip_package

pytestmark = pytest.mark.real


def test_the_list_of_names_is_that_of_the_wheel() -> None:
    package = pip_package("liger-kernel", VERSION, "liger_kernel/") / "liger_kernel"
    assert sorted(public_names(package)) == NAMES.read_text().split()

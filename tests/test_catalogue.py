"""The catalogue of layers by need is current, and the shapes in its examples are right."""

import inspect
import re
import sys

import pytest
from torch import Tensor

from ligerzoo import layers
from tests.test_docs import blocks
from tools import catalogue

COMMENT = re.compile(r"^(\w+)(?:, \w+)* = .*  # (\([\d, ]*\))$", re.MULTILINE)


def test_page_and_docstring_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["catalogue", "--check"])
    catalogue.main()


def test_shapes_of_the_examples() -> None:
    names: dict[str, object] = {}
    shapes = 0
    for code in blocks(catalogue.PAGE, "python"):
        exec(code, names)  # noqa: S102
        for name, shape in COMMENT.findall(code):
            value = names[name]
            assert isinstance(value, Tensor), code
            assert str(tuple(value.shape)) == shape, code
            shapes += 1
    assert shapes >= 80


def test_every_layer_is_in_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    _, sections = catalogue.read_table()
    monkeypatch.setattr(layers, "__all__", [*layers.__all__, "NewLayer"])
    with pytest.raises(SystemExit, match="NewLayer: expected an entry"):
        catalogue.check(sections)


def test_help_begins_with_the_catalogue() -> None:
    listed = re.findall(r"^    (\w+) {3,}\S", inspect.getdoc(layers) or "", re.MULTILINE)
    assert sorted(listed) == sorted(layers.__all__)


def test_arguments_of_a_docstring() -> None:
    doc = "Does it.\n\nArgs:\n    size: H,\n        a number.\n    scale: factor.\n\nRaises:\n    ValueError: no."
    assert catalogue.arguments(doc) == {"size": "H, a number.", "scale": "factor."}
    assert catalogue.first_sentence("One (Vaswani et al. 2017). Two.") == "One (Vaswani et al. 2017)."


def test_imports_of_an_example() -> None:
    code = "y = UngatedMLP(64, 128, activation=XIELU())(x)\nz = glu(y, y)"
    assert catalogue.imports(code) == [
        "from ligerzoo.kernels import glu",
        "from ligerzoo.layers import XIELU, UngatedMLP",
    ]

"""The figures of `python -m tools.structure`."""

import ast
from pathlib import Path

import pytest

from tools import structure
from tools.structure import Module


def package(**sources: str) -> dict[str, Module]:
    root = structure.ROOT / "ligerzoo"
    return {
        f"ligerzoo.{name}": Module(f"ligerzoo.{name}", root / f"{name}.py", source, ast.parse(source))
        for name, source in sources.items()
    }


def test_circles_include_imports_within_functions() -> None:
    found = structure.circles(
        package(
            a="from ligerzoo.b import f", b="def f():\n    from ligerzoo import c", c="import ligerzoo.a",
            d="from ligerzoo.a import f",
        )
    )  # fmt: skip
    assert found == [["ligerzoo.a", "ligerzoo.b", "ligerzoo.c"]]


def test_imports_within_functions_are_lazy() -> None:
    source = "import ligerzoo.files\nif x:\n    from ligerzoo.hub import load\ndef f():\n    import ligerzoo.cli\n"
    found = [("ligerzoo.files", 1, False), ("ligerzoo.hub.load", 3, False), ("ligerzoo.cli", 5, True)]
    assert list(structure.imports(ast.parse(source))) == found


def test_public_names_are_repeated_only_at_the_top_level_of_modules() -> None:
    found = structure.repeated_names(
        package(a="def f(): ...\nclass C: ...\ndef _g(): ...", b="class C:\n    def f(self): ...\ndef _g(): ...")
    )
    assert found == {"C": ["ligerzoo.a", "ligerzoo.b"]}


def test_lines_of_checks() -> None:
    source = "def f(x):\n    if x:\n        raise ValueError\n    check_size(x)\n    y = check_size(x)\n    return y\n"
    assert structure.check_lines(package(a=source)["ligerzoo.a"]) == 3


def test_a_figure_above_its_limit_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits, modules = tmp_path / "structure.toml", package(a="x = 1\ny = 2")
    monkeypatch.setattr(structure, "LIMITS", limits)
    for lines, expected in ((2, []), (1, [["figures", " lines"]])):
        limits.write_text(
            f'[figures]\nmodules = 1\n"lines" = {lines}\n["lines per package"]\nligerzoo = 100\n[repeated]\n'
        )
        assert [line.split(":")[:2] for line in structure.exceeded(modules)] == expected


def test_limits_are_lowered_and_never_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = tmp_path / "structure.toml"
    limits.write_text('[figures]\n"lines" = 9\nAny = 0\n["lines per package"]\nligerzoo = 100\n[repeated]\n')
    monkeypatch.setattr(structure, "LIMITS", limits)
    structure.lower_limits(package(a="from typing import Any\nx: Any = 1"))
    assert structure.limits()["figures"] == {"lines": 2, "Any": 0}
    assert structure.limits()["lines per package"] == {"ligerzoo": 2}


def test_exceeded_limits_are_raised_and_others_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = tmp_path / "structure.toml"
    limits.write_text('[figures]\n"lines" = 1\nAny = 9\n["lines per package"]\nother = 5\n[repeated]\n')
    monkeypatch.setattr(structure, "LIMITS", limits)
    monkeypatch.setattr(structure, "modules", lambda: package(a="from typing import Any\nx: Any = 1"))
    monkeypatch.setattr("sys.argv", ["structure", "--raise"])
    assert structure.main() == 0
    assert "figures: lines: 2, limit 1\n" in capsys.readouterr().out
    assert structure.limits()["figures"] == {"modules": 1, "lines": 2, "Any": 9}
    assert structure.limits()["lines per package"] == {"ligerzoo": 2, "other": 5}
    assert structure.exceeded(structure.modules()) == []

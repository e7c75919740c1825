"""The bounds of pyproject.toml: requirements of both ends, raising them, and the line of README.md."""

import sys
from pathlib import Path

import pytest

from tools.raise_bounds import installed, raise_bounds
from tools.requirements import PYPROJECT, bounds_of, readme_line, requirements, with_newest

SAMPLE = """\
[project]
dependencies = ["torch>=2.11,<2.16", "triton>=3.6,<3.10; sys_platform == 'linux'", "numpy>=2.0"]
[project.optional-dependencies]
clients = ["transformers>=5.17,<5.25", "lm-eval>=0.4.13,<0.5"]
test = ["transformers>=5.17,<5.25", "pytest>=8"]
"""


def test_the_newest_have_no_upper_bounds() -> None:
    assert list(requirements(SAMPLE, ["clients"], "newest")) == [
        "torch>=2.11", "triton>=3.6; sys_platform == 'linux'", "numpy>=2.0", "transformers>=5.17", "lm-eval>=0.4.13"
    ]  # fmt: skip


def test_the_oldest_are_at_the_lower_bounds_of_bounded_packages() -> None:
    assert list(requirements(SAMPLE, ["test"], "oldest")) == [
        "torch==2.11.*", "triton==3.6.*; sys_platform == 'linux'", "numpy>=2.0", "transformers==5.17.*", "pytest>=8"
    ]  # fmt: skip


def test_bounds_are_raised_in_every_list_and_in_the_readme(tmp_path: Path) -> None:
    pyproject, readme = tmp_path / "pyproject.toml", tmp_path / "README.md"
    pyproject.write_text(SAMPLE)
    line = "Tested with torch 2.11 to 2.15, triton 3.6 to 3.9, transformers 5.17 to 5.24 and lm-eval 0.4.13."
    assert readme_line(SAMPLE) == line
    readme.write_text(f"# A package\n\n{line}\n")
    raise_bounds(
        {"torch": "2.16.1+cpu", "triton": "4.0.0", "transformers": "5.25.0", "lm-eval": "0.4.14"}, pyproject, readme
    )
    assert pyproject.read_text() == (
        SAMPLE.replace("<2.16", "<2.17").replace("<3.10", "<4.1").replace("<5.25", "<5.26")
    )
    raised = "Tested with torch 2.11 to 2.16, triton 3.6 to 4.0, transformers 5.17 to 5.25 and lm-eval 0.4.13."
    assert readme.read_text() == f"# A package\n\n{raised}\n"


def test_bounds_are_not_lowered() -> None:
    versions = {"torch": "2.13.0", "triton": "3.7.1", "transformers": "5.23.0", "lm-eval": "0.4.13"}
    assert with_newest(SAMPLE, versions) == SAMPLE


def test_the_readme_names_the_readme_line() -> None:
    readme = PYPROJECT.with_name("README.md").read_text(encoding="utf-8")
    assert readme_line(PYPROJECT.read_text(encoding="utf-8")) in readme.splitlines()


def test_libraries_of_clients_have_upper_bounds() -> None:
    names = {"torch", "triton", "torchao", "transformers", "accelerate", "peft", "trl", "lm-eval"}
    assert set(bounds_of(PYPROJECT.read_text(encoding="utf-8"))) == names


def test_one_range_for_each_package() -> None:
    with pytest.raises(ValueError, match=r"transformers: >=5.17,<5.25 and >=5.18,<5.25; expected one range"):
        bounds_of(SAMPLE + 'other = ["transformers>=5.18,<5.25"]')


def test_versions_of_an_environment() -> None:
    assert installed(Path(sys.prefix), ["pytest"]) == {"pytest": pytest.__version__}

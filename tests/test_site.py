"""The sources of the documentation site. `make docs` builds it, and checks the links and the names of the result."""

import ast
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from ligerzoo.train.methods import METHODS
from ligerzoo.train.options import options_of
from tests.test_docs import PAGES, blocks
from tools import site

INDEX = (site.ROOT / "docs" / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["layers", "kernels", "losses", "models", "generate", "train.data"])
def test_the_reference_has_every_public_name(package: str) -> None:
    page = site.package_page(f"ligerzoo.{package}")
    entries = re.findall(rf"^\.\. auto\w+:: ligerzoo\.{package}\.(\w+)$", page, re.MULTILINE)
    assert sorted(entries) == sorted(import_module(f"ligerzoo.{package}").__all__)


def test_the_reference_has_every_package_with_public_names() -> None:
    sources = (site.ROOT / "ligerzoo").rglob("__init__.py")
    found = {
        path.parent.relative_to(site.ROOT) for path in sources if "\n__all__ = " in path.read_text(encoding="utf-8")
    }
    others = {"ligerzoo.cli", "ligerzoo.integrations.kernels"}  # ligerzoo.integrations exports the latter's names
    assert {".".join(path.parts) for path in found} - others <= set(site.PACKAGES)


def test_the_reference_has_what_the_pages_use() -> None:
    pytest.importorskip("transformers")
    missing = set()
    for page in PAGES:
        for node in ast.walk(ast.parse("\n".join(blocks(page, "python")))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("ligerzoo"):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                missing |= {name for name in names if name not in site.public_names() and not is_module(name)}
    assert not missing, "add them to MORE in tools/site.py"


def is_module(name: str) -> bool:
    return name in site.PACKAGES or name == "ligerzoo.losses"


def test_the_options_of_every_method_are_on_their_page() -> None:
    page = site.train_page()
    options = {one.flag for method in METHODS.values() for one in options_of(method.options)} - {"--method"}
    assert set(re.findall(r"^\| `(--[\w-]+)` \|", page, re.MULTILINE)) == options


def test_every_page_is_in_one_shelf() -> None:
    shelved = [target for _, target in site.SHELVED.findall(INDEX)]
    pages = {page.stem for page in (site.ROOT / "docs").glob("*.md")} - {"index"}
    assert sorted(shelved) == sorted({*pages, "../CONTRIBUTING", "../CHANGELOG"})


def test_the_front_page_has_a_menu_of_each_shelf() -> None:
    page = site.front_page("# Title\n\n[readme](../README.md)\n\n## Use\n\n| [Serve it](serving.md) | text |\n")
    assert "[readme](README.md)" in page
    assert "| [Serve it](docs/serving.md) | text |" in page
    assert "```{toctree}\n:hidden:\n:caption: Use\n\nServe it <docs/serving>\n```" in page


def test_notebooks_have_pages(tmp_path: Path) -> None:
    code = {"cell_type": "code", "source": ["x = 1\n", "print(x)"], "outputs": [{"name": "stdout", "text": ["1\n"]}]}
    notebook = tmp_path / "one.ipynb"
    notebook.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["# One"]}, code]}))
    page = site.notebook_page(notebook)
    assert page.startswith("# One\n\n```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```\n")


def test_docstrings_become_restructured_text() -> None:
    docstring = """Computes `a(x)*2` of a_b_ and *args, see docs/data.md.

    y = a(x)  ->  z

Options:
- one
- two

Args:
    hidden: H.
    mask: one of
        - `None`;
        - a mask.
"""
    text = "\n".join(site.restructured(docstring.splitlines()))
    assert "Computes ``a(x)*2`` of a_b\\_ and \\*args, see :doc:`docs/data.md </docs/data>`." in text
    assert ".. code-block:: text\n    \n        y = a(x)  ->  z\n" in text
    assert "Options:\n\n- one\n- two\n" in text
    assert "    hidden: \\H.\n    mask: one of\n\n        - :py:obj:`None`;\n        - a mask.\n" in text


def test_signatures_are_readable() -> None:
    signature = "(x: Annotated[int, integer(0, unit=' of MiB')] | None, y: ~typing.Any)"
    assert site.readable_signature(None, "function", "f", None, None, signature, None) == (
        "(x: int | None, y: Any)", None
    )  # fmt: skip


NAMES = (
    "AutoModel",
    "AutoModelForEmbedding",
    "AutoModelForMaskedLM",
    "AutoModelForTokenClassification",
    "Tokenizer",
    "from_transformers",
)


def test_problems_of_a_built_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "PACKAGES", {"ligerzoo": "Loading"})
    monkeypatch.setattr(site, "MORE", {})
    site.entries.cache_clear()
    (tmp_path / "reference").mkdir()
    entries = "".join(f'<dt id="ligerzoo.{name}">' for name in NAMES)
    (tmp_path / "reference" / "ligerzoo.html").write_text(f'{entries}<a href="../index.html#no">')
    (tmp_path / "index.html").write_text('<a href="reference/ligerzoo.html#ligerzoo.Tokenizer"><img src="missing.svg">')
    found = site.problems(tmp_path)
    assert "reference/ligerzoo.html links to ../index.html#no" in found
    assert "index.html links to missing.svg" in found
    assert "ligerzoo.Processor is not in the reference" in found
    assert "the search has no index" in found
    assert len(found) == 5
    site.entries.cache_clear()

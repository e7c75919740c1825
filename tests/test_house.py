"""The house keeps its shape: imports point one way, nothing undeclared comes in, and the front door opens quickly."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ligerzoo

ROOT = Path(__file__).parent.parent
FILES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.glob("ligerzoo/**/*.py"))}

# What each part may import: at once, and later, which is inside a function or for the type checker alone.
ARROWS = {
    "errors": ("", ""),
    "atomic": ("errors", ""),
    "checkpoint": ("errors atomic", ""),
    "template_worker": ("", ""),
    "chat_template": ("errors", ""),
    "text_stream": ("", ""),
    "tokenizer_limits": ("errors", ""),
    "tokenizer": ("errors atomic chat_template text_stream tokenizer_limits", "hub"),
    "images": ("errors", ""),
    "processor": ("errors atomic chat_template checkpoint tokenizer images", "hub"),
    "conversation": ("errors tokenizer images processor", ""),
    "drawings": ("errors images", ""),
    "kernels": ("errors", ""),
    "layers": ("errors kernels", ""),
    "generate": ("errors layers", ""),
    "models": ("errors kernels layers", "generate hub"),
    "convert": ("errors checkpoint models", ""),
    "hub": ("errors atomic checkpoint layers models convert", "processor"),
    "info": ("errors atomic checkpoint tokenizer models convert hub", ""),
    "demo": ("errors checkpoint tokenizer generate layers models convert hub ligerzoo", ""),
    "demo_vision": ("errors checkpoint demo drawings processor generate models ligerzoo", ""),
    "cli": (
        "errors checkpoint tokenizer processor conversation generate models convert hub info demo demo_vision train "
        "ligerzoo",
        "",
    ),
    "__main__": ("cli", ""),
    "losses": ("errors kernels", ""),
    "parallel": ("errors kernels layers models", ""),
    "train": ("errors models hub losses", ""),
    "ligerzoo": ("", "hub tokenizer processor"),  # the front door itself
}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORT_NAMES = {"pillow": "PIL"}


def declared(requirements: list[str]) -> set[str]:
    names = {requirement.split(">=")[0] for requirement in requirements}
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


REQUIRED = declared(PROJECT["dependencies"]) | set(sys.stdlib_module_names)
OPTIONAL = declared([r for extra in ("vision", "plot") for r in PROJECT["optional-dependencies"][extra]])


class Import(NamedTuple):
    name: str  # dotted, down to what is imported: "ligerzoo.layers.Attention"
    line: int
    later: bool


def imports(node: ast.AST, later: bool = False) -> Iterator[Import]:
    match node:
        case ast.Import():
            yield from (Import(alias.name, node.lineno, later) for alias in node.names)
        case ast.ImportFrom():
            module = "." * node.level + (node.module or "")
            yield from (Import(f"{module}.{alias.name}", node.lineno, later) for alias in node.names)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            later = True
    for child in ast.iter_child_nodes(node):
        yield from imports(child, later)


def part(dotted: str) -> str:
    """The part of the package that a dotted name belongs to; what has no place in ARROWS is of the front door."""
    name = dotted.split(".")[1] if "." in dotted else ""
    return name if name in ARROWS else "ligerzoo"


def complaints(file: str, source: str) -> list[str]:
    here = Path(file).with_suffix("").parts[1].replace("__init__", "ligerzoo")
    if here not in ARROWS:
        return [f"{file}: {here} has no place in ARROWS"]
    at_once, later = (set(parts.split()) for parts in ARROWS[here])
    found = []
    for name, line, is_later in imports(ast.parse(source)):
        root = name.split(".")[0]
        if root == "ligerzoo":
            allowed = part(name) in {here} | at_once | (later if is_later else set())
        else:
            allowed = root in (REQUIRED | OPTIONAL if is_later else REQUIRED)
        if not allowed:
            found.append(f"{file}:{line}: {here} may not import {name}" + ("" if is_later else " at once"))
    return found


def test_imports_point_one_way() -> None:
    assert FILES
    found = [complaint for file, source in FILES.items() for complaint in complaints(file, source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "file, source",
    [
        ("ligerzoo/kernels/rope.py", "from ligerzoo.layers import RMSNorm"),
        ("ligerzoo/layers/norm.py", "import ligerzoo.models.llama"),
        ("ligerzoo/layers/norm.py", "def f():\n    from ligerzoo import hub"),
        ("ligerzoo/models/llama.py", "from ligerzoo import hub"),
        ("ligerzoo/models/llama.py", "from ligerzoo import AutoModel"),
        ("ligerzoo/models/llama.py", "def f():\n    import ligerzoo"),
        ("ligerzoo/models/llama.py", "from ..layers import RMSNorm"),
        ("ligerzoo/errors.py", "import ligerzoo.atomic"),
        ("ligerzoo/hub.py", "def f():\n    import transformers"),
        ("ligerzoo/nowhere.py", "import torch"),
        ("ligerzoo/cli.py", "import PIL.Image"),
        ("ligerzoo/__init__.py", "from ligerzoo.hub import AutoModel"),
    ],
)
def test_a_turned_arrow_is_seen(file: str, source: str) -> None:
    assert len(complaints(file, source)) == 1


@pytest.mark.parametrize(
    "file, source",
    [
        ("ligerzoo/layers/norm.py", "import math, torch\nfrom ligerzoo.kernels.rms_norm import rms_norm"),
        ("ligerzoo/models/llama.py", "def f():\n    from ligerzoo import hub\n    hub.load()"),
        ("ligerzoo/models/llama.py", "if TYPE_CHECKING:\n    from ligerzoo.hub import Origin"),
        ("ligerzoo/cli.py", "def f():\n    from ligerzoo import AutoModel\n    import PIL.Image"),
    ],
)
def test_a_right_arrow_is_let_through(file: str, source: str) -> None:
    assert complaints(file, source) == []


def fresh_interpreter(script: str) -> Any:
    """What `script` prints as JSON when a new Python runs it."""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


def modules_brought_in(*names: str) -> set[str]:
    """The top-level modules that importing these brings, beyond what torch itself brings."""
    script = "import json, sys, torch; before = set(sys.modules)\n"
    script += "".join(f"import {name}\n" for name in names)
    script += "print(json.dumps(sorted(set(sys.modules) - before)))"
    return {name.split(".")[0] for name in fresh_interpreter(script)}


def test_the_front_door_is_light() -> None:
    heavy = {"transformers", "triton", "huggingface_hub", "tokenizers", "jinja2"}
    assert modules_brought_in("ligerzoo") & heavy == set()


def test_triton_waits_for_a_kernel() -> None:
    files = [file for file in FILES if file.startswith(("ligerzoo/kernels/", "ligerzoo/layers/", "ligerzoo/models/"))]
    assert files
    names = (file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files)
    assert "triton" not in modules_brought_in(*names)


def test_the_front_door_opens_quickly() -> None:
    script = "import time, torch; start = time.perf_counter(); import ligerzoo; print(time.perf_counter() - start)"
    seconds = []
    for _attempt in range(4):  # the first may find cold disks, and any may find a busy machine
        seconds.append(fresh_interpreter(script))
        if seconds[-1] <= 0.3:
            return
    pytest.fail(f"import ligerzoo takes {seconds} s more than import torch")


def test_the_version_is_the_package_s() -> None:
    assert ligerzoo.__version__ == PROJECT["version"]

"""Imports point one way, undeclared packages stay out, and `import ligerzoo` is fast."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ligerzoo
from ligerzoo.models.registry import ARCHITECTURES
from tools.structure import Import, imports

ROOT = Path(__file__).parent.parent
FILES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.glob("ligerzoo/**/*.py"))}

# What each part imports: when it is itself imported, and lazily (within a function, or for type checkers alone). The
# table is exact: an import that is not listed fails, and so does an entry without an import. "ligerzoo" is __init__.py.
ARROWS = {
    "errors": ("", ""),
    "checks": ("errors", ""),
    "foreign_names": ("checks", ""),
    "arguments": ("checks errors foreign_names", ""),
    "own_code": ("errors", ""),
    "exports": ("foreign_names", ""),
    "tensor_checks": ("checks errors foreign_names", ""),
    "entries": ("checks errors", ""),
    "device": ("errors", ""),
    "terminal": ("", ""),
    "dtensors": ("", ""),
    "optimizer_table": ("errors", ""),
    "mesh_sizes": ("errors", ""),
    "training_setting": ("checks mesh_sizes optimizer_table", ""),
    "token_parts": ("", ""),
    "files": ("checks dtensors entries errors", ""),
    "text": ("checks entries errors files", ""),
    "vision": ("checks entries errors files text", ""),
    "kernels": ("checks errors exports foreign_names tensor_checks", ""),
    "layers": ("checks device errors exports kernels tensor_checks", ""),
    "losses": ("checks errors exports foreign_names kernels tensor_checks token_parts", ""),
    "train": (
        "adapters arguments checks convert device dtensors encoding entries errors exports files generate hub kernels "
        "layers ligerzoo losses memory mesh_sizes models optimizer_table own_code parallel tensor_checks terminal text "
        "training_setting vision",
        "",
    ),
    "parallel": ("checks convert device dtensors errors files hub kernels layers mesh_sizes models token_parts", ""),
    "models": ("checks device dtensors errors exports kernels layers tensor_checks", "convert generate text"),
    "convert": ("checks dtensors entries errors files layers models", ""),
    "hub": ("checks convert device dtensors entries errors exports files kernels models", ""),
    "encoding": ("checks device errors files models tensor_checks text", ""),
    "adapters": ("checks convert dtensors entries errors exports files hub layers models tensor_checks", ""),
    "sampling_options": ("checks errors", ""),
    "generate": (
        "checks device dtensors entries errors exports kernels layers models sampling_options tensor_checks",
        "",
    ),
    "memory": (
        "adapters checks dtensors errors exports kernels layers mesh_sizes models optimizer_table training_setting",
        "parallel",
    ),
    "info": ("convert errors files layers memory models optimizer_table text", ""),
    "integrations": (
        "checks convert dtensors errors exports foreign_names hub kernels layers ligerzoo mesh_sizes models parallel "
        "tensor_checks train",
        "",
    ),
    "doctor": ("kernels layers models train", ""),
    "demo": ("errors files generate models terminal text vision", "layers"),
    "serve": ("checks encoding entries errors generate models sampling_options text", ""),
    "cli": (
        "arguments checks errors foreign_names ligerzoo own_code sampling_options train training_setting",
        "adapters convert demo device doctor files generate hub info integrations models serve text vision",
    ),
    "__main__": ("cli", ""),
    "ligerzoo": ("exports", "hub text vision"),
}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORT_NAMES = {"pillow": "PIL", "pyyaml": "yaml"}


def declared(requirements: list[str]) -> set[str]:
    names = {requirement.split(">=")[0] for requirement in requirements}
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


REQUIRED = declared(PROJECT["dependencies"]) | set(sys.stdlib_module_names)
EXTRAS = {name: declared(requirements) for name, requirements in PROJECT["optional-dependencies"].items()}
CLIENTS = {
    "integrations": EXTRAS["integrations"] | EXTRAS["nemo"] | EXTRAS["torchtitan"],
    "serve": EXTRAS["serve"],
}
OPTIONAL = set().union(*(EXTRAS[name] for name in ("vision", "low-bit", "tracking", "data", "grammar")))


@cache
def imports_of(source: str) -> tuple[Import, ...]:
    return tuple(imports(ast.parse(source)))


def part(dotted: str) -> str:
    """Returns the part of the package that a dotted name belongs to; other names belong to `__init__.py`."""
    name = dotted.split(".")[1] if "." in dotted else ""
    return name if name in ARROWS else "ligerzoo"


def part_of_file(file: str) -> str:
    return Path(file).with_suffix("").parts[1].replace("__init__", "ligerzoo")


@cache
def complaints_of(file: str, source: str) -> tuple[list[str], set[tuple[str, str, bool]]]:
    """Returns every import of a file that is not allowed, and the arrows that its imports need."""
    found, used = [], set()
    importer = part_of_file(file)
    if importer not in ARROWS:
        return [f"{file}: {importer} is missing in ARROWS"], used
    eager, lazy = (set(parts.split()) for parts in ARROWS[importer])
    for name, line, is_lazy in imports_of(source):
        root = name.split(".")[0]
        if root == "ligerzoo":
            used.add((importer, part(name), is_lazy))
            allowed = part(name) in {importer} | eager | (lazy if is_lazy else set())
        else:
            clients = CLIENTS.get(importer, set())
            allowed = root in (REQUIRED | clients | (OPTIONAL if is_lazy else set()))
        if not allowed:
            found.append(f"{file}:{line}: {importer} may not import {name}" + ("" if is_lazy else " eagerly"))
    return found, used


def complaints(files: Mapping[str, str]) -> list[str]:
    """Returns every import that is not allowed, and every allowed arrow that no import needs."""
    each = [complaints_of(file, source) for file, source in files.items()]
    found = [complaint for complaints, _ in each for complaint in complaints]
    used = set().union(*(arrows for _, arrows in each))
    for importer, arrows in ARROWS.items():
        for parts, is_lazy in zip(arrows, (False, True), strict=True):
            unused = [part for part in parts.split() if (importer, part, is_lazy) not in used]
            found += [f"ARROWS: {importer} does not import {part}" + (" lazily" if is_lazy else "") for part in unused]
    return found


def test_imports_point_one_way() -> None:
    found = complaints(FILES)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("imported", sorted(ARROWS))
def test_every_reversed_arrow_fails(imported: str) -> None:
    """Adds a file with an import of `imported` to every part that may not import it."""
    for other in ARROWS:
        if other in (imported, "ligerzoo") or imported == "ligerzoo":
            continue
        for is_lazy in (False, True):
            eager, lazy = (parts.split() for parts in ARROWS[other])
            if imported in eager or (is_lazy and imported in lazy):
                continue
            statement = f"import ligerzoo.{imported}"
            source = f"def f():\n    {statement}\n" if is_lazy else f"{statement}\n"
            assert len(complaints({**FILES, f"ligerzoo/{other}/added.py": source})) == 1, (other, imported, is_lazy)


@pytest.mark.parametrize(
    "file, source",
    [
        ("ligerzoo/models/llama.py", "from ..layers import RMSNorm"),
        ("ligerzoo/hub.py", "def f():\n    import transformers"),
        ("ligerzoo/unlisted.py", "import torch"),
        ("ligerzoo/cli/generate.py", "import PIL.Image"),
        ("ligerzoo/__init__.py", "from ligerzoo.hub import AutoModel"),
    ],
)
def test_a_forbidden_import_fails(file: str, source: str) -> None:
    assert len(complaints({**FILES, file: FILES.get(file, "") + "\n" + source})) == 1


def test_an_unused_arrow_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARROWS, "kernels", (ARROWS["kernels"][0] + " files", "hub"))
    assert complaints(FILES) == ["ARROWS: kernels does not import files", "ARROWS: kernels does not import hub lazily"]


def fresh_interpreter(script: str) -> Any:
    """Returns what `script` prints as JSON in a new Python process."""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


def imported_modules(*names: str) -> set[str]:
    """Returns the top-level modules that importing these imports, except those that torch imports."""
    script = "import json, sys, torch; before = set(sys.modules)\n"
    script += "".join(f"import {name}\n" for name in names)
    script += "print(json.dumps(sorted(set(sys.modules) - before)))"
    return {name.split(".")[0] for name in fresh_interpreter(script)}


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = {"transformers", "triton", "huggingface_hub", "tokenizers", "jinja2"}
    assert imported_modules("ligerzoo") & heavy == set()


SAVING = """
import json, sys
from pathlib import Path
from tempfile import TemporaryDirectory
from ligerzoo.models import Apertus, ApertusConfig

sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
with TemporaryDirectory() as directory:
    Apertus(ApertusConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=4)).save_pretrained(directory)
print(json.dumps(sorted(name for name in sys.modules if name.startswith(("ligerzoo.convert.", "ligerzoo.models.")))))
"""


def test_saving_a_model_imports_only_its_converter() -> None:
    imported = set(fresh_interpreter(SAVING))
    names = (
        "architecture", "classifier", "embedding", "embedding_settings", "families", "fields", "layout",
        "registration", "stored_tensors", "tasks", "tensor_slices",
    )  # fmt: skip
    shared = {f"ligerzoo.convert.{name}" for name in names}
    assert {name for name in imported if "convert" in name} == {*shared, "ligerzoo.convert.apertus"}
    assert imported & {f"ligerzoo.models.{name}" for name in ARCHITECTURES} == {
        "ligerzoo.models.apertus", "ligerzoo.models.llama"
    }  # fmt: skip


def test_triton_is_imported_at_the_first_launch_only() -> None:
    files = [file for file in FILES if file.startswith(("ligerzoo/kernels/", "ligerzoo/layers/", "ligerzoo/models/"))]
    assert files
    names = (file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files)
    assert "triton" not in imported_modules(*names)


def test_importing_the_package_is_fast() -> None:
    """By the time of the processor, which other work on the machine does not change much."""
    script = "import time, torch; start = time.process_time(); import ligerzoo; print(time.process_time() - start)"
    found: list[float] = []
    while not found or (found[-1] > 0.3 and len(found) < 3):
        found.append(fresh_interpreter(script))
    assert min(found) <= 0.3, f"import ligerzoo takes {found} s more than import torch"


def test_the_version_is_the_package_s() -> None:
    assert ligerzoo.__version__ == PROJECT["version"]

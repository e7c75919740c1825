"""Writes the package's kernels as a repository of the hub, which `kernels` and transformers' `use_kernels` load.

python -m tools.hub_kernels DIR    # writes DIR/build/torch-universal

The repository has copies of the files that its layers need, with relative imports and ops of another namespace. So it
needs neither ligerzoo nor a compiler, and both can be imported together.
"""

import ast
import json
import re
import sys
from pathlib import Path

from ligerzoo import __version__

ROOT = Path(__file__).parent.parent
NEEDED = ("ligerzoo.kernels.rms_norm", "ligerzoo.kernels.rope")

LAYERS = '''"""Layers without state, whose forwards `kernels` gives to modules and functions of transformers."""

from torch import Tensor, nn

from .code.kernels.rms_norm import rms_norm
from .code.kernels.rope import rope


class RMSNorm(nn.Module):
    """RMSNorm of Llama, Qwen and others: `RMSNorm` of transformers' mapping."""

    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def apply_rotary_transformers(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by halves: `rotary_pos_emb` of transformers' mapping."""
    cos, sin = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
    if unsqueeze_dim == 2:
        return rope(q, k, cos, sin)
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


apply_rotary_transformers.can_torch_compile = True
'''


def write(directory: Path) -> None:
    """Writes the repository into a directory, which may exist."""
    package = directory / "build" / "torch-universal"
    for module, file in needed_files().items():
        target = package.joinpath("code", *module.split(".")[1:]).with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(relocated(module, file.read_text(encoding="utf-8")), encoding="utf-8")
    for folder in {file.parent for file in package.rglob("*.py")}:
        (folder / "__init__.py").touch()
    (package / "code" / "__init__.py").touch()
    (package / "__init__.py").write_text("from . import layers\n\n__all__ = ['layers']\n", encoding="utf-8")
    (package / "layers.py").write_text(LAYERS, encoding="utf-8")
    entries = {"id": f"_ligerzoo_{re.sub(r'[^0-9a-z]', '_', __version__)}", "name": "ligerzoo", "version": 1}
    entries |= {"license": "BSD-2-Clause", "python-depends": [], "backend": {"type": "cpu"}}
    (package / "metadata.json").write_text(json.dumps(entries, indent=2), encoding="utf-8")


def needed_files() -> dict[str, Path]:
    """Returns the files of the modules that the layers import, directly or not, but for packages' `__init__`."""
    found: dict[str, Path] = {}
    rest = [*NEEDED]
    while rest:
        module = rest.pop()
        file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        if module not in found and file.exists():
            found[module] = file
            rest += imported(file.read_text(encoding="utf-8"))
    return found


def imported(source: str) -> list[str]:
    """Returns the names of modules of ligerzoo that a module imports, and of what it imports from them."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    own = [node for node in nodes if (node.module or "").startswith("ligerzoo")]
    return [name for node in own for name in (node.module or "", *(f"{node.module}.{a.name}" for a in node.names))]


def relocated(module: str, source: str) -> str:
    """Returns a module with relative imports, whose ops have another namespace."""
    dots = "." * module.count(".")
    source = re.sub(r"^(\s*)from ligerzoo\.([\w.]+) import", rf"\1from {dots}\2 import", source, flags=re.MULTILINE)
    return source.replace('Library("ligerzoo", "DEF")', 'Library("ligerzoo_hub", "DEF")')


if __name__ == "__main__":
    write(Path(sys.argv[1]))

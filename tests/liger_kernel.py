"""The public names of liger-kernel, read from its source."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

VERSION = "0.8.5"
NAMES = Path(__file__).with_suffix(".txt")
"""The names of this version, one a line."""


def public_names(package: Path) -> set[str]:
    """Returns the public classes and functions of a directory with liger_kernel's files.

    They are the names that packages export, and in other files those that begin with Liger, liger or apply. Left out
    are launchers of kernels (`..._forward`, `..._backward`) and the registry of implementations.
    """
    found: set[str] = set()
    for path in package.rglob("*.py"):
        part = path.relative_to(package).parts
        if part[:2] == ("ops", "backends") or part[0] in ("backends", "testing") or part[-2:-1] == ("model",):
            continue
        if part[0] == "ops" and path != package / "ops" / "__init__.py":
            continue
        exports = path.name in ("__init__.py", "functional.py")
        names = set(defined(ast.parse(path.read_text(encoding="utf-8")).body, with_imports=path.name == "__init__.py"))
        found |= {name for name in names if exports or name.startswith(("Liger", "liger", "apply_liger", "AutoLiger"))}
    return {
        name for name in found
        if not name.startswith("_") and (name.startswith("liger") or not name.endswith(("_forward", "_backward")))
    }  # fmt: skip


def defined(body: Sequence[ast.stmt], *, with_imports: bool) -> Iterator[str]:
    """Yields the classes, functions and aliases of a module, and the names that it imports from liger_kernel."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(module=module) if with_imports and module and module.startswith("liger_kernel."):
                yield from (one.name for one in node.names)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="apply")):
                yield name
            case ast.If() | ast.Try():
                yield from defined([*node.body, *node.orelse], with_imports=with_imports)

"""Measures the structure of the package, and compares it with the limits in structure.toml.

python -m tools.structure              # prints the figures; exits with 1 if one exceeds its limit
python -m tools.structure --names      # also lists repeated names, circles and the largest files
python -m tools.structure --paths      # also how many functions and files an argument passes (needs farm-studio)
python -m tools.structure --lower      # lowers the limits to today's figures
python -m tools.structure --raise      # sets the limits that are exceeded to today's figures, and prints them

A limit may only be raised on purpose: by a commit that says what the package gained for it.
"""

import argparse
import ast
import operator
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
LIMITS = Path(__file__).parent / "structure.toml"

ARGUMENTS = {
    "GatedMLP.forward": "ligerzoo/layers/mlp.py:GatedMLP.forward:x",
    "Attention.forward": "ligerzoo/layers/attention.py:Attention.forward:x",
    "hub.load": "ligerzoo/hub/loading.py:load:name_or_path",
    "SFT recipe": "ligerzoo/train/recipes/sft.py:main:options",
}
CHECK = re.compile(r"_?(check|require|refuse)(_|$)")
"""Names of functions that only check their arguments."""


class Module(NamedTuple):
    name: str
    path: Path
    text: str
    tree: ast.Module


class Import(NamedTuple):
    """An import.

    Attributes:
        name: dotted, down to what is imported: "ligerzoo.layers.Attention".
        line: its line.
        lazy: within a function, or for type checkers alone.
    """

    name: str
    line: int
    lazy: bool


def modules() -> dict[str, Module]:
    """The package's modules by name; a package's name is that of its __init__.py."""
    found = {}
    for path in sorted((ROOT / "ligerzoo").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        found[name] = Module(name, path, text, ast.parse(text))
    return found


def lines_per_package(package: Mapping[str, Module]) -> Counter[str]:
    """Lines by subpackage; modules directly under ligerzoo are counted as "ligerzoo"."""
    lines: Counter[str] = Counter()
    for module in package.values():
        folders = module.path.relative_to(ROOT / "ligerzoo").parts
        lines[folders[0] if len(folders) > 1 else "ligerzoo"] += len(module.text.splitlines())
    return lines


def imports(node: ast.AST, lazy: bool = False) -> Iterator[Import]:
    """The imports in a syntax tree."""
    match node:
        case ast.Import():
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        case ast.ImportFrom():
            module = "." * node.level + (node.module or "")
            yield from (Import(f"{module}.{alias.name}", node.lineno, lazy) for alias in node.names)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            lazy = True
    for child in ast.iter_child_nodes(node):
        yield from imports(child, lazy)


def imported_modules(module: Module, package: Mapping[str, Module]) -> set[str]:
    """The names of the modules that a module imports, anywhere in its file."""
    prefixes = (list(accumulate(name.split("."), "{}.{}".format)) for name, *_ in imports(module.tree))
    found = (next((name for name in reversed(names) if name in package), module.name) for names in prefixes)
    return {*found} - {module.name}


def circles(package: Mapping[str, Module]) -> list[list[str]]:
    """The groups of modules that import each other (strongly connected components of the imports), largest first."""
    graph = {name: imported_modules(module, package) for name, module in package.items()}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for name in graph:
        if name not in order:
            visit(name)
    return sorted(found, key=len, reverse=True)


def public_definitions(package: Mapping[str, Module]) -> dict[str, list[str]]:
    """The modules that define each public name at their top level: classes and functions."""
    found = defaultdict(list)
    for module in package.values():
        names = {
            node.name
            for node in module.tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
        }
        for name in names:
            found[name].append(module.name)
    return found


def repeated_names(package: Mapping[str, Module]) -> dict[str, list[str]]:
    """Public names that more than one module defines."""
    return {name: sorted(users) for name, users in sorted(public_definitions(package).items()) if len(users) > 1}


def _called_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def check_lines(module: Module) -> int:
    """Lines of raise statements, of conditions that only raise, and of calls of functions that only check."""
    counted: set[int] = set()
    for node in ast.walk(module.tree):
        only_raises = isinstance(node, ast.If) and not node.orelse and all(isinstance(n, ast.Raise) for n in node.body)
        checks = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and CHECK.match(_called_name(node.value.func)) is not None
        )
        if isinstance(node, ast.Raise | ast.If | ast.Expr) and (isinstance(node, ast.Raise) or only_raises or checks):
            counted.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(counted)


def figures(package: Mapping[str, Module]) -> dict[str, int]:
    """The figures that have a limit."""
    words: Counter[str] = Counter()
    for module in package.values():
        words["fmt: skip"] += module.text.count("# fmt: skip")
        for node in ast.walk(module.tree):
            name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.keyword) else None
            if name in ("Any", "isinstance", "factory_kwargs"):
                words[name] += 1
    return {
        "modules": len(package),
        "lines": sum(lines_per_package(package).values()),
        "modules in circles": sum(map(len, circles(package))),
        "repeated public names": len(repeated_names(package).keys() - limits()["repeated"].keys()),
        "lines of checks": sum(map(check_lines, package.values())),
        **{name: words[name] for name in ("isinstance", "Any", "factory_kwargs", "fmt: skip")},
    }


def limits() -> dict[str, dict[str, Any]]:
    """The tables of structure.toml."""
    return tomllib.loads(LIMITS.read_text())


def _measured(package: Mapping[str, Module]) -> dict[str, dict[str, int]]:
    return {"figures": figures(package), "lines per package": dict(lines_per_package(package))}


def exceeded(package: Mapping[str, Module]) -> list[str]:
    """One line for each figure above its limit."""
    allowed = limits()
    return [
        f"{table}: {name}: {value:,}, limit {allowed[table].get(name, 0):,}"
        for table, values in _measured(package).items()
        for name, value in values.items()
        if value > allowed[table].get(name, 0)
    ]


def lower_limits(package: Mapping[str, Module]) -> None:
    """Writes the figures that are below their limits to structure.toml."""
    _set_limits(package, operator.lt)


def raise_limits(package: Mapping[str, Module]) -> None:
    """Writes the figures that exceed their limits to structure.toml; a package without a limit gets one."""
    _set_limits(package, operator.gt)


def _set_limits(package: Mapping[str, Module], is_changed: Callable[[int, int], bool]) -> None:
    """Writes the figures to structure.toml for which `is_changed(figure, limit)`."""
    text, allowed = LIMITS.read_text(), limits()
    for table, values in _measured(package).items():
        for name, value in values.items():
            if is_changed(value, allowed[table].get(name, 0)):
                text, found = re.subn(rf'^("?{re.escape(name)}"?) = \d+$', rf"\1 = {value}", text, flags=re.MULTILINE)
                if not found:
                    text = re.sub(
                        rf'^(\["?{re.escape(table)}"?\])$', rf'\1\n"{name}" = {value}', text, flags=re.MULTILINE
                    )
    LIMITS.write_text(text)


def path_of_argument(start: str) -> str:
    """The line in which farm-studio counts the functions and files that an argument passes."""
    lines = subprocess.run(
        ["farm-studio", "walk", start, "--stops", "1600"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return next((line for line in lines if " stays; " in line), lines[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="list repeated names, circles and the largest files")
    parser.add_argument("--paths", action="store_true", help="follow arguments through the package")
    parser.add_argument("--lower", action="store_true", help="lower the limits to today's figures")
    parser.add_argument("--raise", action="store_true", dest="raises", help="raise the limits that are exceeded")
    options = parser.parse_args()
    package = modules()
    for name, value in figures(package).items():
        print(f"{name:24} {value:7,}")
    for name, value in sorted(lines_per_package(package).items()):
        print(f"  {name:22} {value:7,}")
    if options.names:
        for name, users in repeated_names(package).items():
            print(f"repeated: {name}: {', '.join(users)}")
        for circle in circles(package):
            print(f"circle of {len(circle)}: {', '.join(circle)}")
        for module in sorted(package.values(), key=lambda module: -len(module.text.splitlines()))[:20]:
            print(f"{len(module.text.splitlines()):6} {module.path.relative_to(ROOT)}")
    if options.paths and shutil.which("farm-studio"):
        for name, start in ARGUMENTS.items():
            print(f"{name}: {path_of_argument(start)}")
    if options.lower:
        lower_limits(package)
    problems = exceeded(package)
    print(*problems, sep="\n")
    if options.raises and problems:
        raise_limits(package)
        print("These limits are raised to the figures. Say in the body of the commit what the package gained for it.")
        return 0
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

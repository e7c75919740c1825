"""Writes the catalogue of layers by need: docs/catalogue.md, and the docstring of ligerzoo.layers.

python -m tools.catalogue            # rewrites both
python -m tools.catalogue --check    # exits with 1 if one of them differs

tools/catalogue.toml has the needs and the examples. What a layer does and what an option means is read from the
docstrings, and which architectures have a layer from their models.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ligerzoo import kernels, layers, models
from ligerzoo.models.registry import MODEL_CLASSES

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tools" / "catalogue.toml"
PAGE = ROOT / "docs" / "catalogue.md"
PACKAGE = ROOT / "ligerzoo" / "layers" / "__init__.py"

INTRO = """# Catalogue of layers

What you need, the layer of `ligerzoo.layers` that does it, and an example. `help(ligerzoo.layers)` lists the names.
[Compose layers](composing.md) says how they fit together, and [recipes](recipes.md) how to write your own. Written by
`python -m tools.catalogue` from the docstrings.

All examples use the values of the first one, and comments show shapes:
"""

SUMMARY = """Layers to compose transformers from. Constructors take plain numbers and modules, never a config.

docs/catalogue.md has an example of each layer, docs/composing.md says how they fit together, and docs/recipes.md how to
write your own. `help(ligerzoo.layers.Attention)` lists the arguments of one.
"""

NEEDED = {name: {"head_dim": 128} for name in ("Glm4Moe", "Glm4vMoe")}
"""Fields of configs whose defaults are those of no checkpoint."""

MAX_LISTED = 6
"""Most architectures that an entry names."""

WIDTH = 120


class Entry(NamedTuple):
    """A need and what serves it.

    Attributes:
        need: a noun, the entry's heading.
        name: the public name in `ligerzoo.layers`.
        code: the example, without its imports.
        option: the argument that the need is about; None for the layer as a whole.
        text: replaces the text from the docstring.
    """

    need: str
    name: str
    code: str
    option: str | None = None
    text: str | None = None

    @property
    def heading(self) -> str:
        return self.need[0].upper() + self.need[1:]

    @property
    def shown(self) -> str:
        return f"`{self.name}({self.option}=...)`" if self.option else f"`{self.name}`"

    def description(self) -> str:
        """Returns what the layer does, or what the option means, as its docstring says."""
        return f"{self.shown}: {self.text or self._documented()}"

    def _documented(self) -> str:
        doc = inspect.getdoc(getattr(layers, self.name)) or ""
        if self.option is None:
            return first_sentence(doc)
        documented = arguments(doc).get(self.option)
        if documented is None:
            sys.exit(f"tools/catalogue.toml: {self.need}: the docstring of {self.name} has no argument {self.option}")
        return documented


class Section(NamedTuple):
    """Entries of one kind."""

    title: str
    intro: str
    entries: list[Entry]


def read_table() -> tuple[str, list[Section]]:
    """Returns the setup of all examples, and the sections."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    sections = [
        Section(one["title"], one.get("intro", ""), [Entry(**entry) for entry in one["entry"]])
        for one in table["section"]
    ]
    return table["setup"], sections


def first_sentence(doc: str) -> str:
    """Returns the first sentence of a docstring, which ends with its first line or paragraph at the latest."""
    paragraph = " ".join(doc.split("\n\n")[0].split())
    match = re.match(r"(.*?\.)(?= [A-Z]|$)", paragraph)
    return match[1] if match else paragraph


def arguments(doc: str) -> dict[str, str]:
    """Returns the descriptions in the section "Args" of a docstring."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    found = re.split(r"^    (\w+): ", section[1] if section else "", flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(found[::2], found[1::2], strict=True)}


def imports(code: str) -> list[str]:
    """Returns the lines that import the public names of an example."""
    nodes = list(ast.walk(ast.parse(code)))
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - assigned
    lines = []
    for package in (kernels, layers):
        if names := sorted(used & {*package.__all__}, key=lambda name: (not name.isupper(), name)):
            line = f"from {package.__name__} import {', '.join(names)}"
            if len(line) > WIDTH:
                line = "\n".join([f"from {package.__name__} import (", *(f"    {name}," for name in names), ")"])
            lines.append(line)
    return lines


def example(code: str) -> str:
    return "\n".join(["```python", *imports(code), "", code.strip(), "```"])


def users() -> dict[str, list[str]]:
    """Returns the architectures that have each layer, with the defaults of their configs."""
    public = {getattr(layers, name): name for name in layers.__all__ if inspect.isclass(getattr(layers, name))}
    found: dict[str, list[str]] = defaultdict(list)
    for name in MODEL_CLASSES.values():
        config = getattr(models, f"{name}Config")(**NEEDED.get(name, {}))
        model = getattr(models, name)(config, device="meta")
        kinds = {type(module) for module in model.modules()}
        for layer in {next((public[base] for base in kind.__mro__ if base in public), None) for kind in kinds} - {None}:
            found[layer].append(name)
    return found


def _users_of(entry: Entry, found: dict[str, list[str]]) -> str:
    names = found.get(entry.name, [])
    if entry.option or not names:
        return ""
    if len(names) > MAX_LISTED:
        return f" In {len(names)} architectures."
    return f" In {', '.join(f'`{name}`' for name in names)}."


def slug(heading: str) -> str:
    """Returns the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def page(setup: str, sections: list[Section]) -> str:
    """Returns docs/catalogue.md."""
    first = ["import torch", "from torch import nn", *imports(setup), "", setup.strip()]
    lines = [INTRO, "\n".join(["```python", *first, "```"]), ""]
    for section in sections:
        rows = [f"| [{entry.need}](#{slug(entry.heading)}) | {entry.shown} |" for entry in section.entries]
        lines += [f"| {section.title.lower()} | |", "|---|---|", *rows, ""]
    found = users()
    for section in sections:
        lines += [f"## {section.title}", "", *([section.intro, ""] if section.intro else [])]
        for entry in section.entries:
            lines += [f"### {entry.heading}", "", entry.description() + _users_of(entry, found), ""]
            lines += [example(entry.code), ""]
    return "\n".join(lines)


def docstring(sections: list[Section]) -> str:
    """Returns the docstring of ligerzoo.layers: each public name with its first need."""

    def lines() -> Iterator[str]:
        width = max(map(len, layers.__all__)) + 3
        for section in sections:
            named = [entry for entry in section.entries if entry.option is None]
            yield from ["", section.title, *(f"    {entry.name:{width}}{entry.need}" for entry in named)]

    return SUMMARY + "\n".join(lines()) + "\n"


def with_docstring(source: str, doc: str) -> str:
    """Returns the source of a module with another docstring."""
    end = ast.parse(source).body[0].end_lineno
    return f'"""{doc}"""\n' + "".join(source.splitlines(keepends=True)[end:])


def check(sections: list[Section]) -> None:
    """Exits if a public name is missing, or a need is there twice."""
    entries = [entry for section in sections for entry in section.entries]
    named = [entry.name for entry in entries if entry.option is None]
    if wrong := {*layers.__all__} ^ {*named}:
        sys.exit(
            f"tools/catalogue.toml: {', '.join(sorted(wrong))}: expected an entry for each of ligerzoo.layers.__all__"
        )
    anchors = [slug(entry.heading) for entry in entries]
    if repeated := {need for need in [*named, *anchors] if [*named, *anchors].count(need) > 1}:
        sys.exit(f"tools/catalogue.toml: {', '.join(sorted(repeated))}: expected one entry, or options of one name")


def main() -> None:
    setup, sections = read_table()
    check(sections)
    updated = {
        PAGE: page(setup, sections),
        PACKAGE: with_docstring(PACKAGE.read_text(encoding="utf-8"), docstring(sections)),
    }
    for path, content in updated.items():
        if "--check" not in sys.argv:
            path.write_text(content, encoding="utf-8")
        elif not path.exists() or content != path.read_text(encoding="utf-8"):
            sys.exit(f"{path.relative_to(ROOT)} is out of date. Run python -m tools.catalogue")


if __name__ == "__main__":
    main()

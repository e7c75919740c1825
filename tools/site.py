"""Builds the documentation site from README.md, docs/ and the docstrings, without a network or a GPU.

python -m tools.site [DIRECTORY]    # default: build/site; open html/index.html in it. `make docs` runs this.

The pages keep their paths relative to each other, so the same links work in the repository and in the site. The
reference has a page for each package of PACKAGES, written from the names that the package exports, and from MORE.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from tools.notebooks import NOTEBOOKS

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/*.svg", "benchmarks/results/*.svg")

PACKAGES = {
    "ligerzoo": "Loading",
    "ligerzoo.hub": "Checkpoints",
    "ligerzoo.text": "Text",
    "ligerzoo.vision": "Vision",
    "ligerzoo.generate": "Generation",
    "ligerzoo.layers": "Layers",
    "ligerzoo.kernels": "Kernels",
    "ligerzoo.losses": "Losses",
    "ligerzoo.models": "Models",
    "ligerzoo.adapters": "Adapters",
    "ligerzoo.train": "Parts of training",
    "ligerzoo.train.data": "Training data",
    "ligerzoo.train.optimizers": "Optimizers",
    "ligerzoo.memory": "Memory",
    "ligerzoo.parallel": "Parallelism",
    "ligerzoo.integrations": "Integrations: kernels",
    "ligerzoo.integrations.transformers": "Integrations: models",
    "ligerzoo.integrations.parity": "Integrations: parity",
    "ligerzoo.doctor": "Checks of a machine",
}
"""The packages of the reference, in reading order, with the titles of their pages."""

MORE = {
    "ligerzoo": {
        "ligerzoo.errors": [
            "LigerzooError",
            "ConfigError",
            "CheckpointError",
            "TokenizerError",
            "ImageError",
            "DataError",
            "WrongTypeError",
        ],
    },
    "ligerzoo.hub": {
        "ligerzoo.convert.layout": [
            "Layout",
            "Rename",
            "Fused",
            "FusedByHead",
            "PerExpert",
            "Interleaved",
            "Transposed",
        ],
        "ligerzoo.info": ["describe"],
    },
    "ligerzoo.text": {
        "ligerzoo.text.padding": ["BatchEncoding"],
        "ligerzoo.text.chat_template": ["ChatTemplate"],
        "ligerzoo.text.incremental_decoding": ["IncrementalDecoder"],
    },
    "ligerzoo.layers": {
        "ligerzoo.layers.rope_scaling": ["ROPE_TYPES"],
        "ligerzoo.layers.exactness": ["exact_obstacle"],
        "ligerzoo.layers.tensor_plan": ["TensorPlan"],
    },
    "ligerzoo.kernels": {
        "ligerzoo.kernels.activation": ["ACTIVATIONS"],
        "ligerzoo.kernels.registration": ["register"],
        "ligerzoo.kernels.dispatch": ["empty_gradient"],
    },
    "ligerzoo.models": {
        "ligerzoo.models.config": ["DecoderConfig", "heads", "rotary_arguments", "refuse_unless"],
        "ligerzoo.models.llama": ["llama_decoder"],
        "ligerzoo.encoding": ["encode_texts", "encode_token_ids"],
    },
    "ligerzoo.train": {
        "ligerzoo.train.captured_step": ["CapturedStep"],
        "ligerzoo.train.run": ["Run"],
        "ligerzoo.train.completion_options": ["SFTRunOptions"],
        "ligerzoo.train.options": ["option", "Positive"],
        "ligerzoo.train.preferences": ["sequences_of"],
        "ligerzoo.train.scores": ["score_data"],
    },
    "ligerzoo.integrations": {"ligerzoo.integrations.torchao": ["is_linear"]},
}
"""Public names that no package exports, by page and module. A test finds those that the pages in docs/ use."""


NOT_IN_THE_SITE = re.compile(r"\[([^\]]+)\]\((?:LICENSE|\.\./benchmarks/results)\)")
"""Links to files that the site leaves out."""


# ---- docstrings: Markdown's `code` and blocks of formulas, as reStructuredText

SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):$")
LIST_ITEM = re.compile(r"(-|\d+\.) ")
ENUMERATOR = re.compile(r"(^ *|: )(\(?[A-Za-z]\.|\([A-Za-z]\))(?=\s|$)", re.MULTILINE)
"""A description such as "H.", which begins a numbered list in reStructuredText."""

CODE = re.compile(r"`([^`]+)`")
ANNOTATED = re.compile(r"Annotated\[([\w.]+), [^\[\]]*\]")
PAGE = re.compile(r"(?<!`)\bdocs/([a-z-]+)\.md")
SHORTENED = re.compile(r"~(?:\w+\.)+")
NAME = re.compile(r"[A-Za-z][\w.]*\w$")


def _code(match: re.Match[str]) -> str:
    code, text = " ".join(match[1].split()), match.string
    role = ":py:obj:`" + code + "`" if NAME.match(code) else f"``{code}``"
    before, after = text[: match.start()][-1:], text[match.end() :][:1]
    return ("\\ " if before.isalnum() else "") + role + ("\\ " if after.isalnum() else "")


def _prose(block: list[str]) -> list[str]:
    """Returns text in which only `code` and lists are markup, with the empty line that a list needs before it."""
    spaced: list[str] = []
    for line in block:
        if LIST_ITEM.match(line.lstrip()) and spaced:
            before, indent = _indent(spaced[-1]), _indent(line)
            if before < indent or (before == indent and not LIST_ITEM.match(spaced[-1].lstrip())):
                spaced.append("")
        spaced.append(line)
    parts = re.split(r"(`[^`]+`)", "\n".join(spaced))
    parts[::2] = [re.sub(r"(?<!^)(\*|\||\\|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    text = ENUMERATOR.sub(r"\1\\\2", "".join(parts))
    text = PAGE.sub(r":doc:`docs/\1.md </docs/\1>`", CODE.sub(_code, text))
    return [*text.split("\n"), ""]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_verbatim(block: list[str]) -> bool:
    """Whether the columns of a block have a meaning: formulas, diagrams, tables and code."""
    if LIST_ITEM.match(block[0]):
        return False
    return any(line.startswith(" ") or re.search(r"\S {3,}\S", line) for line in block)


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def restructured(lines: Iterable[str]) -> list[str]:
    """Returns the lines of a docstring as reStructuredText with Google's sections, which napoleon reads."""
    text: list[str] = []
    verbatim: list[str] = []
    in_section = False
    for block in [*_blocks(lines), [""]]:
        in_section = bool(SECTION.match(block[0])) or (in_section and block[0].startswith(" "))
        if not in_section and _is_verbatim(block):
            verbatim += ["", *block]
            continue
        if verbatim:
            text += [f".. code-block:: {_language(verbatim)}", *("    " + line for line in verbatim), ""]
            verbatim = []
        text += _prose(block)
    return text


def _language(lines: list[str]) -> str:
    try:
        ast.parse(inspect.cleandoc("\n".join(lines)))
    except SyntaxError:
        return "text"
    return "python"


def to_restructured_text(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Translates a docstring in place, for the event of Sphinx with this signature."""
    lines[:] = restructured(lines)
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # or napoleon reads "type: description" in the first line


def readable_signature(
    app: object, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Leaves the type of `Annotated[type, accepted values]`, and the last part of names that are marked with ~."""

    def readable(text: str | None) -> str | None:
        return text and SHORTENED.sub("", ANNOTATED.sub(r"\1", text))

    return readable(signature), readable(returns)


def skip_member(app: object, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Leaves out the fields of named tuples, whose only text is "Alias for field number 0"."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def exact_references(app: object, doctree: nodes.document) -> None:
    """Makes Sphinx look up exact names: otherwise a type `dtype` links to any attribute of this name."""
    from sphinx.addnodes import pending_xref

    for reference in doctree.findall(pending_xref):
        reference.attributes.pop("refspecific", None)


def en_dashes(app: object, doctree: nodes.document) -> None:
    """Separates the names of arguments from their descriptions by a dash; Sphinx writes two hyphens."""
    from docutils import nodes

    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def public_reference(
    app: Sphinx, env: BuildEnvironment, node: nodes.Element, text: nodes.TextElement
) -> nodes.Element | None:
    """Links a class by the name under which its package exports it: annotations have the module that defines it."""
    public = public_names().get(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or public is None:
        return None
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, text)


@cache
def public_names() -> dict[str, str]:
    """Returns the names of the reference by the full names of what they are, and by their own."""
    found = {}
    for package in reversed(PACKAGES):
        for module, names in entries(package).items():
            for name, public in names.items():
                found |= {f"{module}.{name}": public, public: public}
    return found


# ---- the reference: pages from the exported names


def exported(package: str) -> dict[str, list[str]]:
    """Returns what a package exports, by the module that defines it, in the order of its imports.

    These are the names in `__all__`, or without it those that are imported `as` themselves.
    """
    module = import_module(package)
    if package == "ligerzoo.models":
        by_module: dict[str, list[str]] = {}
        table = module._MODULES
        # What all architectures have comes first.
        bases = {"causal_lm", "classifier", "masked_lm", "sequence_classifier", "token_classifier", "output"}
        for name in sorted(table, key=lambda name: (table[name] not in bases, table[name], name.endswith("Config"))):
            defined_in = table[name]
            by_module.setdefault(f"{package}.{defined_in}", []).append(name)
        return by_module
    public = getattr(module, "__all__", None)
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ligerzoo."):
            exports = [
                alias.name for alias in node.names if (alias.asname == alias.name or alias.name in (public or ()))
            ]
            if names := [name for name in exports if public is None or name in public]:
                found.setdefault(node.module, []).extend(names)
    own = {*(public or ())} - {name for names in found.values() for name in names} - {"__version__"}
    return {**({package: sorted(own)} if own else {}), **found}


@cache
def entries(package: str) -> dict[str, dict[str, str]]:
    """Returns the names on the page of a package, by module: what it exports, and MORE. Values are the full names.

    A name that an earlier page has is left out.
    """
    earlier = list(PACKAGES)[: list(PACKAGES).index(package)]
    taken = {id(_member(public)) for page in earlier for names in entries(page).values() for public in names.values()}
    found = {
        module: {name: f"{package}.{name}" for name in names if id(_member(f"{package}.{name}")) not in taken}
        for module, names in exported(package).items()
    }
    for module, names in MORE.get(package, {}).items():
        found[module] = {**found.get(module, {}), **{name: f"{module}.{name}" for name in names}}
    return {module: names for module, names in found.items() if names}


def _member(public: str) -> object:
    module, _, name = public.rpartition(".")
    return getattr(import_module(module), name)


def _heading(text: str, underline: str) -> list[str]:
    return [text, underline * len(text), ""]


def _entry(public: str) -> list[str]:
    member, name = _member(public), public.rpartition(".")[2]
    if not inspect.isclass(member):
        return [f".. {'autofunction' if inspect.isroutine(member) else 'autodata'}:: {public}", ""]
    options = ["   :members:"]
    if member.__bases__ not in ((object,), (tuple,)):
        options.append("   :show-inheritance:")
    if name in (
        "CausalLM",
        "EmbeddingModel",
        "MaskedLM",
        "SequenceClassifier",
        "TokenClassifier",
    ):  # what all models have
        options.append("   :inherited-members: Module")
    if name in ("Tokenizer", "Processor"):
        options += ["   :inherited-members:", "   :special-members: __call__"]
    return [f".. autoclass:: {public}", *options, ""]


def package_page(package: str) -> str:
    """Returns the page of a package: a section for each module, with its docstring and its public names."""
    lines = _heading(f"{PACKAGES[package]}: {package}", "=")
    lines += restructured(inspect.getdoc(import_module(package)).splitlines())
    for module, names in entries(package).items():
        of_model = package == "ligerzoo.models" and module not in MORE[package]
        title = next(iter(names)) if of_model else module.rpartition(".")[2]
        if module != package:
            lines += _heading(title, "-")
            lines += restructured((inspect.getdoc(import_module(module)) or "").splitlines())
        for public in names.values():
            lines += _entry(public)
    return "\n".join(lines)


def _option_rows(options: Iterable) -> list[str]:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for one in options:
        default = "required" if one.default is MISSING else f"`{one.default}`"
        rows.append(f"| `{one.flag}` | {default} | {one.description.replace('|', chr(92) + '|')} |")
    return [*rows, ""]


def train_page() -> str:
    """Returns the page of the options of `ligerzoo train`, from the tables that the command line reads."""
    from ligerzoo.train.methods import METHODS
    from ligerzoo.train.options import options_of
    from ligerzoo.train.run_options import RunOptions

    common = options_of(RunOptions)
    lines = ["# Options of ligerzoo train", "", "Also fields of the options of a recipe, with `_` for `-`.", ""]
    for group in dict.fromkeys(one.group for one in common):
        lines += [f"## {group}", "", *_option_rows(one for one in common if one.group == group)]
    methods: dict[type, list[str]] = {}
    for name, method in METHODS.items():
        methods.setdefault(method.options, []).append(name)
    for options_class, names in methods.items():
        own = [one for one in options_of(options_class) if one not in common and one.name != "method"]
        lines += [f"## --method {', '.join(names)}", "", f"{inspect.getdoc(options_class)}", "", *_option_rows(own)]
    return "\n".join(lines)


def examples_page() -> str:
    """Returns the page of the scripts in examples/."""
    lines = ["# Scripts", "", "The files in examples/, which the tests run.", ""]
    for script in sorted((ROOT / "examples").glob("*.py")):
        lines += [f"## {script.name}", "", "```python", script.read_text(encoding="utf-8").rstrip(), "```", ""]
    return "\n".join(lines)


LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")
LAYER = re.compile(r"^`(\w+)((?:\(\w+=\.\.\.\))?)`:", re.MULTILINE)
"""The beginning of an entry of docs/catalogue.md, which becomes a link to the reference."""

SHELVED = re.compile(r"^\| \[([^\]]+)\]\(([^)#]+)\.md\)", re.MULTILINE)
"""A row of docs/index.md: the title of a page and its file."""


def _with_links(text: str, new: Callable[[str], str]) -> str:
    return LINK.sub(lambda match: f"]({new(match[1])})", text)


def _in_root(target: str) -> str:
    return target.removeprefix("../") if target.startswith("../") else f"docs/{target}"


def front_page(index: str) -> str:
    """Returns docs/index.md as the first page of the site, with a menu of each shelf, made from its table."""
    intro, *shelves = _with_links(index, _in_root).split("\n## ")
    more = {"Overview": "README", "Scripts": "examples"}
    more |= {f"Notebook: {path.stem.replace('_', '-')}": f"examples/{path.stem}" for path in NOTEBOOKS}
    parts = [intro, _menu(more.items())]
    for shelf in shelves:
        parts += [f"\n## {shelf}", _menu(SHELVED.findall(shelf), caption=shelf.partition("\n")[0])]
    parts += ["\n## API reference\n", "Every public name, in [one page per package](reference/index.md).", ""]
    return "\n".join([*parts, _menu([("All packages", "reference/index")], caption="API reference")])


def _menu(pages: Iterable[tuple[str, str]], caption: str | None = None) -> str:
    titles = [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", ":hidden:", *titles, "", *(f"{title} <{page}>" for title, page in pages), "```"])


def notebook_page(notebook: Path) -> str:
    """Returns the cells of a notebook, with the outputs that are stored in it."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        printed = "".join("".join(output.get("text", [])) for output in cell.get("outputs", []))
        if printed.strip():
            parts.append(f"```text\n{printed.strip()}\n```")
    return "\n\n".join([*parts, f"This page is the notebook `examples/{notebook.name}`.", ""])


def write_sources(directory: Path) -> None:
    """Writes all that Sphinx reads."""
    for pattern in PAGES:
        for page in ROOT.glob(pattern):
            copy = directory / page.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(page, copy)
    index = directory / "docs" / "index.md"
    (directory / "index.md").write_text(front_page(index.read_text(encoding="utf-8")), encoding="utf-8")
    index.unlink()
    (directory / "examples.md").write_text(examples_page(), encoding="utf-8")
    moved = {
        "docs/index.md": "index.md",
        "index.md": "../index.md",
        "examples": "examples.md",
        "../examples": "../examples.md",
    }
    (directory / "examples").mkdir()
    for notebook in NOTEBOOKS:
        page = directory / "examples" / f"{notebook.stem}.md"
        page.write_text(notebook_page(notebook), encoding="utf-8")
    for page in [*directory.glob("*.md"), *(directory / "docs").glob("*.md")]:
        text = _with_links(
            page.read_text(encoding="utf-8"), lambda target: moved.get(target, target.replace(".ipynb", ".md"))
        )
        if page.stem == "catalogue":
            text = LAYER.sub(r"{py:obj}`\1\2 <ligerzoo.layers.\1>`:", text)
        page.write_text(NOT_IN_THE_SITE.sub(r"\1", text), encoding="utf-8")
    reference = directory / "reference"
    reference.mkdir()
    for package in PACKAGES:
        (reference / f"{package}.rst").write_text(package_page(package), encoding="utf-8")
    (reference / "train-options.md").write_text(train_page(), encoding="utf-8")
    titles = [(title, package) for package, title in PACKAGES.items()]
    menu = _menu([*titles, ("Options of ligerzoo train", "train-options")])
    (reference / "index.md").write_text(
        "\n".join(["# API reference", "", menu.replace(":hidden:", ":titlesonly:"), ""]), encoding="utf-8"
    )


class Links(HTMLParser):
    """The ids of a page, and what it links to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        self.targets.add(given.get("href") or given.get("src") or "")


def problems(html: Path) -> list[str]:
    """Returns the broken links of a built site, and the public names that its reference lacks."""
    pages = {page.resolve(): Links(page) for page in html.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for target in page.targets:
            link = urlsplit(target)
            if link.scheme or link.netloc:
                continue
            linked = (path.parent / unquote(link.path)).resolve() if link.path else path
            if not linked.exists() or (linked in pages and unquote(link.fragment) not in pages[linked].ids | {""}):
                found.append(f"{path.relative_to(html.resolve())} links to {target}")
    for package in PACKAGES:
        ids = pages[(html / "reference" / f"{package}.html").resolve()].ids
        names = [public for names in entries(package).values() for public in names.values()]
        found += [f"{public} is not in the reference" for public in names if public not in ids]
    if not (html / "searchindex.js").exists():
        found.append("the search has no index")
    return found


def build(directory: Path) -> int:
    """Builds the site in this directory; returns the exit status: not 0 after a warning, or with a broken link."""
    shutil.rmtree(directory, ignore_errors=True)
    sources, html = directory / "sources", directory / "html"
    sources.mkdir(parents=True)
    write_sources(sources)
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "--jobs", "auto"]
    command += ["--doctree-dir", str(directory / "doctrees"), "--conf-dir", str(ROOT / "docs" / "site")]
    if status := subprocess.run([*command, str(sources), str(html)], cwd=ROOT).returncode:
        return status
    found = problems(html)
    print("\n".join(found) or f"Open {html / 'index.html'}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"))

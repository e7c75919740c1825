"""Finds words and phrases that the project's prose avoids, in docstrings, comments, error messages and names.

python -m tools.prose                  # the whole tree
python -m tools.prose ligerzoo/text    # some files or folders
python -m tools.prose --count          # the number of findings in each folder

Prints `file:line: phrase: text` for each finding and exits with 1 if there is any.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

PATHS = (
    "ligerzoo", "tests", "benchmarks", "tools", "docs", ".ci", "README.md", "CONTRIBUTING.md", "CHANGELOG.md",
    "Makefile", "pyproject.toml",
)  # fmt: skip
EXCLUDED = {"tools/prose.py", "tests/test_prose.py"}
"""This file and its tests quote what they look for."""

AVOIDED: dict[str, tuple[str, ...]] = {
    # words
    r"(re)?(tell|tells|told|telling)": (),
    r"stands?|stood|standing": (r"stands?-in", r"stand-ins", r"stands?[- ]alone"),
    r"places?": (
        r"in[- ]place", r"out[- ]of[- ]place", r"decimal places?", r"(to|must|not) place",
        r"places? (the|a|an|all|each|every|its|their|parameters|tensors|modules|weights)",
    ),
    r"turn(s|ed|ing)?": (
        r"in turn", r"takes? turns", r"multi-turn", r"turns? of the (conversation|chat|user|assistant)",
        r"turn(s|ed|ing)? (\S+ ){0,3}(on|off)", r"turn(s|ed|ing)? (\S+ ){1,8}into",
        r"(assistant|user|system|model|chat|last|next|previous|alternating)('s)? turns?",
    ),
    r"real": (
        r"real-valued",
        r"real (numbers?|parts?|world|time|path|checkpoints?|models?|files?|director(y|ies)|processors?|tokenizers?|"
        r"GPUs?|weights|kernels?|images?|photographs?|sizes?|shapes?)",
    ),
    r"houses?": (r"in-house",),
    r"walk(s|ed|ing)?": (r"random walks?",),
    r"kin": (),
    r"besides?": (),
    r"nobody|somebody": (),
    r"anew|lest|whence|whither|thereof|wherein|likelier": (),
    # phrases
    r"(made|known|computed|ready) ahead": (r"\w+ ahead of time",),
    r"so many(-th)?": (),
    r"such as (it is|they are)": (),
    r"as (it is|they are)": (r"as (it is|they are) (\w+ed|\w+en|read|built|made|not|in|on|for|to)",),
    r"of (its|their|our) (very )?own": (),
    r"at any rate": (),
    r"in the way": (r"in the way (that|in which)",),
    r"there (is|are|was|were) none": (),
    r"(is|are|was|were) to be": (),
    r"(is|are|was|were) no": (r"there \w+ no", r"\w+ no (longer|more|less|later|smaller|larger|greater|fewer|slower)"),
    r"(gives?|gave|takes?|took) (no|none|nothing)": (r"takes? no (arguments?|options?|parameters?)",),
    r"what (it|they) (has|have|had|sees?|saw|reads?|holds?|makes?|made|gives?|gave|takes?|lacks?|can|likes?|left)": (),
    r"(says?|makes?) of": (),
    r"of no (use|matter|avail)": (),
    r"neither[,.]": (),
}  # fmt: skip
"""Regular expressions of words and phrases, each with its technical uses, which are allowed."""


def compiled(*patterns: str) -> re.Pattern[str]:
    """Compiles alternatives that match whole words, in letters of any case, with any white space for a space."""
    alternatives = "|".join(patterns).replace(" ", r"\s+")
    return re.compile(rf"(?<![\w/.])(?:{alternatives})(?!\w)", re.IGNORECASE)


RULES = [(compiled(phrase), compiled(*uses) if uses else None) for phrase, uses in AVOIDED.items()]

POETIC_NAMES = {"told", "made", "known", "wanted", "here", "somewhere", "nowhere", "real"}
"""Variables, arguments and functions whose whole name is one of these words."""


class Text(NamedTuple):
    """A piece of prose: a docstring, a block of comments, a message, a name or a paragraph."""

    text: str
    line: int


class Finding(NamedTuple):
    path: Path
    line: int
    phrase: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.phrase}: {self.text}"


def comments(source: str, mark: str = "#") -> Iterator[Text]:
    """Yields blocks of whole-line comments, joined, and each comment after code."""
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith(mark):
            block.append(line.lstrip().removeprefix(mark))
            continue
        if block:
            yield Text("\n".join(block), number - len(block))
        block = []


def python_comments(source: str) -> Iterator[Text]:
    yield from comments(source)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.line.lstrip().startswith("#"):
            yield Text(token.string, token.start[0])


def literal(node: ast.AST) -> str | None:
    """Returns the text of a string or an f-string, whose values read as "{}"."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(literal(part) or "{}" for part in node.values)
    return None


def python_strings(source: str) -> Iterator[Text]:
    """Yields docstrings and other strings of at least three words."""
    inner: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inner.update(node.values)
        text = literal(node)
        if text is not None and node not in inner and len(text.split()) >= 3:
            yield Text(text, node.lineno)  # type: ignore[attr-defined]


def python_names(source: str) -> Iterator[tuple[str, int]]:
    """Yields the names that a file defines: of functions, classes, arguments and variables."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, node.lineno


def words_of(name: str) -> str:
    """Splits a name: `test_that_itStands` becomes "test that it stands"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").strip().lower()


def texts(path: Path) -> Iterator[Text]:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from python_comments(source)
        yield from python_strings(source)
    elif path.suffix == ".md":
        line = 1
        for paragraph in re.split(r"(\n\n+)", source):
            yield Text(paragraph, line)
            line += paragraph.count("\n")
    else:
        yield from comments(source)


def avoided(text: str) -> Iterator[re.Match[str]]:
    """Yields the phrases to avoid that occur in `text`, except within `code` or one of their technical uses."""
    text = re.sub(r"`[^`\n]+`", lambda code: "`" * len(code[0]), text)
    for pattern, uses in RULES:
        allowed = [use.span() for use in uses.finditer(text)] if uses else []
        for match in pattern.finditer(text):
            if not any(start <= match.start() and match.end() <= end for start, end in allowed):
                yield match


def findings(path: Path, shown: Path) -> Iterator[Finding]:
    for text, line in texts(path):
        for match in avoided(text):
            before = text[: match.start()]
            start, end = before.rfind("\n") + 1, text.find("\n", match.end())
            excerpt = text[start : end if end >= 0 else None]
            yield Finding(
                shown, line + before.count("\n"), " ".join(match[0].lower().split()), " ".join(excerpt.split())
            )
    if path.suffix == ".py":
        for name, line in python_names(path.read_text(encoding="utf-8")):
            if name.strip("_") in POETIC_NAMES:
                yield Finding(shown, line, "name", name)
            else:
                yield from (Finding(shown, line, match[0], name) for match in avoided(words_of(name)))


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields the text files under `paths`, without those that quote the phrases."""
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in found:
            is_text = file.suffix in {".py", ".md", ".sh", ".toml", ""} and "__pycache__" not in file.parts
            if file.is_file() and is_text and not any(file.match(name) for name in EXCLUDED):
                yield file


def scan(paths: Iterable[Path], root: Path = ROOT) -> list[Finding]:
    found = []
    for file in files(paths):
        file = file.resolve()
        found += findings(file, file.relative_to(root) if file.is_relative_to(root) else file)
    return sorted(set(found))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders (default: the whole tree)")
    parser.add_argument("--count", action="store_true", help="print the number of findings in each folder")
    args = parser.parse_args(argv)
    found = scan(args.paths or [ROOT / path for path in PATHS])
    if args.count:
        folders = Counter(str(finding.path.parent) for finding in found)
        print(*(f"{n:5} {folder}" for folder, n in sorted(folders.items())), f"{len(found):5} in all", sep="\n")
    else:
        print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

"""The command `embed`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ligerzoo.arguments import expanded_path
from ligerzoo.checks import is_text
from ligerzoo.cli.checkpoints import ModelChoice, find_base_model, load_embedding_model
from ligerzoo.cli.console import standard_input
from ligerzoo.cli.options import (
    AT_LEAST_1,
    DEFAULT_BATCH_SIZE,
    PATH,
    Subparsers,
    add_option,
    add_parser,
    add_shared,
)
from ligerzoo.errors import LigerzooError, quote

if TYPE_CHECKING:
    from torch import Tensor

_OUTPUTS = (".safetensors", ".jsonl")


class Line(NamedTuple):
    """A text to embed.

    Attributes:
        number: its line in the file, from 1.
        text: the text.
        id: the line's "id", or None.
    """

    number: int
    text: str
    id: object = None


def add_embed(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        embed,
        "write the embeddings of texts, by models of sentence-transformers",
        epilog="""\
examples:
  ligerzoo embed BAAI/bge-small-en-v1.5 --input texts.txt --output embeddings.safetensors
  ligerzoo embed Qwen/Qwen3-Embedding-0.6B --input questions.jsonl --prompt-name query --output questions.safetensors
  ligerzoo embed path/to/checkpoint --pooling mean --normalize --input - --output embeddings.jsonl < texts.txt

Each line of the input is a text. In a file that ends with .jsonl it is a JSON string, or an object with the text in
the field --field, and possibly an "id". The rows of the tensor `embeddings` in a .safetensors file are the lines of
the input, in their order. A .jsonl file gets an object for each line: {"line": 1, "id": ..., "embedding": [...]}. The
output appears under its name when it is complete.""",
        check=check_output,
    )
    add_shared(parser, "model", "--revision", "--adapter", "--import", "--dtype", "--device")
    texts, add = parser.group("texts"), partial(add_option, parser.group("embeddings"))
    lines = 'texts, one per line; "-" reads standard input'
    texts.add_argument("--input", required=True, type=PATH, metavar="FILE", help=lines)
    output = "new file for the embeddings, .safetensors or .jsonl"
    texts.add_argument("--output", required=True, type=expanded_path, metavar="FILE", help=output)
    add_option(texts, "--field", str, "field of the text in lines of a .jsonl file", "text", metavar="NAME")
    prompt = texts.add_mutually_exclusive_group()
    add_option(prompt, "--prompt-name", str, "name of the model's prompt that is put before each text", metavar="NAME")
    add_option(prompt, "--prompt", str, "text that is put before each text", metavar="TEXT")
    pooling = "how to pool the hidden states, such as mean or lasttoken (default: what modules.json says)"
    add("--pooling", str, pooling, metavar="MODE")
    add("--dimensions", AT_LEAST_1, "number of features, the first ones (default: the model's)")
    parser.group("embeddings").add_argument("--normalize", action="store_true", help="scale embeddings to length 1")
    add("--max-length", AT_LEAST_1, "tokens of a text; the rest is left out (default: the model's)")
    add("--batch-size", AT_LEAST_1, "texts that are computed together", DEFAULT_BATCH_SIZE)


def check_output(options: argparse.Namespace) -> None:
    """Raises SystemExit if the output has another ending."""
    if options.output.suffix not in _OUTPUTS:
        expected = "a name that ends with .safetensors or .jsonl"
        options.parser.error(f"argument --output: got {str(options.output)!r}; expected {expected}")


def embed(options: argparse.Namespace) -> int:
    """Writes the embeddings of the texts of a file."""
    from ligerzoo.files.atomic import new_file

    with new_file(options.output) as output:
        lines = list(read_lines(options.input, options.field))
        if not lines:
            raise LigerzooError("no texts", where=options.input, expected="a text in each line")
        settings = {"pooling": options.pooling, "max_length": options.max_length}
        model = load_embedding_model(find_base_model(ModelChoice.of(options)), **settings)
        start = time.perf_counter()
        embeddings = model.encode(
            [line.text for line in lines],
            batch_size=options.batch_size,
            prompt_name=options.prompt_name,
            prompt=options.prompt,
            truncate_dim=options.dimensions,
            normalize=options.normalize,
            device="cpu",
        )
        seconds = time.perf_counter() - start
        write_embeddings(output, embeddings, lines, options.output.suffix)
    count, size = embeddings.shape
    print(f"{options.output}: {count:,} embeddings of {size:,} features, {count / seconds:,.0f} texts/s")
    return 0


def read_lines(file: str, field: str) -> Iterator[Line]:
    """Yields the texts of a file, or of standard input for "-".

    Args:
        file: its path. If it ends with .jsonl, each line is JSON.
        field: the field of the text in JSON objects.

    Raises:
        LigerzooError: a line is not valid.
    """
    if file == "-":
        for number, text in enumerate(standard_input(), 1):
            yield Line(number, text.rstrip("\r\n"))
        return
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as source:
        for number, text in enumerate(source, 1):
            yield _parsed(text, number, file, field) if file.endswith(".jsonl") else Line(number, text.rstrip("\r\n"))


def _parsed(text: str, number: int, file: str, field: str) -> Line:
    """Returns the text of a line of JSON."""
    where = f"{file}, line {number}"
    try:
        match json.loads(text):
            case str(value):
                return Line(number, value)
            case {**entries} if is_text(entries.get(field)):
                return Line(number, str(entries[field]), entries.get("id"))
    except (ValueError, RecursionError) as error:
        raise LigerzooError(f"not valid JSON: {error}", where=where, got=quote(text.strip())) from error
    expected = f"a JSON string, or an object with a text in {field!r}"
    raise LigerzooError("invalid line", where=where, got=quote(text.strip()), expected=expected)


def write_embeddings(path: Path, embeddings: Tensor, lines: list[Line], suffix: str) -> None:
    """Writes embeddings, (n, D) on the CPU, as a tensor or as lines of JSON."""
    from ligerzoo.files.checkpoint_writer import write_safetensors

    if suffix == ".safetensors":
        write_safetensors(path, {"embeddings": embeddings})
        return
    with path.open("w", encoding="utf-8") as file:
        for line, embedding in zip(lines, embeddings.float(), strict=True):
            named = {} if line.id is None else {"id": line.id}
            file.write(json.dumps({"line": line.number, **named, "embedding": embedding.tolist()}) + "\n")

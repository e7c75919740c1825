"""The command `train`, and those that prepare it: `tokenizer`, `tokenize` and `config`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ligerzoo.arguments import expanded_path
from ligerzoo.checks import one_of
from ligerzoo.cli.checkpoints import new_directory
from ligerzoo.cli.console import warnings_as_lines
from ligerzoo.cli.options import AT_LEAST_1, PATH, Subparsers, add_option, add_parser, add_shared
from ligerzoo.errors import LigerzooError, Problems
from ligerzoo.foreign_names import our_flag
from ligerzoo.train.command_line import ConfigFile, add_options, early_value
from ligerzoo.train.methods import METHODS, printed_recipe
from ligerzoo.train.options import options_of
from ligerzoo.train.run_options import RunOptions

DEFAULT_METHOD = "sft"
TOKENIZER_HELP = "directory or hub id of the tokenizer"


def add_train(subparsers: Subparsers, arguments: Sequence[str]) -> None:
    """Adds the command, whose options depend on --method, and whose defaults on --config, among the arguments."""
    is_chosen = arguments[:1] == ["train"]
    file = ConfigFile(early_value("--config", arguments) if is_chosen else None)
    given = (early_value("--method", arguments), file.value("method"))
    method = next((name for name in given if name in METHODS), DEFAULT_METHOD)
    subjects = dict.fromkeys(str(one.options.__doc__).rstrip(".").lower() for one in METHODS.values())
    parser = add_parser(
        subparsers,
        train,
        f"train a model: {', '.join(subjects)}",
        epilog="""\
examples:
  ligerzoo train HuggingFaceTB/SmolLM2-135M --data chats.jsonl --output run --lr 1e-4 --epochs 2
  ligerzoo train path/to/config.json --method pretrain --tokenizer path/to/tokenizer --data text.jsonl --output run \
    --max-steps 1000 --lr 1e-3
  ligerzoo train HuggingFaceTB/SmolLM2-135M --data chats.jsonl --output run --dry-run
  ligerzoo train HuggingFaceTB/SmolLM2-135M --data chats.jsonl --output run --print-recipe > recipe.py
  ligerzoo train --config run/run.yaml --output again

The options depend on --method: `ligerzoo train --method METHOD --help` lists those of a method. --print-recipe prints
the Python script that the command would run, to change and to run with `python`.
Ctrl-C saves and stops; --resume continues. A second Ctrl-C stops at once.""",
    )
    needs_model = "model" not in file.entries
    parser.set_defaults(check=lambda given: check_has_model(given) if needs_model else None)
    parser.usage = "%(prog)s [MODEL] --data FILE --output DIR [OPTION ...]"
    parser.other_hint = methods_with
    options = {one.name: one for one in options_of(METHODS[method].options)}
    options["method"] = options["method"]._replace(values=one_of(tuple(METHODS)))  # of a file, which --method replaces
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if file.path else None,
        default=argparse.SUPPRESS,
        type=PATH,
        help=options["model"].description,
    )
    parser.add_argument(
        "--method", choices=tuple(METHODS), default=method, help=f"what to train (default: {DEFAULT_METHOD})"
    )
    of_file = add_options(parser, [*options.values()], file, without=("model", "method"))
    parser.set_defaults(of_file=of_file)
    parser.add_argument("--print-recipe", action="store_true", help="print the script with these options, run nothing")


def check_has_model(options: argparse.Namespace) -> None:
    """Raises SystemExit if no model is given."""
    if "model" not in options:
        options.parser.error(options.parser.missing(["MODEL"]))


def methods_with(flag: str) -> str | None:
    """Returns a remedy with the methods that have an option, such as `--variant`; None if no method has it."""
    of_methods = {name: [given.flag for given in options_of(one.options)] for name, one in METHODS.items()}
    flag = our_flag(flag, [one for flags in of_methods.values() for one in flags]) or flag
    names = [name for name, flags in of_methods.items() if flag in flags]
    return f"{flag} is an option of --method {', '.join(names)}." if names else None


def train(options: argparse.Namespace) -> int:
    """Trains a model with the recipe of the method, or prints the recipe."""
    method = METHODS[options.method]
    names = {option.name for option in options_of(method.options)}
    given = {**options.of_file, **{name: value for name, value in vars(options).items() if name in names}}
    if options.print_recipe:
        print(printed_recipe(options.method, given), end="")
        return 0
    recipe, problems = import_module(method.module), Problems(collects=given.get("dry_run", False))
    with warnings_as_lines(options.parser.flags):
        code: int | None = problems.result_of(recipe.main, valid_options(method.options, given, problems))
    problems.raise_if_any()
    return code or 0


def valid_options(options: type[RunOptions], given: Mapping[str, Any], problems: Problems) -> RunOptions:
    """Returns the options of a run. Those with an error that is kept have their defaults.

    Raises:
        LigerzooError: an error is not kept, or names no option that was given and has a default.
    """
    with problems:
        return options(**given)
    names = {name for error in problems.errors[-1].errors for name in re.findall(r"\w+", str(error.where))}
    required = {one.name for one in options_of(options) if one.default is dataclasses.MISSING}
    valid = {name: value for name, value in given.items() if name in required or name not in names}
    if valid.keys() == given.keys():
        problems.raise_if_any()
    return valid_options(options, valid, problems)


def add_tokenizer(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        tokenizer,
        "train a byte-level BPE tokenizer on text",
        epilog="""\
examples:
  ligerzoo tokenizer corpus.txt --vocab-size 32000 --output tokenizer
  ligerzoo tokenizer corpus/*.jsonl --vocab-size 8192 --output tokenizer --chat-template none

Reads .txt files, and all texts of JSON Lines files: documents, prompts, completions and messages. Writes tokenizer.json
and tokenizer_config.json, which transformers reads too, and a chat template in the format ChatML.""",
    )
    parser.add_argument("files", metavar="FILE", type=PATH, nargs="+", help="text: .txt, .jsonl or a directory")
    add_shared(parser, "--map")
    parser.add_argument("--vocab-size", type=AT_LEAST_1, required=True, metavar="N", help="number of tokens")
    parser.add_argument("--output", type=expanded_path, required=True, metavar="DIR", help="new or empty directory")
    add_option(parser, "--chat-template", PATH, "chatml, none, or a jinja file", "chatml", metavar="NAME")


def tokenizer(options: argparse.Namespace) -> int:
    """Trains a tokenizer and writes it to a new directory."""
    from ligerzoo.text.chat_template import read_template
    from ligerzoo.train.data.layouts import parse_columns
    from ligerzoo.train.new_tokenizer import CHATML, train_tokenizer

    name, built_in = options.chat_template, {"chatml": CHATML, "none": None}
    with new_directory(options.output, "tokenizer") as target, warnings_as_lines(options.parser.flags):
        template = built_in[name] if name in built_in else read_template(name)
        columns = parse_columns(options.map)
        trained = train_tokenizer(options.files, options.vocab_size, columns=columns, chat_template=template)
        trained.save_pretrained(target)
        print(f"{len(trained):,} tokens; {trained.eos_token} ends texts and messages")
    return 0


def add_tokenize(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        tokenize,
        "write the tokens of texts to a file that training maps into memory",
        epilog="""\
examples:
  ligerzoo tokenize corpus.txt --tokenizer tokenizer --output corpus.bin
  ligerzoo train my-model --method pretrain --data corpus.bin --output run --max-steps 1000 --lr 1e-3""",
    )
    parser.add_argument("files", metavar="FILE", type=PATH, nargs="+", help="text: .txt, or .jsonl")
    add_shared(parser, "--map", "--special-tokens")
    parser.add_argument("--tokenizer", type=PATH, required=True, metavar="DIR", help=TOKENIZER_HELP)
    parser.add_argument("--output", type=expanded_path, required=True, metavar="FILE", help="new file NAME.bin")
    parser.add_argument(
        "--text-unit", choices=("file", "line"), default="file", help="document of a .txt file (default: %(default)s)"
    )


def tokenize(options: argparse.Namespace) -> int:
    """Writes the tokens of text files to a token file."""
    from ligerzoo.text.tokenizer import Tokenizer
    from ligerzoo.train.data import write_tokens
    from ligerzoo.train.data.layouts import parse_columns

    target: Path = options.output
    if target.exists():
        raise LigerzooError("already exists", where=target, remedy="Choose another file, or delete this one.")
    tokenizer = Tokenizer.from_pretrained(options.tokenizer)
    with warnings_as_lines(options.parser.flags):
        given = {name: getattr(options, name) for name in ("text_unit", "special_tokens")}
        count = write_tokens(options.files, target, tokenizer, columns=parse_columns(options.map), **given)
    print(f"{target}: {count:,} tokens, {target.stat().st_size:,} bytes")
    return 0


def add_config(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        config,
        "write the config.json of a new model, to pretrain it",
        epilog="""\
examples:
  ligerzoo config llama --tokenizer tokenizer --output my-model hidden_size=256 intermediate_size=768 \\
    num_hidden_layers=8 num_attention_heads=8
  ligerzoo train my-model --method pretrain --data corpus.txt --output run --max-steps 1000 --lr 1e-3

vocab_size and the ids of special tokens are those of the tokenizer. Other fields have the defaults of the architecture,
which are those of a large model. Also copies the tokenizer.""",
    )
    parser.add_argument("model_type", metavar="MODEL_TYPE", help="architecture, such as llama or qwen3_moe")
    parser.add_argument("fields", metavar="FIELD=VALUE", nargs="+", help="fields of config.json; values are JSON")
    parser.add_argument("--tokenizer", type=PATH, required=True, metavar="DIR", help=TOKENIZER_HELP)
    parser.add_argument("--output", type=expanded_path, required=True, metavar="DIR", help="new or empty directory")


def config(options: argparse.Namespace) -> int:
    """Writes the config.json of a new model, and its tokenizer, to a new directory."""
    from ligerzoo.text.tokenizer import Tokenizer
    from ligerzoo.train.new_config import new_config, parse_field, write_config

    with new_directory(options.output, "config") as target:
        loaded = Tokenizer.from_pretrained(options.tokenizer)
        content = new_config(options.model_type, loaded, dict(map(parse_field, options.fields)))
        loaded.save_pretrained(target)
        write_config(target, content)
        print(json.dumps(content, indent=2))
    return 0

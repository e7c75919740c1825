"""Parsers of the commands around training: train, evaluate, and new tokenizers, token files and configs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ligerzoo.cli import training_commands
from ligerzoo.cli.options import (
    AT_LEAST_1,
    AT_LEAST_2,
    MODEL_HELP,
    Subparsers,
    add_device_option,
    add_dtype_option,
    add_model_arguments,
    add_option,
    add_parser,
)
from ligerzoo.train.methods import METHODS
from ligerzoo.train.options import add_arguments, options_of

DEFAULT_METHOD = "sft"
DATA_KINDS = ("text", "completion", "chat", "preference", "labelled")


def training_method(arguments: Sequence[str] | None) -> str:
    """Returns the method of `ligerzoo train`, on which its other options depend."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--method", nargs="?")
    method: str | None = parser.parse_known_args(arguments)[0].method
    return method if method in METHODS else DEFAULT_METHOD


def methods_with(flag: str) -> list[str]:
    """Returns the methods that have an option, such as `--variant`."""
    option = flag.removeprefix("--").replace("-", "_")
    return [name for name, one in METHODS.items() if any(option == given.name for given in options_of(one.options))]


def add_train(subparsers: Subparsers, method: str) -> None:
    parser = add_parser(
        subparsers,
        training_commands.train,
        "train a model: pretraining and supervised fine-tuning",
        epilog="""\
examples:
  ligerzoo train HuggingFaceTB/SmolLM2-135M --data chats.jsonl --output run --lr 1e-4 --epochs 2
  ligerzoo train path/to/config.json --method pretrain --tokenizer path/to/tokenizer --data text.jsonl --output run \
    --max-steps 1000 --lr 1e-3
  ligerzoo train HuggingFaceTB/SmolLM2-135M --data chats.jsonl --output run --dry-run
  ligerzoo train HuggingFaceTB/SmolLM2-135M --data chats.jsonl --output run --print-recipe > recipe.py

The options depend on --method: `ligerzoo train --method METHOD --help` lists those of a method. --print-recipe prints
the Python script that the command would run, to change and to run with `python`.
Ctrl-C saves and stops; --resume continues. A second Ctrl-C stops at once.""",
    )
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP}; with --method pretrain also a config.json")
    parser.add_argument(
        "--method", choices=tuple(METHODS), default=DEFAULT_METHOD, help="what to train (default: %(default)s)"
    )
    options = options_of(METHODS[method].options)
    add_arguments(parser, (option for option in options if option.name not in ("model", "method")))
    parser.add_argument("--print-recipe", action="store_true", help="print the script with these options, run nothing")


def add_evaluate(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        training_commands.evaluate,
        "score a model on held-out data: loss, perplexity, accuracy, bits per byte; or run tasks of lm-eval",
        epilog="""\
examples:
  ligerzoo evaluate HuggingFaceTB/SmolLM2-135M --data held-out.txt
  ligerzoo evaluate path/to/base --adapter path/to/adapter --data chats.jsonl --json
  ligerzoo evaluate path/to/checkpoint --data pairs.jsonl --kind preference
  ligerzoo evaluate HuggingFaceTB/SmolLM2-135M --tasks arc_easy,hellaswag --limit 100

The data is that of `ligerzoo train`; see docs/data.md. All of it is checked first. Completions and answers are scored
given their prompts. For preference pairs, the accuracy is the share of pairs whose chosen completion is more likely.
--tasks needs lm-eval (`pip install ligerzoo[integrations]`).""",
        check=check_subject,
    )
    add_model_arguments(parser)
    add = partial(add_option, parser)
    add("--data", str, "held-out data; may be repeated", metavar="FILE", repeats=True)
    kinds = ("auto", *DATA_KINDS)
    parser.add_argument("--kind", choices=kinds, default="auto", help="kind of the data (default: by its fields)")
    add("--adapter", str, "directory or hub id of a LoRA adapter of PEFT", metavar="DIR")
    add("--tokenizer", str, "checkpoint of the tokenizer (default: MODEL)", metavar="DIR")
    add("--seq-length", AT_LEAST_2, "the most tokens of a sequence (default: up to 2048)", metavar="T")
    add("--batch-size", AT_LEAST_1, "rows of a batch", 8, metavar="B")
    add_dtype_option(parser)
    add_device_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    tasks = parser.add_argument_group("tasks of lm-eval")
    add_option(tasks, "--tasks", str, "names of tasks, separated by commas", metavar="NAMES")
    add_option(tasks, "--task-directory", str, "directory with YAML files of further tasks", metavar="DIR")
    add_option(tasks, "--limit", AT_LEAST_1, "use the first N records of each task only")


def check_subject(options: argparse.Namespace) -> None:
    """Raises SystemExit if there is neither data nor a task."""
    if not (options.data or options.tasks):
        options.parser.error("one of the arguments --data --tasks is required")


def add_tokenizer(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        training_commands.tokenizer,
        "train a byte-level BPE tokenizer on text",
        epilog="""\
examples:
  ligerzoo tokenizer corpus.txt --vocab-size 32000 --output tokenizer
  ligerzoo tokenizer corpus/*.jsonl --vocab-size 8192 --output tokenizer --chat-template none

Reads .txt files, and all texts of JSON Lines files: documents, prompts, completions and messages. Writes tokenizer.json
and tokenizer_config.json, which transformers reads too, and a chat template in the format ChatML.""",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="text: .txt, .jsonl or a directory")
    parser.add_argument("--vocab-size", type=AT_LEAST_1, required=True, metavar="N", help="number of tokens")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new or empty directory")
    add_option(parser, "--chat-template", str, "chatml, none, or a jinja file", "chatml", metavar="NAME")


def add_tokenize(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        training_commands.tokenize,
        "write the tokens of texts to a file that training maps into memory",
        epilog="""\
examples:
  ligerzoo tokenize corpus.txt --tokenizer tokenizer --output corpus.bin
  ligerzoo train my-model --method pretrain --data corpus.bin --output run --max-steps 1000 --lr 1e-3""",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="text: .txt, or .jsonl with the field text")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="directory or hub id of the tokenizer")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="new file NAME.bin")
    parser.add_argument(
        "--text-unit", choices=("file", "line"), default="file", help="document of a .txt file (default: %(default)s)"
    )


def add_config(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        training_commands.config,
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
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="directory or hub id of the tokenizer")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new or empty directory")

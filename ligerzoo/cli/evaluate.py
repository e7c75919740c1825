"""The command `evaluate`."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from ligerzoo.cli.checkpoints import ModelChoice, find_base_model, find_device, load_model, load_tokenizer, package_of
from ligerzoo.cli.console import warnings_as_lines
from ligerzoo.cli.options import AT_LEAST_1, AT_LEAST_2, PATH, Subparsers, add_option, add_parser, add_shared
from ligerzoo.errors import raise_all
from ligerzoo.train.data_options import TooLong

if TYPE_CHECKING:
    from ligerzoo.models import CausalLM

DATA_KINDS = ("text", "completion", "chat", "preference", "labelled")
DEFAULT_SEQ_LENGTH = 2048


def add_evaluate(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        evaluate,
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
    add_shared(parser, "model", "--revision", "--adapter", "--import", "--dtype", "--device")
    add_option(parser.group("model"), "--tokenizer", PATH, "checkpoint of the tokenizer (default: MODEL)", None, "DIR")
    data, add = parser.group("data"), partial(add_option, parser.group("data"))
    described = "held-out data: files, a directory, a saved dataset, or org/name:split of the hub"
    data.add_argument("--data", metavar="DATA", type=PATH, help=described, action="extend", nargs="+", default=[])
    add_shared(parser, "--map", "--special-tokens")
    too_long = "what happens to samples of more than --seq-length tokens (default: %(default)s)"
    data.add_argument("--too-long", choices=get_args(TooLong), default="error", help=too_long)
    kinds = ("auto", *DATA_KINDS)
    data.add_argument("--kind", choices=kinds, default="auto", help="kind of the data (default: by its fields)")
    add("--seq-length", AT_LEAST_2, "the most tokens of a sequence (default: up to 2048)", metavar="T")
    add("--batch-size", AT_LEAST_1, "rows of a batch", 8, metavar="B")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    tasks = parser.group("tasks of lm-eval")
    add_option(tasks, "--tasks", str, "names of tasks, separated by commas", metavar="NAMES")
    add_option(tasks, "--task-directory", PATH, "directory with YAML files of further tasks", metavar="DIR")
    add_option(tasks, "--limit", AT_LEAST_1, "use the first N records of each task only")


def check_subject(options: argparse.Namespace) -> None:
    """Raises SystemExit if there is neither data nor a task."""
    if not (options.data or options.tasks):
        options.parser.error("one of the arguments --data --tasks is required")


def evaluate(options: argparse.Namespace) -> int:
    """Prints the scores of a model on held-out data, and the results of tasks of lm-eval."""
    from ligerzoo.hub import AutoModel, read_config
    from ligerzoo.train.data.layouts import parse_columns
    from ligerzoo.train.data.read_all import check_data
    from ligerzoo.train.scores import score_data

    find_device(options.device)  # refuses it before the data is read
    choice = find_base_model(ModelChoice.of(options))
    config = read_config(choice.model, revision=choice.revision)
    longest = getattr(config, "max_position_embeddings", DEFAULT_SEQ_LENGTH)
    seq_length = options.seq_length or min(DEFAULT_SEQ_LENGTH, longest)
    data: dict[str, Any] = {}
    if options.data:
        tokenizer = load_tokenizer(choice)
        data = {"data": options.data, "kind": options.kind, "tokenizer": tokenizer, "seq_length": seq_length}
        data |= {"columns": parse_columns(options.map), "too_long": options.too_long}
        data["special_tokens"] = options.special_tokens
        meta_model = AutoModel.from_config(config, device="meta")
        rows = meta_model.input_vocab_size if choice.adapter is None else None  # an adapter may have further tokens
        with warnings_as_lines(options.parser.flags):
            report = check_data(**data, embedding_rows=rows)
            for note in report.notes:
                print(note, file=sys.stderr)
            raise_all(report.problems.errors)
    model = load_model(choice)
    found: dict[str, Any] = {}
    if data:
        with warnings_as_lines(options.parser.flags):
            scores = score_data(model, **data, batch_size=options.batch_size)
        found |= scores.as_json()
        if not options.json:
            print(scores)
    if options.tasks:
        found["tasks"] = task_results(model, choice.text_source, options, seq_length)
        if not options.json:
            print(json.dumps(found["tasks"], indent=2))
    if options.json:
        print(json.dumps(found))
    return 0


def task_results(
    model: CausalLM, tokenizer: str, options: argparse.Namespace, seq_length: int
) -> dict[str, dict[str, object]]:
    """Returns the results of the tasks of the options; `tokenizer` is a directory or hub id.

    Raises:
        LigerzooError: lm-eval is not installed, or a task is unknown.
    """
    with package_of("integrations", "lm_eval", "transformers", what="tasks need", where="--tasks"):
        from ligerzoo.integrations.tasks import run_tasks

    found = run_tasks(
        model,
        tokenizer,
        options.tasks.split(","),
        max_length=seq_length,
        **{name: getattr(options, name) for name in ("batch_size", "task_directory", "limit")},
    )
    return {task: {name: plain(value) for name, value in entries.items()} for task, entries in found.items()}


def plain(value: object) -> object:
    """Returns a number of NumPy as a number of Python."""
    return value.item() if hasattr(value, "item") else value

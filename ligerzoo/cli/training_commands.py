"""The commands around training: train, evaluate, and new tokenizers, token files and configs."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligerzoo.cli.checkpoints import find_base_model, find_device, load_model, new_directory, package_of
from ligerzoo.errors import LigerzooError

if TYPE_CHECKING:
    from ligerzoo.models import CausalLM

DEFAULT_SEQ_LENGTH = 2048


def train(options: argparse.Namespace) -> int:
    """Trains a model with the recipe of the method, or prints the recipe."""
    from ligerzoo.train.methods import METHODS, printed_recipe
    from ligerzoo.train.options import options_of

    method = METHODS[options.method]
    names = {option.name for option in options_of(method.options)}
    given = {name: value for name, value in vars(options).items() if name in names}
    if options.print_recipe:
        print(printed_recipe(options.method, given), end="")
        return 0
    recipe = import_module(method.module)
    with warnings_as_lines():
        code: int = recipe.main(method.options(**given))
    return code


def evaluate(options: argparse.Namespace) -> int:
    """Prints the scores of a model on held-out data, and the results of tasks of lm-eval."""
    from ligerzoo.hub import AutoModel, read_config
    from ligerzoo.text.tokenizer import Tokenizer
    from ligerzoo.train.data.read_all import check_data
    from ligerzoo.train.scores import score_data

    find_device(options.device)  # refuses it before the data is read
    find_base_model(options)
    config = read_config(options.model, revision=options.revision)
    longest = getattr(config, "max_position_embeddings", DEFAULT_SEQ_LENGTH)
    seq_length = options.seq_length or min(DEFAULT_SEQ_LENGTH, longest)
    data: dict[str, Any] = {}
    if options.data:
        tokenizer = Tokenizer.from_pretrained(options.tokenizer or options.model, revision=options.revision)
        data = {"data": options.data, "kind": options.kind, "tokenizer": tokenizer, "seq_length": seq_length}
        meta_model = AutoModel.from_config(config, device="meta")
        rows = meta_model.input_vocab_size if options.adapter is None else None  # an adapter may have further tokens
        with warnings_as_lines():
            check_data(**data, embedding_rows=rows).raise_if_bad()
    model = load_model(options)
    found: dict[str, Any] = {}
    if data:
        with warnings_as_lines():
            scores = score_data(model, **data, batch_size=options.batch_size)
        found |= scores.as_json()
        if not options.json:
            print(scores)
    if options.tasks:
        found["tasks"] = task_results(model, options, seq_length)
        if not options.json:
            print(json.dumps(found["tasks"], indent=2))
    if options.json:
        print(json.dumps(found))
    return 0


def task_results(model: CausalLM, options: argparse.Namespace, seq_length: int) -> dict[str, dict[str, Any]]:
    """Returns the results of the tasks of the options.

    Raises:
        LigerzooError: lm-eval is not installed, or a task is unknown.
    """
    with package_of("integrations", "lm_eval", "transformers", what="tasks need", where="--tasks"):
        from ligerzoo.integrations.tasks import run_tasks

    found = run_tasks(
        model,
        options.tokenizer or options.model,
        options.tasks.split(","),
        max_length=seq_length,
        **{name: getattr(options, name) for name in ("batch_size", "task_directory", "limit")},
    )
    return {task: {name: plain(value) for name, value in entries.items()} for task, entries in found.items()}


def plain(value: Any) -> Any:
    """Returns a number of NumPy as a number of Python."""
    return value.item() if hasattr(value, "item") else value


def tokenizer(options: argparse.Namespace) -> int:
    """Trains a tokenizer and writes it to a new directory."""
    from ligerzoo.text.chat_template import read_template
    from ligerzoo.train.new_tokenizer import CHATML, train_tokenizer

    name, built_in = options.chat_template, {"chatml": CHATML, "none": None}
    with new_directory(options.output, "tokenizer") as target, warnings_as_lines():
        template = built_in[name] if name in built_in else read_template(name)
        trained = train_tokenizer(options.files, options.vocab_size, chat_template=template)
        trained.save_pretrained(target)
        print(f"{len(trained):,} tokens; {trained.eos_token} ends texts and messages")
    return 0


def tokenize(options: argparse.Namespace) -> int:
    """Writes the tokens of text files to a token file."""
    from ligerzoo.text.tokenizer import Tokenizer
    from ligerzoo.train.data import write_tokens

    target: Path = options.output
    if target.exists():
        raise LigerzooError("already exists", where=target, remedy="Choose another file, or delete this one.")
    tokenizer = Tokenizer.from_pretrained(options.tokenizer)
    with warnings_as_lines():
        count = write_tokens(options.files, target, tokenizer, text_unit=options.text_unit)
    print(f"{target}: {count:,} tokens, {target.stat().st_size:,} bytes")
    return 0


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


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Prints each warning in the block as a line on standard error."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print("warning:", message, file=sys.stderr)
        yield

"""Parses the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ligerzoo import __version__
from ligerzoo.cli.model_arguments import add_chat, add_convert, add_demo, add_fuse, add_generate, add_info, add_serve
from ligerzoo.cli.training_arguments import (
    add_config,
    add_evaluate,
    add_tokenize,
    add_tokenizer,
    add_train,
    methods_with,
    training_method,
)
from ligerzoo.errors import did_you_mean


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line. `run` of the result is the function that runs the command.

    Args:
        arguments: the command line without the program name. None uses `sys.argv`.

    Raises:
        SystemExit: the arguments are invalid, or ask for help.
    """
    parser = argparse.ArgumentParser(
        prog="ligerzoo",
        description="Load, run and convert transformer checkpoints in Hugging Face format.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""\
examples:
  ligerzoo demo                                    see what ligerzoo does, in a minute, with a small built-in model
  ligerzoo info HuggingFaceTB/SmolLM2-135M         show a checkpoint's size and memory before downloading its weights
  ligerzoo generate --help                         show the options of a command

exit codes:
  0 success, 1 failure (with one line on standard error), 2 invalid arguments, 130 interrupted

environment:
  HF_HOME sets the directory for downloads. HF_HUB_OFFLINE=1 forbids network access.
  Run `hf auth login` to use gated repositories.""",
    )
    parser.add_argument("--version", action="version", version=f"ligerzoo {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in (add_info, add_generate, add_chat, add_serve, add_convert, add_fuse, add_demo):
        add_command(subparsers)
    add_train(subparsers, training_method(arguments))
    for add_command in (add_evaluate, add_tokenizer, add_tokenize, add_config):
        add_command(subparsers)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].partition("=")[0]
        nearest = did_you_mean(flag, options.parser._option_string_actions)
        remedy = nearest or f"`{options.parser.prog} --help` lists the options."
        if options.parser.prog == "ligerzoo train" and (methods := methods_with(flag)):
            remedy = f"{flag} is an option of --method {', '.join(methods)}."
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}. {remedy}")
    options.check(options)
    return options

"""The command line interface `ligerzoo`: parses arguments, calls the library, prints.

torch takes seconds to import. So each command imports what it needs, and help and argument errors appear at once.

Exit codes: 0 success, 1 failure, 2 invalid arguments, 130 interrupted, 141 the output pipe was closed.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from ligerzoo import __version__
from ligerzoo.arguments import Parser, in_flags
from ligerzoo.cli.console import prepare_streams
from ligerzoo.cli.convert import add_convert, add_fuse
from ligerzoo.cli.demo import add_demo
from ligerzoo.cli.doctor import add_doctor
from ligerzoo.cli.embed import add_embed
from ligerzoo.cli.evaluate import add_evaluate
from ligerzoo.cli.generate import add_chat, add_generate
from ligerzoo.cli.info import add_info
from ligerzoo.cli.parity import add_parity
from ligerzoo.cli.serve import add_serve
from ligerzoo.cli.train import add_config, add_tokenize, add_tokenizer, add_train
from ligerzoo.errors import lines_for_user
from ligerzoo.own_code import import_own_code

__all__ = ["main", "parse"]

OTHER_NAMES = {
    "assistant_model": "--draft",
    "prompt_lookup_num_tokens": "--prompt-lookup",
    "stop_strings": "--stop",
    "truncate_dim": "--dimensions",
    "torch_dtype": "--dtype",
}
"""Options of commands whose names in Python, and so in errors, are others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command line without the program name. None uses `sys.argv`.

    Returns:
        The exit code.

    Raises:
        SystemExit: with code 2 if the arguments are invalid, with code 0 after --help and --version.
    """
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  (None if closed; print would use stdout)
    debug, flags = False, dict[str, str]()
    try:
        try:
            options = parse(arguments)
            debug, flags = options.debug, {**OTHER_NAMES, **options.parser.flags}
            prepare_streams()
            import_own_code(getattr(options, "import_", ()))
            code: int = options.run(options)
            return code
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # keeps the last flush from failing
        return 141
    except Exception as error:
        if debug:
            raise
        bug = f"{type(error).__name__}: {' '.join(str(error).split())} (use --debug for the traceback)"
        for line in lines_for_user(error, lambda one: in_flags(one, flags)) or [bug]:
            print("ligerzoo: error:", line, file=sys.stderr)
        return 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line. `run` of the result is the function that runs the command.

    Args:
        arguments: the command line without the program name. None uses `sys.argv`.

    Raises:
        SystemExit: the arguments are invalid, or ask for help.
    """
    parser = Parser(
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
    for add_command in (add_info, add_generate, add_chat, add_embed, add_serve, add_convert, add_fuse, add_demo):
        add_command(subparsers)
    add_train(subparsers, sys.argv[1:] if arguments is None else arguments)
    for add_command in (add_evaluate, add_parity, add_doctor, add_tokenizer, add_tokenize, add_config):
        add_command(subparsers)
    options = parser.parse_args(arguments)
    options.check(options)
    return options

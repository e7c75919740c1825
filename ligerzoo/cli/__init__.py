"""The command line interface `ligerzoo`: parses arguments, calls the library, prints.

torch takes seconds to import. So each command imports what it needs, and help and argument errors appear at once.

Exit codes: 0 success, 1 failure, 2 invalid arguments, 130 interrupted, 141 the output pipe was closed.
"""

import io
import os
import sys
from collections.abc import Sequence

from ligerzoo.cli.arguments import parse
from ligerzoo.errors import LigerzooError, line_for_user

__all__ = ["main", "parse"]


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
    debug = False
    try:
        try:
            options = parse(arguments)
            debug = options.debug
            prepare_streams()
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
        print("ligerzoo: error:", line_for_user(error) or bug, file=sys.stderr)
        return 1


def prepare_streams() -> None:
    """Sets the error handlers of the standard streams, for text that is invalid in the terminal's encoding.

    Raises:
        LigerzooError: standard output is closed.
    """
    if sys.stdout is None:
        raise LigerzooError("standard output is closed", remedy="Redirect it to /dev/null to discard it.")
    if isinstance(sys.stdout, io.TextIOWrapper):  # replaces what the terminal cannot encode
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):  # the tokenizer refuses invalid text
        sys.stdin.reconfigure(errors="surrogateescape")

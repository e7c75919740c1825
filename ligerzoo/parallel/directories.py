"""Replaces a directory atomically when several processes take part, as saving the state of a run does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ligerzoo.files.atomic import replacing_directory
from ligerzoo.parallel.processes import failing_together, gather_objects, is_main_process


@contextmanager
def replacing_directory_together(
    directory: str | Path, *, keep: Callable[[str], bool] = lambda name: False
) -> Iterator[Path]:
    """`files.atomic.replacing_directory` in all processes: yields one temporary directory, which replaces `directory`.

    The block may call what all processes call, such as `save_pretrained` of a sharded model, with paths below the
    temporary directory. On one host or a shared file system, each process may write files. If a process raises,
    `directory` is unchanged and all processes raise.

    Args:
        directory: the directory to replace, or to create with its parents.
        keep: returns whether to keep an entry of the old directory, given its name.

    Raises:
        CheckpointError: As `replacing_directory`, in the main process.
        LigerzooError: Another process failed.
    """
    what = f"saving {directory}"
    with ExitStack() as replacing:
        own = ""
        with failing_together(what):
            if is_main_process():
                own = str(replacing.enter_context(replacing_directory(directory, keep=keep)))
        temporary = Path(gather_objects(own)[0])
        with failing_together(what):  # and within `replacing`, which then leaves the directory unchanged
            yield temporary
        with failing_together(what):
            replacing.close()

"""Replaces directories atomically.

A process killed at any time leaves the old files or the new ones, never a mixture. `replace_files` replaces single
files instead of a directory: each file is the old one or the new one. Both work in hidden directories, see `slots`.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ligerzoo.errors import CheckpointError
from ligerzoo.files.slots import NEW, OLD, delete_leftovers, is_slot, locked_slot


@contextlib.contextmanager
def replacing_directory(directory: str | Path, *, keep: Callable[[str], bool]) -> Iterator[Path]:
    """Yields an empty temporary directory to fill. On a clean exit it replaces `directory` in one step.

    Entries of `directory` that `keep` accepts are carried over unless the new directory has them, as hard links if
    possible. All others are deleted. Owner and mode are preserved. After an exception `directory` is unchanged, except
    after an interrupt (Ctrl-C), which may come when it has been replaced already. Errors after that are warnings.

    A killed process may leave its slot. The next save to `directory` deletes it. Ctrl-C leaves none: the handler
    deletes the slot before it raises KeyboardInterrupt.

    If the system cannot exchange two directories (Linux and macOS can, on their usual file systems), two renames are
    used. A process killed between them leaves no `directory`; the next save restores the old one first.

    Args:
        directory: the directory to replace, or to create with its parents. A symbolic link to one is followed.
        keep: returns whether to keep an entry of the old directory, given its name. Entries of kept subdirectories are
            kept too.

    Raises:
        CheckpointError: `directory` is a file, belongs to another user, or cannot be renamed.
    """
    target = Path(directory).resolve()
    delete_leftovers(target.parent, target.name)
    refuse_irreplaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked_slot(target) as slot:
        new = slot / NEW
        new.mkdir()
        _keep_owner(target, new)  # may fail: better now than after writing all files
        yield new
        _sync_tree(new)
        if not _rename_if_unused(new, target):
            _carry_over(target, new, keep)
            _keep_owner(target, new)
            new.chmod(stat.S_IMODE(target.stat().st_mode))
            with _staying_in_working_directory():
                replaced = _exchange(slot, target)
            with _warning_of_errors(target, "files that other processes wrote during the save may be lost"):
                _carry_over(replaced, target, keep)  # files that other processes wrote since the first time
        with _warning_of_errors(target, "a power failure may still undo it"):
            _sync(target.parent)


def replace_files(directory: Path, files: Mapping[str, bytes], patterns: Iterable[str]) -> None:
    """Writes files, each in one step, and deletes files of an earlier save that are not among them.

    Args:
        directory: created if it does not exist.
        files: contents by relative path.
        patterns: glob patterns of the files to delete.
    """
    directory.mkdir(parents=True, exist_ok=True)
    delete_leftovers(directory, "files")
    with locked_slot(directory / "files") as slot:
        written = {name: slot / str(number) for number, name in enumerate(files)}
        for name, temporary in written.items():
            temporary.write_bytes(files[name])
        for name, temporary in written.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(directory / name)
    for pattern in patterns:
        for path in directory.glob(pattern):
            if path.relative_to(directory).as_posix() not in files:
                path.unlink()


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a path for the content of a new file, which exists under its name only after a clean exit.

    Raises:
        CheckpointError: the file exists already.
    """
    if path.exists():
        remedy = "Choose another file; existing ones are never overwritten."
        raise CheckpointError("already exists", where=path, expected="a new file", remedy=remedy)
    delete_leftovers(path.parent, path.name)
    with locked_slot(path) as slot:
        yield slot / NEW
        _sync(slot / NEW)
        (slot / NEW).rename(path)


def delete_directory(directory: Path) -> None:
    """Deletes a directory, which disappears in one step. A killed process leaves all of it, or a slot."""
    with locked_slot(directory) as slot:
        directory.rename(slot / NEW)


@contextlib.contextmanager
def _warning_of_errors(target: Path, consequence: str) -> Iterator[None]:
    """Converts an OSError to a warning, because the directory has been replaced already."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{target}: saved, but {consequence}; got {error}", stacklevel=2)


def _keep_owner(target: Path, new: Path) -> None:
    """Sets the owner and group of the new directory to those of the directory that it replaces."""
    if not target.exists():
        return
    old, created = ((owner.st_uid, owner.st_gid) for owner in (target.stat(), new.stat()))
    if created == old:
        return
    try:
        os.chown(new, *old)
    except OSError as error:
        got, expected = ("user {}, group {}".format(*owner) for owner in (created, old))
        what = "cannot be replaced: it would get another owner"
        remedy = "Save to another directory, or as the user who owns this one."
        raise CheckpointError(what, where=target, got=got, expected=expected, remedy=remedy) from error


def refuse_irreplaceable(target: Path) -> None:
    """Raises CheckpointError if `replacing_directory` could not replace the directory, such as a mount point."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError("is a file", where=target, expected="a directory, or a path that does not exist")
    on_another_device = target.stat().st_dev != target.parent.stat().st_dev
    why = got = None
    if target == target.parent or on_another_device or not os.access(target.parent, os.W_OK | os.X_OK):
        why = " in one step: it is a mount point, or its parent is not writable"
        remedy = "Save to a subdirectory of it."
    elif not os.access(target, os.R_OK | os.W_OK | os.X_OK):
        why = ": no permission to read and write it"
        remedy = "Save to another directory, or change its mode."
    elif got := _mount_below(target):
        why = ": it contains a mount point, whose files would be deleted"
        remedy = "Save to another directory, or unmount it."
    if why is not None:
        raise CheckpointError(f"cannot be replaced{why}", where=target, got=got, remedy=remedy)


def _mount_below(directory: Path) -> str | None:
    """Returns a mount point in the directory, or None."""
    table = Path("/proc/self/mountinfo")
    if table.exists():  # Linux; os.path.ismount misses bind mounts from the same file system
        escaped = (line.split()[4] for line in table.read_text().splitlines())
        points = [re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point) for point in escaped]
    else:
        points = [os.path.join(folder, name) for folder, names, _ in os.walk(directory) for name in names]
        points = list(filter(os.path.ismount, points))
    return next((point for point in points if directory in Path(point).parents), None)


def _rename_if_unused(temporary: Path, target: Path) -> bool:
    """Renames to an unused name. Returns False if the name exists, even if another process creates it just now."""
    if target.exists():
        return False
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _carry_over(source: Path, destination: Path, keep: Callable[[str], bool]) -> None:
    """Adds the entries of `source` that `keep` accepts to `destination`, unless they exist. Merges directories."""
    for entry in source.iterdir():
        copy = destination / entry.name
        if not keep(entry.name) or is_slot(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            copy.mkdir(exist_ok=True)
            _carry_over(entry, copy, keep=lambda name: True)
            shutil.copystat(entry, copy)
        else:
            _link_or_copy(entry, copy)
    _sync(destination)


def _link_or_copy(source: Path, destination: Path) -> None:
    """Links or copies a file, unless `destination` exists."""
    try:
        destination.lstat()
    except FileNotFoundError:
        pass
    else:
        return
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:  # the file system has no hard links, or forbids links to other users' files
        try:
            shutil.copy2(source, destination, follow_symlinks=False)
        except PermissionError as error:
            what, remedy = "no permission to read it", "Make it readable, or save to another directory."
            raise CheckpointError(f"cannot be carried over: {what}", where=source, remedy=remedy) from error
        if destination.is_file():
            _sync(destination)


def _sync_tree(directory: Path) -> None:
    def fail(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(directory, onerror=fail):
        for path in (Path(folder, name) for name in names):
            if path.is_file():
                _sync(path)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system has no fsync for directories
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _staying_in_working_directory() -> Iterator[None]:
    """Keeps the path of the working directory, which would otherwise follow a renamed and deleted directory."""
    try:
        path = os.getcwd()
    except FileNotFoundError:  # deleted already
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it was a subdirectory that was not kept
            os.chdir(path)


def _exchange(slot: Path, target: Path) -> Path:
    """Exchanges the new directory in a slot and `target`. Returns the path of the old directory.

    After an exception between two renames, `locked_slot` undoes the first when it exits.
    """
    if _exchange_in_one_step(slot / NEW, target):
        return slot / NEW
    target.rename(slot / OLD)
    (slot / NEW).rename(target)
    return slot / OLD


def _exchange_in_one_step(new: Path, old: Path) -> bool:
    """Exchanges two directories in one step. Returns False if the system cannot."""
    paths = os.fsencode(new), os.fsencode(old)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "renameat2"):
            return False
        at_working_directory, rename_exchange = -100, 2
        status = libc.renameat2(at_working_directory, paths[0], at_working_directory, paths[1], rename_exchange)
    elif sys.platform == "darwin":
        rename_swap = 2
        status = ctypes.CDLL(None, use_errno=True).renamex_np(*paths, rename_swap)
    else:
        return False
    if status == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(old))

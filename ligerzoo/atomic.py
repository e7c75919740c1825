"""Replace a directory as a set: killed at any moment, it holds the old files or the new ones, never a mixture.

Or, where that is too much, single files: each is the old one or the new one.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ligerzoo.errors import CheckpointError


@contextlib.contextmanager
def replacing_directory(directory: str | Path, *, keep: Callable[[str], bool]) -> Iterator[Path]:
    """Yield an empty temporary directory to fill; on a clean exit it takes the place of `directory` in one step.

    What `directory` held is deleted, except the entries that `keep` wants and the new set does not bring itself: those
    are carried over, as hard links where possible. When the block raises, `directory` stays as it was. A killed process
    may leave a hidden sibling behind, named `.<name>.<8 hex digits>`, which can be deleted.

    Where the system cannot exchange two directories (Linux and macOS can, on their usual file systems), two renames do
    it: a kill between those leaves no `directory`, but both sets whole in hidden siblings, the old one in `.<...>.old`.

    Args:
        directory: the directory to replace or to make, parents included. A symbolic link to one is followed.
        keep: says of a name in the old directory whether it is to survive. Not asked about what is in sub-directories.

    Raises:
        CheckpointError: `directory` is a file, or cannot be renamed where it is.
    """
    target = Path(directory).resolve()
    _refuse_irreplaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        replaces = not _put_in_free_place(temporary, target)
        if replaces:
            _carry_over(target, temporary, keep)
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            with _staying_in_working_directory():
                _exchange(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(target.parent)
    if replaces:
        _carry_over(temporary, target, keep)  # what others wrote since the first time
        shutil.rmtree(temporary, ignore_errors=True)  # the new set stands: a leftover wastes space, no more


def replace_files(directory: Path, files: Mapping[str, bytes], patterns: Iterable[str]) -> None:
    """Write files, each in one step, and remove those of an earlier set that are not among them.

    Args:
        directory: made when it does not exist.
        files: contents by name, which may lead into sub-directories.
        patterns: glob patterns of all the names that the set may have.
    """
    for name, content in files.items():
        _write_in_one_step(directory / name, content)
    for pattern in patterns:
        for path in directory.glob(pattern):
            if path.relative_to(directory).as_posix() not in files:
                path.unlink()


def _write_in_one_step(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _refuse_irreplaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError("is a file", where=target, expected="a directory, or nothing yet")
    on_another_device = target.stat().st_dev != target.parent.stat().st_dev
    if target == target.parent or on_another_device or not os.access(target.parent, os.W_OK | os.X_OK):
        raise CheckpointError(
            "cannot be replaced in one step: it is a mount point, or its parent is not writable",
            where=target,
            remedy="Save into a sub-directory of it.",
        )
    if mount := _mount_below(target):
        raise CheckpointError(
            "cannot be replaced: something is mounted in it, which would be deleted with the old set",
            where=target,
            got=mount,
            remedy="Save elsewhere, or unmount it.",
        )


def _mount_below(directory: Path) -> str | None:
    """A mount point within the directory, if there is one."""
    table = Path("/proc/self/mountinfo")
    if table.exists():  # Linux; it alone knows of a mount from the same file system
        escaped = (line.split()[4] for line in table.read_text().splitlines())
        points = [re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point) for point in escaped]
    else:
        points = [os.path.join(folder, name) for folder, names, _ in os.walk(directory) for name in names]
        points = list(filter(os.path.ismount, points))
    return next((point for point in points if directory in Path(point).parents), None)


def _put_in_free_place(temporary: Path, target: Path) -> bool:
    """Rename to a name that nothing has; False when it is taken, be it by another process in this very moment."""
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
    """Add to `destination` what it lacks of the entries of `source` that `keep` wants. Directories are merged."""
    for entry in source.iterdir():
        twin = destination / entry.name
        if not keep(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            twin.mkdir(exist_ok=True)
            _carry_over(entry, twin, keep=lambda name: True)
            shutil.copystat(entry, twin)
        elif not os.path.lexists(twin):
            _link_or_copy(entry, twin)
    _sync(destination)


def _link_or_copy(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:  # no hard links on this file system, or not of a file that is another user's
        shutil.copy2(source, destination, follow_symlinks=False)
        if destination.is_file():
            _sync(destination)


def _sync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            if path.is_file():
                _sync(path)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this file system does not know fsync of a directory
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _staying_in_working_directory() -> Iterator[None]:
    """Keep the working directory's path, where it would follow a directory that is renamed, and then deleted."""
    try:
        path = os.getcwd()
    except FileNotFoundError:  # deleted already
        yield
        return
    yield
    with contextlib.suppress(OSError):  # it was in a sub-directory that was not kept
        os.chdir(path)


def _exchange(new: Path, old: Path) -> None:
    """Swap two sibling directories."""
    if _exchange_in_one_step(new, old):
        return
    parked = new.with_name(new.name + ".old")
    old.rename(parked)
    try:
        new.rename(old)
    except BaseException:
        parked.rename(old)
        raise
    parked.rename(new)


def _exchange_in_one_step(new: Path, old: Path) -> bool:
    """Swap through renameat2(RENAME_EXCHANGE) or renamex_np(RENAME_SWAP); False where the system has no such thing."""
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

"""Replace a directory as a set, and read one as a set.

A process killed at any moment leaves the old files or the new ones, never a mixture. Where replacing the directory is
too much, single files are replaced: each is the old one or the new one.

A save works in a hidden directory, its slot: `.<name>.<12 hex digits>.ligerzoo` beside what it replaces. The process
locks the file `lock` in it, so that a later save can tell a leftover of a killed process from a save that still runs.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ligerzoo.errors import CheckpointError

_LOCK, _NEW, _OLD = "lock", "new", "old"  # the entries of a slot


@contextlib.contextmanager
def reading_directory(directory: str | Path) -> Iterator[None]:
    """Make sure that all files that the block opens are of one set.

    The directory stays open until the end of the block: its inode number cannot go to another directory meanwhile, so
    that equal numbers mean that nobody has replaced it. What the block has opened may be read later.

    Raises:
        CheckpointError: there is no such directory; or it was replaced during the block, whatever else went wrong.
    """
    try:
        descriptor = os.open(directory, os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY))
    except OSError as error:
        known = {errno.ENOENT: "no such directory", errno.ENOTDIR: "is not a directory"}
        problem = known.get(error.errno or 0, f"cannot be opened: {error.strerror}")
        raise CheckpointError(problem, where=directory, expected="a directory with a checkpoint's files") from error
    failure: Exception | None = None
    try:
        try:
            yield
        except Exception as error:
            failure = error
        if not _is_at(descriptor, directory):
            raise CheckpointError(
                "was replaced while it was read", where=directory, remedy="Load it again."
            ) from failure
        if failure is not None:
            raise failure
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing_directory(directory: str | Path, *, keep: Callable[[str], bool]) -> Iterator[Path]:
    """Yield an empty temporary directory to fill; on a clean exit it takes the place of `directory` in one step.

    What `directory` held is deleted, except the entries that `keep` wants and the new set does not bring itself: those
    are carried over, as hard links where possible. Its owner and mode stay. An exception means that `directory` stays
    as it was, except an interrupt (Ctrl-C), which may also come when the new set is in place. What fails after that is
    a warning.

    A killed process may leave a slot behind. The next save to `directory` deletes it.

    Where the system cannot exchange two directories (Linux and macOS can, on their usual file systems), two renames do
    it: a kill between those leaves no `directory`, and the next save first puts the old set back.

    Args:
        directory: the directory to replace or to make, parents included. A symbolic link to one is followed.
        keep: says of a name in the old directory whether it is to survive. Not asked about what is in sub-directories.

    Raises:
        CheckpointError: `directory` is a file, belongs to somebody else, or cannot be renamed where it is.
    """
    target = Path(directory).resolve()
    _delete_leftovers(target)
    _refuse_irreplaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _slot_beside(target) as slot:
        new = slot / _NEW
        new.mkdir()
        _keep_owner(target, new)  # which may be refused: better now than after all has been written
        yield new
        _sync_tree(new)
        if not _put_in_free_place(new, target):
            _carry_over(target, new, keep)
            _keep_owner(target, new)
            new.chmod(stat.S_IMODE(target.stat().st_mode))
            with _staying_in_working_directory():
                replaced = _exchange(slot, target)
            with _warning_of_errors(target, "what other processes wrote meanwhile may be lost"):
                _carry_over(replaced, target, keep)  # what they wrote since the first time
        with _warning_of_errors(target, "a power failure may still undo it"):
            _sync(target.parent)


def replace_files(directory: Path, files: Mapping[str, bytes], patterns: Iterable[str]) -> None:
    """Write files, each in one step, and remove those of an earlier set that are not among them.

    Args:
        directory: made when it does not exist.
        files: contents by name, which may lead into sub-directories.
        patterns: glob patterns of all the names that the set may have.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _delete_leftovers(directory / "files")
    with _slot_beside(directory / "files") as slot:
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
def _slot_beside(target: Path) -> Iterator[Path]:
    """Yield a new slot for saving to `target`, locked; delete it in the end."""
    with contextlib.ExitStack() as cleanup:
        slot = None
        while slot is None:
            slot = _claim_slot(target, cleanup)
        yield slot


def _claim_slot(target: Path, cleanup: contextlib.ExitStack) -> Path | None:
    """Make and lock a slot; None if another process has taken it for a leftover before it was locked."""
    slot = target.with_name(f".{target.name}.{secrets.token_hex(6)}.ligerzoo")
    cleanup.callback(_delete_slot, slot, target)  # registered first: an interrupt may come as soon as it is made
    slot.mkdir()
    try:
        descriptor = os.open(slot / _LOCK, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        return None
    cleanup.callback(_unlock, descriptor)
    try:
        _lock(descriptor)
    except BlockingIOError:
        return None
    except OSError:  # this file system has no locks, so that leftovers on it are never deleted
        pass
    return slot if _is_at(descriptor, slot / _LOCK) else None


def _delete_leftovers(target: Path) -> None:
    """Delete the slots that killed saves to `target` have left behind, as far as that is possible."""
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            if _is_slot(name, of=re.escape(target.name)):
                with contextlib.suppress(OSError):
                    _delete_leftover(target.with_name(name), target)


def _delete_leftover(slot: Path, target: Path) -> None:
    try:
        slot.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return
    descriptor = os.open(slot / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)  # all but an empty slot have had one
    try:
        _lock(descriptor)  # raises if the save still runs
        _delete_slot(slot, target)
    finally:
        _unlock(descriptor)


def _is_slot(name: str, of: str = ".+") -> bool:
    """Whether the name is that of a slot, of a target whose name fits the pattern."""
    return re.fullmatch(rf"\.{of}\.[0-9a-f]{{12}}\.ligerzoo", name, re.DOTALL) is not None


def _delete_slot(slot: Path, target: Path) -> None:
    """Delete a slot; but if it alone holds the old set, for want of the second of two renames, put that back first.

    Raises no OSError: whether the save has succeeded does not depend on this.
    """
    try:
        _try_to_delete_slot(slot, target)
    except BaseException:  # an interrupt: it can wait until this is done
        _try_to_delete_slot(slot, target)
        raise


def _try_to_delete_slot(slot: Path, target: Path) -> None:
    try:
        (slot / _OLD).rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            warnings.warn(f"{slot}: stays, as it may hold all there is of {target}; got {error}", stacklevel=2)
            return
    with contextlib.suppress(OSError):  # of closing a directory, which rmtree does not ignore
        shutil.rmtree(slot, ignore_errors=True)
    if os.path.lexists(slot):
        warnings.warn(f"{slot}: cannot be deleted; the next save to {target} tries again", stacklevel=2)


def _lock(descriptor: int) -> None:
    """Lock a file until it is closed; raise BlockingIOError if another process has locked it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _is_at(descriptor: int, path: str | Path) -> bool:
    """Whether the path leads to the open file or directory."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


@contextlib.contextmanager
def _warning_of_errors(target: Path, consequence: str) -> Iterator[None]:
    """Turn an OSError into a warning, for the new set is in place already."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{target}: saved, but {consequence}; got {error}", stacklevel=2)


def _keep_owner(target: Path, new: Path) -> None:
    """Give the new directory the owner and the group of the one that it is to replace."""
    if not target.exists():
        return
    old, made = target.stat(), new.stat()
    if (made.st_uid, made.st_gid) == (old.st_uid, old.st_gid):
        return
    try:
        os.chown(new, old.st_uid, old.st_gid)
    except OSError as error:
        raise CheckpointError(
            "cannot be replaced: it would get another owner",
            where=target,
            got=f"user {made.st_uid}, group {made.st_gid}",
            expected=f"user {old.st_uid}, group {old.st_gid}",
            remedy="Save elsewhere, or as the user who owns it.",
        ) from error


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
    if not os.access(target, os.R_OK | os.W_OK | os.X_OK):
        raise CheckpointError(
            "cannot be replaced: no permission to read it and to write to it",
            where=target,
            remedy="Save elsewhere, or change its mode.",
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
        if not keep(entry.name) or _is_slot(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            twin.mkdir(exist_ok=True)
            _carry_over(entry, twin, keep=lambda name: True)
            shutil.copystat(entry, twin)
        else:
            _link_or_copy(entry, twin)
    _sync(destination)


def _link_or_copy(source: Path, destination: Path) -> None:
    """Make `destination` the same file as `source`, or a copy of it, unless it exists."""
    try:
        destination.lstat()
    except FileNotFoundError:
        pass
    else:
        return
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:  # no hard links on this file system, or not of a file that is another user's
        try:
            shutil.copy2(source, destination, follow_symlinks=False)
        except PermissionError as error:
            raise CheckpointError(
                "cannot be carried over: no permission to read it",
                where=source,
                remedy="Make it readable, or save elsewhere.",
            ) from error
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
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it was in a sub-directory that was not kept
            os.chdir(path)


def _exchange(slot: Path, target: Path) -> Path:
    """Put the new set of a slot in the place of `target`. Returns where the old set is now.

    An exception between the two renames leaves it to `_delete_slot` to undo the first.
    """
    if _exchange_in_one_step(slot / _NEW, target):
        return slot / _NEW
    target.rename(slot / _OLD)
    (slot / _NEW).rename(target)
    return slot / _OLD


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

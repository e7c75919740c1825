"""Tests of atomic replacement of directories: deleted and kept files, concurrent processes, kills and faults."""

import errno
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ligerzoo
from ligerzoo.errors import CheckpointError
from ligerzoo.files import atomic, slots
from ligerzoo.files.atomic import replacing_directory
from ligerzoo.files.untrusted import reading_directory


def keep_all(name: str) -> bool:
    return True


def keep_none(name: str) -> bool:
    return False


def fill(directory: Path, **contents: str) -> None:
    for name, text in contents.items():
        (directory / name).write_text(text)


def contents(directory: Path) -> dict[str, str]:
    """Returns the contents of all files below a directory; a symbolic link is shown as `-> target`."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(directory))] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[str(path.relative_to(directory))] = path.read_text()
    return found


@pytest.fixture
def old(tmp_path: Path) -> Path:
    directory = tmp_path / "old"
    directory.mkdir()
    fill(directory, a="old a", b="old b")
    return directory


def replace(directory: str | Path, keep: Callable[[str], bool] = keep_none) -> None:
    with replacing_directory(directory, keep=keep) as temporary:
        fill(temporary, a="new a", c="new c")


NEW = {"a": "new a", "c": "new c"}


def only_entry(parent: Path) -> str:
    (name,) = os.listdir(parent)
    return name


def test_new_directory_gets_parents_and_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace(tmp_path / "deep" / "new")
    finally:
        os.umask(before)
    assert contents(tmp_path / "deep" / "new") == NEW
    assert stat.S_IMODE((tmp_path / "deep" / "new").stat().st_mode) == 0o750
    assert only_entry(tmp_path / "deep") == "new"


def test_block_fills_empty_hidden_directory(old: Path) -> None:
    with replacing_directory(old, keep=keep_all) as temporary:
        assert temporary.parent.parent == old.parent
        assert re.fullmatch(r"\.old\.[0-9a-f]{12}\.ligerzoo", temporary.parent.name)
        assert os.listdir(temporary) == []


def test_old_files_are_deleted_and_mode_is_kept(old: Path) -> None:
    old.chmod(0o751)
    replace(old)
    assert contents(old) == NEW
    assert stat.S_IMODE(old.stat().st_mode) == 0o751
    assert only_entry(old.parent) == "old"


def test_kept_entries_are_carried_over(old: Path) -> None:
    (old / "logs" / "deep").mkdir(parents=True)
    (old / "logs").chmod(0o700)
    (old / "empty").mkdir()
    fill(old / "logs" / "deep", log="text", b="kept: only the names at the top are asked about")
    (old / "link").symlink_to("../elsewhere/missing")
    (old / "folder").symlink_to("logs")
    inode = (old / "logs" / "deep" / "log").stat().st_ino
    replace(old, keep=lambda name: name != "b")
    assert contents(old) == NEW | {
        "folder": "-> logs",
        "link": "-> ../elsewhere/missing",
        "logs/deep/b": "kept: only the names at the top are asked about",
        "logs/deep/log": "text",
    }
    assert (old / "empty").is_dir()
    assert stat.S_IMODE((old / "logs").stat().st_mode) == 0o700
    assert (old / "logs" / "deep" / "log").stat().st_ino == inode  # a hard link: the data were not copied


def test_directories_are_merged(old: Path) -> None:
    (old / "both").mkdir()
    fill(old / "both", x="old x", y="old y")
    with replacing_directory(old, keep=keep_all) as temporary:
        (temporary / "both").mkdir()
        fill(temporary / "both", x="new x")
    assert contents(old) == {"a": "old a", "b": "old b", "both/x": "new x", "both/y": "old y"}


def test_files_are_copied_without_hard_links(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError

    (old / "link").symlink_to("missing")
    inode = (old / "b").stat().st_ino
    monkeypatch.setattr(os, "link", refuse)
    replace(old, keep=keep_all)
    assert contents(old) == NEW | {"b": "old b", "link": "-> missing"}
    assert (old / "b").stat().st_ino != inode


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_error_in_block_changes_nothing(old: Path, error: type[BaseException]) -> None:
    def half() -> None:
        with replacing_directory(old, keep=keep_all) as temporary:
            fill(temporary, a="half")
            raise error

    inode = old.stat().st_ino
    with pytest.raises(error):
        half()
    assert contents(old) == {"a": "old a", "b": "old b"}
    assert old.stat().st_ino == inode
    assert only_entry(old.parent) == "old"


def test_error_in_block_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), replacing_directory(tmp_path / "new", keep=keep_all):
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_error_while_carrying_over_changes_nothing(old: Path) -> None:
    def confused(name: str) -> bool:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        replace(old, keep=confused)
    assert contents(old) == {"a": "old a", "b": "old b"}
    assert only_entry(old.parent) == "old"


def test_file_is_refused(old: Path) -> None:
    with pytest.raises(CheckpointError, match=r"old/a: is a file"):
        replace(old / "a")
    assert contents(old) == {"a": "old a", "b": "old b"}


@pytest.mark.parametrize("directory", ["/", "/proc"])
def test_mount_point_is_refused(directory: str) -> None:
    with (
        pytest.raises(CheckpointError, match="Save to a subdirectory"),
        replacing_directory(directory, keep=keep_all),
    ):
        pytest.fail("it should not have come so far")


def test_directory_with_mount_point_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = str(old / "logs" / "the volume").replace(" ", r"\040")
    table = f"22 1 8:1 / / rw - ext4 /dev/vda rw\n36 22 8:1 /volume {mounted} rw - ext4 /dev/vda rw\n"
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: table)
    before = contents(old)
    with (
        pytest.raises(CheckpointError, match=r"contains a mount point.*the volume"),
        replacing_directory(old, keep=bool),
    ):
        pytest.fail("the block must not run")
    assert contents(old) == before


def test_directory_created_by_another_process_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new"
    with replacing_directory(target, keep=lambda name: name == "theirs") as temporary:
        (temporary / "ours").write_text("ours")
        target.mkdir()
        (target / "theirs").write_text("theirs")
        monkeypatch.setattr(Path, "exists", lambda path: path != target and os.path.exists(path))
    assert sorted(os.listdir(target)) == ["ours", "theirs"]
    assert os.listdir(tmp_path) == ["new"]


def test_directory_in_unwritable_parent_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != old.parent)  # the tests may run as root, who may all
    with pytest.raises(CheckpointError, match="Save to a subdirectory"):
        replace(old)


def test_target_of_symbolic_link_is_replaced(old: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link"
    link.symlink_to(old)
    replace(link)
    assert link.is_symlink()
    assert contents(old) == NEW
    assert only_entry(tmp_path / "links") == "link"


@pytest.mark.parametrize("name", [".", "", "../old", "logs/.."])
def test_working_directory_can_be_replaced(old: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (old / "logs").mkdir()
    monkeypatch.chdir(old)
    replace(name)
    assert contents(old) == NEW
    assert Path("a").read_text() == "new a"  # and we are still in it


def test_working_directory_in_kept_subdirectory_is_kept(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (old / "logs").mkdir()
    fill(old / "logs", log="text")
    monkeypatch.chdir(old / "logs")
    replace("..", keep=keep_all)
    assert Path("log").read_text() == "text"
    assert Path("../a").read_text() == "new a"


def test_all_files_are_synced_before_the_exchange(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, exchange = atomic._sync, atomic._exchange

    def recording_sync(path: Path) -> None:
        events.append(str(path.relative_to(old.parent)))
        sync(path)

    def recording_exchange(slot: Path, target: Path) -> Path:
        events.append("exchange")
        return exchange(slot, target)

    monkeypatch.setattr(atomic, "_sync", recording_sync)
    monkeypatch.setattr(atomic, "_exchange", recording_exchange)
    with replacing_directory(old, keep=keep_all) as temporary:
        (temporary / "deep").mkdir()
        fill(temporary, a="new a")
        fill(temporary / "deep", d="new d")
    at = events.index("exchange")
    new = temporary.relative_to(old.parent)
    assert {str(new / path) for path in ("", "a", "deep", "deep/d")} <= set(events[:at])
    assert events[at - 1] == str(new)  # after the last entry was linked into it
    assert events[-1] == "."


def test_files_written_by_others_during_the_exchange_are_kept(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = atomic._exchange

    def interrupted_exchange(slot: Path, target: Path) -> Path:
        fill(target, late="of another process", unwanted="")
        return exchange(slot, target)

    monkeypatch.setattr(atomic, "_exchange", interrupted_exchange)
    replace(old, keep=lambda name: name == "late")
    assert contents(old) == NEW | {"late": "of another process"}


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="elsewhere two renames do it")
def test_system_exchanges_in_one_step(old: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert atomic._exchange_in_one_step(tmp_path / "new", old)
    assert os.listdir(old) == []
    assert contents(tmp_path / "new") == {"a": "old a", "b": "old b"}
    with pytest.raises(FileNotFoundError, match="missing"):
        atomic._exchange_in_one_step(old, tmp_path / "missing")


def test_two_renames_without_exchange(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_exchange_in_one_step", lambda new, old: False)
    replace(old, keep=lambda name: name == "b")
    assert contents(old) == NEW | {"b": "old b"}
    assert only_entry(old.parent) == "old"


def test_first_rename_is_undone_if_the_second_fails(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def failing_rename(self: Path, target: Path) -> Path:
        if target == old and self.name == "new":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(atomic, "_exchange_in_one_step", lambda new, old: False)
    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OSError, match="no"):
        replace(old)
    assert contents(old) == {"a": "old a", "b": "old b"}
    assert only_entry(old.parent) == "old"


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.EPERM, errno.EROFS])
def test_cleanup_that_cannot_rename(old: Path, exchanges: bool, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a whole save there is nothing to rename: the slot is deleted."""
    rename = Path.rename

    def failing_rename(self: Path, target: Path) -> Path:
        if self.name == "old" and target == old:
            raise OSError(error, "no")
        return rename(self, target)

    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange_in_one_step", lambda new, old: False)
    monkeypatch.setattr(Path, "rename", failing_rename)
    replace(old)
    assert contents(old) == NEW
    assert only_entry(old.parent) == "old"


# Slots


def test_slot_of_running_save_is_kept(old: Path) -> None:
    with replacing_directory(old, keep=keep_all) as temporary:
        fill(temporary, a="first")
        replace(old)
        replace(old)
        assert contents(old) == NEW
        assert contents(temporary) == {"a": "first"}
    assert contents(old) == {"a": "first", "c": "new c"}
    assert only_entry(old.parent) == "old"


def test_slots_of_other_directories_are_kept(old: Path) -> None:
    others = [".old.b.0123456789ab.ligerzoo", ".old.0123456789ab", ".old.XYZ.ligerzoo", "old.0123456789ab.ligerzoo"]
    for name in (*others, ".old.0123456789ab.ligerzoo", ".old.ba9876543210.ligerzoo"):
        (old.parent / name / "new").mkdir(parents=True)
    (old.parent / ".old.ba9876543210.ligerzoo" / "new").rmdir()  # killed before it had a lock
    (old.parent / ".old.cccccccccccc.ligerzoo").symlink_to("old")
    replace(old)
    assert sorted(os.listdir(old.parent)) == sorted([*others, ".old.cccccccccccc.ligerzoo", "old"])
    assert contents(old) == NEW


def test_slot_deleted_by_another_process_is_replaced(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, deleted = Path.mkdir, []

    def mkdir_and_lose(self: Path, *arguments: object, **options: object) -> None:
        mkdir(self, *arguments, **options)  # type: ignore[arg-type]
        if self.name.endswith(".ligerzoo") and len(deleted) < 2:
            slots.delete_leftovers(old.parent, old.name)
            deleted.append(self)

    monkeypatch.setattr(Path, "mkdir", mkdir_and_lose)
    replace(old)
    assert len(deleted) == 2
    assert contents(old) == NEW
    assert only_entry(old.parent) == "old"


def test_lock_created_again_during_the_deletion(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another save in the directory, which finds the slot unlocked."""
    rmtree, calls = shutil.rmtree, []

    def lose_to_another(path: Path, **options: object) -> None:
        calls.append(path)
        if len(calls) == 1:
            (path / "lock").unlink()
            (path / "lock").touch()
        else:
            rmtree(path, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(shutil, "rmtree", lose_to_another)
    replace(old)
    assert contents(old) == NEW
    assert only_entry(old.parent) == "old"


def test_save_works_without_locks_and_keeps_leftovers(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (old.parent / ".old.0123456789ab.ligerzoo" / "new").mkdir(parents=True)
    replace(old)
    assert contents(old) == NEW
    assert sorted(os.listdir(old.parent)) == [".old.0123456789ab.ligerzoo", "old"]


def test_slots_are_not_carried_over(old: Path) -> None:
    (old / ".files.0123456789ab.ligerzoo").mkdir()
    replace(old, keep=keep_all)
    assert not (old / ".files.0123456789ab.ligerzoo").exists()


def test_files_are_replaced_together_unless_one_fails(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (old / ".files.0123456789ab.ligerzoo" / "0").mkdir(parents=True)
    atomic.replace_files(old, {"a": b"new a", "deep/d": b"new d"}, ["a", "b", "deep/*"])
    assert contents(old) == {"a": "new a", "deep/d": "new d"}
    assert sorted(os.listdir(old)) == ["a", "deep"]

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        atomic.replace_files(old, {"a": b"newer a"}, ["a"])
    assert contents(old) == {"a": "new a", "deep/d": "new d"}
    assert sorted(os.listdir(old)) == ["a", "deep"]


def test_a_directory_is_deleted_in_one_step(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process killed after the rename leaves a slot, which a cleanup of the parent deletes under any name."""
    with monkeypatch.context() as patch:
        patch.setattr(slots, "_delete_slot", lambda slot, target: None)
        atomic.delete_directory(old)
    (slot,) = os.listdir(old.parent)
    assert slot.startswith(".old.")
    slots.delete_leftovers(old.parent, "other")
    assert os.listdir(old.parent) == [slot]
    slots.delete_leftovers(old.parent)
    assert os.listdir(old.parent) == []


# Owners


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give a directory away")
def test_owner_and_group_are_kept_or_the_save_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(old, 12345, 54321)
    replace(old)
    assert (old.stat().st_uid, old.stat().st_gid) == (12345, 54321)
    assert contents(old) == NEW

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)  # as for anybody but root
    message = "another owner; got user 0, group 0; expected user 12345, group 54321. Save to another directory, or as"
    with pytest.raises(CheckpointError, match=message), replacing_directory(old, keep=keep_none):
        pytest.fail("refused before anything is written")
    assert contents(old) == NEW
    assert only_entry(old.parent) == "old"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give a directory away")
def test_owner_changed_during_the_save_is_kept(old: Path) -> None:
    with replacing_directory(old, keep=keep_none) as temporary:
        fill(temporary, a="new a", c="new c")
        os.chown(old, 12345, 54321)
    assert (old.stat().st_uid, old.stat().st_gid) == (12345, 54321)


def test_directory_without_permissions_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != old)  # the tests may run as root, who may all
    with pytest.raises(CheckpointError, match="no permission to read and write it"):
        replace(old)


def test_file_that_cannot_be_carried_over_is_named(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "copy2", refuse)
    with pytest.raises(CheckpointError, match="old/b: cannot be carried over: no permission to read it"):
        replace(old, keep=lambda name: name == "b")
    assert contents(old) == {"a": "old a", "b": "old b"}


# Reading


REPLACED = "old: was replaced while it was read. Load it again."


def read(directory: Path, *steps: Callable[[], object], error: type[BaseException] | None = None) -> None:
    with reading_directory(directory):
        for step in steps:
            step()
        if error is not None:
            raise error


def test_reading_unchanged_directory(old: Path) -> None:
    read(old, lambda: fill(old, log="others may write to it"))
    with pytest.raises(ZeroDivisionError):
        read(old, error=ZeroDivisionError)


@pytest.mark.parametrize("error", [FileNotFoundError, RuntimeError, None])
def test_directory_replaced_while_read_is_an_error(old: Path, error: type[Exception] | None) -> None:
    with pytest.raises(CheckpointError, match=REPLACED) as caught:
        read(old, lambda: replace(old), error=error)
    assert isinstance(caught.value.__cause__, error or type(None))


def test_directory_replaced_twice_while_read_is_an_error(old: Path) -> None:
    """File systems reuse the inode numbers of deleted directories."""
    for _ in range(20):
        with pytest.raises(CheckpointError, match=REPLACED):
            read(old, lambda: replace(old), lambda: replace(old))


def test_directory_deleted_while_read_is_an_error(old: Path) -> None:
    with pytest.raises(CheckpointError, match=REPLACED):
        read(old, lambda: shutil.rmtree(old))


def test_interrupt_while_reading_is_raised_unchanged(old: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        read(old, lambda: replace(old), error=KeyboardInterrupt)


def test_second_interrupt_during_the_deletion(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rmtree, deletions = shutil.rmtree, []

    def interrupted_rmtree(path: Path, **options: Any) -> None:
        deletions.append(path)
        if len(deletions) == 1:
            signal.raise_signal(signal.SIGINT)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted_rmtree)
    with pytest.raises(KeyboardInterrupt), replacing_directory(old, keep=keep_none):
        signal.raise_signal(signal.SIGINT)
    assert len(deletions) > 1
    assert only_entry(old.parent) == "old"
    assert contents(old) == {"a": "old a", "b": "old b"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_save_continues_if_the_interrupt_handler_raises_nothing(old: Path) -> None:
    received: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        with replacing_directory(old, keep=keep_none) as temporary:
            signal.raise_signal(signal.SIGINT)
            fill(temporary, a="new a", c="new c")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert received == [signal.SIGINT]
    assert contents(old) == NEW


# Kills, interrupts and faults at every line, instruction and system call

FAULTS = """
import contextlib, fcntl, os, shutil, signal, sys, warnings
from pathlib import Path
from ligerzoo.files import atomic, slots

parent, scenario, fault, step = Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
target = parent / "set"
fsync, os.fsync = os.fsync, lambda descriptor: None  # slow, and no matter where only a process dies
warnings.simplefilter("always")
if scenario == "two renames":
    atomic._exchange_in_one_step = lambda new, old: False

def save(version):
    with atomic.replacing_directory(target, keep=lambda name: name.startswith("user")) as temporary:
        for name in ("x", "y", "z"):
            (temporary / name).write_text(version)

def version():
    if not target.exists():
        return None
    texts = {(target / name).read_text() for name in ("x", "y", "z")}
    users = scenario == "first" or (target / "user" / "file").read_text() == "mine"
    names = {"x", "y", "z"} if scenario == "first" else {"x", "y", "z", "user"}
    assert len(texts) == 1 and users and set(os.listdir(target)) == names, os.listdir(target)
    return texts.pop()

def prepare():
    shutil.rmtree(parent)
    parent.mkdir()
    if scenario != "first":
        save("old")
        (target / "user").mkdir()
        (target / "user" / "file").write_text("mine")

before = None if scenario == "first" else "old"

def finish():
    save("next")  # which deletes what is left of the save before
    assert version() == "next"
    assert os.listdir(parent) == ["set"], os.listdir(parent)
"""

AT_EVERY_LINE = """
def act_at(number):
    executed = 0
    def trace(frame, event, argument):
        nonlocal executed
        if frame.f_code.co_filename not in (atomic.__file__, slots.__file__, "<string>"):
            return None
        executed += event == "line"
        if executed == number and event == "line":
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt
        return trace
    sys.settrace(trace)

lines, seen, status = 0, set(), -1
while status:
    prepare()
    lines += step
    child = os.fork()
    if child == 0:
        act_at(lines)
        try:
            save("new")
        except KeyboardInterrupt:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, 256 if fault == "interrupt" else signal.SIGKILL), status
    seen.add(version() or "nothing")
    if fault == "interrupt":
        assert version() in (before, "new")
    finish()
assert lines > 30, lines
expected = {before or "nothing", "new"} | ({"nothing"} if scenario == "two renames" and fault == "kill" else set())
assert seen == expected or step > 1 and seen <= expected, seen
"""

AT_EVERY_INSTRUCTION = """
FILES = atomic.__file__, slots.__file__, contextlib.__file__, shutil.__file__, signal.__file__, "<string>"

def interrupt_at(number):
    executed = 0
    def trace(frame, event, argument):
        nonlocal executed
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed += 1
        if executed == number:
            signal.raise_signal(signal.SIGINT)
        return trace
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces instructions only if a frame asks before settrace
    sys.settrace(trace)

instructions, seen, status = 0, set(), -1
while status:
    prepare()
    instructions += step
    child = os.fork()
    if child == 0:
        interrupt_at(instructions)
        try:
            save("new")
        except KeyboardInterrupt:
            os._exit(1)  # before objects that the traceback holds are finalized
        sys.settrace(None)
        os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 2)
    status = os.waitpid(child, 0)[1]
    assert status in (0, 256), (status, instructions)
    seen.add(version())
    assert version() in (before, "new"), (version(), instructions)
    assert set(os.listdir(parent)) <= {"set"}, (os.listdir(parent), instructions)
assert instructions > 500, instructions  # calls and lines alone are fewer than 400
assert seen == {before, "new"}, seen
"""

AT_EVERY_CALL = """
CALLS = (
    "chmod", "chown", "close", "fstat", "fsync", "getcwd", "link", "listdir", "lstat", "mkdir", "open", "rename",
    "replace", "rmdir", "scandir", "stat", "unlink", "utime",
)
calls, at, log = 0, 0, []

def counting(function, name):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls != at:
            return function(*arguments, **options)
        log.append(name)
        if fault == "error":
            raise OSError(5, "Input/output error")
        if fault == "interrupt after":
            function(*arguments, **options)
        raise KeyboardInterrupt
    return call

@contextlib.contextmanager
def faulty():
    # Interrupted after a close, shutil closes again.
    owners = [(os, name) for name in CALLS if (name, fault) != ("close", "interrupt after")]
    owners += [(fcntl, "flock"), (atomic, "_exchange_in_one_step")]
    true = [(owner, name, getattr(owner, name)) for owner, name in owners]
    for owner, name, function in true:
        setattr(owner, name, counting(function, name))
    try:
        yield
    finally:
        for owner, name, function in true:
            setattr(owner, name, function)

seen = set()
while at <= calls:
    prepare()
    at, calls = at + 1, 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with faulty():
                save("new")
        except OSError:
            outcome = "error"
            assert version() == before, (at, log[-1], version())
        except KeyboardInterrupt:
            outcome = "interrupt"
            assert version() in (before, "new"), (at, log[-1], version())
            assert set(os.listdir(parent)) <= {"set"}, (at, log[-1], os.listdir(parent))
        else:
            outcome = "saved"
            assert version() == "new", (at, log[-1])
            assert os.listdir(parent) == ["set"] or warned, (at, log[-1], os.listdir(parent))
    seen.add((outcome, version()))
    finish()
assert at > 40, at
raised = "error" if fault == "error" else "interrupt"
assert {(raised, before), ("saved", "new")} <= seen, seen
"""


def run_faults(script: str, directory: Path, scenario: str, fault: str, step: int = 1) -> None:
    directory.mkdir()
    subprocess.run(
        [sys.executable, "-c", FAULTS + script, str(directory), scenario, fault, str(step)],
        env=os.environ | {"PYTHONPATH": str(Path(ligerzoo.__file__).parents[1])},
        check=True,
    )


@pytest.mark.parametrize(
    "fault, step",
    [
        ("kill", 7),
        pytest.param("kill", 1, marks=pytest.mark.slow),
        pytest.param("interrupt", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("scenario", ["exchange", "two renames", "first"])
def test_kill_or_interrupt_at_any_line_leaves_old_or_new_files(
    tmp_path: Path, scenario: str, fault: str, step: int
) -> None:
    """A save killed between two renames leaves no directory; the next save restores it."""
    run_faults(AT_EVERY_LINE, tmp_path / "directory", scenario, fault, step)


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", ["exchange", "two renames", "first"])
def test_interrupt_at_any_instruction_leaves_no_slot(tmp_path: Path, scenario: str, step: int) -> None:
    run_faults(AT_EVERY_INSTRUCTION, tmp_path / "directory", scenario, "interrupt", step)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["error", "interrupt before", "interrupt after"])
@pytest.mark.parametrize("scenario", ["exchange", "two renames", "first"])
def test_fault_at_any_system_call_is_reported(tmp_path: Path, scenario: str, fault: str) -> None:
    """An error means that the old directory is in place, no error that the new one is, even if leftovers remain."""
    run_faults(AT_EVERY_CALL, tmp_path / "directory", scenario, fault)

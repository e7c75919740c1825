"""Replacing a directory as a set: what goes, what stays, and what a kill leaves."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ligerzoo
from ligerzoo import atomic
from ligerzoo.atomic import replacing_directory
from ligerzoo.errors import CheckpointError


def keep_all(name: str) -> bool:
    return True


def keep_none(name: str) -> bool:
    return False


def fill(directory: Path, **contents: str) -> None:
    for name, text in contents.items():
        (directory / name).write_text(text)


def contents(directory: Path) -> dict[str, str]:
    """Every file below the directory, and every symbolic link, which shows as `-> where`."""
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


def test_a_new_directory_is_made_with_its_parents_under_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace(tmp_path / "deep" / "new")
    finally:
        os.umask(before)
    assert contents(tmp_path / "deep" / "new") == NEW
    assert stat.S_IMODE((tmp_path / "deep" / "new").stat().st_mode) == 0o750
    assert only_entry(tmp_path / "deep") == "new"


def test_the_block_fills_an_empty_hidden_sibling(old: Path) -> None:
    with replacing_directory(old, keep=keep_all) as temporary:
        assert temporary.parent == old.parent
        assert temporary.name.startswith(".old")
        assert os.listdir(temporary) == []


def test_the_old_set_goes_and_its_mode_stays(old: Path) -> None:
    old.chmod(0o751)
    replace(old)
    assert contents(old) == NEW
    assert stat.S_IMODE(old.stat().st_mode) == 0o751
    assert only_entry(old.parent) == "old"


def test_wanted_entries_are_carried_over(old: Path) -> None:
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


def test_directories_of_both_sets_are_merged(old: Path) -> None:
    (old / "both").mkdir()
    fill(old / "both", x="old x", y="old y")
    with replacing_directory(old, keep=keep_all) as temporary:
        (temporary / "both").mkdir()
        fill(temporary / "both", x="new x")
    assert contents(old) == {"a": "old a", "b": "old b", "both/x": "new x", "both/y": "old y"}


def test_without_hard_links_files_are_copied(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError

    (old / "link").symlink_to("missing")
    inode = (old / "b").stat().st_ino
    monkeypatch.setattr(os, "link", refuse)
    replace(old, keep=keep_all)
    assert contents(old) == NEW | {"b": "old b", "link": "-> missing"}
    assert (old / "b").stat().st_ino != inode


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_block_changes_nothing(old: Path, error: type[BaseException]) -> None:
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


def test_an_error_in_the_block_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), replacing_directory(tmp_path / "new", keep=keep_all):
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_an_error_while_files_are_carried_over_changes_nothing(old: Path) -> None:
    def confused(name: str) -> bool:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        replace(old, keep=confused)
    assert contents(old) == {"a": "old a", "b": "old b"}
    assert only_entry(old.parent) == "old"


def test_a_file_is_refused(old: Path) -> None:
    with pytest.raises(CheckpointError, match=r"old/a: is a file"):
        replace(old / "a")
    assert contents(old) == {"a": "old a", "b": "old b"}


@pytest.mark.parametrize("directory", ["/", "/proc"])
def test_a_mount_point_is_refused(directory: str) -> None:
    with (
        pytest.raises(CheckpointError, match="Save into a sub-directory"),
        replacing_directory(directory, keep=keep_all),
    ):
        pytest.fail("it should not have come so far")


def test_a_directory_with_something_mounted_in_it_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = str(old / "logs" / "the volume").replace(" ", r"\040")
    table = f"22 1 8:1 / / rw - ext4 /dev/vda rw\n36 22 8:1 /volume {mounted} rw - ext4 /dev/vda rw\n"
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: table)
    before = contents(old)
    with pytest.raises(CheckpointError, match=r"mounted in it.*the volume"), replacing_directory(old, keep=bool):
        pytest.fail("the block must not run")
    assert contents(old) == before


def test_a_name_that_another_process_takes_first_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new"
    with replacing_directory(target, keep=lambda name: name == "theirs") as temporary:
        (temporary / "ours").write_text("ours")
        target.mkdir()
        (target / "theirs").write_text("theirs")
        monkeypatch.setattr(Path, "exists", lambda path: path != target and os.path.exists(path))
    assert sorted(os.listdir(target)) == ["ours", "theirs"]
    assert os.listdir(tmp_path) == ["new"]


def test_a_directory_in_an_unwritable_place_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != old.parent)  # the tests may run as root, who may all
    with pytest.raises(CheckpointError, match="Save into a sub-directory"):
        replace(old)


def test_a_symbolic_link_stays_and_what_it_points_to_is_replaced(old: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link"
    link.symlink_to(old)
    replace(link)
    assert link.is_symlink()
    assert contents(old) == NEW
    assert only_entry(tmp_path / "links") == "link"


@pytest.mark.parametrize("name", [".", "", "../old", "logs/.."])
def test_the_working_directory_can_be_replaced(old: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (old / "logs").mkdir()
    monkeypatch.chdir(old)
    replace(name)
    assert contents(old) == NEW
    assert Path("a").read_text() == "new a"  # and we are still in it


def test_a_process_in_a_kept_sub_directory_stays_there(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (old / "logs").mkdir()
    fill(old / "logs", log="text")
    monkeypatch.chdir(old / "logs")
    replace("..", keep=keep_all)
    assert Path("log").read_text() == "text"
    assert Path("../a").read_text() == "new a"


def test_everything_is_on_the_disk_before_the_exchange(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, exchange = atomic._sync, atomic._exchange

    def recording_sync(path: Path) -> None:
        events.append(str(path.relative_to(old.parent)))
        sync(path)

    def recording_exchange(new: Path, old: Path) -> None:
        events.append("exchange")
        exchange(new, old)

    monkeypatch.setattr(atomic, "_sync", recording_sync)
    monkeypatch.setattr(atomic, "_exchange", recording_exchange)
    with replacing_directory(old, keep=keep_all) as temporary:
        (temporary / "deep").mkdir()
        fill(temporary, a="new a")
        fill(temporary / "deep", d="new d")
    at = events.index("exchange")
    assert {f"{temporary.name}{path}" for path in ("", "/a", "/deep", "/deep/d")} <= set(events[:at])
    assert events[at - 1] == temporary.name  # after the last entry was linked into it
    assert events[at + 1] == "."


def test_what_others_write_during_the_exchange_is_not_lost(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = atomic._exchange

    def interrupted_exchange(new: Path, old: Path) -> None:
        fill(old, late="of another process", unwanted="")
        exchange(new, old)

    monkeypatch.setattr(atomic, "_exchange", interrupted_exchange)
    replace(old, keep=lambda name: name == "late")
    assert contents(old) == NEW | {"late": "of another process"}


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="elsewhere two renames do it")
def test_the_system_exchanges_in_one_step(old: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert atomic._exchange_in_one_step(tmp_path / "new", old)
    assert os.listdir(old) == []
    assert contents(tmp_path / "new") == {"a": "old a", "b": "old b"}
    with pytest.raises(FileNotFoundError, match="missing"):
        atomic._exchange_in_one_step(old, tmp_path / "missing")


def test_two_renames_do_where_the_system_cannot_exchange(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_exchange_in_one_step", lambda new, old: False)
    replace(old, keep=lambda name: name == "b")
    assert contents(old) == NEW | {"b": "old b"}
    assert only_entry(old.parent) == "old"


def test_when_the_second_rename_fails_the_first_is_undone(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def failing_rename(self: Path, target: Path) -> Path:
        if target == old and not self.name.endswith(".old"):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(atomic, "_exchange_in_one_step", lambda new, old: False)
    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OSError, match="no"):
        replace(old)
    assert contents(old) == {"a": "old a", "b": "old b"}
    assert only_entry(old.parent) == "old"


# Save in child after child, each of which kills itself one executed line later than the one before, until one finishes.
KILL_AT_EVERY_LINE = """
import os, shutil, signal, sys
from pathlib import Path
from ligerzoo import atomic

parent, scenario = Path(sys.argv[1]), sys.argv[2]
target = parent / "set"
os.fsync = lambda descriptor: None  # slow, and no matter where only a process dies
if scenario == "two renames":
    atomic._exchange_in_one_step = lambda new, old: False

def save(version):
    with atomic.replacing_directory(target, keep=lambda name: name.startswith("user")) as temporary:
        for name in ("x", "y", "z"):
            (temporary / name).write_text(version)

def whole(directory):
    texts = {(directory / name).read_text() for name in ("x", "y", "z")}
    users = scenario == "first" or (directory / "user" / "file").read_text() == "mine"
    names = {"x", "y", "z"} if scenario == "first" else {"x", "y", "z", "user"}
    assert len(texts) == 1 and users and set(os.listdir(directory)) == names, directory
    return texts.pop()

def kill_at(number):
    executed = 0
    def trace(frame, event, argument):
        nonlocal executed
        if frame.f_code.co_filename not in (atomic.__file__, "<string>"):
            return None
        executed += event == "line"
        if executed == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)

kills, seen, status = 0, set(), -1
while status:
    shutil.rmtree(parent)
    parent.mkdir()
    if scenario != "first":
        save("old")
        (target / "user").mkdir()
        (target / "user" / "file").write_text("mine")
    kills += 1
    child = os.fork()
    if child == 0:
        kill_at(kills)
        save("new")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    leftovers = [path for path in parent.iterdir() if path != target]
    assert all(path.name.startswith(".set.") for path in leftovers), leftovers
    if target.exists():
        seen.add(whole(target))
    elif scenario == "two renames":
        seen.add("between")
        parked, = (path for path in leftovers if path.suffix == ".old")
        new, = (path for path in leftovers if path.suffix != ".old")
        assert (whole(parked), whole(new)) == ("old", "new")
    else:
        assert scenario == "first"
        seen.add("nothing")
assert whole(target) == "new" and not leftovers
expected = {"exchange": {"old", "new"}, "two renames": {"old", "new", "between"}, "first": {"nothing", "new"}}
assert seen == expected[scenario], seen
assert kills > 30, kills
"""


@pytest.mark.parametrize("scenario", ["exchange", "two renames", "first"])
def test_a_kill_at_any_line_leaves_the_old_set_or_the_new(tmp_path: Path, scenario: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    subprocess.run(
        [sys.executable, "-c", KILL_AT_EVERY_LINE, str(place), scenario],
        env=os.environ | {"PYTHONPATH": str(Path(ligerzoo.__file__).parents[1])},
        check=True,
    )

"""`make` installs quietly and completely, and the wheel contains everything that `ligerzoo demo` needs."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FAKE_PYTHON = """\
#!/usr/bin/env bash
# Creates "environments" that consist of this script, and "installs" with 200 lines of output.
echo "$*" >>"$CALLS"
case "$1 $2" in
  "-m venv")
    if [ "$3" = --clear ]; then rm -rf "$4"; shift; fi
    mkdir -p "$3/bin"
    touch "$3/pyvenv.cfg"
    cp "$0" "$3/bin/python"
    ;;
  "-m pip")
    seq 200
    if [[ "$*" == *"$KILLED_AT"* ]]; then kill -KILL "$PPID"; fi
    if [[ "$*" == *"$FAILS"* ]]; then
      echo "no such package"
      exit 1
    fi
    ;;
  "--version ") echo "Python 3.99" ;;
esac
"""


def make(
    directory: Path, *, fails: str = "nothing", killed_at: str = "nothing", venv: str = "env"
) -> subprocess.CompletedProcess[str]:
    """Runs `make VENV/installed` with a fake Python. Its `pip` fails if its arguments contain `fails`, and kills the
    installation if they contain `killed_at`."""
    python = directory / "fake-python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    environment = directory / venv
    return subprocess.run(
        ["make", "--no-print-directory", f"PYTHON={python}", f"VENV={environment}", f"{environment}/installed"],
        cwd=ROOT, env={**os.environ, "CALLS": str(directory / "calls"), "FAILS": fails, "KILLED_AT": killed_at},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def calls(directory: Path) -> list[str]:
    return (directory / "calls").read_text().splitlines()


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@needs_make
def test_make_installs_with_a_line_for_each_step(tmp_path: Path) -> None:
    done = make(tmp_path)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"Creating {tmp_path / 'env'} with Python 3.99 ... ")
    assert lines[1].startswith("Installing torch ... ")
    assert lines[2].startswith("Installing ligerzoo[vision] ... ")
    assert lines[3].startswith("Compiling to bytecode ... ")
    assert "up to date" in make(tmp_path).stdout


@needs_make
@pytest.mark.parametrize("step", [" torch", "--editable"])
def test_a_failed_installation_shows_the_log_and_starts_over(step: str, tmp_path: Path) -> None:
    failed = make(tmp_path, fails=step)
    assert failed.returncode != 0
    assert "200\nno such package\n" in failed.stdout
    assert_starts_over(tmp_path)


@needs_make
@pytest.mark.parametrize("step", [" torch", "--editable"])
def test_a_killed_installation_starts_over(step: str, tmp_path: Path) -> None:
    assert make(tmp_path, killed_at=step).returncode != 0
    assert_starts_over(tmp_path)


def assert_starts_over(tmp_path: Path) -> None:
    assert not (tmp_path / "env" / "installed").exists()
    (tmp_path / "env" / "leftover").touch()
    assert make(tmp_path).returncode == 0
    assert f"-m venv --clear {tmp_path / 'env'}" in calls(tmp_path)
    assert not (tmp_path / "env" / "leftover").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calls", "env", "fake-python"]


@needs_make
def test_an_environment_is_updated_in_place(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "env" / "installed").unlink()
    assert make(tmp_path).returncode == 0
    assert not any("--clear" in call for call in calls(tmp_path))


@needs_make
def test_a_directory_with_other_files_is_refused_as_environment(tmp_path: Path) -> None:
    precious = tmp_path / "home" / "letter.txt"
    precious.parent.mkdir()
    precious.touch()
    for _ in range(2):
        refused = make(tmp_path, venv="home")
        assert refused.returncode != 0
        assert "is a directory with other files in it, not a virtual environment" in refused.stdout
    assert list(precious.parent.iterdir()) == [precious]


@needs_make
def test_the_newest_versions_are_installed_without_pins(tmp_path: Path) -> None:
    python = tmp_path / "fake-python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    options = [f"PYTHON={python}", f"NEWEST={tmp_path / 'env'}", "TORCH=pinned", "CLIENTS=tests/integrations"]
    subprocess.run(
        ["make", *options, "test-newest"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        env={**os.environ, "CALLS": str(tmp_path / "calls"), "FAILS": "nothing", "KILLED_AT": "nothing"},
    )  # fmt: skip
    asked, installed, ours, engines, compiled, tested = calls(tmp_path)[-6:]
    assert asked == "tools/requirements.py newest test,integrations,serve"
    assert "--upgrade" in installed
    assert "constraints.txt" not in installed + ours
    assert ours.endswith("--no-deps --editable .")
    assert engines.endswith("--no-deps --requirement tools/engines.txt")
    assert compiled.startswith("-m compileall ")
    assert tested.startswith("-m pytest ")
    assert tested.endswith(" tests/integrations")


@needs_make
def test_make_help_names_every_command() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    for target in set(phony.split()[1:]) - {"help"}:
        assert f"make {target} " in shown
    default = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert default == shown


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `pip wheel .` builds, without a network."""
    pytest.importorskip("hatchling")
    directory = tmp_path_factory.mktemp("wheel")
    pip_wheel = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip_wheel, "--quiet", "--wheel-dir", str(directory)], cwd=ROOT, check=True)
    (path,) = directory.glob("*.whl")
    return path


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (path for path in (ROOT / "ligerzoo").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert packed == {path.relative_to(ROOT).as_posix() for path in files}


@pytest.mark.thorough  # the wheel has the same files, with which tests/demo runs both
@pytest.mark.parametrize("demo", ["demo", "demo --vision"])
def test_the_wheel_runs_the_demos_from_an_empty_directory(demo: str, wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    pip_install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip_install, str(wheel)], check=True)
    empty.mkdir()

    def run(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=empty, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    assert Path(run("-c", "import ligerzoo; print(ligerzoo.__file__)").strip()).is_relative_to(site)
    assert run("-m", "ligerzoo", *demo.split())
    assert list(empty.iterdir()) == []

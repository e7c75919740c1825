"""Imports Python code of the user: files of own model classes and of reward functions.

Nothing in a checkpoint is ever imported: only files and modules that the user names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from ligerzoo.errors import ConfigError, did_you_mean

_IMPORTED: dict[Path, ModuleType] = {}


def import_own_code(names: Iterable[str], *, where: str = "option import_") -> None:
    """Imports files and modules, such as "my_model.py" or "my_package.model": each one once in a process.

    Modules are also found in the working directory, and next to a file that imports them.

    Args:
        names: paths that end with .py, or names of modules.
        where: the option, for errors.

    Raises:
        ConfigError: there is no such file or module, or an exception ends its import.
    """
    for name in names:
        file = Path(name)
        if file.suffix == ".py" or file.parent != Path() or file.exists():
            if file.resolve() not in _IMPORTED:
                _IMPORTED[file.resolve()] = import_file(file, file.stem, where=where, expected="FILE.py or a module")
            continue
        _append_to_path(Path.cwd())
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            if not name.startswith(str(getattr(error, "name", None))):
                raise ConfigError("cannot be imported", where=f"{where}: {name}", got=summary(error)) from error
            near = did_you_mean(f"{name}.py", [path.name for path in Path.cwd().glob("*.py")])
            expected = "FILE.py, or a module that Python finds here"
            raise ConfigError("no such module", where=where, got=name, expected=expected, remedy=near) from error


def import_file(file: Path, module_name: str, *, where: str, expected: str) -> ModuleType:
    """Imports a Python file, whose directory is appended to `sys.path`.

    Args:
        file: its path.
        module_name: name of the module, under which other code finds it, unless another module has it.
        where: the option, for errors.
        expected: what it accepts.

    Raises:
        ConfigError: the file does not exist or cannot be imported.
    """
    if not file.is_file():
        raise ConfigError("there is no such file", where=where, got=file, expected=expected)
    if file.suffix != ".py":
        raise ConfigError("not a Python file", where=where, got=file, expected=expected)
    earlier = sys.modules.get(module_name)
    if earlier is not None and Path(getattr(earlier, "__file__", None) or "").resolve() != file.resolve():
        module_name = f"own_code_{module_name}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    _append_to_path(file.resolve().parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        raise ConfigError("cannot be imported", where=line_of(file, error), got=summary(error)) from error
    return module


def line_of(file: Path, error: BaseException) -> str:
    """Returns FILE:LINE of the last line of the file that an exception passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.absolute()]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    return str(file) if line is None else f"{file}:{line}"


def summary(error: BaseException) -> str:
    """Returns the type and the message of an exception, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _append_to_path(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))

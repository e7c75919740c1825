"""Raises the upper bounds of pyproject.toml to the newest releases, if the tests pass with them.

    python -m tools.raise_bounds

Runs `make test-newest`. Then writes the bounds, and the line of README.md that names the tested versions.
"""

import json
import subprocess
from pathlib import Path

from tools.requirements import PYPROJECT, bounds_of, readme_line, with_newest

ROOT = PYPROJECT.parent
README = ROOT / "README.md"
ENVIRONMENT = ROOT / ".venv-newest"

LIST_VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


def installed(environment: Path, names: list[str]) -> dict[str, str]:
    """Returns the versions of packages in a virtual environment."""
    command = [environment / "bin/python", "-c", LIST_VERSIONS, *names]
    versions: dict[str, str] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return versions


def raise_bounds(versions: dict[str, str], pyproject: Path = PYPROJECT, readme: Path = README) -> None:
    """Writes the bounds of packages that were tested with `versions`."""
    before = pyproject.read_text(encoding="utf-8")
    after = with_newest(before, versions)
    text = readme.read_text(encoding="utf-8")
    readme.write_text(text.replace(readme_line(before), readme_line(after)), encoding="utf-8")
    pyproject.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    subprocess.run(["make", "test-newest", f"NEWEST={ENVIRONMENT}"], cwd=ROOT, check=True)
    raise_bounds(installed(ENVIRONMENT, list(bounds_of(PYPROJECT.read_text(encoding="utf-8")))))

"""Executes the notebooks in examples/ and stores their outputs in them.

python -m tools.notebooks
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def execute(path: Path) -> NotebookNode:
    """Returns the notebook with the outputs of a new kernel, which runs in its directory. Raises if a cell does."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources, coalesce_streams=True)
    client.execute(cleanup_kc=True)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which change in every run
    notebook.metadata.language_info = {"name": "python"}
    return notebook


if __name__ == "__main__":
    import nbformat

    for path in NOTEBOOKS:
        nbformat.write(execute(path), path)

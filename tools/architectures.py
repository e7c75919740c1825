"""Writes the README's table of architectures, from the docstrings of ligerzoo/models.

python -m tools.architectures            # rewrites the table
python -m tools.architectures --check    # exits with 1 if the README's table differs
"""

import re
import sys
from pathlib import Path

from ligerzoo.errors import ConfigError
from ligerzoo.info import architectures

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"


def without_references(checkpoints: str) -> str:
    """Drops references such as "(Yang et al. 2024)"; `ligerzoo info --architectures` shows them."""
    return re.sub(r" \([^()]*\b(19|20)\d\d\b[^()]*\)", "", checkpoints)


def with_table(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    rows = [
        f"| `{model.class_name}` | {without_references(model.checkpoints)} | {model.distinctive} |"
        for model in architectures()
    ]
    table = "\n".join(["| class | checkpoints | distinctive |", "|---|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    current = README.read_text(encoding="utf-8")
    try:
        updated = with_table(current)
    except ConfigError as error:
        sys.exit(str(error))
    if "--check" not in sys.argv:
        README.write_text(updated, encoding="utf-8")
    elif updated != current:
        sys.exit(f"{README.name}: the table of architectures is out of date. Run python -m tools.architectures")

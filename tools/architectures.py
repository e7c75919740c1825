"""The README's table of architectures, from what their files say of themselves.

python -m tools.architectures            # rewrites it
python -m tools.architectures --check    # exits with 1 if the README has another
"""

import sys
from pathlib import Path

from ligerzoo.info import architectures

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"


def with_table(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    rows = [f"| `{known.class_name}` | {known.checkpoints} | {known.distinctive} |" for known in architectures()]
    table = "\n".join(["| class | checkpoints | distinctive |", "|---|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    present = README.read_text(encoding="utf-8")
    wanted = with_table(present)
    if "--check" not in sys.argv:
        README.write_text(wanted, encoding="utf-8")
    elif wanted != present:
        sys.exit(f"{README.name}: another table of architectures; run python -m tools.architectures")

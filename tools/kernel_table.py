"""Writes the table of docs/kernels-in-transformers.md, from reports of tiny models of transformers.

python -m tools.kernel_table            # rewrites the table
python -m tools.kernel_table --check    # exits with 1 if the page's table differs
"""

import re
import sys
from pathlib import Path

from ligerzoo.integrations import Report, apply
from ligerzoo.integrations.kernels.promised import KINDS
from tests.integrations.families import ENCODERS, FAMILIES, tiny

PAGE = Path(__file__).parent.parent / "docs/kernels-in-transformers.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"

NO_KERNEL = "no kernel replaces this class"


def with_table(page: str) -> str:
    """Returns the page with a new table."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    rows = [row(family, apply(tiny(family))) for family in (*FAMILIES, *ENCODERS)]
    head = f"| family | {' | '.join(KINDS)} | kept, and why |"
    table = "\n".join([head, "|---" * (len(KINDS) + 2) + "|", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def row(family: str, report: Report) -> str:
    """Returns the row of a family: the number of replaced modules in each column, and the reasons to keep others."""
    names = [re.sub(r" .*", "", entry.kernel or "") for entry in report.replaced]
    counts = [sum(name in kernels for name in names) or "" for kernels in KINDS.values()]
    kept = dict.fromkeys(
        f"`{entry.class_name}`: {re.sub(r' by [-+.e0-9]+$', '', entry.reason or '')}"
        for entry in report.kept
        if entry.reason != NO_KERNEL and "does not rotate" not in (entry.reason or "")
    )
    return f"| {family} | {' | '.join(map(str, counts))} | {'; '.join(kept)} |"


if __name__ == "__main__":
    current = PAGE.read_text(encoding="utf-8")
    updated = with_table(current)
    if "--check" not in sys.argv:
        PAGE.write_text(updated, encoding="utf-8")
    elif updated != current:
        sys.exit(f"{PAGE.name}: the table of families is out of date. Run python -m tools.kernel_table")

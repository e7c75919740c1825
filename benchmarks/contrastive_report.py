"""Table of `benchmarks.contrastive`'s results."""

from __future__ import annotations

from benchmarks.contrastive import BF16_MATRIX, IN_CHUNKS
from benchmarks.markdown import Json, bold, measured_on, number, paragraph, table
from benchmarks.row import OURS, compare

PROVIDERS = (OURS, "eager", BF16_MATRIX, "torch.compile", IN_CHUNKS)


def line(row: Json) -> list[str]:
    """Milliseconds and extra MiB of each provider, forward and backward."""

    def cell(provider: str) -> str:
        found = row["providers"].get(provider, {})
        return f"{number(found['forward_backward_ms'])} / {number(found.get('extra_mib'))}" if found else ""

    ratio = compare(row["providers"], "forward_backward", 1.0)["ours / fastest peer"]
    shape = " x ".join(map(str, row["shape"]))
    cells = map(cell, PROVIDERS)
    return [f"{shape}, {row['variant']}", *cells, "" if ratio is None else bold(f"{ratio:.2f}", ratio <= 1)]


def contrastive_figures(result: Json) -> list[str]:
    """The section of docs/benchmarks.md."""
    text = (
        f"In-batch loss of pairs x features, forward and backward in ms / extra MiB. {measured_on(result)}. Peers are "
        "PyTorch with the matrix of all similarities, in fp32 or in bf16, and in chunks of queries that the backward "
        "pass computes again. A peer without figures failed, or did not fit."
    )
    rows = [row for row in result["rows"] if OURS in row.get("providers", {})]
    header = ["pairs x features", *PROVIDERS, "/ fastest"]
    return ["## Contrastive loss", paragraph(text), table(header, map(line, rows))]

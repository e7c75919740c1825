"""The benchmark of sharded training: its comparison, and its table."""

from typing import Any

import pytest

from benchmarks import sharded_report, sharded_training
from benchmarks.sharded_training import KEPT, RECOMPUTED


def rounds(*ms: float) -> list[dict[str, Any]]:
    return [{"ms": value, "peak_gib": 1.0} for value in ms]


def row(recomputed: list[dict[str, Any]], kept: list[dict[str, Any]]) -> dict[str, Any]:
    modes = {RECOMPUTED: recomputed, KEPT: kept}
    return {mode: sharded_training.summarized(found, 1000) for mode, found in modes.items()}


def test_speeds_are_compared_with_the_fastest_setting_of_the_peer() -> None:
    failed = [{"error": "OutOfMemoryError"}, *rounds(5.0)]
    rows = {
        "default": row(rounds(10.0, 8.0), rounds(7.0)),
        "gathered": row(rounds(9.0), failed),
        "liger": row(rounds(10.0, 12.0), rounds(8.4)),
        "liger-bf16": row(rounds(16.0), failed),
        "one-gpu": row(rounds(6.0), rounds(5.6)),
    }
    assert rows["default"][RECOMPUTED]["tokens_per_s"] == 1000 / 8.0 * 1e3
    over = sharded_training.compared(rows, RECOMPUTED)
    assert over["default over"] == pytest.approx({"liger": 1.25, "liger-bf16": 2.0, "one-gpu": 0.75})
    assert "gathered over" not in sharded_training.compared(rows, KEPT)
    result = {"shape": {"processes": 2, "tokens per process": 1000}, "environment": {"gpu": "some GPU"}, "rows": rows}
    _, text, table = sharded_report.sharded_figures(result)
    assert "on 2 GPUs" in text
    lines = {line.split(" | ")[0]: line.split(" | ")[1:] for line in table.splitlines()}
    assert lines["| ligerzoo, `shard_model(model)`"] == ["**125,000**", "1.25", "1.00", "**142,857**", "1.20", "1.00 |"]
    assert lines["| ligerzoo, weights gathered until backward"][3:] == ["OutOfMemoryError", "", " |"]

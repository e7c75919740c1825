"""The tables of docs/parallelism.md: current, and as close to what was measured as the page promises."""

import json
from typing import Any

import pytest

from tools import mesh_tables
from tools.mesh_tables import FILE, GPUS, MODELS, PAGE

RESULTS: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))


def test_the_page_has_the_tables_of_the_predictions() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert mesh_tables.with_tables(page, RESULTS) == page, "run python -m tools.mesh_tables --write"
    assert [(row["model"], row["gpus"]) for row in RESULTS["fastest"]] == [(name, n) for name in MODELS for n in GPUS]


@pytest.mark.parametrize("row", RESULTS["compared"], ids=lambda row: f"{row['what']}, {row['mesh']}")
def test_predictions_are_close_to_what_was_measured(row: dict[str, Any]) -> None:
    assert row["predicted_gib"] == pytest.approx(row["measured_gib"], rel=0.03)
    if (row["what"], row["mesh"]) in mesh_tables.WAITS_FOR_HOST:
        assert row["predicted_ms"] < 0.85 * row["measured_ms"], "it is predicted: remove it from WAITS_FOR_HOST"
    else:
        assert row["predicted_ms"] == pytest.approx(row["measured_ms"], rel=0.15)


def test_measured_steps_are_predicted_as_in_the_table() -> None:
    current = mesh_tables.compared("shard=2 expert=2", "context=2")
    recorded = {(row["what"], row["mesh"]): row for row in RESULTS["compared"]}
    assert len(current) == 3
    for row in current:
        expected = recorded[row["what"], row["mesh"]]
        assert row["predicted_gib"] == pytest.approx(expected["predicted_gib"], rel=0.002)
        assert row["predicted_ms"] == pytest.approx(expected["predicted_ms"], rel=0.005)


@pytest.mark.parametrize(
    "name, gpus", [("8B", (8,)), *(pytest.param(name, GPUS, marks=pytest.mark.slow) for name in MODELS)]
)
def test_the_fastest_meshes_are_those_of_the_table(name: str, gpus: tuple[int, ...]) -> None:
    expected = [row for row in RESULTS["fastest"] if row["model"] == name and row["gpus"] in gpus]
    assert expected, "run python -m tools.mesh_tables"
    for row, recorded in zip(mesh_tables.fastest(name, gpus), expected, strict=True):
        assert row["mesh"] == recorded["mesh"]
        assert row["gib"] == pytest.approx(recorded["gib"], abs=0.11)
        assert row["tokens_per_s_per_gpu"] == pytest.approx(recorded["tokens_per_s_per_gpu"], rel=0.005)

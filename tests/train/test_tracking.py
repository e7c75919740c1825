"""The log in Trackio's own database, without a network."""

import sys
from pathlib import Path

import pytest

from ligerzoo.errors import ConfigError
from ligerzoo.train.log import read_log
from tests.train.tiny_run import options, train, write_checkpoint, write_data


@pytest.fixture
def run(tmp_path: Path) -> dict[str, object]:
    checkpoint, data = write_checkpoint(tmp_path / "tiny"), write_data(tmp_path / "data.jsonl")
    return options(checkpoint, data, tmp_path / "run", tracker="trackio", max_steps=3)


def test_trackio(run: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output directory has the options and the numbers of the log."""
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("trackio")
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads TRACKIO_DIR once
    assert train(run) == 0
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    trackio.finish()
    assert [*(tmp_path / "run" / "trackio").glob("*.db")]
    [logged] = trackio.Api().runs("ligerzoo")
    assert logged.name == "run"
    assert logged.config["lr"] == run["lr"]
    log = [entry for entry in read_log(tmp_path / "run" / "log.jsonl") if "loss" in entry]
    rows = SQLiteStorage.get_logs("ligerzoo", "run")
    assert [(row["step"], row["loss"]) for row in rows] == [(entry["step"], entry["loss"]) for entry in log]


def test_trackio_is_not_installed(run: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"package trackio is not installed.*pip install trackio"):
        train({**run, "dry_run": True})

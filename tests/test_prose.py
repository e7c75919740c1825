"""The scanner for words that the project's prose avoids."""

from pathlib import Path

import pytest

from tools.prose import PATHS, ROOT, avoided, main, scan


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Tells where the tokens stand.", ["tells", "stand"]),
        ("Nobody walks, where there\n    is none of its own.", ["nobody", "walks", "there is none", "of its own"]),
        ("the place of a token, so many features turned", ["so many", "place", "turned"]),
        ("an image is no square", ["is no"]),
        ("A stand-in, written in place, replaces the placeholder.", []),
        ("Places the model on a device; turns the cache off in turn.", []),
        ("Turns a conversation into a prompt. The assistant's turn begins.", []),
        ("There is no cache if the value is no longer used, as it is computed anyway.", []),
        ("Walks with os.walk below /no/such/place.", ["walks"]),
        ("Real tokens, not real numbers", ["real"]),
        ("Formerly `real` and `told()`; told here", ["told"]),
    ],
)
def test_phrases(text: str, expected: list[str]) -> None:
    found = [" ".join(match[0].lower().split()) for match in avoided(text)]
    assert sorted(found) == sorted(expected)


SOURCE = '''\
"""What nobody
tells."""

URL = "/no/such/place"  # stands here


def test_it_stands(told: int) -> None:
    real = 1
    # one comment, over
    # so many lines
    raise ValueError(f"{told} is no number" "of its own")
'''


def test_comments_strings_and_names_of_python_files(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE, encoding="utf-8")
    assert [(finding.line, finding.phrase) for finding in scan([tmp_path], tmp_path)] == [
        (1, "nobody"),
        (2, "tells"),
        (4, "stands"),
        (7, "name"),
        (7, "stands"),
        (8, "name"),
        (10, "so many"),
        (11, "is no"),
    ]


def test_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text("# Title\n\nFirst line\nstands.\n", encoding="utf-8")
    (tmp_path / "script.sh").write_text("# Walks.\nwalk # nothing\n", encoding="utf-8")
    assert main([str(tmp_path)]) == 1
    page, script = capsys.readouterr().out.splitlines()
    assert page.endswith("page.md:4: stands: stands.")
    assert script.endswith("script.sh:1: walks: Walks.")
    assert main([str(tmp_path), "--count"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].strip() == "2 in all"
    (tmp_path / "page.md").write_text("# Title\n", encoding="utf-8")
    (tmp_path / "script.sh").unlink()
    assert main([str(tmp_path)]) == 0


@pytest.mark.thorough  # `make lint` runs it too
def test_the_tree_has_none() -> None:
    found = scan(ROOT / path for path in PATHS)
    assert not found, "\n".join(map(str, found))

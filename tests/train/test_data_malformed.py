"""Damaged files of every kind: each problem is one line that names file and line, before anything is trained."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ligerzoo.errors import DataError
from ligerzoo.train.data import check_data
from ligerzoo.train.recipes import sft
from tests.train.data_helpers import CHATML, GENERATION, tokenizer
from tests.train.test_scores import RECORDS
from tests.train.tiny_run import options

pytestmark = pytest.mark.filterwarnings("ignore:.*the special token:UserWarning")

LINES = {
    **{kind: [json.dumps(record).encode() for record in records[:4]] for kind, records in RECORDS.items()},
    "prompt": [b'{"prompt": "Hello %d"}' % number for number in range(4)],
}


def flip(line: bytes, position: int, byte: int) -> bytes:
    return line[:position] + bytes([line[position] ^ (byte or 1)]) + line[position + 1 :]


def cut(line: bytes, position: int, byte: int) -> bytes:
    return line[:position]


def insert(line: bytes, position: int, byte: int) -> bytes:
    return line[:position] + bytes([byte]) * 3 + line[position:]


def escape(line: bytes, position: int, byte: int) -> bytes:
    return line[:position] + [rb"\u0000", rb"\ud83d", rb"\ufdd0\ufdd1", rb"\u2028"][byte % 4] + line[position:]


def twice(line: bytes, position: int, byte: int) -> bytes:
    return line + line


def nest(line: bytes, position: int, byte: int) -> bytes:
    return b'{"x": ' * 10**5 + line


def number(line: bytes, position: int, byte: int) -> bytes:
    return line[:-1] + b', "id": ' + [b"NaN", b"1" * 5000, b"1e999", b"-0"][byte % 4] + b"}"


BYTES = [flip, cut, insert, escape, twice, nest, number]
VALUES: list[Any] = [
    None, True, 3, 1e308, "", " ", {}, [], [None], [[]], ["user"], [{}], [{"role": "user"}],
    [{"role": ["user"], "content": "x"}], [{"role": "user", "content": [None]}], [{"role": "assistant", "content": {}}],
    [{"role": "user", "content": [{"type": ["text"]}]}], [{"role": "assistant", "tool_calls": [3]}],
    [{"role": "assistant", "content": "x", "tool_calls": "y"}],
]  # fmt: skip


def problems_of(file: Path, kind: str, seq_length: int, template: str) -> list[str]:
    try:
        report = check_data(file, kind, tokenizer(template), seq_length=seq_length)
    except DataError as error:
        return [str(error)]
    return list(map(str, report.problems.first))


def assert_names_the_line(file: Path, lines: list[bytes], changed: int, problems: list[str]) -> None:
    content = b"\r\n".join(lines)
    breaks = lines[changed].count(b"\n")
    named = [changed + 1 + extra for extra in range(breaks + 1)]
    if content.startswith(b"\xef\xbb\xbf"):
        named = [1]
    for problem in problems:
        found = re.match(re.escape(str(file)) + r":(\d+): ", problem)
        assert found, problem
        assert int(found[1]) in named
        assert "\n" not in problem
        assert len(problem) < 2500


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(LINES)), st.sampled_from(BYTES), st.integers(0, 3), st.integers(0, 10**6),
    st.integers(0, 255), st.sampled_from([CHATML, GENERATION]),
)  # fmt: skip
def test_damaged_bytes(
    tmp_path: Path, kind: str, damage: Callable[..., bytes], index: int, position: int, byte: int, template: str
) -> None:
    lines = list(LINES[kind])
    lines[index] = damage(lines[index], position % len(lines[index]), byte)
    file = tmp_path / "damaged.jsonl"
    file.write_bytes(b"\r\n".join(lines))
    assert_names_the_line(file, lines, index, problems_of(file, kind, 300, template))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(LINES)), st.sampled_from(VALUES), st.integers(0, 3), st.data(), st.booleans())
def test_values_of_other_types(tmp_path: Path, kind: str, value: Any, index: int, data: Any, renames: bool) -> None:
    lines = list(LINES[kind])
    record = json.loads(lines[index])
    name = data.draw(st.sampled_from(sorted(record)))
    assume(record[name] != value)
    if renames:
        record[name + "s"] = record.pop(name)
    else:
        record[name] = value
    lines[index] = json.dumps(record).encode()
    file = tmp_path / "damaged.jsonl"
    file.write_bytes(b"\r\n".join(lines))
    problems = problems_of(file, kind, 300, CHATML)
    is_label = name == "label" and value is True
    is_text = name == "prompt" and kind != "prompt" and isinstance(value, str)  # a prompt may be empty
    assert bool(problems) == (renames or not (is_label or is_text))
    assert_names_the_line(file, lines, index, problems)


@pytest.mark.parametrize("line", ["{", '{"prompt": "a", "completion": ""}', '{"prompt": "a"}', '{"text": "a"}', '"a"'])
def test_a_run_stops_at_a_bad_line_before_it_is_trained(checkpoint: Path, tmp_path: Path, line: str) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "a", "completion": " b"}\n' * 3 + line + "\n")
    given = options(checkpoint, data, tmp_path / "run", max_steps=None, epochs=1)
    with pytest.raises(DataError, match=r"train\.jsonl:4: "):
        sft.main(sft.SFTRunOptions(**given))
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match=r"train\.jsonl:4: "):
        sft.main(sft.SFTRunOptions(**given, dry_run=True))

"""Columns with other names, the fields of other programs, and several sources with weights."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from ligerzoo import cli
from ligerzoo.errors import DataError
from ligerzoo.train.data import PackedBatches, check_data, open_data
from ligerzoo.train.data.layouts import parse_columns
from ligerzoo.train.data.text_files import TextReader
from ligerzoo.train.data.text_formats import OpenFormat
from tests.train.data_helpers import chat, tokenizer, write_lines
from tests.train.tiny_run import arguments, options, train, write_checkpoint

Records = list[dict[str, Any]]


def samples(data: Any, kind: Any = "auto", template: bool = True, **given: Any) -> list[Any]:
    own = tokenizer() if template else tokenizer(None)
    given = {"seq_length": 256, "epochs": 1, "shuffle": False, **given}
    return list(open_data(data, kind, own, **given))


def ids(found: list[Any]) -> list[tuple[list[int], list[int]]]:
    return [(segment.input_ids, segment.labels) for one in found for segment in one.segments]


# Columns


def test_columns_are_renamed(tmp_path: Path) -> None:
    expected = samples([{"prompt": "a:", "completion": "b"}])
    columns = parse_columns(["prompt=question", "completion=answer"])
    assert ids(samples([{"question": "a:", "answer": "b", "prompt": "other"}], columns=columns)) == ids(expected)
    swapped = parse_columns(["prompt=completion", "completion=prompt"])
    assert ids(samples([{"completion": "a:", "prompt": "b"}], columns=swapped)) == ids(expected)
    (tmp_path / "a.csv").write_text(
        'role of,says\nx,"[{""role"": ""user"", ""content"": ""a""}, {""role"": ""assistant"", ""content"": ""b""}]"\n'
    )
    chats = samples(tmp_path / "a.csv", columns={"messages": "says"})
    assert ids(chats) == ids(samples([chat("a", "b")]))
    with pytest.raises(
        DataError, match=r"there is no column 'qestion'.*; got columns 'question', 'answer'\. Did you mean 'q"
    ):
        samples([{"question": "a", "answer": "b"}], columns={"prompt": "qestion"})
    with pytest.raises(DataError, match=r"dataset\[1\]: the field 'completion' is missing"):
        samples([{"question": "a", "answer": "b"}, {"question": "a"}], columns=columns)
    own = {"prompt": "a:", "completion": "b"}
    for clean in ({"completion": "clen"}, {"prompt": "prompt", "completion": "clen"}, {"margin": "clen"}):
        with pytest.raises(DataError, match=r"dataset\[0\]: there is no column 'clen', .*Did you mean 'clean'"):
            samples([{**own, "clean": "c"}], columns=clean)
    with pytest.raises(DataError, match=r"dataset\[1\]: there is no column 'clean', .*Did you mean 'claen'"):
        samples([{**own, "clean": "c"}, {**own, "claen": "c"}], columns={"completion": "clean"})


def test_a_source_without_the_columns_is_noted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\na,b\n")
    (tmp_path / "b.csv").write_text("prompt,completion,clean\na,b,c\n")
    data = [f"{tmp_path / name}.csv:0.5" for name in "ab"]
    stream = open_data(data, "auto", tokenizer(), seq_length=64, columns={"completion": "clean"}, epochs=1)
    expected = f"{tmp_path / 'a.csv'}: has no column that --map names; read are 'completion'"
    assert [note for note in stream.notes if "--map" in note] == [expected]
    assert len({tuple(sample.input_ids) for sample in stream}) == 2


BOTH = {"prompt": "a:", "completion": "b", **chat("c", "d")}


def test_a_record_of_two_kinds_is_refused_unless_columns_choose() -> None:
    expected = r"a record of two kinds; got fields 'messages', 'prompt', 'completion'; expected .*: --map messages=mes"
    with pytest.raises(DataError, match=rf"dataset\[0\]: {expected}"):
        samples([BOTH])
    for first in (chat("c", "d"), {"prompt": "a:", "completion": "b"}):
        with pytest.raises(DataError, match=rf"dataset\[1\]: {expected}"):
            samples([first, BOTH])
    assert ids(samples([BOTH], columns={"messages": "messages"})) == ids(samples([chat("c", "d")]))
    texts = ids(samples([{"prompt": "a:", "completion": "b"}]))
    assert ids(samples([BOTH], columns=parse_columns(["prompt=prompt", "completion=completion"]))) == texts
    assert ids(samples([BOTH], "completion")) == texts
    nulls = dict.fromkeys(BOTH)
    assert ids(samples([{**nulls, "prompt": "a:", "completion": "b"}])) == texts


def test_fields_of_other_kinds_are_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{**chat("c", "d"), "text": "c d", "id": 1}])
    report = check_data(file, "auto", tokenizer(), seq_length=64, progress=False)
    assert report.notes == [f"{file}: not read: 'text'; read are messages"]
    file = write_lines(tmp_path / "b.jsonl", [{"anchor": "c", "positive": "d", "negative_1": "e", "id": 1}])
    report = check_data(file, "pair", tokenizer(), seq_length=64, progress=False)
    assert report.notes[0].startswith(f"{file}: not read: 'id'; read are query or anchor, positive, ")


@pytest.mark.parametrize(
    "texts, problem",
    [
        (["prompt=a", "prompt=b"], "the field is given twice; got prompt=a and prompt=b"),
        (["prompt=a", "completion=a"], "the column is given twice; got prompt=a and completion=a"),
    ],
)
def test_a_field_or_column_that_is_given_twice_is_named(texts: list[str], problem: str) -> None:
    with pytest.raises(DataError, match=f"option map: {problem}; expected each field and each column once"):
        parse_columns(texts)


def test_a_resumed_run_has_the_same_columns() -> None:
    data = [{"prompt": "a", "completion": "b", "other": "c"}]

    def stream(columns: dict[str, str]) -> Any:
        return open_data(data, "auto", tokenizer(), seq_length=64, columns=columns)

    with pytest.raises(DataError, match="columns: the data has changed"):
        stream({"completion": "other"}).load_state_dict(stream({}).state_dict())


# Fields of other programs


ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
PROMPT = {"role": "user", "content": "Add.\n\n1 2"}
ANSWER = {"role": "assistant", "content": "3"}
SHAREGPT = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
CALL = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "record, kind, expected",
    [
        (ALPACA, "auto", {"messages": [PROMPT, ANSWER]}),
        ({**ALPACA, "text": "as Stanford's file has it"}, "auto", {"messages": [PROMPT, ANSWER]}),
        ({"instruction": "Add.\n\n1 2", "input": None, "output": "3"}, "auto", {"messages": [PROMPT, ANSWER]}),
        (
            {**ALPACA, "system": "Be brief.", "history": [["a", "b"]]}, "auto",
            {"messages": [*chat("a", "b", system="Be brief.")["messages"], PROMPT, ANSWER]},
        ),
        (
            {"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "4"}, "auto",
            {"prompt": [PROMPT], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "4"}]},
        ),
        ({**ALPACA, "label": True}, "auto", {"prompt": [PROMPT], "completion": [ANSWER], "label": True}),
        (ALPACA, "prompt", {"prompt": [PROMPT]}),
        (SHAREGPT, "auto", chat("a", "b")),
        ({**SHAREGPT, "system": "Be brief.", "tools": ""}, "auto", chat("a", "b", system="Be brief.")),
        ({"conversations": chat("a", "b")["messages"]}, "auto", chat("a", "b")),
        (SHAREGPT, "prompt", {"prompt": chat("a")["messages"]}),
        (
            {**SHAREGPT, "label": False}, "auto",
            {"prompt": chat("a")["messages"], "completion": [{**ANSWER, "content": "b"}], "label": False},
        ),
        (
            {"conversations": SHAREGPT["conversations"][:1], "chosen": {"from": "gpt", "value": "3"}, "rejected": "4"},
            "auto", {"prompt": chat("a")["messages"], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "4"}]},
        ),
    ],
)  # fmt: skip
def test_fields_of_other_programs_are_recognized(record: dict[str, Any], kind: Any, expected: dict[str, Any]) -> None:
    assert ids(samples([record], kind)) == ids(samples([expected], kind))


def test_alpaca_without_a_chat_template_is_text() -> None:
    assert ids(samples([ALPACA], template=False)) == ids(
        samples([{"prompt": "Add.\n\n1 2\n\n", "completion": "3"}], template=False)
    )
    with pytest.raises(DataError, match=r"dataset\[0\]: history: earlier messages need a chat template"):
        samples([{**ALPACA, "history": [["a", "b"]]}], template=False)


def test_malformed_records_of_other_programs_are_named(tmp_path: Path) -> None:
    records: Records = [
        ALPACA, {"instruction": "a", "input": "b"}, {"instruction": "a", "input": 3, "output": "b"},
        {**ALPACA, "history": [["a"]]},
    ]  # fmt: skip
    report = check_data(write_lines(tmp_path / "a.jsonl", records), "auto", tokenizer(), seq_length=64, progress=False)
    expected = ["2: the field 'output' is missing", "3: input: wrong type", "4: history[0]: wrong type"]
    assert [str(one).partition("a.jsonl:")[2].split(";")[0] for one in report.problems.first] == expected
    assert report.notes == [f"{tmp_path / 'a.jsonl'}: records with Alpaca fields (instruction, input, output)"]
    entries: list[Any] = [
        {"from": "gtp", "value": "a"},
        {"from": "human"},
        "a",
        {"from": "function_call", "value": "{"},
    ]
    records = [
        SHAREGPT,
        *({"conversations": [entry]} for entry in entries),
        {"conversations": "a"},
        {"conversations": []},
    ]
    report = check_data(write_lines(tmp_path / "b.jsonl", records), "auto", tokenizer(), seq_length=64, progress=False)
    assert (report.samples, report.problems.count) == (1, 6)
    assert "b.jsonl:2: conversations[0]: unknown sender; got 'gtp'" in str(report.problems.first[0])
    assert all(f"b.jsonl:{line}: conversations" in str(one) for line, one in enumerate(report.problems.first, 2))


def test_tool_calls_and_images_of_sharegpt() -> None:
    from ligerzoo.train.data.layouts import SHAREGPT as LAYOUT

    entries = [
        {"from": "human", "value": "<image>\nWhat?"}, {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "2"}, {"from": "gpt", "value": "2", "weight": 0},
    ]  # fmt: skip
    found = LAYOUT.convert({"conversations": entries, "image": "a.png", "id": 1}, "auto", True)
    assert found == {
        "id": 1, "images": ["a.png"], "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
            {"role": "tool", "content": "2"}, {"role": "assistant", "content": "2", "weight": 0},
        ],
    }  # fmt: skip


# Several sources


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str]:
    """Two files, of 40 lines and of 9 rows, with their weights."""
    few = write_lines(tmp_path / "a.jsonl", ({"prompt": f"a{i}:", "completion": "b" * (1 + i % 7)} for i in range(40)))
    (tmp_path / "b.csv").write_text("prompt,completion\n" + "".join(f"b{i}:,c\n" for i in range(9)))
    return f"{few}:0.7", f"{tmp_path / 'b.csv'}:0.3"


def mixed(data: Any, **given: Any) -> Any:
    return open_data(data, "auto", tokenizer(), **{"seq_length": 64, **given})


def test_sources_have_their_shares(sources: tuple[str, str]) -> None:
    """After any number of samples. Each source is read in another order in each of its epochs."""
    found = [Path(one.source.name).name for one in itertools.islice(mixed(sources), 300)]
    for count in range(1, 301):
        assert abs(Counter(found[:count])["a.jsonl"] - 0.7 * count) < 1
    epoch = [str(one.source) for one in mixed(sources, epochs=1)]
    assert Counter(Counter(one for one in epoch if "a.jsonl" in one).values()) == {1: 40}
    repeated = [one for one in epoch if "b.csv" in one]
    assert len({*repeated}) == 9
    assert len(repeated) in (17, 18)
    assert repeated[:9] != repeated[9:18]
    assert [str(one.source) for one in mixed(sources, epochs=1, seed=1)] != epoch
    in_order = [str(one.source).rpartition("/")[2] for one in mixed(sources, epochs=1, shuffle=False)]
    assert in_order == [*(f"a.jsonl:{i}" for i in range(1, 41)), *(f"b.csv:{i}" for i in range(2, 11))]


@pytest.mark.parametrize("shuffle", [True, False])
def test_mixtures_continue_at_every_batch(sources: tuple[str, str], shuffle: bool) -> None:
    options: dict[str, Any] = {"batch_size": 2, "seq_length": 64, "pad_token_id": 0, "window_rows": 3}

    def stream() -> Any:
        return mixed(sources, epochs=2, shuffle=shuffle, workers=2)

    def batches() -> PackedBatches:
        return PackedBatches(stream(), **options)

    def tensors(those: PackedBatches) -> list[Any]:
        return [batch.inputs["input_ids"].tolist() for batch in those]

    whole, one = tensors(batches()), batches()
    for taken in range(len(whole)):
        if taken % 3 == 0:
            other = batches()
            other.load_state_dict(json.loads(json.dumps(one.state_dict())))
            assert tensors(other) == whole[taken:]
        next(one)
    parts = [PackedBatches(stream(), **{**options, "batch_size": 1}, rank=rank, world_size=2) for rank in range(2)]
    assert [batch.rows for batch in batches()] == [one.rows + other.rows for one, other in zip(*parts, strict=True)]
    changed = sources[0], sources[1].replace("0.3", "0.4")
    with pytest.raises(DataError, match="weights: the data has changed"):
        mixed(changed).load_state_dict(mixed(sources).state_dict())


def test_a_run_opens_its_data_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CSV and JSON arrays are scanned to their end when they are opened."""
    records = [{"prompt": f"{i}:", "completion": "b"} for i in range(20)]
    (tmp_path / "a.json").write_text(json.dumps(records))
    write_lines(tmp_path / "b.jsonl", records[:3])
    opened: list[str] = []
    open_file = TextReader._opened

    def counted(self: TextReader, path: Path, open_format: OpenFormat) -> Any:
        opened.append(path.name)
        return open_file(self, path, open_format)

    monkeypatch.setattr(TextReader, "_opened", counted)
    given = options(write_checkpoint(tmp_path / "model"), tmp_path / "a.json", tmp_path / "run", eval_every=1)
    assert train({**given, "max_steps": None, "epochs": 1, "eval_data": (str(tmp_path / "b.jsonl"),)}) == 0
    assert sorted(opened) == ["a.json", "b.jsonl"]


def test_data_that_is_listed_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under whatever name, and also within a directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "a.jsonl", [{"text": "a"}])
    (tmp_path / "link").symlink_to("data")
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "a"}])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "other").symlink_to("splits")
    for one, other in [
        ("data/a.jsonl", "./data/a.jsonl"), ("data/a.jsonl", "data"), ("data/*.jsonl", "link/a.jsonl"),
        ("saved", "./saved"), ("splits:train", "other:train"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=r"the data is listed twice; got .* and .*Give it once, with a larger weig"):
            mixed([f"{one}:0.7", f"{other}:0.3"])
    mixed(["data/a.jsonl:0.7", "saved:0.3"])


def test_a_run_trains_from_csv_alpaca_and_a_mixture(
    tmp_path: Path, sources: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line, stopped and resumed: the weights are those of a run that was not stopped."""
    model = write_checkpoint(tmp_path / "model")
    (tmp_path / "alpaca.json").write_text(json.dumps([ALPACA] * 8, indent=1))
    (tmp_path / "c.csv").write_text("question,answer\n" + "a,b\n" * 8)
    data = *sources, f"{tmp_path / 'alpaca.json'}:1e-1", f"{tmp_path / 'c.csv'}:.1"
    given = {"map": ("prompt=question", "completion=answer"), "eval_data": (str(tmp_path / "c.csv"),)}
    stopped = {
        **options(
            model, Path(), tmp_path / "stopped", schedule="constant", warmup=0.0, max_steps=2, save_every=2, **given
        ),
        "data": data,
    }
    line = arguments({name: value for name, value in stopped.items() if name not in ("data", "map")})
    assert cli.main([*line, "--data", *data, "--map", *given["map"]]) == 0  # several values after one flag
    assert capsys.readouterr().out.count("alpaca.json: records with Alpaca fields (instruction, input, output)\n") == 1
    assert cli.main(arguments(stopped | {"max_steps": 4, "resume": True})) == 0
    assert train(stopped | {"output": str(tmp_path / "whole"), "max_steps": 4}) == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("stopped", "whole")]
    assert files[0] == files[1]
    capsys.readouterr()
    assert cli.main(["evaluate", str(model), "--data", str(tmp_path / "c.csv"), "--map", *given["map"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 16

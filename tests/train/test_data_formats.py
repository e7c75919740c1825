"""CSV, JSON arrays, Parquet and datasets are read as JSON Lines are: the same samples, and lines in errors."""

import csv
import json
import random
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerzoo.errors import DataError
from ligerzoo.train.data import PackedBatches, check_data, open_data
from ligerzoo.train.data import hub_data as hub
from ligerzoo.train.data.separators import ArrayItems, CsvRows, Separators
from ligerzoo.train.data.text_files import TextReader
from ligerzoo.train.data.text_formats import open_csv, open_json
from tests.train.data_helpers import chat, tokenizer, write_lines

Records = list[dict[str, Any]]

datasets.disable_progress_bars()


def write_csv(file: Path, records: Records, **options: Any) -> Path:
    with file.open("w", newline="", encoding=options.pop("encoding", "utf-8")) as stream:
        writer = csv.DictWriter(stream, [*records[0]], **options)
        writer.writeheader()
        writer.writerows(records)
    return file


def write_json(file: Path, records: Records, **options: Any) -> Path:
    file.write_text(json.dumps(records, **options))
    return file


def write_parquet(file: Path, records: Records, rows: int = 7) -> Path:
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), file, row_group_size=rows)
    return file


def write_saved(file: Path, records: Records) -> Path:
    datasets.Dataset.from_list(records).save_to_disk(file)
    return file


FORMATS: dict[str, Callable[[Path, Records], Path]] = {
    "lines": lambda path, records: write_lines(path / "a.jsonl", records),
    "csv": lambda path, records: write_csv(path / "a.csv", records),
    "csv with marks": lambda path, records: write_csv(path / "b.csv", records, encoding="utf-8-sig", delimiter=";"),
    "quoted csv": lambda path, records: write_csv(path / "c.csv", records, quoting=csv.QUOTE_ALL, lineterminator="\n"),
    "tsv": lambda path, records: write_csv(path / "a.tsv", records, delimiter="\t"),
    "json": lambda path, records: write_json(path / "a.json", records, indent=2, ensure_ascii=False),
    "json in one line": lambda path, records: write_json(path / "b.json", records),
    "lines in json": lambda path, records: write_lines(path / "c.json", records),
    "parquet": lambda path, records: write_parquet(path / "a.parquet", records),
    "saved": lambda path, records: write_saved(path / "saved", records),
}


def ids(samples: Iterable[Any]) -> list[list[int]]:
    return [sample.input_ids for sample in samples]


def completions(count: int) -> Records:
    source = random.Random(0)
    texts = ["yes", 'say "no", please', "two\nlines", '5" long; a,b', "tab\there", "\\", "[{,}]", "ü"]
    return [
        {"prompt": f"{i} {source.choice(texts)}:", "completion": " ".join(source.choices(texts, k=1 + i % 9))}
        for i in range(count)
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_samples_of_json_lines(name: str, tmp_path: Path) -> None:
    records = completions(60)
    options: dict[str, Any] = {"seq_length": 256}
    expected = ids(open_data(records, "auto", tokenizer(), epochs=1, shuffle=False, **options))
    path = FORMATS[name](tmp_path, records)
    assert ids(open_data(path, "auto", tokenizer(), epochs=1, shuffle=False, **options)) == expected
    shuffled = ids(open_data(path, "auto", tokenizer(), epochs=1, **options))
    assert shuffled != expected
    assert sorted(shuffled) == sorted(expected)

    def batches() -> PackedBatches:
        stream = open_data(path, "auto", tokenizer(), epochs=2, **options)
        return PackedBatches(stream, batch_size=2, seq_length=256, pad_token_id=0, window_rows=6)

    one = batches()
    whole = [batch.inputs["input_ids"].tolist() for batch in batches()]
    for taken in range(len(whole)):
        if taken % 4 == 0:
            other = batches()
            other.load_state_dict(json.loads(json.dumps(one.state_dict())))
            assert [batch.inputs["input_ids"].tolist() for batch in other] == whole[taken:]
        next(one)
    state = one.state_dict()
    records[3]["completion"] += "!"
    FORMATS[name](tmp_path, records)
    with pytest.raises(DataError, match="the data has changed, so the training cannot be continued"):
        batches().load_state_dict(state)


LINES = {
    "csv": ("a.csv:6: ", "a.csv:12: "),
    "tsv": ("a.tsv:6: ", "a.tsv:12: "),
    "json": ("a.json:6: ", "a.json:14: "),
    "parquet": ("a.parquet[1]: ", "a.parquet[3]: "),
    "saved": ("saved[1]: ", "saved[3]: "),
}


@pytest.mark.parametrize("name", LINES)
def test_errors_name_the_line_or_row(name: str, tmp_path: Path) -> None:
    records: Records = [{"prompt": "a\nb\n\nc", "completion": "b"} for _ in range(4)]
    records[1] = {"prompt": "a\nb", "completion": None}
    records[3] = {"prompt": "a", "completion": "long " * 60}
    report = check_data(FORMATS[name](tmp_path, records), "completion", tokenizer(), seq_length=32, progress=False)
    assert (report.samples, report.problems.count) == (2, 2)
    first, second = LINES[name]
    assert f"{first}the field 'completion' is null" in str(report.problems.first[0])
    assert f"{second}the sample is too long" in str(report.problems.first[1])


def _ends_of_rows(data: bytes) -> list[int]:
    state, found = "begin", []
    for index, letter in enumerate(map(chr, data)):
        if state == "quoted":
            state = "closed" if letter == '"' else state
        elif letter == '"' and state in ("begin", "closed"):
            state = "quoted"
        else:
            found += [index] * (letter == "\n")
            state = "begin" if letter in ",\n\r" else "field"
    return found


def _ends_of_items(data: bytes) -> list[int]:
    in_string = escaped = False
    level, found = 0, []
    for index, letter in enumerate(map(chr, data)):
        if in_string:
            escaped, in_string = letter == "\\" and not escaped, escaped or letter != '"'
        elif letter == '"':
            in_string = True
        else:
            level += (letter in "[{") - (letter in "]}")
            found += [index] * ((letter == "," and level == 0) or (letter in "]}" and level == -1))
    return found


def _scanned(separators: Separators, data: bytes, size: int) -> list[int]:
    found: list[int] = []
    state = 0
    for first in range(0, len(data), size):
        piece, before = np.frombuffer(data[first : first + size], np.uint8), state
        ends, state = separators.scan(piece, before)
        assert separators.state_after(piece, before) == state
        is_end = len(ends) > 0 and ends[-1] == len(piece) - 1 and piece[-1] == separators.byte
        assert (state == 0 and piece[-1] == separators.byte) == is_end
        found += (ends + first).tolist()
    return found


@settings(max_examples=80, deadline=None)
@given(st.text(st.sampled_from('a,"\n\r'), max_size=24), st.integers(1, 25))
def test_rows_of_csv_end_outside_of_quotes(text: str, size: int) -> None:
    """In pieces of every size, also where fields without quotes contain some."""
    assert _scanned(CsvRows(","), text.encode(), size) == _ends_of_rows(text.encode())


VALUES = st.recursive(
    st.text(st.sampled_from('a\\"{[,]}'), max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("k", max_size=2), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(VALUES, max_size=4), st.integers(1, 25))
def test_items_of_a_json_array_end_at_its_commas(values: list[Any], size: int) -> None:
    data = json.dumps(values).encode()[1:]
    assert _scanned(ArrayItems(), data, size) == _ends_of_items(data)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.text(st.sampled_from('ab,"\n\\[{'), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(1, 30)
)
def test_blocks_have_every_row_and_item_once(tmp_path_factory: Any, texts: list[str], block: int) -> None:
    directory = tmp_path_factory.mktemp("blocks")
    records: Records = [{"x": text, "y": "1"} for text in texts]
    files = [write_csv(directory / "a.csv", records), write_json(directory / "a.json", records, indent=1)]
    reader = TextReader(files, {".csv": open_csv, ".json": open_json}, block)
    found = [reader.read(location) for number in range(reader.num_blocks) for location in reader.locate(number)]
    fields = [dict(one) for record in found if (one := record.fields()) is not None]
    assert fields == records * 2
    for record in found:
        assert reader.read_again(record.source).data == record.data


@pytest.mark.parametrize("name", ["a.csv", "a.json"])
def test_a_large_text_file_is_read_in_bounded_memory(name: str, tmp_path: Path) -> None:
    line, count = "word " * 4000, 1000
    array = "[" + ",".join(f'{{"text": "{line}"}}' for _ in range(count)) + "]"
    (tmp_path / name).write_text(array if name == "a.json" else "text\n" + f'"{line}"\n' * count)
    del array
    tracemalloc.start()
    try:
        stream = open_data(tmp_path / name, "auto", tokenizer(), seq_length=8192)
        next(stream)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = (tmp_path / name).stat().st_size
    assert size > 20e6
    assert most < 12e6


def test_a_large_row_group_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """A row group of 40 MB; its rows are in a file that is mapped."""
    table = pa.table({"text": pa.array(["word " * 800] * 1000)})
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", table.schema, use_dictionary=False) as writer:
        writer.write_table(pa.concat_tables([table] * 10), row_group_size=10**6)
    del table
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        next(open_data(tmp_path / "a.parquet", "auto", tokenizer(), seq_length=2048))
    finally:
        pa.set_memory_pool(before)
    assert 0 < pool.max_memory() < 20e6


def test_a_directory_has_files_of_several_text_formats(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "one"}])
    write_csv(tmp_path / "b.csv", [{"text": "two"}])
    write_json(tmp_path / "c.json", [{"text": "three"}])
    (tmp_path / "info.json").write_text('{"text": "an object: not data, next to other files"}')

    def texts(path: Any) -> list[str]:
        stream = open_data(path, "auto", tokenizer(), seq_length=32, epochs=1, shuffle=False)
        return [tokenizer().decode(one, skip_special_tokens=True) for one in ids(stream)]

    assert texts(tmp_path) == ["one", "two", "three"]
    for name in ("a.jsonl", "b.csv", "c.json"):
        (tmp_path / name).unlink()
    assert texts(tmp_path) == ["an object: not data, next to other files"]


def test_cells_of_csv_are_json_where_fields_are_lists(tmp_path: Path) -> None:
    records: Records = [{"messages": json.dumps(chat("Hello", "yes")["messages"]), "tools": None}]
    expected = ids(open_data([chat("Hello", "yes")], "auto", tokenizer(), seq_length=64, epochs=1))
    assert (
        ids(open_data(write_csv(tmp_path / "a.csv", records), "auto", tokenizer(), seq_length=64, epochs=1)) == expected
    )
    labels: Records = [{"prompt": "a", "completion": "b", "label": label} for label in ("True", "0", "no")]
    report = check_data(write_csv(tmp_path / "b.csv", labels), "auto", tokenizer(), seq_length=64, progress=False)
    assert report.kind == "labelled"
    assert [one.is_desirable for one in report.first_samples] == [True, False]  # type: ignore[union-attr]
    assert "b.csv:4: label: wrong type; got a string, 'no'" in str(report.problems.first[0])
    pairs: Records = [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin} for margin in ("0.5", "x")]
    report = check_data(write_csv(tmp_path / "c.csv", pairs), "auto", tokenizer(), seq_length=64, progress=False)
    assert report.first_samples[0].margin == 0.5  # type: ignore[union-attr]
    assert "c.csv:3: margin: " in str(report.problems.first[0])


def test_tables_of_other_programs(tmp_path: Path) -> None:
    """With the index that pandas writes, and blanks around the names of columns."""
    expected = ids(open_data([{"text": "yes"}], "auto", tokenizer(), seq_length=64, epochs=1))
    for content in (",text\n0,yes\n", "id, text\n0,yes\n", 'text ,"id"\r\nyes,1\r\n'):
        (tmp_path / "a.csv").write_text(content)
        assert ids(open_data(tmp_path / "a.csv", "auto", tokenizer(), seq_length=64, epochs=1)) == expected, content


def test_splits_of_saved_datasets(tmp_path: Path) -> None:
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "yes"}])})
    splits.save_to_disk(tmp_path / "saved")
    stream = open_data(f"{tmp_path / 'saved'}:train", "auto", tokenizer(), seq_length=64, epochs=1)
    assert len(list(stream)) == 1
    with pytest.raises(DataError, match=r"there is no split 'tran'; got 'train'\. Did you mean 'train'\?"):
        open_data(f"{tmp_path / 'saved'}:tran", "auto", tokenizer(), seq_length=64)


def test_a_directory_of_saved_datasets_is_refused_by_their_names(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list([{"text": "yes"}])
    one.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "b" / "splits")
    names = [f"{tmp_path}/b/splits:test", f"{tmp_path}/b/splits:train", f"{tmp_path}/saved"]
    expected = f"{tmp_path}: a directory of saved datasets; got {', '.join(map(repr, names))}. Give one of them, such"
    with pytest.raises(DataError, match=re.escape(expected)):
        open_data(tmp_path, "auto", tokenizer(), seq_length=64)


def test_suffixes_may_be_capitals(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "a.JSONL", [{"text": "yes"}])
    write_csv(tmp_path / "data" / "b.CSV", [{"text": "yes"}])
    write_json(tmp_path / "data" / "c.Json", [{"text": "yes"}])
    write_parquet(tmp_path / "d.PARQUET", [{"text": "yes"}])
    (tmp_path / "e.TXT").write_text("yes")
    np.save(tmp_path / "f.npy", np.array([1, 2, 3], np.uint16))
    (tmp_path / "f.npy").rename(tmp_path / "f.NPY")
    for name, count in {"data": 3, "data/b.CSV": 1, "d.PARQUET": 1, "e.TXT": 1, "f.NPY": 1}.items():
        stream = open_data(tmp_path / name, "auto", tokenizer(), seq_length=64, epochs=1)
        assert len(list(stream)) == count, name


def test_datasets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library loads a directory instead, with the names that the hub would get."""
    (tmp_path / "repo").mkdir()
    write_lines(tmp_path / "repo" / "train.jsonl", [{"text": "yes"}])
    asked: list[tuple[Any, ...]] = []
    load = datasets.load_dataset

    def load_dataset(repo: str, name: Any = None, **options: Any) -> Any:
        asked.append((repo, name, options.get("split"), options.get("revision"), options.get("data_files")))
        given = {} if options.get("data_files") is None else {"data_files": options["data_files"]}
        return load(str(tmp_path / "repo"), split=options.get("split"), cache_dir=str(tmp_path / "cache"), **given)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    names = {
        "org/name": ("org/name", None, None, None, None),
        "org/name:train": ("org/name", None, "train", None, None),
        "org/name/config:train[:1]": ("org/name", "config", "train[:1]", None, None),
        "hf://datasets/org/name@main/config:train": ("org/name", "config", "train", "main", None),
        "hf://datasets/org/name/train.jsonl": ("org/name", None, None, None, "train.jsonl"),
    }
    for name, expected in names.items():
        stream = open_data(name, "auto", tokenizer(), seq_length=64, epochs=1)
        (sample,) = stream
        assert asked.pop() == expected
        assert str(sample.source) == f"{name}[0]"
        other = open_data(name, "auto", tokenizer(), seq_length=64, epochs=1)
        other.load_state_dict(stream.state_dict())
    with pytest.raises(DataError, match="org/name:tets: is neither a file nor a directory, and the dataset of the hub"):
        open_data("org/name:tets", "auto", tokenizer(), seq_length=64)


def test_parquet_of_the_hub_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    folder = tmp_path / "datasets" / "org" / "name" / "data"
    folder.mkdir(parents=True)
    records = completions(20)
    write_parquet(folder / "0.parquet", records[:9])
    write_parquet(folder / "1.parquet", records[9:])
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: DirFileSystem(str(tmp_path), LocalFileSystem()))
    data = "hf://datasets/org/name/data/*.parquet"
    options: dict[str, Any] = {"seq_length": 256, "epochs": 1, "shuffle": False}
    expected = ids(open_data(records, "auto", tokenizer(), **options))
    assert ids(open_data(data, "auto", tokenizer(), **options)) == expected
    with pytest.raises(DataError, match=r"no file of the repository has this name"):
        open_data("hf://datasets/org/name/none/*.parquet", "auto", tokenizer(), **options)


@pytest.mark.parametrize("name, package", [("parquet", "pyarrow"), ("saved", "datasets")])
def test_without_the_extra_one_error_names_it(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FORMATS[name](tmp_path, completions(3))
    monkeypatch.setitem(sys.modules, package, None)
    what = f"the package {package}, which is not installed. Run `pip install 'ligerzoo\\[data\\]'`"
    with pytest.raises(DataError, match=what):
        open_data(path, "auto", tokenizer(), seq_length=64)
    assert hub.hub_data("org/name:train") is not None

"""Streams and batches: the order is reproducible, packing loses nothing, and resuming changes nothing."""

import gc
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerzoo.errors import DataError
from ligerzoo.hub import AutoModel
from ligerzoo.train.data import PackedBatches, PaddedBatches, check_data, open_data, write_tokens
from ligerzoo.train.data.packing import pack_best_fit, pack_concatenated, pack_pieces
from ligerzoo.train.data.samples import Sample, Source, row_length
from ligerzoo.train.data.sources import DataSource, ReadOptions
from ligerzoo.train.data.stream import Order, Permutation
from ligerzoo.train.data.text_files import TextReader
from ligerzoo.train.data.text_formats import open_text
from ligerzoo.train.data_options import ONCE, ReadOrder
from tests.models.tiny import Tiny
from tests.models.zoo import TEXT_CHECKPOINTS
from tests.train.data_helpers import chat, tokenizer, write_lines

ROOT = Path(__file__).parent.parent.parent


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 700), st.integers())
def test_a_permutation_has_every_number_once(n: int, key: int) -> None:
    permutation = Permutation(n, key)
    assert sorted(permutation[i] for i in range(n)) == list(range(n))
    with pytest.raises(IndexError):
        permutation[n]


def test_permutations_are_uniform() -> None:
    """Each of the 6 orders of 3 numbers is expected 500 times in 3000, with a standard deviation of 20."""
    counts = Counter(tuple(Permutation(3, key)[i] for i in range(3)) for key in range(3000))
    assert len(counts) == 6
    assert all(400 < count < 600 for count in counts.values())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.text(st.sampled_from("abü"), max_size=9), min_size=1, max_size=12), min_size=1, max_size=3),
    st.integers(1, 20), st.integers(1, 60), st.booleans(), st.booleans(),
)  # fmt: skip
def test_blocks_have_every_line_once(
    tmp_path_factory: Any, contents: list[list[str]], block: int, pool: int, ends: bool, shuffle: bool
) -> None:
    directory, files = tmp_path_factory.mktemp("lines"), []
    for index, lines in enumerate(contents):
        text = "\n".join(lines) + "\n" * ends
        if text:
            files.append(directory / f"{index}.jsonl")
            files[-1].write_text(text)
    expected = sorted(line.encode() for file in files for line in file.read_text().split("\n") if line)
    if not expected:
        return
    formats = {".jsonl": open_text}
    reader = TextReader(files, formats, block, pool_size=pool, holds="text")
    source = DataSource(reader, "text", ReadOptions())
    order = Order([source], ReadOrder(seed=1, shuffle=shuffle, epochs=1))
    records = list(order.records())
    assert sorted(record.data for _, record in records) == expected
    for _, record in records:
        name, number = str(record.source).rsplit(":", 1)
        assert Path(name).read_bytes().split(b"\n")[int(number) - 1] == record.data
    for index, (progress, _) in enumerate(records, 1):
        assert [one for one, _ in order.records(progress)] == [one for one, _ in records[index:]]
    joined = DataSource(TextReader(files, formats, block, joined=True, holds="text"), "text", ReadOptions())
    in_order = Order([joined], ONCE)
    documents = [record for _, record in in_order.records()]
    assert sum(record.ends_document for record in documents) <= len(files)
    whole = b"".join(record.data + b"\n" * record.ends_document for record in documents)
    assert b"".join(whole.split()) == b"".join(b"".join(file.read_bytes().split()) for file in files)


@pytest.fixture(scope="module")
def completions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = ({"prompt": f"{i}:", "completion": " yes no" * (1 + i % 13)} for i in range(90))
    return write_lines(tmp_path_factory.mktemp("data") / "completions.jsonl", records)


def ids(samples: Any) -> list[list[int]]:
    return [sample.input_ids for sample in samples]


def test_the_order_depends_on_the_seed_only(completions: Path) -> None:
    def samples(**options: Any) -> list[list[int]]:
        return ids(open_data(completions, "auto", tokenizer(), seq_length=64, **{"epochs": 2, **options}))

    first = samples()
    assert samples(workers=3) == first
    assert samples(seed=1) != first
    assert sorted(samples(seed=1)) == sorted(first)
    assert first[:90] != first[90:]
    assert sorted(first[:90]) == sorted(first[90:])
    ordered = samples(shuffle=False, epochs=1)
    assert [tokenizer().decode(one).split(":")[0] for one in ordered] == [f"<s>{i}" for i in range(90)]


def test_a_stream_continues_at_every_sample(completions: Path) -> None:
    def stream() -> Any:
        return open_data(completions, "auto", tokenizer(), seq_length=64, epochs=1)

    expected, one = ids(stream()), stream()
    for taken in range(0, 91, 7):
        other = stream()
        other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert ids(other) == expected[taken:]
        list(itertools.islice(one, 7))


def batches_of(path: Path, *, packed: bool = True, kind: Any = "auto", **options: Any) -> Any:
    epochs, workers = options.pop("epochs", 2), options.pop("workers", 1)
    stream = open_data(path, kind, tokenizer(), seq_length=48, epochs=epochs, workers=workers)
    if packed:
        options = {"window_rows": 6, "seq_length": 48, **options}
    make: Any = PackedBatches if packed else PaddedBatches
    return make(stream, **{"batch_size": 2, "pad_token_id": 0, **options})


def tensors(batches: Any) -> list[dict[str, Any]]:
    return [{name: tensor.tolist() for name, tensor in batch.inputs.items()} for batch in batches]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = ({"text": f"{i} " + "yes no, " * (i % 29)} for i in range(40))
    return write_lines(tmp_path_factory.mktemp("data") / "documents.jsonl", records)


CASES: list[dict[str, Any]] = [
    {}, {"packed": False}, {"documents": "concatenate"}, {"documents": "separate"}, {"documents": "whole"},
]  # fmt: skip


@pytest.mark.parametrize("options", CASES, ids=str)
def test_batches_continue_at_every_batch(completions: Path, documents: Path, options: dict[str, Any]) -> None:
    """The state is that of the batches that were yielded, however many the thread has prepared."""
    path = documents if "documents" in options else completions
    expected, one = tensors(batches_of(path, **options)), batches_of(path, **options)
    assert tensors(batches_of(path, workers=2, **options)) == expected
    for taken in range(len(expected) + 1):
        state = json.loads(json.dumps(one.state_dict()))
        if taken % 3 == 0 or taken > len(expected) - 2:
            other = batches_of(path, **options)
            other.load_state_dict(state)
            assert tensors(other) == expected[taken:]
        next(one, None)
    one.load_state_dict(state)
    assert next(one, None) is None


@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_processes(
    completions: Path, documents: Path, options: dict[str, Any]
) -> None:
    path = documents if "documents" in options else completions

    def rows(world_size: int) -> list[list[list[int]]]:
        ranks = [
            list(batches_of(path, batch_size=4 // world_size, rank=rank, world_size=world_size, **options))
            for rank in range(world_size)
        ]
        assert len({len(one) for one in ranks}) == 1
        return [
            [[str(one.source) for one in row] for batch in step for row in batch.rows]
            for step in zip(*ranks, strict=True)
        ]

    assert rows(1) == rows(2) == rows(4)


@st.composite
def samples(draw: st.DrawFn, longest: int = 20) -> list[Sample]:
    lengths = draw(st.lists(st.integers(2, longest), min_size=1, max_size=30))
    number = itertools.count()
    chosen = []
    for index, length in enumerate(lengths):
        tokens = list(itertools.islice(number, length))
        chosen.append(Sample(tokens, tokens, Source("x", index, "row")))
    return chosen


@settings(max_examples=60, deadline=None)
@given(samples(), st.booleans())
def test_best_fit_packing_keeps_every_sample_once(given_samples: list[Sample], is_last: bool) -> None:
    rows, rest = pack_best_fit(given_samples, 20, is_last)
    assert sorted(ids(itertools.chain(*rows, rest))) == ids(given_samples)
    assert all(sum(map(row_length, row)) <= 20 for row in rows)
    assert not (is_last and rest)
    fullest = [sum(map(row_length, row)) for row in [*rows, rest]]
    assert sum(length <= 10 for length in fullest) <= 1 + (not rest)  # two half-empty rows would share a row
    with pytest.raises(DataError, match=r"x\[0\]: the sample is too long for a row; got .* at most 1 "):
        pack_best_fit(given_samples[:1], 1, is_last)


@settings(max_examples=60, deadline=None)
@given(samples(longest=50), st.booleans())
def test_documents_are_cut_without_loss(given_samples: list[Sample], is_last: bool) -> None:
    tokens = list(itertools.chain(*ids(given_samples)))
    rows, rest = pack_concatenated(given_samples, 20, is_last)
    found = list(itertools.chain(*ids(itertools.chain(*rows, rest))))
    assert found == tokens or (is_last and found == tokens[:-1] and len(tokens) % 20 == 1)
    assert all(sum(map(row_length, row)) == 20 for row in rows[: len(rows) - is_last])
    rows, rest = pack_pieces(given_samples, 20, is_last)
    pieces = list(itertools.chain(*rows, rest))
    assert sorted(set(itertools.chain(*ids(pieces)))) == tokens
    assert sum(len(piece) - 1 for piece in ids(pieces)) == sum(len(one) - 1 for one in ids(given_samples))


@pytest.mark.parametrize("mode", ["concatenate", "separate", "whole"])
def test_positions_of_documents(documents: Path, mode: str) -> None:
    for batch in batches_of(documents, documents=mode, epochs=1):
        for row, row_ids, positions in zip(
            batch.rows, batch.inputs["input_ids"], batch.inputs["position_ids"], strict=True
        ):
            lengths = list(map(row_length, row))
            starts = [sum(lengths)] if mode == "concatenate" else lengths
            expected = [i for length in starts for i in range(length)]
            assert positions.tolist() == expected + [0] * (48 - len(expected))
            assert row_ids.tolist()[: len(expected)] == list(itertools.chain(*ids(row)))


ROWS = {
    row.config["model_type"]: row
    for row in TEXT_CHECKPOINTS
    if row.config["model_type"] in ("llama", "gemma2", "qwen3", "mixtral", "phi3")
    and not row.rotation_depends_on_length
}


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_has_the_loss_and_gradients_of_its_samples_alone(row: Tiny, packed: bool, tmp_path: Path) -> None:
    row.write(tmp_path / "model")
    model = AutoModel.from_pretrained(tmp_path / "model", dtype="float64")
    generator, vocab = torch.Generator().manual_seed(0), model.config.vocab_size
    records = [
        {"prompt": "a" * int(length), "completion": "b"} for length in torch.randint(1, 12, (9,), generator=generator)
    ]
    stream = open_data(records, "auto", tokenizer(), seq_length=32, epochs=1)
    make: Any = PackedBatches if packed else PaddedBatches
    options = {"seq_length": 32} if packed else {}
    batch = next(iter(make(stream, batch_size=9, pad_token_id=1, **options)))
    segments = [segment for one in batch.rows for sample in one for segment in sample.segments]
    assert len(segments) == 9
    assert batch.padding > 0
    parameters = [one for one in model.parameters() if one.requires_grad]

    def loss(**inputs: Any) -> Any:
        inputs["input_ids"] = inputs["input_ids"] % vocab
        inputs["labels"] = torch.where(inputs["labels"] == -100, -100, inputs["labels"] % vocab)
        out = model(**inputs, num_items_in_batch=1)
        return out.loss if out.aux_loss is None else out.loss - model.config.router_aux_loss_coef * out.aux_loss

    together = loss(**batch.inputs)
    alone = sum(loss(input_ids=torch.tensor([one.input_ids]), labels=torch.tensor([one.labels])) for one in segments)
    assert batch.trained_tokens == sum(one.trained_tokens for one in segments)
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)
    for one, other in zip(
        torch.autograd.grad(together, parameters), torch.autograd.grad(alone, parameters), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_token_files(tmp_path: Path, documents: Path) -> None:
    written = write_tokens(documents, tmp_path / "data.bin", tokenizer())
    stream = open_data(documents, "text", tokenizer(), seq_length=9, shuffle=False, epochs=1)
    expected = list(itertools.chain(*ids(stream)))
    assert written == len(expected)
    np.save(tmp_path / "data.npy", np.array(expected, np.uint32))
    for name in ("data.bin", "data.npy"):
        stream = open_data(tmp_path / name, "auto", tokenizer(), seq_length=9, shuffle=False, epochs=1)
        assert list(itertools.chain(*ids(stream))) == expected
        shuffled = ids(open_data(tmp_path / name, "auto", tokenizer(), seq_length=9, epochs=1))
        assert shuffled != ids(open_data(tmp_path / name, "auto", tokenizer(), seq_length=9, epochs=1, seed=1))
        assert Counter(itertools.chain(*shuffled)) == Counter(expected)
    np.save(tmp_path / "wrong.npy", np.array([1, 2, 10**6]))
    with pytest.raises(DataError, match=r"wrong.npy, token 2: the id is not in the vocabulary; got 1000000"):
        next(open_data(tmp_path / "wrong.npy", "auto", tokenizer(), seq_length=9))
    (tmp_path / "data.bin.json").write_text('{"dtype": "uint32", "tokens": 3}')
    with pytest.raises(DataError, match=r"does not have the size that its description says"):
        open_data(tmp_path / "data.bin", "auto", tokenizer(), seq_length=9)
    bad = write_lines(tmp_path / "bad.jsonl", [{"text": "yes"}, {"txt": "no"}])
    with pytest.raises(DataError, match=r"bad.jsonl:2"):
        write_tokens(bad, tmp_path / "new.bin", tokenizer())
    assert not list(tmp_path.glob("*new*"))


def test_text_files(tmp_path: Path) -> None:
    tok = tokenizer()
    (tmp_path / "a.txt").write_text("yes\r\n\nno yes\n")
    (tmp_path / "b.txt").write_text("no")
    whole = [tok.decode(one) for one in ids(open_data(tmp_path, "auto", tok, seq_length=8, shuffle=False, epochs=1))]
    assert whole == ["<s>yes\r\n\nno yes</s>", "<s>no</s>"]
    lines = open_data(tmp_path / "*.txt", "text", tok, seq_length=8, shuffle=False, epochs=1, text_unit="line")
    assert [tok.decode(one) for one in ids(lines)] == ["<s>yes</s>", "<s>no yes</s>", "<s>no</s>"]


def test_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [chat("Hello", "yes"), chat("And?", "no", system="Be brief.")]
    dataset = datasets.Dataset.from_list([{**row, "id": index} for index, row in enumerate(rows)])
    expected = ids(open_data(rows, "auto", tokenizer(), seq_length=99, epochs=1))
    assert ids(open_data(dataset, "auto", tokenizer(), seq_length=99, epochs=1)) == expected
    dataset.save_to_disk(tmp_path / "saved")
    assert ids(open_data(tmp_path / "saved", "chat", tokenizer(), seq_length=99, epochs=1)) == expected
    splits = datasets.DatasetDict({"train": dataset})
    splits.save_to_disk(tmp_path / "splits")
    for data in (splits, tmp_path / "splits"):
        with pytest.raises(DataError, match="several splits of a dataset; got 'train'"):
            open_data(data, "auto", tokenizer(), seq_length=99)
    assert ids(open_data(tmp_path / "splits" / "train", "auto", tokenizer(), seq_length=99, epochs=1)) == expected
    with pytest.raises(DataError, match="cannot be read in random order; got IterableDataset"):
        open_data(dataset.to_iterable_dataset(), "auto", tokenizer(), seq_length=99)


def test_changed_data_is_not_continued(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "yes"}, {"text": "no"}])
    state = open_data(path, "auto", tokenizer(), seq_length=9).state_dict()
    with pytest.raises(DataError, match=r"^seed: the data has changed, so the training cannot be continued; got 1"):
        open_data(path, "auto", tokenizer(), seq_length=9, seed=1).load_state_dict(state)
    for others in ([{"text": "yes"}] * 3, [{"text": "yes"}, {"text": "yo"}]):
        write_lines(path, others)
        with pytest.raises(DataError, match=r"^files: the data has changed"):
            open_data(path, "auto", tokenizer(), seq_length=9).load_state_dict(state)


LONG = {"prompt": "yes " * 40, "completion": "no"}


@pytest.mark.parametrize(
    "line, problem",
    [
        ('{"text": "yes"', "broken JSON: Expecting ',' delimiter; got"),
        ("[1]", "not a JSON object; got '[1]'"),
        ('{"text": "a", "text": "b"}', "the key 'text' occurs twice in one object"),
        (b'{"text": "\xff"}', "invalid UTF-8; got byte 0xFF at byte 11 of the line"),
        (b'{"text": "\x00"}', "contains a NUL byte"),
        ('{"text": "\\u0000"}', "contains a NUL character"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000 + "]" * 100_000, "broken JSON"),
        ({"text": " "}, "text is empty; got ' '"),
        ({"text": 3}, "text: wrong type; got a number, '3'; expected a string"),
        ({"txt": "yes"}, "unknown field 'txt'. Did you mean 'text'?"),
        ({"body": "yes"}, "the field 'text' is missing; got fields 'body'"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, problem: str) -> None:
    data = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "yes"}\n \n' + data + b'\n{"text": "no"}\n')
    report = check_data(path, "auto", tokenizer(), seq_length=64, progress=False)
    assert (report.samples, report.problems.count, report.dropped) == (2, 1, 1)
    assert str(report.problems.first[0]).startswith(f"{path}:3: {problem}")
    assert "\n" not in str(report.problems.first[0])
    with pytest.raises(DataError, match=r"bad\.jsonl:3: "):
        list(open_data(path, "auto", tokenizer(), seq_length=64, epochs=1))
    with pytest.raises(DataError, match="^" + re.escape(f"{path}:3: {problem}")):
        report.raise_if_bad()


@pytest.mark.parametrize(
    "record, problem",
    [
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        (
            {"prompt": "a", "complation": "b", "completion": None},
            "unknown field 'complation'. Did you mean 'compl",
        ),
        (LONG, r"the sample is too long; got \d+ tokens; expected at most 16 \(seq_length\)"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": "Hello"}, "messages: wrong type; got a string"),
        ({"messages": ["Hello"]}, r"messages\[0\]: wrong type"),
        (
            {"messages": [{"role": "usr", "content": "a"}]},
            r"messages\[0\]: unknown role; got 'usr'.*mean 'user'",
        ),
        ({"messages": [{"rol": "user", "content": "a"}]}, r"messages\[0\]: unknown field 'rol'.*Did you mean 'role'"),
        ({"messages": [{"role": "user", "contnt": "a"}]}, r"messages\[0\]: unknown field 'contnt'.*mean 'content'"),
        ({"instruction": "a", "ouput": "b"}, "'output' is missing; .*Did you mean 'output' by 'ouput'"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]: content has a wrong type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "the record has images, which this run cannot train",
        ),
        (chat("Hello", " "), r"messages\[1\]: the assistant's content is empty"),
        ({"prompt": "a", "completion": "b", "label": 1}, "label: wrong type; got a number"),
        ({"prompt": "a", "chosen": "b", "rejected": 4}, "rejected: wrong type"),
    ],
)
def test_bad_records_are_named(record: dict[str, Any], problem: str) -> None:
    kinds = {"messages": "chat", "label": "labelled", "chosen": "preference"}
    kind = next((kind for name, kind in kinds.items() if name in record), "completion")
    with pytest.raises(DataError, match=rf"^dataset\[0\]: .*{problem}"):
        next(open_data([record], kind, tokenizer(), seq_length=16))  # type: ignore[arg-type]


def test_long_samples_are_truncated_or_dropped_on_request() -> None:
    records = [LONG, {"prompt": "a", "completion": "no " * 40}, {"prompt": "a", "completion": "b"}]
    for too_long, count in (("truncate", 2), ("drop", 1)):
        stream = open_data(records, "auto", tokenizer(), seq_length=16, epochs=1, too_long=too_long)  # type: ignore[arg-type]
        found = list(stream)
        assert len(found) == count
        assert stream.dropped == 3 - count
        assert all(len(one.input_ids) <= 16 and one.trained_tokens for one in found)


@pytest.mark.parametrize("packed", [True, False])
def test_dropped_records_are_counted_up_to_each_batch(packed: bool) -> None:
    """Those after the last sample, too; and the same ones by batches that continue from a state."""
    records = [LONG if i % 4 == 3 else {"prompt": "a", "completion": " no" * (1 + i % 3)} for i in range(40)]

    def batches() -> Any:
        stream = open_data(records, "completion", tokenizer(), seq_length=16, epochs=1, shuffle=False, too_long="drop")
        shared: dict[str, Any] = {"batch_size": 2, "pad_token_id": 0}
        return (
            PackedBatches(stream, seq_length=16, window_rows=2, **shared) if packed else PaddedBatches(stream, **shared)
        )

    one, counts, state = batches(), [0], {}
    for _ in one:
        if state:
            other = batches()
            other.load_state_dict(json.loads(json.dumps(state)))
            assert other.dropped == counts[-1]
            next(other)
            assert other.dropped == one.dropped
        state = one.state_dict()
        counts.append(one.dropped)
    assert counts == sorted(counts)
    assert len(set(counts)) > 3
    assert counts[-1] == 10


def test_endless_data_without_a_sample_is_an_error() -> None:
    stream = open_data([LONG], "auto", tokenizer(), seq_length=16, too_long="drop")
    with pytest.raises(DataError, match="the data has no samples"):
        next(stream)


def test_data_that_cannot_be_opened(tmp_path: Path) -> None:
    def refused(problem: str, data: Any, kind: Any = "auto", **options: Any) -> None:
        with pytest.raises(DataError, match=problem):
            open_data(data, kind, tokenizer(), **{"seq_length": 9, **options})

    refused("no such file or directory", tmp_path / "a.jsonl")
    refused("no file matches the pattern", tmp_path / "*.jsonl")
    refused("the directory has no data files", tmp_path)
    (tmp_path / "a.jsonl").touch()
    refused("a.jsonl: the file is empty", tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("\n\n")
    refused("the data has no records", tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"^a\.jsonl: the data has no records"):
        next(open_data(tmp_path / "a.jsonl", "text", tokenizer(), seq_length=9))
    (tmp_path / "a.jsonl").write_bytes("{}".encode("utf-16"))
    refused("a.jsonl:1: the file is UTF-16; expected UTF-8. Convert it", tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf")
    refused("the data has no records", tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"text": "a"}'))
    refused(r"a.jsonl:1: the file is compressed \(gzip\). Decompress it", tmp_path / "a.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    for name in ("pipe", "loop"):
        refused("not a regular file.* Write pipes", tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.jsonl").unlink()
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "b"}')
    refused("not a record of a known kind; got fields 'question', 'answer'.*--map prompt=", tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"prompt": null, "completion": "b"}')
    refused("a.jsonl:1: the field 'prompt' is null; got values of 'completion'", tmp_path / "a.jsonl")
    refused("listed twice", [tmp_path / "a.jsonl", tmp_path])
    (tmp_path / "b.xlsx").write_text("[]")
    refused("not a format of data files; got '.xlsx'.*Save the table as CSV", tmp_path / "b.xlsx")
    (tmp_path / "c.txt").write_text("yes")
    refused("files of different formats.* Give each a weight", tmp_path)
    refused("text and token files are of another kind", tmp_path / "c.txt", "chat")
    refused("kind: unsupported value; got 'chats'.*Did you mean 'chat'", tmp_path / "c.txt", "chats")
    refused("seq_length: unsupported value; got 0; expected an integer, 2 or more", tmp_path / "c.txt", seq_length=0)
    with pytest.raises(DataError, match="prompts have no labels"):
        PackedBatches(
            open_data([{"prompt": "a"}], "auto", tokenizer(), seq_length=9), batch_size=1, seq_length=9, pad_token_id=0
        )
    stream = open_data([{"text": "abc"}], "text", tokenizer(), seq_length=9)
    for length in (0, 1):
        with pytest.raises(DataError, match=f"seq_length: unsupported value; got {length}; expected an integer, 2 or"):
            PackedBatches(stream, batch_size=1, seq_length=length, pad_token_id=0, documents="whole")


def test_the_report_counts_problems(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["{", '{"text": "yes"}'] * 25)
    report = check_data(path, "text", tokenizer(), seq_length=9, progress=False)
    assert (report.samples, report.problems.count, len(report.problems.first)) == (25, 25, 20)
    assert str(report).endswith("5 more records have problems")
    assert report.trained_tokens == report.tokens - 25


def test_a_program_that_ends_in_the_middle_of_the_data_ends_cleanly() -> None:
    script = """
from ligerzoo.train.data import PackedBatches, open_data
from tests.train.data_helpers import tokenizer

stream = open_data([{"text": "yes no " * 50}] * 500, "auto", tokenizer(), seq_length=64)
batches = PackedBatches(stream, batch_size=2, seq_length=64, pad_token_id=0)
next(batches)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, "")


def test_batches_that_are_dropped_end_their_thread(completions: Path) -> None:
    batches = batches_of(completions, epochs=None)
    next(batches)
    assert any(thread.name == "ligerzoo-batches" for thread in threading.enumerate())
    del batches
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "ligerzoo-batches":
            thread.join(timeout=10)
            assert not thread.is_alive()


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
@pytest.mark.parametrize("padding", [0, 2**18])
def test_byte_order_marks_are_skipped(tmp_path: Path, suffix: str, padding: int) -> None:
    """In each file, also if its first line is longer than a block."""
    text = "one" + padding * "a"
    content = json.dumps({"text": text}) + '\n{"text": "two"}\n' if suffix == "jsonl" else f"{text}\ntwo\n"
    found = []
    for mark in (b"", b"\xef\xbb\xbf"):
        for name in "ab":
            (tmp_path / f"{name}.{suffix}").write_bytes(mark + content.encode())
        stream = open_data(tmp_path, "text", tokenizer(), seq_length=2**20, epochs=1, shuffle=False)
        found.append([sample.input_ids for sample in stream if isinstance(sample, Sample)])
    assert found[0] == found[1]
    assert tokenizer().decode(found[1][0])[:6] == "<s>one"


def test_tokens_that_the_model_lacks_name_their_record(tmp_path: Path) -> None:
    """A tokenizer may have more tokens than the model, as long as no record has them: of any kind and sequence."""
    own = tokenizer()
    rows = len(own)
    own.add_tokens(["you"])
    bad: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": "you"}], "prompt": [{"prompt": "you"}],
        "completion": [{"prompt": "you", "completion": "a"}, {"prompt": "a", "completion": "you"}],
        "preference": [
            {"prompt": "a", "chosen": "you", "rejected": "b"}, {"prompt": "a", "chosen": "b", "rejected": "you"},
        ],
        "labelled": [{"prompt": "a", "completion": "you", "label": True}],
    }  # fmt: skip
    for kind, records in bad.items():
        for record in records:
            good = {name: name if isinstance(value, str) else value for name, value in record.items()}
            file = write_lines(tmp_path / "a.jsonl", [good, record])
            report = check_data(file, kind, own, seq_length=99, embedding_rows=rows)
            assert (report.samples, report.problems.count) == (1, 1)
            assert re.match(
                r".*a\.jsonl:2: .*the token '.*' is not in the model's vocabulary", str(report.problems.first[0])
            )


def test_a_repeated_key_and_many_bad_lines_take_linear_time(tmp_path: Path) -> None:
    """Twice the input takes about twice the time: 20,000 keys took 24 s, and each bad line counted all lines before."""
    keys = ",".join(f'"f{index}":1' for index in range(20_000))
    lines = [f'{{{keys},"f19999":2}}', '{"a": [[[{"b": 1, "b": 2}]]]}', *["{"] * 50_000]
    file = write_lines(tmp_path / "a.jsonl", lines)
    start = time.process_time()
    report = check_data(file, "text", tokenizer(), seq_length=9)
    assert time.process_time() - start < 20
    assert report.problems.count == 50_002
    assert "a.jsonl:1: the key 'f19999' occurs twice in one object" in str(report.problems.first[0])
    assert "a.jsonl:2: the key 'b' occurs twice in one object" in str(report.problems.first[1])
    assert "a.jsonl:20: broken JSON" in str(report.problems.first[19])

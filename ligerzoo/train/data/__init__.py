"""A stand-in for the data part, with its interface: JSONL with texts, or prompts and completions, in memory."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligerzoo.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    input_ids: list[int]
    labels: list[int]
    source: str


@dataclass(frozen=True)
class Batch:
    inputs: dict[str, Tensor]
    tokens: int
    trained_tokens: int
    padding: int
    sources: list[str]


class Stream:
    def __init__(self, samples: list[Sample], seed: int, shuffle: bool, epochs: int | None) -> None:
        self.samples, self.seed, self.shuffle, self.epochs = samples, seed, shuffle, epochs
        self.position = 0

    def __iter__(self) -> Iterator[Sample]:
        while self.epochs is None or self.position < self.epochs * len(self.samples):
            epoch, index = divmod(self.position, len(self.samples))
            order = list(range(len(self.samples)))
            if self.shuffle:
                random.Random(f"{self.seed} {epoch}").shuffle(order)
            self.position += 1
            yield self.samples[order[index]]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def open_data(
    paths: Sequence[str], kind: str, tokenizer: Tokenizer, *, seq_length: int, seed: int = 0, shuffle: bool = True,
    epochs: int | None = None,
) -> Stream:  # fmt: skip
    samples = []
    for path in paths:
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            record = json.loads(line)
            prompt = tokenizer.encode(record.get("prompt", ""))
            rest = tokenizer.encode(record.get("completion", record.get("text")), add_special_tokens=False)
            ids, labels = (prompt + rest)[:seq_length], ([-100] * len(prompt) + rest)[:seq_length]
            samples.append(Sample(ids, labels, f"{path}:{number}"))
    return Stream(samples, seed, shuffle, epochs)


class DataReport:
    def __init__(self, samples: list[Sample]) -> None:
        self.samples, self.first_samples = len(samples), samples[:3]

    def raise_if_bad(self) -> None: ...

    def __str__(self) -> str:
        return f"{self.samples} samples"


def check_data(paths: Sequence[str], kind: str, tokenizer: Tokenizer, *, seq_length: int) -> DataReport:
    return DataReport(open_data(paths, kind, tokenizer, seq_length=seq_length).samples)


def format_sample(sample: Sample, tokenizer: Tokenizer, *, max_tokens: int) -> str:
    trained = [token for token, label in zip(sample.input_ids, sample.labels, strict=True) if label != -100]
    return f"{sample.source}: {tokenizer.decode(sample.input_ids)} [[{tokenizer.decode(trained)}]]"


class PackedBatches:
    def __init__(self, stream: Stream, *, batch_size: int, seq_length: int, pad_token_id: int) -> None:
        self.stream, self.batch_size, self.seq_length, self.pad_token_id = stream, batch_size, seq_length, pad_token_id
        self.samples = iter(stream)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows: list[list[Sample]] = []
        while len(rows) < self.batch_size:
            row: list[Sample] = []
            before = self.stream.state_dict()
            for sample in self.samples:
                if sum(len(one.input_ids) for one in row) + len(sample.input_ids) > self.seq_length:
                    self.stream.load_state_dict(before)
                    break
                row.append(sample)
                before = self.stream.state_dict()
            if not row:
                break
            rows.append(row)
        if not rows:
            raise StopIteration
        return self.pack(rows)

    def pack(self, rows: list[list[Sample]]) -> Batch:
        filler = {"input_ids": self.pad_token_id, "labels": -100, "position_ids": 0}
        inputs = {name: torch.full((len(rows), self.seq_length), value) for name, value in filler.items()}
        for row, samples in enumerate(rows):
            at = 0
            for sample in samples:
                span = slice(at, at := at + len(sample.input_ids))
                inputs["input_ids"][row, span] = torch.tensor(sample.input_ids)
                inputs["labels"][row, span] = torch.tensor([-100, *sample.labels[1:]])
                inputs["position_ids"][row, span] = torch.arange(len(sample.input_ids))
        tokens = sum(len(sample.input_ids) for samples in rows for sample in samples)
        trained = int((inputs["labels"] != -100).sum())
        sources = [sample.source for samples in rows for sample in samples]
        return Batch(inputs, tokens, trained, len(rows) * self.seq_length - tokens, sources)

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)

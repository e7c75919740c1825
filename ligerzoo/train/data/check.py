"""Reads all data once and reports every problem, before anything is trained."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from ligerzoo.errors import DataError
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.open import open_data
from ligerzoo.train.data.samples import AnySample, PromptSample, Sample
from ligerzoo.vision.processor import Processor

_MAX_PROBLEMS = 20


@dataclass
class DataReport:
    """What a data set contains. `str` gives a summary with one line for each problem.

    Attributes:
        kind: the kind of the records.
        samples: number of samples.
        dropped: number of records without a sample: blank lines, and samples dropped as too long.
        tokens: number of tokens of all samples.
        trained_tokens: number of tokens that the loss counts; 0 for prompts.
        longest: tokens of the longest sequence.
        images: number of images.
        problems: the first 20 problems, each with file and line.
        num_problems: number of all problems.
        first_samples: the first three samples.
    """

    kind: str
    samples: int = 0
    dropped: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    images: int = 0
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0
    first_samples: list[AnySample] = field(default_factory=list)

    def raise_if_bad(self) -> None:
        """Raises DataError with all reported problems if there is any."""
        if self.num_problems:
            raise DataError(self.problems[0] if self.num_problems == 1 else "\n".join(self._lines_of_problems()))

    def __str__(self) -> str:
        lines = [
            f"{self.samples:,} samples of kind {self.kind!r}, {self.tokens:,} tokens, {self.trained_tokens:,} of them "
            f"trained; {f'{self.images:,} images; ' if self.images else ''}longest sequence {self.longest:,} tokens; "
            f"{self.dropped:,} records without a sample"
        ]
        return "\n".join(lines + (self._lines_of_problems() if self.num_problems else []))

    def _lines_of_problems(self) -> list[str]:
        lines = [
            f"{self.num_problems:,} problem{'s' * (self.num_problems > 1)}:",
            *(f"  {problem}" for problem in self.problems),
        ]
        if self.num_problems > len(self.problems):
            lines.append(f"  and {self.num_problems - len(self.problems):,} more")
        return lines

    def _count(self, sample: AnySample) -> None:
        self.samples += 1
        if len(self.first_samples) < 3:
            self.first_samples.append(sample)
        if isinstance(sample, PromptSample):
            lengths = [len(sample.input_ids)]
        else:
            lengths = [len(segment.input_ids) for segment in sample.segments]
            self.trained_tokens += sum(segment.trained_tokens for segment in sample.segments)
            self.images += sum(len(segment.images) for segment in sample.segments)
        self.tokens += sum(lengths)
        self.longest = max(self.longest, *lengths)


def check_data(
    data: Any, kind: Any, tokenizer: Tokenizer | Processor, *, progress: bool | None = None, **options: Any
) -> DataReport:
    """Reads and encodes all records once, images included, and reports what is wrong with them.

    Args:
        data: see `open_data`.
        kind: see `open_data`.
        tokenizer: see `open_data`.
        progress: whether to show a progress bar on stderr; None if stderr is a terminal.
        options: further options of `open_data`.

    Raises:
        DataError: the data cannot be opened at all; see `open_data`.
    """
    stream = open_data(data, kind, tokenizer, **{**options, "shuffle": False, "epochs": 1})
    report = DataReport(stream.kind)
    hidden = not (sys.stderr.isatty() if progress is None else progress)
    with tqdm(stream.results(), "checking data", unit=" records", disable=hidden) as results:
        for _, result in results:
            try:
                if isinstance(result, DataError):
                    raise result
                for sample in result:
                    if stream.images is not None and isinstance(sample, Sample):
                        stream.images.read([sample])  # all pixels: files may be truncated
            except DataError as error:
                report.num_problems += 1
                if len(report.problems) < _MAX_PROBLEMS:
                    report.problems.append(str(error))
                continue
            report.dropped += not result
            for sample in result:
                report._count(sample)
    return report

"""Continues the prompts of a JSONL file, many at a time.

Each line of the input is an object with "prompt" (a text) or "messages" (a conversation), an optional "id", and options
that replace those of the command line. All lines are checked before the first one runs. Each result is written when it
is complete, so that an interrupted run loses only the prompts that were running.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

from ligerzoo.errors import LigerzooError, RecordProblems, quote, raise_all
from ligerzoo.generate import BrokenLogitsError, Request, Scheduler
from ligerzoo.serve.continuation import Continuation
from ligerzoo.serve.fields import OBJECT, STRING, Fields, check_names, show
from ligerzoo.serve.options import VALUES, ClientOptions, derived_seed
from ligerzoo.serve.prompts import PromptEncoder
from ligerzoo.serve.strict_json import parse_strict_json
from ligerzoo.text.tokenizer import Tokenizer

FIELDS = ("id", "prompt", "messages", *VALUES)

LOOKAHEAD = 2
"""The scheduler has this many times `batch_size` requests, so that rows that finish are filled at once."""


@dataclass(frozen=True)
class Entry:
    """One line of a batch file.

    Attributes:
        line: number of the line, from 1.
        id: the line's "id", or None.
        request: the prompt with its options.
        stop: the stop strings.
    """

    line: int
    id: object
    request: Request
    stop: tuple[str, ...]

    @classmethod
    def read(cls, text: str, line: int, defaults: Fields, encoder: PromptEncoder, scheduler: Scheduler) -> Self:
        """Reads a line.

        Args:
            text: the line.
            line: its number.
            defaults: options of the command line by name.
            encoder: encodes and checks the prompt.
            scheduler: checks the options.

        Raises:
            LigerzooError: the line is malformed, or the model does not accept the prompt or the options.
        """
        try:
            fields = parse_strict_json(text)
        except (ValueError, RecursionError) as error:
            raise LigerzooError(f"not valid JSON: {error}", got=quote(text.strip())) from error
        if not OBJECT.accepts(fields) or ("prompt" in fields) == ("messages" in fields):
            raise LigerzooError(
                "invalid line", got=quote(text.strip()), expected='an object with "prompt" or with "messages"'
            )
        if not STRING.accepts(fields.get("prompt", "")):
            raise LigerzooError("not a text", where="prompt", got=show(fields["prompt"]))
        check_names(fields, FIELDS, {})
        merged = {**defaults, **{name: value for name, value in fields.items() if value is not None}}
        options = ClientOptions.from_json(merged, {name: name for name in VALUES})
        if "seed" not in fields and options.seed is not None:
            options = options._replace(seed=derived_seed(options.seed, line))
        is_chat = "messages" in fields
        prompt = encoder.encode_chat(fields["messages"]) if is_chat else encoder.encode(fields["prompt"])
        options = options.updated(max_new_tokens=encoder.room(prompt, options.max_new_tokens))
        request = scheduler.request(prompt, **options.for_scheduler(scheduler.device))
        return cls(line, fields.get("id"), request, options.stop)


def read_batch(path: Path, defaults: Fields, encoder: PromptEncoder, scheduler: Scheduler) -> list[Entry]:
    """Reads all lines of a batch file that are not blank; see `Entry.read`.

    Raises:
        LigerzooError: names the file and the lines with a problem; SeveralErrors if there are several.
    """
    entries, problems = [], RecordProblems()
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:  # some editors write a byte order mark
        for line, text in enumerate(file, 1):
            if text.strip():
                try:
                    entries.append(Entry.read(text, line, defaults, encoder, scheduler))
                except LigerzooError as error:
                    problems.add(LigerzooError(str(error), where=f"{path}, line {line}"), error)
    raise_all(problems.errors)
    return entries


class Results:
    """The output file: one object for each prompt, in the order in which they finish. It is open within `with`.

    Args:
        path: the file.
        resumes: whether to continue the file of an interrupted run. Otherwise it must not exist.

    Attributes:
        finished: the lines of the input whose results are in the file, and their "id".

    Raises:
        LigerzooError: the file exists and `resumes` is False, or it has other content than results.
    """

    def __init__(self, path: Path, *, resumes: bool) -> None:
        self.path = path
        self.finished: dict[int, object] = {}
        if not resumes and path.exists():
            remedy = "Continue an interrupted run with --resume, or choose another file."
            raise LigerzooError("already exists", where=path, expected="a new file", remedy=remedy)
        if resumes and path.exists():
            self._read()

    def __enter__(self) -> Self:
        """Opens the file to append results."""
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.close()

    def _read(self) -> None:
        """Reads the results of an earlier run, and removes a line that it did not complete."""
        content = self.path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        for number, text in enumerate(complete.splitlines(), 1):
            try:
                result = json.loads(text)
                self.finished[result["line"]] = result.get("id")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                where = f"{self.path}, line {number}"
                raise LigerzooError("not a result of `ligerzoo generate --batch`", where=where) from error
        with self.path.open("r+b") as file:
            file.truncate(len(complete))

    def remaining(self, entries: Sequence[Entry]) -> list[Entry]:
        """Returns the entries without a result.

        Raises:
            LigerzooError: a result has another id than its line of the input, or no line.
        """
        ids = {entry.line: entry.id for entry in entries}
        for line, identifier in self.finished.items():
            if line not in ids or ids[line] != identifier:
                what, got = "the result is not of this input", f"line {line} with id {show(identifier)}"
                expected = f"id {show(ids[line])}" if line in ids else f"a line of the {len(ids)} of the input"
                remedy = "Resume with the same input, or choose another output file."
                raise LigerzooError(what, where=self.path, got=got, expected=expected, remedy=remedy)
        return [entry for entry in entries if entry.line not in self.finished]

    def write(self, entry: Entry, text: str, finish_reason: str, new_tokens: int) -> None:
        """Appends a result, and flushes it to the operating system."""
        result = {
            "line": entry.line,
            **({} if entry.id is None else {"id": entry.id}),
            "text": text,
            "finish_reason": finish_reason,
            "prompt_tokens": len(entry.request.prompt),
            "new_tokens": new_tokens,
        }
        self._file.write(json.dumps(result, ensure_ascii=False) + "\n")
        self._file.flush()


class Running:
    """An entry that the scheduler has, and its text so far."""

    def __init__(self, entry: Entry, continuation: Continuation) -> None:
        self.entry, self.continuation = entry, continuation
        self.texts: list[str] = []


def run_batch(
    entries: Iterable[Entry],
    scheduler: Scheduler,
    batch_size: int,
    tokenizer: Tokenizer,
    results: Results,
) -> Iterator[tuple[int, bool]]:
    """Continues the prompts and writes the results.

    Args:
        entries: the prompts.
        scheduler: decodes them.
        batch_size: number of prompts that the scheduler decodes together.
        tokenizer: decodes the continuations.
        results: the output file, opened.

    Yields:
        (number of new tokens of one prompt, whether its continuation has finished).

    Raises:
        BrokenLogitsError: no token can be chosen for a line.
    """
    waiting = iter(entries)
    running: dict[int, Running] = {}
    while True:
        while len(running) < LOOKAHEAD * batch_size and (entry := next(waiting, None)) is not None:
            index = scheduler.add(entry.request)
            running[index] = Running(entry, Continuation(tokenizer, entry.stop, keeps_stop=True))
        if not running:
            return
        try:
            updates = scheduler.step()
        except BrokenLogitsError as error:
            lines = ", ".join(str(running[index].entry.line) for index in error.requests)
            raise BrokenLogitsError(error.requests, where=f"logits of line {lines}") from error
        for update in updates:
            one = running[update.index]
            piece = one.continuation.push(update)
            one.texts.append(piece.text)
            if piece.finish_reason is not None:
                del running[update.index]
                if update.finish_reason is None:
                    scheduler.cancel(update.index)
                results.write(one.entry, "".join(one.texts), piece.finish_reason, one.continuation.num_tokens)
            yield len(update.tokens), piece.finish_reason is not None

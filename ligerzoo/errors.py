"""The errors that ligerzoo raises for invalid input.

Each message says what is wrong, where, what was found and expected, and what to do. A violated internal invariant,
which is a bug of ligerzoo, is an `AssertionError` instead.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")

_MAX_RECORDS = 20


class LigerzooError(ValueError):
    """Invalid input.

    Args:
        what: the problem in a few words; None for a value that is not accepted, which `got` and `expected` describe.
        where: the file, tensor, field or argument with the problem.
        got: what was found.
        expected: what was expected.
        remedy: what the user can do, as a sentence.
    """

    def __init__(
        self,
        what: str | None = None,
        *,
        where: object = None,
        got: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.where, self.got, self.expected, self.remedy = where, got, expected, remedy
        if what is None and where is not None:
            message = f"{_shorten(where)}={_shorten(got)}"
        else:
            what = _shorten(what or "invalid value")
            message = what if where is None else f"{_shorten(where)}: {what}"
            if got is not None:
                message += f"; got {_shorten(got)}"
        if expected is not None:
            message += f"; expected {expected}"
        if remedy is not None:
            message = f"{message.removesuffix('.')}. {remedy}"
        super().__init__(message)

    @property
    def errors(self) -> tuple[LigerzooError, ...]:
        """The error itself; those of `SeveralErrors`."""
        return (self,)

    def moved_to(self, where: object, remedy: str | None = None) -> Self:
        """Returns the error with another `where`, such as the argument that a value came from."""
        return self.replaced(where=where, remedy=self.remedy or remedy)

    def replaced(self, **parts: object) -> Self:
        """Returns the error with other parts of its message."""
        changed = type(self).__new__(type(self))  # subclasses have other constructors
        changed.__dict__.update(vars(self))
        names = ("what", "where", "got", "expected", "remedy")
        given: dict[str, Any] = {name: parts.get(name, getattr(self, name)) for name in names}
        LigerzooError.__init__(changed, **given)
        return changed


class WrongTypeError(LigerzooError, TypeError):
    """A value of a type that an argument does not accept."""


class SeveralErrors(LigerzooError):
    """Several problems of one input, each of which is an error. The message has a line for each."""

    def __init__(self, errors: Iterable[LigerzooError]) -> None:
        self._errors = tuple(one for error in errors for one in error.errors)
        super().__init__("several problems")
        self.args = ("\n".join(map(str, self._errors)),)

    @property
    def errors(self) -> tuple[LigerzooError, ...]:
        """The problems."""
        return self._errors


class Problems:
    """Errors that are raised together. As a context manager, it keeps an error of the block, if it collects."""

    def __init__(self, *, collects: bool = True) -> None:
        self.errors: list[LigerzooError] = []
        self._collects = collects

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not self._collects or not isinstance(error, LigerzooError):
            return False
        self.errors.append(error)
        return True

    def result_of(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Returns the result of a function; None if it raises an error that is kept."""
        with self:
            return function(*args, **kwargs)
        return None

    def result_or(self, function: Callable[[V], T], value: V, fallback: V) -> T:
        """Returns the result for a value; that for the fallback if the value's error is kept."""
        with self:
            return function(value)
        return function(fallback)

    def raise_if_any(self) -> None:
        """Raises the error, or SeveralErrors if there is more than one."""
        raise_all(self.errors)


RAISED = Problems(collects=False)
"""Raises each error at once."""


class RecordProblems:
    """The errors of many records, such as the lines of a file. The first ones are kept, and all are counted.

    That a chat template is missing or malformed is one problem, although each record that needs it has the error.

    Attributes:
        first: the first 20 errors.
        count: number of all errors.
    """

    def __init__(self) -> None:
        self.first: list[LigerzooError] = []
        self.count = 0
        self._of_templates = set[str]()

    def add(self, error: LigerzooError, cause: object) -> None:
        """Adds the error of a record, which names the record, and its cause, which does not."""
        match cause:
            case TemplateError() if str(cause) in self._of_templates:
                return
            case TemplateError():
                self._of_templates.add(str(cause))
        self.count += 1
        if len(self.first) < _MAX_RECORDS:
            self.first.append(error)

    @property
    def errors(self) -> list[LigerzooError]:
        """The first errors, and one that says how many more there are."""
        more = self.count - len(self.first)
        return [*self.first, *([LigerzooError(f"{more:,} more records have problems")] if more else [])]


def raise_all(errors: Iterable[LigerzooError]) -> None:
    """Raises the error; SeveralErrors if there are several; nothing without any."""
    found = [*{str(error): error for error in errors}.values()]
    if found:
        raise found[0] if len(found) == 1 else SeveralErrors(found)


def lines_for_user(
    error: Exception, words: Callable[[LigerzooError], LigerzooError] = lambda error: error
) -> list[str]:
    """Returns the lines of an error of input, of the system or of memory; none for others: bugs.

    Args:
        error: the error. `SeveralErrors` have a line for each.
        words: returns an error of input in the words of the user's interface.
    """
    match error:
        case LigerzooError():
            return [" ".join(str(words(one)).split()) for one in error.errors]
        case _:
            line = line_for_user(error)
            return [] if line is None else [line]


def line_for_user(error: Exception) -> str | None:
    """Returns the message of an error of input, of the system or of memory as one line; None for others: bugs."""
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if is_memory or "can't allocate memory" in str(error):  # torch's error for the memory of a CPU has no class
        message = f"out of memory; got {error}. Use smaller batches, shorter sequences or a smaller dtype."
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    elif isinstance(error, LigerzooError | OSError):
        message = str(error)
    else:
        return None
    return " ".join(message.split())


def _shorten(part: object) -> str:
    """Limits the length of parts of a message, which may come from files."""
    text = str(part)
    return text if len(text) <= 1000 else text[:1000] + "..."


def quote(text: object) -> str:
    """Returns text from a file for a message: escaped and shortened."""
    text = str(text)
    return repr(text if len(text) <= 200 else text[:200] + "...")


def first_names(names: Sequence[str], limit: int = 8) -> str:
    """Returns the first names of a possibly long list for a message, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(quote, names[:limit])) + more


def did_you_mean(name: object, names: Iterable[str]) -> str | None:
    """Returns a remedy that asks for the nearest of `names`, or None if none is similar."""
    nearest = difflib.get_close_matches(name, list(names), n=1) if isinstance(name, str) else []
    return f"Did you mean {nearest[0]!r}?" if nearest else None


def unknown_names(
    names: Iterable[str], accepted: Collection[str], similar: Iterable[str] = ()
) -> Iterator[tuple[str, str | None]]:
    """Yields the names that are not accepted, each with the remedy of `did_you_mean`, also for `similar` names."""
    return ((name, did_you_mean(name, [*accepted, *similar])) for name in names if name not in accepted)


def warn(message: str) -> None:
    """Warns, with the line of the caller of ligerzoo."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("ligerzoo", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class ConfigError(LigerzooError):
    """A field of a config is missing, malformed or asks for something that is not supported."""


class CheckpointError(LigerzooError):
    """A checkpoint's files are missing or malformed, or do not match the architecture that config.json names."""


class TokenizerError(LigerzooError):
    """A tokenizer's files are missing or malformed, or its input cannot be encoded."""


class TemplateError(TokenizerError):
    """A chat template is missing or malformed, whatever the conversation."""


class ImageError(LigerzooError):
    """An image or video cannot be read, does not match the prompt, or has a size that the model does not accept."""


class DataError(LigerzooError):
    """A training sample is malformed, too long, or contains nothing to train on."""

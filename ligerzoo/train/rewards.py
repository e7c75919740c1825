"""Rewards of completions: the user's reward function, and the advantages within a group of completions.

A reward function has the form of TRL's. It is called with lists that have an entry for each completion:

    def reward(completions, answer, **fields):
        return [float(answer in completion) for completion, answer in zip(completions, answer)]

It gets those of these arguments that it names, or all if it has `**fields`:

    prompts          the field `prompt` of the record: a text, or messages
    completions      the text; for prompts of messages a list of one message, {"role": "assistant", "content": text}
    completion_ids   the tokens
    records          all fields of the record, a dictionary (only if it is named)
    others           the field of the record with this name
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ligerzoo.checks import is_text
from ligerzoo.errors import ConfigError, LigerzooError, quote
from ligerzoo.own_code import import_file, line_of, summary
from ligerzoo.train.completions import SampledCompletion, sampling_numbers

DEFAULT_NAME = "reward"
_ARGUMENTS = ("prompts", "completions", "completion_ids", "records")
_EXPECTED = "FILE.py, FILE.py:NAME, or the directory of a reward model"
_EPSILON = 1e-4  # added to the standard deviation of a group, as in TRL

Scale = Literal["group", "batch", "none"]
Score = Callable[[Sequence[SampledCompletion]], list[SampledCompletion]]
"""Returns completions with their rewards."""


class RewardFunction:
    """A function of a user's Python file, whose directory is appended to `sys.path`.

    Args:
        where: path of the file, or FILE.py:NAME for a function that is not called `reward`.

    Raises:
        ConfigError: the file does not exist or cannot be imported, or it has no such function.
    """

    def __init__(self, where: str) -> None:
        is_file = where.endswith(".py") or ":" not in where
        file, _, name = (where, "", DEFAULT_NAME) if is_file else where.rpartition(":")
        self._file, self._name = Path(file), f"{file}:{name}"
        module = import_file(
            self._file,
            f"reward_function_{self._file.stem}",
            where="option reward",
            expected=_EXPECTED,
        )
        function = getattr(module, name, None)
        if not callable(function):
            own = vars(module).items()
            functions = [key for key, value in own if getattr(value, "__module__", None) == module.__name__]
            what, got = "the file has no such function", ", ".join(functions) or "none"
            remedy = "Name another one with --reward FILE.py:NAME."
            raise ConfigError(what, where=file, got=got, expected=f"a function {name}", remedy=remedy)
        if inspect.iscoroutinefunction(function):
            raise ConfigError("the reward function is asynchronous", where=self._name, expected="a plain function")
        self._function: Callable[..., Any] = function
        self._parameters = inspect.signature(function).parameters.values()

    def __call__(self, completions: Sequence[SampledCompletion]) -> list[SampledCompletion]:
        """Returns the completions with their rewards.

        Raises:
            LigerzooError: the function names a field that a record lacks, raises an exception, or returns something
                other than one finite number for each completion.
        """
        if not completions:
            return []
        try:
            result = self._function(**self._arguments(completions))
        except LigerzooError:
            raise
        except (Exception, SystemExit) as error:
            where = line_of(self._file, error)
            raise LigerzooError("the reward function failed", where=where, got=summary(error)) from error
        if isinstance(result, str | Mapping) or not hasattr(result, "__len__") or len(result) != len(completions):
            got = f"{len(result)} rewards" if isinstance(result, Sequence) else f"a {type(result).__name__}"
            expected = f"a list of {len(completions)} numbers, one for each completion"
            raise LigerzooError("wrong number of rewards", where=self._name, got=got, expected=expected)
        return [replace(one, reward=self._number(value, one)) for one, value in zip(completions, result, strict=True)]

    def _arguments(self, completions: Sequence[SampledCompletion]) -> dict[str, Any]:
        records = [one.prompt.record for one in completions]
        arguments: dict[str, list[Any]] = {
            "prompts": [record["prompt"] for record in records],
            "completions": list(map(completion_of, completions)),
            "completion_ids": [one.tokens for one in completions],
        }
        named = {parameter.name for parameter in self._parameters if parameter.kind is not parameter.VAR_KEYWORD}
        takes_all = len(named) < len(self._parameters)
        if "records" in named:
            arguments["records"] = [dict(record) for record in records]
        for parameter in self._parameters:
            if parameter.name in arguments or parameter.kind is parameter.VAR_KEYWORD:
                continue
            lacking = next((one for one in completions if parameter.name not in one.prompt.record), None)
            if lacking is None:
                arguments[parameter.name] = [record[parameter.name] for record in records]
            elif parameter.default is parameter.empty:
                what = f"the field {parameter.name!r} is missing, which the reward function {self._name} takes"
                expected = f"the field, or another argument of the function: {', '.join(_ARGUMENTS)}"
                raise LigerzooError(what, where=lacking.source, got=", ".join(lacking.prompt.record), expected=expected)
        if takes_all:
            for field in dict.fromkeys(field for record in records for field in record if field != "prompt"):
                arguments.setdefault(field, [record.get(field) for record in records])
            return arguments
        return {name: values for name, values in arguments.items() if name in named}

    def _number(self, value: Any, completion: SampledCompletion) -> float:
        """Returns a reward as a finite number."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            where = f"{self._name}, for a completion of {completion.source}"
            got = f"{value!r} for {quote(completion.text)}"
            raise LigerzooError("the reward is not a finite number", where=where, got=got, expected="a finite number")
        return number


def with_advantages(completions: Sequence[SampledCompletion], group_size: int, scale: Scale) -> list[SampledCompletion]:
    """Returns completions with their advantages: the reward minus the mean of the group (Shao et al. 2024).

    A group whose rewards are equal has advantages of exactly 0.

    Args:
        completions: with rewards; the completions of a group, those of one prompt, follow each other.
        group_size: number of completions of a group, at least 2.
        scale: what divides the advantages: the standard deviation of the "group" or of the "batch" of all completions,
            plus 1e-4; or "none" (Liu et al. 2025, Dr. GRPO).
    """
    rewards = [one.reward for one in completions]
    means, spreads = [], []
    for first in range(0, len(rewards), group_size):
        group = rewards[first : first + group_size]
        is_equal = min(group) == max(group)  # the mean of equal numbers may be rounded
        means += [group[0] if is_equal else statistics.fmean(group)] * group_size
        spreads += [0.0 if is_equal else statistics.stdev(group)] * group_size
    if scale == "batch":
        spreads = [statistics.stdev(rewards)] * len(rewards)
    divisors = [1.0] * len(rewards) if scale == "none" else [spread + _EPSILON for spread in spreads]
    return [
        replace(one, advantage=(one.reward - mean) / divisor)
        for one, mean, divisor in zip(completions, means, divisors, strict=True)
    ]


def summarize(completions: Sequence[SampledCompletion], group_size: int) -> dict[str, float]:
    """Returns what a log shows of completions with rewards and advantages; see docs/reinforcement-learning.md."""
    rewards = [one.reward for one in completions]
    advantages = [one.advantage for one in completions]
    groups = [advantages[first : first + group_size] for first in range(0, len(advantages), group_size)]
    return {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.stdev(rewards),
        "groups_without_signal": statistics.fmean(not any(group) for group in groups),
        **sampling_numbers(completions),
    }


def mean_reward(completions: Sequence[SampledCompletion]) -> dict[str, float]:
    """Returns what a log shows of completions with rewards at an evaluation."""
    return {"reward": statistics.fmean(one.reward for one in completions)}


def completion_of(completion: SampledCompletion) -> Any:
    """Returns a completion as TRL passes it: like its prompt, as a text or as messages."""
    if is_text(completion.prompt.record["prompt"]):
        return completion.text
    return [{"role": "assistant", "content": completion.text}]

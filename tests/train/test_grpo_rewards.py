"""The user's reward function: its arguments, and errors that name the file, the line or the record; advantages."""

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo.errors import LigerzooError
from ligerzoo.train.completions import SampledCompletion
from ligerzoo.train.data import PromptSample, Source
from ligerzoo.train.rewards import RewardFunction, summarize, with_advantages


def completions(*texts: str, **record: Any) -> list[SampledCompletion]:
    record = {"prompt": "1 + 1 =", "answer": "2", **record}
    prompt = PromptSample([1, 2], record, Source("sums.jsonl", 7, "row"))
    return [
        SampledCompletion(
            input_ids=[1, 2, *range(5, 5 + len(text))], labels=[-100, -100, *range(5, 5 + len(text))],
            source=prompt.source, prompt=prompt, text=text, logps=[-1.0] * len(text), finish_reason="stop",
        )
        for text in texts
    ]  # fmt: skip


def write(directory: Path, source: str, name: str = "reward.py") -> str:
    (directory / name).write_text(source)
    return str(directory / name)


def rewards(where: str, given: list[SampledCompletion]) -> list[float]:
    return [one.reward for one in RewardFunction(where)(given)]


@pytest.mark.parametrize(
    "source",
    [
        "def reward(completions, answer, **fields):\n    return [float(a in c) for c, a in zip(completions, answer)]",
        "def reward(completions, records):\n    return [r['answer'] in c for c, r in zip(completions, records)]",
        "def reward(prompts, completions, **kwargs):\n"
        "    assert prompts == ['1 + 1 ='] * 2 and sorted(kwargs) == ['answer', 'completion_ids']\n"
        "    return [float(a in c) for c, a in zip(completions, kwargs['answer'])]",
        "import torch\ndef reward(completion_ids, level=3):\n"
        "    assert level == 3\n    return torch.tensor([float(len(ids) == 1) for ids in completion_ids])",
        "import numpy\ndef reward(completions):\n    return numpy.array([c == '2' for c in completions])",
    ],
)
def test_a_function_gets_the_arguments_that_it_names(tmp_path: Path, source: str) -> None:
    assert rewards(write(tmp_path, source), completions("2", "three")) == [1.0, 0.0]


def test_functions_of_trl_work_for_messages(tmp_path: Path) -> None:
    """Completions of messages are messages, as in TRL."""
    source = "def reward(completions, **kwargs):\n    return [len(c[0]['content']) for c in completions]"
    messages = [{"role": "user", "content": "?"}]
    assert rewards(write(tmp_path, source), completions("a", "", prompt=messages)) == [1.0, 0.0]


def test_other_names_and_modules_of_the_directory(tmp_path: Path) -> None:
    write(tmp_path, "SCALE = 3", "scale_of_rewards.py")
    source = """
from __future__ import annotations
from dataclasses import dataclass
from scale_of_rewards import SCALE

@dataclass
class Length:
    scale: int
    def __call__(self, completions):
        return [self.scale * len(text) for text in completions]

length = Length(SCALE)
"""
    where = write(tmp_path, source)
    assert rewards(f"{where}:length", completions("ab", "")) == [6.0, 0.0]
    with pytest.raises(LigerzooError, match=r"has no such function; got Length, length; expected a function reward"):
        RewardFunction(where)


@pytest.mark.parametrize(
    "source, expected",
    [
        ("def score(completions): ...", r"reward\.py: the file has no such function; got score; expected a function"),
        ("import nothing_like_this", r"reward\.py:1: cannot be imported; got ModuleNotFoundError: No module named"),
        ("x = 1\ndef reward(:", r"reward\.py:2: cannot be imported; got SyntaxError"),
        ("async def reward(completions): ...", r"reward\.py:reward: the reward function is asynchronous"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, source: str, expected: str) -> None:
    with pytest.raises(LigerzooError, match=expected):
        RewardFunction(write(tmp_path, source))


@pytest.mark.parametrize("name", ["missing.py", "missing.py:score", "missing", "notes.txt:reward"])
def test_missing_files(tmp_path: Path, name: str) -> None:
    write(tmp_path, "", "notes.txt")
    file = re.escape(str(tmp_path / name.partition(":")[0]))
    with pytest.raises(LigerzooError, match=rf"option reward: (there is no such file|not a Python file); got {file}"):
        RewardFunction(str(tmp_path / name))


@pytest.mark.parametrize(
    "body, expected",
    [
        ("return [1.0]", r"reward\.py:reward: wrong number of rewards; got 1 rewards; expected a list of 2 numbers"),
        ("return 1.0", r"wrong number of rewards; got a float; expected a list of 2"),
        ("pass", r"wrong number of rewards; got a NoneType"),
        ("return '12'", r"wrong number of rewards"),
        (
            "return [1.0, None]",
            r"for a completion of sums\.jsonl\[7\]: the reward is not a finite number; got None for",
        ),
        ("return [10**400, 1]", r"the reward is not a finite number; got 1000"),
        ("return [float('nan'), 1]", r"the reward is not a finite number; got nan for 'two'; expected a finite number"),
        ("return [1, float('inf')]", r"the reward is not a finite number; got inf for '2'"),
        ("return ['high', 1]", r"the reward is not a finite number; got 'high'"),
        ("return [1 / 0, 1]", r"reward\.py:2: the reward function failed; got ZeroDivisionError: division by zero"),
        ("raise SystemExit('no rewards')", r"reward\.py:2: the reward function failed; got SystemExit: no rewards"),
    ],
)
def test_results_that_are_refused(tmp_path: Path, body: str, expected: str) -> None:
    with pytest.raises(LigerzooError, match=expected):
        rewards(write(tmp_path, f"def reward(completions):\n    {body}\n"), completions("two", "2"))


def test_a_missing_field_is_named_with_its_record(tmp_path: Path) -> None:
    where = write(tmp_path, "def reward(completions, solution): return [0, 0]")
    expected = r"sums\.jsonl\[7\]: the field 'solution' is missing, which the reward function .*; got prompt, answer;"
    with pytest.raises(LigerzooError, match=expected):
        rewards(where, completions("a", "b"))


# Advantages


def scored(values: list[float], scale: Any) -> list[float]:
    given = [SampledCompletion(**{**vars(one), "reward": value})
             for one, value in zip(completions(*["a"] * len(values)), values, strict=True)]  # fmt: skip
    return [one.advantage for one in with_advantages(given, 4, scale)]


def test_advantages_are_those_of_trl() -> None:
    values = [0.0, 1.0, 0.5, 0.25, 3.0, -1.0, 0.0, 0.0]
    groups = torch.tensor(values, dtype=torch.float64).view(2, 4)
    centred = groups - groups.mean(1, keepdim=True)
    for scale, expected in (
        ("group", centred / (groups.std(1, keepdim=True) + 1e-4)), ("batch", centred / (groups.std() + 1e-4)),
        ("none", centred),
    ):  # fmt: skip
        torch.testing.assert_close(torch.tensor(scored(values, scale), dtype=torch.float64), expected.flatten())


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_advantages_of_exactly_zero(scale: str) -> None:
    """Although the mean of equal numbers may be rounded."""
    assert sum([0.1] * 3) / 3 != 0.1  # such a mean
    found = scored([0.1] * 4 + [0.0, 1.0, 0.0, 1.0], scale)
    assert found[:4] == [0.0] * 4
    assert all(found[4:])


def test_the_summary() -> None:
    given = [SampledCompletion(**{**vars(one), "reward": value, "finish_reason": reason})
             for one, value, reason in zip(completions("a", "abc", "ab", "ab"), (0.0, 1.0, 2.0, 2.0),
                                           ("stop", "length", "stop", "stop"), strict=True)]  # fmt: skip
    found = summarize(with_advantages(given, 2, "group"), 2)
    assert found == pytest.approx({
        "reward": 1.25, "reward_std": statistics.stdev([0, 1, 2, 2]), "groups_without_signal": 0.5,
        "completion_length": 2.0, "completion_length_max": 3, "truncated": 0.25, "entropy": 1.0,
    })  # fmt: skip

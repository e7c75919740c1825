"""Products of options, thinned out: every pair of values at least once."""

from __future__ import annotations

import itertools
from typing import Any


def pairwise(options: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Choices of one value for each option, such that any two values of two options meet in one of them.

    Greedy and always the same: a choice starts with the first pair that has not met, and each further option takes the
    value that meets the most values chosen before it for the first time.
    """
    names = list(options)
    missing = {
        ((a, i), (b, j)): None  # a dict keeps the order, which a set would not
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(options[names[a]]))
        for j in range(len(options[names[b]]))
    }
    if len(names) < 2:
        return [{name: value} for name in names for value in options[name]]
    choices = []
    while missing:
        chosen = dict(next(iter(missing)))
        for option, name in enumerate(names):
            if option not in chosen:
                news = [
                    sum(_pair(option, value, *other) in missing for other in chosen.items())
                    for value in range(len(options[name]))
                ]
                chosen[option] = news.index(max(news))
        for pair in itertools.combinations(sorted(chosen.items()), 2):
            missing.pop(pair, None)
        choices.append({name: options[name][chosen[option]] for option, name in enumerate(names)})
    return choices


def _pair(a: int, i: int, b: int, j: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((a, i), (b, j)) if a < b else ((b, j), (a, i))

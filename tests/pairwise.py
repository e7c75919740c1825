"""Few combinations of options that contain every pair of their values."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(options: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations of one value of each option, so that every pair of values of two options occurs at least once.

    Greedy: each combination begins with the first pair that is missing, and each further option takes the value that
    brings the most missing pairs, the first of equals. The same options always give the same combinations. A single
    option gives each of its values, no option gives the one empty combination.
    """
    indices = {name: range(len(values)) for name, values in options.items()}
    size = min(2, len(options))
    missing = {
        frozenset(zip(names, values, strict=True)): None  # a dict keeps its order, a set does not
        for names in combinations(indices, size)
        for values in product(*(indices[name] for name in names))
    }

    def brought(chosen: dict[str, int]) -> int:
        return sum(frozenset(pair) in missing for pair in combinations(chosen.items(), size))

    rows = []
    while missing:
        row: dict[str, int] = dict(next(iter(missing)))
        for name in indices:
            if name not in row:
                row[name] = max(indices[name], key=lambda value, name=name: brought({**row, name: value}))
        for pair in combinations(row.items(), size):
            missing.pop(frozenset(pair), None)
        rows.append({name: values[row[name]] for name, values in options.items()})
    return rows

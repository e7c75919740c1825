"""Small sets of combinations of options in which every pair (or every three) of values occurs."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(options: Mapping[str, Sequence[Any]], strength: int = 2) -> list[dict[str, Any]]:
    """Returns combinations of one value of each option, so that any `strength` options take all their values together
    at least once.

    Greedy and deterministic: each combination begins with a tuple of values that is still missing. Each further option
    takes the value that adds most missing tuples; ties alternate, so that later combinations differ from each other.
    With fewer options than `strength`, returns the full product.
    """
    names = list(options)
    strength = min(strength, len(names))
    missing = {
        tuple(zip(some, values, strict=True)): None  # a dict keeps the order, a set does not
        for some in combinations(range(len(names)), strength)
        for values in product(*(range(len(options[names[i]])) for i in some))
    }
    found = []
    while missing:
        chosen = dict(next(iter(missing)))
        for i, name in enumerate(names):
            if i not in chosen:
                added = [
                    sum(
                        tuple(sorted((*some, (i, value)))) in missing
                        for some in combinations(chosen.items(), strength - 1)
                    )
                    for value in range(len(options[name]))
                ]
                best = [value for value, n in enumerate(added) if n == max(added)]
                chosen[i] = best[len(found) % len(best)]
        for some in combinations(sorted(chosen.items()), strength):
            missing.pop(some, None)
        found.append({name: options[name][chosen[i]] for i, name in enumerate(names)})
    return found


def long_cases(options: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Returns the combinations of `covering` as parameters of a test whose cases take long.

    Those that add no new value of an option are marked `thorough`.
    """
    rows = covering(options)
    taken = covering_rows([[id(value) for value in row.values()] for row in rows], strength=1)
    return [pytest.param(row, marks=() if i in taken else pytest.mark.thorough) for i, row in enumerate(rows)]


def representatives(values: Iterable[Any], *taken: Any) -> list[Any]:
    """Returns the values as parameters of a test, of which `make test` runs those in `taken`."""
    return [pytest.param(value, marks=() if value in taken else pytest.mark.thorough) for value in values]


every_backend = pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.thorough)])
"""Backends for tests that compile a whole model: half of the time is that of AOTAutograd, not of tracing our code."""


def covering_rows(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Returns the indices of a few rows in which every pair of values occurs that occurs in any row.

    With another `strength`, every value, or every three. A value is identified by its column. Greedy and deterministic:
    takes the row with most missing pairs, the first of equals. So columns that always change together count as one, and
    of two independent columns every row is taken.
    """
    pairs = [set(combinations(enumerate(row), strength)) or {tuple(enumerate(row))} for row in rows]
    missing = set().union(*pairs)
    taken = []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        taken.append(best)
    return sorted(taken)

"""Small sets of products of options in which every pair (or every three) of values occurs."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def covering(factors: Mapping[str, Sequence[Any]], strength: int = 2) -> list[dict[str, Any]]:
    """Products of the factors such that any `strength` of them take all their values together at least once.

    Greedy and deterministic: each product begins with a combination that is still missing, and then takes for factor
    after factor the value that adds most of the missing ones.
    """
    names = list(factors)
    missing = {
        tuple(zip(some, values, strict=True)): None
        for some in combinations(range(len(names)), strength)
        for values in product(*(range(len(factors[names[i]])) for i in some))
    }
    products = []
    while missing:
        chosen = dict(next(iter(missing)))
        for i, name in enumerate(names):
            if i not in chosen:
                known = {*chosen.items()}
                added = [
                    sum((i, value) in some and known.issuperset(set(some) - {(i, value)}) for some in missing)
                    for value in range(len(factors[name]))
                ]
                # of equally good values not always the first, or the last products would all look alike
                best = [value for value, n in enumerate(added) if n == max(added)]
                chosen[i] = best[len(products) % len(best)]
        for some in combinations(sorted(chosen.items()), strength):
            missing.pop(some, None)
        products.append({name: factors[name][chosen[i]] for i, name in enumerate(names)})
    return products

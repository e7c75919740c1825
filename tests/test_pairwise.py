from itertools import combinations, product
from typing import Any

import pytest

from tests.pairwise import pairwise

OPTIONS: list[dict[str, list[Any]]] = [
    {},
    {"a": [1, 2, 3]},
    {"a": [1, 2], "b": [None, [], {}]},
    {"a": [1, 2, 3], "b": ["x"], "c": [False, True], "d": [0.1, 0.2, 0.3, 0.4]},
    {name: [0, 1] for name in "abcdefghij"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_pair_occurs(options: dict[str, list[Any]]) -> None:
    rows = pairwise(options)
    assert all(list(row) == list(options) for row in rows)
    for names in combinations(options, min(2, len(options))):
        for values in product(*(options[name] for name in names)):
            assert any([row[name] for name in names] == list(values) for row in rows), (names, values)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_options_give_the_same_combinations(options: dict[str, list[Any]]) -> None:
    assert pairwise(options) == pairwise(options)


def test_the_combinations_are_few() -> None:
    assert pairwise({}) == [{}]
    assert pairwise({"a": [1, 2]}) == [{"a": 1}, {"a": 2}]
    assert len(pairwise({"a": [1, 2, 3], "b": [1, 2, 3]})) == 9
    assert len(pairwise({name: [0, 1] for name in "abcdefghij"})) <= 12  # of 1024
    assert len(pairwise({name: [0, 1, 2] for name in "abcdef"})) <= 18  # of 729

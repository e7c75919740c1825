"""Every pair (or triple) of values occurs, in few combinations."""

from itertools import combinations, product
from typing import Any

import pytest

from tests.covering import covering, covering_rows, long_cases

OPTIONS: list[dict[str, list[Any]]] = [
    {},
    {"a": [1, 2, 3]},
    {"a": [1, 2], "b": [None, [], {}]},
    {"a": [1, 2, 3], "b": ["x"], "c": [False, True], "d": [0.1, 0.2, 0.3, 0.4]},
    {name: [0, 1] for name in "abcdefghij"},
]


@pytest.mark.parametrize("strength", [2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_tuple_of_values_occurs(options: dict[str, list[Any]], strength: int) -> None:
    rows = covering(options, strength)
    assert all(list(row) == list(options) for row in rows)
    for names in combinations(options, min(strength, len(options))):
        for values in product(*(options[name] for name in names)):
            assert any([row[name] for name in names] == list(values) for row in rows), (names, values)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_options_give_the_same_combinations(options: dict[str, list[Any]]) -> None:
    assert covering(options) == covering(options)


def test_the_combinations_are_few() -> None:
    assert covering({}) == [{}]
    assert covering({"a": [1, 2]}) == [{"a": 1}, {"a": 2}]
    assert len(covering({"a": [1, 2, 3], "b": [1, 2, 3]})) == 9
    assert len(covering({name: [0, 1] for name in "abcdefghij"})) <= 12  # of 1024
    assert len(covering({name: [0, 1, 2] for name in "abcdef"})) <= 22  # of 729


def test_rows_with_every_pair() -> None:
    rows = [values for values in product(range(3), range(4), range(2), range(3)) if sum(values) != 3]
    taken = [rows[i] for i in covering_rows(rows)]
    assert len(taken) < len(rows) / 3
    for i, j in combinations(range(4), 2):
        assert {(row[i], row[j]) for row in taken} == {(row[i], row[j]) for row in rows}


def test_every_value_of_long_cases() -> None:
    options: dict[str, list[Any]] = {"a": list(range(6)), "b": [None, [], {}], "c": [False, True]}
    cases = long_cases(options)
    assert [case.values[0] for case in cases] == covering(options)
    rows = [case.values[0] for case in cases if not case.marks]
    assert len(rows) == 6
    assert all(value in [row[name] for row in rows] for name, values in options.items() for value in values)
    assert {mark.name for case in cases for mark in case.marks} == {"thorough"}


def test_all_rows_of_two_independent_columns() -> None:
    assert covering_rows([]) == []
    assert covering_rows([("a",), ("b",)]) == [0, 1]
    rows = [(i, i, j) for i in range(3) for j in range(2)]  # the first two columns change together
    assert covering_rows(rows) == list(range(6))

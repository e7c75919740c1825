"""Every pair (or triple) of values occurs, in few combinations; and which cases are marked `thorough`."""

from collections.abc import Mapping
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.covering import covering, covering_rows, long_cases
from tests.models.kinds import kinds, of_checkpoint, of_layers, of_model, repeated
from tests.models.tiny import Tiny
from tests.models.zoo import CHECKPOINTS
from tests.selection import mark_combinations, mark_repeated_checkpoints

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


class Case:
    """What the rules read of a collected test case."""

    def __init__(self, parameters: Mapping[str, object], *marks: pytest.MarkDecorator) -> None:
        self.nodeid = f"tests/test_a.py::test[{parameters}]"
        self.callspec = SimpleNamespace(params=parameters)
        self.own_markers = [mark.mark for mark in marks]

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self.own_markers if mark.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.own_markers.append(mark.mark)

    @property
    def is_thorough(self) -> bool:
        return self.get_closest_marker("thorough") is not None


@pytest.mark.parametrize("marks, strength", [((), 2), ((pytest.mark.long,), 1)], ids=["pairs", "long"])
@pytest.mark.parametrize("names", ["abc", "ab"])
def test_cases_without_a_new_pair_or_value_are_thorough(
    names: str, marks: tuple[pytest.MarkDecorator, ...], strength: int
) -> None:
    values = [object() for _ in range(3)]
    rows = list(product(values, repeat=len(names)))
    cases: list[Any] = [Case(dict(zip(names, row, strict=True)), *marks) for row in rows]
    mark_combinations(cases)
    taken = [row for row, case in zip(rows, cases, strict=True) if not case.is_thorough]
    assert len(taken) < len(rows) or len(names) == strength
    for columns in combinations(range(len(names)), strength):
        assert len({tuple(row[i] for i in columns) for row in taken}) == 3**strength


def test_checkpoints_that_add_no_kind_are_thorough() -> None:
    cases: list[Any] = [Case({"row": row, "other": 1}) for row in CHECKPOINTS]
    mark_repeated_checkpoints(cases)
    thorough = [row for row, case in zip(CHECKPOINTS, cases, strict=True) if case.is_thorough]
    assert list(map(id, thorough)) == list(map(id, repeated(CHECKPOINTS, of_model)))
    assert len(CHECKPOINTS) / 2 < len(thorough)
    types: set[str] = set()
    for row, case in zip(CHECKPOINTS, cases, strict=True):
        model_type = row.config["model_type"]
        assert not case.is_thorough or model_type in types, "the first checkpoint of each architecture always runs"
        types.add(model_type)

    every: list[Any] = [Case({"row": row}, pytest.mark.every_checkpoint) for row in CHECKPOINTS]
    mark_repeated_checkpoints(every)
    assert not any(case.is_thorough and not other.is_thorough for case, other in zip(every, cases, strict=True))
    taken = [row for row, case in zip(CHECKPOINTS, every, strict=True) if not case.is_thorough]
    assert set().union(*map(of_checkpoint, taken)) == set().union(*map(of_checkpoint, CHECKPOINTS))


def test_tests_of_layers_run_for_every_kind_of_layer() -> None:
    cases: list[Any] = [Case({"row": row}, pytest.mark.every_layer) for row in CHECKPOINTS]
    mark_repeated_checkpoints(cases)
    taken = [row for row, case in zip(CHECKPOINTS, cases, strict=True) if not case.is_thorough]
    assert len(taken) < len(CHECKPOINTS) / 8
    assert set().union(*map(of_layers, taken)) == set().union(*map(of_layers, CHECKPOINTS))


def test_a_new_kind_of_value_is_found() -> None:
    llama = next(row for row in CHECKPOINTS if row.config["model_type"] == "llama")
    one_head = {"num_key_value_heads": 1}
    changes = ({}, {"vocab_size": 300}, one_head, {"rope_theta": 3e4}, {**one_head, "tie_word_embeddings": True})
    rows = [Tiny(str(i), {**llama.config, **changed}) for i, changed in enumerate(changes)]
    assert list(map(str, repeated(rows, of_checkpoint))) == ["1", "3"]
    assert list(map(str, repeated(rows, of_model))) == ["1", "2", "3"]
    assert list(kinds({"a": [1, 2, 50], "b": {"c": None}}, 40)) == [
        ("a", 1), ("a", "within the text"), ("a", "beyond the text"), ("c", None)
    ]  # fmt: skip

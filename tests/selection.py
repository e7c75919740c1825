"""Marks `thorough` the cases that add no new kind to the others of their test. CONTRIBUTING.md has the rules."""

import sys
from collections.abc import Callable

import pytest

from tests.covering import covering_rows


def _parameters(item: pytest.Item) -> list[tuple[int, ...]]:
    """Returns the parameters of a test case; those of one `parametrize` with several names are one parameter.

    Values are identified by `id`, since many cannot be hashed: all cases of a test share the objects of its lists.
    """
    values = {name: id(value) for name, value in item.callspec.params.items()} if hasattr(item, "callspec") else {}
    together = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        together.append(tuple(values.pop(name.strip()) for name in names))
    return together + [(value,) for value in values.values()]


def _strength(item: pytest.Item) -> int:
    """Returns how many values at once `make test` runs in every combination."""
    return 1 if item.get_closest_marker("long") else 2


def mark_repeated_checkpoints(items: list[pytest.Item]) -> None:
    """Marks `thorough` the cases of tiny checkpoints that add no new kind to the earlier cases of their test.

    A kind of model. Of tests marked `every_checkpoint`, which show that each gives the right model, also a kind of
    value in the config, or of files. Of tests marked `every_layer`, of what layers do with padding, caches, segments
    and other dtypes, a kind of layer.
    """
    if "tests.models.tiny" not in sys.modules:  # which imports transformers
        return
    from tests.models.kinds import of_checkpoint, of_layers, of_model, repeated
    from tests.models.tiny import Tiny

    cases: dict[str, dict[int, Tiny]] = {}
    kinds_of: dict[str, Callable[[Tiny], set[object]]] = {}
    rows: dict[pytest.Item, Tiny] = {}
    for item in items:
        found = [
            value
            for value in getattr(getattr(item, "callspec", None), "params", {}).values()
            if isinstance(value, Tiny)
        ]
        if len(found) == 1:
            rows[item] = found[0]
            test = item.nodeid.partition("[")[0]
            cases.setdefault(test, {})[id(found[0])] = found[0]
            markers = {"every_checkpoint": of_checkpoint, "every_layer": of_layers}
            kinds_of[test] = next((kinds for name, kinds in markers.items() if item.get_closest_marker(name)), of_model)
    thorough = {test: {id(row) for row in repeated([*of.values()], kinds_of[test])} for test, of in cases.items()}
    for item, row in rows.items():
        if id(row) in thorough[item.nodeid.partition("[")[0]]:
            item.add_marker(pytest.mark.thorough)


def mark_combinations(items: list[pytest.Item]) -> None:
    """Marks `thorough` the cases of a test with three or more parameters that add no new pair of values.

    In tests marked `long`, with two or more parameters, those that add no new value.

    Stacked `parametrize` markers give all combinations: 81 of four parameters with three values, where each pair of
    values occurs 9 times. A fault that needs three particular values at once is rare. So `make test` covers every value
    and every pair of values of each test; `make test-thorough` and GPU runs cover every combination. Cases with other
    markers (such as `gpu`) are counted separately, because they may be skipped.
    """
    cases: dict[tuple[str, ...], list[pytest.Item]] = {}
    for item in items:
        marks = [str(mark) for mark in item.own_markers if mark.name != "parametrize"]
        if len(_parameters(item)) > _strength(item):
            cases.setdefault((item.nodeid.partition("[")[0], *marks), []).append(item)
    for group in cases.values():
        taken = {group[i] for i in covering_rows([_parameters(item) for item in group], _strength(group[0]))}
        for item in group:
            if item not in taken:
                item.add_marker(pytest.mark.thorough)

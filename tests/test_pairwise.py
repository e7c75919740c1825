"""Any two values of two options meet."""

import itertools

import pytest

from tests.pairwise import pairwise


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (2, 3, 4), (5, 1, 2, 7, 3), (2,) * 10])
def test_every_pair_meets(sizes: tuple[int, ...]) -> None:
    options = {f"option {i}": [f"{i} {value}" for value in range(size)] for i, size in enumerate(sizes)}
    choices = pairwise(options)
    met = {pair for choice in choices for pair in itertools.combinations(choice.values(), 2)}
    for a, b in itertools.combinations(options.values(), 2):
        assert met >= set(itertools.product(a, b))
    assert all(list(choice) == list(options) for choice in choices)
    most = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert most <= len(choices) <= 2 * most + 6
    assert choices == pairwise(options)


def test_one_option_and_none() -> None:
    assert pairwise({"a": [1, 2]}) == [{"a": 1}, {"a": 2}]
    assert pairwise({}) == []

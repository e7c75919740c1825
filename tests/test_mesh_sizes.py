"""Sizes of a mesh, as text and against the number of processes."""

import pytest

from ligerzoo.errors import ConfigError
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.train.completion_options import SFTRunOptions


def test_sizes_are_read_from_text() -> None:
    assert MeshSizes.parse("") == MeshSizes()
    assert MeshSizes.parse("replicate=2 shard=4") == MeshSizes(replicate=2, shard=4)
    assert MeshSizes.parse("tensor=2,expert=2") == MeshSizes(tensor=2, expert=2)
    for sizes in (MeshSizes(replicate=2, shard=4, expert=8), MeshSizes(shard=1, tensor=2), MeshSizes()):
        assert MeshSizes.parse(str(sizes)) == sizes


def test_shard_is_what_remains() -> None:
    assert MeshSizes().over(8) == MeshSizes(shard=8)
    assert MeshSizes.parse("replicate=2 tensor=2").over(8) == MeshSizes(replicate=2, shard=2, tensor=2)
    assert MeshSizes.parse("expert=4 context=2").over(8).shard == 4


@pytest.mark.parametrize(
    "text, message",
    [
        ("replica=2", r"mesh: an unknown axis; got 'replica=2'; expected replicate, .*replicate"),
        ("shard=2 shard=2", "mesh: an axis twice; got 'shard=2'"),
        ("shard=two", "mesh: not a size of an axis; got 'shard=two'; expected shard=N"),
        ("shard", "not a size of an axis; got 'shard'"),
        ("tensor=0", "mesh tensor: not a size of an axis; got 0; expected 1 or more"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeshSizes.parse(text)
    with pytest.raises(ConfigError, match=message):
        SFTRunOptions(model="m", data=("d",), output="o", mesh=text)


@pytest.mark.parametrize("text, product", [("shard=4", 4), ("replicate=3", 3), ("replicate=2 shard=8", 16)])
def test_sizes_must_fit_the_processes(text: str, product: int) -> None:
    with pytest.raises(ConfigError, match=rf"{text}, whose product is {product}; expected .*8, .* Start {product}"):
        MeshSizes.parse(text).over(8)


def test_experts_are_split_within_shard_and_context() -> None:
    with pytest.raises(ConfigError, match=r"mesh shard \* context: .* got expert=3; expected a divisor of 4 \* 2"):
        MeshSizes.parse("shard=4 context=2 expert=3").over(8)


def test_sizes_of_another_engine() -> None:
    """Whose experts are divided over the processes of `tensor`, too."""
    assert MeshSizes.of_engine(2, 4, 1, 2, 8, "ep") == MeshSizes(replicate=2, shard=4, tensor=2, expert=4)
    assert MeshSizes.of_engine(1, 4, 2, 2, 1, "ep") == MeshSizes(shard=4, context=2, tensor=2)
    with pytest.raises(ConfigError, match=r"ep: experts are divided over all .* got 2; expected 1, or a multiple of 4"):
        MeshSizes.of_engine(1, 2, 1, 4, 2, "ep")

"""What each process of `test_mesh.py` does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ligerzoo.errors import ConfigError
from ligerzoo.models import Llama
from ligerzoo.parallel import MeshSizes, make_mesh, parallelize
from tests.parallel.fsdp_cases import compare, gradients, tiny
from tests.train.test_resume import train


def axes(rank: int) -> None:
    """Neighbours in the last axis are neighbours in rank; sizes that do not fit are refused in all processes."""
    mesh = make_mesh("replicate=2 shard=2")
    assert mesh.mesh_dim_names == ("replicate", "shard", "context", "tensor")
    assert [*mesh.get_coordinate()] == [rank // 2, rank % 2, 0, 0]
    with pytest.raises(ConfigError, match="shard=3, whose product is 3; expected 4"):
        make_mesh(MeshSizes(shard=3))


def shards_and_replicas(rank: int) -> None:
    """Gradients are those of one process, for each division of the processes."""
    batches = []
    for number in range(4):
        ids = torch.randint(33, (1, 9 + number), generator=torch.Generator().manual_seed(number))
        batches.append({"input_ids": ids, "labels": ids})
    config, labels = tiny(initializer_range=0.3), sum(batch["labels"].shape[1] - 1 for batch in batches)

    def model() -> Llama:
        torch.manual_seed(0)
        return Llama(config).train()

    expected_loss, expected = gradients(model(), batches, labels)
    for mesh in ("replicate=4", "replicate=2 shard=2", MeshSizes(shard=4)):
        loss, actual = gradients(parallelize(model(), mesh), batches[rank::4], labels / 4)
        losses = torch.tensor(loss)
        dist.all_reduce(losses)
        assert float(losses) / 4 == pytest.approx(expected_loss, rel=1e-5)
        compare(actual, expected, str(mesh))


def one_and_all(rank: int, runs: list[dict[str, Any]]) -> None:
    """All cases of four processes, since starting them takes seconds."""
    axes(rank)
    shards_and_replicas(rank)
    train_all(rank, runs)


def train_all(rank: int, runs: list[dict[str, Any]]) -> None:
    """Trains runs, one after the other."""
    for given in runs:
        assert train(given) == 0

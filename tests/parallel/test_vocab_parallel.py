"""`vocab_parallel_linear_cross_entropy` over two processes equals `linear_cross_entropy` in one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from ligerzoo.kernels import linear_cross_entropy
from ligerzoo.parallel import vocab_parallel_linear_cross_entropy
from tests.parallel.spawning import PROCESSES, on_all_processes

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version


def make(classes: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 5, 17, requires_grad=True), torch.randn(classes, 17, requires_grad=True)
    target = torch.randint(classes, (3, 5))
    target[0, 1] = target[2, 4] = -100
    return hidden, weight, target


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    upstream = torch.linspace(0.5, 1.5, loss.numel()).view_as(loss)
    return loss.detach(), *torch.autograd.grad(loss, inputs, upstream)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "z_loss": 0.01},
    {"reduction": "none", "softcap": 3.0, "temperature": 1.3, "logit_scale": 0.7, "z_loss": 0.01},
    {"num_items": 7},
    {"ignore_index": 0},
]


def shards(rank: int) -> None:
    for vocab_size, padded in ((34, 34), (33, 34), (20, 40), (31, 40)):
        compare_shards(rank, vocab_size, padded)


def compare_shards(rank: int, vocab_size: int, padded: int) -> None:
    hidden, weight, targets = make(vocab_size)
    own_rows = slice(rank * padded // PROCESSES, (rank + 1) * padded // PROCESSES)
    filler = torch.full((padded - vocab_size, 17), 100.0)  # padding that would dominate the softmax
    for options in OPTIONS:
        target = targets.where(targets != -100, options.get("ignore_index", -100))
        for budget in (0, None):  # one row per chunk, and one chunk
            own = torch.cat([weight.detach(), filler])[own_rows].requires_grad_()
            found = gradients(
                vocab_parallel_linear_cross_entropy(
                    hidden, own, target, vocab_size=vocab_size, logits_budget=budget, **options
                ),
                hidden, own,
            )  # fmt: skip
            loss, dhidden, dweight = gradients(linear_cross_entropy(hidden, weight, target, **options), hidden, weight)
            close(found[0], loss)
            close(found[1], dhidden)
            close(found[2], torch.cat([dweight, torch.zeros_like(filler)])[own_rows])


def test_a_sharded_head() -> None:
    """Without padding, with padding in the last shard, in nearly half of it, and in all of it."""
    on_all_processes(shards)


def dtensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for classes in (34, 33, 1):  # even shards, uneven shards, and an empty shard
        hidden, weight, target = make(classes)
        expected = gradients(linear_cross_entropy(hidden, weight, target), hidden, weight)
        own_hidden, own_weight = (
            distribute_tensor(t.detach(), mesh, [placement]).requires_grad_()
            for t, placement in ((hidden, Replicate()), (weight, Shard(0)))
        )
        found = gradients(vocab_parallel_linear_cross_entropy(own_hidden, own_weight, target), own_hidden, own_weight)
        for actual, reference in zip(found, expected, strict=True):
            close(actual.full_tensor() if hasattr(actual, "full_tensor") else actual, reference)
        with pytest.raises(ValueError, match=r"weight has placements .*; expected \(Shard\(0\),\)"):
            vocab_parallel_linear_cross_entropy(own_hidden, own_hidden[0], target)


def test_a_dtensor() -> None:
    on_all_processes(dtensors)


def invalid_arguments(rank: int) -> None:
    hidden, weight, target = make(34)
    with pytest.raises(ValueError, match=r"this process's weight \(17, 16\)"):
        vocab_parallel_linear_cross_entropy(hidden, weight[:17, :16], target)
    with pytest.raises(ValueError, match="have 16 to 18 rows of weight; expected the same number; pad"):
        vocab_parallel_linear_cross_entropy(hidden, weight[: 16 + 2 * rank], target)
    with pytest.raises(ValueError, match="vocab_size=35; expected at most 34"):
        vocab_parallel_linear_cross_entropy(hidden, weight[:17], target, vocab_size=35)
    target[0, 0] = 34
    with pytest.raises(ValueError, match=r"target\[.*\] is 34; expected 0 to 33"):
        vocab_parallel_linear_cross_entropy(hidden, weight[:17], target)


def test_invalid_arguments() -> None:
    on_all_processes(invalid_arguments)

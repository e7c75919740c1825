"""Optimizers, clipping and averages of parameters that FSDP2 shards over two processes equal those of one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from ligerzoo.train.optimizers import (
    EMA,
    SkipNonFinite,
    StepInBackward,
    clip_grad_norm,
    make_optimizer,
    muon_groups,
    parameter_groups,
    share_unchanged,
)
from tests.parallel.spawning import PROCESSES, on_all_processes
from tests.train.optimizer_cases import tiny_llama, tiny_moe

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

IDS = torch.arange(24).view(2, 12)
BF16 = torch.bfloat16
STOCHASTIC = {"stochastic_rounding": True}


def shard(model: nn.Module) -> nn.Module:
    decoder: Any = model
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in decoder.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run(
    model: nn.Module, name: str, options: dict[str, Any], in_backward: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the norms, and the weights with their averages."""
    optimizer = make_optimizer(model, name, lr=0.02, eps=1e-3, **options)
    ema, skip = EMA(model, 0.5), SkipNonFinite(optimizer)
    hooks = StepInBackward(optimizer, skip) if in_backward else None
    norms = []
    for i in range(4):
        loss = model(IDS, labels=IDS).loss * (torch.nan if i == 2 else 1.0)
        loss.backward()
        if hooks is None:
            norms.append(clip_grad_norm(model, 0.5))
            skip(norms[-1])
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    assert skip.count == (len(list(model.parameters())) if in_backward else 1)
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    with ema.swapped():
        weights |= {f"average of {name}": whole(parameter) for name, parameter in model.named_parameters()}
    return norms, weights


def compare(make: Any, name: str, options: dict[str, Any], in_backward: bool) -> None:
    torch.manual_seed(0)
    expected_norms, expected = run(make(), name, options, in_backward)
    torch.manual_seed(0)
    norms, actual = run(shard(make()), name, options, in_backward)
    for norm, other in zip(norms, expected_norms, strict=True):
        torch.testing.assert_close(norm, other, rtol=1e-5, atol=0, equal_nan=True)
    for parameter, weight in expected.items():
        torch.testing.assert_close(actual[parameter], weight, rtol=0, atol=1e-4)
        assert weight.isfinite().all()


def compare_all(rank: int, in_backward: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "bfloat16", Tensor.double)  # in Muon, bf16 would amplify rounding errors
        for make in (tiny_llama, tiny_moe):
            for name, options in (("adamw", {}), ("adamw", STOCHASTIC), ("muon", {})):
                compare(make, name, options, in_backward)


@pytest.mark.parametrize("in_backward", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_equals_that_of_one_process(in_backward: bool) -> None:
    on_all_processes(partial(compare_all, in_backward=in_backward))


def compare_rounding(name: str) -> None:
    """Shards of bf16 weights with sizes that are multiples of 4 are rounded as the whole, bit for bit."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    torch.manual_seed(0)
    start = [torch.randn(shape).to(BF16) for shape in ((8, 12), (16,), (6, 4, 10))]
    gradients = [torch.randn(weight.shape).to(BF16) for weight in start]
    results = []
    for is_sharded in (False, True):

        def distributed(t: Tensor) -> Tensor:
            return distribute_tensor(t, mesh, [Shard(0)]) if is_sharded else t  # noqa: B023  (used at once)

        parameters = [nn.Parameter(distributed(weight.clone())) for weight in start]
        groups = [{"params": [p], "muon": p.dim() > 1} for p in parameters]
        optimizer = make_optimizer(groups, name, lr=1e-3, **STOCHASTIC)
        assert share_unchanged(optimizer) == 0.0
        for _ in range(3):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = distributed(gradient)
            optimizer.step()
        results.append([whole(parameter) for parameter in parameters])
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], start[0])


def norms_of_any_placement(rank: int) -> None:
    flat, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    torch.manual_seed(0)
    plain = [torch.randn(5, 6) for _ in range(5)]
    placements = [(flat, [Shard(0)]), (flat, [Shard(1)]), (flat, [Replicate()]), (square, [Replicate(), Shard(0)])]
    parameters = [nn.Parameter(torch.zeros(5, 6))]
    parameters += [nn.Parameter(distribute_tensor(torch.zeros(5, 6), *where)) for where in placements]
    for parameter, gradient in zip(parameters, plain, strict=True):
        like: Any = parameter
        is_plain = not isinstance(parameter, DTensor)
        own = gradient.clone()  # a replicated tensor would share its memory
        parameter.grad = own if is_plain else distribute_tensor(own, like.device_mesh, like.placements)
    expected = torch.stack([gradient.norm() for gradient in plain]).norm()
    norm = clip_grad_norm(parameters, 1.0)
    assert type(norm) is Tensor
    torch.testing.assert_close(norm, expected)
    for parameter, gradient in zip(parameters, plain, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(whole(parameter.grad), gradient / expected, rtol=1e-4, atol=1e-6)
    one = nn.Parameter(distribute_tensor(torch.zeros(1, 6), flat, [Shard(0)]))  # empty on the second process
    one.grad = distribute_tensor(torch.ones(1, 6), flat, [Shard(0)])
    assert clip_grad_norm([one], None).item() == pytest.approx(6**0.5)
    if rank == 0:
        one.grad.to_local()[0, 0] = torch.nan
    assert clip_grad_norm([one], 1.0).isnan()


def groups_of_shards() -> None:
    for make_groups in (parameter_groups, muon_groups):
        sizes = [
            [(group["weight_decay"], [name for name, _ in group["params"]]) for group in make_groups(model, 0.1)]
            for model in (tiny_moe(), shard(tiny_moe()))
        ]
        assert sizes[0] == sizes[1]


def parts(rank: int) -> None:
    norms_of_any_placement(rank)
    groups_of_shards()
    compare_rounding("adamw")
    compare_rounding("muon")


def test_norms_groups_and_rounding_of_shards() -> None:
    on_all_processes(parts)

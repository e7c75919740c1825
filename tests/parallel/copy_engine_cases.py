"""What each process of `test_copy_engines.py` does."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ligerzoo.models import Llama, LlamaConfig
from ligerzoo.parallel import initialize_sharded, shard_model
from ligerzoo.parallel.copy_engines import CopyEngineAllGather, CopyEngineReduceScatter, use_copy_engines
from ligerzoo.parallel.processes import default_mesh

NBYTES = 240  # of each buffer: tensors of the cases need several pieces


class SharedBuffers:
    """`PeerBuffers` in files that all processes map into their memory."""

    def __init__(self, directory: Path) -> None:
        self.rank = dist.get_rank()
        names = [str(directory / f"buffer {rank}") for rank in range(dist.get_world_size())]
        self.views = [torch.from_file(name, shared=True, size=NBYTES, dtype=torch.uint8) for name in names]
        self.views[self.rank].fill_(255)  # NaN in all dtypes

    def barrier(self) -> None:
        dist.barrier()


def part(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collectives(rank: int, directory: Path) -> None:
    """Both collectives give what those of torch give, in fp32; with sizes below, equal to and above the buffer's."""
    count = dist.get_world_size()
    buffers = SharedBuffers(directory)
    dist.barrier()
    gather, scatter = CopyEngineAllGather(buffers), CopyEngineReduceScatter(buffers)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for length in (1, 7, NBYTES // dtype.itemsize, 131):
            check_gather(gather, part(rank, length, dtype), [part(other, length, dtype) for other in range(count)])
            whole = [part(other, length * count, dtype) for other in range(count)]
            for op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
                check_scatter(scatter, whole, op)


def check_gather(gather: CopyEngineAllGather, own: Tensor, parts: list[Tensor]) -> None:
    rank, length = dist.get_rank(), len(own)
    for is_inside in (False, True):  # FSDP2 passes a part of the output
        output = gather.allocate((len(parts) * length,), dtype=own.dtype, device=own.device).fill_(float("nan"))
        source = output[rank * length : (rank + 1) * length].copy_(own) if is_inside else own
        gather(output, source, None)
        assert torch.equal(output, torch.cat(parts))


def check_scatter(scatter: CopyEngineReduceScatter, whole: list[Tensor], op: dist.ReduceOp.RedOpType) -> None:
    rank, length = dist.get_rank(), len(whole[0]) // len(whole)
    options: Any = {"dtype": whole[0].dtype, "device": whole[0].device}
    given = scatter.allocate(whole[rank].shape, **options).copy_(whole[rank])
    output = scatter.allocate((length,), **options).fill_(float("nan"))
    scatter(output, given, None, op)
    own = torch.stack([tensor[rank * length : (rank + 1) * length] for tensor in whole]).double()
    expected = own.mean(0) if op == dist.ReduceOp.AVG else own.sum(0)
    tolerance = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 2**-8}[output.dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


def allocated_after_an_error(rank: int, directory: Path) -> None:
    """An input without a reduction, as after an error in backward, does not change the dtypes of later ones."""
    scatter = CopyEngineReduceScatter(SharedBuffers(directory), torch.bfloat16, torch.float32)
    count = dist.get_world_size()
    for length in (3 * count, 5 * count, 5 * count, 0):
        given = scatter.allocate((length,), dtype=torch.float64, device=torch.device("cpu"))
        assert given.dtype == torch.bfloat16
    output = scatter.allocate((0,), dtype=torch.float64, device=torch.device("cpu"))
    assert output.dtype == torch.float32


def not_on_a_cpu(rank: int) -> None:
    model = shard_model(Llama(LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)))
    assert use_copy_engines({model: torch.float32}, default_mesh(), None) == ()


def same_steps_as_nccl(rank: int) -> None:
    """Three steps give the bits of NCCL's collectives: with two processes, both add two numbers and halve the sum."""
    sizes = {"vocab_size": 1003, "hidden_size": 256, "intermediate_size": 514, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    for options in ({}, {"reshard_after_forward": False}, {"prefetch": 2}, {"param_dtype": torch.bfloat16}):
        for dtype in (torch.float32, torch.bfloat16):
            found = []
            for copy_engines in (True, False):
                torch.manual_seed(0)
                model = shard_model(Llama(config, device="meta", dtype=dtype), **options, copy_engines=copy_engines)
                initialize_sharded(model)
                group = model.model.layers[0]._get_fsdp_state()._fsdp_param_group
                assert isinstance(group._all_gather_comm, CopyEngineAllGather) == copy_engines
                found.append(trained(model, rank))
            for name, got in found[0].items():
                assert torch.equal(got, found[1][name]), (options, dtype, name)


def trained(model: Llama, rank: int) -> dict[str, Tensor]:
    """Trains three steps; returns the losses, and the own shards of the last gradients and the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator("cuda").manual_seed(rank)
    losses = []
    for step in range(3):
        ids = torch.randint(1003, (2, 64 + step), generator=generator, device="cuda")
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = {f"gradient of {name}": weight.grad.to_local() for name, weight in model.named_parameters()}
    weights = {name: weight.detach().to_local() for name, weight in model.named_parameters()}
    return {"losses": torch.stack(losses), **grads, **weights}

"""What each process of `test_saving.py` does. Does not import transformers, which takes seconds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from ligerzoo import AutoModel
from ligerzoo.errors import CheckpointError
from ligerzoo.models import CausalLM

SIZE = "20KiB"


def fsdp(model: CausalLM) -> CausalLM:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_by_columns(model: CausalLM) -> CausalLM:
    """Shards matrices by columns, and leaves vectors plain tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2:
                own = sharded.setdefault(parameter, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(1)])))
                setattr(module, name, own)
    return model


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "loaded").iterdir())


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def save(rank: int, directory: Path, shard: Callable[[CausalLM], CausalLM], main: int | None = None) -> None:
    for name in names(directory):
        whole = AutoModel.from_pretrained(directory / "loaded" / name)
        model = shard(AutoModel.from_pretrained(directory / "loaded" / name))
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
        saved = directory / "saved" / name
        is_main_process = None if main is None else rank == main
        model.save_pretrained(saved, is_main_process=is_main_process, max_shard_size=SIZE)
        assert files(saved) == files(directory / "expected" / name)  # on every rank, when it returns
        assert_same(model.hf_state_dict(), whole.hf_state_dict())
        dist.barrier()


def save_state_dict(rank: int, directory: Path) -> None:
    """The full state on rank 0, as FSDP gathers it for Hugging Face's Trainer and accelerate; and the shards."""
    for name in names(directory):
        model = fsdp(AutoModel.from_pretrained(directory / "loaded" / name))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        assert bool(state) == (rank == 0)
        saved, expected = directory / "full" / name, files(directory / "expected" / name)
        model.save_pretrained(saved, is_main_process=rank == 0, state_dict=state, max_shard_size=SIZE)
        dist.barrier()
        assert files(saved) == expected
        saved = directory / "shards" / name
        model.save_pretrained(saved, state_dict=get_model_state_dict(model), max_shard_size=SIZE)
        assert files(saved) == expected


def load(rank: int, directory: Path) -> None:
    for name in names(directory):
        expected = AutoModel.from_pretrained(directory / "loaded" / name)
        model = fsdp(AutoModel.from_config(expected.config))
        optimizer = torch.optim.AdamW(model.parameters())
        model.load_hf_state_dict(expected.hf_state_dict())
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
        full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        assert_same(full, dict(expected.state_dict()))
        again = fsdp(AutoModel.from_config(expected.config))
        again.load_hf_state_dict(dict(model.state_dict()) if name == "llama" else model.hf_state_dict())
        assert_same({name: tensor.full_tensor() for name, tensor in again.state_dict().items()}, full)
        ids = torch.arange(1, 11)[None]
        loss = model.train()(ids, labels=ids).loss
        torch.testing.assert_close(loss, expected.train()(ids, labels=ids).loss, rtol=1e-6, atol=0)
        loss.backward()
        optimizer.step()


def fail(rank: int, directory: Path) -> None:
    model = fsdp(AutoModel.from_pretrained(directory / "loaded" / "llama"))
    (directory / "a file").touch()
    message = "a file: is a file" if rank == 0 else "a file: the main process could not save"
    with pytest.raises(CheckpointError, match=message):
        model.save_pretrained(directory / "a file")
    model.save_pretrained(directory / "after")  # the processes still agree on what comes next
    assert (directory / "after" / "model.safetensors").exists()

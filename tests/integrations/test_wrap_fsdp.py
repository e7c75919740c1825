"""A wrapped model that accelerate shards with FSDP2, in two processes on the CPU."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("accelerate")

from tests.models.tiny_llama import CHECKPOINTS as LLAMA
from tests.models.tiny_phi3 import CHECKPOINTS
from tests.parallel.spawning import on_all_processes


def shard_and_step(directory: Path, rank: int) -> None:
    """Compares loss, gradients and the checkpoints of a sharded model with those of one that is not sharded."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from ligerzoo.integrations.transformers import AutoModelForCausalLM

    os.environ.update({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"})
    whole, model = (AutoModelForCausalLM.from_pretrained(directory / "model").train() for _ in range(2))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    plugin.set_auto_wrap_policy(model)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"), is_main_process=rank == 0,
        mixed_precision="no", torch_device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=("fsdp",)), process_index=rank, num_processes=2,
        is_fsdp2=True, wait_for_everyone=dist.barrier,
    )  # fmt: skip
    sharded = fsdp2_prepare_model(accelerator, model)
    assert [name for name, part in sharded.named_modules() if hasattr(part, "unshard") and "layers" in name] == [
        "model.layers.0", "model.layers.1"
    ]  # fmt: skip
    assert (sharded.lm_head.weight is sharded.get_input_embeddings().weight) == sharded.config.tie_word_embeddings
    ids = torch.arange(3, 27).view(2, 12)
    losses = [each(ids, labels=ids).loss for each in (sharded, whole)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
    for loss in losses:
        loss.backward()
    for (name, got), expected in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), expected.grad, msg=name, rtol=0, atol=1e-6)
    gathered = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for name, state in (("gathered", gathered), ("sharded", None)):
        sharded.save_pretrained(directory / name, state_dict=state, is_main_process=rank == 0)
        dist.barrier()
        again = AutoModelForCausalLM.from_pretrained(directory / name).state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in whole.state_dict().items())
    check_states(accelerator, sharded, directory, whole.state_dict())


def check_states(accelerator: Any, sharded: Any, directory: Path, expected: dict[str, Tensor]) -> None:
    """Compares what accelerate saves and loads, whole and in shards, with the weights."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import load_fsdp_model, save_fsdp_model

    os.environ.update({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"RANK": str(accelerator.process_index), "LOCAL_RANK": str(accelerator.process_index)})
    PartialState(cpu=True)  # accelerate's log needs it
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        save_fsdp_model(plugin, accelerator, sharded, str(directory / kind))
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.zero_()
        load_fsdp_model(plugin, accelerator, sharded, str(directory / kind))
        state = {name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()}
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


TIED = next(row for row in LLAMA if row.name.endswith("tied, only the embedding stored"))


def shard_and_step_each(directories: list[Path], rank: int) -> None:
    """All cases, since each process imports transformers."""
    for directory in directories:
        shard_and_step(directory, rank)


def test_fsdp2(tmp_path: Path) -> None:
    checkpoints = {tmp_path / "untied": CHECKPOINTS[0], tmp_path / "tied": TIED}
    for directory, checkpoint in checkpoints.items():
        checkpoint.write(directory / "model")
    on_all_processes(partial(shard_and_step_each, list(checkpoints)))

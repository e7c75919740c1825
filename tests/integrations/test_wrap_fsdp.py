"""A wrapped model that accelerate shards with FSDP2, in two processes on the CPU."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate")

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
        mixed_precision="no", torch_device_mesh=None, parallelism_config=None, process_index=rank,
    )  # fmt: skip
    sharded = fsdp2_prepare_model(accelerator, model)
    assert [name for name, part in sharded.named_modules() if hasattr(part, "unshard") and "layers" in name] == [
        "model.layers.0", "model.layers.1"
    ]  # fmt: skip
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


def test_fsdp2(tmp_path: Path) -> None:
    CHECKPOINTS[0].write(tmp_path / "model")
    on_all_processes(partial(shard_and_step, tmp_path))

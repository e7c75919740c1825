"""The environment of torchrun, and functions of all processes without a process group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ligerzoo.errors import ConfigError
from ligerzoo.models import Llama, LlamaConfig
from ligerzoo.parallel import (
    barrier,
    failing_together,
    gather_objects,
    items_per_process,
    load_optimizer,
    replacing_directory_together,
    save_optimizer,
    shard_model,
    start_processes,
    stop_processes,
)
from ligerzoo.parallel import processes as processes_module

ROOT = Path(__file__).parents[2]
WHOLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"WORLD_SIZE": None}, "variables of torchrun are missing; got RANK=0, LOCAL_RANK=0"),
        ({"MASTER_PORT": None, "LOCAL_RANK": None}, "expected LOCAL_RANK and MASTER_PORT as well"),
        ({"RANK": "one"}, "environment variable RANK: not a number; got 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: not a rank; got 2; expected less than WORLD_SIZE, 2"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK: not a rank"),
    ],
)
def test_an_inconsistent_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], message: str
) -> None:
    for name, value in {**WHOLE, **changes}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        start_processes("cpu")


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**WHOLE, "WORLD_SIZE": "8", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="more processes than GPUs on this host; got 3; expected less than 2"):
        start_processes("cuda")


def test_restarts_with_the_store_of_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's variables without and with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    for name, value in {**WHOLE, "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="--max-restarts 3: .* set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        start_processes("cpu")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    start_processes("cpu")


@pytest.mark.parametrize("error", [ValueError("a"), KeyboardInterrupt(), SystemExit(1)])
def test_other_processes_hear_of_each_end_of_a_block(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr(processes_module, "gather_objects", sent.append)
    with pytest.raises(type(error)), failing_together("a test"):
        raise error
    assert sent == [f"{type(error).__name__}: {error}"]


def test_one_process(tmp_path: Path) -> None:
    processes = start_processes("cpu")
    assert (processes.rank, processes.count, processes.is_main) == (0, 1, True)
    assert processes.device == torch.device("cpu")
    assert gather_objects("mine") == ["mine"]
    assert float(items_per_process(7)) == 7
    barrier("alone")
    with pytest.raises(KeyError), failing_together("a test"):
        {}["missing"]
    model = Llama(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                              num_attention_heads=2))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(5)[None], labels=torch.arange(5)[None]).loss.backward()
    optimizer.step()
    with replacing_directory_together(tmp_path / "run") as run:
        save_optimizer(model, optimizer, run / "optimizer")
    again = torch.optim.AdamW(model.parameters(), lr=1.0)
    load_optimizer(model, again, tmp_path / "run" / "optimizer")
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for weight, state in optimizer.state.items():
        assert all(torch.equal(value, again.state[weight][key]) for key, value in state.items())
    with pytest.raises(ConfigError, match=r"no process group.*torchrun"):
        shard_model(model)
    stop_processes()


TRAIN = """
import sys
import torch
from ligerzoo import AutoModel
from ligerzoo.models import LlamaConfig
from ligerzoo.parallel import initialize_sharded, shard_model, start_processes, stop_processes

processes = start_processes("cpu")
config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = shard_model(AutoModel.from_config(config, device="meta"))
initialize_sharded(model)
ids = torch.arange(5)[None]
model(ids, labels=ids).loss.backward()
model.save_pretrained(sys.argv[1])
stop_processes()
"""


@pytest.mark.thorough  # tests/train/test_training_processes.py runs torchrun too
def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, tmp_path / "train.py", tmp_path / "saved"], check=True, env=environment)
    assert (tmp_path / "saved" / "model.safetensors").exists()

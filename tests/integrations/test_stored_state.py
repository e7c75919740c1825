"""State dicts under the names of checkpoints: of every architecture, and of models that two processes share."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from ligerzoo import AutoModel
from ligerzoo.adapters import add_lora
from ligerzoo.dtensors import full
from ligerzoo.errors import CheckpointError
from ligerzoo.hub import load_on_meta
from ligerzoo.integrations.stored_state import StoredState
from ligerzoo.models import CausalLM
from ligerzoo.parallel import load_sharded
from tests.integrations.engine_data import MODELS, write_all
from tests.models.comparing import stored_tensors
from tests.models.tiny import Tiny
from tests.models.zoo import CHECKPOINTS
from tests.parallel.spawning import on_all_processes


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


def test_there_and_back(tiny: Tiny, tmp_path: Path) -> None:
    """The tensors are those of the files, and give the model's state."""
    tiny.write(tmp_path)
    state = AutoModel.from_pretrained(tmp_path).state_dict()
    stored = StoredState(load_on_meta(tmp_path, CausalLM), "zoo.")
    named = {f"zoo.{name}": tensor for name, tensor in state.items()}
    files, tensors = stored_tensors(tmp_path), stored.of_model(named)
    assert tensors.keys() == set(stored.names)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, files[name]), name
    again = stored.to_model({name: tensor.clone() for name, tensor in tensors.items()})
    whole = StoredState(load_on_meta(tmp_path, CausalLM), "zoo.").to_model(files)
    for name, tensor in named.items():
        for got in (again, whole):
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=0, check_dtype=False)  # some stay in fp32


SHARDED = [
    ("llama", "shard=2"), ("qwen3_moe", "shard=2"), ("phi3", "shard=2"), ("qwen3_moe", "expert=2"),
    ("phi3", "tensor=2"), ("qwen3_moe", "tensor=2"),
]  # fmt: skip


def exchange(directory: Path, rank: int) -> None:
    """Reads and writes each checkpoint in two processes, with torch's readers and writers."""
    for name, mesh in SHARDED:
        model = load_sharded(directory / name, mesh)
        expected = {key: full(tensor).clone() for key, tensor in model.state_dict().items()}
        stored = StoredState(load_on_meta(directory / name, CausalLM))
        written = directory / f"{name}-{mesh}"
        writer = HuggingFaceStorageWriter(str(written), save_distributed=True, enable_consolidation=True)
        dcp.save(stored.of_model(model.state_dict()), storage_writer=writer)
        dist.barrier()
        if rank == 0:
            (written / "config.json").write_text((directory / name / "config.json").read_text())
            assert_equal(AutoModel.from_pretrained(written).state_dict(), expected, name, mesh)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = stored.of_model(model.state_dict())
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory / name)))
        model.load_state_dict(stored.to_model(state))
        assert_equal({key: full(tensor) for key, tensor in model.state_dict().items()}, expected, name, mesh)


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], *case: str) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), (name, *case)


def test_two_processes(tmp_path: Path) -> None:
    write_all(tmp_path)
    on_all_processes(partial(exchange, tmp_path))


def test_tensors_that_are_read_in_place() -> None:
    """Views of experts are read in place: nothing is copied. Other tensors are put together again."""
    model = MODELS["qwen3_moe"]()
    state, stored = model.state_dict(), StoredState(model)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = stored.of_model(state)
    assert stored.to_model(tensors)[name] is state[name]
    tensors = stored.of_model(state)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"] = torch.ones(24, 32)
    again = stored.to_model(tensors)[name]
    assert again is not state[name]
    assert again[1, 24:].eq(1).all()
    assert torch.equal(again[0], state[name][0])


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    stored, state = StoredState(model, "zoo."), {f"zoo.{key}": value for key, value in model.state_dict().items()}
    del state["zoo.lm_head.weight"]  # of two tied weights, one is enough
    tensors = stored.of_model(state)
    assert "lm_head.weight" not in tensors
    assert "zoo.lm_head.weight" not in stored.to_model(tensors)
    with pytest.raises(CheckpointError, match=r"state dict: .* expected 'model.norm.weight'"):
        stored.of_model({key: value for key, value in state.items() if "model.norm" not in key})
    add_lora(model)
    with pytest.raises(CheckpointError, match=r"got '.*lora_A'.* Train without adapters"):
        stored.of_model({f"zoo.{key}": value for key, value in model.state_dict().items()})
    with pytest.raises(CheckpointError, match=r"state dict: tensors are missing; got no 'model.norm.weight'"):
        stored.to_model({key: value for key, value in tensors.items() if key != "model.norm.weight"})

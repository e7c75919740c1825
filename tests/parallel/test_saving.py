"""Saving and loading models whose parameters are DTensors, over two processes on a CPU."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ligerzoo import AutoModel
from ligerzoo.hub import sharding
from ligerzoo.hub.sharding import GatheredTensors
from ligerzoo.hub.state import as_stored
from tests.models.tiny import HEAD, Tiny, without
from tests.models.tiny_gemma3 import GEMMA3
from tests.models.tiny_llama import LLAMA
from tests.models.tiny_mixtral import MIXTRAL, ON_THE_HUB
from tests.models.tiny_phi3 import PHI3
from tests.parallel import sharded_models as process
from tests.parallel.spawning import PROCESSES, on_all_processes

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

ODD = {"vocab_size": 33, "intermediate_size": 37}  # uneven shards
TINY = {
    "llama": Tiny("llama", {**LLAMA, **ODD}),
    "tied": Tiny("tied", {**LLAMA, **ODD, "tie_word_embeddings": True}, tensors=without(HEAD)),
    "mixtral": Tiny("mixtral", {**MIXTRAL, "num_local_experts": 5}, tensors=ON_THE_HUB),
    "phi3": Tiny("phi3", {**PHI3, **ODD}),
    "gemma3": Tiny("gemma3", GEMMA3),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, tiny in TINY.items():
        tiny.write(tmp_path / "loaded" / name)
        model = AutoModel.from_pretrained(tmp_path / "loaded" / name)
        model.save_pretrained(tmp_path / "expected" / name, max_shard_size=process.SIZE)
        assert len(list((tmp_path / "expected" / name).glob("*.safetensors"))) > 1
    return tmp_path


@pytest.mark.parametrize("shard", [process.fsdp, process.sharded_by_columns])
def test_files_equal_those_of_the_whole_model(directory: Path, shard: Any) -> None:
    on_all_processes(partial(process.save, directory=directory, shard=shard))


def test_the_main_process_writes(directory: Path) -> None:
    on_all_processes(partial(process.save, directory=directory, shard=process.fsdp, main=PROCESSES - 1))


def test_state_dicts(directory: Path) -> None:
    on_all_processes(partial(process.save_state_dict, directory=directory))


def test_loading_keeps_parameters_and_shards(directory: Path) -> None:
    on_all_processes(partial(process.load, directory=directory))


def test_all_processes_fail_if_the_main_process_does(directory: Path) -> None:
    on_all_processes(partial(process.fail, directory=directory))


def test_one_whole_parameter_at_a_time(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """A parameter whose experts are stored one by one is gathered once."""
    model = AutoModel.from_pretrained(directory / "loaded" / "mixtral")
    gathered: list[Tensor] = []
    monkeypatch.setattr(sharding, "full", lambda tensor: gathered.append(tensor) or tensor)
    plain = as_stored(model, model.origin, model.state_dict())
    slices = [part for parts in plain._slices.values() for part in parts]
    tensors = GatheredTensors(slices, plain._tensors)
    meta = tensors.meta()
    assert not gathered
    assert {name: (t.shape, t.dtype) for name, t in meta.items()} == {n: (t.shape, t.dtype) for n, t in tensors.items()}
    assert len(gathered) == len(model.state_dict())

"""All-gathers and reduce-scatters by copy engines: their logic on a CPU, and steps of a model on two GPUs."""

from functools import partial
from pathlib import Path

import pytest
import torch

from ligerzoo.errors import LigerzooError
from ligerzoo.parallel.copy_engines import SymmetricBuffers
from tests.parallel import copy_engine_cases as process
from tests.parallel.spawning import on_all_processes

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version


@pytest.mark.parametrize("processes", [2, 3])
def test_collectives_equal_those_of_torch(tmp_path: Path, processes: int) -> None:
    on_all_processes(partial(process.collectives, directory=tmp_path), processes)


def test_dtypes_after_an_error(tmp_path: Path) -> None:
    on_all_processes(partial(process.allocated_after_an_error, directory=tmp_path))


def test_processes_on_a_cpu_use_gloo() -> None:
    on_all_processes(process.not_on_a_cpu)


def test_cuda_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LigerzooError, match=r"cannot be captured in a CUDA graph.*copy_engines=False"):
        SymmetricBuffers.__new__(SymmetricBuffers).barrier()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_steps_have_the_bits_of_nccl() -> None:
    on_all_processes(process.same_steps_as_nccl, backend="nccl")

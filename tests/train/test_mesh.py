"""One mesh of four processes on a CPU: shards and replicas."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ligerzoo.errors import ConfigError
from tests.parallel import mesh_cases as process
from tests.parallel.spawning import on_all_processes
from tests.train.test_resume import train
from tests.train.test_training_processes import numbers
from tests.train.tiny_run import options

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version


def test_shards_and_replicas_train_as_one(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    variant = {"accumulate": 2, "max_steps": 3, "eval_data": (str(data),), "eval_every": 3}
    assert train(options(checkpoint, data, tmp_path / "one", batch_size=4, **variant)) == 0
    given = options(checkpoint, data, tmp_path / "four", batch_size=1, mesh="replicate=2 shard=2", **variant)
    on_all_processes(partial(process.one_and_all, given=given), processes=4)
    for column in ("loss", "eval_loss", "grad_norm", "tokens", "trained_tokens"):
        assert numbers(tmp_path / "four", column) == pytest.approx(numbers(tmp_path / "one", column), rel=1e-4)
    single, shared = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "four"))
    for key, weight in single.items():
        torch.testing.assert_close(shared[key], weight, atol=2e-5, rtol=2e-3)


def test_a_mesh_of_several_processes_needs_torchrun(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh: .* shard=2, whose product is 2; expected 1, .* Start 2.*torchrun"):
        train(options(checkpoint, data, tmp_path / "run", mesh="shard=2"))

"""One mesh of four processes on a CPU: shards and replicas."""

from functools import partial
from pathlib import Path
from typing import Any

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


def compare(run: Path, one: Path, steps: int = 0) -> None:
    """Compares the log, or its last steps, and the weights of a run with those of one process."""
    for column in ("loss", "grad_norm", "eval_loss", "tokens", "trained_tokens", "padding"):
        assert numbers(run, column)[-steps:] == pytest.approx(numbers(one, column)[-steps:], rel=1e-4), (run, column)
    single, shared = (load_file(path / "model.safetensors") for path in (one, run))
    assert shared.keys() == single.keys()
    for key, weight in single.items():
        torch.testing.assert_close(shared[key], weight, atol=2e-5, rtol=2e-3)


VARIANT = {"accumulate": 2, "max_steps": 3, "schedule": "constant", "eval_every": 3, "ema": 0.9}


def test_meshes_train_as_one_process(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    variant = {**VARIANT, "eval_data": (str(data),)}
    assert train(options(checkpoint, data, tmp_path / "one", batch_size=4, **variant)) == 0
    replicas = options(checkpoint, data, tmp_path / "replicas", batch_size=1, mesh="replicate=2 shard=2", **variant)
    tensor = options(checkpoint, data, tmp_path / "tensor", batch_size=2, mesh="shard=2 tensor=2", **variant)
    on_all_processes(partial(process.one_and_all, runs=[replicas, tensor]), processes=4)
    for name in ("replicas", "tensor"):
        compare(tmp_path / name, tmp_path / "one")


@pytest.mark.slow
def test_runs_over_tensor_continue_and_train_adapters_and_preferences(
    checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    def of_run(name: str, **changes: Any) -> dict[str, Any]:
        return options(checkpoint, data, tmp_path / name, **{"batch_size": 2, **VARIANT, "ema": None, **changes})

    mesh, lora = {"mesh": "tensor=2"}, {"lora_rank": 4, "lr": 1e-2}
    assert train(of_run("one")) == train(of_run("one-lora", **lora)) == 0
    halves = [of_run("again", save_every=2, **mesh, max_steps=steps, resume=steps == 3) for steps in (2, 3)]
    on_all_processes(partial(process.train_all, runs=[*halves, of_run("lora", **mesh, **lora)]))
    compare(tmp_path / "again", tmp_path / "one", 1)
    for run, one in (("lora", "one-lora"),):
        assert numbers(tmp_path / run, "loss") == pytest.approx(numbers(tmp_path / one, "loss"), rel=1e-4)


def test_a_mesh_of_several_processes_needs_torchrun(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh: .* shard=2, whose product is 2; expected 1, .* Start 2.*torchrun"):
        train(options(checkpoint, data, tmp_path / "run", mesh="shard=2"))

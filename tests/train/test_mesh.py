"""Meshes of two and four processes on a CPU."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ligerzoo.errors import ConfigError
from ligerzoo.models import Mixtral, MixtralConfig
from ligerzoo.train.rollout_options import GRPORunOptions
from tests.parallel import mesh_cases as process
from tests.parallel.spawning import on_all_processes
from tests.train.test_resume import train
from tests.train.test_training_processes import numbers
from tests.train.tiny_run import SIZES, options, write_tokenizer

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


@pytest.mark.parametrize(
    "mesh, batch_size", [("replicate=2 tensor=2", 2), pytest.param("replicate=2 shard=2", 1, marks=pytest.mark.slow)]
)
def test_meshes_train_as_one_process(checkpoint: Path, data: Path, tmp_path: Path, mesh: str, batch_size: int) -> None:
    variant = {**VARIANT, "eval_data": (str(data),)}
    assert train(options(checkpoint, data, tmp_path / "one", batch_size=4, **variant)) == 0
    run = options(checkpoint, data, tmp_path / "four", batch_size=batch_size, mesh=mesh, **variant)
    on_all_processes(partial(process.one_and_all, runs=[run]), processes=4)
    compare(tmp_path / "four", tmp_path / "one")


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


@pytest.mark.slow
def test_experts_over_processes_train_as_one(data: Path, tmp_path: Path) -> None:
    """All weights, and adapters of experts; evaluation samples continuations in step."""
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    model = Mixtral(MixtralConfig(**sizes, num_key_value_heads=2, intermediate_size=24, num_experts=4))
    write_tokenizer(tmp_path / "tiny")
    model.save_pretrained(tmp_path / "tiny")
    evaluated = {**VARIANT, "eval_data": (str(data),)}
    adapted = {**VARIANT, "lora_rank": 4, "lr": 1e-2, "lora_targets": ("experts",), "ema": None}

    def of_run(name: str, size: int, **changes: Any) -> dict[str, Any]:
        return options(tmp_path / "tiny", data, tmp_path / name, batch_size=size, **changes)

    assert train(of_run("one", 4, **evaluated)) == train(of_run("one-lora", 4, **adapted)) == 0
    mesh = {"mesh": "shard=4 expert=2"}
    tensor = {"mesh": "shard=2 tensor=2 expert=2"}
    runs = [of_run("four", 1, **evaluated, **mesh), of_run("lora", 2, **adapted, **tensor)]
    on_all_processes(partial(process.train_all, runs=runs), processes=4)
    compare(tmp_path / "four", tmp_path / "one")
    assert numbers(tmp_path / "lora", "loss") == pytest.approx(numbers(tmp_path / "one-lora", "loss"), rel=1e-4)
    with pytest.raises(ConfigError, match="processes that share experts cannot sample different prompts"):
        GRPORunOptions(model="m", data=("d",), output="o", reward="r.py", mesh="expert=2")


def test_a_mesh_of_several_processes_needs_torchrun(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh: .* shard=2, whose product is 2; expected 1, .* Start 2.*torchrun"):
        train(options(checkpoint, data, tmp_path / "run", mesh="shard=2"))

"""NeMo AutoModel's recipe trains our models, in two processes on the CPU."""

import os
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from ligerzoo import AutoModel
from ligerzoo.errors import LigerzooError
from tests.integrations import nemo_on_cpu
from tests.integrations.engine_data import STEPS, Batch, reference, write_all
from tests.parallel.spawning import on_all_processes
from tests.test_docs import blocks

if find_spec("nemo_automodel") is None:
    pytest.skip("NeMo AutoModel is not installed", allow_module_level=True)

LR = 1e-3
PAGE = Path(__file__).parents[2] / "docs" / "other-engines.md"


def rows(count: int = 4 * STEPS, **_: object) -> list[dict[str, list[int]]]:
    """A data set of NeMo AutoModel: token ids, and labels that are shifted already."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(2, 30, (count, 33), generator=generator).tolist()
    return [{"input_ids": text[:-1], "labels": [-100] * 3 + text[4:]} for text in texts]


def config(directory: Path, name: str, output: str, **sizes: int) -> dict[str, Any]:
    """Returns the page's recipe with other sizes and data."""
    [block] = [block for block in blocks(PAGE, "yaml") if block.startswith("# recipe.yaml")]
    recipe: dict[str, Any] = yaml.safe_load(block)
    policy = dict.fromkeys(("param_dtype", "reduce_dtype"), "torch.float32")
    recipe["step_scheduler"] |= {
        "global_batch_size": 4, "local_batch_size": 2, "ckpt_every_steps": STEPS - 1, "max_steps": STEPS
    }  # fmt: skip
    recipe["dist_env"] = {"backend": "gloo"}
    recipe["model"] |= {"pretrained_model_name_or_path": f"{directory}/{name}", "torch_dtype": "float32"}
    policy = {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", **policy}
    recipe["distributed"] = {"strategy": "fsdp2", "mp_policy": policy, **sizes}
    recipe["dataset"] = {"_target_": f"{__name__}.rows"}
    recipe["dataloader"]["shuffle"] = False
    recipe["optimizer"] |= {"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1}
    recipe["checkpoint"]["checkpoint_dir"] = f"{directory}/{output}"
    return recipe


def setup(directory: Path, output: str, content: dict[str, Any]) -> Any:
    """Returns a recipe that is ready to run."""
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

    file = directory / f"{output}-{dist.get_rank()}.yaml"
    file.write_text(yaml.safe_dump(content))
    recipe = TrainFinetuneRecipeForNextTokenPrediction(load_yaml_config(file))
    recipe.setup()
    return recipe


def train(directory: Path, name: str, output: str, **sizes: int) -> list[tuple[float, float]]:
    """Runs the recipe. Returns the losses and the norms of the gradients."""
    recipe = setup(directory, output, config(directory, name, output, **sizes))
    steps: list[tuple[float, float]] = []
    step = recipe._run_train_optim_step

    def recorded(*args: Any, **options: Any) -> Any:
        sample = step(*args, **options)
        steps.append((sample.metrics["loss"], float(sample.metrics["grad_norm"])))
        return sample

    recipe._run_train_optim_step = recorded
    recipe.run_train_validation_loop()
    return steps


CASES: list[tuple[str, dict[str, int]]] = [
    ("llama", {}),
    ("qwen3", {}),
    ("qwen3_moe", {}),
    ("phi3", {}),
    ("llama", {"tp_size": 2}),
    ("qwen3", {"cp_size": 2}),
    ("qwen3_moe", {"ep_size": 2}),
    ("qwen3_moe", {"tp_size": 2}),
]
"""Checkpoints and sizes of the mesh; without sizes, the weights are sharded over both processes."""


def all_cases(directory: Path, rank: int) -> None:
    """Trains each case in two processes, and compares it with one process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NEMO_ENABLE_USER_MODULES": "1"}
    nemo_on_cpu.prepare()
    for number, (name, sizes) in enumerate(CASES):
        steps = train(directory, name, f"out-{number}", **sizes)
        if rank == 0:
            compare(directory, name, f"out-{number}", steps, str(sizes))
        dist.barrier()
    resume(directory, "qwen3_moe", "out-2", rank)
    refuse(directory)


def batches() -> list[list[Batch]]:
    """Returns the rows of each step, of all processes and microbatches."""
    tensors = [{name: torch.tensor(value)[None] for name, value in row.items()} for row in rows()]
    each: list[Batch] = [(row["input_ids"], row["labels"], None) for row in tensors]
    return [each[4 * step : 4 * step + 4] for step in range(STEPS)]


def compare(directory: Path, name: str, output: str, steps: list[tuple[float, float]], case: str) -> None:
    """Compares losses, norms and the saved checkpoint with those of one process."""
    losses, norms, model = reference(directory, name, batches(), [LR] * STEPS)
    assert [loss for loss, _ in steps] == pytest.approx(losses, abs=1e-5), (name, case)
    assert [norm for _, norm in steps] == pytest.approx(norms, rel=1e-4), (name, case)
    saved = AutoModel.from_pretrained(directory / output / f"epoch_0_step_{STEPS - 1}" / "model")
    for (key, got), want in zip(saved.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, msg=f"{name} {case} {key}", rtol=0, atol=1e-5)


def resume(directory: Path, name: str, output: str, rank: int) -> None:
    """A run that stopped after its second step goes on from there, and ends with the same weights."""
    last = directory / output / f"epoch_0_step_{STEPS - 1}"
    expected = AutoModel.from_pretrained(last / "model").state_dict()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(last)
    dist.barrier()
    assert len(train(directory, name, output)) == 1
    if rank == 0:
        for key, got in AutoModel.from_pretrained(last / "model").state_dict().items():
            torch.testing.assert_close(got, expected[key], msg=key, rtol=0, atol=1e-6)


def refuse(directory: Path) -> None:
    """Options without a meaning are refused by name."""
    for section, changes, message in (
        ("distributed", {"strategy": "ddp"}, "distributed.strategy: not supported; got DDPConfig"),
        (
            "distributed",
            {"strategy": "fsdp2", "sequence_parallel": True, "tp_size": 2},
            "distributed.sequence_parallel: not supported",
        ),
        ("model", {"num_hidden_layers": 1}, "config.num_hidden_layers: differs from config.json; got 1; expected 2"),
        ("peft", {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "target_modules": "*"}, "lora"),
    ):
        changed = config(directory, "qwen3", "refused")
        changed[section] = changes if section == "distributed" else changed.get(section, {}) | changes
        with pytest.raises(LigerzooError, match=message):
            setup(directory, "refused", changed)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nemo")
    write_all(path)
    return path


def test_recipe(directory: Path) -> None:
    # Never in this process: its import replaces configs of transformers, which other tests use.
    imported = subprocess.run(
        [sys.executable, "-c", "import nemo_automodel._transformers.auto_model"], capture_output=True, text=True
    )
    if imported.returncode and "ValueError" in imported.stderr:  # NeMo AutoModel 0.7 with triton 3.9
        pytest.skip(f"NeMo AutoModel does not import: {imported.stderr.splitlines()[-1]}")
    assert imported.returncode == 0, imported.stderr
    on_all_processes(partial(all_cases, directory))

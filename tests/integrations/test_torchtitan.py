"""torchtitan trains our models: its command and its trainer, with two processes on the CPU."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ligerzoo import AutoModel, cli
from ligerzoo.errors import ConfigError
from ligerzoo.hub import read_config
from tests.integrations import torchtitan_on_cpu
from tests.integrations.engine_data import STEPS, Batch, reference, write_all
from tests.parallel.spawning import on_all_processes
from tests.test_docs import blocks

pytest.importorskip("torchtitan")

MODULE = ["--module", "ligerzoo.integrations.torchtitan"]
OPTIONS = [
    "--dataloader.dataset", "c4_test", "--training.seq_len", "32", "--training.local_batch_size", "2",
    "--training.steps", str(STEPS), "--lr_scheduler.warmup_steps", "0", "--metrics.log_freq", "1",
    "--training.mixed_precision_param", "float32",
]  # fmt: skip
LR = 1e-3
LRS = [LR * (1 - step / STEPS) for step in range(STEPS)]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "other-engines.md"


Steps = list[list[Batch]]


def arguments(directory: Path, name: str, *options: str, config: str = "finetune") -> list[str]:
    """Returns the arguments of torchtitan's command that trains a checkpoint of the directory."""
    paths = ["--hf_assets_path", f"{directory}/{name}", "--dataloader.dataset_path", f"{directory}/data"]
    return [*MODULE, "--config", config, *paths, *OPTIONS, *options]


def train(
    directory: Path, name: str, output: str, *options: str, config: str = "finetune", plain: bool = False
) -> list[dict[str, Any]]:
    """Trains as the command does, in this process, or with torchtitan's trainer. Returns losses and norms."""
    from torchtitan import trainer
    from torchtitan.config import ConfigManager

    given = arguments(directory, name, "--dump_folder", f"{directory}/{output}", *options, config=config)
    parsed = ConfigManager().parse_args(given)
    parsed.optimizer.param_groups[0].optimizer_kwargs["lr"] = LR
    trained = trainer.Trainer(parsed) if plain else parsed.build()
    losses: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch, torchtitan_on_cpu.record(losses):
        patch.setattr(trainer.dist_utils, "set_pg_timeouts", lambda **_: None)
        patch.setattr(trainer.time, "sleep", lambda _: None)
        trained.train()
        trained.close()
    return losses


def batches(directory: Path, name: str) -> Steps:
    """Returns the batches of each step, of both data-parallel processes."""
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args(arguments(directory, name))
    tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    loaders = [
        config.dataloader.build(
            dp_world_size=2, dp_rank=rank, tokenizer=tokenizer, seq_len=32, local_batch_size=2,
            snapshot_every_n_steps=None,
        )
        for rank in range(2)
    ]  # fmt: skip
    steps = [step for _, step in zip(range(STEPS), zip(*loaders, strict=True), strict=False)]
    return [[(inputs["input"], labels, inputs["positions"]) for inputs, labels in step] for step in steps]


CASES = [
    ("llama", ()),
    ("qwen3", ()),
    ("qwen3_moe", ()),
    ("phi3", ()),
    ("llama", ("--parallelism.tensor_parallel_degree", "2")),
    ("qwen3", ("--parallelism.context_parallel_degree", "2")),
    ("qwen3", ("--parallelism.data_parallel_replicate_degree", "2")),
    ("qwen3_moe", ("--parallelism.expert_parallel_degree", "2")),
    ("qwen3_moe", ("--parallelism.tensor_parallel_degree", "2")),
]
"""Checkpoints and options of the mesh; without options, the weights are sharded over both processes."""


def all_cases(directory: Path, rank: int) -> None:
    """Trains each case in two processes, and compares it with one process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torchtitan_on_cpu.prepare()
    for number, (name, options) in enumerate(CASES):
        losses = train(directory, name, f"out-{number}", *options)
        if rank == 0:
            compare(directory, name, f"out-{number}", losses, batches(directory, name), str(options))
        dist.barrier()
    losses = train(directory, "qwen3", "plain", plain=True)
    if rank == 0:
        assert_close(losses, *reference(directory, "qwen3", batches(directory, "qwen3"), LRS)[:2], "plain")
    resume(directory, rank)
    pretrain(directory, rank)
    refuse(directory)


def resume(directory: Path, rank: int) -> None:
    """A run whose last checkpoint is lost goes on from the one before, as if it had not stopped."""
    losses = train(directory, "qwen3_moe", "resumed", "--checkpoint.interval", "2")
    if rank == 0:
        shutil.rmtree(directory / "resumed" / "checkpoint" / f"step-{STEPS}")
    dist.barrier()
    [last] = train(directory, "qwen3_moe", "resumed", "--checkpoint.interval", "2")
    if rank == 0:
        assert last == losses[-1]


def pretrain(directory: Path, rank: int) -> None:
    """New weights are those of one process with the seed; config.json and the tokenizer are enough."""
    if rank == 0:
        shutil.copytree(directory / "llama", directory / "new", ignore=shutil.ignore_patterns("*.safetensors"))
    dist.barrier()
    losses = train(directory, "new", "pretrained", "--debug.seed", "3", config="pretrain")
    if rank == 0:
        model = AutoModel.from_config(read_config(directory / "new"), device="meta").to_empty(device="cpu")
        model.tie_weights()
        torch.manual_seed(3)
        model.init_weights()
        model.save_pretrained(directory / "new")
        assert_close(losses, *reference(directory, "new", batches(directory, "new"), LRS)[:2], "new weights")
    dist.barrier()


def refuse(directory: Path) -> None:
    """Options without a meaning are refused by name, before the model is built."""
    for options, message in (
        (["--compile.enable"], "compile.enable: not supported; got True"),
        (["--training.enable_cpu_offload"], "training.enable_cpu_offload: not supported"),
        (["--training.no-disable_cuda_graphs"], "training.disable_cuda_graphs: not supported; got False"),
        (["--parallelism.pipeline_parallel_degree", "2"], "ligerzoo does not support pipelining"),
    ):
        with pytest.raises((ConfigError, RuntimeError), match=message):
            train(directory, "qwen3_moe", "refused", *options)
    with pytest.raises(ConfigError, match="the model divides rows itself; got 2"):
        train(directory, "qwen3", "refused", "--parallelism.context_parallel_degree", "2", plain=True)


def assert_close(losses: list[dict[str, Any]], expected: list[float], norms: list[float], case: str) -> None:
    assert [each["loss"] for each in losses] == pytest.approx(expected, abs=1e-5), case
    assert [each["norm"] for each in losses] == pytest.approx(norms, rel=1e-4), case


def compare(directory: Path, name: str, output: str, losses: list[dict[str, Any]], steps: Steps, case: str) -> None:
    """Compares losses, norms and the saved checkpoint with those of one process."""
    if "tensor" in case or "context" in case:  # both processes have the samples of one
        steps = [step[:1] for step in steps]
    expected, norms, model = reference(directory, name, steps, LRS)
    assert_close(losses, expected, norms, f"{name} {case}")
    saved = AutoModel.from_pretrained(directory / output / "checkpoint" / f"step-{STEPS}")
    for (key, got), want in zip(saved.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, msg=f"{name} {case} {key}", rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torchtitan")
    write_all(path)
    return path


def test_trainer(directory: Path) -> None:
    on_all_processes(partial(all_cases, directory))


def test_command(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the page, with other sizes; the checkpoint that it saves is trained further by ours."""
    [command] = [block for block in blocks(PAGE, "sh") if "torchtitan.train" in block]
    changes = {
        "-m torchtitan.train": f"-m {torchtitan_on_cpu.__name__}",
        "--nproc-per-node 8": "--standalone --nproc-per-node 2",
        "hf_assets_path Llama-3.1-8B": f"hf_assets_path {directory}/qwen3",
        "dump_folder run": f"dump_folder {directory}/run",
        "seq_len 8192": "seq_len 32",
        "steps 1000": f"steps {STEPS}",
        "interval 100": "interval 2",
        "\\\n": " ",
    }
    for old, new in changes.items():
        assert old in command, old
        command = command.replace(old, new)
    data = ["--dataloader.dataset", "c4_test", "--dataloader.dataset_path", f"{directory}/data"]
    program, *options = [*shlex.split(command), *data, "--metrics.log_freq", "1"]
    assert program == "torchrun"
    environment = {**os.environ, "LOSSES": f"{directory}/losses.json", "PYTHONPATH": str(ROOT)}
    launched = [sys.executable, "-m", "torch.distributed.run", *options]
    subprocess.run(launched, env=environment, check=True, cwd=ROOT)
    assert len(json.loads((directory / "losses.json").read_text())) == STEPS
    saved, text = f"{directory}/run/checkpoint/step-{STEPS}", f"{directory}/data/train.jsonl"
    trained = ["train", saved, "--data", text, "--output", f"{directory}/again", "--max-steps", "1"]
    assert cli.main([*trained, "--seq-length", "32", "--device", "cpu"]) == 0


def test_a_config_of_the_user(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchtitan_on_cpu.prepare()
    from torchtitan.config import ConfigManager

    [code] = [block for block in blocks(PAGE, "python") if "my_run.py" in block]
    (tmp_path / "my_run.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = ["--module", "my_run", "--config", "long_rows", "--hf_assets_path", f"{directory}/qwen3"]
    config = ConfigManager().parse_args(given)
    assert config.optimizer.param_groups[0].optimizer_kwargs["lr"] == 2e-5
    assert config.parallelism.context_parallel_degree == 8

"""`ligerzoo train` over meshes of 2, 4 and 8 processes on a CPU: losses and gradients of one process, by families."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ligerzoo import AutoModel
from ligerzoo.hub import read_config
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.train.log import read_log
from tests.covering import covering
from tests.parallel.families import TEXT, fitting
from tests.parallel.spawning import on_all_processes
from tests.train.grpo_run import grpo_options, write_prompts, write_reward
from tests.train.mesh_runs import recorded, train_all
from tests.train.preference_data import labelled, options, pairs, write
from tests.train.test_grpo import LOW_TOKENS
from tests.train.test_resume import environment
from tests.train.tiny_run import arguments, write_tokenizer
from tests.train.tiny_vision import write_conversations, write_vision_checkpoint

VISION = ("qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe", "gemma3")


def write_family(directory: Path, name: str, seed: int) -> Path:
    """Writes a model with random weights and a tokenizer with a token for each byte."""
    if name in VISION:
        return write_vision_checkpoint(directory, name)
    write_tokenizer(directory)
    changes = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}
    changes |= {"output_router_logits": False}  # a loss of routers is that of each micro-batch
    (directory / "config.json").write_text(json.dumps({**TEXT[name], **changes, "max_position_embeddings": 256}))
    model = AutoModel.from_config(read_config(directory), dtype="float32", device="cpu")
    torch.manual_seed(seed)
    model.init_weights(0.15)
    model.save_pretrained(directory)
    return directory


class Case(NamedTuple):
    """A run over a mesh.

    Attributes:
        family: name of the model.
        processes: their number.
        mesh: the option.
        method: training method.
        changes: further options, of both runs; `batch_size` is that of a process.
    """

    family: str
    processes: int
    mesh: str
    method: str = "sft"
    changes: Mapping[str, Any] = {}

    def __str__(self) -> str:
        changes = " ".join(f"{name}={value}" for name, value in self.changes.items())
        return f"{self.family} {self.method} {self.mesh} {changes}".strip()

    @property
    def data_ranks(self) -> int:
        sizes = MeshSizes.parse(self.mesh).over(self.processes)
        return sizes.replicate * (sizes.shard or 1)


class Files:
    """The checkpoints and data of runs in a directory, each written once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._paths: dict[str, Path] = {}

    def model(self, family: str, seed: int = 0) -> Path:
        name = f"{family} {seed}"
        if name not in self._paths:
            self._paths[name] = write_family(self._directory / name, family, seed)
        return self._paths[name]

    def data(self, method: str, with_images: bool) -> Path:
        kind = "images" if with_images else method
        if kind not in self._paths:
            self._paths[kind] = self._write(kind)
        return self._paths[kind]

    def _write(self, kind: str) -> Path:
        file = self._directory / f"{kind}.jsonl"
        match kind:
            case "images":
                return write_conversations(self._directory / "images")
            case "dpo" | "orpo" | "simpo" | "cpo":
                return write(file, pairs(30))
            case "kto":
                return write(file, labelled(30))
            case "grpo" | "opd":
                write_reward(self._directory / "reward.py", LOW_TOKENS)
                return write_prompts(file)
            case "pretrain":
                return write(file, [{"text": f"{one['prompt']}{one['chosen']}"} for one in pairs(40)])
            case _:
                records = [{"prompt": one["prompt"], "completion": one["chosen"]} for one in pairs(60)]
                return write(file, records)

    def runs(self, case: Case, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the options of the runs of one process and of several."""
        with_images = case.family in VISION
        model, data = self.model(case.family), self.data(case.method, with_images)
        shared: dict[str, Any] = {"max_steps": 2, "warmup": 0.0, "seq_length": 96, "batch_size": 1, "lr": 1e-3}
        shared |= {"method": case.method, "eval_data": (str(data),), "eval_every": 2}
        if with_images:
            shared |= {"packing": "none", "seq_length": 128}
        outputs = self._directory / f"{number} one", self._directory / f"{number} many"
        if case.method in ("distill", "opd"):
            shared["teacher"] = str(self.model(case.family, seed=1))
            shared["temperature"] = 2.0
        shared |= case.changes
        if case.method in ("grpo", "opd"):
            reward = self._directory / "reward.py"
            one, many = (grpo_options(model, data, reward, output, **shared) for output in outputs)
            if case.method == "opd":
                for given in (one, many):
                    del given["reward"]
        else:
            one, many = (options(model, data, output, **shared) for output in outputs)
            one["batch_size"] *= case.data_ranks
        return one, {**many, "mesh": case.mesh}


UNEQUAL = ("tokens_per_second", "memory_gib", "mfu", "samples", "nll_loss", "eval_nll_loss", "padding")
"""Times, texts, and means over tokens, which micro-batches weight by their pairs; so are `logits/`."""


def compare_logs(case: Case, one: Path, many: Path) -> None:
    """Losses of the first step within 1e-5, and those of further steps.

    Muon amplifies rounding: other weights by 1e-7 change the next gradient of one process by 1e-3, with AdamW by 1e-5.
    """
    is_muon = case.changes.get("optimizer") == "muon"
    later = 5e-3 if is_muon else 5e-4
    logs = [read_log(output / "log.jsonl") for output in (one, many)]
    assert [list(entry) for entry in logs[0]] == [list(entry) for entry in logs[1]], str(case)
    for expected, found in zip(*logs, strict=True):
        error = 1e-5 if expected["step"] == 1 else later
        for column in expected.keys() - set(UNEQUAL):
            # KTO pairs prompts and completions in an order that depends on the processes.
            is_paired = case.method == "kto" and "eval" in column
            is_sampled = is_muon and column == "eval_reward"  # of texts that may differ in a token
            if not (is_paired or is_sampled or "logits/" in column or column.endswith("seconds")):
                close = pytest.approx(expected[column], rel=error, abs=error)
                assert found[column] == close, (str(case), column, expected["step"])


def compare_gradients(case: Case, one: Path, many: Path) -> None:
    """Gradients of the first step within 1e-5."""
    gradients, others = (torch.load(f"{output}-gradients.pt") for output in (one, many))
    assert gradients.keys() == others.keys(), str(case)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 0, str(case)
    for name, gradient in gradients.items():
        scale = max(float(gradient.abs().max()), 1e-3 * largest)  # of biases of keys, it is 0 but for rounding
        difference = float((others[name] - gradient).abs().max())
        assert difference <= 1e-5 * scale, (str(case), name, difference / scale)


TOGETHER = 8
"""Cases of a test. Each makes a mesh, whose gloo groups keep their threads until the processes end."""

LORA = {"lora_rank": 2, "lr": 1e-2}
MESHES: dict[int, Sequence[str]] = {
    2: ("replicate=2", "shard=2", "context=2", "tensor=2", "shard=2 expert=2", "context=2 expert=2"),
    4: (
        "replicate=2 shard=2", "replicate=2 context=2", "replicate=2 tensor=2", "shard=2 context=2", "shard=2 tensor=2",
        "context=2 tensor=2", "tensor=4", "context=4", "shard=4 expert=2", "replicate=2 shard=2 expert=2",
        "shard=2 tensor=2 expert=2", "context=2 tensor=2 expert=2",
    ),
    8: (
        "replicate=2 shard=2 context=2", "replicate=2 shard=2 tensor=2", "replicate=2 context=2 tensor=2",
        "shard=2 context=2 tensor=2 expert=4", "replicate=2 context=2 tensor=2 expert=2", "shard=2 context=4 expert=8",
    ),
}  # fmt: skip


def thorough(processes: int) -> list[Case]:
    """Returns cases in which every pair of a family, a mesh, a method and other options occurs, if they fit."""
    options: dict[str, Sequence[Any]] = {
        "family": (*TEXT, *VISION),
        "mesh": MESHES[processes],
        "method": ("sft", "pretrain", "dpo", "kto", "orpo", "distill", "grpo", "opd"),
        "weights": (
            {},
            LORA,
            {**LORA, "dora": True, "lora_targets": ("q_proj",)},
            {"train_only": ("layers.1",)},
            {"optimizer": "muon", "weight_decay": 0.1},
        ),
        "steps": ({}, {"activation_checkpointing": True}, {"accumulate": 3, "max_grad_norm": 0.05}, {"ema": 0.5}),
    }
    cases = []
    for row in covering(options):
        family, method, steps = row["family"], row["method"], dict(row["steps"])
        if family in VISION:
            method = "sft"
        mesh = fitting(family, row["mesh"], experts=4 if family in VISION else 8)
        if mesh is not None and method in ("grpo", "opd"):
            mesh = mesh.partition(" expert")[0]
            steps.pop("accumulate", None)
        weights = dict(row["weights"])
        if "lora_targets" in weights and family == "deepseek_v3":
            weights["lora_targets"] = ("q_b_proj",)
        if mesh is not None:
            cases.append(Case(family, processes, mesh, method, weights | steps))
    return [*{str(case): case for case in cases}.values()]


PARTS = [
    pytest.param(processes, cases[start : start + TOGETHER], id=f"{processes}-{start // TOGETHER}")
    for processes in MESHES
    for cases in [thorough(processes)]
    for start in range(0, len(cases), TOGETHER)
]


@pytest.mark.slow
@pytest.mark.parametrize("processes, cases", PARTS)
def test_every_pair_trains_as_one_process(tmp_path: Path, processes: int, cases: Sequence[Case]) -> None:
    files = Files(tmp_path)
    runs = [files.runs(case, number) for number, case in enumerate(cases)]
    for one, _ in runs:
        assert recorded(one) == 0
    on_all_processes(partial(train_all, given=[many for _, many in runs]), processes)
    failed = []
    for case, (one, many) in zip(cases, runs, strict=True):
        outputs = Path(one["output"]), Path(many["output"])
        try:
            compare_logs(case, *outputs)
            compare_gradients(case, *outputs)
        except AssertionError as error:
            failed.append(f"{case}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["shard=2 tensor=2", "context=2 tensor=2", "shard=2 context=2 expert=4"])
def test_torchrun(tmp_path: Path, mesh: str) -> None:
    """The commands of users."""
    case = Case("qwen3_moe", 4, mesh, changes={"accumulate": 2, **LORA})
    one, many = Files(tmp_path).runs(case, 0)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    for command, given in (([sys.executable], one), (torchrun, many)):
        local = environment() | {"GLOO_SOCKET_IFNAME": "lo"}
        line = [*command, "-m", "ligerzoo", *arguments(given)]
        subprocess.run(line, env=local, cwd=tmp_path, check=True, capture_output=True)
    compare_logs(case, Path(one["output"]), Path(many["output"]))

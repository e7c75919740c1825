"""Meshes of several axes, on a CPU: losses, gradients and routing of one process, for each family."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import covering
from tests.models.prompts import image, prompt
from tests.models.tiny_gemma3 import IMAGE
from tests.parallel import combination_cases as process
from tests.parallel.combination_cases import Case
from tests.parallel.families import TEXT, VISION, fitting
from tests.parallel.spawning import on_all_processes
from tests.parallel.test_context_parallel import write

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

QUICK = [
    Case("llama", "tensor=4", ("accumulate", "lora")),
    Case("gemma2", "replicate=2 shard=2", ("accumulate", "plan")),
    Case("olmo2", "shard=2 tensor=2"),
    Case("qwen3", "replicate=2 context=2", ("checkpoints", "dpo")),
    Case("gpt_oss", "context=2 tensor=2", ("accumulate", "plan")),
    Case("mixtral", "shard=4 expert=4", ("lora",)),
    Case("deepseek_v3", "shard=2 tensor=2 expert=2", ("dpo", "plan")),
    Case("qwen3_moe", "shard=2 context=2 expert=2", ("grpo", "lora")),
    Case("qwen3_next", "context=4", ("checkpoints",)),
    Case("qwen3_next", "replicate=2 shard=2 expert=2", ("accumulate",)),
    Case("few", "replicate=2 tensor=2", ("plan", "lora")),
    Case("qwen2_vl", "shard=2 context=2", ("plan",)),
    Case("qwen3_vl_moe", "context=2 tensor=2 expert=2"),
]
"""Another combination of axes in each."""

MESHES: dict[int, Sequence[str]] = {
    2: ("replicate=2", "shard=2", "context=2", "tensor=2", "shard=2 expert=2", "context=2 expert=2"),
    4: ("replicate=4", *dict.fromkeys(case.mesh for case in QUICK)),
    8: (
        "replicate=2 shard=2 context=2", "replicate=2 shard=2 tensor=2", "replicate=2 context=2 tensor=2",
        "shard=2 context=2 tensor=2 expert=4", "replicate=2 context=2 tensor=2 expert=2", "shard=2 context=4 expert=8",
    ),
}  # fmt: skip
OPTIONS: dict[str, Sequence[Any]] = {
    "loss": ((), ("dpo",), ("grpo",)),
    "memory": ((), ("checkpoints",), ("plan",)),
    "weights": ((), ("lora",)),
    "steps": ((), ("accumulate",)),
}


def thorough(processes: int) -> list[Case]:
    """Returns cases in which every pair of a family, a mesh and the options of a step occurs."""
    cases = []
    for row in covering({"family": [*TEXT, *VISION], "mesh": MESHES[processes], **OPTIONS}):
        family, mesh = row["family"], fitting(row["family"], row["mesh"])
        if mesh is not None:
            loss = () if family in VISION else row["loss"]
            cases.append(Case(family, mesh, (*loss, *row["memory"], *row["weights"], *row["steps"])))
    return list(dict.fromkeys(cases))


def write_models(directory: Path) -> None:
    """Configs, and rows with images."""
    for name, config in (TEXT | VISION).items():
        write(directory / name, config)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in VISION}
    for number in range(4):
        torch.manual_seed(number)
        ids = torch.randint(3, 80, (1, 32))
        ids[:, 6:15] = IMAGE
        labels, pixels = ids.where(ids < 88, -100), torch.randn(1, 3, 26, 26)
        rows["gemma3"].append({"input_ids": ids, "labels": labels, "pixel_values": pixels})
        for name in ("qwen2_vl", "qwen3_vl_moe"):
            given = prompt([[4, image(2, 4), 5, image(2, 2), 11]], VISION[name]["vision_config"])
            assert given.ids.shape[1] == 32
            rows[name].append({"input_ids": given.ids, "labels": given.ids.where(given.ids < 88, -100), **given.vision})
    for name, of_model in rows.items():
        torch.save(of_model, directory / name / "inputs.pt")


def run(directory: Path, cases: Sequence[Case], processes: int) -> None:
    write_models(directory)
    for number, case in enumerate(cases):
        torch.save(tuple(process.in_one_process(directory / case.family, case.options)), directory / f"{number}.pt")
    on_all_processes(partial(process.equal_one_process, cases=cases, directory=directory), processes)


def test_combinations_compute_as_one_process(tmp_path: Path) -> None:
    run(tmp_path, QUICK, 4)


@pytest.mark.slow
@pytest.mark.parametrize("processes", MESHES)
def test_every_pair_computes_as_one_process(tmp_path: Path, processes: int) -> None:
    run(tmp_path, thorough(processes), processes)

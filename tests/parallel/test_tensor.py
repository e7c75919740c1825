"""Tensor parallelism on a CPU: two and four processes compute what one does."""

from functools import partial
from pathlib import Path

import pytest

from ligerzoo import AutoModel
from tests.models.tiny import Tiny
from tests.models.zoo import CHECKPOINTS
from tests.parallel import tensor_cases as process
from tests.parallel.spawning import on_all_processes

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

FIRST = {str(tiny.config["model_type"]): tiny for tiny in reversed(CHECKPOINTS)}
GEMMA4 = next(tiny for tiny in CHECKPOINTS if tiny.config["model_type"] == "gemma4_text" and "mixture" in tiny.name)
MIXTURES = (
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "flint", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe_swa",
    "granitemoehybrid", "kimi_linear", "lfm2_moe", "llama4_text", "minimax_m2", "mixtral", "nemotron_h", "olmoe",
    "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe",
)  # fmt: skip
MESHES_OF_EXPERTS = {
    "expert=2": 4,
    "expert=4": 4,
    "replicate=2 expert=2": 4,
    "context=2 expert=2": 4,
    "tensor=2 expert=2": 4,
    "replicate=2 context=2 tensor=2 expert=2": 8,
}
QUICK = ("gemma2", "olmo2", "gpt_oss", "deepseek_v3")
"""Windows and soft caps; norms over all heads; sinks and experts with biases; MLA and shared experts."""


def write(directory: Path, tinies: dict[str, Tiny]) -> None:
    for name, tiny in tinies.items():
        tiny.write(directory / "loaded" / name)
        AutoModel.from_pretrained(directory / "loaded" / name, dtype="float32").save_pretrained(
            directory / "expected" / name
        )


def test_two_processes_compute_as_one(tmp_path: Path) -> None:
    write(tmp_path, {name: FIRST[name] for name in QUICK})
    on_all_processes(partial(process.one_and_all, directory=tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=2", "shard=2 tensor=2", "replicate=2 tensor=2", "context=2 tensor=2"])
def test_every_architecture_computes_as_one(tmp_path: Path, mesh: str) -> None:
    write(tmp_path, {name: tiny for name, tiny in FIRST.items() if name != "mllama"})
    work = partial(process.architectures, directory=tmp_path, mesh=mesh, saves=True)
    on_all_processes(work, processes=4 if " " in mesh else 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, processes", MESHES_OF_EXPERTS.items())
def test_every_mixture_computes_as_one(tmp_path: Path, mesh: str, processes: int) -> None:
    write(tmp_path, {name: FIRST[name] for name in MIXTURES} | {"gemma4_text": GEMMA4})
    work = partial(process.architectures, directory=tmp_path, mesh=mesh, saves=True)
    on_all_processes(work, processes=processes)

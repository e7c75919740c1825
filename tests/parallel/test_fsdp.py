"""Training, loading and saving models that `shard_model` shards, over several processes on a CPU."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo import AutoModel
from tests.models.prompts import image, prompt
from tests.models.tiny import HEAD, Tiny, without
from tests.models.tiny_gemma3 import GEMMA3, IMAGE, with_another_head
from tests.models.tiny_gemma3 import TEXT as GEMMA3_TEXT
from tests.models.tiny_llama import LLAMA
from tests.models.tiny_mixtral import MIXTRAL, ON_THE_HUB
from tests.models.tiny_phi3 import PHI3
from tests.models.tiny_qwen2_vl import CHECKPOINTS as QWEN2_VL
from tests.models.tiny_qwen3_next import QWEN3_NEXT, with_mtp
from tests.parallel import fsdp_cases as process
from tests.parallel.spawning import on_all_processes

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

ODD = {"vocab_size": 103, "intermediate_size": 37}  # uneven shards
TINY = {
    "llama": Tiny("llama", {**LLAMA, **ODD}),
    "tied": Tiny("tied", {**LLAMA, **ODD, "tie_word_embeddings": True}, tensors=without(HEAD)),
    "mixtral": Tiny("mixtral", {**MIXTRAL, "num_local_experts": 5}, tensors=ON_THE_HUB),
    "phi3": Tiny("phi3", {**PHI3, **ODD}),
    "gemma3": Tiny("gemma3", {**GEMMA3, "text_config": {**GEMMA3_TEXT, "tie_word_embeddings": False}}),
    "qwen2-vl": QWEN2_VL[3],
    "qwen3-next": Tiny("qwen3-next", {**QWEN3_NEXT, **ODD, "num_experts": 5, "mlp_only_layers": [0]}, tensors=with_mtp),
}


def batches_of(name: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(process.BATCHES):
        ids = torch.randint(3, 80, (1, 24 + 3 * number), generator=generator)
        batch: dict[str, Any] = {}
        if name == "gemma3":
            ids[:, 2:11] = IMAGE
            batch = {"pixel_values": torch.randn(1, 3, 26, 26, generator=generator)}
        if name == "qwen2-vl":
            torch.manual_seed(number)
            inputs = prompt([[4, image(2, 4), 9 + number]], QWEN2_VL[3].config["vision_config"])
            ids, batch = inputs.ids, inputs.vision
        labels = ids.where(ids < 88, -100)
        labels[:, : 1 + number] = -100
        batches.append({"input_ids": ids, "labels": labels, **batch})
    return batches


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, what saving them again writes, and batches."""
    directory = tmp_path_factory.mktemp("fsdp")
    for name, tiny in TINY.items():
        tiny.write(directory / "loaded" / name)
        model = AutoModel.from_pretrained(directory / "loaded" / name)
        model.save_pretrained(directory / "expected" / name, max_shard_size="20KiB")
        torch.save(batches_of(name), directory / f"{name}.pt")
    return directory


def test_loading_reads_shards_and_saving_writes_the_same_files(directory: Path) -> None:
    on_all_processes(partial(process.load, directory=directory))


def test_gradients_equal_those_of_one_process(directory: Path) -> None:
    on_all_processes(partial(process.train, directory=directory))


def test_shards_and_replicas(directory: Path) -> None:
    on_all_processes(partial(process.replicated, directory=directory), processes=4)


@pytest.mark.parametrize(
    "work",
    [
        process.collectives,
        process.accumulate,
        process.mixed_precision,
        process.packed,
        process.initialize,
        process.release,
    ],
)
def test_steps(work: Any) -> None:
    on_all_processes(work)


def test_generation(directory: Path) -> None:
    on_all_processes(partial(process.generate, directory=directory))


def test_resuming(tmp_path: Path) -> None:
    on_all_processes(partial(process.resume, directory=tmp_path))
    on_all_processes(partial(process.local_states, directory=tmp_path))
    on_all_processes(partial(process.three_processes, directory=tmp_path), processes=3)


def test_errors(directory: Path) -> None:
    another_head = {**GEMMA3, "text_config": {**GEMMA3_TEXT, "tie_word_embeddings": True}}
    Tiny("another head", another_head, tensors=with_another_head).write(directory / "refused" / "another head")
    on_all_processes(partial(process.refuse, directory=directory))


def test_failures_in_one_process(tmp_path: Path) -> None:
    on_all_processes(partial(process.fail, directory=tmp_path))

"""Runs whose rows are divided over processes: the log and the model of one process, with each method."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ligerzoo.train.log import read_log
from tests.parallel.spawning import on_all_processes
from tests.train.grpo_run import grpo_options, write_prompts, write_reward
from tests.train.preference_data import labelled, options, pairs, write
from tests.train.test_grpo import LOW_TOKENS
from tests.train.tiny_run import train, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

UNEQUAL = ("tokens_per_second", "memory_gib", "mfu", "samples", "nll_loss", "eval_nll_loss")
"""Times, texts, and means over tokens, which micro-batches weight by their pairs; so are `logits/`."""


def runs(directory: Path) -> dict[str, dict[str, Any]]:
    """Options of a run of each method on one process."""
    checkpoint = write_checkpoint(directory / "tiny", initializer_range=0.1)
    prompts, reward = write_prompts(directory / "prompts.jsonl"), write_reward(directory / "reward.py", LOW_TOKENS)
    preferences, labels = write(directory / "pairs.jsonl", pairs(12)), write(directory / "labels.jsonl", labelled(12))
    records = [{"prompt": one["prompt"], "completion": one["chosen"]} for one in pairs(12)]
    data = write(directory / "data.jsonl", records)
    cases: dict[str, tuple[Path, dict[str, Any]]] = {
        "sft": (data, {"accumulate": 2, "activation_checkpointing": True, "seq_length": 63}),
        "dpo": (preferences, {"method": "dpo"}),
        "kto": (labels, {"method": "kto", "lr": 3e-3}),
        "orpo": (preferences, {"method": "orpo"}),
        "distill": (data, {"method": "distill", "teacher": str(checkpoint)}),
        "lora": (data, {"lora_rank": 4, "lr": 1e-2}),
    }
    shared: dict[str, Any] = {"max_steps": 2, "eval_every": 2}
    given = {
        name: options(checkpoint, data, directory / f"one {name}", eval_data=(str(data),), **shared, **case)
        for name, (data, case) in cases.items()
    }
    shared |= {"method": "grpo", "eval_data": (str(prompts),), "beta": 0.05}
    given["grpo"] = grpo_options(checkpoint, prompts, reward, directory / "one grpo", **shared)
    return given


def train_all(rank: int, given: list[dict[str, Any]]) -> None:
    for one in given:
        assert train(one) == 0


def compare(directory: Path, names: tuple[str, ...], mesh: str, processes: int, **changes: Any) -> None:
    """Trains in one process, and in several over a mesh."""
    given = {name: case for name, case in runs(directory).items() if name in names}
    for case in given.values():
        assert train(case) == 0
    divided = [
        {**case, "output": str(directory / f"many {name}"), "mesh": mesh, **changes} for name, case in given.items()
    ]
    on_all_processes(partial(train_all, given=divided), processes)
    for name in given:
        one, many = (read_log(directory / f"{which} {name}" / "log.jsonl") for which in ("one", "many"))
        assert [list(entry) for entry in one] == [list(entry) for entry in many]
        for expected, found in zip(one, many, strict=True):
            for column in expected.keys() - set(UNEQUAL):
                if column.endswith("seconds") or ("logits/" in column and changes):
                    continue
                assert found[column] == pytest.approx(expected[column], rel=1e-3, abs=1e-4), (name, column)
        file = "adapter_model.safetensors" if "lora_rank" in given[name] else "model.safetensors"
        alone, shared = (load_file(directory / f"{which} {name}" / file) for which in ("one", "many"))
        for key, weight in alone.items():
            torch.testing.assert_close(shared[key], weight, atol=5e-5, rtol=2e-3)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    compare(tmp_path, ("sft",), "context=2", 2)


@pytest.mark.slow
def test_other_methods(tmp_path: Path) -> None:
    compare(tmp_path, ("dpo", "kto", "orpo", "distill", "lora", "grpo"), "context=2", 2)


@pytest.mark.slow
def test_rows_and_data_are_divided(tmp_path: Path) -> None:
    """Replicas or shards with other data, each of several processes that divide rows."""
    (tmp_path / "shards").mkdir()
    compare(tmp_path / "shards", ("sft", "dpo", "lora"), "shard=2 context=2", 4, batch_size=1)
    (tmp_path / "replicas").mkdir()
    compare(tmp_path / "replicas", ("sft",), "replicate=2 context=2", 4, batch_size=1)

"""The GRPO recipe: it learns, resumes bit for bit, and what it logs, prints and refuses."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import AutoModel, cli
from ligerzoo.errors import ConfigError, DataError, LigerzooError
from ligerzoo.models import Llama, LlamaConfig
from ligerzoo.train import rollouts
from ligerzoo.train.log import read_log
from ligerzoo.train.recipes import grpo
from ligerzoo.train.run_state import RunState
from tests.train.grpo_run import grpo_options, write_prompts, write_reward
from tests.train.test_resume import assert_equal
from tests.train.tiny_run import SIZES, arguments, run_script, write_tokenizer

TIMED = ("seconds", "sampling_seconds", "reward_seconds", "update_seconds", "tokens_per_second", "memory_gib")

LOW_TOKENS = """
def reward(completion_ids, **fields):
    return [sum(token < 64 for token in ids) / len(ids) for ids in completion_ids]
"""
"""The share of a quarter of the tokens."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward(tmp_path_factory.mktemp("reward") / "reward.py", LOW_TOKENS)


def train(given: dict[str, Any]) -> int:
    return grpo.main(grpo.GRPORunOptions(**given))


def steps(output: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k not in TIMED} for entry in read_log(Path(output) / "log.jsonl")]


def weights(output: Any, lora_rank: int | None = None) -> bytes:
    return (Path(output) / ("adapter_model.safetensors" if lora_rank else "model.safetensors")).read_bytes()


def assert_continues(
    run: Callable[[dict[str, Any]], int], whole: dict[str, Any], parts: dict[str, Any], lora_rank: int | None,
    samples_per_step: int,
) -> None:  # fmt: skip
    """Resumes a run of 5 steps that was stopped after 3, and compares all that it wrote with those of a whole run."""
    with (Path(parts["output"]) / "samples.jsonl").open("a") as file:  # of a step after the checkpoint
        file.write('{"step": 4, "prompt": "')
    torch.manual_seed(99)
    assert run({**parts, "resume": True}) == 0
    assert weights(parts["output"], lora_rank) == weights(whole["output"], lora_rank)
    assert steps(parts["output"]) == steps(whole["output"])
    samples = [(Path(given["output"]) / "samples.jsonl").read_text() for given in (whole, parts)]
    assert samples[0] == samples[1]
    expected = [step for step in (1, 2, 4) for _ in range(samples_per_step)]
    assert [json.loads(line)["step"] for line in samples[0].splitlines()] == expected
    states = [
        torch.load(Path(given["output"]) / "checkpoint-5" / "state.pt", weights_only=True) for given in (whole, parts)
    ]
    assert_equal(*states)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        {"loss_type": "grpo", "iterations": 2, "old_logps": "recomputed", "temperature": 0.9, "beta": 0.01},
        pytest.param({"loss_type": "dr_grpo", "scale_rewards": "none"}, marks=pytest.mark.thorough),
        pytest.param(
            {"dtype": "float32", "mixed_precision": True, "activation_checkpointing": True}, marks=pytest.mark.thorough
        ),
        pytest.param(
            {"lora_rank": 8, "lora_targets": ("layers", "lm_head"), "beta": 0.001, "lr": 3e-2},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["default", "iterations", "dr_grpo", "mixed", "lora"],
)
def test_the_reward_rises(
    checkpoint: Path, prompts: Path, reward: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    given = {"max_steps": 20, "prompts": 4, "num_samples": 8, "lr": 1e-2, **changes}
    assert train(grpo_options(checkpoint, prompts, reward, tmp_path / "run", **given)) == 0
    found = [entry["reward"] for entry in steps(tmp_path / "run")]
    assert sum(found[:3]) / 3 < 0.4
    assert sum(found[-3:]) / 3 > 0.75
    assert "polyline" in (tmp_path / "run" / "reward.svg").read_text()


@pytest.mark.parametrize("lora_rank", [None, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_stopped_run_continues_bit_for_bit(
    checkpoint: Path, prompts: Path, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    lora_rank: int | None,
) -> None:  # fmt: skip
    """Weights, optimizer, position in the prompts, random numbers of sampling, log and samples."""
    changes = {
        "max_steps": 5,
        "sample_every": 2,
        "iterations": 2,
        "schedule": "linear",
        "beta": 0.02,
        "lora_rank": lora_rank,
    }
    whole = grpo_options(checkpoint, prompts, reward, tmp_path / "whole", **changes)
    assert train(whole) == 0
    parts = {**whole, "output": str(tmp_path / "parts")}
    with monkeypatch.context() as patch:
        saves = []
        save = RunState.save

        def save_and_fail(self: Any, step: int, *given: Any) -> None:
            save(self, step, *given)
            saves.append(step)
            if step == 3:
                raise KeyboardInterrupt

        patch.setattr(RunState, "save", save_and_fail)
        with pytest.raises(KeyboardInterrupt):
            train({**parts, "save_every": 3})
    assert_continues(train, whole, parts, lora_rank, samples_per_step=8)


def test_what_is_logged(checkpoint: Path, prompts: Path, reward: Path, tmp_path: Path) -> None:
    given = grpo_options(
        checkpoint, prompts, reward, tmp_path / "run", beta=0.1, iterations=2, old_logps="recomputed", lr=1e-2,
        temperature=0.7, prompts=3, sampling_batch=5,
    )  # fmt: skip
    assert train(given) == 0
    entries = read_log(tmp_path / "run" / "log.jsonl")
    assert len(entries) == 4
    for entry in entries:
        assert {"reward", "reward_std", "groups_without_signal", "completion_length", "truncated", "entropy", "kl",
                "clip_ratio/region", "sampler_difference", *TIMED} <= entry.keys()  # fmt: skip
        assert entry["sampler_difference"] < 1e-5
        assert 0 < entry["completion_length"] <= entry["completion_length_max"] <= 8
        parts = entry["sampling_seconds"] + entry["reward_seconds"] + entry["update_seconds"]
        assert parts <= entry["seconds"]
        assert entry["tokens"] > entry["trained_tokens"] > 0
    assert entries[0]["kl"] < entries[-1]["kl"]
    assert entries[0]["entropy"] == pytest.approx(5.5, abs=0.2)  # log 258
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 12
    assert {sample["prompt"] for sample in samples} <= {f"<s>Say {'a' * (n % 5)} {n}:" for n in range(20)}
    mean = sum(sample["reward"] for sample in samples) / 12
    assert entries[0]["reward"] == pytest.approx(mean)


def test_groups_of_equal_rewards_change_nothing(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """No update, and no warning of a loss of 0."""
    constant = write_reward(tmp_path / "reward.py", "def reward(completions): return [0.1] * len(completions)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(grpo_options(checkpoint, prompts, constant, tmp_path / "run", weight_decay=0.1)) == 0
    entries = steps(tmp_path / "run")
    assert [entry["groups_without_signal"] for entry in entries] == [1.0] * 4
    assert {entry["loss"] for entry in entries} == {entry["grad_norm"] for entry in entries} == {0.0}
    assert weights(tmp_path / "run") == weights(checkpoint)


def test_completions_without_signal_are_left_out(
    checkpoint: Path, prompts: Path, reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are those of all completions."""
    pairs = write_reward(
        tmp_path / "pairs.py",
        "def reward(completion_ids, id): return [ids[0] < 128 if n % 2 else 1 for ids, n in zip(completion_ids, id)]",
    )
    given = grpo_options(checkpoint, prompts, pairs, tmp_path / "fewer", max_steps=2, prompts=6)
    assert train(given) == 0
    pack = rollouts.pack_completions
    everything: list[Any] = []
    summarize = grpo.summarize

    def keep(completions: Any, size: int) -> Any:
        everything[:] = completions
        return summarize(completions, size)

    monkeypatch.setattr(grpo, "summarize", keep)
    monkeypatch.setattr(rollouts, "pack_completions", lambda _, **options: pack(everything, **options))
    assert train({**given, "output": str(tmp_path / "all")}) == 0
    fewer, everyone = steps(tmp_path / "fewer"), steps(tmp_path / "all")
    for one, other in zip(fewer, everyone, strict=True):
        assert one["trained_tokens"] < other["trained_tokens"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_truncated_completions_can_be_left_out(checkpoint: Path, prompts: Path, reward: Path, tmp_path: Path) -> None:
    given = grpo_options(checkpoint, prompts, reward, tmp_path / "run", mask_truncated=True, max_steps=2)
    model = AutoModel.from_pretrained(checkpoint)
    (tmp_path / "ends").mkdir()
    model.generation_config["eos_token_id"] = list(range(100))
    model.save_pretrained(tmp_path / "ends")
    write_tokenizer(tmp_path / "ends")
    assert train(given) == 0
    assert train({**given, "model": str(tmp_path / "ends"), "output": str(tmp_path / "other")}) == 0
    for entry in steps(tmp_path / "run"):
        assert entry["truncated"] > 0.5
        assert entry["trained_tokens"] < 0.5 * 8 * entry["completion_length"]
    assert all(entry["truncated"] < 0.5 and entry["trained_tokens"] for entry in steps(tmp_path / "other"))


def test_empty_completions(prompts: Path, tmp_path: Path) -> None:
    """A model that ends at once: the end-of-sequence token is the completion, and its text is empty."""
    write_tokenizer(tmp_path / "silent")
    model = Llama(LlamaConfig(**{**SIZES, "tie_word_embeddings": False}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_("norm" in name or "embed" in name)
        model.lm_head.weight[257] = 1
    model.save_pretrained(tmp_path / "silent")
    source = "def reward(completions, completion_ids, id):\n    assert set(completions) == {''}\n    return [*range(8)]"
    reward = write_reward(tmp_path / "reward.py", source)
    assert train(grpo_options(tmp_path / "silent", prompts, reward, tmp_path / "run", max_steps=2)) == 0
    for entry in steps(tmp_path / "run"):
        assert entry["completion_length"] == 1
        assert entry["truncated"] == 0
        assert entry["trained_tokens"] == 8


# Before training


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_long_prompt_is_named(checkpoint: Path, reward: Path, tmp_path: Path, dry_run: bool) -> None:
    file = write_prompts(tmp_path / "prompts.jsonl", 3)
    with file.open("a") as stream:
        stream.write(json.dumps({"prompt": "a" * 60, "answer": "", "id": 0}) + "\n")
    expected = rf"{file}:4: the sample is too long; got 61 tokens; expected at most 56\. Shorten it.* max_new_tokens"
    with pytest.raises(DataError, match=expected):
        train(grpo_options(checkpoint, file, reward, tmp_path / "run", dry_run=dry_run))


def test_evaluation_prompts_are_checked_before_the_first_step(
    checkpoint: Path, prompts: Path, reward: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="no such file or directory"):
        train(grpo_options(checkpoint, prompts, reward, tmp_path / "run", eval_data=(str(tmp_path / "missing.jsonl"),)))
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_completions_with_rewards(
    checkpoint: Path, prompts: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = grpo_options(checkpoint, prompts, reward, tmp_path / "run")
    assert cli.main([*arguments({**given, "method": "grpo"}), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "4 steps of 2 prompts x 4 completions" in shown
    assert "Log-probabilities of sampling are not exact" in shown
    assert shown.count("\n  reward 0") == 2
    assert not (tmp_path / "run").exists()


def test_a_reward_error_of_the_command_is_one_line(
    checkpoint: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = write_reward(tmp_path / "reward.py", "def reward(completions): return [float('nan')] * len(completions)")
    given = grpo_options(checkpoint, prompts, reward, tmp_path / "run")
    assert cli.main(arguments({**given, "method": "grpo"})) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"ligerzoo: error: {reward}:reward, for a completion of {prompts}:")
    assert "the reward is not a finite number; got nan" in last


def test_exact_sampling_is_refused_with_the_reason(
    checkpoint: Path, prompts: Path, reward: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"option exact: .*Hopper GPU.*Use --exact auto"):
        train(grpo_options(checkpoint, prompts, reward, tmp_path / "run", exact="on"))


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ({"num_samples": 1}, "option num_samples: too few; got 1; expected at least 2"),
        ({"max_new_tokens": 63}, "option seq_length: too small; got 64; expected at least 65"),
        ({"dora": True}, "option lora_rank: is needed by the other options of adapters"),
        ({"epochs": 2}, "options max_steps and epochs: only one"),
        ({"epsilon": 1.5}, "option epsilon: invalid value; got 1.5; expected a number from 0 to 1"),
        ({"loss_type": "sapo", "epsilon": 0.1}, "option loss_type: GRPO: epsilon=0.1 with variant='sapo'"),
        ({"loss_type": "vespo", "epsilon_high": 0.3}, "option loss_type: GRPO: epsilon_high=0.3 with variant='vespo'"),
    ],
)
def test_invalid_options(
    checkpoint: Path, prompts: Path, reward: Path, tmp_path: Path, wrong: dict[str, Any], expected: str
) -> None:
    with pytest.raises(LigerzooError) as raised:
        grpo.GRPORunOptions(**grpo_options(checkpoint, prompts, reward, tmp_path, **wrong))
    assert str(raised.value).startswith(expected)


def test_the_printed_recipe_gives_the_same_weights(
    checkpoint: Path, prompts: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**grpo_options(checkpoint, prompts, reward, tmp_path / "command", max_steps=None), "epochs": 1}
    line = arguments({**given, "method": "grpo", "prompts": 8})
    assert cli.main([*line, "--print-recipe"]) == 0
    (tmp_path / "recipe.py").write_text(capsys.readouterr().out)
    assert cli.main(line) == 0
    assert len(steps(tmp_path / "command")) == 3  # 20 prompts
    run_script(tmp_path / "recipe.py", "--output", str(tmp_path / "script"))
    assert weights(tmp_path / "script") == weights(tmp_path / "command")

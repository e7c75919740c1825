"""`ligerzoo train --method reward`: TRL's losses and gradients, adapters, resuming, and rewards of GRPO."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ligerzoo import AutoModelForSequenceClassification, Tokenizer, cli
from ligerzoo.errors import LigerzooError
from ligerzoo.losses import reward_loss
from ligerzoo.train.data import open_data
from ligerzoo.train.data.samples import PreferenceSample, as_state, from_state
from ligerzoo.train.log import RunLog, read_log
from tests.parallel.spawning import on_all_processes
from tests.train import tiny_run
from tests.train.preference_data import options, pairs, write
from tests.train.test_resume import untimed_log
from tests.train.tiny_run import train, write_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*missing parameters, which keep their initialization:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*return_outputs=True.*:FutureWarning"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.1)


def entries(output: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_log(output / "log.jsonl") if "loss" in entry]


def classifier(checkpoint: Path, directory: Path, **changes: Any) -> Path:
    """Writes a classifier with one label, and its tokenizer, which has a padding token where `changes` say so."""
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1, **changes)
    with torch.no_grad():
        model.score.weight.normal_(std=0.3)
    model.save_pretrained(directory)
    tiny_run.write_tokenizer(directory)
    return directory


def test_the_formula() -> None:
    chosen, rejected, margins = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    loss, metrics = reward_loss(chosen, rejected, margins.detach(), center_weight=0.3)
    parts = [
        -torch.log(1 / (1 + torch.exp(-(c - r - m)))) + 0.3 * (c + r) ** 2
        for c, r, m in zip(chosen, rejected, margins, strict=True)
    ]
    torch.testing.assert_close(loss, torch.stack(parts).mean())
    assert metrics["rewards/accuracies"].item() == (chosen > rejected).double().mean().item()
    assert metrics["rewards/margins"].item() == pytest.approx((chosen - rejected).mean().item())
    of_step = reward_loss(chosen, rejected, margins, center_weight=0.3, num_items=10)
    torch.testing.assert_close(5 * loss, 10 * of_step.loss)
    with pytest.raises(LigerzooError, match=r"reward_loss: rejected has shape \(4,\); expected \(5,\)"):
        reward_loss(chosen, rejected[:4])
    with pytest.raises(LigerzooError, match="center_weight=-1"):
        reward_loss(chosen, rejected, center_weight=-1)


STEPS, PER_STEP = 3, 4


@pytest.mark.parametrize("case", ["plain", "margin, centered"])
def test_training_is_that_of_trl(case: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    source, has_margin = random.Random(0), case != "plain"
    rows = []
    for _ in range(STEPS * PER_STEP):  # each pair has 36 tokens, so that a step is one row
        length = source.randint(3, 17)
        texts = ("".join(source.choices("abcdefgh ", k=k)) for k in (6, length, 20 - length))
        margin = {"margin": source.random()} if has_margin else {}
        rows.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)) | margin)
    model = classifier(checkpoint, tmp_path / "model")
    data = write(tmp_path / "data.jsonl", rows)
    seen: list[dict[str, Any]] = []
    log_step = RunLog.step

    def recorded(self: Any, step: int, **values: Any) -> None:
        lines = dict.fromkeys(line for batch in values["batches"] for line in batch.sources)
        seen.extend(rows[int(line.rpartition(":")[2]) - 1] for line in lines)
        log_step(self, step, **values)

    monkeypatch.setattr(RunLog, "step", recorded)
    center = 0.1 if has_margin else 0.0
    given = options(
        model, data, tmp_path / "run", method="reward", seq_length=36 * PER_STEP, batch_size=1, max_steps=STEPS,
        lr=1e-3, schedule="constant", warmup=0.0, center_weight=center,
    )  # fmt: skip
    assert train(given) == 0
    ours = entries(tmp_path / "run")
    assert len(seen) == STEPS * PER_STEP
    config = trl.RewardConfig(
        str(tmp_path / "trl"), max_steps=STEPS, per_device_train_batch_size=PER_STEP, logging_steps=1, report_to=[],
        save_strategy="no", learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.0, use_cpu=True,
        bf16=False, disable_tqdm=True, train_sampling_strategy="sequential", gradient_checkpointing=False,
        max_length=None, center_rewards_coefficient=center or None,
    )  # fmt: skip
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(model, pad_token="</s>")
    trainer = trl.RewardTrainer(
        theirs, config, train_dataset=datasets.Dataset.from_list(seen), processing_class=tokenizer
    )
    trainer.train()
    expected = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    names = {"loss": "loss", "grad_norm": "grad_norm", "rewards/accuracies": "accuracy", "rewards/margins": "margin"}
    for one, other in zip(ours, expected, strict=True):
        for name, their_name in names.items():
            assert one[name] == pytest.approx(other[their_name], rel=1e-4, abs=1e-5), name
    last = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").state_dict()
    trainer.save_model(str(tmp_path / "theirs"))
    for name, weight in AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs").state_dict().items():
        torch.testing.assert_close(last[name], weight, rtol=0, atol=1e-4)


def scores(load: Any, directory: Path) -> Tensor:
    """Rewards of two texts of different lengths, in a padded batch."""
    model = load.from_pretrained(directory).eval()
    pad = model.config.pad_token_id
    ids = torch.tensor([[256, 10, 20, 30, 40], [256, 50, 60, pad, pad]])
    with torch.no_grad():
        return model(ids, attention_mask=(ids != pad).long()).logits[:, 0]  # type: ignore[no-any-return]


def test_a_language_model_becomes_a_reward_model(checkpoint: Path, tmp_path: Path) -> None:
    """It prefers the chosen completions, transformers reads the same rewards, and a resumed run has the same bits."""
    data = write(tmp_path / "data.jsonl", pairs())
    given = options(
        checkpoint, data, tmp_path / "run", method="reward", max_steps=12, lr=3e-3, eval_data=(str(data),), save_every=6
    )
    assert cli.main(tiny_run.arguments(given)) == 0
    log = read_log(tmp_path / "run" / "log.jsonl")
    assert entries(tmp_path / "run")[-1]["rewards/accuracies"] == 1
    assert log[-1]["eval_rewards/accuracies"] > 0.95
    assert log[-1]["eval_rewards/margins"] > 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]
    torch.testing.assert_close(
        scores(AutoModelForSequenceClassification, tmp_path / "run"),
        scores(transformers.AutoModelForSequenceClassification, tmp_path / "run"),
        rtol=1e-5,
        atol=1e-5,
    )
    parts = {**given, "output": str(tmp_path / "parts")}
    (tmp_path / "parts").mkdir()
    (tmp_path / "run" / "checkpoint-6").rename(tmp_path / "parts" / "checkpoint-6")
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "parts" / "log.jsonl").write_text("".join(lines[:6]))
    assert train({**parts, "resume": True}) == 0
    assert (tmp_path / "parts/model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()
    assert untimed_log(tmp_path / "parts") == untimed_log(tmp_path / "run")


def test_adapters(checkpoint: Path, tmp_path: Path) -> None:
    """The head trains in full, and PEFT loads both."""
    peft = pytest.importorskip("peft")
    data = write(tmp_path / "data.jsonl", pairs())
    given = options(
        checkpoint, data, tmp_path / "run", method="reward", max_steps=3, lr=1e-2, lora_rank=2, lora_targets=("q_proj",)
    )
    assert train(given) == 0
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "run").eval()
    assert adapted(torch.tensor([[256, 10]])).logits.abs() > 0


def test_rewards_of_grpo(checkpoint: Path, tmp_path: Path) -> None:
    """The completions that GRPO samples have the rewards of the model that --reward names."""
    reward = classifier(checkpoint, tmp_path / "reward", pad_token_id=0)
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "a liger"}, {"prompt": "a lion is"}])
    given = tiny_run.options(
        checkpoint, prompts, tmp_path / "run", method="grpo", reward=str(reward), max_steps=1, prompts=2,
        num_samples=2, max_new_tokens=6, seq_length=64,
    )  # fmt: skip
    del given["batch_size"]
    assert train(given) == 0
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(reward), Tokenizer.from_pretrained(reward)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4
    for sample in samples:
        ids = torch.tensor([[*tokenizer.encode(sample["prompt"].removeprefix("<s>") + sample["completion"]), 257]])
        with torch.no_grad():
            assert sample["reward"] == pytest.approx(model(ids).logits.item(), abs=1e-5)


def test_margins_of_records(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    record = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = [{**record, "margin": 0.5}, record]
    samples = [*open_data(rows, "preference", tokenizer, seq_length=64, shuffle=False, epochs=1)]
    assert all(isinstance(sample, PreferenceSample) and from_state(as_state(sample)) == sample for sample in samples)
    assert [sample.margin for sample in samples if isinstance(sample, PreferenceSample)] == [0.5, 0.0]
    data = write(tmp_path / "data.jsonl", [{**record, "margin": "large"}])
    with pytest.raises(LigerzooError, match=r"data\.jsonl:1: .*margin"):
        list(open_data(data, "preference", tokenizer, seq_length=64))


def test_wrong_uses_are_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "data.jsonl", pairs(4))
    given = options(checkpoint, data, tmp_path / "run", method="reward", mesh="tensor=2")
    assert cli.main(tiny_run.arguments(given)) != 0
    assert "of reward models has the axes replicate and shard only" in capsys.readouterr().err
    three = tmp_path / "three"
    AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=3).save_pretrained(three)
    tiny_run.write_tokenizer(three)
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "a liger"}])
    grpo = tiny_run.options(checkpoint, prompts, tmp_path / "grpo", method="grpo", reward=str(three), max_new_tokens=6)
    del grpo["batch_size"]
    assert cli.main(tiny_run.arguments(grpo)) != 0
    assert "not a reward model; got 3 labels; expected a decoder with one label" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("case", [{"accumulate": 2}, {"lora_rank": 2, "lr": 1e-2}], ids=["all weights", "adapters"])
def test_two_processes_train_as_one(case: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", pairs(27))  # at the end, the second process has an empty batch
    case = {**case, "method": "reward", "max_steps": None, "epochs": 1, "eval_data": (str(data),)}
    assert train(options(checkpoint, data, tmp_path / "one", batch_size=2, **case)) == 0
    given = options(checkpoint, data, tmp_path / "two", batch_size=1, **case)
    on_all_processes(partial(train_in_process, given=given))
    for one, two in zip(*(read_log(tmp_path / name / "log.jsonl") for name in ("one", "two")), strict=True):
        assert list(one) == list(two)
        for name, value in one.items():
            if name not in ("seconds", "tokens_per_second", "memory_gib", "mfu"):
                assert two[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def train_in_process(rank: int, given: dict[str, Any]) -> None:
    assert train(given) == 0

"""The recipe of distillation: its loss, stopping and resuming, and the teachers that it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import AutoModel, Tokenizer, cli
from ligerzoo.errors import ConfigError
from ligerzoo.train.data import PackedBatches, open_data
from ligerzoo.train.log import read_log
from ligerzoo.train.recipes import distill
from tests.train.preference_data import options
from tests.train.test_resume import assert_equal, stop_after, untimed_log
from tests.train.tiny_run import arguments, write_checkpoint


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with more features, and padded rows of the vocabulary."""
    changes = {"hidden_size": 64, "initializer_range": 0.2, "vocab_size": 264}
    return write_checkpoint(tmp_path_factory.mktemp("teacher") / "llama", **changes)


def train(given: dict[str, Any]) -> list[dict[str, Any]]:
    assert distill.main(distill.DistillRunOptions(**given)) == 0
    return read_log(Path(given["output"]) / "log.jsonl")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        {"divergence": "forward_kl", "temperature": 2.0, "hard_weight": 0.01},
    ],
    ids=str,
)
def test_the_student_approaches_the_teacher(
    changes: dict[str, Any], checkpoint: Path, teacher: Path, data: Path, tmp_path: Path
) -> None:
    given = options(
        checkpoint,
        data,
        tmp_path / "run",
        teacher=str(teacher),
        max_steps=60,
        lr=1e-2,
        eval_data=(str(data),),
        **changes,
    )
    log = train(given)
    first, evaluation = log[0], log[-1]
    assert evaluation["eval_soft_loss"] < 0.7 * first["soft_loss"]
    hard = first.get("hard_loss", 0.0)
    assert first["loss"] == pytest.approx(first["soft_loss"] + given.get("hard_weight", 0.0) * hard, rel=1e-5)
    assert len(log[-1]["samples"]) == 2


def test_the_loss_of_a_step_is_the_mean_divergence_of_its_trained_tokens(
    checkpoint: Path, teacher: Path, data: Path, tmp_path: Path
) -> None:
    given = options(
        checkpoint, data, tmp_path / "run", teacher=str(teacher), max_steps=1, accumulate=3, divergence="reverse_kl"
    )
    (entry,) = train(given)
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    stream = open_data((str(data),), "auto", tokenizer, seq_length=128, seed=0)
    batches = PackedBatches(stream, batch_size=2, seq_length=128, pad_token_id=257)
    total, count = 0.0, 0
    student, other = (AutoModel.from_pretrained(path) for path in (checkpoint, teacher))
    for _ in range(3):
        for row in next(batches).rows:
            for sample in row:
                (segment,) = sample.segments
                ids = torch.tensor([segment.input_ids])
                with torch.no_grad():
                    logits = [m(ids).logits[0, :-1, :258].double() for m in (student, other)]
                p, q = (one.log_softmax(-1) for one in logits)
                trained = torch.tensor(segment.labels[1:]) != -100
                total += (p.exp() * (p - q)).sum(-1)[trained].sum().item()
                count += int(trained.sum())
    assert entry["trained_tokens"] == count
    assert entry["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.thorough  # a teacher has no state
def test_a_stopped_run_continues_bit_for_bit(
    checkpoint: Path, teacher: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(name: str, **more: Any) -> dict[str, Any]:
        return options(checkpoint, data, tmp_path / name, teacher=str(teacher), max_steps=5, lora_rank=2, **more)

    train(given("whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert distill.main(distill.DistillRunOptions(**given("stopped"))) == 130
    train(given("stopped", resume=True))
    outputs = [tmp_path / output for output in ("stopped", "whole")]
    weights = [(output / "adapter_model.safetensors").read_bytes() for output in outputs]
    assert weights[0] == weights[1]
    assert untimed_log(outputs[0]) == untimed_log(outputs[1])
    assert_equal(*(torch.load(output / "checkpoint-5" / "state.pt", weights_only=True) for output in outputs))


def test_a_config_becomes_a_new_student(checkpoint: Path, teacher: Path, data: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    given = options(
        tmp_path / "config.json",
        data,
        tmp_path / "run",
        teacher=str(teacher),
        tokenizer=str(teacher),
        max_steps=2,
        method="distill",
    )
    assert cli.main(arguments(given)) == 0
    assert AutoModel.from_pretrained(tmp_path / "run").config.num_hidden_layers == 1


def test_other_tokens_are_refused(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    given = options(checkpoint, data, tmp_path / "run", teacher=str(other))
    first = min(vocabulary["a"], vocabulary["b"])
    message = f"teacher {other}, token {first}: the teacher has another vocabulary than the student: 2 token ids differ"
    with pytest.raises(ConfigError) as raised:
        distill.main(distill.DistillRunOptions(**given))
    assert str(raised.value).startswith(message)


def test_a_smaller_vocabulary_is_refused(data: Path, teacher: Path, checkpoint: Path, tmp_path: Path) -> None:
    given = options(teacher, data, tmp_path / "run", teacher=str(checkpoint))
    with pytest.raises(
        ConfigError, match=r"vocabulary is smaller than the student's; got vocab_size 258; expected 264"
    ):
        distill.main(distill.DistillRunOptions(**given))


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"divergence": "tvd", "beta": 0.3}, "option divergence: Distillation: beta=0.3"),
        ({"lora_alpha": 4.0}, "option lora_rank"),
        ({"mixed_precision": True}, "option mixed_precision: needs dtype=float32"),
    ],
)
def test_invalid_options(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        distill.DistillRunOptions(**options(tmp_path, tmp_path, tmp_path, teacher="teacher", **changes))
    assert str(raised.value).startswith(expected)

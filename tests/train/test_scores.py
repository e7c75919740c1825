"""Scores on held-out data, against transformers' model, one sequence at a time."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import AutoModel, Tokenizer, adapters, cli
from ligerzoo.errors import DataError, LigerzooError
from ligerzoo.models import Gemma2, Gemma2Config, Llama, LlamaConfig, Mixtral, MixtralConfig
from ligerzoo.train.data import open_data
from ligerzoo.train.scores import TokenScores, score_data
from tests.train.data_helpers import GENERATION, byte_level, chat, files_of, write_lines
from tests.train.tiny_run import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")

T = 40
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog,",
    "and",
    "naïve",
    "猫",
    "mind",
    "yes",
    "no",
]


def words(first: int, count: int) -> str:
    return " ".join(WORDS[(first * 7 + i * i) % len(WORDS)] for i in range(count))


RECORDS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": words(i, 2 + 9 * (i % 4))} for i in range(9)],
    "completion": [{"prompt": words(i, 3), "completion": " " + words(i + 1, 1 + i % 5)} for i in range(9)],
    "chat": [chat(words(i, 2), words(i + 1, 3), words(i, 1), words(i + 2, 2)) for i in range(6)],
    "preference": [
        {"prompt": words(i, 3), "chosen": " " + words(i + 1, 1 + i % 4), "rejected": " " + words(i + 2, 2)}
        for i in range(8)
    ],
    "labelled": [{"prompt": words(i, 3), "completion": " " + words(i, 2), "label": i % 3 > 0} for i in range(8)],
}


def model_class(name: str) -> tuple[Any, Any, dict[str, Any]]:
    return {
        "llama": (Llama, LlamaConfig, {}),
        "gemma2": (Gemma2, Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 5.0}),
        "mixtral": (Mixtral, MixtralConfig, {"output_router_logits": True}),
    }[name]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("scores")
    torch.manual_seed(0)
    for name in ("llama", "gemma2", "mixtral"):
        kind, config_class, extra = model_class(name)
        config = config_class(
            vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.2, **extra,
        )  # fmt: skip
        kind(config).save_pretrained(root / name)
        for file, content in files_of(byte_level(), GENERATION).items():
            (root / name / file).write_bytes(content)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(params=RECORDS)
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_lines(tmp_path / f"{request.param}.jsonl", RECORDS[request.param])


def expected_scores(checkpoint: Path, data: Path, kind: str) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Returns sums of log-probability, correct tokens, tokens and bytes by group, and those of each sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    sums: dict[str, list[float]] = {}
    each = []
    long = 2**20 if kind == "text" else T
    for sample in open_data(data, kind, tokenizer, seq_length=long, shuffle=False, epochs=1):
        groups = {"preference": ["chosen", "rejected"]}.get(kind, ["all"])
        if kind == "labelled":
            groups = ["desirable" if sample.is_desirable else "undesirable"]
        for group, one in zip(groups, sample.segments, strict=True):
            ids, labels = torch.tensor([one.input_ids]), torch.tensor(one.labels)
            found = [0.0, 0.0, 0.0, 0.0]
            for first in range(0, max(1, len(one.input_ids) - 1), T - 1):
                piece = slice(first, first + T)
                with torch.no_grad():
                    logps = model(ids[:, piece]).logits[0].double().log_softmax(-1)
                for row, label in zip(logps, labels[piece][1:].tolist()):  # noqa: B905
                    if label != -100:
                        text = tokenizer.decode([label], skip_special_tokens=True)
                        size = len(tokenizer.id_to_token(label)) if text else 0  # a character of the spelling is a byte
                        found = [a + b for a, b in zip(found, [row[label].item(), row.argmax() == label, 1, size])]  # noqa: B905
            each.append([float(number) for number in found])
            sums[group] = [a + float(b) for a, b in zip(sums.get(group, [0.0] * 4), found)]  # noqa: B905
    return sums, each


def assert_scores(found: TokenScores, expected: list[float]) -> None:
    logp, correct, tokens, size = expected
    assert (found.tokens, found.bytes) == (tokens, size)
    assert found.token_accuracy == pytest.approx(correct / tokens, abs=1e-12)
    assert found.loss == pytest.approx(-logp / tokens, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(-logp / tokens), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(-logp / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_scores_are_those_of_transformers(checkpoints: dict[str, Path], data: Path, name: str) -> None:
    checkpoint, kind = checkpoints[name], data.stem
    expected, each = expected_scores(checkpoint, data, kind)
    model, tokenizer = AutoModel.from_pretrained(checkpoint), Tokenizer.from_pretrained(checkpoint)
    model.train()
    for batch_size in (1, 3):
        found = score_data(model, tokenizer, data, "auto", seq_length=T, batch_size=batch_size)
        assert found.kind == kind
        assert found.tokens.keys() == expected.keys()
        for group, scores in found.tokens.items():
            assert_scores(scores, expected[group])
        if kind == "preference":
            pairs = [(a[0] - b[0], a[0] / a[2] - b[0] / b[2]) for a, b in zip(each[::2], each[1::2], strict=True)]
            assert found.pairs is not None
            assert found.pairs.pairs == len(pairs)
            assert found.pairs.accuracy == sum(a > 0 for a, _ in pairs) / len(pairs)
            assert found.pairs.accuracy_per_token == sum(b > 0 for _, b in pairs) / len(pairs)
            assert found.pairs.margin == pytest.approx(sum(a for a, _ in pairs) / len(pairs), rel=1e-5, abs=1e-5)
    assert model.training


def test_bytes_are_those_of_the_text(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """With a beginning-of-sequence token, all tokens of a text are predicted."""
    model, tokenizer = (load.from_pretrained(checkpoints["llama"]) for load in (AutoModel, Tokenizer))
    text = "naïve 猫\n\u2003 🦁 \x01!"
    found = score_data(model, tokenizer, [{"text": text}] * 3, seq_length=16).tokens["all"]
    assert found.bytes == 3 * len(text.encode())


def test_both_sequences_of_a_pair_must_fit(checkpoints: dict[str, Path]) -> None:
    model, tokenizer = (load.from_pretrained(checkpoints["llama"]) for load in (AutoModel, Tokenizer))
    pair = {"prompt": words(1, 8), "chosen": " yes", "rejected": " no no"}
    lengths = [
        len(one.input_ids)
        for one in next(open_data([pair], "auto", tokenizer, seq_length=999, epochs=1)).segments  # type: ignore[union-attr]
    ]
    assert score_data(model, tokenizer, [pair], seq_length=sum(lengths)).tokens["chosen"].sequences == 1
    with pytest.raises(DataError, match="the sample is too long"):
        score_data(model, tokenizer, [pair], seq_length=sum(lengths) - 1)


def test_records_that_are_too_long_are_counted(checkpoints: dict[str, Path]) -> None:
    model, tokenizer = (load.from_pretrained(checkpoints["llama"]) for load in (AutoModel, Tokenizer))
    short, long = {"prompt": "a", "completion": " b"}, {"prompt": words(1, 30), "completion": " b"}
    options: dict[str, Any] = {"seq_length": 8, "too_long": "drop"}
    found = score_data(model, tokenizer, [long, short, long], **options)
    assert (found.tokens["all"].sequences, found.dropped, found.as_json()["dropped"]) == (1, 2, 2)
    assert str(found).startswith("records not scored   2 ")
    with pytest.raises(DataError, match="the data has no samples"):
        score_data(model, tokenizer, [long], **options)


def test_what_is_refused(checkpoints: dict[str, Path]) -> None:
    model, tokenizer = (load.from_pretrained(checkpoints["llama"]) for load in (AutoModel, Tokenizer))
    with pytest.raises(DataError, match="prompts have no labels"):
        score_data(model, tokenizer, [{"prompt": "Hello"}], seq_length=8)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(float("nan"))
    with pytest.raises(LigerzooError, match=r"^dataset\[0\]: the loss is not a finite number; got nan"):
        score_data(model, tokenizer, [{"text": "Hello"}], seq_length=8)


# The command


def evaluate(capsys: Any, *arguments: str, code: int = 0) -> str:
    assert cli.main(["evaluate", *arguments, "--device", "cpu"]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_command(checkpoints: dict[str, Path], data: Path, capsys: Any) -> None:
    line = [str(checkpoints["llama"]), "--data", str(data), "--seq-length", str(T)]
    model, tokenizer = (load.from_pretrained(checkpoints["llama"]) for load in (AutoModel, Tokenizer))
    expected = score_data(model, tokenizer, data, seq_length=T)
    assert json.loads(evaluate(capsys, *line, "--json")) == expected.as_json()
    assert evaluate(capsys, *line, "--batch-size", "2").splitlines()[0] == str(expected).splitlines()[0]


def test_command_with_an_adapter(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    data = write_lines(tmp_path / "text.jsonl", [{"text": "a liger"}])
    model = AutoModel.from_pretrained(checkpoint)
    adapters.add_lora(model, rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_()
    adapters.save_adapter(model, tmp_path / "adapter", base_model=checkpoint)
    expected = score_data(model, Tokenizer.from_pretrained(checkpoint), data, seq_length=32).tokens["all"].loss
    line = (str(checkpoint), "--data", str(data), "--seq-length", "32", "--json")
    found = json.loads(evaluate(capsys, *line, "--adapter", str(tmp_path / "adapter")))
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["loss"] != pytest.approx(json.loads(evaluate(capsys, *line))["loss"], rel=1e-3)


def test_all_data_is_checked_before_the_model_is_loaded(tmp_path: Path, capsys: Any) -> None:
    checkpoint = write_checkpoint(tmp_path / "llama")
    (checkpoint / "model.safetensors").unlink()
    data = write_lines(tmp_path / "bad.jsonl", [{"text": "good"}, "{", {"text": ""}])
    message = evaluate(capsys, str(checkpoint), "--data", str(data), code=1)
    assert message.count("\n") == 2  # one line for each
    assert "bad.jsonl:2: broken JSON" in message
    assert "bad.jsonl:3: text is empty" in message


def test_data_or_tasks_are_required(checkpoint: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evaluate", str(checkpoint)])
    assert "one of the arguments --data --tasks is required" in capsys.readouterr().err

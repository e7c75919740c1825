"""The recipe of contrastive learning: its gradient, runs that stop and continue, processes, and its data."""

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ligerzoo import AutoModelForEmbedding, Tokenizer, cli
from ligerzoo.adapters import load_adapter
from ligerzoo.errors import ConfigError, DataError
from ligerzoo.losses.contrastive import reference
from ligerzoo.models.embedding import PoolingStage
from ligerzoo.train.data import open_data
from ligerzoo.train.data.read_all import read_texts
from ligerzoo.train.log import read_log
from ligerzoo.train.pairs import TextRow
from ligerzoo.train.recipes import contrastive
from tests.parallel.spawning import on_all_processes
from tests.train import tiny_run
from tests.train.test_resume import TIMED, assert_equal, stop_after, untimed_log
from tests.train.tiny_run import arguments, options, run_script, write_checkpoint

WORDS = ["liger", "lion", "tiger", "is", "a", "large", "cat", "hybrid", "of", "and", "the", "bird"]


def write_pairs(file: Path, count: int = 40, *, negatives: int = 0, seed: int = 0) -> Path:
    """Writes queries of two words with documents that begin with these, and other negatives."""
    source = random.Random(seed)

    def text(most: int) -> str:
        return " ".join(source.choices(WORDS, k=source.randint(1, most)))

    def record() -> dict[str, Any]:
        query = text(2)
        others = {f"negative_{index + 1}": text(5) for index in range(negatives)}
        return {"anchor": query, "positive": f"{query} {text(4)}", **others}

    file.write_text("".join(json.dumps(record()) + "\n" for _ in range(count)))
    return file


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", negatives=2)


def given_options(checkpoint: Path, pairs: Path, output: Path, /, **changes: Any) -> dict[str, Any]:
    given = {"method": "contrastive", "pooling": "mean", "pairs": 8, "batch_size": 1, "seq_length": 48, **changes}
    return options(checkpoint, pairs, output, **given)


def train(given: dict[str, Any]) -> list[dict[str, Any]]:
    assert contrastive.main(contrastive.ContrastiveRunOptions(**given)) == 0
    return read_log(Path(given["output"]) / "log.jsonl")


def test_queries_find_their_documents(checkpoint: Path, pairs: Path, tmp_path: Path) -> None:
    given = given_options(
        checkpoint, pairs, tmp_path / "run", max_steps=10, lr=3e-3, eval_data=(str(pairs),), query_prompt="q: ", ema=0.5
    )
    *steps, last, evaluation = train(given)
    assert last["loss"] < 0.7 * steps[0]["loss"]
    assert evaluation["eval_loss"] < steps[0]["loss"]
    assert 0.2 < evaluation["eval_accuracy"] < evaluation["eval_mrr"] <= 1
    assert evaluation["eval_pairs"] == 40
    model = AutoModelForEmbedding.from_pretrained(tmp_path / "run")
    assert model.settings.stages[0].modes == ("mean",)
    assert torch.equal(model.encode("a", prompt_name="query"), model.encode("q: a"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch_size": 100},
        {"loss_type": "qwen3", "dims": (32, 8)},
        pytest.param({"loss_type": "symmetric"}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_step_has_the_gradient_of_all_texts_at_once(
    changes: dict[str, Any], checkpoint: Path, pairs: Path, tmp_path: Path
) -> None:
    """Each text alone in a row, and the loss of plain torch."""
    (entry,) = train(given_options(checkpoint, pairs, tmp_path / "run", max_steps=1, document_prompt="d: ", **changes))
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    stream = open_data((str(pairs),), "pair", tokenizer, seq_length=48, too_long="truncate", document_prompt="d: ")
    samples: list[Any] = [next(stream) for _ in range(8)]
    model = AutoModelForEmbedding.from_pretrained(checkpoint, pooling="mean")
    negatives = [one for sample in samples for one in sample.negatives]
    kinds = [[s.query for s in samples], [s.positive for s in samples], negatives]
    q, p, n = (torch.cat([model(torch.tensor([one.input_ids])) for one in kind]) for kind in kinds)
    assert entry["trained_tokens"] == sum(len(one.input_ids) for kind in kinds for one in kind)
    options = contrastive.ContrastiveRunOptions(**given_options(checkpoint, pairs, tmp_path, **changes)).loss().options
    sizes = options.pop("dims", None) or (32,)
    numbers: dict[Any, int] = {}
    ids = [
        torch.tensor([numbers.setdefault((index > 0, *one.input_ids), len(numbers)) for one in kind])
        for index, kind in enumerate(kinds)
    ]
    given = {"query_ids": ids[0], "positive_ids": ids[1], "negative_ids": ids[2].view(8, 2), **options}
    parts = [reference(q[:, :d], p[:, :d], n[:, :d].view(8, 2, d), **given) for d in sizes]
    loss = torch.stack(parts).sum()
    loss.backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
    assert entry["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert entry["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_prompts_that_are_not_pooled_and_lower_case(checkpoint: Path, tmp_path: Path) -> None:
    """Queries and documents do not share rows, since a row has prompts of one length."""
    base = AutoModelForEmbedding.from_pretrained(checkpoint, pooling="mean", lowercase=True)
    settings = replace(
        base.settings, stages=(PoolingStage(include_prompt=False),), prompts={"query": "q: ", "passage": "text: "}
    )
    model = AutoModelForEmbedding.from_config(base.config, settings)
    model.load_state_dict(base.state_dict())
    model.save_pretrained(tmp_path / "model")
    Tokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    records = [{"query": f"A{n}", "positive": f"B{n} C"} for n in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    changes = {"pairs": 4, "max_steps": 1, "pooling": None}
    (entry,) = train(given_options(tmp_path / "model", tmp_path / "pairs.jsonl", tmp_path / "run", **changes))
    model = AutoModelForEmbedding.from_pretrained(tmp_path / "model")
    q = model.encode([one["query"].lower() for one in records], prompt_name="query")
    d = model.encode([one["positive"] for one in records], prompt_name="passage")
    assert entry["loss"] == pytest.approx(reference(q, d).item(), rel=1e-5)
    assert entry["loss"] != pytest.approx(
        reference(model.encode([one["query"] for one in records]), d).item(), rel=1e-3
    )


def test_both_forwards_have_the_same_dropout(
    checkpoint: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed, found = TextRow.embed, []

    def recorded(self: TextRow, model: Any) -> Tensor:
        found.append((self, embeddings := embed(self, model)))
        return embeddings

    monkeypatch.setattr(TextRow, "embed", recorded)
    given = {"lora_rank": 4, "lora_dropout": 0.5, "max_steps": 2, "lr": 1e-2, "activation_checkpointing": True}
    train(given_options(checkpoint, pairs, tmp_path / "run", **given))
    count = len(found) // 4  # rows of a step; the first updates are zero
    first, second = found[-2 * count : -count], found[-count:]
    assert count > 2
    for (row, embeddings), (again, differentiated) in zip(first, second, strict=True):
        assert row is again
        assert torch.equal(embeddings, differentiated)
        assert differentiated.requires_grad
    without = AutoModelForEmbedding.from_pretrained(checkpoint, pooling="mean")
    load_adapter(without, tmp_path / "run")
    assert not torch.allclose(embed(first[0][0], without), first[0][1])


@pytest.mark.thorough
def test_a_stopped_run_continues_bit_for_bit(
    checkpoint: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(name: str, **more: Any) -> dict[str, Any]:
        changes = {"lora_rank": 2, "lora_dropout": 0.1, "ema": 0.9, "max_steps": 5}
        return given_options(checkpoint, pairs, tmp_path / name, eval_data=(str(pairs),), **changes, **more)

    train(given("whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert contrastive.main(contrastive.ContrastiveRunOptions(**given("stopped"))) == 130
    train(given("stopped", resume=True))
    outputs = [tmp_path / output for output in ("stopped", "whole")]
    weights = [(output / "adapter_model.safetensors").read_bytes() for output in outputs]
    assert weights[0] == weights[1]
    assert untimed_log(outputs[0]) == untimed_log(outputs[1])
    assert_equal(*(torch.load(output / "checkpoint-5" / "state.pt", weights_only=True) for output in outputs))


def in_two(rank: int, given: dict[str, Any]) -> None:
    train(given)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version
@pytest.mark.parametrize("loss_type", ["infonce", "gte"])
def test_two_processes_train_as_one(loss_type: str, tmp_path: Path) -> None:
    """13 pairs of at most 8 in a step: the processes have other numbers of pairs and of rows, and share negatives."""
    checkpoint = write_checkpoint(tmp_path / "tiny", initializer_range=0.1)
    pairs = write_pairs(tmp_path / "pairs.jsonl", 13, negatives=1)
    changes = {"max_steps": None, "epochs": 1, "eval_data": (str(pairs),), "loss_type": loss_type}
    one, two = (given_options(checkpoint, pairs, tmp_path / name, **changes) for name in ("one", "two"))
    train(one)
    on_all_processes(partial(in_two, given=two))
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("one", "two")]
    unequal = (*TIMED, "padding", "mfu")
    for entries in zip(*logs, strict=True):
        for column, value in entries[0].items():
            if column not in unequal:
                assert entries[1][column] == pytest.approx(value, rel=1e-5, abs=1e-6), column
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    for name, weight in models[0].items():
        torch.testing.assert_close(models[1][name], weight, rtol=1e-5, atol=1e-5)


def test_the_command_and_the_printed_recipe(
    checkpoint: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = given_options(checkpoint, pairs, tmp_path / "printed", max_steps=1)
    assert cli.main([*arguments(given), "--print-recipe"]) == 0
    recipe = tmp_path / "recipe.py"
    recipe.write_text(capsys.readouterr().out)
    run_script(recipe)
    assert cli.main(arguments({**given, "output": str(tmp_path / "run"), "dry_run": True})) == 0
    printed = capsys.readouterr().out
    assert "negative, " in printed
    assert "40 samples of kind 'pair'" in printed
    assert untimed_log(tmp_path / "printed")


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"mesh": "context=2"}, "option mesh: of embedding models has the axes replicate and shard only"),
        ({"loss_temperature": 0.0}, "option loss_temperature: invalid value"),
        ({"pooling": "average"}, "option pooling: invalid value"),
        ({"dims": (0,)}, "option dims: invalid value"),
        ({"special_tokens": "text"}, "option special_tokens: invalid value"),
    ],
)
def test_invalid_options(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        contrastive.ContrastiveRunOptions(**given_options(tmp_path, tmp_path, tmp_path, **changes))
    assert str(raised.value).startswith(expected)


def test_a_model_without_pooling_is_refused(checkpoint: Path, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown how to pool .* pooling=\"lasttoken\""):
        train(given_options(checkpoint, pairs, tmp_path / "run", pooling=None))


def test_options_that_do_not_fit_are_refused(checkpoint: Path, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"option pairs: the data has fewer pairs than a step; got 41; .* 40\."):
        train(given_options(checkpoint, pairs, tmp_path / "run", pairs=41, dry_run=True))
    with pytest.raises(ConfigError, match=r"option dims: more features than embeddings have; .*; expected at most "):
        train(given_options(checkpoint, pairs, tmp_path / "run", dims=(8, 999), dry_run=True))


# Data


def samples_of(tokenizer: Tokenizer, records: list[dict[str, Any]], **options: Any) -> list[Any]:
    return list(open_data(records, "auto", tokenizer, seq_length=12, epochs=1, shuffle=False, **options))


def texts_of(tokenizer: Tokenizer, sample: Any) -> list[str]:
    return [tokenizer.decode(one.input_ids) for one in sample.segments]


def test_names_of_fields_and_prompts(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    records: list[dict[str, Any]] = [
        {"anchor": "a", "positive": "b", "negative_10": "e", "negative_2": "d", "negative": "c", "id": 7},
        {"query": "a", "positive": "b", "negatives": ["c", "d"]},
        {"query": "a", "positive": "b", "negative": None},
    ]
    found = samples_of(tokenizer, records, query_prompt="q:", document_prompt="d:")
    assert [one.source.start for one in found] == [0, 1, 2]
    assert texts_of(tokenizer, found[0]) == ["<s>q:a", "<s>d:b", "<s>d:c", "<s>d:d", "<s>d:e"]
    assert texts_of(tokenizer, found[1]) == ["<s>q:a", "<s>d:b", "<s>d:c", "<s>d:d"]
    assert texts_of(tokenizer, found[2]) == ["<s>q:a", "<s>d:b"]
    assert list(read_texts(records)) == ["a", "b", "c", "d", "e", "a", "b", "c", "d", "a", "b"]


def test_long_texts(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    records = [{"query": "a", "positive": "b" * 20}, {"query": "a", "positive": "b"}]
    cut, whole = samples_of(tokenizer, records, too_long="truncate")
    assert texts_of(tokenizer, cut) == ["<s>a", "<s>" + 11 * "b"]
    assert samples_of(tokenizer, records, too_long="drop")[0].segments == whole.segments
    with pytest.raises(DataError, match=r"dataset\[0\]: a text is too long; got 21 tokens; expected at most 12"):
        samples_of(tokenizer, records)


@pytest.mark.parametrize(
    "record, message",
    [
        ({"query": "a", "positve": "b"}, r"not a record of a known kind.*Did you mean 'positive'\?"),
        ({"query": "a", "positive": None}, r"the field 'positive' is null"),
        ({"query": "a", "positive": " "}, r"positive is empty"),
        ({"query": "a", "positive": ["b"]}, r"positive.*; got a list"),
        ({"query": "a", "positive": "b", "negatives": ["c", 3]}, r"negatives.*; got a number, '3'"),
        ({"query": "a", "positive": "b", "negtive": "c"}, r"unknown field 'negtive'\. Did you mean 'negative'\?"),
    ],
)
def test_malformed_records(record: dict[str, Any], message: str, checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    with pytest.raises(DataError, match=rf"dataset\[0\]: {message}"):
        samples_of(tokenizer, [record])


def test_pairs_are_for_this_method(checkpoint: Path, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"records of kind 'pair' are for another method.*Use --method contrastive"):
        tiny_run.train(options(checkpoint, pairs, tmp_path / "run"))

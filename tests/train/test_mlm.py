"""The recipe for masked tokens: masks, packing without padding, the loss, evaluation, stopping and resuming."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, processors
from torch import Tensor

from ligerzoo import AutoModelForMaskedLM, Tokenizer, cli
from ligerzoo.errors import ConfigError
from ligerzoo.models import Bert, BertConfig, MaskedLM, ModernBert, ModernBertConfig
from ligerzoo.train import processes
from ligerzoo.train.data.masking import MaskedBatch, Masking, row_seeds
from ligerzoo.train.data_options import Frame
from ligerzoo.train.log import read_log
from ligerzoo.train.masked_data import MaskedData, frame_of
from ligerzoo.train.recipes import mlm
from tests.parallel.spawning import on_all_processes
from tests.train.test_resume import assert_equal, stop_after, untimed_log
from tests.train.tiny_run import arguments, options, write_tokenizer

SPECIAL = CLS, SEP, PAD, MASK = 256, 257, 258, 259
SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": PAD,
}  # fmt: skip


def write_encoder(directory: Path, model: MaskedLM) -> Path:
    """Writes an encoder, and a tokenizer with a token for each byte, [CLS], [SEP], [PAD] and [MASK]."""
    write_tokenizer(directory)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<mask>", special=True)])
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", CLS), ("</s>", SEP)])
    backend.post_processor = template
    backend.save(str(directory / "tokenizer.json"))
    names = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return write_encoder(
        tmp_path_factory.mktemp("tiny") / "bert", Bert(BertConfig(**SIZES, max_position_embeddings=64))
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of 5 to 200 characters."""
    source, file = random.Random(0), tmp_path_factory.mktemp("data") / "texts.jsonl"
    words = ["liger", "lion", "tiger", "is", "a", "large", "cat", "hybrid", "of", "and"]
    lines = [" ".join(source.choices(words, k=source.randint(1, 40))) for _ in range(60)]
    file.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return file


def given(encoder: Path, texts: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return options(encoder, texts, output, method="mlm", **changes)


def train(given: dict[str, Any]) -> list[dict[str, Any]]:
    assert mlm.main(mlm.MLMRunOptions(**given)) == 0
    return read_log(Path(given["output"]) / "log.jsonl")


def masked_data(given: dict[str, Any]) -> MaskedData:
    model = AutoModelForMaskedLM.from_pretrained(given["model"])
    tokenizer = Tokenizer.from_pretrained(given["model"])
    return MaskedData(mlm.MLMRunOptions(**given), tokenizer, model, pin_memory=False)


def batches_of(data: MaskedData, count: int, step: int = 1) -> list[MaskedBatch]:
    stream = data.training()
    return data.masked([next(stream) for _ in range(count)], step)


def originals(batch: MaskedBatch) -> Tensor:
    return torch.cat([torch.tensor(one.input_ids) for row in batch.rows for sample in row for one in sample.segments])


def test_masked_tokens_are_learned_and_evaluated(
    encoder: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = given(
        encoder, texts, tmp_path / "run", eval_data=(str(texts),), eval_every=10, max_steps=20, lr=1e-2, batch_size=4,
        mask_fraction=0.3,
    )  # fmt: skip
    assert cli.main(arguments(run)) == 0
    assert "<mask>]]" in capsys.readouterr().out
    log = read_log(tmp_path / "run" / "log.jsonl")
    steps = [entry for entry in log if "loss" in entry]
    first, last = (entry for entry in log if "eval_loss" in entry)
    assert steps[0]["loss"] > 5
    assert last["eval_loss"] < first["eval_loss"] < 4
    assert all(entry["padding"] == 0 and 0.2 < entry["trained_tokens"] / entry["tokens"] < 0.4 for entry in steps)
    assert len(last["samples"]) == 2
    prompts = [[sample["prompt"] for sample in entry["samples"]] for entry in (first, last)]
    assert prompts[0] == prompts[1]
    assert all("<mask>" in prompt and prompt.startswith("<s>") for prompt in prompts[0])
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path / "run")) is Bert
    assert Tokenizer.from_pretrained(tmp_path / "run").mask_token_id == MASK


def test_the_loss_is_that_of_texts_alone(encoder: Path, texts: Path, tmp_path: Path) -> None:
    """The mean over the masked tokens of all micro-batches of a step, each text without the others."""
    run = given(encoder, texts, tmp_path / "run", accumulate=2, max_steps=2)
    steps = train(run)
    data, model = masked_data(run), AutoModelForMaskedLM.from_pretrained(encoder)
    total, count = 0.0, 0
    for batch in batches_of(data, 2):
        ids, labels = batch.inputs["input_ids"][0], batch.inputs["labels"][0]
        for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            with torch.no_grad():
                logits = model(ids[None, first:last]).logits[0]
            total += F.cross_entropy(logits, labels[first:last], reduction="sum").item()
            count += int((labels[first:last] != -100).sum())
    assert steps[0]["trained_tokens"] == count
    assert steps[0]["loss"] == pytest.approx(total / count, rel=1e-5)


def test_texts_are_packed_without_padding(encoder: Path, texts: Path, tmp_path: Path) -> None:
    """Each text begins with [CLS] and ends with [SEP]; longer ones become several; no character is lost."""
    run = given(encoder, texts, tmp_path, seq_length=48, epochs=1, max_steps=None)
    data = masked_data(run)
    assert frame_of(Tokenizer.from_pretrained(encoder)) == Frame((CLS,), (SEP,))
    found, rows = 0, 0
    for batch in data.masked(list(data.training()), 1):
        ids = originals(batch)
        rows += len(batch.rows)
        found += int((ids < CLS).sum())
        assert len(ids) == batch.tokens == batch.inputs["input_ids"].numel()
        for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            assert (ids[first], ids[last - 1]) == (CLS, SEP)
            assert last - first <= 48
            assert not torch.isin(ids[first + 1 : last - 1], torch.tensor(SPECIAL)).any()
            assert torch.equal(batch.inputs["position_ids"][0, first:last], torch.arange(last - first))
    assert found == sum(len(json.loads(line)["text"]) for line in texts.read_text().splitlines())
    assert found + 2 * 60 > 0.8 * 48 * rows


def test_masks(encoder: Path) -> None:
    """The shares of masks, random and kept tokens; special tokens are never predicted, and a row has a prediction."""
    tokenizer = Tokenizer.from_pretrained(encoder)
    masking = Masking.of(tokenizer, 270, fraction=0.15, mask_share=0.8, random_share=0.1)
    ids = torch.randint(0, 256, (50_000,))
    ids[::100] = SEP
    seen, labels = masking.mask(ids, 1)
    is_predicted = labels != -100
    assert torch.equal(labels[is_predicted], ids[is_predicted])
    assert torch.equal(seen[~is_predicted], ids[~is_predicted])
    assert not is_predicted[::100].any()
    ordinary = is_predicted.sum() / (len(ids) * 0.99)
    assert ordinary == pytest.approx(0.15, abs=0.01)
    is_masked = seen[is_predicted] == MASK
    is_random = ~is_masked & (seen[is_predicted] != ids[is_predicted])
    assert is_masked.float().mean() == pytest.approx(0.8, abs=0.02)
    assert is_random.float().mean() == pytest.approx(0.1, abs=0.02)
    assert seen[is_predicted][is_random].max() < CLS
    assert len(seen[is_predicted][is_random].unique()) > 200
    for one, other in zip(masking.mask(ids, 1), (seen, labels), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(masking.mask(ids, 2)[1], labels)
    few = Masking.of(tokenizer, 260, fraction=0.0, mask_share=1.0, random_share=0.0)
    assert (few.mask(torch.tensor([CLS, 3, 4, SEP]), 0)[1] != -100).sum() == 1
    assert (few.mask(torch.tensor([CLS, SEP]), 0)[1] != -100).sum() == 0


def test_masks_depend_on_rows_and_steps_only(
    encoder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with one row each have the masks of one process with two rows."""
    run = given(encoder, texts, tmp_path)
    whole = batches_of(masked_data(run), 2)
    monkeypatch.setattr(processes, "data_ranks", lambda: 2)
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(processes, "data_rank", lambda rank=rank: rank)
        parts.append(batches_of(masked_data({**run, "batch_size": 1}), 2))
    for index, batch in enumerate(whole):
        for name, tensor in batch.inputs.items():
            assert torch.equal(torch.cat([part[index].inputs[name] for part in parts], 1), tensor)
    other = batches_of(masked_data({**run, "batch_size": 1}), 2, step=2)
    assert not torch.equal(other[0].inputs["labels"], parts[1][0].inputs["labels"])
    assert len({*row_seeds(0, 1, 0, 9), *row_seeds(0, 2, 0, 9), *row_seeds(1, 1, 0, 9)}) == 27


@pytest.mark.thorough  # masks have no state: they depend on the seed and the row
@pytest.mark.parametrize("changes", [{"accumulate": 2}, {"lora_rank": 2}])
def test_a_stopped_run_continues_bit_for_bit(
    encoder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    held_out = {"eval_data": (str(texts),), "eval_every": 2}

    def run(name: str, **more: Any) -> dict[str, Any]:
        return given(encoder, texts, tmp_path / name, max_steps=4, **held_out, **changes, **more)

    train(run("whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert mlm.main(mlm.MLMRunOptions(**run("stopped"))) == 130
    train(run("stopped", resume=True))
    outputs = [tmp_path / output for output in ("stopped", "whole")]
    name = "adapter_model.safetensors" if "lora_rank" in changes else "model.safetensors"
    weights = [(output / name).read_bytes() for output in outputs]
    assert weights[0] == weights[1]
    assert untimed_log(outputs[0]) == untimed_log(outputs[1])
    assert_equal(*(torch.load(output / "checkpoint-4" / "state.pt", weights_only=True) for output in outputs))


def test_a_config_becomes_a_new_encoder(encoder: Path, texts: Path, tmp_path: Path) -> None:
    config = ModernBertConfig(**SIZES, sliding_window=8)
    write_encoder(tmp_path / "modern", ModernBert(config))
    (tmp_path / "modern" / "model.safetensors").unlink()
    run = given(
        tmp_path / "modern", texts, tmp_path / "run", max_steps=2, activation_budget="1", activation_checkpointing=False
    )
    train(run)
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "run").config == config


def test_wrong_models_and_options_are_refused(
    encoder: Path, checkpoint: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"option seq_length: texts would be longer.*got 65; expected at most 64"):
        train(given(encoder, texts, tmp_path / "run", seq_length=65))
    with pytest.raises(ConfigError, match=r"options mask_share and random_share: are at most 1 together; got 1\.2"):
        train(given(encoder, texts, tmp_path / "run", mask_share=0.9, random_share=0.3))
    without_mask = write_encoder(tmp_path / "other", Bert(BertConfig(**SIZES)))
    (without_mask / "tokenizer_config.json").write_text(json.dumps({"sep_token": "</s>"}))
    with pytest.raises(ConfigError, match="mask_token: the tokenizer has no mask token"):
        train(given(without_mask, texts, tmp_path / "run"))
    assert cli.main(arguments(given(checkpoint, texts, tmp_path / "run"))) == 1
    assert "expected MaskedLM" in capsys.readouterr().err
    assert cli.main(["train", str(encoder), "--data", str(texts), "--output", str(tmp_path / "run")]) == 1
    assert "Train it with --method mlm" in capsys.readouterr().err


def train_part(rank: int, given: dict[str, Any]) -> None:
    train(given)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version
def test_two_processes_train_as_one(encoder: Path, texts: Path, tmp_path: Path) -> None:
    """Of an odd number of rows: at the end, the second process has an empty batch."""
    shared: dict[str, Any] = {"max_steps": None, "epochs": 1, "eval_data": (str(texts),), "seq_length": 40}
    train(given(encoder, texts, tmp_path / "one", batch_size=2, **shared))
    two = given(encoder, texts, tmp_path / "two", batch_size=1, **shared)
    on_all_processes(partial(train_part, given=two))
    for one, other in zip(*(read_log(tmp_path / name / "log.jsonl") for name in ("one", "two")), strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & {"loss", "grad_norm", "eval_loss", "tokens", "trained_tokens"}:
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
        if "samples" in one:
            assert [sample["prompt"] for sample in one["samples"]] == [sample["prompt"] for sample in other["samples"]]

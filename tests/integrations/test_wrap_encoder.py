"""Wrapped encoders and token classifiers in transformers' clients, compared with transformers' own."""

import copy
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from transformers import PreTrainedModel, Trainer, TrainingArguments  # noqa: E402

import ligerzoo.integrations.transformers as wrapped  # noqa: E402
from ligerzoo import AutoModelForEmbedding  # noqa: E402
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError  # noqa: E402
from ligerzoo.integrations.transformers import wrap  # noqa: E402
from ligerzoo.models import Bert, BertConfig  # noqa: E402
from tests.models.comparing import assert_close, raw_bytes, stored_tensors  # noqa: E402
from tests.models.test_encoder_classifiers import ENCODERS, MLM, write  # noqa: E402
from tests.models.tiny_llama import LLAMA  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SEQUENCES, TOKENS = "SequenceClassification", "TokenClassification"
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "embedding_dropout": 0.0,
    "mlp_dropout": 0.0,
    "attention_dropout": 0.0,
    "classifier_dropout": 0.0,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    **{name: ENCODERS[name] for name in ("bert", "roberta", "xlm-roberta", "modernbert, mean")},
    "bert, untied": {**ENCODERS["bert"], "tie_word_embeddings": False},
    "llama": {**LLAMA, "pad_token_id": 0},
}
CASES = [
    *((kind, name) for kind in (MLM, SEQUENCES, TOKENS) for name in ("bert", "roberta", "modernbert, mean")),
    (TOKENS, "llama"),
]
LEAST = (MLM, "bert"), (MLM, "modernbert, mean"), (SEQUENCES, "roberta"), (TOKENS, "llama")
"""Cases of `make test`: each kind, and each way in which transformers' modules differ from ours."""

TRAINED = [pytest.param(*case, marks=() if case in LEAST else pytest.mark.thorough) for case in CASES]


def written(kind: str, name: str, directory: Path) -> Path:
    """Writes a checkpoint without dropout."""
    base = MODELS[name]
    write(directory, kind, {**base, **({"classifier_dropout": 0.0} if name == "llama" else NO_DROPOUT)})
    return directory


def ours(kind: str, directory: Path, **options: Any) -> Any:
    return getattr(wrapped, f"AutoModelFor{kind}").from_pretrained(directory, dtype=torch.float32, **options)


def theirs(kind: str, directory: Path) -> PreTrainedModel:
    auto = getattr(transformers, f"AutoModelFor{kind}")
    return auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def rows_of(kind: str) -> list[dict[str, Any]]:
    """Texts of different lengths, with labels."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (12, 20, 9, 31, 7, 16):
        ids = torch.randint(6, 90, (length,), generator=generator)
        labels = {MLM: ids, SEQUENCES: ids[0] % 3, TOKENS: ids % 3}[kind]
        if kind != SEQUENCES:
            labels = labels.masked_fill(torch.rand(length, generator=generator) < 0.5, -100)
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def collating(pad: int) -> Any:
    def padded(tensors: list[Tensor], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids, labels = ([torch.as_tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
        return {
            "input_ids": padded(ids, pad),
            "attention_mask": padded([torch.ones_like(row) for row in ids], 0),
            "labels": padded(labels, -100) if labels[0].ndim else torch.stack(labels),
        }

    return collate


def batch_of(model: PreTrainedModel, kind: str) -> dict[str, Tensor]:
    return collating(model.config.pad_token_id)(rows_of(kind)[:3])  # type: ignore[no-any-return]


def train(kind: str, model: Any, directory: Path, **options: Any) -> tuple[Trainer, Tensor]:
    """Returns the trainer after 3 steps, and the loss and gradient norm of each."""
    arguments: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "learning_rate": 1e-2, "adam_epsilon": 1e-5, "use_cpu": True, "disable_tqdm": True, "seed": 1, **options,
    }  # fmt: skip
    rows = rows_of(kind)
    collator = collating(model.config.pad_token_id)
    trainer = Trainer(
        model,
        TrainingArguments(str(directory), **arguments),
        train_dataset=rows,
        eval_dataset=rows[:3],
        data_collator=collator,
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return trainer, torch.tensor([[entry["loss"], entry["grad_norm"]] for entry in entries])


@pytest.mark.parametrize("kind, name", TRAINED)
def test_training_is_that_of_transformers(kind: str, name: str, tmp_path: Path) -> None:
    directory = written(kind, name, tmp_path / "model")
    trainers, figures = zip(
        *(train(kind, load(kind, directory), tmp_path / "out") for load in (ours, theirs)), strict=True
    )
    torch.testing.assert_close(figures[0], figures[1], rtol=1e-5, atol=1e-5)
    got, expected = (trainer.evaluate()["eval_loss"] for trainer in trainers)
    assert got == pytest.approx(expected, rel=0, abs=1e-5)
    trainers[0].save_model(str(tmp_path / "saved"))
    model, loaded = trainers[0].model.eval(), theirs(kind, tmp_path / "saved").eval()
    assert type(model).__name__ == type(loaded).__name__
    with torch.no_grad():
        outputs = [each(**batch_of(each, kind)) for each in (model, loaded)]
        assert_close(outputs[0].loss, outputs[1].loss, "loss of the saved model")


FILES = [
    pytest.param(kind, name, marks=() if (kind, name) in (*LEAST, (MLM, "bert, untied")) else pytest.mark.thorough)
    for kind in (MLM, SEQUENCES, TOKENS)
    for name in MODELS
    if kind == TOKENS or name != "llama"
]


@pytest.mark.parametrize("kind, name", FILES)
def test_modules_outputs_and_files_are_those_of_transformers(kind: str, name: str, tmp_path: Path) -> None:
    directory = written(kind, name, tmp_path / "model")
    model, other = ours(kind, directory), theirs(kind, directory).eval()
    own, expected = (dict(each.state_dict()) for each in (model, other))
    dead = {"cls.predictions.bias"} if (kind, name) == (MLM, "bert, untied") else set()  # it has no effect there
    assert own.keys() == expected.keys() - dead
    leaves = [{n for n, module in each.named_modules() if module._parameters} for each in (model, other)]
    assert leaves[0] == leaves[1] - {name.rpartition(".")[0] for name in dead}
    batch = batch_of(other, kind)
    mask, labels = batch["attention_mask"].bool(), batch.pop("labels")
    inputs = {**batch, "output_hidden_states": True}
    out, reference = model(**inputs), other(**inputs)
    assert list(out) == [key for key in reference if "past" not in key and key != "cache"]
    kept = slice(None) if kind == SEQUENCES else mask
    assert_close(out.logits[kept], reference.logits[kept], "logits")
    for states, other_states in zip(out.hidden_states, reference.hidden_states, strict=True):
        assert_close(states[mask], other_states[mask], "hidden states")
    base, other_base = (each.base_model(**batch)[0] for each in (model, other))
    assert_close(base[mask], other_base[mask], "hidden states of the base model")
    assert model(**batch, labels=labels, return_dict=False)[0].ndim == 0
    model.save_pretrained(tmp_path / "again")
    saved, stored = (raw_bytes(stored_tensors(path)) for path in (tmp_path / "again", directory))
    assert saved == {key: value for key, value in stored.items() if key not in dead}
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert type(each) is type(model)
        assert torch.equal(each(**batch).logits, out.logits)
        with torch.no_grad():
            each.get_input_embeddings().weight.zero_()
        assert not torch.equal(each(**batch).logits, out.logits)
    model.load_state_dict({key: value * 1.5 for key, value in expected.items() if key not in dead})
    assert not torch.allclose(model(**batch).logits, out.logits)
    with pytest.raises(CheckpointError):
        model.load_state_dict({"another": torch.ones(1)})
    model.resize_token_embeddings(110)
    model.save_pretrained(tmp_path / "resized")
    resized = theirs(kind, tmp_path / "resized").eval()
    assert_close(model(**batch).logits[kept], resized(**batch).logits[kept], "logits with a larger vocabulary")


ADAPTERS = [
    pytest.param(*case, marks=() if case in ((MLM, "bert"), (SEQUENCES, "roberta")) else pytest.mark.thorough)
    for case in CASES
]


@pytest.mark.parametrize("kind, name", ADAPTERS)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT and transformers
def test_peft(kind: str, name: str, tmp_path: Path) -> None:
    """Adapters train as on transformers' own model, which loads what ours saved, and merge."""
    peft = pytest.importorskip("peft")
    directory = written(kind, name, tmp_path / "model")
    targets = {"modernbert, mean": ["Wqkv", "Wi"], "llama": ["q_proj", "v_proj"]}.get(name, ["query", "dense"])
    task = {SEQUENCES: "SEQ_CLS", TOKENS: "TOKEN_CLS"}.get(kind)
    adapted, figures = [], []
    for load in (ours, theirs):
        torch.manual_seed(3)
        adapted.append(peft.get_peft_model(load(kind, directory), peft.LoraConfig(task, r=2, target_modules=targets)))
        figures.append(train(kind, adapted[-1], tmp_path / "out", label_names=["labels"])[1])
    torch.testing.assert_close(*figures, rtol=1e-4, atol=1e-5)
    mine, batch = adapted[0].eval(), batch_of(adapted[0], kind)
    del batch["labels"]
    mine.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(theirs(kind, directory), tmp_path / "adapter").eval()
    kept = slice(None) if kind == SEQUENCES else batch["attention_mask"].bool()
    with torch.no_grad():
        expected = mine(**batch).logits
        assert_close(loaded(**batch).logits[kept], expected[kept], "logits of transformers with the adapter")
        mine.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = theirs(kind, tmp_path / "merged").eval()
        assert_close(merged(**batch).logits[kept], expected[kept], "logits after merging")


def test_accumulated_masked_tokens_count_alike(tmp_path: Path) -> None:
    directory = written(MLM, "bert", tmp_path / "model")
    figures = [
        train(MLM, ours(MLM, directory), tmp_path / "out", **options)[1]
        for options in ({"gradient_accumulation_steps": 3}, {"per_device_train_batch_size": 6})
    ]
    torch.testing.assert_close(*figures, rtol=1e-4, atol=1e-5)


def test_pipelines(tmp_path: Path) -> None:
    from tests.integrations.test_wrap_classifier import tokenizer

    words = tokenizer()
    words.add_special_tokens({"mask_token": "w4"})
    for kind, task in ((MLM, "fill-mask"), (SEQUENCES, "text-classification"), (TOKENS, "token-classification")):
        directory = written(kind, "bert", tmp_path / kind)
        options = {"top_k": 3} if kind == MLM else {}
        answers = [
            transformers.pipeline(task, load(kind, directory), tokenizer=words, device="cpu")("w5 w4 w7", **options)
            for load in (ours, theirs)
        ]
        assert [[row.get("token"), row.get("entity")] for row in answers[0]] == [
            [row.get("token"), row.get("entity")] for row in answers[1]
        ]
        assert [row["score"] for row in answers[0]] == pytest.approx([row["score"] for row in answers[1]], abs=1e-5)


def test_no_padding_is_computed(tmp_path: Path) -> None:
    model = ours(MLM, written(MLM, "roberta", tmp_path / "model"))
    seen: list[int] = []
    dense = model.roberta.encoder.layer[0].intermediate.dense
    dense.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    batch = batch_of(model, MLM)
    model(**batch)
    assert seen == [int(batch["attention_mask"].sum())]


def test_what_cannot_be_wrapped_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    encoder = Bert(config)
    with pytest.raises(LigerzooError, match=r"lables: not an input of Bert\. Did you mean 'labels'\?"):
        wrap(encoder)(torch.tensor([[5]]), lables=torch.tensor([1]))
    roberta = ours(MLM, written(MLM, "roberta", tmp_path / "model"))
    roberta.config.pad_token_id = 7
    with pytest.raises(ConfigError, match=r"config\.pad_token_id: changed after the model was built"):
        roberta.to_zoo_model()
    encoder.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^wrap: an embedding model cannot be wrapped"):
        wrap(AutoModelForEmbedding.from_pretrained(tmp_path, pooling="cls"))

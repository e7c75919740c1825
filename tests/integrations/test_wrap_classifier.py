"""Wrapped sequence classifiers in transformers' clients, compared with transformers' own in the same script."""

import copy
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments  # noqa: E402

import ligerzoo  # noqa: E402
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError  # noqa: E402
from ligerzoo.integrations.transformers import AutoModelForSequenceClassification, wrap  # noqa: E402
from ligerzoo.integrations.transformers.versions import CACHE  # noqa: E402
from tests.covering import long_cases  # noqa: E402
from tests.models.comparing import assert_close, raw_bytes, stored_tensors  # noqa: E402
from tests.models.test_sequence_classifier import NEW_HEAD, PAD, PROBLEMS, ROWS, expected_class, write  # noqa: E402
from tests.models.tiny import Tiny  # noqa: E402
from tests.models.zoo import TEXT_CHECKPOINTS  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BY_TYPE: Mapping[str, Tiny] = {row.config["model_type"]: row for row in ROWS}
NOT_IN_TRANSFORMERS = [row for row in TEXT_CHECKPOINTS if row.config["model_type"] not in BY_TYPE]

COMPARED = ("llama", "mixtral", "phi3", "qwen3")
"""Architectures whose training is compared: plain, mixture of experts, fused projections, tied embeddings."""


def written(model_type: str, directory: Path, num_labels: int = 3, **changes: Any) -> Path:
    write(directory / "model", BY_TYPE[model_type].config, num_labels=num_labels, **changes)
    return directory / "model"


def ours(directory: Path, **options: Any) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, **options)


def theirs(directory: Path) -> PreTrainedModel:
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


def texts(problem: str = "single") -> list[dict[str, Any]]:
    """Sequences of different lengths, with labels."""
    generator = torch.Generator().manual_seed(0)
    number = PROBLEMS[problem]
    rows = []
    for length in (12, 20, 9, 31, 7, 16, 25, 14):
        labels = torch.randn(number, generator=generator)
        label: Any = {"single": labels.argmax(), "reward": labels[0], "multi": (labels > 0).float()}[problem].tolist()
        rows.append({"input_ids": torch.randint(PAD + 1, 90, (length,), generator=generator).tolist(), "label": label})
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


def arguments(directory: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {
        "output_dir": str(directory), "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "learning_rate": 1e-2, "adam_epsilon": 1e-5, "use_cpu": True,
        "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    return {**defaults, **options}


def mean_and_spread(prediction: Any) -> dict[str, float]:
    return {
        "mean": prediction.predictions.mean(),
        "spread": abs(prediction.predictions - prediction.label_ids.mean()).max(),
    }


def train(
    model: Any, directory: Path, problem: str = "single", resume: bool = False, **options: Any
) -> tuple[Trainer, Tensor]:
    """Returns the trainer after 3 steps, and the loss and gradient norm of each, (3, 2)."""
    rows = texts(problem)
    trainer = Trainer(
        model, TrainingArguments(**arguments(directory, options)), train_dataset=rows, eval_dataset=rows[:5],
        data_collator=collate, compute_metrics=mean_and_spread,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer, figures_of(trainer)


def figures_of(trainer: Trainer) -> Tensor:
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor([[entry["loss"], entry["grad_norm"]] for entry in entries], dtype=torch.float64)


def assert_equal_figures(got: Tensor, expected: Tensor) -> None:
    assert len(got) == 3
    torch.testing.assert_close(got[:, 0], expected[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(got[:, 1], expected[:, 1], rtol=1e-5, atol=1e-5)


def compare_training(directory: Path, out: Path, problem: str = "single", **options: Any) -> None:
    other, expected = train(averaging(theirs(directory)), out / "theirs", problem, **options)
    trainer, got = train(ours(directory), out / "ours", problem, **options)
    assert_equal_figures(got, expected)
    metrics, reference = (
        {name: t.evaluate()[f"eval_{name}"] for name in ("loss", "mean", "spread")} for t in (trainer, other)
    )
    assert metrics == pytest.approx(reference, rel=0, abs=1e-5)
    predictions = [t.predict(texts(problem)[:5]) for t in (trainer, other)]
    assert_close(*(torch.from_numpy(p.predictions) for p in predictions), "predictions")  # type: ignore[call-arg]
    assert predictions[0].metrics["test_loss"] == pytest.approx(predictions[1].metrics["test_loss"], rel=0, abs=1e-5)
    assert trainer.model.config.problem_type == other.model.config.problem_type


def averaging(model: PreTrainedModel) -> PreTrainedModel:
    """Makes the Trainer average the loss over microbatches; with transformers' classifiers it adds them up."""
    model.accepts_loss_kwargs = False
    return model


@pytest.mark.parametrize("case", long_cases({"model_type": COMPARED, "problem": tuple(PROBLEMS)}), ids=str)
def test_training_is_that_of_transformers(case: dict[str, str], tmp_path: Path) -> None:
    compare_training(written(case["model_type"], tmp_path, PROBLEMS[case["problem"]]), tmp_path, case["problem"])


@pytest.mark.parametrize(
    "options",
    [{"gradient_accumulation_steps": 4}, {"label_smoothing_factor": 0.1}, {"gradient_checkpointing": True}],
    ids=["accumulation", "smoothing", "checkpointing"],
)
def test_options_of_the_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    compare_training(written("llama", tmp_path), tmp_path, **options)


def test_accumulation_averages_over_microbatches(tmp_path: Path) -> None:
    directory = written("llama", tmp_path)
    _, got = train(ours(directory), tmp_path / "a", gradient_accumulation_steps=4)
    _, expected = train(ours(directory), tmp_path / "b", per_device_train_batch_size=8)
    assert_equal_figures(got, expected)


@pytest.mark.parametrize("model_type", COMPARED)
def test_logits_loss_and_gradients(model_type: str, tmp_path: Path) -> None:
    directory = written(model_type, tmp_path)
    models, batch = (ours(directory), theirs(directory).eval()), collate(texts()[:3])
    for model in models:
        model(**batch).loss.backward()
    got, expected = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in models)
    assert got.keys() >= expected.keys()
    for name, gradient in expected.items():
        assert_close(got[name], gradient, name)
    out, reference = (model(**batch, output_hidden_states=True, output_attentions=True) for model in models)
    assert list(out) == [name for name in reference if name != CACHE]
    for name in ("logits", "loss"):
        assert_close(out[name], reference[name], name)
    for name in ("hidden_states", "attentions"):
        for each, other in zip(out[name], reference[name], strict=True):
            kept = batch["attention_mask"].bool() if name == "hidden_states" else slice(1)  # row 0 has no padding
            assert_close(each[kept], other[kept], name)
    loss, logits = models[0](**batch, return_dict=False)
    assert (loss.item(), logits.shape) == (out.loss.item(), (3, 3))


def often(rows: list[Tiny]) -> list[Any]:
    """Marks `thorough` the architectures that are not compared: other tests write and load the files of each."""
    return [row if row.config["model_type"] in COMPARED else pytest.param(row, marks=pytest.mark.thorough)
            for row in rows]  # fmt: skip


@pytest.mark.parametrize("row", [*often(ROWS), *NOT_IN_TRANSFORMERS[:1]], ids=str)
@pytest.mark.filterwarnings(NEW_HEAD)
def test_every_architecture_trains_and_loads(row: Tiny, tmp_path: Path) -> None:
    """From a causal language model, with a new head."""
    row.write(tmp_path / "lm")
    model = ours(tmp_path / "lm", num_labels=3, pad_token_id=PAD)
    assert type(model).__name__ == expected_class(row)
    train(model, tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1)
    saved, kept = tmp_path / "out" / "checkpoint-1", raw_bytes(model.state_dict())
    assert raw_bytes(ours(saved).state_dict()) == kept
    config = json.loads((saved / "config.json").read_text())
    assert (config["architectures"], config["problem_type"]) == ([expected_class(row)], "single_label_classification")
    if row not in ROWS:
        return  # transformers has no such class
    loaded, info = type(theirs(saved)).from_pretrained(saved, dtype=torch.float32, output_loading_info=True)
    assert type(loaded).__name__ == type(model).__name__
    assert not any(info.values())
    loaded.save_pretrained(tmp_path / "again")
    assert raw_bytes(stored_tensors(tmp_path / "again")) == raw_bytes(stored_tensors(saved))


@pytest.mark.parametrize("model_type", COMPARED)
def test_resuming(model_type: str, tmp_path: Path) -> None:
    directory, out = written(model_type, tmp_path), tmp_path / "out"
    steps = {"save_strategy": "steps", "save_steps": 1}
    whole, _ = train(ours(directory), out, **steps)
    (out / "checkpoint-3").rename(tmp_path / "last")
    resumed, _ = train(ours(directory), out, resume=True, **steps)
    assert raw_bytes(resumed.model.state_dict()) == raw_bytes(whole.model.state_dict())


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose words are w4 to w89."""
    vocabulary = {"<s>": 1, "</s>": 2, "<pad>": PAD, "<unk>": 0, **{f"w{i}": i for i in range(PAD + 1, 90)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS)
def test_pipeline(problem: str, tmp_path: Path) -> None:
    names = {i: f"name {i}" for i in range(PROBLEMS[problem])}
    directory = written("llama", tmp_path, PROBLEMS[problem])
    answers = []
    for model in (ours(directory, id2label=names), theirs(directory)):
        model.config.id2label = names
        classify = transformers.pipeline("text-classification", model, tokenizer=tokenizer(), device="cpu")
        answers.append(classify(["w5 w6 w7", "w8 w9 w10 w11 w12"], top_k=None, batch_size=2))
    for got, expected in zip(*answers, strict=True):
        assert [each["label"] for each in got] == [each["label"] for each in expected]
        scores = ([each["score"] for each in answer] for answer in (got, expected))
        assert next(scores) == pytest.approx(next(scores), rel=0, abs=1e-5)


TARGETS = {"llama": None, "mixtral": ["q_proj", "v_proj"], "phi3": ["qkv_proj", "gate_up_proj"], "qwen3": None}
"""Modules with adapters; None for those that PEFT chooses, which it cannot for the others, nor in transformers."""


@pytest.mark.parametrize("model_type", COMPARED)
def test_peft(model_type: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    directory = written(model_type, tmp_path)
    config = {"task_type": "SEQ_CLS", "r": 2, "target_modules": TARGETS[model_type]}
    adapted = []
    for load in (ours, theirs):
        torch.manual_seed(3)
        adapted.append(peft.get_peft_model(averaging(load(directory)), peft.LoraConfig(**config)))
    figures = [train(model, tmp_path / "out")[1] for model in adapted]
    assert_equal_figures(*figures)
    mine, batch = adapted[0], collate(texts()[:3])
    mine.eval()
    trained = {name for name, parameter in mine.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "lora" not in name} == {"base_model.model.score.modules_to_save.default.weight"}
    mine.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(theirs(directory), tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = mine(**batch).logits
        assert_close(loaded(**batch).logits, expected, "logits of transformers with the adapter")
        mine.merge_and_unload().save_pretrained(tmp_path / "merged")
        assert_close(theirs(tmp_path / "merged").eval()(**batch).logits, expected, "logits after merging")


@pytest.mark.parametrize("model_type", COMPARED)
def test_trl_reward_trainer(model_type: str, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    directory = written(model_type, tmp_path, 1)
    ids = [row["input_ids"] for row in texts()]
    pairs = datasets.Dataset.from_dict({"chosen_ids": ids[:4], "rejected_ids": ids[4:]})
    trainers = []
    for load in (ours, theirs):
        config = trl.RewardConfig(**arguments(tmp_path / "out", {"bf16": False, "gradient_checkpointing": False}))
        trainer = trl.RewardTrainer(
            load(directory), config, train_dataset=pairs, eval_dataset=pairs, processing_class=tokenizer()
        )
        trainer.train()
        trainers.append(trainer)
    assert_equal_figures(*map(figures_of, trainers))
    got, expected = (trainer.evaluate() for trainer in trainers)
    for name in ("eval_loss", "eval_mean_reward", "eval_margin", "eval_accuracy"):
        assert got[name] == pytest.approx(expected[name], rel=0, abs=1e-5)


# The config


def test_changes_of_the_labels_are_saved(tmp_path: Path) -> None:
    directory = written("llama", tmp_path, problem_type="single_label_classification")
    model = ours(directory)
    model.save_pretrained(tmp_path / "same")
    before, same = (json.loads((path / "config.json").read_text()) for path in (directory, tmp_path / "same"))
    assert before == same
    model.config.id2label = {0: "a", 1: "b", 2: "c"}
    model.config.problem_type = "multi_label_classification"
    model.config.pad_token_id = 7
    model.save_pretrained(tmp_path / "out")
    for config in (theirs(tmp_path / "out").config, ours(tmp_path / "out").config):
        assert config.id2label == {0: "a", 1: "b", 2: "c"}
        assert config.label2id == {"a": 0, "b": 1, "c": 2}
        assert (config.num_labels, config.problem_type) == (3, "multi_label_classification")
        assert config.pad_token_id == 7
    assert model.to_zoo_model().labels.names == ("a", "b", "c")
    model.config.label2id = {"d": 0, "e": 1, "f": 2}
    with pytest.raises(ConfigError, match="label2id: contradicts id2label"):
        model.save_pretrained(tmp_path / "out")
    model.config.num_labels = 4
    with pytest.raises(ConfigError, match=r"config\.id2label: differs from the number of rows of the head; got 4; exp"):
        model.save_pretrained(tmp_path / "out")
    model = ours(directory)
    model.config.label2id, model.config.problem_type = {"d": 0, "e": 1, "f": 2}, None
    assert (model.to_zoo_model().labels.names, model.to_zoo_model().labels.problem_type) == (("d", "e", "f"), None)
    model.save_pretrained(tmp_path / "out")
    assert ours(tmp_path / "out").config.problem_type is None
    assert ours(tmp_path / "out").config.id2label == {0: "d", 1: "e", 2: "f"}


def test_the_config_decides_the_loss_and_the_last_token(tmp_path: Path) -> None:
    directory = written("llama", tmp_path)
    model, other = ours(directory), theirs(directory).eval()
    batch = collate(texts()[:3])
    batch["labels"] = torch.rand(3, 3)
    for each in (model, other):
        each.config.problem_type = "regression"
        each.config.pad_token_id = int(batch["input_ids"][1, -1])
    assert_close(model(**batch).loss, other(**batch).loss, "loss")
    assert_close(model(**batch).logits, other(**batch).logits, "logits")


def test_the_last_token_by_the_padding_mask(tmp_path: Path) -> None:
    model, batch = ours(written("llama", tmp_path)), collate(texts()[:3])
    del batch["labels"]
    expected = model(**batch).logits
    embeddings = model.get_input_embeddings()(batch["input_ids"])
    assert_close(model(inputs_embeds=embeddings, attention_mask=batch["attention_mask"]).logits, expected, "logits")
    model.config.pad_token_id = None
    assert_close(model(**batch).logits, expected, "logits")
    with pytest.raises(LigerzooError, match="3 sequences whose last token is unknown"):
        model(batch["input_ids"])
    packed = batch["input_ids"][batch["attention_mask"].bool()][None]
    bounds = nn.functional.pad(batch["attention_mask"].sum(1).cumsum(0), (1, 0)).int()
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        assert_close(model(packed, **{name: bounds}).logits, expected, "logits of packed sequences")


def test_unknown_inputs_are_refused(tmp_path: Path) -> None:
    model = ours(written("llama", tmp_path))
    with pytest.raises(LigerzooError, match=r"lables: not an input of SequenceClassifier\. Did you mean 'labels'\?"):
        model(torch.tensor([[5]]), lables=torch.tensor([1]))
    with pytest.raises(LigerzooError, match="past_key_values: not a cache of this model; got DynamicCache"):
        model(torch.tensor([[5]]), past_key_values=transformers.DynamicCache())


# Weights


def test_state_dicts_of_checkpoints(tmp_path: Path) -> None:
    for model_type in COMPARED:
        directory = written(model_type, tmp_path / model_type)
        model, changed = ours(directory), {name: x + 1 for name, x in stored_tensors(directory).items()}
        assert not any(model.load_state_dict(changed, strict=False))
        model.save_pretrained(tmp_path / "out", max_shard_size="20KB")
        assert raw_bytes(stored_tensors(tmp_path / "out")) == raw_bytes(changed)
        with pytest.raises(CheckpointError, match="unexpected"):
            model.load_state_dict({**changed, "another": torch.ones(1)}, strict=False)
        with pytest.raises((CheckpointError, RuntimeError), match=r"score\.weight"):
            model.load_state_dict({name: x for name, x in changed.items() if name != "score.weight"})


def test_the_wrapper_shares_weights_and_nothing_else(tmp_path: Path) -> None:
    directory = written("phi3", tmp_path)
    model = ligerzoo.AutoModelForSequenceClassification.from_pretrained(directory)
    wrapped, ids = wrap(model), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter += 0.1
        assert_close(wrapped(ids).logits, model(ids).logits, "logits")
    assert isinstance(wrapped.score, nn.Linear)
    wrapped.score.register_forward_hook(lambda *_: pytest.fail("called"))
    model(ids)


def test_copies_pickles_and_resizing(tmp_path: Path) -> None:
    model, ids = ours(written("phi3", tmp_path)), torch.tensor([[5, 6, 7]])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert type(other) is type(model)
        assert torch.equal(other(ids).logits, model(ids).logits)
        with torch.no_grad():
            other.score.weight.zero_()
        assert not torch.equal(other(ids).logits, model(ids).logits)
    model.resize_token_embeddings(110, pad_to_multiple_of=8)
    model.save_pretrained(tmp_path / "out")
    assert theirs(tmp_path / "out").get_input_embeddings().weight.shape[0] == 112


def test_models_without_a_checkpoint(tmp_path: Path) -> None:
    config = ligerzoo.AutoModelForSequenceClassification.from_pretrained(written("qwen3", tmp_path)).config
    model = wrap(ligerzoo.AutoModelForSequenceClassification.from_config(config, id2label={0: "reward"}))
    assert type(model).__name__ == "Qwen3ForSequenceClassification"
    assert (model.config.id2label, model.num_labels, model.config.problem_type) == ({0: "reward"}, 1, None)
    assert not model.can_generate()
    model.save_pretrained(tmp_path / "out")
    assert theirs(tmp_path / "out").config.label2id == {"reward": 0}

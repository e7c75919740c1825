"""TRL's trainers on wrapped models, compared with the same scripts on transformers' own models."""

import copy
import json
import re
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import datasets
import transformers
from peft import LoraConfig
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)

from ligerzoo import AutoModel, cli
from ligerzoo.errors import LigerzooError
from tests.covering import long_cases, representatives
from tests.integrations.clients import (
    COMPARED,
    PLACEHOLDERS,
    Writer,
    assert_loads_in_transformers,
    assert_same,
    ours,
    processor,
    rows,
    theirs,
    tokenizer,
)
from tests.models.comparing import raw_bytes

datasets.disable_progress_bars()

ROOT = Path(__file__).parents[2]
LLAMA = next((ROOT / "ligerzoo").rglob("tiny-python-llama"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),  # torch, when accelerate trains on a CPU
    # transformers 5.23 renamed an option that TRL 1.16 sets.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*label_smoothing_factor.*:FutureWarning:tests"),
    pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning"),  # transformers reads config.json of version 4
    pytest.mark.filterwarnings("ignore:.*return_outputs=True.*:FutureWarning"),
]

OPTIONS: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [], "save_strategy": "no",
    "learning_rate": 1e-3, "adam_epsilon": 1e-5, "use_cpu": True, "bf16": False, "disable_tqdm": True, "seed": 1,
}  # fmt: skip
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
}  # fmt: skip
COMMON = {"model_type": COMPARED, "gradient_accumulation_steps": (1, 4), "gradient_checkpointing": (False, True)}


def trained(trainer: str, model: Any, directory: Path, data: Any, resume: bool = False, **options: Any) -> Any:
    """Returns TRL's trainer after training. Options of the trainer's own are those whose name is a parameter of it."""
    trainer_class, config_class = TRAINERS[trainer]
    given = {name: options.pop(name) for name in ("ref_model", "peft_config", "reward_funcs") if name in options}
    given = copy.deepcopy(given)  # TRL writes the path of the model into the adapter's config
    processing_class = options.pop("processing_class", None) or tokenizer()
    config = config_class(str(directory), **{**OPTIONS, **options})
    client = trainer_class(
        model, args=config, train_dataset=data, eval_dataset=data.select(range(4)), processing_class=processing_class,
        **given,
    )  # fmt: skip
    client.train(resume_from_checkpoint=resume or None)
    return client


def figures(trainer: Any) -> list[float]:
    """Returns loss and gradient norm of each step."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(history) == 3
    return [entry[name] for entry in history for name in ("loss", "grad_norm")]


def compare(trainer: str, checkpoint: Path, directory: Path, data: Any, **options: Any) -> Any:
    """Returns the trainer of our model, after comparing it with that of transformers' model."""
    got, expected = (trained(trainer, load(checkpoint), directory, data, **options) for load in (ours, theirs))
    assert_same(figures(got), figures(expected))
    return got


def ids(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


TEXT = {
    "text": (lambda w, n: {"text": w.words(n)}, {}),
    "packed": (lambda w, n: {"text": w.words(n)}, {"packing": True, "max_length": 64}),
    "padding-free": (lambda w, n: {"text": w.words(n)}, {"padding_free": True, "max_length": None}),
    "completions": (lambda w, n: {"prompt": w.words(n) + " ", "completion": w.words(n // 2)}, {}),
    "chats": (
        lambda w, n: {"messages": [*w.message("user", n), *w.message("assistant", n)] * 2},
        {"assistant_only_loss": True},
    ),
}
SFT = long_cases({**COMMON, "data": tuple(TEXT), "label_smoothing_factor": (0.0, 0.1)})


@pytest.mark.parametrize("options", SFT, ids=ids)
def test_sft(options: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path) -> None:
    options = dict(options)
    model_type, data = options.pop("model_type"), options.pop("data")
    make, more = TEXT[data]
    if model_type == "qwen2_vl" and data in ("packed", "padding-free"):
        pytest.skip("transformers' Qwen2-VL lets packed segments attend to each other; see the next test")
    compare("sft", checkpoints[model_type], tmp_path, rows(make), **more, **options)


def test_segments_of_a_vision_language_model_do_not_attend_to_each_other(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model, data = checkpoints["qwen2_vl"], rows(TEXT["text"][0])
    got, expected = (
        figures(trained("sft", ours(model), tmp_path, data, padding_free=value, max_length=None))
        for value in (True, False)
    )
    assert_same(got, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dft"},
        {"neftune_noise_alpha": 5.0},
        {"packing": True, "packing_strategy": "wrapped", "max_length": 32},
        {"peft_config": LoraConfig(r=4)},
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "eager", "pad_to_multiple_of": 64},  # one shape
            marks=pytest.mark.thorough,
        ),
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_sft(options: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path) -> None:
    compare("sft", checkpoints["llama"], tmp_path, rows(TEXT["text"][0]), **options)


def test_sft_in_bf16(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    data = rows(TEXT["text"][0])
    got, expected = (
        figures(trained("sft", load(checkpoints["llama"]), tmp_path, data, bf16=True)) for load in (ours, theirs)
    )
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("model_type", representatives(COMPARED, "llama", "qwen2_vl"))
def test_checkpoints(model_type: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Evaluates, resumes, keeps the best model, and loads into transformers."""
    data, kept = rows(TEXT["text"][0]), {"save_strategy": "steps", "save_steps": 1}
    measured = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    whole = trained("sft", ours(checkpoints[model_type]), tmp_path, data, **kept, **measured)
    losses = [entry["eval_loss"] for entry in whole.state.log_history if "eval_loss" in entry]
    best = ours(Path(whole.state.best_model_checkpoint))
    assert whole.state.best_model_checkpoint.endswith(str(1 + losses.index(min(losses))))
    assert raw_bytes(whole.model.state_dict()) == raw_bytes(best.state_dict())

    last = tmp_path / "last"
    (tmp_path / "checkpoint-3").rename(last)
    resumed = trained("sft", ours(checkpoints[model_type]), tmp_path, data, resume=True, **kept)
    assert raw_bytes(resumed.model.state_dict()) == raw_bytes(ours(last).state_dict())
    resumed.save_model(str(tmp_path / "saved"))
    assert_loads_in_transformers(tmp_path / "saved", resumed.model, tmp_path / "again")


def test_the_options_of_the_guide_train_as_the_defaults_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, with data of one batch: the order of the samples differs."""
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^ligerzoo (train .* --output trl .*) --mixed-precision$", guide, re.MULTILINE)
    data = [{"prompt": f"def f{n}(", "completion": "x):\n    return x" + "\n" * n} for n in range(8)]
    Path("train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in data))
    assert cli.main(command.replace("meta-llama/Llama-3.2-1B", str(LLAMA)).split()) == 0
    logged = [line for line in map(json.loads, Path("trl/log.jsonl").read_text().splitlines()) if "loss" in line]
    got = [[line[name] for line in logged] for name in ("loss", "grad_norm", "lr")]

    config = SFTConfig("theirs", bf16=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True)
    trainer = SFTTrainer(str(LLAMA), args=config, train_dataset=datasets.Dataset.from_list(data))
    trainer.train()
    logged = trainer.state.log_history[:-1]
    expected = [[line[name] for line in logged] for name in ("loss", "grad_norm", "learning_rate")]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=0)
    assert trainer.model.dtype == torch.float32


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_a_model_that_is_not_wrapped_is_refused(trainer: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(checkpoints["llama"])
    assert not hasattr(model.config, "get_text_config")  # PEFT and accelerate ask for it
    with pytest.raises(AttributeError, match=r"LlamaConfig: .*Give the Trainer .*wrap\(model\)"):
        trained(
            trainer, model, tmp_path, datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4)
        )


def test_predictions_and_metrics(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    def accuracy(prediction: Any) -> dict[str, float]:
        right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": float(right[prediction.label_ids[:, 1:] != -100].mean())}

    found = []
    for load in (ours, theirs):
        config = SFTConfig(str(tmp_path), **OPTIONS)
        trainer = SFTTrainer(
            load(checkpoints["llama"]), config, train_dataset=rows(TEXT["text"][0]),
            eval_dataset=rows(TEXT["text"][0]), processing_class=tokenizer(), compute_metrics=accuracy,
        )  # fmt: skip
        metrics, predicted = trainer.evaluate(), trainer.predict(trainer.eval_dataset)
        found.append([metrics["eval_loss"], metrics["eval_accuracy"], float(abs(predicted.predictions).sum()) / 1e4])
    assert_same(*found)


def preferences(w: Writer, n: int) -> dict[str, Any]:
    return {"prompt": w.words(n) + " ", "chosen": w.words(n // 2), "rejected": w.words(n // 3)}


REFERENCES = {
    "loaded": {},
    "precomputed": {"precompute_ref_log_probs": True},
    "synchronized": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "base of the adapters": {"peft_config": LoraConfig(r=4, target_modules=["o_proj"])},
}
DPO = long_cases({**COMMON, "reference": tuple(REFERENCES), "label_smoothing": (0.0, 0.1)})


@pytest.mark.parametrize("options", DPO, ids=ids)
def test_dpo(options: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path) -> None:
    options = dict(options)
    checkpoint, reference = checkpoints[options.pop("model_type")], options.pop("reference")
    data = rows(preferences)
    if checkpoint.name == "qwen2_vl" and reference == "synchronized":  # TRL loads a reference with other parameters
        got, expected = (
            trained("dpo", load(checkpoint), tmp_path, data, ref_model=load(checkpoint), **REFERENCES[reference],
                    **options) for load in (ours, theirs)
        )  # fmt: skip
        assert_same(figures(got), figures(expected))
    else:
        compare("dpo", checkpoint, tmp_path, data, **REFERENCES[reference], **options)


@pytest.mark.parametrize("options", long_cases(COMMON), ids=ids)
def test_kto(options: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path) -> None:
    options = dict(options)
    checkpoint = checkpoints[options.pop("model_type")]
    data = rows(lambda w, n: {"prompt": w.words(n) + " ", "completion": w.words(n // 2), "label": n % 2 == 0})
    compare("kto", checkpoint, tmp_path, data, **options)


def distinct_words(completions: list[Any], **_: Any) -> list[float]:
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(len(set(text.split()))) + len(text) % 3 for text in texts]


SAMPLING = {
    "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8,
    "generation_kwargs": {"suppress_tokens": PLACEHOLDERS}, "reward_funcs": distinct_words,
}  # fmt: skip


@pytest.mark.parametrize("options", long_cases({**COMMON, "beta": (0.0, 0.04)}), ids=ids)
def test_grpo(options: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Completions are sampled: the losses are equal only if all tokens are."""
    options = dict(options)
    checkpoint = checkpoints[options.pop("model_type")]
    compare("grpo", checkpoint, tmp_path, rows(lambda w, n: {"prompt": w.words(n)}), **SAMPLING, **options)


def image_and_messages(w: Writer, n: int) -> dict[str, Any]:
    return {"images": [w.image(n)], "prompt": w.message("user", n)}


IMAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sft": (lambda w, n: {**image_and_messages(w, n), "completion": w.message("assistant", n)}, {"max_length": None}),
    "dpo": (
        lambda w, n: {
            **image_and_messages(w, n), "chosen": w.message("assistant", n), "rejected": w.message("assistant", n // 2)
        },
        {"max_length": None},
    ),
    "grpo": (image_and_messages, {**SAMPLING, "beta": 0.04}),
}  # fmt: skip


@pytest.mark.parametrize("trainer", IMAGES)
def test_images(trainer: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    make, options = IMAGES[trainer]
    compare(trainer, checkpoints["qwen2_vl"], tmp_path, rows(make), processing_class=processor(), **options)


def test_placeholders_of_images_are_never_sampled(checkpoints: dict[str, Path]) -> None:
    model = ours(checkpoints["qwen2_vl"])
    with torch.no_grad():
        model.lm_head.weight[PLACEHOLDERS] = 9 * model.lm_head.weight[5]
    sampled = model.generate(torch.tensor([[5, 6]]), do_sample=True, max_new_tokens=40, eos_token_id=[])
    assert not torch.isin(sampled, torch.tensor(PLACEHOLDERS)).any()


@pytest.mark.parametrize("is_fused_loss", [False, True])
def test_liger_kernel_is_refused(
    is_fused_loss: bool, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """liger-kernel binds its functions to modules of the model when training starts."""

    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        raise AssertionError("called")

    def apply(model: Any, options: Any) -> None:
        forward.__module__ = "liger_kernel.transformers.rms_norm"
        module = model if is_fused_loss else model.model.norm
        module.__dict__["forward"] = MethodType(forward, module)

    monkeypatch.setattr(transformers.trainer, "apply_liger_kernel", apply)
    config = transformers.TrainingArguments(str(tmp_path), use_liger_kernel=True, use_cpu=True, report_to=[])
    trainer = transformers.Trainer(
        ours(checkpoints["llama"]), config, train_dataset=[{"input_ids": [3], "labels": [3]}]
    )
    with pytest.raises(LigerzooError, match="use_liger_kernel: the model has fused kernels"):
        trainer.train()

"""Wrapped models in transformers' Trainer and `generate`, compared with transformers' own models in the same script."""

import copy
import dataclasses
import json
import math
import pickle
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from packaging.version import Version  # noqa: E402
from transformers import PreTrainedModel, Trainer, TrainingArguments  # noqa: E402

import ligerzoo  # noqa: E402
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError  # noqa: E402
from ligerzoo.integrations.transformers import AutoModelForCausalLM, AutoModelForImageTextToText, wrap  # noqa: E402
from ligerzoo.integrations.transformers.versions import CACHE  # noqa: E402
from tests.covering import long_cases  # noqa: E402
from tests.models.comparing import assert_close, raw_bytes, stored_tensors  # noqa: E402
from tests.models.prompts import PROMPTS, prompt  # noqa: E402
from tests.models.tiny import Tiny  # noqa: E402
from tests.models.zoo import COMPARED_TYPES  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

OLD_TRANSFORMERS = Version(transformers.__version__) < Version("5.18")

COMPARED = ("llama", "mixtral", "phi3", "qwen2_vl")
"""Architectures whose training is compared: plain, mixture of experts, fused projections, images."""


def tiny(model_type: str, name: str | None = None) -> Tiny:
    rows: list[Tiny] = import_module(f"tests.models.tiny_{model_type}").CHECKPOINTS
    return rows[0] if name is None else next(row for row in rows if row.name.endswith(name))


def written(model_type: str, directory: Path, name: str | None = None) -> Path:
    tiny(model_type, name).write(directory / "model")
    return directory / "model"


def ours(directory: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)


def auto_class(directory: Path) -> Any:
    has_vision = "vision_config" in (directory / "config.json").read_text()
    return transformers.AutoModelForImageTextToText if has_vision else transformers.AutoModelForCausalLM


def theirs(directory: Path) -> PreTrainedModel:
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return auto_class(directory).from_pretrained(directory, **options).eval()


def text_rows(lengths: tuple[int, ...] = (12, 20, 9, 31, 7, 16, 25, 14)) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 89, (n,), generator=generator).tolist()} for n in lengths]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pads with token 0, on the right, and lets 1 token in 7 have no label."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return {
        "input_ids": padded,
        "attention_mask": mask,
        "labels": padded.masked_fill((mask == 0) | (padded % 7 == 0), -100),
    }


def train(model: Any, directory: Path, resume: bool = False, **options: Any) -> tuple[Trainer, list[float]]:
    """Returns the trainer after 3 steps, and the loss and gradient norm of each."""
    defaults: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "learning_rate": 1e-2, "adam_epsilon": 1e-5, "use_cpu": True, "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    arguments = TrainingArguments(str(directory), **{**defaults, **options})
    trainer = Trainer(model, arguments, train_dataset=text_rows(), eval_dataset=text_rows()[:4], data_collator=collate)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer, [entry[name] for entry in trainer.state.log_history if "loss" in entry
                     for name in ("loss", "grad_norm")]  # fmt: skip


TRAINING: dict[str, tuple[Any, ...]] = {
    "options": (
        {"gradient_accumulation_steps": 4}, {"label_smoothing_factor": 0.1}, {"gradient_checkpointing": True}
    ),
    "model_type": COMPARED,
}  # fmt: skip


@pytest.mark.parametrize("case", long_cases(TRAINING), ids=str)
def test_training_is_that_of_transformers(case: dict[str, Any], tmp_path: Path) -> None:
    model_type, options = case["model_type"], case["options"]
    directory = written(model_type, tmp_path)
    if model_type == "qwen2_vl" and "label_smoothing_factor" in options:
        pytest.skip("transformers does not shift the labels of vision-language models; see the next test")
    expected, figures = train(theirs(directory), tmp_path / "theirs", **options)
    trainer, got = train(ours(directory), tmp_path / "ours", **options)
    torch.testing.assert_close(got, figures, rtol=0, atol=1e-5)
    evaluated, reference = trainer.evaluate()["eval_loss"], expected.evaluate()["eval_loss"]
    assert abs(evaluated - reference) < 1e-5
    metrics = [t.predict(text_rows()[:4]) for t in (trainer, expected)]
    assert_close(*(torch.from_numpy(m.predictions) for m in metrics), "predictions")  # type: ignore[call-arg]


def test_smoothing_shifts_the_labels_of_vision_language_models(tmp_path: Path) -> None:
    directory = written("qwen2_vl", tmp_path)
    model = ours(directory)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[]))
    batch = collate(text_rows((8, 8)))
    logits = theirs(directory)(batch["input_ids"], batch["attention_mask"]).logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), expected, rtol=0, atol=1e-5)


def resumable(model_type: str) -> str:
    """Returns the first checkpoint from which transformers' Trainer can resume.

    It reads config.json into a config without sizes, which fails for rope types that need `max_position_embeddings`.
    """

    def config_of(row: Tiny) -> str:
        return transformers.AutoConfig.for_model(**copy.deepcopy(dict(row.config))).to_json_string()

    rows: list[Tiny] = import_module(f"tests.models.tiny_{model_type}").CHECKPOINTS
    return next(row.name for row in rows if not re.search('"(yarn|llama3|longrope)"', config_of(row)))


OFTEN = (*COMPARED, "deepseek_v3", "gemma2", "gemma3", "gpt_oss", "mllama", "qwen3_next", "qwen3_vl_moe")
"""Architectures of each kind of layer and tower; test_names.py and test_state_dict.py check the names of all."""


@pytest.mark.parametrize(
    "model_type", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.thorough) for name in COMPARED_TYPES]
)
def test_every_architecture_trains_resumes_and_loads(model_type: str, tmp_path: Path) -> None:
    directory, out = written(model_type, tmp_path, resumable(model_type)), tmp_path / "out"
    steps = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole, figures = train(ours(directory), out, **steps)
    assert len(figures) == 4
    kept = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    resumed = ours(directory)
    (out / "checkpoint-2").rename(tmp_path / "last")
    train(resumed, out, resume=True, **steps)
    assert raw_bytes(resumed.state_dict()) == raw_bytes(kept)
    assert raw_bytes(ours(out / "checkpoint-2").state_dict()) == raw_bytes(kept)

    last = out / "checkpoint-2"
    loaded, info = auto_class(directory).from_pretrained(last, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    # What transformers writes from what it loaded is what it would write after loading the first checkpoint.
    loaded.save_pretrained(tmp_path / "again")
    assert raw_bytes(ours(tmp_path / "again").state_dict()) == raw_bytes(kept)


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_infinity_as_transformers_writes_it(model_type: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    dataclasses.replace(tiny(model_type), by_transformers=True, stored_dtype=torch.float32).write(directory)
    entries = json.loads((directory / "config.json").read_text())
    assert entries["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    wrapped = ours(directory)
    assert list(wrapped.config.time_step_limit) == [0.0, math.inf]
    wrapped.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == entries


@pytest.mark.parametrize("model_type", [*COMPARED, "gemma2", "granite", "ernie4_5_moe"])
def test_logits_loss_and_gradients(model_type: str, tmp_path: Path) -> None:
    directory = written(model_type, tmp_path, "biases" if model_type == "ernie4_5_moe" else None)
    models = ours(directory), theirs(directory)
    batch = collate(text_rows((9, 5)))
    for model in models:
        model(**batch).loss.backward()  # in evaluation mode, since Granite's config has dropout
    got, expected = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in models)
    padding = models[1].config.get_text_config().pad_token_id
    for name in got.keys() & expected.keys():
        if padding is not None and name.endswith("embed_tokens.weight"):  # transformers never trains its row
            got[name][padding] = expected[name][padding] = 0
        assert_close(got[name], expected[name], name)
    assert len(got.keys() & expected.keys()) > len(expected) / 2  # towers have other names
    out, reference = (model(**batch) for model in models)
    assert_close(out.logits, reference.logits, "logits")
    torch.testing.assert_close(out.loss, reference.loss, rtol=0, atol=1e-5)
    assert list(out) == [name for name in reference if name != CACHE]
    assert len(models[0](**batch, return_dict=False)) == len(out)
    models[0].train()
    assert list(models[0](**batch)) == ["loss"]
    assert models[0](**batch, logits_to_keep=2).logits.shape[1] == 2


def test_router_logits_and_load_balancing_loss(tmp_path: Path) -> None:
    directory = written("mixtral", tmp_path, "load-balancing loss")
    batch, models = collate(text_rows((9, 5))), (ours(directory), theirs(directory))
    out, reference = (model(**batch) for model in models)
    for name in ("loss", "aux_loss"):
        torch.testing.assert_close(out[name], reference[name], rtol=0, atol=1e-5)
    for got, expected in zip(out.router_logits, reference.router_logits, strict=True):
        assert_close(got, expected, "router logits")
    body = models[0].base_model(batch["input_ids"], batch["attention_mask"], output_router_logits=True, use_cache=False)
    assert len(body.router_logits) == 2
    logits = models[0].head_options.logits(models[0].lm_head(body.last_hidden_state))
    assert_close(logits, out.logits, "logits")
    for model in models:
        model.config.output_router_logits = False
    out, reference = (model(**batch) for model in models)
    assert out.get("aux_loss") is None
    torch.testing.assert_close(out.loss, reference.loss, rtol=0, atol=1e-5)


GENERATION: dict[str, Callable[[Any], dict[str, Any]]] = {
    "greedy": lambda model: {},
    "scores": lambda model: {"return_dict_in_generate": True, "output_scores": True},
    "beams": lambda model: {"num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 1.3},
    "samples": lambda model: {"do_sample": True, "num_return_sequences": 2},
    "assistant": lambda model: {"assistant_model": assistant_of(model), "rows": 1},
    "prompt lookup": lambda model: {"prompt_lookup_num_tokens": 3, "rows": 1},
    "no cache": lambda model: {"use_cache": False},
}


def assistant_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model that proposes some wrong tokens."""
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        assistant.get_input_embeddings().weight[:20] += 0.3
    return assistant


def generated(model: PreTrainedModel, ids: Tensor, mask: Tensor, rows: int | None = None, **options: Any) -> Tensor:
    torch.manual_seed(5)
    common = {"max_new_tokens": 20, "eos_token_id": -1, "pad_token_id": 0, "suppress_tokens": [90, 91]}
    out = model.generate(ids[:rows], attention_mask=mask[:rows], **common, **options)
    return out if isinstance(out, Tensor) else out.sequences


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", GENERATION)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3"])
def test_generation_is_that_of_transformers(model_type: str, mode: str, tmp_path: Path) -> None:
    directory = written(model_type, tmp_path)
    ids = torch.randint(3, 60, (3, 14))
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :2] = 0
    model, other = ours(directory), theirs(directory)
    # Greedily, an assistant changes nothing. The cache of transformers 5.17 fails with one.
    options = {"rows": 1} if mode == "assistant" else GENERATION[mode](other)
    assert torch.equal(generated(model, ids, mask, **GENERATION[mode](model)), generated(other, ids, mask, **options))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["greedy", "beams", "no cache"])
@pytest.mark.parametrize(
    "model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.thorough)]
)
def test_generation_with_images_and_videos(model_type: str, mode: str, tmp_path: Path) -> None:
    if mode == "beams" and OLD_TRANSFORMERS:
        pytest.skip("transformers 5.17 cannot repeat rows without videos")
    directory = written(model_type, tmp_path)
    vision_config = {**tiny(model_type).config["vision_config"], "in_channels": 3}
    p = prompt(PROMPTS["a padded batch"], vision_config)
    inputs = {**p.vision, "mm_token_type_ids": p.types}
    got, expected = (
        generated(m, p.ids, p.mask, **inputs, **GENERATION[mode](m)) for m in (ours(directory), theirs(directory))
    )
    assert torch.equal(got, expected)


def test_cached_keys_become_invalid_beyond_the_original_context(tmp_path: Path) -> None:
    """With LongRoPE, all tokens are processed again once. transformers 5.17 does not, which contradicts `use_cache`."""
    from tests.models.tiny_phi3 import CHECKPOINTS

    row = next(row for row in CHECKPOINTS if row.name.endswith("longrope, original context length"))
    row.write(tmp_path / "model")
    length = row.config["original_max_position_embeddings"]
    ids = torch.randint(3, 89, (1, length - 4))
    expected = generated(theirs(tmp_path / "model"), ids, torch.ones_like(ids), use_cache=False)
    assert torch.equal(generated(ours(tmp_path / "model"), ids, torch.ones_like(ids)), expected)


def test_generator_and_empty_list_of_end_tokens(tmp_path: Path) -> None:
    model = ours(written("llama", tmp_path))
    ids, options = torch.randint(3, 60, (1, 6)), {"do_sample": True, "max_new_tokens": 12, "eos_token_id": []}
    state = torch.get_rng_state()
    first, second = (model.generate(ids, generator=torch.Generator().manual_seed(3), **options) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    model.generation_config.eos_token_id = list(range(101))
    assert model.generate(ids, **options).shape[1] == 18
    with pytest.raises(LigerzooError, match="cache_implementation"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2)


def test_state_dicts_of_checkpoints(tmp_path: Path) -> None:
    """The Trainer resumes with strict=False: other names must be translated or refused, not ignored."""
    for model_type in COMPARED:
        directory = written(model_type, tmp_path / model_type)
        model, state = ours(directory), stored_tensors(directory)
        changed = {name: tensor.float() + 1 for name, tensor in state.items()}
        assert not any(model.load_state_dict(changed, strict=False))
        model.save_pretrained(tmp_path / "out", safe_serialization=True, max_shard_size="20KB")
        assert raw_bytes(stored_tensors(tmp_path / "out")) == raw_bytes(changed)
        with pytest.raises(CheckpointError, match=r"unexpected|missing"):
            model.load_state_dict({**changed, "model.layers.0.another": torch.ones(1)}, strict=False)
    model = ours(written("llama", tmp_path, "tied, only the embedding stored"))
    state = stored_tensors(tmp_path / "model")
    assert not any(model.load_state_dict({name: tensor + 1 for name, tensor in state.items()}))
    assert torch.equal(model.lm_head.weight, state["model.embed_tokens.weight"] + 1)
    with pytest.raises(CheckpointError, match=r"no 'model\.norm\.weight'"):
        model.load_state_dict({name: tensor for name, tensor in state.items() if name != "model.norm.weight"})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", [None, "tied, only the embedding stored"], ids=["untied", "tied"])
def test_part_of_a_state_dict(name: str | None, assign: bool, tmp_path: Path) -> None:
    model = ours(written("llama", tmp_path, name))
    own = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    tied = set() if name is None else {head, embedding}
    for part in ([], ["model.norm.weight"], [head], [embedding], [head, embedding, "model.norm.weight"]):
        result = model.load_state_dict({key: own[key] + 1 for key in part}, strict=False, assign=assign)
        assert result.missing_keys == [key for key in own if key not in part]
        loaded = {*part, *(tied if tied & {*part} else ())}
        assert not result.unexpected_keys
        state = model.state_dict()
        assert {key for key in own if torch.equal(state[key], own[key] + 1)} == loaded
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == bool(tied)
        with pytest.raises(CheckpointError, match="weights are missing"):
            model.load_state_dict({key: own[key] + 2 for key in part}, assign=assign)
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
        model.load_state_dict({key: tensor.clone() for key, tensor in own.items()}, assign=assign)


def test_saving(tmp_path: Path) -> None:
    model = ours(written("llama", tmp_path))
    model.config.pad_token_id = model.generation_config.pad_token_id = 7
    model.save_pretrained(tmp_path / "out", state_dict=dict(model.state_dict()), is_main_process=True)
    again = ours(tmp_path / "out")
    assert (again.config.pad_token_id, again.generation_config.pad_token_id) == (7, 7)
    model.save_pretrained(tmp_path / "none", state_dict={}, is_main_process=False)
    assert not (tmp_path / "none").exists()
    for option in ({"safe_serialization": False}, {"variant": "fp16"}):
        with pytest.raises(LigerzooError, match="not supported"):
            model.save_pretrained(tmp_path / "out", **option)
    model.config.num_attention_heads = 2
    with pytest.raises(ConfigError, match=r"config\.num_attention_heads: changed after the model was built"):
        model.save_pretrained(tmp_path / "out")


def test_resizing(tmp_path: Path) -> None:
    for name in (None, "tied, only the embedding stored"):
        model = ours(written("llama", tmp_path / str(name), name))
        model.resize_token_embeddings(110, pad_to_multiple_of=8)
        assert model(torch.tensor([[111]])).logits.shape == (1, 1, 112)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == (name is not None)
        model.save_pretrained(tmp_path / "out")
        assert theirs(tmp_path / "out").get_input_embeddings().weight.shape[0] == 112


def test_the_wrapper_shares_weights_and_nothing_else(tmp_path: Path) -> None:
    for model_type in ("llama", "phi3"):
        model = ligerzoo.AutoModel.from_pretrained(written(model_type, tmp_path / model_type), dtype=torch.float32)
        wrapped, ids = wrap(model), torch.tensor([[3, 4, 5]])
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter += 0.1
            assert_close(wrapped(ids).logits, model(ids).logits, "logits")
        wrapped.model.embed_tokens.register_forward_hook(lambda *_: pytest.fail("called"))
        model(ids)
        assert isinstance(pickle.loads(pickle.dumps(model)), type(model))  # noqa: S301


def test_copies_and_pickles(tmp_path: Path) -> None:
    model = ours(written("phi3", tmp_path))
    ids = torch.tensor([[3, 4, 5]])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert type(other) is type(model)
        assert torch.equal(other(ids).logits, model(ids).logits)
        with torch.no_grad():
            other.lm_head.weight.zero_()
            other.model.layers[0].self_attn.qkv_proj.weight.zero_()
        assert not torch.equal(other(ids).logits, model(ids).logits)
        assert other.model.zoo_model.model.layers[0] is other.model.layers[0]


def test_names_for_trainers(tmp_path: Path) -> None:
    model = ours(written("qwen2_vl", tmp_path))
    assert type(model).__name__ == "Qwen2VLForConditionalGeneration"
    assert model._no_split_modules == {"PreNormBlock"}
    assert model.lm_head.bias is None
    assert isinstance(model.lm_head, nn.Linear)
    assert isinstance(AutoModelForImageTextToText.from_pretrained(tmp_path / "model"), PreTrainedModel)
    with pytest.raises(ConfigError, match="text model"):
        AutoModelForImageTextToText.from_pretrained(written("llama", tmp_path / "llama"))
    with pytest.raises(LigerzooError, match="another: not an input"):
        model(torch.tensor([[3]]), another=torch.ones(1))
    with pytest.raises(LigerzooError, match="past_key_values: not a cache of this model; got DynamicCache"):
        model(torch.tensor([[3]]), past_key_values=transformers.DynamicCache())


@pytest.mark.parametrize("argument", ["labels", "shift_labels"])
def test_labels_of_another_shape_or_vocabulary_are_refused(argument: str, tmp_path: Path) -> None:
    model, ids = ours(written("llama", tmp_path)), torch.randint(3, 89, (2, 9))
    with pytest.raises(ValueError, match=rf"LlamaForCausalLM: {argument} has shape \(2, 8\).*\(2, 9\)"):
        model(ids, **{argument: ids[:, 1:]})
    with pytest.raises(ValueError, match=rf"{argument}\[1, 3\]: label outside the vocabulary; got 101"):
        model(ids, **{argument: torch.where(torch.arange(18).view(2, 9) == 12, 101, ids)})
    with pytest.raises(ValueError, match=r"expected exactly one of input_ids and inputs_embeds; got neither"):
        model(**{argument: ids})


def test_neftune_and_bf16(tmp_path: Path) -> None:
    directory = written("llama", tmp_path)
    options = {"neftune_noise_alpha": 5.0}
    got, expected = (train(load(directory), tmp_path / "out", **options)[1] for load in (ours, theirs))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    got, expected = (train(load(directory), tmp_path / "out", bf16=True)[1] for load in (ours, theirs))
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer, _ = train(ours(written("mixtral", tmp_path)), tmp_path / "out", load_best_model_at_end=True, **options)
    best = ours(Path(trainer.state.best_model_checkpoint))
    assert raw_bytes(trainer.model.state_dict()) == raw_bytes(best.state_dict())


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.2-1B", nn.Linear(2, 2)], ids=["name", "module"])
def test_other_models_and_names_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"model: not a model of ligerzoo; .* ligerzoo\.from_transformers converts"):
        wrap(model)


def test_a_bare_model_is_refused_by_name(tmp_path: Path) -> None:
    model = ligerzoo.AutoModel.from_pretrained(written("llama", tmp_path))
    with pytest.raises(LigerzooError, match=r"Give the Trainer ligerzoo\.integrations\.transformers\.wrap\(model\)\.$"):
        Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


def test_packed_rows_do_not_predict_across_boundaries(tmp_path: Path) -> None:
    model = ours(written("llama", tmp_path))
    ids, position_ids = torch.randint(3, 89, (1, 9)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    labels = ids.clone()
    labels[0, 4] = -100
    expected = model(ids, position_ids=position_ids, labels=labels).loss
    assert model(ids, position_ids=position_ids, labels=ids).loss == expected
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    flattened = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 5, "max_length_k": 5}
    torch.testing.assert_close(model(ids, position_ids=position_ids, labels=ids, **flattened).loss, expected)

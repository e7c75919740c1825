"""Sequence classifiers against transformers: logits, loss and gradients, and their checkpoints."""

import copy
import dataclasses
import json
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification as Theirs
from transformers import PreTrainedModel

from ligerzoo import AutoModel, AutoModelForSequenceClassification
from ligerzoo.convert.classifier import read_labels
from ligerzoo.convert.fields import SEQUENCE_SUFFIX
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError
from ligerzoo.info import describe
from ligerzoo.models import Labels, Llama, LlamaConfig, MixtralConfig, SequenceClassifier
from ligerzoo.models.sequence_classifier import classification_loss
from tests.covering import every_backend
from tests.models.comparing import assert_close, gradients, raw_bytes, stored_tensors
from tests.models.tiny import EMBEDDING, Tiny
from tests.models.tiny_llama import LLAMA
from tests.models.tiny_phi3 import PHI3
from tests.models.zoo import CHECKPOINTS, TEXT_CHECKPOINTS

PAD = 3
NEW_HEAD = "ignore:.*missing parameters, which keep their initialization. .*score.weight:UserWarning"


def one_of_each() -> Iterator[Tiny]:
    """Yields a checkpoint per architecture that transformers has a classifier of; Granite has none."""
    taken = set()
    for row in TEXT_CHECKPOINTS:
        model_type = row.config["model_type"]
        config = transformers.AutoConfig.for_model(**copy.deepcopy(dict(row.config)))
        if model_type not in taken and type(config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            taken.add(model_type)
            yield row


ROWS = list(one_of_each())
PROBLEMS = {"reward": 1, "single": 3, "multi": 4}


def test_every_text_architecture_of_transformers_is_compared() -> None:
    types = {row.config["model_type"] for row in TEXT_CHECKPOINTS}
    assert types - {row.config["model_type"] for row in ROWS} <= {
        "apertus", "bamba", "ernie4_5", "ernie4_5_moe", "exaone", "falcon_h1", "flint", "gemma4_text", "glm4_moe",
        "glm4_moe_lite", "granite", "granite_swa", "granitemoe_swa", "granitemoehybrid", "hyperclovax", "internlm3",
        "iquestcoder", "kimi_linear", "kolibri1", "lfm2", "lfm2_moe", "lfm3", "llama4_text", "mellum", "minimax_m2",
        "muse_glimmer_text", "nanochat", "nemotron_h", "olmo_hybrid", "olmoe", "qwen3_5_moe_text", "sarvam_mla",
        "sarvam_moe", "youtu",
        "olmo2",  # not in 5.17
    }  # fmt: skip


def write(directory: Path, base: Mapping[str, Any] = LLAMA, **changes: Any) -> PreTrainedModel:
    """Writes a transformers classifier with random weights, saved by transformers."""
    entries = {**copy.deepcopy(dict(base)), "pad_token_id": PAD, **changes}
    config = transformers.AutoConfig.for_model(**entries)
    model = Theirs.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in name else noise)
    model.save_pretrained(directory)
    return Theirs.from_pretrained(directory, attn_implementation="eager").eval()


def labels_for(num_labels: int, rows: int, device: str) -> Tensor:
    if num_labels == PROBLEMS["reward"]:
        return torch.randn(rows, device=device)
    if num_labels == PROBLEMS["single"]:
        return torch.randint(num_labels, (rows,), device=device)
    return torch.randint(2, (rows, num_labels), device=device).float()


def padded(vocab_size: int, device: str, side: str) -> tuple[Tensor, Tensor]:
    """Tokens without the padding token, and padding of 0, 7 and 30 tokens."""
    tokens = torch.randint(PAD + 1, vocab_size, (3, 40), device=device)
    mask = torch.ones_like(tokens)
    for row, count in enumerate((0, 7, 30)):
        if count:
            mask[row, slice(None, count) if side == "left" else slice(-count, None)] = 0
    return tokens.masked_fill(mask == 0, PAD), mask


def under_our_names(theirs: PreTrainedModel, ours: SequenceClassifier, directory: Path) -> dict[str, Tensor]:
    """Returns their gradients in the layout of our parameters: saved as a checkpoint, and loaded as ours."""
    config, expected = copy.deepcopy(theirs), gradients(theirs)
    with torch.no_grad():
        for name, parameter in config.named_parameters():
            parameter.copy_(expected[name])
    config.save_pretrained(directory)
    return dict(AutoModelForSequenceClassification.from_pretrained(directory).state_dict())


# Every problem for the first architecture, one for each of the others.
CASES = [(row, problem) for i, row in enumerate(ROWS) for j, problem in enumerate(PROBLEMS) if i == 0 or i % 3 == j]


@pytest.mark.every_layer
@pytest.mark.parametrize("row, problem", CASES, ids=str)
def test_logits_loss_and_gradients(row: Tiny, problem: str, tmp_path: Path, device: str) -> None:
    number = PROBLEMS[problem]
    theirs = write(tmp_path / "theirs", row.config, num_labels=number).to(device)
    ours = AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs", device=device)
    assert (type(ours), ours.num_labels) == (SequenceClassifier, number)
    for side in ("left", "right"):
        tokens, mask = padded(row.config["vocab_size"], device, side)
        labels = labels_for(number, 3, device)
        for model in (ours, theirs):
            model.zero_grad()
        got = ours(tokens, attention_mask=mask, labels=labels)
        expected = theirs(tokens, attention_mask=mask, labels=labels, **row.positions(mask))
        assert got.logits.shape == (3, number)
        assert_close(got.logits, expected.logits, f"logits, {side}")
        assert_close(got.loss, expected.loss, f"loss, {side}")
    got.loss.backward()
    expected.loss.backward()
    for parameter in theirs.parameters():  # transformers gives padding none, unused experts none
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    theirs_by_name = under_our_names(theirs.cpu(), ours, tmp_path / "gradients")
    for name, parameter in ours.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        want = theirs_by_name[name].to(device)
        if name == "model.embed_tokens.weight":  # transformers never trains the padding token
            gradient, want = gradient[PAD + 1 :], want[PAD + 1 :]
        assert_close(gradient, want, f"gradient of {name}")


@pytest.mark.parametrize("base", [LLAMA, PHI3], ids=["llama", "phi3"])
def test_saving_writes_what_was_loaded(base: Mapping[str, Any], tmp_path: Path) -> None:
    names = {0: "bad", 1: "good", 2: "é"}
    write(tmp_path / "a", base, id2label=names, label2id={v: k for k, v in names.items()},
          problem_type="multi_label_classification")  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "a")
    assert model.labels == Labels(("bad", "good", "é"), "multi_label_classification")
    assert model.labels.id2label == names
    model.save_pretrained(tmp_path / "b")
    assert raw_bytes(stored_tensors(tmp_path / "a")) == raw_bytes(stored_tensors(tmp_path / "b"))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    assert configs[0] == configs[1]


@pytest.mark.every_layer
@pytest.mark.filterwarnings(NEW_HEAD)
@pytest.mark.parametrize(
    "row", [row for row in TEXT_CHECKPOINTS if row.name.endswith(("plain", "on the hub"))], ids=str
)
def test_a_causal_lm_becomes_a_classifier(row: Tiny, tmp_path: Path) -> None:
    """Loaded with a new head, saved, and loaded by transformers."""
    row.write(tmp_path / "lm")
    with pytest.warns(UserWarning, match="missing parameters, which keep their initialization: 'score.weight'"):
        ours = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "lm", dtype=torch.float32, num_labels=3, pad_token_id=PAD
        )
    assert ours.origin.missing == ("score.weight",)
    causal_lm = AutoModel.from_pretrained(tmp_path / "lm", dtype=torch.float32)
    assert all(
        torch.equal(causal_lm.state_dict()[name], x) for name, x in ours.state_dict().items() if name != "score.weight"
    )
    assert 0 < ours.score.weight.std() < 0.05
    assert (ours.score.weight.shape[0], ours.config.pad_token_id) == (3, PAD)

    ours.save_pretrained(tmp_path / "classifier")
    assert "lm_head.weight" not in stored_tensors(tmp_path / "classifier")
    config = json.loads((tmp_path / "classifier" / "config.json").read_text())
    assert config["architectures"] == [expected_class(row)]
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    tokens, mask = padded(row.config["vocab_size"], "cpu", "right")
    assert_close(again(tokens, mask).logits, ours(tokens, mask).logits, "logits")
    if row not in ROWS and row.config["model_type"] not in {other.config["model_type"] for other in ROWS}:
        return  # transformers has no such class
    theirs, report = Theirs.from_pretrained(
        tmp_path / "classifier", output_loading_info=True, attn_implementation="eager"
    )
    assert type(theirs).__name__ == expected_class(row)
    assert not any(report.values()), report
    assert_close(ours(tokens, mask).logits, theirs(tokens, attention_mask=mask).logits, "logits of transformers")


def expected_class(row: Tiny) -> str:
    name = row.config["architectures"][0].replace("ForCausalLM", SEQUENCE_SUFFIX)
    return name.replace("Gemma3For", "Gemma3TextFor").replace("Qwen3_5For", "Qwen3_5TextFor")


# Where a sequence ends


@pytest.fixture
def classifier(device: str) -> SequenceClassifier:
    return small(pad_token_id=PAD).to(device)


def small(num_labels: int = 2, problem_type: str | None = None, **changes: Any) -> SequenceClassifier:
    sizes: dict[str, Any] = {
        "vocab_size": 70, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "initializer_range": 0.2,
    }  # fmt: skip
    config = LlamaConfig(**sizes | changes)
    return AutoModelForSequenceClassification.from_config(config, num_labels=num_labels, problem_type=problem_type)


def test_the_last_token_without_a_padding_token(device: str) -> None:
    model = small().to(device)
    tokens, mask = padded(70, device, "right")
    alone = [model(row[None, : int(shown.sum())]).logits[0] for row, shown in zip(tokens, mask, strict=True)]
    for got in (
        model(tokens, attention_mask=mask).logits,
        model(inputs_embeds=model.get_input_embeddings()(tokens), attention_mask=mask).logits,
    ):
        for one, expected in zip(got, alone, strict=True):
            assert_close(one, expected, "logits")
    message = "3 sequences whose last token is unknown; expected a batch of one .* pad_token_id in the config"
    with pytest.raises(LigerzooError, match=message):
        model(tokens)
    with pytest.raises(LigerzooError, match=message):
        model(tokens, torch.ones(3, 1, 40, 40, dtype=torch.bool, device=device).tril())
    # Without a mask, embeddings have no padding.
    embedded = model(inputs_embeds=model.get_input_embeddings()(tokens[:2, :9])).logits
    assert_close(embedded[1:], model(tokens[1:2, :9]).logits, "logits")


def test_a_row_of_padding_gives_its_first_token(classifier: SequenceClassifier, device: str) -> None:
    tokens = torch.full((2, 5), PAD, device=device)
    assert_close(classifier(tokens).logits[:1], classifier(tokens[:1, :1]).logits, "logits")


def test_packed_sequences(classifier: SequenceClassifier, device: str) -> None:
    tokens = torch.randint(PAD + 1, 70, (1, 30), device=device)
    bounds = torch.tensor([0, 11, 25], device=device)
    labels = torch.tensor([0, 1], device=device)
    got = classifier(tokens, cu_seqlens=bounds, labels=labels)
    alone = [classifier(tokens[:, :11], labels=labels[:1]), classifier(tokens[:, 11:25], labels=labels[1:])]
    assert_close(got.logits, torch.cat([out.logits for out in alone]), "logits")
    assert_close(got.loss, sum(out.loss for out in alone) / 2, "loss")


def test_a_cache(classifier: SequenceClassifier, device: str) -> None:
    tokens = torch.randint(PAD + 1, 70, (2, 30), device=device)
    with torch.no_grad():
        out = classifier(tokens[:, :20], use_cache=True)
        got = classifier(tokens[:, 20:], past_key_values=out.past_key_values)
        assert_close(got.logits, classifier(tokens).logits, "logits")


# Modes


@every_backend
def test_checkpointing_outputs_and_compilation(classifier: SequenceClassifier, device: str, backend: str) -> None:
    tokens, mask = padded(70, device, "right")
    labels = torch.tensor([0, 1, -100], device=device)
    options = {"attention_mask": mask, "labels": labels, "output_hidden_states": True, "output_attentions": True}
    expected = classifier(tokens, **options)
    assert list(expected) == ["loss", "logits", "hidden_states", "attentions"]
    assert len(expected.hidden_states) == 3
    expected.loss.backward()
    required = gradients(classifier)
    classifier.zero_grad()
    classifier.gradient_checkpointing_enable()
    torch._dynamo.reset()
    compiled = torch.compile(classifier, backend=backend, fullgraph=True)
    for model in (classifier, compiled):
        out = model(tokens, **options)
        out.loss.backward()
        assert_close(out.loss, expected.loss, "loss")
        for name, gradient in gradients(classifier).items():
            assert_close(gradient, required[name], name)
        classifier.zero_grad()


def test_mixtures_have_no_load_balancing_loss() -> None:
    sizes: dict[str, Any] = {"vocab_size": 70, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
    config = MixtralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, output_router_logits=True, router_aux_loss_coef=100.0
    )
    model = AutoModelForSequenceClassification.from_config(config)
    out = model(torch.arange(9)[None], labels=torch.tensor([1]))
    assert_close(out.loss, classification_loss(out.logits, torch.tensor([1])), "loss")


def test_copies_and_resizing(classifier: SequenceClassifier, tmp_path: Path, device: str) -> None:
    tokens, mask = padded(70, device, "left")
    expected = classifier(tokens, mask).logits
    for twin in (copy.deepcopy(classifier), pickle.loads(pickle.dumps(classifier))):  # noqa: S301
        assert torch.equal(twin(tokens, mask).logits, expected)
    classifier.resize_token_embeddings(75)
    assert classifier.get_output_embeddings() is None
    assert torch.equal(classifier(tokens, mask).logits, expected)
    classifier.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, device=device)
    assert (again.config, again.labels) == (classifier.config, classifier.labels)
    assert Theirs.from_pretrained(tmp_path).get_input_embeddings().weight.shape[0] == 75


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    model = small(tie_word_embeddings=True, pad_token_id=PAD)
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.config.tie_word_embeddings
    again.save_pretrained(tmp_path / "b")
    assert raw_bytes(stored_tensors(tmp_path)) == raw_bytes(stored_tensors(tmp_path / "b"))


def without_embedding(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}


@pytest.mark.filterwarnings(NEW_HEAD)
@pytest.mark.parametrize("base", [LLAMA, PHI3], ids=["llama", "phi3"])
def test_a_tied_causal_lm_that_stores_only_the_head(base: Mapping[str, Any], tmp_path: Path) -> None:
    """The head is the embedding, as for a causal language model."""
    tied = Tiny("tied", {**base, "tie_word_embeddings": True})
    tied.write(tmp_path / "both")
    dataclasses.replace(tied, tensors=without_embedding).write(tmp_path / "head")
    assert EMBEDDING not in stored_tensors(tmp_path / "head")
    both, head = (AutoModelForSequenceClassification.from_pretrained(tmp_path / name) for name in ("both", "head"))
    for model in (both, head):
        del model.score
    assert raw_bytes(dict(head.state_dict())) == raw_bytes(dict(both.state_dict()))
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path / "head", pad_token_id=PAD)
    head.save_pretrained(tmp_path / "classifier")
    assert not any(Theirs.from_pretrained(tmp_path / "classifier", output_loading_info=True)[1].values())
    with pytest.raises(CheckpointError, match=rf"tensors are missing; got no '{EMBEDDING}'"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "head", tie_word_embeddings=False)


# Losses and labels


@pytest.mark.parametrize(
    "labels, problem_type, num_labels, message",
    [
        (torch.zeros(2), "single_label_classification", 3, r"with 3 labels; got \(2,\) torch.float32; expected"),
        (torch.zeros(2), "multi_label_classification", 3, r"expected \(2, 3\) numbers"),
        (torch.zeros(3), None, 1, r"labels do not fit regression with 1 labels; got \(3,\)"),
        (torch.zeros(3, dtype=torch.int64), None, 3, r"expected \(2,\) label indices"),
    ],
)  # fmt: skip
def test_labels_that_do_not_fit(labels: Tensor, problem_type: Any, num_labels: int, message: str) -> None:
    with pytest.raises(LigerzooError, match=message):
        classification_loss(torch.randn(2, num_labels), labels, problem_type)


@pytest.mark.parametrize(
    "name, message",
    [
        ("lables", r"lables: not an input of SequenceClassifier\. Did you mean 'labels'\?"),
        ("output_router_logits", "output_router_logits: not an input of SequenceClassifier"),
        ("num_items_in_batch", "num_items_in_batch: not an input of SequenceClassifier"),
    ],
)
def test_misspelt_inputs(name: str, message: str) -> None:
    with pytest.raises(LigerzooError, match=message):
        small()(torch.arange(5)[None], **{name: torch.tensor([1])})


@pytest.mark.parametrize("problem_type, num_labels", [("clustering", 3), ("single_label_classification", 1)])
def test_invalid_problem_types(problem_type: Any, num_labels: int) -> None:
    with pytest.raises(ConfigError, match="problem_type: "):
        classification_loss(torch.randn(2, num_labels), torch.tensor([0, 0]), problem_type)


@pytest.mark.parametrize(
    "labels, error, message",
    [
        ([1, 0], TypeError, "SequenceClassifier: labels is a list; expected a tensor. Convert it with torch.tensor"),
        (torch.tensor([1, 3]), LigerzooError, "labels: no label has this index; got .3.; expected 0 to 2, or -100"),
        (torch.tensor([-1, -100]), LigerzooError, "labels: no label has this index; got .-1.; expected 0 to 2"),
        (torch.tensor([1.0, 0.0]), LigerzooError, "got .2,. torch.float32; .* Integers choose one label for each seq"),
    ],
)
def test_labels_of_another_type_or_value(labels: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        classification_loss(torch.randn(2, 3), labels)


def test_losses_in_bf16_are_computed_in_fp32() -> None:
    logits, labels = torch.randn(5, 1).bfloat16(), torch.randint(9, (5, 1))
    loss = classification_loss(logits, labels)
    assert_close(loss, (logits.float() - labels).square().mean(), "loss")


@pytest.mark.parametrize(
    "raw, options, expected",
    [
        ({}, {}, ("LABEL_0", "LABEL_1")),
        ({"num_labels": 1}, {}, ("LABEL_0",)),
        ({"id2label": {"1": "b", "0": "a"}}, {}, ("a", "b")),
        ({"label2id": {"b": 1, "a": 0}}, {}, ("a", "b")),
        ({"id2label": {"1": "b", "0": "a"}, "label2id": {"a": 0, "b": 1}}, {"num_labels": 2}, ("a", "b")),
        ({"id2label": {"1": "b", "0": "a"}}, {"num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {"1": "b", "0": "a"}, "label2id": {"a": 0, "b": 1}}, {"id2label": {0: "c"}}, ("c",)),
        ({"num_labels": 5}, {"id2label": {0: "c", 1: "d"}, "label2id": {"c": 0, "d": 1}}, ("c", "d")),
    ],
)
def test_names_of_labels(raw: dict[str, Any], options: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert read_labels(raw, options).names == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_labels": 0}, "num_labels: not a number of labels; got 0"),
        ({"num_labels": 2**40}, "num_labels: not a number of labels"),
        ({"num_labels": 3, "id2label": {0: "a"}}, "num_labels: differs from the number of names; got 3; expected 1"),
        ({"id2label": {0: "a", 2: "b"}}, "id2label: invalid indices of labels; got '0', '2'; expected 0 to 1"),
        ({"id2label": {0: "a"}, "label2id": {"b": 0}}, "label2id: contradicts id2label"),
        ({"id2label": ["a"]}, r"id2label: not a dictionary; got \['a'\]; expected a dictionary such as {0: \"negative"),
        ({"problem_type": "clustering"}, "problem_type: unknown; got 'clustering'; expected 'regression'"),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, "problem_type: a single label leaves"),
    ],
)
def test_invalid_labels(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoModelForSequenceClassification.from_config(small().config, **options)


# Checkpoints that do not fit


def test_a_causal_lm_refuses_a_classifier_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    for load in (AutoModel.from_pretrained, Llama.from_pretrained):
        with pytest.raises(ConfigError, match=r"is a classifier; .* Load it with AutoModelForSequenceClass"):
            load(tmp_path)


def test_a_description_names_the_class(tmp_path: Path) -> None:
    write(tmp_path)
    page = describe(tmp_path)
    assert "sequence classifier with the decoder of Llama ('LlamaForSequenceClassification')" in page
    assert re.search(r"  head +64 ", page), page


def test_a_classifier_needs_its_head(tmp_path: Path) -> None:
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"score.weight'?: wrong shape; got \(2, 32\); expected \(3, 32\)"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    Tiny("llama", LLAMA).write(tmp_path / "lm")
    (tmp_path / "lm" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tensors are missing; got no 'score.weight'"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm")


def test_misspelt_options(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"num_label: unknown; .* Did you mean 'num_labels'"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_label=3)
    with pytest.raises(ConfigError, match="argument problem_type: unknown"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, problem_type="x")


def test_models_with_images_are_refused(tmp_path: Path) -> None:
    row = next(row for row in CHECKPOINTS if row.config["model_type"] == "qwen2_vl")
    row.write(tmp_path)
    with pytest.raises(ConfigError, match=r"Qwen2VL: a classifier has a decoder only; .* that read images"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_registered_classes(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class MineConfig(LlamaConfig):
        pass

    class Mine(Llama):
        pass

    class Louder(Mine):
        def embed(self, x: Tensor, context: Any) -> Tensor:
            return 2 * self.get_input_embeddings()(x)

    @dataclass(frozen=True, kw_only=True)
    class LouderConfig(MineConfig):
        pass

    AutoModel.register(MineConfig, Mine, model_type="mine-for-classification")
    AutoModel.register(LouderConfig, Louder, model_type="louder-for-classification")
    sizes = vars(small().config)
    model = AutoModelForSequenceClassification.from_config(MineConfig(**sizes), num_labels=3)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["MineForSequenceClassification"]
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokens = torch.arange(9)[None]
    assert_close(again(tokens).logits, model(tokens).logits, "logits")
    with pytest.raises(ConfigError, match="Louder: a classifier has a decoder only; got a method `embed`"):
        AutoModelForSequenceClassification.from_config(LouderConfig(**sizes))


def test_a_class_that_sets_a_dtype_is_refused_for_another() -> None:
    @dataclass(frozen=True, kw_only=True)
    class WideConfig(LlamaConfig):
        pass

    class Wide(Llama):
        def __init__(self, config: WideConfig) -> None:
            super().__init__(config)
            self.model.layers[0].double()

    AutoModel.register(WideConfig, Wide, model_type="wide-for-classification")
    config = WideConfig(**vars(small().config))
    model = AutoModelForSequenceClassification.from_config(small().config, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match=r"do not have the given dtype; got torch\.float64 in"):
        AutoModelForSequenceClassification.from_config(config, dtype="bfloat16")

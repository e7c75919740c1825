"""Classifiers of sequences and tokens over encoders, and of tokens over decoders, against transformers."""

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

import ligerzoo
from ligerzoo import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForTokenClassification
from ligerzoo.adapters import add_lora, load_adapter, save_adapter
from ligerzoo.convert import architecture_of_model
from ligerzoo.convert.fields import SEQUENCE_SUFFIX, TOKEN_SUFFIX
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.info import describe
from ligerzoo.models import BertConfig, Labels, ModernBertConfig, SequenceClassifier, TokenClassifier
from ligerzoo.models.classifier import Classifier
from tests.models.comparing import assert_close, gradients, raw_bytes, stored_tensors, under_their_names
from tests.models.tiny_bert import BERT
from tests.models.tiny_gemma import CHECKPOINTS as GEMMA
from tests.models.tiny_llama import LLAMA
from tests.models.tiny_modernbert import BIASES, MODERNBERT
from tests.models.tiny_phi3 import PHI3
from tests.models.tiny_roberta import ROBERTA

logging.disable_progress_bar()
logging.set_verbosity_error()

KINDS = {
    "SequenceClassification": AutoModelForSequenceClassification,
    "TokenClassification": AutoModelForTokenClassification,
}
MLM = "MaskedLM"
ADAPTED = {**KINDS, MLM: AutoModelForMaskedLM}
MODERN = MODERNBERT | {"pad_token_id": 1}
ENCODERS: dict[str, Mapping[str, Any]] = {
    "bert": BERT,
    "bert, other numbers": BERT | {"layer_norm_eps": 0.01, "type_vocab_size": 1, "num_attention_heads": 2},
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA | {"model_type": "xlm-roberta", "type_vocab_size": 2},
    "modernbert, mean": MODERN,
    "modernbert, cls, biases": MODERN | BIASES | {"classifier_pooling": "cls", "local_attention": 5},
}
CASES = [(kind, name) for name in ENCODERS for kind in KINDS]


def write(directory: Path, kind: str, base: Mapping[str, Any], **changes: Any) -> PreTrainedModel:
    """Writes a transformers classifier with random weights, saved by transformers."""
    config = transformers.AutoConfig.for_model(**{**copy.deepcopy(dict(base)), "num_labels": 3, **changes})
    theirs = getattr(transformers, f"AutoModelFor{kind}")
    model = theirs.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if re.search(r"norm\w*\.weight$", name, re.IGNORECASE) else noise)
    model.save_pretrained(directory)
    loaded: PreTrainedModel = theirs.from_pretrained(directory, attn_implementation="eager").eval()
    return loaded


def inputs_of(config: Any) -> dict[str, Tensor]:
    """Rows with padding on the right, and without the padding token elsewhere."""
    tokens = torch.randint(6, config.vocab_size, (3, 40))
    mask = torch.ones_like(tokens)
    mask[1, 33:] = mask[2, 10:] = 0
    inputs = {"input_ids": tokens.masked_fill(mask == 0, config.pad_token_id), "attention_mask": mask}
    if types := getattr(config, "type_vocab_size", 0):
        inputs["token_type_ids"] = torch.randint(types, tokens.shape)
    return inputs


def labels_of(model: Classifier, mask: Tensor) -> Tensor:
    if isinstance(model, SequenceClassifier):
        return torch.tensor([2, 0, 1])
    return torch.randint(3, mask.shape).masked_fill((mask == 0) | (torch.rand(mask.shape) < 0.2), -100)


@pytest.mark.parametrize("kind, name", CASES)
def test_logits_loss_gradients_and_files(kind: str, name: str, tmp_path: Path, device: str) -> None:
    theirs = write(tmp_path / "a", kind, ENCODERS[name]).to(device)
    ours = KINDS[kind].from_pretrained(tmp_path / "a", device=device)
    inputs = {key: value.to(device) for key, value in inputs_of(ours.config).items()}
    mask = inputs["attention_mask"]
    labels = labels_of(ours, mask.cpu()).to(device)
    results = []
    for model in (ours, theirs):
        out = model(**inputs, labels=labels)
        out.loss.backward()
        logits = out.logits if kind.startswith("Seq") else out.logits[mask == 1]
        results.append((out.loss.detach(), logits.detach()))
    (loss, logits), (their_loss, their_logits) = results
    assert_close(logits, their_logits, "logits")
    assert_close(loss, their_loss, "loss")
    expected = gradients(theirs)
    got = under_their_names(ours, gradients(ours), expected)
    assert got.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for key, gradient in expected.items():
        scale = largest if key.endswith("key.bias") else gradient.abs().max().item()  # it changes no probability
        assert_close(got[key], gradient, f"gradient of {key}", max(scale, 1e-3 * largest))
    ours.save_pretrained(tmp_path / "b")
    assert raw_bytes(stored_tensors(tmp_path / "a")) == raw_bytes(stored_tensors(tmp_path / "b"))
    configs = [json.loads((tmp_path / directory / "config.json").read_text()) for directory in "ab"]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bert", "modernbert, mean"])
def test_padding_and_packing_give_each_text_alone(kind: str, name: str, tmp_path: Path, device: str) -> None:
    write(tmp_path, kind, ENCODERS[name])
    model = KINDS[kind].from_pretrained(tmp_path, device=device)
    tokens = torch.randint(6, 101, (2, 20), device=device)
    mask = torch.ones_like(tokens)
    mask[1, :12] = 0
    texts = [tokens[:1], tokens[1:, 12:]]
    expected = torch.cat([model(text).logits.flatten(0, -2) for text in texts])
    bounds = torch.tensor([0, 20, 28], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    calls = {
        "packed by a mask": model(tokens, mask),
        "packed by the user": model(torch.cat(texts, 1), cu_seqlens=bounds),
        "padding is computed": model(tokens, mask, positions),
    }
    for what, out in calls.items():
        logits = out.logits
        if kind.startswith("Token"):
            logits = logits[0] if what == "packed by the user" else logits[mask == 1]
        assert_close(logits, expected, what)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert, mean"])
def test_an_encoder_becomes_a_classifier(kind: str, name: str, tmp_path: Path) -> None:
    """Loaded with a new head, saved, and loaded by transformers."""
    config = transformers.AutoConfig.for_model(**copy.deepcopy(dict(ENCODERS[name])))
    encoder = transformers.AutoModelForPreTraining if name == "bert" else transformers.AutoModelForMaskedLM
    encoder.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "lm")
    with pytest.warns(UserWarning, match="missing parameters, which keep their initialization: .*'score.weight'"):
        ours = KINDS[kind].from_pretrained(tmp_path / "lm", id2label={0: "bad", 1: "good"})
    assert ours.labels == Labels(("bad", "good"))
    has_head = name == "bert" and kind.startswith("Seq")  # its pooler is trained with the second task
    stored = stored_tensors(tmp_path / "lm")
    if has_head:
        assert torch.equal(ours.head.dense.weight, stored["bert.pooler.dense.weight"])
    if name.startswith("modern"):
        assert torch.equal(ours.head.dense.weight, stored["head.dense.weight"])
    ours.save_pretrained(tmp_path / "classifier")
    theirs, report = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        tmp_path / "classifier", output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] | report["mismatched_keys"] | report["unexpected_keys"]
    assert theirs.config.id2label == {0: "bad", 1: "good"}
    inputs = inputs_of(ours.config)
    mask = inputs["attention_mask"] == 1
    got, expected = (model(**inputs).logits for model in (ours, theirs.eval()))
    assert_close(*((got, expected) if kind.startswith("Seq") else (got[mask], expected[mask])), "logits")


def test_a_bare_encoder_becomes_a_classifier(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(**copy.deepcopy(BERT))
    transformers.AutoModel.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="missing parameters, which keep their initialization: 'score.weight', 'score"):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    assert torch.equal(model.head.dense.weight, stored_tensors(tmp_path)["pooler.dense.weight"])
    assert architecture_of_model(model).hf_class == "BertForSequenceClassification"


@pytest.mark.parametrize("base", [LLAMA, PHI3, GEMMA[0].config], ids=["llama", "phi3", "gemma"])
def test_decoders_classify_tokens(base: Mapping[str, Any], tmp_path: Path, device: str) -> None:
    theirs = write(tmp_path / "a", "TokenClassification", base, pad_token_id=3).to(device)
    ours = AutoModelForTokenClassification.from_pretrained(tmp_path / "a", device=device)
    inputs = {key: value.to(device) for key, value in inputs_of(ours.config).items()}
    labels = labels_of(ours, inputs["attention_mask"].cpu()).to(device)
    got, expected = (model(**inputs, labels=labels) for model in (ours, theirs))
    is_token = inputs["attention_mask"] == 1
    assert_close(got.logits[is_token], expected.logits[is_token], "logits")
    assert_close(got.loss, expected.loss, "loss")
    got.loss.backward()
    expected.loss.backward()
    assert_close(ours.score.weight.grad, theirs.score.weight.grad, "gradient of the head")
    ours.save_pretrained(tmp_path / "b")
    assert raw_bytes(stored_tensors(tmp_path / "a")) == raw_bytes(stored_tensors(tmp_path / "b"))
    count = int((labels != -100).sum())
    twice = ours(**inputs, labels=labels, num_items_in_batch=2 * count).loss
    assert_close(2 * twice, got.loss, "loss of another number of items")
    ours.eval()
    first = ours(inputs["input_ids"][:1, :7], use_cache=True)
    rest = ours(inputs["input_ids"][:1, 7:], past_key_values=first.past_key_values)
    assert_close(torch.cat([first.logits, rest.logits], 1), got.logits[:1], "logits with a cache")


SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
CONFIG = BertConfig(**SIZES, num_attention_heads=4)
TOKENS = torch.arange(40).view(2, 20)


@pytest.mark.thorough
def test_compiled_code_and_checkpointing_give_the_same() -> None:
    config = ModernBertConfig(**SIZES, num_attention_heads=4, sliding_window=6, classifier_pooling="mean")
    model, mask = AutoModelForSequenceClassification.from_config(config), torch.ones_like(TOKENS)
    mask[0, :5] = 0

    def run(call: Any) -> list[Tensor]:
        model.zero_grad()
        loss = call(TOKENS, mask, labels=torch.tensor([0, 1])).loss
        loss.backward()
        return [loss.detach(), *gradients(model).values()]

    expected = run(model)
    model.gradient_checkpointing_enable()
    assert all(map(torch.equal, run(model), expected))
    model.gradient_checkpointing_disable()
    for got, one in zip(run(torch.compile(model, backend="eager", fullgraph=True)), expected, strict=True):
        assert_close(got, one, "compiled", max(one.abs().max().item(), 1e-3))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT and transformers
@pytest.mark.parametrize(
    "kind, name", [(kind, "bert") for kind in ADAPTED] + [(MLM, "roberta"), (MLM, "modernbert, mean")]
)
def test_adapters_have_the_names_of_peft(kind: str, name: str, tmp_path: Path) -> None:
    """PEFT loads an adapter of ours into transformers' model, and ours loads it again."""
    peft = pytest.importorskip("peft")
    theirs = write(tmp_path / "model", kind, ENCODERS[name])
    model = ADAPTED[kind].from_pretrained(tmp_path / "model")
    add_lora(model, rank=2, trained=[] if kind == MLM else "score")  # as PEFT does
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.05)
    save_adapter(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == {"SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS"}.get(kind)
    inputs = inputs_of(model.config)
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    again = ADAPTED[kind].from_pretrained(tmp_path / "model")
    load_adapter(again, tmp_path / "adapter")
    mask = inputs["attention_mask"] == 1
    got, expected, loaded = (one(**inputs).logits for one in (model, adapted, again))
    pick = slice(None) if kind.startswith("Seq") else mask
    assert_close(got[pick], expected[pick], "logits in PEFT")
    assert_close(loaded, got, "logits of the adapter")


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    model = AutoModelForTokenClassification.from_config(CONFIG, num_labels=3)
    assert isinstance(model, TokenClassifier)
    with pytest.raises(LigerzooError, match=r"labels has shape \(2, 19\); expected \(2, 20\)"):
        model(TOKENS, labels=TOKENS[:, 1:])
    with pytest.raises(LigerzooError, match=r"no label has this index; got \[3, 4.*-100 for an ignored token"):
        model(TOKENS, labels=TOKENS % 5)
    with pytest.raises(LigerzooError, match=r"lables: not an input of EncoderTokenClassifier\. Did you mean 'labels'"):
        model(TOKENS, lables=TOKENS)
    with pytest.raises(LigerzooError, match="an encoder, whose tokens attend to later ones, has no generate"):
        model.generate(TOKENS)
    model.save_pretrained(tmp_path)
    assert "token classifier with the encoder of Bert ('BertForTokenClassification')" in describe(tmp_path)
    with pytest.raises(ConfigError, match=r"another kind of classifier.*AutoModelForTokenClassification"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the checkpoint is a classifier.*AutoModelForTokenClassification"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="classifier_pooling: invalid value; got 'max'"):
        ModernBertConfig(classifier_pooling="max")


def test_public_names() -> None:
    for kind, suffix in zip(KINDS, (SEQUENCE_SUFFIX, TOKEN_SUFFIX), strict=True):
        assert getattr(ligerzoo, f"AutoModelFor{kind}") is KINDS[kind]
        assert suffix == f"For{kind}"
        model = KINDS[kind].from_config(CONFIG, device="meta")
        assert isinstance(model.score, nn.Linear)
        assert model.num_labels == 2

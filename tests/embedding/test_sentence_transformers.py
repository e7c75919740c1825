"""Embedding models against sentence-transformers: embeddings, prompts, truncation, similarity, files both ways."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from ligerzoo import AutoModelForEmbedding, adapters
from ligerzoo.models import EmbeddingModel
from tests.embedding.sentence_models import MODELS, Sentences, imported, texts, write_sentence_model
from tests.models.comparing import raw_bytes, stored_tensors

logging.disable_progress_bar()
logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module", params=MODELS, ids=str)
def row(request: pytest.FixtureRequest) -> Sentences:
    found: Sentences = request.param
    return found


@pytest.fixture(scope="module")
def both(row: Sentences, tmp_path_factory: pytest.TempPathFactory) -> tuple[EmbeddingModel, Any, Path]:
    pytest.importorskip("sentence_transformers")
    directory = tmp_path_factory.mktemp(str(row)) / "model"
    theirs = write_sentence_model(directory, row)
    return AutoModelForEmbedding.from_pretrained(directory), theirs, directory


def test_embeddings_equal(both: tuple[EmbeddingModel, Any, Path], device: str) -> None:
    ours, theirs, _ = both
    ours.to(device)
    for options in (
        {},
        {"prompt_name": "query"},
        {"prompt": "an tiger that was : "},
        {"truncate_dim": 7},
        {"truncate_dim": 9, "normalize": True, "prompt_name": "document"},
    ):
        their_options = {("normalize_embeddings" if name == "normalize" else name): v for name, v in options.items()}
        want = theirs.encode(texts(), batch_size=5, convert_to_tensor=True, **their_options)
        got = ours.encode(texts(), batch_size=3, **options)
        torch.testing.assert_close(got.cpu(), want, **TOLERANCE)
        one = ours.encode(texts()[4], **options)
        torch.testing.assert_close(one, got[4], **TOLERANCE)
    torch.testing.assert_close(ours.similarity(want[:3], want).cpu(), theirs.similarity(want[:3], want), **TOLERANCE)
    ours.cpu()


def files_of(directory: Path) -> dict[str, Any]:
    """Returns the contents of a directory's files by relative path, of those with weights the tensors."""
    paths = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    others = {name: path.read_bytes() for name, path in paths.items() if name != "model.safetensors"}
    return {**others, "weights": raw_bytes(stored_tensors(directory))}


def test_saving_writes_the_same_files(both: tuple[EmbeddingModel, Any, Path], tmp_path: Path) -> None:
    ours, _, directory = both
    ours.save_pretrained(tmp_path)
    assert files_of(tmp_path) == files_of(directory)


def test_changed_settings_are_saved(both: tuple[EmbeddingModel, Any, Path], tmp_path: Path) -> None:
    """Both read what was saved, in which other entries and the files of others stay."""
    _, _, directory = both
    ours = AutoModelForEmbedding.from_pretrained(directory, max_length=9)
    ours.settings = replace(ours.settings, prompts={"a": "tiger : "}, default_prompt_name="a", dimensions=11)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1.1)
    ours.save_pretrained(tmp_path)
    theirs = imported().SentenceTransformer(str(tmp_path), device="cpu")
    want = theirs.encode(texts(), convert_to_tensor=True)
    assert want.shape == (12, 11)
    again = AutoModelForEmbedding.from_pretrained(tmp_path)
    assert again.settings == ours.settings
    for model in (ours, again):
        torch.testing.assert_close(model.encode(texts()), want, **TOLERANCE)
    name = "config_sentence_transformers.json"
    before, after = (json.loads((path / name).read_text()) for path in (directory, tmp_path))
    assert before["__version__"] == after["__version__"]


OLD_POOLING = (
    "cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"
)  # fmt: skip
MODELS_OF_OLD = "sentence_transformers.models"


def test_files_of_older_versions(tmp_path: Path) -> None:
    """Flags in place of modes, `max_seq_length`, lower case, and no file of settings, as MiniLM's."""
    pytest.importorskip("sentence_transformers")
    directory = tmp_path / "model"
    write_sentence_model(directory, MODELS[0])
    (directory / "config_sentence_transformers.json").unlink()
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{MODELS_OF_OLD}.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    flags = {f"pooling_mode_{name}": name in ("max_tokens", "mean_tokens") for name in OLD_POOLING}
    (directory / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    (directory / "2_Normalize/config.json").unlink()
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12, "do_lower_case": True}))
    (directory / "2_Normalize").rmdir()  # git stores no empty directory
    ours = AutoModelForEmbedding.from_pretrained(directory)
    theirs = imported().SentenceTransformer(str(directory), device="cpu")
    upper = [text.title() for text in texts()]
    got = ours.encode(upper)
    torch.testing.assert_close(got, theirs.encode(upper, convert_to_tensor=True), **TOLERANCE)
    assert got.shape == (12, 64)
    ours.save_pretrained(tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(directory)


def test_a_new_model_is_one_of_sentence_transformers(tmp_path: Path) -> None:
    """Files that they have not written: a decoder of the zoo, pooling, and a tokenizer."""
    pytest.importorskip("sentence_transformers")
    source = tmp_path / "model"
    write_sentence_model(source, MODELS[3])
    shutil.rmtree(source / "1_Pooling")
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (source / name).unlink()
    ours = AutoModelForEmbedding.from_pretrained(source, pooling=("lasttoken", "mean"), prompts={"query": "to : "})
    ours.save_pretrained(tmp_path / "new")
    theirs = imported().SentenceTransformer(str(tmp_path / "new"), device="cpu")
    want = theirs.encode(texts(), convert_to_tensor=True, prompt_name="query")
    for model in (ours, AutoModelForEmbedding.from_pretrained(tmp_path / "new")):
        torch.testing.assert_close(model.encode(texts(), prompt_name="query"), want, **TOLERANCE)


def test_they_read_our_adapters(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("peft")
    theirs = write_sentence_model(tmp_path / "model", MODELS[3])
    ours = AutoModelForEmbedding.from_pretrained(tmp_path / "model")
    adapters.add_lora(ours, rank=2)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapters.save_adapter(ours, tmp_path / "adapter")
    theirs.load_adapter(str(tmp_path / "adapter"))
    torch.testing.assert_close(ours.encode(texts()), theirs.encode(texts(), convert_to_tensor=True), **TOLERANCE)

"""Embedding models: packed, padded and single texts, loading and saving, refusals."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from ligerzoo import AutoModelForEmbedding, Tokenizer, adapters
from ligerzoo.encoding import embed_rows
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError
from ligerzoo.models import (
    BertConfig,
    DenseStage,
    EmbeddingModel,
    EmbeddingSettings,
    Gemma3Config,
    LlamaConfig,
    ModernBertConfig,
    NormalizeStage,
    PoolingStage,
)
from tests.train.tiny_run import SIZES, write_checkpoint, write_tokenizer

SETTINGS = EmbeddingSettings(
    stages=(PoolingStage(modes=("mean", "max")), DenseStage(out_features=24), NormalizeStage(path="3_Normalize")),
    prompts={"query": "liger: "},
    max_length=40,
)
TEXTS = ["liger", "a tiger and a lion", "", "cats " * 30]


def new_model(**changes: Any) -> EmbeddingModel:
    return AutoModelForEmbedding.from_config(LlamaConfig(**{**SIZES, "initializer_range": 0.2, **changes}), SETTINGS)


def write_new_model(directory: Path) -> None:
    """Writes a model and its tokenizer, of which there is a copy."""
    torch.manual_seed(0)
    write_tokenizer(directory / "tokenizer")
    model = new_model()
    model.tokenizer = Tokenizer.from_pretrained(directory / "tokenizer")
    model.save_pretrained(directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embedding")
    write_new_model(directory)
    return directory


@pytest.fixture(scope="module")
def model(directory: Path, device: str) -> EmbeddingModel:
    return AutoModelForEmbedding.from_pretrained(directory, device=device)


def test_a_text_has_one_embedding_whatever_is_around_it(model: EmbeddingModel) -> None:
    together = model.encode(TEXTS)
    assert together.shape == (4, model.embedding_size) == (4, 24)
    alone = torch.stack([model.encode(text) for text in TEXTS])
    torch.testing.assert_close(together, alone)
    inputs = {side: model.tokenizer(TEXTS, padding_side=side, truncation=True, max_length=40, return_tensors="pt")
              for side in ("left", "right")}  # fmt: skip
    for given in inputs.values():
        ids, mask = given["input_ids"].to(model.device), given["attention_mask"]
        torch.testing.assert_close(model(ids, mask), together)
        torch.testing.assert_close(
            model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask), together
        )
    rows = model.tokenizer([TEXTS[0]] * 3, return_tensors="pt")["input_ids"].to(model.device)
    torch.testing.assert_close(model(rows), together[[0, 0, 0]])  # rows without padding need no mask
    assert model.encode([]).shape == (0, 24)


def test_gradients_reach_every_weight(model: EmbeddingModel) -> None:
    ids = torch.randint(250, (1, 20), device=model.device)
    loss = model(ids, cu_seqlens=torch.tensor([0, 7, 20]))[:, :5].sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_a_saved_model_is_the_same(model: EmbeddingModel, directory: Path, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    again = AutoModelForEmbedding.from_pretrained(tmp_path)
    assert again.settings == model.settings == SETTINGS
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight.cpu()), name
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == sum(p.numel() for p in model.model.parameters())
    assert {path.name for path in tmp_path.iterdir()} >= {"1_Pooling", "2_Dense", "3_Normalize", "tokenizer.json"}
    assert (tmp_path / "modules.json").read_bytes() == (directory / "modules.json").read_bytes()


def test_only_files_of_the_model_are_downloaded(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(directory, source)
    for name in ("pytorch_model.bin", "onnx/model.safetensors", "onnx/config.json", "README.md"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"")
    names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    snapshot = tmp_path / "1234"

    def snapshot_download(_: str, *, allow_patterns: list[str], **__: Any) -> str:
        for name in huggingface_hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, snapshot / name)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model = AutoModelForEmbedding.from_pretrained("org/name")
    torch.testing.assert_close(model.encode(TEXTS), AutoModelForEmbedding.from_pretrained(directory).encode(TEXTS))
    found = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}
    own = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert found == {name for name in own if not name.startswith("tokenizer/")}


def test_a_checkpoint_without_modules_needs_pooling(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r'unknown how to pool.*Pass pooling="lasttoken"'):
        AutoModelForEmbedding.from_pretrained(tmp_path)
    model = AutoModelForEmbedding.from_pretrained(tmp_path, pooling="lasttoken", prompts={"a": "x"})
    assert model.settings.stages == (PoolingStage(modes=("lasttoken",)),)
    assert model.settings.prompts == {"a": "x"}
    assert not any("lm_head" in name for name in model.state_dict())
    with pytest.raises(ConfigError, match="pooling: not supported; got 'middle'; expected 'cls' or"):
        AutoModelForEmbedding.from_pretrained(tmp_path, pooling="middle")
    with pytest.raises(ConfigError, match=r"argument max_length=0; expected an integer, 1 or more"):
        AutoModelForEmbedding.from_pretrained(tmp_path, pooling="mean", max_length=0)
    with pytest.raises(ConfigError, match=r"poling: unknown.* Did you mean 'pooling'\?"):
        AutoModelForEmbedding.from_pretrained(tmp_path, pooling="mean", poling="mean")


Change = Callable[[Path], object]


def changed(file: str, **entries: Any) -> Change:
    def change(directory: Path) -> None:
        path = directory / file
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **entries}))

    return change


def module(index: int, **entries: Any) -> Change:
    def change(directory: Path) -> None:
        modules = json.loads((directory / "modules.json").read_text())
        modules[index] |= entries
        (directory / "modules.json").write_text(json.dumps(modules))

    return change


TRANSFORMER = "sentence_bert_config.json"
REFUSED: dict[str, tuple[Change, str]] = {
    "code": (module(1, type="custom_pooling.Pooling"), "a class of another library, whose code would run"),
    "outside": (module(2, path="../2_Dense"), "invalid path"),
    "absolute": (module(2, path="/tmp"), "invalid path"),
    "order": (module(1, type="sentence_transformers.models.Dense"), "not supported; got Transformer, Dense"),
    "kind": (module(3, type="sentence_transformers.models.LSTM"), "modules are not supported"),
    "twice": (module(3, path="2_Dense"), "two modules have one directory"),
    "list": (lambda directory: (directory / "modules.json").write_text("{}"), "not a list of modules"),
    "no module": (lambda directory: (directory / "modules.json").write_text("[3]"), "not a module; got 3"),
    "json": (lambda directory: (directory / "1_Pooling/config.json").write_text("{"), "not a valid JSON file"),
    "mode": (changed("1_Pooling/config.json", pooling_mode="attention"), "pooling_mode: not supported"),
    "size": (changed("1_Pooling/config.json", embedding_dimension=7), "another number of features"),
    "entry": (changed("1_Pooling/config.json", pooling_mode_tokens=True), "pooling_mode_tokens: unknown entry"),
    "activation": (changed("2_Dense/config.json", activation_function="os.system"), "activation_function: not"),
    "token": (changed("2_Dense/config.json", module_input_name="token_embeddings"), "module_input_name: not supported"),
    "features": (changed("2_Dense/config.json", out_features=0), "out_features: not a size; got 0"),
    "weights": (changed("2_Dense/config.json", out_features=25), r"2_Dense/linear.bias.*wrong shape"),
    "no weights": (lambda directory: (directory / "2_Dense/model.safetensors").unlink(), "1 of 1 weight files missing"),
    "task": (changed(TRANSFORMER, transformer_task="fill-mask"), "transformer_task: not supported"),
    "chat": (changed(TRANSFORMER, modality_config={"message": {}}), "inputs other than plain texts"),
    "expansion": (changed(TRANSFORMER, query_expansion={"length": 32}), "query_expansion: not supported"),
    "argument": (changed(TRANSFORMER, config_args={"is_causal": False}), "argument is not supported; got is_causal"),
    "processing": (changed(TRANSFORMER, processing_kwargs={"image": {}}), "argument is not supported; got image"),
    "length": (changed(TRANSFORMER, max_seq_length=0), "max_seq_length: not a number of tokens; got 0"),
    "sparse": (changed("config_sentence_transformers.json", model_type="SparseEncoder"), "model_type: not supported"),
    "prompt": (changed("config_sentence_transformers.json", default_prompt_name="x"), "default_prompt_name"),
    "prompts": (changed("config_sentence_transformers.json", prompts={"a": 1}), "prompts: invalid value"),
    "similarity": (changed("config_sentence_transformers.json", similarity_fn_name="hamming"), "similarity_fn_name"),
    "classifier": (changed("config.json", architectures=["LlamaForSequenceClassification"]), "is a classifier"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused(name: str, directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(directory, copy)
    change, problem = REFUSED[name]
    change(copy)
    with pytest.raises(LigerzooError, match=problem):
        AutoModelForEmbedding.from_pretrained(copy)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"batch_size": 0}, "encode_texts: batch_size=0"),
        ({"truncate_dim": 25}, "truncate_dim=25; expected an integer from 1 to 24, or None"),
        ({"prompt_name": "passage"}, "prompt_name='passage'; expected one of 'query', 'document'"),
        ({"prompt": "a", "prompt_name": "query"}, "prompt_name: a prompt is given as well"),
        ({"normalize": 1}, "normalize=1; expected True or False"),
        ({"batchsize": 3}, r"unknown option batchsize=3.*Did you mean 'batch_size'\?"),
    ],
)
def test_invalid_options_are_refused(model: EmbeddingModel, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(LigerzooError, match=problem):
        model.encode(TEXTS, **options)


def test_invalid_texts_are_refused(model: EmbeddingModel) -> None:
    with pytest.raises(LigerzooError, match="encode_texts: texts=3; expected a text"):
        model.encode(["a", 3])  # type: ignore[list-item]
    with pytest.raises(LigerzooError, match="rows: no such token; got 258; expected 0 to 257"):
        model.encode_tokens([[1, 2], [258]])
    with pytest.raises(LigerzooError, match="rows: too many tokens; got 41; expected at most 40"):
        model.encode_tokens([[1], [1] * 41])
    with pytest.raises(LigerzooError, match="a text without tokens"):
        model.encode_tokens([[1], []])
    torch.testing.assert_close(model.encode_tokens([[256, 65]]), model.encode_tokens([[256, 65], [3]])[:1])
    with pytest.raises(LigerzooError, match=r"the model has no tokenizer.*model.tokenizer = "):
        new_model().encode("a")


def test_models_that_read_images_are_refused() -> None:
    config = Gemma3Config(num_hidden_layers=1)
    with pytest.raises(ConfigError, match="an embedding model has a decoder only"):
        AutoModelForEmbedding.from_config(config, device="meta")


def test_lora_of_the_decoder_is_saved_and_loaded(directory: Path, tmp_path: Path) -> None:
    model = AutoModelForEmbedding.from_pretrained(directory)
    before = model.encode(TEXTS)
    names = adapters.add_lora(model, rank=2)
    assert len(names) == 14
    assert all(name.startswith("model.layers.") for name in names)
    torch.testing.assert_close(model.encode(TEXTS), before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapters.save_adapter(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["task_type"] == "FEATURE_EXTRACTION"
    again = AutoModelForEmbedding.from_pretrained(directory)
    adapters.load_adapter(again, tmp_path)
    torch.testing.assert_close(again.encode(TEXTS), model.encode(TEXTS))
    assert (again.encode(TEXTS) - before).abs().max() > 0.01
    other = AutoModelForEmbedding.from_pretrained(directory)
    adapters.add_lora(other, targets="stages.1.linear")
    with pytest.raises(CheckpointError, match="cannot name modules after the decoder; got '2_Dense/linear'"):
        adapters.save_adapter(other, tmp_path)


def test_transformers_has_no_such_wrapper(model: EmbeddingModel) -> None:
    pytest.importorskip("accelerate")
    from ligerzoo.integrations.transformers import wrap

    with pytest.raises(ConfigError, match="an embedding model cannot be wrapped"):
        wrap(model)  # type: ignore[call-overload]


@pytest.mark.thorough
def test_a_compiled_model_is_the_same(model: EmbeddingModel) -> None:
    ids, bounds = torch.randint(250, (1, 20), device=model.device), torch.tensor([0, 7, 20], device=model.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(ids, cu_seqlens=bounds), model(ids, cu_seqlens=bounds))


def test_an_encoder_without_modules(tmp_path: Path) -> None:
    """A checkpoint with a head for masked tokens, which is left out."""
    from ligerzoo import AutoModelForMaskedLM

    config = ModernBertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4
    )
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match='pooling="mean"'):
        AutoModelForEmbedding.from_pretrained(tmp_path)
    model = AutoModelForEmbedding.from_pretrained(tmp_path, pooling="mean")
    assert model.encode_tokens([[1, 2, 3]]).shape == (1, 32)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="weight files missing"):
        AutoModelForEmbedding.from_pretrained(tmp_path, pooling="mean")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("config", [BertConfig, ModernBertConfig])
def test_encoding_never_waits_for_the_gpu(config: type[BertConfig] | type[ModernBertConfig]) -> None:
    """Also with more tokens in a batch than the encoder has positions."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    small = config(**sizes, vocab_size=90, max_position_embeddings=64)  # type: ignore[arg-type]
    model = AutoModelForEmbedding.from_config(small, device="cuda", dtype=torch.bfloat16)
    rows = [[7] * length for length in (64, 30, 1, 50)]
    expected = embed_rows(model, rows)
    try:
        torch.cuda.set_sync_debug_mode("error")
        embeddings = embed_rows(model, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(embeddings, expected)

"""New tokenizers, token files and configs, and pretraining from them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerzoo import AutoModel, Tokenizer, cli
from ligerzoo.errors import ConfigError, DataError, TokenizerError
from ligerzoo.train.data import open_data
from ligerzoo.train.data.read_all import read_texts
from ligerzoo.train.data.token_files import map_tokens
from ligerzoo.train.log import read_log
from ligerzoo.train.new_config import new_config, parse_field
from ligerzoo.train.new_tokenizer import MIN_VOCAB_SIZE, SPECIAL_TOKENS, train_tokenizer
from tests.train.data_helpers import GENERATION, chat, write_lines

SENTENCES = [f"Liger number {i} is a large cat, and doesn't mind {i * 37} lions or {i} tigers.\n" for i in range(60)]
SIZE = 290


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    file.write_text("".join(SENTENCES))
    return file


@pytest.fixture(scope="module")
def saved(corpus: Path) -> Path:
    train_tokenizer(corpus, SIZE).save_pretrained(corpus.parent / "tokenizer")
    return corpus.parent / "tokenizer"


@pytest.fixture(scope="module")
def tokenizer(saved: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(saved)


@pytest.fixture(scope="module")
def theirs(saved: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(saved)


def test_size_and_roles(tokenizer: Tokenizer, theirs: Any) -> None:
    assert len(tokenizer) == len(theirs) == SIZE
    for role in ("pad", "bos", "eos"):
        assert getattr(tokenizer, f"{role}_token") == getattr(theirs, f"{role}_token")
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 3]
    assert sorted(tokenizer.all_special_ids) == sorted(theirs.all_special_ids) == [0, 1, 2, 3]
    assert len(tokenizer.encode(SENTENCES[0])) < len(SENTENCES[0]) / 2


PARTS = [*SPECIAL_TOKENS, " ", "  ", "\n", "liger", "1", "e\u0301", "\ufffd", "🦁"]
TEXTS = st.one_of(
    st.text(),
    st.binary().map(lambda data: data.decode("latin-1")),
    st.lists(st.sampled_from(PARTS)).map("".join),
)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_every_text_decodes_to_itself(tokenizer: Tokenizer, theirs: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == theirs.decode(ids[1:]) == text
    if not any(token in text for token in SPECIAL_TOKENS):
        lengths = tokenizer.bytes_per_token()
        assert sum(lengths[token_id] for token_id in ids) == len(text.encode())


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    lengths = tokenizer.bytes_per_token()
    assert lengths[: len(SPECIAL_TOKENS)] == [0, 0, 0, 0]
    assert lengths[4:260] == [1] * 256
    assert len(set(tokenizer.convert_ids_to_tokens(range(4, 260)))) == 256


def test_chat_template_trains_the_answers(tokenizer: Tokenizer, theirs: Any) -> None:
    conversation = chat("Hello?", "A lion.", "12 cats", "", system="Be brief.")
    conversation["messages"][-1]["content"] = [{"type": "text", "text": "13 "}, {"type": "text", "text": "ligers"}]
    sample = next(open_data([conversation], "auto", tokenizer, seq_length=200, epochs=1))
    labels = sample.labels  # type: ignore[union-attr]
    assert tokenizer.decode([label for label in labels if label != -100]) == "A lion.<|im_end|>13 ligers<|im_end|>"
    text = tokenizer.decode(sample.input_ids)
    assert text == (
        "<|bos|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
        "<|im_start|>assistant\nA lion.<|im_end|>\n<|im_start|>user\n12 cats<|im_end|>\n"
        "<|im_start|>assistant\n13 ligers<|im_end|>\n"
    )
    conversation["messages"][-1]["content"] = "13 ligers"
    encoded = theirs.apply_chat_template(
        conversation["messages"], return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    assert encoded["input_ids"] == sample.input_ids
    assert encoded["assistant_masks"] == [int(label != -100) for label in labels]
    prompt = conversation["messages"][:-1]
    rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    assert rendered == theirs.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    assert text.startswith(rendered)
    with pytest.raises(TokenizerError, match="this chat template has no tools"):
        tokenizer.apply_chat_template(prompt, tools=[{"name": "f"}])


def test_files_are_reproducible(corpus: Path, saved: Path, tmp_path: Path) -> None:
    train_tokenizer(corpus, SIZE).save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in saved.iterdir()}
    for file in saved.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_texts_of_records(tmp_path: Path) -> None:
    part = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    pair = {"prompt": "p", "chosen": [{"role": "assistant", "content": "c"}], "rejected": "r"}
    for records, expected in (
        ([{"text": "one"}, "", {"text": "two", "id": 3}], ["one", "two"]),
        ([{"prompt": "", "completion": "c"}], ["", "c"]),
        ([{"prompt": "p", "completion": "c", "label": True}], ["p", "c"]),
        ([{"messages": [{"role": "user", "content": part}]}], ["ab"]),
        ([pair], ["c", "r", "p"]),
    ):
        assert list(read_texts(write_lines(tmp_path / "records.jsonl", records))) == expected


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", r"bad\.jsonl:3: broken JSON"),
        ('{"text": 1}', r"bad\.jsonl:3: text: wrong type; got a number, '1'; expected a string"),
        ('{"prompt": "a"}', r"bad\.jsonl:3: the field 'text' is missing"),
        (r'{"text": "\ud800"}', r"bad\.jsonl:3: half of a surrogate pair"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    file = write_lines(tmp_path / "bad.jsonl", [{"text": "one"}, {"text": "two"}, line])
    with pytest.raises(DataError, match=message):
        train_tokenizer(file, SIZE)


def test_bad_options(corpus: Path, tmp_path: Path) -> None:
    for size in (MIN_VOCAB_SIZE - 1, 2**20 + 1):
        with pytest.raises(TokenizerError, match=f"vocab_size: out of range; got {size}; expected 260 to"):
            train_tokenizer(corpus, size)
    with pytest.raises(TokenizerError, match="template"):
        train_tokenizer(corpus, SIZE, chat_template="{% for %}")
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(DataError, match="no text"):
        train_tokenizer(tmp_path / "blank.txt", SIZE)
    with pytest.warns(UserWarning, match="the text has only 26. tokens that occur twice or are bytes, instead of 290"):
        small = train_tokenizer([{"text": "aa aa"}], SIZE, chat_template=None)
    assert small.decode(small.encode("éa")[1:]) == "éa"
    assert not small.chat_templates


# Configs


def test_config_of_a_tokenizer(tokenizer: Tokenizer) -> None:
    content = new_config("qwen3_moe", tokenizer, {"hidden_size": 64, "tie_word_embeddings": True})
    assert content["vocab_size"] == SIZE
    assert [content[f"{role}_token_id"] for role in ("pad", "bos", "eos")] == [0, 1, 3]
    assert (content["model_type"], content["architectures"]) == ("qwen3_moe", ["Qwen3MoeForCausalLM"])
    assert new_config("llama", tokenizer, {"vocab_size": 512})["vocab_size"] == 512


@pytest.mark.parametrize(
    "model_type, fields, message",
    [
        ("lama", {}, "model_type: no such architecture; got 'lama'"),
        ("llama", {"hiden_size": 3}, "hiden_size: unknown field.* Did you mean 'hidden_size'"),
        ("llama", {"vocab_size": 280}, "vocab_size: the tokenizer has more tokens; got 280; expected at least 290"),
        ("llama", {"hidden_size": "many"}, "hidden_size"),
        ("llama", {"hidden_size": 30, "num_attention_heads": 4}, "num_attention_heads: invalid number of heads"),
        ("llama", {"hidden_size": 28, "num_attention_heads": 4}, "head_dim: invalid"),
    ],
)
def test_bad_configs(tokenizer: Tokenizer, model_type: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_config(model_type, tokenizer, fields)


def test_fields_are_parsed() -> None:
    texts = ["a=3", "b=1e-5", "c=true", "d=null", 'e={"x": [1]}', "f=text", "g=a=b"]
    parsed = dict(map(parse_field, texts))
    assert parsed == {"a": 3, "b": 1e-5, "c": True, "d": None, "e": {"x": [1]}, "f": "text", "g": "a=b"}
    for text in ("a", "=3", "a="):
        with pytest.raises(ConfigError, match=r"FIELD: not a field; got .* expected NAME=VALUE"):
            parse_field(text)


# The commands


def run(capsys: Any, *arguments: str | Path, code: int = 0) -> str:
    assert cli.main([str(argument) for argument in arguments]) == code, capsys.readouterr().err
    captured = capsys.readouterr()
    return captured.err if code else captured.out


SIZES = ["hidden_size=32", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=4"]


def test_from_text_to_a_model(tmp_path: Path, corpus: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains a tokenizer, tokenizes, makes a config, pretrains from a token file, fine-tunes on chats, evaluates."""
    monkeypatch.chdir(tmp_path)
    out = run(capsys, "tokenizer", corpus, "--vocab-size", SIZE, "--output", "tokenizer")
    assert out.startswith("290 tokens; <|im_end|> ends texts and messages\ntokenizer: 3 files, ")
    out = run(capsys, "tokenize", corpus, "--tokenizer", "tokenizer", "--output", "tokens.bin", "--text-unit", "line")
    ids = map_tokens("tokens.bin")
    assert out == f"tokens.bin: {len(ids):,} tokens, {2 * len(ids):,} bytes\n"
    assert ids.tolist().count(3) == len(SENTENCES)
    run(capsys, "config", "llama", *SIZES, "max_position_embeddings=256", "--tokenizer", "tokenizer", "--output", "new")
    line = ["--seq-length", 64, "--batch-size", 4, "--device", "cpu"]
    steps = ["--max-steps", 20, "--lr", "1e-2", *line]
    run(capsys, "train", "new", "--method", "pretrain", "--data", "tokens.bin", "--output", "run", *steps)
    losses = [entry["loss"] for entry in read_log(Path("run/log.jsonl"))]
    assert losses[0] == pytest.approx(math.log(SIZE), abs=0.3)
    assert losses[-1] < 4
    before, after = (
        json.loads(run(capsys, "evaluate", name, "--data", corpus, "--json", "--device", "cpu", "--seq-length", 64))
        for name in ("run/checkpoint-20", "run")
    )
    assert before == after
    assert after["loss"] == pytest.approx(losses[-1], abs=0.5)
    assert after["bytes"] == len("".join(SENTENCES).rstrip("\n").encode()) or after["bytes"] == corpus.stat().st_size
    assert run(capsys, "generate", "run", "--prompt", "The liger", "--max-new-tokens", 5, "--device", "cpu")
    write_lines(tmp_path / "chats.jsonl", [chat(f"What is {i}?", "A liger.") for i in range(16)])
    run(capsys, "train", "run", "--data", "chats.jsonl", "--output", "chat", *steps)
    model, tokenizer = AutoModel.from_pretrained("chat"), Tokenizer.from_pretrained("chat")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7?"}], add_generation_prompt=True, return_tensors="pt"
    )
    continued = model.generate(**prompt, max_new_tokens=30)[0, prompt["input_ids"].shape[1] :].tolist()
    assert len(continued) == 30 or continued[-1] == tokenizer.eos_token_id


def test_commands_never_overwrite(tmp_path: Path, corpus: Path, saved: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    for line in (
        ["tokenizer", corpus, "--vocab-size", SIZE, "--output", tmp_path],
        ["config", "llama", *SIZES, "--tokenizer", saved, "--output", tmp_path],
        ["tokenize", corpus, "--tokenizer", saved, "--output", tmp_path / "file"],
    ):
        message = run(capsys, *line, code=1)
        assert re.fullmatch(r"ligerzoo: error: \S+: already exists.*\n", message), message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_templates_of_the_command(tmp_path: Path, corpus: Path, capsys: Any) -> None:
    (tmp_path / "own.jinja").write_text(GENERATION)
    line = ["tokenizer", corpus, "--vocab-size", SIZE]
    run(capsys, *line, "--output", tmp_path / "own", "--chat-template", tmp_path / "own.jinja")
    assert Tokenizer.from_pretrained(tmp_path / "own").chat_templates["default"].source == GENERATION
    run(capsys, *line, "--output", tmp_path / "none", "--chat-template", "none")
    assert not Tokenizer.from_pretrained(tmp_path / "none").chat_templates
    message = run(capsys, *line, "--output", tmp_path / "x", "--chat-template", tmp_path / "missing", code=1)
    assert "missing" in message
    assert not (tmp_path / "x").exists()


def test_tokens_that_the_model_lacks_are_refused(tmp_path: Path, saved: Path, corpus: Path, capsys: Any) -> None:
    run(capsys, "config", "llama", *SIZES, "--tokenizer", saved, "--output", tmp_path / "new")
    train_tokenizer(corpus, SIZE + 1).save_pretrained(tmp_path / "larger")
    message = run(
        capsys, "train", tmp_path / "new", "--method", "pretrain", "--tokenizer", tmp_path / "larger", "--data", corpus,
        "--output", tmp_path / "run", "--device", "cpu", code=1,
    )  # fmt: skip
    assert re.search(rf"{corpus}.*:\d+: .*the token .* is not in the model's vocabulary; got id 290", message), message

"""Tokenizers agree with transformers, on toy tokenizers of the kinds that checkpoints have."""

import base64
import io
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from ligerzoo.errors import TokenizerError
from ligerzoo.generate import TextStreamer
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.text.tokenizer_json import read_rules
from tests.text.features import HAS_PADDING_SIDE_OF_FILES

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "def add(a, b):\n    return a + b  # 12345 + 67890\n\n\nprint(add(1, 2))",
    "Größe, déjà vu, naïve café; Привет, мир; 你好世界; こんにちは",
] * 4

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces before, two after  ",
    "runs   of    spaces,\ttabs\n\n\nand\r\nlines\n",
    "don't can't it's 3.14 1234567 x==y",
    "Größe déjà vu 你好世界 Привет",
    "cafe\u0301 and café, ﬁ, Å",  # composed, decomposed and compatibility characters
    "emoji 👩‍👩‍👧‍👦🏽 🇩🇪 🤷🏼‍♀️ and \u200b zero width",
    "nul \x00, bell \x07, private \ue000, astral 𐍈, replacement \ufffd",
    "▁ metaspace ▁▁ and Ġ byte-level letters",
    "<s>special</s> in <|begin_of_text|> text<|eot|><|im_start|>user\n<|im_end|>after <0x41> <tool>it</tool>",
    "<s> <s>  </s> x",
]


def llama3_like() -> Backend:
    """Byte-level BPE behind a regex, with a BOS token from the post-processor."""
    backend = Backend(models.BPE(ignore_merges=True))
    words = Regex(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(words, "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot|>"])
    backend.add_tokens(["<tool>", AddedToken("</tool>", normalized=False), "<a b>"])
    bos = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing("<|begin_of_text|> $A", "<|begin_of_text|> $A $B", [bos])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def llama2_like() -> Backend:
    """Sentencepiece-style BPE with "▁" for spaces, byte fallback and a BOS token."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *(token for token in model["vocab"] if token != "▁"), "▁", "▁▁"]
    merges = [*map(tuple, model["merges"]), ("▁", "▁")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(stages)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return backend


def qwen_like() -> Backend:
    """Byte-level BPE on NFC text, without a BOS token."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<tool>", "</tool>"])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def unigram_like() -> Backend:
    """Unigram with the Metaspace decoder, which drops the first space."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=140, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def end_of_word_like() -> Backend:
    """A decoder that depends on later tokens: a word ends with a space, except at the end of the text."""
    vocabulary = {"the</w>": 0, "dog</w>": 1, "dog": 2, "s</w>": 3, "<unk>": 4}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder("</w>")
    return backend


def without_decoder() -> Backend:
    return Backend(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))


KINDS: dict[str, Callable[[], Backend]] = {
    "llama3": llama3_like,
    "llama2": llama2_like,
    "qwen": qwen_like,
    "unigram": unigram_like,
    "end of word": end_of_word_like,
    "no decoder": without_decoder,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>", "padding_side": "left"},
    "llama2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True},
    "qwen": {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": True},
}


@pytest.fixture(scope="module")
def backends() -> dict[str, str]:
    """Returns the tokenizer.json of each kind."""
    return {kind: build().to_str() for kind, build in KINDS.items()}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, backends: dict[str, str]) -> dict[str, Path]:
    """Returns a checkpoint directory for each kind that has a config."""
    return {kind: write(tmp_path_factory.mktemp(kind), backends[kind], config) for kind, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def tokenizers(backends: dict[str, str]) -> dict[str, Tokenizer]:
    files = {
        kind: {
            "tokenizer.json": backend.encode(),
            "tokenizer_config.json": json.dumps(CONFIGS.get(kind, {})).encode(),
        }
        for kind, backend in backends.items()
    }
    return {kind: Tokenizer(content, kind) for kind, content in files.items()}


def write(directory: Path, backend: str, config: dict[str, Any], **others: Any) -> Path:
    (directory / "tokenizer.json").write_text(backend)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in others.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def added(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {str(token_id): {"content": content, **plain, "special": True, **flags}}


def token_object(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **added(0, content, **flags)["0"]}


# Against transformers


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_ids_and_texts_equal_transformers(directories: dict[str, Path], kind: str, add_special_tokens: bool) -> None:
    ours, theirs = Tokenizer.from_pretrained(directories[kind]), AutoTokenizer.from_pretrained(directories[kind])
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        for skip in (False, True):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip) == ours.decode(torch.tensor(ids, dtype=torch.int64), skip) == expected


@pytest.mark.parametrize("kind", CONFIGS)
def test_attributes_equal_transformers(directories: dict[str, Path], kind: str) -> None:
    ours, theirs = Tokenizer.from_pretrained(directories[kind]), AutoTokenizer.from_pretrained(directories[kind])
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    assert (len(ours), ours.vocab_size, ours.padding_side) == (len(theirs), theirs.vocab_size, theirs.padding_side)
    assert [ours.id_to_token(i) for i in range(len(ours))] == theirs.convert_ids_to_tokens(range(len(theirs)))
    assert ours.token_to_id(theirs.eos_token) == theirs.eos_token_id
    assert ours.id_to_token(len(ours)) is ours.token_to_id("no such token") is None


def test_only_the_post_processor_adds_bos(directories: dict[str, Path]) -> None:
    bos = {kind: Tokenizer.from_pretrained(path).encode("x")[0] for kind, path in directories.items()}
    assert bos["llama2"] == 1
    tokenizer = Tokenizer.from_pretrained(directories["qwen"])
    assert tokenizer.encode("x") == tokenizer.encode("x", add_special_tokens=False)


@pytest.mark.parametrize("padding_side", ["left", "right", None])
@pytest.mark.parametrize("kind", ["qwen", "llama3"])
def test_batches_equal_transformers(directories: dict[str, Path], kind: str, padding_side: Any) -> None:
    ours, theirs = Tokenizer.from_pretrained(directories[kind]), AutoTokenizer.from_pretrained(directories[kind])
    if theirs.pad_token is None:
        theirs.pad_token = theirs.eos_token
    texts = ["a", "a somewhat longer text", "", "one more"]
    expected = theirs(texts, padding=True, padding_side=padding_side or theirs.padding_side, return_tensors="pt")
    got = ours(texts, padding_side=padding_side, return_tensors="pt")
    for name in ("input_ids", "attention_mask"):
        assert got[name].dtype == torch.int64
        assert torch.equal(got[name], expected[name])
        assert ours(texts, padding=True, padding_side=padding_side)[name] == expected[name].tolist()


TOKEN_CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "nothing": ({}, None),
    "strings": ({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, None),
    "objects": ({"bos_token": token_object("<|im_start|>"), "eos_token": token_object("<eos>", rstrip=True)}, None),
    "empty": ({"bos_token": "", "eos_token": None}, None),
    "from the map": ({}, {"bos_token": "<|im_start|>", "eos_token": added(0, "<|im_end|>")["0"], "pad_token": "<p>"}),
    "the map's extra": ({}, {"additional_special_tokens": ["<x>", "<y>"]}),
    "the map against config": ({"bos_token": "<|im_start|>"}, {"bos_token": "<|im_end|>"}),
    "the map and a list": ({"added_tokens_decoder": added(351, "<|im_start|>")}, {"eos_token": "<|im_end|>"}),
    "listed, with holes": (
        {"added_tokens_decoder": {**added(1000, "<x>"), **added(70, "<y>"), **added(800, "<new>")}},
        None,
    ),
    "listed, other flags": ({"added_tokens_decoder": added(353, "<tool>", normalized=True)}, None),
    "listed, in the vocabulary": ({"added_tokens_decoder": added(3, "a", special=False)}, None),
    "extra": ({"extra_special_tokens": ["<x>", "<|im_end|>"], "pad_token": "<p>"}, None),
    "additional": (
        {"additional_special_tokens": ["<x>", token_object("<y>", lstrip=True)], "eos_token": "<eos>"},
        None,
    ),
    "named extra": ({"image_token": "<img>", "extra_special_tokens": {"audio_token": "<aud>"}}, None),
    "flags": ({"eos_token": "<|im_end|>", "add_bos_token": True, "add_eos_token": True}, None),
}


@pytest.mark.parametrize("case", TOKEN_CASES)
def test_tokens_of_the_other_files_equal_transformers(tmp_path: Path, backends: dict[str, str], case: str) -> None:
    config, special_tokens_map = TOKEN_CASES[case]
    others = {} if special_tokens_map is None else {"special_tokens_map": special_tokens_map}
    write(tmp_path, backends["qwen"], config, **others)
    ours, theirs = Tokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>a <tool> <x> <y>b<img><aud><p><eos> <new> c<|im_end|> "
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text), skip_special_tokens=True) == theirs.decode(
        theirs.encode(text), skip_special_tokens=True
    )
    assert ours.special_tokens == {name: token for name, token in theirs.special_tokens_map.items() if token}
    assert (len(ours), ours.bos_token_id, ours.eos_token_id) == (len(theirs), theirs.bos_token_id, theirs.eos_token_id)


LEFT_PADDING: dict[str, tuple[str, ...]] = {  # classes by kind of tokenizer; byte-level ones ignore LlamaTokenizer
    "llama3": ("GemmaTokenizerFast", "CohereTokenizerFast"),
    "llama2": ("LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizerFast", "CohereTokenizerFast"),
}


@pytest.mark.parametrize("kind", LEFT_PADDING)
@pytest.mark.parametrize(
    "model_type", [None, "llama", "deepseek_v3", "mistral", "gemma3_text", "cohere", "qwen2", "phi3"]
)
def test_the_padding_side_is_that_of_transformers(
    tmp_path: Path, backends: dict[str, str], kind: str, model_type: str | None
) -> None:
    (tmp_path / "tokenizer.json").write_text(backends[kind])
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name in ("LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizerFast", "CohereTokenizerFast", "Other", None):
        for side in ({}, {"padding_side": "left"}):
            config = {**({} if name is None else {"tokenizer_class": name}), "unk_token": "<unk>", **side}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
            is_left = name in LEFT_PADDING[kind] if name else model_type in ("gemma3_text", "cohere")
            expected = "left" if side or (is_left and model_type not in ("mistral", "qwen2", "phi3")) else "right"
            ours = Tokenizer.from_pretrained(tmp_path)
            assert ours.padding_side == expected, (name, side)
            if HAS_PADDING_SIDE_OF_FILES:
                assert AutoTokenizer.from_pretrained(tmp_path).padding_side == expected, (name, side)
    ours.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "config.json").exists()


# Encoding and decoding


def test_truncation_and_padding_in_the_file_are_off(backends: dict[str, str]) -> None:
    backend = Backend.from_str(backends["qwen"])
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer, plain = (
        Tokenizer({"tokenizer.json": b.to_str().encode()}, "here")
        for b in (backend, Backend.from_str(backends["qwen"]))
    )
    text = "more than four tokens, fewer than fifty"
    assert tokenizer.encode(text) == plain.encode(text)


def test_a_single_text_is_not_padded(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama2"]
    ids = tokenizer.encode("one text")
    assert tokenizer("one text") == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert tokenizer("one text", return_tensors="pt")["input_ids"].tolist() == [ids]
    assert tokenizer("one text", add_special_tokens=False)["input_ids"] == ids[1:]
    assert tokenizer([]) == {"input_ids": [], "attention_mask": []}
    assert tokenizer([], return_tensors="pt")["input_ids"].shape == (0, 0)
    assert tokenizer("", add_special_tokens=False, return_tensors="pt")["input_ids"].shape == (1, 0)


def test_padding_needs_a_token_only_when_texts_differ_in_length(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["unigram"]
    assert tokenizer(["a", "a"])["attention_mask"] == [[1] * len(tokenizer.encode("a"))] * 2
    with pytest.raises(TokenizerError, match="neither a pad_token nor an eos_token"):
        tokenizer(["a", "a longer text"], padding=True)


@pytest.mark.parametrize("text", ["half a pair \ud83d", b"bytes", None, 3])
def test_invalid_texts_are_refused(tokenizers: dict[str, Tokenizer], text: Any) -> None:
    with pytest.raises(TokenizerError, match="cannot encode this text"):
        tokenizers["qwen"].encode(text)
    with pytest.raises(TokenizerError, match=r"cannot encode (this text|these texts): "):
        tokenizers["qwen"](["fine", text])


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["a"], [[1, 2]], torch.tensor([[1, 2]]), torch.tensor([1.0]), 3])
def test_invalid_ids_are_refused(tokenizers: dict[str, Tokenizer], ids: Any) -> None:
    with pytest.raises(TokenizerError, match="cannot decode these ids"):
        tokenizers["qwen"].decode(ids)


def test_unsupported_arguments_are_refused(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(TokenizerError, match="padding_side: unsupported value; got 'middle'"):
        tokenizers["qwen"](["a"], padding_side="middle")  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match="return_tensors: unsupported value; got 'np'"):
        tokenizers["qwen"](["a"], return_tensors="np")  # type: ignore[arg-type]


def test_ids_without_a_token_are_skipped(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["qwen"]
    ids = tokenizer.encode("text")
    assert tokenizer.decode([len(tokenizer), *ids, 2**31]) == "text"


# Incremental decoding


def byte_level_tokens() -> dict[int, str]:
    """Returns the byte-level letter of each byte, from the tokenizers library's pre-tokenizer."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [
        chr(point) for point in (*range(0x800), *range(0x800, 0xD800, 0x40), *range(0x10000, 0x110000, 0x1000))
    ]
    letters: dict[int, str] = {}
    for character in characters:
        letters.update(zip(character.encode(), splitter.pre_tokenize_str(character)[0][0], strict=True))
    never_in_text = [byte for byte in range(256) if byte not in letters]  # 0xC0, 0xC1, 0xF5 and on
    return letters | dict(zip(never_in_text, sorted(set(splitter.alphabet()) - set(letters.values())), strict=True))


BYTE_LEVEL_TOKENS = byte_level_tokens()


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = False) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens)
    return [*map(stream.push, ids), stream.flush()]


def assert_streams_like_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    for skip in (False, True):
        assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_texts_are_decoded_texts(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    for text in TEXTS:
        assert_streams_like_decode(tokenizers[kind], tokenizers[kind].encode(text))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_stream_like_decode(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    # Ids from len(tokenizer) on have no token. Many ids below 260 are parts of characters.
    one = st.integers(0, len(tokenizer) + 2) | st.integers(0, min(260, len(tokenizer)))
    assert_streams_like_decode(tokenizer, data.draw(st.lists(one, max_size=30)))


@pytest.mark.parametrize("kind", ["llama3", "llama2"])
@settings(max_examples=100, deadline=None)
@given(content=st.lists(st.binary(max_size=6) | st.text(max_size=3).map(str.encode) | st.just(b"a"), max_size=8))
def test_any_bytes_stream_like_decode(tokenizers: dict[str, Tokenizer], kind: str, content: list[bytes]) -> None:
    tokenizer = tokenizers[kind]
    if kind == "llama2":
        tokens = [f"<0x{byte:02X}>" if byte != 0x61 else "▁" for byte in b"".join(content)]
    else:
        tokens = [BYTE_LEVEL_TOKENS[byte] for byte in b"".join(content)]
    ids = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in ids
    assert_streams_like_decode(tokenizer, ids)


@pytest.mark.parametrize("kind", ["llama3", "qwen", "llama2"])
def test_pieces_arrive_early_and_in_whole_characters(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    text = "dog 👩‍👧 on\n你好, ok"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)  # some characters are several tokens
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert any(pieces[:2])
    assert pieces[-1] == ""


@pytest.mark.parametrize("kind", ["llama3", "qwen", "llama2"])
def test_a_streamed_continuation_keeps_its_leading_space(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer, file = tokenizers[kind], io.StringIO()
    prompt, ids = tokenizer.encode("the dog"), tokenizer.encode("the dog on the dog", add_special_tokens=True)
    assert ids[: len(prompt)] == prompt
    streamer = TextStreamer(tokenizer, file=file)
    streamer.put(torch.tensor([prompt]))
    for token in ids[len(prompt) :]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert file.getvalue() == " on the dog\n"


def test_invalid_bytes_become_replacement_characters(tokenizers: dict[str, Tokenizer]) -> None:
    def bytes_of_llama2(*values: int) -> list[int]:
        return [3 + value for value in values]

    tokenizer = tokenizers["llama2"]
    a = tokenizer.encode("a", add_special_tokens=False)
    # é, then an invalid byte: the decoder rejects a run of byte tokens as a whole
    assert streamed(tokenizer, [*bytes_of_llama2(0xC3, 0xA9, 0xFF), *a]) == ["", "", "", *["\ufffd" * 3 + " a"], ""]
    assert streamed(tokenizer, [*bytes_of_llama2(0xC3, 0xA9), *a]) == ["", "", "é a", ""]
    assert streamed(tokenizer, bytes_of_llama2(0xF0, 0x9F)) == ["", "", "\ufffd" * 2]
    # a skipped special token does not end the run
    assert streamed(tokenizer, [3 + 0xC3, 2, 3 + 0xA9], skip_special_tokens=True) == ["", "", "", "é"]
    assert streamed(tokenizer, [3 + 0xC3, 2, 3 + 0xA9]) == ["", "\ufffd</s>", "", "\ufffd"]


def test_an_added_token_may_contain_other_letters(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama3"]
    token, half = tokenizer.token_to_id("<a b>"), tokenizer.token_to_id(BYTE_LEVEL_TOKENS[0xC3])
    assert token is not None
    assert half is not None
    assert streamed(tokenizer, [token, half, token]) == ["<a b>", "", "\ufffd<a b>", ""]
    assert_streams_like_decode(tokenizer, [token, half, token])


def test_a_replacement_character_of_the_text_is_not_held_back(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["qwen"]
    ids = tokenizer.encode("\ufffd!")
    assert streamed(tokenizer, ids)[-2:] == ["!", ""]
    assert "".join(streamed(tokenizer, ids)) == "\ufffd!"


@pytest.mark.parametrize("kind", ["llama2", "unigram"])
def test_only_the_first_space_is_dropped(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("the dog, the dog", add_special_tokens=False)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces[:2])[0] == "t"
    assert "".join(pieces) == "the dog, the dog"


def test_text_that_continues_another_keeps_its_first_space(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in KINDS:
        tokenizer = tokenizers[kind]
        text = "the dog's 你 é"
        ids = tokenizer.encode(text, add_special_tokens=False)
        for cut in range(1, len(ids)):
            before = tokenizer.decode(ids[:cut])
            if before.encode().endswith(b"\xef\xbf\xbd"):
                continue  # within a character
            stream = tokenizer.stream(continues_text=True)
            assert before + "".join(map(stream.push, ids[cut:])) + stream.flush() == tokenizer.decode(ids)


def test_bytes_of_tokens_are_those_of_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in KINDS:
        tokenizer = tokenizers[kind]
        bytes_of = tokenizer.token_bytes()
        ids = tokenizer.encode("the dog's 你🦁", add_special_tokens=False)
        assert b"".join(map(bytes_of, ids)).decode().lstrip(" ") == tokenizer.decode(ids)
        for token_id, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True):
            assert bytes_of(token_id) == token.encode()
        assert bytes_of(10**6) == b""


def test_a_new_text_begins_after_flush(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in KINDS:
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode("the dog's 你")
        stream = tokenizer.stream()
        texts = ["".join(map(stream.push, ids)) + stream.flush() for _ in range(2)]
        assert texts == [tokenizer.decode(ids)] * 2
        assert stream.flush() == ""


@pytest.mark.parametrize("kind", ["llama3", "llama2", "unigram"])
def test_a_stream_does_not_keep_all_tokens(
    tokenizers: dict[str, Tokenizer], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers[kind]
    stream = tokenizer.stream()
    lengths: list[int] = []
    if kind != "llama3":
        join = stream._text._join  # type: ignore[union-attr]
        monkeypatch.setattr(stream._text, "_join", lambda tokens: (lengths.append(len(tokens)), join(tokens))[1])
    for token_id in tokenizer.encode("the quick brown fox " * 50):
        stream.push(token_id)
    assert max(lengths, default=0) <= 6


def test_a_stream_accepts_tensors_and_refuses_invalid_ids(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["qwen"]
    stream = tokenizer.stream()
    assert "".join(map(stream.push, torch.tensor(tokenizer.encode("ids")))) == "ids"
    for token_id in (-1, 2**32, 1.5, "a"):
        with pytest.raises(TokenizerError, match="cannot look up this id"):
            stream.push(token_id)  # type: ignore[arg-type]


# Saving


def test_saving_keeps_every_byte(tmp_path: Path, backends: dict[str, str]) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    config = '{ "bos_token" :"<|im_start|>",\n\n "unknown": [1e3, "\\u00e9"], "added_tokens_decoder": {}}\r\n'
    contents = {
        "tokenizer.json": backends["qwen"] + " \n",
        "tokenizer_config.json": config,
        "special_tokens_map.json": '{"pad_token": "<pad>"}',
        "chat_template.jinja": "{{ messages }}\r\n\n",
        "additional_chat_templates/rag.jinja": "é {{ documents }}",
    }
    for name, content in contents.items():
        (source / name).write_bytes(content.encode())
    (source / "vocab.json").write_text("not a file of the tokenizer")
    tokenizer = Tokenizer.from_pretrained(source)
    for path in source.rglob("*.j*"):
        path.unlink()
    tokenizer.save_pretrained(target)
    saved = {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert saved == {name: content.encode() for name, content in contents.items()}
    again = Tokenizer.from_pretrained(target)
    assert (len(again), again.special_tokens) == (len(tokenizer), tokenizer.special_tokens)


def test_saving_removes_the_files_of_another_tokenizer(tmp_path: Path, backends: dict[str, str]) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    for stale in ("chat_template.jinja", "additional_chat_templates/rag.jinja", "special_tokens_map.json"):
        (tmp_path / stale).write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    Tokenizer({"tokenizer.json": backends["qwen"].encode()}, "here").save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["config.json", "tokenizer.json"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, backends: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("old")

    def fail(path: Path, content: bytes) -> None:
        path.open("wb").close()
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="no space left"):
        Tokenizer({"tokenizer.json": backends["qwen"].encode()}, "here").save_pretrained(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"tokenizer.json": "old"}


# Malformed and hostile files


def test_tokenizer_json_is_required(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("sentencepiece")
    with pytest.raises(TokenizerError, match=r"there is no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_pretrained(tmp_path)


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 17209920\n"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", "null", "[" * 100_000, LFS_POINTER, '{"model": {"type": "BPE"}}', "\x00"]
)
def test_a_malformed_tokenizer_json_is_refused(content: str) -> None:
    with pytest.raises(TokenizerError, match=r"^here/tokenizer\.json: "):
        Tokenizer({"tokenizer.json": content.encode()}, "here")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"\xff\xfe\xfd", b"[" * 100_000, b'{"bos_token": ' + b"9" * 5000 + b"}"]
)
def test_malformed_json_is_refused(backends: dict[str, str], name: str, content: bytes) -> None:
    with pytest.raises(TokenizerError, match=rf"^here/{name}: "):
        Tokenizer({"tokenizer.json": backends["qwen"].encode(), name: content}, "here")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bos_token", 3),
        ("eos_token", ["<|im_end|>"]),
        ("eos_token", {"no": "content"}),
        ("eos_token", {"content": 3}),
        ("eos_token", {"content": "x", "lstrip": "yes"}),
        ("pad_token", "\ud800"),
        ("extra_special_tokens", [3]),
        ("additional_special_tokens", [{"content": None}]),
        ("added_tokens_decoder", [1]),
        ("added_tokens_decoder", {"one": {"content": "x"}}),
        ("added_tokens_decoder", {"-1": {"content": "x"}}),
        ("added_tokens_decoder", {"9" * 5000: {"content": "x"}}),
        ("added_tokens_decoder", {"1": 3}),
        ("padding_side", "up"),
        ("chat_template", 3),
        ("chat_template", {"name": "default"}),
        ("chat_template", [3]),
        ("chat_template", [{"name": ["default"], "template": "x"}]),
        ("chat_template", [{"name": "default", "template": None}]),
    ],
)
def test_malformed_fields_are_refused_by_name(backends: dict[str, str], field: str, value: Any) -> None:
    config = json.dumps({field: value}).encode()
    with pytest.raises(TokenizerError, match=rf"^here/tokenizer_config\.json: {field}"):
        Tokenizer({"tokenizer.json": backends["qwen"].encode(), "tokenizer_config.json": config}, "here")


def test_an_added_token_that_cannot_have_its_id_is_refused(backends: dict[str, str]) -> None:
    content = json.loads(backends["qwen"])
    content["added_tokens"][-1]["id"] += 7
    with pytest.raises(TokenizerError, match=r"'</tool>' cannot have this id; got 361; expected 354"):
        Tokenizer({"tokenizer.json": json.dumps(content).encode()}, "here")


def test_a_panic_of_the_library_raises_tokenizer_error(backends: dict[str, str], capfd: Any) -> None:
    content = json.loads(backends["qwen"])
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "ALQ="}
    with pytest.raises(TokenizerError, match=r"here/tokenizer\.json: cannot load the tokenizer: .*charsmap"):
        Tokenizer({"tokenizer.json": json.dumps(content).encode()}, "here")
    assert "panicked" in capfd.readouterr().err  # otherwise this tests no panic


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def repeated(stage: dict[str, Any], number: int, key: str) -> dict[str, Any]:
    return {"type": "Sequence", key: [stage] * number}


def template(single: list[dict[str, Any]], ids: int = 1) -> dict[str, Any]:
    special = {"<|im_end|>": {"id": "<|im_end|>", "ids": [352] * ids, "tokens": ["<|im_end|>"] * ids}}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


TEXT, SPECIAL = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TABLE = (4).to_bytes(4, "little") + bytes(4) + b"x" * 1000 + b"\0"
TOKENIZER_BOMBS: dict[str, tuple[str, Any]] = {
    "chained rules": ("normalizer", repeated(replace("l", "l" * 100), 10, "normalizers")),
    "rules without a type": ("normalizer", {"normalizers": [replace("l", "l" * 100)] * 10}),
    "one long rule": ("normalizer", replace("l", "l" * 10**6)),
    "rules that match nothing": ("normalizer", repeated(replace("x*", "y", "Regex"), 8, "normalizers")),
    "rules for the empty string": ("normalizer", repeated(replace("", "y"), 8, "normalizers")),
    "a long beginning": ("normalizer", {"type": "Prepend", "prepend": "x" * 10**6}),
    "many beginnings": ("normalizer", repeated({"type": "Prepend", "prepend": "x"}, 8, "normalizers")),
    "a table": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(TABLE).decode()}),
    "many stages": ("normalizer", repeated({"type": "NFC"}, 65, "normalizers")),
    "nested stages": ("normalizer", repeated(repeated(replace("l", "ll"), 4, "normalizers"), 2, "normalizers")),
    "chained bytes": ("pre_tokenizer", repeated(BYTES, 30, "pretokenizers")),
    "a repeated text": ("post_processor", template([TEXT] * 1000)),
    "many special tokens": ("post_processor", template([TEXT, *[SPECIAL] * 2000])),
    "a special token of many ids": ("post_processor", template([TEXT, SPECIAL], ids=2000)),
    "chained templates": ("post_processor", repeated(template([TEXT] * 3), 5, "processors")),
    "a decoder's rules": ("decoder", repeated(replace("l", "l" * 100), 10, "decoders")),
    "a decoder's empty suffix": ("decoder", repeated({"type": "BPEDecoder", "suffix": ""}, 20, "decoders")),
    "a long token": ("model.vocab", {"type": "WordLevel", "vocab": {"x" * 10**6: 0}, "unk_token": "x"}),
    "a long piece": ("model.vocab", {"type": "Unigram", "unk_id": 0, "vocab": [["x" * 10**6, 0.0]]}),
    "a long prefix": ("model.continuing_subword_prefix", {"type": "BPE", "vocab": {}, "merges": [],
                      "continuing_subword_prefix": "#" * 10**6}),
    "long words": ("model.max_input_chars_per_word", {"type": "WordPiece", "vocab": {}, "unk_token": "x",
                   "continuing_subword_prefix": "#", "max_input_chars_per_word": 10**9}),
}  # fmt: skip


@pytest.mark.parametrize("bomb", TOKENIZER_BOMBS)
def test_rules_that_multiply_a_text_are_refused_before_they_run(
    backends: dict[str, str], bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Backend, "from_buffer")  # reads the whole file
    field, value = TOKENIZER_BOMBS[bomb]
    content = {**json.loads(backends["qwen"]), field.partition(".")[0]: value}
    with pytest.raises(TokenizerError, match=rf"^here/tokenizer\.json: .*{field}.*: exceeds the limit; got .* at most"):
        Tokenizer({"tokenizer.json": json.dumps(content).encode()}, "here")


@pytest.mark.parametrize(
    "section, stage",
    [
        ("post_processor", template([TEXT] * 10**5)),
        ("post_processor", template([TEXT, *[SPECIAL] * 10**5])),
        ("post_processor", template([TEXT]) | {"pair": [TEXT] * 10**5}),
        ("post_processor", template([TEXT], ids=10**5)),
        ("post_processor", template([TEXT]) | {"special_tokens": {str(i): {} for i in range(10**5)}}),
        ("post_processor", repeated(repeated(template([TEXT] * 100), 10, "processors"), 10, "processors")),
        ("decoder", repeated({"type": "Fuse"}, 10**5, "decoders")),
    ],
)
def test_many_rules_are_refused_before_the_library_reads_them(
    backends: dict[str, str], monkeypatch: pytest.MonkeyPatch, section: str, stage: dict[str, Any]
) -> None:
    monkeypatch.delattr(Backend, "from_str")
    content = json.dumps({**json.loads(backends["qwen"]), section: stage}).encode()
    with pytest.raises(TokenizerError, match=rf"^here/tokenizer\.json: {section}: exceeds the limit; got .* entries"):
        Tokenizer({"tokenizer.json": content}, "here")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("lengths", [[10**5], [2000] * 3000])
def test_added_tokens_that_are_too_long_are_refused(backends: dict[str, str], file: str, lengths: list[int]) -> None:
    content = json.loads(backends["qwen"])
    first = max(content["model"]["vocab"].values()) + 1
    tokens = {first + i: token_object(f"{i}{'x' * length}") for i, length in enumerate(lengths)}
    listed = tokens if file == "tokenizer_config.json" else {}
    content["added_tokens"] = [] if listed else [{"id": i, **token} for i, token in tokens.items()]
    config = json.dumps({"added_tokens_decoder": listed})
    files = {"tokenizer.json": json.dumps(content).encode(), "tokenizer_config.json": config.encode()}
    with pytest.raises(TokenizerError, match="added_tokens: exceeds the limit"):
        Tokenizer(files, "here")


def test_rules_of_well_known_tokenizers_are_allowed(backends: dict[str, str]) -> None:
    spaces = replace(" {2,}", "▁", "Regex")
    sentencepiece = (2048).to_bytes(4, "little") + bytes(2048) + b"\0".join([b"a", "صلى الله عليه وسلم".encode(), b""])
    table = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(sentencepiece).decode()}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    bert = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": True}  # fmt: skip
    clip = {"type": "Sequence", "normalizers": [{"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"}]}
    rules: list[dict[str, Any]] = [
        {"normalizer": replace(" ", "▁"), "decoder": {"type": "Fuse"}},  # Gemma
        {"normalizer": {"type": "Sequence", "normalizers": [table, spaces]}, "pre_tokenizer": metaspace},  # XLM-R
        {"normalizer": bert},
        {"normalizer": clip, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES]}},
        {"post_processor": template([SPECIAL, TEXT, SPECIAL])},
        {"post_processor": template([TEXT, *[SPECIAL] * 1000]) | {"pair": [TEXT, *[SPECIAL] * 1000]}},
        {"normalizer": {"type": "Sequence", "normalizers": [replace(letter, "x") for letter in "abcdefghij" * 5]}},
    ]
    for entries in rules:
        Tokenizer({"tokenizer.json": json.dumps({**json.loads(backends["qwen"]), **entries}).encode()}, "here")


def test_a_text_that_may_become_too_long_is_refused(backends: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    content = {**json.loads(backends["qwen"]), "normalizer": replace("l", "l" * 50)}
    tokenizer = Tokenizer({"tokenizer.json": json.dumps(content).encode()}, "here")
    assert tokenizer.decode(tokenizer.encode("hello")) == f"he{'l' * 100}o"
    monkeypatch.setattr("ligerzoo.text.tokenizer_limits.MAX_CHARACTERS", 10**5)
    for encode in (tokenizer.encode, tokenizer, lambda text: tokenizer(["a", text])):
        with pytest.raises(TokenizerError, match=r"100 times as long; got 1001 characters; expected at most 1000"):
            encode("l" * 1001)
    assert len(tokenizer.encode("l" * 1000)) > 10_000
    monkeypatch.setattr("ligerzoo.text.tokenizer_limits.MAX_CHARACTERS", 250)
    ids = tokenizer.encode("h") * 300
    with pytest.raises(
        TokenizerError, match="the tokens are too long to decode; got 300 characters; expected at most 250 "
    ):
        tokenizer.decode(ids)
    assert tokenizer.decode(ids[:250]) == "h" * 250


def test_ids_without_an_embedding_are_refused(backends: dict[str, str]) -> None:
    tokenizer = Tokenizer({"tokenizer.json": backends["qwen"].encode()}, "here")
    ids = torch.tensor([tokenizer.encode("a</tool>b")])
    tokenizer.check_ids(ids, 355)
    tokenizer.check_ids(ids[:, :0], 1)
    message = r"here: the token '</tool>' is not in the model's vocabulary; got id 354; expected an id below 354"
    with pytest.raises(TokenizerError, match=message):
        tokenizer.check_ids(ids, 354)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_huge_files_are_refused_unread(tmp_path: Path, backends: dict[str, str], name: str) -> None:
    write(tmp_path, backends["qwen"], {})
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**40)  # sparse: it uses no disk space
    with pytest.raises(TokenizerError, match=rf"{name}: the file is too large; expected at most"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_template_with_invalid_utf8_is_refused(backends: dict[str, str]) -> None:
    with pytest.raises(TokenizerError, match=r"^here/chat_template\.jinja: not valid UTF-8"):
        Tokenizer({"tokenizer.json": backends["qwen"].encode(), "chat_template.jinja": b"\xff"}, "here")


def test_only_the_tokenizer_s_files_are_downloaded(
    monkeypatch: pytest.MonkeyPatch, directories: dict[str, Path]
) -> None:
    calls: list[Any] = []

    def locate_files(name: str, patterns: Any, **options: Any) -> Path:
        calls.append((name, [*patterns], options))
        return directories["qwen"]

    monkeypatch.setattr("ligerzoo.files.locate.locate_files", locate_files)
    options = {"revision": "main", "token": "secret", "cache_dir": "here", "local_files_only": True}
    assert Tokenizer.from_pretrained("org/name", **options).eos_token == "<|im_end|>"  # type: ignore[arg-type]
    jsons = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
    templates = ["chat_template.jinja", "additional_chat_templates/*.jinja"]
    assert calls == [("org/name", [*jsons, *templates, "config.json"], options)]


def test_a_missing_directory_is_refused() -> None:
    with pytest.raises(ValueError, match="no such directory"):
        Tokenizer.from_pretrained("./no/such/directory")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["broken link", "pipe", "directory"])
def test_a_file_that_cannot_be_read_is_not_absent(
    name: str, kind: str, tmp_path: Path, backends: dict[str, str]
) -> None:
    path = write(tmp_path, backends["qwen"], {})
    (path / name).unlink(missing_ok=True)
    match kind:
        case "broken link":
            (path / name).symlink_to("nowhere")
        case "pipe":
            os.mkfifo(path / name)
        case "directory":
            (path / name).mkdir()
    with pytest.raises(TokenizerError, match=f"{name}: is not a readable file"):
        Tokenizer.from_pretrained(path)


# Reading tokenizer.json without its vocabulary


TABLES = {
    "pairs": {"vocab": {"a": 0, 'b"[{': 1, "\\\\": 2}, "merges": [["a", "b]"], ['"', "a"]]},
    "texts": {"vocab": {}, "merges": ["a b", "] }"]},
    "unigram": {"vocab": [["a", -1.5e-3], ["▁", 0]]},
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
def test_rules_are_the_content_without_the_tables(tables: dict[str, Any], indent: int | None) -> None:
    model = {"type": "x", **tables, "unk_token": "u"}
    content = {"added_tokens": [{"content": '"vocab": {'}], "model": model, "x": [1]}
    files = {"tokenizer.json": json.dumps(content, indent=indent).encode()}
    expected = {**content, "model": {"type": "x", "unk_token": "u"}}
    assert read_rules(files, "here") == expected


@pytest.mark.parametrize(
    "content",
    [
        {"normalizer": {"vocab": ["a", "b"]}, "model": {"vocab": {"a": 0}}},  # entries to count
        {"model": {"vocab": {"a" * 3000: 0}}}, {"model": {"vocab": {"a": [0]}}}, {"model": {"vocab": [["a", 0, 1]]}},
        {"model": [{"vocab": {"a": 0}}]}, {"vocab": {"a": 0}},
    ],
)  # fmt: skip
def test_other_tables_are_read(content: dict[str, Any]) -> None:
    assert read_rules({"tokenizer.json": json.dumps(content).encode()}, "here") == content


def test_loading_does_not_parse_the_vocabulary_in_python() -> None:
    content = json.loads(without_decoder().to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"word{number}": number for number in range(len(vocabulary), 20_000)}
    data = json.dumps(content).encode()
    Tokenizer({"tokenizer.json": data}, "here")  # imports
    tracemalloc.start()
    try:
        Tokenizer({"tokenizer.json": data}, "here")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(data)

"""The options and methods that users of transformers' tokenizers reach for, compared with theirs."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ligerzoo import Tokenizer
from ligerzoo.errors import TokenizerError
from ligerzoo.text.padding import BatchEncoding
from tests.text.features import TRUNCATION_IGNORES_EMPTY_TEXTS
from tests.text.test_tokenizer import CONFIGS, KINDS, TEXTS

EXTRA: dict[str, dict[str, Any]] = {  # every kind has a padding token, as transformers needs one to pad
    "llama3": {"pad_token": "<|eot|>", "model_max_length": 12, "truncation_side": "left"},
    "llama2": {"pad_token": "<unk>"},
    "qwen": {},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for kind in CONFIGS:
        found[kind] = tmp_path_factory.mktemp(kind)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **CONFIGS[kind], **EXTRA[kind]}
        (found[kind] / "tokenizer.json").write_text(KINDS[kind]().to_str())
        (found[kind] / "tokenizer_config.json").write_text(json.dumps(config))
    return found


def both(directory: Path) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    return Tokenizer.from_pretrained(directory), PreTrainedTokenizerFast.from_pretrained(directory)


def plain(inputs: Any) -> dict[str, Any]:
    """Returns a batch as lists, without the inputs that only transformers returns by default."""
    lists = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    return {name: json.loads(json.dumps(value)) for name, value in lists.items()}


every_kind = pytest.mark.parametrize("kind", CONFIGS)

BATCH = ["a", "a somewhat longer text", "", "one, two; three"]
PAIRS = ["b c", "", "another text, the longer one of its pair", "x"]
PADDING: list[dict[str, Any]] = [
    {"padding": False}, {"padding": True}, {"padding": "longest", "pad_to_multiple_of": 8},
    {"padding": "max_length", "max_length": 64}, {"padding": "max_length", "max_length": 30, "pad_to_multiple_of": 8},
    {"padding": "do_not_pad"},
]  # fmt: skip
TRUNCATION: list[dict[str, Any]] = [
    {}, {"truncation": True, "max_length": 7}, {"truncation": "longest_first", "max_length": 4},
    {"truncation": "only_first", "max_length": 9}, {"truncation": False, "max_length": 3},
]  # fmt: skip


@every_kind
def test_padding_and_truncation(directories: dict[str, Path], kind: str) -> None:
    ours, theirs = both(directories[kind])
    further = {"return_token_type_ids": True, "return_special_tokens_mask": True, "return_offsets_mapping": True}
    for padding, truncation, side, special in itertools.product(PADDING, TRUNCATION, ["left", "right"], [True, False]):
        options: dict[str, Any] = {**truncation, **padding, "padding_side": side, "add_special_tokens": special}
        if not truncation.get("truncation") and padding["padding"] != "max_length":
            options.pop("max_length", None)  # transformers warns that it is ignored
        if truncation.get("truncation") and options["max_length"] % options.get("pad_to_multiple_of", 1):
            continue  # transformers refuses it
        for text in (BATCH, BATCH[1]):
            assert plain(ours(text, **options, **further)) == plain(theirs(text, **options, **further)), options
            expected = theirs(text, **options, return_token_type_ids=False)
            assert plain(ours(text, **options)) == plain(expected), options


@every_kind
def test_pairs(directories: dict[str, Path], kind: str) -> None:
    ours, theirs = both(directories[kind])
    further = {"return_token_type_ids": True, "return_special_tokens_mask": True, "return_offsets_mapping": True}
    strategies = [False, True, "only_first", "only_second"]
    compared = 0
    for truncation, length, special in itertools.product(strategies, range(2, 14), [True, False]):
        options: dict[str, Any] = {"truncation": truncation, "max_length": length, "add_special_tokens": special}
        for first, second in zip([*BATCH, BATCH[1]], [*PAIRS, BATCH[1]], strict=True):
            if not second:
                continue  # transformers ignores a single empty second text
            try:
                expected = plain(theirs(first, second, **options, **further))
            except BaseException:  # a panic of the library
                with pytest.raises(TokenizerError, match="cannot truncate the texts"):
                    ours(first, second, **options)
                continue
            try:
                got = plain(ours(first, second, **options, **further))
            except TokenizerError:
                if TRUNCATION_IGNORES_EMPTY_TEXTS and not first:
                    continue
                raise
            assert got == expected, (options, first, second)
            compared += 1
    assert compared > 250
    assert plain(ours(BATCH, PAIRS, padding=True)) == plain(
        theirs(BATCH, PAIRS, padding=True, return_token_type_ids=False)
    )


@every_kind
def test_tensors(directories: dict[str, Path], kind: str) -> None:
    ours, theirs = both(directories[kind])
    got = ours(BATCH, padding=True, return_tensors="pt", return_offsets_mapping=True, return_length=True)
    expected = theirs(
        BATCH, padding=True, return_tensors="pt", return_offsets_mapping=True, return_token_type_ids=False
    )
    for name, tensor in expected.items():
        assert got[name].dtype == torch.int64
        assert torch.equal(got[name], tensor)
    assert got.length.tolist() == [len(ids) for ids in theirs(BATCH).input_ids]
    assert got.to("cpu") is got
    assert torch.equal(got.input_ids, ours(BATCH, return_tensors="pt")["input_ids"])  # tensors need padding
    assert torch.equal(ours.encode("a b", return_tensors="pt"), theirs.encode("a b", return_tensors="pt"))
    with pytest.raises(TokenizerError, match=r"input_ids: cannot be converted .*; expected rows of equal"):
        ours(BATCH, padding=False, return_tensors="pt")
    with pytest.raises(AttributeError, match="no_such_input"):
        _ = got.no_such_input


@every_kind
def test_encoding_and_conversion(directories: dict[str, Path], kind: str) -> None:
    ours, theirs = both(directories[kind])
    for text in TEXTS:
        assert ours.encode(text, "second") == theirs.encode(text, "second")
        assert ours.encode(text, truncation=True, max_length=5) == theirs.encode(text, truncation=True, max_length=5)
        ids = ours.encode(text)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        assert ours.convert_tokens_to_ids(ours.convert_ids_to_tokens(ids)) == ids
        assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)
    for token in ("a", "no such token"):
        assert ours.convert_tokens_to_ids(token) == theirs.convert_tokens_to_ids(token)
    assert ours.get_vocab() == theirs.get_vocab()
    rows = [ours.encode(text) for text in TEXTS]
    for skip in (False, True):
        assert ours.batch_decode(rows, skip_special_tokens=skip) == theirs.batch_decode(rows, skip_special_tokens=skip)
    tensor = ours(BATCH, return_tensors="pt")["input_ids"]
    assert ours.batch_decode(tensor) == theirs.batch_decode(tensor)
    assert (ours.model_max_length, ours.truncation_side) == (theirs.model_max_length, theirs.truncation_side)


@every_kind
def test_pad(directories: dict[str, Path], kind: str) -> None:
    ours, theirs = both(directories[kind])
    rows = [dict(ours(text)) for text in BATCH]
    without_mask = [{"input_ids": row["input_ids"]} for row in rows]
    for options in PADDING[1:]:
        for given in (rows, without_mask, dict(ours(BATCH)), dict(ours(BATCH[1]))):
            assert plain(ours.pad(given, **options)) == plain(theirs.pad(given, **options))
    got, expected = ours.pad(rows, return_tensors="pt"), theirs.pad(rows, return_tensors="pt")
    assert all(torch.equal(got[name], expected[name]) for name in ("input_ids", "attention_mask"))
    assert "attention_mask" not in ours.pad(without_mask, return_attention_mask=False)
    tensors = [{name: torch.tensor(value) for name, value in row.items()} for row in rows if row["input_ids"]]
    assert plain(ours.pad(tensors, padding_side="left")) == plain(theirs.pad(tensors, padding_side="left"))
    labelled = [{**row, "labels": row["input_ids"]} for row in rows]
    assert ours.pad(labelled)["labels"] == [row["labels"] for row in labelled]
    with pytest.raises(TokenizerError, match="labels: cannot be converted to a tensor"):
        ours.pad(labelled, return_tensors="pt")
    with pytest.raises(TokenizerError, match="encoded_inputs: no input_ids; got"):
        ours.pad({"labels": [1]})
    with pytest.raises(TokenizerError, match="encoded_inputs: rows with different inputs"):
        ours.pad([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}])


ADDITIONS: dict[str, Any] = {
    "names": ("add_special_tokens", {"pad_token": "<pad>", "eos_token": "<new eos>"}),
    "a token of the vocabulary": ("add_special_tokens", {"bos_token": "a"}),
    "a list": ("add_special_tokens", {"additional_special_tokens": ["<x>", "<y>", "<x>"]}),
    "a newer list and a name": ("add_special_tokens", {"extra_special_tokens": ["<x>"], "mask_token": "<mask>"}),
    "objects": ("add_special_tokens", {"sep_token": AddedToken("<sep>", lstrip=True, rstrip=True, special=True)}),
    "tokens": ("add_tokens", ["new", "<x>", "a", AddedToken("word", single_word=True)]),
    "a token": ("add_tokens", "<x>"),
    "nothing": ("add_tokens", []),
}


@every_kind
@pytest.mark.parametrize("case", ADDITIONS)
def test_added_tokens(directories: dict[str, Path], tmp_path: Path, kind: str, case: str) -> None:
    """They have the effect and the return value of transformers', also after saving, in both libraries."""
    ours, theirs = both(directories[kind])
    method, argument = ADDITIONS[case]
    assert getattr(ours, method)(argument) == getattr(theirs, method)(argument)
    ours.save_pretrained(tmp_path)
    text = "<s>a<x> <y> b<pad> <new eos>new word words <mask> c <sep> d</s>"
    for name, other in (("now", theirs), ("saved", PreTrainedTokenizerFast.from_pretrained(tmp_path))):
        for one in (ours, Tokenizer.from_pretrained(tmp_path)):
            assert one.encode(text) == other.encode(text), name
            ids = one.encode(text)
            assert one.decode(ids) == other.decode(ids)
            if case != "a token of the vocabulary":  # after loading, named tokens are special in both
                assert one.decode(ids, skip_special_tokens=True) == other.decode(ids, skip_special_tokens=True)
            assert len(one) == len(other)
            for token in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
                assert getattr(one, token) == getattr(other, token)
                assert getattr(one, f"{token}_id") == getattr(other, f"{token}_id")
    extra = ["<x>", "<y>"] if case == "a list" else ["<x>"] if case.startswith("a newer") else []
    assert Tokenizer.from_pretrained(tmp_path).additional_special_tokens == ours.additional_special_tokens == extra


def test_a_list_of_special_tokens_and_its_replacement(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_pretrained(directories["qwen"])
    size = len(tokenizer)
    assert tokenizer.add_special_tokens(["<x>", "<y>"]) == 2
    assert tokenizer.all_special_tokens[-2:] == ["<x>", "<y>"]
    assert tokenizer.all_special_ids[-2:] == [size, size + 1]
    assert tokenizer.add_special_tokens({"extra_special_tokens": ["<z>"]}, replace_extra_special_tokens=False) == 1
    assert tokenizer.additional_special_tokens == ["<x>", "<y>", "<z>"]
    assert tokenizer.add_special_tokens({"extra_special_tokens": ["<z>"]}) == 0
    assert tokenizer.additional_special_tokens == ["<z>"]
    assert len(tokenizer) == size + 3


@every_kind
@pytest.mark.parametrize("again", ["<x>", AddedToken("<x>", lstrip=True)], ids=["text", "object"])
def test_a_token_that_the_list_has_keeps_its_flags(directories: dict[str, Path], kind: str, again: Any) -> None:
    first = AddedToken("<x>", lstrip=isinstance(again, str), special=True)
    text = "a <x> b"
    counts, ids = [], []
    for one in both(directories[kind]):
        for token in (first, again):
            counts.append(one.add_special_tokens({"extra_special_tokens": [token]}, replace_extra_special_tokens=False))
        ids.append(one.encode(text))
    assert counts == [1, 0, 1, 0]
    assert ids[0] == ids[1]


def test_special_tokens_can_be_set(directories: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(directories["llama2"])
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    tokenizer.pad_token_id = tokenizer.unk_token_id
    assert tokenizer.pad_token == "<unk>"
    tokenizer.bos_token = None
    tokenizer.save_pretrained(tmp_path)
    for loaded in both(tmp_path):
        assert (loaded.pad_token, loaded.bos_token, loaded.eos_token) == ("<unk>", None, "</s>")
    with pytest.raises(TokenizerError, match=r"pad_token: the vocabulary .*; got '<pad>'. Call add_special_tokens\("):
        tokenizer.pad_token = "<pad>"
    with pytest.raises(TokenizerError, match="pad_token_id: no token has this id; got 99999"):
        tokenizer.pad_token_id = 99999
    assert tokenizer.pad_token == "<unk>"


def test_other_entries_of_the_files_are_kept(directories: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(directories["llama3"])
    tokenizer.add_tokens("<x>")
    tokenizer.save_pretrained(tmp_path)
    config, before = (
        json.loads((path / "tokenizer_config.json").read_text()) for path in (tmp_path, directories["llama3"])
    )
    assert config == before
    content, before = (json.loads((path / "tokenizer.json").read_text()) for path in (tmp_path, directories["llama3"]))
    assert [token["content"] for token in content.pop("added_tokens")][-1] == "<x>"
    del before["added_tokens"]
    assert content == before


def test_invalid_arguments(directories: dict[str, Path]) -> None:
    tokenizer: Any = Tokenizer.from_pretrained(directories["qwen"])
    for call, message in (
        (lambda: tokenizer("a", max_lenght=3), "max_lenght: not an option of the tokenizer. Did you mean 'max_length'"),
        (lambda: tokenizer.encode(["a"]), r"not a string; got \['a'\]. Call tokenizer\(\[...\]\) for several texts"),
        (lambda: tokenizer.encode(3), "cannot encode this text: it is not a string; got 3$"),
        (lambda: tokenizer.decode(torch.ones(2, 3).long()), "got tensor.*decode takes one row of ids, batch_de"),
        (lambda: tokenizer.decode([[1, 2]]), r"got \[\[1, 2\]\]; expected a list or a 1-D tensor of integers. decode"),
        (lambda: tokenizer.decode("a"), "got 'a'; expected a list or a 1-D tensor of integers. decode takes one row"),
        (lambda: tokenizer.batch_decode([1, 2]), "got 1; expected a list or a 1-D tensor of integers. decode takes"),
        (lambda: tokenizer("a", stride=3), "stride: not an option of the tokenizer; expected text, text_pair, add"),
        (lambda: tokenizer("a", padding="both"), "padding: unsupported value; got 'both'; expected True"),
        (lambda: tokenizer("a", padding="max_length"), 'max_length: padding="max_length" without a length'),
        (lambda: tokenizer("a", truncation="first"), "truncation: unsupported value; got 'first'"),
        (lambda: tokenizer("a", truncation=True), "max_length: truncation without a length; .*Pass max_length"),
        (lambda: tokenizer(["a", "b"], ["c"]), "text_pair: not one second text for each; got 1; expected 2 texts"),
        (lambda: tokenizer.encode("a", True), "text_pair: not a text; got True"),
        (lambda: tokenizer.add_special_tokens({"padding_token": "x"}), "got 'padding_token'.*Did you mean 'pad_t"),
        (lambda: tokenizer.add_special_tokens({"pad_token": 3}), "not a token; got 3"),
        (lambda: tokenizer.add_special_tokens({"pad_token": ["<x>"]}), r"not a token; got \['<x>'\]"),
        (lambda: tokenizer.add_special_tokens({"extra_special_tokens": "<x>"}), "extra_special_tokens: not a list"),
        (lambda: tokenizer.add_tokens([""]), "not a token; got ''"),
        (lambda: tokenizer.add_tokens("x" * 10**5), "added_tokens: exceeds the limit"),
    ):  # fmt: skip
        with pytest.raises(TokenizerError, match=message):
            call()
    assert len(tokenizer) == len(Tokenizer.from_pretrained(directories["qwen"]))


def test_a_pair_template_that_multiplies_texts_is_refused(directories: dict[str, Path]) -> None:
    backend = Backend.from_file(str(directories["qwen"] / "tokenizer.json"))
    backend.post_processor = TemplateProcessing("$A", " ".join(["$A", "$B"] * 500), [])
    tokenizer = Tokenizer({"tokenizer.json": backend.to_str().encode()}, "here")
    assert tokenizer("one text").input_ids
    with pytest.raises(TokenizerError, match="the post-processor for two texts exceeds the limit"):
        tokenizer("one text", "another")


def test_batches_can_be_copied_and_unpacked(directories: dict[str, Path]) -> None:
    batch = Tokenizer.from_pretrained(directories["qwen"])(BATCH, return_tensors="pt")
    for again in (copy.deepcopy(batch), copy.copy(batch), BatchEncoding(**batch)):
        assert torch.equal(again.input_ids, batch.input_ids)

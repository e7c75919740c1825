"""The lower bound on the number of tokens never exceeds it, and encoding lets other threads run."""

import threading
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ligerzoo.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import CORPUS, KINDS

PIECES = [
    *CORPUS, "the quick", "  ", "\n", "e\u0301", "é", "\u1112\u1161\u11ab", "한", "😀", "\u00a0", "▁", "Ġ", "x",
    "<|eot|>", "</s>", "<tool>", "<a b>", "<0x41>",
]  # fmt: skip


def tokenizer(backend: Backend) -> Tokenizer:
    return Tokenizer({"tokenizer.json": backend.to_str().encode()}, "here")


TOKENIZERS = {kind: tokenizer(make()) for kind, make in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8), repeats=st.integers(1, 30))
@example(pieces=["e\u0301"], repeats=30)
@example(pieces=["<tool>"], repeats=9)
def test_no_text_has_fewer_tokens(kind: str, pieces: list[str], repeats: int) -> None:
    text = "".join(pieces).encode(errors="ignore").decode() * repeats
    assert TOKENIZERS[kind].min_tokens(text) <= len(TOKENIZERS[kind].encode(text, add_special_tokens=False))


@pytest.mark.parametrize("kind", ["llama3", "llama2", "qwen"])
def test_a_long_text_has_many_tokens(kind: str) -> None:
    text = "".join(CORPUS) * 10
    number = len(TOKENIZERS[kind].encode(text))
    assert TOKENIZERS[kind].min_tokens(text) > number / 15
    assert TOKENIZERS[kind].min_tokens("z" * 10_000) > 10_000 / 15


def test_there_is_no_bound_if_rules_drop_characters() -> None:
    text = " " * 5000
    for change in ("strip", "remove", "absorb"):
        backend = KINDS["llama3"]()
        if change == "strip":
            backend.normalizer = normalizers.Strip()
        elif change == "remove":
            splits = [pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer]
            backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
        else:
            backend.add_tokens([AddedToken("<end>", rstrip=True)])
        assert tokenizer(backend).min_tokens(text) == 0, change
    assert tokenizer(backend).min_tokens("x" * 5000) > 100  # only spaces can belong to "<end>"
    assert all(TOKENIZERS[kind].min_tokens("a" * 5000) == 0 for kind in ("unigram", "end of word", "no decoder"))


def test_the_bound_follows_added_tokens() -> None:
    one = tokenizer(KINDS["qwen"]())
    assert one.min_tokens("z" * 300) > 10
    one.add_tokens(["z" * 300])
    assert one.min_tokens("z" * 300) <= len(one.encode("z" * 300)) == 1


def test_encoding_lets_other_threads_run() -> None:
    text = "a b" * 100_000
    stop, stalls = threading.Event(), [0.0]

    def watch() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            stalls.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    TOKENIZERS["llama3"].encode(text)
    taken = time.perf_counter() - start
    stop.set()
    watcher.join()
    assert taken > 0.02
    assert max(stalls) < taken / 2

"""The text of a continuation while its tokens arrive."""

import random
from dataclasses import replace

import pytest

from ligerzoo.demo.text import CHECKPOINT
from ligerzoo.generate import Update
from ligerzoo.serve.continuation import Continuation, Piece
from ligerzoo.serve.prompts import PromptEncoder
from ligerzoo.text.tokenizer import Tokenizer

TEXT = "def größe(löwe):\n    return '🦁' * 3  # \u200d👩\u200d🚀 stop here\n\nUser: next"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(CHECKPOINT)


def pieces(
    tokenizer: Tokenizer, ids: list[int], reason: str, stop: list[str] | None = None, sizes: int = 1, **options: bool
) -> tuple[Continuation, list[Piece]]:
    """Pushes the ids in updates of up to `sizes` tokens, until the continuation has finished."""
    continuation = Continuation(tokenizer, stop or [], **options)
    parts, draw = [], random.Random(0)
    while ids:
        size = draw.randint(1, sizes)
        new, ids = ids[:size], ids[size:]
        logps = [-0.5 * token for token in new]
        parts.append(continuation.push(Update(0, new, logps, None if ids else reason)))
        if parts[-1].finish_reason is not None:
            break
    return continuation, parts


@pytest.mark.parametrize("sizes", [1, 4])
def test_parts_concatenate_to_the_text_in_whole_characters(tokenizer: Tokenizer, sizes: int) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    continuation, parts = pieces(tokenizer, ids, "length", sizes=sizes)
    assert "".join(part.text for part in parts) == TEXT
    assert not any("\ufffd" in part.text for part in parts)
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    tokens = [token for part in parts for token in part.tokens]
    assert [token.logp for token in tokens] == [-0.5 * token for token in ids]
    assert all(TEXT[token.offset :].startswith(token.text) for token in tokens)
    assert "".join(token.text for token in tokens) == TEXT
    assert continuation.num_tokens == len(ids)


def test_an_unfinished_character_at_the_end_belongs_to_the_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🦁", add_special_tokens=False)
    assert len(ids) > 3
    _, parts = pieces(tokenizer, ids[:-1], "length")
    assert "".join(part.text for part in parts) == tokenizer.decode(ids[:-1]) == "a\ufffd"
    assert parts[-1].tokens[-1].text == "\ufffd"


def test_the_end_of_sequence_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("return x", add_special_tokens=False)
    for end in (tokenizer.eos_token_id, ids[0]):  # an end-of-sequence token need not be a special one
        continuation, parts = pieces(tokenizer, [*ids, end], "stop")
        assert "".join(part.text for part in parts) == "return x"
        assert continuation.num_tokens == len(ids) + 1
        tokens = [token for part in parts for token in part.tokens]
        assert [token.id for token in tokens] == [*ids, end]
        assert (tokens[-1].text, tokens[-1].logp, tokens[-1].offset) == ("", -0.5 * end, len("return x"))
        assert parts[-1].finish_reason == "stop"


@pytest.mark.parametrize("sizes", [1, 5])
@pytest.mark.parametrize("keeps_stop", [False, True])
@pytest.mark.parametrize("stop", ["stop", "\n\nUser:", "🦁", "here\n\nUser", "d", "öw"])
def test_a_stop_string_ends_the_text(tokenizer: Tokenizer, stop: str, keeps_stop: bool, sizes: int) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    continuation, parts = pieces(tokenizer, ids, "length", [stop, "not there"], sizes, keeps_stop=keeps_stop)
    expected = TEXT[: TEXT.index(stop) + len(stop) * keeps_stop]
    assert "".join(part.text for part in parts) == expected
    assert parts[-1].finish_reason == "stop"
    tokens = [token for part in parts for token in part.tokens]
    assert "".join(token.text for token in tokens) == expected
    assert all(expected[token.offset :].startswith(token.text) for token in tokens)
    assert len(tokens) == continuation.num_tokens  # those of the stop string have no text


def test_the_first_of_several_stop_strings_counts(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    _, parts = pieces(tokenizer, ids, "length", ["User", "return '", "return", "here"], sizes=9, keeps_stop=True)
    assert "".join(part.text for part in parts) == TEXT[: TEXT.index("return") + len("return")]


def test_text_that_only_begins_like_a_stop_string_is_returned_later(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "aababc"]
    _, parts = pieces(tokenizer, ids, "length", ["aabac"])
    assert [part.text for part in parts] == ["", "", "", "", "aabab", "c"]
    assert [len(part.tokens) for part in parts] == [0, 0, 0, 0, 5, 1]


def test_a_special_token_may_be_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a", add_special_tokens=False), tokenizer.bos_token_id]
    ids += tokenizer.encode("b", add_special_tokens=False)
    _, parts = pieces(tokenizer, ids, "length", ["<s>"])
    assert ("".join(part.text for part in parts), parts[-1].finish_reason) == ("a", "stop")
    _, parts = pieces(tokenizer, ids, "length")
    assert "".join(part.text for part in parts) == "ab"  # otherwise it is skipped


@pytest.mark.parametrize("prompt", [TEXT, "x", "🦁"])
def test_an_echoed_prompt_precedes_the_text(tokenizer: Tokenizer, prompt: str) -> None:
    """Its updates arrive in parts, without the first token. Stop strings count in the continuation only."""
    ids, new = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, "def f"))
    for limit in (0, len(new)):
        encoder = PromptEncoder(tokenizer, 10_000, 500)
        for given, tokens in ((prompt, tokenizer.encode(prompt)), (ids, ids)):
            texts = encoder.texts(given, tokens)
            continuation = Continuation(tokenizer, [prompt[-1] * 2], echoed=texts, continues_text=True)
            logps = [-0.5 * token for token in tokens[1:]]
            updates = [
                Update(0, tokens[start:end], logps[start - 1 : end - 1], None, is_prompt=True)
                for start, end in ((1, 4), (4, len(tokens)))
            ]
            if limit == 0:
                updates[-1] = replace(updates[-1], finish_reason="length")
            else:
                updates.append(Update(0, new, [-0.5 * token for token in new], "length"))
            parts = [continuation.push(update) for update in updates]
            text = prompt + ("def f" if limit else "")
            assert "".join(part.text for part in parts) == text
            shown = [token for part in parts for token in part.tokens]
            assert [token.id for token in shown] == [None, *tokens[1:], *new[:limit]]
            assert [token.logp for token in shown[1:]] == [-0.5 * (token.id or 0) for token in shown[1:]]
            assert "".join(token.text for token in shown) == text
            assert all(text[token.offset :].startswith(token.text) for token in shown)
            assert parts[-1].finish_reason == "length"
            assert continuation.num_tokens == limit

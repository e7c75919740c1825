"""Calls with one KV cache return the tokens of calls without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import ConversationCache, generate
from ligerzoo.layers import KVCache, TokenCache
from tests.generate.families import FAMILIES, pair
from tests.generate.models import LEFT, PROMPT, VOCAB, Recorder, Scripted, mask_of, prompts, tiny_llama

CAPACITY = 120


def keeping_all(model: Any) -> KVCache:
    cache: KVCache = model.new_cache()
    cache.keep_all_tokens()
    return cache


KINDS: dict[str, Callable[[Any], KVCache]] = {
    "growing": lambda model: model.new_cache(),  # rolling in layers with a window
    "all": keeping_all,
    "static": lambda model: model.new_cache(CAPACITY),
}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_with_a_cache_equal_calls_without(family: str, kind: str) -> None:
    """Rows are ragged, end at different tokens, and are continued by ragged texts, padded on the left.

    With a sliding window, only the prompts are ragged: a window counts padding. So it is with recurrent layers.
    """
    is_windowed = "sliding_window" in FAMILIES[family] or family == "qwen3_5_text"
    model = Recorder(pair(family)[0])
    if kind == "all" and family == "qwen3_5_text":
        with pytest.raises(ValueError, match=r"^keep_all_tokens: the model has recurrent layers"):
            keeping_all(model.model)
        return
    cache = KINDS[kind](model.model)
    ids, mask = prompts("cpu", 3, 17), mask_of(LEFT, "cpu")
    ends, pad = ([] if is_windowed else [3, 8, 40, 60, 90]), VOCAB + 3  # padding has no embedding
    options: dict[str, Any] = {"max_new_tokens": 13, "eos_token_id": ends, "pad_token_id": pad}
    for call in range(3):
        expected = pair(family)[0].generate(ids, mask, **options)
        model.read.clear()
        cached = cache.length
        got = generate(model, ids, mask, past_key_values=cache, **options)
        assert got.tolist() == expected.tolist()
        assert model.read[0].shape == (3, ids.shape[1] - cached)
        assert cache.length == got.shape[1] - 1
        new = got[:, ids.shape[1] :]
        question = prompts("cpu", 3, 5, seed=9 + call)
        question_mask = torch.ones_like(question) if is_windowed else mask_of(["..###", "#####", ".####"], "cpu")
        mask = torch.cat([mask, (new != pad).long(), question_mask], 1)
        ids = torch.cat([got, question], 1)
    assert is_windowed or (mask[:, 17:-5] == 0).any()  # padding after rows that ended


def test_padding_between_tokens_is_refused_with_a_sliding_window() -> None:
    model, _ = pair("mistral")
    ids, mask = prompts("cpu", 2, 7), mask_of(["..#####", "##..###"], "cpu")
    with pytest.raises(LigerzooError, match=r"^attention_mask: .*got padding between tokens; expected padding on"):
        model.generate(ids, mask, past_key_values=model.new_cache(), max_new_tokens=2)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_share_a_history(kind: str) -> None:
    model, _ = pair("mistral")
    cache, ids = KINDS[kind](model), prompts("cpu", 2, 20)
    model.generate(ids[:, :9], max_new_tokens=1, past_key_values=cache)
    copies = model.generate(
        ids, max_new_tokens=12, do_sample=True, top_k=1, num_return_sequences=3, past_key_values=cache
    )
    assert torch.equal(copies, model.generate(ids, max_new_tokens=12).repeat_interleave(3, 0))
    assert (cache.rows, cache.length) == (6, 31)


def test_embeddings_continue_a_history() -> None:
    model, _ = pair("gemma2")
    ids, cache = prompts("cpu", 2, 20), model.new_cache()
    model.generate(ids[:, :9], max_new_tokens=1, past_key_values=cache)
    embeddings = model.get_input_embeddings()(ids).detach()
    got = model.generate(inputs_embeds=embeddings, past_key_values=cache, max_new_tokens=12)
    assert torch.equal(got, model.generate(ids, max_new_tokens=12)[:, 20:])


def test_a_cache_that_longer_sequences_cannot_use_is_filled_again() -> None:
    """As with LongRoPE, whose frequencies change at this length, before and during generation."""
    model, ids = tiny_llama("cpu"), prompts("cpu", 2, 27)
    for limit, reads in ((25, [30, *[1] * 7]), (35, [8, *[1] * 5, 36, 1])):
        cache, recorder = model.new_cache(), Recorder(model)
        cache.max_valid_length = limit
        first = generate(recorder, ids[:, :20], max_new_tokens=3, past_key_values=cache)
        history = torch.cat([first, ids[:, 20:]], 1)
        got = generate(recorder, history, max_new_tokens=8, past_key_values=cache)
        assert torch.equal(got, model.generate(history, max_new_tokens=8))
        assert cache.length == 37
        assert [tokens.shape[1] for tokens in recorder.read] == [20, 1, 1, *reads]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_empties_the_cache(kind: str) -> None:
    model, ids = tiny_llama("cpu"), prompts("cpu", 2, 12)
    cache = KINDS[kind](model)
    model.generate(ids, max_new_tokens=3, past_key_values=cache)

    def interrupt(input_ids: Tensor, scores: None) -> bool:
        raise KeyboardInterrupt

    whole = torch.cat([ids, ids], 1)
    with pytest.raises(KeyboardInterrupt):
        model.generate(whole, max_new_tokens=3, past_key_values=cache, pad_token_id=0, stopping_criteria=[interrupt])
    assert cache.length == 0
    got = model.generate(whole, max_new_tokens=3, past_key_values=cache)
    assert torch.equal(got, model.generate(whole, max_new_tokens=3))


def new_cache(tokens: int = 0, rows: int = 2, layers: int = 2, capacity: int | None = None) -> KVCache:
    cache = tiny_llama("cpu").new_cache(capacity) if capacity else KVCache(TokenCache() for _ in range(layers))
    for layer in cache.layers if tokens else ():
        layer.append(torch.zeros(rows, tokens, 6, 8), torch.zeros(rows, tokens, 6, 8))
    return cache


@pytest.mark.parametrize(
    "cache, options, message",
    [
        ([], {}, r"got list; expected a ligerzoo.layers.KVCache. Pass model.new_cache\(\) in the first call"),
        (new_cache(layers=3), {}, "got a cache of 3 layers; expected 2 layers"),
        (new_cache(1, rows=3), {}, r"got a cache of 3 rows; .* one for each prompt. .* cache.select_rows\(indices\)"),
        (new_cache(2), {}, r"got a cache of 2 tokens; expected fewer than 2, .* use cache.crop\(length\)"),
        (new_cache(capacity=4), {}, "got a cache of capacity 4; expected at least 5, .* grows"),
        (new_cache(), {"use_cache": False}, "got False with past_key_values; expected True"),
        (
            new_cache(),
            {"attention_mask": torch.tensor([[1, 0], [1, 1]])},
            "got padding in the last column; expected tokens, with past_key_values. Pad on the left",
        ),
    ],
)
def test_caches_that_do_not_fit_are_refused(cache: Any, options: dict[str, Any], message: str) -> None:
    model = tiny_llama("cpu")
    where = "past_key_values|use_cache|attention_mask"
    with pytest.raises(LigerzooError, match=f"^({where}): .*{message}"):
        model.generate(PROMPT, past_key_values=cache, max_new_tokens=4, **options)


def test_a_model_without_new_cache_accepts_any_number_of_layers() -> None:
    assert generate(Scripted([[7], [8]]), PROMPT, max_new_tokens=1, past_key_values=new_cache(layers=5)).shape == (2, 3)


def test_a_conversation_processes_only_what_differs() -> None:
    model = Recorder(pair("mistral")[0])
    conversation = ConversationCache(model.model)
    history = prompts("cpu", 1, 12)
    processed = []
    for call in range(4):
        model.read.clear()
        got = generate(model, history, max_new_tokens=15, past_key_values=conversation.shared_with(history))
        conversation.keep(got)
        processed.append(model.read[0].shape[1])
        assert torch.equal(got, pair("mistral")[0].generate(history, max_new_tokens=15))
        if call == 1:  # a template that drops a part of the answer
            got = torch.cat([got[:, :31], got[:, 40:]], 1)
        history = torch.cat([got, prompts("cpu", 1, 6, seed=call)], 1) if call != 2 else got[:, :10]
    # 12; the last new token and a question; the tokens after column 31; a prefix of the history
    assert processed == [12, 7, 48 - 9 + 6 - 31, 1]


def test_a_conversation_that_starts_again_shares_nothing() -> None:
    model = Recorder(tiny_llama("cpu"))
    conversation = ConversationCache(model.model)
    ids = prompts("cpu", 1, 12)
    conversation.keep(generate(model, ids, max_new_tokens=4, past_key_values=conversation.shared_with(ids)))
    other = (ids + 1) % 97
    assert conversation.shared_with(other).length == 0
    got = generate(model, other, max_new_tokens=4, past_key_values=conversation.shared_with(other))
    assert torch.equal(got, tiny_llama("cpu").generate(other, max_new_tokens=4))


def test_a_conversation_with_recurrent_layers_is_reused_if_it_is_extended() -> None:
    """Else it is read again from its first token, since states cannot go back."""
    model, ids = Recorder(pair("qwen3_5_text")[0]), prompts("cpu", 1, 9)
    cache = ConversationCache(model.model)
    for is_changed, tokens_read in ((False, 9), (False, 5), (True, 27)):
        if is_changed:
            ids[0, 11] = (ids[0, 11] + 1) % VOCAB
        model.read.clear()
        answered = generate(model, ids, past_key_values=cache.shared_with(ids), max_new_tokens=5)
        assert torch.equal(answered, model.model.generate(ids, max_new_tokens=5))
        assert model.read[0].shape[1] == tokens_read
        cache.keep(answered)
        ids = torch.cat([answered, prompts("cpu", 1, 4, seed=tokens_read)], 1)


def test_rows_that_ended_earlier_cannot_be_continued_with_recurrent_layers() -> None:
    model, _ = pair("qwen3_5_text")
    ids, mask = prompts("cpu", 2, 7), mask_of(["..#####", "##..###"], "cpu")
    with pytest.raises(LigerzooError, match=r"^attention_mask: .*on the left only, with past_key_values and recurrent"):
        model.generate(ids, mask, past_key_values=model.new_cache(), max_new_tokens=2)

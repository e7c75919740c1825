"""Continuous batching: each prompt gets the tokens that it gets alone."""

import gc
import math
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ligerzoo.device import DelayedReads
from ligerzoo.errors import LigerzooError
from ligerzoo.generate import Completion, Scheduler, Update, chunked_prefill, generate_many
from ligerzoo.generate import scheduler as scheduler_module
from ligerzoo.generate import slots as slots_module
from ligerzoo.generate.graphs import CapturedCall, release_decode_graphs
from ligerzoo.layers.capture import can_capture
from ligerzoo.layers.kv_cache import cache_size
from ligerzoo.layers.static_cache import StaticLayerCache
from ligerzoo.models import Llama, LlamaConfig
from tests.covering import long_cases
from tests.generate.graphs import replace_graphs
from tests.generate.models import NO_END, TINY, VOCAB
from tests.generate.test_slots import BUILD, build

OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": NO_END}


@pytest.fixture
def model(device: str) -> Any:
    return build("llama", device)


@pytest.fixture(params=[0, 3], ids=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the host read the tokens some steps late, as on a GPU."""
    if request.param > 0:

        def reads(device: torch.device, lag: int) -> DelayedReads[Any]:
            late = DelayedReads[Any](device, lag)
            late.lag = request.param if lag else 0
            return late

        monkeypatch.setattr("ligerzoo.generate.engine.DelayedReads", reads)


@pytest.fixture(params=[False, True], ids=["eager", "captured"])
def captured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Decodes through captured graphs, on a CPU through a stand-in."""
    if request.param and device == "cpu":
        monkeypatch.setattr(slots_module, "can_capture", lambda model: True)
        replace_graphs(monkeypatch)
    elif device != "cpu":
        monkeypatch.setattr(slots_module, "can_capture", lambda model: request.param and can_capture(model))


def in_pairs(options: dict[str, list[Any]]) -> Callable[[Any], Any]:
    """Runs a test with a `case` of the options, and `late` and `captured`, so that every pair of values occurs."""
    cases = [
        pytest.param(row.pop("late"), row.pop("captured"), row, marks=marks)
        for (row,), marks, _ in long_cases({**options, "late": [0, 3], "captured": [False, True]})
    ]
    parametrize = pytest.mark.parametrize("late, captured, case", cases, indirect=["late", "captured"], ids=str)
    return lambda test: pytest.mark.usefixtures("late", "captured")(parametrize(test))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, so that caches grow and shrink, and prompts are prefilled in chunks."""
    for name, value in {"_MIN_CAPACITY": 8, "_SPARSE_STEPS": 2, "PREFILL_TOKENS": 24, "_MERGED_TOKENS": 12}.items():
        monkeypatch.setattr(slots_module, name, value)
    monkeypatch.setattr(scheduler_module, "PREFILL_TOKENS", 24)
    monkeypatch.setattr(scheduler_module, "_MIN_NEW_TOKENS", 3)
    in_chunks_of(1000, monkeypatch)


def in_chunks_of(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills prompts of more tokens in chunks, on a CPU."""
    for module in (scheduler_module, chunked_prefill):
        monkeypatch.setattr(module, "CHUNK_TOKENS", tokens)


def draw(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Returns the continuation that `generate` gives a single prompt."""
    ids = torch.tensor([prompt], device=model.device)
    return model.generate(ids, **{**OPTIONS, **options})[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def log_probabilities(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    ids = torch.tensor([prompt + tokens], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]  # type: ignore[no-any-return]


def check(model: Any, prompts: list[list[int]], results: list[Completion], **options: Any) -> None:
    """Compares results with those of each prompt alone."""
    assert sorted(result.index for result in results) == list(range(len(prompts)))
    for result in results:
        index, tokens, logps, reason = result.index, result.tokens, result.logps, result.finish_reason
        expected = alone(model, prompts[index], **options)
        assert tokens == expected
        is_full = len(tokens) == {**OPTIONS, **options}["max_new_tokens"]
        assert reason in (("stop", "length") if is_full else ("stop",))
        with torch.no_grad():
            torch.testing.assert_close(
                torch.tensor(logps, device=model.device),
                log_probabilities(model, prompts[index], tokens),
                rtol=0,
                atol=1e-5,
            )


class Words:
    """A tokenizer whose tokens are words of one letter and two digits."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(f"w{i:02}" for i in ids)

    def __repr__(self) -> str:  # without an address, which would differ between processes in the ids of tests
        return "Words()"


STOP = {"stop_strings": ["w11w", "7"], "tokenizer": Words()}
CASES: dict[str, list[Any]] = {
    "name": list(BUILD),
    "batch_size": [1, 3, 8],
    "longest": [1, 9, 40],
    "options": [{}, {"eos_token_id": list(range(0, VOCAB, 9))}, STOP, {"repetition_penalty": 1.4}],
    "max_new_tokens": [1, 2, 20],
    "chunk": [1000, 7],
}


@in_pairs(CASES)
def test_results_are_those_of_each_prompt_alone(
    case: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks_of(case["chunk"], monkeypatch)
    model, prompts = build(case["name"], device), draw(9, longest=case["longest"])
    options = {**case["options"], "max_new_tokens": case["max_new_tokens"]}
    results = list(model.generate_many(prompts, batch_size=case["batch_size"], **OPTIONS | options))
    check(model, prompts, results, **options)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("captured", [True], indirect=True)
def test_tokens_are_chosen_by_a_graph(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captures, capture = list[Any](), CapturedCall.capture

    def spy(call: CapturedCall[Any], function: Callable[[Tensor], Any]) -> None:
        if call._graph is None:
            captures.append(function)
        capture(call, function)

    monkeypatch.setattr(CapturedCall, "capture", spy)
    list(model.generate_many([[1, 2], [3, 4]], batch_size=2, **OPTIONS))
    assert captures
    captures.clear()
    with Scheduler(model, batch_size=2, **OPTIONS) as scheduler:
        scheduler.add([1, 2])
        scheduler.add([3, 4])
        for _ in range(5):
            scheduler.step()
        assert len(captures) == 1  # the model's graph of this capacity is there already
        scheduler.cancel(0)
        scheduler.add([3, 4], do_sample=True)
        drain(scheduler)
    assert len(captures) > 1  # the options of the sampler have changed


@pytest.mark.usefixtures("late")
def test_finish_reasons(model: Any) -> None:
    prompts = draw(6)
    free = [alone(model, prompt) for prompt in prompts]
    ends = {free[0][3], free[1][13]}
    results = list(generate_many(model, prompts, batch_size=3, max_new_tokens=14, eos_token_id=list(ends)))
    for result in results:
        reason = "stop" if ends & set(free[result.index]) else "length"
        assert (result.finish_reason, len(set(result.tokens) & ends)) == (reason, int(reason == "stop"))


def test_prompts_are_read_as_rows_become_free(model: Any) -> None:
    prompts, read = draw(9), 0

    def lazily() -> Iterator[Tensor]:
        nonlocal read
        for prompt in prompts:
            read += 1
            yield torch.tensor(prompt, dtype=torch.int32)

    results = []
    for result in model.generate_many(lazily(), batch_size=2, **OPTIONS):
        results.append(result)
        assert read <= len(results) + 2
    check(model, prompts, results)
    assert list(model.generate_many([], batch_size=2, **OPTIONS)) == []


def by_index(results: list[Completion]) -> list[tuple[int, list[int], str]]:
    return sorted((result.index, result.tokens, result.finish_reason) for result in results)


def test_seeded_samples_are_reproducible(model: Any, device: str) -> None:
    options = {**OPTIONS, "do_sample": True, "temperature": 1.4, "top_k": 30}

    def sample(seed: int) -> list[Completion]:
        generator = torch.Generator(device).manual_seed(seed)
        return list(model.generate_many(draw(5), batch_size=2, generator=generator, **options))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def drain(scheduler: Scheduler) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while not scheduler.is_idle:
        for update in scheduler.step():
            tokens.setdefault(update.index, []).extend(update.tokens)
    return tokens


@pytest.mark.usefixtures("late")
def test_requests_have_different_options(model: Any, device: str) -> None:
    prompts = draw(6)
    variants: list[dict[str, Any]] = [
        {}, {"max_new_tokens": 3}, {"repetition_penalty": 1.5}, {"eos_token_id": list(range(0, VOCAB, 5))}, STOP,
        {"do_sample": True, "top_k": 1},
    ]  # fmt: skip
    with Scheduler(model, batch_size=4, **OPTIONS) as scheduler:
        indices = [scheduler.add(prompt, **variant) for prompt, variant in zip(prompts, variants, strict=True)]
        assert indices == list(range(6))
        tokens = drain(scheduler)
    for index, variant in enumerate(variants):
        assert tokens[index] == alone(model, prompts[index], **variant)


@pytest.mark.usefixtures("late")
def test_requests_arrive_at_any_time(model: Any) -> None:
    prompts, tokens = draw(12, seed=3), dict[int, list[int]]()
    scheduler = Scheduler(model, batch_size=3, **OPTIONS)
    assert scheduler.is_idle
    assert scheduler.step() == []
    for number, prompt in enumerate(prompts):
        scheduler.add(torch.tensor(prompt))
        for _ in range(number % 5):
            for update in scheduler.step():
                assert isinstance(update, Update)
                tokens.setdefault(update.index, []).extend(update.tokens)
    for index, more in drain(scheduler).items():
        tokens.setdefault(index, []).extend(more)
    assert tokens == {index: alone(model, prompt) for index, prompt in enumerate(prompts)}


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("max_cache_tokens", [None, 200])
def test_running_requests_do_not_wait_for_a_long_prompt(
    model: Any, monkeypatch: pytest.MonkeyPatch, max_cache_tokens: int | None
) -> None:
    if model.device.type == "cuda":
        pytest.skip("a GPU prefills 16,384 tokens at once")
    in_chunks_of(5, monkeypatch)
    prompts = [[1, 2], [5] * 31, [6] * 40, [7, 8]]
    scheduler = Scheduler(model, batch_size=3, max_cache_tokens=max_cache_tokens, **OPTIONS)
    tokens: dict[int, list[int]] = {index: [] for index in range(4)}
    lengths, forward = [], model._call_impl
    monkeypatch.setattr(model, "_call_impl", lambda ids, *rest, **more: lengths.append(ids.numel()) or forward(
        ids, *rest, **more
    ))  # fmt: skip
    for prompt in prompts:
        scheduler.add(prompt)
    while not scheduler.is_idle:
        for update in scheduler.step():
            tokens[update.index] += update.tokens
        if len(tokens[0]) == 4:
            assert tokens[1] == tokens[2] == []
            assert tokens[3]  # it overtakes the third
    assert max(lengths) <= 5
    assert [tokens[index] for index in range(4)] == [alone(model, prompt) for prompt in prompts]
    for index in (scheduler.add([5] * 31), scheduler.add([6] * 31)):  # one is being prefilled, one waits
        scheduler.step()
        scheduler.cancel(index)
    assert scheduler.is_idle
    assert scheduler.free_rows == 3


def test_long_prompts_wait_while_others_run(model: Any) -> None:
    """One step prefills a bounded number of tokens, unless nothing runs."""
    prompts, waiting = [[5] * 30, [6] * 30, [7] * 30], []
    scheduler = Scheduler(model, batch_size=5, **OPTIONS)
    scheduler._in_chunks = False  # as on a GPU
    for prompt in prompts[:2]:
        scheduler.add(prompt)
    scheduler.step()
    assert scheduler.free_rows == 3
    for prompt in prompts:
        scheduler.add(prompt)
    for _ in range(3):
        assert scheduler.free_rows == 0
        scheduler.step()
        waiting.append(len(scheduler._waiting))
    assert waiting == [2, 1, 0]
    scheduler.close()
    assert scheduler.is_idle
    assert scheduler.free_rows == 5


@pytest.mark.usefixtures("late")
def test_cancelled_requests_leave(model: Any) -> None:
    prompts = draw(6)
    scheduler = Scheduler(model, batch_size=2, **OPTIONS)
    for prompt in prompts:
        scheduler.add(prompt)
    scheduler.step()
    for index in (0, 3):  # one runs, one waits
        scheduler.cancel(index)
    tokens = drain(scheduler)
    scheduler.cancel(1)  # has finished
    assert sorted(tokens) == [1, 2, 4, 5]
    for index in (2, 4, 5):
        assert tokens[index] == alone(model, prompts[index])
    for index in (6, -1, "0"):
        with pytest.raises(LigerzooError, match=r"index: invalid value; got .*; expected an index that add returned"):
            scheduler.cancel(index)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": None}, "max_new_tokens: invalid value; got None"),
        ({"max_new_tokens": 0}, "max_new_tokens: invalid value; got 0; expected an integer, 1 or more"),
        ({"max_new_token": 3}, r"max_new_token: not an option of a request\. Did you mean 'max_new_tokens'\?"),
        ({"topk": 3}, "topk: not an option of a request. Did you mean 'top_k'"),
        ({"num_beams": 3}, "num_beams: not an option of a request. Beam search is not implemented"),
        ({"max_length": 3}, "max_length: not an option of a request. Use max_new_tokens"),
        ({"stopping_criteria": []}, "stopping_criteria: not an option of a request. Use generate, which has this opti"),
        ({"pad_token_id": 3}, "pad_token_id: not an option of a request. Leave it out: results contain no padding"),
        ({"frobnicate": 3}, "frobnicate: not an option of a request; expected max_new_tokens, eos_token_id,"),
        ({"do_sample": True, "top_p": 2.0}, "top_p: invalid value; got 2.0"),
        ({"temperature": -1}, "temperature: invalid value"),
        ({"repetition_penalty": 0}, "repetition_penalty: invalid value"),
        ({"eos_token_id": "a"}, "eos_token_id: invalid value; got 'a'"),
        ({"stop_strings": "a"}, "tokenizer: stop_strings need a tokenizer"),
        ({"generator": 3}, "generator: invalid value; got 3; expected a torch.Generator"),
        ({"batch_size": 0}, "batch_size: invalid value; got 0; expected an integer, 1 or more"),
        ({"batch_size": 2.0}, "batch_size: invalid value; got 2.0"),
        ({"max_cache_tokens": 0}, "max_cache_tokens: invalid value; got 0; expected an integer, 1 or more, or None"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_before_anything_runs(model: Any, options: dict[str, Any], message: str) -> None:
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model runs"))
    with pytest.raises(LigerzooError, match=message):
        model.generate_many([[1, 2]], **{**OPTIONS, "batch_size": 2, **options})
    if not options.keys() & {"batch_size", "max_cache_tokens"}:
        with pytest.raises(LigerzooError, match=message):
            Scheduler(model, batch_size=2, **OPTIONS).add([1, 2], **options)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "no tokens; expected at least one token"),
        (torch.zeros(0, dtype=torch.int64), "no tokens; expected at least one token"),
        ("text", r"got str; expected token ids, a list or 1-D tensor of integers\. Encode text first"),
        (b"text", r"got bytes; expected token ids, a list or 1-D tensor of integers\. Encode text first"),
        (np.ones((2, 2), int), r"got a list with \[1, 1\]"),
        (np.ones(2), r"got a list with 1\.0"),
        (None, "got None; expected token ids"),
        (7, r"got int; .*\. Pass a list of prompts"),
        ([1.5], r"got a list with 1\.5"),
        ([True], "got a list with True"),
        ([2**70], "got a list with 1180591620717411303424"),
        (torch.zeros(2, 2), r"got \(2, 2\) torch.float32"),
        (torch.zeros(2), r"got \(2,\) torch.float32"),
        ([VOCAB, 1], rf"token ids outside the vocabulary; got \[{VOCAB}\]; expected 0 to {VOCAB - 1}"),
        ([-1], r"token ids outside the vocabulary; got \[-1\]"),
    ],
    ids=str,
)
def test_invalid_prompts_are_refused_by_index(model: Any, prompt: Any, message: str) -> None:
    with pytest.raises(LigerzooError, match=rf"^prompt: .*{message}"):
        Scheduler(model, batch_size=2, **OPTIONS).add(prompt)
    results = model.generate_many(iter([[1, 2], [3], prompt]), batch_size=2, **OPTIONS)
    with pytest.raises(LigerzooError, match=rf"^prompts\[2\]: .*{message}"):
        list(results)
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model runs"))
    with pytest.raises(LigerzooError, match=rf"^prompts\[2\]: .*{message}"):
        model.generate_many([[1, 2], [3], prompt], batch_size=2, **OPTIONS)


def test_prompts_of_numpy(model: Any) -> None:
    prompts = draw(3)
    arrays = [np.array(prompts[0], np.int16), list(np.array(prompts[1])), np.array(prompts[2])]
    check(model, prompts, list(model.generate_many(arrays, batch_size=2, **OPTIONS)))


@pytest.mark.parametrize("prompts", ["text", {"input_ids": [[1]]}, 5])
def test_other_collections_are_refused(model: Any, prompts: Any) -> None:
    with pytest.raises(LigerzooError, match=r"prompts: invalid value; got .*; expected an iterable of lists of token"):
        model.generate_many(prompts, batch_size=2, **OPTIONS)


def test_sequences_that_change_the_rotation_of_others_are_refused() -> None:
    sizes = {**TINY, "max_position_embeddings": 20, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**sizes)).double()
    with pytest.raises(
        LigerzooError, match=r"prompts\[1\]: .* got 7 tokens and max_new_tokens=14; expected at most 20"
    ):
        model.generate_many([[1], [2] * 7], batch_size=2, **OPTIONS)
    prompts = [[1], [2] * 6]
    check(model, prompts, list(model.generate_many(prompts, batch_size=2, **OPTIONS)))


# Memory


class Memory:
    """Tokens for which all static caches that are alive have memory, and their largest sum."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest = 0
        self.sizes = list[tuple[int, int]]()  # rows and capacity of the caches, in order
        self._caches = weakref.WeakSet[StaticLayerCache]()
        allocate = StaticLayerCache.allocate

        def spy(cache: StaticLayerCache, rows: int, *arguments: Tensor) -> tuple[Tensor, Tensor]:
            buffers = allocate(cache, rows, *arguments)
            self._caches.add(cache)
            if (rows, cache.capacity) not in self.sizes[-1:]:
                self.sizes.append((rows, cache.capacity))
            if self.tokens > self.largest:
                gc.collect()  # the stand-in for a graph refers to its batch
            self.largest = max(self.largest, self.tokens)
            return buffers

        monkeypatch.setattr(StaticLayerCache, "allocate", spy)

    @property
    def tokens(self) -> int:
        """Tokens of all layers."""
        buffers = [cache._keys for cache in self._caches if cache._keys is not None]
        return sum(len(buffer) * buffer.shape[2] for buffer in buffers)


BUDGETS: dict[str, list[Any]] = {
    "name": ["llama", "mistral", "qwen3_moe", "qwen3_next"],
    "max_cache_tokens": [60, 61, 100, 130, 250, 10_000],
    "batch_size": [1, 3, 8],
    "new": [20, 40],
    "options": [
        {}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2, "bad_words_ids": [[3], [5, 6]]},
        {"min_new_tokens": 17, "eos_token_id": list(range(0, VOCAB, 4))},
        {"do_sample": True, "temperature": 1.3, "top_p": 0.9},
    ],
}  # fmt: skip


@in_pairs(BUDGETS)
def test_requests_wait_for_memory(case: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches never exceed `max_cache_tokens`, and the tokens do not depend on it."""
    model, prompts = build(case["name"], device), draw(9, longest=20)
    options, limit = {**OPTIONS, **case["options"], "max_new_tokens": case["new"]}, case["max_cache_tokens"]

    def seeded() -> Any:
        return {**options, "generator": torch.Generator(device).manual_seed(3)}

    expected = list(model.generate_many(prompts, batch_size=9, **seeded()))
    release_decode_graphs(model)
    memory = Memory(monkeypatch)
    results = list(model.generate_many(prompts, batch_size=case["batch_size"], max_cache_tokens=limit, **seeded()))
    assert memory.largest <= limit * (len(model.model.layers) + 1)  # one layer while a cache moves to another
    assert by_index(results) == by_index(expected)


@pytest.mark.usefixtures("late")
def test_the_longest_request_waits_when_a_cache_cannot_grow(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1] * 20, [2] * 5, [3] * 5, [4] * 5]
    memory = Memory(monkeypatch)
    with Scheduler(model, batch_size=4, max_cache_tokens=128, max_new_tokens=20, eos_token_id=NO_END) as scheduler:
        for prompt in prompts:
            scheduler.add(prompt)
        waiting, tokens = list[list[int]](), dict[int, list[int]]()
        while not scheduler.is_idle:
            for update in scheduler.step():
                tokens.setdefault(update.index, []).extend(update.tokens)
            waiting.append(list(scheduler._waiting))
    assert waiting[0] == []
    assert [0] in waiting
    assert all(len(indices) <= 1 for indices in waiting)
    assert (4, 32) in memory.sizes
    assert max(capacity for _, capacity in memory.sizes) == 64
    for index, prompt in enumerate(prompts):
        assert tokens[index] == alone(model, prompt, max_new_tokens=20)


def test_a_cache_becomes_short_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long request that has finished does not keep the others from running together."""
    memory = Memory(monkeypatch)
    with Scheduler(model, batch_size=8, max_cache_tokens=128, eos_token_id=NO_END) as scheduler:
        scheduler.add([1] * 90, max_new_tokens=4)
        for index in range(8):
            scheduler.add([index] * 5, max_new_tokens=9)
        drain(scheduler)
    assert memory.sizes[0] == (1, 128)
    assert (8, 16) in memory.sizes


def test_requests_that_never_fit_are_refused_by_name(model: Any) -> None:
    scheduler = Scheduler(model, batch_size=2, max_cache_tokens=50, **OPTIONS)
    assert (scheduler.max_cache_tokens, scheduler.max_length) == (50, 50)
    scheduler.add([1] * 36)
    message = "prompt: invalid value; got 37 tokens and max_new_tokens=14; expected at most 50 in all. Use a larger"
    with pytest.raises(LigerzooError, match=re.escape(message)):
        scheduler.add([1] * 37)
    assert len(drain(scheduler)[0]) == 14


def test_the_default_limit_is_the_free_memory_of_a_gpu(model: Any, device: str) -> None:
    scheduler = Scheduler(model, batch_size=2, **OPTIONS)
    cache = model.new_cache(10)
    model(torch.tensor([[1, 2]], device=device), past_key_values=cache, use_cache=True)
    bytes_per_token = cache_size(model).per_token.total()
    assert bytes_per_token * 10 == cache.nbytes
    if device == "cpu":
        assert scheduler.max_cache_tokens is None
    else:
        free, total = torch.cuda.mem_get_info()
        assert scheduler.max_cache_tokens is not None
        assert free // 2 < scheduler.max_cache_tokens * bytes_per_token < total


def test_samples_depend_on_the_seed_of_the_request_only(model: Any, device: str) -> None:
    """Not on other requests, the size of the batch, the row, or the memory."""
    options = {"do_sample": True, "temperature": 1.4, "top_k": 30}

    def tokens(before: int, after: int, **sizes: int) -> list[int]:
        scheduler = Scheduler(model, **{"batch_size": 3, **sizes}, **OPTIONS, **options)
        for prompt in draw(before, seed=before):
            scheduler.add(prompt)
        index = scheduler.add([7, 8, 9], generator=torch.Generator(device).manual_seed(4))
        for prompt in draw(after, seed=after):
            scheduler.add(prompt)
        return drain(scheduler)[index]

    expected = tokens(0, 0)
    assert expected == alone(model, [7, 8, 9], generator=torch.Generator(device).manual_seed(4), **options)
    assert tokens(2, 3) == tokens(9, 1, batch_size=8) == tokens(5, 5, max_cache_tokens=60) == expected


class Interruption:
    """A hook that raises at a later forward."""

    def __init__(self, error: type[BaseException], forwards: int) -> None:
        self.error, self.forwards = error, forwards

    def __call__(self, *_: Any) -> None:
        self.forwards -= 1
        if self.forwards == 0:
            raise self.error


@pytest.mark.long
@pytest.mark.usefixtures("late", "captured")
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("forwards", [1, 3, 9])
def test_a_model_stays_usable_after_an_exception(model: Any, error: type[BaseException], forwards: int) -> None:
    prompts = draw(5)
    handle = model.model.layers[1].register_forward_hook(Interruption(error, forwards))
    with pytest.raises(error):
        list(model.generate_many(prompts, batch_size=2, **OPTIONS))
    handle.remove()
    check(model, prompts, list(model.generate_many(prompts, batch_size=2, **OPTIONS)))


class Failure:
    """A logits processor that fails in its second call."""

    def __init__(self, error: BaseException | None) -> None:
        self.error, self.calls = error, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls < 2:
            return scores
        if self.error is not None:
            raise self.error
        return scores[:, 1:]  # of another shape


@pytest.mark.long
@pytest.mark.usefixtures("late", "captured")
@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), LigerzooError("x"), torch.OutOfMemoryError()], ids=repr)
def test_an_exception_in_a_step_removes_all_requests(model: Any, error: BaseException | None) -> None:
    """None may go on with a KV cache that holds other tokens than the host."""
    prompts = draw(5)
    scheduler = Scheduler(model, batch_size=3, **OPTIONS)
    scheduler.add(prompts[0])
    scheduler.step()
    failure = Failure(error)
    scheduler.add(prompts[1], logits_processor=[failure])
    scheduler.add(prompts[2])
    scheduler.step()
    with pytest.raises(LigerzooError if error is None else type(error)):
        scheduler.step()
    assert scheduler.is_idle
    assert scheduler.step() == []
    for prompt in prompts:
        scheduler.add(prompt)
    assert drain(scheduler) == {3 + i: alone(model, prompt) for i, prompt in enumerate(prompts)}
    assert failure.calls == 2


def test_an_iterator_may_be_left(model: Any) -> None:
    prompts = draw(5)
    results = model.generate_many(prompts, batch_size=2, **OPTIONS)
    next(results)
    results.close()
    check(model, prompts, list(model.generate_many(prompts, batch_size=2, **OPTIONS)))


def test_training_goes_on_afterwards(model: Any) -> None:
    model.train()
    with torch.inference_mode():
        results = list(model.generate_many(draw(3), batch_size=2, **OPTIONS))
    assert len(results) == 3
    assert model.training
    ids = torch.tensor([[1, 2, 3]], device=model.device)
    model(ids, labels=ids).loss.backward()


@pytest.mark.usefixtures("late", "captured")
def test_broken_logits_remove_their_request_only(model: Any) -> None:
    """Token 5 has an embedding of NaN."""
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = math.nan
    free = [[prompt for prompt in draw(9) if 5 not in prompt][i] for i in (0, 1)]
    scheduler = Scheduler(model, batch_size=3, **OPTIONS)
    for prompt in (free[0], [1, 5], free[1], [5, 2], free[0]):  # the last one takes a row that held NaN
        scheduler.add(prompt)
    errors, tokens = [], dict[int, list[int]]()
    while not scheduler.is_idle:
        try:
            for update in scheduler.step():
                tokens.setdefault(update.index, []).extend(update.tokens)
        except LigerzooError as error:
            errors.append(str(error))
    assert [error.partition(": no token can be chosen; got NaN")[0] for error in errors] == [
        "logits of request 1", "logits of request 3",
    ]  # fmt: skip
    assert tokens == {0: alone(model, free[0]), 2: alone(model, free[1]), 4: alone(model, free[0])}

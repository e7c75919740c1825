"""Speculative decoding gives the tokens of plain decoding, with fewer forwards of the model."""

import copy
import math
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import Sampler, SamplingOptions, filter_logits, generate
from ligerzoo.generate import rows as rows_module
from ligerzoo.generate import slots as slots_module
from ligerzoo.generate.graphs import _GRAPHS
from ligerzoo.generate.speculative import PromptLookup, choose_with_drafts
from ligerzoo.models import Llama, LlamaConfig
from tests.covering import long_cases
from tests.generate.families import FAMILIES, pair
from tests.generate.graphs import replace_graphs
from tests.generate.models import PROMPT, TINY, VOCAB, Scripted, prompts, tiny_llama

NEW = 30
CPU = torch.device("cpu")


def noisy(model: Any, noise: float) -> Any:
    """Returns a copy of the model with other weights: the larger the noise, the fewer drafts are accepted."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator).to(weight.device)
    return other


@cache
def assistant(family: str, noise: float = 0.01) -> Any:
    return noisy(pair(family)[0], noise)


def drafts(kind: str, family: str) -> dict[str, Any]:
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}
    if kind == "itself":
        return {"assistant_model": pair(family)[0], "num_assistant_tokens": 3}
    return {"assistant_model": assistant(family)}


@pytest.fixture
def in_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of fixed size, as on a GPU, but with eager steps."""
    monkeypatch.setattr(rows_module, "can_capture", lambda model: True)
    monkeypatch.setattr(rows_module, "model_graphs", lambda model: None)
    monkeypatch.setattr(slots_module, "_MIN_CAPACITY", 16)


def text(period: int, seed: int, length: int = 17) -> Tensor:
    """Returns a prompt that repeats after some tokens, so that lookups find drafts."""
    return prompts("cpu", 1, period, seed).repeat(1, length)[:, :length]


class EndsWith:
    """A stopping criterion."""

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        return input_ids[:, -1] % 11 == 3


class Records:
    """A processor that depends on the number of its calls."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(input_ids[0].tolist())
        scores[:, len(self.calls) % 5] += 3
        return scores


class Numbers:
    """A tokenizer whose token i is the text "<i>"."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(f"<{i}>" for i in ids)


SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "eos": {"eos_token_id": [3, 8, 40, 60, 90]},
    "sampled until eos": {"eos_token_id": list(range(0, VOCAB, 9)), "min_new_tokens": 6, **SAMPLED},
    "stop strings": {"stop_strings": ["1><", "<5"], "tokenizer": Numbers()},
    "criteria": {"stopping_criteria": [EndsWith()], "do_sample": True},
    "processors": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "bad_words_ids": [[5], [7, 8], [1, 2, 3]]},
    "sampled with processors": {"repetition_penalty": 0.6, "no_repeat_ngram_size": 2, **SAMPLED},
    "functions": {"logits_processor": "records"},
    "sampled with functions": {"logits_processor": "records", "no_repeat_ngram_size": 3, **SAMPLED},
}


def run(model: Any, ids: Tensor, **options: Any) -> Any:
    if options.get("logits_processor") == "records":
        options["logits_processor"] = [Records()]
    return model.generate(
        ids, generator=torch.Generator(model.device).manual_seed(4), return_dict_in_generate=True,
        **{"max_new_tokens": NEW, "eos_token_id": []} | options,
    )  # fmt: skip


def assert_same(got: Any, expected: Any) -> None:
    assert got.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(got.logps, expected.logps, rtol=0, atol=2e-4)
    torch.testing.assert_close(got.sampling_logps, expected.sampling_logps, rtol=0, atol=2e-4)
    assert got.finish_reasons == expected.finish_reasons


CASES = {
    "family": [family for family in FAMILIES if family != "qwen3_5_text"],
    "kind": ["lookup", "itself", "assistant"], "options": list(OPTIONS), "sequences": ["growing", "slots"],
}  # fmt: skip


@pytest.mark.parametrize("case", long_cases(CASES), ids=str)
def test_the_result_is_that_without_drafts(case: dict[str, str], request: Any) -> None:
    model, options = pair(case["family"])[0], OPTIONS[case["options"]]
    for seed in range(2):
        ids = text(5 + 3 * seed, seed)
        expected = run(model, ids, **options)
        if case["sequences"] == "slots":
            request.getfixturevalue("in_slots")
        assert_same(run(model, ids, **options, **drafts(case["kind"], case["family"])), expected)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("options", ["greedy", "sampled", "sampled with processors"])
def test_captured_forwards_verify_drafts(
    family: str, options: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, a stand-in for graphs runs the steps, and overwrites what a graph may overwrite."""
    model, helper = (noisy(pair(family)[0], noise).to(device) for noise in (0.0, 0.01))
    ids = text(5, 0).to(device)
    if device == "cpu":
        replace_graphs(monkeypatch)
        for module in (rows_module, slots_module):
            monkeypatch.setattr(module, "can_capture", lambda model: True)
    limit = 25 if device == "cpu" else 100
    expected = run(model, ids, max_new_tokens=limit, **OPTIONS[options])
    for _ in range(2):  # the second call finds the graphs of the first
        got = run(model, ids, max_new_tokens=limit, assistant_model=helper, num_assistant_tokens=3, **OPTIONS[options])
        assert_same(got, expected)
    keys = [[key for batch in _GRAPHS[m]._idle.values() for key in batch._calls] for m in (model, helper)]
    counts = [{tokens for name, _, tokens in found if name == "_decode"} for found in keys]
    assert 4 in counts[0]
    assert counts[1] == {1, 2}
    assert_same(run(model, ids, max_new_tokens=limit, prompt_lookup_num_tokens=5, **OPTIONS[options]), expected)


def test_cases_end_early_and_late() -> None:
    """Otherwise the test above would not see what happens when a row ends within a draft."""
    model, _ = pair("llama")
    for name in ("eos", "sampled until eos", "stop strings", "criteria"):
        lengths = {run(model, text(5 + 3 * seed, seed), **OPTIONS[name]).sequences.shape[1] for seed in range(2)}
        assert min(lengths) < 17 + NEW, name


@pytest.mark.parametrize("new_tokens", range(9))
def test_each_limit_of_new_tokens(new_tokens: int) -> None:
    model, ids = pair("llama")[0], text(5, 0)
    expected = run(model, ids, max_new_tokens=NEW).sequences[:, : 17 + new_tokens]
    for kind in ("lookup", "itself", "assistant"):
        got = run(model, ids, max_new_tokens=new_tokens, **drafts(kind, "llama"))
        assert got.sequences.tolist() == expected.tolist()


class Forwards:
    """Counts the tokens of each forward of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens: list[int] = []
        model.register_forward_pre_hook(lambda _, args: self.tokens.append(args[0].shape[1]))


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_accepted_drafts_save_forwards(options: dict[str, Any]) -> None:
    """The drafts of a copy of the model are all accepted, if they are sampled too."""
    model, helper = (copy.deepcopy(pair("qwen3")[0]) for _ in range(2))
    forwards, draft_forwards = Forwards(model), Forwards(helper)
    run(model, text(5, 0), max_new_tokens=25, assistant_model=helper, **options)
    assert forwards.tokens == [17, 6, 6, 6, 6]
    assert draft_forwards.tokens == [17, 1, 1, 1, 1, 1, *[2, 1, 1, 1, 1] * 3]


def test_lookups_save_forwards_in_text_that_repeats() -> None:
    model = copy.deepcopy(pair("llama")[0])
    with torch.no_grad():  # the next token depends on the last one only, so that the text repeats in the end
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
    forwards = Forwards(model)
    expected = model.generate(text(5, 0), max_new_tokens=200, eos_token_id=[])
    forwards.tokens.clear()
    got = model.generate(text(5, 0), max_new_tokens=200, eos_token_id=[], prompt_lookup_num_tokens=9)
    assert torch.equal(got, expected)
    assert len(forwards.tokens) < 60


def test_rejected_drafts_leave_nothing_in_rolling_caches() -> None:
    """The window of 7 tokens is smaller than the draft, of which nothing is accepted."""
    model, helper = pair("mistral")[0], assistant("mistral", 1.0)
    expected = run(model, text(6, 2), max_new_tokens=60)
    forwards = Forwards(copied := copy.deepcopy(model))
    assert_same(run(copied, text(6, 2), max_new_tokens=60, assistant_model=helper, num_assistant_tokens=10), expected)
    assert len(forwards.tokens) > 40


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(1, 4), st.integers(1, 6), st.data())
@settings(deadline=None, max_examples=60)
def test_lookup_finds_the_drafts_of_transformers(tokens: list[int], largest: int, count: int, data: Any) -> None:
    lookup, sampler = PromptLookup(count, largest, CPU), Sampler(1, 4, CPU)
    first = data.draw(st.integers(1, len(tokens)))
    lookup.propose(tokens[:first], count, sampler)
    ours = lookup.propose(tokens, count, sampler).tolist()
    theirs = (
        PromptLookupCandidateGenerator(num_output_tokens=count, max_matching_ngram_size=largest, max_length=1000)
        .get_candidates(torch.tensor([tokens]))[0][0, len(tokens) :]
        .tolist()
    )
    assert ours[: len(theirs)] == theirs
    assert bool(ours) == bool(theirs)
    if theirs:  # the rest repeats what follows the match
        assert ours == (theirs * count)[:count]


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Returns the statistic and its degrees of freedom; rare values count as one."""
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = expected > 0
    assert counts[~kept].sum() == 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum()) - 1


@pytest.mark.thorough  # the tokens are those without drafts, see above
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_samples_follow_the_filtered_softmax_over_three_tokens(kind: str) -> None:
    draws = 1200
    tokens, filters = 3, {"temperature": 1.2, "top_k": 6, "top_p": 0.95}
    torch.manual_seed(0)
    sizes = TINY | {"vocab_size": 8, "num_hidden_layers": 1, "initializer_range": 0.25}
    model = Llama(LlamaConfig(**sizes))
    options: dict[str, Any] = {"assistant_model": noisy(model, 0.05), "num_assistant_tokens": 2}
    ids = torch.tensor([[1, 2, 3, 4, 1, 2, 5, 3]])
    if kind == "lookup":
        options = {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 1}
    forwards = Forwards(model)
    generator = torch.Generator().manual_seed(7)
    counts = torch.zeros(8**tokens, dtype=torch.float64)
    for _ in range(draws):
        new = model.generate(
            ids, max_new_tokens=tokens, do_sample=True, eos_token_id=[], generator=generator, **filters, **options
        )[0, -tokens:]
        counts[int(new @ torch.tensor([64, 8, 1]))] += 1
    saved = draws * tokens - len(forwards.tokens)
    assert 0.1 * draws < saved < 0.95 * draws  # drafts are accepted and rejected
    continuations = torch.tensor(list(product(range(8), repeat=tokens)))
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(len(continuations), -1), continuations], 1)).logits[:, -tokens - 1 : -1]
    logps = filter_logits(logits.double(), **filters).log_softmax(-1).gather(2, continuations[..., None])  # type: ignore[arg-type]
    statistic, freedom = chi_square(counts, draws * logps.sum((1, 2)).exp())
    assert freedom > draws / 48
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_drafts_with_the_random_numbers_of_the_model_are_accepted_as_often_as_promised() -> None:
    """At least (1 - d) / (1 + d) of them, with the total variation distance d (Daliri et al. 2024)."""
    rows, generator = 4000, torch.Generator().manual_seed(0)
    for noise in (0.3, 1.0, 3.0):
        p = 2 * torch.randn(1, 50, generator=generator)
        q = p + noise * torch.randn(1, 50, generator=generator)
        sampler = Sampler(rows, 50, CPU)
        sampler.assign(range(rows), torch.zeros(rows, 1).long(), SamplingOptions(do_sample=True), generator=generator)
        drafted = sampler.clone().choose(q.expand(rows, -1)).tokens
        accepted = (drafted == sampler.choose(p.expand(rows, -1)).tokens).double().mean()
        d = 0.5 * float((p.softmax(-1) - q.softmax(-1)).abs().sum())
        assert (1 - d) / (1 + d) - 0.03 < accepted < 1 - d + 0.03


def test_functions_are_called_as_without_drafts() -> None:
    model, calls = pair("llama")[0], []
    for options in ({}, drafts("lookup", "llama"), drafts("assistant", "llama")):
        function = Records()
        run(model, text(5, 0), logits_processor=[function], **options)
        calls.append(function.calls)
    assert calls[0] == calls[1] == calls[2]
    assert len(calls[0]) == NEW


class Collects:
    """A streamer."""

    def __init__(self) -> None:
        self.received: list[list[int]] = []
        self.has_ended = False

    def put(self, token_ids: Tensor) -> None:
        self.received.append(token_ids.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


def test_streamers_receive_one_token_at_a_time() -> None:
    model, streamers = pair("llama")[0], [Collects(), Collects()]
    for streamer, options in zip(streamers, ({}, drafts("itself", "llama")), strict=True):
        run(model, text(5, 0), streamer=streamer, eos_token_id=[3, 8, 40, 60, 90], **options)
    assert streamers[0].received == streamers[1].received
    assert streamers[1].has_ended


@pytest.mark.long
@pytest.mark.parametrize("sequences", ["growing", "slots"])
@pytest.mark.parametrize("kind", ["lookup", "itself", "assistant"])
@pytest.mark.parametrize("new_cache", ["growing", "static"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_conversations_with_a_cache(family: str, new_cache: str, kind: str, sequences: str, request: Any) -> None:
    """Rows end within drafts, and the cache then holds all tokens but the last."""
    model = pair(family)[0]
    cache = model.new_cache(160 if new_cache == "static" else None)
    history = text(7, 3)
    options: dict[str, Any] = {"eos_token_id": list(range(0, VOCAB, 8)), "do_sample": True}
    for call in range(4):
        limit = 30 if call < 3 else 160 + 1 - history.shape[1]  # the last call fills the static cache
        expected = run(model, history, max_new_tokens=limit, **options)
        with pytest.MonkeyPatch.context() as patch:
            if sequences == "slots":
                patch.setattr(rows_module, "can_capture", lambda model: True)
                patch.setattr(rows_module, "model_graphs", lambda model: None)
            got = run(
                model, history, max_new_tokens=limit, past_key_values=cache, **options, **drafts(kind, family)
            )  # fmt: skip
        assert_same(got, expected)
        assert got.past_key_values is cache
        assert cache.length == got.sequences.shape[1] - 1
        history = torch.cat([got.sequences, prompts("cpu", 1, 3, call)], 1)
        if call == 2:
            options["eos_token_id"] = []
    with torch.no_grad():
        keys = model.new_cache()
        keys.keep_all_tokens()
        model(got.sequences[:, :-1], past_key_values=keys)
    for ours, theirs in zip(cache.layers, keys.layers, strict=True):
        torch.testing.assert_close(ours.read()[0], theirs.read()[0], rtol=0, atol=1e-4)


def test_padding_and_embeddings_of_one_prompt() -> None:
    model, ids = pair("mistral")[0], text(5, 0)
    mask = torch.ones_like(ids)
    mask[0, [0, 1, 9]] = 0
    embeddings = model.get_input_embeddings()(ids).detach()
    for options in (drafts("lookup", "mistral"), drafts("assistant", "mistral")):
        expected = run(model, ids, attention_mask=mask, repetition_penalty=1.2)
        assert_same(run(model, ids, attention_mask=mask, repetition_penalty=1.2, **options), expected)
    expected = run(model, None, inputs_embeds=embeddings)  # type: ignore[arg-type]
    assert_same(run(model, None, inputs_embeds=embeddings, prompt_lookup_num_tokens=4), expected)  # type: ignore[arg-type]
    cached_mask = torch.ones_like(ids)
    cached_mask[0, :3] = 0
    expected = run(model, ids, attention_mask=cached_mask)
    for options in (drafts("lookup", "mistral"), drafts("assistant", "mistral")):
        got = run(model, ids, attention_mask=cached_mask, past_key_values=model.new_cache(), **options)
        assert_same(got, expected)


@pytest.mark.parametrize("sequences", ["growing", "slots"])
@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("kind", ["lookup", "itself"])
@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rotary_frequencies_that_depend_on_the_length(
    rope: str, kind: str, has_cache: bool, sequences: str, request: Any
) -> None:
    """Beyond the trained length there are no drafts."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 32}
    scaling = {"rope_type": rope, "factor": 4.0, **(factors if rope == "longrope" else {})}
    torch.manual_seed(0)
    sizes = TINY | {"max_position_embeddings": 128 if rope == "longrope" else 32, "initializer_range": 0.15}
    model = Llama(LlamaConfig(**sizes, rope_scaling=scaling))
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if kind == "itself":
        options = {"assistant_model": copy.deepcopy(model)}
    expected = run(model, text(5, 0), past_key_values=model.new_cache() if has_cache else None)
    if sequences == "slots":
        request.getfixturevalue("in_slots")
    forwards = Forwards(model)
    got = run(model, text(5, 0), past_key_values=model.new_cache() if has_cache else None, **options)
    assert_same(got, expected)
    assert kind == "lookup" or max(forwards.tokens[1:]) > 1


def test_processors_see_the_tokens_of_each_position() -> None:
    """The rows of a branch choose what one row chooses after the same tokens, for each number of accepted drafts."""
    options = SamplingOptions(
        do_sample=True, repetition_penalty=1.5, no_repeat_ngram_size=2, bad_words_ids=[[1, 2]], min_new_tokens=5
    )
    generator = torch.Generator().manual_seed(0)
    for accepted in range(5):
        plain, branched = Sampler(1, 9, CPU), Sampler(1, 9, CPU)
        for sampler in (plain, branched):
            sampler.assign(
                [0], torch.tensor([[1, 2, 3, 1]]), options, eos_token_ids=[4], seeds=torch.tensor([accepted])
            )  # fmt: skip
        for _ in range(3):  # verifications
            logits = 2 * torch.randn(5, 9, generator=generator)
            after = plain.clone()
            tokens = torch.cat([after.choose(row[None]).tokens for row in logits])
            drafts = tokens[:4].clone()
            drafts[accepted:] = (drafts[accepted:] + 1) % 9
            chosen, new = choose_with_drafts(branched, logits, drafts)
            assert new == tokens[: accepted + 1].tolist() == chosen.tokens.tolist()
            for row in logits[: accepted + 1]:
                expected = plain.choose(row[None])
            assert chosen.logps[-1] == expected.logps[0]
            assert chosen.sampling_logps[-1] == expected.sampling_logps[0]


def test_broken_logits_are_not_forgotten() -> None:
    logits = torch.zeros(3, 5)
    logits[0, 2] = torch.nan
    sampler = Sampler(1, 5, CPU)
    sampler.assign([0], torch.tensor([[1]]), SamplingOptions())
    wrong = int(sampler.clone().choose(logits[:1]).tokens)
    assert len(choose_with_drafts(sampler, logits, torch.tensor([wrong, 0]))[1]) == 3
    assert bool(sampler.is_broken)
    logits = torch.zeros(3, 5)
    logits[2] = torch.nan  # after a rejected draft
    sampler.assign([0], torch.tensor([[1]]), SamplingOptions())
    assert choose_with_drafts(sampler, logits, torch.tensor([0, 1]))[1] == [0, 0]
    assert not bool(sampler.is_broken)


def test_errors_leave_an_empty_cache_and_a_usable_model() -> None:
    model, ids = pair("llama")[0], text(5, 0)
    cache = model.new_cache()

    def fail(input_ids: Tensor, scores: Any) -> bool:
        if input_ids.shape[1] == 25:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        run(model, ids, stopping_criteria=[fail], past_key_values=cache, **drafts("assistant", "llama"))
    assert cache.length == 0
    assert_same(run(model, ids, past_key_values=cache, **drafts("assistant", "llama")), run(model, ids))


SMALL = LlamaConfig(**TINY | {"vocab_size": 90})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompt_lookup_num_tokens": 0}, "^prompt_lookup_num_tokens: .*got 0; expected a positive integer"),
        ({"max_matching_ngram_size": 2}, "^max_matching_ngram_size: .*without prompt_lookup_num_tokens"),
        ({"num_assistant_tokens": 2}, "^num_assistant_tokens: .*without assistant_model"),
        ({"assistant_model": "org/name"}, "^assistant_model: .*got str; expected a ligerzoo.models.CausalLM"),
        ({"assistant_model": "model", "prompt_lookup_num_tokens": 3}, "^assistant_model: .*expected one of"),
        ({"assistant_model": "small"}, "^assistant_model: .*a vocabulary of 90 tokens; expected 97 tokens"),
        ({"assistant_model": "meta"}, "^assistant_model: .*a model on meta; expected one on cpu"),
        ({"prompt_lookup_num_tokens": 3, "rows": 2}, "^input_ids: .*2 prompts with prompt_lookup_num_tokens"),
        ({"assistant_model": "model", "rows": 2}, "^input_ids: .*2 prompts with assistant_model"),
        (
            {"prompt_lookup_num_tokens": 3, "num_return_sequences": 2, "do_sample": True},
            "^num_return_seq.*: .*got 2",
        ),
        ({"prompt_lookup_num_tokens": 3, "use_cache": False}, "^use_cache: .*expected True"),
        ({"assistant_model": "model", "embeddings": True}, "^inputs_embeds: .*expected token ids only"),
    ],
    ids=str,
)
def test_what_cannot_be_verified_is_refused(options: dict[str, Any], message: str) -> None:
    model = tiny_llama("cpu")
    models = {"model": model, "small": Llama(SMALL), "meta": tiny_llama("meta")}
    if "assistant_model" in options:
        options = options | {"assistant_model": models.get(options["assistant_model"], "org/name")}
    ids: Tensor | None = PROMPT[: options.pop("rows", 1)]
    if options.pop("embeddings", False):
        options["inputs_embeds"], ids = model.get_input_embeddings()(ids).detach(), None
    with pytest.raises(LigerzooError, match=message):
        model.generate(ids, max_new_tokens=3, **options)


def test_caches_that_cannot_drop_tokens_are_refused() -> None:
    model, ids = pair("mistral")[0], text(5, 0)
    cache = model.new_cache()
    out = model.generate(ids, past_key_values=cache, max_new_tokens=4, eos_token_id=[])
    with pytest.raises(LigerzooError, match=r"^past_key_values: .*Call cache\.keep_all_tokens\(\)"):
        model.generate(out, past_key_values=cache, max_new_tokens=4, prompt_lookup_num_tokens=3)
    assert cache.length == 20


def test_a_model_without_new_cache_is_refused() -> None:
    with pytest.raises(LigerzooError, match=r"^model: .*a Scripted without new_cache; expected a ligerzoo\.models"):
        generate(Scripted([[1, 2, 3]]), PROMPT[:1], max_new_tokens=3, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("kind", ["lookup", "itself", "assistant"])
def test_recurrent_layers_cannot_reject_drafts(kind: str) -> None:
    model = pair("llama" if kind == "assistant" else "qwen3_5_text")[0]
    options = {"assistant_model": pair("qwen3_5_text")[0]} if kind == "assistant" else drafts(kind, "qwen3_5_text")
    name = "assistant_model" if kind == "assistant" else "model"
    with pytest.raises(LigerzooError, match=rf"^{name}: .*Qwen3_5Text, whose recurrent layers cannot remove rejected"):
        model.generate(text(5, 0), max_new_tokens=3, **options)

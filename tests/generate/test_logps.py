"""Log-probabilities of prompts, and of the most likely tokens."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import BrokenLogitsError, Completion, Scheduler
from ligerzoo.generate.api import _completion
from ligerzoo.generate.packed_logps import packed_logps, score, unpack, with_top_logps
from tests.generate.models import VOCAB
from tests.generate.test_scheduler import (
    OPTIONS,
    captured,  # noqa: F401, a fixture, as are the next two
    drain,
    draw,
    in_chunks_of,
    in_pairs,
    late,  # noqa: F401
    small,  # noqa: F401
)
from tests.generate.test_slots import build


@pytest.fixture
def model(device: str) -> Any:
    return build("llama", device)


def all_logps(model: Any, ids: list[int]) -> Tensor:
    """Returns the (T, V) log-probabilities after each token."""
    with torch.no_grad():
        return model(torch.tensor([ids], device=model.device)).logits[0].float().log_softmax(-1).cpu()


def check(model: Any, prompt: list[int], found: Completion, top: int, *, has_prompt: bool) -> None:
    """Compares the log-probabilities of a completion with those of one forward."""
    expected = all_logps(model, prompt + found.tokens)
    first = 1 if has_prompt else len(prompt)
    ids = (prompt + found.tokens)[first:]
    rows = expected[first - 1 : len(expected) - 1]
    logps = torch.tensor(found.prompt_logps + found.logps)
    torch.testing.assert_close(logps, rows[range(len(ids)), ids], rtol=0, atol=1e-4)
    assert (len(found.prompt_logps), len(found.logps)) == (len(prompt) - 1 if has_prompt else 0, len(found.tokens))
    top_logps = found.prompt_top_logps + found.top_logps
    assert len(top_logps) == (len(ids) if top else 0)
    if top and ids:
        likely = torch.tensor([[*one] for one in top_logps])
        values = torch.tensor([[*one.values()] for one in top_logps])
        torch.testing.assert_close(values, rows.topk(top).values, rtol=0, atol=1e-4)
        torch.testing.assert_close(values, rows.gather(1, likely), rtol=0, atol=1e-4)
        is_given = likely == torch.tensor(ids)[:, None]
        assert torch.equal(values[is_given], logps[is_given.any(1)])  # the same bits


@in_pairs({
    "name": ["llama", "gemma2", "qwen3_next"],
    "batch_size": [1, 3],
    "chunk": [1000, 7],
    "max_new_tokens": [0, 1, 4],
    "top": [0, 1, 20],
})  # fmt: skip
def test_prompts_are_scored(case: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks_of(case["chunk"], monkeypatch)
    model, prompts = build(case["name"], device), [[5], *draw(3)]
    options = {**OPTIONS, "max_new_tokens": case["max_new_tokens"], "top_logps": case["top"], "prompt_logps": True}
    results = sorted(model.generate_many(prompts, batch_size=case["batch_size"], **options), key=lambda r: r.index)
    for prompt, found in zip(prompts, results, strict=True):
        assert (len(found.tokens), found.finish_reason) == (case["max_new_tokens"], "length")
        check(model, prompt, found, case["top"], has_prompt=True)


@pytest.mark.usefixtures("late")
def test_requests_ask_for_different_log_probabilities(model: Any) -> None:
    """Some ask, others do not; sampled tokens need not be likely; few rows and little memory change nothing."""
    prompts = draw(8)
    variants: list[dict[str, Any]] = [
        {}, {"top_logps": 3}, {"prompt_logps": True}, {"prompt_logps": True, "top_logps": 2, "max_new_tokens": 0},
        {"top_logps": 20, "do_sample": True, "temperature": 3.0}, {"prompt_logps": True, "top_logps": 1}, {}, STOPS,
    ]  # fmt: skip
    requests = list(zip(prompts, variants, strict=True))
    together = Scheduler(model, batch_size=3, max_cache_tokens=130, **{**OPTIONS, "max_new_tokens": 6})
    for index, (prompt, variant) in enumerate(requests):
        generator = torch.Generator(model.device).manual_seed(index)
        together.add(prompt, generator=generator, **variant)
    updates = []
    while not together.is_idle:
        updates += together.step()
    for index, (prompt, variant) in enumerate(requests):
        of_request = [update for update in updates if update.index == index]
        is_prompt = [update.is_prompt for update in of_request]
        assert is_prompt == sorted(is_prompt, reverse=True)
        has_prompt, found = "prompt_logps" in variant, _completion(of_request)
        scored = [token for update in of_request if update.is_prompt for token in update.tokens]
        assert scored == (prompt[1:] if has_prompt else [])
        check(model, prompt, found, variant.get("top_logps", 0), has_prompt=has_prompt)
        options = {**OPTIONS, **variant}
        if options["max_new_tokens"] and "do_sample" not in variant:
            alone = model.generate(torch.tensor([prompt], device=model.device), max_new_tokens=6, eos_token_id=[])
            assert found.tokens == alone[0, len(prompt) :].tolist()[: len(found.tokens)]


STOPS = {"prompt_logps": True, "top_logps": 4, "eos_token_id": list(range(0, VOCAB, 3))}


def test_only_requests_that_ask_cost_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("scheduler", "chunked_prefill"):
        monkeypatch.setattr(f"ligerzoo.generate.{module}.with_top_logps", None)
    with Scheduler(model, batch_size=2, **OPTIONS) as scheduler:
        scheduler.add([1, 2])
        drain(scheduler)


@pytest.mark.usefixtures("late")
def test_given_tokens_replace_the_most_likely_ones(model: Any) -> None:
    """Each request has those that it names, or the most likely ones, or none, whatever the others have."""
    asked: list[dict[str, Any]] = [
        {"top_logps": 3}, {"logp_token_ids": [5, 0, 5, VOCAB - 1]}, {}, {"logp_token_ids": range(30), "top_logps": 2}
    ]  # fmt: skip
    asked = [{**options, "logp_token_ids": list(options.get("logp_token_ids", [])) or None} for options in asked]
    prompt = [3, 1, 4, 1, 5]
    with Scheduler(model, batch_size=2, prompt_logps=True, **OPTIONS) as scheduler:
        for options in asked:
            scheduler.add(prompt, **options)
        updates: list[Any] = []
        while not scheduler.is_idle:
            updates += scheduler.step()
    for index, options in enumerate(asked):
        found = _completion([update for update in updates if update.index == index])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + found.tokens], device=model.device)).logits[0, :-1].float()
        likely = [*found.prompt_top_logps, *found.top_logps]
        if not options["logp_token_ids"]:
            assert [len(one) for one in likely] == [options.get("top_logps", 0)] * len(likely)
            assert len(likely) == len(logits) * ("top_logps" in options)
            continue
        ids = list(dict.fromkeys(options["logp_token_ids"]))
        for one, row in zip(likely, logits.log_softmax(-1)[:, ids].tolist(), strict=True):
            assert list(one) == ids
            assert list(one.values()) == pytest.approx(row, abs=1e-3)


@pytest.mark.usefixtures("late")
def test_a_scored_prompt_may_be_cancelled(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks_of(5, monkeypatch)
    with Scheduler(model, batch_size=2, prompt_logps=True, **OPTIONS) as scheduler:
        for steps in range(0, 6, 2):
            index = scheduler.add([1] * 17)
            for _ in range(steps):
                scheduler.step()
            scheduler.cancel(index)
            assert scheduler.is_idle
            assert scheduler.free_rows == 2


@pytest.mark.usefixtures("late")
def test_a_prompt_with_broken_logits_ends_alone(model: Any) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = math.nan
    if model.config.tie_word_embeddings:
        pytest.skip("all logits would be broken")
    with Scheduler(model, batch_size=2, **OPTIONS) as scheduler:
        scheduler.add([1, 7, 2], prompt_logps=True, max_new_tokens=0)
        scheduler.add([1, 2], max_new_tokens=2)
        with pytest.raises(BrokenLogitsError, match="logits of request 0"):
            drain(scheduler)
        assert len(drain(scheduler)[1]) > 0


def test_equal_logits_have_the_same_bits() -> None:
    logits = torch.randn(50, 40).bfloat16().repeat(1, 2)
    packed = with_top_logps(score(logits, torch.arange(50)), logits)
    for i in range(50):
        (logp,), (likely,) = unpack(packed.tolist(), [i], 20)[1:]
        same = [value for token, value in likely.items() if logits[i, token] == logits[i, i]]
        assert same == [logp] * len(same)
        assert [*likely.values()] == sorted(likely.values(), reverse=True)


def test_a_small_vocabulary_has_fewer_tokens() -> None:
    logits = torch.randn(3, 4)
    tokens = torch.tensor([0, 3, 1])
    packed = with_top_logps(packed_logps(tokens, logits.log_softmax(-1)[range(3), tokens]), logits)
    assert [len(likely) for likely in unpack(packed.tolist(), range(3), 20)[2]] == [4, 4, 4]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_logps": 21}, "top_logps: invalid value; got 21; expected an integer from 0 to 20"),
        ({"top_logps": True}, "top_logps: invalid value; got True"),
        ({"prompt_logps": 1}, "prompt_logps"),
        ({"logp_token_ids": []}, "logp_token_ids: invalid value; got []; expected a list of 1 to 128 token ids"),
        ({"logp_token_ids": [10**6]}, "logp_token_ids: invalid value; got 1000000; expected token ids below"),
        ({"max_new_tokens": 0}, "max_new_tokens: invalid value; got 0; expected an integer, 1 or more"),
        ({"max_new_tokens": -1, "prompt_logps": True}, "max_new_tokens: invalid value; got -1; expected an integer, 0"),
    ],
)
def test_options_are_checked(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LigerzooError) as caught:
        Scheduler(model, batch_size=2, **{**OPTIONS, **options})
    assert message in str(caught.value)

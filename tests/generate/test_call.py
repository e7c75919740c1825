"""Options of a call give what transformers gives, and what they promise."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import GenerateOutput, filter_logits, generate
from tests.generate.families import FAMILIES, pair
from tests.generate.models import LEFT, PROMPT, RIGHT, Letters, Recorder, Scripted, mask_of, prompts

ROWS = len(LEFT)
IDS = prompts("cpu", ROWS, 17)
MASK = mask_of(LEFT, "cpu")


def theirs(family: str, *inputs: Tensor | None, **options: Any) -> Any:
    _, model = pair(family)
    ids, mask = inputs
    return model.generate(ids, attention_mask=mask, **{"do_sample": False} | options)


class EndsAfter(transformers.StoppingCriteria):
    """Finishes a row with its first token below a limit, after some new tokens."""

    def __init__(self, limit: int, new: int = 3) -> None:
        self.limit, self.new, self.lengths = limit, new, []  # type: ignore[var-annotated]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        is_late = len(self.lengths) >= self.new
        return (input_ids[:, -1] < self.limit) & is_late


CASES: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 37},
    "eos": {"max_new_tokens": 20, "eos_token_id": [3, 8, 40, 60, 90]},
    "penalty": {"max_length": 40, "repetition_penalty": 1.4},
    "criteria": {"max_new_tokens": 20, "eos_token_id": [95], "criteria": 20},
}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_ragged_prompts_equal_transformers(family: str, case: str) -> None:
    options = dict(CASES[case])
    limit = options.pop("criteria", None)

    def criteria() -> dict[str, Any]:
        return {} if limit is None else {"stopping_criteria": [EndsAfter(limit)]}

    # transformers before 5.23 penalizes the tokens at padding positions, so they repeat the last token of the prompt.
    ids = IDS.where(MASK.bool(), IDS[:, -1:])
    expected = theirs(family, ids, MASK, **options, **criteria())
    model, _ = pair(family)
    ours = model.generate(IDS, MASK, **options, **criteria())
    assert torch.equal(ours[:, :17], IDS)
    assert ours[:, 17:].tolist() == expected[:, 17:].tolist()
    right = IDS.flip(1)
    right_mask = mask_of(RIGHT, "cpu")
    for row in range(ROWS):  # the same tokens, padded on the right
        right[row, right_mask[row].bool()] = IDS[row, MASK[row].bool()]
    padded_right = model.generate(right, right_mask, **options, **criteria())
    assert torch.equal(padded_right[:, :17], right)
    assert padded_right[:, 17:].tolist() == expected[:, 17:].tolist()
    if case in ("eos", "criteria"):
        assert (expected[:, 17:] == 0).any()  # some row ended before another


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("options", [{"max_new_tokens": 15}, {"max_length": 29, "repetition_penalty": 1.5}])
def test_embeddings_equal_transformers(family: str, has_ids: bool, options: dict[str, Any]) -> None:
    if has_ids and "repetition_penalty" in options and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("the penalty of older versions of transformers ignores new tokens here, too")
    model, model_of_transformers = pair(family)
    ids = IDS if has_ids else None
    their_embeddings = model_of_transformers.get_input_embeddings()(IDS).detach()
    our_embeddings = model.get_input_embeddings()(IDS).detach()
    # transformers' penalty would skip as many new tokens as a row has padding.
    mask = MASK if has_ids or "repetition_penalty" not in options else None
    expected = theirs(family, ids, mask, inputs_embeds=their_embeddings, **options)
    ours = model.generate(ids, mask, inputs_embeds=our_embeddings, **options)
    assert ours.tolist() == expected.tolist()
    recomputed = model.generate(ids, mask, inputs_embeds=our_embeddings, use_cache=False, **options)
    assert recomputed.tolist() == ours.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_equal_transformers_and_share_the_prefill(family: str) -> None:
    """With `top_k=1`, sampling is greedy, so that both libraries choose the same tokens."""
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "top_k": 1, "num_return_sequences": 3}
    expected = theirs(family, IDS, MASK, **options)
    model = Recorder(pair(family)[0])
    assert generate(model, IDS, MASK, **options).tolist() == expected.tolist()
    assert [len(tokens) for tokens in model.read] == [ROWS, *[3 * ROWS] * 11]
    recomputed = generate(model, IDS, MASK, use_cache=False, **options)
    assert recomputed.tolist() == expected.tolist()


def test_copies_are_sampled_independently() -> None:
    model, _ = pair("llama")
    ids = model.generate(IDS, max_new_tokens=12, do_sample=True, temperature=2.0, num_return_sequences=4)
    assert len({tuple(row) for row in ids.tolist()}) == 4 * ROWS
    assert torch.equal(ids[:, :17], IDS.repeat_interleave(4, 0))


@pytest.mark.long
@pytest.mark.parametrize("new_cache", [None, "growing", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_one_forward(family: str, new_cache: str | None) -> None:
    model, _ = pair(family)
    sampling: dict[str, Any] = {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.01}

    def sample(**options: Any) -> GenerateOutput:
        out = model.generate(
            IDS, MASK, max_new_tokens=20, do_sample=True, num_return_sequences=2, return_dict_in_generate=True,
            generator=torch.Generator().manual_seed(0), **sampling, **options,
        )  # fmt: skip
        assert isinstance(out, GenerateOutput)
        return out

    ends = sample(eos_token_id=[]).sequences[0, [21, 30]]  # the first row ends with one of these
    cache = None if new_cache is None else model.new_cache(40 if new_cache == "static" else None)
    out = sample(eos_token_id=ends.tolist(), past_key_values=cache)
    new = out.sequences[:, 17:]
    assert out.logps.dtype == out.sampling_logps.dtype == torch.float32
    assert out.logps.shape == out.sampling_logps.shape == new.shape
    assert out.past_key_values is cache
    mask = torch.cat([MASK.repeat_interleave(2, 0), torch.ones_like(new)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(out.sequences, mask, positions).logits[:, 16:-1].float()
    for got, distribution in ((out.logps, logits), (out.sampling_logps, filter_logits(logits, **sampling))):
        expected = distribution.log_softmax(-1).gather(2, new[..., None])[..., 0]
        for row, reason in enumerate(out.finish_reasons):
            is_end = torch.isin(new[row], ends)
            length = int(is_end.int().argmax()) + 1 if is_end.any() else new.shape[1]
            assert reason == ("stop" if is_end.any() else "length")
            torch.testing.assert_close(got[row, :length], expected[row, :length], rtol=1e-4, atol=1e-4)
            assert not got[row, length:].any()
    assert out.finish_reasons[0] == "stop"


@pytest.mark.parametrize("capacity", [None, 40])
def test_a_cache_that_was_filled_within_inference_mode(capacity: int | None) -> None:
    model, _ = pair("llama")
    expected = model.generate(IDS, max_new_tokens=5)
    for within in (False, True):
        cache = model.new_cache(capacity)
        with torch.inference_mode():
            model(IDS[:, :4], past_key_values=cache)
        with torch.inference_mode(within):
            for _call in range(2):
                assert torch.equal(model.generate(IDS, max_new_tokens=5, past_key_values=cache), expected)
                cache.crop(7)


def test_greedy_tokens_have_a_sampling_probability_of_one() -> None:
    model, _ = pair("llama")
    out = model.generate(IDS, max_new_tokens=9, repetition_penalty=1.5, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(IDS, max_new_tokens=9, repetition_penalty=1.5))
    assert not out.sampling_logps.any()
    logits = model(out.sequences).logits[:, 16:-1]
    expected = logits.log_softmax(-1).gather(2, out.sequences[:, 17:, None])[..., 0]
    torch.testing.assert_close(out.logps, expected, rtol=1e-4, atol=1e-4)
    assert out.keys() == ["sequences", "logps", "sampling_logps", "finish_reasons"]
    assert out["sequences"] is out.sequences
    assert out.finish_reasons == ["length"] * ROWS


def test_reasons_of_finishing() -> None:
    script = [[7, 50, 9, 9], [0, 3, 6, 5], [6, 9, 2, 9], [6, 6, 6, 6]]
    ids, options = torch.ones(4, 2, dtype=torch.long), {"pad_token_id": 0, "return_dict_in_generate": True}
    out: Any = generate(
        Scripted(script), ids, max_new_tokens=3, eos_token_id=50, stop_strings="xSTOxSTO", tokenizer=AnyLetters(),
        stopping_criteria=[lambda ids, scores: ids[:, -1] == 2], **options,
    )  # fmt: skip
    assert out.finish_reasons == ["stop", "length", "stop", "stop"]
    assert out.sequences[:, 2:].tolist() == [[7, 50, 0], [0, 3, 6], [6, 9, 2], [6, 6, 0]]
    assert out.logps.bool().tolist() == [[True, True, False], [True] * 3, [True] * 3, [True, True, False]]
    out = generate(Scripted(script), ids, max_new_tokens=0, **options)
    assert (out.logps.shape, out.sampling_logps.shape, out.finish_reasons) == ((4, 0), (4, 0), ["length"] * 4)


class AnyLetters(Letters):
    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(self.PIECES[i % len(self.PIECES)] for i in ids)


# Stopping criteria


def test_criteria_see_prompts_and_padded_continuations() -> None:
    seen: list[Any] = []

    def record(input_ids: Tensor, scores: None) -> bool:
        seen.append((input_ids.tolist(), scores))
        return len(seen) == 3

    out = generate(
        Scripted([[50, 7, 7, 7], [8, 9, 6, 6]]), PROMPT, max_new_tokens=4, eos_token_id=50, pad_token_id=0,
        stopping_criteria=[record],
    )  # fmt: skip
    assert out.tolist() == [[1, 2, 50, 0, 0], [3, 4, 8, 9, 6]]
    assert seen == [([row[:end] for row in out.tolist()], None) for end in (3, 4, 5)]


def test_transformers_criteria_end_generation() -> None:
    model, _ = pair("llama")
    criteria = transformers.StoppingCriteriaList([transformers.MaxTimeCriteria(0.0)])
    assert model.generate(IDS, max_new_tokens=20, stopping_criteria=criteria).shape == (ROWS, 18)
    criteria = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(22)])
    assert model.generate(IDS, max_new_tokens=20, stopping_criteria=criteria).shape == (ROWS, 22)


@pytest.mark.parametrize(
    "criteria, message",
    [
        (lambda ids, scores: True, "stopping_criteria: .* Put it in a list"),
        (["end"], r"stopping_criteria: .*got \['end'\]; expected a list of callables"),
        ("end", "stopping_criteria: .*got 'end'"),
        ([lambda ids, scores: None], r"stopping_criteria\[0\]: .*got None; expected it to return a bool, or a bool"),
        ([lambda ids, scores: ids[:, 0]], r"stopping_criteria\[0\]: .*got torch.int64 \(2,\)"),
        ([lambda ids, scores: ids > 0], r"stopping_criteria\[0\]: .*got torch.bool \(2, 3\); .* of shape \(2,\)"),
    ],
)
def test_invalid_criteria_are_refused(criteria: Any, message: str) -> None:
    with pytest.raises(LigerzooError, match=message):
        generate(Scripted([[7] * 3] * 2), PROMPT, max_new_tokens=3, pad_token_id=0, stopping_criteria=criteria)


# Lengths and copies


def test_max_new_tokens_takes_precedence_over_max_length() -> None:
    message = "^generate: max_new_tokens=2 takes precedence over max_length=9. Pass only"
    with pytest.warns(UserWarning, match=message) as warnings:
        assert generate(Scripted([[7, 8, 9]] * 2), PROMPT, max_new_tokens=2, max_length=9).shape == (2, 4)
    assert [warning.filename for warning in warnings] == [__file__]


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "max_new_tokens: .*got None; expected an integer, 0 or more. Pass max_new_tokens=20"),
        ({"max_length": 2}, "max_length: .*got 2; expected more than 2, the length of the prompts"),
        ({"max_length": 2.5}, "max_length: .*got 2.5; expected an integer"),
        (
            {"max_new_tokens": 1, "num_return_sequences": 0},
            "num_return_sequences: .*got 0; expected a positive integer",
        ),
        (
            {"max_new_tokens": 1, "num_return_sequences": 2},
            "num_return_sequences: .*got 2 without sampling, .*; expected 1. Pass do_sample=True",
        ),
        ({"max_new_tokens": 1, "return_dict_in_generate": 1}, "return_dict_in_generate: .*got 1; expected True or Fa"),
    ],
)
def test_invalid_lengths_and_copies_are_refused(options: dict[str, Any], message: str) -> None:
    model = Scripted([[1], [1]])
    with pytest.raises(LigerzooError, match=f"^{message}"):
        generate(model, PROMPT, **options)
    assert model.calls == 0


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"input_ids": None}, "input_ids: .*got None; .* Pass input_ids or inputs_embeds"),
        ({"inputs_embeds": [1.0]}, r"inputs_embeds: .*got list; expected a \(B, T, H\) tensor of embeddings"),
        ({"inputs_embeds": PROMPT}, "inputs_embeds: .*got torch.int64"),
        ({"inputs_embeds": torch.ones(2, 4)}, r"inputs_embeds: .*got \(2, 4\); expected \(B, T, H\)"),
        (
            {"inputs_embeds": torch.ones(2, 4, 48), "input_ids": PROMPT},
            r"input_ids: .*got \(2, 2\); expected \(2, 4\), like inputs_embeds",
        ),
        (
            {"inputs_embeds": torch.ones(2, 4, 48), "attention_mask": PROMPT},
            r"attention_mask: .*got \(2, 2\); expected \(2, 4\), the shape of inputs_embeds",
        ),
    ],
)
def test_invalid_embeddings_are_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(LigerzooError, match=f"^{message}"):
        pair("llama")[0].generate(**inputs, max_new_tokens=2)


def test_a_model_without_the_methods_that_options_need_is_refused() -> None:
    model = Scripted([[1], [1]])
    with pytest.raises(LigerzooError, match=r"^inputs_embeds: .*got a Scripted without get_input_embeddings"):
        generate(model, inputs_embeds=torch.ones(2, 3, 8), max_new_tokens=1)
    with pytest.raises(LigerzooError, match=r"^num_return_sequences: .*got a Scripted without repeat_rows"):
        generate(model, PROMPT, max_new_tokens=1, do_sample=True, num_return_sequences=2, volume=torch.ones(2))

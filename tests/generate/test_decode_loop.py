"""Generation agrees with transformers, is reproducible, and refuses broken logits."""

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import generate
from tests.generate.models import LEFT, NO_END, PROMPT, VARIANTS, VOCAB, Scripted, mask_of, oracle, prompts, tiny_llama


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_transformers(variant: str, device: str) -> None:
    model = tiny_llama(device, variant)
    ids = prompts(device, 1, 12)
    ours = model.generate(ids, max_new_tokens=30)
    theirs = oracle(model, variant).generate(ids, max_new_tokens=30, do_sample=False)
    assert ours.shape == (1, 42)
    assert ours.tolist() == theirs.tolist()
    assert len(set(ours[0, 12:].tolist())) > 8  # many different tokens, not one repeated


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_left_padded_batch_with_several_eos_tokens_equals_transformers(variant: str, device: str) -> None:
    model, mask = tiny_llama(device, variant), mask_of(LEFT, device)
    ids = prompts(device, 3, 17)
    free = model.generate(ids, mask, max_new_tokens=30, eos_token_id=NO_END)[:, 17:]
    eos = [int(free[0, 7]), int(free[2, 15])]
    options = {"max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": 5}
    ours = model.generate(ids, mask, **options)
    theirs = oracle(model, variant).generate(ids, attention_mask=mask, do_sample=False, **options)
    assert ours.tolist() == theirs.tolist()
    ends = [next((n for n, token in enumerate(row) if token in eos), 30) for row in free.tolist()]
    assert len(set(ends)) > 1
    for row, end in enumerate(ends):
        assert ours[row, 17:].tolist() == free[row, : end + 1].tolist() + [5] * (ours.shape[1] - 17 - end - 1)


def test_a_sampled_row_does_not_depend_on_the_others(device: str) -> None:
    model, ids, mask = tiny_llama(device, std=0.1), prompts(device, 3, 17), mask_of(LEFT, device)
    options = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "max_new_tokens": 30}
    seeds = torch.tensor([11, 12, 13], device=device)

    def sampled(rows: list[int], *inputs: torch.Tensor) -> list[list[int]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ligerzoo.generate.sampling.draw_seeds", lambda *_: seeds[rows])
            return [row[-30:] for row in model.generate(*inputs, **options).tolist()]

    together = sampled([0, 1, 2], ids, mask)
    assert sampled([2, 1, 0], ids.flip(0), mask.flip(0)) == together[::-1]
    for row in range(3):
        assert sampled([row], ids[row : row + 1, mask[row] == 1]) == [together[row]]


PROCESSORS: dict[str, dict[str, Any]] = {
    "min_new_tokens": {"min_new_tokens": 20},
    "bad_words_ids": {"bad_words_ids": [[27, 27], [96, 1, 2, 3]]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "all": {
        "min_new_tokens": 25, "bad_words_ids": [[25, 35]], "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.4,
        "logits_processor": [transformers.TopKLogitsWarper(9)],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_equal_transformers(name: str, device: str) -> None:
    model, ids = tiny_llama(device), prompts(device, 3, 12)
    free = model.generate(ids, max_new_tokens=40, eos_token_id=NO_END)[:, 12:]
    options = {"max_new_tokens": 40, "eos_token_id": free[:, 6].tolist(), "pad_token_id": 0} | PROCESSORS[name]
    if "bad_words_ids" in options:  # and sequences that the model would choose
        options["bad_words_ids"] = [*options["bad_words_ids"], *free[:2, 4:6].tolist(), free[2, 3:4].tolist()]
    ours = model.generate(ids, **options)
    processors = transformers.LogitsProcessorList(options.pop("logits_processor", []))
    theirs = oracle(model, "llama2").generate(ids, do_sample=False, logits_processor=processors, **options)
    assert ours.tolist() == theirs.tolist()
    without = {key: value for key, value in options.items() if key not in PROCESSORS[name]} | {"max_new_tokens": 40}
    assert ours.tolist() != model.generate(ids, **without).tolist()


@pytest.mark.parametrize("penalty", [0.5, 1.8])
def test_a_repetition_penalty_equals_transformers(penalty: float, device: str) -> None:
    model = tiny_llama(device)
    ids = prompts(device, 2, 12)
    ours = model.generate(ids, max_new_tokens=30, repetition_penalty=penalty)
    theirs = oracle(model, "llama2").generate(ids, max_new_tokens=30, repetition_penalty=penalty, do_sample=False)
    assert ours.tolist() == theirs.tolist()
    assert ours.tolist() != model.generate(ids, max_new_tokens=30).tolist()


def test_equal_seeds_give_equal_samples(device: str) -> None:
    model, ids = tiny_llama(device), prompts(device, 2, 12)

    def draw(seed: int) -> list[list[int]]:
        generator = torch.Generator(device).manual_seed(seed)
        return model.generate(ids, max_new_tokens=20, do_sample=True, generator=generator).tolist()  # type: ignore[no-any-return]

    first = draw(1)
    torch.manual_seed(123)
    assert draw(1) == first
    assert draw(2) != first


def test_the_model_is_not_changed(device: str) -> None:
    model, ids = tiny_llama(device, "llama3.2"), prompts(device, 2, 12)
    model.train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    out = model.generate(ids, max_new_tokens=4)
    assert model.training
    assert torch.is_grad_enabled()
    loss = model(out, labels=out).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is not None


def test_no_new_tokens_returns_the_prompts() -> None:
    model = Scripted([[1], [1]])
    assert generate(model, PROMPT, max_new_tokens=0).tolist() == PROMPT.tolist()
    assert model.calls == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_token_ids_are_returned_as_int64(dtype: torch.dtype) -> None:
    out = generate(Scripted([[7, 8], [9, 6]]), PROMPT.to(dtype), max_new_tokens=2)
    assert (out.dtype, out.tolist()) == (torch.int64, [[1, 2, 7, 8], [3, 4, 9, 6]])


class Broken(Scripted):
    """A scripted model that replaces some logits of the last row at one step."""

    def __init__(self, step: int, values: list[float]) -> None:
        super().__init__([[7] * 9, [8] * 9])
        self.step, self.values = step, torch.tensor(values)

    def __call__(self, *args: Any, **options: Any) -> Any:
        output = super().__call__(*args, **options)
        if self.calls == self.step:
            output.logits[-1, -1, : len(self.values)] = self.values
        return output


@pytest.mark.parametrize("values", [[math.nan], [math.inf], [math.inf] * 2, [-math.inf] * VOCAB], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"do_sample": True, "top_k": 3, "top_p": 0.5, "min_p": 0.1}]
)
@pytest.mark.parametrize("ends, checked_at", [({}, 6), ({"eos_token_id": 50}, 3)])
def test_nan_and_infinite_logits_are_refused(
    values: list[float], options: dict[str, Any], ends: dict[str, Any], checked_at: int
) -> None:
    """At that step if the host checks each step for the end, else at the last step."""
    model = Broken(3, values)
    message = f"logits: no token can be chosen; got NaN, inf or only -inf within {checked_at} new tokens"
    with pytest.raises(LigerzooError, match=message):
        generate(model, PROMPT, max_new_tokens=6, **options, **ends)
    assert model.calls == checked_at


def test_single_logits_of_minus_infinity_are_allowed() -> None:
    for options in ({}, {"do_sample": True}):
        out = generate(Broken(1, [-math.inf] * (VOCAB - 1)), PROMPT, max_new_tokens=1, **options)
        assert out[1, 2] == VOCAB - 1


def test_a_streamer_receives_no_token_of_broken_logits() -> None:
    got: list[Any] = []
    streamer: Any = SimpleNamespace(put=lambda ids: got.append(ids.tolist()), end=lambda: got.append("end"))
    with pytest.raises(LigerzooError, match="no token can be chosen"):
        generate(Broken(3, [math.nan]), PROMPT, max_new_tokens=6, streamer=streamer)
    assert got == [PROMPT.tolist(), [7, 8], [7, 8]]


def test_nan_weights_are_named_as_a_cause(device: str) -> None:
    model = tiny_llama(device)
    model.model.norm.weight.data[3] = math.nan
    with pytest.raises(LigerzooError, match="Check the weights for NaN"):
        model.generate(prompts(device, 2, 5), max_new_tokens=3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [None, LEFT])
@pytest.mark.parametrize("eos", [NO_END, [VOCAB - 1, VOCAB + 1]])
def test_tokens_cause_no_host_sync(rows: list[str] | None, eos: list[int]) -> None:
    model, ids = tiny_llama("cuda"), prompts("cuda", 3, 17)
    mask = None if rows is None else mask_of(rows, "cuda")
    counts = []
    for new in (8, 8, 24):  # the first run compiles kernels
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model.generate(
                    ids, mask, max_new_tokens=new, eos_token_id=eos, do_sample=True, top_k=20, top_p=0.9,
                    repetition_penalty=1.1,
                )  # fmt: skip
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing" in str(warning.message) for warning in caught))
    assert counts[2] == counts[1]

"""Generation agrees with transformers and with itself; logit filters with loops; stopping with scripted models."""

import io
import math
import random
import warnings
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers.decoders
import torch
import transformers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import (
    StopStrings,
    TextStreamer,
    align_prompts,
    filter_logits,
    generate,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    sample,
)
from ligerzoo.models import Llama, LlamaConfig

VOCAB = 97
NO_END: list[int] = []
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama3.2": {"num_key_value_heads": 2, "rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": True},
    "odd": {"num_key_value_heads": 1, "head_dim": 10, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3},
}


def tiny_llama(device: str, variant: str = "llama2", std: float = 0.15) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**TINY | VARIANTS[variant], initializer_range=std), device=device)


def oracle(model: Llama, variant: str) -> Any:
    """Returns transformers' model with the same weights."""
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.LlamaConfig(**TINY | VARIANTS[variant] | ids)
    theirs = transformers.LlamaForCausalLM(config).to(model.device).eval()
    theirs.load_state_dict(model.state_dict())
    return theirs


def prompts(device: str, rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)


def mask_of(rows: list[str], device: str) -> Tensor:
    """Returns an attention mask from rows of # (token) and . (padding)."""
    return torch.tensor([[character == "#" for character in row] for row in rows], dtype=torch.long, device=device)


LEFT = ["....#############", "#################", ".......##########"]
RIGHT = [row[::-1] for row in LEFT]


class Recorder:
    """A model that records its inputs and logits."""

    def __init__(self, model: Llama) -> None:
        self.model, self.config, self.generation_config = model, model.config, model.generation_config
        self.read: list[Tensor] = []
        self.positions: list[Tensor | None] = []
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None, **options: Any) -> Any:
        output = self.model(input_ids, mask, position_ids, **options)
        self.read.append(input_ids)
        self.positions.append(position_ids)
        self.logits.append(output.logits)
        return output


class Scripted:
    """A model whose most likely tokens follow a script: row r continues with script[r]."""

    def __init__(self, script: list[list[int]], **config: Any) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB, **config)
        self.generation_config: dict[str, Any] = {}
        self.script = torch.tensor(script)
        self.calls = 0

    def __call__(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        logits = torch.nn.functional.one_hot(self.script[:, self.calls], VOCAB)[:, None].float()
        self.calls += 1
        return SimpleNamespace(logits=logits, past_key_values=None)


class Letters:
    """A tokenizer whose token i is the text PIECES[i]."""

    PIECES = ("a", "b", "c", "ab", "ST", "OP", "xSTO", "P!", "\n", "<end>")

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(self.PIECES[i] for i in ids)


# Against transformers


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


def test_seeded_sampling_equals_transformers(device: str) -> None:
    model = tiny_llama(device, std=0.1)
    theirs_model = oracle(model, "llama2")
    ids, mask = prompts(device, 3, 17), mask_of(LEFT, device)
    options = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "max_new_tokens": 30}
    torch.manual_seed(7)
    ours = model.generate(ids, mask, **options)
    torch.manual_seed(7)
    theirs = theirs_model.generate(ids, attention_mask=mask, pad_token_id=0, **options)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("penalty", [0.5, 1.8])
def test_a_repetition_penalty_equals_transformers(penalty: float, device: str) -> None:
    model = tiny_llama(device)
    ids = prompts(device, 2, 12)
    ours = model.generate(ids, max_new_tokens=30, repetition_penalty=penalty)
    theirs = oracle(model, "llama2").generate(ids, max_new_tokens=30, repetition_penalty=penalty, do_sample=False)
    assert ours.tolist() == theirs.tolist()
    assert ours.tolist() != model.generate(ids, max_new_tokens=30).tolist()


# Against itself


@pytest.mark.parametrize("rows", [RIGHT, ["..######.#####...", "##.#.#.#.#####.##", "................#"]])
def test_rows_with_any_padding_equal_single_rows(rows: list[str], device: str) -> None:
    model, mask = tiny_llama(device, "llama3.2"), mask_of(rows, device)
    ids = prompts(device, 3, 17).where(mask.bool(), VOCAB + 3)  # a padding token that has no embedding
    together = model.generate(ids, mask, max_new_tokens=30, repetition_penalty=1.2)
    assert together[:, :17].tolist() == ids.tolist()
    for row in range(3):
        prompt = ids[row, mask[row].bool()][None]
        alone = model.generate(prompt, max_new_tokens=30, repetition_penalty=1.2)
        assert together[row, 17:].tolist() == alone[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("rows", [None, LEFT, RIGHT])
def test_each_step_with_the_cache_has_the_logits_of_a_full_forward(rows: list[str] | None, device: str) -> None:
    cached, ids = Recorder(tiny_llama(device, "llama3.2")), prompts(device, 3, 17)
    mask = None if rows is None else mask_of(rows, device)
    out = generate(cached, ids, mask, max_new_tokens=30, eos_token_id=NO_END)
    assert [tokens.shape[1] for tokens in cached.read] == [17] + [1] * 29
    assert [logits.shape for logits in cached.logits] == [(3, 1, VOCAB)] * 30
    for row in range(3):
        prompt = ids[row] if mask is None else ids[row, mask[row].bool()]
        whole = torch.cat([prompt, out[row, 17:-1]])
        again = cached.model(whole[None]).logits[0, -30:]
        steps = torch.cat(cached.logits, 1)[row]
        torch.testing.assert_close(steps, again, rtol=1e-4, atol=2e-5)
    assert generate(cached, ids, mask, max_new_tokens=30, use_cache=False).tolist() == out.tolist()
    assert cached.read[-1].shape == (3, 17 + 29)


def test_position_ids_do_not_count_padding() -> None:
    model = Recorder(tiny_llama("cpu"))
    generate(model, prompts("cpu", 2, 5), mask_of(["..###", "####."], "cpu"), max_new_tokens=3)
    steps = [positions.tolist() for positions in model.positions if positions is not None]
    assert steps == [[[0, 0, 1, 2], [0, 1, 2, 3]], [[3], [4]], [[4], [5]]]


def test_prompts_of_one_length_need_no_mask() -> None:
    ids = torch.tensor([[9, 1, 2, 9], [3, 4, 9, 9]])
    tokens, mask = align_prompts(ids, torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]]))
    assert (tokens.tolist(), mask) == ([[1, 2], [3, 4]], None)
    tokens, mask = align_prompts(ids, torch.tensor([[0, 1, 0, 0], [1, 1, 0, 0]]))
    assert mask is not None
    assert (tokens.tolist(), mask.tolist()) == ([[1, 1], [3, 4]], [[False, True], [True, True]])


def test_equal_seeds_give_equal_samples(device: str) -> None:
    model, ids = tiny_llama(device), prompts(device, 2, 12)

    def draw(seed: int) -> list[list[int]]:
        generator = torch.Generator(device).manual_seed(seed)
        return model.generate(ids, max_new_tokens=20, do_sample=True, generator=generator).tolist()  # type: ignore[no-any-return]

    first = draw(1)
    torch.manual_seed(123)
    assert draw(1) == first
    assert draw(2) != first


def test_samples_follow_the_filtered_distribution(device: str) -> None:
    model, ids = tiny_llama(device, std=0.1), prompts(device, 1, 3)
    filters: dict[str, Any] = {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_p": 0.1}
    draws = 5000
    out = model.generate(ids.expand(draws, -1), max_new_tokens=1, do_sample=True, **filters)
    counts = out[:, -1].bincount(minlength=VOCAB).double()
    expected = draws * filter_logits(model(ids).logits[0, -1].double(), **filters).softmax(-1)
    kept = expected > 0
    freedom = int(kept.sum()) - 1
    assert freedom >= 8
    assert counts[~kept].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


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


def test_sample_equals_torch_multinomial() -> None:
    logits = keep_top_k(torch.randn(50, 200), 20)
    ours = sample(logits, torch.Generator().manual_seed(3))
    theirs = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ours, theirs)


# Logit filters, against loops over one row

ROWS = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12)


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(x - max(row)) for x in row]
    return [weight / sum(weights) for weight in weights]


def kept_by(filtered: Tensor, row: list[float]) -> set[int]:
    """Returns the tokens that are kept; checks that their logits are unchanged and the others are -inf."""
    kept = {i for i, x in enumerate(filtered.tolist()) if x != -math.inf}
    assert all(filtered[i] == row[i] for i in kept)
    return kept


@given(ROWS, st.integers(1, 15))
def test_top_k_by_loop(row: list[float], top_k: int) -> None:
    better = [sum(other > x for other in row) for x in row]
    assert kept_by(keep_top_k(torch.tensor(row), top_k), row) == {i for i, n in enumerate(better) if n < top_k}


@given(ROWS, st.floats(0.01, 1))
@example([-1e-10, 0.0], 0.25)  # so close that their probabilities round to one value
def test_top_p_by_loop(row: list[float], top_p: float) -> None:
    probabilities, expected, mass = softmax(row), set(), 0.0
    for i in sorted(range(len(row)), key=lambda i: (-row[i], i)):
        assume(top_p == 1 or abs(mass - top_p) > 1e-5)  # closer values depend on rounding
        if mass >= top_p and top_p < 1:
            break
        expected.add(i)
        mass += probabilities[i]
    assert kept_by(keep_top_p(torch.tensor(row), top_p), row) == expected


def test_top_p_of_one_keeps_all() -> None:
    logits = 5 * torch.randn(50, 1000)
    assert torch.equal(keep_top_p(logits, 1.0), logits)


@given(ROWS, st.floats(0, 1))
def test_min_p_by_loop(row: list[float], min_p: float) -> None:
    probabilities = softmax(row)
    floor = min_p * max(probabilities)
    assume(all(p == max(probabilities) or abs(p - floor) > 1e-5 * floor for p in probabilities))
    assert kept_by(keep_min_p(torch.tensor(row), min_p), row) == {i for i, p in enumerate(probabilities) if p >= floor}


@given(ROWS, st.sets(st.integers(0, 11)), st.floats(0.1, 5))
def test_repetition_penalty_by_loop(row: list[float], occurred: set[int], penalty: float) -> None:
    expected = [(x / penalty if x > 0 else x * penalty) if i in occurred else x for i, x in enumerate(row)]
    mask = torch.tensor([[i in occurred for i in range(len(row))]])
    torch.testing.assert_close(penalize_repetition(torch.tensor([row]), mask, penalty), torch.tensor([expected]))


@given(ROWS, st.floats(0.05, 5), st.integers(1, 15), st.floats(0.001, 1), st.floats(0, 1))
def test_the_most_likely_token_is_always_kept(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    filtered = filter_logits(torch.tensor(row), temperature, top_k, top_p, min_p)
    assert max(filtered.tolist()) == pytest.approx(max(row) / temperature, rel=1e-6)


@given(st.integers(0, 2**32), st.floats(0.1, 3), st.integers(1, 60), st.floats(0.05, 0.99), st.floats(0, 0.5))
@settings(max_examples=50)
def test_the_chain_of_filters_equals_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = 3 * torch.randn(3, 50, generator=torch.Generator().manual_seed(seed))
    processors = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(temperature),
            transformers.TopKLogitsWarper(top_k),
            transformers.TopPLogitsWarper(top_p),
            transformers.MinPLogitsWarper(min_p),
        ]
    )
    assert torch.equal(filter_logits(logits, temperature, top_k, top_p, min_p), processors(None, logits))


def test_the_penalty_equals_transformers() -> None:
    logits, ids = torch.randn(3, 50), torch.randint(50, (3, 20))
    occurred = torch.zeros(3, 50, dtype=torch.bool).scatter_(1, ids, True)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.3)(ids, logits)
    assert torch.equal(penalize_repetition(logits, occurred, 1.3), theirs)


# Stopping

PROMPT = torch.tensor([[1, 2], [3, 4]])


def test_rows_finish_independently_and_the_last_stops_generation() -> None:
    model = Scripted([[7, 8, 50, 9, 9, 9], [8, 51, 8, 50, 9, 9]])
    out = generate(model, PROMPT, max_new_tokens=6, eos_token_id=[50, 60], pad_token_id=0)
    assert out.tolist() == [[1, 2, 7, 8, 50, 0], [3, 4, 8, 51, 8, 50]]
    assert model.calls == 4


def test_a_finished_row_reads_no_padding(device: str) -> None:
    model = tiny_llama(device)
    ids = prompts(device, 2, 12)
    free = model.generate(ids, max_new_tokens=8)
    eos = int(free[0, 13])
    assert eos not in free[1, 12:]
    out = model.generate(ids, max_new_tokens=8, eos_token_id=eos, pad_token_id=VOCAB + 1)  # has no embedding
    assert out[0, 12:].tolist() == free[0, 12:14].tolist() + [VOCAB + 1] * 6
    assert out[1].tolist() == free[1].tolist()


@pytest.mark.parametrize(
    "config, generation_config, options, end, padding",
    [
        ({"eos_token_id": 50}, {}, {}, 2, 50),
        ({"eos_token_id": [9, 50], "pad_token_id": -1}, {}, {}, 2, 9),
        ({"eos_token_id": 50, "pad_token_id": 3}, {"eos_token_id": [51]}, {}, 3, 3),
        ({"eos_token_id": 50}, {"eos_token_id": 51, "pad_token_id": 4}, {}, 3, 4),
        ({"eos_token_id": 50}, {"eos_token_id": 51, "pad_token_id": 4}, {"eos_token_id": 8, "pad_token_id": 5}, 1, 5),
        ({"eos_token_id": 50}, {"eos_token_id": 51}, {"eos_token_id": []}, 4, None),
        ({}, {}, {}, 4, None),
    ],
)
def test_sources_of_token_ids(
    config: dict[str, Any], generation_config: dict[str, Any], options: dict[str, Any], end: int, padding: int | None
) -> None:
    model = Scripted([[7, 8, 50, 51, 7], [7, 7, 7, 7, 7]], **config)
    model.generation_config = generation_config
    row = generate(model, PROMPT, max_new_tokens=5, **options)[0, 2:].tolist()
    assert row == [7, 8, 50, 51, 7][: end + 1] + [padding] * (4 - end)


def test_no_new_tokens_returns_the_prompts() -> None:
    model = Scripted([[1], [1]])
    assert generate(model, PROMPT, max_new_tokens=0).tolist() == PROMPT.tolist()
    assert model.calls == 0


@pytest.mark.parametrize("rows", [None, LEFT])
def test_memory_grows_with_the_generated_tokens(rows: list[str] | None, device: str) -> None:
    """It does not grow with max_new_tokens."""
    model, ids = tiny_llama(device), prompts(device, 3, 17)
    mask = None if rows is None else mask_of(rows, device)
    free = model.generate(ids, mask, max_new_tokens=60)
    end = [int(free[row, -1]) for row in range(3)]
    cut = model.generate(ids, mask, max_new_tokens=60, eos_token_id=end, pad_token_id=0)
    sizes: list[int] = []

    class SizeRecorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))
            return out

    for most in (10**9, 10**30):
        with SizeRecorder():
            got = model.generate(ids, mask, max_new_tokens=most, eos_token_id=end, pad_token_id=0)
        assert torch.equal(got, cut)
    assert max(sizes) < 3 * 128 * 80


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_token_ids_are_returned_as_int64(dtype: torch.dtype) -> None:
    out = generate(Scripted([[7, 8], [9, 6]]), PROMPT.to(dtype), max_new_tokens=2)
    assert (out.dtype, out.tolist()) == (torch.int64, [[1, 2, 7, 8], [3, 4, 9, 6]])


# NaN and infinite logits


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
    streamer: Any = SimpleNamespace(put=lambda ids: got.append(ids.tolist()))
    with pytest.raises(LigerzooError, match="no token can be chosen"):
        generate(Broken(3, [math.nan]), PROMPT, max_new_tokens=6, streamer=streamer)
    assert got == [PROMPT.tolist(), [7, 8], [7, 8]]


def test_nan_weights_are_named_as_a_cause(device: str) -> None:
    model = tiny_llama(device)
    model.model.norm.weight.data[3] = math.nan
    with pytest.raises(LigerzooError, match="Check the weights for NaN"):
        model.generate(prompts(device, 2, 5), max_new_tokens=3)


def test_stop_strings_finish_a_row_within_and_across_tokens() -> None:
    # The texts are "abaSTOPcccccc..." and "xSTOb\nSTaOPxSTOP!...". The text of the prompt does not count.
    model = Scripted([[3, 0, 4, 5, *[2] * 10], [6, 1, 8, 4, 0, 5, 0, 0, 0, 0, 0, 0, 6, 7]])
    prompt = torch.tensor([[4, 5], [5, 4]])
    options: dict[str, Any] = {"tokenizer": Letters(), "max_new_tokens": 14, "pad_token_id": 9}
    out = generate(model, prompt, stop_strings="STOP", **options)
    assert out[:, 2:].tolist() == [[3, 0, 4, 5, *[9] * 10], model.script[1].tolist()]

    model.calls = 0
    out = generate(model, prompt, stop_strings=["b\nS", "TOPc"], **options)
    assert out[:, 2:].tolist() == [[3, 0, 4, 5, 2], [6, 1, 8, 4, 9]]
    assert model.calls == 5


SENTENCEPIECE = tokenizers.decoders.Sequence(
    [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
)


class SentencePieces:
    """Byte tokens 0 to 255 and four pieces, decoded like Llama 2's tokens."""

    PIECES = (*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁to", "to", "p")

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return str(SENTENCEPIECE.decode([self.PIECES[i] for i in ids]))


class Utf8:
    """Bytes as tokens, decoded like byte-level tokens: invalid UTF-8 is replaced."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


CHARACTERS = [list(character.encode()) for character in "\nto é你😀"]


@pytest.mark.parametrize(
    "tokenizer, pieces", [(Utf8(), CHARACTERS), (SentencePieces(), [*CHARACTERS, [256], [257], [258], [259]])]
)
@pytest.mark.parametrize("strings", [["\n"], [" to"], ["é\n"], ["你"], ["oé "], ["t t", "😀😀"], ["\n\n "]])
def test_the_last_tokens_suffice_to_find_stop_strings(
    strings: list[str], tokenizer: Any, pieces: list[list[int]]
) -> None:
    stops, chance = StopStrings(strings, tokenizer), random.Random(0)
    for _ in range(200):
        stop = list(chance.choice(strings).encode())
        ids = list(chain(*chance.choices(pieces, k=chance.randrange(1, 8)), stop, *chance.choices(pieces, k=2)))
        texts = [tokenizer.decode(ids[: end + 1], skip_special_tokens=False) for end in range(len(ids))]
        first = next(end for end, text in enumerate(texts) if any(string in text for string in strings))
        found = [stops.found_in(ids[: end + 1][-stops.window :]) for end in range(first + 1)]
        assert found == [False] * first + [True]


# Streamers


def test_a_streamer_receives_the_prompts_and_each_step() -> None:
    class Collector:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, token_ids: Tensor) -> None:
            self.got.append(token_ids.tolist())

        def end(self) -> None:
            self.got.append("end")

    collector = Collector()
    model = Scripted([[7, 50, 9], [8, 9, 50]])
    generate(model, PROMPT, max_new_tokens=5, eos_token_id=50, pad_token_id=0, streamer=collector)
    assert collector.got == [[[1, 2], [3, 4]], [7, 8], [50, 9], [0, 50], "end"]


class LetterStream:
    """Holds back one piece."""

    def __init__(self, hides: bool) -> None:
        self.hides, self.held = hides, ""

    def push(self, token_id: int) -> str:
        text, self.held = self.held, "" if self.hides and token_id == 9 else Letters.PIECES[token_id]
        return text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


class StreamingLetters:
    def stream(self, *, skip_special_tokens: bool) -> LetterStream:
        return LetterStream(skip_special_tokens)


@pytest.mark.parametrize(
    "options, printed",
    [
        ({}, "STOPc\n"),
        ({"skip_prompt": False}, "abaSTOPc\n"),
        ({"skip_special_tokens": False}, "STOPc<end>\n"),
    ],
)
def test_a_text_streamer_prints_the_continuation(options: dict[str, Any], printed: str) -> None:
    file = io.StringIO()
    streamer = TextStreamer(StreamingLetters(), file=file, **options)
    prompt = torch.tensor([[3, 0]])
    for repeat in (1, 2):
        generate(Scripted([[4, 5, 2, 9]]), prompt, max_new_tokens=9, eos_token_id=9, streamer=streamer)
        assert file.getvalue() == printed * repeat


def test_a_text_streamer_flushes_each_piece() -> None:
    class Terminal(io.StringIO):
        def flush(self) -> None:
            self.flushed = self.getvalue()

    terminal = Terminal()
    streamer = TextStreamer(StreamingLetters(), file=terminal)
    streamer.put(torch.tensor([4]))
    streamer.put(torch.tensor([5]))
    assert terminal.flushed == "ST"


def test_a_text_streamer_prints_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextStreamer(StreamingLetters())
    streamer.put(torch.tensor([4]))
    streamer.end()
    assert capsys.readouterr().out == "ST\n"


def test_a_text_streamer_accepts_one_prompt_only() -> None:
    with pytest.raises(LigerzooError, match=r"TextStreamer: .*got 2 prompts"):
        generate(Scripted([[1], [1]]), PROMPT, max_new_tokens=1, streamer=TextStreamer(StreamingLetters()))


# Invalid arguments


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": -1}, "max_new_tokens: .*got -1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: .*got 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens: .*got True"),
        ({"max_new_tokens": None}, "max_new_tokens: .*expected an integer"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: .*got 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty: .*got nan"),
        ({"do_sample": True, "temperature": 0.0}, "temperature: .*got 0.0; expected a positive number"),
        ({"do_sample": True, "temperature": math.inf}, "temperature: .*got inf"),
        ({"do_sample": True, "top_k": 0}, "top_k: .*got 0"),
        ({"do_sample": True, "top_p": 0.0}, "top_p: .*got 0.0"),
        ({"do_sample": True, "top_p": 1.1}, "top_p: .*got 1.1"),
        ({"do_sample": True, "min_p": -0.1}, "min_p: .*got -0.1"),
        ({"do_sample": True, "min_p": 1.1}, "min_p: .*got 1.1"),
        ({"do_sample": True, "generator": torch.Generator("cpu")}, "generator: .*got one on cpu; expected one on meta"),
        ({"eos_token_id": "</s>"}, "eos_token_id: .*got </s>"),
        ({"pad_token_id": 1.0}, "pad_token_id: .*got 1.0"),
        ({"stop_strings": ["a", ""], "tokenizer": Letters()}, "stop_strings: .*not empty"),
        ({"stop_strings": [], "tokenizer": Letters()}, "stop_strings: .*not empty"),
        ({"stop_strings": "a"}, "tokenizer: stop_strings need a tokenizer"),
        ({"stop_strings": "a", "tokenizer": Letters()}, "pad_token_id: "),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask: .*got \(2, 3\); expected \(2, 2\)"),
    ],
)
def test_invalid_values_are_refused_before_the_model_runs(options: dict[str, Any], message: str) -> None:
    model = Scripted([[1], [1]])
    prompt = PROMPT.to("meta") if "generator" in options else PROMPT
    with pytest.raises(LigerzooError, match=message):
        generate(model, prompt, **{"max_new_tokens": 1} | options)
    assert model.calls == 0


@pytest.mark.parametrize(
    "ids, mask, message",
    [
        (torch.zeros(1, 0, dtype=torch.long), None, r"input_ids: .*got \(1, 0\); .*at least one token in each row"),
        (torch.tensor([1, 2]), None, r"input_ids: .*got \(2,\); expected \(B, T\)"),
        (PROMPT, torch.tensor([[1, 1], [0, 0]]), "attention_mask: .*got a row of padding only"),
    ],
)
def test_empty_prompts_are_refused(ids: Tensor, mask: Tensor | None, message: str) -> None:
    with pytest.raises(LigerzooError, match=message):
        generate(Scripted([[1], [1]]), ids, mask, max_new_tokens=1)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [None, LEFT])
@pytest.mark.parametrize("eos, waits", [(NO_END, 0), ([VOCAB - 1, VOCAB + 1], 1)])
def test_at_most_one_host_sync_per_token(rows: list[str] | None, eos: list[int], waits: int) -> None:
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
    assert counts[2] - counts[1] == waits * 16


@pytest.mark.parametrize(
    "options, named",
    [
        ({"eos_token_id": 10**20}, "eos_token_id: invalid value; got 100000000000000000000; expected a token id below"),
        ({"pad_token_id": 2**63}, "pad_token_id"),
        ({"do_sample": True, "top_k": True}, "top_k"),
        ({"do_sample": True, "top_p": "0.9"}, "top_p"),
        ({"do_sample": True, "min_p": "0.1"}, "min_p"),
        ({"do_sample": True, "temperature": None}, "temperature"),
        ({"repetition_penalty": None}, "repetition_penalty"),
    ],
)
def test_options_of_the_wrong_type_or_size(options: dict[str, Any], named: str) -> None:
    model = Llama(LlamaConfig(vocab_size=101, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                              num_attention_heads=2, num_key_value_heads=1))  # fmt: skip
    with pytest.raises(LigerzooError, match=named):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, **options)


def test_a_tiny_top_p_keeps_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert keep_top_p(logits, 1e-320).tolist() == [[-math.inf, 2.0, -math.inf]]

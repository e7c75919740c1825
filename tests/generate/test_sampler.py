"""`Sampler`: rows with different options, whose tokens follow the filtered softmax whatever the other rows do."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import Sampler, SamplingOptions, filter_logits
from ligerzoo.generate.processors import RowState
from ligerzoo.kernels import cross_entropy
from ligerzoo.kernels.sampling import SampledTokens
from tests.covering import covering

VOCAB = 61
OPTIONS = [
    SamplingOptions(**options)
    for options in (
        {},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6},
        {"do_sample": True, "temperature": 1.7, "top_k": 9},
        {"do_sample": True, "top_p": 0.8},
        {"do_sample": True, "min_p": 0.1},
        {"do_sample": True, "temperature": 1.5, "top_k": 30, "top_p": 0.85, "min_p": 0.03},
        {"do_sample": True, "top_k": 2 * VOCAB, "top_p": 1.0, "min_p": 0.0},
        {"do_sample": True, "repetition_penalty": 1.5, "top_p": 0.9},
        {"do_sample": True, "bad_words_ids": [[3], [7, 8]], "no_repeat_ngram_size": 2},
        {"min_new_tokens": 5, "repetition_penalty": 1.2},
    )
]
EOS = [11, 12]


def prompt(seed: int, length: int) -> Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def logits_at(step: int, row: int) -> Tensor:
    """Returns logits (V,) that depend on the sequence and its step."""
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * row + step))


def run(order: Sequence[int], steps: int, device: str, late: Sequence[int] = ()) -> dict[int, list[Tensor]]:
    """Samples a sequence for each index of OPTIONS in `order`, one row each. Rows in `late` start two steps later.

    Returns:
        For each index: tokens, logps and sampling_logps, each (steps,).
    """
    sampler = Sampler(len(order), VOCAB, torch.device(device))

    def assign(row: int) -> None:
        seed, index = torch.tensor([77 + order[row]], device=device), order[row]
        sampler.assign([row], [prompt(index, 3 + index)], OPTIONS[index], eos_token_ids=EOS, seeds=seed)

    for row, index in enumerate(order):
        if index not in late:
            assign(row)
    found: dict[int, list[list[Tensor]]] = {index: [] for index in order}
    for step in range(steps + 2 * bool(late)):
        if step == 2:
            for row, index in enumerate(order):
                if index in late:
                    assign(row)
        counts = [len(found[index]) for index in order]
        logits = torch.stack([logits_at(count, index) for count, index in zip(counts, order, strict=True)]).to(device)
        sampled = sampler.choose(logits)
        for row, index in enumerate(order):
            is_running = (step >= 2 or index not in late) and len(found[index]) < steps
            if is_running:
                found[index].append([result[row].clone() for result in sampled])
    assert not sampler.is_broken
    return {index: [torch.stack(column) for column in zip(*rows, strict=True)] for index, rows in found.items()}


def test_a_row_is_the_same_in_any_company_order_and_time(device: str) -> None:
    indices = list(range(len(OPTIONS)))
    together = run(indices, 12, device)
    late = run(indices[::-1], 12, device, late=[1, 6, 8, 9])
    for index in indices:
        alone = run([index], 12, device)[index]
        for other in (together[index], late[index]):
            assert torch.equal(alone[0], other[0])
            torch.testing.assert_close(alone[1:], other[1:], rtol=0, atol=2e-6)
    assert len({tuple(tokens.tolist()) for tokens, _, _ in together.values()}) == len(OPTIONS)


@pytest.mark.parametrize("index", range(1, 8))
def test_tokens_follow_the_filtered_softmax(index: int, device: str) -> None:
    """Rows with the tested options are among rows with others."""
    draws, options = 6000, OPTIONS[index]
    sampler = Sampler(draws + len(OPTIONS), VOCAB, torch.device(device))
    rows = range(draws)
    sampler.assign(rows, torch.zeros(draws, 1, dtype=torch.long), options)
    for row, other in enumerate(OPTIONS, draws):
        sampler.assign([row], [prompt(row, 4)], other)
    logits = 1.5 * torch.randn(VOCAB, device=device)
    sampled = sampler.choose(logits.expand(sampler.rows, -1))
    tokens, logps, sampling_logps = (result[:draws] for result in sampled)
    filters = options.temperature, options.top_k, options.top_p, options.min_p
    distribution = filter_logits(logits.double(), *filters).log_softmax(-1)
    torch.testing.assert_close(sampling_logps.double(), distribution[tokens], rtol=0, atol=5e-6)
    torch.testing.assert_close(logps.double(), logits.double().log_softmax(-1)[tokens], rtol=0, atol=5e-6)
    expected = draws * distribution.exp()
    counts = tokens.bincount(minlength=VOCAB).double()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    rare = expected < 5  # the statistic needs larger expectations, so these tokens count as one
    groups = [(counts[kept & ~rare], expected[kept & ~rare])]
    if expected[rare].sum() > 1:
        groups.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    chi_square = sum(((count - mean) ** 2 / mean).sum() for count, mean in groups)
    freedom = sum(len(mean) for _, mean in groups) - 1
    assert freedom >= 4
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_tokens_of_one_row_follow_the_softmax_over_its_steps(device: str) -> None:
    sampler = Sampler(1, 5, torch.device(device))
    sampler.assign([0], torch.zeros(1, 1, dtype=torch.long), SamplingOptions(do_sample=True))
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5, 2.0]], device=device)
    tokens = torch.cat([sampler.choose(logits).tokens for _ in range(2000)])
    expected = 2000 * logits[0].double().softmax(-1)
    chi_square = ((tokens.bincount(minlength=5) - expected) ** 2 / expected).sum()
    assert chi_square < 20  # 0.0005 of the distribution with 4 degrees of freedom are above
    pairs = (5 * tokens[:-1] + tokens[1:]).bincount(minlength=25).double()
    expected = (expected[:, None] * expected / 2000).flatten()
    assert ((pairs - expected) ** 2 / expected).sum() < 24 + 5 * math.sqrt(48)


def test_seeds_are_drawn_from_the_generator_and_only_for_sampling(device: str) -> None:
    def tokens(seed: int | None, **options: Any) -> list[int]:
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        sampler = Sampler(4, 1000, torch.device(device))
        sampler.assign(range(4), torch.zeros(4, 1), SamplingOptions(**options), generator=generator)
        return sampler.choose(torch.zeros(4, 1000, device=device)).tokens.tolist()  # type: ignore[no-any-return]

    assert tokens(1, do_sample=True) == tokens(1, do_sample=True) != tokens(2, do_sample=True)
    assert len(set(tokens(1, do_sample=True))) > 1
    torch.manual_seed(3)
    first = tokens(None, do_sample=True)
    assert tokens(None, do_sample=True) != first
    torch.manual_seed(3)
    tokens(None)
    assert tokens(None, do_sample=True) == first


CASES: dict[str, list[Any]] = {
    "repetition_penalty": [1.0, 0.7, 1.6],
    "no_repeat_ngram_size": [None, 1, 2, 4],
    "bad_words_ids": [None, [[2], [1, 1], [11]], [[0, 1, 2, 0], [3], [1, 0]]],
    "min_new_tokens": [None, 3, 100],
    "functions": [0, 1, 2],
    "length": [1, 3, 40],
}


def processors_of(case: dict[str, Any], length: int, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns transformers' processors for these options, in transformers' order."""
    found = transformers.LogitsProcessorList()
    if case["repetition_penalty"] != 1:
        found.append(transformers.RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    if case["no_repeat_ngram_size"]:
        found.append(transformers.NoRepeatNGramLogitsProcessor(case["no_repeat_ngram_size"]))
    if case["bad_words_ids"]:
        bad_words = transformers.NoBadWordsLogitsProcessor(case["bad_words_ids"], torch.tensor(EOS, device=device))
        # transformers before 5.18 ignores a sequence that is one token longer than the text so far.
        found.append(lambda input_ids, scores: bad_words(F.pad(input_ids, (4, 0), value=VOCAB - 1), scores))
    if case["min_new_tokens"]:
        found.append(transformers.MinNewTokensLengthLogitsProcessor(length, case["min_new_tokens"], EOS, device))
    found.extend(functions_of(case))
    return found


def functions_of(case: dict[str, Any]) -> list[Any]:
    functions = [
        transformers.SequenceBiasLogitsProcessor([[[5], 1.5], [[4, 6], -3.0]]),
        lambda input_ids, scores: scores.index_fill(1, torch.tensor([input_ids.shape[1] % 7]).to(scores.device), -9.0),
    ]
    return functions[: case["functions"]]


@pytest.mark.parametrize("case", covering(CASES), ids=str)
def test_scores_equal_those_of_transformers_processors(case: dict[str, Any], device: str) -> None:
    """Few different tokens, so that sequences and n-grams occur."""
    names = ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_new_tokens")
    options = SamplingOptions(**{name: case[name] for name in names}, logits_processor=functions_of(case))
    length, rows = case["length"], 4
    ids = torch.randint(4, (rows, length), device=device)
    expected_of = processors_of(case, length, device)
    # Two more rows, with other lengths and options, before and behind.
    sampler = Sampler(rows + 2, VOCAB, torch.device(device))
    sampler.assign([0, rows + 1], [prompt(1, 5), prompt(2, 50)], OPTIONS[9])
    sampler.assign(range(1, rows + 1), ids, options, eos_token_ids=EOS)
    for _ in range(12):
        logits = torch.randn(rows + 2, VOCAB, device=device)
        logits[:, :4] += 6
        before, scores = logits.clone(), expected_of(ids, logits[1:-1].clone())
        tokens, logps, _ = sampler.choose(logits)
        assert torch.equal(logits, before)
        best = scores.argmax(-1)
        assert torch.equal(tokens[1:-1], best)
        torch.testing.assert_close(logps[1:-1], logits[1:-1].log_softmax(-1).gather(1, best[:, None])[:, 0])
        ids = torch.cat([ids, best[:, None]], 1)


@given(st.integers(0, 2**31), st.integers(1, 5), st.booleans())
@settings(max_examples=30, deadline=None)
def test_banned_scores_equal_transformers_on_random_inputs(seed: int, size: int, ragged: bool) -> None:
    """All scores are compared, through a function that records them."""
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(3, (1 + i % 4,), generator=generator).tolist() for i in range(3)]
    lengths = [int(n) for n in torch.randint(6, 20, (3,), generator=generator)] if ragged else [9] * 3
    ids = [torch.randint(3, (n,), generator=generator) for n in lengths]
    recorded: list[Tensor] = []

    def record(input_ids: Tensor, scores: Tensor) -> Tensor:
        recorded.append(scores.clone())
        return scores

    options = SamplingOptions(bad_words_ids=words, no_repeat_ngram_size=size, logits_processor=[record])
    sampler = Sampler(3, 6, torch.device("cpu"))
    sampler.assign(range(3), ids, options)
    logits = torch.randn(3, 6, generator=generator)
    sampler.choose(logits)
    theirs = transformers.LogitsProcessorList(
        [transformers.NoRepeatNGramLogitsProcessor(size), transformers.NoBadWordsLogitsProcessor(words)]
    )
    for row in range(3):
        assert torch.equal(recorded[0][row], theirs(ids[row][None], logits[row : row + 1])[0])


def test_functions_receive_the_rows_of_one_assignment_with_their_tokens(device: str) -> None:
    seen: list[Tensor] = []

    def record(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids.cpu())
        scores[:, 0] = 100.0  # in place
        return scores

    options = SamplingOptions(logits_processor=[record])
    sampler = Sampler(4, 9, torch.device(device))
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    sampler.assign([2, 0], torch.tensor([[1, 2, 3], [8, 4, 5]]), options, attention_mask=mask)
    sampler.assign([1], [torch.tensor([6])], options)
    logits = torch.zeros(4, 9, device=device)
    logits[3, 7] = 1
    assert sampler.choose(logits).tokens.tolist() == [0, 0, 0, 7]
    sampler.choose(logits)
    assert [ids.tolist() for ids in seen] == [
        [[1, 2, 3], [4, 4, 5]], [[6]],
        [[1, 2, 3, 0], [4, 4, 5, 0]], [[6, 0]],
    ]  # fmt: skip
    assert logits[:, 0].tolist() == [0, 0, 0, 0]
    sampler.release([0, 1])
    sampler.choose(logits)
    assert seen[-1].tolist() == [[1, 2, 3, 0, 0]]
    sampler.select_rows([3, 2, 2])
    sampler.choose(logits[:3])
    assert seen[-1].tolist() == [[1, 2, 3, 0, 0, 0]] * 2


@pytest.mark.parametrize("result, got", [(None, "None"), (torch.zeros(1, 4), r"\(1, 4\)")])
def test_results_of_functions_are_checked(result: Any, got: str) -> None:
    def bad(input_ids: Tensor, scores: Tensor) -> Any:
        return result

    sampler = Sampler(1, 9, torch.device("cpu"))
    sampler.assign([0], torch.tensor([[1]]), SamplingOptions(logits_processor=[bad]))
    expected = rf"result of logits_processor function: .*got {got}; expected a tensor of shape \(1, 9\)"
    with pytest.raises(LigerzooError, match=expected):
        sampler.choose(torch.zeros(1, 9))


def test_selected_rows_continue(device: str) -> None:
    def start() -> Sampler:
        sampler = Sampler(len(OPTIONS), VOCAB, torch.device(device))
        for row, options in enumerate(OPTIONS):
            seed = torch.tensor([row], device=device)
            sampler.assign([row], [prompt(row, 5 + row)], options, eos_token_ids=EOS, seeds=seed)
        return sampler

    whole, part, rows = start(), start(), [8, 9, 3, 10]
    for step in range(20):
        if step == 4:
            part.select_rows(rows)
            assert part.rows == 4
        logits = torch.randn(len(OPTIONS), VOCAB, device=device)
        expected = whole.choose(logits).tokens
        actual = part.choose(logits if step < 4 else logits[rows]).tokens
        assert torch.equal(actual, expected if step < 4 else expected[rows])


def test_released_rows_cost_nothing_more_and_rows_can_be_reused() -> None:
    sampler = Sampler(2, VOCAB, torch.device("cpu"))
    plain = sampler.graph_key
    for index in (6, 8, 9, 10):
        sampler.assign([1], [prompt(1, 4)], OPTIONS[index], eos_token_ids=EOS)
        assert sampler.graph_key != plain
        sampler.release([1])
        assert sampler._features == Sampler(2, VOCAB, torch.device("cpu"))._features
        length = sampler._history.tokens.shape[1]
        for _ in range(40):
            sampler.choose(torch.randn(2, VOCAB))
        assert sampler._history.tokens.shape[1] == length


def test_a_broken_row_is_forgotten_when_it_is_assigned_again() -> None:
    sampler = Sampler(3, 5, torch.device("cpu"))
    sampler.assign(range(3), torch.zeros(3, 1), SamplingOptions(do_sample=True))
    logits = torch.zeros(3, 5)
    logits[1, 2] = math.nan
    sampler.choose(logits)
    sampler.choose(torch.zeros(3, 5))
    assert sampler.broken.tolist() == [False, True, False]
    assert sampler.is_broken
    sampler.assign([1], torch.zeros(1, 1), SamplingOptions())
    assert not sampler.is_broken


def test_a_row_without_allowed_tokens_is_broken() -> None:
    sampler = Sampler(2, 5, torch.device("cpu"))
    sampler.assign([0], torch.zeros(1, 1), SamplingOptions(bad_words_ids=[[i] for i in range(5)]))
    sampler.choose(torch.zeros(2, 5))
    assert sampler.broken.tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_logits_of_other_dtypes(dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(len(OPTIONS), VOCAB, device=device).bfloat16()
    results = []
    for values in (logits.float(), logits.to(dtype)):
        sampler = Sampler(len(OPTIONS), VOCAB, torch.device(device))
        for row, options in enumerate(OPTIONS):
            seed = torch.tensor([row], device=device)
            sampler.assign([row], [prompt(row, 5)], options, eos_token_ids=EOS, seeds=seed)
        results.append(sampler.choose(values))
    torch.testing.assert_close(*results)


def memory(sampler: Sampler) -> dict[str, int]:
    """Returns the addresses of all tensors that `draw` reads and updates."""
    states = {name: state for name, state in vars(sampler).items() if isinstance(state, RowState)}
    return {
        f"{owner}.{name}": value.data_ptr()
        for owner, state in states.items()
        for name, value in vars(state).items()
        if isinstance(value, Tensor) and value.numel()
    }


def test_memory_changes_only_with_the_graph_key() -> None:
    """A captured graph reads and writes the memory of its capture."""
    sampler = Sampler(3, VOCAB, torch.device("cpu"))
    addresses: dict[Any, dict[str, int]] = {}
    for step in range(80):
        if step % 10 == 0:
            index = (6, 8, 9, 10, 1, 9, 0, 8)[step // 10]
            sampler.assign([step // 10 % 3], [prompt(step, 1 + step)], OPTIONS[index], eos_token_ids=EOS)
        sampler.prepare()
        key = sampler.graph_key
        assert addresses.setdefault(key, memory(sampler)) == memory(sampler)
        sampler.draw(torch.randn(3, VOCAB))
        assert addresses[key] == memory(sampler)
    assert 5 < len(addresses) < 40


@pytest.mark.gpu
def test_captured_draws_equal_eager_ones() -> None:
    results = []
    logits = torch.randn(len(OPTIONS), 5003, device="cuda")
    for capture in (False, True):
        sampler = Sampler(len(OPTIONS), 5003, torch.device("cuda"))
        for row, options in enumerate(OPTIONS):
            seed = torch.tensor([row], device="cuda")
            sampler.assign([row], [prompt(row, 5)], options, eos_token_ids=EOS, seeds=seed)
        tokens, graph, key, sampled = [], None, None, None
        for _ in range(50):
            sampler.prepare()
            if not capture or sampler.graph_key != key:
                key, graph = sampler.graph_key, None
                sampled = sampler.draw(logits)
            else:
                if graph is None:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        sampled = sampler.draw(logits)
                graph.replay()
            assert sampled is not None
            tokens.append(torch.stack([result.double() for result in sampled]))
        results.append(torch.stack(tokens))
    assert torch.equal(*results)


def test_exact_log_probabilities_are_those_of_the_loss(device: str) -> None:
    """At the temperature that rows share, if nothing else changes the scores."""
    logits = torch.stack([logits_at(0, row) for row in range(3)]).to(device).bfloat16()

    def sample(*options: SamplingOptions) -> tuple[SampledTokens, Sampler]:
        sampler = Sampler(3, VOCAB, logits.device, exact=True)
        for row, one in enumerate(options):
            sampler.assign([row], [prompt(row, 4)], one)
        return sampler.choose(logits.float()), sampler

    plain, warm, cold = (SamplingOptions(do_sample=True, temperature=t) for t in (1.0, 0.7, 2.0))
    keys = set()
    for options, temperature in (([plain] * 3, 1.0), ([warm] * 3, 0.7), ([cold] * 2, 2.0)):
        sampled, sampler = sample(*options)
        expected = -cross_entropy(logits, sampled.tokens, temperature=temperature, reduction="none")
        assert torch.equal(sampled.sampling_logps[: len(options)], expected[: len(options)])
        assert torch.equal(sampled.logps, -cross_entropy(logits, sampled.tokens, reduction="none"))
        assert (sampled.sampling_logps[len(options) :] == 0).all()  # a free row
        keys.add(sampler.graph_key)
    assert len(keys) == 3  # each is captured
    for options in ([plain, warm], [SamplingOptions(do_sample=True, top_k=3)] * 3):
        sampled, _ = sample(*options)
        torch.testing.assert_close(sampled.logps, -cross_entropy(logits, sampled.tokens, reduction="none"))

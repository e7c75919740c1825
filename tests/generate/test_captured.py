"""Captured decode steps choose the tokens of eager ones. On a CPU, a stand-in for the graph runs the step eagerly."""

import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.generate import Scheduler, graphs, slots
from ligerzoo.generate import rows as rows_module
from ligerzoo.generate.graphs import CapturedCall, GraphPool, release_decode_graphs
from ligerzoo.layers import SigmoidRouter
from ligerzoo.layers.capture import can_capture
from ligerzoo.models import (
    DeepseekV3,
    DeepseekV3Config,
    Gemma2,
    Gemma2Config,
    Gemma3Text,
    Gemma3TextConfig,
    Gemma4Text,
    Gemma4TextConfig,
    GptOss,
    GptOssConfig,
    Llama,
    LlamaConfig,
    Mistral,
    MistralConfig,
    Mixtral,
    MixtralConfig,
    Phi3,
    Phi3Config,
    Qwen3Moe,
    Qwen3MoeConfig,
    Qwen3Next,
    Qwen3NextConfig,
)
from tests.covering import long_cases
from tests.generate.graphs import replace_graphs
from tests.generate.models import HYBRID, NO_END, TINY, VOCAB

SIZES: dict[str, Any] = {**TINY, "num_key_value_heads": 2, "head_dim": 16}
MOE: dict[str, Any] = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK: dict[str, Any] = {
    **TINY, "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "num_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "global_head_dim": 32, "sliding_window": 7, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
FACTORS = [1.0 + i for i in range(8)]
LONGROPE = {"type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1]}
PHI3: dict[str, Any] = {**TINY, "rope_scaling": LONGROPE, "original_max_position_embeddings": 50}
BUILD: dict[str, Callable[[], nn.Module]] = {
    "deepseek_v3": lambda: DeepseekV3(DeepseekV3Config(**DEEPSEEK)),
    "llama": lambda: Llama(LlamaConfig(**SIZES)),
    "mistral": lambda: Mistral(MistralConfig(**SIZES, sliding_window=7)),
    "gemma2": lambda: Gemma2(Gemma2Config(**SIZES, sliding_window=7)),
    "gemma3_text": lambda: Gemma3Text(Gemma3TextConfig(**SIZES, sliding_window=7)),
    "gemma4_text": lambda: Gemma4Text(Gemma4TextConfig(**{**SIZES, **GEMMA4})),
    "mixtral": lambda: Mixtral(MixtralConfig(**SIZES, num_experts=4)),
    "qwen3_moe": lambda: Qwen3Moe(Qwen3MoeConfig(**MOE)),
    "qwen3_next": lambda: Qwen3Next(Qwen3NextConfig(**SIZES, **HYBRID)),
    "gpt_oss": lambda: GptOss(GptOssConfig(**SIZES, num_experts=4, num_experts_per_tok=2, sliding_window=7)),
    "phi3": lambda: Phi3(Phi3Config(**{**PHI3, "hidden_size": 96})),  # the longest prompts end beyond 50 tokens
}
ROUTED = {"deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe", "qwen3_next"}
"""With padding, the eager prefill rounds differently; in bf16, that may select other experts."""
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 1.3}
PROCESSED: dict[str, Any] = {
    "no_repeat_ngram_size": 2, "bad_words_ids": [[3], [5, 6]], "min_new_tokens": 9, "eos_token_id": [7, 8],
    "do_sample": True, "top_p": 0.9,
}  # fmt: skip


def favor(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor that makes one token more likely, which depends on the number of tokens."""
    scores[:, input_ids.shape[1] % 5] += 3
    return scores


def build(name: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """On a CPU in fp64: there, a static cache takes another way through attention, which rounds differently."""
    torch.manual_seed(0)
    model = BUILD[name]()
    model.init_weights(0.2)
    return model.to(device, torch.float64 if device == "cpu" else dtype).eval()


@pytest.fixture(autouse=True)
def small_buckets(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small capacities, so that caches grow, and on a CPU a stand-in for graphs."""
    monkeypatch.setattr(slots, "_MIN_CAPACITY", 16)
    monkeypatch.setattr(slots, "_SPARSE_STEPS", 3)
    if device == "cpu":
        replace_graphs(monkeypatch)


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch, device: str) -> Callable[..., Tensor]:
    """Generates eagerly, or captured, with the same seed."""

    def run(model: Any, *inputs: Tensor | None, capture: bool, **options: Any) -> Tensor:
        for module in (rows_module, slots):
            monkeypatch.setattr(module, "can_capture", lambda model: capture)
        torch.manual_seed(5)
        options = {"max_new_tokens": 30, "eos_token_id": NO_END, "pad_token_id": 0} | options
        result: Tensor = model.generate(*inputs, **options)
        return result

    return run


def prompts(rows: int, length: int, device: str, *, padded: bool) -> tuple[Tensor, Tensor | None]:
    ids = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(2)).to(device)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % min(3, length)] = 0
    return ids, mask if padded else None


CASES: dict[str, list[Any]] = {
    "name": list(BUILD),
    "options": [{}, SAMPLED, {"repetition_penalty": 1.3, "eos_token_id": 7}, PROCESSED, {"logits_processor": [favor]}],
    "padded": [False, True],
    "shape": [(1, 5), (3, 4), (3, 40)],
    "dtype": [torch.float32, torch.bfloat16],
}


@pytest.mark.parametrize("case", long_cases(CASES), ids=lambda case: re.sub(" at 0x[0-9a-f]+", "", str(case)))
def test_captured_tokens_are_the_eager_ones(case: dict[str, Any], generate: Callable[..., Tensor], device: str) -> None:
    dtype = torch.float32 if case["padded"] and case["name"] in ROUTED else case["dtype"]
    model = build(case["name"], device, dtype)
    inputs = prompts(*case["shape"], device, padded=case["padded"])
    expected = generate(model, *inputs, capture=False, **case["options"])
    for _ in range(2):  # the second call finds the graph of the first
        assert torch.equal(generate(model, *inputs, capture=True, **case["options"]), expected)


def test_finished_rows_leave(generate: Callable[..., Tensor], device: str) -> None:
    model = build("mistral", device)
    inputs = prompts(6, 9, device, padded=True)
    options = {"eos_token_id": list(range(0, VOCAB, 12)), "max_new_tokens": 60}
    expected = generate(model, *inputs, capture=False, **options)
    assert torch.equal(generate(model, *inputs, capture=True, **options), expected)
    assert {graph.rows for graph in graphs._GRAPHS[model]._idle.values()} > {6}


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["growing", "static"])
def test_captured_calls_extend_a_cache(
    name: str, padded: bool, kind: str, generate: Callable[..., Any], device: str
) -> None:
    model = build(name, device)
    ids, mask = prompts(3, 10, device, padded=padded)
    cache = model.new_cache(200 if kind == "static" else None)
    for _call in range(3):
        options = {"max_new_tokens": 30, "num_return_sequences": 1, "past_key_values": cache}
        expected = generate(model, ids, mask, capture=False, max_new_tokens=30)
        out = generate(model, ids, mask, capture=True, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, expected)
        assert out.past_key_values is cache
        assert cache.length == expected.shape[1] - 1
        ids = F.pad(expected, (0, 4), value=5)
        mask = None if mask is None else F.pad(mask, (0, 34), value=1)


def test_captured_copies_share_the_prefill(generate: Callable[..., Any], device: str) -> None:
    model = build("mistral", device)
    inputs = prompts(2, 9, device, padded=True)
    expected = generate(model, *inputs, capture=False)
    for cache in (None, model.new_cache()):
        options = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "past_key_values": cache}
        assert torch.equal(generate(model, *inputs, capture=True, **options), expected.repeat_interleave(3, 0))


def test_captured_log_probabilities_are_the_eager_ones(generate: Callable[..., Any], device: str) -> None:
    model = build("llama", device)
    inputs = prompts(3, 9, device, padded=True)
    eager, captured = (
        generate(model, *inputs, capture=capture, return_dict_in_generate=True, **SAMPLED) for capture in (False, True)
    )
    assert torch.equal(captured.sequences, eager.sequences)
    for got, expected in ((captured.logps, eager.logps), (captured.sampling_logps, eager.sampling_logps)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_replaced_buffers_have_other_addresses() -> None:
    router = SigmoidRouter(8, 4, 2)
    before = graphs._addresses(router)
    router.e_score_correction_bias.add_(1.0)
    assert graphs._addresses(router) == before
    router.e_score_correction_bias = router.e_score_correction_bias.clone()
    assert graphs._addresses(router) != before


def test_weights_may_change_in_place_and_be_replaced(generate: Callable[..., Tensor], device: str) -> None:
    model = build("llama", device)
    inputs = prompts(2, 5, device, padded=False)
    results = [generate(model, *inputs, capture=True)]
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.neg_()
    results.append(generate(model, *inputs, capture=True))
    assert torch.equal(results[-1], generate(model, *inputs, capture=False))
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(-model.model.layers[1].mlp.up_proj.weight)
    results.append(generate(model, *inputs, capture=True))
    assert torch.equal(results[-1], generate(model, *inputs, capture=False))
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])


def test_a_generator_advances_as_in_eager_generation(generate: Callable[..., Tensor], device: str) -> None:
    model = build("llama", device)
    inputs = prompts(2, 5, device, padded=False)

    def two_calls(capture: bool) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(3)
        return [generate(model, *inputs, capture=capture, generator=generator, **SAMPLED) for _ in range(2)]

    assert all(torch.equal(*pair) for pair in zip(two_calls(True), two_calls(False), strict=True))


class Steps:
    """Counts the calls of prefills and decode steps, and those that run eagerly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.eager = 0, 0
        call = CapturedCall.__call__

        def count(captured: CapturedCall[Any], function: Any, x: Tensor) -> Any:
            if isinstance(function, partial):  # of a batch and not of the sampler
                self.calls, self.eager = self.calls + 1, self.eager + (captured._graph is None)
            return call(captured, function, x)

        monkeypatch.setattr(CapturedCall, "__call__", count)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_no_step_of_a_known_shape_runs_eagerly(
    name: str, generate: Callable[..., Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of another prompt that is padded to the same length, or of several if few tokens are padding."""
    monkeypatch.setattr(slots, "_MIN_CAPACITY", 256)
    model, steps = build(name, device), Steps(monkeypatch)
    for rows, length, new_tokens, eager in ((1, 21, 8, 2), (1, 32, 2, 0), (1, 17, 1, 0), (3, 20, 5, 2), (4, 30, 3, 1)):
        steps.calls = steps.eager = 0
        inputs = prompts(rows, length, device, padded=False)
        options = {"max_new_tokens": new_tokens}
        tokens = generate(model, *inputs, capture=True, **options)
        assert (steps.calls, steps.eager) == (new_tokens, eager), (rows, length, new_tokens)
        assert torch.equal(tokens, generate(model, *inputs, capture=False, **options))


def test_calls_run_eagerly_without_memory_for_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Callable[[], Any], pool: object) -> Any:
        raise torch.OutOfMemoryError

    x, calls = torch.zeros(2), []
    monkeypatch.undo()
    monkeypatch.setattr(graphs, "capture", fail)
    call = CapturedCall[int](x, GraphPool(torch.device("cpu")))
    monkeypatch.setattr(GraphPool, "id", None)
    for value in (1, 2):
        call.capture(lambda x: 0)
        assert call(lambda x: calls.append(x.tolist()) or len(calls), torch.full((2,), value)) == value
    assert calls == [[1, 1], [2, 2]]


def test_prefills_and_decode_steps_of_one_size(
    generate: Callable[..., Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own batch: one call needs both."""
    monkeypatch.setattr(slots, "CAPTURED_TOKENS", 64)
    model, steps = build("llama", device), Steps(monkeypatch)
    for eager in (2, 0):
        steps.eager = 0
        generate(model, *prompts(1, 50, device, padded=False), capture=True, max_new_tokens=9)
        assert steps.eager == eager
    assert [size[:2] for size in graphs._GRAPHS[model]._idle] == [(1, 64)] * 2


def test_lengths_of_captured_prefills() -> None:
    padded = sorted({slots._padded_length(tokens) for tokens in range(1, slots.CAPTURED_TOKENS + 1)})
    assert padded[:13] == [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320]
    assert padded[-4:] == [1280, 1536, 1792, 2048]
    assert all(tokens <= slots._padded_length(tokens) < 1.25 * tokens + 16 for tokens in range(1, 2049))


def test_long_and_many_prompts_are_prefilled_eagerly(
    generate: Callable[..., Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "CAPTURED_TOKENS", 64)
    model = build("llama", device)
    for rows, length, is_captured in ((1, 64, True), (1, 65, False), (2, 32, True), (2, 33, False), (17, 3, False)):
        release_decode_graphs(model)
        inputs = prompts(rows, length, device, padded=False)
        expected = generate(model, *inputs, capture=False, max_new_tokens=3)
        assert torch.equal(generate(model, *inputs, capture=True, max_new_tokens=3), expected)
        assert len(graphs._GRAPHS[model]._idle) == 1 + is_captured


def test_a_prefill_leaves_other_rows_unchanged(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests join a running batch: their prompts go through the same graphs, in groups and with padding."""
    monkeypatch.setattr(slots, "can_capture", lambda model: True)
    # Experts in fp64 are products in a loop over the experts, which a GPU cannot capture.
    model = build("qwen3_next", device, torch.float64 if device == "cpu" else torch.float32)
    texts = [torch.randint(VOCAB, (length,)).tolist() for length in (5, 40, 41, 3, 17, 30, 2)]
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": NO_END}
    alone = [next(model.generate_many([text], batch_size=1, **options)).tokens for text in texts]
    scheduler = Scheduler(model, batch_size=4, **options)
    found: dict[int, list[int]] = {}
    for text in texts:
        scheduler.add(text)
        for update in scheduler.step():
            found.setdefault(update.index, []).extend(update.tokens)
    while not scheduler.is_idle:
        for update in scheduler.step():
            found.setdefault(update.index, []).extend(update.tokens)
    assert [found[index] for index in range(len(texts))] == alone


class Interrupting:
    """A streamer that raises at the tenth token."""

    def __init__(self) -> None:
        self.count = 0

    def put(self, token_ids: Tensor) -> None:
        self.count += 1
        if self.count == 10:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


def test_a_model_stays_usable_after_an_interrupt(generate: Callable[..., Tensor], device: str) -> None:
    model = build("llama", device)
    inputs = prompts(2, 5, device, padded=True)
    expected = generate(model, *inputs, capture=True)
    with pytest.raises(KeyboardInterrupt):
        generate(model, *inputs, capture=True, streamer=Interrupting())
    assert torch.equal(generate(model, *inputs, capture=True), expected)


def test_graphs_are_kept_if_the_cache_of_the_caller_has_no_memory(
    generate: Callable[..., Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(*_: object) -> None:
        raise MemoryError

    model, cache = build("llama", device), build("llama", device).new_cache()
    monkeypatch.setattr(slots.Slots, "export", export)
    with pytest.raises(MemoryError):
        generate(model, *prompts(2, 5, device, padded=False), capture=True, past_key_values=cache, max_new_tokens=4)
    assert any(not size.prefills for size in graphs._GRAPHS[model]._idle)


def test_the_batch_that_was_given_back_last_is_dropped_last(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MAX_BATCHES", 2)
    model = build("llama", device)
    kept = graphs.ModelGraphs(model)
    first, again, second, third = (kept.take(model, graphs.BatchSize(rows, 16)) for rows in (1, 1, 2, 3))
    for batch in (first, second, again, third):
        kept.give_back(batch)
    assert list(kept._idle.values()) == [again, third]


def test_inference_mode_leaves_no_trace(generate: Callable[..., Tensor], device: str) -> None:
    model = build("llama", device)
    inputs = prompts(2, 5, device, padded=True)
    with torch.inference_mode():
        expected = generate(model, *inputs, capture=True)
    assert torch.equal(generate(model, *inputs, capture=True), expected)
    model(inputs[0], labels=inputs[0]).loss.backward()


def test_idle_graphs_are_bounded_and_released(generate: Callable[..., Tensor], device: str) -> None:
    model = build("llama", device)
    for rows in range(1, 20):
        generate(model, *prompts(rows, 3, device, padded=False), capture=True, max_new_tokens=4)
    assert 0 < len(graphs._GRAPHS[model]._idle) <= graphs._MAX_BATCHES
    release_decode_graphs(model)
    assert model not in graphs._GRAPHS
    generate(model, *prompts(2, 3, device, padded=False), capture=True, max_new_tokens=4)


def test_what_can_be_captured(device: str) -> None:
    model = build("llama", device)
    on_gpu = device != "cpu"
    assert can_capture(model) == on_gpu
    model.compile()
    assert can_capture(model) == on_gpu  # `generate` runs uncompiled
    if on_gpu:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert not can_capture(model)
    hook = model.model.layers[0].register_forward_hook(lambda *arguments: None)
    assert not can_capture(model)
    hook.remove()
    assert can_capture(model) == on_gpu

    class Other(nn.Linear):
        pass

    model.model.layers[0].mlp.up_proj = Other(48, 80, bias=False, device=device)
    assert not can_capture(model)
    mixture = build("mixtral", device)
    assert can_capture(mixture) == on_gpu
    assert not can_capture(mixture.double())  # plain torch groups the tokens by expert on the host


@pytest.mark.gpu
def test_memory_does_not_grow_with_calls() -> None:
    """That of live tensors and graphs: the allocator keeps freed memory of earlier tests.

    The calls have fewer shapes than batches are kept. If some were dropped, new ones would lie elsewhere, in parts of
    blocks that the allocator cannot free.
    """
    model = build("llama", "cuda")

    def reserved_after_calls() -> int:
        generator = torch.Generator().manual_seed(0)
        for _ in range(60):
            rows, length, new = (int(torch.randint(1, high, (), generator=generator)) for high in (5, 50, 40))
            model.generate(*prompts(rows, length, "cuda", padded=False), max_new_tokens=new, eos_token_id=NO_END)
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = reserved_after_calls()
    assert len(graphs._GRAPHS[model]._idle) < graphs._MAX_BATCHES
    for _ in range(3):
        assert reserved_after_calls() <= before

"""KV caches in fp8: every way of generation gives the same tokens, those of rounded keys and values."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import Scheduler, graphs, slots
from ligerzoo.generate import rows as rows_module
from ligerzoo.kernels.fp8 import FP8, to_storage
from ligerzoo.layers import Attention, KVCache, RecurrentLayerCache, SharedKeysAttention, TokenCache
from tests.generate.graphs import replace_graphs
from tests.generate.models import NO_END, VOCAB
from tests.generate.test_captured import BUILD, build

OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": NO_END}
LENGTHS = [7, 12, 9]


class RoundingCache(TokenCache):
    """Returns rounded keys and values in their own dtype: the specification of a cache in fp8."""

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return super().append(*(to_storage(x, FP8).to(x.dtype) for x in (keys, values)))


OTHERS = {"mistral", "gemma3_text", "mixtral", "phi3", "qwen3_moe"}
"""Models whose caches are those of others: of Gemma 2, with a window in some layers, or of Llama."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.thorough) if name in OTHERS else name for name in BUILD],
)
def model(request: pytest.FixtureRequest, device: str) -> Any:
    return build(request.param, device)


@pytest.fixture(scope="module")
def prompts(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (length,), generator=generator).to(device) for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[Tensor]) -> list[list[int]]:
    return [expected_tokens(model, prompt) for prompt in prompts]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Lets `generate` decode through graphs; on a CPU, they run eagerly."""
    monkeypatch.setattr(slots, "_MIN_CAPACITY", 16)
    if device == "cpu":
        for module in (rows_module, slots):
            monkeypatch.setattr(module, "can_capture", lambda model: True)
        replace_graphs(monkeypatch)


def rounding_cache(model: Any) -> KVCache:
    layers = model.new_cache().layers  # the states of recurrent layers are not rounded
    return KVCache(layer if isinstance(layer, RecurrentLayerCache) else RoundingCache() for layer in layers)


@torch.no_grad()
def expected_tokens(model: Any, prompt: Tensor, count: int = OPTIONS["max_new_tokens"]) -> list[int]:
    cache, ids = rounding_cache(model), prompt[None]
    tokens = []
    for _ in range(count):
        ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens


@torch.no_grad()
def test_logits_are_those_of_rounded_keys_and_values(model: Any, prompts: list[Tensor]) -> None:
    ids = torch.cat(prompts)[None]
    expected = model(ids, past_key_values=rounding_cache(model)).logits
    for capacity in (None, 40):
        for chunks in ([28], [1] * 28, [5, 1, 20, 2]):
            cache = model.new_cache(capacity, dtype=FP8)
            logits = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(chunks, 1)], 1)
            tolerance = 1e-9 if logits.dtype == torch.float64 else 0.1 * expected.abs().max().item()
            torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
            for layer, block in zip(cache.layers, model.model.layers, strict=True):
                is_recurrent = isinstance(layer, RecurrentLayerCache)
                if isinstance(block.mixer, SharedKeysAttention):  # it has none
                    assert layer._keys is None
                else:
                    assert layer._keys is not None
                    assert layer._keys.dtype == (logits.dtype if is_recurrent else FP8)


@pytest.mark.usefixtures("capture")
def test_captured_calls_generate_the_tokens(model: Any, prompts: list[Tensor], expected: list[list[int]]) -> None:
    for i in (0, 0, 1):  # calls find the graphs of those before, also for a longer prompt
        out = model.generate(prompts[i][None], cache_dtype=FP8, **OPTIONS)
        assert out[0, LENGTHS[i] :].tolist() == expected[i]
    if model.device.type == "cpu":  # elsewhere, products of batches round differently
        ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(p) for p in prompts], True, padding_side="left")
        assert model.generate(ids, mask, cache_dtype=FP8, **OPTIONS)[:, ids.shape[1] :].tolist() == expected
        results = model.generate_many(prompts, batch_size=2, cache_dtype=FP8, **OPTIONS)
        assert {result.index: result.tokens for result in results} == dict(enumerate(expected))


def test_eager_calls_generate_the_tokens(
    model: Any, prompts: list[Tensor], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "can_capture", lambda model: False)
    for prompt, tokens in zip(prompts, expected, strict=True):
        out = model.generate(prompt[None], cache_dtype=FP8, **OPTIONS)
        assert out[0, len(prompt) :].tolist() == tokens


@pytest.mark.usefixtures("capture")
@pytest.mark.parametrize("capacity", [None, 60])
def test_a_cache_of_the_caller_keeps_its_dtype(capacity: int | None, device: str) -> None:
    model = build("llama", device)
    ids = torch.randint(VOCAB, (1, 9), device=device)
    cache = model.new_cache(capacity, dtype=FP8)
    for _ in range(2):
        expected = [*ids[0].tolist(), *expected_tokens(model, ids[0], 20)]
        ids = model.generate(ids, past_key_values=cache, **{**OPTIONS, "max_new_tokens": 20})
        assert ids[0].tolist() == expected
        assert cache.length == ids.shape[1] - 1
        assert all(layer._keys is not None and layer._keys.dtype == FP8 for layer in cache.layers)


@pytest.mark.usefixtures("capture")
def test_graphs_of_both_dtypes_are_kept(device: str) -> None:
    model = build("llama", device)
    ids = torch.randint(VOCAB, (1, 9), device=device)
    for dtype in (None, FP8, None):
        model.generate(ids, cache_dtype=dtype, **{**OPTIONS, "max_new_tokens": 4})
    idle = graphs._GRAPHS[model]._idle
    assert [batch.cache.dtype for batch in idle.values()] == [FP8, FP8, None, None]  # of prefills and of decode steps
    fp8, plain = [batch.cache.nbytes for batch in idle.values()][1::2]
    assert plain == fp8 * model.dtype.itemsize


def test_attention_probabilities_are_those_of_rounded_keys(device: str) -> None:
    model = build("llama", device)
    ids = torch.randint(VOCAB, (1, 9), device=device)
    for capacity in (None, 20):
        got, expected = (
            model(ids, past_key_values=cache, output_attentions=True).attentions
            for cache in (model.new_cache(capacity, dtype=FP8), rounding_cache(model))
        )
        assert len(got) == sum(isinstance(module, Attention) for module in model.modules())
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x[..., :9], y)
            assert not x[..., 9:].any()  # slots of a static cache that are not written yet


def test_what_does_not_fit_is_refused() -> None:
    model, ids = build("llama", "cpu"), torch.ones(1, 3).long()
    for options, message in (
        ({"cache_dtype": torch.bfloat16}, "cache_dtype: invalid value.*bfloat16.*float8_e4m3fn, or None"),
        ({"cache_dtype": "fp8"}, "cache_dtype: invalid value.*'fp8'.*float8_e4m3fn, or None"),
        ({"cache_dtype": FP8, "use_cache": False}, "cache_dtype.*use_cache=False"),
        ({"cache_dtype": FP8, "past_key_values": model.new_cache()}, r"cache_dtype.*Pass .*new_cache\(dtype=torch"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype.*Use cache_dtype=torch.float8_e4m3fn"),
    ):  # fmt: skip
        with pytest.raises(LigerzooError, match=f"(?s){message}"):
            model.generate(ids, **OPTIONS, **options)
    with pytest.raises(LigerzooError, match="cache_dtype: invalid value"):
        Scheduler(model, batch_size=2, cache_dtype=torch.float16)
    with pytest.raises(LigerzooError, match=r"cache_dtype.*Pass it to Scheduler"):
        Scheduler(model, batch_size=2, max_new_tokens=3).add([1, 2], cache_dtype=FP8)

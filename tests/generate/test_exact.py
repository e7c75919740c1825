"""Exact mode: logits and log-probabilities have the bits of one exact forward of the whole text."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import Scheduler, slots
from ligerzoo.layers.exactness import obstacles
from ligerzoo.losses import model_token_logps
from ligerzoo.models import (
    Ernie4_5Moe,
    Ernie4_5MoeConfig,
    Gemma2,
    Gemma2Config,
    Gemma3Text,
    Gemma3TextConfig,
    GptOss,
    GptOssConfig,
    Llama,
    LlamaConfig,
    MiniMaxM2,
    MiniMaxM2Config,
    Mistral,
    MistralConfig,
    Mixtral,
    MixtralConfig,
    Qwen2Moe,
    Qwen2MoeConfig,
    Qwen3,
    Qwen3Config,
    Qwen3Moe,
    Qwen3MoeConfig,
)
from tests.generate.models import TINY

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
LARGE = {  # enough features that cuBLAS splits the sums of few rows
    "vocab_size": 32000, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 2,
    "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL_HEADS = {**LARGE, "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True}
MIXTURE = {**LARGE, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
MODELS = {
    "llama": lambda **kwargs: Llama(LlamaConfig(**SMALL_HEADS), **kwargs),
    "qwen3": lambda **kwargs: Qwen3(Qwen3Config(**LARGE), **kwargs),
    "mistral": lambda **kwargs: Mistral(MistralConfig(**LARGE, sliding_window=4096), **kwargs),
    "window": lambda **kwargs: Mistral(MistralConfig(**LARGE, sliding_window=100), **kwargs),
    "gpt_oss": lambda **kwargs: GptOss(GptOssConfig(vocab_size=32000, num_hidden_layers=2, num_experts=32), **kwargs),
    "gemma3": lambda **kwargs: Gemma3Text(
        Gemma3TextConfig(**{**LARGE, "head_dim": 256, "num_hidden_layers": 6, "sliding_window": 200}), **kwargs
    ),
    "mixtral": lambda **kwargs: Mixtral(MixtralConfig(**MIXTURE), **kwargs),
    "qwen2_moe": lambda **kwargs: Qwen2Moe(Qwen2MoeConfig(**MIXTURE, num_experts=60, num_experts_per_tok=4), **kwargs),
    "qwen3_moe": lambda **kwargs: Qwen3Moe(Qwen3MoeConfig(**MIXTURE), **kwargs),
}


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return MODELS[request.param](dtype=torch.bfloat16, device="cuda").eval()


def whole(model: Any, text: Tensor) -> Tensor:
    """The logits of one exact forward of the text."""
    with torch.no_grad():
        return model(text[None], exact=True).logits[0]  # type: ignore[no-any-return]


class Scores:
    """A `logits_processor` that stores what it receives."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        self.steps.append(scores.clone())
        return scores


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("seed", range(4))
def test_logits_and_logps_are_those_of_a_whole_forward(model: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(slots, "PREFILL_TOKENS", draw.choice([300, 16384]))
    lengths = [
        draw.choice([1, 2, draw.randrange(3, 70), draw.randrange(70, 1500)]) for _ in range(draw.randrange(1, 20))
    ]
    ids = torch.randint(1, 32000, (len(lengths), max(lengths)), device="cuda")
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    if draw.random() < 0.3:
        ids, mask = ids.flip(1), mask.flip(1)
    scores = Scores()
    out = model.generate(
        ids, mask, max_new_tokens=7, exact=True, do_sample=True, eos_token_id=[], logits_processor=[scores],
        return_dict_in_generate=True,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        text = torch.cat([ids[row][mask[row] == 1], out.sequences[row, ids.shape[1] :]])
        logits = whole(model, text)
        for step, got in enumerate(scores.steps):
            assert torch.equal(got[row], logits[length - 1 + step].float()), (length, step)
        trained = model_token_logps(model, text[None], text[None], exact=True)[0, length - 1 : -1]
        assert torch.equal(out.logps[row], trained.detach())


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("capacity", [None, 2000])
def test_chunks(model: Any, capacity: int | None) -> None:
    draw = random.Random(0)
    text = torch.randint(1, 32000, (1900,), device="cuda")
    expected = whole(model, text)
    cache, start, parts = model.new_cache(capacity, exact=True), 0, []
    while start < len(text):
        end = min(len(text), start + draw.choice([1, 2, 5, 31, 64, 65, 200, 700]))
        with torch.no_grad():
            parts.append(model(text[None, start:end], past_key_values=cache).logits[0])
        start = end
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.gpu
@on_hopper
def test_a_gradient_does_not_change_the_bits(model: Any) -> None:
    text = torch.randint(1, 32000, (600,), device="cuda")
    expected = whole(model, text)
    for length in (1, 2, 40, 64, 65, 300, 600):
        assert torch.equal(model(text[None, :length], exact=True).logits[0], expected[:length])


@pytest.mark.gpu
@on_hopper
def test_speculative_decoding_and_queues(model: Any) -> None:
    torch.manual_seed(0)
    prompts = [torch.randint(1, 32000, (n,), device="cuda") for n in (40, 3, 700, 3, 90)]
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": [], "exact": True}
    alone = [model.generate(prompt[None], **options)[0, len(prompt) :].tolist() for prompt in prompts]
    for result in model.generate_many([prompt.tolist() for prompt in prompts], batch_size=2, **options):
        assert list(result.tokens) == alone[result.index]
    looked_up = model.generate(prompts[0][None], prompt_lookup_num_tokens=4, **options)
    assert looked_up[0, len(prompts[0]) :].tolist() == alone[0]


def test_other_models_are_refused() -> None:
    model = Llama(LlamaConfig(**TINY))
    message = r"embed_tokens.weight is on cpu; expected a Hopper GPU"
    with pytest.raises(ValueError, match=f"^exact cache: {message}"):
        model.new_cache(exact=True)
    with pytest.raises(LigerzooError, match=f"exact.*{message}"):
        model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=3, exact=True)
    with pytest.raises(LigerzooError, match=f"exact.*{message}"):
        Scheduler(model, batch_size=2, exact=True)


def refusals(model: Any) -> list[tuple[str, str, str]]:
    """What prevents exact results, except for the device."""
    return [obstacle for obstacle in obstacles(model) if "Hopper" not in obstacle[1]]


REFUSED: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "Qwen2-MoE": (lambda **sizes: Qwen2Moe(Qwen2MoeConfig(**sizes), device="meta"), []),
    "Qwen3-MoE": (lambda **sizes: Qwen3Moe(Qwen3MoeConfig(**sizes), device="meta"), []),
    "gpt-oss": (lambda **sizes: GptOss(GptOssConfig(**sizes, num_experts=4), device="meta"), []),
    "Gemma 3": (lambda **sizes: Gemma3Text(Gemma3TextConfig(**{**sizes, "head_dim": 256}), device="meta"), []),
    "Gemma 2": (
        lambda **sizes: Gemma2(Gemma2Config(**{**sizes, "head_dim": 256}), device="meta"),
        [(name, "has a soft cap") for name in ("model.layers.0.self_attn", "model.layers.1.self_attn", "lm_head")],
    ),
    "jitter": (
        lambda **sizes: Mixtral(MixtralConfig(**sizes, router_jitter_noise=0.1), device="meta"),
        [("model.layers.0.mlp.jitter_noise", "is 0.1"), ("model.layers.1.mlp.jitter_noise", "is 0.1")],
    ),
    "one expert": (
        lambda **sizes: Mixtral(MixtralConfig(**sizes, num_experts=1, num_experts_per_tok=1), device="meta"),
        [("model.layers.0.mlp.experts", "is one expert"), ("model.layers.1.mlp.experts", "is one expert")],
    ),
    "sigmoid router": (
        lambda **sizes: MiniMaxM2(MiniMaxM2Config(**sizes), device="meta"),
        [("model.layers.0.mlp.gate", "is a SigmoidRouter"), ("model.layers.1.mlp.gate", "is a SigmoidRouter")],
    ),
    "balancing bias": (
        lambda **sizes: Ernie4_5Moe(Ernie4_5MoeConfig(**sizes), device="meta"),
        [("model.layers.1.mlp.gate", "is a BiasedRouter")],
    ),
}


@pytest.mark.parametrize("make, expected", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_by_name(make: Any, expected: list[tuple[str, str]]) -> None:
    model = make(**{**TINY, "head_dim": 64, "num_key_value_heads": 2, "num_hidden_layers": 2}).bfloat16()
    assert [(name, got) for name, _, got in refusals(model)] == expected


def test_the_option_is_checked() -> None:
    model = Llama(LlamaConfig(**TINY))
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(LigerzooError, match="exact"):
        model.generate(ids, max_new_tokens=3, exact="yes")
    with pytest.raises(LigerzooError, match=r"exact.*Pass it to Scheduler"):
        Scheduler(model, batch_size=2, max_new_tokens=3).add([1, 2], exact=True)

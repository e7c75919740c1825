"""Rows of a KV cache of fixed size: each has the logits of its sequence alone, whatever the other rows do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import slots as slots_module
from ligerzoo.generate.slots import Slots, max_length, prefill_groups
from ligerzoo.models import (
    DeepseekV3,
    DeepseekV3Config,
    Gemma2,
    Gemma2Config,
    Gemma3Text,
    Gemma3TextConfig,
    Llama,
    LlamaConfig,
    Mistral,
    MistralConfig,
    Qwen3Moe,
    Qwen3MoeConfig,
    Qwen3Next,
    Qwen3NextConfig,
)
from tests.generate.models import HYBRID, TINY, VOCAB

SIZES: dict[str, Any] = {**TINY, "num_key_value_heads": 2, "head_dim": 16}
DEEPSEEK: dict[str, Any] = {
    **TINY, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_experts": 8,
    "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
BUILD: dict[str, Callable[[], nn.Module]] = {
    "deepseek_v3": lambda: DeepseekV3(DeepseekV3Config(**DEEPSEEK)),
    "llama": lambda: Llama(LlamaConfig(**SIZES)),
    "mistral": lambda: Mistral(MistralConfig(**SIZES, sliding_window=7)),
    "gemma2": lambda: Gemma2(Gemma2Config(**SIZES, sliding_window=7)),
    "qwen3_moe": lambda: Qwen3Moe(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
    "qwen3_next": lambda: Qwen3Next(Qwen3NextConfig(**SIZES, **HYBRID)),
}


def build(name: str, device: str) -> Any:
    torch.manual_seed(0)
    model = BUILD[name]()
    model.init_weights(0.2)  # type: ignore[operator]
    return model.to(device, torch.float64).eval()


@pytest.fixture
def model(device: str) -> Any:
    return build("llama", device)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, so that caches grow and shrink, and prompts are prefilled in chunks. No graphs."""
    for name, value in {"_MIN_CAPACITY": 8, "_SPARSE_STEPS": 2, "PREFILL_TOKENS": 24, "_MERGED_TOKENS": 12}.items():
        monkeypatch.setattr(slots_module, name, value)
    monkeypatch.setattr(slots_module, "can_capture", lambda model: False)


class Rows:
    """Slots and the tokens of each row. Compares all logits with those of each sequence alone."""

    def __init__(self, model: Any, rows: int, generator: torch.Generator) -> None:
        self.model, self.slots, self.generator = model, Slots(model, rows), generator
        self.tokens: dict[int, Tensor] = {}

    def draw(self, *shape: int) -> Tensor:
        return torch.randint(VOCAB, shape, generator=self.generator)

    def check(self, row: int, logits: Tensor) -> None:
        alone = self.model(self.tokens[row][None].to(self.model.device), logits_to_keep=1).logits[0, -1].float()
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)

    def admit(self, prompts: dict[int, Tensor]) -> None:
        self.tokens |= prompts
        logits = self.slots.admit(list(prompts), list(prompts.values()))
        for row, own in zip(prompts, logits, strict=True):
            self.check(row, own)

    def decode(self) -> None:
        newest = self.draw(self.slots.rows, 1)
        logits = self.slots.decode(newest.to(self.model.device))
        assert logits.isfinite().all()
        for row in self.tokens:
            self.tokens[row] = torch.cat([self.tokens[row], newest[row]])
            self.check(row, logits[row])

    def decode_several(self, count: int, dropped: int) -> None:
        """Decodes `count` tokens at once, and then removes the last ones."""
        newest = self.draw(self.slots.rows, count)
        logits = self.slots.decode(newest.to(self.model.device)).view(self.slots.rows, count, -1)
        for row, before in self.tokens.items():
            whole = torch.cat([before, newest[row]])[None].to(self.model.device)
            alone = self.model(whole, logits_to_keep=count).logits[0].float()
            torch.testing.assert_close(logits[row], alone, rtol=0, atol=1e-5)
            self.tokens[row] = whole[0, : len(before) + count - dropped].cpu()
            self.slots.remove_last(row, dropped)

    def release(self, rows: list[int]) -> None:
        self.slots.release(rows)
        for row in rows:
            del self.tokens[row]

    @property
    def shape(self) -> tuple[int, int]:
        assert self.slots._batch is not None
        return self.slots._batch.rows, self.slots._batch.capacity


@pytest.mark.long
@pytest.mark.parametrize("name", list(BUILD))
@pytest.mark.parametrize("rows", [1, 3, 8])
@torch.no_grad()
def test_rows_are_as_if_alone(name: str, rows: int, device: str) -> None:
    """Random admissions, releases and steps, with prompts of one token and of several chunks."""
    generator = torch.Generator().manual_seed(rows)
    state = Rows(build(name, device), rows, generator)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    shapes = set()
    for _ in range(12):
        empty = [row for row in range(rows) if row not in state.tokens]
        if empty and (number(0, 2) or not state.tokens):
            state.admit({row: state.draw(number(1, 30)) for row in empty[: number(1, len(empty) + 1)]})
        for _ in range(number(1, 5)):
            state.decode()
        shapes.add(state.shape)
        state.release([row for row in state.tokens if not number(0, 3)][: len(state.tokens) - 1])
    assert len(shapes) > 1


@pytest.mark.parametrize("name", [name for name in BUILD if name != "qwen3_next"])
@torch.no_grad()
def test_rows_decode_several_tokens_at_once(name: str, device: str) -> None:
    """As the verification of drafts does: each row masks from its own length on, whatever was removed before."""
    state = Rows(build(name, device), 4, torch.Generator().manual_seed(0))
    state.admit({row: state.draw(length) for row, length in ((3, 2), (0, 17), (1, 9))})  # not in the order of the cache
    for count, dropped in ((5, 0), (5, 3), (2, 1), (9, 9), (5, 4)):
        state.decode_several(count, dropped)
        state.decode()
    state.release([0])
    state.decode_several(4, 2)
    state.admit({0: state.draw(21), 2: state.draw(1)})
    state.decode_several(6, 5)
    state.decode()


@torch.no_grad()
def test_rows_of_recurrent_layers_keep_their_tokens(device: str) -> None:
    state = Rows(build("qwen3_next", device), 1, torch.Generator().manual_seed(0))
    state.admit({0: state.draw(3)})
    with pytest.raises(ValueError, match=r"^remove_last: the model has recurrent layers.*must be removed again$"):
        state.decode_several(2, 1)


@torch.no_grad()
def test_the_cache_grows_and_loses_rows(model: Any) -> None:
    state = Rows(model, 6, torch.Generator().manual_seed(0))
    state.admit({4: state.draw(3)})
    assert state.shape == (1, 8)
    state.admit({1: state.draw(7), 2: state.draw(2)})
    assert state.shape == (4, 8)
    for _ in range(2):
        state.decode()
    assert state.shape == (4, 16)
    state.admit({row: state.draw(4) for row in (0, 3, 5)})
    assert state.shape == (6, 16)
    state.release([0, 1, 2, 3])
    shapes = []
    for _ in range(6):
        state.decode()
        shapes.append(state.shape[0])
    assert shapes == [6, 6, 2, 2, 2, 2]
    state.slots.close()
    state.tokens.clear()
    state.admit({0: state.draw(3)})
    assert state.shape == (1, 8)


@torch.no_grad()
def test_empty_rows_never_run_out_of_room(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "_SPARSE_STEPS", 100)
    state = Rows(model, 2, torch.Generator().manual_seed(0))
    state.admit({0: state.draw(1), 1: state.draw(20)})
    state.release([1])
    for _ in range(14):
        state.decode()
    state.admit({1: state.draw(2)})
    for _ in range(14):
        state.decode()
    assert state.shape == (2, 32)


@torch.no_grad()
def test_equal_prompts_are_prefilled_once(model: Any) -> None:
    state = Rows(model, 5, torch.Generator().manual_seed(0))
    one, other = state.draw(9), state.draw(9)
    read = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal read
        read += inputs[0].numel()

    handle = model.model.embed_tokens.register_forward_pre_hook(count)
    state.slots.admit([3, 0, 1, 4], [one, other, one.clone(), one[:8]])
    handle.remove()
    assert read == 9 + 9 + 8
    state.tokens = {3: one, 0: other, 1: one, 4: one[:8]}
    state.decode()


@torch.no_grad()
def test_prefill_is_bounded(model: Any) -> None:
    state = Rows(model, 4, torch.Generator().manual_seed(0))
    sizes: list[int] = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    state.slots.admit(range(4), [state.draw(length) for length in (50, 1, 49, 11)])
    handle.remove()
    assert max(sizes) == slots_module.PREFILL_TOKENS
    assert sum(sizes) == 111


def test_groups_have_similar_lengths() -> None:
    lengths = dict(enumerate([3, 9, 8, 30, 2, 9, 6, 5]))
    assert prefill_groups(lengths) == [[3], [1, 5], [2, 6], [7, 0], [4]]
    assert prefill_groups({0: 5}) == [[0]]


def test_sequences_end_where_rows_would_affect_each_other() -> None:
    assert max_length(Llama(LlamaConfig(**TINY))) is None
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert max_length(Llama(LlamaConfig(**TINY, rope_scaling=dynamic))) == TINY["max_position_embeddings"]


@torch.no_grad()
def test_capacity_ends_there_too(device: str) -> None:
    torch.manual_seed(0)
    sizes = {**TINY, "max_position_embeddings": 21, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    model = Llama(LlamaConfig(**sizes)).to(device, torch.float64)
    state = Rows(model, 2, torch.Generator().manual_seed(0))
    state.admit({0: state.draw(2), 1: state.draw(12)})
    state.release([0])
    for _ in range(9):
        state.decode()
    assert state.shape == (1, 21)


def test_other_models_are_refused() -> None:
    bidirectional = Gemma3Text(Gemma3TextConfig(**SIZES, use_bidirectional_attention=True))
    for model in (nn.Linear(2, 2), bidirectional):
        name = type(model).__name__
        with pytest.raises(LigerzooError, match=f"{name}: the model cannot decode with a KV cache of fixed size"):
            Slots(model, 2)

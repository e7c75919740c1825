"""Memory of `generate`: what a call needs, and that calls leave nothing behind, whatever ends them."""

import gc
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.generate import graphs, slots
from ligerzoo.generate import rows as rows_module
from ligerzoo.generate.graphs import StaticBatch
from ligerzoo.models import Llama, LlamaConfig
from tests.generate.graphs import replace_graphs
from tests.generate.models import NO_END, TINY, VOCAB

SHAPES = [(rows, 1 + 7 * rows % 40) for rows in range(1, 19)]
"""More shapes than graphs are kept, so that these calls determine which ones are."""


class FailingStep:
    """Makes the n-th decode step fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.remaining = -1
        step: Callable[..., Tensor] = StaticBatch.decode

        def failing(*arguments: Any) -> Tensor:
            self.remaining -= 1
            logits = step(*arguments)
            if self.remaining == 0:
                raise KeyboardInterrupt
            return logits

        monkeypatch.setattr(StaticBatch, "decode", failing)


class FailingStreamer:
    """A streamer that fails at the n-th call."""

    def __init__(self, n: int) -> None:
        self.remaining = n

    def put(self, tokens: Tensor) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise OSError("broken pipe")

    def end(self) -> None:
        pass


def build(device: str) -> Llama:
    model = Llama(LlamaConfig(**{**TINY, "num_key_value_heads": 2, "head_dim": 16}))
    model.init_weights(0.2)
    return model.to(device, torch.float64 if device == "cpu" else torch.bfloat16).eval()


def kept_bytes(model: Llama, device: str) -> int:
    """Bytes of all tensors, on a CPU without parameters, after calls that determine which graphs are kept."""
    model.release_decode_graphs()
    for rows, length in SHAPES:
        ids = torch.arange(rows * length, device=device).view(rows, length) % VOCAB
        model.generate(ids, max_new_tokens=6, eos_token_id=NO_END)
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    plain = (x for x in gc.get_objects() if type(x) is Tensor and x.device.type == "cpu")
    storages = [x.untyped_storage() for x in plain if not torch._is_functional_tensor(x)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def random_call(model: Llama, step: FailingStep, seed: int, device: str) -> str:
    """A call with random shapes and options, one in four of which fails. Returns its outcome."""
    drawn = random.Random(seed)
    rows, length = drawn.randint(1, 12), drawn.choice([1, 5, 20, 90])
    ids = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)
    mask = torch.ones_like(ids)
    mask[drawn.randrange(rows), : drawn.randrange(length)] = 0
    options: dict[str, Any] = drawn.choice(
        [
            {},
            {"do_sample": True, "top_k": 7},
            {"do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True},
            {"eos_token_id": list(range(0, VOCAB, 9)), "repetition_penalty": 1.2},
        ]
    )
    end = drawn.choice(["", "", "step", "streamer"])
    step.remaining = drawn.randint(1, 3) if end == "step" else -1
    if end == "streamer":
        options["streamer"] = FailingStreamer(drawn.randint(1, 6))
    arguments: dict[str, Any] = {"eos_token_id": NO_END, "pad_token_id": 0, "max_new_tokens": drawn.randint(3, 12)}
    try:
        model.generate(ids, mask, **arguments | options)
    except (KeyboardInterrupt, OSError) as error:
        return type(error).__name__
    finally:
        step.remaining = -1
    return "finished"


def test_random_calls_leave_no_memory_behind(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(slots, "_MIN_CAPACITY", 16)
    monkeypatch.setattr(slots, "_SPARSE_STEPS", 3)
    if device == "cpu":
        replace_graphs(monkeypatch)
        for module in (rows_module, slots):
            monkeypatch.setattr(module, "can_capture", lambda model: True)
    model, step = build(device), FailingStep(monkeypatch)
    calls = 1000 if device == "cuda" else 40
    ids = torch.arange(8, device=device).view(2, 4)
    expected = model.generate(ids, max_new_tokens=9, eos_token_id=NO_END)
    outcomes = [random_call(model, step, seed, device) for seed in range(calls // 2)]
    kept = kept_bytes(model, device)
    used = used_gpu_bytes(device)
    outcomes += [random_call(model, step, seed, device) for seed in range(calls // 2, calls)]
    assert set(outcomes) == {"finished", "KeyboardInterrupt", "OSError"}
    assert kept_bytes(model, device) == kept
    assert used_gpu_bytes(device) - used <= 32 * 2**20  # what drivers keep of hundreds of graphs that are gone
    assert torch.equal(model.generate(ids, max_new_tokens=9, eos_token_id=NO_END), expected)
    assert graphs._GRAPHS[model]._idle  # graphs were captured


def used_gpu_bytes(device: str) -> int:
    """Bytes of the GPU that are in use, those outside of torch included; 0 on a CPU, and if other processes test."""
    if device == "cpu" or int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
def test_a_call_needs_weights_caches_and_the_pool_of_its_graphs(rows: int) -> None:
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    x = x @ x  # cuBLAS's workspace stays
    gc.collect()
    before = torch.cuda.memory_allocated()
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4,
    )  # fmt: skip
    model = Llama(config, device="cuda", dtype=torch.bfloat16).eval()
    weights = sum(weight.nbytes for weight in model.parameters())
    ids = torch.arange(rows * 4, device="cuda").view(rows, 4)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model.generate(ids, max_new_tokens=300, eos_token_id=NO_END)
    batches = list(graphs._GRAPHS[model]._idle.values())
    assert len(batches) == 2  # one for prefills
    segments = torch.cuda.memory_snapshot()
    pools = {batch.pool.id for batch in batches if batch.pool is not None}
    pool = sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] in pools)
    assert pool > 0
    needed = weights + sum(batch.cache.nbytes for batch in batches) + pool
    assert torch.cuda.max_memory_allocated() - before <= 1.01 * needed

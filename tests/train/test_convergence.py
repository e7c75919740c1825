"""The recipe and a plain loop with transformers: the same losses over 200 steps from the same weights and data."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo import Tokenizer
from ligerzoo.models import (
    Gemma2,
    Gemma2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    Phi3,
    Phi3Config,
    Qwen3,
    Qwen3Config,
)  # fmt: skip
from ligerzoo.train.data import PackedBatches, open_data
from ligerzoo.train.log import read_log
from ligerzoo.train.optimizers import schedule
from ligerzoo.train.recipes import sft
from tests.train.tiny_run import SIZES, options, write_tokenizer

STEPS = 200
SEQ_LENGTH, BATCH_SIZE, LR, CLIP = 64, 2, 1e-3, 1.0

MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (Llama, LlamaConfig, {}),
    "qwen3": (Qwen3, Qwen3Config, {"head_dim": 8}),
    "mixtral": (Mixtral, MixtralConfig, {"num_experts": 4, "output_router_logits": False}),
    "gemma2": (Gemma2, Gemma2Config, {"head_dim": 8, "sliding_window": 16}),
    "phi3": (Phi3, Phi3Config, {"pad_token_id": 0}),
}


def segments(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the segments of packed rows as rows that are padded on the right."""
    rows: dict[str, list[Tensor]] = {"input_ids": [], "labels": []}
    for ids, labels, positions in zip(*(inputs[n] for n in ("input_ids", "labels", "position_ids")), strict=True):
        starts = [i for i, p in enumerate(positions.tolist()) if i == 0 or p != positions[i - 1] + 1]
        for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            if (labels[begin:end] != -100).any():
                rows["input_ids"].append(ids[begin:end])
                rows["labels"].append(labels[begin:end])
    pad = torch.nn.utils.rnn.pad_sequence
    masks = pad([torch.ones_like(row) for row in rows["input_ids"]], batch_first=True)
    ids = pad(rows["input_ids"], batch_first=True)
    return {"input_ids": ids, "attention_mask": masks, "labels": pad(rows["labels"], True, padding_value=-100)}


def transformers_losses(
    checkpoint: Path,
    data: Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "eager",
    is_reversed: bool = False,
    parts: int = 1,
) -> list[float]:
    """Trains with transformers in a plain loop, each segment in a row by itself.

    With `is_reversed`, the rows of a batch are in the opposite order, and with `parts` they are several micro-batches:
    sums are rounded differently.
    """
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, attn_implementation=attention
    ).train()
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    stream = open_data((str(data),), "auto", tokenizer, seq_length=SEQ_LENGTH, seed=0, epochs=None)
    batches = iter(PackedBatches(stream, batch_size=BATCH_SIZE, seq_length=SEQ_LENGTH, pad_token_id=257))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)  # the default of Trainer
    factor = schedule("cosine", STEPS, warmup_steps=6)
    losses = []
    for step in range(STEPS):
        rows = segments(next(batches).inputs)
        if is_reversed:
            rows = {name: tensor.flip(0) for name, tensor in rows.items()}
        labels = F.pad(rows.pop("labels")[:, 1:], (0, 1), value=-100)
        total = 0.0
        for part in torch.arange(len(labels)).chunk(parts):
            logits = model(**{name: tensor[part] for name, tensor in rows.items()}).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[part].flatten(), reduction="sum")
            loss = loss / (labels != -100).sum()
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LR * factor(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def recipe_losses(name: str, data: Path, directory: Path, **changes: Any) -> list[float]:
    """Writes a new checkpoint to `directory/tiny`, and trains it with the recipe."""
    model_class, config_class, more = MODELS[name]
    write_tokenizer(directory / "tiny")
    model_class(config_class(**{**SIZES, "initializer_range": 0.1, **more})).save_pretrained(directory / "tiny")
    given = options(
        directory / "tiny", data, directory / "run", seq_length=SEQ_LENGTH, batch_size=BATCH_SIZE, lr=LR,
        max_steps=STEPS, warmup=6 / STEPS, **changes,
    )  # fmt: skip
    assert sft.main(sft.SFTRunOptions(**given)) == 0
    return [entry["loss"] for entry in read_log(directory / "run" / "log.jsonl")]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_losses_agree_with_transformers(name: str, data: Path, tmp_path: Path) -> None:
    losses = recipe_losses(name, data, tmp_path)
    expected = transformers_losses(tmp_path / "tiny", data)
    assert len(losses) == len(expected) == STEPS
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert worst < 1e-4
    assert losses[-1] < 0.5 * losses[0]


RUNS: tuple[dict[str, Any], ...] = (
    {}, {"attention": "sdpa"}, {"is_reversed": True}, {"parts": 2}, {"is_reversed": True, "parts": 2},
)  # fmt: skip
"""Runs of transformers that round differently, and are equal in exact arithmetic."""


def distance(a: list[float], b: list[float]) -> float:
    """Returns the mean absolute difference of the losses of two runs."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / STEPS


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "llama")]
)
def test_losses_in_bfloat16_are_within_the_spread_of_transformers(name: str, data: Path, tmp_path: Path) -> None:
    """Weights, gradients and moments in bf16, rounded to the nearest.

    Rounding to 8 bits makes equal runs diverge, so losses cannot agree step by step. The spread is the largest distance
    between two of five runs of transformers: eager, with sdpa attention (which Gemma 2 lacks), with the rows of each
    batch in the opposite order, with two micro-batches, and with both. Weights, data, optimizer and schedule are the
    same. The mean distance of the recipe from these runs may not be larger, and neither may the difference of its mean
    loss.
    """
    losses = recipe_losses(name, data, tmp_path, dtype="bfloat16", stochastic_rounding="off")
    runs = [
        transformers_losses(tmp_path / "tiny", data, dtype=torch.bfloat16, **run)
        for run in RUNS
        if name != "gemma2" or "attention" not in run
    ]
    spread = max(distance(a, b) for a, b in itertools.combinations(runs, 2))
    assert 0 < spread < 0.02
    assert sum(distance(losses, run) for run in runs) / len(runs) <= spread
    assert abs(sum(losses) - sum(map(sum, runs)) / len(runs)) / STEPS <= spread
    assert losses[-1] < 0.5 * losses[0]

"""The recipe and a plain loop with transformers: the same losses over 200 steps from the same weights and data."""

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


def transformers_losses(checkpoint: Path, data: Path) -> list[float]:
    """Trains with transformers in a plain loop, each segment in a row by itself."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).train()
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    stream = open_data((str(data),), "auto", tokenizer, seq_length=SEQ_LENGTH, seed=0, epochs=None)
    batches = iter(PackedBatches(stream, batch_size=BATCH_SIZE, seq_length=SEQ_LENGTH, pad_token_id=257))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    factor = schedule("cosine", STEPS, warmup_steps=6)
    losses = []
    for step in range(STEPS):
        rows = segments(next(batches).inputs)
        labels = F.pad(rows.pop("labels")[:, 1:], (0, 1), value=-100)
        loss = F.cross_entropy(model(**rows).logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LR * factor(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_losses_agree_with_transformers(name: str, data: Path, tmp_path: Path) -> None:
    model_class, config_class, changes = MODELS[name]
    write_tokenizer(tmp_path / "tiny")
    model_class(config_class(**{**SIZES, "initializer_range": 0.1, **changes})).save_pretrained(tmp_path / "tiny")
    given = options(
        tmp_path / "tiny", data, tmp_path / "run", seq_length=SEQ_LENGTH, batch_size=BATCH_SIZE, lr=LR,
        max_steps=STEPS, warmup=6 / STEPS,
    )  # fmt: skip
    assert sft.main(sft.Options(**given)) == 0
    losses = [entry["loss"] for entry in read_log(tmp_path / "run" / "log.jsonl")]
    expected = transformers_losses(tmp_path / "tiny", data)
    assert len(losses) == len(expected) == STEPS
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert worst < 1e-4
    assert losses[-1] < 0.5 * losses[0]

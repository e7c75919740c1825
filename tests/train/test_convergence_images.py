"""The recipe with images and a plain loop with transformers: the same losses over 200 steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.train.data import PackedBatches, Sample, open_data
from ligerzoo.train.log import read_log
from ligerzoo.train.optimizers import schedule
from ligerzoo.train.recipes import sft
from ligerzoo.vision.processor import Processor
from tests.train.tiny_run import options
from tests.train.tiny_vision import write_conversations, write_vision_checkpoint

STEPS = 200
SEQ_LENGTH, BATCH_SIZE, LR, CLIP = 160, 1, 1e-3, 1.0


def padded(samples: list[Sample]) -> dict[str, Tensor]:
    """Returns samples as rows that are padded on the right."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [torch.tensor(sample.input_ids) for sample in samples]
    labels = [torch.tensor(sample.labels) for sample in samples]
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad(labels, True, padding_value=-100),
    }


def transformers_losses(checkpoint: Path, data: Path) -> list[float]:
    """Trains with transformers in a plain loop, each conversation in a row by itself."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).train()
    processor = Processor.from_pretrained(checkpoint)
    stream = open_data((str(data),), "auto", processor, seq_length=SEQ_LENGTH, seed=0, epochs=None)
    assert stream.images is not None
    batches = iter(
        PackedBatches(stream, batch_size=BATCH_SIZE, seq_length=SEQ_LENGTH, pad_token_id=0, read_images=False)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    factor = schedule("cosine", STEPS, warmup_steps=6)
    losses = []
    for step in range(STEPS):
        samples: list[Any] = [sample for row in next(batches).rows for sample in row]
        rows = padded(samples)
        labels = F.pad(rows.pop("labels")[:, 1:], (0, 1), value=-100)
        vision = stream.images.inputs([[sample] for sample in samples], rows)
        types = (rows["input_ids"] == processor.image_token_id).int()
        logits = model(**rows, **vision, mm_token_type_ids=types, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LR * factor(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["qwen2_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_losses_with_images_agree_with_transformers(kind: str, tmp_path: Path) -> None:
    checkpoint, data = write_vision_checkpoint(tmp_path / kind, kind), write_conversations(tmp_path / "chats")
    given = options(
        checkpoint, data, tmp_path / "run", seq_length=SEQ_LENGTH, batch_size=BATCH_SIZE, lr=LR, max_steps=STEPS,
        warmup=6 / STEPS,
    )  # fmt: skip
    assert sft.main(sft.SFTRunOptions(**given)) == 0
    log = read_log(tmp_path / "run" / "log.jsonl")
    losses, expected = [entry["loss"] for entry in log], transformers_losses(checkpoint, data)
    assert sum(entry.get("images", 0) for entry in log) > STEPS
    assert len(losses) == len(expected) == STEPS
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(kind, worst, losses[0], losses[-1])
    assert worst < 1e-4
    assert losses[-1] < 0.5 * losses[0]

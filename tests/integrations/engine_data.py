"""Tiny checkpoints, data, and the losses without an engine, for the tests of other engines."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from ligerzoo import AutoModel
from ligerzoo.models import (
    CausalLM,
    Llama,
    LlamaConfig,
    Phi3,
    Phi3Config,
    Qwen3,
    Qwen3Config,
    Qwen3Moe,
    Qwen3MoeConfig,
)
from ligerzoo.train.optimizers import clip_grad_norm

STEPS = 3
SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, Callable[[], CausalLM]] = {
    "llama": lambda: Llama(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3(Qwen3Config(**SIZES, head_dim=8)),
    "qwen3_moe": lambda: Qwen3Moe(Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8)),
    "phi3": lambda: Phi3(Phi3Config(**SIZES)),  # stores fused projections
}


def write_all(directory: Path) -> None:
    """Writes the checkpoints, each with a tokenizer, and data/train.jsonl."""
    words = ["<s>", "</s>", *map(chr, range(97, 97 + 26))]
    for name, build in MODELS.items():
        torch.manual_seed(0)
        build().save_pretrained(directory / name)
        tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(28), strict=True)), unk_token="<s>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(directory / name / "tokenizer.json"))
        special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (directory / name / "tokenizer_config.json").write_text(json.dumps(special))
    generator = random.Random(0)
    texts = [" ".join(generator.choices(words[2:12], k=generator.randint(5, 40))) for _ in range(200)]
    (directory / "data").mkdir()
    (directory / "data" / "train.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))


Batch = tuple[Tensor, Tensor, Tensor | None]
"""Token ids, labels that are shifted already, and position ids."""


def reference(
    directory: Path, name: str, steps: Sequence[Sequence[Batch]], lrs: Sequence[float], max_norm: float | None = 1.0
) -> tuple[list[float], list[float], CausalLM]:
    """Trains in one process, without an engine. Returns the losses, the norms of the gradients, and the model."""
    model = AutoModel.from_pretrained(directory / name).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses, norms = [], []
    for batches, lr in zip(steps, lrs, strict=True):
        count = sum(int((labels != -100).sum()) for _, labels, _ in batches)
        losses.append(0.0)
        for ids, labels, positions in batches:
            loss = model(ids, position_ids=positions, shift_labels=labels, num_items_in_batch=count).loss
            loss.backward()
            losses[-1] += loss.item()
        norms.append(clip_grad_norm(model, max_norm).item())
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model

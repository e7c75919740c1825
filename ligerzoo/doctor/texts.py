"""Random texts for a model."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from ligerzoo.models import CausalLM

ROW = 2048
"""Largest number of tokens of a row."""


def random_tokens(model: CausalLM, chance: random.Random, rows: int, length: int) -> Tensor:
    """Returns token ids, (rows, length) on the CPU, without placeholders of images and videos."""
    placeholders = torch.tensor(list(model.placeholders), dtype=torch.int64)
    other = next(token for token in range(model.input_vocab_size) if token not in model.placeholders)
    generator = torch.Generator().manual_seed(chance.getrandbits(62))
    ids = torch.randint(model.input_vocab_size, (rows, length), generator=generator)
    return ids.masked_fill(torch.isin(ids, placeholders), other)


def longest_text(model: CausalLM) -> int:
    """Returns the largest number of tokens of a text: `ROW`, or what the model's positions allow."""
    return min(ROW, getattr(model.config, "max_position_embeddings", None) or ROW)

"""Changes the number of tokens of a model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.dispatch import accumulation_dtype

if TYPE_CHECKING:
    from ligerzoo.models.language_model import LanguageModel


def resize_token_embeddings(
    model: LanguageModel, new_num_tokens: int | None, pad_to_multiple_of: int | None
) -> nn.Embedding:
    """See `LanguageModel.resize_token_embeddings`."""
    for name, number in (("new_num_tokens", new_num_tokens), ("pad_to_multiple_of", pad_to_multiple_of)):
        if number is not None and (type(number) is not int or number < 1):
            raise LigerzooError(
                "not a number of tokens", where=name, got=repr(number), expected="an integer, 1 or more"
            )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = [module for module in (embedding, head) if module is not None]
    parameters = (getattr(module, name, None) for name in ("weight", "bias") for module in modules)
    weights = [parameter for parameter in parameters if isinstance(parameter, nn.Parameter)]
    size = model.config.vocab_size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
    if size == model.config.vocab_size:
        return embedding
    if model.input_vocab_size != model.config.vocab_size:
        raise LigerzooError(
            f"rows of image tokens follow the vocabulary of {type(model).__name__}", where="new_num_tokens",
            got=size, expected=f"{model.config.vocab_size}, the current vocabulary",
        )  # fmt: skip
    if size <= (last := max(model.placeholders, default=-1)):
        raise LigerzooError(
            "fewer rows than the placeholder token ids of images and videos need", where="new_num_tokens",
            got=size, expected=f"at least {last + 1}",
        )  # fmt: skip
    if any(hasattr(weight, "device_mesh") for weight in weights):
        raise LigerzooError(
            "the weights are sharded", where="resize_token_embeddings", remedy="Resize before sharding."
        )
    for weight in dict.fromkeys(weights):  # a tied weight once
        _resize_rows(weight, size)
    embedding.num_embeddings = size
    names = (name for name, module in model.named_modules() if module in modules)
    model.replaced_weights |= dict.fromkeys(names)
    model.config = dataclasses.replace(model.config, vocab_size=size)  # type: ignore[type-var]
    return embedding


def _resize_rows(weight: nn.Parameter, rows: int) -> None:
    """Removes rows at the end of `weight`, (V, ...), or adds rows that are the mean of the old ones."""
    old = weight.detach()
    mean = old.mean(0, keepdim=True, dtype=accumulation_dtype(old.dtype)).to(old.dtype)
    weight.data = torch.cat([old[:rows], mean.expand(max(rows - len(old), 0), *old.shape[1:])])
    weight.grad = None

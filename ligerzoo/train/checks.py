"""Checks before training: what would go wrong without an error."""

from __future__ import annotations

import warnings

import torch

from ligerzoo.errors import ConfigError
from ligerzoo.models import CausalLM
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.optimizers import share_unchanged


def check_dtype(model: CausalLM) -> None:
    """Refuses weights in float16, in which small gradients become 0.

    Raises:
        ConfigError: A weight that trains is in float16.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ConfigError(
                "cannot be trained in float16: small gradients would become 0", where=name,
                expected="float32 or bfloat16", remedy="Choose a dtype, such as --dtype bfloat16.",
            )  # fmt: skip


def check_tied_weights(model: CausalLM) -> None:
    """Refuses a model whose head has become separate from the embedding, although its config ties them.

    Both would train, and the file could store only one of them.

    Raises:
        ConfigError: The weights are separate.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if model.config.tie_word_embeddings and head is not embedding:
        raise ConfigError(
            "the head is separate from the embedding, although config.json ties them", where=type(model).__name__,
            remedy="Call model.tie_weights() before the optimizer is made.",
        )  # fmt: skip


def check_vocabulary(model: CausalLM, tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer with more tokens than the model's embedding.

    Raises:
        ConfigError: The vocabulary is too large.
    """
    if len(tokenizer) > model.input_vocab_size:
        raise ConfigError(
            "the tokenizer has more tokens than the model's embedding", where="vocab_size", got=len(tokenizer),
            expected=f"at most {model.input_vocab_size}",
            remedy="Choose the model's own tokenizer or, for a new model, set vocab_size in config.json.",
        )  # fmt: skip


def warn_of_rounding(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Warns if most weights would not change by an update of size `lr`, because their dtype rounds it away.

    Args:
        optimizer: any optimizer.
        lr: peak learning rate; AdamW changes a weight by about as much.
    """
    share = share_unchanged(optimizer, lr)
    if share > 0.5:
        dtype = optimizer.param_groups[0]["params"][0].dtype
        warnings.warn(
            f"a learning rate of {lr:g} is below the resolution of {str(dtype).removeprefix('torch.')} for {share:.0%} "
            "of the weights, which would not change; use --dtype float32 --mixed-precision or a higher learning rate",
            stacklevel=2,
        )

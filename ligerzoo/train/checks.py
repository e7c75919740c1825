"""Checks before training: what would go wrong without an error."""

from __future__ import annotations

import warnings

import torch
from torch.distributed.tensor import DTensor

from ligerzoo.errors import ConfigError
from ligerzoo.models import CausalLM
from ligerzoo.optimizer_table import check_optimizer
from ligerzoo.train import processes
from ligerzoo.train.optimizers import share_unchanged


def check_model(model: CausalLM, optimizer: str) -> None:
    """Makes the checks below, and refuses optimizers that several processes cannot use.

    Args:
        model: the model as it will be trained, also on the meta device.
        optimizer: name of its optimizer.

    Raises:
        LigerzooError: One of them fails.
    """
    check_dtype(model)
    check_tied_weights(model)
    check_optimizer(optimizer, processes.world_size())


def check_dtype(model: CausalLM) -> None:
    """Refuses weights in float16, in which small gradients become 0.

    Raises:
        ConfigError: A weight that trains is in float16.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            what = "cannot be trained in float16: small gradients would become 0"
            remedy = "Choose a dtype, such as --dtype bfloat16."
            raise ConfigError(what, where=name, expected="float32 or bfloat16", remedy=remedy)


def weights_that_are_not_finite(model: CausalLM) -> list[str]:
    """Returns the names of weights that train and, in this process, have a value that is infinite or NaN.

    Waits for the GPU.
    """
    own = {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    largest = [
        (name, torch.linalg.vector_norm(weight.detach(), torch.inf).double())
        for name, weight in own.items()
        if weight.numel()
    ]
    if not largest:
        return []
    are_finite = torch.stack([value for _, value in largest]).isfinite().tolist()
    return [name for (name, _), is_finite in zip(largest, are_finite, strict=True) if not is_finite]


def check_tied_weights(model: CausalLM) -> None:
    """Refuses a model whose head has become separate from the embedding, although its config ties them.

    Both would train, and the file could store only one of them.

    Raises:
        ConfigError: The weights are separate.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if model.config.tie_word_embeddings and head is not embedding:
        what = "the head is separate from the embedding, although config.json ties them"
        remedy = "Call model.tie_weights() before the optimizer is made."
        raise ConfigError(what, where=type(model).__name__, remedy=remedy)


def trains_bfloat16(model: CausalLM) -> bool:
    """Whether a weight that trains is in bfloat16, in which most small updates would be lost by rounding."""
    return any(weight.requires_grad and weight.dtype == torch.bfloat16 for weight in model.parameters())


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
            "of the weights, which would not change; use --stochastic-rounding on, --dtype float32 --mixed-precision "
            "or a higher learning rate",
            stacklevel=2,
        )

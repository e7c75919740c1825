"""Parameter groups: which parameters decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ligerzoo.errors import LigerzooError

Group = dict[str, Any]
"""A parameter group of `torch.optim`: `params` is a list of (name, parameter), other entries override the defaults."""


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that require gradients by name, tied ones once.

    Raises:
        ValueError: the model has none.
    """
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        what = "the model has no parameter with requires_grad=True"
        raise LigerzooError(what, expected="at least one to train")
    return found


def names_without_decay(model: nn.Module) -> set[str]:
    """Returns the names of the parameters that should not decay, under every name of a tied one.

    These are

    - vectors and scalars: the scales of norms, biases, gates. They have few elements, which do not overfit, and a decay
      towards 0 would shrink what a norm has scaled.
    - embedding tables, and a head tied to one. A batch has gradients for few rows, but decay would shrink all rows in
      every step: those of rare tokens would vanish.

    Matrices decay: linear layers, experts, routers, an untied head, patch projections, adapters.
    """
    found = {name for name, parameter in model.named_parameters() if parameter.dim() < 2}
    tables = {id(parameter) for parameter in embedding_tables(model)}
    return found | {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in tables}


def embedding_tables(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the weights of `nn.Embedding` modules, and parameters that are named as embeddings (of positions)."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding) or "embedding" in name:
                yield parameter


def parameter_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Returns the trainable parameters in up to two groups, with and without weight decay.

    `names_without_decay` documents which do not decay. Frozen parameters are in no group.

    Args:
        model: the model; its parameters keep their order.
        weight_decay: decay of the first group.

    Returns:
        Groups for any optimizer of `torch.optim`, with names. None is empty.

    Raises:
        ValueError: the model has no trainable parameter.
    """
    exempt = names_without_decay(model)
    parameters = trainable_parameters(model)
    decaying = [(name, parameter) for name, parameter in parameters.items() if name not in exempt]
    others = [(name, parameter) for name, parameter in parameters.items() if name in exempt]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]

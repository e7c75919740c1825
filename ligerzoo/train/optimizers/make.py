"""`make_optimizer`: an optimizer by its name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.checks import check, one_of
from ligerzoo.errors import LigerzooError, unknown_names
from ligerzoo.optimizer_table import OPTIMIZER_NAMES, OPTIMIZERS, imported
from ligerzoo.train.optimizers.stochastic_adamw import AdamWNumbers

Parameters = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


def make_optimizer(
    parameters: Parameters,
    name: str = "adamw",
    *,
    lr: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    **options: Any,
) -> torch.optim.Optimizer:
    """Returns an optimizer.

    - "adamw": torch's fused AdamW. With `stochastic_rounding=True`, `StochasticAdamW`, with its options `state_dtype`
      and `seed`.
    - "adamw-fp8": `Fp8AdamW`, with its options `stochastic_rounding` and `seed`.
    - "adamw-8bit", "adamw-4bit": AdamW of torchao with quantized moments, see `low_bit_adamw`; option
      `stochastic_rounding`.
    - "muon": `Muon` with AdamW for what is not a matrix; options `momentum`, `scale`, `state_dtype`,
      `stochastic_rounding`, `seed`.

    Args:
        parameters: a model, whose norms, biases and embeddings do not decay (see `parameter_groups`); or parameters,
            named parameters, or groups of either, as torch's optimizers take.
        name: the optimizer.
        lr: learning rate, also remembered for `set_lr`.
        weight_decay: decoupled weight decay, of groups that do not set it.
        betas: decay of the moments of AdamW.
        eps: added to the root of AdamW's second moment.
        options: of the optimizer.

    Returns:
        An optimizer of `torch.optim`. Its `load_state_dict` refuses states of other parameters.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the name or an option is unknown, a number is out of range, there is nothing to train, or a
            parameter is on the meta device.
        ImportError: torchao is not installed.
    """
    check("make_optimizer", one_of(OPTIMIZER_NAMES), name=name)
    row = OPTIMIZERS[name]
    make = imported(row.maker or "")
    accepted = inspect.signature(make).parameters.keys() - {"params", "state_format"}
    for unknown, nearest in unknown_names(sorted(options), accepted):
        expected = ", ".join(sorted(accepted - {"lr", "betas", "eps", "weight_decay"}))
        what = f"{name!r} has no option {unknown!r}"
        raise LigerzooError(what, where="make_optimizer", expected=expected, remedy=nearest)
    AdamWNumbers(lr, betas, eps, weight_decay).check("make_optimizer")
    groups = parameters
    if isinstance(parameters, nn.Module):
        groups = imported(row.groups)(parameters, weight_decay)
    groups = _refuse_meta(groups)
    optimizer: torch.optim.Optimizer = make(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])
    optimizer.register_load_state_dict_pre_hook(_refuse_other_parameters)
    return optimizer


def _refuse_meta(groups: Any) -> list[Any]:
    """Returns parameters or groups as a list, after checking that all have data."""
    listed = [{**g, "params": list(g["params"])} if isinstance(g, dict) else g for g in groups]
    parameters = chain.from_iterable(g["params"] if isinstance(g, dict) else [g] for g in listed)
    for index, entry in enumerate(parameters):
        name, parameter = entry if isinstance(entry, tuple) else (f"number {index}", entry)
        if isinstance(parameter, Tensor) and parameter.is_meta:
            what = f"parameter {name} is on the meta device and has no data; load the weights first"
            raise LigerzooError(what, where="make_optimizer")
    return listed


def _refuse_other_parameters(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raises LigerzooError if a state belongs to other parameters: torch matches them by their order alone."""
    for own, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        if own.get("optimizer") != saved.get("optimizer"):
            what = f"the state is of {saved.get('optimizer', 'another optimizer')}"
            raise LigerzooError(what, where="load_state_dict", expected=f"one of {type(optimizer).__name__}")
        names = own.get("param_names") or [f"number {i}" for i in range(len(own["params"]))]
        for i, (name, parameter) in enumerate(zip(names, own["params"], strict=True)):
            saved_name = saved.get("param_names", names)[i : i + 1]
            if saved_name != [name]:
                what = f"the optimizer's parameter {name} has the state of {saved_name[0] if saved_name else 'none'}"
                expected = "a state of the same parameters, in the same groups"
                raise LigerzooError(what, where="load_state_dict", expected=expected)
            for key, value in state_dict["state"].get(saved["params"][i], {}).items():
                is_scale = key.endswith("_scales")  # one for each block, see `Fp8AdamW`
                if isinstance(value, Tensor) and value.dim() and not is_scale and value.shape != parameter.shape:
                    what = f"{key} of parameter {name} has shape {tuple(value.shape)}"
                    raise LigerzooError(what, where="load_state_dict", expected=tuple(parameter.shape))

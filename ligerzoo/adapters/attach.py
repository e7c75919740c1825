"""Chooses what trains: low-rank updates of some layers, or some parameters."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from ligerzoo.adapters.module_names import lora_layers
from ligerzoo.adapters.targets import Target, targets_of
from ligerzoo.checks import as_list
from ligerzoo.errors import LigerzooError, did_you_mean
from ligerzoo.hub.tying import untie
from ligerzoo.layers import Decoder, Experts, Linear
from ligerzoo.layers.adapt import adapt
from ligerzoo.layers.lora import LoRAOptions
from ligerzoo.layers.plain import find_modules
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.tensor_checks import explains_options


@explains_options
def add_lora(
    model: LanguageModel,
    rank: int = 16,
    alpha: float = 32,
    targets: str | Sequence[str] | None = None,
    *,
    dropout: float = 0.0,
    use_rslora: bool = False,
    dora: bool = False,
    trained: str | Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Adds low-rank updates to weights of a model, and freezes all others. The model computes what it did before.

    Targets are patterns of dotted names, see `matches`: "q_proj" is every query projection, "layers.3" all layers of
    the fourth block, "experts.down_proj" one weight of all experts, "lm_head" the head. The fused names of checkpoints,
    such as Phi3's "qkv_proj", are targets too: their parts then share one matrix A, as in PEFT.

    Args:
        model: a model without adapters; its weights may be quantized by torchao.
        rank: r, columns of B and rows of A.
        alpha: the update is B A * alpha / r.
        targets: patterns of the weights to update. Default: all linear layers and experts of the decoder's blocks.
            Routers, the head and embeddings are only updated if a pattern names them.
        dropout: probability with which training drops input features of A. Experts and embeddings have none.
        use_rslora: scale by alpha / sqrt(r).
        dora: train magnitudes too (DoRA). Not for experts.
        trained: patterns of modules that train in full, such as "norm" or "lm_head"; PEFT's `modules_to_save`.
        dtype: dtype of the updates. Modules that train in full keep theirs.

    Returns:
        The names of the updated weights.

    Raises:
        LigerzooError: an option is invalid, a pattern matches nothing, or the model has adapters.
    """
    refuse_adapters(model, "add_lora")
    try:
        options = LoRAOptions(rank=rank, alpha=alpha, use_rslora=use_rslora, dropout=dropout)
    except LigerzooError as error:
        raise error.moved_to(str(error.where).replace("LoRA", "add_lora")) from error
    available = targets_of(model)
    patterns = None if targets is None else as_list(targets, str)
    chosen = _default_targets(model, available) if patterns is None else _matching_targets(available, patterns)
    if experts := [t.name for t in chosen if t.is_experts]:
        for name, value, neutral in (("dora", dora, False), ("dropout", dropout, 0.0)):
            if value != neutral:
                what, where = f"experts have no {name}", f"add_lora, {experts[0]!r}"
                remedy = "Leave the experts out of the targets."
                raise LigerzooError(what, where=where, got=value, expected=neutral, remedy=remedy)
    to_train = modules_to_train(model, as_list(trained, str), exclude={target.module for target in chosen})
    model.requires_grad_(False)
    for module in to_train:
        untie(model, module)
        model.get_submodule(module).requires_grad_(True)
    attach(model, [(target, options) for target in chosen], dora=dora, dtype=dtype)
    if patterns is not None:
        for fused in _fused_only(chosen, patterns):
            share_a(model, fused)
    return [target.name for target in chosen]


def attach(
    model: LanguageModel, targets: Iterable[tuple[Target, LoRAOptions]], *, dora: bool, dtype: torch.dtype
) -> None:
    """Adds updates to the layers of targets, with their options."""
    by_module: dict[str, list[tuple[Target, LoRAOptions]]] = {}
    for target, options in targets:
        by_module.setdefault(target.module, []).append((target, options))
    for name, group in by_module.items():
        layer = model.get_submodule(name)
        adapted = adapt(layer, group[0][1], [group[0][0].parameter], dora=dora, dtype=dtype)
        for target, options in group[1:]:
            adapted.add_update(target.parameter, options, dora=dora, dtype=dtype)


def share_a(model: LanguageModel, targets: Sequence[Target]) -> None:
    """Makes linear layers of one input share the matrix A of the first, as the parts of PEFT's fused layers do."""
    first, *others = (model.get_submodule(target.module) for target in targets)
    for layer in others:
        layer.lora_A = first.lora_A


def freeze_all_but(model: nn.Module, patterns: str | Sequence[str]) -> list[str]:
    """Freezes all parameters but those whose names match a pattern, see `matches`.

    Args:
        model: any model.
        patterns: such as "lm_head", "norm", ["layers.30", "layers.31"] or "layers.*.mlp".

    Returns:
        The names of the parameters that train. A tied weight trains if one of its names matches.

    Raises:
        LigerzooError: a pattern matches no parameter.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in as_list(patterns, str):
        if not any(matches(name, [pattern]) for name in names):
            raise _no_match("freeze_all_but", pattern, names)
    chosen = [name for name in names if matches(name, as_list(patterns, str))]
    model.requires_grad_(False)
    for name in chosen:
        model.get_parameter(name).requires_grad_(True)
    return chosen


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern is a sequence of parts of a dotted name; its * matches any characters."""
    return any(fnmatchcase(f".{name}.", f"*.{pattern}.*") for pattern in patterns)


def modules_to_train(model: LanguageModel, patterns: Sequence[str], exclude: set[str]) -> list[str]:
    """Returns the names of the modules with own parameters that match a pattern."""
    owners = [name for name, module in model.named_modules() if module._parameters and name not in exclude]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in owners):
            raise _no_match("add_lora, trained", pattern, owners)
    return [name for name in owners if matches(name, patterns)]


def has_adapters(model: nn.Module) -> bool:
    """Whether layers of the model have low-rank updates."""
    return bool(lora_layers(model))


def refuse_adapters(model: LanguageModel, where: str) -> None:
    """Raises LigerzooError if the model has adapters."""
    if has_adapters(model):
        remedy = "Call ligerzoo.adapters.merge_lora(model) or remove_lora(model) first."
        raise LigerzooError("the model has adapters already", where=where, remedy=remedy)


def _default_targets(model: LanguageModel, available: Sequence[Target]) -> list[Target]:
    blocks = {module for decoder in find_modules(model, Decoder) for module in decoder.layers.modules()}
    layers = {target: model.get_submodule(target.module) for target in available}
    return [
        target for target, layer in layers.items() if layer in blocks and type(layer) in (Linear, nn.Linear, Experts)
    ]


def _matching_targets(available: Sequence[Target], patterns: Sequence[str]) -> list[Target]:
    for pattern in patterns:
        if not any(matches(name, [pattern]) for target in available for name in (target.name, target.stored_name)):
            raise _no_match("add_lora, targets", pattern, [target.module for target in available])
    return [t for t in available if matches(t.name, patterns) or matches(t.stored_name, patterns)]


def _fused_only(chosen: Sequence[Target], patterns: Sequence[str]) -> list[list[Target]]:
    """Returns the targets that match by the name of a fused layer only, grouped by this layer."""
    groups: dict[str, list[Target]] = {}
    for target in chosen:
        if target.is_part and not matches(target.name, patterns):
            groups.setdefault(target.stored_name, []).append(target)
    return list(groups.values())


def _no_match(where: str, pattern: str, names: Iterable[str]) -> LigerzooError:
    last_parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
    expected, remedy = f"parts of names, such as {', '.join(last_parts)}", did_you_mean(str(pattern), last_parts)
    return LigerzooError("matches nothing", where=where, got=repr(pattern), expected=expected, remedy=remedy)

"""Which modules of two models hold the same tensors of a checkpoint, and which are not compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from torch import nn
from transformers import PreTrainedModel

from ligerzoo.convert import architecture_of_model
from ligerzoo.convert.tensor_slices import shapes_of
from ligerzoo.integrations.parity.trace import Trace
from ligerzoo.layers import RotaryEmbedding
from ligerzoo.models import CausalLM


def module_pairs(ours: CausalLM, theirs: PreTrainedModel) -> dict[str, str]:
    """Returns the name of their module that holds the same tensors, by the name of ours; outer modules first."""
    our_shapes, their_shapes = shapes_of(ours.state_dict()), shapes_of(theirs.state_dict())
    layout = architecture_of_model(ours).layout_of(ours.config, their_shapes, our_shapes)
    stored = defaultdict(set)
    holders = defaultdict(set)
    for part in layout.slices(our_shapes):
        stored[part.name].add(part.stored_name)
        holders[part.stored_name].add(part.name)
    found: dict[frozenset[str], list[str]] = defaultdict(list)
    for name, module in _called_modules(theirs):
        found[frozenset(f"{name}.{own}" for own in module.state_dict())].append(name)
    pairs = {}
    for name, module in _called_modules(ours):
        own = {f"{name}.{tensor}" for tensor in module.state_dict()}
        tensors = frozenset().union(*(stored[tensor] for tensor in own))
        is_whole = all(holders[tensor] <= own for tensor in tensors)
        if own and is_whole and found[tensors]:
            candidates = found[tensors]
            pairs[name] = candidates.pop(0) if len(candidates) > 1 else candidates[0]
    return pairs


def _called_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with a `forward`: neither lists, nor modules that only hold parameters."""
    return (
        (name, part) for name, part in model.named_modules() if name and type(part).forward is not nn.Module.forward
    )


def not_run(names: Iterable[str], layers: Collection[str], run: Collection[str]) -> Iterator[str]:
    """Yields the layers that did not run, and other modules that are not part of a compared one."""
    covered = set(run)
    for name in names:  # outer ones first
        if name not in covered and (name in layers or not any(name.startswith(f"{other}.") for other in covered)):
            covered.add(name)
            yield name


def without_counterpart(theirs: Trace, ours: Trace) -> list[str]:
    """The tensors of transformers' modules that ours do not have, or have with another number of values."""
    missing = (point for point, x in theirs.items() if point not in ours or ours[point].numel() != x.numel())
    return list(dict.fromkeys(f"{point.module} (its {point.side})" for point in missing))


def beyond_text(ours: CausalLM, tokens: int) -> list[str]:
    """Returns what a text of this length does not show."""
    windows = {getattr(part, "window", None) for part in ours.modules()}
    found = [
        f"a window of {window} tokens, not reached" for window in sorted(filter(None, windows)) if tokens <= window
    ]
    for rotary in (part for part in ours.modules() if isinstance(part, RotaryEmbedding)):
        length = rotary.rope.max_position if rotary.rope_type == "dynamic" else rotary.original_max_position
        if rotary.rope_type not in ("default", "linear") and tokens <= length:
            found.append(f"{rotary.rope_type} RoPE beyond {length} tokens, not reached")
    if tokens == 1:
        found.append("RoPE and attention: the text has one token")
    return list(dict.fromkeys(found))

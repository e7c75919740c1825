"""Heads of models: a language-model head as an `nn.Linear`, which PEFT and resizing expect; heads of several parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.convert.layout import Layout, Rename, Rule
from ligerzoo.integrations.transformers.names import apply_names
from ligerzoo.kernels import cross_entropy
from ligerzoo.layers import LMHead
from ligerzoo.layers.head import scaled_and_capped


class Head(LMHead, nn.Linear):  # type: ignore[misc]
    """Language-model head whose `logits` are those before scale and soft cap, as in transformers.

    Args:
        head: the head that it replaces, whose parameters and options it shares.
    """

    def __init__(self, head: LMHead) -> None:
        nn.Linear.__init__(self, head.hidden_size, len(head.weight), bias=head.bias is not None, device="meta")
        self.hidden_size, self.backend, self.logits_budget = head.hidden_size, head.backend, head.logits_budget
        self.softcap, self.logit_scale = head.softcap, head.logit_scale
        self.weight, self.bias = head.weight, head.bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the product with the weight, (..., H) -> (..., V)."""
        return F.linear(hidden, self.weight, self.bias)


class LogitOptions:
    """What follows the linear layer of the head: scale, soft cap, loss.

    Args:
        head: the head of a ligerzoo model.
    """

    def __init__(self, head: LMHead) -> None:
        self.softcap, self.logit_scale = head.softcap, head.logit_scale
        self.of_loss: dict[str, Any] = {name: getattr(head, name) for name in ("softcap", "logit_scale", "backend")}

    def logits(self, product: Tensor) -> Tensor:
        """Returns the logits: the product of hidden states and weight (..., V), scaled and soft-capped."""
        return scaled_and_capped(product, self.logit_scale, self.softcap)

    def loss(self, product: Tensor, target: Tensor, num_items: int | Tensor | None) -> Tensor:
        """Returns the loss, 0-d fp32, of a product (..., V) that exists already; see `Head.loss`."""
        return cross_entropy(product, target, num_items=num_items, **self.of_loss)


class HeadParts(nn.Module):
    """A head of several modules, one after the other, as one module under the names of transformers.

    Args:
        parts: the modules, by our names.
        rules: the names of transformers within this module.
    """

    def __init__(self, parts: Mapping[str, nn.Module], rules: Iterable[Rule]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._steps = tuple(parts)
        apply_names(self, tuple(rules))

    def forward(self, x: Tensor, *arguments: object) -> Tensor:
        """(..., H) -> what the last part returns, which gets the other arguments too."""
        *firsts, last = (getattr(self, name) for name in self._steps)
        for part in firsts:
            x = part(x)
        return last(x, *arguments)


def head_modules(parts: Mapping[str, nn.Module], names: Layout, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the heads of a model, and the dotted paths that they have in transformers, in the order of the forward.

    Args:
        parts: modules by our names, in this order.
        names: the layout of the wrapper.
        prefix: name of the model without its head, where BERT has a pooler.
    """
    groups: dict[str, dict[str, nn.Module]] = {}
    is_whole: dict[str, bool] = {}
    for name, part in parts.items():
        shapes = {f"{name}.{each}": tuple(tensor.shape) for each, tensor in part.state_dict().items()}
        if not shapes:
            continue
        first = next(iter(shapes))
        stored = next(names.slices_of(first, shapes)).stored_name
        path = ".".join(stored.split(".")[: 2 if stored.startswith(f"{prefix}.") else 1])
        groups.setdefault(path, {})[name] = part
        is_whole[path] = stored == path + first.removeprefix(name)
    for path, group in groups.items():
        if len(group) == 1 and is_whole[path]:
            yield path, next(iter(group.values()))
        else:
            inner = (rule for rule in names.rules if isinstance(rule, Rename) and rule.path.split(".")[0] in group)
            rules = (replace(rule, stored_path=rule.stored_path.removeprefix(f"{path}.")) for rule in inner)
            yield path, HeadParts(group, rules)

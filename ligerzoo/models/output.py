"""Outputs of models: dataclasses that also answer like mappings and tuples, as in transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from ligerzoo.layers import Context, KVCache


class ModelOutput:
    """Base class of outputs: dataclasses whose fields are also items.

    Only fields that are not None are items, as in transformers: `"loss" in out`, `out["loss"]`, `out.get("loss")`,
    `dict(out)`. An index or a slice selects among them in the order of the fields: `out[0]`, `out[1:]`.

    Not a subclass of `collections.abc.Mapping`: libraries rebuild mappings as `type(out)({...})`, which would store the
    whole dict in the first field.
    """

    def keys(self) -> list[str]:
        """Returns the names of the fields that are not None."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]  # type: ignore[arg-type]

    def values(self) -> list[Any]:
        """Returns the values of the fields that are not None."""
        return [getattr(self, name) for name in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        """Returns names and values of the fields that are not None."""
        return [(name, getattr(self, name)) for name in self.keys()]

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field, or `default` if it is None or does not exist."""
        return dict(self.items()).get(key, default)

    def to_tuple(self) -> tuple[Any, ...]:
        """Returns the values of the fields that are not None."""
        return tuple(self.values())

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key in self:
            return getattr(self, key)
        raise KeyError(f"{key!r}: not in this {type(self).__name__}; expected one of {', '.join(self.keys())}")

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


@dataclass
class CausalLMOutput(ModelOutput):
    """Output of a causal language model; see `ModelOutput` for access by name and index.

    Attributes:
        loss: 0-d fp32, if labels were given.
        logits: (B, T, V) in the model's dtype; None if labels were given, since they are never materialized then.
        past_key_values: the KV cache, if one was passed or `use_cache` was set.
        hidden_states: (B, T, H) each: the embeddings and the output of each block, the last one after the final norm;
            with `output_hidden_states`.
        attentions: attention probabilities of each layer, (B, heads, T, S); with `output_attentions`.
        router_logits: (B * T, experts) of each MoE layer; with `output_router_logits`.
        aux_loss: 0-d load-balancing loss of MoE architectures; with `output_router_logits`.
        details: second result of the objective, if one was given.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: KVCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    aux_loss: Tensor | None = None
    details: Any = None


@dataclass
class MaskedLMOutput(ModelOutput):
    """Output of an encoder with a head for masked tokens; see `ModelOutput` for access by name and index.

    Attributes:
        loss: 0-d fp32, if labels were given.
        logits: (B, T, V) in the model's dtype; None if labels were given, since they are never materialized then.
        hidden_states: see `CausalLMOutput`.
        attentions: see `CausalLMOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class SequenceClassifierOutput(ModelOutput):
    """Output of a sequence classifier; see `ModelOutput` for access by name and index.

    Attributes:
        loss: 0-d fp32, if labels were given.
        logits: (B, labels) in the model's dtype.
        past_key_values: the KV cache, if one was passed or `use_cache` was set.
        hidden_states: see `CausalLMOutput`.
        attentions: see `CausalLMOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: KVCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class TokenClassifierOutput(ModelOutput):
    """Output of a token classifier; see `ModelOutput` for access by name and index.

    Attributes:
        loss: 0-d fp32, if labels were given.
        logits: (B, T, labels) in the model's dtype.
        past_key_values: the KV cache, if one was passed or `use_cache` was set.
        hidden_states: see `CausalLMOutput`.
        attentions: see `CausalLMOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: KVCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


# FSDP2 and DDP find the tensors to hook through pytree.
_pytree.register_dataclass(CausalLMOutput)
_pytree.register_dataclass(MaskedLMOutput)
_pytree.register_dataclass(SequenceClassifierOutput)
_pytree.register_dataclass(TokenClassifierOutput)


def layer_outputs(context: Context) -> dict[str, Any]:
    """Returns what layers stored in the context's outputs, by the names of an output's fields."""
    return {name: tuple(tensors) for name, tensors in context.outputs.stored().items()}

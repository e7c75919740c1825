"""What the configs of the architectures have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from ligerzoo.errors import ConfigError
from ligerzoo.layers.rope_scaling import check_rope_scaling, check_theta, is_positive

_LARGEST_SIZE = 2**31 - 1

field_types: Callable[[type], dict[str, Any]] = cache(get_type_hints)
"""Returns the types of a config's fields, by name. Cached: evaluating the annotations takes most of a check."""


def check_fields(config: Any) -> None:
    """Raises ConfigError unless every field of a config dataclass holds what its annotation and name say.

    A whole number is a size, from 1 (or what the field's metadata has as "least") to 2^31 - 1, unless its name ends in
    `_token_id`; a float is 0, or positive within limits that fp32 can hold (and may be given as a whole number); None
    is allowed where the annotation says so.
    """
    hints = field_types(type(config))
    for field in fields(config):
        name, hint, least = field.name, hints[field.name], field.metadata.get("least", 1)
        value, kinds = getattr(config, name), get_args(hint) if isinstance(hint, UnionType) else (hint,)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None and NoneType in kinds:
            continue
        if name.endswith("_token_id"):
            ids = value if isinstance(value, list) and len(kinds) > 2 else [value]
            right, expected = (
                bool(ids) and all(type(i) is int and abs(i) <= _LARGEST_SIZE for i in ids),
                "a token id" + (" or a list of them" if len(kinds) > 2 else ""),
            )
        elif bool in kinds:
            right, expected = isinstance(value, bool), "true or false"
        elif int in kinds:
            right = type(value) is int and least <= value <= _LARGEST_SIZE
            expected = "a positive whole number" if least else "a whole number, 0 or more"
        elif float in kinds:
            right, expected = number and (value == 0 or is_positive(value)), "0, or a number from 1e-30 to 1e30"
        else:
            continue  # a structured field is checked by the part that reads it
        if not right:
            raise ConfigError("not a possible value", where=name, got=repr(value), expected=expected)


def check_positive(config: Any, *names: str) -> None:
    """Raises ConfigError if one of these fields, by which something is divided, is zero (or close enough)."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not is_positive(value):
            raise ConfigError("not a possible value", where=name, got=repr(value), expected="a positive number")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The numbers that every decoder has, under their names in config.json. An architecture's config adds its own, and
    its own defaults.

    Attributes:
        num_key_value_heads: None means one for each query head.
        head_dim: None means hidden_size / num_attention_heads.
        rope_scaling: `{"rope_type": ..., its parameters}`, see `ligerzoo.layers.RotaryEmbedding`.
        tie_word_embeddings: the head shares the embedding's weight.
        initializer_range: standard deviation of a new model's matrices.

    Raises:
        ConfigError: naming the field whose value cannot be.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_attention_heads % self.kv_heads:
            raise ConfigError(
                "query heads cannot share key-value heads evenly",
                where="num_key_value_heads",
                got=self.kv_heads,
                expected=f"a divisor of num_attention_heads, {self.num_attention_heads}",
            )
        check_theta(self.rope_theta)
        check_rope_scaling({} if self.rope_scaling is None else self.rope_scaling, self.rotary_size)

    @property
    def all_layers(self) -> int:
        """The number of blocks in all parts of the model."""
        return self.num_hidden_layers

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """The size of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """How many features of a head are rotated."""
        return self.head_size


@dataclass(frozen=True, kw_only=True)
class PartialRotaryConfig(DecoderConfig):
    """Of a decoder that rotates only the first features of each head.

    Attributes:
        partial_rotary_factor: what part of the features, at most 1.
    """

    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.partial_rotary_factor > 1:
            raise ConfigError(
                "more than all features", where="partial_rotary_factor", got=self.partial_rotary_factor,
                expected="at most 1",
            )  # fmt: skip
        super().__post_init__()

    @property
    def rotary_size(self) -> int:
        """How many features of a head are rotated."""
        return int(self.head_size * self.partial_rotary_factor)


LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(DecoderConfig):
    """Of a decoder some of whose layers see no more than the last tokens.

    Attributes:
        sliding_window: how many tokens a token sees in such a layer, itself included; None: no layer is one.
        layer_types: "sliding_attention" or "full_attention" for each layer; None: as `slides` says.
    """

    sliding_window: int | None = None
    layer_types: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        types = self.layer_types
        if types is not None and (
            not isinstance(types, list | tuple)
            or len(types) != self.num_hidden_layers
            or not all(isinstance(kind, str) and kind in LAYER_TYPES for kind in types)
        ):
            raise ConfigError(
                "not a type for each layer",
                where="layer_types",
                got=repr(types)[:200],
                expected=f"a list of {self.num_hidden_layers}, each {' or '.join(LAYER_TYPES)}",
            )

    def slides(self, layer: int) -> bool:
        """Whether this layer has a sliding window where `layer_types` does not say so."""
        return True

    def is_sliding(self, layer: int) -> bool:
        """Whether this layer is one of those with a sliding window."""
        return self.slides(layer) if self.layer_types is None else self.layer_types[layer] == "sliding_attention"

    def window(self, layer: int) -> int | None:
        """How many tokens a token sees in this layer; None for all before it."""
        return self.sliding_window if self.is_sliding(layer) else None

"""Base classes of architecture configs, and checks of their fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, ClassVar, Never, Protocol, TypeGuard, get_args, get_type_hints

from ligerzoo.checks import FLAG, is_list, is_number, is_text, one_of
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.layers.rope_scaling import MAX_ROTARY_DIM, Scaling, is_positive, is_rotary_dim, is_theta, scaling_error
from ligerzoo.tensor_checks import describe_value

_LARGEST_SIZE = 2**31 - 1

WRAP_FOR_TRAINER = "Give the Trainer ligerzoo.integrations.transformers.wrap(model)."

field_types: Callable[[type], dict[str, Any]] = cache(get_type_hints)
"""Returns the types of a config's fields, by name. Cached: evaluating the annotations takes most of a check."""


def check_fields(config: Any) -> None:
    """Raises ConfigError unless every field of a config dataclass has a value of its annotated type and range.

    Integers are sizes, from 1 (or the "least" of the field's metadata) to 2^31 - 1; token ids (`*_token_id`) may also
    be 0 or negative. Floats are 0 or from 1e-30 to 1e30, and may be given as integers. None is allowed if annotated.
    """
    hints = field_types(type(config))
    for each in fields(config):
        name, hint, least = each.name, hints[each.name], each.metadata.get("least", 1)
        value, kinds = getattr(config, name), get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if (value is None and NoneType in kinds) or (is_text(value) and str in kinds):
            continue
        if name.endswith("_token_id"):
            ids = value if isinstance(value, list) and len(kinds) > 2 else [value]
            is_valid, expected = (
                bool(ids) and all(type(i) is int and abs(i) <= _LARGEST_SIZE for i in ids),
                "a token id" + (" or a list of them" if len(kinds) > 2 else ""),
            )
        elif bool in kinds:
            is_valid, expected = FLAG.accepts(value), "true or false"
        elif int in kinds:
            is_valid = type(value) is int and least <= value <= _LARGEST_SIZE
            expected = f"an integer, {least} or more"
        elif float in kinds:
            is_valid, expected = (
                is_number(value) and (value == 0 or is_positive(value)),
                "0, or a number from 1e-30 to 1e30",
            )
        else:
            continue  # structured fields have separate checks
        refuse_unless(is_valid, name, value, expected)


class LanguageModelConfig(Protocol):
    """Config fields that every language model reads."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def initializer_range(self) -> float: ...


REQUIRED_FIELDS = ("vocab_size", "tie_word_embeddings", "initializer_range")
"""Fields of every config, see `LanguageModelConfig`."""


def require_config(model_class: type, config: object) -> None:
    """Raises ConfigError unless a model's first argument is a config, that is, an object with `REQUIRED_FIELDS`."""
    if not inspect.isclass(config) and all(hasattr(config, name) for name in REQUIRED_FIELDS):
        return
    name, config_class = model_class.__name__, _config_class_name(model_class)
    got, remedy = describe_value(config), None
    match config:
        case type():
            got, remedy = f"the class {config.__name__}", f"Create one: {name}({config_class}(...))."
        case dict():
            remedy = f"Build one from the dict: {name}({config_class}(**values))."
        case str():
            remedy = f"To load a checkpoint, call {name}.from_pretrained."
    raise ConfigError("not a config", where=f"argument config of {name}", got=got, expected=config_class, remedy=remedy)


def _config_class_name(model_class: type) -> str:
    """Returns the name of a model's config class as annotated on the class or its constructor."""
    for cls in model_class.__mro__:
        for annotated in (cls, vars(cls).get("__init__")):
            annotation = inspect.get_annotations(annotated).get("config") if annotated is not None else None
            if annotation is not None:
                return str(getattr(annotation, "__name__", annotation))
    return "config"


def refuse_unless(holds: bool, where: str, got: object, expected: str, what: str = "invalid value") -> None:
    """Raises ConfigError unless a field has an accepted value."""
    if not holds:
        raise ConfigError(what, where=where, got=repr(got)[:200], expected=expected)


def are_indices(value: object) -> TypeGuard[Sequence[int]]:
    """Whether `value` is a list of integers, 0 or more."""
    return is_list(value) and all(type(number) is int and number >= 0 for number in value)


def check_positive(config: Any, *names: str) -> None:
    """Raises ConfigError unless these fields, which are used as divisors, are positive numbers or None."""
    for name in names:
        value = getattr(config, name)
        refuse_unless(value is None or is_positive(value), name, value, "a positive number")


def check_theta(config: Any, name: str = "rope_theta") -> None:
    """Raises ConfigError unless this field can be the base of a rotary embedding."""
    value = getattr(config, name)
    refuse_unless(is_theta(value), name, value, "a number above 1, up to 1e30")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Fields of every decoder, with their names in config.json. Architectures add fields and change defaults.

    Attributes:
        num_key_value_heads: None for `num_attention_heads`.
        head_dim: features per head; None for hidden_size / num_attention_heads.
        rope_scaling: `{"rope_type": ..., its parameters}`, see `ligerzoo.layers.RotaryEmbedding`.
        tie_word_embeddings: the head shares the weight of the embedding.
        initializer_range: standard deviation with which matrices of a new model are initialized.

    Raises:
        ConfigError: a field has an invalid value.
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
    rope_scaling: Scaling | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    has_rotary: ClassVar[bool] = True
    """Whether queries and keys have rotary positions."""

    splits_hidden_size: ClassVar[bool] = True
    """Whether the heads divide the hidden features among them if `head_dim` is None."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Makes `validate` run before the `__post_init__` of a subclass, whether or not that calls the base's."""
        super().__init_subclass__(**options)
        if (own := vars(cls).get("__post_init__")) is not None:

            @wraps(own)
            def __post_init__(self: DecoderConfig) -> None:
                DecoderConfig.__post_init__(self)
                own(self)

            cls.__post_init__ = __post_init__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_fields(self)
        self.validate()

    def validate(self) -> None:
        """Checks values beyond their types. Subclasses call that of the base class, and check their own fields.

        Raises:
            ConfigError: a field has an invalid value.
        """
        where, what = "num_key_value_heads", "invalid number of key-value heads"
        expected = f"a divisor of num_attention_heads, {self.num_attention_heads}"
        refuse_unless(self.num_attention_heads % self.kv_heads == 0, where, self.kv_heads, expected, what)
        if self.splits_hidden_size and self.head_dim is None:
            where, what = "num_attention_heads", "invalid number of heads"
            divides, expected = self.hidden_size % self.num_attention_heads == 0, f"a divisor of {self.hidden_size}"
            refuse_unless(divides, where, self.num_attention_heads, f"{expected}, hidden_size, or head_dim", what)
        check_theta(self)
        what, expected = "invalid number of rotated features", f"an even number, 2 to {MAX_ROTARY_DIM}"
        refuse_unless(is_rotary_dim(self.rotary_size), "head_dim", self.rotary_size, expected, what)
        if self.rope_scaling is not None and (error := scaling_error(self.rope_scaling, self.rotary_size)):
            raise ConfigError(error, where="rope_scaling")

    @property
    def get_text_config(self) -> Never:
        """Raises AttributeError, which `hasattr` of other libraries expects: only TRL's trainers ask without it."""
        what = "a model without transformers' interface cannot be trained by TRL's trainers"
        raise AttributeError(str(LigerzooError(what, where=type(self).__name__, remedy=WRAP_FOR_TRAINER)))

    @property
    def all_layers(self) -> int:
        """Number of blocks in all parts of the model."""
        return self.num_hidden_layers

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Features per head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Rotated features per head."""
        return self.head_size

    @property
    def key_size(self) -> int:
        """Features of a head's key."""
        return self.head_size

    @property
    def value_size(self) -> int:
        """Features of a head's value."""
        return self.head_size


def heads(config: DecoderConfig) -> tuple[int, int, int, int]:
    """Returns the first arguments of `Attention`: hidden size, heads, key-value heads, and features per head."""
    return config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size


def rotary_arguments(config: DecoderConfig) -> tuple[int, float, Scaling | None, int]:
    """Returns the first arguments of `RotaryEmbedding`."""
    return config.rotary_size, config.rope_theta, config.rope_scaling, config.max_position_embeddings


@dataclass(frozen=True, kw_only=True)
class PartialRotaryConfig(DecoderConfig):
    """Config of a decoder that rotates only the first features of each head.

    Attributes:
        partial_rotary_factor: fraction of the features that are rotated, at most 1.
    """

    partial_rotary_factor: float = 1.0

    def validate(self) -> None:
        factor = self.partial_rotary_factor
        refuse_unless(factor <= 1, "partial_rotary_factor", factor, "at most 1")
        super().validate()

    @property
    def rotary_size(self) -> int:
        """Rotated features per head."""
        return int(self.head_size * self.partial_rotary_factor)


_WINDOW_TYPES = ("full_attention", "sliding_attention")


def check_layer_types(config: Any, kinds: Sequence[str], name: str = "layer_types", *, required: bool = False) -> None:
    """Raises ConfigError unless this field is None, if that is allowed, or lists one of these kinds for each layer."""
    types, layers = getattr(config, name), config.num_hidden_layers
    is_valid = types is None and not required
    is_valid |= is_list(types) and len(types) == layers and all(map(one_of(kinds).accepts, types))
    expected = f"a list of {layers} entries, each {' or '.join(kinds)}"
    refuse_unless(is_valid, name, types, expected, "invalid layer types")


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(DecoderConfig):
    """Config of a decoder in which some layers use a sliding window.

    Attributes:
        sliding_window: tokens that a token attends to in such a layer, including itself; None for full attention.
        layer_types: "sliding_attention" or "full_attention" for each layer; None: `slides` decides.
    """

    sliding_window: int | None = None
    layer_types: Sequence[str] | None = None

    def validate(self) -> None:
        super().validate()
        check_layer_types(self, _WINDOW_TYPES)

    def slides(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses the sliding window if `layer_types` is None."""
        return True

    def is_sliding(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses the sliding window."""
        return self.slides(layer) if self.layer_types is None else self.layer_types[layer] == "sliding_attention"

    def window(self, layer: int) -> int | None:
        """Tokens that a token attends to in this layer, including itself; None for full attention."""
        return self.sliding_window if self.is_sliding(layer) else None


@dataclass(frozen=True, kw_only=True)
class SharedKeysConfig(WindowedConfig):
    """Config of a decoder whose last layers attend to keys and values of earlier layers of their kind.

    Attributes:
        num_kv_shared_layers: number of these last layers.
    """

    num_kv_shared_layers: int = field(default=0, metadata={"least": 0})

    def validate(self) -> None:
        super().validate()
        slides = any(map(self.is_sliding, range(self.num_hidden_layers)))
        has_sources = all(self.last_own_layer(kind) is not None for kind in {False, slides})
        expected = "fewer layers, so that earlier ones of each kind have keys and values"
        refuse_unless(has_sources, "num_kv_shared_layers", self.num_kv_shared_layers, expected)

    def shares_keys(self, layer: int) -> bool:
        """Whether this layer, counted from 0, attends to keys and values of an earlier one."""
        return layer >= self.num_hidden_layers - self.num_kv_shared_layers

    def last_own_layer(self, slides: bool) -> int | None:
        """The last layer with or without a sliding window that has keys and values itself; None without any."""
        own = range(self.num_hidden_layers - self.num_kv_shared_layers)
        return next((i for i in reversed(own) if self.is_sliding(i) is slides), None)

    def is_source(self, layer: int) -> bool:
        """Whether later layers attend to the keys and values of this layer, counted from 0."""
        return self.num_kv_shared_layers > 0 and layer == self.last_own_layer(self.is_sliding(layer))


@dataclass(frozen=True, kw_only=True)
class NoRopeConfig(DecoderConfig):
    """Config of a decoder in which some layers have no rotary positions (NoPE).

    Attributes:
        no_rope_layers: one flag per layer: despite the name, 1 for rotary positions and 0 for none. Flags beyond the
            last layer are ignored. None: `no_rope_layer_interval` decides.
        no_rope_layer_interval: n; every n-th layer has no rotary positions.
    """

    no_rope_layers: Sequence[int] | None = None
    no_rope_layer_interval: int = 4

    def validate(self) -> None:
        super().validate()
        flags, layers = self.no_rope_layers, self.num_hidden_layers
        is_valid = flags is None or (are_indices(flags) and len(flags) >= layers and max(flags) <= 1)
        expected = f"a list of at least {layers} flags, each 0 or 1"
        refuse_unless(is_valid, "no_rope_layers", flags, expected, "invalid per-layer flags")

    def rotates(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has rotary positions."""
        if self.no_rope_layers is None:
            return (layer + 1) % self.no_rope_layer_interval != 0
        return bool(self.no_rope_layers[layer])

"""`Architecture`: all that loading and saving need to know about one family of checkpoints."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ligerzoo import models
from ligerzoo.convert.fields import (
    build_config,
    convert_overrides,
    is_classifier,
    partial_rotary_factor,
    refuse,
    rope_entry,
    rope_fields,
    shared_fields,
    written_fields,
)
from ligerzoo.convert.layout import FusedByHead, Layout, Rule
from ligerzoo.convert.tensor_slices import Shape
from ligerzoo.entries import Entries
from ligerzoo.errors import ConfigError
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.registry import ALIASES, MODEL_CLASSES

SILU = ("silu", "swish")
GELU_TANH = "gelu_pytorch_tanh"
ACTIVATIONS = ("hidden_act", "hidden_activation")
"""Entries of config.json that name the activation."""

ROTARY_BUFFERS = r"(.+\.)?rotary_emb\.inv_freq"
"""Names of rotary frequencies. Old Llama 2 checkpoints contain them; the model computes them in fp32."""

_LAYER = re.compile(r"(?:(?:model|language_model)\.)*layers\.(\d{1,9})\..+")


def is_rotary_buffer(name: str) -> bool:
    """Returns whether a stored tensor holds rotary frequencies."""
    return re.fullmatch(ROTARY_BUFFERS, name) is not None


def is_beyond_last_layer(name: str, num_hidden_layers: int) -> bool:
    """Returns whether a stored tensor belongs to a layer with an index of `num_hidden_layers` or more."""
    match = _LAYER.fullmatch(name)
    return match is not None and int(match[1]) >= num_hidden_layers


@dataclass(frozen=True)
class Architecture:
    """One architecture as Hugging Face checkpoints describe it.

    The defaults describe a checkpoint whose tensors and config.json entries have the names of ours, except for the two
    spellings of the rotary embedding.

    Attributes:
        model_type: `model_type` in config.json.
        class_name: `hf_class`. Defaults to `<our class>ForCausalLM`.
        accepted: entries without a field, with their accepted values. Other values are refused. The first value of one
            of `ACTIVATIONS` is written; the default is SiLU, or none for a user's own classes.
        read_entries: returns the decoder's entries of config.json under the names of our fields. The default returns
            config.json unchanged.
        read_rope: returns the fields of the rotary embedding from these entries and the default `rope_theta`.
        write_entries: returns the entries of config.json from the config and the entries named like its fields.
        layouts: returns the possible layouts of the tensors, given the config. New models are saved in the first;
            transformers' modules have the last.
        extra_tensors: pattern of the names of stored tensors that are not part of the model. Loading keeps such tensors
            and saving writes them again.
        keeps_extra_layers: loading keeps the tensors of layers with an index of `num_hidden_layers` or more, such as
            those for multi-token prediction (MTP), and saving writes them again. Otherwise loading leaves them out.
        kept_fp32: pattern of the names of parameters that stay in fp32 where half-precision files store them so.
        quantized_formats: formats of quantized checkpoints, by `quant_method` in config.json, that loading dequantizes;
            see `ligerzoo.files.quantized`.
        classifier_class: class in transformers that classifies sequences. Defaults to a name like that of `hf_class`.
        classes: model class and config class of a user. Defaults to those of `ligerzoo.models`.
    """

    model_type: str
    class_name: str = ""
    accepted: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    read_entries: Callable[[Entries], Entries] = lambda raw: raw
    read_rope: Callable[[Entries, float], Entries] = rope_fields
    write_entries: Callable[[Any, dict[str, object]], dict[str, object]] = lambda config, entries: entries
    layouts: Callable[[Any], tuple[Layout, ...]] = lambda config: (Layout(),)
    extra_tensors: str = ROTARY_BUFFERS
    keeps_extra_layers: bool = False
    kept_fp32: str = ""
    quantized_formats: frozenset[str] = frozenset()
    classifier_class: str = ""
    classes: tuple[type[LanguageModel], type[Any]] | None = None

    @property
    def hf_class(self) -> str:
        """Class in transformers, for `architectures` in config.json."""
        return self.class_name or f"{MODEL_CLASSES[self.model_type]}ForCausalLM"

    @property
    def accepted_entries(self) -> Mapping[str, tuple[object, ...]]:
        """`accepted`, with SiLU unless it names the activation or the classes are a user's own."""
        if self.classes or self.accepted.keys() & {*ACTIVATIONS}:
            return self.accepted
        return {"hidden_act": SILU, **self.accepted}

    @property
    def model_class(self) -> type[LanguageModel]:
        """The model class."""
        return self.classes[0] if self.classes else getattr(models, MODEL_CLASSES[self.model_type])

    @property
    def config_class(self) -> type[Any]:
        """The config class, a frozen dataclass."""
        return self.classes[1] if self.classes else getattr(models, f"{MODEL_CLASSES[self.model_type]}Config")

    @property
    def optional(self) -> frozenset[str]:
        """Parameters that a checkpoint may lack. They keep their initialization, and a warning names them."""
        return frozenset()

    @property
    def unused(self) -> frozenset[str]:
        """Names of stored tensors that loading leaves out."""
        return frozenset()

    @property
    def is_encoder(self) -> bool:
        """Whether tokens attend to later ones: models have a head for masked tokens, and classifiers another head."""
        return False

    def classifier_rules(self, suffix: str) -> tuple[Rule, ...]:
        """Returns the rules of the head of classifiers, by the end of the name of their class in transformers."""
        return ()

    def stored_heads(self, config: object) -> Iterator[str]:
        """Yields the stored names of the language model's heads, which models with another head leave out."""
        yield from ("lm_head.weight", "lm_head.bias")

    @property
    def folders(self) -> tuple[str, ...]:
        """Directories in the checkpoint's that hold further weights, of tensors named "<directory>/<name>"."""
        return ()

    def files_of(self, model: LanguageModel) -> dict[str, bytes]:
        """Returns the contents of further files to save with a model, by relative path."""
        return {}

    def is_extra_tensor(self, name: str, num_layers: int | None = None) -> bool:
        """Returns whether loading keeps a stored tensor that is not part of the model, and saving writes it again.

        Args:
            name: name of the stored tensor.
            num_layers: layers of the model; None if tensors of further layers are unexpected.
        """
        keeps_layer = self.keeps_extra_layers and num_layers is not None and is_beyond_last_layer(name, num_layers)
        return keeps_layer or re.fullmatch(self.extra_tensors, name) is not None

    def keeps_fp32(self, name: str) -> bool:
        """Returns whether a parameter stays in fp32 where half-precision files store it so."""
        return re.fullmatch(self.kept_fp32, name) is not None

    def describes(self, raw: Entries) -> bool:
        """Returns whether config.json is that of a model which this architecture builds."""
        names = [self.model_type, *(alias for alias, name in ALIASES.items() if name == self.model_type)]
        return raw.get("model_type") in names and not is_classifier(raw)

    def config_from_hf(
        self, raw: Entries, config_class: type[Any] | None = None, overrides: Entries | None = None
    ) -> Any:
        """Builds the config from config.json. A missing entry takes the default of the config class.

        Args:
            raw: config.json.
            config_class: class of the config. Defaults to the architecture's.
            overrides: values of fields that take precedence over config.json.

        Raises:
            ConfigError: An entry has an invalid or unsupported value, or asks for attention to later tokens.
        """
        config_class = config_class or self.config_class
        entries = self.read_entries(raw)
        for name, accepted in self.accepted_entries.items():
            refuse(entries, name, unless=(None, *accepted))
        if "partial_rotary_factor" in self.accepted:  # either spelling
            refuse(rope_entry(entries), "partial_rotary_factor", unless=(None, *self.accepted["partial_rotary_factor"]))
        values, names = shared_fields(entries, config_class), {field.name for field in fields(config_class)}
        if "partial_rotary_factor" in names:
            factor = partial_rotary_factor(entries, getattr(config_class, "partial_rotary_factor", None))
            values |= {} if factor is None else {"partial_rotary_factor": factor}
        if "rope_theta" in names:
            values |= self.read_rope(entries, config_class.rope_theta)
        config = build_config(config_class, values | convert_overrides(overrides or {}, config_class))
        is_causal = getattr(config, "is_causal", True)
        refuse({"is_causal": True, **raw}, "is_causal", unless=(True, is_causal))  # null is false in transformers
        return config

    def config_to_hf(self, config: object) -> dict[str, object]:
        """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read.

        They don't include `architectures`, `model_type` and the dtype.
        """
        activations = {name: values[0] for name, values in self.accepted_entries.items() if name in ACTIVATIONS}
        return self.write_entries(config, {**activations, **written_fields(config)})

    def build(
        self,
        config: Any,
        model_class: type[LanguageModel] = LanguageModel,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Builds a model with random weights.

        Args:
            config: config of the model.
            model_class: class of the model if it is a subclass of the architecture's, else ignored.
            device: device of the weights; "meta" for a model without weights. Defaults to torch's default device.
            dtype: dtype of the weights. Defaults to torch's default dtype.
        """
        own = issubclass(model_class, self.model_class)
        make: Callable[..., LanguageModel] = model_class if own else self.model_class
        return make(config, device=device, dtype=dtype)

    def check_rules(self, config: object, shapes: Mapping[str, Shape]) -> None:
        """Raises ConfigError if a rule of a user's own layout has no effect on a model.

        Args:
            config: config of the model.
            shapes: shapes of its parameters, by name.
        """
        own = [layout for layout in self.layouts(config) if layout.is_own]
        if unused := [rule for layout in own for rule in layout.unused_rules(shapes)]:
            where, got = f"layout of model_type {self.model_type!r}", ", ".join(map(str, unused))
            expected = f"paths in names such as {next(iter(shapes))!r}"
            remedy = "An earlier rule may rename the same path, or the paths be swapped: the stored one comes first."
            raise ConfigError("rules without effect", where=where, got=got, expected=expected, remedy=remedy)

    def layout_of(self, config: object, stored: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> Layout:
        """Returns the layout and prefixes of a checkpoint: those under which most parameters are stored.

        If several layouts have the same names, most shapes decide.

        Args:
            config: config of the model.
            stored: shapes of the stored tensors, by name.
            shapes: shapes of the parameters, by name.
        """

        def count(layout: Layout) -> tuple[int, int]:  # checks one slice per parameter: experts can be any number
            slices = [next(layout.slices_of(name, shapes)) for name in shapes]
            found = [part.stored_shape == stored[part.stored_name] for part in slices if part.stored_name in stored]
            return len(found), sum(found)

        def with_best_prefixes(layout: Layout) -> Layout:
            for prefix, *others in layout.prefixes:
                layout = max((layout.with_prefix(prefix, other) for other in others), key=count)
            return layout

        return max(map(with_best_prefixes, self.layouts(config)), key=count)

    def module_layout(self, config: object) -> Layout:
        """The layout of parameters in transformers' modules, whose names adapters of PEFT have."""
        return self.layouts(config)[-1].without_experts()

    def module_names(self, config: object, name: str, shapes: Mapping[str, Shape]) -> list[str]:
        """Returns the names in transformers' modules of what holds a parameter: today's, then those of old versions.

        Of vision-language models until 4.51, and of mixtures until 5.0, modules had the names of checkpoints.
        """
        part = next(self.module_layout(config).slices_of(name, shapes))
        names = [part.stored_name]
        for layout in self.layouts(config):
            others = [(p, other) for p, *all_others in layout.prefixes if name.startswith(p) for other in all_others]
            for variant in [layout.with_prefix(*pair) for pair in others if pair[1]] or [layout]:
                old = next(variant.slices_of(name, shapes))
                if replace(old, stored_name=part.stored_name) == part:
                    names.append(old.stored_name)
        return list(dict.fromkeys(names))

    def wrapper_layout(self, config: object) -> Layout:
        """`module_layout` for our modules under the names of transformers, except for biases of routers.

        Our interleaved and transposed weights differ from transformers', so they have other names. Modules of a user's
        own class keep their names.
        """
        layout = self.module_layout(config)
        if self.is_encoder:
            return layout
        return Layout(tuple(rule for each in layout.rules for rule in each.in_wrapper(layout.is_own)))

    def interleaves(self, config: object, name: str) -> bool:
        """Returns whether transformers' modules interleave this parameter with others, head by head.

        Adapters of PEFT cannot have an update of such a parameter alone.
        """
        rules = self.layouts(config)[0].rules
        return any(isinstance(rule, FusedByHead) and rule.path_in(name) is not None for rule in rules)

"""`Architecture`: all that loading and saving need to know about one family of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import torch

from ligerzoo.convert.fields import build_config, refuse, rope_entry, rope_fields, shared_fields, written_fields
from ligerzoo.convert.layout import (
    Fused,
    FusedByHead,
    Interleaved,
    Layout,
    ModuleRules,
    PerExpert,
    Rename,
    Rule,
    Transposed,
)
from ligerzoo.convert.tensor_slices import Shape
from ligerzoo.errors import ConfigError
from ligerzoo.models.language_model import LanguageModel

SILU = ("silu", "swish")
GELU_TANH = "gelu_pytorch_tanh"
CLASSIFIER_SUFFIX = "ForSequenceClassification"

_ROTARY_BUFFER = re.compile(r"(.+\.)?rotary_emb\.inv_freq")


def is_rotary_buffer(name: str) -> bool:
    """Returns whether a stored tensor holds rotary frequencies.

    Old Llama 2 checkpoints contain them. They are ignored, because the model computes them in fp32.
    """
    return _ROTARY_BUFFER.fullmatch(name) is not None


def is_classifier(raw: Mapping[str, Any]) -> bool:
    """Returns whether config.json names a class of transformers that classifies sequences."""
    names = raw.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(CLASSIFIER_SUFFIX) for name in names)


@dataclass(frozen=True)
class Architecture:
    """One architecture as Hugging Face checkpoints describe it.

    The defaults describe a checkpoint whose tensors and config.json entries have the names of ours, except for the two
    spellings of the rotary embedding.

    Attributes:
        model_type: `model_type` in config.json.
        hf_class: class in transformers, for `architectures` in config.json.
        model_class: our model class.
        config_class: its config class, a frozen dataclass.
        activations: entries that name the activation, with the accepted values. The first value is written.
        accepted: further entries with their accepted values. Other values are refused.
        read_entries: returns the decoder's entries of config.json under the names of our fields. The default returns
            config.json unchanged.
        read_rope: returns the fields of the rotary embedding from these entries and the default `rope_theta`.
        write_entries: returns the entries of config.json from the config and the entries named like its fields.
        layouts: possible layouts of the tensors. New models are saved in the first.
        layout_of_modules: index of the layout that transformers' modules have, up to prefixes.
        has_own_layout: `AutoModel.register` gave the layout: a rule without effect is an error.
        layouts_of_config: returns the layouts for a config where they depend on it, instead of `layouts`.
        prefixes: prefixes of parameter names with the possible prefixes in checkpoints, in any layout. New models get
            the first. A checkpoint of the bare decoder (`LlamaModel`) lacks "model.".
        module_prefixes: pairs (prefix of our parameters, prefix in transformers' modules) that differ.
        is_extra_tensor: returns whether a stored tensor of this name is not part of the model. Loading keeps such
            tensors and saving writes them again.
        keeps_extra_layers: loading keeps the tensors of layers with an index of `num_hidden_layers` or more, such as
            those for multi-token prediction (MTP), and saving writes them again. Otherwise loading leaves them out.
        aliases: other values of `model_type` in config.json; see `ligerzoo.convert.ALIASES`.
        keeps_fp32: returns whether a parameter of this name stays in fp32 where half-precision files store it so.
        classifier_class: class in transformers that classifies sequences. Defaults to a name like that of `hf_class`.
        optional: parameters that a checkpoint may lack. They keep their initialization, and a warning names them.
        unused: names of stored tensors that loading leaves out.
        quantized_formats: formats of quantized checkpoints, by `quant_method` in config.json, that loading dequantizes;
            see `ligerzoo.files.quantized`.
    """

    model_type: str
    hf_class: str
    model_class: type[LanguageModel]
    config_class: type[Any]
    activations: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"hidden_act": SILU})
    accepted: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    read_entries: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda raw: raw
    read_rope: Callable[[Mapping[str, Any], float], dict[str, Any]] = rope_fields
    write_entries: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda config, entries: entries
    layouts: tuple[Layout, ...] = (Layout(),)
    layout_of_modules: int = -1
    has_own_layout: bool = False
    layouts_of_config: Callable[[Any], tuple[Layout, ...]] | None = None
    prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"model.": ("model.", "")})
    module_prefixes: tuple[tuple[str, str], ...] = ()
    is_extra_tensor: Callable[[str], bool] = is_rotary_buffer
    keeps_extra_layers: bool = False
    aliases: tuple[str, ...] = ()
    keeps_fp32: Callable[[str], bool] = lambda name: False
    classifier_class: str | None = None
    optional: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    quantized_formats: frozenset[str] = frozenset()

    def check_rules(self, shapes: Mapping[str, Shape]) -> None:
        """Raises ConfigError if a rule of a user's own layout has no effect on a model.

        Args:
            shapes: shapes of its parameters, by name.
        """
        unused = (
            [rule for layout in self.layouts for rule in layout.unused_rules(shapes)] if self.has_own_layout else []
        )
        if unused:
            raise ConfigError(
                "rules without effect", where=f"layout of model_type {self.model_type!r}",
                got=", ".join(map(str, unused)), expected=f"paths in names such as {next(iter(shapes))!r}",
                remedy="An earlier rule may rename the same path, or the paths be swapped: the stored one comes first.",
            )  # fmt: skip

    def describes(self, raw: Mapping[str, Any]) -> bool:
        """Returns whether config.json is that of a model which this architecture builds."""
        return raw.get("model_type") in (self.model_type, *self.aliases) and not is_classifier(raw)

    def config_from_hf(
        self,
        raw: Mapping[str, Any],
        config_class: type[Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> Any:
        """Builds the config from config.json. A missing entry takes the default of the config class.

        Args:
            raw: config.json.
            config_class: class of the config. Defaults to the architecture's.
            overrides: values of fields that take precedence over config.json.

        Raises:
            ConfigError: An entry has an invalid or unsupported value.
        """
        config_class = config_class or self.config_class
        entries = self.read_entries(raw)
        for name, accepted in (*self.activations.items(), *self.accepted.items()):
            refuse(entries, name, unless=(None, *accepted))
        values = shared_fields(entries, config_class)
        names = {field.name for field in fields(config_class)}
        for name, accepted in self.accepted.items():
            if name == "partial_rotary_factor":  # either spelling
                refuse(rope_entry(entries), name, unless=(None, *accepted))
        if "rope_theta" in names:
            values |= self.read_rope(entries, config_class.rope_theta)
        return build_config(config_class, {**values, **(overrides or {})})

    def config_to_hf(self, config: Any) -> dict[str, Any]:
        """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read.

        They don't include `architectures`, `model_type` and the dtype.
        """
        activations = {name: values[0] for name, values in self.activations.items()}
        return self.write_entries(config, {**activations, **written_fields(config)})

    def with_layouts_for(self, config: Any) -> Architecture:
        """Returns this architecture with the layouts for a config."""
        if self.layouts_of_config is None:
            return self
        return replace(self, layouts=self.layouts_of_config(config), layouts_of_config=None)

    @property
    def layout_of_new(self) -> Layout:
        """The layout in which a new model is saved."""
        layout = self.layouts[0]
        for prefix, (stored_prefix, *_) in self.prefixes.items():
            layout = layout.with_prefix(prefix, stored_prefix)
        return layout

    @property
    def module_layout(self) -> Layout:
        """The layout of parameters in transformers' modules, whose names adapters of PEFT have."""
        rules = (rule for rule in self.layouts[self.layout_of_modules].rules if not isinstance(rule, PerExpert))
        return Layout(tuple(rules), prefixes=self.module_prefixes)

    def module_names(self, name: str, shapes: Mapping[str, Shape]) -> list[str]:
        """Returns the names in transformers' modules of what holds a parameter: today's, then those of old versions.

        Of vision-language models until 4.51, and of mixtures until 5.0, modules had the names of checkpoints.
        """
        part = next(self.module_layout.slices_of(name, shapes))
        names = [part.stored_name]
        for layout in self.layouts:
            stored_prefixes = [
                (prefix, other) for prefix, others in self.prefixes.items() if name.startswith(prefix)
                for other in others if other
            ]  # fmt: skip
            for variant in [layout.with_prefix(*pair) for pair in stored_prefixes] or [layout]:
                old = next(variant.slices_of(name, shapes))
                if replace(old, stored_name=part.stored_name) == part:
                    names.append(old.stored_name)
        return list(dict.fromkeys(names))

    @property
    def wrapper_layout(self) -> Layout:
        """`module_layout` for our modules under the names of transformers, except for biases of routers.

        Our interleaved and transposed weights differ from transformers', so they have other names. Modules of a user's
        own class keep their names.
        """

        def renamed(rule: Rule) -> Iterator[Rule]:
            match rule:
                case Interleaved():
                    yield Rename(f"{rule.path}_split", rule.path)
                case Transposed():
                    yield Rename(f"{rule.path}_transposed", rule.path)
                case Rename() if self.has_own_layout or rule.path.count(".") != rule.stored_path.count("."):
                    return  # transformers has a router's bias in another module
                case Fused() | ModuleRules() | Rename():
                    yield rule

        return Layout(tuple(chain.from_iterable(map(renamed, self.module_layout.rules))))

    def interleaves(self, name: str) -> bool:
        """Returns whether transformers' modules interleave this parameter with others, head by head.

        Adapters of PEFT cannot have an update of such a parameter alone.
        """
        rules = self.layouts[0].rules
        return any(isinstance(rule, FusedByHead) and rule.path_in(name) is not None for rule in rules)

    def build(
        self, config: Any, model_class: type[LanguageModel] = LanguageModel, device: torch.device | str | None = None
    ) -> Any:
        """Builds a model with random weights.

        Args:
            config: config of the model.
            model_class: class of the model if it is a subclass of the architecture's, else ignored.
            device: device of the weights. Defaults to torch's default device.
        """
        make: Callable[..., LanguageModel] = (
            model_class if issubclass(model_class, self.model_class) else self.model_class
        )
        return make(config, device=device)

    def build_on_meta(self, config: Any, model_class: type[LanguageModel] = LanguageModel) -> Any:
        """Builds a model on the meta device, without weights. The arguments are those of `build`."""
        return self.build(config, model_class, "meta")

    def layout_of(self, stored: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> Layout:
        """Returns the layout and prefixes of a checkpoint: those under which most parameters are stored.

        If several layouts have the same names, most shapes decide.

        Args:
            stored: shapes of the stored tensors, by name.
            shapes: shapes of the parameters, by name.
        """

        def count(layout: Layout) -> tuple[int, int]:  # checks one slice per parameter: experts can be any number
            slices = [next(layout.slices_of(name, shapes)) for name in shapes]
            found = [part.stored_shape == stored[part.stored_name] for part in slices if part.stored_name in stored]
            return len(found), sum(found)

        def with_best_prefixes(layout: Layout) -> Layout:
            for prefix, stored_prefixes in self.prefixes.items():
                layout = max((layout.with_prefix(prefix, other) for other in stored_prefixes), key=count)
            return layout

        return max(map(with_best_prefixes, self.layouts), key=count)


_LAYER = re.compile(r"(?:(?:model|language_model)\.)*layers\.(\d{1,9})\..+")


def is_beyond_last_layer(name: str, num_hidden_layers: int) -> bool:
    """Returns whether a stored tensor belongs to a layer with an index of `num_hidden_layers` or more."""
    match = _LAYER.fullmatch(name)
    return match is not None and int(match[1]) >= num_hidden_layers

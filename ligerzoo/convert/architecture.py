"""What the loader must know of an architecture: its classes, and how its config and tensors are spelled on disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ligerzoo.convert.weights import Layout, Shape
from ligerzoo.models.causal_lm import CausalLM

_ROTARY_BUFFER = re.compile(r"(.+\.)?rotary_emb\.inv_freq")


def is_rotary_buffer(name: str) -> bool:
    """Whether the tensor is a rotary embedding's frequencies: old Llama 2 files have them, and their values must not be
    used."""
    return _ROTARY_BUFFER.fullmatch(name) is not None


@dataclass(frozen=True)
class Architecture:
    """One architecture as Hugging Face's checkpoints spell it.

    Attributes:
        model_type: the entry of config.json.
        hf_class: its class in transformers, for the `architectures` entry of config.json.
        model_class: ours.
        config_from_hf: config.json to our config.
        config_to_hf: our config to config.json, without `architectures`, `model_type` and the dtype.
        layouts: the ways in which its tensors may stand on disk; a new model is saved in the first.
        prefixes: what our names begin with, and what may stand there on disk, in any layout and for each of them by
            itself; a new model gets the first. A checkpoint of the bare decoder (`LlamaModel`) has no "model.".
        is_extra_tensor: whether a tensor of that name on disk is none of the model's, but is kept and saved with it.
    """

    model_type: str
    hf_class: str
    model_class: type[CausalLM]
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    config_to_hf: Callable[[Any], dict[str, Any]]
    layouts: tuple[Layout, ...] = (Layout(),)
    prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"model.": ("model.", "")})
    is_extra_tensor: Callable[[str], bool] = is_rotary_buffer

    @property
    def layout_of_new(self) -> Layout:
        """The layout in which a new model is saved."""
        layout = self.layouts[0]
        for ours, (theirs, *_) in self.prefixes.items():
            layout = layout.with_prefix(ours, theirs)
        return layout

    def build_on_meta(self, config: Any, model_class: type[CausalLM] = CausalLM) -> Any:
        """A model of that config without weights: of `model_class`, if that is a subclass of ours."""
        make: Callable[[Any], CausalLM] = model_class if issubclass(model_class, self.model_class) else self.model_class
        with torch.device("meta"), _NothingDrawn():
            return make(config)

    def layout_of(self, stored: Collection[str], shapes: Mapping[str, Shape]) -> Layout:
        """The layout of a checkpoint that holds tensors of these names: the one that finds the most of ours there.

        Args:
            stored: names of the tensors on disk.
            shapes: of our tensors.
        """

        def found(layout: Layout) -> int:  # by the first piece of each, for experts can be any number
            return sum(next(layout.pieces_of(ours, shapes)).theirs in stored for ours in shapes)

        def spelled(layout: Layout) -> Layout:
            for ours, spellings in self.prefixes.items():
                layout = max((layout.with_prefix(ours, theirs) for theirs in spellings), key=found)
            return layout

        return max(map(spelled, self.layouts), key=found)


class _NothingDrawn(TorchFunctionMode):
    """Leaves out random initialization: to draw into meta tensors, torch would import its compiler (for seconds)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_initialization = getattr(func, "__module__", None) == nn.init.__name__
        return kwargs["tensor"] if is_initialization else func(*args, **kwargs)


_LAYER = re.compile(r"(?:(?:model|language_model)\.)*layers\.(\d{1,9})\..+")


def is_beyond_last_layer(name: str, num_hidden_layers: int) -> bool:
    """Whether the tensor belongs to a layer that the config leaves out."""
    match = _LAYER.fullmatch(name)
    return match is not None and int(match[1]) >= num_hidden_layers

"""`AutoModel`: models of any architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ligerzoo import convert
from ligerzoo.convert import architecture_for_config
from ligerzoo.convert.weights import Rule
from ligerzoo.models.causal_lm import CausalLM


class AutoModel:
    """Loads and builds models of any architecture, and registers new ones."""

    from_pretrained = CausalLM.from_pretrained

    @staticmethod
    def from_config(
        config: Any, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> CausalLM:
        """Builds a model with random weights.

        Args:
            config: config of an architecture in ligerzoo.models, or of a registered class.
            device: device of the weights. Defaults to torch's default device.
            dtype: dtype of the weights. Defaults to torch's default dtype.

        Raises:
            ConfigError: The config's class belongs to no model class.
        """
        make: Callable[..., CausalLM] = architecture_for_config(type(config)).model_class
        given = {"device": device, "dtype": dtype}
        return make(config, **{name: value for name, value in given.items() if value is not None})

    @staticmethod
    def register(
        config_class: type, model_class: type[CausalLM], *, model_type: str, layout: tuple[Rule, ...] = ()
    ) -> None:
        """Makes a class of your own save, load and show in `ligerzoo info` like those of ligerzoo.models.

        Registration lasts as long as the process. Register the same classes before you load their checkpoints.

        Args:
            config_class: config of the model: a frozen dataclass with fields that JSON can represent. If it extends
                `ligerzoo.models.config.DecoderConfig`, the types of its values are checked.
            model_class: a subclass of CausalLM that is built as `model_class(config)`.
            model_type: `model_type` in config.json.
            layout: rules of `ligerzoo.convert.weights` for tensors that checkpoints store under other names or shapes.
                The default stores each parameter under its own name, or as the nearest base class in ligerzoo.models.

        Raises:
            ConfigError: An argument is invalid, or the name or a class is in use already.
        """
        convert.register(config_class, model_class, model_type=model_type, layout=layout)

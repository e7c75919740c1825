"""Loads a transformers model and applies the kernels, in one call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM

from ligerzoo.integrations.kernels.apply_kernels import apply


class AutoKernelModelForCausalLM:
    """`transformers.AutoModelForCausalLM` whose models compute with ligerzoo's kernels."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, kernels: Mapping[str, bool] | None = None, **options: Any
    ) -> Any:
        """Loads a model with transformers, and calls `apply`.

        Args:
            pretrained_model_name_or_path: the name on the hub, or a directory.
            args: other positional arguments of `transformers.AutoModelForCausalLM.from_pretrained`.
            kernels: keyword arguments of `ligerzoo.integrations.apply`, such as `{"attention": True}`.
            options: keyword arguments of `transformers.AutoModelForCausalLM.from_pretrained`.

        Returns:
            The transformers model. Its `kernel_report` is the report of `apply`. With `output_loading_info=True`, a
            tuple of the model and a dict, as transformers returns.

        Raises:
            TypeError: `kernels` is not a mapping of arguments of `apply`, or an option is an argument of `apply`.
        """
        if kernels is None:
            kernels = {}
        switches = [name for name in inspect.signature(apply).parameters if name != "hf_model"]
        if not isinstance(kernels, Mapping) or not set(switches).issuperset(kernels):
            raise TypeError(
                f"AutoKernelModelForCausalLM.from_pretrained: kernels is {kernels!r}; "
                f"expected a mapping from names of arguments of apply ({', '.join(switches)}) to True or False"
            )
        for name in options:
            if name in switches:
                raise TypeError(
                    f"from_pretrained: {name}={options[name]!r} is an argument of apply; expected options of "
                    f"transformers. Pass kernels={{{name!r}: {options[name]!r}}}"
                )
        loaded: Any = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.kernel_report = apply(model, **kernels)
        return loaded

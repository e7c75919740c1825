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
            kernels: arguments of `ligerzoo.integrations.apply`, such as `{"attention": True}`.
            options: keyword arguments of `transformers.AutoModelForCausalLM.from_pretrained`.

        Returns:
            The transformers model. Its `kernel_report` is the report of `apply`.

        Raises:
            TypeError: an argument of `apply` is not in `kernels`.
        """
        for name in options:
            if name in inspect.signature(apply).parameters:
                raise TypeError(
                    f"from_pretrained: {name}={options[name]!r} is an argument of apply; expected options of "
                    f"transformers. Pass kernels={{{name!r}: {options[name]!r}}}"
                )
        model: Any = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **options)
        model.kernel_report = apply(model, **(kernels or {}))
        return model

"""A class that loads a model with transformers and calls `apply`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM

from ligerzoo.errors import WrongTypeError
from ligerzoo.foreign_names import OURS
from ligerzoo.integrations.kernels.apply_kernels import apply


class AutoKernelModelForCausalLM:
    """`transformers.AutoModelForCausalLM` whose models compute with ligerzoo's kernels."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: object,
        *args: object,
        kernels: Mapping[str, bool] | None = None,
        **options: object,
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
            TypeError: `kernels` is not a mapping of arguments of `apply`, or an option is an argument of `apply`, or of
                liger-kernel's `apply_liger_kernel_to_...`.
        """
        kernels = {} if kernels is None else kernels
        switches = [*inspect.signature(apply).parameters][1:]
        if not isinstance(kernels, Mapping) or not set(switches).issuperset(kernels):
            expected = f"a mapping from names of arguments of apply ({', '.join(switches)}) to True or False"
            raise WrongTypeError(f"kernels is {kernels!r}", where="from_pretrained", expected=expected)
        for name, value in options.items():
            if (switch := OURS.get(name, name)) not in switches:
                continue
            what, remedy = f"{name}={value!r} is an argument of apply", f"Pass kernels={{{switch!r}: {value!r}}}."
            raise WrongTypeError(what, where="from_pretrained", expected="options of transformers", remedy=remedy)
        loaded = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.kernel_report = apply(model, **kernels)
        return loaded

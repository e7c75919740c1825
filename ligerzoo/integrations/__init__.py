"""Integrations with other libraries, which are optional. Each module imports the library that it is for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligerzoo.integrations.kernels import AutoKernelModelForCausalLM as AutoKernelModelForCausalLM
    from ligerzoo.integrations.kernels import MissingKernelWarning as MissingKernelWarning
    from ligerzoo.integrations.kernels import ModuleReport as ModuleReport
    from ligerzoo.integrations.kernels import Report as Report
    from ligerzoo.integrations.kernels import apply as apply

__all__ = ["AutoKernelModelForCausalLM", "MissingKernelWarning", "ModuleReport", "Report", "apply"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported at first use, since they import transformers
        return getattr(import_module("ligerzoo.integrations.kernels"), name)
    raise AttributeError(f"module 'ligerzoo.integrations' has no attribute {name!r}")

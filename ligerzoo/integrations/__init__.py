"""Integrations with other libraries, which are optional. Each module imports the library that it is for."""

from typing import TYPE_CHECKING

from ligerzoo.exports import lazy

if TYPE_CHECKING:
    from ligerzoo.integrations.kernels import AutoKernelModelForCausalLM as AutoKernelModelForCausalLM
    from ligerzoo.integrations.kernels import MissingKernelWarning as MissingKernelWarning
    from ligerzoo.integrations.kernels import ModuleReport as ModuleReport
    from ligerzoo.integrations.kernels import Report as Report
    from ligerzoo.integrations.kernels import apply as apply
    from ligerzoo.integrations.transformers import wrap as wrap

__all__ = ["AutoKernelModelForCausalLM", "MissingKernelWarning", "ModuleReport", "Report", "apply", "wrap"]

# Imported at first use, since they import transformers.
__getattr__, __dir__ = lazy(
    __name__,
    {**dict.fromkeys(__all__, "ligerzoo.integrations.kernels"), "wrap": "ligerzoo.integrations.transformers"},
    submodules=("kernels", "parity", "tasks", "torchao", "transformers"),
)

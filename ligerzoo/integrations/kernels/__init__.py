"""ligerzoo's kernels in transformers' models. Imports transformers."""

from ligerzoo.integrations.kernels.apply_kernels import apply
from ligerzoo.integrations.kernels.auto import AutoKernelModelForCausalLM
from ligerzoo.integrations.kernels.report import ModuleReport, Report

__all__ = ["AutoKernelModelForCausalLM", "ModuleReport", "Report", "apply"]

"""ligerzoo's kernels in transformers' models. Imports transformers."""

from ligerzoo.integrations.kernels.apply_kernels import apply
from ligerzoo.integrations.kernels.auto import AutoKernelModelForCausalLM
from ligerzoo.integrations.kernels.promised import MissingKernelWarning
from ligerzoo.integrations.kernels.report import ModuleReport, Report

__all__ = ["AutoKernelModelForCausalLM", "MissingKernelWarning", "ModuleReport", "Report", "apply"]

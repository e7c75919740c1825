"""What `apply` replaced in a model, what it kept, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ligerzoo.integrations.kernels.replace import KernelModule


@dataclass(frozen=True)
class ModuleReport:
    """What `apply` did with one module.

    Args:
        name: the name of the module in the model; "" for the model itself.
        class_name: the name of its class.
        kernel: the kernel that it computes with; None if it was kept.
        reason: why it was kept; None if it was replaced.
    """

    name: str
    class_name: str
    kernel: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Report:
    """The result of `apply`. `print(report)` shows it with equal modules of all layers in one line.

    Args:
        modules: one entry per module of the model.
        check: how the model as a whole was compared with itself before.
        missing: the kernels that docs/kernels-in-transformers.md promises for the model and that no module uses, by
            the `model_type` of the part of the model, such as `{"llama": ("rope",)}`.
    """

    modules: Sequence[ModuleReport]
    check: str
    missing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    _instances: list[KernelModule] = field(default_factory=list, repr=False)

    @property
    def replaced(self) -> list[ModuleReport]:
        """The modules that compute with a kernel."""
        return [module for module in self.modules if module.kernel is not None]

    @property
    def kept(self) -> list[ModuleReport]:
        """The modules that compute as before."""
        return [module for module in self.modules if module.kernel is None]

    def undo(self) -> None:
        """Gives all replaced modules their own class again. Does nothing the second time.

        Raises:
            RuntimeError: a replaced module or its forward has been wrapped since, for instance by `fully_shard` or by
                accelerate. Nothing is undone.
        """
        parts = [part for module in self._instances for part in module.kernel_parts()]
        instances = list(dict.fromkeys([*self._instances, *parts]))
        if wrapped := _names(module for module in instances if "kernel_original" not in vars(type(module))):
            raise RuntimeError(
                f"Report.undo: replaced modules have another class now ({wrapped}); expected the class that apply gave "
                "them. Call undo before sharding or wrapping the model"
            )
        if hooked := _names(module for module in instances if _has_other_forward(module)):
            raise RuntimeError(
                f"Report.undo: another library has replaced the forward of instances ({hooked}), which calls the "
                "kernels; expected the forward of their class. Remove it first: accelerate adds it for mixed precision "
                "(delete the model's attribute `forward`) and for device maps "
                "(accelerate.hooks.remove_hook_from_module(model, recurse=True))"
            )
        for module in instances:
            vars(module).pop("kernel_defers", None)
            vars(module).pop("forward", None)  # the bound method of its class
            module.__class__ = vars(type(module))["kernel_original"]
        self._instances.clear()

    def describe_missing(self) -> str:
        """Returns the kernels that are missing, such as "rope and add_rms_norm in llama"."""
        return "; ".join(f"{' and '.join(kernels)} in {family}" for family, kernels in self.missing.items())

    def __str__(self) -> str:
        promised = f"Promised but not used: {self.describe_missing()}. " if self.missing else ""
        counts = f"{len(self.replaced)} of {len(self.modules)} modules replaced."
        lines = [f"{promised}{counts} {self.check}", "", "replaced:"]
        lines += _table([(m.name, m.class_name, m.kernel or "") for m in self.replaced]) or ["  nothing"]
        lines += ["", "kept:"]
        lines += _table([(m.name, m.class_name, m.reason or "") for m in self.kept]) or ["  nothing"]
        return "\n".join(lines)


def _names(modules: Iterable[KernelModule]) -> str:
    """Returns the names of the classes of modules."""
    return ", ".join(sorted({type(module).__name__ for module in modules}))


def _has_other_forward(module: KernelModule) -> bool:
    """Whether the instance has an attribute `forward` other than the method of its class."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Returns aligned lines, one for all modules whose names differ in layer numbers only."""
    counts = Counter((re.sub(r"\b\d+\b", "*", name) or "(the model)", *others) for name, *others in rows)
    cells = [(f"{count} x", *row) for row, count in counts.items()]
    first, second, third = (max((len(row[column]) for row in cells), default=0) for column in range(3))
    return [f"  {row[0]:>{first}}  {row[1]:<{second}}  {row[2]:<{third}}  {row[3]}" for row in cells]

"""What the checks of a model find on this machine, and the certificate that lists it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch

Status = Literal["holds", "fails", "not covered"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        group: "kernels", "model" or "exact".
        name: what was checked.
        status: "holds"; "fails", although it is claimed; or "not covered" on this machine or for this model.
        detail: figures, or the reason.
    """

    group: str
    name: str
    status: Status
    detail: str


@dataclass(frozen=True)
class Certificate:
    """The findings for a model.

    Attributes:
        model: its name.
        machine: device and versions.
        findings: in the order of the checks.
        seconds: time of the checks.
    """

    model: str
    machine: dict[str, str]
    findings: Sequence[Finding]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether nothing fails that is claimed."""
        return all(finding.status != "fails" for finding in self.findings)

    def as_json(self) -> dict[str, object]:
        """Returns what `ligerzoo doctor --json` prints."""
        return {**asdict(self), "holds": self.holds}

    def __str__(self) -> str:
        lines = [f"{self.model} on {', '.join(f'{name} {value}' for name, value in self.machine.items())}"]
        width = max(len(finding.name) for finding in self.findings)
        for group in dict.fromkeys(finding.group for finding in self.findings):
            lines += ["", group]
            for one in self.findings:
                if one.group == group:
                    lines.append(f"  {one.name:{width}}  {one.status:11}  {one.detail}")
        failed = [finding.name for finding in self.findings if finding.status == "fails"]
        verdict = f"fails: {', '.join(failed)}" if failed else "nothing fails"
        return "\n".join([*lines, "", f"{verdict} ({self.seconds:.0f} s)"])


def machine_of(device: torch.device) -> dict[str, str]:
    """Returns the name of a device, and the versions that its results depend on."""
    found = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    for package in ("triton", "ligerzoo"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

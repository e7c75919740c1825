"""A certificate for a machine and a model: kernels against fp64, and what exact results rest on.

certificate = examine(model, "my model")
print(certificate)
certificate.holds
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import torch

from ligerzoo.doctor.default import default_models
from ligerzoo.doctor.exact import exact_findings
from ligerzoo.doctor.findings import Certificate, Finding, Status, machine_of
from ligerzoo.doctor.kernels import kernel_findings
from ligerzoo.doctor.paths import path_findings
from ligerzoo.models import CausalLM

__all__ = ["Certificate", "Finding", "Status", "default_models", "examine"]


def examine(
    model: CausalLM,
    name: str,
    *,
    placements: int = 200,
    seed: int = 0,
    report: Callable[[Finding], object] = lambda finding: None,
) -> Certificate:
    """Checks a model on its device. Takes less than two minutes for a model of 8 billion parameters on a GPU.

    Args:
        model: in evaluation mode. Its weights and gradients do not change.
        name: of the model, for the certificate.
        placements: texts whose log-probabilities are sampled and computed again.
        seed: of inputs, lengths and prompts.
        report: gets each finding when it is there.
    """
    start, findings = time.monotonic(), []
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for finding in _findings(model, placements, random.Random(seed)):
            findings.append(finding)
            report(finding)
    return Certificate(name, machine_of(model.device), findings, round(time.monotonic() - start, 1))


def _findings(model: CausalLM, placements: int, chance: random.Random) -> Iterator[Finding]:
    yield from kernel_findings(model, chance)
    yield from path_findings(model, chance)
    yield from exact_findings(model, placements, chance)

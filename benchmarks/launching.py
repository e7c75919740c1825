"""Host time per call: microseconds for a small forward, and for forward and backward.

    python -m benchmarks.launching --out benchmarks/results/launching.json

The tensors are so small that the GPU always waits for the host. Compares the operations that training calls in every
layer with torch's own and liger-kernel's. On any machine, `--without-launches` runs the Triton path with tensors on the
CPU and kernels that do nothing: what remains is the time of Python and of autograd.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks.measure import seconds_per_call, write_result
from ligerzoo import kernels
from ligerzoo.kernels import dispatch
from ligerzoo.kernels.jit import Kernel

Function = Callable[..., Any]
CALLS, ROUNDS, WARMUP = 50, 40, 100


def leaf(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device).bfloat16().requires_grad_()


def liger(name: str, *options: Any) -> Function:
    apply: Function = getattr(importlib.import_module("liger_kernel.ops"), name).apply
    return lambda *inputs: apply(*inputs, *options)


def cases(device: str) -> dict[str, tuple[list[Tensor], dict[str, Callable[[], Function]]]]:
    """Returns for each operation its inputs and its providers."""
    x, y, weight = leaf(64, 256, device=device), leaf(64, 256, device=device), leaf(256, device=device)
    bias = leaf(256, device=device)
    q, k = leaf(1, 64, 4, 64, device=device), leaf(1, 64, 2, 64, device=device)
    angle = torch.randn(1, 64, 32, device=device)
    cos, sin = angle.cos(), angle.sin()
    target = torch.randint(256, (64,), device=device)
    return {
        "rms_norm": (
            [x, weight],
            {
                "ligerzoo": lambda: kernels.rms_norm,
                "torch": lambda: lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
                "liger-kernel": lambda: liger("LigerRMSNormFunction", 1e-6),
            },
        ),
        "add_rms_norm": (
            [x, y, weight],
            {
                "ligerzoo": lambda: lambda *inputs: kernels.add_rms_norm(*inputs)[0],
                "torch": lambda: lambda x, y, w: F.rms_norm(x + y, w.shape, w, 1e-6),
            },
        ),
        "layer_norm": (
            [x, weight, bias],
            {
                "ligerzoo": lambda: kernels.layer_norm,
                "torch": lambda: lambda x, w, b: F.layer_norm(x, w.shape, w, b),
                "liger-kernel": lambda: liger("LigerLayerNormFunction", 1e-5),
            },
        ),
        "swiglu": (
            [x, y],
            {
                "ligerzoo": lambda: kernels.swiglu,
                "torch": lambda: lambda gate, up: F.silu(gate) * up,
                "liger-kernel": lambda: liger("LigerSiLUMulFunction"),
            },
        ),
        "rope": ([q, k], {"ligerzoo": lambda: lambda q, k: kernels.rope(q, k, cos, sin)[0]}),
        "cross_entropy": (
            [x],
            {
                "ligerzoo": lambda: lambda x: kernels.cross_entropy(x, target),
                "torch": lambda: lambda x: F.cross_entropy(x.float(), target),
            },
        ),
    }


def microseconds(call: Callable[[], object], device: str) -> float:
    return 1e6 * seconds_per_call(call, device=device, warmup=WARMUP, rounds=ROUNDS, calls=CALLS)


def measure(function: Function, inputs: list[Tensor], device: str) -> dict[str, float]:
    constants = [t.detach() for t in inputs]
    upstream = torch.ones_like(function(*inputs))
    return {
        "forward_us": microseconds(lambda: function(*constants), device),
        "forward_backward_us": microseconds(
            lambda: torch.autograd.grad(function(*inputs), inputs, upstream, allow_unused=True), device
        ),
    }


def remove_launches() -> None:
    """Runs the Triton path with CPU tensors, without launching any kernel."""
    dispatch.INTERPRETING = True
    Kernel.__getitem__ = lambda self, programs: lambda *arguments, **options: None  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/launching.json"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--without-launches", action="store_true", help="time the Triton path's Python, on a CPU")
    arguments = parser.parse_args()
    if arguments.without_launches:
        arguments.device = "cpu"
        remove_launches()
    results: dict[str, dict[str, Any]] = {}
    for name, (inputs, providers) in tqdm(cases(arguments.device).items(), unit="operation"):
        results[name] = {}
        for provider, load in providers.items():
            try:
                results[name][provider] = measure(load(), inputs, arguments.device)
            except Exception as error:  # a peer that is not installed or fails on this machine
                results[name][provider] = {"error": str(error).split("\n", 1)[0]}
    write_result(arguments.out, {"what": __doc__, "operations": results}, {"operations": results})


if __name__ == "__main__":
    main()

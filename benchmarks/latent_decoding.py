"""Decoding with latent attention: one token per sequence attends to 8,192 latent vectors, in batches of 1 and 32.

    python -m benchmarks.latent_decoding --out benchmarks/results/latent_decoding.json

The kernel is measured against torch's attention with one key-value head. The least time is that of one read of the
cache, 1,152 bytes per token, at the bandwidth of the command line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import interleaved, write_result
from ligerzoo.kernels import latent_decode_attention

RANK, ROPE, SCALE = 512, 64, 192**-0.5
HEADS = {"DeepSeek-V3": 128, "GLM-4.7-Flash": 20}


def by_torch(q: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor) -> Tensor:
    """Computes `latent_decode_attention` with torch's attention of 576 features."""
    keys = torch.cat([latents, k_rope], -1)[:, None]
    out = F.scaled_dot_product_attention(torch.cat([q, q_rope], -1)[:, None], keys, latents[:, None], scale=SCALE)
    return out[:, 0]


def measure(batch: int, heads: int, tokens: int, device: str, gb_per_second: float) -> dict[str, float]:
    """Returns milliseconds of both, the kernel's share of the bandwidth, and its largest error in bf16."""
    shapes = ((batch, heads, RANK), (batch, heads, ROPE), (batch, tokens, RANK), (batch, tokens, ROPE))
    inputs = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    functions = {
        "ligerzoo": lambda: latent_decode_attention(*inputs, scale=SCALE),
        "torch": lambda: by_torch(*inputs),
    }
    truth = by_torch(*(x.float() for x in inputs))
    errors = {f"error of {name}": float((f() - truth).norm() / truth.norm()) for name, f in functions.items()}
    times = interleaved(functions, device=device, rounds=50 if device == "cuda" else 2)
    floor = sum(x.nbytes for x in inputs[2:]) / gb_per_second / 1e6
    return {**times, "floor": floor, "floor / ligerzoo": floor / times["ligerzoo"], **errors}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/latent_decoding.json"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--gb-per-second", type=float, default=4800, help="bandwidth of the GPU: of an H200, 4,800")
    options = parser.parse_args()
    rows = {
        f"{name}, batch {batch}": measure(batch, heads, options.tokens, options.device, options.gb_per_second)
        for name, heads in HEADS.items()
        for batch in (1, 32)
    }
    write_result(options.out, {"rows": rows}, {"rows": rows})

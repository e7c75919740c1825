"""FLOPs, the share of the GPU's peak, memory and time of a step."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ligerzoo.models import CausalLM
from ligerzoo.models.config import DecoderConfig

_PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250, "B100": 1750, "H200": 989, "H100": 989, "H800": 989, "GH200": 989, "H20": 148,
    "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A40": 150, "A10": 125, "RTX 4090": 165,
    "RTX 5090": 209,
}  # fmt: skip
"""Peak dense bf16 TFLOP/s with fp32 accumulation by a part of the device's name, from the vendors' data sheets."""


def peak_flops(device: torch.device) -> float | None:
    """Returns the peak bf16 FLOP/s of a GPU, or None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part in sorted(_PEAK_TFLOPS, key=len, reverse=True):
        if part in name:
            return _PEAK_TFLOPS[part] * 1e12
    return None


class StepFlops:
    """Counts the FLOPs of a training step: forward and backward, without what checkpointing recomputes.

    6 FLOPs for each token and each weight of a matrix product (of the experts, the share that a token uses), and 12 for
    each feature of the attention heads, layer, token and token that it attends to (Kaplan et al. 2020). Sliding windows
    count as full attention.
    """

    def __init__(self, model: CausalLM) -> None:
        config = model.config
        embedding = model.get_input_embeddings().weight
        head: nn.Module | None = model.get_output_embeddings()
        used = 1.0
        if experts := getattr(config, "num_experts", None):
            used = (model.experts_per_token or experts) / experts
        tables = {id(embedding), *(id(table.weight) for table in model.model.embedding_tables)}
        weights = {id(weight): weight for weight in model.parameters() if weight.dim() > 1 and id(weight) not in tables}
        if head is not None:
            weight: nn.Parameter = head.weight  # type: ignore[assignment]
            weights[id(weight)] = weight
        matrices = sum(weight.numel() * (used if weight.dim() == 3 else 1) for weight in weights.values())
        heads = getattr(config, "num_attention_heads", 0)
        if isinstance(config, DecoderConfig):
            head_dim = (config.key_size + config.value_size) / 2
        else:
            head_dim = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0)
        self.per_token = 6 * matrices
        self.per_attended_token = 12 * heads * head_dim * getattr(config, "num_hidden_layers", 0)

    def __call__(self, position_ids: Tensor, tokens: int) -> float:
        """Returns the FLOPs of rows.

        Args:
            position_ids: (B, T), on the CPU: the position of each token in its segment.
            tokens: number of tokens that are not padding.
        """
        return self.per_token * tokens + self.per_attended_token * float((position_ids + 1).sum())


def peak_memory_gib(device: torch.device) -> float:
    """Returns the largest memory so far in GiB: of tensors on a GPU, of the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Stopwatch:
    """Adds up the time of named parts, each of which waits for the device at its end.

    Attributes:
        seconds: by "NAME_seconds".
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Times the block."""
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        key = f"{name}_seconds"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start

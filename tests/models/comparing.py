"""What tests against transformers compare, and how."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from ligerzoo import AutoModel
from ligerzoo.convert import architecture_for
from ligerzoo.convert.weights import DiskTensors, shapes_of
from ligerzoo.models import CausalLM

TOLERANCE = 2e-5
"""Of the largest magnitude, in fp32 on a CPU."""

GPU_TOLERANCE = 1e-4
"""On a GPU, where sums run in other orders: against fp64 transformers' gradients stray by up to 6.0e-5 there, and
ours by up to 6.4e-5 (an H200, Gemma 3 with few keys)."""


def assert_close(ours: Tensor, theirs: Tensor, what: str) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), what
    error, scale = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    tolerance = TOLERANCE if ours.device.type == "cpu" else GPU_TOLERANCE
    assert error <= tolerance * scale, f"{what}: off by {error / scale:.1e} of the largest"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def all_gradients(model: CausalLM, **inputs: Any) -> dict[str, Tensor]:
    """Those of the loss; the model keeps none."""
    model.zero_grad()
    model(**inputs).loss.backward()
    found = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    return found


def load_both(
    directory: Path, dtype: torch.dtype, device: str, theirs: Any = AutoModelForImageTextToText
) -> tuple[Any, PreTrainedModel]:
    """Our model and transformers', which rounds as its eager attention does."""
    model = theirs.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return AutoModel.from_pretrained(directory, dtype=dtype, device=device), model.to(device).eval()


def under_their_names(ours: CausalLM, tensors: dict[str, Tensor], theirs: Collection[str]) -> dict[str, Tensor]:
    """Tensors by our parameters' names, as a weight table has them by transformers'."""
    shapes = shapes_of(tensors)
    layout = architecture_for(type(ours)).layout_of(theirs, shapes)
    return dict(DiskTensors(layout.pieces(shapes), tensors))


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return {name: tensor for file in files for name, tensor in load_file(directory / file).items()}


def raw_bytes(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {name: (t.dtype, t.shape, t.flatten().view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


def assert_as_exact(ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
    """In bf16: fused kernels round less often than transformers' eager steps, so what they must not do is stray further
    from the same weights in fp32. On a GPU the two round each in its own way, and errors of a few tokens are draws."""
    allowed = 1.05 if ours.device.type == "cpu" else 1.2
    assert (ours - truth).norm() <= allowed * (theirs - truth).norm()

"""Comparison helpers for tests against transformers."""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from ligerzoo import AutoModel
from ligerzoo.convert import architecture_of_model
from ligerzoo.convert.stored_tensors import StoredTensors
from ligerzoo.convert.tensor_slices import shapes_of
from ligerzoo.device import emulated_dtypes
from ligerzoo.layers import attention_paths
from ligerzoo.models import CausalLM

TOLERANCE = 2e-5
"""Maximum error in fp32 on a CPU, relative to the largest magnitude."""

GPU_TOLERANCE = 1e-4
"""Maximum error on a GPU, where sums are accumulated in other orders.

On an H200, gradients of "gemma3 minimal config" differ from fp64 by up to 6.0e-5 in transformers and 6.4e-5 in ours.
"""


def assert_close(ours: Tensor, theirs: Tensor, what: str, scale: float | None = None) -> None:
    """Errors are relative to `scale`; None for the largest magnitude of `theirs`."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), what
    error = (ours - theirs).abs().max().item()
    largest = theirs.abs().max().item() if scale is None else scale
    assert is_close(ours, theirs, scale), f"{what}: error {error / largest:.1e} relative to the largest value"


def is_close(ours: Tensor, theirs: Tensor, scale: float | None = None) -> bool:
    """Whether `assert_close` passes for tensors of one shape and dtype."""
    scale = theirs.abs().max().item() if scale is None else scale
    return (ours - theirs).abs().max().item() <= tolerance_on(ours.device) * scale


def tolerance_on(device: torch.device) -> float:
    return TOLERANCE if device.type == "cpu" else GPU_TOLERANCE


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def all_gradients(model: CausalLM, **inputs: Any) -> dict[str, Tensor]:
    """Returns the gradients of the loss, by parameter name, and clears them in the model."""
    model.zero_grad()
    model(**inputs).loss.backward()
    found = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    return found


def assert_same_gradients(
    ours: CausalLM, expected: Mapping[str, Tensor], inputs: Mapping[str, Any], scales: Mapping[str, float] | None = None
) -> None:
    """Compares the gradients of our model, whose loss for these inputs has gone backward, with those of transformers.

    Those that differ are compared with fp64: our error may be as large as the tolerance, or twice that of transformers.

    Args:
        ours: our model.
        expected: the gradients of the model of transformers.
        inputs: of our model, for fp64.
        scales: of gradients, by their names, see `assert_close`.
    """
    scales = scales or {}
    got = under_their_names(ours, gradients(ours), expected)
    assert got.keys() == expected.keys()
    different = [name for name in expected if not is_close(got[name], expected[name], scales.get(name))]
    if not different:
        return
    exact = copy.deepcopy(ours).double()
    exact.zero_grad()
    exact(**{name: x.double() if is_float(x) else x for name, x in inputs.items()}).loss.backward()
    truth = under_their_names(exact, gradients(exact), expected)
    for name in different:
        our_error, their_error = ((one[name].double() - truth[name]).abs().max() for one in (got, expected))
        scale = truth[name].abs().max() if scales.get(name) is None else scales[name]
        allowed = max(tolerance_on(ours.device) * scale, 2 * their_error)
        assert our_error <= allowed, f"gradient of {name}: error {our_error:.1e}; of transformers {their_error:.1e}"


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def load_both(
    directory: Path, dtype: torch.dtype, device: str, theirs: Any = AutoModelForImageTextToText
) -> tuple[Any, PreTrainedModel]:
    """Loads our model and the transformers model, the latter with eager attention and experts."""
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = theirs.from_pretrained(directory, dtype=dtype, **options)
    return AutoModel.from_pretrained(directory, dtype=dtype, device=device), model.to(device).eval()


def under_their_names(ours: CausalLM, tensors: dict[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames tensors from our parameter names to those of transformers, through the weight table."""
    shapes = shapes_of(tensors)
    layout = architecture_of_model(ours).layout_of(ours.config, shapes_of(theirs), shapes)
    return dict(StoredTensors(layout.slices(shapes), tensors))


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return {name: tensor for file in files for name, tensor in load_file(directory / file).items()}


def raw_bytes(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {name: (t.dtype, t.shape, t.flatten().view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


@contextmanager
def rounding_as_eager() -> Iterator[None]:
    """Within this context, attention in half precision on a CPU rounds scores and probabilities, as eager attention."""
    paths = tuple(path for path in attention_paths.PATHS if path.run is not attention_paths._in_fp32)
    half = attention_paths.Path(attention_paths._is_half_on_cpu, attention_paths._reference)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_paths, "PATHS", (half, *paths))
        yield


def assert_same_vision_training(
    ours: CausalLM,
    theirs: nn.Module,
    tokens: tuple[Tensor, Tensor],
    vision: Mapping[str, Tensor],
    labels: Tensor,
    expected: Any,
) -> None:
    """Compares logits, loss and gradients of a padded batch, in which gradients reach the tower if it has images.

    Args:
        ours: our model.
        theirs: that of transformers.
        tokens: ids and padding mask.
        vision: inputs for images and videos, which may be none.
        labels: of the tokens.
        expected: the output of `theirs` with the labels.
    """
    ids, mask = tokens
    with torch.no_grad():
        logits = ours(ids, mask, **vision).logits
    assert_close(logits[mask == 1], expected.logits[mask == 1], "logits")
    for model in (ours, theirs):
        model.zero_grad()
    loss = ours(ids, mask, labels=labels, **vision).loss
    assert_close(loss, expected.loss, "loss")
    loss.backward()
    expected.loss.backward()
    assert any("vis" in name for name in gradients(ours)) == bool(vision)  # visual, vision_tower
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, **vision}
    assert_same_gradients(ours, gradients(theirs), inputs)  # none of blocks that do not run


def assert_same_bf16(ours: Tensor, theirs: Tensor) -> None:
    """Asserts that results in bf16 differ by at most 2 ulps of the largest number.

    A CPU that emulates bf16 rounds products of other shapes otherwise.
    """
    if torch.bfloat16 in emulated_dtypes(ours.device):
        return
    ulp = 2.0 ** (math.floor(math.log2(theirs.abs().max().item())) - 7)
    assert (ours.float() - theirs.float()).abs().max().item() <= 2 * ulp


def assert_errors_as_small(draw: Callable[[], tuple[Tensor, Tensor, Tensor]], device: str, draws: int = 1) -> None:
    """Asserts that our error against fp32 is at most that of transformers, up to a factor.

    Compares the geometric mean of the errors of all tokens. Rounding to bf16 sends one token in a thousand to another
    expert, in either model. The mean square error of thousands of tokens is that of this one.

    Args:
        draw: returns our results for random inputs, those of transformers, and the truth, (..., V) each.
        device: of the models.
        draws: number of draws.
    """
    ratios = []
    for _ in range(draws):
        ours, theirs, truth = draw()
        ours_error, their_error = ((x.double() - truth.double()).norm(dim=-1).flatten() for x in (ours, theirs))
        ratios.append(ours_error.log() - their_error.log())
    ratio = torch.cat(ratios).mean().exp().item()
    assert ratio <= largest_relative_error(device), f"error {ratio:.3f} times that of transformers"


def largest_relative_error(device: str) -> float:
    """Fused kernels round less often than transformers' eager operations, so their results differ.

    On a GPU the rounding of the two is independent, so that the errors of a few tokens vary more.
    """
    return 1.05 if device == "cpu" else 1.2

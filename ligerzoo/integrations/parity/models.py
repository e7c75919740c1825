"""Loads a checkpoint in transformers and here, runs both models and compares their modules and layers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from ligerzoo.errors import LigerzooError
from ligerzoo.hub import AutoModel
from ligerzoo.integrations.parity.modules import beyond_text, module_pairs, not_run, without_counterpart
from ligerzoo.integrations.parity.report import Difference, Parity
from ligerzoo.integrations.parity.trace import HEAD, Point, Trace, TracedModel, nearest
from ligerzoo.models import CausalLM

LAYER = re.compile(r"model\.([a-z_]+|layers\.\d+)")
"""Names of the embedding, the blocks and the final norm of our decoders."""

TRIMMED = 0.1
"""The most tokens, of all, that rounding may send to other experts in half precision without being a difference."""


def compare(
    name_or_path: str | Path,
    inputs: Mapping[str, Tensor],
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Parity:
    """Loads a checkpoint in transformers and here, and compares the two models on one text.

    Args:
        name_or_path: directory or hub id of a causal language model.
        inputs: arguments of our model: `input_ids`, (1, T); and, for a model that reads images, what its processor
            returns.
        revision: branch, tag or commit on the hub.
        dtype: of both models.
        device: of both models.

    Raises:
        LigerzooError: transformers does not have the architecture, or the models share no modules.
    """
    ours = AutoModel.from_pretrained(name_or_path, revision=revision, dtype=dtype, device=device)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    with _quiet():
        theirs = _load_theirs(name_or_path, revision, dtype).to(device).eval()
        return compare_models(ours, theirs, inputs)


def _load_theirs(name_or_path: str | Path, revision: str | None, dtype: torch.dtype) -> PreTrainedModel:
    load = {"pretrained_model_name_or_path": str(name_or_path), "revision": revision, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(**load)
    except ValueError as error:
        what = "transformers does not have the architecture"
        raise LigerzooError(what, where=name_or_path, got=str(error).split("\n")[0]) from error
    auto_class = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return auto_class.from_pretrained(**load, dtype=dtype, attn_implementation="eager")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings and progress bars of transformers."""
    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


@torch.no_grad()
def compare_models(ours: CausalLM, theirs: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Parity:
    """`compare` for two models in evaluation mode, of one device and dtype."""
    pairs = module_pairs(ours, theirs)
    layers = [name for name in pairs if LAYER.fullmatch(name)]
    if not layers:
        what = "the models share no modules"
        got, expected = (", ".join(list(model.state_dict())[:2]) for model in (ours, theirs))
        raise LigerzooError(what, where="parity", got=got, expected=expected)
    their_modules = {name: theirs.get_submodule(their_name) for name, their_name in pairs.items()}
    our_modules = {name: ours.get_submodule(name) for name in pairs}
    their_run, our_run = (
        TracedModel(theirs, their_modules, _with_types(theirs, inputs)),
        TracedModel(ours, our_modules, inputs),
    )
    trace = their_run.trace()
    our_trace = our_run.trace(trace)
    alone = _differences(our_trace, trace, their_run.trace(trace, change=True))
    experts = [point.module for point in trace if point.side == "experts"] if _is_half(trace) else []
    whole_trace = our_run.only([*layers, *experts]).trace()
    whole = _differences(whole_trace, trace, their_run.trace(change=True), is_whole=True)
    tokens = inputs["input_ids"].shape[1]
    skipped = (
        *not_run(pairs, layers, {point.module for point in trace}),
        *without_counterpart(trace, our_trace),
        *beyond_text(ours, tokens),
    )
    return Parity(
        tuple(one for one in whole if one.what == "output" and one.name in {*layers, HEAD}),
        tuple(alone),
        skipped,
        tokens,
    )


def _with_types(theirs: nn.Module, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The inputs, and the kinds of the tokens, which transformers' models of images need."""
    kinds = {"mm_token_type_ids", "token_type_ids"} & set(inspect.signature(theirs.forward).parameters)
    if len(inputs) == 1 or not kinds:
        return inputs
    ids, config = inputs["input_ids"], theirs.config
    image = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    types = (ids == image).int() + 2 * (ids == getattr(config, "video_token_id", None)).int()  # type: ignore[attr-defined]
    return {**inputs, **dict.fromkeys(kinds, types)}


def _differences(trace: Trace, expected: Trace, changed: Trace, *, is_whole: bool = False) -> list[Difference]:
    """The errors of all tensors that both forwards have.

    Args:
        trace: of our model.
        expected: of transformers' model.
        changed: of transformers' model with changed inputs.
        is_whole: a token that went to other experts differs in all later modules, not in its experts alone.
    """
    found = []
    rerouted: dict[str, tuple[Tensor, Tensor]] = {}  # tokens that go to other experts in trace, and in changed
    for point, x in trace.items():
        if point not in expected or expected[point].numel() != x.numel():
            continue  # see `without_counterpart`
        like = expected[point]
        if point.side == "experts":
            rerouted[point.module] = (x != like).any(-1), (changed[point] != like).any(-1)
            continue
        masks = [pair for name, pair in rerouted.items() if is_whole or name == point.module]
        ours, theirs = (torch.stack(part).any(0) for part in zip(*masks, strict=True)) if masks else (None, None)
        error, worst = _errors(x, nearest(like, x, point.module), ours)
        rounding, worst_rounding = (max(one, torch.finfo(x.dtype).eps) for one in _errors(changed[point], like, theirs))
        parent, _, own = point.module.rpartition(".")
        name, what = (point.module, "output") if point.side == "output" else (parent, own)
        found.append(Difference(name, what, error, rounding, worst, worst_rounding))
    return found


def _is_half(trace: Trace) -> bool:
    return trace[Point(HEAD, "output", 0)].dtype.itemsize == 2


def _errors(actual: Tensor, expected: Tensor, rerouted: Tensor | None) -> tuple[float, float]:
    """The root of the mean square of the relative errors of rows, and the largest one.

    In half precision, rounding sends a few tokens to other experts: up to `TRIMMED` of the worst of these are left out.
    """
    wide = torch.float64 if expected.device.type != "mps" else torch.float32
    difference, size = ((x.to(wide).flatten(0, -2)).norm(dim=-1) for x in (actual - expected, expected))
    errors = difference / size.clamp(min=(1e-2 * size.median()).clamp(min=torch.finfo(torch.float32).tiny))
    if expected.dtype.itemsize == 2 and rerouted is not None and len(rerouted) == len(errors):
        moved = errors[rerouted].sort(descending=True).values[int(len(errors) * TRIMMED) :]
        errors = torch.cat([errors[~rerouted], moved])
    return float(errors.square().mean().sqrt()), float(errors.max())

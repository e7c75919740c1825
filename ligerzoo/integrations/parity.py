"""Our model of a checkpoint against transformers' model, module by module, on one text.

    report = compare("org/name", {"input_ids": ids})
    print(report)           # errors of the hidden states of each layer, and the first module that differs
    report.first            # its name and error; None if rounding explains all differences

Modules of both models are one pair if they hold the same tensors of the checkpoint; their names do not matter. Each is
compared alone: it gets the input of transformers' module, and its parts' outputs are replaced by those of transformers,
so that errors do not add up. What a module computes between its parts is compared by the inputs of these parts.

Rounding explains as much as a change of all inputs by an ulp changes the outputs of transformers' module.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from ligerzoo.convert import architecture_of_model
from ligerzoo.convert.tensor_slices import shapes_of
from ligerzoo.errors import LigerzooError
from ligerzoo.hub import AutoModel
from ligerzoo.layers import RotaryEmbedding
from ligerzoo.models import CausalLM

ALLOWED = 8.0
"""How many times what an ulp of the inputs changes an error may be: rounding happens within modules, too. For tiny
models of all architectures it is up to 1.3 times."""

ALLOWED_IN_A_TOKEN = 32.0
"""The same for the worst token: up to 3 times for tiny models; up to 15 where values of a gated delta net cancel."""

HEAD = "lm_head"
"""Name of the module whose output are the logits, after scales and soft caps that may be part of it or not."""

LAYER = re.compile(r"model\.([a-z_]+|layers\.\d+)")
"""Names of the embedding, the blocks and the final norm of our decoders."""

TRIMMED = 0.1
"""The most tokens, of all, that rounding may send to other experts in half precision without being a difference."""

DECODER = re.compile(r"model\.|lm_head")
"""Start of the names of the modules of our decoders; others are parts of a vision tower."""

Side = Literal["input", "output", "experts"]


class Point(NamedTuple):
    """Where in a forward a tensor is compared.

    Attributes:
        module: our module's name.
        side: the first input of the module, its first output, or the sorted ids of the experts of each token.
        call: index of the module's call.
    """

    module: str
    side: Side
    call: int


Trace = dict[Point, Tensor]
"""The tensors of a forward, in order."""


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from that of transformers' model.

    Attributes:
        name: the module that computed it; for the input of a module, the module around it.
        what: "output", or the name of the part whose input it is.
        error: mean of the relative errors of the tokens (of their squares, and the root of it).
        rounding: the error that rounding explains.
        worst: the largest relative error of a token.
        worst_rounding: the largest that rounding explains.
    """

    name: str
    what: str
    error: float
    rounding: float
    worst: float
    worst_rounding: float

    @property
    def is_explained(self) -> bool:
        """Whether rounding explains the errors; not if one is NaN."""
        return self._mean_is_explained and self.worst <= ALLOWED_IN_A_TOKEN * self.worst_rounding

    @property
    def _mean_is_explained(self) -> bool:
        return self.error <= ALLOWED * self.rounding

    def as_json(self) -> dict[str, object]:
        """The fields, with None for an error that is not finite, and whether rounding explains it."""
        errors = {name: x if math.isfinite(x) else None for name, x in (("error", self.error), ("worst", self.worst))}
        return {**asdict(self), **errors, "explained": self.is_explained}

    def __str__(self) -> str:
        what = "its output" if self.what == "output" else f"what it passes to {self.what}"
        error, of, rounding = self.error, "", self.rounding
        if self._mean_is_explained and not self.is_explained:
            error, of, rounding = self.worst, " in a token", self.worst_rounding
        return f"{self.name}: {what} has a relative error of {error:.1e}{of}; rounding explains {rounding:.1e}"


@dataclass(frozen=True)
class Parity:
    """The comparison of a model with transformers' model.

    Attributes:
        layers: errors of the embeddings, of the hidden states after each layer and of the logits, when both models run
            unchanged. Errors of a layer are part of all later ones.
        modules: errors of each module for the input of transformers' module, in order of execution.
        skipped: what is not compared: modules with parameters that did not run, such as a vision tower without an
            image; tensors of transformers' modules that ours lack; what the text is too short for, such as a window.
        tokens: of the text.
    """

    layers: tuple[Difference, ...]
    modules: tuple[Difference, ...]
    skipped: tuple[str, ...]
    tokens: int

    @property
    def first(self) -> Difference | None:
        """The first module that differs; the first layer, if none does so alone; None without a difference."""
        differences = (one for one in (*self.modules, *self.layers) if not one.is_explained)
        return next(differences, None)

    def as_json(self) -> dict[str, object]:
        """Returns what `ligerzoo parity --json` prints."""
        return {
            "equal": self.first is None,
            "first": None if self.first is None else self.first.as_json(),
            "layers": [one.as_json() for one in self.layers],
            "modules": [one.as_json() for one in self.modules],
            "skipped": list(self.skipped),
            "tokens": self.tokens,
        }

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.layers)
        lines = [f"{'hidden states after':{width}}  error    of rounding"]
        lines += [f"{row.name:{width}}  {row.error:.1e}  {row.rounding:.1e}" for row in self.layers]
        if self.skipped:
            lines.append(f"not compared: {', '.join(self.skipped)}")
        count = f"{len({row.name for row in self.modules})} modules on {self.tokens} tokens"
        verdict = f"equal up to rounding: {count}" if self.first is None else f"different, of {count}: {self.first}"
        return "\n".join([*lines, verdict])


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
        *_not_run(pairs, layers, {point.module for point in trace}),
        *_without_counterpart(trace, our_trace),
        *_beyond(ours, tokens),
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


def _not_run(names: Iterable[str], layers: Collection[str], run: Collection[str]) -> Iterator[str]:
    """Yields the layers that did not run, and other modules that are not part of a compared one."""
    covered = set(run)
    for name in names:  # outer ones first
        if name not in covered and (name in layers or not any(name.startswith(f"{other}.") for other in covered)):
            covered.add(name)
            yield name


def _without_counterpart(theirs: Trace, ours: Trace) -> list[str]:
    """The tensors of transformers' modules that ours do not have, or have with another number of values."""
    missing = (point for point, x in theirs.items() if point not in ours or ours[point].numel() != x.numel())
    return list(dict.fromkeys(f"{point.module} (its {point.side})" for point in missing))


def _beyond(ours: CausalLM, tokens: int) -> list[str]:
    """What a text of this length does not show."""
    windows = {getattr(part, "window", None) for part in ours.modules()}
    found = [
        f"a window of {window} tokens, not reached" for window in sorted(filter(None, windows)) if tokens <= window
    ]
    for rotary in (part for part in ours.modules() if isinstance(part, RotaryEmbedding)):
        length = rotary.rope.max_position if rotary.rope_type == "dynamic" else rotary.original_max_position
        if rotary.rope_type not in ("default", "linear") and tokens <= length:
            found.append(f"{rotary.rope_type} RoPE beyond {length} tokens, not reached")
    if tokens == 1:
        found.append("RoPE and attention: the text has one token")
    return list(dict.fromkeys(found))


def module_pairs(ours: CausalLM, theirs: PreTrainedModel) -> dict[str, str]:
    """Returns the name of their module that holds the same tensors, by the name of ours; outer modules first."""
    our_shapes, their_shapes = shapes_of(ours.state_dict()), shapes_of(theirs.state_dict())
    layout = architecture_of_model(ours).layout_of(ours.config, their_shapes, our_shapes)
    stored = defaultdict(set)
    holders = defaultdict(set)
    for part in layout.slices(our_shapes):
        stored[part.name].add(part.stored_name)
        holders[part.stored_name].add(part.name)
    found: dict[frozenset[str], list[str]] = defaultdict(list)
    for name, module in _called_modules(theirs):
        found[frozenset(f"{name}.{own}" for own in module.state_dict())].append(name)
    pairs = {}
    for name, module in _called_modules(ours):
        own = {f"{name}.{tensor}" for tensor in module.state_dict()}
        tensors = frozenset().union(*(stored[tensor] for tensor in own))
        is_whole = all(holders[tensor] <= own for tensor in tensors)
        if own and is_whole and found[tensors]:
            candidates = found[tensors]
            pairs[name] = candidates.pop(0) if len(candidates) > 1 else candidates[0]
    return pairs


def _called_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, part) for name, part in model.named_modules() if name and not isinstance(part, nn.ModuleList))


@dataclass(frozen=True)
class TracedModel:
    """A model with its inputs, and the modules whose inputs and outputs are recorded, by our names."""

    model: nn.Module
    modules: Mapping[str, nn.Module]
    inputs: Mapping[str, Tensor]

    def only(self, names: Collection[str]) -> TracedModel:
        """The run that records these modules alone: others may run in fused kernels."""
        return TracedModel(self.model, {name: self.modules[name] for name in names}, self.inputs)

    def trace(self, expected: Trace | None = None, *, change: bool = False) -> Trace:
        """Runs the model.

        Args:
            expected: what modules get as input and give as output, after what they would is recorded; None for that.
            change: change all inputs of modules by up to an ulp.
        """
        trace: Trace = {}
        calls: Counter[str] = Counter()
        generator = torch.Generator(next(iter(self.inputs.values())).device).manual_seed(0)

        def record(name: str, side: Side, x: Tensor) -> Tensor:
            """Records a tensor, and returns what replaces it."""
            point = Point(name, side, calls[name])
            trace[point] = x.clone()
            other = None if expected is None else expected.get(point)
            new = x if other is None or other.numel() != x.numel() else _nearest(other, x, name)
            if change and side == "input":
                noise = torch.rand(new.shape, generator=generator, device=new.device) * 2 - 1
                new = new + new * torch.finfo(new.dtype).eps * noise
            return new.to(x.dtype)

        def before(name: str, arguments: object) -> object:
            x = _first_tensor(arguments)
            if x is not None and (ids := _expert_ids(arguments, x)) is not None:
                trace[Point(name, "experts", calls[name])] = ids.sort().values
            return None if x is None else _swapped(arguments, x, record(name, "input", x))

        def after(name: str, output: object) -> object:
            y = None if name == HEAD else _first_tensor(output)
            new = None if y is None else _swapped(output, y, record(name, "output", y))
            calls[name] += 1
            return new

        with ExitStack() as hooks:
            for name, module in self.modules.items():
                hooks.enter_context(_hooked(module, partial(before, name), partial(after, name)))
            trace[Point(HEAD, "output", 0)] = self.model(**self.inputs, use_cache=False).logits
        return trace


@contextmanager
def _hooked(module: nn.Module, before: Callable[[object], object], after: Callable[[object], object]) -> Iterator[None]:
    handles = (
        module.register_forward_pre_hook(lambda _, *arguments: before(arguments), with_kwargs=True),
        module.register_forward_hook(lambda _, __, output: after(output)),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(values: object) -> Tensor | None:
    """The first floating-point tensor among nested values."""
    return next((one for one in tree_leaves(values) if isinstance(one, Tensor) and one.is_floating_point()), None)


def _expert_ids(values: object, x: Tensor) -> Tensor | None:
    """The ids of the experts, (T, k), among the arguments of experts; None for other modules."""
    found = (one for one in tree_leaves(values) if isinstance(one, Tensor) and not one.is_floating_point())
    return next((one for one in found if x.dim() == one.dim() == 2 and len(one) == len(x)), None)


def _swapped(values: object, old: Tensor, new: Tensor) -> object:
    """Nested values with another tensor for one of them."""
    return tree_map(lambda one: new if one is old else one, values)


def _nearest(x: Tensor, like: Tensor, module: str) -> Tensor:
    """x in the shape of another tensor with as many numbers, in the order of its heads, tokens or patches.

    The order is that of the nearer one: heads before or after tokens, and in a vision tower rows in the order of their
    norms.
    """
    layouts = [x.reshape(like.shape)]
    if x.dim() == 4 and like.dim() == 4:
        layouts.append(x.transpose(1, 2).reshape(like.shape))
    if like.dim() == 2 and not DECODER.match(module):  # patches of images
        rows = torch.empty_like(layouts[0])
        rows[like.norm(dim=-1).argsort()] = layouts[0][layouts[0].norm(dim=-1).argsort()]
        layouts.append(rows)
    return min(layouts, key=lambda one: (one - like).abs().sum().nan_to_num(float("inf")).item())


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
            continue  # see `_without_counterpart`
        like = expected[point]
        if point.side == "experts":
            rerouted[point.module] = (x != like).any(-1), (changed[point] != like).any(-1)
            continue
        masks = [pair for name, pair in rerouted.items() if is_whole or name == point.module]
        ours, theirs = (torch.stack(part).any(0) for part in zip(*masks, strict=True)) if masks else (None, None)
        error, worst = _errors(x, _nearest(like, x, point.module), ours)
        rounding, worst_rounding = (max(one, torch.finfo(x.dtype).eps) for one in _errors(changed[point], like, theirs))
        parent, _, own = point.module.rpartition(".")
        name, what = (point.module, "output") if point.side == "output" else (parent, own)
        found.append(Difference(name, what, error, rounding, worst, worst_rounding))
    return found


def _is_half(trace: Trace) -> bool:
    return trace[Point(HEAD, "output", 0)].dtype.itemsize == 2


def _errors(actual: Tensor, expected: Tensor, rerouted: Tensor | None) -> tuple[float, float]:
    """The root of the mean square of the relative errors of rows, and the largest one.

    In half precision, rounding sends a few tokens to other experts: the worst of these do not count, up to `TRIMMED`.
    """
    wide = torch.float64 if expected.device.type != "mps" else torch.float32
    difference, size = ((x.to(wide).flatten(0, -2)).norm(dim=-1) for x in (actual - expected, expected))
    errors = difference / size.clamp(min=(1e-2 * size.median()).clamp(min=torch.finfo(torch.float32).tiny))
    if expected.dtype.itemsize == 2 and rerouted is not None and len(rerouted) == len(errors):
        moved = errors[rerouted].sort(descending=True).values[int(len(errors) * TRIMMED) :]
        errors = torch.cat([errors[~rerouted], moved])
    return float(errors.square().mean().sqrt()), float(errors.max())

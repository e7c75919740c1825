"""Compares modules and models before and after a replacement, on random input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from ligerzoo.integrations.kernels.replace import Replacement
from ligerzoo.layers.plain import find_modules

T = TypeVar("T")

ULPS = 16
"""Largest difference of a replacement from the module's own result, in ulps of the largest element."""

TOKENS = 16
"""Number of random tokens on which models are compared."""


def hf_models(module: nn.Module) -> list[PreTrainedModel]:
    """Returns the models of transformers among a module and the modules in it, outer ones first."""
    return find_modules(module, PreTrainedModel)


@contextmanager
def class_of(module: nn.Module, cls: type[nn.Module]) -> Iterator[None]:
    """Gives `module` the class `cls` within the block."""
    own = module.__class__
    module.__class__ = cls
    try:
        yield
    finally:
        module.__class__ = own


def difference(module: nn.Module, replacement: Replacement, *arguments: object, **named: object) -> str | None:
    """Compares the replacement with the module's forward on random input; returns what differs, None for nothing.

    Compares in training mode, where a module may apply dropout, and in evaluation mode. Runs without gradients and
    hooks, and restores the mode of each module and the state of torch's random number generators.

    Args:
        module: the module.
        replacement: what may replace it. Its `inputs`, if it has them, are the positional arguments.
        arguments: positional arguments of the forward.
        named: keyword arguments of the forward.
    """
    try:
        if replacement.inputs is not None:
            arguments = replacement.inputs(module)
        with no_effects(module):
            for training in (True, False):
                with training_mode(module, training):
                    torch.manual_seed(0)  # the same dropout in both
                    expected = type(module).forward(module, *arguments, **named)
                    torch.manual_seed(0)
                    with class_of(module, replacement.class_for(module)):
                        actual = type(module).forward(module, *arguments, **named)
                found = difference_of(actual, expected)
                if found is not None:
                    return found
    except Exception as error:  # the forward of any module
        return f"its forward fails on random input: {error}"
    return None


def difference_of(actual: object, expected: object, ulps: float = ULPS) -> str | None:
    """Returns how `actual` differs from `expected`, a tensor or a sequence of tensors; None if they are equal."""
    match actual, expected:
        case ([*actuals], [*expecteds]):
            if len(actuals) != len(expecteds):
                return f"{len(actuals)} results instead of {len(expecteds)}"
            found = (difference_of(a, e, ulps) for a, e in zip(actuals, expecteds, strict=True))
            return next(filter(None, found), None)
        case (Tensor(), Tensor()):
            if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
                return f"{tuple(actual.shape)} {actual.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
            scale = expected.abs().max().item()
            error = (actual - expected).abs().max().item()
            if error <= ulps * torch.finfo(expected.dtype).eps * scale:  # False for NaN
                return None
            return f"its results on random input differ from the kernel's by {error / scale if scale else error:.1e}"
    return None if actual is expected or actual == expected else f"{actual!r} instead of {expected!r}"


def first_match(candidates: Iterable[T], agrees: Callable[[T], bool]) -> T | None:
    """Returns the first candidate that agrees; a candidate that does not support the input does not."""
    for candidate in candidates:
        with suppress(RuntimeError, ValueError, TypeError, IndexError):
            if agrees(candidate):
                return candidate
    return None


@contextmanager
def no_effects(module: nn.Module) -> Iterator[None]:
    """Runs the block without gradients, and restores the state of torch's random number generators."""
    devices = list({p.device for p in module.parameters() if p.device.type == "cuda"})
    with torch.no_grad(), torch.random.fork_rng(devices):
        yield


@contextmanager
def training_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Sets training or evaluation mode within the block, and then the mode that each submodule had."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def signature(module: nn.Module) -> tuple[object, ...]:
    """Returns what the equality of a module with its replacement depends on, except the values of the parameters."""
    found: list[object] = []
    for name, part in module.named_modules():
        constants = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, bool | int | float | str | None) and key not in ("layer_idx", "training")
        }
        found.append((name, type(part), tuple(sorted(constants.items()))))
    found += [(name, p.shape, p.dtype, p.device) for name, p in module.named_parameters()]
    return tuple(found)


def random_like(parameter: Tensor, *shape: int) -> Tensor:
    """Returns standard normal samples in the dtype and on the device of `parameter`, the same at each call."""
    generator = torch.Generator(parameter.device).manual_seed(0)
    return torch.randn(*shape, generator=generator, device=parameter.device).to(parameter.dtype)


class ModelResults(NamedTuple):
    """The results of a model for random tokens.

    Attributes:
        tensors: its logits or hidden states, and its loss if it has one.
        problem: the reason if the model has not run; None otherwise.
    """

    tensors: tuple[Tensor, ...] = ()
    problem: str | None = None

    def change(self, after: ModelResults) -> str | None:
        """Returns how results have changed; None if they agree up to rounding."""
        for name, old, new in zip(("logits", "loss"), self.tensors, after.tensors, strict=False):
            error = ((new.float() - old.float()).norm() / old.float().norm()).item()
            if not error <= max(1e-3, 16 * torch.finfo(old.dtype).eps):
                return f"its {name} on random tokens have changed by {error:.1e}"
        return after.problem


def run_model(model: nn.Module) -> ModelResults:
    """Runs a model on random tokens; of several modalities, on text only. Dropout is off. The loss is of training."""
    hf_model = hf_models(model)[0]
    try:
        tokens = _random_tokens(hf_model)
        with torch.no_grad(), training_mode(model, False):
            results = [model(input_ids=tokens, use_cache=False)[0]]
            hf_model.training = True
            if hasattr(hf_model, "lm_head"):
                results.append(model(input_ids=tokens, labels=tokens, use_cache=False)[0])
    except Exception as error:  # the forward of any model, on input that it may not accept
        problem = f"The results of the model have not been compared, since its forward fails on text: {error}"
        return ModelResults(problem=problem)
    if all(result.isfinite().all() for result in results):
        return ModelResults(tuple(results))
    return ModelResults(problem="The results of the model have not been compared, since they are not finite.")


def _random_tokens(model: PreTrainedModel) -> Tensor:
    """(1, T) tokens, none of which the config names, such as placeholders of images."""
    weight: Tensor = model.get_input_embeddings().weight
    entries = [*model.config.to_dict().items(), *model.config.get_text_config().to_dict().items()]
    special = {value for key, value in entries if isinstance(value, int) and key.endswith(("token_id", "token_index"))}
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(weight.shape[0], generator=generator).tolist()
    tokens = [token for token in order[: TOKENS + len(special)] if token not in special][:TOKENS]
    return torch.tensor([tokens], device=weight.device)

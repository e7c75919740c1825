"""Differences between versions of transformers, which other modules need not know.

Up to 5.23, the KV cache is `past_key_values` in arguments and outputs; since 5.24, it is `cache`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from ligerzoo.errors import LigerzooError

T = TypeVar("T")

OUR_CACHE = "past_key_values"
"""Name of the KV cache in ligerzoo, and up to transformers 5.23."""

NEW_CACHE = "cache"
"""Name of the KV cache since transformers 5.24."""

CACHE = NEW_CACHE if NEW_CACHE in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)} else OUR_CACHE
"""Name of the KV cache in arguments and outputs of the installed version."""

PARALLEL_STYLES = None
with suppress(ImportError):  # before 5.21
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    PARALLEL_STYLES = ALL_PARALLEL_STYLES
"""Registry of the styles of plans; None where `DistributedConfig` is another."""

GENERATE_OPTIONS = {"tokenizer", "assistant_tokenizer", *inspect.signature(GenerationMixin.generate).parameters}
"""Options of `generate` that are not entries of its config. It passes some of them on with the inputs of the model."""


def with_cache_as(name: str, inputs: Mapping[str, object]) -> dict[str, Any]:
    """Returns keyword arguments in which the KV cache has one name; without it, if it is None.

    Args:
        name: the name.
        inputs: keyword arguments, with the cache under the name of any version.

    Raises:
        LigerzooError: the two names have different caches.
    """
    renamed = dict(inputs)
    caches = [cache for key in (OUR_CACHE, NEW_CACHE) if (cache := renamed.pop(key, None)) is not None]
    if len(caches) == 2 and caches[0] is not caches[1]:
        what, where = "two names of the KV cache with different caches", f"{OUR_CACHE} and {NEW_CACHE}"
        got = " and ".join(type(cache).__name__ for cache in caches)
        raise LigerzooError(what, where=where, got=got, expected="one cache", remedy=f"Pass {CACHE}.")
    return {**renamed, name: caches[0]} if caches else renamed


def takes_cache(method: Callable[..., T]) -> Callable[..., T]:
    """Lets a method with the parameter `past_key_values` take the KV cache under the name of any version.

    Its signature has the name of the installed version, which `generate` and clients look up.
    """

    @functools.wraps(method)
    def call(*args: object, **inputs: object) -> T:
        return method(*args, **with_cache_as(OUR_CACHE, inputs))

    signature = inspect.signature(method)
    parameters = [p.replace(name=CACHE) if p.name == OUR_CACHE else p for p in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call

"""The model that samples while a model trains: itself, a copy in bfloat16, or its gathered shards."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch

from ligerzoo.models import CausalLM
from ligerzoo.parallel import unsharded
from ligerzoo.train import processes


class SamplingModel:
    """Gives a model that trains the form in which it samples.

    One process samples with the model itself or, in mixed precision, with a copy in bfloat16, whose decode steps can
    run as CUDA graphs without autocast. Several processes gather the whole model in the dtype in which they compute,
    so that each samples alone, and free it afterwards.

    Args:
        model: the model that trains.
        mixed_precision: whether it computes in bfloat16 with weights in float32.

    Attributes:
        model: the model that samples.
    """

    def __init__(self, model: CausalLM, *, mixed_precision: bool) -> None:
        self._source, self._is_sharded = model, processes.world_size() > 1
        self._is_copy = mixed_precision and not self._is_sharded
        self.model: CausalLM = copy.deepcopy(model).requires_grad_(False).bfloat16() if self._is_copy else model

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """In this context, `model` has the current weights and can sample. All processes must enter it."""
        if self._is_sharded:
            with unsharded(self.model):
                yield
            self.model.release_decode_graphs()  # they read the gathered weights, which are freed
            return
        if self._is_copy:
            with torch.no_grad():
                for own, source in zip(self.model.parameters(), self._source.parameters(), strict=True):
                    own.copy_(source)
        yield

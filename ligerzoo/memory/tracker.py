"""Counts the memory and the matrix products of operations on meta tensors, which have shapes but no data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ligerzoo.kernels.registration import OPS

ALLOCATION_UNIT = 512
"""Bytes; PyTorch's allocator rounds every allocation on a GPU up to a multiple."""


def allocated_bytes(nbytes: int) -> int:
    """Returns the bytes that an allocation of `nbytes` takes on a GPU."""
    return -(-nbytes // ALLOCATION_UNIT) * ALLOCATION_UNIT


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the bytes of meta tensors that exist, and the operations of matrix products.

    A storage exists until its last tensor is freed: Python and autograd free meta tensors when they free those on GPUs.

    Args:
        existing: tensors that are not counted, such as parameters.
        on_peak: called whenever `peak` has grown.

    Attributes:
        live: bytes that exist.
        flops: operations of matrix products so far, two for each multiplication and addition.
        peak: the largest number of bytes that existed at a time, including what operations hold internally.
        marked: bytes that existed when `mark` was called and still exist; `live` before `mark` was called.
    """

    def __init__(self, existing: Iterable[Tensor] = (), on_peak: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.flops = 0
        self.on_peak = on_peak
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._marked: set[int] | None = None
        self._marked_bytes = 0
        for tensor in existing:
            self._add(tensor, counted=False)

    def mark(self) -> None:
        """Starts to count `marked`, with what exists now."""
        self._marked = set(self._sizes)
        self._marked_bytes = self.live

    @property
    def marked(self) -> int:
        return self.live if self._marked is None else self._marked_bytes

    def hold(self, nbytes: int) -> None:
        """Counts bytes that no meta tensor represents."""
        self.live += nbytes
        self._record(self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        within = 0
        if func.namespace == "ligerzoo":
            op = OPS[func._schema.name.removeprefix("ligerzoo::")]
            self.flops += 0 if op.flops is None else op.flops(*args)
            within = 0 if op.peak is None else op.peak(*args)
        before = self.live
        result = func(*args, **kwargs)
        if func.namespace == "aten" and (formula := _product_formulas().get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        self._record(max(self.live, before + within))
        return result

    def _add(self, tensor: Tensor, *, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._storages:
            size = allocated_bytes(storage.nbytes()) if counted and tensor.is_meta else 0
            self.live += size
            self._sizes[address] = size
            self._storages[address] = weakref.ref(storage, lambda _: self._free(address))

    def _free(self, address: int) -> None:
        del self._storages[address]
        size = self._sizes.pop(address)
        self.live -= size
        if self._marked is not None and address in self._marked:
            self._marked.remove(address)
            self._marked_bytes -= size

    def _record(self, nbytes: int) -> None:
        if nbytes > self.peak:
            self.peak = nbytes
            self.on_peak()


def _product_formulas() -> dict[Any, Any]:
    """Returns torch's formulas for the operations of its matrix products, which it imports together with triton."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry

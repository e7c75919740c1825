"""Counts the memory, the work and the communication of operations on meta tensors, which have shapes but no data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ligerzoo.dtensors import is_dtensor, local
from ligerzoo.kernels.registration import OPS

ALLOCATION_UNIT = 512
"""Bytes; PyTorch's allocator rounds every allocation on a GPU up to a multiple."""


def allocated_bytes(nbytes: int) -> int:
    """Returns the bytes that an allocation of `nbytes` takes on a GPU."""
    return -(-nbytes // ALLOCATION_UNIT) * ALLOCATION_UNIT


class Work(NamedTuple):
    """What a GPU does.

    Attributes:
        products: operations of matrix products, two for each multiplication and addition.
        attention: those of attention, whose kernels are slower.
        nbytes: bytes that operations read and write, each tensor once.
        calls: operations.
    """

    products: int = 0
    attention: int = 0
    nbytes: int = 0
    calls: int = 0

    @property
    def flops(self) -> int:
        return self.products + self.attention

    def __add__(self, other: tuple[int, ...]) -> Work:  # type: ignore[override]
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def __sub__(self, other: Work) -> Work:
        return Work(*(a - b for a, b in zip(self, other, strict=True)))


CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]


class Collective(NamedTuple):
    """A collective operation of a process group.

    Attributes:
        kind: what it does.
        group: name of the process group.
        nbytes: size of the tensor of this process; of the whole tensor of an all-gather or a reduce-scatter.
    """

    kind: CollectiveKind
    group: str
    nbytes: int


_COLLECTIVES: dict[str, tuple[CollectiveKind, int]] = {
    "c10d::allreduce_": ("all-reduce", 1),
    "c10d::alltoall_base_": ("all-to-all", 2),
    "c10d::_allgather_base_": ("all-gather", 2),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 2),
}
"""Those of the forward and backward of divided layers, with the position of the process group after their tensors."""

_READ_BY_ROW = ("aten::embedding", "aten::index_select", "aten::gather")
"""Operations that read as much as they write."""


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the bytes of meta tensors that exist, and what operations do with them.

    Collectives of torch.distributed are counted and not run: meta tensors have nothing to send.

    A storage exists until its last tensor is freed: Python and autograd free meta tensors when they free those on GPUs.

    Args:
        existing: tensors that are not counted, such as parameters.
        on_peak: called whenever `peak` has grown.

    Attributes:
        live: bytes that exist.
        work: all work so far.
        collectives: all so far.
        peak: the largest number of bytes that existed at a time, including what operations hold internally.
        marked: bytes that existed when `mark` was called and still exist; `live` before `mark` was called.
    """

    def __init__(self, existing: Iterable[Tensor] = (), on_peak: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.work = Work()
        self.collectives: list[Collective] = []
        self.on_peak = on_peak
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._marked: set[int] | None = None
        self._marked_bytes = 0
        for tensor in existing:
            self._add(local(tensor), counted=False)

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

    def unmark(self, nbytes: int) -> None:
        """Counts bytes of `hold` as freed that were held when `mark` was called."""
        self._marked_bytes -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        if any(map(is_dtensor, inputs)):
            return NotImplemented  # it operates on its shard, which is counted
        if name in _COLLECTIVES:
            return self._communicate(func, args)
        within = flops = moved = 0
        if func.namespace == "ligerzoo":
            op = OPS[name.removeprefix("ligerzoo::")]
            flops = 0 if op.flops is None else op.flops(*args)
            within = 0 if op.peak is None else op.peak(*args)
            moved = 0 if op.moved is None else op.moved(*args)
        before = self.live
        result = func(*args, **kwargs)
        if func.namespace == "aten" and (formula := _product_formulas().get(func._overloadpacket)) is not None:
            flops = formula(*args, **kwargs, out_val=result)
        outputs = list(_tensors((result,)))
        for tensor in outputs:
            self._add(tensor)
        self._record(max(self.live, before + within))
        self._count(func, flops, moved, inputs, outputs)
        return result

    def _count(self, func: OpOverload, flops: int, moved: int, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Adds an operation to the work, unless it makes a view or allocates only."""
        read, written = (
            {tensor.untyped_storage()._cdata: tensor for tensor in tensors if tensor.is_meta}
            for tensors in (inputs, outputs)
        )
        name, is_view = func._schema.name, not func._schema.is_mutable and written.keys() <= read.keys()
        if is_view or "empty" in name:
            return
        by_row = name in _READ_BY_ROW
        nbytes = moved + sum(map(_touched_bytes, written.values())) * (2 if by_row else 1)
        nbytes += 0 if by_row else sum(map(_touched_bytes, read.values()))
        is_attention = "attention" in name
        self.work += (0 if is_attention else flops, flops if is_attention else 0, nbytes, 1)

    def _communicate(self, func: OpOverload, args: Sequence[object]) -> object:
        """Counts a collective. Returns what torch.distributed expects of one that has ended."""
        from torch._C._distributed_c10d import FakeWork, ProcessGroup, Work

        kind, position = _COLLECTIVES[func._schema.name]
        given = [one.numel() * one.element_size() for one in _tensors(args[:position])]
        nbytes = given[0] if kind == "all-to-all" else max(given)
        group = ProcessGroup.unbox(args[position])  # type: ignore[arg-type]
        self.collectives.append(Collective(kind, str(group.group_name), nbytes))
        work = Work.boxed(FakeWork())
        return (args[0], work) if len(func._schema.returns) == 2 else work

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


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yields the tensors among arguments or results, also those in lists."""
    for value in values:
        match value:
            case Tensor():
                yield value
            case list() | tuple():
                yield from _tensors(value)


def _touched_bytes(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())  # less if it is expanded


def _product_formulas() -> dict[Any, Any]:
    """Returns torch's formulas for the operations of its matrix products, which it imports together with triton."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry

"""`TensorSlice`: which slice of a stored tensor is which slice of a parameter, or of a shard of one (`within`)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ligerzoo.dtensors import Box

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Maps a slice of a stored tensor to a slice of a parameter.

    In a layout, at least one of the two slices is a whole tensor, or both are rows; see also `within`.

    Attributes:
        stored_name: name of the stored tensor.
        stored_shape: shape of the whole stored tensor.
        name: name of the parameter.
        stored_index: index into the stored tensor, with steps of 1 or more; () selects all of it.
        index: index into the parameter; () selects all of it.
        transposed: the last two dimensions of the stored tensor are swapped.
    """

    stored_name: str
    stored_shape: Shape
    name: str
    stored_index: tuple[slice, ...] = ()
    index: tuple[int | slice, ...] = ()
    transposed: bool = False

    def select(self, stored: Tensor) -> Tensor:
        """Returns a view of the slice of the stored tensor, with the dimensions of the parameter."""
        selected = stored[self.stored_index] if self.stored_index else stored  # the same memory, of a DTensor, too
        return selected.mT if self.transposed else selected

    @property
    def is_copy(self) -> bool:
        """Whether the parameter is the whole stored tensor, in the same layout."""
        return not (self.stored_index or self.index or self.transposed)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Returns the shapes of tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def within(part: TensorSlice, box: Box) -> TensorSlice | None:
    """Restricts a slice to a box of the parameter; None if they have no element in common.

    Args:
        part: a slice of the whole parameter.
        box: as many dimensions as the parameter.

    Returns:
        A slice whose `index` is relative to the box.
    """
    stored_slices = [
        part.stored_index[i] if i < len(part.stored_index) else slice(None) for i in range(len(part.stored_shape))
    ]
    sources = [range(size)[chosen] for size, chosen in zip(part.stored_shape, stored_slices, strict=True)]
    if part.transposed:
        sources[-2:] = reversed(sources[-2:])
    remaining = iter(sources)
    stored_index: list[slice] = []
    index: list[int | slice] = []
    for dimension, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        chosen = part.index[dimension] if dimension < len(part.index) else slice(None)
        if isinstance(chosen, int):
            if not offset <= chosen < offset + size:
                return None
            index.append(chosen - offset)
            continue
        source = next(remaining)
        start = chosen.start or 0
        begin, end = max(start, offset), min(start + len(source), offset + size)
        if begin >= end:
            return None
        own = source[begin - start : end - start]
        stored_index.append(slice(own.start, own.stop, own.step))
        index.append(slice(begin - offset, end - offset))
    if part.transposed:
        stored_index[-2:] = reversed(stored_index[-2:])
    is_whole = all(chosen == slice(0, size) for chosen, size in zip(index, box.shape, strict=True))
    return replace(part, stored_index=tuple(stored_index), index=() if is_whole else tuple(index))


def matrices_of(part: TensorSlice) -> Iterator[TensorSlice]:
    """Yields the slices of the single matrices in a slice of a stack of matrices, as `within` returns it."""
    stack, *rest = part.stored_index
    if len(rest) < 2:
        yield part
        return
    first, *others = part.index or (slice(0, stack.stop - stack.start),)
    assert isinstance(first, slice)
    for i in range(stack.stop - stack.start):
        stored_index = (slice(stack.start + i, stack.start + i + 1), *rest)
        yield replace(part, stored_index=stored_index, index=(slice(first.start + i, first.start + i + 1), *others))

"""How long a training step takes: a model of its computation and communication, in stated rates.

    computation   operations of products and of attention, and bytes read and written, each at its rate, and a time for
                  each operation
    copies        FSDP2 copies weights out of the buffers that it gathers, and gradients into those that it reduces
    divided       collectives of tensor, context and expert parallelism: the computation waits for each (exposed)
    sharded       all-gathers, and sums of gradients over `shard` and `replicate`: they overlap with the computation.
                  Exposed are the first all-gather of the forward, the last sum, and what takes longer than the
                  computation of its half of the step. While NCCL's kernels run, the computation is slower.

The shares were measured on H100s; docs/parallelism.md compares predicted and measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ligerzoo.memory.network import Transfer
from ligerzoo.memory.sharding import REDUCED_BYTES, Sharding, ShardingGroup
from ligerzoo.memory.tracker import Work
from ligerzoo.training_setting import GPURates

PRODUCTS_SHARE, ATTENTION_SHARE = 0.77, 0.50
"""Shares of a GPU's FLOP rate that products and attention reach, apart from the bytes that move."""

BANDWIDTH_SHARE = 0.87
"""Share of the bandwidth of a GPU's memory."""

CALL_SECONDS = 4e-6
"""Seconds of an operation that does little."""

NCCL_SHARE = 0.2
"""Share of its speed that the computation loses while kernels of NCCL run."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a training step, by part. They add up.

    Attributes:
        forward: computation of the forward and of the loss head.
        backward: computation of the backward, with recomputation.
        optimizer: update of the weights.
        copies: copies of FSDP2.
        divided: collectives of tensor, context and expert parallelism.
        sharded: those of FSDP2 that do not overlap with computation.
        slowed: how much longer the computation takes while kernels of NCCL run.
    """

    forward: float
    backward: float
    optimizer: float
    copies: float
    divided: float
    sharded: float
    slowed: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return float(sum(astuple(self)))


def computation(work: Work, rates: GPURates) -> float:
    """Returns the seconds of some work."""
    flops, bandwidth = rates.flops * 1e12, rates.bandwidth * 1e12
    products = work.products / (PRODUCTS_SHARE * flops) + work.attention / (ATTENTION_SHARE * flops)
    return products + work.nbytes / (BANDWIDTH_SHARE * bandwidth) + work.calls * CALL_SECONDS


def step_time(
    forward: Work,
    backward: Work,
    updated: int,
    sharding: Sharding | None,
    transfers: Sequence[Transfer],
    rates: GPURates,
    copy_engines: bool,
) -> StepTime:
    """Returns the seconds of a step.

    Args:
        forward: work of the forward and of the loss head.
        backward: work of the backward.
        updated: bytes that the optimizer reads and writes.
        sharding: the groups of FSDP2; None without.
        transfers: what the GPU sends.
        rates: of the GPU.
        copy_engines: whether FSDP2 communicates without NCCL's kernels.
    """
    bandwidth = BANDWIDTH_SHARE * rates.bandwidth * 1e12
    halves = {"forward": computation(forward, rates), "backward": computation(backward, rates)}
    exposed = overlapped = copied = 0.0
    if sharding is not None:
        copied = sum(_copied_bytes(group, copy_engines) for group in sharding)
        for when, seconds in halves.items():
            own = [one for one in transfers if one.when == when]
            whole = sum(one.seconds(rates) for one in own)
            alone = whole * _share_alone(sharding, when)
            exposed += alone + max(0.0, whole - alone - seconds)
            nccl = sum(one.seconds(rates) for one in own if one.axis == "replicate" or not copy_engines)
            overlapped += min(whole - alone, seconds) * (nccl / whole if whole else 0.0)
    return StepTime(
        **halves,
        optimizer=updated / bandwidth,
        copies=copied / bandwidth,
        divided=sum(one.seconds(rates) for one in transfers if not one.when),
        sharded=exposed,
        slowed=NCCL_SHARE * overlapped,
    )


def _copied_bytes(group: ShardingGroup, copy_engines: bool) -> int:
    """Returns the bytes that copies of a group read and write in a step."""
    own = group.nbytes // group.count
    gathered = group.gathers * 2 * (group.nbytes + (own if group.count > 1 else 0))
    reduced = group.trained if copy_engines else REDUCED_BYTES * group.numbers
    # Gradients are copied to a buffer, added by the GPU that updates them, and converted.
    return gathered + group.trained + 2 * reduced + 2 * reduced // group.count


def _share_alone(sharding: Sharding, when: str) -> float:
    """Returns the share of the first gathered group, or of the last reduced one: with those nothing overlaps."""
    groups = list(sharding)
    if when == "forward":
        return sharding.ends[0].nbytes / max(1, sum(group.nbytes for group in groups))
    sent = sum(group.trained + group.nbytes * (group.gathers - 1) for group in groups)
    return sharding.ends[0].trained / max(1, sent)

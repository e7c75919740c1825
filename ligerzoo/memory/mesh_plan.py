"""Training on a mesh of GPUs: memory, communication and time of a step; and the fastest mesh that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from math import gcd
from typing import NamedTuple

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.layers import Experts
from ligerzoo.layers.plain import find_modules
from ligerzoo.memory.divided import DividedModel, divided
from ligerzoo.memory.network import Transfer, members_of, transfers_of, uses_copy_engines
from ligerzoo.memory.plan import WORDS, ActivationPlan, choose_plan
from ligerzoo.memory.repetition import StepCount, kinds_of
from ligerzoo.memory.sharding import Sharding
from ligerzoo.memory.simulation import HeldMemory, StepMemory, count_step, gib, held_memory, step_memory
from ligerzoo.memory.step_time import StepTime, step_time
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.training_setting import GPURates, TrainingSetting

MOST_EXPERTS = 64
"""Most processes over which a proposed mesh divides experts."""


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """A training step on a mesh, for one of its GPUs. `str(plan)` is a page.

    Attributes:
        setting: what is trained, on which mesh.
        activations: what backward recomputes, and the memory of the step.
        transfers: what the GPU sends.
        time: of a step.
        rates: of the GPUs.
        flops: operations of the step without recomputation.
    """

    setting: TrainingSetting
    activations: ActivationPlan
    transfers: tuple[Transfer, ...]
    time: StepTime
    rates: GPURates
    flops: int

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        sizes = self.setting.sizes
        tokens = self.setting.batch_size * self.setting.seq_length / (sizes.context * sizes.tensor)
        return tokens / self.time.seconds

    @property
    def utilization(self) -> float:
        """Operations of the step, without recomputation, over those that the GPU could do (MFU)."""
        return self.flops / self.time.seconds / (self.rates.flops * 1e12)

    def sent(self) -> dict[str, float]:
        """Returns the bytes that a GPU sends in a step, by axis of the mesh."""
        sums: dict[str, float] = {}
        for one in self.transfers:
            sums[one.axis] = sums.get(one.axis, 0.0) + one.sent
        return sums

    def __str__(self) -> str:
        gpus, seconds = self.setting.gpus, self.time.seconds
        hosts = -(-gpus // self.rates.gpus_per_host)
        where = f"{gpus:,} GPU{'s' * (gpus > 1)} of {hosts:,} host{'s' * (hosts > 1)}"
        lines = [f"step on {where}, mesh {named(self.setting.sizes)}"]
        for one in self.transfers:
            what = f"{one.axis}: {one.kind}{', ' * bool(one.when)}{one.when}"
            lines.append(f"  sends {what:<36}{one.sent / 1e9:>9.3f} GB {1e3 * one.seconds(self.rates):>9.1f} ms")
        for part, value in asdict(self.time).items():
            if value:
                lines.append(f"  {PARTS[part]:<53}{1e3 * value:>11.1f} ms")
        lines.append(
            f"  step {1e3 * seconds:,.0f} ms, {self.tokens_per_second:,.0f} tokens/s per GPU, "
            f"{self.tokens_per_second * gpus:,.0f} in all, {self.utilization:.0%} of the peak FLOP/s"
        )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Returns the plan as numbers, texts, lists and dicts, for JSON."""
        step = self.activations.step
        parts = ("weights", "optimizer_states", "gradients", "activations", "workspace", "peak")
        return {
            "mesh": {axis: size for axis, size in asdict(self.setting.sizes).items() if size},
            "memory_bytes": {part: getattr(step, part) for part in parts},
            "levels": [level.name for level in self.activations.levels],
            "keeps_gathered": self.activations.keeps_gathered,
            "sends": [
                {
                    "axis": one.axis,
                    "collective": one.kind,
                    "in": one.when or "each layer",
                    "calls": one.calls,
                    "bytes": round(one.sent),
                    "seconds": one.seconds(self.rates),
                }
                for one in self.transfers
            ],
            "seconds": {**asdict(self.time), "step": self.time.seconds},
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "mfu": self.utilization,
        }


PARTS = {
    "forward": "computation, forward and loss",
    "backward": "computation, backward",
    "optimizer": "optimizer",
    "copies": "copies of FSDP2",
    "divided": "collectives of divided layers, exposed",
    "sharded": "collectives of FSDP2, exposed",
    "slowed": "computation, slowed by kernels of NCCL",
}
"""The parts of `StepTime` in words."""


def named(sizes: MeshSizes) -> str:
    """Returns the sizes as text, with that of `shard`."""
    return str(replace(sizes, shard=sizes.shard or 1))


@dataclass(frozen=True)
class SimulatedSteps:
    """Steps of a divided model, which are counted once for all ways to shard its weights.

    Attributes:
        divided: the model.
        setting: how it is trained; `replicate` and `shard` may differ from those that are asked for.
        rates: of the GPUs.
    """

    divided: DividedModel
    setting: TrainingSetting
    rates: GPURates
    _counts: dict[tuple[Recompute, ...], StepCount] = field(default_factory=dict)
    _held: dict[tuple[MeshSizes, int, bool], HeldMemory] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> list[int]:
        """Of the blocks, see `kinds_of`."""
        return kinds_of(list(self.divided.model.model.layers))

    @property
    def blocks(self) -> int:
        return len(self.divided.model.model.layers)

    def count(self, levels: Sequence[Recompute]) -> StepCount:
        """Returns the step in which backward recomputes some levels of blocks."""
        key = tuple(levels)
        if key not in self._counts:
            self._counts[key] = count_step(self.divided.model, self.setting, key, self.kinds)
        return self._counts[key]

    def memory(
        self, setting: TrainingSetting, levels: Sequence[Recompute], *, keeps_gathered: bool = False
    ) -> StepMemory:
        """Returns the memory of a step on the mesh of a setting."""
        return step_memory(self.count(levels), self.held(setting, keeps_gathered=keeps_gathered))

    def held(self, setting: TrainingSetting, *, keeps_gathered: bool = False) -> HeldMemory:
        """Returns what a step holds on the mesh of a setting, whatever backward recomputes."""
        key = setting.sizes, setting.gpus, keeps_gathered
        if key not in self._held:
            self._held[key] = held_memory(
                self.divided.model,
                setting,
                keeps_gathered=keeps_gathered,
                copy_engines=uses_copy_engines(setting.sizes, self.rates.gpus_per_host),
            )
        return self._held[key]

    def uniform(self, setting: TrainingSetting, level: Recompute) -> ActivationPlan:
        """Returns the step in which backward recomputes one level of all blocks."""
        levels = (level,) * self.blocks
        return ActivationPlan(
            levels=levels,
            batch_size=setting.batch_size,
            seq_length=setting.seq_length,
            step=self.memory(setting, levels),
            extra_flops=0.0,
            budget=None,
        )

    def plan(self, setting: TrainingSetting, activations: ActivationPlan) -> MeshPlan:
        """Returns what a step sends and how long it takes."""
        sizes, count = setting.sizes, self.count(activations.levels)
        engines = uses_copy_engines(sizes, self.rates.gpus_per_host)
        sharding = self.held(setting, keeps_gathered=activations.keeps_gathered).sharding
        members = members_of(sizes, self.rates.gpus_per_host)
        transfers = transfers_of(count.collectives, self.divided.axes, sharding, members, engines)
        updated = self._updated(activations, sharding)
        time = step_time(count.forward, count.backward, updated, sharding, transfers, self.rates, engines)
        nothing = self.count((Recompute.NOTHING,) * self.blocks)
        return MeshPlan(
            setting=setting,
            activations=activations,
            transfers=transfers,
            time=time,
            rates=self.rates,
            flops=(nothing.forward + nothing.backward).flops,
        )

    def _updated(self, activations: ActivationPlan, sharding: Sharding | None) -> int:
        """Returns the bytes that the optimizer reads and writes: states and weights twice, gradients once."""
        if sharding is None:
            trained = sum(one.nbytes for one in self.divided.model.parameters() if one.requires_grad)
        else:
            trained = sum(group.trained // group.count for group in sharding)
        return 2 * activations.step.optimizer_states + 3 * trained

    def first_fit(
        self, setting: TrainingSetting, limit: int | None, levels: Sequence[Recompute] = tuple(Recompute)
    ) -> ActivationPlan:
        """Returns the first step that fits, of those that recompute one level of all blocks; the last if none does."""
        for level in levels:
            plan = self.uniform(setting, level)
            if limit is None or plan.step.peak <= limit:
                break
        return plan

    def best_fit(self, setting: TrainingSetting, limit: int | None) -> ActivationPlan:
        """Returns the step that recomputes the least, see `choose_plan`."""
        return choose_plan(self.divided.model, setting, limit, partial(self.memory, setting))


class Rejected(NamedTuple):
    """A mesh that is not the fastest, and why."""

    sizes: MeshSizes
    reason: str


def plan_mesh(model: CausalLM, setting: TrainingSetting, limit: int | None, rates: GPURates) -> MeshPlan:
    """Plans a step on the mesh of a setting.

    Args:
        model: on meta, as it is trained.
        setting: how.
        limit: bytes of a GPU; None for no limit.
        rates: of the GPUs.

    Raises:
        LigerzooError: A layer cannot be divided, or the step does not fit.
    """
    with divided(model, setting.sizes) as one:
        steps = SimulatedSteps(one, setting, rates)
        return steps.plan(setting, steps.best_fit(setting, limit))


def propose_mesh(
    model: CausalLM, setting: TrainingSetting, limit: int, rates: GPURates
) -> tuple[MeshPlan | None, list[Rejected]]:
    """Returns the plan of the fastest mesh that fits, and why the others are not; None if none fits.

    Tried are axes of powers of two: `context` or `tensor` within a host, up to 64 processes for experts, and all
    divisions of the other GPUs into `replicate` and `shard`. Of the meshes with equal `context`, `tensor` and `expert`,
    the reasons name the best one; of those of the proposed one, all.
    """
    [(best, rejected)] = propose_meshes(model, [setting], limit, rates)
    return None if best is None else plan_mesh(model, best.setting, limit, rates), rejected


def propose_meshes(
    model: CausalLM, settings: Sequence[TrainingSetting], limit: int, rates: GPURates
) -> list[tuple[MeshPlan | None, list[Rejected]]]:
    """Returns the fastest mesh for each of some numbers of GPUs, which recomputes one level of all blocks.

    The settings differ in the number of GPUs only: a divided model is counted once for all.
    """
    found: list[list[MeshPlan]] = [[] for _ in settings]
    rejected: list[list[Rejected]] = [[] for _ in settings]
    for division in _divisions(model, max(setting.gpus for setting in settings), rates):
        own = [(index, setting) for index, setting in enumerate(settings) if _fits(division, setting.gpus)]
        try:
            with divided(model, division) as one:
                steps = SimulatedSteps(one, settings[-1], rates)
                for index, setting in own:
                    plans, refused = _best_shards(steps, setting, division.over(setting.gpus), limit)
                    found[index] += plans
                    rejected[index] += refused
        except LigerzooError as error:
            for index, setting in own:
                rejected[index].append(Rejected(division.over(setting.gpus), str(error)))
    return [_fastest(*results) for results in zip(found, rejected, strict=True)]


def _fastest(plans: list[MeshPlan], rejected: list[Rejected]) -> tuple[MeshPlan | None, list[Rejected]]:
    """Returns the fastest plan, and why others are not: the best of each division, and all of the fastest one's."""
    fitting = sorted(plans, key=lambda plan: -plan.tokens_per_second)
    best = fitting[0] if fitting else None
    own = None if best is None else _division(best.setting.sizes)
    slower = [
        Rejected(
            plan.setting.sizes,
            f"{plan.tokens_per_second:,.0f} tokens/s per GPU, {WORDS[plan.activations.levels[0]]}",
        )
        for plan in fitting[1:]
    ]
    named: dict[MeshSizes, Rejected] = {}
    divisions = set()
    for one in slower + rejected:
        division = _division(one.sizes)
        if division == own or division not in divisions:
            named[one.sizes] = one
        divisions.add(division)
    return best, list(named.values())


def _division(sizes: MeshSizes) -> tuple[int, int, int]:
    return sizes.context, sizes.tensor, sizes.expert


def _best_shards(
    steps: SimulatedSteps, setting: TrainingSetting, sizes: MeshSizes, limit: int
) -> tuple[list[MeshPlan], list[Rejected]]:
    """Returns the steps that fit, of the divisions of GPUs into `replicate` and `shard`, and the first that does not.

    More replicas need more memory.
    """
    found: list[MeshPlan] = []
    copies = (sizes.shard or 1) // (sizes.expert // gcd(sizes.expert, sizes.context))
    levels = tuple(Recompute)
    for replicas in _powers_of_2(copies):
        if copies % replicas:
            continue
        tried = replace(sizes, replicate=replicas, shard=(sizes.shard or 1) // replicas)
        own = replace(setting, mesh=named(tried))
        plan = steps.first_fit(own, limit, levels)
        if plan.step.peak > limit:
            needs = min(plan.step.peak, steps.uniform(own, Recompute.BLOCK).step.peak)
            return found, [Rejected(tried, f"does not fit: {gib(needs)} GiB with everything recomputed")]
        found.append(steps.plan(own, plan))
        levels = levels[levels.index(plan.levels[0]) :]
    return found, []


def _divisions(model: CausalLM, gpus: int, rates: GPURates) -> Iterator[MeshSizes]:
    """Yields the tried sizes of `context`, `tensor` and `expert`."""
    experts = max((len(one.down_proj) for one in find_modules(model, Experts)), default=1)
    within = _powers_of_2(min(gpus, rates.gpus_per_host))
    for context, tensor in [(1, 1), *((1, size) for size in within[1:]), *((size, 1) for size in within[1:])]:
        most = min(MOST_EXPERTS, experts)
        whole_host = {1, min(most, rates.gpus_per_host)}
        for expert in _powers_of_2(most) if context == tensor == 1 else sorted(whole_host):
            yield MeshSizes(context=context, tensor=tensor, expert=expert)


def _fits(division: MeshSizes, gpus: int) -> bool:
    parts = division.context * division.tensor
    return gpus % parts == 0 and gpus // division.tensor % division.expert == 0


def _powers_of_2(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]

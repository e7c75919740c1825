"""Saves and loads tensors that may be DTensors, such as averaged weights, and the states of optimizers.

Both are safetensors files in a directory that holds nothing else but the JSON file of an optimizer's hyperparameters.

A state is stored under the name of its parameter: "model.norm.weight/exp_avg". A DTensor is gathered, stored whole, and
loaded by any number of processes. Other states of a DTensor's parameter differ between processes, such as the scales of
8-bit states: they are stored per process, as ".../exp_avg_scale@1", for the same number of processes. Scalars and the
states of other parameters are equal in all processes, and stored once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ligerzoo.checks import as_list
from ligerzoo.convert.tensor_slices import TensorSlice, within
from ligerzoo.dtensors import as_shard_of, full, is_dtensor, is_sharded, largest_mesh, local, shard_of
from ligerzoo.errors import CheckpointError, first_names
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.files.checkpoint_writer import write_checkpoint
from ligerzoo.files.untrusted import read_json
from ligerzoo.hub.sharding import write_gathered
from ligerzoo.parallel.processes import control_group, gather_objects

OPTIMIZER_FILE = "optimizer.json"
Optimizers = Optimizer | Sequence[Optimizer]


def save_optimizer(model: nn.Module, optimizers: Optimizers, directory: str | Path) -> None:
    """Writes the states and hyperparameters of optimizers to a directory, which is replaced in one step.

    If parameters are DTensors, all processes must call it. The main process writes; one tensor at a time is whole.

    Args:
        model: the model that is trained.
        optimizers: one optimizer, or several whose parameters differ.
        directory: holds nothing else; created if it does not exist.

    Raises:
        CheckpointError: A parameter is not one of the model, a state cannot be stored, or the directory cannot be
            written.
    """
    stored_optimizer(model, optimizers).write(directory)


@dataclass(frozen=True)
class StoredOptimizer:
    """What is stored of optimizers.

    Attributes:
        content: the JSON file: parameter groups, and states that are not tensors.
        whole: states that are DTensors or equal in all processes, by name.
        own: states that differ between processes.
        mesh: the processes that share the parameters; None for one.
    """

    content: Mapping[str, object]
    whole: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    mesh: DeviceMesh | None

    def write(self, directory: str | Path) -> None:
        """See `save_optimizer`."""
        try:
            files = {OPTIMIZER_FILE: json.dumps(self.content) + "\n"}
        except TypeError as error:
            what, expected = "a value of the optimizer cannot be stored", "tensors, numbers, strings and lists"
            raise CheckpointError(what, where=directory, got=error, expected=expected) from error
        tensors = _States(self.whole, self.own, 1 if self.mesh is None else dist.get_world_size())
        if self.mesh is not None:
            write_gathered(directory, tensors, files, meta=tensors.meta, mesh=self.mesh)
        else:
            write_checkpoint(directory, tensors, files, meta=tensors.meta)


def stored_optimizer(model: nn.Module, optimizers: Optimizers) -> StoredOptimizer:
    """Returns what `save_optimizer` writes, with the tensors themselves. Raises as `save_optimizer`."""
    names = _parameter_names(model)
    mesh = largest_mesh(names) if is_sharded(names) else None
    processes = 1 if mesh is None else dist.get_world_size()
    content: dict[str, Any] = {"processes": processes, "groups": [], "values": {}, "on_cpu": []}
    whole: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    for optimizer in as_list(optimizers, Optimizer):
        content["groups"].append([_described(group, names) for group in optimizer.param_groups])
        for weight, state in optimizer.state.items():
            for key, value in state.items():
                name = f"{names[weight]}/{key}"
                if not isinstance(value, Tensor):
                    content["values"][name] = value
                    continue
                _refuse_unstorable(name, value, weight)
                is_local = is_dtensor(weight) and not is_dtensor(value) and value.ndim > 0
                (own if is_local else whole)[name] = value.detach()
                if value.device.type == "cpu" != weight.device.type:
                    content["on_cpu"].append(name)
    return StoredOptimizer(content, whole, own, mesh)


def load_optimizer(model: nn.Module, optimizers: Optimizers, directory: str | Path) -> None:
    """Restores what `save_optimizer` wrote, bit for bit. Each process reads its part.

    Unlike `Optimizer.load_state_dict`, keeps the dtypes of the states. All checks come first: an error leaves the
    optimizers unchanged.

    Args:
        model: the model that is trained; sharded over any number of processes, or not sharded.
        optimizers: optimizers of the same parameters, in the same groups.
        directory: as written by `save_optimizer`.

    Raises:
        CheckpointError: Files are missing or damaged; or the optimizers have other parameters than the stored ones; or
            states that differ between processes were stored by another number of processes.
    """
    directory = Path(directory)
    names = _parameter_names(model)
    weights = {name: weight for weight, name in names.items()}
    optimizers = as_list(optimizers, Optimizer)
    with ExitStack() as files:
        content = read_json(directory / OPTIMIZER_FILE)
        groups = _checked_groups(content, optimizers, names, directory)
        checkpoint = files.enter_context(Checkpoint(directory))
        states: dict[str, dict[str, Any]] = {}
        for name, value in content["values"].items():
            weight_name, _, key = name.rpartition("/")
            states.setdefault(weight_name, {})[key] = value
        local = {name.rpartition("@")[0] for name in checkpoint.tensors if "@" in name}
        for name in [*(name for name in checkpoint.tensors if "@" not in name), *sorted(local)]:
            weight_name, _, key = name.rpartition("/")
            if weight_name not in weights:
                where = f"{directory}, tensor {name!r}"
                raise CheckpointError("the state of a parameter that the model lacks", where=where)
            weight = weights[weight_name]
            if name in local:
                value = _read_local(checkpoint, name, weight, int(content["processes"]))
            else:
                value = _read_whole(checkpoint, name, weight, on_cpu=name in content["on_cpu"])
            states.setdefault(weight_name, {})[key] = value
    for optimizer, stored_groups in zip(optimizers, groups, strict=True):
        optimizer.state.clear()
        for group, stored in zip(optimizer.param_groups, stored_groups, strict=True):
            for key, value in stored.items():
                if key != "params":
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else _like(group.get(key), value)
            for weight in group["params"]:
                if names[weight] in states:
                    optimizer.state[weight] = states[names[weight]]


# Tensors


def save_tensors(tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Writes tensors to a directory, which is replaced in one step.

    If some are DTensors, all processes must call it. The main process writes; one tensor at a time is whole.

    Args:
        tensors: by name; equal in all processes unless they are DTensors.
        directory: created if it does not exist.

    Raises:
        CheckpointError: The directory cannot be written.
    """
    if is_sharded(tensors.values()):
        gathered = _States(tensors, {}, 1)
        write_gathered(directory, gathered, {}, meta=gathered.meta, mesh=largest_mesh(tensors.values()))
    else:
        write_checkpoint(directory, tensors, {})


@torch.no_grad()
def load_tensors(tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Copies what `save_tensors` wrote into tensors of the same names. Each process reads its part.

    Args:
        tensors: by name; sharded over any number of processes, or not sharded.
        directory: as written by `save_tensors`.

    Raises:
        CheckpointError: Files are missing or damaged, or a name or shape differs.
    """
    with Checkpoint(directory) as checkpoint:
        stored = {name: info.shape for name, info in checkpoint.tensors.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if different := sorted(name for name in {**stored, **expected} if stored.get(name) != expected.get(name)):
            what = "the stored tensors have other names or shapes"
            remedy = "Load them with the options with which they were saved."
            raise CheckpointError(what, where=directory, got=first_names(different, 3), remedy=remedy)
        for name, tensor in tensors.items():
            box = shard_of(tensor)
            part = within(TensorSlice(name, expected[name], name), box)
            if part is not None:
                local(tensor).copy_(checkpoint.read(name)[part.stored_index])


class _States(Mapping[str, Tensor]):
    """State tensors by stored name, gathered at each access, by all processes in the same order.

    Args:
        whole: tensors that are DTensors or equal in all processes, by name.
        own: tensors that differ between processes, by name without rank.
        processes: number of processes.

    Attributes:
        meta: meta tensors by stored name.
    """

    def __init__(self, whole: Mapping[str, Tensor], own: Mapping[str, Tensor] = {}, processes: int = 1) -> None:
        self._whole, self._own = whole, own
        self.meta = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in whole.items()}
        if own:
            blueprints = gather_objects({name: (tuple(value.shape), str(value.dtype)) for name, value in own.items()})
            for name in own:
                for rank in range(processes):
                    shape, dtype = blueprints[rank][name]
                    dtype = getattr(torch, dtype.removeprefix("torch."))
                    self.meta[f"{name}@{rank}"] = torch.empty(shape, dtype=dtype, device="meta")

    def __getitem__(self, stored_name: str) -> Tensor:
        if stored_name in self._whole:
            return full(self._whole[stored_name]).detach()
        name, _, rank = stored_name.rpartition("@")
        own = self._own[name]
        is_here = dist.get_rank() == int(rank)
        value = own.contiguous() if is_here else torch.empty_like(self.meta[stored_name], device=own.device)
        dist.broadcast(value, int(rank), group=control_group() if own.device.type == "cpu" else None)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.meta)

    def __len__(self) -> int:
        return len(self.meta)


def _parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Returns the names of the parameters, the first one of a tied weight. FSDP2 frees gathered ones before."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {weight: name for name, weight in reversed(state.items())}


def _described(group: Mapping[str, Any], names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Returns a parameter group with names instead of parameters, and numbers instead of 0-d tensors."""
    unknown = [tuple(weight.shape) for weight in group["params"] if weight not in names]
    if unknown:
        what = "the optimizer has parameters that are not the model's"
        got = f"{len(unknown)}, the first of shape {unknown[0]}"
        remedy = "Create the optimizer after the model was sharded, loaded and given its adapters."
        raise CheckpointError(what, where="optimizer", got=got, remedy=remedy)
    values = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
    return {**values, "params": [names[weight] for weight in group["params"]]}


def _like(current: object, value: Any) -> Any:
    """Returns a stored hyperparameter, as a tensor if the current one is a tensor, such as a capturable `lr`."""
    if not isinstance(current, Tensor):
        return value
    return torch.tensor(value, dtype=current.dtype, device=current.device)


def _refuse_unstorable(name: str, value: Tensor, weight: Tensor) -> None:
    own = local(value)
    problem, expected = None, "a plain tensor, or a DTensor of one"
    if type(own) not in (Tensor, nn.Parameter):
        problem = type(own).__name__
    elif is_dtensor(value) and value.shape != weight.shape:
        problem, expected = f"a DTensor of shape {tuple(value.shape)}", f"{tuple(weight.shape)}, as the parameter"
    if problem:
        where = f"optimizer, {name}"
        raise CheckpointError("a state that cannot be stored", where=where, got=problem, expected=expected)


def _checked_groups(
    content: Mapping[str, Any], optimizers: Sequence[Optimizer], names: Mapping[Tensor, str], directory: Path
) -> list[list[dict[str, Any]]]:
    """Returns the stored groups of each optimizer.

    Raises:
        CheckpointError: The file is malformed, or the optimizers have other groups.
    """
    where = directory / OPTIMIZER_FILE
    if not {"processes", "groups", "values", "on_cpu"} <= content.keys():
        raise CheckpointError("not the state of an optimizer", where=where, got=first_names(sorted(content)))
    stored: list[list[dict[str, Any]]] = content["groups"]
    found = [[_described(group, names)["params"] for group in optimizer.param_groups] for optimizer in optimizers]
    expected = [[group["params"] for group in groups] for groups in stored]
    if found != expected:
        ours, theirs = ({name for groups in every for group in groups for name in group} for every in (found, expected))
        what = "the optimizers have other parameters or groups than the stored ones"
        got, needed = _counted(found, ours - theirs), _counted(expected, theirs - ours)
        remedy = "Create the optimizers as in the run that was saved."
        raise CheckpointError(what, where=where, got=got, expected=needed, remedy=remedy)
    return stored


def _counted(groups: Sequence[Sequence[object]], extra: set[str]) -> str:
    return f"{sum(map(len, groups))} groups, {first_names(sorted(extra), 3) or 'no parameter'} in addition"


def _read_whole(checkpoint: Checkpoint, name: str, weight: Tensor, *, on_cpu: bool) -> Tensor:
    """Reads a state that is stored whole: this process's part if it has the shape of a DTensor."""
    value = checkpoint.read(name)
    device = torch.device("cpu") if on_cpu else weight.device
    if not is_dtensor(weight) or value.shape != weight.shape:
        return value.to(device, copy=True)
    box = shard_of(weight)
    part = within(TensorSlice(name, tuple(value.shape), name), box)
    own = value.new_empty(box.shape) if part is None else value[part.stored_index]
    return as_shard_of(weight, own.to(device, copy=True))


def _read_local(checkpoint: Checkpoint, name: str, weight: Tensor, processes: int) -> Tensor:
    """Reads the state of this process."""
    current = dist.get_world_size() if is_dtensor(weight) else 1
    if current != processes:
        what = "a state that differs between processes was stored by another number of processes"
        where, remedy = f"{checkpoint.directory}, tensor {name!r}", f"Resume with {processes} processes."
        raise CheckpointError(what, where=where, got=current, expected=f"{processes} processes", remedy=remedy)
    return checkpoint.read(f"{name}@{dist.get_rank()}").to(weight.device, copy=True)

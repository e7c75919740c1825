"""Wrapped models over several processes, as transformers' `DistributedConfig` says.

`from_pretrained(..., distributed_config=...)` and `wrap` distribute models with `ligerzoo.parallel`, and set what the
Trainer and `generate` ask transformers' own models:

    DistributedConfig    mesh of ligerzoo
    dp_replicate_size    replicate
    fsdp_size            shard
    tp_size              tensor
    ep_size              tensor * expert: if it is tp_size, the processes of `tensor` share the experts
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias, cast

import torch
import transformers
from transformers import DistributedConfig, PreTrainedModel

from ligerzoo.errors import ConfigError
from ligerzoo.integrations.transformers.plans import expert_rules, fsdp_rules, tensor_rules
from ligerzoo.integrations.transformers.versions import PARALLEL_STYLES
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.parallel import MeshSizes, parallelize, reshard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers.distributed.utils import TransformersDeviceMesh


ConfigLike: TypeAlias = DistributedConfig | dict[str, object] | None
"""A `DistributedConfig`, or its fields; None for one process."""


class Placement(NamedTuple):
    """The processes of a model, and the device of this one.

    Attributes:
        config: the sizes of their mesh.
        device: the device of this process.
        meshes: transformers' meshes; None for one process.
    """

    config: DistributedConfig | None = None
    device: torch.device | None = None
    meshes: TransformersDeviceMesh | None = None

    @classmethod
    def of(cls, config: ConfigLike, **options: object) -> Self:
        """Joins the processes of a config, as `PreTrainedModel.prepare_distribute_model`.

        Args:
            config: the config.
            options: other options of loading the model, which may not name a device.

        Raises:
            ConfigError: the installed transformers is older than 5.21, or an option names a device.
        """
        if config is None:
            return cls()
        if PARALLEL_STYLES is None:
            where, got, expected = "distributed_config", f"transformers {transformers.__version__}", "5.21 or newer"
            remedy = "Upgrade it, or use ligerzoo.parallel.load_sharded."
            raise ConfigError("not supported", where=where, got=got, expected=expected, remedy=remedy)
        match config:
            case dict():
                config = DistributedConfig(**config)  # with an error for an unknown field
        placement = cls(*PreTrainedModel.prepare_distribute_model(config))
        for name in ("device", "device_map"):
            if placement.meshes is not None and options.get(name) is not None:
                what, expected = "each process has its own device", "None with distributed_config"
                raise ConfigError(what, where=f"argument {name}", got=options[name], expected=expected)
        return placement


class Distribution(PreTrainedModel):
    """Base class with plans under transformers' names, and `ligerzoo.parallel` behind transformers' methods."""

    def init_parallel_plans(self) -> None:
        """Sets the plans, which are read as `tp_plan`, `ep_plan`, `fsdp_plan` and `pp_plan`."""
        model = cast(LanguageModel, self)
        self._tp_plan, self._ep_plan, self._fsdp_plan = tensor_rules(model), expert_rules(model), fsdp_rules(model)
        self._pp_plan: dict[str, object] = {}

    @property
    def supports_tp_plan(self) -> bool:
        """Whether tensor parallelism can divide the model."""
        return bool(self._tp_plan)

    @property
    def supports_pp_plan(self) -> bool:
        """False: transformers' pipeline computes no loss."""
        return False

    @classmethod
    def maybe_distribute_model(
        cls, model: Self, distributed_config: DistributedConfig, mesh_manager: TransformersDeviceMesh | None
    ) -> Self:
        """Distributes a wrapped model in place.

        Args:
            model: the model, also on the meta device.
            distributed_config: how.
            mesh_manager: what `prepare_distribute_model` returned with it; None for one process.

        Raises:
            ConfigError: the config asks for what ligerzoo does not have, or the model cannot be divided so.
        """
        if mesh_manager is None:
            return model
        for name, got, expected, remedy in _refusals(model, distributed_config):
            where = f"DistributedConfig.{name}"
            raise ConfigError("not supported", where=where, got=repr(got), expected=expected, remedy=remedy)
        dtype = torch.bfloat16 if distributed_config.fsdp_mixed_precision else None
        parallelize(
            cast(LanguageModel, model),
            _mesh(distributed_config, mesh_manager),
            param_dtype=dtype,
            copy_engines=False,  # the Trainer accumulates gradients without `accumulating`, which they need
        )
        model.config.distributed_config, model._mesh_manager = distributed_config, mesh_manager
        model._device_mesh = mesh_manager.get_mesh(("pp", "fsdp", "tp"))
        model._is_distributed_loading_by_transformers = True
        model._tp_size, model._fsdp_size = distributed_config.tp_size, distributed_config.fsdp_size
        model._is_fsdp_managed_module = distributed_config.dp_size > 1
        model.register_forward_hook(_reshard)
        return model


def _mesh(config: DistributedConfig, meshes: TransformersDeviceMesh) -> DeviceMesh | MeshSizes:
    """Returns the mesh of a model: that of transformers for shards alone, which PEFT knows by its name."""
    replicate, shard, tensor, experts = (
        getattr(config, f"{axis}_size") for axis in ("dp_replicate", "fsdp", "tp", "ep")
    )
    if tensor == experts == 1:
        return meshes.get_mesh("fsdp" if replicate == 1 else ("dp_replicate", "fsdp"))
    return MeshSizes(replicate, shard, tensor=tensor, expert=max(1, experts // tensor))


def _reshard(model: torch.nn.Module, inputs: object, output: object) -> None:
    """Frees gathered weights after a forward without gradients: an optimizer that is created next needs shards."""
    if not torch.is_grad_enabled():
        reshard(cast(LanguageModel, model))


def _refusals(model: Distribution, config: DistributedConfig) -> Iterator[tuple[str, object, object, str]]:
    """Yields the options that wrapped models do not have: name, value, what is expected, and what to do."""
    if config.pp_size > 1:
        yield "pp_size", config.pp_size, 1, "Use fsdp_size or tp_size: transformers' pipeline computes no loss."
    if config.fsdp_cpu_offload:
        yield "fsdp_cpu_offload", True, False, "Use more processes, or activation checkpointing."
    if config.enable_sequence_parallel:
        yield "enable_sequence_parallel", True, False, "Leave it out: transformers does not have it yet."
    for name in ("tp_plan", "ep_plan", "fsdp_plan"):
        match getattr(config, name):
            case None:
                continue
            case "auto" if name == "tp_plan":
                continue
            case {**rules} if rules and rules.items() <= getattr(model, name).items():
                continue
            case plan:
                expected = f"None, or rules of model.{name}"
                yield name, plan, expected, "Leave it out: the layers know how they are divided."
    if config.ep_size > 1:
        if not model.ep_plan:
            yield "ep_size", config.ep_size, 1, "The model has no experts."
        ways = ("auto", "all_to_all" if config.ep_size > config.tp_size else "all_reduce")
        if config.ep_implementation not in ways:
            yield "ep_implementation", config.ep_implementation, " or ".join(map(repr, ways)), "Leave it out."

"""Ligerzoo models in NeMo AutoModel: the class that its entry-point group `nemo_automodel.architectures` names.

Many architectures have a model in NeMo AutoModel, which an entry point cannot replace. So each run chooses:

    model:
      _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
      pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
      architectures: [LigerzooForCausalLM]

The sizes of its `distributed` section become those of a mesh of `ligerzoo.parallel.parallelize`:

    dp_replicate_size   replicate
    dp_size             replicate * shard
    cp_size             context
    tp_size             tensor
    ep_size             expert, times tensor

Needs NeMo AutoModel, which `[nemo]` installs.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import ClassVar, cast

import torch
import torch.distributed as dist
from nemo_automodel.components.checkpoint.state_dict_adapter import StateDictAdapter
from nemo_automodel.components.distributed.config import FSDP2Config
from nemo_automodel.components.distributed.context_parallel.sharder import ContextParallelSharder
from nemo_automodel.components.distributed.mesh import MeshContext
from nemo_automodel.components.distributed.parallelizer import ModelParallelizer
from nemo_automodel.components.distributed.tp_replicas import exclude_from_tp_replica_sync
from nemo_automodel.components.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
from nemo_automodel.components.moe.fsdp_mixin import MoEFSDPSyncMixin
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from ligerzoo.dtensors import is_sharded
from ligerzoo.errors import ConfigError
from ligerzoo.hub import AutoModel, load_on_meta
from ligerzoo.hub.sharing import read_transformers_config
from ligerzoo.integrations.stored_state import StoredState
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.pretrained import Saveable
from ligerzoo.parallel import initialize_sharded, make_mesh, parallelize

_PREFIX = "zoo_model."
_NOT_OF_THE_MODEL = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Entries of a config that do not change our model."""


class ZooParallelizer(ModelParallelizer):
    """Distributes a model with `ligerzoo.parallel.parallelize`. NeMo AutoModel finds it in the class of the model."""

    def parallelize(self, model: nn.Module, mesh_context: MeshContext, /) -> nn.Module:
        """Distributes a model over the processes of a mesh, in place.

        Raises:
            ConfigError: The strategy is not FSDP2, an option of it has no meaning here, or sizes do not fit the model.
        """
        _refuse_options(mesh_context)
        strategy, zoo_model = mesh_context.strategy_config, cast(CausalLM, model.zoo_model)
        if mesh_context.activation_checkpointing:
            zoo_model.gradient_checkpointing_enable()
        policy, device_type = strategy.mp_policy, mesh_context.device_mesh.device_type
        dtype = zoo_model.get_input_embeddings().weight.dtype
        parallelize(
            zoo_model,
            make_mesh(_mesh_sizes(mesh_context), device_type),
            param_dtype=None if policy is None or policy.param_dtype == dtype else policy.param_dtype,
            reduce_dtype=torch.float32 if policy is None else policy.reduce_dtype,
            reshard_after_forward=strategy.reshard_after_forward is not False,
        )
        for module in model.modules():
            exclude_from_tp_replica_sync(module)  # gradients of a tensor group are equal already
        if mesh_context.reapply_trainability is not None:
            mesh_context.reapply_trainability(model)
        return model


def _mesh_sizes(context: MeshContext) -> MeshSizes:
    shards = context.dp_replicate_size or 1, context.dp_shard_size
    return MeshSizes.of_engine(*shards, context.cp_size, context.tp_size, context.ep_size, where="distributed.ep_size")


def _refuse_options(context: MeshContext) -> None:
    """Raises ConfigError for options of NeMo AutoModel that do nothing, or something else, with our models."""
    refused: dict[str, tuple[object, object, str]]
    match strategy := context.strategy_config:
        case FSDP2Config():
            refused = {
                "pp_size": (context.pp_size, 1, "Use more tensor or shard processes."),
                "tp_plan": (strategy.tp_plan, None, "Each layer has its plan."),
                "sequence_parallel": (strategy.sequence_parallel, False, "Use cp_size to divide tokens."),
                "offload_policy": (strategy.offload_policy, None, "Shard over more processes."),
                "enable_compile": (strategy.enable_compile, False, "The layers are fused kernels already."),
            }
        case _:
            refused = {"strategy": (type(strategy).__name__, "FSDP2Config", "Use strategy: fsdp2.")}
    for name, (got, expected, remedy) in refused.items():
        if got != expected:
            raise ConfigError("not supported", where=f"distributed.{name}", got=got, expected=expected, remedy=remedy)


class NemoStateDictAdapter(StateDictAdapter):
    """Our state dict under the names of the checkpoint, in both directions; see `StoredState`."""

    _supports_low_memory_dcp_load = True

    def __init__(self, model: CausalLM) -> None:
        self._stored = StoredState(model, _PREFIX)

    def to_hf(self, state_dict: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
        """Returns tensors by their stored names, of which each process has its parts."""
        return self._stored.of_model(state_dict)

    def from_hf(
        self, hf_state_dict: dict[str, Tensor], device_mesh: object = None, **options: object
    ) -> dict[str, Tensor]:
        """Returns the state dict of the model."""
        return self._stored.to_model(hf_state_dict)

    def convert_single_tensor_to_hf(self, fqn: str, tensor: Tensor, **options: object) -> list[tuple[str, Tensor]]:
        """Raises ConfigError: NeMo AutoModel calls it for weights that it sends to other engines one by one."""
        remedy = "Save the model, and load the checkpoint there."
        raise ConfigError("not supported", where="convert_single_tensor_to_hf", got=fqn, remedy=remedy)

    def get_hf_state_dict_keys(self, state_dict: dict[str, Tensor]) -> list[str]:
        """Returns the names of the stored tensors. Raises CheckpointError if the model has adapters."""
        self._stored.check(state_dict)
        return self._stored.names


class _OwnTokens(CausalLM):
    """A model that returns final hidden states and logits, of this process's tokens if rows are divided."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, kept: int, **inputs: object
    ) -> tuple[Tensor, Tensor]:
        hidden, _ = self.run_decoder(input_ids, attention_mask, position_ids, **inputs)  # type: ignore[arg-type]
        return hidden, self.lm_head(hidden[:, -kept:])


@functools.cache
def _own_tokens(model_class: type[CausalLM]) -> type[CausalLM]:
    return type(model_class.__name__, (_OwnTokens, model_class), {})


class LigerzooForCausalLM(HFCheckpointingMixin, MoEFSDPSyncMixin, nn.Module):
    """A model of ligerzoo, as NeMo AutoModel builds, shards, calls and saves it.

    Args:
        config: transformers' config, of any architecture of the zoo. Its `name_or_path` is the checkpoint.

    Attributes:
        config: as given.
        zoo_model: the model.
        state_dict_adapter: names of the tensors in checkpoints.
    """

    parallelizer = ZooParallelizer()
    _tp_plan: ClassVar[dict[str, str]] = {}  # NeMo AutoModel divides models that have one; ours is in the layers
    _owns_cp_attention = True
    _supports_sdpa = True
    supports_gradient_checkpointing = True

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        with torch.device("cpu"):
            self.zoo_model = _build(self, torch.get_default_dtype()).train()
        self.zoo_model.__class__ = _own_tokens(type(self.zoo_model))
        self.state_dict_adapter = NemoStateDictAdapter(self.zoo_model)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
        **inputs: object,
    ) -> CausalLMOutputWithPast:
        """Returns the logits, and with `output_hidden_states` the final hidden states.

        With context parallelism, all processes of a group pass whole rows, and each returns its consecutive part.

        Args:
            input_ids: see `ligerzoo.models.CausalLM.forward`, as for `attention_mask` and `position_ids`.
            logits_to_keep: number of last tokens to compute logits for, 0 for all.
            output_hidden_states: also return the input of the head, for losses that compute the logits.
            inputs: inputs of the architecture, such as `pixel_values`. Others are ignored.
        """
        given = {name: value for name, value in inputs.items() if name in self.zoo_model.modalities}
        hidden, logits = self.zoo_model(input_ids, attention_mask, position_ids, logits_to_keep, **given)
        return CausalLMOutputWithPast(logits=logits, hidden_states=(hidden,) if output_hidden_states else None)

    def prepare_model_inputs_for_cp(
        self, batch: dict[str, Tensor], num_chunks: int = 1
    ) -> dict[str, ContextParallelSharder]:
        """Returns what divides a batch over the processes of a `cp` group: labels here, inputs in the model."""
        return {"cp_sharder": ContextParallelSharder(shard_batch=self._divide_labels)}

    def _divide_labels(
        self, cp_mesh: object, tp_mesh: object, batch: dict[str, Tensor], **options: object
    ) -> tuple[type[contextlib.nullcontext[None]], dict[str, Tensor], None]:
        labels = batch["labels"]
        parts = self.zoo_model.row_parts.of(labels.shape[1])
        return contextlib.nullcontext, {**batch, "labels": parts.own(labels, fill=-100).contiguous()}, None

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding of the tokens."""
        return self.zoo_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """Returns the head."""
        return self.zoo_model.get_output_embeddings()

    def initialize_weights(self, dtype: torch.dtype | None = None) -> None:
        """Initializes all weights, in all processes with the same seed."""
        self.zoo_model.tie_weights()
        if is_sharded(self.zoo_model.parameters()):
            initialize_sharded(self.zoo_model)
        else:
            self.zoo_model.init_weights()

    def prepare_for_grad_accumulation(self, pp_enabled: bool = False) -> None:
        """Does nothing: gradients of all microbatches are reduced."""

    def prepare_for_final_backward(self, pp_enabled: bool = False) -> None:
        """Does nothing."""

    def save_pretrained(
        self, save_directory: str, *args: object, tokenizer: Saveable | None = None, **options: object
    ) -> None:
        """Saves the model as ligerzoo does, and the tokenizer, to the directory `model`. All processes must call it."""
        directory = Path(save_directory, "model")
        self.zoo_model.save_pretrained(directory)
        if tokenizer is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            tokenizer.save_pretrained(directory)


def _build(wrapper: LigerzooForCausalLM, dtype: torch.dtype) -> CausalLM:
    """Builds the model of a wrapper's config on the meta device, with the names of the tensors of its checkpoint."""
    config = wrapper.config
    checkpoint = config.name_or_path
    if not checkpoint or (Path(checkpoint).is_dir() and not any(Path(checkpoint).glob("*.safetensors"))):
        _, _, own = read_transformers_config(wrapper)
        return AutoModel.from_config(own, device="meta", dtype=dtype)
    stored = type(config).from_pretrained(checkpoint).to_dict()
    for name, value in config.to_dict().items():
        if not name.startswith("_") and name not in _NOT_OF_THE_MODEL and value != stored.get(name):
            remedy = "Save a checkpoint with this config.json, or train with ligerzoo."
            raise ConfigError(
                "differs from config.json", where=f"config.{name}", got=value, expected=stored.get(name), remedy=remedy
            )
    return load_on_meta(checkpoint, CausalLM, dtype=dtype)

"""Ligerzoo models in torchtitan: a `ModelSpec`, a trainer, and two configs for its command line.

    torchrun --nproc-per-node 8 -m torchtitan.train --module ligerzoo.integrations.torchtitan --config finetune \
        --hf_assets_path DIRECTORY

The directory has config.json, tokenizer and weights of any architecture of the zoo. torchtitan's degrees of parallelism
become the sizes of a mesh of `ligerzoo.parallel.parallelize`:

    data_parallel_replicate_degree   replicate
    data_parallel_shard_degree       shard
    context_parallel_degree          context
    tensor_parallel_degree           tensor
    expert_parallel_degree           expert, times tensor

Needs torchtitan, which `[torchtitan]` installs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.protocols import BaseModel, ModelSpec, StateDictAdapter
from torchtitan.trainer import Trainer

from ligerzoo.dtensors import is_sharded
from ligerzoo.errors import ConfigError
from ligerzoo.hub import AutoModel, load_on_meta, read_config
from ligerzoo.integrations.stored_state import StoredState
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.parallel import initialize_sharded, make_mesh, parallelize
from ligerzoo.train.optimizers.gradients import clip_grad_norm
from ligerzoo.train.throughput import StepFlops

_FILES = ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer*", "special_tokens_map.json")
_PREFIX = "zoo_model."


class ZooModel(BaseModel):
    """A model of ligerzoo, as torchtitan builds and calls it.

    Args:
        config: names the checkpoint.

    Attributes:
        zoo_model: the model.
        data_processes: number of processes with other samples, over which gradients are averaged.
        context_processes: number of processes that divide rows.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Config of a checkpoint.

        Attributes:
            checkpoint: directory with config.json, and weights or not. Default: `hf_assets_path` of the trainer.
        """

        checkpoint: str = ""

        def update_from_config(self, *, config: Trainer.Config, **kwargs: object) -> None:
            """Takes the checkpoint from the trainer's config. Raises ConfigError for options without a meaning here."""
            self.checkpoint = self.checkpoint or config.hf_assets_path
            _refuse_options(config)

        def get_nparams_and_flops(self, model: ZooModel, seq_len: int) -> tuple[int, int]:
            """Returns the number of weights, and the FLOPs of a token."""
            parameters = sum(weight.numel() for weight in model.parameters())
            flops = StepFlops(model.zoo_model)(torch.arange(seq_len, device="cpu")[None], seq_len)
            return parameters, int(flops / seq_len)

    zoo_model: CausalLM

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.zoo_model = build(config.checkpoint, torch.get_default_dtype()).train()
        self.data_processes = self.context_processes = 1

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        num_items: int | Tensor | None = None,
    ) -> Tensor:
        """Returns the logits, (B, T, V); with labels the loss, 0-d.

        Args:
            tokens: (B, T) token ids.
            positions: (B, T) position of each token in its document.
            labels: (B, T) token ids, already shifted; -100 is ignored.
            num_items: divisor of the summed loss.

        Raises:
            ConfigError: Rows are divided, but by torchtitan's trainer or validator.
        """
        if labels is None:
            if self.context_processes > 1:
                where, remedy = "parallelism.context_parallel_degree", "Train with ZooTrainer, without validation."
                raise ConfigError(
                    "the model divides rows itself", where=where, got=self.context_processes, remedy=remedy
                )
            logits = self.zoo_model(tokens, position_ids=positions).logits
            return _GradientOfSum.apply(logits, self.data_processes)  # torchtitan's losses are shares of a sum
        return self.zoo_model(tokens, position_ids=positions, shift_labels=labels, num_items_in_batch=num_items).loss

    def verify_module_protocol(self) -> None:
        """Accepts layers that are not torchtitan's."""

    def to_empty(self, *, device: torch.device | str, recurse: bool = True) -> ZooModel:
        """Allocates a model that is not sharded. `init_weights` allocates a sharded one, a module at a time."""
        if not is_sharded(self.zoo_model.parameters()):
            self.zoo_model.to_empty(device=device)
            self.zoo_model.tie_weights()
        return self

    def init_weights(self, **kwargs: object) -> None:
        """Initializes all weights, in all processes with the same seed."""
        if is_sharded(self.zoo_model.parameters()):
            initialize_sharded(self.zoo_model)
        else:
            self.zoo_model.init_weights()


def build(checkpoint: str | Path, dtype: torch.dtype) -> CausalLM:
    """Builds the model of a checkpoint, which may have no weights, on the meta device."""
    with torch.device("cpu"):
        if any(Path(checkpoint).glob("*.safetensors")):
            return load_on_meta(checkpoint, CausalLM, dtype=dtype)
        return AutoModel.from_config(read_config(checkpoint), device="meta", dtype=dtype)


class _GradientOfSum(FusedFunction):
    """x, whose gradient is multiplied, for losses that are added up over processes that average gradients."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, processes: int) -> Tensor:
        ctx.processes = processes
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.processes, None


def parallelize_model(
    model: ZooModel,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    ac_config: object = None,
    **options: object,
) -> ZooModel:
    """Distributes a model with `ligerzoo.parallel.parallelize`. torchtitan's trainer calls it.

    Args:
        model: on the meta device.
        parallel_dims: torchtitan's degrees of parallelism.
        training: dtypes of the computation and of the reduction of gradients.
        parallelism: whether weights are freed after the forward of their block.
        ac_config: recomputes blocks in backward, for any policy but None.
        options: unused.

    Raises:
        ConfigError: `expert_parallel_degree` is not a multiple of `tensor_parallel_degree`, or a layer cannot be
            divided.
    """
    if ac_config is not None:
        model.zoo_model.gradient_checkpointing_enable()
    compute, dims = TORCH_DTYPE_MAP[training.mixed_precision_param], parallel_dims
    degrees = dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.ep
    parallelize(
        model.zoo_model,
        make_mesh(MeshSizes.of_engine(*degrees, where="parallelism.expert_parallel_degree")),
        param_dtype=None if compute == TORCH_DTYPE_MAP[training.dtype] else compute,
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never",
    )
    model.data_processes, model.context_processes = dims.dp_replicate * dims.dp_shard, dims.cp
    return model


class TitanStateDictAdapter(StateDictAdapter):
    """Our state dict under the names of the checkpoint, in both directions."""

    def __init__(self, model_config: ZooModel.Config, hf_assets_path: str | None) -> None:
        checkpoint = model_config.checkpoint or hf_assets_path or ""
        with_index = Path(checkpoint, "model.safetensors.index.json").is_file()
        super().__init__(model_config, checkpoint if with_index else None)
        self.hf_assets_path = checkpoint
        self._stored = StoredState(build(checkpoint, torch.float32), _PREFIX)

    def to_hf(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors by their stored names, of which each process has its parts; see `StoredState.of_model`."""
        return self._stored.of_model(state_dict)

    def from_hf(self, hf_state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the state dict of the model; see `StoredState.to_model`."""
        return self._stored.to_model(hf_state_dict)


def model_spec(checkpoint: str | Path = "") -> ModelSpec:
    """Returns the spec of a checkpoint, for a config of `ZooTrainer`.

    Args:
        checkpoint: directory. Default: `hf_assets_path` of the trainer.
    """
    return ModelSpec(
        name="ligerzoo",
        flavor=Path(checkpoint).name,
        model=ZooModel.Config(checkpoint=str(checkpoint)),
        parallelize_fn=parallelize_model,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=TitanStateDictAdapter,
    )


class ZooTrainer(Trainer):
    """torchtitan's trainer with our loss head, which never has all logits, and our division of rows over processes.

    The processes of a `context` group get whole rows, and the model divides them. The final checkpoint in Hugging Face
    format gets config.json and the tokenizer, so that ligerzoo and others load it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Config of `ZooTrainer`. The loss is the cross entropy; `loss` is for validation."""

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns whole rows: the model divides them."""
        self.ntokens_seen += labels.numel() // self.parallel_dims.cp
        return input_dict["input"], labels, {name: value for name, value in input_dict.items() if name != "input"}

    def _forward_backward_body(
        self, inputs: Tensor, labels: Tensor, global_valid_tokens: Tensor, extra_kwargs: dict[str, Tensor]
    ) -> Tensor:
        """Returns this process's share of the loss of all processes, after backward."""
        [model] = self.model_parts
        with self.train_context():
            loss = model(inputs, labels=labels, num_items=global_valid_tokens / model.data_processes, **extra_kwargs)
            loss.backward()
        return loss.detach() / (model.data_processes * model.context_processes)

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Trains one step. Clips gradients of several meshes, which torchtitan's function does not."""
        with mock.patch.object(dist_utils, "clip_grad_norm_", _clip_grad_norm):
            super().train_step(data_iterator)

    def train(self) -> None:
        """Trains, and completes the final checkpoint."""
        super().train()
        saved = Path(self.config.dump_folder, self.config.checkpoint.folder, f"step-{self.step}")
        if self.config.checkpoint.last_save_in_hf and dist.get_rank() == 0 and saved.is_dir():
            for pattern in _FILES:
                for file in Path(self.model_config.checkpoint).glob(pattern):
                    shutil.copy(file, saved)


def _clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, **options: object) -> Tensor:
    return clip_grad_norm(parameters, max_norm)


def _refuse_options(config: Trainer.Config) -> None:
    """Raises ConfigError for options of torchtitan that do nothing, or something else, with our models."""
    training, checkpoint = config.training, config.checkpoint
    unquantized = "Load the checkpoint with ligerzoo.AutoModel and save it with save_pretrained."
    refused = {
        "compile.enable": (config.compile.enable, False, "The layers are fused kernels already."),
        "training.enable_cpu_offload": (training.enable_cpu_offload, False, "Shard over more processes."),
        "training.disable_cuda_graphs": (training.disable_cuda_graphs, True, "Set it."),
        "checkpoint.initial_load_in_hf_quantized": (checkpoint.initial_load_in_hf_quantized, False, unquantized),
    }
    for where, (got, expected, remedy) in refused.items():
        if got != expected:
            raise ConfigError("not supported", where=where, got=got, expected=expected, remedy=remedy)


def finetune() -> ZooTrainer.Config:
    """Config that trains the weights in `--hf_assets_path`, and saves in Hugging Face format."""
    config = pretrain()
    config.checkpoint.initial_load_in_hf = True
    return config


def pretrain() -> ZooTrainer.Config:
    """Config that trains new weights of the architecture in `--hf_assets_path`, and saves in Hugging Face format."""
    return ZooTrainer.Config(
        model_spec=model_spec(),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-5),
        lr_scheduler=LRSchedulersContainer.Config(),
        training=TrainingConfig(disable_cuda_graphs=True),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        checkpoint=CheckpointManager.Config(enable=True, last_save_in_hf=True),
    )

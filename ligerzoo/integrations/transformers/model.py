"""Base class of ligerzoo models as `PreTrainedModel` of transformers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Self

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils.checkpoint import checkpoint

from ligerzoo.convert import architecture_of_model
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.tensor_slices import shapes_of
from ligerzoo.dtensors import is_dtensor, is_sharded, shard_like
from ligerzoo.errors import CheckpointError, LigerzooError, first_names
from ligerzoo.hub.tying import under_both_names
from ligerzoo.integrations.transformers.backbone import Backbone, Model
from ligerzoo.integrations.transformers.config import hf_config, values, with_changes
from ligerzoo.integrations.transformers.distribution import Distribution
from ligerzoo.layers.plain import find_modules


class WrappedModel(Distribution, Generic[Model]):
    """A ligerzoo model as a `PreTrainedModel`; see `wrap`. Subclasses add the head.

    Args:
        model: the model. Its parameters are shared.
        fuses: see `Backbone`.

    Attributes:
        backbone_class: class of the model without its head.
    """

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    backbone_class: ClassVar[type[Backbone[Any]]] = Backbone

    def __init__(self, model: Model, *, fuses: bool = True) -> None:
        super().__init__(hf_config(model))
        backbone = self.backbone_class(model, self.config, fuses=fuses)
        self.base_model_prefix = backbone.prefix
        self.add_module(backbone.prefix, backbone)
        blocks = {type(block).__name__ for blocks in find_modules(self, nn.ModuleList) for block in blocks}
        self._no_split_modules = sorted(blocks)
        self._config_before = copy.deepcopy(values(self.config))

    @property
    def backbone(self) -> Backbone[Model]:
        """The model without its head."""
        return getattr(self, self.base_model_prefix)

    # What `ligerzoo.parallel` asks a model

    @property
    def decoder_layers(self) -> nn.ModuleList:
        """The blocks of the decoder."""
        return self.backbone.zoo_model.decoder_layers

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the inputs other than text."""
        return self.backbone.zoo_model.modalities

    @property
    def gathered_with_head(self) -> tuple[nn.Module, ...]:
        """The final norm: trainers of TRL multiply with the head's weight without its forward, but after the norm's."""
        return (self.backbone.zoo_model.model.norm,)

    @property
    def shares_head(self) -> bool:
        """Whether the language-model head and the embedding are the same parameter."""
        head = self.get_output_embeddings()
        return head is not None and head.weight is self.get_input_embeddings().weight

    # Embeddings

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding of the tokens."""
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding of the tokens."""
        self.backbone.set_input_embeddings(value)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Changes the number of rows of embedding and head, as transformers does.

        Raises:
            LigerzooError: the embedding has rows for more tokens than the head, or the weights are sharded.
        """
        model = self.backbone.zoo_model
        if is_sharded(self.parameters()):
            what, remedy = "the weights are sharded", "Resize before the model is distributed."
            raise LigerzooError(what, where="resize_token_embeddings", remedy=remedy)
        if (rows := model.input_vocab_size) != (head_rows := model.config.vocab_size):
            what, got = "the embedding has more rows than the head", f"{rows} and {head_rows}"
            expected = "a model without extra tokens"
            raise LigerzooError(what, where="resize_token_embeddings", got=got, expected=expected)
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        model.config = dataclasses.replace(model.config, vocab_size=self.config.get_text_config().vocab_size)  # type: ignore[type-var]
        return embedding

    def initialize_weights(self) -> None:
        """Keeps the weights: they are those of the ligerzoo model."""

    def train(self, mode: bool = True) -> Self:
        """Sets training or evaluation mode, as `torch.nn.Module.train`.

        Raises:
            LigerzooError: liger-kernel replaced methods of the model.
        """
        for module in self.modules():
            if getattr(vars(module).get("forward"), "__module__", "").startswith("liger_kernel"):
                what = "the model has fused kernels, which liger-kernel cannot replace"
                raise LigerzooError(what, where="use_liger_kernel", got=True, expected="False")
        return super().train(mode)

    # Activation checkpointing

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., object] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Called by transformers' methods that enable or disable activation checkpointing."""
        model = self.backbone.zoo_model
        if not enable:
            model.gradient_checkpointing_disable()
            return
        is_offloading = getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func) is not checkpoint
        _check_supported("activation checkpointing without it", every_n_layers=(every_n_layers, 1))
        _check_supported("activation checkpointing without it", offload=(is_offloading, False))
        model.gradient_checkpointing_enable(getattr(gradient_checkpointing_func, "keywords", None))

    # Weights

    @property
    def architecture(self) -> Architecture:
        """The architecture of the model, which names the tensors and entries of its checkpoints."""
        return architecture_of_model(self.backbone.zoo_model)

    def to_zoo_model(self, state: Mapping[str, Tensor] | None = None) -> Model:
        """Returns a ligerzoo model with these weights: views of them.

        Args:
            state: weights by their names in this model, such as those gathered from all ranks. Default: this model's.

        Raises:
            CheckpointError: `state` has other names than the architecture's, such as those of adapters.
        """
        source = self.backbone.zoo_model
        config = with_changes(source.config, self.config, self._config_before)
        model: Model = self.architecture.build(config, type(source), "meta")
        tied = self.all_tied_weights_keys
        given = under_both_names(self.state_dict() if state is None else state, tied)
        slices = list(self.backbone.names.slices(shapes_of(model.state_dict())))
        expected = {part.stored_name for part in slices}
        names = {name for name in given if name in expected or tied.get(name) not in expected}
        if names != expected:
            unknown, missing = (first_names(sorted(some)) or None for some in (names - expected, expected - names))
            what, remedy = "tensors differ from those of the architecture", "Merge adapters into the weights first."
            raise CheckpointError(what, where=type(self).__name__, got=unknown, expected=missing, remedy=remedy)
        weights = {part.name: part.select(given[part.stored_name]) for part in slices}
        model.load_state_dict(weights, assign=True)
        model.tie_weights()
        model.origin, model.generation_config = source.origin, source.generation_config
        return model.train(self.training)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Loads weights under the names of this model, or under the names and in the layout of a checkpoint.

        Args:
            state_dict: weights. In a checkpoint's layout, all are required, also if `strict` is False. One of the names
                of a tied weight is enough.
            strict: True refuses missing weights. False loads the given ones, and returns the names of the others. Names
                that are neither this model's nor a checkpoint's are refused in either case.
            assign: see `torch.nn.Module.load_state_dict`. Weights in a checkpoint's layout are copied.

        Returns:
            `missing_keys` and `unexpected_keys`, as of `torch.nn.Module.load_state_dict`. If `strict` is False, the
            former has all names of this model that `state_dict` lacks. A tied weight may be among them: safetensors and
            accelerate, which store only one of its names, expect this. The latter is empty.

        Raises:
            CheckpointError: weights are missing, or names are unknown. Nothing is loaded.
        """
        own = super().state_dict()
        names = own.keys()
        if state_dict.keys() <= names and not self._is_transposed(state_dict, own):
            state = under_both_names(state_dict, self.all_tied_weights_keys)
            state = {name: x if is_dtensor(x) else shard_like(own[name], x) for name, x in state.items()}
            missing = [name for name in names if name not in state]
            if strict and missing:
                raise CheckpointError("weights are missing", where="state_dict", got=f"no {first_names(missing)}")
            super().load_state_dict(state, strict=False, assign=assign)
            if assign:
                self.tie_weights()
            return _IncompatibleKeys([] if strict else [name for name in names if name not in state_dict], [])
        self.to_zoo_model().load_hf_state_dict(state_dict)
        return _IncompatibleKeys([], [])

    def _is_transposed(self, state_dict: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> bool:
        """Whether the weights have the shapes of a checkpoint whose names are this model's (Qwen3-VL-MoE's experts)."""
        if all(tensor.shape == own[name].shape for name, tensor in state_dict.items()):
            return False
        stored = shapes_of(self.to_zoo_model().hf_state_dict())
        return all(stored.get(name) == shape for name, shape in shapes_of(state_dict).items())

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "5GB",
        safe_serialization: bool = True,
        variant: str | None = None,
        **options: Any,
    ) -> None:
        """Saves the model as ligerzoo does: transformers, vLLM and ligerzoo load it.

        Args:
            save_directory: created if it does not exist. Other files in it, such as the tokenizer's, are kept.
            is_main_process: whether this process writes.
            state_dict: weights under the names of this model. Default: its own.
            push_to_hub: also upload the model, see `ligerzoo.models.CausalLM.push_to_hub`.
            max_shard_size: maximum bytes of tensors per file.
            safe_serialization: True; other formats than safetensors are refused.
            variant: None.
            options: `repo_id`, `token`, `private` and `commit_message` for `push_to_hub`.

        Raises:
            LigerzooError: an option asks for another format.
        """
        if getattr(self, "_hf_peft_config_loaded", False):  # adapters that `add_adapter` added: they alone are saved
            super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict)
            return
        _check_supported(
            "not supported",
            safe_serialization=(safe_serialization, True),
            variant=(variant, None),
            save_original_format=(options.pop("save_original_format", True), True),
            distributed_checkpoint=(options.pop("distributed_checkpoint", False), False),
        )
        options.pop("save_peft_format", None)
        if not is_main_process and state_dict is not None:
            return
        model = self.to_zoo_model(state_dict)
        model.save_pretrained(save_directory, max_shard_size=max_shard_size, is_main_process=is_main_process)
        if push_to_hub and is_main_process:
            model.push_to_hub(options.pop("repo_id", Path(save_directory).name), **options)


def _check_supported(what: str, **values: tuple[object, object]) -> None:
    """Raises LigerzooError unless each argument, given with the only supported value, has it."""
    for where, (got, expected) in values.items():
        if got != expected:
            raise LigerzooError(what, where=where, got=got, expected=expected)

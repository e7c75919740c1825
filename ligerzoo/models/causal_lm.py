"""Base class of causal language models: a decoder and a head, called with Hugging Face's arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.dispatch import DEBUG
from ligerzoo.layers import Context, Decoder, KVCache, LMHead, shifted_labels
from ligerzoo.layers.linear import INIT_STD

if TYPE_CHECKING:
    from ligerzoo.hub import Origin, Saveable


@dataclass
class CausalLMOutput:
    """Output of a causal language model.

    Fields are also available as `out["loss"]`, or as `out[0]` among those that are not None.

    Attributes:
        loss: 0-d fp32, if labels were given.
        logits: (B, T, V) in the model's dtype; None if labels were given, since they are never materialized then.
        past_key_values: the KV cache, if one was passed or `use_cache` was set.
        aux_loss: 0-d load-balancing loss of MoE architectures.
        details: second result of the objective, if one was given.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: KVCache | None = None
    aux_loss: Tensor | None = None
    details: Any = None

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, str):
            return getattr(self, key)
        return [value for field in fields(self) if (value := getattr(self, field.name)) is not None][key]


# FSDP2 and DDP find the tensors to hook through pytree.
_pytree.register_dataclass(CausalLMOutput)


Objective = Callable[..., tuple[Tensor | None, Any]]
"""Replacement for the cross entropy.

Called as `objective(hidden, weight, target, softcap=..., logit_scale=..., logits_budget=..., backend=...)` with hidden
states (B, T, H), the weight of the head (V, H) and target token ids (B, T). Returns the loss, 0-d or None, and details
of any type.
"""


class CausalLMConfig(Protocol):
    """Config fields that `CausalLM` reads."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def initializer_range(self) -> float: ...


class FactoryKwargs(TypedDict, total=False):
    """Device and dtype of the weights of a new model.

    Attributes:
        device: device; "meta" allocates no memory.
        dtype: floating dtype.
    """

    device: torch.device | str | None
    dtype: torch.dtype | None


class CausalLM(nn.Module):
    """A decoder and a language-model head.

    A subclass takes a config and `FactoryKwargs`, builds both parts and passes them to this constructor. Dropout is
    never applied, even if config.json sets one.

    Args:
        config: config of the architecture.
        model: token ids to final hidden states.
        lm_head: final hidden states to logits or loss. Shares the weight of the embedding if the config ties them.
        parts: further modules, by attribute name.

    Attributes:
        generation_config: entries of generation_config.json: default token ids for `generate`.
        origin: where the weights were loaded from, to save them with the same names; None for a new model.
    """

    modalities: ClassVar[tuple[str, ...]] = ()
    """Names of the inputs other than text: the keyword parameters of `embed`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # All classes, since one `embed` may pass its keyword arguments on to the next.
        embeds = [vars(base)["embed"] for base in cls.__mro__ if "embed" in vars(base)]
        parameters = [p for embed in embeds for p in list(inspect.signature(embed).parameters.values())[3:]]
        cls.modalities = tuple(dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD))

    def __init__(self, config: CausalLMConfig, model: Decoder, lm_head: LMHead, **parts: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.lm_head = lm_head
        for name, part in parts.items():
            self.add_module(name, part)
        self.generation_config: dict[str, Any] = {}
        self.origin: Origin | None = None
        self.tie_weights()
        if config.initializer_range != INIT_STD:
            self.init_weights()

    def tie_weights(self) -> None:
        """Shares the weight of the embedding with the head, if the config ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight  # type: ignore[assignment]

    def init_weights(self, std: float | None = None) -> None:
        """Initializes all weights again, such as those of a model built on meta after `to_empty` and `tie_weights`.

        Calls `init_weights(std)` of every submodule that has this method. Other modules keep their weights.

        Args:
            std: standard deviation of the matrices. Default: `initializer_range` of the config.
        """
        std = self.config.initializer_range if std is None else std
        for module in self.modules():
            if module is not self and hasattr(module, "init_weights"):
                module.init_weights(std)  # type: ignore[operator]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        objective: Objective | None = None,
        **modalities: Any,
    ) -> CausalLMOutput:
        """Computes the logits, or the loss if labels are given.

        Args:
            input_ids: (B, T) token ids, from 0 to `input_vocab_size` - 1. Checked on a CPU; on a GPU only if the
                environment variable LIGERZOO_DEBUG is 1, see `check_inputs`. Other ids are undefined behaviour.
            attention_mask: (B, S) padding mask, 1 for a token and 0 for padding, cached tokens included; or a
                (B, 1, T, S) attention mask.
            position_ids: (B or 1, T). Default: 0 to T - 1, plus the length of the cache. Without padding and cache, a
                new segment of a packed row starts wherever an id is not its predecessor plus 1. Segments do not attend
                to each other.
            inputs_embeds: (B, T, H) embeddings, instead of `input_ids`.
            labels: (B, T) token ids aligned with `input_ids`, which this method shifts; -100 is ignored. With left
                padding, set the label of the first token to -100, or padding predicts it.
            shift_labels: (B, T) token ids, already shifted; takes precedence over `labels`.
            past_key_values: KV cache of earlier tokens; extended in place.
            use_cache: create a cache if none was passed.
            logits_to_keep: number of last tokens to compute logits for, 0 for all; or a 1-d tensor of token indices.
            num_items_in_batch: divisor of the summed loss. Default: the number of labels that are not ignored.
            cu_seqlens: (n + 1,) int, boundaries of n segments packed into a single row: 0, ..., at most T. The rest of
                the row is padding.
            objective: replaces the cross entropy, such as the losses of `ligerzoo.losses`; see `Objective`. It ignores
                `num_items_in_batch`.
            modalities: further inputs of the architecture; see its `embed`.

        Raises:
            ValueError: the inputs have inconsistent shapes or values, or are missing.
        """
        self._refuse_unknown(modalities)
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        x = input_ids if inputs_embeds is None else inputs_embeds
        if x is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError(
                f"expected exactly one of input_ids and inputs_embeds; got {'neither' if x is None else 'both'}"
            )
        if input_ids is not None and not (isinstance(input_ids, Tensor) and not input_ids.is_floating_point()):
            got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise TypeError(f"input_ids: got {got}; expected a (B, T) tensor of integers")
        for name, target in (("labels", labels), ("shift_labels", shift_labels)):
            if target is not None and target.shape != x.shape[:2]:
                raise ValueError(
                    f"{name} has shape {tuple(target.shape)}; expected {tuple(x.shape[:2])}, one per token"
                )
        if objective is not None and labels is None and shift_labels is None:
            raise ValueError("labels: got None with an objective; expected (B, T) token ids, -100 for ignored tokens")
        context = Context(x, attention_mask, position_ids, cu_seqlens, past_key_values)
        if (DEBUG or x.device.type == "cpu") and not (x.is_floating_point() or torch.compiler.is_compiling()):
            self.check_inputs(x, context.call_padding_mask(), past_key_values, **modalities)
        hidden = self.model(self.embed(x, context, **modalities), context)

        if labels is not None and shift_labels is None:
            shift_labels = shifted_labels(labels, context.segment_start)
        aux_loss = self.aux_loss(context)
        if shift_labels is not None:
            loss, details = self.lm_head(hidden, shift_labels, num_items_in_batch, objective), None
            if objective is not None:
                loss, details = loss
            if aux_loss is not None and loss is not None:
                loss = loss + self.aux_loss_weight * aux_loss
            return CausalLMOutput(loss=loss, past_key_values=past_key_values, aux_loss=aux_loss, details=details)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        return CausalLMOutput(logits=logits, past_key_values=past_key_values, aux_loss=aux_loss)

    def _refuse_unknown(self, modalities: Mapping[str, Any]) -> None:
        for name in modalities:
            if name not in self.modalities:
                nearest = difflib.get_close_matches(name, [*_FORWARD_INPUTS, *self.modalities], n=1)
                raise LigerzooError(
                    f"not an input of {type(self).__name__}", where=name,
                    expected=", ".join(self.modalities) or "text inputs only, such as input_ids",
                    remedy=f"Did you mean {nearest[0]!r}?" if nearest else None,
                )  # fmt: skip

    def embed(self, x: Tensor, context: Context) -> Tensor:
        """Returns the input of the decoder: (B, T) token ids, or (B, T, H) embeddings.

        Architectures with further inputs override it. Each input is a keyword parameter, which the method merges into
        the embeddings or stores in the context.
        """
        return x

    @property
    def input_vocab_size(self) -> int:
        """Number of token ids that have an embedding."""
        return self.config.vocab_size

    @property
    def placeholders(self) -> Mapping[int, str]:
        """Placeholder token ids, such as that of images, and the input that each of them needs."""
        return {}

    def check_inputs(
        self,
        input_ids: Tensor,
        padding_mask: Tensor | None = None,
        past_key_values: KVCache | None = None,
        **modalities: Any,
    ) -> None:
        """Checks the values of the inputs, which on a GPU is a host sync.

        `forward` calls it on a CPU or if LIGERZOO_DEBUG is 1, and `generate` for the prompts only.

        Args:
            input_ids: (B, T).
            padding_mask: (B, T) bool, False for padding, which may be a placeholder token; None for no padding.
            past_key_values: KV cache of earlier tokens. A single token after others may be a placeholder, since
                generation may sample any token.
            modalities: further inputs of the architecture; see its `embed`.

        Raises:
            LigerzooError: a token id has no embedding, or a placeholder lacks its input.
        """
        self._refuse_unknown(modalities)
        is_sampled = input_ids.shape[1] == 1 and past_key_values is not None and past_key_values.length > 0
        is_invalid = (input_ids < 0) | (input_ids >= self.input_vocab_size)
        for token_id, name in self.placeholders.items():
            is_placeholder = input_ids == token_id
            if modalities.get(name) is not None:
                is_invalid = is_invalid & ~is_placeholder
            elif not is_sampled and bool(
                (is_placeholder if padding_mask is None else is_placeholder & padding_mask).any()
            ):
                raise LigerzooError(
                    f"placeholder tokens of images or videos without {name}", where="input_ids", got=token_id,
                    expected=f"{name} as well", remedy="Get both from the model's processor.",
                )  # fmt: skip
        if bool(is_invalid.any()):
            raise LigerzooError(
                "token ids outside the vocabulary", where="input_ids", got=input_ids[is_invalid][:8].tolist(),
                expected=f"0 to {self.input_vocab_size - 1}",
                remedy="Use the tokenizer of this model, and pad with an id of its vocabulary.",
            )  # fmt: skip

    inputs_per_token: ClassVar[tuple[str, ...]] = ()
    """Per-token model inputs, (B, T, ...); `generate` pads and slices them like `input_ids`."""

    aux_loss_weight = 0.0
    """Factor of `aux_loss` when it is added to the loss."""

    def aux_loss(self, context: Context) -> Tensor | None:
        """Returns an auxiliary loss from what layers stored in the context, 0-d; None if the architecture has none."""
        return None

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """Returns an empty KV cache for `past_key_values`; see `ligerzoo.layers.Decoder.new_cache`."""
        return self.model.new_cache(capacity)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(self.parameters()).dtype

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        """Enables activation checkpointing: saves only the inputs of blocks and recomputes the blocks in backward.

        Args:
            gradient_checkpointing_kwargs: {"use_reentrant": False}, as Hugging Face's Trainer passes it, or None.

        Raises:
            ValueError: `gradient_checkpointing_kwargs` has another value.
        """
        if dict(gradient_checkpointing_kwargs or {}) not in ({}, {"use_reentrant": False}):
            raise ValueError(
                f"gradient_checkpointing_kwargs: got {gradient_checkpointing_kwargs}; "
                "expected {'use_reentrant': False} or None"
            )
        self._set_gradient_checkpointing(True)

    def gradient_checkpointing_disable(self) -> None:
        """Disables activation checkpointing."""
        self._set_gradient_checkpointing(False)

    def _set_gradient_checkpointing(self, enabled: bool) -> None:
        for module in self.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = enabled  # type: ignore[assignment]

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        strict: bool = True,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        **overrides: Any,
    ) -> Self:
        """Loads a checkpoint in Hugging Face format, see `ligerzoo.hub.load`.

        Args:
            name_or_path: directory, or id of a repository on the hub ("org/name").
            dtype: dtype of the weights; "auto" means that of config.json, or else that of the stored embedding.
            device: device of the weights. Defaults to torch's default device.
            strict: False allows missing and unexpected tensors, to load a checkpoint into an extended class.
            revision: branch, tag or commit on the hub.
            token: access token for private and gated repositories.
            cache_dir: directory of the downloaded files.
            local_files_only: use cached files only, without network access.
            overrides: values of config fields, which take precedence over config.json.
        """
        from ligerzoo import hub

        return hub.load(
            name_or_path, cls, dtype=dtype, device=device, strict=strict, revision=revision, token=token,
            cache_dir=cache_dir, local_files_only=local_files_only, **overrides,
        )  # fmt: skip

    def save_pretrained(self, directory: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Saves the model to `directory` in Hugging Face format; see `ligerzoo.hub.save`."""
        from ligerzoo import hub

        hub.save(self, directory, max_shard_size=max_shard_size)

    def hf_state_dict(self) -> dict[str, Tensor]:
        """Returns the weights under the names and in the shapes of checkpoints; see `ligerzoo.hub.hf_state_dict`."""
        from ligerzoo import hub

        return hub.hf_state_dict(self)

    def load_hf_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies weights named as in checkpoints into the parameters; see `ligerzoo.hub.load_hf_state_dict`."""
        from ligerzoo import hub

        hub.load_hf_state_dict(self, state)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload model",
        processor: Saveable | None = None,
    ) -> str:
        """Uploads the model, and a processor or tokenizer, to the Hugging Face hub; see `ligerzoo.hub.push`.

        Returns:
            The URL of the commit.
        """
        from ligerzoo import hub

        return hub.push(self, repo_id, private=private, token=token, commit_message=commit_message, processor=processor)

    def repeat_rows(
        self, modalities: Mapping[str, Any], repeats: int, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        """Repeats the inputs of each row of a batch, as beam search does: rows a, b become a, a, b, b.

        Architectures whose inputs have no row dimension, such as one list of the images of all rows, override it.

        Args:
            modalities: inputs of the architecture; see `embed`.
            repeats: number of copies of each row.
            input_ids: (B, T), before repetition.
            attention_mask: (B, T) padding mask.
        """
        return {
            name: value.repeat_interleave(repeats, 0) if isinstance(value, Tensor) else value
            for name, value in modalities.items()
        }

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Continues the prompts; see `ligerzoo.generate.generate` for the options.

        Returns:
            Prompts and continuations, (B, T + new tokens).
        """
        from ligerzoo.generate import generate

        return generate(self, input_ids, attention_mask, **options)


_FORWARD_INPUTS = [name for name in inspect.signature(CausalLM.forward).parameters if name != "self"]

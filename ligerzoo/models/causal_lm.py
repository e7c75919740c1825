"""What every causal language model shares: a decoder, a head, and Hugging Face's calling convention around them."""

from __future__ import annotations

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
from ligerzoo.layers import (
    BlockStack,
    Context,
    CrossAttentionBlock,
    Decoder,
    Experts,
    GatedPreNormBlock,
    KVCache,
    LayerNorm,
    LMHead,
    PatchEmbedding,
    PoolingProjector,
    RMSNorm,
    Router,
    TiledVisionTower,
    TileEmbedding,
    TilePositionEmbedding,
    VisionTower,
    shifted_labels,
)

if TYPE_CHECKING:
    from ligerzoo.hub import Origin, Saveable


@dataclass
class CausalLMOutput:
    """What a causal language model returns; read a field as `out.loss`, `out["loss"]`, or by its place among those that
    are not None.

    Attributes:
        loss: 0-d fp32, when labels were given.
        logits: (B, T, V) in the model's dtype; None when labels were given, for they are never all made.
        past_key_values: the cache, when one was passed or asked for.
        aux_loss: 0-d, of architectures with a router.
        details: what an objective returned besides the loss.
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
"""(hidden states (B, T, H), the head's weight (V, H), targets (B, T), softcap, logit_scale, logits_budget, backend) ->
(loss, 0-d or None, and details): what a model computes instead of the cross entropy."""

_DRAWN = (
    GatedPreNormBlock, PatchEmbedding, PoolingProjector, TileEmbedding, TilePositionEmbedding, TiledVisionTower
)  # fmt: skip
"""Layers with matrices that are no linear layers."""


class CausalLMConfig(Protocol):
    """What the shared code reads of an architecture's config."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def initializer_range(self) -> float: ...


class FactoryKwargs(TypedDict, total=False):
    """How the weights of a new model are made.

    Attributes:
        device: where ("meta" makes none).
        dtype: of what numbers.
    """

    device: torch.device | str | None
    dtype: torch.dtype | None


class CausalLM(nn.Module):
    """A decoder and a head. An architecture's class builds both and hands them to `__init__`; it takes a config, and
    how to make the weights. There is no dropout, in training neither, whatever config.json says of one.

    Args:
        config: the architecture's config.
        model: token ids to final hidden states.
        lm_head: final hidden states to logits or loss; its weight becomes the embedding's if the config ties them.
        parts: what else the architecture has, by the names of its attributes.

    Attributes:
        generation_config: the entries of generation_config.json: default token ids for `generate`.
        origin: where the weights came from, for saving them back under the same names; None for a new model.
    """

    modalities: ClassVar[tuple[str, ...]] = ()
    """The names of what the model reads besides text: those that `embed` has for its inputs."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        embeds = [vars(base)["embed"] for base in cls.__mro__ if "embed" in vars(base)]  # which may call each other
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
        self.reset_parameters()

    def tie_weights(self) -> None:
        """Makes the head's weight the embedding's, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight  # type: ignore[assignment]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random initialization: matrices from N(0, initializer_range^2), biases zero, norms one, gates of new layers
        closed."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | LMHead | Router):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, Experts):
                for weight in module.parameters():
                    nn.init.normal_(weight, std=self.config.initializer_range)
            elif isinstance(module, _DRAWN):
                module.reset_parameters(self.config.initializer_range)
            elif isinstance(module, RMSNorm | LayerNorm | CrossAttentionBlock):
                module.reset_parameters()

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
        """Logits, or with labels the loss.

        Args:
            input_ids: (B, T) token ids, from 0 to `input_vocab_size` - 1. On a GPU this is checked only with
                LIGERZOO_DEBUG=1 in the environment, see `check_inputs`; without it, other ids are undefined behaviour.
            attention_mask: (B, S), 1 for a token and 0 for padding, the cached tokens included; or (B, 1, T, S).
            position_ids: (B or 1, T); by default 0 to T - 1, after the cached tokens. Without padding and cache, where
                they begin anew another text begins: texts packed into a row do not see each other.
            inputs_embeds: (B, T, H) embeddings, instead of `input_ids`.
            labels: (B, T) token ids, -100 for those that do not count, in the same places as `input_ids` (they are
                shifted here). After padding on the left, give the first token -100 too: padding would predict it.
            shift_labels: (B, T), already shifted; they win over `labels`.
            past_key_values: the cache of the tokens before these; it is extended in place.
            use_cache: True starts a cache when none was passed.
            logits_to_keep: logits of the last so many tokens only (0: all), or of the places in a 1-d tensor.
            num_items_in_batch: divides the summed loss, in place of the number of labels that count.
            cu_seqlens: (n + 1,) int, where the n texts packed into a single row begin and end, as attention kernels
                for packed texts take it: 0, ..., at most T. What is left of the row is padding.
            objective: what is made of hidden states and head in place of the cross entropy of the labels, such as the
                losses of `ligerzoo.losses`, see `Objective`. It divides by what it likes.
            modalities: what else the architecture reads, see its `embed`.

        Raises:
            ValueError: the inputs do not fit together.
        """
        self._refuse_unknown(modalities)
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        x = input_ids if inputs_embeds is None else inputs_embeds
        if x is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give one of input_ids and inputs_embeds")
        for name, target in (("labels", labels), ("shift_labels", shift_labels)):
            if target is not None and target.shape != x.shape[:2]:
                raise ValueError(f"{name} {tuple(target.shape)} for tokens {tuple(x.shape[:2])}; expected one for each")
        if objective is not None and labels is None and shift_labels is None:
            raise ValueError("an objective needs labels, got None; expected (B, T) token ids, -100 where none counts")
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
                raise LigerzooError(
                    f"{type(self).__name__} does not read it", where=name,
                    expected=", ".join(self.modalities) or "text alone, such as input_ids",
                )  # fmt: skip

    def embed(self, x: Tensor, context: Context) -> Tensor:
        """What the decoder reads: (B, T) token ids, or (B, T, H) embeddings in their place. An architecture that reads
        more than text has arguments for that, and puts it among the tokens or in the context."""
        return x

    @property
    def input_vocab_size(self) -> int:
        """The number of token ids that have an embedding."""
        return self.config.vocab_size

    @property
    def placeholders(self) -> Mapping[int, str]:
        """The token ids in whose places images and the like go, each with the input that brings these."""
        return {}

    def check_inputs(
        self,
        input_ids: Tensor,
        padding_mask: Tensor | None = None,
        past_key_values: KVCache | None = None,
        **modalities: Any,
    ) -> None:
        """Checks the values of the inputs, for which the host waits for a GPU. So `forward` calls it on a CPU or with
        LIGERZOO_DEBUG=1 only, and `generate` for the prompts only.

        Args:
            input_ids: (B, T).
            padding_mask: (B, T) bool, False for padding, whose tokens may be placeholders; None for no padding.
            past_key_values: the cache of the tokens before these. A single token after others may be a placeholder:
                generation may draw any token.
            modalities: what else the architecture reads, see its `embed`.

        Raises:
            LigerzooError: a token id has no embedding, or is a placeholder without the input that belongs there.
        """
        self._refuse_unknown(modalities)
        is_drawn = input_ids.shape[1] == 1 and past_key_values is not None and past_key_values.length > 0
        has_none = (input_ids < 0) | (input_ids >= self.input_vocab_size)
        for token_id, name in self.placeholders.items():
            here = input_ids == token_id
            if modalities.get(name) is not None:
                has_none = has_none & ~here
            elif not is_drawn and bool((here if padding_mask is None else here & padding_mask).any()):
                raise LigerzooError(
                    "tokens that stand for images or videos, but no such input", where="input_ids", got=token_id,
                    expected=f"{name} with them", remedy="A processor makes both.",
                )  # fmt: skip
        if bool(has_none.any()):
            raise LigerzooError(
                "token ids outside the vocabulary", where="input_ids", got=input_ids[has_none][:8].tolist(),
                expected=f"0 to {self.input_vocab_size - 1}",
                remedy="The tokenizer must be that of the model; padding needs an id of the vocabulary, too.",
            )  # fmt: skip

    inputs_per_token: ClassVar[tuple[str, ...]] = ()
    """The names of what `embed` reads that tells something of each token, (B, T, ...)."""

    aux_loss_weight = 0.0
    """What `aux_loss` is multiplied by before it is added to the loss."""

    def aux_loss(self, context: Context) -> Tensor | None:
        """A loss besides that of the labels, 0-d, out of what the layers left in the context; None for none."""
        return None

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """An empty cache for `past_key_values`, see `ligerzoo.layers.Decoder.new_cache`."""
        return self.model.new_cache(capacity)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return next(self.parameters()).dtype

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        """From now on each block is computed again in the backward pass, from its input, which is all that is kept of
        it.

        Args:
            gradient_checkpointing_kwargs: as Hugging Face's Trainer passes them: {"use_reentrant": False} or nothing.

        Raises:
            ValueError: another kind of checkpointing is asked for.
        """
        if dict(gradient_checkpointing_kwargs or {}) not in ({}, {"use_reentrant": False}):
            raise ValueError(
                f"gradient_checkpointing_kwargs={gradient_checkpointing_kwargs}; expected {{'use_reentrant': False}}"
            )
        self._set_gradient_checkpointing(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keeps what the backward pass needs again."""
        self._set_gradient_checkpointing(False)

    def _set_gradient_checkpointing(self, on: bool) -> None:
        for module in self.modules():
            if isinstance(module, BlockStack | Decoder | VisionTower):
                module.gradient_checkpointing = on

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
        """Writes the model to `directory` in Hugging Face format, see `ligerzoo.hub.save`."""
        from ligerzoo import hub

        hub.save(self, directory, max_shard_size=max_shard_size)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload model",
        processor: Saveable | None = None,
    ) -> str:
        """Uploads the model, and the processor or tokenizer given with it, to the Hugging Face hub and returns the
        commit's address, see `ligerzoo.hub.push`."""
        from ligerzoo import hub

        return hub.push(self, repo_id, private=private, token=token, commit_message=commit_message, processor=processor)

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Continues the prompts; returns prompts and continuations, (B, T + new). The options are those of
        `ligerzoo.generate.generate`."""
        from ligerzoo.generate import generate

        return generate(self, input_ids, attention_mask, **options)

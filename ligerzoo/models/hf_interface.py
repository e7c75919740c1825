"""The names by which Hugging Face's libraries ask a model: embeddings, ties, device, activation checkpointing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Never

import torch
from torch import nn

from ligerzoo.dtensors import is_sharded
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.layers import Decoder
from ligerzoo.models.config import WRAP_FOR_TRAINER, LanguageModelConfig


class HFInterface(nn.Module):
    """Methods of a model over a decoder that have the names of `transformers.PreTrainedModel`.

    Attributes:
        config: config of the architecture.
        model: the decoder.
        replaced_weights: embedding and head whose weights are not those of the base model, by module name: all rows
            (None), or some. Adapters are saved with them.
    """

    config: LanguageModelConfig
    model: Decoder
    replaced_weights: dict[str, tuple[int, ...] | None]

    @property
    def input_vocab_size(self) -> int:
        """Number of token ids that have an embedding."""
        return self.config.vocab_size

    @property
    def placeholders(self) -> Mapping[int, str]:
        """Placeholder token ids, such as that of images, and the input that each of them needs."""
        return {}

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Raises LigerzooError: only transformers' Trainer asks, and it would count and shift labels wrongly.

        The Trainer recognizes its own models only, by their class.
        """
        raise self._not_wrapped("be trained by its Trainer", WRAP_FOR_TRAINER)

    def can_generate(self) -> bool:
        """Raises LigerzooError: only transformers' pipelines ask, and they read more of its interface."""
        remedy = "Give the pipeline ligerzoo.integrations.transformers.wrap(model)."
        raise self._not_wrapped("be used in its pipelines", remedy)

    @property
    def prepare_inputs_for_generation(self) -> Never:
        """Raises LigerzooError: only PEFT's models of a task ask, which generate by transformers."""
        remedy = "Give it ligerzoo.integrations.transformers.wrap(model), or use ligerzoo.adapters.add_lora."
        raise self._not_wrapped("have PEFT's adapters for a task_type", remedy)

    def _not_wrapped(self, what: str, remedy: str) -> LigerzooError:
        problem = f"a model without transformers' interface cannot {what}"
        return LigerzooError(problem, where=type(self).__name__, remedy=remedy)

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Returns the number of parameters, or of those that are trained. Tied ones count once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not only_trainable)

    @property
    def base_model(self) -> Decoder:
        """The decoder; the name that transformers uses."""
        return self.model

    @property
    def decoder_layers(self) -> nn.ModuleList:
        """The blocks of the decoder."""
        return self.model.layers

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the embedding of the token ids."""
        return self.model.embed_tokens  # type: ignore[return-value]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding. Ties the head to it, if the config ties them."""
        self.model.embed_tokens = value
        self.tie_weights()

    def get_output_embeddings(self) -> nn.Module | None:
        """Returns the language-model head; None if the model has none."""
        return None

    @property
    def gathered_with_head(self) -> tuple[nn.Module, ...]:
        """Modules whose weights FSDP2 gathers with those of the head."""
        return ()

    @property
    def shares_head(self) -> bool:
        """Whether the language-model head and the embedding are the same parameter."""
        head = self.get_output_embeddings()
        return head is not None and head.weight is self.get_input_embeddings().weight

    def tie_weights(self) -> None:
        """Shares the weights that the config ties: none without a language-model head."""

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None
    ) -> nn.Embedding:
        """Changes the number of rows of the embedding and of the language-model head, and `config.vocab_size`.

        Parameters stay the same objects, and tied ones stay tied. Create optimizers afterwards, since moments of old
        shapes no longer fit.

        Args:
            new_num_tokens: number of tokens. New rows, at the end, are the mean of the old ones, so that a new token is
                neither likely nor unlikely (Hewitt 2021; transformers adds noise of a billionth of the covariance). A
                smaller number removes rows at the end. None for the current number.
            pad_to_multiple_of: round the number up to a multiple of this; None for no rounding.

        Returns:
            The embedding.

        Raises:
            LigerzooError: a number is not a positive integer; a placeholder token of images or videos would lose its
                row; rows of image tokens follow those of the vocabulary (Llama 3.2 Vision); or the weights are sharded.
        """
        for name, number in (("new_num_tokens", new_num_tokens), ("pad_to_multiple_of", pad_to_multiple_of)):
            if number is not None and (type(number) is not int or number < 1):
                raise LigerzooError(
                    "not a number of tokens", where=name, got=repr(number), expected="an integer, 1 or more"
                )
        embedding, head = self.get_input_embeddings(), self.get_output_embeddings()
        tables = self.model.embedding_tables
        modules = [module for module in (embedding, head, *tables) if module is not None]
        parameters = (getattr(module, name, None) for name in ("weight", "bias") for module in modules)
        weights = [parameter for parameter in parameters if parameter is not None]
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        if size == self.config.vocab_size:
            return embedding
        if self.input_vocab_size != self.config.vocab_size:
            what = f"rows of image tokens follow the vocabulary of {type(self).__name__}"
            expected = f"{self.config.vocab_size}, the current vocabulary"
            raise LigerzooError(what, where="new_num_tokens", got=size, expected=expected)
        if size <= (last := max(self.placeholders, default=-1)):
            what = "fewer rows than the placeholder token ids of images and videos need"
            raise LigerzooError(what, where="new_num_tokens", got=size, expected=f"at least {last + 1}")
        if is_sharded(weights):
            raise LigerzooError(
                "the weights are sharded", where="resize_token_embeddings", remedy="Resize before sharding."
            )
        for weight in dict.fromkeys(weights):  # a tied weight once
            _resize_rows(weight, size)
        for table in (embedding, *tables):
            table.num_embeddings = size
        names = (name for name, module in self.named_modules() if module in modules)
        self.replaced_weights |= dict.fromkeys(names)
        sizes = {name: size for name in ("vocab_size", "vocab_size_per_layer_input") if hasattr(self.config, name)}
        self.config = dataclasses.replace(self.config, **sizes)  # type: ignore[type-var]
        return embedding

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


def _resize_rows(weight: nn.Parameter, rows: int) -> None:
    """Removes rows at the end of `weight`, (V, ...), or adds rows that are the mean of the old ones."""
    old = weight.detach()
    mean = old.mean(0, keepdim=True, dtype=accumulation_dtype(old.dtype)).to(old.dtype)
    weight.data = torch.cat([old[:rows], mean.expand(max(rows - len(old), 0), *old.shape[1:])])
    weight.grad = None

"""Embeddings of texts: a decoder or encoder, pooling, and the modules of sentence-transformers after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.checks import AT_LEAST_1, COUNT, check, one_of, or_none
from ligerzoo.device import to_device
from ligerzoo.errors import LigerzooError
from ligerzoo.layers import Decoder, Dense, Normalize, Pooling
from ligerzoo.layers.linear import INIT_STD
from ligerzoo.models.config import LanguageModelConfig
from ligerzoo.models.inputs import tokens_or_embeddings
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.packed_rows import PackedRows
from ligerzoo.models.pretrained import TextEmbedding

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""Similarities of embeddings; the last two are negative distances."""


class EmbeddingStage(Protocol):
    """The config of a module after the decoder.

    Attributes:
        path: its directory in a checkpoint.
        projections: names of its parts with weights, which may not all exist.
    """

    projections: ClassVar[tuple[str, ...]]

    @property
    def path(self) -> str: ...

    def build(self, features: int) -> nn.Module:
        """Builds the module for inputs of this many features."""

    def output_size(self, features: int) -> int:
        """Returns the features of the results."""


@dataclass(frozen=True, kw_only=True)
class PoolingStage:
    """Config of `Pooling`, whose arguments the fields are."""

    projections: ClassVar[tuple[str, ...]] = ()
    path: str = "1_Pooling"
    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True

    def __str__(self) -> str:
        return "+".join(self.modes) + ("" if self.include_prompt else " without the prompt")

    def build(self, features: int) -> nn.Module:
        """See `EmbeddingStage`."""
        return Pooling(self.modes, include_prompt=self.include_prompt)

    def output_size(self, features: int) -> int:
        """See `EmbeddingStage`."""
        return features * len(self.modes)


@dataclass(frozen=True, kw_only=True)
class DenseStage:
    """Config of `Dense`, whose arguments the fields are."""

    projections: ClassVar[tuple[str, ...]] = ("linear", "residual")
    path: str = "2_Dense"
    out_features: int
    bias: bool = True
    activation: str = "tanh"
    residual: bool = False

    def __str__(self) -> str:
        return f"dense {self.out_features} ({self.activation})"

    def build(self, features: int) -> nn.Module:
        """See `EmbeddingStage`."""
        options = {"bias": self.bias, "residual": self.residual}
        return Dense(features, self.out_features, activation=self.activation, **options)

    def output_size(self, features: int) -> int:
        """See `EmbeddingStage`."""
        return self.out_features


@dataclass(frozen=True, kw_only=True)
class NormalizeStage:
    """Config of `Normalize`."""

    projections: ClassVar[tuple[str, ...]] = ()
    path: str = "2_Normalize"

    def __str__(self) -> str:
        return "normalize"

    def build(self, features: int) -> nn.Module:
        """See `EmbeddingStage`."""
        return Normalize()

    def output_size(self, features: int) -> int:
        """See `EmbeddingStage`."""
        return features


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """What an embedding model computes of hidden states, and how it encodes texts.

    Attributes:
        stages: the modules after the decoder. The first one pools, and no other does.
        prompts: texts that are put before a text, by name, such as "query".
        default_prompt_name: the prompt without another choice; None for none.
        similarity: the similarity of embeddings for which the model was trained.
        max_length: tokens of a text, special tokens included; the rest of a longer text is left out. None for as many
            as the tokenizer and the decoder take.
        lowercase: convert texts to lower case first.
        dimensions: number of features that `encode` returns, the first ones; None for all.

    Raises:
        LigerzooError: a value is invalid, or the default prompt does not exist.
    """

    stages: tuple[EmbeddingStage, ...] = (PoolingStage(),)
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: Similarity = "cosine"
    max_length: int | None = None
    lowercase: bool = False
    dimensions: int | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        """Directories in a checkpoint's that may hold weights of stages."""
        return tuple(stage.path for stage in self.stages if stage.projections)

    def __post_init__(self) -> None:
        where = type(self).__name__
        check(where, one_of(get_args(Similarity)), similarity=self.similarity)
        check(where, or_none(AT_LEAST_1), max_length=self.max_length, dimensions=self.dimensions)
        check(where, or_none(one_of(tuple(self.prompts))), default_prompt_name=self.default_prompt_name)


class EmbeddingModel(TextEmbedding, LanguageModel):
    """A decoder or encoder of any architecture, and modules that make one embedding of each text.

    Reads and writes the checkpoints of sentence-transformers. Texts are always packed into one row: nothing is computed
    for padding, and the embedding of a text does not depend on others.

    Args:
        config: config of the architecture.
        model: token ids to final hidden states.
        settings: the modules after the decoder, and how texts are encoded.

    Attributes:
        stages: the modules after the decoder.
        settings: as given. Assign another one to change prompts or lengths; its stages are those of the model.
        files: contents of the checkpoint's further files, by relative path, which saving writes again.
    """

    def __init__(self, config: LanguageModelConfig, model: Decoder, settings: EmbeddingSettings) -> None:
        super().__init__(config, model)
        self.settings = settings
        self.files: Mapping[str, bytes] = {}
        weight: Tensor = model.embed_tokens.weight  # type: ignore[assignment]
        size, stages = weight.shape[1], []
        for stage in settings.stages:
            stages.append(stage.build(size).to(weight.device, weight.dtype))
            size = stage.output_size(size)
        self.stages, self.embedding_size = nn.ModuleList(stages), size
        if config.initializer_range != INIT_STD:
            for module in self.stages.modules():
                if hasattr(module, "init_weights"):
                    module.init_weights(config.initializer_range)  # type: ignore[operator]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prompt_tokens: int = 0,
        **unknown: object,
    ) -> Tensor:
        """Returns the embeddings of texts, (n, D).

        Args:
            input_ids: (B, T) token ids, of one text in each row or, with `cu_seqlens`, of n texts in a single row.
            attention_mask: (B, T) padding mask, 1 for a token and 0 for padding on either side.
            inputs_embeds: (B, T, H) embeddings of tokens, instead of `input_ids`.
            cu_seqlens: (n + 1,) int, boundaries of the texts in a single row; attention is faster if it is on the CPU.
            prompt_tokens: tokens of the prompt with which each text begins, which pooling may leave out.
            unknown: refused, with the nearest name.

        Raises:
            TypeError: an input has another type, such as a list instead of a tensor.
            ValueError: the inputs have inconsistent shapes or values, or are missing.
            LigerzooError: an input is unknown, or the rows are divided over processes.
        """
        self.refuse_unknown(unknown)
        check(type(self).__name__, COUNT, prompt_tokens=prompt_tokens)
        x = tokens_or_embeddings(input_ids, inputs_embeds)
        if attention_mask is not None:
            _check_padding_mask(x, attention_mask, cu_seqlens)
            rows = PackedRows.of(attention_mask.to(x.device, torch.bool))
            x, cu_seqlens = rows.pack(x), rows.cu_seqlens
        hidden, context = self.run_decoder(x, cu_seqlens=cu_seqlens, output_router_logits=False)
        hidden = context.parts.gather(hidden)
        if cu_seqlens is None:  # rows without padding
            cu_seqlens = torch.arange(0, hidden.shape[0] * hidden.shape[1] + 1, hidden.shape[1])
        offsets = to_device(cu_seqlens, hidden.device).to(torch.int64)
        pooling, *others = self.stages
        embeddings: Tensor = pooling(hidden.flatten(0, 1), offsets, prompt_tokens)
        for stage in others:
            embeddings = stage(embeddings)
        return embeddings

    @property
    def max_length(self) -> int:
        """Tokens of a text that `encode` reads, special tokens included."""
        if self.settings.max_length is not None:
            return self.settings.max_length
        positions: int = getattr(self.config, "max_position_embeddings", sys.maxsize)
        limits = [positions - getattr(self.config, "first_position", 0)]
        if "tokenizer.json" in self.files or self._tokenizer is not None:
            limits.append(self.tokenizer.model_max_length)
        return min(limits)

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the similarity of each pair of embeddings, (n, D) and (m, D) -> (n, m), as `settings` says.

        A single embedding, (D,), counts as one row.
        """
        x, y = (embeddings[None] if embeddings.ndim == 1 else embeddings for embeddings in (x, y))
        return SIMILARITIES[self.settings.similarity](x, y)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T


SIMILARITIES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": _cosine,
    "dot": lambda x, y: x @ y.T,
    "euclidean": lambda x, y: -torch.cdist(x, y),
    "manhattan": lambda x, y: -torch.cdist(x, y, p=1.0),
}
"""Functions of all similarities: (n, D), (m, D) -> (n, m)."""


def _check_padding_mask(x: Tensor, attention_mask: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raises LigerzooError if the mask has another shape than the rows, or boundaries of texts are given as well."""
    shape = tuple(x.shape[:2])
    if cu_seqlens is not None or tuple(attention_mask.shape) != shape:
        got = f"a mask {tuple(attention_mask.shape)} for rows {shape}"
        what = "not a padding mask of the rows" if cu_seqlens is None else "cu_seqlens says where texts end"
        expected = f"{shape}" if cu_seqlens is None else "one of both"
        raise LigerzooError(what, where="attention_mask", got=got, expected=expected)

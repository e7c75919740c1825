"""Options of the methods that train encoders of texts: masked tokens, embeddings. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.train.data_options import EncodingOptions, TooLong
from ligerzoo.train.options import (
    Budget,
    Count,
    Fraction,
    Location,
    NotNegative,
    Positive,
    PositiveFraction,
    changeable,
    option,
)
from ligerzoo.train.run_options import BatchOptions, RunOptions, given_options, refuse_options

if TYPE_CHECKING:
    from ligerzoo.losses import ContrastiveLoss
    from ligerzoo.models.embedding import EmbeddingSettings
    from ligerzoo.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class MLMRunOptions(BatchOptions):
    """Masked tokens."""

    model: Location = option(
        "checkpoint of an encoder in Hugging Face format: a directory or a hub id; also a config.json, or a directory "
        "without weights, for random weights"
    )
    method: Literal["mlm"] = option("predicts masked tokens of texts, with an encoder", "mlm")
    data: tuple[Location, ...] = option("data as for sft, with texts")
    mask_fraction: PositiveFraction = option(
        "probability that a token is predicted, at least one in a row; ModernBERT was trained with 0.3", 0.15
    )
    mask_share: Fraction = option("share of the predicted tokens that the model sees as the mask token", 0.8)
    random_share: Fraction = option("share of them that it sees as a random token; others stay unchanged", 0.1)
    seq_length: Count = option("tokens in a row; texts share rows, and longer ones become several", 512)
    batch_size: Count = option("rows in a micro-batch of a process, which are computed as one without padding", 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.mask_share + self.random_share
        refuse_options((both > 1, "options mask_share and random_share", "are at most 1 together", both))

    @property
    def model_class(self) -> type[LanguageModel]:
        from ligerzoo.models import MaskedLM

        return MaskedLM


_CONTRASTIVE_LOSSES: dict[str, dict[str, object]] = {
    "infonce": {},
    "symmetric": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    "gte": {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
    "qwen3": {"directions": ("query_to_doc", "query_to_query", "doc_to_doc"), "margin": 0.1},
}


@dataclass(frozen=True, kw_only=True)
class ContrastiveRunOptions(RunOptions):
    """Contrastive learning of embeddings."""

    data: tuple[Location, ...] = option(
        "data as for sft, with pairs (query or anchor, positive) and optional hard negatives (negative, negative_1, "
        "..., negatives)"
    )
    method: Literal["contrastive"] = option("name of the recipe", "contrastive")
    pairs: Count = option("pairs in a step, of all processes; the documents of all are candidates of each query", 128)
    loss_type: Literal["infonce", "symmetric", "gte", "qwen3"] = option(
        "which texts are compared with which: queries with documents; also documents with queries, as CLIP does; all "
        "with all; or as Qwen3-Embedding does",
        "infonce",
    )
    loss_temperature: Positive = option("divides the similarities", 0.05)
    margin: NotNegative | None = option(
        "leave out negatives whose similarity exceeds that of the positive by more: they may be positives (default: "
        "keep all; for qwen3: 0.1)",
        None,
    )
    dims: tuple[Count, ...] | None = option(
        "also train the first N features as embeddings (Matryoshka); give the full size too", None
    )
    pooling: Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"] | None = option(
        "how the hidden states of a text become its embedding (default: as modules.json of MODEL says)", None
    )
    query_prompt: str | None = option("text before each query (default: MODEL's prompt named query)", None)
    document_prompt: str | None = option(
        "text before each document (default: MODEL's prompt named document or passage)", None
    )
    seq_length: Count = option("tokens of a text, at most as many as MODEL takes", 512)
    batch_size: Count = option("texts of --seq-length tokens whose activations exist at a time, in each process", 32)
    too_long: TooLong = option("what happens to texts of more than --seq-length tokens", "truncate")
    special_tokens: Literal["control"] = option("special tokens in texts are control tokens, as in `encode`", "control")
    lora_dropout: Fraction = option("dropout of the updates' inputs", 0.0)
    lr: Positive = 2e-5
    activation_budget: Budget = changeable("none: the memory of a step is not predicted", "none")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = MeshSizes.parse(self.mesh or "")
        is_divided = max(sizes.context, sizes.tensor, sizes.expert) > 1
        refuse_options((is_divided, "option mesh", "of embedding models has the axes replicate and shard only", sizes))
        self.loss()

    @property
    def model_class(self) -> type[LanguageModel]:
        from ligerzoo.models.embedding import EmbeddingModel

        return EmbeddingModel

    @property
    def model_arguments(self) -> dict[str, Any]:
        return {"pooling": self.pooling}

    @property
    def adapter_dropout(self) -> float:
        return self.lora_dropout

    def encoding(self, embedding_rows: int) -> EncodingOptions:
        return replace(super().encoding(embedding_rows), too_long=self.too_long)

    def prompts_of(self, settings: EmbeddingSettings) -> tuple[str, str]:
        """Returns the prompts of queries and documents, given those of the model."""
        query, document = self.query_prompt, self.document_prompt
        if document is None:
            document = settings.prompts.get("document") or settings.prompts.get("passage")
        return settings.prompts.get("query", "") if query is None else query, document or ""

    def loss(self) -> ContrastiveLoss:
        """Returns the loss. Raises ConfigError for an invalid option."""
        from ligerzoo.losses import ContrastiveLoss

        given = {**_CONTRASTIVE_LOSSES[self.loss_type], "temperature": self.loss_temperature}
        given |= given_options(self, ("margin", "dims"))
        return ContrastiveLoss(**given)

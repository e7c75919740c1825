"""Pairs of texts in packed rows, their embeddings, and how well queries find their documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.encoding import unpooled_tokens
from ligerzoo.errors import ConfigError
from ligerzoo.losses.group_rows import GroupRows
from ligerzoo.models.embedding import EmbeddingModel
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.train import processes
from ligerzoo.train.data import PairSample, Sample
from ligerzoo.train.encoder_options import ContrastiveRunOptions
from ligerzoo.train.metrics import mean_metrics
from ligerzoo.train.run import Run

_QUERIES_AT_ONCE = 1024


def embedding_model(model: LanguageModel) -> EmbeddingModel:
    """Returns the model of a run that trains embeddings."""
    assert isinstance(model, EmbeddingModel)
    return model


def open_embedding_model(run: Run, options: ContrastiveRunOptions) -> EmbeddingModel:
    """Opens the model of a run, with the prompts of the options, which are saved with it.

    Raises:
        ConfigError: its embeddings are compared by another similarity than cosine and dot product.
    """
    model = embedding_model(run.open_model())
    if options.tokenizer is not None:
        model.tokenizer = run.tokenizer
    if model.settings.similarity not in ("cosine", "dot"):
        what, got = "the loss has no such similarity", model.settings.similarity
        raise ConfigError(what, where="the model's similarity", got=got, expected="cosine or dot")
    given = {"query": options.query_prompt, "document": options.document_prompt}
    changed = {name: prompt for name, prompt in given.items() if prompt is not None}
    if changed:
        model.settings = replace(model.settings, prompts={**model.settings.prompts, **changed})
    return model


@dataclass(frozen=True)
class TextRow:
    """Texts that share a row, on the CPU.

    Attributes:
        inputs: `input_ids` and `position_ids`, (1, T) int64.
        cu_seqlens: (n + 1,) int64, boundaries of the texts.
        count: n; 0 for a row whose text is not trained, while other processes have rows.
        prompt_tokens: tokens of the prompt with which each text begins, if pooling leaves them out.
        sources: the records of the texts.
    """

    inputs: dict[str, Tensor]
    cu_seqlens: Tensor
    count: int
    prompt_tokens: int
    sources: Sequence[object]

    @property
    def tokens(self) -> int:
        """Number of tokens of texts that are trained."""
        return self.inputs["input_ids"].numel() if self.count else 0

    @property
    def trained_tokens(self) -> int:
        """The same number: an embedding depends on all tokens of its text."""
        return self.tokens

    @property
    def padding(self) -> int:
        """Number of other tokens."""
        return self.inputs["input_ids"].numel() - self.tokens

    def embed(self, model: EmbeddingModel) -> Tensor:
        """Returns the embeddings of the texts, (n, D)."""
        ids = self.inputs["input_ids"].to(model.device, non_blocking=True)
        embeddings: Tensor = model(ids, cu_seqlens=self.cu_seqlens, prompt_tokens=self.prompt_tokens)
        return embeddings[: self.count]


def _length(text: Sample) -> int:
    return len(text.input_ids)


def _row(texts: Sequence[Sample], prompt_tokens: int, *, is_trained: bool = True) -> TextRow:
    lengths = [*map(_length, texts)]
    ids = torch.tensor([[*chain.from_iterable(one.input_ids for one in texts)]])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    inputs = {"input_ids": ids, "position_ids": positions}
    return TextRow(inputs, boundaries, len(texts) * is_trained, prompt_tokens, [one.source for one in texts])


def _packed(texts: Sequence[Sample], tokens: int) -> list[list[Sample]]:
    """Divides texts, in their order, into groups of at most `tokens` tokens."""
    groups: list[list[Sample]] = []
    room = 0
    for text in texts:
        if _length(text) > room:
            groups.append([])
            room = tokens
        groups[-1].append(text)
        room -= _length(text)
    return groups


class PairRows:
    """The pairs of a step that this process has, as rows of texts: queries, then their documents, then negatives.

    All processes have equally many rows, since a sharded model runs in all of them.

    Args:
        pairs: those of all processes.
        tokens: largest number of tokens of a row.
        prompt_tokens: tokens of the prompts of queries and of documents, if pooling leaves them out.
        device: device of the model.

    Attributes:
        rows: the rows.
        fit_together: whether all rows together have no more tokens than one may have, in all processes.
        count: number of pairs of this process.
        arguments: further arguments of `contrastive_loss`: the ids of texts, so that equal ones are not negatives of
            each other, and what other processes have.
    """

    def __init__(
        self, pairs: Sequence[PairSample], *, tokens: int, prompt_tokens: tuple[int, int], device: torch.device
    ) -> None:
        rank, world = processes.data_rank(), processes.data_ranks()
        parts = [pairs[len(pairs) * i // world : len(pairs) * (i + 1) // world] for i in range(world)]
        texts = [_texts(part) for part in parts]
        filler = _row([min((pair.query for pair in pairs), key=_length)], 0, is_trained=False)
        self.rows: list[TextRow] = []
        if prompt_tokens[0] == prompt_tokens[1]:
            kinds = [(prompt_tokens[0], [[*queries, *documents] for queries, documents in texts])]
        else:  # a row has texts with as long prompts
            kinds = [(prompt, [each[kind] for each in texts]) for kind, prompt in enumerate(prompt_tokens)]
        for prompt, of_processes in kinds:
            groups = [_packed(each, tokens) for each in of_processes]
            own, most = groups[rank], max(map(len, groups))
            self.rows += [*(_row(group, prompt) for group in own), *[filler] * (most - len(own))]
        self.fit_together = all(sum(map(_length, chain(*each))) <= tokens for each in texts)
        self.arguments: dict[str, object]
        self.count, own_pairs = len(parts[rank]), parts[rank]
        numbers: tuple[dict[tuple[int, ...], int], ...] = ({}, {})
        for kind, of_kind in enumerate(numbers):
            for text in chain.from_iterable(of_process[kind] for of_process in texts):
                of_kind.setdefault(tuple(text.input_ids), len(of_kind))
        ids = [
            torch.tensor([of_kind[tuple(text.input_ids)] for text in of_process], dtype=torch.int64, device=device)
            for of_kind, of_process in zip(numbers, texts[rank], strict=True)
        ]
        sizes = [(len(part), sum(len(pair.negatives) for pair in part)) for part in parts]
        group, self._document_ids = dist.group.WORLD if world > 1 else None, ids[1]
        self._of_processes = GroupRows(group, [n + m for n, m in sizes], rank)
        self.arguments = {"query_ids": ids[0], "positive_ids": ids[1][: self.count], "num_items": len(pairs) / world}
        self.arguments |= {"group": group, "sizes": sizes}
        self._has_negatives = any(m for _, m in sizes)
        if self._has_negatives:
            of = [index for index, pair in enumerate(own_pairs) for _ in pair.negatives]
            self.arguments["negatives_of"] = torch.tensor(of, dtype=torch.int64, device=device)
            self.arguments["negative_ids"] = ids[1][self.count :]

    def of_kinds(self, embeddings: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the embeddings of queries, positives and negatives, (n, D), (n, D) and (m, D), of all rows."""
        queries, positives, negatives = embeddings.tensor_split([self.count, 2 * self.count])
        return queries, positives, negatives if self._has_negatives else None

    @torch.no_grad()
    def retrieval(self, embeddings: Tensor, similarity: str) -> dict[str, Tensor]:
        """Returns how well queries find their document among those of all processes: "accuracy", the share of queries
        to which it is the most similar, and "mrr", the mean of 1 / its rank. All processes must call it."""
        wide, rows, ids = embeddings.float(), self._of_processes, self._document_ids
        wide = F.normalize(wide, dim=-1) if similarity == "cosine" else wide
        documents, of_documents, ranks = rows.gather(wide[self.count :]), rows.gather(ids), []
        for first in range(0, self.count, _QUERIES_AT_ONCE):
            chunk = slice(first, min(first + _QUERIES_AT_ONCE, self.count))
            similarities = wide[chunk] @ documents.T
            own = torch.arange(rows.first + chunk.start, rows.first + chunk.stop, device=ids.device)[:, None]
            is_better = (similarities > similarities.gather(1, own)) & (ids[chunk, None] != of_documents)
            ranks.append(1 + is_better.sum(1))
        rank = torch.cat(ranks or [ids]).double()
        metrics = {"accuracy": (rank == 1).double(), "mrr": 1 / rank}
        means = {name: values.mean() if self.count else values.new_zeros(()) for name, values in metrics.items()}
        return mean_metrics([means], [self.count])


def _texts(pairs: Sequence[PairSample]) -> tuple[list[Sample], list[Sample]]:
    """Returns the queries, and the documents: positives, then negatives."""
    negatives = chain.from_iterable(pair.negatives for pair in pairs)
    return [pair.query for pair in pairs], [*(pair.positive for pair in pairs), *negatives]


def pair_packer(model: EmbeddingModel, options: ContrastiveRunOptions) -> Callable[[Sequence[PairSample]], PairRows]:
    """Returns the function that packs the pairs of a step, see `PairRows`."""
    query, document = (unpooled_tokens(model, prompt) for prompt in options.prompts_of(model.settings))

    def pack(pairs: Sequence[PairSample]) -> PairRows:
        tokens = options.batch_size * options.seq_length
        return PairRows(pairs, tokens=tokens, prompt_tokens=(query, document), device=model.device)

    return pack

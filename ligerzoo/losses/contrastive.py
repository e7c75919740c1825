"""Contrastive learning of embeddings: each query is closer to its positive than to all other documents of the batch.

InfoNCE (van den Oord et al. 2018, eq. 4) with the other documents of the batch as negatives (Henderson et al. 2017,
section 4.4). For N queries q_i, their positives d_i, and M hard negatives, which are candidates of every query, the
logits of a similarity s are x = s / temperature, and

    loss = mean_i ( log sum exp(x over the candidates of i) - x(q_i, d_i) ).

The directions choose the candidates of sample i:

    query_to_doc     x(q_i, d) for all documents d, positives and negatives
    doc_to_query     x(q, d_i) for all queries q
    query_to_query   x(q_i, q) for all other queries
    doc_to_doc       x(d_i, d) for all documents of other samples

"joint" takes one softmax over all of them (Li et al. 2023, eq. 2 and 3; Qwen3-Embedding, eq. 1), "per_direction" one
softmax each and their mean: with query_to_doc and doc_to_query the loss of CLIP (Radford et al. 2021, figure 3).

The similarities of all pairs never exist at once, see `ligerzoo.kernels.contrastive`. The gradients are computed along
with the loss: 6N(N + M)D operations with queries as rows only, 8N(N + M)D with doc_to_query, which uses the same
similarities. Saved: the gradients of the embeddings.

On several processes every query meets the documents of all of them. Each process computes the similarities of those
queries that it has. It gathers the embeddings of documents, and adds up their gradients, and the exponentials of a
document's logits over all queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.checks import FINITE, POSITIVE, check, integer, one_of, or_none
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels import rms_norm
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable, under_transform
from ligerzoo.kernels.contrastive import SimilarityOptions, SimilarityResults, SimilaritySide, contrastive_sweep
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, uses_triton
from ligerzoo.kernels.loss.chunked_head import Needs, check_budget
from ligerzoo.kernels.loss.precomputed_grad import attach_gradients
from ligerzoo.losses.objective import LossOutput
from ligerzoo.losses.token_losses import TokenLoss
from ligerzoo.tensor_checks import (
    check_floats,
    check_num_items,
    check_optional_floats,
    check_tensor,
    explains_options,
    shape_or_dtype_error,
)

Direction = Literal["query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc"]
PartitionMode = Literal["joint", "per_direction"]
Similarity = Literal["cosine", "dot"]

_NO_ID = torch.iinfo(torch.int64).min


def reference(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.05,
    similarity: Similarity = "cosine",
    directions: Sequence[Direction] = ("query_to_doc",),
    partition_mode: PartitionMode = "joint",
    query_ids: Tensor | None = None,
    positive_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    margin: float | None = None,
) -> Tensor:
    """`contrastive_loss` of one process in plain torch, with matrices of all similarities: the specification."""
    n, wide = len(queries), accumulation_dtype(queries.dtype)
    hard = queries[:0] if negatives is None else negatives.flatten(0, -2)
    q, d = queries, torch.cat([positives, hard])
    if similarity == "cosine":
        q, d = (F.normalize(x.to(wide), dim=-1).to(x.dtype) for x in (q, d))
    samples = torch.arange(n, device=q.device)
    of_hard, no_ids = (samples.new_full((len(hard),), number) for number in (-1, _NO_ID))
    if negatives is not None and negatives.dim() == 3:
        of_hard = samples.repeat_interleave(negatives.shape[1])
    is_own = samples[:, None] == torch.arange(len(d), device=q.device)
    is_same_sample = samples[:, None] == torch.cat([samples, of_hard])
    shares_id = torch.zeros_like(is_own)
    if query_ids is not None:
        shares_id = shares_id | (query_ids[:, None] == torch.cat([query_ids, no_ids]))
    if positive_ids is not None:
        ids = no_ids if negative_ids is None else negative_ids.flatten()
        shares_id = shares_id | (positive_ids[:, None] == torch.cat([positive_ids, ids]))
    products = q @ d.T
    positive = products.diagonal().to(wide)
    limit = torch.inf if margin is None else (positive + margin)[:, None]

    def logits(direction: Direction) -> Tensor:
        match direction:
            case "query_to_doc":
                x, excluded = products, shares_id & ~is_own
            case "doc_to_query":
                x, excluded = products[:, :n].T, (shares_id & ~is_own)[:, :n].T
            case "query_to_query":
                x, excluded = q @ q.T, (shares_id | is_same_sample)[:, :n]
            case "doc_to_doc":
                x, excluded = d[:n] @ d.T, shares_id | is_same_sample
        x = x.to(wide)
        is_above = (x > limit) & ~is_own[:, : x.shape[1]]
        return (x / temperature).masked_fill(excluded | is_above, -torch.inf)

    each = [logits(direction) for direction in dict.fromkeys(directions)]
    if partition_mode == "joint":
        z = torch.cat(each, 1).logsumexp(1)
    else:
        z = torch.stack([one.logsumexp(1) for one in each]).mean(0)
    return (z - positive / temperature).mean()


class _Embeddings(NamedTuple):
    """What the loss is differentiated by.

    Attributes:
        queries: (N, D).
        positives: (N, D).
        negatives: (M, D), possibly empty.
        scale: 0-d, multiplies dot products.
    """

    queries: Tensor
    positives: Tensor
    negatives: Tensor
    scale: Tensor


class _Ids(NamedTuple):
    """The ids of queries (N,), of positives (N,) and of negatives (M,), or None; and the samples of negatives (M,), -1
    for those of no sample."""

    queries: Tensor | None
    positives: Tensor | None
    negatives: Tensor | None
    samples: Tensor


@dataclass(frozen=True)
class GroupRows:
    """Rows of tensors that the processes of a group have, one process after the other.

    Attributes:
        group: the group; None for a single process.
        counts: rows of each process.
        rank: number of this process.
    """

    group: dist.ProcessGroup | None
    counts: Sequence[int]
    rank: int

    @property
    def first(self) -> int:
        """The index of the first row of this process."""
        return sum(self.counts[: self.rank])

    def gather(self, own: Tensor) -> Tensor:
        """Returns the rows of all processes."""
        if self.group is None:
            return own
        most = max(self.counts)
        gathered = own.new_empty((len(self.counts), most, *own.shape[1:]))
        dist.all_gather([*gathered], _padded(own, most).contiguous(), group=self.group)
        if min(self.counts) == most:
            return gathered.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(gathered, self.counts, strict=True)])

    def own_sum(self, addends: Tensor) -> Tensor:
        """Returns the sums over the processes of the rows of this process."""
        if self.group is None:
            return addends
        addends = addends.to(accumulation_dtype(addends.dtype))
        most, own = max(self.counts), self.counts[self.rank]
        parts = [_padded(part, most).contiguous() for part in torch.split(addends, list(self.counts))]
        total = addends.new_empty((most, *addends.shape[1:]))
        dist.reduce_scatter(total, parts, group=self.group)
        return total[:own]

    def logsumexp(self, values: Tensor) -> Tensor:
        """Returns the log of the sum of exponentials over the processes."""
        if self.group is None:
            return values
        gathered = values.new_empty((len(self.counts), *values.shape))
        dist.all_gather([*gathered], values, group=self.group)
        return gathered.logsumexp(0)


def _padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0,) * (2 * x.dim() - 1) + (rows - x.shape[0],))


class _Terms(NamedTuple):
    """What determines the loss of embeddings.

    Attributes:
        directions: the directions, without repetitions.
        is_joint: whether there is one softmax over all candidates.
        ids: which candidates are not negatives.
        margin: candidates whose similarity exceeds that of the positive by more are not negatives; or None.
        unit: what a similarity of 1 is among the dot products.
        weight: 0-d, the weight of each query.
        documents: positives and negatives of all processes.
        samples: queries of all processes.
        budget: see `contrastive_loss`.
        triton: whether to use Triton.
    """

    directions: frozenset[str]
    is_joint: bool
    ids: _Ids
    margin: float | None
    unit: float
    weight: Tensor
    documents: GroupRows
    samples: GroupRows
    budget: int | None
    triton: bool

    @property
    def share(self) -> float:
        """The weight of each softmax."""
        return 1.0 if self.is_joint else 1 / len(self.directions)


class _Similarities:
    """The similarities that a loss reads: of queries and candidates, and with "doc_to_doc" of positives and documents.

    Attributes:
        candidates: (C, D), the documents of all processes; with "query_to_query" then their queries.
        target: (N,), the positives of the queries of this process among them.
        has_queries: whether queries are candidates.
        documents: the documents among the candidates.
    """

    def __init__(self, embeddings: _Embeddings, terms: _Terms) -> None:
        self._embeddings, self._terms, ids = embeddings, terms, terms.ids
        queries, positives, negatives, scale = embeddings
        n, self._m = len(queries), len(negatives)
        self.has_queries, has_columns = ("query_to_query" in terms.directions, "doc_to_query" in terms.directions)
        documents = terms.documents.gather(torch.cat([positives, negatives]) if self._m else positives)
        self.documents = slice(len(documents))
        self.candidates = torch.cat([documents, terms.samples.gather(queries)]) if self.has_queries else documents
        arange = torch.arange(n, device=queries.device)
        self.target, self._samples = terms.documents.first + arange, terms.samples.first + arange
        threshold = None
        if terms.margin is not None:
            positive = (queries.to(scale.dtype) * positives.to(scale.dtype)).sum(-1)
            threshold = (positive + terms.margin * terms.unit) * scale
        weight = terms.weight.expand(n).contiguous()
        self._rows = SimilaritySide(None, ids.queries, ids.positives, threshold, None, weight)
        self._columns = SimilaritySide(
            query_id=self.of_candidates(ids.queries, None, ids.queries),
            document_id=self.of_candidates(ids.positives, ids.negatives, ids.positives),
            threshold=self.of_candidates(threshold, torch.inf, torch.inf) if has_columns else None,
            weight=self.of_candidates(weight, 0.0, 0.0) if has_columns else None,
        )

    def of_candidates(
        self, positives: Tensor | None, negatives: Tensor | float | None, queries: Tensor | float | None
    ) -> Tensor | None:
        """Returns a number of each candidate, (C,), from those of this process, or one number for all; None for no
        id. Returns None without numbers of positives."""
        if positives is None:
            return None

        def numbers(given: Tensor | float | None, count: int) -> Tensor:
            return given if torch.is_tensor(given) else positives.new_full((count,), _NO_ID if given is None else given)

        gathered = self._terms.documents.gather(torch.cat([positives, numbers(negatives, self._m)]))
        if not self.has_queries:
            return gathered
        return torch.cat([gathered, self._terms.samples.gather(numbers(queries, len(positives)))])

    def sweep_queries(self, needs: Needs, z: Tensor | None = None, u: Tensor | None = None) -> SimilarityResults:
        """Sweeps the similarities of the queries and all candidates; for the gradients, with given normalizers."""
        rows, columns = self._rows._replace(normalizer=z), self._columns._replace(normalizer=u)
        if self.has_queries:
            other = torch.full_like(self._samples, -1)
            columns = columns._replace(sample=self.of_candidates(other, -1, self._samples))
            rows = rows._replace(sample=self._samples)
        has_columns = z is None and "doc_to_query" in self._terms.directions
        return self._sweep(self._embeddings.queries, self.candidates, self.target, rows, columns, has_columns, needs)

    def sweep_documents(self, needs: Needs, z: Tensor | None = None) -> SimilarityResults:
        """Sweeps the similarities of the positives and all documents, likewise."""
        of_negatives = self._terms.ids.samples
        of_negatives = torch.where(of_negatives < 0, -1, of_negatives + self._terms.samples.first)
        samples = self._terms.documents.gather(torch.cat([self._samples, of_negatives]))
        rows = self._rows._replace(sample=self._samples, normalizer=z)
        columns = self._columns.of(self.documents)._replace(sample=samples, threshold=None, weight=None)
        target, documents = torch.full_like(self.target, -1), self.candidates[self.documents]
        return self._sweep(self._embeddings.positives, documents, target, rows, columns, False, needs)

    def _sweep(
        self,
        a: Tensor,
        c: Tensor,
        target: Tensor,
        rows: SimilaritySide,
        columns: SimilaritySide,
        has_columns: bool,
        needs: Needs,
    ) -> SimilarityResults:
        terms = self._terms
        options = SimilarityOptions(terms.share, has_columns, terms.budget, terms.triton)
        return contrastive_sweep(a, c, self._embeddings.scale, target, rows, columns, options, needs)


class _Results(NamedTuple):
    """The loss, whether each positive is the best candidate of its query, the logits of the positives, and the
    gradients of `_Embeddings`: empty tensors where not needed."""

    loss: Tensor
    is_best: Tensor
    positive: Tensor
    gradients: Sequence[Tensor]


_NOTHING = Needs(False, False)


def _evaluate(embeddings: _Embeddings, terms: _Terms, needs: Sequence[bool]) -> _Results:
    """Computes the loss and the needed gradients, outside autograd."""
    similarities, directions, n = _Similarities(embeddings, terms), terms.directions, len(embeddings.queries)
    of_queries, of_positives, of_negatives, of_scale = needs
    of_candidates = of_positives or of_negatives or (of_queries and similarities.has_queries)
    first_needs = Needs(of_queries or of_scale, of_candidates)
    if directions & {"doc_to_query", "doc_to_doc"}:
        found, u = similarities.sweep_queries(_NOTHING), None
        normalizers = [found.z]
        if "doc_to_query" in directions:
            u = terms.documents.logsumexp(found.u)
            normalizers.append(u[similarities.target])
        if "doc_to_doc" in directions:
            normalizers.append(similarities.sweep_documents(_NOTHING).z)
        stacked = torch.stack(normalizers)
        z = stacked.logsumexp(0) if terms.is_joint else stacked.mean(0)
    else:
        found = similarities.sweep_queries(first_needs)
        z, u = found.z, None
    loss, is_best = ((z - found.positive) * terms.weight).sum(), found.positive >= found.largest
    if not any(needs):
        return _Results(loss, is_best, found.positive, ())
    first, second = found, None
    if len(directions - {"query_to_query"}) > 1:
        if u is not None:  # of positives; the loss has no softmax over the column of another candidate
            of_columns = similarities.of_candidates(z if terms.is_joint else z.new_zeros(n), torch.inf, torch.inf)
            assert of_columns is not None
            u = of_columns if terms.is_joint else u + of_columns
        first = similarities.sweep_queries(first_needs, z if terms.is_joint else found.z, u)
    if "doc_to_doc" in directions:
        second = similarities.sweep_documents(Needs(of_positives or of_scale, of_candidates), z)
    dqueries, dcandidates, dscale = first.drows, first.dcandidates, first.dscale
    dpositives, dnegatives, documents = dqueries[:0], dqueries[:0], similarities.documents
    if second is not None:
        dpositives, dscale = second.drows, dscale + second.dscale
        if of_candidates:
            dcandidates[documents] += second.dcandidates
    if of_candidates:
        own = terms.documents.own_sum(dcandidates[documents])
        dnegatives = own[n:].clone()  # backward scales each gradient in place
        dpositives = own[:n] + dpositives if second is not None and of_positives else own[:n]
        if of_queries and similarities.has_queries:
            dqueries = dqueries + terms.samples.own_sum(dcandidates[documents.stop :])
    gradients = (dqueries, dpositives, dnegatives, dscale)
    return _Results(loss, is_best, found.positive, [g.to(x.dtype) for g, x in zip(gradients, embeddings, strict=True)])


class _Loss(FusedFunction):
    """The results for transforms of torch.func: backward computes the similarities again."""

    @staticmethod
    def forward(
        ctx: FusedContext, queries: Tensor, positives: Tensor, negatives: Tensor, scale: Tensor, terms: _Terms
    ) -> tuple[Tensor, ...]:
        embeddings = _Embeddings(queries, positives, negatives, scale)
        ctx.save_for_backward(*embeddings)
        ctx.terms = terms
        loss, *others, _ = _evaluate(embeddings, terms, (False,) * 4)
        ctx.mark_non_differentiable(*others)
        return loss, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, needs = ctx.saved_tensors, ctx.needs_input_grad[:4]
        gradients = _evaluate(_Embeddings(*embeddings), ctx.terms, needs).gradients
        scaled = ((upstream * gradient).to(gradient.dtype) for gradient in gradients)
        return *if_needed(scaled, needs), None


@explains_options
def contrastive_loss(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.05,
    similarity: Similarity = "cosine",
    directions: Sequence[Direction] = ("query_to_doc",),
    partition_mode: PartitionMode = "joint",
    query_ids: Tensor | None = None,
    positive_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    negatives_of: Tensor | None = None,
    margin: float | None = None,
    dims: Sequence[int] | None = None,
    num_items: int | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[tuple[int, int]] | None = None,
    logits_budget: int | None = None,
    backend: Backend = "auto",
) -> LossOutput:
    """Computes the contrastive loss of pairs of embeddings, with the other documents of the batch as negatives.

    The formulas are in the docstring of `ligerzoo.losses.contrastive`. The matrix of all similarities never exists: a
    batch of 32,768 pairs needs the memory of `logits_budget`.

    Args:
        queries: (N, D) embeddings.
        positives: (N, D), the document of each query.
        negatives: (N, K, D), hard negatives of each query, or (M, D), of no query in particular. All are candidates of
            all queries. Default: None, the other positives are the negatives.
        temperature: divides the similarities. A 0-d tensor may require a gradient: for CLIP's learned logit scale s,
            pass (-s).exp().
        similarity: "cosine", or "dot" for dot products.
        directions: the candidates of a sample: "query_to_doc", which is required, "doc_to_query", "query_to_query" and
            "doc_to_doc".
        partition_mode: "joint" for one softmax over all candidates, "per_direction" for the mean of one softmax per
            direction, which is possible for "query_to_doc" and "doc_to_query".
        query_ids: (N,) integers. Pairs with the same query are not each other's negatives.
        positive_ids: (N,) integers. Pairs with the same document are not each other's negatives.
        negative_ids: the documents of `negatives`, (N, K) or (M,) integers. A query whose positive is this document
            does not have it as a negative.
        negatives_of: (M,) integers, the query, 0 to N - 1, of each negative of (M, D), or -1 for none: "doc_to_doc"
            does not compare it with the positive of this query. Default: of none.
        margin: candidates whose similarity exceeds that of the positive by more are taken for unlabelled positives, and
            left out. Default: None, all candidates count. Qwen3-Embedding uses 0.1.
        dims: sums the losses of the embeddings' first features, for each of these numbers of features (Matryoshka;
            Kusupati et al. 2022). Default: None, all D features only.
        num_items: divides the sum over the queries. Default: N.
        group: processes whose documents are candidates too, such as those of a data-parallel mesh. Every process gets
            its part of the loss, for gradients that are averaged over the processes, as by DDP and FSDP2.
        sizes: the number of queries and of negatives (N K or M) of each process in the group. Default: those of this
            process.
        logits_budget: MiB of similarities that exist at a time. Default: None, the budget of `set_logits_budget`.
        backend: "auto" (Triton on a GPU), "triton" or "torch" (the reference).

    Returns:
        `LossOutput`: the loss, and as metrics "accuracy", the share of queries whose positive has the largest
        similarity of all candidates, and "positive_similarity", the mean similarity of the pairs. With `dims`, those of
        the first.

    Raises:
        TypeError: an argument has another type.
        ValueError: shapes, dtypes or devices do not match, or an option is out of range or excluded by another one.
    """
    name = "contrastive_loss"
    check_contrastive_options(name, directions, partition_mode, similarity, margin)
    _check_embeddings(name, queries, positives, negatives, dims or ())
    check_num_items(name, num_items=num_items)
    check_budget(name, logits_budget)
    queries, positives, negatives = autocast(queries, positives, negatives)
    ids = _ids(name, queries, negatives, query_ids, positive_ids, negative_ids, negatives_of)
    rest = queries[:0] if negatives is None else negatives.flatten(0, -2)
    documents, samples = _group_rows(name, group, sizes, (len(queries), len(rest)))
    new = partial(torch.full, (), dtype=accumulation_dtype(queries.dtype), device=queries.device)
    scale = _reciprocal(name, temperature, new)
    divisor = new(max(1, len(queries))) if num_items is None else new(1) * num_items
    # In fp16, gradients divided by the number of queries would underflow.
    boost = max(1, sum(samples.counts)) if queries.dtype == torch.float16 else 1
    terms = _Terms(
        directions=frozenset(directions),
        is_joint=partition_mode == "joint",
        ids=ids,
        margin=margin,
        unit=1.0,
        weight=boost / divisor,
        documents=documents,
        samples=samples,
        budget=logits_budget,
        triton=uses_triton(queries, positives, backend=backend),
    )

    def loss_of(size: int) -> LossOutput:
        parts, of_size, factor = [x[:, :size] for x in (queries, positives, rest)], terms, scale
        if similarity == "cosine":  # x / rms(x) = sqrt(size) x / |x|
            parts = [rms_norm(x, eps=_EPS, backend=backend) if len(x) else x for x in parts]
            of_size, factor = terms._replace(unit=float(size)), scale / size
        embeddings = _Embeddings(*parts, factor)  # type: ignore[call-arg]
        loss, is_best, positive = _differentiable(embeddings, of_size)
        metrics = {"accuracy": is_best.to(loss.dtype).sum(), "positive_similarity": (positive / scale).sum()}
        count = max(1, len(queries))
        return LossOutput(loss / boost, {metric: (value / count).detach() for metric, value in metrics.items()})

    outputs = [loss_of(size) for size in dims or (queries.shape[1],)]
    return LossOutput(torch.stack([output.loss for output in outputs]).sum(), outputs[0].metrics)


class ContrastiveLoss(TokenLoss, function=contrastive_loss):
    """Contrastive loss of embeddings (queries, positives, negatives=None): `contrastive_loss`."""


_EPS = 1e-24


def _differentiable(embeddings: _Embeddings, terms: _Terms) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss, whether each positive is the best candidate of its query, and the positives' logits."""
    if under_transform():
        results: tuple[Tensor, Tensor, Tensor] = _Loss.apply(*embeddings, terms)
        return results
    needs = [x.requires_grad and torch.is_grad_enabled() for x in embeddings]
    with torch.no_grad():
        loss, is_best, positive, gradients = _evaluate(embeddings, terms, needs)
    if not any(needs):
        return loss, is_best, positive
    *others, (scale, dscale) = zip(embeddings, gradients, strict=True)
    return attach_gradients(loss, *others, (scale.view(1), dscale.view(1))), is_best, positive


def _reciprocal(name: str, temperature: float | Tensor, new: Callable[[float], Tensor]) -> Tensor:
    """Returns 1 / temperature, 0-d. Raises unless it is a positive number or a 0-d tensor."""
    if torch.is_tensor(temperature):
        check_tensor(name, "temperature", temperature, shapes=[()])
        return new(1.0) / temperature
    check(name, POSITIVE, temperature=temperature)
    return new(1 / temperature)


def check_contrastive_options(
    name: str, directions: Sequence[str], partition_mode: str, similarity: str, margin: float | None
) -> None:
    """Raises for options of `contrastive_loss` with unknown values, or that exclude each other."""
    check(name, one_of(get_args(PartitionMode)), partition_mode=partition_mode)
    check(name, one_of(get_args(Similarity)), similarity=similarity)
    check(name, or_none(FINITE), margin=margin)
    for direction in directions:
        check(name, one_of(get_args(Direction)), direction=direction)
    what = f"directions={tuple(directions)} with partition_mode={partition_mode!r}"
    if "query_to_doc" not in directions:
        raise LigerzooError(what, where=name, expected="query_to_doc among the directions: it has the positives")
    if partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
        remedy = 'Use partition_mode="joint"'
        raise LigerzooError(
            what, where=name, expected="directions whose candidates include the positives", remedy=remedy
        )


def _check_embeddings(
    name: str, queries: Tensor, positives: Tensor, negatives: Tensor | None, dims: Sequence[int]
) -> None:
    check_floats(name, queries=queries, positives=positives)
    check_optional_floats(name, negatives=negatives)
    shape = tuple(queries.shape)
    others = [positives] if negatives is None else [positives, negatives]
    fits = len(shape) == 2 and positives.shape == shape
    if negatives is not None:
        fits = (
            fits
            and negatives.shape[-1] == shape[1]
            and (negatives.dim(), *shape[:1])
            in (
                (2, shape[0]),
                (3, negatives.shape[0]),
            )
        )
    if not fits or any(one.dtype != queries.dtype for one in others):
        expected = "(N, D), (N, D) and (N, K, D) or (M, D), of one dtype"
        raise shape_or_dtype_error(name, expected, queries=queries, positives=positives, negatives=negatives)
    features = integer(1, shape[1])
    if not all(map(features.accepts, dims)):
        raise LigerzooError(where=f"{name}: dims", got=dims, expected=f"numbers of features, 1 to {shape[1]}")
    for argument, one in {"positives": positives, "negatives": negatives}.items():
        if one is not None and one.device != queries.device:
            raise LigerzooError(f"{argument} is on {one.device}", where=name, expected=f"{queries.device}, as queries")


def _ids(
    name: str,
    queries: Tensor,
    negatives: Tensor | None,
    query_ids: Tensor | None,
    positive_ids: Tensor | None,
    negative_ids: Tensor | None,
    negatives_of: Tensor | None,
) -> _Ids:
    """Returns the ids of all embeddings. Raises for ids of another kind, shape or device."""
    n, device = len(queries), queries.device
    given: dict[str, tuple[Tensor | None, tuple[int, ...]]]
    given = {"query_ids": (query_ids, (n,)), "positive_ids": (positive_ids, (n,))}
    if negatives is not None:
        given["negative_ids"] = negative_ids, tuple(negatives.shape[:-1])
        if negatives_of is not None:
            given["negatives_of"] = negatives_of, tuple(negatives.shape[:1])
    elif negative_ids is not None:
        raise LigerzooError("negative_ids without negatives", where=name)
    if negatives_of is not None and (negatives is None or negatives.dim() == 3):
        got = "none" if negatives is None else f"{tuple(negatives.shape)}, whose first index is the query"
        raise LigerzooError("negatives_of without negatives (M, D)", where=name, got=got)
    if negative_ids is not None and positive_ids is None:
        raise LigerzooError("negative_ids without positive_ids, which they are compared with", where=name)
    for argument, (ids, shape) in given.items():
        if ids is not None:
            check_tensor(name, argument, ids, "integer", [shape], device)
    if negatives_of is not None and negatives_of.numel() and device.type == "cpu":  # on a GPU, it would wait
        least, most = torch.stack(negatives_of.aminmax()).tolist()
        if least < -1 or most >= n:
            expected = f"-1 to {n - 1}"
            raise LigerzooError(where=f"{name}: negatives_of", got=least if least < -1 else most, expected=expected)
    samples = torch.arange(n, device=device)
    if negatives is None or negatives.dim() == 2:
        samples = torch.full((0 if negatives is None else len(negatives),), -1, device=device)
        samples = samples if negatives_of is None else negatives_of.long()
    else:
        samples = samples.repeat_interleave(negatives.shape[1])
    flat = (None if ids is None else ids.long().flatten() for ids in (query_ids, positive_ids, negative_ids))
    of_queries, of_positives, of_negatives = flat
    return _Ids(of_queries, of_positives, of_negatives, samples)


def _group_rows(
    name: str, group: dist.ProcessGroup | None, sizes: Sequence[tuple[int, int]] | None, own: tuple[int, int]
) -> tuple[GroupRows, GroupRows]:
    """Returns the documents and the queries of all processes. Raises for sizes that do not fit the embeddings."""
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    sizes = [own] * world if sizes is None else [(n, m) for n, m in sizes]
    if len(sizes) != world or sizes[rank] != own:
        expected = f"one pair for each of {world} processes, {own} for this one, number {rank}"
        raise LigerzooError(f"sizes={sizes}", where=name, expected=expected)
    return GroupRows(group, [n + m for n, m in sizes], rank), GroupRows(group, [n for n, _ in sizes], rank)

"""The contrastive loss and its gradients: sweeps over similarities, of which blocks exist at a time.

The formulas are in the docstring of `ligerzoo.losses.contrastive`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable, under_transform
from ligerzoo.kernels.contrastive import SimilarityOptions, SimilarityResults, SimilaritySide, contrastive_sweep
from ligerzoo.kernels.loss.chunked_head import Needs
from ligerzoo.kernels.loss.precomputed_grad import attach_gradients
from ligerzoo.losses.group_rows import GroupRows

NO_ID = torch.iinfo(torch.int64).min
"""The id of embeddings without one."""


class ContrastiveEmbeddings(NamedTuple):
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


class CandidateIds(NamedTuple):
    """The ids of queries (N,), of positives (N,) and of negatives (M,), or None; and the samples of negatives (M,), -1
    for those of no sample."""

    queries: Tensor | None
    positives: Tensor | None
    negatives: Tensor | None
    samples: Tensor


class ContrastiveTerms(NamedTuple):
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
    ids: CandidateIds
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

    def __init__(self, embeddings: ContrastiveEmbeddings, terms: ContrastiveTerms) -> None:
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
            return given if torch.is_tensor(given) else positives.new_full((count,), NO_ID if given is None else given)

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
    gradients of `ContrastiveEmbeddings`: empty tensors where not needed."""

    loss: Tensor
    is_best: Tensor
    positive: Tensor
    gradients: Sequence[Tensor]


_NOTHING = Needs(False, False)


def _loss_and_gradients(embeddings: ContrastiveEmbeddings, terms: ContrastiveTerms, needs: Sequence[bool]) -> _Results:
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
        ctx: FusedContext, queries: Tensor, positives: Tensor, negatives: Tensor, scale: Tensor, terms: ContrastiveTerms
    ) -> tuple[Tensor, ...]:
        embeddings = ContrastiveEmbeddings(queries, positives, negatives, scale)
        ctx.save_for_backward(*embeddings)
        ctx.terms = terms
        loss, *others, _ = _loss_and_gradients(embeddings, terms, (False,) * 4)
        ctx.mark_non_differentiable(*others)
        return loss, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, needs = ctx.saved_tensors, ctx.needs_input_grad[:4]
        gradients = _loss_and_gradients(ContrastiveEmbeddings(*embeddings), ctx.terms, needs).gradients
        scaled = ((upstream * gradient).to(gradient.dtype) for gradient in gradients)
        return *if_needed(scaled, needs), None


def differentiable_loss(embeddings: ContrastiveEmbeddings, terms: ContrastiveTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss, whether each positive is the best candidate of its query, and the positives' logits."""
    if under_transform():
        results: tuple[Tensor, Tensor, Tensor] = _Loss.apply(*embeddings, terms)
        return results
    needs = [x.requires_grad and torch.is_grad_enabled() for x in embeddings]
    with torch.no_grad():
        loss, is_best, positive, gradients = _loss_and_gradients(embeddings, terms, needs)
    if not any(needs):
        return loss, is_best, positive
    *others, (scale, dscale) = zip(embeddings, gradients, strict=True)
    return attach_gradients(loss, *others, (scale.view(1), dscale.view(1))), is_best, positive

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
from functools import partial
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.checks import FINITE, POSITIVE, check, instances, integer, is_list, one_of, or_none
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels import rms_norm
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, uses_triton
from ligerzoo.kernels.loss.chunked_head import check_budget
from ligerzoo.losses.contrastive_evaluation import (
    NO_ID,
    CandidateIds,
    ContrastiveEmbeddings,
    ContrastiveTerms,
    differentiable_loss,
)
from ligerzoo.losses.group_rows import GroupRows
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
    of_hard, no_ids = (samples.new_full((len(hard),), number) for number in (-1, NO_ID))
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
    terms = ContrastiveTerms(
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
        embeddings = ContrastiveEmbeddings(*parts, factor)  # type: ignore[call-arg]
        loss, is_best, positive = differentiable_loss(embeddings, of_size)
        metrics = {"accuracy": is_best.to(loss.dtype).sum(), "positive_similarity": (positive / scale).sum()}
        count = max(1, len(queries))
        return LossOutput(loss / boost, {metric: (value / count).detach() for metric, value in metrics.items()})

    outputs = [loss_of(size) for size in dims or (queries.shape[1],)]
    return LossOutput(torch.stack([output.loss for output in outputs]).sum(), outputs[0].metrics)


class ContrastiveLoss(TokenLoss, function=contrastive_loss):
    """Contrastive loss of embeddings (queries, positives, negatives=None): `contrastive_loss`."""


_EPS = 1e-24


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
    check(name, instances("""a list of directions, such as ("query_to_doc",)""", is_list), directions=directions)
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
) -> CandidateIds:
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
    return CandidateIds(of_queries, of_positives, of_negatives, samples)


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

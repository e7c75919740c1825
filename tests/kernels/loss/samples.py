"""Arguments of the loss ops for `opcheck`: by op, by keyword."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels.contrastive import SimilarityOptions, SimilaritySide
from ligerzoo.kernels.dispatch import INTERPRETING
from ligerzoo.kernels.linear_cross_entropy import SweepOptions
from ligerzoo.kernels.linear_divergence import TeacherInputs, _SweepOptions
from ligerzoo.kernels.loss.chunked_head import HeadInputs, Needs
from ligerzoo.kernels.loss.token_divergence import DivergenceOptions
from ligerzoo.kernels.loss.token_loss import Terms, Upstream
from tests.kernels.layouts import transposed
from tests.kernels.oracles import numbers, targets

TERMS = Terms(scale=0.7, softcap=3.0, temperature=1.3, label_smoothing=0.1, z_loss=0.01, ignore_index=5)


def new(*shape: int, device: str) -> Tensor:
    return numbers(*shape, device=device).detach()


def fused(device: str) -> bool:
    return device == "cuda" or INTERPRETING


def classes(device: str, ignore_index: int = -100) -> Tensor:
    return targets(5, classes=33, device=device, ignore_index=ignore_index)


def cross_entropy_forward(device: str) -> list[dict[str, Any]]:
    logits, class_weight = new(5, 33, device=device), new(33, 7, device=device)[:, 0]
    plain = {"class_weight": None, "terms": Terms(), "statistics": False}
    return [
        {"logits": logits, "target": classes(device), **plain},
        {
            "logits": transposed(logits).half(), "target": classes(device, 5), "class_weight": class_weight,
            "terms": TERMS, "statistics": True,
        },
        {"logits": logits[:0], "target": classes(device)[:0], **plain},
    ]  # fmt: skip


def cross_entropy_backward(device: str) -> list[dict[str, Any]]:
    logits, upstream, normalizer = new(5, 33, device=device), new(5, device=device), new(2, 5, device=device)
    plain = {"class_weight": None, "terms": Terms()}
    return [
        {"logits": logits, "target": classes(device), "normalizer": normalizer, "upstream": upstream, **plain},
        {
            "logits": transposed(logits).half(), "target": classes(device, 5), "normalizer": normalizer,
            "upstream": upstream[:1].expand(5), "class_weight": new(33, 7, device=device)[:, 0], "terms": TERMS,
        },
        {
            "logits": logits[:0], "target": classes(device)[:0], "normalizer": normalizer[:, :0].contiguous(),
            "upstream": upstream[:0], **plain,
        },
    ]  # fmt: skip


def linear_cross_entropy_sweep(device: str) -> list[dict[str, Any]]:
    hidden, weight, upstream = new(5, 7, device=device), new(33, 7, device=device), new(5, device=device)
    plain = {"target": classes(device), "class_weight": None, "terms": Terms()}
    options = SweepOptions(budget=0, triton=fused(device), statistics=False)
    return [
        {
            **plain, "head": HeadInputs(hidden, weight), "upstream": Upstream(loss=upstream), "options": options,
            "needs": Needs(True, True),
        },
        {
            **plain, "head": HeadInputs(transposed(hidden).half(), weight.half()), "target": classes(device, 5),
            "upstream": Upstream(loss=upstream[:1].expand(5)), "options": options._replace(budget=512),
            "terms": Terms(ignore_index=5), "needs": Needs(True, False),
        },
        {
            **plain, "head": HeadInputs(hidden, transposed(weight), weight[:, 0]), "class_weight": weight[:, 1],
            "upstream": Upstream(logp=upstream, entropy=upstream, logsumexp=upstream[:1].expand(5)),
            "terms": TERMS._replace(ignore_index=-100),
            "options": options._replace(budget=None, statistics=True), "needs": Needs(False, True, True),
        },
        {
            **plain, "head": HeadInputs(hidden, weight), "upstream": Upstream(),
            "options": options._replace(triton=False, statistics=True), "needs": Needs(False, False),
        },
        {
            **plain, "head": HeadInputs(hidden[:0], weight), "target": classes(device)[:0],
            "upstream": Upstream(loss=upstream[:0]), "options": options._replace(budget=512),
            "needs": Needs(True, True),
        },
    ]  # fmt: skip


def divergence_forward(device: str) -> list[dict[str, Any]]:
    logits = new(5, 33, device=device)
    return [
        {
            "student": logits, "teacher": logits.flip(0), "target": classes(device),
            "options": DivergenceOptions("forward_kl", 0.0, 1.0, -100),
        },
        {
            "student": transposed(logits).half(), "teacher": logits, "target": classes(device, 5),
            "options": DivergenceOptions("jsd", 0.3, 2.0, 5, 0.7, 3.0, 0.9, None),
        },
        {
            "student": logits[:0], "teacher": logits[:0], "target": classes(device)[:0],
            "options": DivergenceOptions("tvd", 0.0, 1.0, -100),
        },
    ]  # fmt: skip


def divergence_backward(device: str) -> list[dict[str, Any]]:
    logits, statistics, upstream = new(5, 33, device=device), new(5, 6, device=device), new(5, device=device)
    return [
        {
            "student": logits, "teacher": logits.flip(0), "target": classes(device), "statistics": statistics,
            "upstream": upstream, "options": DivergenceOptions("reverse_kl", 0.0, 1.0, -100),
        },
        {
            "student": transposed(logits).half(), "teacher": logits.flip(0), "target": classes(device, 5),
            "statistics": statistics, "upstream": upstream[:1].expand(5),
            "options": DivergenceOptions("jsd", 0.3, 2.0, 5, 1.0, None, 0.9, 2.0),
        },
        {
            "student": logits[:0], "teacher": logits[:0], "target": classes(device)[:0], "statistics": statistics[:0],
            "upstream": upstream[:0], "options": DivergenceOptions("tvd", 0.0, 1.0, -100),
        },
    ]  # fmt: skip


def linear_divergence_sweep(device: str) -> list[dict[str, Any]]:
    hidden, weight, upstream = new(5, 7, device=device), new(33, 7, device=device), new(5, device=device)
    plain = {"target": classes(device), "options": _SweepOptions(None, fused(device))}
    return [
        {
            **plain, "student": HeadInputs(hidden, weight, weight[:, 0]),
            "teacher": TeacherInputs(hidden.flip(0), weight, weight[:, 1]), "upstream": upstream,
            "divergence": DivergenceOptions("forward_kl", 0.0, 1.0, -100), "options": _SweepOptions(0, fused(device)),
            "needs": Needs(True, True, True),
        },
        {
            **plain, "student": HeadInputs(hidden.half(), weight.half()),
            "teacher": TeacherInputs(hidden, weight, None), "target": classes(device, 5),
            "upstream": upstream[:1].expand(5),
            "divergence": DivergenceOptions("jsd", 0.3, 2.0, 5, 0.7, 3.0, 0.9, 2.0), "needs": Needs(True, False),
        },
        {
            **plain, "student": HeadInputs(hidden, weight), "teacher": TeacherInputs(hidden @ weight.T, None, None),
            "upstream": None, "divergence": DivergenceOptions("cosine", 0.0, 1.0, -100),
            "options": _SweepOptions(0, False), "needs": Needs(False, False),
        },
        {
            **plain, "student": HeadInputs(hidden[:0], weight), "teacher": TeacherInputs(hidden[:0], weight, None),
            "target": classes(device)[:0], "upstream": upstream[:0],
            "divergence": DivergenceOptions("tvd", 0.0, 1.0, -100), "needs": Needs(True, True),
        },
    ]  # fmt: skip


def scaled(device: str) -> list[dict[str, Any]]:
    x, factor = new(33, 7, device=device), new(device=device)
    return [
        {"x": x, "factor": factor, "dtype": torch.bfloat16},
        {"x": transposed(x).half(), "factor": factor, "dtype": torch.float16},
        {"x": x[:0], "factor": factor, "dtype": torch.float32},
    ]


def contrastive_sweep(device: str) -> list[dict[str, Any]]:
    rows, candidates = new(5, 7, device=device), new(9, 7, device=device)
    numbers_of = partial(torch.rand, device=device)
    plain = {
        "rows": rows, "candidates": candidates, "scale": numbers_of(()) + 0.5,
        "target": torch.arange(5, device=device), "of_rows": SimilaritySide(weight=numbers_of(5)),
        "of_candidates": SimilaritySide(),
        "options": SimilarityOptions(1.0, False, None, fused(device)), "needs": Needs(True, True),
    }  # fmt: skip
    ids = [torch.arange(n, device=device) % 4 for n in (5, 9)]
    return [
        plain,
        {
            **plain, "rows": rows.half(), "candidates": candidates.half(), "target": -torch.ones_like(ids[0]),
            "of_rows": SimilaritySide(sample=ids[0], query_id=ids[0], threshold=numbers_of(5)),
            "of_candidates": SimilaritySide(sample=ids[1], query_id=ids[1], threshold=numbers_of(9)),
            "options": SimilarityOptions(1.0, True, 0, fused(device)), "needs": Needs(False, False),
        },
        {
            **plain, "of_rows": SimilaritySide(document_id=ids[0], weight=numbers_of(5), normalizer=numbers_of(5) + 4),
            "of_candidates": SimilaritySide(document_id=ids[1], weight=numbers_of(9), normalizer=numbers_of(9) + 4),
            "options": SimilarityOptions(0.5, False, 0, False), "needs": Needs(True, False),
        },
        {**plain, "rows": rows[:0], "target": plain["target"][:0], "of_rows": SimilaritySide(weight=numbers_of(0))},
    ]  # fmt: skip


SAMPLES: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "cross_entropy_forward": cross_entropy_forward,
    "cross_entropy_backward": cross_entropy_backward,
    "linear_cross_entropy_sweep": linear_cross_entropy_sweep,
    "divergence_forward": divergence_forward,
    "divergence_backward": divergence_backward,
    "linear_divergence_sweep": linear_divergence_sweep,
    "contrastive_sweep": contrastive_sweep,
    "scaled": scaled,
}
"""For each op some arguments that differ in layout, in dtype and in the gradients needed."""

"""The post-training losses of ligerzoo.losses against liger-kernel's chunked losses: time, memory and error in one run.
`benchmarks.row` describes the method.

    python -m benchmarks.losses --out benchmarks/results/losses.json
    python -m benchmarks.losses --device cpu --quick --out /tmp/losses.json

8 rows of 1024 tokens, the head of Llama-3-8B, bf16. The head of a reference model or teacher is part of the timed call.
The floor counts the FLOPs of the GEMMs: three with the head, and one with the head of a reference or teacher.

The losses of embeddings are measured for 8192 pairs against plain torch, with the matrix of all similarities.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations import BOTH, GIB, kl_between, normal, plain, upcast
from benchmarks.row import OURS, Floor, Function, Goal, Provider, Row
from benchmarks.suite import Size, suite_command

BATCH, LENGTH, WIDTH, CLASSES = 8, 1024, 4096, 128256
BETA, GAMMA = 0.1, 0.5
PAIRS, FEATURES, TEMPERATURE = 8192, 1024, 0.05
SHARED = frozenset({"weight", "ref_weight"})


# The formulas, on all logits


def token_logps(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return upcast(F.linear(hidden, weight)).log_softmax(-1).gather(-1, target[..., None])[..., 0]


def nll(logps: Tensor) -> Tensor:
    return -logps[: len(logps) // 2].mean()


def dpo(hidden: Tensor, weight: Tensor, target: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
    ratios = (token_logps(hidden, weight, target) - token_logps(ref_hidden, ref_weight, target)).sum(-1)
    chosen, rejected = ratios.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def orpo(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logps = token_logps(hidden, weight, target)
    averages = logps.mean(-1)
    chosen, rejected = (averages - torch.log1p(-averages.exp())).chunk(2)
    return nll(logps) - BETA * F.logsigmoid(chosen - rejected).mean()


def simpo(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    chosen, rejected = token_logps(hidden, weight, target).mean(-1).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected) - GAMMA).mean()


def cpo(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logps = token_logps(hidden, weight, target)
    chosen, rejected = logps.sum(-1).chunk(2)
    return nll(logps) - F.logsigmoid(BETA * (chosen - rejected)).mean()


def kto(
    hidden: Tensor, weight: Tensor, target: Tensor, ref_hidden: Tensor, ref_weight: Tensor, desirable: Tensor
) -> Tensor:  # fmt: skip
    ratios = (token_logps(hidden, weight, target) - token_logps(ref_hidden, ref_weight, target)).sum(-1)
    return torch.sigmoid(BETA * torch.where(desirable, -ratios, ratios)).mean()


def grpo(hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, old_logps: Tensor) -> Tensor:
    ratio, advantages = torch.exp(token_logps(hidden, weight, target) - old_logps), advantages[:, None]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean(-1).mean()


def gspo(hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, old_logps: Tensor) -> Tensor:
    ratio = torch.exp((token_logps(hidden, weight, target) - old_logps).mean(-1))
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def jsd(hidden: Tensor, weight: Tensor, target: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
    log_q, log_p = (upcast(F.linear(*head)).log_softmax(-1) for head in ((hidden, weight), (ref_hidden, ref_weight)))
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()
    return ((kl_between(log_p, log_m) + kl_between(log_q, log_m)) / 2).mean()


def infonce(queries: Tensor, positives: Tensor) -> Tensor:
    logits = upcast(queries @ positives.T) / TEMPERATURE
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def clip(queries: Tensor, positives: Tensor) -> Tensor:
    logits, labels = upcast(queries @ positives.T) / TEMPERATURE, torch.arange(len(queries), device=queries.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


# Providers


def ours(name: str, call: Callable[[Any, Any], Function]) -> Provider:
    """`call` turns a function of ligerzoo.losses, and `sequence_logps`, into a function of the row's inputs."""

    def load() -> Function:
        losses = importlib.import_module("ligerzoo.losses")
        return call(getattr(losses, name), torch.no_grad()(losses.sequence_logps))

    return Provider(load)


def ligers(name: str, call: Callable[[Any], Function], **options: Any) -> Provider:
    """`call` turns one of liger-kernel's modules into a function of the row's inputs."""

    def load() -> Function:
        return call(getattr(importlib.import_module("liger_kernel.chunked_loss"), name)(**options))

    return Provider(load, needs_gpu=True)


def first(result: Any) -> Tensor:
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


def without_reference(name: str, **options: Any) -> Provider:
    return ours(name, lambda loss, _: lambda h, w, t: loss(h, w, t, **options).loss)


def of_pairs(module: str, **options: Any) -> Provider:
    return ligers(module, lambda loss: lambda h, w, t: first(loss(w, h, t)), **options)


def of_rollouts(**options: Any) -> Provider:
    return ours("grpo_loss", lambda loss, _: lambda h, w, t, a, old: loss(h, w, t, a, old_logps=old, **options).loss)


def ligers_rollouts(**options: Any) -> Provider:
    def call(loss: Any) -> Function:
        return lambda h, w, t, a, old: first(
            loss(h, w, t, torch.ones_like(t, dtype=torch.float32), a, old_per_token_logps=old)
        )

    return ligers("LigerFusedLinearGRPOLoss", call, beta=0.0, loss_type="grpo", use_ref_model=False, **options)


PROVIDERS: dict[Function, tuple[Provider, Provider]] = {
    dpo: (
        ours("dpo_loss", lambda loss, logps: lambda h, w, t, rh, rw: loss(h, w, t, ref_logps=logps(rh, rw, t)).loss),
        ligers(
            "LigerFusedLinearDPOLoss",
            lambda loss: lambda h, w, t, rh, rw: first(loss(w, h, t, ref_input=rh, ref_weight=rw)),
        ),
    ),
    orpo: (without_reference("orpo_loss"), of_pairs("LigerFusedLinearORPOLoss")),
    simpo: (
        without_reference("simpo_loss", beta=BETA, gamma=GAMMA),
        of_pairs("LigerFusedLinearSimPOLoss", beta=BETA, gamma=GAMMA, compute_nll_loss=False),
    ),
    cpo: (without_reference("cpo_loss"), of_pairs("LigerFusedLinearCPOLoss")),
    kto: (
        ours(
            "kto_loss",
            lambda loss, logps: lambda h, w, t, rh, rw, good: loss(h, w, t, good, ref_logps=logps(rh, rw, t)).loss,
        ),
        ligers(
            "LigerFusedLinearKTOLoss",
            lambda loss: lambda h, w, t, rh, rw, good: first(
                loss(h, w, t, preference_labels=good, ref_input=rh, ref_weight=rw)
            ),
            use_ref_model=True,
        ),
    ),
    grpo: (of_rollouts(), ligers_rollouts()),
    gspo: (of_rollouts(variant="gspo"), ligers_rollouts(importance_sampling_level="sequence")),
    jsd: (
        ours("distillation_loss", lambda loss, _: lambda *inputs: loss(*inputs, divergence="jsd").loss),
        ligers(
            "LigerFusedLinearJSDLoss",
            lambda loss: lambda h, w, t, rh, rw: first(
                loss(h.flatten(0, 1), w, rh.flatten(0, 1), rw, t.flatten())
            ),
            weight_hard_loss=0.0,
            weight_soft_loss=1.0,
        ),
    ),
}  # fmt: skip


# Inputs


def head_inputs(batch: int, length: int, width: int, classes: int) -> dict[str, Tensor]:
    return {
        "hidden": normal(batch, length, width),
        "weight": normal(classes, width, scale=width**-0.5),
        "target": torch.randint(classes, (batch, length)),
    }


def with_reference(*shape: int) -> dict[str, Tensor]:
    """Adds a reference model close to the policy, as in training."""
    inputs = head_inputs(*shape)
    hidden, weight = inputs["hidden"].detach(), inputs["weight"].detach()
    return {**inputs, "ref_hidden": hidden + 0.1 * torch.randn_like(hidden), "ref_weight": weight.clone()}


def with_labels(*shape: int) -> dict[str, Tensor]:
    return {**with_reference(*shape), "desirable": torch.arange(shape[0]) % 2 == 0}


def with_rollouts(*shape: int) -> dict[str, Tensor]:
    inputs = head_inputs(*shape)
    with torch.no_grad():
        rows = zip(inputs["hidden"], inputs["target"], strict=True)
        logps = torch.stack([token_logps(hidden, inputs["weight"], target) for hidden, target in rows])
    old_logps = logps + 0.2 * torch.randn_like(logps)
    return {**inputs, "advantages": torch.randn(shape[0]), "old_logps": old_logps}


INPUTS: Mapping[Function, Callable[..., dict[str, Tensor]]] = {
    dpo: with_reference, orpo: head_inputs, simpo: head_inputs, cpo: head_inputs, kto: with_labels,
    grpo: with_rollouts, gspo: with_rollouts, jsd: with_reference,
}  # fmt: skip


def loss_row(formula: Function, batch: int, length: int, width: int, classes: int) -> Row:
    product = 2 * batch * length * width * classes
    of_two = INPUTS[formula] in (with_reference, with_labels)
    own, ligers_own = PROVIDERS[formula]
    return Row(
        formula.__name__,
        (batch, length, width, classes),
        partial(INPUTS[formula], batch, length, width, classes),
        formula,
        {OURS: own, "liger-kernel": ligers_own},
        Floor((1 + of_two) * product, (3 + of_two) * product, "FLOPs"),
        Goal(0.09 if formula in (grpo, gspo) else 0.82, of_floor=1.15, extra_mib=GIB, directions=BOTH),
        outputs=("loss",),
        shared=SHARED,
        tokens_at_once=batch,
    )


EMBEDDING_LOSSES: dict[Function, dict[str, Any]] = {
    infonce: {},
    clip: {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
}


def embedding_row(formula: Function, pairs: int, features: int) -> Row:
    product = 2 * pairs * pairs * features
    options = {"temperature": TEMPERATURE, "similarity": "dot", **EMBEDDING_LOSSES[formula]}

    def inputs() -> dict[str, Tensor]:
        names = "queries", "positives"
        return {name: F.normalize(torch.randn(pairs, features)).bfloat16().requires_grad_() for name in names}

    return Row(
        formula.__name__,
        (pairs, features),
        inputs,
        formula,
        {OURS: ours("contrastive_loss", lambda loss, _: lambda *pair: loss(*pair, **options).loss), **plain(formula)},
        Floor(product, (3 if formula is infonce else 4) * product, "FLOPs"),
        Goal(of_peer=0.7, extra_mib=GIB, directions=("forward_backward",)),
        outputs=("loss",),
        tokens_at_once=pairs,
    )


def rows(size: Size) -> Iterator[Row]:
    for formula in PROVIDERS:
        yield loss_row(formula, BATCH, size(LENGTH), size(WIDTH), size(CLASSES))
    for formula in EMBEDDING_LOSSES:
        yield embedding_row(formula, size(PAIRS), size(FEATURES))


if __name__ == "__main__":
    suite_command(rows, what=__doc__, out=Path("benchmarks/results/losses.json"), seconds=2.0)

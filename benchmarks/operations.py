"""Every operation of ligerzoo.kernels against eager torch, torch's fused functions, torch.compile, liger-kernel and
cut-cross-entropy (loss head only): time, memory and error in one run. `benchmarks.row` describes the method.

    python -m benchmarks.operations --out benchmarks/results/operations.json
    python -m benchmarks.operations --device cpu --quick --out /tmp/operations.json

bf16 inputs. Losses are measured on random logits and on peaked ones, as a trained model has. Each row has goals and
reports whether it meets them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.row import IGNORED, OURS, Direction, Floor, Function, Goal, Provider, Row
from benchmarks.suite import Size, suite_command

EPS = 1e-6
HIGHEST_BOOST = 20.0  # largest boost of the target's logit in a peaked softmax: from uncertain to certain tokens
GIB = 1024.0  # in MiB


# Providers


def ours(name: str, *positional: Any, **options: Any) -> Provider:
    """A function of ligerzoo.kernels, called with the inputs and then the options."""

    def load() -> Function:
        function: Function = getattr(importlib.import_module("ligerzoo.kernels"), name)
        return (lambda *inputs: function(*inputs, *positional, **options)) if positional or options else function

    return Provider(load)


def plain(formula: Function, compiled: Function | None = None) -> dict[str, Provider]:
    """The formula in eager mode, and it (or `compiled`) under torch.compile."""

    def compile() -> Function:
        return torch.compile(compiled or formula, fullgraph=True, dynamic=False)

    return {"eager": Provider(lambda: formula), "torch.compile": Provider(compile, needs_gpu=True)}


def ligers(name: str, call: Callable[[Function], Function], note: str = "", overwrites: bool = False) -> Provider:
    """One of liger-kernel's autograd.Functions. `call` turns its `apply` into a function of the row's inputs."""

    def load() -> Function:
        return call(getattr(importlib.import_module("liger_kernel.ops"), name).apply)

    return Provider(load, note, needs_gpu=True, overwrites=overwrites)


def with_eps(apply: Function) -> Function:
    return lambda *inputs: apply(*inputs, EPS)


def unchanged(apply: Function) -> Function:
    return apply


def first_result(apply: Function) -> Function:
    return lambda *inputs: apply(*inputs)[0]


# Inputs


def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Random normal, bf16, requires grad."""
    return (torch.randn(shape) * scale + shift).bfloat16().requires_grad_()


def labels(tokens: int, classes: int, ignored: float = 0.0) -> Tensor:
    return torch.randint(classes, (tokens,)).masked_fill(torch.rand(tokens) < ignored, IGNORED)


def boosts(tokens: int) -> Tensor:
    return torch.rand(tokens, 1) * HIGHEST_BOOST


def logits_inputs(tokens: int, classes: int, peaked: bool) -> dict[str, Tensor]:
    target = labels(tokens, classes)
    logits = torch.randn(tokens, classes)
    if peaked:
        logits.scatter_add_(1, target[:, None], boosts(tokens))
    return {"logits": logits.bfloat16().requires_grad_(), "target": target}


def head_inputs(tokens: int, width: int, classes: int, peaked: bool, ignored: float = 0.0) -> dict[str, Tensor]:
    """Hidden states and a head with logits of variance 1. If peaked, hidden states point along their target's row."""
    weight = normal(classes, width, scale=width**-0.5)
    target = labels(tokens, classes, ignored)
    hidden = torch.randn(tokens, width)
    if peaked:
        hidden += boosts(tokens) * weight.detach()[target.clamp(min=0)]
    return {"hidden": hidden.bfloat16().requires_grad_(), "weight": weight, "target": target}


def upcast(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# Normalization

NORM_SHAPES = [(16384, 2048), (16384, 4096), (8192, 8192), (2048, 4096)]
NORM_GOALS = {(16384, 4096): Goal(of_floor=1.25), (2048, 4096): Goal(ms=0.080)}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = upcast(x)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight), total


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch_rms_norm(total, weight), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = upcast(x)
    centered = wide - wide.mean(-1, keepdim=True)
    normalized = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + EPS)
    return (normalized * weight + bias).to(x.dtype)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def norm_input(name: str, tokens: int, width: int) -> Tensor:
    match name:
        case "weight":
            return normal(width, scale=0.1, shift=1.0)
        case "bias":
            return normal(width, scale=0.1)
    return normal(tokens, width)


def norm_row(
    formula: Function, builtin: Function, liger: Provider, passes: tuple[int, int], tokens: int, width: int
) -> Row:
    """`passes`: the fewest reads and writes of x-sized tensors, forward and forward + backward."""
    size = 2 * tokens * width
    names = list(inspect.signature(formula).parameters)
    return Row(
        formula.__name__,
        (tokens, width),
        lambda: {name: norm_input(name, tokens, width) for name in names},
        formula,
        {
            OURS: ours(formula.__name__, EPS),
            **plain(formula),
            "torch": Provider(lambda: builtin),
            "liger-kernel": liger,
        },
        Floor(passes[0] * size, passes[1] * size),
        NORM_GOALS.get((tokens, width), Goal()),
        outputs=("y", "total") if "residual" in names else ("y",),
        shared=frozenset({"weight", "bias"}),
    )


rms_norm_row = partial(
    norm_row,
    rms_norm,
    torch_rms_norm,
    ligers("LigerRMSNormFunction", with_eps, "its backward writes into the upstream gradient", overwrites=True),
    (2, 5),
)
add_rms_norm_row = partial(
    norm_row,
    add_rms_norm,
    torch_add_rms_norm,
    ligers("LigerFusedAddRMSNormFunction", with_eps),
    (4, 8),  # x and residual have the same gradient
)
layer_norm_row = partial(norm_row, layer_norm, torch_layer_norm, ligers("LigerLayerNormFunction", with_eps), (2, 5))


# The rest of a layer: gates, rotary embedding, softmax

OVER_INPUTS = "its backward writes into the inputs"


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def gate_row(formula: Function, liger: str, tokens: int, width: int) -> Row:
    size = 2 * tokens * width
    return Row(
        formula.__name__,
        (tokens, width),
        lambda: {"gate": normal(tokens, width), "up": normal(tokens, width)},
        formula,
        {
            OURS: ours(formula.__name__),
            **plain(formula),
            "liger-kernel": ligers(liger, unchanged, OVER_INPUTS, overwrites=True),
        },
        Floor(3 * size, 8 * size),
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(-2) + torch.cat([-second, first], -1) * sin.unsqueeze(-2)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half_cos: Tensor, half_sin: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return rotate(q, cos, sin), rotate(k, cos, sin)


def our_rope(function: Function) -> Function:
    return lambda q, k, cos, sin, half_cos, half_sin: function(q, k, half_cos, half_sin)


def liger_rope(apply: Function) -> Function:
    """Takes (B, N, T, D) with the memory layout of (B, T, N, D)."""

    def call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        q, k = apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return call


def rope_row(batch: int, tokens: int, heads: int, kv_heads: int, head_size: int) -> Row:
    size = 2 * batch * tokens * (heads + kv_heads) * head_size

    def inputs() -> dict[str, Tensor]:
        q, k = normal(batch, tokens, heads, head_size), normal(batch, tokens, kv_heads, head_size)
        frequencies = 1e4 ** -(torch.arange(head_size // 2) * 2 / head_size)
        angles = (torch.arange(tokens)[:, None] * frequencies)[None]
        half_cos, half_sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        cos, sin = (torch.cat([half, half], -1) for half in (half_cos, half_sin))
        return {"q": q, "k": k, "cos": cos, "sin": sin, "half_cos": half_cos, "half_sin": half_sin}

    return Row(
        "rope",
        (batch, tokens, heads, kv_heads, head_size),
        inputs,
        rope,
        {
            OURS: Provider(lambda: our_rope(ours("rope").load())),
            **plain(rope),
            "liger-kernel": ligers("LigerRopeFunction", liger_rope, "it works in place", overwrites=True),
        },
        Floor(2 * size, 4 * size),
        outputs=("q_out", "k_out"),
        shared=frozenset({"cos", "sin", "half_cos", "half_sin"}),
        tokens_at_once=1,
    )


def softmax(x: Tensor) -> Tensor:
    return upcast(x).softmax(-1).to(x.dtype)


def torch_softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def softmax_row(tokens: int, classes: int) -> Row:
    size = 2 * tokens * classes
    return Row(
        "softmax",
        (tokens, classes),
        lambda: {"x": normal(tokens, classes)},
        softmax,
        {
            OURS: ours("softmax"),
            **plain(softmax),
            "torch": Provider(lambda: torch_softmax),
            "liger-kernel": ligers("LigerSoftmaxFunction", unchanged),
        },
        Floor(2 * size, 5 * size),
    )


# Losses of given logits


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(upcast(logits), target)


def liger_cross_entropy(apply: Function) -> Function:
    def call(logits: Tensor, target: Tensor) -> Tensor:
        own = logits.clone() if logits.requires_grad else logits
        loss: Tensor = apply(own, target, None)[0]
        return loss

    return call


def cross_entropy_row(tokens: int, classes: int, peaked: bool) -> Row:
    size = 2 * tokens * classes
    return Row(
        "cross_entropy",
        (tokens, classes),
        lambda: logits_inputs(tokens, classes, peaked),
        cross_entropy,
        {
            OURS: ours("cross_entropy"),
            **plain(cross_entropy),
            "torch": Provider(lambda: F.cross_entropy),
            "liger-kernel": ligers(
                "LigerCrossEntropyFunction",
                liger_cross_entropy,
                "its gradient overwrites the logits: forward + backward runs on a clone, made within the timed call",
            ),
        },
        Floor(size, 2 * size),
        Goal(of_peer=0.6, directions=("forward_backward",)),
        "peaked" if peaked else "",
        outputs=("loss",),
        tokens_at_once=1024,
    )


def log_softmax(logits: Tensor) -> Tensor:
    return upcast(logits).log_softmax(-1)


def kl_between(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def kl_div(student: Tensor, teacher: Tensor) -> Tensor:
    return kl_between(log_softmax(teacher), log_softmax(student)).mean()


def torch_kl_div(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(log_softmax(student), log_softmax(teacher), reduction="batchmean", log_target=True)


def jsd(student: Tensor, teacher: Tensor) -> Tensor:
    log_q, log_p = log_softmax(student), log_softmax(teacher)
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()
    return ((kl_between(log_p, log_m) + kl_between(log_q, log_m)) / 2).mean()


def tvd(student: Tensor, teacher: Tensor) -> Tensor:
    return (log_softmax(teacher).exp() - log_softmax(student).exp()).abs().sum(-1).mean() / 2


def liger_kl_div(apply: Function) -> Function:
    return lambda student, teacher: apply(log_softmax(student), log_softmax(teacher), "batchmean", True)


def liger_jsd(apply: Function) -> Function:
    return lambda student, teacher: apply(log_softmax(student), log_softmax(teacher))


def liger_tvd(apply: Function) -> Function:
    return lambda student, teacher: apply(log_softmax(student).exp(), log_softmax(teacher).exp())


def divergence_row(formula: Function, liger: Provider, tokens: int, classes: int, peaked: bool) -> Row:
    size = 2 * tokens * classes

    def inputs() -> dict[str, Tensor]:
        """In a peaked pair student and teacher boost the same target by different amounts."""
        student = logits_inputs(tokens, classes, peaked)
        teacher = torch.randn(tokens, classes)
        if peaked:
            teacher.scatter_add_(1, student["target"][:, None], boosts(tokens))
        return {"student": student["logits"], "teacher": teacher.bfloat16()}

    builtin = {"torch": Provider(lambda: torch_kl_div)} if formula is kl_div else {}
    return Row(
        formula.__name__,
        (tokens, classes),
        inputs,
        formula,
        {OURS: ours(formula.__name__), **plain(formula), **builtin, "liger-kernel": liger},
        Floor(2 * size, 3 * size),
        variant="peaked" if peaked else "",
        outputs=("loss",),
        tokens_at_once=1024,
    )


# The loss head

HEAD_SHAPES = [
    (8192, 4096, 128256),
    (16384, 2048, 128256),
    (8192, 3584, 152064),
    (8192, 4096, 32000),
    (8192, 2304, 256000),
    (32768, 4096, 128256),
]
HEAD = frozenset({"weight"})
BOTH: tuple[Direction, ...] = ("forward_backward",)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(F.linear(hidden, weight), target)


def torch_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def torchs_chunked() -> Function:
    """`F.linear_cross_entropy` of torch 2.13 and later. With options it never materializes all logits."""
    if not hasattr(F, "linear_cross_entropy"):
        raise NotImplementedError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    return partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())


def cut_cross_entropy(call: Callable[[Function], Function]) -> Provider:
    return Provider(lambda: call(importlib.import_module("cut_cross_entropy").linear_cross_entropy), needs_gpu=True)


def linear_cross_entropy_row(
    tokens: int, width: int, classes: int, peaked: bool, ignored: float = 0.0, goal: Goal | None = None
) -> Row:
    product = 2 * tokens * width * classes * (1 - ignored)
    extra = min(GIB, 2 * tokens * classes / 2**20)
    return Row(
        "linear_cross_entropy",
        (tokens, width, classes),
        lambda: head_inputs(tokens, width, classes, peaked, ignored),
        linear_cross_entropy,
        {
            OURS: ours("linear_cross_entropy"),
            f"{OURS}, all logits at once": ours("linear_cross_entropy", logits_budget=2**16),
            **plain(linear_cross_entropy),
            "torch": Provider(lambda: torch_linear_cross_entropy),
            "torch linear_cross_entropy": Provider(torchs_chunked),
            "liger-kernel": ligers("LigerFusedLinearCrossEntropyFunction", first_result),
            "cut-cross-entropy": cut_cross_entropy(unchanged),
        },
        Floor(product, 3 * product, "FLOPs"),
        goal or Goal(of_peer=0.95, of_floor=1.10, extra_mib=extra, directions=BOTH),
        ", ".join([*(["peaked"] if peaked else []), *([f"{ignored:.0%} ignored"] if ignored else [])]),
        outputs=("loss",),
        shared=HEAD,
        tokens_at_once=1024,
    )


def mostly_ignored_row(tokens: int, width: int, classes: int) -> Row:
    """75 % of the targets are ignored, as in a chat where only answers have labels."""
    full = linear_cross_entropy_row(tokens, width, classes, peaked=False)
    goal = Goal(of_peer=0.95, of_row=(full.name, 0.30), extra_mib=full.goal.extra_mib, directions=BOTH)
    return linear_cross_entropy_row(tokens, width, classes, peaked=False, ignored=0.75, goal=goal)


def token_logps(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return -F.cross_entropy(upcast(logits), target, reduction="none")


def torch_token_logps(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -F.cross_entropy(F.linear(hidden, weight), target, reduction="none")


def liger_token_logps(apply: Function) -> Function:
    return lambda *inputs: -apply(*inputs, None, None, IGNORED, 0.0, 0.0, "none")[0]


def negative_losses(function: Function) -> Function:
    return lambda *inputs: -function(*inputs, reduction="none")


def token_logps_row(tokens: int, width: int, classes: int) -> Row:
    product = 2 * tokens * width * classes
    return Row(
        "token_logps",
        (tokens, width, classes),
        lambda: head_inputs(tokens, width, classes, peaked=True),
        token_logps,
        {
            OURS: ours("token_logps"),
            **plain(token_logps),
            "torch": Provider(lambda: torch_token_logps),
            "torch linear_cross_entropy": Provider(lambda: negative_losses(torchs_chunked())),
            "liger-kernel": ligers("LigerFusedLinearCrossEntropyFunction", liger_token_logps),
            "cut-cross-entropy": cut_cross_entropy(negative_losses),
        },
        Floor(product, 3 * product, "FLOPs"),
        Goal(extra_mib=GIB, directions=BOTH),
        "peaked",
        outputs=("logps",),
        shared=HEAD,
        tokens_at_once=1024,
    )


def linear_jsd(student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Tensor:
    return jsd(F.linear(student, student_weight), F.linear(teacher, teacher_weight))


def linear_jsd_row(tokens: int, width: int, classes: int) -> Row:
    product = 2 * tokens * width * classes

    def inputs() -> dict[str, Tensor]:
        student, teacher = (head_inputs(tokens, width, classes, peaked=False) for _ in range(2))
        return {
            "student": student["hidden"],
            "student_weight": student["weight"],
            "teacher": teacher["hidden"].detach(),
            "teacher_weight": teacher["weight"].detach(),
        }

    return Row(
        "linear_jsd",
        (tokens, width, classes),
        inputs,
        linear_jsd,
        {
            OURS: ours("linear_jsd"),
            **plain(linear_jsd),
            "liger-kernel": ligers("LigerFusedLinearJSDFunction", unchanged),
        },
        Floor(2 * product, 4 * product, "FLOPs"),
        Goal(of_peer=0.82, of_floor=1.15, extra_mib=GIB, directions=BOTH),
        outputs=("loss",),
        shared=frozenset({"student_weight", "teacher_weight"}),
        tokens_at_once=1024,
    )


# Mixture of experts

# liger-kernel would autotune for minutes. It reads this variable at import; to tune, set 1 and raise --patience.
LIGER_TUNING = f"LIGER_FUSED_MOE_AUTOTUNE={os.environ.setdefault('LIGER_FUSED_MOE_AUTOTUNE', '0')}"
EXPERTS_GOALS = {
    "Qwen3-30B-A3B": {8192: Goal(of_peer=None, ms=4.6), 32768: Goal(of_peer=None, ms=16.0)},
    "Mixtral": {8192: Goal(of_peer=None, ms=28.0)},
}


def experts_mlp(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Loops over the experts."""
    y = torch.zeros_like(x)
    for expert, (into, out) in enumerate(zip(gate_up.unbind(), down.unbind(), strict=True)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], into).chunk(2, -1)
        y.index_add_(0, token, F.linear(F.silu(gate) * up, out) * weights[token, slot, None])
    return y


def grouped_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """All experts in one `F.grouped_mm`, on tokens sorted by expert."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    experts = torch.arange(len(gate_up), device=x.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True).int()
    token = order // ids.shape[1]
    gate, up = F.grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None])


def liger_experts(apply: Function) -> Function:
    return lambda x, ids, weights, gate_up, down: apply(x, gate_up, down, ids.int(), weights)


def experts_row(model: str, tokens: int, experts: int, width: int, intermediate: int, chosen: int) -> Row:
    pairs = 2 * tokens * chosen * width * intermediate

    def inputs() -> dict[str, Tensor]:
        return {
            "x": normal(tokens, width),
            "ids": torch.rand(tokens, experts).topk(chosen).indices,
            "weights": torch.randn(tokens, chosen).softmax(-1).bfloat16().requires_grad_(),
            "gate_up": normal(experts, 2 * intermediate, width, scale=width**-0.5),
            "down": normal(experts, width, intermediate, scale=intermediate**-0.5),
        }

    return Row(
        "experts_mlp",
        (tokens, experts, width, intermediate, chosen),
        inputs,
        experts_mlp,
        {
            OURS: ours("experts_mlp"),
            **plain(experts_mlp, compiled=grouped_experts),
            "torch": Provider(lambda: grouped_experts, "F.grouped_mm"),
            "liger-kernel": ligers("LigerFusedMoEFunction", liger_experts, LIGER_TUNING),
        },
        Floor(3 * pairs, 9 * pairs, "FLOPs"),
        EXPERTS_GOALS[model].get(tokens, Goal(of_peer=None)),
        model,
        shared=frozenset({"gate_up", "down"}),
    )


# Attention


def visible_pairs(tokens: int, window: int) -> int:
    """Counts the visible (query, key) pairs."""
    return sum(min(i + 1, window) for i in range(tokens))


def attention(q: Tensor, k: Tensor, v: Tensor, window: int, softcap: float | None) -> Tensor:
    """Loops over the heads, with activation checkpointing."""

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
        return scores.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1) @ v

    share = q.shape[2] // k.shape[2]
    heads = [
        checkpoint(head, q[0, :, i], k[0, :, i // share], v[0, :, i // share], use_reentrant=False)
        for i in range(q.shape[2])
    ]
    return torch.stack(heads, 1)[None]


def our_attention(window: int, softcap: float | None) -> Function:
    from ligerzoo.layers import Context, attend

    @functools.cache
    def context(tokens: int, device: torch.device) -> Context:  # shared by all layers of a forward
        return Context(torch.empty(1, tokens, device=device))

    def attend_windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = context(q.shape[1], q.device).mask(k.shape[1], window=window, force=softcap is not None)
        return attend(q, k, v, mask, softcap=softcap)

    return attend_windowed


def flex_attention(window: int, softcap: float | None) -> Function:
    """FlexAttention as its documentation recommends; of large heads in our tiles, since its own do not fit."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from ligerzoo.layers.flex_attention import flex_tiles

    compiled = torch.compile(flex_attention)
    score_mod = None if softcap is None else lambda score, b, h, q, k: softcap * torch.tanh(score / softcap)

    @functools.cache
    def block_mask(tokens: int, device: torch.device) -> Any:
        sees = lambda b, h, q, k: (k <= q) & (q - k < window)  # noqa: E731
        return create_block_mask(sees, None, None, tokens, tokens, device=str(device))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = block_mask(q.shape[1], q.device)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, score_mod, mask, enable_gqa=True, kernel_options=flex_tiles(q))
        return out.transpose(1, 2)

    return call


def masked_attention(window: int) -> Function:
    @functools.cache
    def dense_mask(tokens: int, device: torch.device) -> Tensor:
        distance = torch.arange(tokens, device=device)[:, None] - torch.arange(tokens, device=device)
        return (distance >= 0) & (distance < window)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = dense_mask(q.shape[1], q.device)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)

    return call


def attention_row(
    model: str, tokens: int, heads: int, kv_heads: int, head_dim: int, window: int, softcap: float | None, goal: Goal
) -> Row:
    def inputs() -> dict[str, Tensor]:
        shapes = {"q": heads, "k": kv_heads, "v": kv_heads}
        return {name: normal(1, tokens, count, head_dim) for name, count in shapes.items()}

    products = 4 * visible_pairs(tokens, window) * heads * head_dim
    providers = {
        OURS: Provider(lambda: our_attention(window, softcap)),
        "torch.compile": Provider(lambda: flex_attention(window, softcap), "FlexAttention", needs_gpu=True),
    }
    if softcap is None:
        providers["torch"] = Provider(lambda: masked_attention(window), "with a dense mask")
    return Row(
        "attention",
        (tokens, heads, kv_heads, head_dim),
        inputs,
        partial(attention, window=window, softcap=softcap),
        providers,
        Floor(products, 3.5 * products, "FLOPs"),
        goal,
        f"{model}, window {window}",
    )


# The suite


def rows(size: Size) -> Iterator[Row]:
    """Yields every row. `size` maps each dimension, to shrink a quick run."""

    def sized(build: Callable[..., Row], *shape: int, **options: Any) -> Row:
        return build(*map(size, shape), **options)

    for norm in (rms_norm_row, add_rms_norm_row, layer_norm_row):
        yield from (sized(norm, *shape) for shape in NORM_SHAPES)
    yield sized(partial(gate_row, swiglu, "LigerSiLUMulFunction"), 16384, 14336)
    yield sized(partial(gate_row, geglu, "LigerGELUMulFunction"), 16384, 14336)
    yield sized(rope_row, 4, 4096, 32, 8, 128)
    yield sized(softmax_row, 8192, 32000)
    for peaked in (False, True):
        for classes in (128256, 32000):
            yield sized(cross_entropy_row, 8192, classes, peaked=peaked)
    for formula, liger in (
        (kl_div, ligers("LigerKLDivLossFunction", liger_kl_div)),
        (jsd, ligers("LigerJSDFunction", liger_jsd)),
        (tvd, ligers("LigerTVDLossFunction", liger_tvd)),
    ):
        for peaked in (False, True):
            yield sized(partial(divergence_row, formula, liger), 8192, 32000, peaked=peaked)
    for shape in HEAD_SHAPES:
        for peaked in (False, True):
            yield sized(linear_cross_entropy_row, *shape, peaked=peaked)
    yield sized(mostly_ignored_row, 8192, 4096, 128256)
    yield sized(token_logps_row, 8192, 4096, 128256)
    yield sized(linear_jsd_row, 8192, 4096, 128256)
    for tokens in (8192, 32768):
        yield sized(partial(experts_row, "Qwen3-30B-A3B"), tokens, 128, 2048, 768, 8)
    yield sized(partial(experts_row, "Mixtral"), 8192, 8, 4096, 14336, 2)
    flex = Goal(of_peer=1.0)
    yield attention_row("Mistral", size(16384), 32, 8, 128, size(4096), None, flex)
    for window in (size(4096), size(16384)):
        goal = Goal(of_peer=0.7, directions=("forward_backward",))
        yield attention_row("Gemma 2 with softcap", size(16384), 16, 8, 256, window, 50.0, goal)


if __name__ == "__main__":
    suite_command(rows, what=__doc__, out=Path("benchmarks/results/operations.json"), seconds=0.8)

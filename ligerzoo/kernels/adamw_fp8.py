"""One AdamW update of a parameter whose moments are stored in fp8, in one kernel; see `adamw` for the rule.

m, and the square root of v, are stored as a number in e4m3 (see `fp8`) times the scale of its block of 256 elements:

    m = code * scale,   v = (code * scale)^2,   scale = 2^(e - 7),   2^e <= largest number of the block < 2^(e + 1)

The root has the range of m. A v without a root would need twice the exponents, and become 0 where m does not: the next
update would divide by eps. For the same reason, a positive root is at least the smallest positive code. A scale is a
power of two, so that a number that does not change keeps its code when the scale changes. An infinite moment is stored
as the largest code, and does not change the scale. Far smaller roots than the largest of their block, by 2^16 or more,
are stored larger than they are: clip gradients.

Codes are rounded stochastically, such that the expectations are m and v (that of v, not of its root): one update
changes v by 1 - b2 or less, which is less than half of the distance of two codes, and would be lost. The standard
deviation of a stored v is about a third of v with b2 = 0.999.

An fp32 number x * 2^-120 has the e4m3 number x in its upper 12 bits: those of the smallest numbers are alike too. So
adding random bits to its lower 20 bits rounds x, as in `stochastic_rounding`.

The parameter, v and m share a random word of 32 bits: its lower half, its upper half, and bits that depend on all of
it. A second word would take longer than the update.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ligerzoo.checks import NOT_NEGATIVE, check
from ligerzoo.kernels.adamw import BETA, UpdateNumbers, UpdateStep, store_rounded, update, updated
from ligerzoo.kernels.dispatch import Backend, cdiv, uses_triton
from ligerzoo.kernels.fp8 import FP8, MAX, saturated
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.philox import random_block
from ligerzoo.kernels.registration import needs_dispatch
from ligerzoo.kernels.stochastic_rounding import check_key, store, to_bf16, words_like
from ligerzoo.tensor_checks import check_floats

SCALED = 256
"""Elements of a block, which share a scale."""

MIX = 0x9E3779B1
"""An odd number near 2^32 divided by the golden ratio: the upper bits of its product with a word depend on all bits."""

LAST = 0x7E
"""The code of the largest number, 448."""

_BLOCK, _WARPS = 1024, 2
_SMALLEST = 2.0**-50
"""Of the largest number of a block, for its scale. Far smaller moments are small against eps."""


def scale_count(parameter: Tensor) -> int:
    """The number of scales of a moment."""
    return cdiv(parameter.numel(), SCALED)


def reference(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_scales: Tensor, root: Tensor, root_scales: Tensor,
    step: Tensor, lr: Tensor, betas: tuple[float, float], eps: float, weight_decay: float, key: int,
    stochastic: bool = True, skip: Tensor | None = None,
) -> None:  # fmt: skip
    """`adamw_update_fp8` in plain torch: the specification, the CPU path and the test oracle."""
    p, g = parameter.float(), gradient.float()
    m, v = decode(exp_avg, exp_avg_scales), decode(root, root_scales).square()
    p, m, v = updated(p, g, m, v, step.float(), lr.float(), UpdateNumbers.of(betas, eps, weight_decay))
    words = words_like(p, key, step, 0)
    if stochastic and parameter.dtype == torch.bfloat16:
        p = to_bf16(p, words)
    m_codes, m_scales = encode(m, words)
    v_codes, v_scales = encode_root(v, words)
    targets = (parameter, exp_avg, exp_avg_scales, root, root_scales)
    for old, new in zip(targets, (p, m_codes, m_scales, v_codes, v_scales), strict=True):
        store(old, new, skip)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the numbers in fp32, in the shape of the codes."""
    return codes.float() * scales.repeat_interleave(SCALED)[: codes.numel()].view(codes.shape)


def encode(x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of fp32 numbers, rounded with the upper bits of the words' products with `MIX`."""
    scales, wide = _scales(x.abs())
    bits = ((x / wide).clamp(-MAX, MAX) * 2.0**-120).view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF) + ((words * MIX & 0xFFFFFFFF) >> 12).to(torch.int32)
    return _codes((bits >> 24 & 0x80) | (magnitude >> 20).clamp_max(LAST)), scales


def encode_root(v: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of the roots of fp32 numbers, such that the expectations of their squares are v.

    The upper 16 bits of the words decide.
    """
    scales, wide = _scales(v.sqrt())
    scaled = (v / wide / wide).clamp_max(MAX**2)
    lower = (scaled.sqrt() * 2.0**-120).view(torch.int32) >> 20
    squares, next_squares = (_magnitude(code).square() for code in (lower, lower + 1))
    is_next = (words >> 16).float() * 2.0**-16 * (next_squares - squares) < scaled - squares
    return _codes(torch.where(v > 0, (lower + is_next).clamp(1, LAST), lower)), scales


def _scales(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scale of each block, and that of each element."""
    count = magnitudes.numel()
    blocks = torch.nn.functional.pad(magnitudes.reshape(-1), (0, -count % SCALED)).view(-1, SCALED)
    largest = blocks.nan_to_num(0.0, posinf=0.0).amax(1)
    exponents = largest.clamp_min(_SMALLEST).view(torch.int32) & 0x7F800000
    scales = (exponents - (7 << 23)).view(torch.float32)
    return scales, scales.repeat_interleave(SCALED)[:count].view(magnitudes.shape)


def _magnitude(code: Tensor) -> Tensor:
    return (code << 20).view(torch.float32) * 2.0**120


def _codes(bits: Tensor) -> Tensor:
    return bits.to(torch.uint8).view(FP8)


@jit
def _magnitude_of(code):
    return (code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@jit
def _load_codes(codes_ptr, scales_ptr, offsets, blocks, mask, n):
    """Numbers in fp32, (blocks, SCALED)."""
    code = tl.load(codes_ptr + offsets, mask=mask, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + blocks, mask=blocks * offsets.shape[1] < n, other=1.0)
    magnitude = _magnitude_of(code & 0x7F)
    return tl.where(code > 127, -magnitude, magnitude) * scale[:, None]


@jit
def _largest_of(magnitudes):
    """The largest finite number of each row."""
    return tl.max(tl.where(magnitudes < float("inf"), magnitudes, 0.0), 1)


@jit
def _scale_of(largest, SMALLEST: tl.constexpr):
    """The scale of a row with this largest number, and its reciprocal."""
    exponents = tl.maximum(largest, SMALLEST).to(tl.int32, bitcast=True) & 0x7F800000
    scale = exponents - (7 << 23)
    return scale.to(tl.float32, bitcast=True), ((254 << 23) - scale).to(tl.float32, bitcast=True)


@jit
def _upper_bits(x):
    """The bits of x * 2^-120."""
    return (x * 7.52316384526264e-37).to(tl.int32, bitcast=True)


class _Operands(NamedTuple):
    """The parameter, its gradient, and the codes and scales of m and of the root of v."""

    p: Tensor
    g: Tensor
    m: Tensor
    m_scales: Tensor
    root: Tensor
    root_scales: Tensor


@kernel
def _kernel(
    operands, schedule, key, n, numbers, BLOCK: tl.constexpr, SCALED: tl.constexpr, MIX: tl.constexpr,
    SMALLEST: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK // SCALED
    p_ptr, g_ptr, m_ptr, m_scales_ptr, root_ptr, root_scales_ptr = operands
    program = tl.program_id(0).to(tl.int64)
    if schedule.skip is not None:
        n = tl.where(tl.load(schedule.skip) == 0, n, 0)
    blocks = program * ROWS + tl.arange(0, ROWS)
    offsets = blocks[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
    mask, has_elements = offsets < n, blocks * SCALED < n
    step, lr = tl.load(schedule.step), tl.load(schedule.lr)
    p = tl.load(p_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    m = _load_codes(m_ptr, m_scales_ptr, offsets, blocks, mask, n)
    root = _load_codes(root_ptr, root_scales_ptr, offsets, blocks, mask, n)
    p, m, v = update(p, g, m, root * root, step, lr, numbers)
    group = program * (BLOCK // 4)
    words = tl.reshape(random_block(key, step.to(tl.int64), group, BLOCK), (ROWS, SCALED))
    store_rounded(p_ptr, offsets, p, words, mask, STOCHASTIC)

    scale, inverse = _scale_of(_largest_of(tl.abs(m)), SMALLEST)
    bits = _upper_bits(saturated(m * inverse[:, None]))
    magnitude = (bits & 0x7FFFFFFF) + (words * MIX >> 12).to(tl.int32)
    tl.store(m_ptr + offsets, ((bits >> 24 & 0x80) | tl.minimum(magnitude >> 20, 0x7E)).to(tl.uint8), mask=mask)
    tl.store(m_scales_ptr + blocks, scale, mask=has_elements)

    scale, inverse = _scale_of(tl.sqrt_rn(_largest_of(v)), SMALLEST)
    scaled = tl.minimum(v * inverse[:, None] * inverse[:, None], 448.0 * 448.0)
    lower = _upper_bits(tl.sqrt(scaled)) >> 20
    square, next_square = _magnitude_of(lower), _magnitude_of(lower + 1)
    square, next_square = square * square, next_square * next_square
    is_next = (words >> 16).to(tl.float32) * 1.52587890625e-5 * (next_square - square) < scaled - square
    code = lower + is_next.to(tl.int32)
    tl.store(root_ptr + offsets, tl.where(v > 0.0, tl.minimum(tl.maximum(code, 1), 0x7E), code).to(tl.uint8), mask=mask)
    tl.store(root_scales_ptr + blocks, scale, mask=has_elements)


def adamw_update_fp8(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_scales: Tensor,
    root: Tensor,
    root_scales: Tensor,
    step: Tensor,
    lr: Tensor,
    *,
    key: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    stochastic: bool = True,
    skip: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Updates a parameter and its moments in fp8 in place by AdamW. No host sync.

    Args:
        parameter: any shape; fp32 or bf16.
        gradient: the shape of `parameter`, any floating-point dtype.
        exp_avg: codes of m, float8_e4m3fn, the shape of `parameter`.
        exp_avg_scales: (ceil(n / 256),) fp32 for n elements.
        root: codes of the root of v, float8_e4m3fn, the shape of `parameter`.
        root_scales: (ceil(n / 256),) fp32.
        step: t, 0-d fp32, the number of this update from 1 to 2^24.
        lr: 0-d fp32.
        key: 2^32 or more; each key, step and element has independent random bits.
        betas: b1 and b2, from 0 to 1 and not 1.
        eps: added to the root of v.
        weight_decay: wd.
        stochastic: round a bf16 parameter stochastically, else to the nearest.
        skip: 0-d or (1,); nothing is written if it is not 0.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Raises:
        ValueError: shapes, dtypes or numbers are wrong.
    """
    states = {"exp_avg": exp_avg, "exp_avg_scales": exp_avg_scales, "root": root, "root_scales": root_scales}
    check_floats("adamw_update_fp8", parameter=parameter, gradient=gradient, **states, step=step, lr=lr)
    scales = (scale_count(parameter),)
    for name, tensor in {"gradient": gradient, **states}.items():
        shape = scales if name.endswith("_scales") else tuple(parameter.shape)
        dtype = gradient.dtype if name == "gradient" else torch.float32 if name.endswith("_scales") else FP8
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(
                f"adamw_update_fp8: {name} is {tuple(tensor.shape)} {tensor.dtype}; expected {shape} {dtype}"
            )
    check("adamw_update_fp8", BETA, beta1=betas[0], beta2=betas[1])
    check("adamw_update_fp8", NOT_NEGATIVE, eps=eps, weight_decay=weight_decay)
    check_key("adamw_update_fp8", key, 0)
    moments = tuple(states.values())
    is_dense = all(t.is_contiguous() for t in (parameter, *moments))
    if not (uses_triton(parameter, gradient, backend=backend) and is_dense) or needs_dispatch(parameter, *moments):
        with torch.no_grad():
            options = step, lr, betas, eps, weight_decay, key, stochastic, skip
            reference(parameter, gradient, exp_avg, exp_avg_scales, root, root_scales, *options)
    elif parameter.numel():
        m, m_scales, root, root_scales = (t.view(torch.uint8) if t.dtype == FP8 else t for t in moments)
        operands = _Operands(parameter, gradient.contiguous(), m, m_scales, root, root_scales)
        numbers = UpdateNumbers.of(betas, eps, weight_decay)
        with torch.cuda.device(parameter.device if parameter.is_cuda else -1):
            _kernel[cdiv(parameter.numel(), _BLOCK)](
                operands, UpdateStep(step, lr, skip), key, parameter.numel(), numbers, _BLOCK, SCALED, MIX, _SMALLEST,
                stochastic, num_warps=_WARPS,
            )  # fmt: skip
        increment_version((parameter, *moments))

"""Functions of one number that several kernels use: for fp32 exact to an ulp or two, for 16-bit numbers fast.

The fast ones are the GPU's approximate 2^x and log2. Triton's `exp` spends three more instructions on results below
1e-38, which softmaxes have no use for, its `log`, exact to an ulp, twenty more. Its `tanh` is not there in the
interpreter.
"""

from __future__ import annotations

from ligerzoo.kernels.jit import INTERPRETING, jit, tl


@jit
def exp(x, EXACT: tl.constexpr):
    if EXACT:
        return _exact_exp(x)
    else:
        return fast_exp(x)


@jit
def fast_exp(x):
    """Up to 2 ulps of error near 0, more as x grows, for x / log(2) is rounded; what is less than 2e-38 is 0."""
    return tl.exp2(x * 1.4426950408889634)


@jit
def fast_log(x, less_1):
    """log(x), for x - 1 as well: where that is small, by the first terms of the series of log(1 + (x - 1)), for the
    fast logarithm errs by 5e-8, and to one side."""
    near = less_1 * (1.0 + less_1 * (-1.0 / 2.0 + less_1 * (1.0 / 3.0 - less_1 * (1.0 / 4.0))))
    return tl.where(tl.abs(less_1) < 0.05, near, _fast_log(x))


if INTERPRETING:

    @jit
    def _fast_log(x):
        return tl.log(x)

else:

    @jit
    def _fast_log(x):
        """Errs by 2e-7 between 0.5 and 2, elsewhere by 2 ulps."""
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
        return log2 * 0.6931471805599453


@jit
def _exact_exp(x):
    """2^n e^r with x = n log(2) + r, |r| <= log(2) / 2, and e^r by its series; what is less than 2e-38 may be 0."""
    x = tl.where(x < -110.0, -110.0, tl.where(x > 110.0, 110.0, x))  # beyond, all is 0 or infinity
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = tl.fma(n, -0.693145751953125, x)  # log(2) in two parts: n times the first is exact
    r = tl.fma(n, -1.42860682030941723212e-06, r)
    tail = 1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0)))
    series = 1.0 + r * (1.0 + r * (1.0 / 2.0 + r * (1.0 / 6.0 + r * tail)))
    return 2.0 * series * tl.exp2(n - 1.0)  # 2^128 would be infinite, though e^x may not be


@jit
def sigmoids(x, EXACT: tl.constexpr):
    """s(x) and s(-x) = 1 - s(x)."""
    if EXACT:  # which 1 - s(x) is not
        decay = _exact_exp(-tl.abs(x))
        larger = 1.0 / (1.0 + decay)
        smaller = decay * larger
        return tl.where(x < 0.0, smaller, larger), tl.where(x < 0.0, larger, smaller)
    else:
        share = tl.sigmoid(x)
        return share, 1.0 - share


@jit
def tanh(x):
    """Exact: by exp where it keeps its digits, near 0 by the first terms of the series."""
    t, _ = tanh_and_slope(x)
    return t


@jit
def tanh_and_slope(x):
    """tanh(x) and 1 - tanh(x)^2, the latter as 4 e / (1 + e)^2 with e = exp(-2 |x|): exact where tanh(x) is near 1."""
    decay = _exact_exp(-2.0 * tl.abs(x))
    share = 1.0 / (1.0 + decay)
    away = (1.0 - decay) / (1.0 + decay)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(square < 0.0225, near, tl.where(x < 0.0, -away, away)), 4.0 * decay * share * share


@jit
def softcapped(z, scale, softcap, inverse_temperature=None):
    """x and dx/dz for x = scale * z, or softcap * tanh(scale * z / softcap), times `inverse_temperature`; None stands
    for no scale, no softcap, no temperature."""
    scale = 1.0 if scale is None else scale
    slope = scale if inverse_temperature is None else scale * inverse_temperature
    if softcap is None:
        x = z * slope
    else:
        t, tanh_slope = tanh_and_slope(z * (scale / softcap))
        x = t * (softcap if inverse_temperature is None else softcap * inverse_temperature)
        slope = slope * tanh_slope
    return x, slope

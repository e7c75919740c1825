"""Elementwise functions shared by kernels: exact to 1 or 2 ulps for fp32, fast for 16-bit inputs.

The fast versions use the GPU's approximate 2^x and log2. Triton's `exp` takes three more instructions for results below
1e-38, which a softmax does not need. Its `log` is exact to 1 ulp and takes twenty more. Its `tanh` is missing in the
interpreter.
"""

from __future__ import annotations

from ligerzoo.kernels.jit import INTERPRETING, jit, tl


@jit
def exp(x, EXACT: tl.constexpr):
    """exp(x), exact in fp32 if EXACT, else fast."""
    if EXACT:
        return _exact_exp(x)
    else:
        return fast_exp(x)


@jit
def fast_exp(x):
    """exp(x) with up to 2 ulps of error near 0, and more for large x, because x / log(2) is rounded.

    Results below 2e-38 are 0.
    """
    return tl.exp2(x * 1.4426950408889634)


@jit
def fast_log(x, x_minus_1):
    """log(x), given x and x - 1. Small x - 1 uses the series of log(1 + (x - 1)): the fast log2 has a bias of 5e-8."""
    series = x_minus_1 * (1.0 + x_minus_1 * (-1.0 / 2.0 + x_minus_1 * (1.0 / 3.0 - x_minus_1 * (1.0 / 4.0))))
    return tl.where(tl.abs(x_minus_1) < 0.05, series, approximate_log(x))


if INTERPRETING:

    @jit
    def approximate_log(x):
        return tl.log(x)

else:

    @jit
    def approximate_log(x):
        """log(x) with an error of 2e-7 for x between 0.5 and 2, else of 2 ulps."""
        instruction: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        log2 = tl.inline_asm_elementwise(instruction, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return log2 * 0.6931471805599453


@jit
def _exact_exp(x):
    """exp(x) = 2^n e^r with x = n log(2) + r and |r| <= log(2) / 2, e^r by its series. Results below 2e-38 may be 0."""
    x = tl.where(x < -110.0, -110.0, tl.where(x > 110.0, 110.0, x))  # beyond, exp(x) is 0 or inf
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = tl.fma(n, -0.693145751953125, x)  # log(2) = c1 + c2, where n * c1 is exact
    r = tl.fma(n, -1.42860682030941723212e-06, r)
    tail = 1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0)))
    series = 1.0 + r * (1.0 + r * (1.0 / 2.0 + r * (1.0 / 6.0 + r * tail)))
    return 2.0 * series * tl.exp2(n - 1.0)  # 2^128 overflows where e^x may not


@jit
def expm1(x):
    """exp(x) - 1, exact in fp32. Near 0, where the difference would cancel, by its series."""
    tail = 1.0 / 120.0 + x * (1.0 / 720.0 + x * (1.0 / 5040.0 + x * (1.0 / 40320.0 + x * (1.0 / 362880.0))))
    series = x + x * x * (1.0 / 2.0 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * tail)))
    return tl.where(tl.abs(x) < 0.5, series, _exact_exp(x) - 1.0)


@jit
def softplus_exactly(x):
    """log(1 + e^x), exact in fp32: max(x, 0) + log(1 + d) with d = e^-|x|.

    s = d / (2 + d) <= 1/3 has 2 artanh(s) = log(1 + d).
    """
    decay = _exact_exp(-tl.abs(x))
    s = decay / (2.0 + decay)
    u = s * s
    series = 1.0 / 9.0 + u * (1.0 / 11.0 + u * (1.0 / 13.0 + u * (1.0 / 15.0)))
    series = 1.0 + u * (1.0 / 3.0 + u * (1.0 / 5.0 + u * (1.0 / 7.0 + u * series)))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@jit
def sigmoids(x, EXACT: tl.constexpr):
    """s(x) and s(-x) = 1 - s(x)."""
    if EXACT:  # 1 - s(x) would cancel
        decay = _exact_exp(-tl.abs(x))
        larger = 1.0 / (1.0 + decay)
        smaller = decay * larger
        return tl.where(x < 0.0, smaller, larger), tl.where(x < 0.0, larger, smaller)
    else:
        s = tl.sigmoid(x)
        return s, 1.0 - s


@jit
def tanh(x):
    """tanh(x), exact in fp32, see `tanh_and_slope`."""
    t, _ = tanh_and_slope(x)
    return t


@jit
def tanh_and_slope(x):
    """tanh(x) and 1 - tanh(x)^2, exact in fp32.

    With e = exp(-2 |x|), tanh |x| is (1 - e) / (1 + e), or the first terms of its series near 0. The slope is
    4 e / (1 + e)^2, which does not cancel where tanh(x) is near 1.
    """
    decay = _exact_exp(-2.0 * tl.abs(x))
    inverse = 1.0 / (1.0 + decay)
    quotient = (1.0 - decay) / (1.0 + decay)
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    t = tl.where(square < 0.0225, series, tl.where(x < 0.0, -quotient, quotient))
    return t, 4.0 * decay * inverse * inverse


@jit
def softcapped(z, scale, softcap, inverse_temperature=None):
    """x and dx/dz for x = scale * z, or softcap * tanh(scale * z / softcap), times `inverse_temperature`.

    None omits scale, softcap or temperature.
    """
    scale = 1.0 if scale is None else scale
    slope = scale if inverse_temperature is None else scale * inverse_temperature
    if softcap is None:
        x = z * slope
    else:
        t, tanh_slope = tanh_and_slope(z * (scale / softcap))
        x = t * (softcap if inverse_temperature is None else softcap * inverse_temperature)
        slope = slope * tanh_slope
    return x, slope


@jit
def load_softcapped(row_ptr, cols, n_cols, scale, softcap, inverse_temperature=None, MASKED: tl.constexpr = True):
    """Loads logits of a row and returns x and dx/dz as `softcapped` does; x is -inf beyond the last column.

    Without MASKED, all columns must exist.
    """
    mask = cols < n_cols if MASKED else None
    if MASKED and (scale is None) and (softcap is None) and (inverse_temperature is None):
        # The load itself pads, which saves a select.
        x, slope = tl.load(row_ptr + cols, mask=mask, other=-float("inf")).to(tl.float32), 1.0
    else:
        z = tl.load(row_ptr + cols, mask=mask, other=0.0 if MASKED else None).to(tl.float32)
        x, slope = softcapped(z, scale, softcap, inverse_temperature)
        if MASKED:
            x = tl.where(mask, x, -float("inf"))
    return x, slope

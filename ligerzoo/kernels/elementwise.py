"""Functions of one number that several kernels use, exact to an ulp or two.

Triton's own `exp` is made for softmax: it rounds x / log(2) to fp32, which costs digits as x grows. Its `tanh` is not
there in the interpreter.
"""

from __future__ import annotations

from ligerzoo.kernels.jit import jit, tl


@jit
def exp(x):
    """2 to the power of x / log(2), whose own rounding error is made good."""
    power = x * 1.4426950408889634
    error = tl.fma(x, 1.4426950408889634, -power) + x * 1.9259629911266175e-08  # what fp32 lacks of 1 / log(2)
    error = tl.where(tl.abs(power) < 200.0, error, 0.0)  # beyond, all is 0 or infinity
    return tl.exp2(power) * (1.0 + 0.6931471805599453 * error)


@jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@jit
def tanh(x):
    """By exp where it keeps its digits, near 0 by the first terms of the series."""
    decay = exp(-2.0 * tl.abs(x))
    away = (1.0 - decay) / (1.0 + decay)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(square < 0.0225, near, tl.where(x < 0.0, -away, away))

"""The cosine distance of a student's logits from a teacher's, for each token.

Forward:   loss = 1 - cos,   cos = (z . y) / (|z| |y|)   of the student's logits z and the teacher's y.
Backward:  dz = (cos z / |z| - y / |y|) / |z|.

For zero logits cos and the gradient are 0. A temperature would only divide the gradient. Computed in fp32
(fp64 for fp64 logits), a few rows at a time, in plain torch on every device. The transforms of `softcap` come first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.kernels.loss.token_divergence import DivergenceOptions
from ligerzoo.kernels.softcap import transformed

_MAX_ELEMENTS = 2**23  # of an fp32 copy


def reference(student: Tensor, teacher: Tensor, target: Tensor, options: DivergenceOptions) -> Tensor:
    """Returns the distance of each row of (..., V) logits, 0 if ignored: the specification and the tests' oracle."""
    dtype = accumulation_dtype(torch.promote_types(student.dtype, teacher.dtype))
    ignored = target == options.ignore_index
    # Masking only the losses would multiply NaN logits of an ignored token by an upstream gradient of 0.
    z, y = (
        _directions(transformed(logits.to(dtype).masked_fill(ignored[..., None], 0.0), transform)[0])[0]
        for logits, transform in ((student, options.student), (teacher, options.teacher))
    )
    return (1 - (z * y).sum(-1)).masked_fill(ignored, 0.0)


def _directions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x / |x| and 1 / |x|; 0 for x = 0."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    is_zero = norm == 0
    inverse = norm.masked_fill(is_zero, 1.0).reciprocal().masked_fill(is_zero, 0.0)
    return x * inverse, inverse


def cosine_distances_(
    student: Tensor, teacher: Tensor, target: Tensor, upstream: Tensor | None, options: DivergenceOptions
) -> Tensor:
    """`ligerzoo.kernels.divergence.row_divergences_` for the cosine distance."""
    ignored, dtype = target == options.ignore_index, torch.promote_types(student.dtype, teacher.dtype)
    losses = ignored.new_zeros(ignored.shape, dtype=accumulation_dtype(dtype))
    step = max(1, _MAX_ELEMENTS // max(1, student.shape[-1]))
    for start in range(0, len(student), step):
        rows = slice(start, start + step)
        x, slope = transformed(student[rows].to(losses.dtype), options.student)
        z, inverse = _directions(x)
        y, _ = _directions(transformed(teacher[rows].to(losses.dtype), options.teacher)[0])
        cos = (z * y).sum(-1, keepdim=True)
        losses[rows] = (1 - cos[:, 0]).masked_fill(ignored[rows], 0.0)
        if upstream is not None:
            gradient = (cos * z - y) * (inverse * upstream[rows, None]) * slope
            student[rows] = gradient.masked_fill(ignored[rows, None], 0.0).to(student.dtype)
    return losses

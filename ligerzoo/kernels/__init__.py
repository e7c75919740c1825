"""Fused operations, in the style of `torch.nn.functional`: Triton on a GPU, the plain-torch reference elsewhere.

Each file holds one operation: its formula, its reference, its Triton kernels, and the public function.
"""

from ligerzoo.kernels.cross_entropy import cross_entropy
from ligerzoo.kernels.linear_cross_entropy import linear_cross_entropy
from ligerzoo.kernels.rms_norm import rms_norm
from ligerzoo.kernels.rope import rope
from ligerzoo.kernels.swiglu import swiglu, swiglu_linear

__all__ = ["cross_entropy", "linear_cross_entropy", "rms_norm", "rope", "swiglu", "swiglu_linear"]

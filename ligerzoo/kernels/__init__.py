"""Fused operations, in the style of `torch.nn.functional`: Triton on a GPU, the plain-torch reference elsewhere.

Each file contains one operation: formula, reference, Triton kernels and public function. Shared code is in `dispatch`,
`registration`, `jit`, `tiling`, `math` and `loss`. `ligerzoo.parallel` has the operations on several processes.
"""

from typing import TYPE_CHECKING

from ligerzoo.exports import renamed
from ligerzoo.kernels.activation import Activation, activation_linear
from ligerzoo.kernels.adamw import adamw_update
from ligerzoo.kernels.adamw_fp8 import adamw_update_fp8
from ligerzoo.kernels.attention_sinks import apply_sinks, sink_attention
from ligerzoo.kernels.cache_write import write_to_cache
from ligerzoo.kernels.causal_conv import ConvActivation, causal_conv1d
from ligerzoo.kernels.causal_conv_step import causal_conv1d_step
from ligerzoo.kernels.cross_entropy import cross_entropy
from ligerzoo.kernels.decode_attention import decode_attention
from ligerzoo.kernels.decode_experts import decode_experts
from ligerzoo.kernels.delta_gates import delta_gates
from ligerzoo.kernels.delta_rule import gated_delta_rule
from ligerzoo.kernels.delta_step import gated_delta_step
from ligerzoo.kernels.dispatch import Backend
from ligerzoo.kernels.divergence import jsd, kl_div, tvd
from ligerzoo.kernels.exact_attention import exact_attention
from ligerzoo.kernels.experts import experts_mlp
from ligerzoo.kernels.gated_rms_norm import gated_rms_norm
from ligerzoo.kernels.gating import ClampedSwiGLU, ExpertActivation, GatedActivation, Ungated
from ligerzoo.kernels.glu import geglu, glu, glu_linear, swiglu
from ligerzoo.kernels.large_head_attention import large_head_attention
from ligerzoo.kernels.latent_decode_attention import latent_decode_attention
from ligerzoo.kernels.layer_norm import layer_norm
from ligerzoo.kernels.linear_cross_entropy import linear_cross_entropy, token_logps, token_statistics
from ligerzoo.kernels.linear_divergence import linear_jsd, linear_kl_div, linear_tvd
from ligerzoo.kernels.linears import linear_glu, linears
from ligerzoo.kernels.logit_filter import FilterBounds, filter_bounds
from ligerzoo.kernels.lora import lora_linears
from ligerzoo.kernels.lora_experts import lora_experts_mlp
from ligerzoo.kernels.loss.chunked_head import set_logits_budget
from ligerzoo.kernels.loss.reduction import Reduction
from ligerzoo.kernels.loss.token_loss import TokenStatistics
from ligerzoo.kernels.low_rank import LowRank, LowRankTerms
from ligerzoo.kernels.packed_attention import packed_attention
from ligerzoo.kernels.packing import Packing, pack_documents
from ligerzoo.kernels.rms_norm import add_rms_norm, residual_rms_norm, rms_norm
from ligerzoo.kernels.rope import rope
from ligerzoo.kernels.route import Routing, route, route_sigmoid
from ligerzoo.kernels.sampling import SampledTokens, sample_tokens
from ligerzoo.kernels.softmax import softmax
from ligerzoo.kernels.ssd import ssd
from ligerzoo.kernels.ssd_gates import ssd_gates
from ligerzoo.kernels.ssd_step import ssd_step
from ligerzoo.kernels.stochastic_rounding import round_stochastically
from ligerzoo.kernels.xielu import xielu

__all__ = [
    "Activation",
    "Backend",
    "ClampedSwiGLU",
    "ConvActivation",
    "ExpertActivation",
    "FilterBounds",
    "GatedActivation",
    "LowRank",
    "LowRankTerms",
    "Packing",
    "Reduction",
    "Routing",
    "SampledTokens",
    "TokenStatistics",
    "Ungated",
    "activation_linear",
    "adamw_update",
    "adamw_update_fp8",
    "add_rms_norm",
    "apply_sinks",
    "causal_conv1d",
    "causal_conv1d_step",
    "cross_entropy",
    "decode_attention",
    "decode_experts",
    "delta_gates",
    "exact_attention",
    "experts_mlp",
    "filter_bounds",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_rms_norm",
    "geglu",
    "glu",
    "glu_linear",
    "jsd",
    "kl_div",
    "large_head_attention",
    "latent_decode_attention",
    "layer_norm",
    "linear_cross_entropy",
    "linear_glu",
    "linear_jsd",
    "linear_kl_div",
    "linear_tvd",
    "linears",
    "lora_experts_mlp",
    "lora_linears",
    "pack_documents",
    "packed_attention",
    "residual_rms_norm",
    "rms_norm",
    "rope",
    "round_stochastically",
    "route",
    "route_sigmoid",
    "sample_tokens",
    "set_logits_budget",
    "sink_attention",
    "softmax",
    "ssd",
    "ssd_gates",
    "ssd_step",
    "swiglu",
    "token_logps",
    "token_statistics",
    "tvd",
    "write_to_cache",
    "xielu",
]

if not TYPE_CHECKING:  # a type checker reports a missing name itself
    __getattr__ = renamed(__name__)

"""Nemotron-H, Nemotron Nano 2 and Nemotron 3, such as Nemotron-3-Nano-30B-A3B (NVIDIA 2025).

    tokens -> embedding -> L x [ x += mamba, attention, mlp or moe(norm(x)) ] -> norm -> head

Distinctive: blocks of one branch: Mamba-2, attention without positions, or ungated ReLU-squared MLP or MoE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ligerzoo.kernels import Ungated
from ligerzoo.layers import (
    Attention,
    Decoder,
    DeepSeekMoE,
    Embedding,
    Experts,
    LatentMoE,
    Linear,
    MambaMixerBlock,
    MixerBlock,
    MLPBlock,
    RMSNorm,
    UngatedMLP,
)
from ligerzoo.models.config import check_layer_types, heads
from ligerzoo.models.moe import DeepSeekMoECausalLM, SigmoidRoutedConfig
from ligerzoo.models.state_space import MambaConfig, mamba

MIXER_TYPES = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""Types of layers, by their letters in `hybrid_override_pattern`."""


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(MambaConfig, SigmoidRoutedConfig):
    """Configuration of Nemotron-H. Defaults: those of transformers' NemotronHConfig.

    Attributes:
        layers_block_type: "linear_attention" (Mamba-2), "full_attention", "mlp" or "moe" for each layer.
        intermediate_size: intermediate features of an MLP.
        moe_shared_expert_intermediate_size: intermediate features of the expert that processes every token.
        moe_latent_size: input and output features of routed experts; None for the hidden size.
        mlp_bias: add biases to MLPs, shared experts and projections to latent features; routed experts have none.
        time_step_min: lower limit of step sizes.
    """

    vocab_size: int = 131072
    intermediate_size: int = 21504
    num_hidden_layers: int = 4
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    layers_block_type: Sequence[str] = field(default_factory=lambda: [*MIXER_TYPES.values()])
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    mlp_bias: bool = False
    mamba_d_head: int | None = 64
    mamba_n_groups: int = 8
    mamba_d_state: int = 128
    time_step_min: float = 0.001

    def validate(self) -> None:
        super().validate()
        check_layer_types(self, [*MIXER_TYPES.values()], "layers_block_type", required=True)

    @property
    def mamba_inner_size(self) -> int:
        return self.mamba_n_heads * (self.mamba_d_head or 64)

    def is_mamba(self, layer: int) -> bool:
        return self.layers_block_type[layer] == "linear_attention"

    def has_mixture(self, layer: int) -> bool:
        return self.layers_block_type[layer] == "moe"

    @property
    def has_dense_layers(self) -> bool:
        return "mlp" in self.layers_block_type


class NemotronH(DeepSeekMoECausalLM):
    """Nemotron-H with a language-model head."""

    config: NemotronHConfig

    def __init__(self, config: NemotronHConfig) -> None:
        c, hidden, latent, bias = config, config.hidden_size, config.moe_latent_size, config.mlp_bias

        def norm() -> RMSNorm:
            return RMSNorm(hidden, c.rms_norm_eps, round_before_scale=False)

        def mixture() -> DeepSeekMoE:
            experts = Experts(latent or hidden, c.moe_intermediate_size, c.num_experts, activation=Ungated("relu2"))
            parts = c.router(), experts, UngatedMLP(hidden, c.moe_shared_expert_intermediate_size, bias=bias)
            if latent is None:
                return DeepSeekMoE(*parts)
            return LatentMoE(*parts, Linear(hidden, latent, bias=bias), Linear(latent, hidden, bias=bias))

        build: dict[str, Callable[[], MixerBlock | MLPBlock]] = {
            "linear_attention": lambda: MambaMixerBlock(norm(), mamba(c, time_step_min=c.time_step_min)),
            "full_attention": lambda: MixerBlock(norm(), Attention(*heads(c), None)),
            "mlp": lambda: MLPBlock(norm(), UngatedMLP(hidden, c.intermediate_size, bias=bias)),
            "moe": lambda: MLPBlock(norm(), mixture()),
        }
        layers = (build[kind]() for kind in c.layers_block_type)
        super().__init__(config, Decoder(Embedding(c.vocab_size, hidden), layers, norm()))

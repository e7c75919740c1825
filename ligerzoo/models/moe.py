"""Shared by mixture-of-experts (MoE) decoders: configuration of the MoE layers, and the load-balancing loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from ligerzoo.errors import ConfigError
from ligerzoo.layers import Context, Decoder, LMHead, load_balancing_loss
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Configuration of a decoder with MoE layers in place of MLPs.

    Attributes:
        sliding_window: tokens that a token attends to, including itself; None for full attention.
        num_experts: experts per MoE layer.
        num_experts_per_tok: experts selected for each token.
        output_router_logits: return the router logits, and compute the load-balancing loss, `aux_loss`, and add it to
            the loss. The argument of `forward` with this name takes precedence.
        router_aux_loss_coef: factor of the load-balancing loss when it is added.
    """

    sliding_window: int | None = None
    num_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                "more experts per token than experts",
                where="num_experts_per_tok",
                got=self.num_experts_per_tok,
                expected=f"at most num_experts, {self.num_experts}",
            )


@dataclass(frozen=True, kw_only=True)
class SparseStepMoEConfig(MoEConfig):
    """Configuration of a decoder with MoE in some layers and a dense MLP in the others (Qwen).

    Attributes:
        intermediate_size: intermediate features of a dense MLP.
        moe_intermediate_size: intermediate features of each expert.
        norm_topk_prob: divide a token's expert weights by their sum, so that they add up to one.
        decoder_sparse_step: n; every n-th layer uses MoE.
        mlp_only_layers: indices of layers that always use a dense MLP, counted from 0.
    """

    num_hidden_layers: int = 24
    hidden_size: int = 2048
    vocab_size: int = 151936
    max_position_embeddings: int = 32768
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: Sequence[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.mlp_only_layers
        if not isinstance(layers, list | tuple) or not all(type(layer) is int for layer in layers):
            raise ConfigError(
                "invalid layer indices", where="mlp_only_layers", got=repr(layers)[:200], expected="a list of integers"
            )

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses MoE."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class MoECausalLM(CausalLM):
    """A causal language model with MoE layers; see `CausalLM`."""

    config: MoEConfig

    def __init__(self, config: MoEConfig, model: Decoder, lm_head: LMHead, **parts: nn.Module) -> None:
        super().__init__(config, model, lm_head, **parts)
        self.aux_loss_weight = config.router_aux_loss_coef

    def aux_loss(self, context: Context) -> Tensor | None:
        """Returns the load-balancing loss over the tokens of this forward, padding excluded.

        None unless the router logits were asked for, by `config.output_router_logits` or the argument of `forward`, and
        at least one layer uses MoE.
        """
        if not context.router_logits:
            return None
        return load_balancing_loss(context.router_logits, self.config.num_experts_per_tok, context.call_padding_mask())

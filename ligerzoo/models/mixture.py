"""What decoders with mixtures of experts share: the numbers of the mixtures, and the loss that keeps their experts
evenly busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ligerzoo.errors import ConfigError
from ligerzoo.layers import Context, Decoder, LMHead, load_balancing_loss
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(DecoderConfig):
    """Of a decoder with mixtures of experts in the place of feed-forwards.

    Attributes:
        sliding_window: how many tokens a token sees, itself included; None for all before it.
        num_experts: of each mixture.
        num_experts_per_tok: how many of them each token goes to.
        output_router_logits: make the load-balancing loss, `aux_loss`, and add it to the loss of the labels.
        router_aux_loss_coef: what it is multiplied by before.
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
                "a token cannot go to more experts than there are",
                where="num_experts_per_tok",
                got=self.num_experts_per_tok,
                expected=f"at most num_experts, {self.num_experts}",
            )


@dataclass(frozen=True, kw_only=True)
class PartlyMixtureConfig(MixtureConfig):
    """Of a decoder that has mixtures in some layers and feed-forwards in the others (Qwen).

    Attributes:
        intermediate_size: the width of the feed-forwards.
        moe_intermediate_size: the width of an expert.
        norm_topk_prob: a token's weights are divided by their sum, so that they add up to one.
        decoder_sparse_step: n; every n-th layer has a mixture.
        mlp_only_layers: layers, counted from 0, that have none at any rate.
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
                "no layers", where="mlp_only_layers", got=repr(layers)[:200], expected="a list of whole numbers"
            )

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has a mixture."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class MixtureLM(CausalLM):
    """A causal language model with mixtures of experts, see `CausalLM`."""

    config: MixtureConfig

    def __init__(self, config: MixtureConfig, model: Decoder, lm_head: LMHead) -> None:
        super().__init__(config, model, lm_head)
        self.aux_loss_weight = config.router_aux_loss_coef

    def aux_loss(self, context: Context) -> Tensor | None:
        """The load-balancing loss over the call's tokens, padding left out; None where the config does not ask for it
        or no layer has a mixture."""
        if not (self.config.output_router_logits and context.router_logits):
            return None
        return load_balancing_loss(context.router_logits, self.config.num_experts_per_tok, context.real_tokens())

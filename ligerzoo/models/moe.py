"""Shared by mixture-of-experts (MoE) decoders: configuration of the MoE layers, and the load-balancing loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ligerzoo.checks import is_list
from ligerzoo.layers import (
    Context,
    DeepSeekMoE,
    Experts,
    GatedMLP,
    Linear,
    Router,
    ScaledInputMoE,
    SharedExpertMoE,
    SigmoidRouter,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, refuse_unless


@dataclass(frozen=True, kw_only=True)
class RoutedConfig(DecoderConfig):
    """Configuration of a decoder with routed experts.

    Attributes:
        num_experts: routed experts per MoE layer.
        num_experts_per_tok: experts selected for each token.
        output_router_logits: return the router logits. The argument of `forward` with this name takes precedence.
    """

    num_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False

    def validate(self) -> None:
        super().validate()
        chosen, experts = self.num_experts_per_tok, self.num_experts
        expected, what = f"at most num_experts, {experts}", "more experts per token than experts"
        refuse_unless(chosen <= experts or not experts, "num_experts_per_tok", chosen, expected, what)

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses MoE instead of a dense MLP."""
        return True

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer uses a dense MLP."""
        return not all(map(self.has_mixture, range(self.num_hidden_layers)))


@dataclass(frozen=True, kw_only=True)
class MoEConfig(RoutedConfig):
    """Configuration of a decoder with MoE layers in place of MLPs, and a load-balancing loss.

    With `output_router_logits`, the loss includes the load-balancing loss, `aux_loss`.

    Attributes:
        router_aux_loss_coef: factor of the load-balancing loss when it is added.
    """

    router_aux_loss_coef: float = 0.001


@dataclass(frozen=True, kw_only=True)
class SigmoidRoutedConfig(RoutedConfig):
    """Configuration of a decoder with sigmoid routers, which may have groups of experts (DeepSeek).

    Attributes:
        moe_intermediate_size: intermediate features of each expert.
        routed_scaling_factor: factor of the weights of the selected experts.
        n_group: number of groups of consecutive routed experts.
        topk_group: number of groups from which a token's experts are selected.
        norm_topk_prob: divide a token's expert weights by their sum, before the factor.
    """

    moe_intermediate_size: int = 2048
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True

    def validate(self) -> None:
        super().validate()
        experts, chosen, groups, selected = self.num_experts, self.num_experts_per_tok, self.n_group, self.topk_group
        what = "the experts do not form groups of equal size"
        expected = f"1, or a divisor of the number of experts, {experts}, with two per group or more"
        are_equal = experts % groups == 0 and (groups == 1 or experts >= 2 * groups)
        refuse_unless(are_equal, "n_group", groups, expected, what)
        what = "more experts per token than the selected groups have, or more selected groups than there are"
        expected = f"at most n_group, {groups}, and enough groups for {chosen} experts"
        suffice = selected <= groups and chosen <= selected * (experts // groups)
        refuse_unless(suffice, "topk_group", selected, expected, what)

    def router(self) -> Router | SigmoidRouter:
        """Returns the router of an MoE layer."""
        return SigmoidRouter(
            self.hidden_size,
            self.num_experts,
            self.num_experts_per_tok,
            num_groups=self.n_group,
            num_selected_groups=self.topk_group,
            renormalize=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )


@dataclass(frozen=True, kw_only=True)
class DeepSeekMoEConfig(SigmoidRoutedConfig):
    """Configuration of a decoder with shared experts (DeepSeek), and sigmoid routers without load-balancing loss.

    Attributes:
        intermediate_size: intermediate features of a dense MLP.
        n_shared_experts: experts that process every token.
        first_k_dense_replace: number of layers at the beginning that use a dense MLP instead.
    """

    n_shared_experts: int = 1
    first_k_dense_replace: int = field(default=1, metadata={"least": 0})

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses MoE."""
        return layer >= self.first_k_dense_replace

    def feed_forward(self, layer: int) -> GatedMLP | DeepSeekMoE:
        """Returns the dense MLP or the MoE of this layer, counted from 0."""
        if not self.has_mixture(layer):
            return GatedMLP(self.hidden_size, self.intermediate_size)
        shared_size = self.n_shared_experts * self.moe_intermediate_size
        return DeepSeekMoE(
            self.router(),
            Experts(self.hidden_size, self.moe_intermediate_size, self.num_experts),
            GatedMLP(self.hidden_size, shared_size),
        )


@dataclass(frozen=True, kw_only=True)
class MixedMoEConfig(MoEConfig):
    """Configuration of a decoder with MoE in some layers and a dense MLP in the others.

    Attributes:
        intermediate_size: intermediate features of a dense MLP.
        moe_intermediate_size: intermediate features of each expert.
        norm_topk_prob: divide a token's expert weights by their sum, so that they add up to one.
    """

    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False


@dataclass(frozen=True, kw_only=True)
class SparseStepMoEConfig(MixedMoEConfig):
    """Configuration of a decoder with MoE in every n-th layer (Qwen).

    Attributes:
        decoder_sparse_step: n; every n-th layer uses MoE.
        mlp_only_layers: indices of layers that always use a dense MLP, counted from 0.
    """

    num_hidden_layers: int = 24
    hidden_size: int = 2048
    vocab_size: int = 151936
    max_position_embeddings: int = 32768
    decoder_sparse_step: int = 1
    mlp_only_layers: Sequence[int] = field(default_factory=list)

    def validate(self) -> None:
        super().validate()
        layers = self.mlp_only_layers
        are_integers = is_list(layers) and all(type(layer) is int for layer in layers)
        refuse_unless(are_integers, "mlp_only_layers", layers, "a list of integers", "invalid layer indices")

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses MoE."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def shared_expert_moe(config: MoEConfig, expert_size: int, shared_size: int, *, renormalize: bool) -> SharedExpertMoE:
    """Builds an MoE layer with a gated shared expert (Qwen).

    Args:
        config: the hidden size and the number of experts.
        expert_size: intermediate features of each expert.
        shared_size: intermediate features of the shared expert.
        renormalize: divide a token's expert weights by their sum.
    """
    c = config
    return SharedExpertMoE(
        Router(c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalize=renormalize),
        Experts(c.hidden_size, expert_size, c.num_experts),
        GatedMLP(c.hidden_size, shared_size),
        Linear(c.hidden_size, 1, bias=False),
    )


class MoECausalLM(CausalLM):
    """A causal language model with MoE layers; see `CausalLM`."""

    config: MoEConfig


def scaled_input_moe(config: RoutedConfig, size: int) -> ScaledInputMoE:
    """Returns an MoE layer whose experts and shared expert have `size` intermediate features (Llama 4)."""
    c, chosen = config, (config.num_experts, config.num_experts_per_tok)
    router = SigmoidRouter(c.hidden_size, *chosen, renormalize=False, balanced=False, in_fp32=False)
    return ScaledInputMoE(router, Experts(c.hidden_size, size, c.num_experts), GatedMLP(c.hidden_size, size))


class DeepSeekMoECausalLM(CausalLM):
    """A causal language model with MoE layers, without a load-balancing loss."""

    config: DecoderConfig

    def aux_loss(self, context: Context) -> Tensor | None:
        """Returns None: `output_router_logits` adds no loss."""
        return None

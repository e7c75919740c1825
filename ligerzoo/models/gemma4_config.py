"""Shared by Gemma 4's models: the configuration of their decoder."""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.layers.rope_scaling import MAX_ROTARY_DIM, Scaling, is_rotary_dim
from ligerzoo.models.config import SharedKeysConfig, check_positive, check_theta, refuse_unless

PROPORTIONAL: Scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
"""Rope scaling of the full-attention layers of published checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Gemma4DecoderConfig(SharedKeysConfig):
    """Configuration of Gemma 4's decoder. Defaults: those of transformers' Gemma4TextConfig.

    Attributes:
        sliding_window: tokens that a token attends to in a sliding-window layer, including itself; for a bidirectional
            model, on both sides together.
        layer_types: None: every sixth layer uses full attention. The last layer always does.
        head_dim: features per head of sliding-window layers.
        global_head_dim: features per head of full-attention layers.
        num_global_key_value_heads: key-value heads of full-attention layers; None for `num_key_value_heads`.
        attention_k_eq_v: full-attention layers use keys as values.
        use_double_wide_mlp: the last `num_kv_shared_layers` layers have twice the intermediate features.
        rope_theta, rope_scaling: of full-attention layers only.
        rope_local_base_freq: rotary base of sliding-window layers.
        attention_bias: add biases to the query, key, value and output projections.
        final_logit_softcapping: soft cap of the logits, `cap * tanh(logit / cap)`; None for no cap.
        use_bidirectional_attention: "all": tokens also attend to later tokens; "vision": those of images do.
        hidden_size_per_layer_input: features of the per-layer embeddings; 0 for none.
        vocab_size_per_layer_input: number of per-layer embeddings.
        enable_moe_block: add a mixture of experts to each layer.
        num_experts, num_experts_per_tok, moe_intermediate_size: those of the mixtures, see `MixedMoEConfig`.
    """

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    sliding_window: int | None = 512
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    rope_theta: float = 1e6
    rope_scaling: Scaling | None = field(default_factory=lambda: dict(PROPORTIONAL))
    rope_local_base_freq: float = 1e4
    attention_bias: bool = False
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None
    hidden_size_per_layer_input: int = field(default=256, metadata={"least": 0})
    vocab_size_per_layer_input: int = 262144
    enable_moe_block: bool = False
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None

    def validate(self) -> None:
        super().validate()
        check_theta(self, "rope_local_base_freq")
        check_positive(self, "final_logit_softcapping")
        sizes, expected = self.head_size, f"an even number, 2 to {MAX_ROTARY_DIM}"
        refuse_unless(is_rotary_dim(sizes), "head_dim", sizes, expected, "invalid number of rotated features")
        kv_heads = self.num_global_key_value_heads
        is_divisor = kv_heads is None or (self.attention_k_eq_v and self.num_attention_heads % kv_heads == 0)
        expected = f"None, or with attention_k_eq_v a divisor of num_attention_heads, {self.num_attention_heads}"
        refuse_unless(is_divisor, "num_global_key_value_heads", kv_heads, expected)
        directions, given = (None, "all", "vision"), self.use_bidirectional_attention
        refuse_unless(given in directions, "use_bidirectional_attention", given, 'None, "all" or "vision"')
        size, least = self.vocab_size_per_layer_input, self.vocab_size if self.hidden_size_per_layer_input else 0
        refuse_unless(size >= least, "vocab_size_per_layer_input", size, f"at least vocab_size, {least}")
        if self.enable_moe_block:
            for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
                refuse_unless(getattr(self, name) is not None, name, None, "a number, with enable_moe_block")
            experts, chosen = self.num_experts or 0, self.num_experts_per_tok or 0
            refuse_unless(chosen <= experts, "num_experts_per_tok", chosen, f"at most num_experts, {experts}")

    def slides(self, layer: int) -> bool:
        """Whether the layer uses a sliding window if `layer_types` is None: all but every sixth do."""
        return (layer + 1) % 6 != 0

    def is_sliding(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses the sliding window: the last one never does."""
        return layer < self.num_hidden_layers - 1 and super().is_sliding(layer)

    def window(self, layer: int) -> int | None:
        """Window to each attended side, in tokens including the current one; None for full attention."""
        window = super().window(layer)
        return window if window is None or self.is_causal else window // 2 + 2  # as in transformers' eager attention

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has a mixture of experts."""
        return self.enable_moe_block

    @property
    def is_causal(self) -> bool:
        """Whether tokens attend to earlier tokens only, except for those of images."""
        return self.use_bidirectional_attention != "all"

    @property
    def rotary_size(self) -> int:
        """Features per head of full-attention layers, of which `rope_scaling` says how many are rotated."""
        return self.global_head_dim

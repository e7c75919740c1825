"""BERT, base and large, and models with its architecture, such as BGE, E5 and MiniLM (Devlin et al. 2019).

    tokens -> norm(embedding + type + position) -> L x [ x = norm(x + attention(x));  x = norm(x + mlp(x)) ]
           -> norm(gelu(dense(x))) -> head

Distinctive: an encoder with norms of the residual sums, learned positions, token types, and biases everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ligerzoo.layers import MLP, AbsolutePositionDecoder, Attention, Embedding, LayerNorm, LMHead, ResidualNormBlock
from ligerzoo.models.config import DecoderConfig, heads, refuse_unless
from ligerzoo.models.masked_lm import MaskedLM, PredictionHead, TanhHead


@dataclass(frozen=True, kw_only=True)
class BertConfig(DecoderConfig):
    """Configuration of BERT. Defaults: those of transformers, which are BERT-base.

    Attributes:
        rms_norm_eps: added to the variance by LayerNorm; `layer_norm_eps` in config.json.
        type_vocab_size: number of token types.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-12
    type_vocab_size: int = 2
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0

    is_causal: ClassVar[bool] = False
    has_rotary: ClassVar[bool] = False
    classifier_pooling: ClassVar[str] = "cls"

    def validate(self) -> None:
        super().validate()
        for name in ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling"):
            default, value = getattr(DecoderConfig, name), getattr(self, name)
            refuse_unless(value == default, name, value, "no entry: heads divide hidden_size, positions are learned")

    @property
    def first_position(self) -> int:
        """Position of the first token of a text."""
        return 0


class Bert(MaskedLM):
    """BERT with a head for masked tokens."""

    config: BertConfig

    def __init__(self, config: BertConfig) -> None:
        c = config

        def norm() -> LayerNorm:
            return LayerNorm(c.hidden_size, c.rms_norm_eps)

        def block() -> ResidualNormBlock:
            attention = Attention(*heads(c), is_causal=False, qkv_bias=True, output_bias=True)
            return ResidualNormBlock(attention, norm(), MLP(c.hidden_size, c.intermediate_size), norm())

        encoder = AbsolutePositionDecoder(
            Embedding(c.vocab_size, c.hidden_size),
            [block() for _ in range(c.num_hidden_layers)],
            nn.Identity(),
            position_embeddings=Embedding(c.max_position_embeddings, c.hidden_size),
            token_type_embeddings=Embedding(c.type_vocab_size, c.hidden_size),
            input_norm=norm(),
            padding_id=c.pad_token_id if c.first_position else None,
        )
        head = PredictionHead(norm(), c.hidden_size)
        super().__init__(config, encoder, head, LMHead(c.hidden_size, c.vocab_size, bias=True))

    def text_head(self) -> TanhHead:
        return TanhHead(self.config.hidden_size)

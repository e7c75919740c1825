"""XLM-RoBERTa, base and large, and models with its architecture, such as multilingual E5 (Conneau et al. 2020).

    tokens -> norm(embedding + type + position) -> L x [ x = norm(x + attention(x));  x = norm(x + mlp(x)) ]
           -> norm(gelu(dense(x))) -> head

Distinctive: RoBERTa with a vocabulary of 100 languages.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.models.roberta import Roberta, RobertaConfig


@dataclass(frozen=True, kw_only=True)
class XLMRobertaConfig(RobertaConfig):
    """Configuration of XLM-RoBERTa. Defaults: those of transformers."""

    vocab_size: int = 30522


class XLMRoberta(Roberta):
    """XLM-RoBERTa with a head for masked tokens."""

    config: XLMRobertaConfig

"""RoBERTa, base and large (Liu et al. 2019).

    tokens -> norm(embedding + type + position) -> L x [ x = norm(x + attention(x));  x = norm(x + mlp(x)) ]
           -> norm(gelu(dense(x))) -> head

Distinctive: BERT whose positions begin after the padding token's id.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.models.bert import Bert, BertConfig
from ligerzoo.models.config import refuse_unless


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    """Configuration of RoBERTa. Defaults: those of transformers.

    Attributes:
        pad_token_id: the padding token; a text's first token has the next higher position.
        max_position_embeddings: rows of the table of positions, of which texts use those after `pad_token_id`.
    """

    vocab_size: int = 50265
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = 1

    def validate(self) -> None:
        super().validate()
        pad, last = self.pad_token_id, self.max_position_embeddings - 1
        expected = f"an id below {last}, the last position (max_position_embeddings - 1)"
        refuse_unless(pad is not None and 0 <= pad < last, "pad_token_id", pad, expected)

    @property
    def first_position(self) -> int:
        assert self.pad_token_id is not None  # see `validate`
        return self.pad_token_id + 1


class Roberta(Bert):
    """RoBERTa with a head for masked tokens."""

    config: RobertaConfig

"""Pairs of texts as samples: each text has the tokens that an embedding model reads, with its prompt."""

from __future__ import annotations

from ligerzoo.errors import DataError, quote
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.fields import pair_texts
from ligerzoo.train.data.records import Fields
from ligerzoo.train.data.samples import UNTRAINED, PairSample, Sample, Source
from ligerzoo.train.data_options import EncodingOptions


class PairEncoder:
    """Encodes pairs. As in `EmbeddingModel.encode`, special tokens in texts are control tokens."""

    def __init__(self, tokenizer: Tokenizer, options: EncodingOptions) -> None:
        self._tokenizer, self._options = tokenizer, options

    def encode(self, fields: Fields, source: Source) -> list[PairSample]:
        """Returns the sample of a record; nothing with too_long="drop" for a text that is too long.

        Raises:
            DataError: a field is malformed, or a text has no or too many tokens.
        """
        texts, options = pair_texts(fields), self._options
        prompts = options.query_prompt or "", options.document_prompt or ""
        query, positive, *negatives = (
            self._tokens(prompts[index > 0] + text, source)
            for index, text in enumerate([texts.query, texts.positive, *texts.negatives])
        )
        sample = PairSample(query, positive, tuple(negatives))
        longest = max(len(one.input_ids) for one in sample.segments)
        if longest <= options.seq_length:
            return [sample]
        if options.too_long == "drop":
            return []
        what, expected = "a text is too long", f"at most {options.seq_length} (seq_length)"
        raise DataError(
            what, got=f"{longest} tokens", expected=expected, remedy='Pass too_long="truncate" or too_long="drop".'
        )

    def _tokens(self, text: str, source: Source) -> Sample:
        cut = self._options.too_long == "truncate"
        ids: list[int] = self._tokenizer(text, truncation=cut, max_length=self._options.seq_length if cut else None)[
            "input_ids"
        ]
        if not ids:
            raise DataError("a text without tokens", got=quote(text))
        return Sample(ids, [UNTRAINED] * len(ids), source)

"""Texts -> model inputs: encoding, truncation, padding."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ligerzoo.checks import as_list, is_number, is_text
from ligerzoo.entries import is_array
from ligerzoo.errors import TokenizerError, unknown_names
from ligerzoo.text.backend import as_lists
from ligerzoo.text.padding import BatchEncoding, Columns, Padding
from ligerzoo.text.rendered import Rendered, Span
from ligerzoo.text.tokenizer_files import PaddingSide, TokenizerFiles
from ligerzoo.text.truncation import TruncationStrategy, truncation_of
from ligerzoo.text.vocabulary import Vocabulary

_NO_MAX_LENGTH = int(1e30)  # transformers' value for "unknown"


class Encoder(Vocabulary):
    """Encodes texts.

    Args:
        files: see `Tokenizer`.

    Attributes:
        padding_side, truncation_side, model_max_length: see `Tokenizer`.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        super().__init__(files)
        self.padding_side, self.truncation_side = files.padding_side(), files.side("truncation_side", "right")
        length = files.config.get("model_max_length", 0)
        self.model_max_length = int(length) if is_number(length) and 0 < length < _NO_MAX_LENGTH else _NO_MAX_LENGTH

    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        *,
        truncation: TruncationStrategy = False,
        max_length: int | None = None,
        return_tensors: Literal["pt"] | None = None,
    ) -> Any:
        """Encodes a text as token ids.

        Args:
            text: the text. Special tokens written in it become their ids.
            text_pair: a second text, which the post-processor of tokenizer.json joins to the first.
            add_special_tokens: whether to add the special tokens that tokenizer.json puts around a text, such as BOS.
            truncation: see `__call__`.
            max_length: see `__call__`.
            return_tensors: "pt" returns an int64 tensor (1, T), None a list.

        Raises:
            TokenizerError: `text` is not a string, contains half of a surrogate pair, or is too long.
        """
        if text_pair is None and truncation is False and return_tensors is None:
            return self.backend.encode([text], add_special_tokens=add_special_tokens)[0].ids
        options: dict[str, Any] = {"truncation": truncation, "max_length": max_length}
        inputs = self(text, text_pair, add_special_tokens=add_special_tokens, return_tensors=return_tensors, **options)
        return inputs["input_ids"]

    def min_tokens(self, text: str) -> int:
        """Returns a number of tokens that a text has at least, in a hundredth of the time of `encode`.

        0 if the tokenizer has rules that drop characters. The first call takes up to a quarter of a second. A text that
        `encode` would refuse is not refused here.
        """
        return self.backend.min_tokens(text)

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Returns the vocabulary's spelling of the tokens of a text."""
        tokens: list[str] = self.convert_ids_to_tokens(self.encode(text, add_special_tokens=add_special_tokens))
        return tokens

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | Literal["longest", "max_length", "do_not_pad"] | None = None,
        truncation: TruncationStrategy = False,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: PaddingSide | None = None,
        return_tensors: Literal["pt"] | None = None,
        return_attention_mask: bool = True,
        return_token_type_ids: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        **unknown: Any,
    ) -> BatchEncoding:
        """Prepares the model inputs of one text or of several. The options are those of transformers.

        Args:
            text: a text, or a list of B texts.
            text_pair: a second text for each, which the post-processor of tokenizer.json joins to the first.
            add_special_tokens: see `encode`.
            padding: True or "longest" pads to the longest row, "max_length" to `max_length`. None means True with
                `return_tensors`, else False.
            truncation: True or "longest_first" removes tokens from the longer text of a pair until a row has
                `max_length` tokens; "only_first" and "only_second" from one of the texts.
            max_length: number of tokens, special tokens included. None means `model_max_length`.
            pad_to_multiple_of: rounds the length of padded rows up to a multiple of this.
            padding_side: "left" (for generation) or "right". None uses `self.padding_side`.
            return_tensors: "pt" returns int64 tensors, None returns lists.
            return_attention_mask: whether to return `attention_mask`.
            return_token_type_ids: whether to return `token_type_ids`: 0 for the first text, 1 for the second.
            return_special_tokens_mask: whether to return `special_tokens_mask`: 1 for added special tokens.
            return_offsets_mapping: whether to return `offset_mapping`, the (first, last + 1) characters of each token.
            return_length: whether to return `length`, the tokens of each row before padding.
            unknown: refused by name.

        Returns:
            `input_ids` and `attention_mask` (1 for a token, 0 for padding), each (B, T). For a single text: (T,) as
            lists and (1, T) as tensors.

        Raises:
            TokenizerError: a text cannot be encoded, an argument has an unsupported value, or rows need padding and
                there is neither a pad token nor an EOS token.
        """
        if unknown:
            parameters = inspect.signature(Encoder.__call__).parameters
            refuse_unknown(unknown, [name for name in parameters if name not in ("self", "unknown")], "the tokenizer")
        is_single, texts = is_text(text), as_list(text, str)
        if not isinstance(text_pair, str | Sequence | None):
            expected = "a text, a list or None"
            raise TokenizerError("not a text", where="text_pair", got=repr(text_pair), expected=expected)
        pairs = None if text_pair is None else as_list(text_pair, str)
        limit = self._limit(max_length)
        encodings = self.backend.encode(
            texts,
            pairs,
            add_special_tokens=add_special_tokens,
            truncation=truncation_of(truncation, limit, self.truncation_side),
            offsets=return_offsets_mapping,
        )
        columns: Columns = {"input_ids": [encoding.ids for encoding in encodings]}
        lengths = [len(row) for row in columns["input_ids"]]
        if return_attention_mask:
            columns["attention_mask"] = [[1] * length for length in lengths]
        if return_token_type_ids:
            columns["token_type_ids"] = [encoding.type_ids for encoding in encodings]
        if return_special_tokens_mask:
            columns["special_tokens_mask"] = [encoding.special_tokens_mask for encoding in encodings]
        if return_offsets_mapping:
            columns["offset_mapping"] = [encoding.offsets for encoding in encodings]
        per_row = {"length": lengths} if return_length else {}
        how = Padding(padding, limit, pad_to_multiple_of, padding_side or self.padding_side, return_tensors)
        return how.batch(columns, self._padding_id, is_single=is_single, per_row=per_row)

    def pad(
        self,
        encoded_inputs: Mapping[str, object] | Sequence[Mapping[str, object]],
        padding: bool | Literal["longest", "max_length", "do_not_pad"] = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: PaddingSide | None = None,
        return_attention_mask: bool = True,
        return_tensors: Literal["pt"] | None = None,
    ) -> BatchEncoding:
        """Pads encoded rows to one length, such as in a data collator.

        Args:
            encoded_inputs: outputs of `__call__` for single texts, or one output of `__call__`. `input_ids`,
                `attention_mask`, `token_type_ids`, `special_tokens_mask` and `offset_mapping` are padded; other inputs,
                such as `labels`, are not.
            padding: see `__call__`.
            max_length: see `__call__`.
            pad_to_multiple_of: see `__call__`.
            padding_side: see `__call__`.
            return_attention_mask: whether to add an `attention_mask` to inputs without one.
            return_tensors: see `__call__`.

        Raises:
            TokenizerError: `input_ids` are missing, rows have different inputs, or as `__call__`.
        """
        if isinstance(encoded_inputs, Mapping):
            columns = {name: as_lists(value) for name, value in encoded_inputs.items()}
        else:
            names = {name for row in encoded_inputs for name in row}
            if any(names - row.keys() for row in encoded_inputs):
                raise TokenizerError("rows with different inputs", where="encoded_inputs", got=sorted(names))
            columns = {name: [as_lists(row[name]) for row in encoded_inputs] for name in encoded_inputs[0]}
        if "input_ids" not in columns:
            raise TokenizerError("no input_ids", where="encoded_inputs", got=sorted(columns))
        is_single = not all(map(is_array, columns["input_ids"]))
        if is_single:
            columns = {name: [value] for name, value in columns.items()}
        if return_attention_mask and "attention_mask" not in columns:
            columns["attention_mask"] = [[1] * len(row) for row in columns["input_ids"]]
        side = padding_side or self.padding_side
        how = Padding(padding, self._limit(max_length), pad_to_multiple_of, side, return_tensors)
        return how.batch(columns, self._padding_id, is_single=is_single, per_row={})

    def encode_rendered(self, rendered: Rendered, add_special_tokens: bool = False) -> tuple[list[int], list[Span]]:
        """Returns the ids of a rendered conversation, and the (first, last + 1) characters of each token.

        Args:
            rendered: the conversation.
            add_special_tokens: see `encode`.
        """
        (encoding,) = self.backend.encode([rendered.text], add_special_tokens=add_special_tokens, offsets=True)
        if rendered.literal is None:
            return encoding.ids, encoding.offsets
        return self.special_text.spell(
            rendered.text, encoding.ids, encoding.offsets, rendered.literal, encoding.special_tokens_mask
        )

    def _limit(self, max_length: int | None) -> int | None:
        """Returns the length to truncate and pad to: the default is that of the model, if it is known."""
        own = None if self.model_max_length >= _NO_MAX_LENGTH else self.model_max_length
        return own if max_length is None else max_length

    def _padding_id(self) -> int:
        for token_id in (self.pad_token_id, self.eos_token_id):
            if token_id is not None:
                return token_id
        what = "texts of different lengths need padding, but there is neither a pad_token nor an eos_token"
        raise TokenizerError(what, where=self.backend.where, remedy="Encode the texts one by one.")


def refuse_unknown(options: Mapping[str, object], accepted: Sequence[str], what: str) -> None:
    """Raises TokenizerError for the first option that is not accepted."""
    for name, nearest in unknown_names(options, accepted):
        expected = None if nearest else ", ".join(accepted)
        raise TokenizerError(f"not an option of {what}", where=name, expected=expected, remedy=nearest)

"""Tokenizers of checkpoints that have a tokenizer.json.

A `Tokenizer` is a `ChatRenderer`, an `Encoder` and a `Vocabulary` that loads, saves and decodes; each part is a file:

    tokenizer_files       reads the files, and writes those with changed tokens
    tokenizer_limits      refuses a hostile tokenizer.json
    stages                the stages of its rules
    backend               the tokenizers library, behind the limits
    vocabulary            tokens and ids, special and added tokens
    encoder               texts -> model inputs
    truncation, padding   rows of ids -> batches
    messages              conversations in the form of chat templates
    chat, chat_template   conversations -> texts -> model inputs
    special_text          special tokens that are written in messages
    token_bound           texts -> a lower bound on the number of ids
    incremental_decoding  ids that arrive one at a time -> text

The tokenizers library encodes and decodes. Only the post-processor in tokenizer.json adds a beginning-of-sequence
token.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, Unpack, get_args

import torch

from ligerzoo.checks import AT_LEAST_1, one_of
from ligerzoo.errors import ConfigError
from ligerzoo.files.atomic import replace_files
from ligerzoo.files.layout import TOKENIZER_FILES, TOKENIZER_INPUTS
from ligerzoo.files.transformers_options import TextOptions, text_options
from ligerzoo.files.untrusted import read_tokenizer_files, reading_directory
from ligerzoo.text.chat import ChatRenderer
from ligerzoo.text.incremental_decoding import IncrementalDecoder, token_bytes
from ligerzoo.text.tokenizer_files import PaddingSide, TokenizerFiles


class Tokenizer(ChatRenderer):
    """A checkpoint's tokenizer.

    Args:
        files: contents of the files in `TOKENIZER_INPUTS`, by name.
        where: the directory or hub id of the files, for error messages.

    Attributes:
        special_tokens: special tokens by the names that chat templates use, such as
            `{"bos_token": "<s>", "eos_token": "</s>"}`.
        additional_special_tokens: special tokens without a name.
        chat_templates: chat templates by name. The only template of a checkpoint is called "default".
        padding_side: the default padding side of `__call__`, "left" or "right".
        truncation_side: the side from which `truncation=True` removes tokens, "left" or "right".
        model_max_length: the default `max_length`; 10**30 if tokenizer_config.json has none.

    Raises:
        TokenizerError: tokenizer.json is missing, or a file is malformed.
    """

    def __init__(self, files: Mapping[str, bytes], where: str) -> None:
        super().__init__(TokenizerFiles(files, where))

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        padding_side: PaddingSide | None = None,
        truncation_side: PaddingSide | None = None,
        model_max_length: int | None = None,
        **options: Unpack[TextOptions],
    ) -> Self:
        """Loads a checkpoint's tokenizer from a directory or from the hub.

        Args:
            name_or_path: a directory, or a hub id such as "org/name".
            padding_side: value of the attribute instead of the files'.
            truncation_side: value of the attribute instead of the files'.
            model_max_length: value of the attribute instead of the files'.
            options: `revision`, `token`, `cache_dir` and `local_files_only`, see `HubOptions`; and options of
                transformers that change nothing here, such as `use_fast`.

        Raises:
            TokenizerError: tokenizer.json is missing, or a file is malformed.
            CheckpointError: the directory was replaced during the read.
            ConfigError: an option is unknown, or has an invalid value.
        """
        from ligerzoo.files.locate import locate_files

        given = {"padding_side": padding_side, "truncation_side": truncation_side, "model_max_length": model_max_length}
        hub_options = text_options(options, "Tokenizer.from_pretrained", *given)
        attributes = {name: _attribute(name, value) for name, value in given.items() if value is not None}
        directory = locate_files(name_or_path, TOKENIZER_INPUTS, **hub_options)
        with reading_directory(directory):
            files = read_tokenizer_files(directory)
        tokenizer = cls(files, str(name_or_path))
        for name, value in attributes.items():
            setattr(tokenizer, name, value)
        return tokenizer

    def lowercasing(self) -> Self:
        """Returns the tokenizer of the same files that converts texts to lower case first."""
        return type(self)(self.files.with_lowercase().contents, self.files.where)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the tokenizer's files, byte for byte as they were loaded unless tokens were added or renamed.

        Replaces each file atomically and removes the files of a tokenizer that was saved there before.
        """
        replace_files(Path(directory), self.files.contents, TOKENIZER_FILES)

    def decode(self, ids: Sequence[int] | torch.Tensor, skip_special_tokens: bool = False) -> str:
        """Decodes token ids as text.

        Args:
            ids: a list or a 1-D integer tensor. Ids without a token are skipped.
            skip_special_tokens: whether to skip `all_special_ids`.

        Raises:
            TokenizerError: `ids` is not a sequence of non-negative integers, or the text is too long.
        """
        return self.backend.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor, skip_special_tokens: bool = False
    ) -> list[str]:
        """Decodes several rows of token ids, such as the output of `generate`; see `decode`.

        Args:
            sequences: rows of ids, or a 2-D integer tensor.
            skip_special_tokens: whether to skip `all_special_ids`.
        """
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def token_bytes(self) -> Callable[[int], bytes]:
        """Returns a function of a token id: the bytes of UTF-8 that it adds to a text that has begun.

        They may be a part of a character. Those of a special token are its name. An id without a token has none.
        """
        bytes_of, special = token_bytes(self.backend.library.decoder), frozenset(self.all_special_ids)

        def of(token_id: int) -> bytes:
            token = self.id_to_token(token_id)
            if token is None:
                return b""
            return token.encode() if token_id in special else bytes_of(token)

        return of

    def bytes_per_token(self) -> list[int]:
        """Returns how many bytes of UTF-8 text each token adds, by id; 0 for special tokens and ids without a token.

        The bytes of a text's tokens are those of the text. Only a leading space that the decoder strips, as those of
        SentencePiece do, counts too.
        """
        bytes_of, special = self.token_bytes(), frozenset(self.all_special_ids)
        return [0 if token_id in special else len(bytes_of(token_id)) for token_id in range(len(self))]

    def stream(self, skip_special_tokens: bool = False, *, continues_text: bool = False) -> IncrementalDecoder:
        """Returns a decoder for ids that arrive one at a time; see `IncrementalDecoder`."""
        skipped_ids = self.all_special_ids if skip_special_tokens else ()
        decoder = self.backend.library.decoder
        return IncrementalDecoder(self.id_to_token, decoder, skipped_ids, continues_text=continues_text)


def _attribute(name: str, value: object) -> object:
    """Returns the value of an attribute that a user gives. Raises ConfigError if it is invalid."""
    values = AT_LEAST_1 if name == "model_max_length" else one_of(get_args(PaddingSide))
    if not values.accepts(value):
        where, got = f"Tokenizer.from_pretrained, argument {name}", repr(value)[:200]
        raise ConfigError("invalid value", where=where, got=got, expected=values.expected)
    return value

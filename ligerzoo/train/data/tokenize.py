"""Tokenizes text files once, into a token file that training reads without a tokenizer's work."""

from __future__ import annotations

import os
import sys
from typing import Any

from tqdm import tqdm

from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.open import open_data
from ligerzoo.train.data.samples import Sample
from ligerzoo.train.data.token_files import TokenWriter


def write_tokens(
    data: Any, output: str | os.PathLike[str], tokenizer: Tokenizer, *, workers: int = 1, progress: bool | None = None,
    **options: Any,
) -> int:  # fmt: skip
    """Writes the tokens of all documents of kind "text" to a token file, each with the end-of-sequence token.

    Args:
        data: see `open_data`.
        output: the file, `NAME.bin`. `NAME.bin.json` describes it.
        tokenizer: see `open_data`.
        workers: see `open_data`.
        progress: whether to show a progress bar on stderr; None if stderr is a terminal.
        options: `special_tokens`, `text_unit` and `eos_token_id` of `open_data`.

    Returns:
        The number of tokens.

    Raises:
        DataError: as `open_data`. No file is written.
    """
    stream = open_data(data, "text", tokenizer, seq_length=2**20, shuffle=False, epochs=1, workers=workers, **options)
    hidden = not (sys.stderr.isatty() if progress is None else progress)
    with (
        TokenWriter(output, len(tokenizer)) as writer,
        tqdm(desc="tokenizing", unit=" tokens", unit_scale=True, disable=hidden) as bar,
    ):
        for sample in stream:
            assert isinstance(sample, Sample)
            writer.write(sample.input_ids)
            bar.update(len(sample.input_ids))
    return writer.tokens

"""Prints samples with their trained tokens in colour."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.samples import (
    UNTRAINED,
    AnySample,
    ImageTokens,
    LabelledSample,
    PreferenceSample,
    PromptSample,
    Sample,
)

_TRAINED, _UNTRAINED, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def format_sample(
    sample: AnySample, tokenizer: Tokenizer, *, color: bool | None = None, max_tokens: int | None = None
) -> str:
    """Returns the text of a sample with its trained tokens marked.

    Args:
        sample: the sample.
        tokenizer: decodes the tokens.
        color: whether trained tokens are green and the others dim; otherwise trained text is between [[ and ]]. None
            uses colours if stdout is a terminal and the environment variable NO_COLOR is empty.
        max_tokens: shows the first tokens only. None for all.
    """
    if color is None:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    match sample:
        case Sample():
            trained = [label != UNTRAINED for label in sample.labels]
            count = f"{len(sample.input_ids)} tokens, {sample.trained_tokens} trained"
            text = _text(sample.input_ids, trained, tokenizer, color, max_tokens, sample.images)
            return f"{sample.source}: {count}\n{text}"
        case PreferenceSample():
            parts = {"chosen": sample.chosen, "rejected": sample.rejected}
            options: dict[str, Any] = {"color": color, "max_tokens": max_tokens}
            return "\n".join(f"{name}: {format_sample(one, tokenizer, **options)}" for name, one in parts.items())
        case LabelledSample():
            name = "desirable" if sample.is_desirable else "undesirable"
            return f"{name}: {format_sample(sample.sample, tokenizer, color=color, max_tokens=max_tokens)}"
        case PromptSample():
            ids = sample.input_ids
            text = _text(ids, [False] * len(ids), tokenizer, color, max_tokens)
            return f"{sample.source}: {len(ids)} tokens\n{text}"


def _text(
    ids: list[int], trained: list[bool], tokenizer: Tokenizer, color: bool, max_tokens: int | None,
    images: Sequence[ImageTokens] = (),
) -> str:  # fmt: skip
    decoder = tokenizer.stream()
    tokens: list[tuple[int | ImageTokens, bool]] = list(zip(ids, trained, strict=True))
    for image in reversed(images):  # an image counts as one token
        tokens[image.first : image.last] = [(image, False)]
    shown, parts = tokens[:max_tokens], []
    for is_trained, group in itertools.groupby(shown, key=lambda token: token[1]):
        text = "".join(
            f"[image {one.width} x {one.height}, {one.last - one.first} tokens]"
            if isinstance(one, ImageTokens) else _printable(decoder.push(one))
            for one, _ in group
        )  # fmt: skip
        if color:
            parts.append(f"{_TRAINED if is_trained else _UNTRAINED}{text}{_RESET}")
        else:
            parts.append(f"[[{text}]]" if is_trained else text)
    more = f" ... and {len(tokens) - len(shown)} more tokens" if len(tokens) > len(shown) else ""
    return "".join(parts) + _printable(decoder.flush()) + more


def _printable(text: str) -> str:
    """Escapes control characters: data must not control the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)

"""Encodes texts as embeddings: prompts, tokens, batches without padding, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ligerzoo.checks import AT_LEAST_1, FLAG, Values, check, integer, is_text, one_of, or_none
from ligerzoo.device import to_device, upload
from ligerzoo.errors import LigerzooError
from ligerzoo.files.layout import TOKENIZER_FILES
from ligerzoo.models.embedding import EmbeddingModel
from ligerzoo.tensor_checks import explains_options
from ligerzoo.text.tokenizer import Tokenizer

_BATCHES = 16
"""Batches whose texts are tokenized together, in parallel, and sorted by their numbers of tokens."""

_STANDARD_PROMPTS = {"query": "", "document": ""}
"""Prompts that every model has, empty unless its files say otherwise, as in sentence-transformers."""

_STRING = Values("a text", is_text)


def read_tokenizer(model: EmbeddingModel) -> Tokenizer:
    """Returns the tokenizer in the files of a model.

    Raises:
        LigerzooError: there is no tokenizer.json.
        TokenizerError: a file is malformed.
    """
    if "tokenizer.json" not in model.files:
        remedy = "Assign one: model.tokenizer = Tokenizer.from_pretrained(...)."
        raise LigerzooError("the model has no tokenizer", where=type(model).__name__, remedy=remedy)
    tokenizer = Tokenizer(model.files, type(model).__name__)
    return tokenizer.lowercasing() if model.settings.lowercase else tokenizer


def set_tokenizer(model: EmbeddingModel, tokenizer: Tokenizer) -> Tokenizer:
    """Puts the files of a tokenizer in place of those of a model, and returns the tokenizer for `encode_texts`."""
    others = {
        name: content
        for name, content in model.files.items()
        if not any(fnmatchcase(name, pattern) for pattern in TOKENIZER_FILES)
    }
    model.files = {**others, **tokenizer.files.contents}
    return tokenizer.lowercasing() if model.settings.lowercase else tokenizer


@explains_options
def encode_texts(
    model: EmbeddingModel,
    texts: str | Iterable[str],
    *,
    batch_size: int = 32,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate_dim: int | None = None,
    normalize: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns the embeddings of texts, in their order. A bar shows the progress of long work in a terminal.

    Sorts texts by length, and packs each batch into one row: nothing is computed for padding. Tokens beyond
    `model.max_length` are left out.

    Args:
        model: the model.
        texts: a text, or n texts.
        batch_size: texts that are computed together.
        prompt_name: name of a prompt in `model.settings.prompts` that is put before each text. "query" and "document"
            always exist. Default: the one that `default_prompt_name` names, if any.
        prompt: a text that is put before each text, instead of a named one.
        truncate_dim: number of features to return, the first ones, for models that were trained for it (Kusupati et
            al. 2022, "Matryoshka representation learning"). Default: `model.settings.dimensions`, or all.
        normalize: scale the embeddings to length 1, after truncation.
        device: device of the result. Default: the model's.

    Returns:
        (n, D), or (D,) for a single text, in the dtype of the weights.

    Raises:
        LigerzooError: there is no such prompt, an option is invalid, or a text has no tokens.
        TokenizerError: a text cannot be encoded.
    """
    is_single = is_text(texts)
    given = [texts] if is_text(texts) else list(texts)
    for text in given:
        check("encode_texts", _STRING, texts=text)
    before, tokenizer = encoding_prompt(model, prompt, prompt_name), model.tokenizer
    max_length = model.max_length

    def tokens(indices: Sequence[int]) -> list[list[int]]:
        inputs = tokenizer([before + given[index] for index in indices], truncation=True, max_length=max_length)
        rows: list[list[int]] = inputs["input_ids"]
        return rows

    embeddings = _encode(
        model,
        [len(text) for text in given],
        tokens,
        batch_size=batch_size,
        prompt_tokens=unpooled_tokens(model, before),
        truncate_dim=truncate_dim,
        normalize=normalize,
        device=device,
    )
    return embeddings[0] if is_single else embeddings


@explains_options
def encode_token_ids(
    model: EmbeddingModel,
    rows: Iterable[Sequence[int]],
    *,
    batch_size: int = 32,
    truncate_dim: int | None = None,
    normalize: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns the embeddings of texts that are given as token ids, special tokens included, (n, D).

    Args:
        model: the model.
        rows: ids of n texts.
        batch_size: see `encode_texts`, as for the other options.
        truncate_dim: number of features.
        normalize: scale the embeddings to length 1.
        device: device of the result.

    Raises:
        LigerzooError: an option is invalid, or a text has no tokens, or too many.
    """
    given = [list(row) for row in rows]
    if (longest := max(map(len, given), default=0)) > model.max_length:
        raise LigerzooError("too many tokens", where="rows", got=longest, expected=f"at most {model.max_length}")
    return _encode(
        model,
        [len(row) for row in given],
        lambda indices: [given[index] for index in indices],
        batch_size=batch_size,
        prompt_tokens=0,
        truncate_dim=truncate_dim,
        normalize=normalize,
        device=device,
    )


def encoding_prompt(model: EmbeddingModel, prompt: str | None = None, name: str | None = None) -> str:
    """Returns the text that is put before each text: a given prompt, or the one of this name, or the default one.

    Raises:
        LigerzooError: there is no prompt of this name, or both are given.
    """
    check("encode_texts", or_none(_STRING), prompt=prompt)
    if prompt is not None:
        if name is not None:
            what = "a prompt is given as well"
            raise LigerzooError(what, where="prompt_name", got=repr(name), expected="one of both")
        return prompt
    prompts = prompts_of(model)
    name = model.settings.default_prompt_name if name is None else name
    check("encode_texts", or_none(one_of(tuple(prompts))), prompt_name=name)
    return "" if name is None else prompts[name]


def prompts_of(model: EmbeddingModel) -> dict[str, str]:
    """Returns the prompts of a model by their names."""
    return {**_STANDARD_PROMPTS, **model.settings.prompts}


def unpooled_tokens(model: EmbeddingModel, prompt: str) -> int:
    """Returns the number of tokens of a prompt that pooling leaves out, as sentence-transformers counts them."""
    if not prompt or model.stages[0].include_prompt:
        return 0
    ids = model.tokenizer.encode(prompt)
    return len(ids) - bool(ids and ids[-1] in model.tokenizer.all_special_ids)


def _encode(
    model: EmbeddingModel,
    lengths: Sequence[int],
    tokens: Callable[[Sequence[int]], list[list[int]]],
    *,
    batch_size: int,
    prompt_tokens: int,
    truncate_dim: int | None,
    normalize: bool,
    device: torch.device | str | None,
) -> Tensor:
    """Returns the embeddings of texts of about these lengths, whose token ids `tokens` returns by their indices."""
    check("encode_texts", AT_LEAST_1, batch_size=batch_size)
    check("encode_texts", or_none(integer(1, model.embedding_size)), truncate_dim=truncate_dim)
    check("encode_texts", FLAG, normalize=normalize)
    size = truncate_dim or model.settings.dimensions or model.embedding_size
    size = min(size, model.embedding_size)
    result = torch.empty(len(lengths), size, dtype=model.dtype, device=model.device if device is None else device)
    order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    with tqdm(total=len(order), desc="Encoding", unit="text", disable=None, leave=False, delay=1) as progress:
        for start in range(0, len(order), batch_size * _BATCHES):
            chunk = order[start : start + batch_size * _BATCHES]
            rows = sorted(zip(chunk, tokens(chunk), strict=True), key=lambda row: len(row[1]), reverse=True)
            for first in range(0, len(rows), batch_size):
                indices, batch = zip(*rows[first : first + batch_size], strict=True)
                embeddings = embed_rows(model, batch, prompt_tokens)[:, :size]
                if normalize:
                    embeddings = F.normalize(embeddings, dim=-1)
                result[upload(indices, result.device)] = embeddings.to(result.device)
                progress.update(len(batch))
    return result


@torch.inference_mode()
def embed_rows(model: EmbeddingModel, rows: Sequence[Sequence[int]], prompt_tokens: int = 0) -> Tensor:
    """Returns the embeddings of texts, (n, D), which are computed in one packed row.

    Args:
        model: the model.
        rows: token ids of n texts.
        prompt_tokens: tokens of the prompt with which each text begins.

    Raises:
        LigerzooError: a text has no tokens, or a token has no embedding.
    """
    lengths = [len(row) for row in rows]
    if not all(lengths):
        remedy = "Leave out empty texts, or use a tokenizer that adds special tokens."
        raise LigerzooError("a text without tokens", where="texts", remedy=remedy)
    ids = torch.tensor([token_id for row in rows for token_id in row])
    least, most = ids.min().item(), ids.max().item()
    if least < 0 or most >= model.input_vocab_size:
        got, expected = least if least < 0 else most, f"0 to {model.input_vocab_size - 1}"
        remedy = "Use the tokenizer of this model."
        raise LigerzooError("no such token", where="rows", got=got, expected=expected, remedy=remedy)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    result: Tensor = model(to_device(ids[None], model.device), cu_seqlens=bounds, prompt_tokens=prompt_tokens)
    return result

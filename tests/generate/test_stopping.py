"""End-of-sequence tokens and stop strings finish rows."""

import random
from itertools import chain
from typing import Any

import pytest
import tokenizers.decoders
import torch

from ligerzoo.generate import StopStrings, generate
from tests.generate.models import PROMPT, VOCAB, Letters, Scripted, prompts, tiny_llama


def test_rows_finish_independently_and_the_last_stops_generation() -> None:
    model = Scripted([[7, 8, 50, 9, 9, 9], [8, 51, 8, 50, 9, 9]])
    out = generate(model, PROMPT, max_new_tokens=6, eos_token_id=[50, 60], pad_token_id=0)
    assert out.tolist() == [[1, 2, 7, 8, 50, 0], [3, 4, 8, 51, 8, 50]]
    assert model.calls == 4


def test_a_finished_row_reads_no_padding(device: str) -> None:
    model = tiny_llama(device)
    ids = prompts(device, 2, 12)
    free = model.generate(ids, max_new_tokens=8)
    eos = int(free[0, 13])
    assert eos not in free[1, 12:]
    out = model.generate(ids, max_new_tokens=8, eos_token_id=eos, pad_token_id=VOCAB + 1)  # has no embedding
    assert out[0, 12:].tolist() == free[0, 12:14].tolist() + [VOCAB + 1] * 6
    assert out[1].tolist() == free[1].tolist()


@pytest.mark.parametrize(
    "config, generation_config, options, end, padding",
    [
        ({"eos_token_id": 50}, {}, {}, 2, 50),
        ({"eos_token_id": [9, 50], "pad_token_id": -1}, {}, {}, 2, 9),
        ({"eos_token_id": 50, "pad_token_id": 3}, {"eos_token_id": [51]}, {}, 3, 3),
        ({"eos_token_id": 50}, {"eos_token_id": 51, "pad_token_id": 4}, {}, 3, 4),
        ({"eos_token_id": 50}, {"eos_token_id": 51, "pad_token_id": 4}, {"eos_token_id": 8, "pad_token_id": 5}, 1, 5),
        ({"eos_token_id": 50}, {"eos_token_id": 51}, {"eos_token_id": []}, 4, None),
        ({}, {}, {}, 4, None),
    ],
)
def test_sources_of_token_ids(
    config: dict[str, Any], generation_config: dict[str, Any], options: dict[str, Any], end: int, padding: int | None
) -> None:
    model = Scripted([[7, 8, 50, 51, 7], [7, 7, 7, 7, 7]], **config)
    model.generation_config = generation_config
    row = generate(model, PROMPT, max_new_tokens=5, **options)[0, 2:].tolist()
    assert row == [7, 8, 50, 51, 7][: end + 1] + [padding] * (4 - end)


def test_stop_strings_finish_a_row_within_and_across_tokens() -> None:
    # The texts are "abaSTOPcccccc..." and "xSTOb\nSTaOPxSTOP!...". The text of the prompt does not count.
    model = Scripted([[3, 0, 4, 5, *[2] * 10], [6, 1, 8, 4, 0, 5, 0, 0, 0, 0, 0, 0, 6, 7]])
    prompt = torch.tensor([[4, 5], [5, 4]])
    options: dict[str, Any] = {"tokenizer": Letters(), "max_new_tokens": 14, "pad_token_id": 9}
    out = generate(model, prompt, stop_strings="STOP", **options)
    assert out[:, 2:].tolist() == [[3, 0, 4, 5, *[9] * 10], model.script[1].tolist()]

    model.calls = 0
    out = generate(model, prompt, stop_strings=["b\nS", "TOPc"], **options)
    assert out[:, 2:].tolist() == [[3, 0, 4, 5, 2], [6, 1, 8, 4, 9]]
    assert model.calls == 5


SENTENCEPIECE = tokenizers.decoders.Sequence(
    [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
)


class SentencePieces:
    """Byte tokens 0 to 255 and four pieces, decoded like Llama 2's tokens."""

    PIECES = (*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁to", "to", "p")

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return str(SENTENCEPIECE.decode([self.PIECES[i] for i in ids]))


class Utf8:
    """Bytes as tokens, decoded like byte-level tokens: invalid UTF-8 is replaced."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


CHARACTERS = [list(character.encode()) for character in "\nto é你😀"]


@pytest.mark.parametrize(
    "tokenizer, pieces", [(Utf8(), CHARACTERS), (SentencePieces(), [*CHARACTERS, [256], [257], [258], [259]])]
)
@pytest.mark.parametrize("strings", [["\n"], [" to"], ["é\n"], ["你"], ["oé "], ["t t", "😀😀"], ["\n\n "]])
def test_the_last_tokens_suffice_to_find_stop_strings(
    strings: list[str], tokenizer: Any, pieces: list[list[int]]
) -> None:
    stops, chance = StopStrings(strings, tokenizer), random.Random(0)
    for _ in range(200):
        stop = list(chance.choice(strings).encode())
        ids = list(chain(*chance.choices(pieces, k=chance.randrange(1, 8)), stop, *chance.choices(pieces, k=2)))
        texts = [tokenizer.decode(ids[: end + 1], skip_special_tokens=False) for end in range(len(ids))]
        first = next(end for end, text in enumerate(texts) if any(string in text for string in strings))
        found = [stops.found_in(ids[: end + 1][-stops.window :]) for end in range(first + 1)]
        assert found == [False] * first + [True]

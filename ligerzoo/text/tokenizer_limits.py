"""What a tokenizer.json may hold. The tokenizers library bounds nothing: where memory runs out it aborts the process.

The rules of a tokenizer.json rewrite a text in stages, and each stage may multiply its length: ten rules that replace a
letter by a hundred make 100**10 of it. So the product of all factors is bounded before a text is rewritten. Stages
that only normalize Unicode count as 1: they grow a text by a constant, repeated or not.
"""

import base64
import binascii
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import tokenizers

from ligerzoo.errors import TokenizerError

MAX_GROWTH = 128  # XLM-RoBERTa's, among the largest, is 72: its table of characters, a rule for spaces, Metaspace
MAX_CHARACTERS = 2**27  # of one text after all rules
MAX_STAGES = 64
MAX_TOKEN = 2**11  # characters; the longest in use are runs of some hundred spaces
MAX_ADDED = 2**22  # characters of all added tokens; Gemma 3's 6,400 have 2**16
MAX_SPECIAL_IDS = 2**10  # that the post-processor adds to a text
MAX_WORD = 2**10  # characters of a word that WordPiece looks up: the time grows with the square

_SEQUENCES = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


@dataclass(frozen=True)
class Limits:
    """How much longer the rules of a tokenizer.json may make a text.

    Attributes:
        encoding: the factor from characters to characters, or token ids, of the rewritten text.
        decoding: the factor from the characters of all tokens to those of the decoded text.
        where: the file, for errors.
    """

    encoding: float
    decoding: float
    where: str

    @classmethod
    def of(cls, content: Mapping[str, Any], where: str) -> Self:
        """Checks the content of a tokenizer.json.

        Raises:
            TokenizerError: a limit is exceeded.
            Exception: of the tokenizers library, if the content is malformed.
        """
        rules = _rules(content)
        growth: dict[str, float] = {}
        for section, stages in rules.items():
            _check(len(stages), MAX_STAGES, "stages", f"{where}: {section}")
            growth[section] = math.prod(_growth(section, stage) for stage in stages)
        _check(sum(map(_special_ids, rules["post_processor"])), MAX_SPECIAL_IDS, "ids", f"{where}: post_processor")
        encoding = growth["normalizer"] * growth["pre_tokenizer"] * growth["post_processor"]
        _check(encoding, MAX_GROWTH, "times the text", f"{where}: normalizer, pre_tokenizer and post_processor")
        _check(growth["decoder"], MAX_GROWTH, "times the text", f"{where}: decoder")
        _check_model(content["model"], f"{where}: model")
        limits = cls(encoding, growth["decoder"], where)
        limits.check_added([token["content"] for token in content.get("added_tokens") or []])
        return limits

    def check_added(self, tokens: Iterable[str]) -> None:
        """Refuses added tokens that are too long together: the library rewrites them as it does texts."""
        lengths = [len(token) for token in tokens]
        _check(max(lengths, default=0), MAX_TOKEN, "characters in a token", f"{self.where}: added_tokens")
        _check(sum(lengths) * self.encoding, MAX_ADDED, "characters in all", f"{self.where}: added_tokens")

    def check_text(self, text: object) -> None:
        """Refuses a text to encode that could become too long."""
        if isinstance(text, str) and len(text) * self.encoding > MAX_CHARACTERS:
            raise TokenizerError(
                f"the tokenizer's rules may make a text {self.encoding:g} times as long",
                where=self.where,
                got=f"{len(text)} characters",
                expected=f"at most {math.floor(MAX_CHARACTERS / self.encoding)}",
                remedy="Encode the text in parts.",
            )

    def check_tokens(self, tokens: Iterable[str | None], number: int) -> None:
        """Refuses `number` tokens to decode that could become too long."""
        if number * MAX_TOKEN * self.decoding <= MAX_CHARACTERS:
            return
        length = sum(len(token) for token in tokens if token is not None)
        if length * self.decoding > MAX_CHARACTERS:
            raise TokenizerError(
                f"the tokens have {length} characters",
                where=self.where,
                expected=f"at most {math.floor(MAX_CHARACTERS / self.decoding)} for this decoder",
                remedy="Decode the ids in parts.",
            )


def _rules(content: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The stages of each section, in the one spelling that the library itself has for the several it reads."""
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    sections = {name: content.get(name) for name in _SEQUENCES}
    source = json.dumps({"version": content.get("version", "1.0"), "added_tokens": [], "model": model, **sections})
    spelled = json.loads(tokenizers.Tokenizer.from_str(source).to_str())
    return {name: list(_stages(spelled[name], key)) for name, key in _SEQUENCES.items()}


def _stages(stage: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    if stage is None:
        return
    if stage["type"] != "Sequence":
        yield stage
        return
    for inner in stage[key]:
        yield from _stages(inner, key)


def _growth(section: str, stage: Mapping[str, Any]) -> float:
    """How many characters, or ids, a stage makes of one at most."""
    match section, stage:
        case _, {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1, len(new) / len(old))
        case _, {"type": "Replace", "content": str(new)} | {"type": "Prepend", "prepend": str(new)}:
            return 1 + len(new)  # a regular expression may match the empty text before each character
        case _, {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            return _longest_in_table(encoded)
        case _, {"type": "BertNormalizer"}:
            return 3  # spaces around each Chinese character
        case "normalizer" | "pre_tokenizer", {"type": "ByteLevel" | "Metaspace"}:
            return 2
        case "decoder", {"type": "BPEDecoder", "suffix": ""}:
            return 2
        case _, {"type": "TemplateProcessing", "single": list(pieces)}:
            return max(1, sum("Sequence" in piece for piece in pieces))
    return 1


def _special_ids(stage: Mapping[str, Any]) -> int:
    match stage:
        case {"type": "TemplateProcessing", "single": list(single), "special_tokens": dict(tokens)}:
            names = [piece["SpecialToken"]["id"] for piece in single if "SpecialToken" in piece]
            return sum(len(tokens[name]["ids"]) for name in names)
    return 2  # of RobertaProcessing and BertProcessing; others add none


def _longest_in_table(encoded: str) -> int:
    """The longest text in a table of sentencepiece's: a trie, whose size comes first, and texts that end with a 0."""
    try:
        table = base64.b64decode(encoded)
    except binascii.Error:
        return MAX_GROWTH + 1
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))


def _check_model(model: Mapping[str, Any], where: str) -> None:
    vocabulary = model.get("vocab") or []
    if isinstance(vocabulary, list):  # of Unigram: tokens and their scores
        vocabulary = [entry[0] for entry in vocabulary]
    _check(max(map(len, vocabulary), default=0), MAX_TOKEN, "characters in a token", f"{where}.vocab")
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        _check(len(model.get(name) or ""), MAX_TOKEN, "characters", f"{where}.{name}")
    name = "max_input_chars_per_word"
    _check(model.get(name) or 0, MAX_WORD, "characters", f"{where}.{name}")


def _check(got: float, most: int, unit: str, where: str) -> None:
    if got > most:
        raise TokenizerError("asks for too much", where=where, got=f"{got:g} {unit}", expected=f"at most {most}")

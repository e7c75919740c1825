"""Limits on tokenizer.json. The tokenizers library has none: it aborts the process when memory runs out.

The rules of a tokenizer.json rewrite a text in stages, and each stage may multiply its length. Ten rules that replace a
letter by a hundred letters produce 100**10 letters. So the product of all growth factors is limited before any text is
rewritten. Stages that only normalize Unicode count as 1: they grow a text by a constant factor, however often repeated.
"""

import base64
import binascii
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import tokenizers

from ligerzoo.entries import is_array, is_object
from ligerzoo.errors import TokenizerError
from ligerzoo.text.stages import Stage, stages_of

MAX_GROWTH = 128  # XLM-RoBERTa has 72, one of the largest: character table, a rule for spaces, Metaspace
MAX_CHARACTERS = 2**27  # of a text after all rules
MAX_ENTRIES = 2**14  # values in a section of rules, at any depth; the library takes up to 50 us for each
MAX_STAGES = 64
MAX_TOKEN = 2**11  # characters of a token; the longest in use are runs of about a hundred spaces
MAX_ADDED = 2**22  # characters of all added tokens; Gemma 3 has 6,400 tokens with 2**16
MAX_SPECIAL_IDS = 2**10  # ids that the post-processor adds to a text
MAX_WORD = 2**10  # characters of a word; WordPiece takes time quadratic in it

_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


@dataclass(frozen=True)
class Limits:
    """How much the rules of a tokenizer.json may lengthen a text.

    Attributes:
        encoding: largest ratio of the rewritten text's characters, or token ids, to the text's characters.
        decoding: largest ratio of the decoded text's characters to the characters of all tokens.
        where: the file, for error messages.
    """

    encoding: float
    decoding: float
    where: str

    @classmethod
    def of(cls, content: Mapping[str, Any], where: str) -> Self:
        """Checks the content of a tokenizer.json and returns its limits.

        Raises:
            TokenizerError: a limit is exceeded.
            Exception: the content is malformed; raised by the tokenizers library.
        """
        for section in _SECTIONS:
            _check_entries(content.get(section), f"{where}: {section}")
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
        """Raises TokenizerError if the added tokens are too long: the library rewrites them like texts."""
        lengths = [len(token) for token in tokens]
        _check(max(lengths, default=0), MAX_TOKEN, "characters in a token", f"{self.where}: added_tokens")
        _check(sum(lengths) * self.encoding, MAX_ADDED, "characters in total", f"{self.where}: added_tokens")

    def check_text(self, text: str) -> None:
        """Raises TokenizerError if a text could become too long in encoding."""
        if len(text) * self.encoding > MAX_CHARACTERS:
            what = f"the text is too long; the tokenizer's rules may make it {self.encoding:g} times as long"
            got, expected = f"{len(text)} characters", f"at most {math.floor(MAX_CHARACTERS / self.encoding)}"
            raise TokenizerError(what, where=self.where, got=got, expected=expected, remedy="Encode the text in parts.")

    def check_tokens(self, tokens: Iterable[str | None], number: int) -> None:
        """Raises TokenizerError if the text of `number` tokens could become too long in decoding."""
        if number * MAX_TOKEN * self.decoding <= MAX_CHARACTERS:
            return
        length = sum(len(token) for token in tokens if token is not None)
        if length * self.decoding > MAX_CHARACTERS:
            what, got = "the tokens are too long to decode", f"{length} characters"
            expected = f"at most {math.floor(MAX_CHARACTERS / self.decoding)} for this decoder"
            raise TokenizerError(what, where=self.where, got=got, expected=expected, remedy="Decode the ids in parts.")


def _check_entries(section: object, where: str) -> None:
    """Raises TokenizerError if a section of the file has too many entries, whatever they mean."""
    count, pending = 1, [section]
    while pending:
        value = pending.pop()
        items = value.values() if is_object(value) else value if is_array(value) else ()
        count += len(items)
        _check(count, MAX_ENTRIES, "entries", where)
        pending += items


def _rules(content: Mapping[str, Any]) -> dict[str, list[Stage]]:
    """Returns the stages of each section, in the canonical format that the library writes."""
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    sections = {name: content.get(name) for name in _SECTIONS}
    source = json.dumps({"version": content.get("version", "1.0"), "added_tokens": [], "model": model, **sections})
    canonical = json.loads(tokenizers.Tokenizer.from_str(source).to_str())
    return {name: stages_of(canonical[name]) for name in _SECTIONS}


def _growth(section: str, stage: Stage) -> float:
    """Returns the largest number of characters, or ids, that a stage produces from one character."""
    match section, stage:
        case _, {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1, len(new) / len(old))
        case _, {"type": "Replace", "content": str(new)} | {"type": "Prepend", "prepend": str(new)}:
            return 1 + len(new)  # a regular expression may match the empty string before each character
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


def _special_ids(stage: Stage) -> int:
    match stage:
        case {"type": "TemplateProcessing", "single": list(single), "special_tokens": dict(tokens)}:
            names = [piece["SpecialToken"]["id"] for piece in single if "SpecialToken" in piece]
            return sum(len(tokens[name]["ids"]) for name in names)
    return 2  # RobertaProcessing and BertProcessing add two, others none


def _longest_in_table(encoded: str) -> int:
    """Returns the length of the longest text in a sentencepiece table: size of a trie, the trie, 0-terminated texts."""
    try:
        table = base64.b64decode(encoded)
    except binascii.Error:
        return MAX_GROWTH + 1
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))


def _check_model(model: Mapping[str, Any], where: str) -> None:
    vocabulary = model.get("vocab") or []
    if is_array(vocabulary):  # Unigram: pairs of token and score
        vocabulary = [entry[0] for entry in vocabulary]
    _check(max(map(len, vocabulary), default=0), MAX_TOKEN, "characters in a token", f"{where}.vocab")
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        _check(len(model.get(name) or ""), MAX_TOKEN, "characters", f"{where}.{name}")
    name = "max_input_chars_per_word"
    _check(model.get(name) or 0, MAX_WORD, "characters", f"{where}.{name}")


def _check(got: float, limit: int, unit: str, where: str) -> None:
    if got > limit:
        raise TokenizerError("exceeds the limit", where=where, got=f"{got:g} {unit}", expected=f"at most {limit}")

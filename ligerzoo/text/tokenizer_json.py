"""Reads the JSON files of a tokenizer; tokenizer.json without the tables of its vocabulary.

In Python, a table of 200,000 tokens and their merges takes 100 MiB and half a second. Only the rules of the file are
checked before the tokenizers library reads it, and the length of the longest token.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from ligerzoo.entries import is_object
from ligerzoo.errors import TokenizerError
from ligerzoo.text.tokenizer_limits import MAX_TOKEN

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_NUMBER = rb"-?[0-9][-+.0-9eE]*+"
_ENTRY = rb"(?:%s(?:\s*+:\s*+%s)?|\[\s*+%s\s*+,\s*+(?:%s|%s)\s*+\])" % (_STRING, _NUMBER, _STRING, _STRING, _NUMBER)
_TABLE = re.compile(rb'("(?:vocab|merges)"\s*+:\s*+)([\[{]\s*+(?:%s\s*+,?\s*+)*+[\]}])' % _ENTRY, re.DOTALL)
_CUT = "\0"  # instead of a table


def read_object(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    """Returns the content of a JSON file; {} if it does not exist."""
    where, remedy = f"{where}/{name}", "Download the file again, or run `git lfs pull` in a git clone."
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError("not valid JSON", where=where, got=error, remedy=remedy) from error
    if not isinstance(value, dict):
        raise TokenizerError("not a JSON object", where=where, got=type(value).__name__)
    return value


def read_rules(files: Mapping[str, bytes], where: str) -> dict[str, Any]:
    """Returns the content of tokenizer.json, without the tables of its model if they are within the limits.

    Raises:
        TokenizerError: the file is not a JSON object.
    """
    longest, tables = 0, 0

    def cut(table: re.Match[bytes]) -> bytes:
        nonlocal longest, tables
        tables += 1
        if table[1].startswith(b'"vocab'):
            longest = max(longest, max(map(len, re.findall(_STRING, table[2], re.DOTALL)), default=0))
        return table[1] + json.dumps(_CUT).encode()

    rules = read_object({"tokenizer.json": _TABLE.sub(cut, files["tokenizer.json"])}, "tokenizer.json", where)
    model = rules.get("model")
    found = [name for name in ("vocab", "merges") if is_object(model) and model.get(name) == _CUT]
    if len(found) != tables or longest > MAX_TOKEN:  # a table elsewhere, or perhaps a token that is too long
        return read_object(files, "tokenizer.json", where)
    for name in found:
        del rules["model"][name]
    return rules

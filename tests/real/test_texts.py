"""Real tokenizers and chat templates give what transformers gives."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from ligerzoo import Tokenizer
from ligerzoo.errors import LigerzooError
from ligerzoo.serve.tools import find_format
from ligerzoo.text.chat_template import ChatTemplate
from tests.real.packages import llama_cpp, npm_tokenizer

pytestmark = pytest.mark.real

TOKENIZERS = ("llama2", "llama3", "llama3_1", "qwen2_5", "qwen3", "gemma3", "deepseek_v3", "gptoss")

PIECES = (
    "The liger", " is", "  big", "\n\n", "\t", "don't", "I'LL", "1234567", "3.14", "0x1F", "!?", "...", "_", "`x`",
    " def f(x):\n    return x", "é", "e\u0301", "\ufb01", "ß", "東京", "動物園", "مرحبا", "नमस्ते", "한국어",
    "🦁", "👨\u200d👩\u200d👧", "\u200b", "\xa0", "\r\n", "\u2028",
    "<s>", "</s>", "<|im_start|>", "<|eot_id|>", "<bos>", "<mask>", "<unk>", "[INST]", "https://a.b/c?d=e",
)  # fmt: skip


def texts(count: int) -> list[str]:
    drawn = random.Random(0)
    return ["", *PIECES, *("".join(drawn.choices(PIECES, k=drawn.randint(2, 12))) for _ in range(count))]


@pytest.mark.parametrize("name", [*TOKENIZERS, "smollm2"])
def test_tokenizers_encode_decode_and_stream(name: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue("checkpoint") if name == "smollm2" else npm_tokenizer(name)
    ours = Tokenizer.from_pretrained(directory)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    for text in texts(300):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skips in (False, True):
            decoded = theirs.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skips) == decoded, text
        stream = ours.stream(skip_special_tokens=False)
        assert "".join(map(stream.push, ids)) + stream.flush() == ours.decode(ids), text


MESSAGES: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": " What is a liger? "}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "1 < 2 & \"3\""},
        {"role": "assistant", "content": "<think>\nyes\n</think>\n\nYes."},
        {"role": "user", "content": "é🦁\n\nWhy?"},
    ],
    "answer": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!\n"}],
    "tools": [
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
        ]},
        {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "17 degrees"},
    ],
}  # fmt: skip

CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "é"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": 'The weather of a "city".', "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]


@cache
def templates() -> list[Path]:
    found = sorted((llama_cpp() / "models" / "templates").glob("*.jinja"))
    assert len(found) >= 60
    return found


@pytest.mark.parametrize("kind", MESSAGES)
def test_chat_templates(kind: str, checkpoint: Path) -> None:
    """A template that refuses a conversation does so in both."""
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    ours, rendered = Tokenizer.from_pretrained(checkpoint), 0
    for path in templates():
        source = path.read_text(encoding="utf-8")
        ours.chat_templates = {"default": ChatTemplate(source, path.name)}
        for tools in (None, TOOLS):
            for adds_prompt in (False, True):
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": adds_prompt, "tokenize": False}
                try:
                    expected = theirs.apply_chat_template(MESSAGES[kind], chat_template=source, **options)
                except Exception:
                    with pytest.raises(LigerzooError):
                        ours.apply_chat_template(MESSAGES[kind], **options)
                else:
                    assert ours.apply_chat_template(MESSAGES[kind], **options) == expected, path.name
                    rendered += 1
    assert rendered > 20


TOOL_FORMATS = {
    "<tool_call>\n": ("Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "ibm-granite-granite-4.0", "MiMo-VL"),
    "[TOOL_CALLS][": ("mistralai-Mistral-Nemo-Instruct-2407",),
    "[TOOL_CALLS]": ("mistralai-Ministral-3-14B-Reasoning-2512", "unsloth-mistral-Devstral-Small-2507"),
    "<tool_calls>[": ("unsloth-Apriel-1.5",),
    "<TOOLCALL>[": ("NVIDIA-Nemotron-Nano-v2",),
    "": ("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
}
NO_TOOL_FORMAT = ("Qwen3-Coder", "google-gemma-2-2b-it", "GLM-4.6", "openai-gpt-oss-120b")


def test_formats_of_tool_calls(checkpoint: Path) -> None:
    """Found by rendering calls. Llama's templates write one call only."""
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    expected = {name: opening for opening, names in TOOL_FORMATS.items() for name in names}
    for path in templates():
        if path.stem in expected or path.stem in NO_TOOL_FORMAT:
            tokenizer.chat_templates = {"default": ChatTemplate(path.read_text(encoding="utf-8"), path.name)}
            found = find_format(tokenizer)
            opening = expected.pop(path.stem, None)
            assert (None if found is None else (found[0].open, found[1])) == (
                None if opening is None else (opening, bool(opening))
            ), path.stem
    assert not expected

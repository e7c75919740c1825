"""Constraints: rows with and without a grammar together, early and late reads, and grammars that fail."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ligerzoo.demo.text import CHECKPOINT, load
from ligerzoo.errors import LigerzooError
from ligerzoo.generate import BrokenLogitsError, Grammar, Scheduler, generate_many
from ligerzoo.generate.endless_schemas import refuse_endless
from ligerzoo.models import Llama
from ligerzoo.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        "kind": {"enum": ["lion", "tiger"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def demo() -> tuple[Llama, Tokenizer]:
    return load(CHECKPOINT)


@pytest.fixture(scope="module")
def grammar(demo: tuple[Llama, Tokenizer]) -> Grammar:
    return Grammar.json_schema(SCHEMA, demo[1])


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "sizes", "kind"]
    assert len(value["name"]) <= 8
    assert all(type(size) is int and 0 <= size <= 99 for size in value["sizes"])
    assert len(value["sizes"]) <= 2
    assert value["kind"] in ("lion", "tiger")
    assert text == json.dumps(value, ensure_ascii=False)  # its blanks


def test_generate(demo: tuple[Llama, Tokenizer], grammar: Grammar) -> None:
    """Each row has a text of the grammar, and log-probabilities of the model."""
    model, tokenizer = demo
    ids = torch.tensor([tokenizer.encode("import os")] * 3)
    options = {"do_sample": True, "temperature": 2.0, "seeds": torch.arange(3)}
    output = model.generate(
        ids, constraint=grammar, max_new_tokens=40, return_dict_in_generate=True, pad_token_id=0, **options
    )
    assert output.finish_reasons == ["stop"] * 3
    new = output.sequences[:, ids.shape[1] :]
    for text in tokenizer.batch_decode(new, skip_special_tokens=True):
        check(text)
    logps = model(output.sequences).logits[:, ids.shape[1] - 1 : -1].float().log_softmax(-1)
    ends = (new == tokenizer.eos_token_id).cumsum(1) - (new == tokenizer.eos_token_id).int()
    torch.testing.assert_close(logps.gather(2, new[..., None])[..., 0] * (ends == 0), output.logps)
    assert len(set(map(tuple, new.tolist()))) == 3


def test_rows_with_and_without_a_grammar(demo: tuple[Llama, Tokenizer], grammar: Grammar) -> None:
    """A row has the tokens that it has alone, also if the host reads late, as on a GPU, and if rows are exchanged."""
    model, tokenizer = demo
    prompts = [tokenizer.encode(text) for text in ("import os", "def read(path):", "class A", "for i in")]
    requests: list[dict[str, Any]] = [
        {"constraint": grammar, "max_new_tokens": 40},
        {"max_new_tokens": 20},
        {"constraint": grammar, "max_new_tokens": 7},
        {"constraint": grammar, "max_new_tokens": 40, "do_sample": True, "top_p": 0.9},
    ]

    def seeded() -> list[dict[str, Any]]:
        return [{**options, "generator": torch.Generator().manual_seed(7)} for options in requests]

    alone: list[list[int]] = []
    for prompt, options in zip(prompts, seeded(), strict=True):
        (one,) = generate_many(model, [prompt], batch_size=1, **options)
        alone.append(one.tokens)
    for index in (0, 3):
        check(tokenizer.decode(alone[index], skip_special_tokens=True))
    for lag in (0, 4):
        scheduler = Scheduler(model, batch_size=3, max_cache_tokens=128)
        scheduler._reads.lag = lag
        found: list[list[int]] = [[] for _ in prompts]
        for prompt, options in zip(prompts, seeded(), strict=True):
            scheduler.add(prompt, **options)
        while not scheduler.is_idle:
            for update in scheduler.step():
                found[update.index] += update.tokens
        assert found == alone
        assert not scheduler._sampler.has_constraints


def test_the_other_options_apply(demo: tuple[Llama, Tokenizer]) -> None:
    model, tokenizer = demo
    ids = torch.tensor([tokenizer.encode("import os")])
    grammar = Grammar('start: "yes" | "no" | "perhaps"', tokenizer)
    new = model.generate(ids, constraint=grammar, max_new_tokens=9)[0, ids.shape[1] :].tolist()
    other = model.generate(ids, constraint=grammar, max_new_tokens=9, bad_words_ids=[new[:1]])[0, ids.shape[1] :]
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (new, other.tolist())]
    assert set(texts) < {"yes", "no", "perhaps"}
    assert len(set(texts)) == 2


class _Broken:
    """A constraint that allows nothing after some tokens."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def start(self, eos_token_ids: Sequence[int]) -> "_Broken":
        return _Broken(self.left)

    def append(self, token: int) -> None:
        self.left -= 1

    def fill(self, bits: Any) -> None:
        bits.fill(255 if self.left > 0 else 0)


@pytest.mark.parametrize("lag", [0, 4])
def test_a_grammar_that_fails_ends_its_request_only(demo: tuple[Llama, Tokenizer], lag: int) -> None:
    model, tokenizer = demo
    prompt = tokenizer.encode("import os")
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12)[0, len(prompt) :].tolist()
    scheduler = Scheduler(model, batch_size=2, max_new_tokens=12)
    scheduler._reads.lag = lag
    scheduler.add(prompt, constraint=_Broken(3))
    scheduler.add(prompt)
    found: dict[int, list[int]] = {0: [], 1: []}
    broken: list[int] = []
    while not scheduler.is_idle:
        try:
            for update in scheduler.step():
                found[update.index] += update.tokens
        except BrokenLogitsError as error:
            broken += error.requests
    assert (broken, found) == ([0], {0: expected[:3], 1: expected})
    with pytest.raises(BrokenLogitsError):
        model.generate(torch.tensor([prompt]), constraint=_Broken(3), max_new_tokens=12)


def test_the_end_of_a_text_is_that_of_the_model(demo: tuple[Llama, Tokenizer]) -> None:
    _, tokenizer = demo
    a = tokenizer.encode("a", add_special_tokens=False)
    state = Grammar("start: /a+/", tokenizer).start([a[0] + 1, 5000])

    def allowed() -> set[int]:
        bits = np.zeros(700, np.uint8)
        state.fill(bits)
        return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())

    ends = {a[0] + 1, 5000}  # also if it is the token of another text
    assert a[0] in allowed()
    assert not allowed() & ends
    state.append(a[0])
    assert ends < allowed()
    state.append(5000)
    assert allowed() == ends


def _endless(schema: dict[str, Any], **definitions: Any) -> str | None:
    """Returns what refers to itself without end."""
    try:
        refuse_endless({**schema, "$defs": definitions}, "schema")
    except LigerzooError as error:
        return str(error.got).partition(",")[0]
    return None


A, B, ROOT = ({"$ref": reference} for reference in ("#/$defs/A", "#/$defs/B", "#"))


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


def test_definitions_that_refer_to_themselves_without_end() -> None:
    """Wherever in a schema, also in parts that a text need not have: the model may begin them."""
    leaf = {"type": "string"}
    assert _endless(ROOT) == "#"
    assert _endless(_object("a", a=A), A=A) == "#/$defs/A"
    assert _endless(_object(a=A), A=B, B={"allOf": [leaf, A]}) in ("#/$defs/A", "#/$defs/B")
    assert _endless({"items": A}, A=_object("a", a=A)) == "#/$defs/A"
    assert _endless({"prefixItems": [leaf, A]}, A={"type": "array", "items": A, "minItems": 1}) == "#/$defs/A"
    assert _endless({"additionalProperties": {"$ref": "#/$defs/a~1b%20c"}}, **{"a/b c": {"oneOf": [_object("a", a=ROOT),
        {"$ref": "#/$defs/a~1b%20c"}]}}) is None  # fmt: skip
    assert _endless({"$ref": "#/$defs/a~1b%20c"}, **{"a/b c": {"$ref": "#/$defs/a~1b c"}}) == "#/$defs/a~1b c"
    assert _endless({"type": "array", "prefixItems": [leaf, ROOT], "minItems": 2}) == "#"
    assert _endless({"type": "object", "required": ["a"], "additionalProperties": ROOT}) == "#"
    for schema, definitions in [
        (_object("next", next={"anyOf": [{"type": "null"}, ROOT]}), {}),
        ({"type": "array", "items": ROOT}, {}),
        ({"type": "array", "prefixItems": [leaf, ROOT], "minItems": 1}, {}),
        (_object("a", a=A), {"A": {"type": ["object", "null"], **_object("a", a=A), "enum": [None]}}),
        ({**ROOT, "const": 1}, {}),
        (_object("a", a=False), {}),  # which llguidance refuses
        (_object("a", a={"$ref": "#/$defs/none"}), {}),
        (_object("a", a={"$ref": "other.json#/A"}), {}),
        (_object("a", a=A), {"A": _object("b", b=B), "B": leaf}),
    ]:
        assert _endless(schema, **definitions) is None, (schema, definitions)


def test_large_schemas_are_read_once() -> None:
    names = [f"n{index}" for index in range(5_000)]
    chain = {name: {"$ref": f"#/$defs/{after}"} for name, after in zip(names, [*names[1:], "end"], strict=True)}
    started = time.process_time()
    assert _endless(_object(*names, **chain), **chain, end={"type": "null"}) is None
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(900):
        deep = {"type": "array", "items": deep, "minItems": 1}
    assert _endless(deep) is None
    assert time.process_time() - started < 5


def test_invalid_constraints(demo: tuple[Llama, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = demo
    prompt = torch.tensor([tokenizer.encode("x")])
    for schema, message in (
        ({"type": "strin"}, "schema: not a supported grammar; got Invalid type: strin"),
        ({"not": {}}, "schema: not a supported grammar; got Unimplemented keys"),
        ({"enum": []}, "Unsatisfiable schema"),
        ({"type": "string", "pattern": "("}, "regex parse error"),
        ({"$ref": "http://example.com/schema.json"}, "retrieving it failed"),
    ):
        with pytest.raises(LigerzooError, match=message):
            Grammar.json_schema(schema, tokenizer)
    with pytest.raises(LigerzooError, match="grammar: not a supported grammar; got at 1"):
        Grammar("start: missing", tokenizer)
    with pytest.raises(LigerzooError, match="constraint: invalid value; got 5; expected a constraint"):
        model.generate(prompt, constraint=5, max_new_tokens=1)
    grammar = Grammar('start: "a"', tokenizer)
    with pytest.raises(LigerzooError, match="eos_token_id: invalid value; got none; expected a token that ends a row"):
        model.generate(prompt, constraint=grammar, max_new_tokens=1, eos_token_id=[])
    with pytest.raises(LigerzooError, match="a token that ends a row"):
        Scheduler(model, batch_size=1).add(prompt[0], constraint=grammar, max_new_tokens=1, eos_token_id=[])
    with pytest.raises(LigerzooError, match="constraint: invalid value; got a Grammar with prompt_lookup_num_tokens"):
        model.generate(prompt, constraint=grammar, max_new_tokens=1, prompt_lookup_num_tokens=3)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(LigerzooError, match=r"needs the package llguidance. Run `pip install ligerzoo\[grammar\]`"):
        Grammar('start: "a"', tokenizer)

"""Messages that are marked not to be trained are not trained, under every name of the marker."""

import json
from pathlib import Path
from typing import Any

import pytest

from ligerzoo.errors import DataError
from ligerzoo.train.data import check_data, open_data
from tests.train.data_helpers import CHATML, GENERATION, chat, tokenizer

FALSE: list[dict[str, Any]] = [
    {"loss": False}, {"train": False}, {"training": False}, {"trainable": False}, {"loss_mask": 0}, {"masked": True},
    {"weight": 0}, {"weight": 0.0}, {"loss": 0}, {"masked": 1}, {"loss": False, "weight": 0},
]  # fmt: skip
TRUE: list[dict[str, Any]] = [{"loss": True}, {"weight": 1}, {"masked": False}, {"train": None}, {"loss_mask": 1.0}]
CONTENTS = ("Hello", "bad", "And?", "yes", "So?", "no")


def conversation(*marked: int, fields: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = chat(*CONTENTS)["messages"]
    return [{**message, **fields} if index in marked else message for index, message in enumerate(messages)]


def trained(record: dict[str, Any], template: str = CHATML, **options: Any) -> list[str]:
    """Returns the trained text of each sequence of a record's sample."""
    tok = tokenizer(template)
    sample: Any = next(open_data([record], "auto", tok, seq_length=512, epochs=1, **options))
    return [tok.decode([one for one in segment.labels if one != -100]) for segment in sample.segments]


@pytest.mark.parametrize("template", [CHATML, GENERATION])
@pytest.mark.parametrize("fields", FALSE, ids=str)
def test_a_marked_message_is_not_trained(fields: dict[str, Any], template: str) -> None:
    for marked, expected in (((1,), "yes no"), ((1, 5), "yes"), ((3,), "bad no"), ((0, 2), "bad yes no")):
        record = {"messages": conversation(*marked, fields=fields)}
        assert trained(record, template) == ["".join(f"{answer}<|im_end|>" for answer in expected.split())]
        assert trained(record, template)[0] == trained({"messages": conversation(*marked, fields={"train": False})})[0]


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_markers_of_other_values_and_kinds(template: str) -> None:
    for fields in TRUE:
        assert trained({"messages": conversation(1, 3, 5, fields=fields)}, template) == [
            "bad<|im_end|>yes<|im_end|>no<|im_end|>"
        ]
    messages = conversation(3, fields={"loss": False})
    completion = {"prompt": messages[:1], "completion": messages[1:]}
    assert trained(completion, template) == ["bad<|im_end|>no<|im_end|>"]
    prompted = {"prompt": conversation(1, fields={"loss": False})[:3], "completion": messages[3:4] + messages[4:]}
    assert trained(prompted, template, train_on_prompt=True) == ["no<|im_end|>"]
    other = [*messages[:5], {"role": "assistant", "content": "else"}]
    pair = {"prompt": messages[:2], "chosen": messages[2:], "rejected": other[2:]}
    assert trained(pair, template) == ["no<|im_end|>", "else<|im_end|>"]
    assert trained({"chosen": messages, "rejected": other}, template) == ["no<|im_end|>", "else<|im_end|>"]
    assert trained({**completion, "label": True}, template) == ["bad<|im_end|>no<|im_end|>"]
    assert trained({"messages": messages}, template, train_answers="last") == ["no<|im_end|>"]


@pytest.mark.parametrize(
    ("index", "fields", "message"),
    [
        (1, {"loss": "maybe"}, r"messages\[1\]: loss has an unsupported value; got 'maybe'; expected true, false, 1"),
        (1, {"weight": 0.5}, r"weight has an unsupported value; got '0.5'"),
        (1, {"loss_mask": [0, 1]}, "loss_mask has an unsupported value"),
        (1, {"train": "false"}, "train has an unsupported value"),
        (1, {"loss": False, "train": True}, "contradict each other; got train, loss"),
        (0, {"loss": True}, r"messages\[0\]: only messages of the assistant are trained"),
        (1, {"mask": True}, r"unknown field 'mask', which seems to say what is trained"),
        (1, {"loss_scale": 0}, "unknown field 'loss_scale'"),
        (1, {"trainning": False}, "unknown field 'trainning'"),
        (1, {"weigth": 0}, "unknown field 'weigth'"),
        (1, {"isTrainable": False}, "unknown field 'isTrainable'"),
        (1, {"train_detail": []}, "unknown field 'train_detail'"),
    ],
)  # fmt: skip
def test_unclear_markers_are_refused_with_file_and_line(
    tmp_path: Path, index: int, fields: dict[str, Any], message: str
) -> None:
    file = tmp_path / "data.jsonl"
    records = [chat("Hello", "yes"), {"messages": conversation(index, fields=fields)}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    report = check_data(str(file), "auto", tokenizer(), seq_length=256)
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{message}"):
        report.raise_if_bad()


def test_a_conversation_without_trained_messages_is_refused() -> None:
    for options in ({}, {"train_answers": "last"}):
        with pytest.raises(DataError, match=r"dataset\[0\].*no message of the assistant that is trained"):
            trained({"messages": conversation(1, 3, 5, fields={"loss": False})}, **options)


@pytest.mark.parametrize("kind, field", [
    ("completion", "completion"), ("labelled", "completion"), ("preference", "chosen"), ("preference", "rejected"),
    ("whole conversations", "rejected"),
])  # fmt: skip
@pytest.mark.parametrize("marker", [{"loss": False}, {"masked": 1}])
def test_the_error_names_the_field_without_trained_messages(kind: str, field: str, marker: dict[str, Any]) -> None:
    prompt = [{"role": "user", "content": "Hello"}]
    answers = {name: [{"role": "assistant", "content": name}] for name in ("completion", "chosen", "rejected")}
    answers[field][0] |= marker
    pair = {name: answers[name] for name in ("chosen", "rejected")}
    record: dict[str, Any] = {
        "completion": {"prompt": prompt, "completion": answers["completion"]},
        "labelled": {"prompt": prompt, "completion": answers["completion"], "label": True},
        "preference": {"prompt": prompt, **pair},
        "whole conversations": {name: prompt + messages for name, messages in pair.items()},
    }[kind]
    with pytest.raises(DataError, match=rf"^dataset\[0\]: {field}: no message of the assistant that is trained$"):
        list(open_data([record], "auto", tokenizer(), seq_length=256, epochs=1))


def test_other_fields_of_messages_are_allowed() -> None:
    fields = {"rating": 5, "id": "a", "height": 3, "constraints": ["x"], "tone": "dry"}
    assert trained({"messages": conversation(1, fields=fields)})[0].startswith("bad")

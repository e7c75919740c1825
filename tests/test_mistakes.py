"""Ordinary mistakes on the command line end in one line that names what is wrong, and in no traceback."""

import json
from pathlib import Path

import pytest

from ligerzoo import cli
from ligerzoo.checks import POSITIVE, check
from ligerzoo.errors import LigerzooError
from tests.train.tiny_run import write_checkpoint, write_data
from tests.train.tiny_vision import write_processor

TRAIN = "train model --output out --seq-length 64 --max-steps 1 --device cpu"
TRAIN_DATA = f"{TRAIN} --data data.jsonl"
GRPO = f"{TRAIN_DATA} --method grpo --seq-length 600 --reward"
IMAGE = [{"type": "image", "path": "no image.png"}, {"type": "text", "text": "What?"}]
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

FILES: dict[str, str | bytes] = {
    "empty.jsonl": "",
    "bytes.jsonl": b"\x00\xff\xfe",
    "broken.jsonl": '{"prompt": "a", "completion": "b"}\n{"prompt": \n',
    "utf16.jsonl": '{"text": "a"}\n'.encode("utf-16"),
    "list.json": '[{"text": "a"}, {"txt": "b"},\n3]',
    "cut.json": '[{"text": "a"}, {"te',
    "pretty.json": '{\n"text": "a"\n}',
    "table.csv": "prompt,completion\n",
    "names.csv": "a,a\n1,2\n",
    "cells.csv": 'prompt,completion\na,b\n"a\nb",c,d\n',
    "quotes.csv": 'prompt,completion\na,"b" c\n',
    "repr.csv": "messages\n\"[{'role': 'user'}]\"\n",
    "questions.csv": "question,answer\na,b\n",
    "chats.json": '[{"conversations": [{"from": "humen", "value": "a"}]}]',
    "table.parquet": "PAR1",
    "table.xlsx": "PK",
    "chat.jsonl": json.dumps({"messages": CHAT}),
    "image.jsonl": json.dumps({"messages": [{"role": "user", "content": IMAGE}, CHAT[1]]}),
    "model.gguf": "GGUF",
    "broken.jinja": "{% for x in %}",
    "syntax.py": "def reward(:",
    "nothing.py": "x = 1",
    "imports.py": "import no_such_module",
}

MISTAKES = [
    (f"{TRAIN} --data none.jsonl", "none.jsonl: no such file or directory"),
    (f"{TRAIN} --data https://host/x.jsonl", "https://host/x.jsonl: data is not downloaded"),
    (f"{TRAIN} --data folder", "folder: the directory has no data files"),
    (f"{TRAIN} --data empty.jsonl", "empty.jsonl: the file is empty"),
    (f"{TRAIN} --data bytes.jsonl", "bytes.jsonl:1: invalid UTF-8"),
    (f"{TRAIN} --data broken.jsonl", "broken.jsonl:2: broken JSON"),
    (f"{TRAIN} --data utf16.jsonl", "utf16.jsonl:1: the file is UTF-16"),
    (f"{TRAIN} --data list.json", "list.json:1: the field 'text' is missing; got fields 'txt'. Did you mean 'txt'?"),
    (f"{TRAIN} --data list.json --dry-run", "2 problems: list.json:1: the field 'text' is missing; got fields 'txt'."),
    (f"{TRAIN} --data cut.json", "cut.json: the list does not end"),
    (f"{TRAIN} --data pretty.json", "pretty.json:1: an object that several lines share"),
    (f"{TRAIN} --data table.csv", "table.csv: the data has no records"),
    (f"{TRAIN} --data names.csv", "names.csv:1: not the names of columns; got 'a', 'a'"),
    (f"{TRAIN} --data cells.csv", "cells.csv:3: a row with another number of cells; got 3: "),
    (f"{TRAIN} --data quotes.csv", "quotes.csv:2: malformed CSV: ',' expected after '\"'"),
    (f"{TRAIN} --data repr.csv", "repr.csv:2: messages: not JSON"),
    (f"{TRAIN} --data questions.csv", "got fields 'question', 'answer'"),
    (
        f"{TRAIN} --data questions.csv --map prompt=qestion",
        "questions.csv:2: there is no column 'qestion', which --map",
    ),
    (f"{TRAIN} --data questions.csv --map promt=question", "option map: unknown field; got 'promt'"),
    (f"{TRAIN} --data questions.csv --map question=prompt", "Write prompt=question: our field first."),
    (f"{TRAIN} --data questions.csv --map prompt", "option map: not a field and its column; got 'prompt'"),
    (f"{TRAIN} --data chats.json", "chats.json:1: conversations[0]: unknown sender; got 'humen'"),
    (f"{TRAIN} --data table.parquet", "table.parquet: not a Parquet file"),
    (f"{TRAIN} --data table.xlsx", "table.xlsx: not a format of data files; got '.xlsx'"),
    (f"{TRAIN} --data data.jsonl:0.5 questions.csv", "questions.csv: the weight is missing, which others have"),
    (f"{TRAIN} --data data.jsonl:0 questions.csv:1", "data.jsonl:0: not a weight"),
    (f"{TRAIN} --data data.jsonl chat.jsonl cells.csv data.txt", "data.txt: no such file or directory"),
    (f"{TRAIN} --data data.jsonl:1 chat.jsonl:1", "the data has several kinds; got data.jsonl of kind 'completion'"),
    (f"{TRAIN} --data hf://nothing", "hf://nothing: not a dataset of the hub"),
    (f"{TRAIN} --data chat.jsonl", "chat.jsonl:1: model: the tokenizer has no chat template"),
    (f"{TRAIN} --data chat.jsonl --chat-template none.jinja", "option chat_template: cannot be read"),
    (f"{TRAIN} --data chat.jsonl --chat-template broken.jinja", "broken.jinja, line 1: the template is malformed"),
    (f"{TRAIN} --data image.jsonl", "image.jsonl:1: the record has images, which this run cannot train"),
    (f"{TRAIN_DATA} --output data.jsonl", "option output: "),
    (f"{TRAIN_DATA} --output .", "option output: is the working directory"),
    (f"{TRAIN_DATA} --seq-length 4", "the sample is too long"),
    (f"{TRAIN_DATA} --device nowhere", "no such device; got nowhere"),
    (f"{TRAIN_DATA} --train-only nothing", "matches nothing; got 'nothing'"),
    (f"{TRAIN_DATA} --lora-rank 2 --lora-targets nothing", "matches nothing; got 'nothing'"),
    (f"{TRAIN_DATA} --tokenizer folder", "folder: there is no tokenizer.json"),
    (f"{TRAIN_DATA} --eval-data none.jsonl", "none.jsonl: no such file or directory"),
    (f"{TRAIN_DATA} --method dpo", "the field 'chosen' is missing"),
    (f"{TRAIN_DATA} --method stf", "argument --method: invalid choice: 'stf'"),
    (f"{TRAIN_DATA} --optimizer sgd", "argument --optimizer: invalid choice: 'sgd'"),
    (f"{TRAIN_DATA} --leraning-rate 1", "unrecognized arguments: --leraning-rate"),
    (f"{GRPO} none.py", "option reward: there is no such file"),
    (f"{GRPO} syntax.py", "syntax.py:1: cannot be imported; got SyntaxError"),
    (f"{GRPO} nothing.py", "nothing.py: the file has no such function"),
    (f"{GRPO} imports.py", "imports.py:1: cannot be imported; got ModuleNotFoundError"),
    ("train data.jsonl --data data.jsonl --output out", "data.jsonl: a file; expected a directory"),
    ("train folder --data data.jsonl --output out", "folder: there is no tokenizer.json"),
    ("generate model --prompt hi --temperature 1e-40", "temperature: invalid value; got 1e-40"),
    ("generate model --prompt hi --image none.png", "not a supported vision-language model; got 'llama'"),
    ("generate model --prompt hi --chat", "no chat template"),
    ("generate model --batch none.jsonl --output out.jsonl", "none.jsonl: No such file or directory"),
    ("generate model --batch data.jsonl --output data.jsonl", "data.jsonl: already exists"),
    ("generate model.gguf --prompt hi", "gguf_file="),
    ("generate images --prompt hi --image none.png", "none.png): cannot read the image"),
    ("chat model", "no chat template"),
    ("evaluate model", "one of the arguments --data --tasks is required"),
    ("evaluate model --data chat.jsonl", "error: chat.jsonl:1: model: the tokenizer has no chat template"),
    ("evaluate model --data data.jsonl --kind chat", "60 problems: data.jsonl:1: the field 'messages' is missing"),
    ("serve model --port http", "argument --port: got 'http'"),
    ("serve folder", "folder: there is no tokenizer.json"),
    ("info model/config.json", "Pass its directory"),
    ("info folder", "folder/config.json: no such file; got an empty directory"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    write_checkpoint(folder / "model")
    write_data(folder / "data.jsonl")
    write_processor(folder / "images", "qwen2_vl")
    (folder / "images" / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    (folder / "folder").mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("command, problem", MISTAKES)
def test_a_mistake_is_one_line(
    command: str, problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    is_parsed = True
    try:
        code = cli.main(command.split())
    except SystemExit as stopped:  # of argparse, which prints the usage first
        code, is_parsed = stopped.code, False  # type: ignore[assignment]
    lines = capsys.readouterr().err.splitlines()
    assert code == (1 if is_parsed else 2)
    assert len(lines) == 1 or not is_parsed, lines
    assert problem in lines[-1]
    assert "--debug" not in lines[-1]


def test_an_error_that_moves_keeps_its_form() -> None:
    with pytest.raises(LigerzooError) as raised:
        check("rms_norm", POSITIVE, eps=-1)
    assert str(raised.value.moved_to("file.json, eps")) == "file.json, eps=-1; expected a positive number"
    assert str(raised.value.moved_to(None)) == "invalid value; got -1; expected a positive number"

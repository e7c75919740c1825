"""Ordinary mistakes on the command line end in one line that names what is wrong, and in no traceback."""

import json
import warnings
from pathlib import Path

import pytest

from ligerzoo import cli
from ligerzoo.checks import POSITIVE, check
from ligerzoo.cli.console import warnings_as_lines
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
    "long.jsonl": '{"prompt": "a long question", "completion": "a long answer"}',
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
    "answers.csv": "question,response,completion\na,b,c\n",
    "mark.csv": b"\xef\xbb\xbf",
    "null.json": '[{"instruction": "a", "output": null}]',
    "chats.json": '[{"conversations": [{"from": "humen", "value": "a"}]}]',
    "table.parquet": "PAR1",
    "table.xlsx": "PK",
    "chat.jsonl": json.dumps({"messages": CHAT}),
    "image.jsonl": json.dumps({"messages": [{"role": "user", "content": IMAGE}, CHAT[1]]}),
    "completon.jsonl": '{"prompt": "a", "completon": "b"}',
    "model.gguf": "GGUF",
    "broken.jinja": "{% for x in %}",
    "mac.csv": "prompt,completion\ra,b\r",
    "capitals.csv": "Prompt,Completion\na,b\n",
    "talk.jsonl": json.dumps({"talk": CHAT}),
    "dialog.jsonl": json.dumps({"dialog": [{"from": "human", "value": "a"}]}),
    "wrapped.json": json.dumps({"data": [{"prompt": "a", "completion": "b"}]}),
    "dolly.jsonl": json.dumps({"instruction": "a", "response": "b"}),
    "no-model.yaml": "data: data.jsonl\noutput: out\n",
    "both.jsonl": json.dumps({"prompt": "a", "completion": "b", "messages": CHAT}),
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
    (f"{TRAIN} --data list.json", "list.json:1:17: unknown field 'txt'. Did you mean 'text'?"),
    (f"{TRAIN} --data cut.json", "cut.json: the list does not end"),
    (f"{TRAIN} --data pretty.json", "pretty.json:1: an object that several lines share"),
    (f"{TRAIN} --data table.csv", "table.csv: the data has no records"),
    (f"{TRAIN} --data names.csv", "names.csv:1: not the names of columns; got 'a', 'a'"),
    (f"{TRAIN} --data cells.csv", "cells.csv:3: a row with another number of cells; got 3: "),
    (f"{TRAIN} --data quotes.csv", "quotes.csv:2: malformed CSV: ',' expected after '\"'"),
    (f"{TRAIN} --data repr.csv", "repr.csv:2: messages: not JSON"),
    (f"{TRAIN} --data mac.csv", "mac.csv:1: malformed CSV: a carriage return outside of quotes"),
    (f"{TRAIN} --data capitals.csv", "Say which columns they are: --map prompt=Prompt completion=Completion."),
    (f"{TRAIN} --data talk.jsonl", "talk.jsonl:1: not a record of a known kind; got fields 'talk'"),
    (f"{TRAIN} --data talk.jsonl", "Say that it is a conversation: --map messages=talk."),
    (f"{TRAIN} --data dialog.jsonl", "Say that it is a conversation: --map conversations=dialog."),
    (f"{TRAIN} --data wrapped.json", "If 'data' are the records, write this list to a file."),
    (f"{TRAIN} --data questions.csv", "such as --map prompt=question completion=answer."),
    (f"{TRAIN} --data dolly.jsonl", "the field 'output' is missing; got fields 'instruction', 'response'. Say which"),
    (f"{TRAIN} --data dolly.jsonl", "--map output=COLUMN"),
    (f"{TRAIN} --data questions.csv", "got fields 'question', 'answer'"),
    (
        f"{TRAIN} --data questions.csv --map prompt=qestion",
        "questions.csv:2: there is no column 'qestion', which --map",
    ),
    (
        f"{TRAIN} --data answers.csv --map prompt=question completion=respones",
        "answers.csv:2: there is no column 'respones', which --map names; got columns 'question', 'response', ",
    ),
    (
        "evaluate model --data questions.csv --map prompt=question",
        "questions.csv: prompts have no labels; expected text, prompt and completion, messages, or chosen and rejected",
    ),
    (
        "evaluate model --data long.jsonl --seq-length 2",
        ". Pass a larger --seq-length, or --too-long truncate or --too-",
    ),
    (
        f"{TRAIN} --data long.jsonl --seq-length 2",
        ". Pass a larger --seq-length, or --too-long truncate or --too-long dr",
    ),
    (
        "tokenizer questions.csv --vocab-size 300 --output out --map text=qestion",
        "no column 'qestion', which --map nam",
    ),
    (f"{TRAIN} --data questions.csv --map prompt=question", "Say which column it is: --map completion=answer; or"),
    (
        f"{TRAIN} --data completon.jsonl",
        "the field 'completion' is missing; got prompt, and not read: 'completon'; ",
    ),
    (f"{TRAIN} --data completon.jsonl", "Did you mean 'completion' by 'completon'?"),
    (f"{TRAIN} --data questions.csv --map promt=question", "error: --map: unknown field; got 'promt'"),
    (f"{TRAIN} --data questions.csv --map prompt=answer completion=answer", "--map: the column is given twice; got "),
    (
        f"{TRAIN} --data both.jsonl",
        "both.jsonl:1: a record of two kinds; got fields 'messages', 'prompt', 'completion'",
    ),
    (
        f"{TRAIN} --data data.jsonl:1 ./data.jsonl:1",
        "data.jsonl: the data is listed twice; got data.jsonl and ./",
    ),
    (f"{TRAIN} --data questions.csv --map question=prompt", "Write prompt=question: our field first."),
    (f"{TRAIN} --data questions.csv --map prompt", "error: --map: not a field and its column; got 'prompt'"),
    (f"{TRAIN} --data chats.json", "chats.json:1: conversations[0]: unknown sender; got 'humen'"),
    (f"{TRAIN} --data table.parquet", "table.parquet: not a Parquet file"),
    (f"{TRAIN} --data table.xlsx", "table.xlsx: not a format of data files; got '.xlsx'"),
    (f"{TRAIN} --data data.jsonl:0.5 questions.csv", "questions.csv: the weight is missing, which others have"),
    (f"{TRAIN} --data data.jsonl:0 questions.csv:1", "data.jsonl:0: not a weight"),
    (f"{TRAIN} --data data.jsonl:-1 questions.csv:1", "data.jsonl:-1: not a weight; got -1"),
    (f"{TRAIN} --data mark.csv", "mark.csv: the data has no records"),
    (f"{TRAIN} --data null.json", "null.json:1: the field 'output' is null"),
    (f"{TRAIN} --data data.jsonl chat.jsonl cells.csv data.txt", "data.txt: no such file or directory"),
    (f"{TRAIN} --data data.jsonl:1 chat.jsonl:1", "the data has several kinds; got data.jsonl of kind 'completion'"),
    (f"{TRAIN} --data hf://nothing", "hf://nothing: not a dataset of the hub"),
    (f"{TRAIN} --data chat.jsonl", "chat.jsonl:1: model: the tokenizer has no chat template"),
    (f"{TRAIN} --data chat.jsonl --chat-template none.jinja", "error: --chat-template: cannot be read"),
    (f"{TRAIN} --data chat.jsonl --chat-template broken.jinja", "broken.jinja, line 1: the template is malformed"),
    (f"{TRAIN} --data image.jsonl", "image.jsonl:1: the record has images, which this run cannot train"),
    (f"{TRAIN_DATA} --output data.jsonl", "error: --output: "),
    (f"{TRAIN_DATA} --output .", "error: --output: is the working directory"),
    (f"{TRAIN_DATA} --seq-length 4", "Pass a larger --seq-length, or --too-long truncate or --too-long drop."),
    (f"{TRAIN_DATA} --seq-length 2 --too-long drop", "before their first trained token, need a larger --seq-length."),
    (f"{TRAIN_DATA} --device nowhere", "no such device; got nowhere"),
    (f"{TRAIN_DATA} --train-only nothing", "matches nothing; got 'nothing'"),
    (f"{TRAIN_DATA} --lora-rank 2 --lora-targets nothing", "matches nothing; got 'nothing'"),
    (f"{TRAIN_DATA} --tokenizer folder", "folder: there is no tokenizer.json"),
    (f"{TRAIN_DATA} --eval-data none.jsonl", "none.jsonl: no such file or directory"),
    (f"{TRAIN_DATA} --method dpo", "the field 'chosen' is missing"),
    (f"{TRAIN_DATA} --method stf", "argument --method: got 'stf'; expected one of sft, pretrain"),
    (f"{TRAIN_DATA} --optimizer sgd", "argument --optimizer: got 'sgd'; expected one of adamw"),
    (f"{TRAIN_DATA} --leraning-rate 1", "unrecognized arguments: --leraning-rate 1. "),
    (f"{TRAIN_DATA} --learning-rate 1e-4", "--learning-rate 1e-4. Did you mean '--lr'?"),
    (f"{TRAIN_DATA} --per_device_train_batch_size 4", "Did you mean '--batch-size'?"),
    (f"{TRAIN_DATA} --gradient-accumulation-steps=4", "Did you mean '--accumulate'?"),
    (f"{TRAIN_DATA} --num_train_epochs 3", "Did you mean '--epochs'?"),
    (f"{TRAIN_DATA} --max_seq_length 512", "Did you mean '--seq-length'?"),
    (f"{TRAIN_DATA} --train.max_seq_length 512", "Did you mean '--seq-length'?"),
    (f"{TRAIN_DATA} --lora_target_modules q_proj", "Did you mean '--lora-targets'?"),
    (f"{TRAIN_DATA} --gradient_checkpointing", "Did you mean '--activation-checkpointing'?"),
    (f"{TRAIN_DATA} --bf16", "Did you mean '--dtype bfloat16'?"),
    (f"{TRAIN_DATA} --no-packing", "Did you mean '--packing none'?"),
    (f"{TRAIN_DATA} --output_dir run", "Did you mean '--output'?"),
    (f"{TRAIN_DATA} --report_to wandb", "Did you mean '--tracker'?"),
    (f"{TRAIN_DATA} --num_generations 4", "--num-samples is an option of --method grpo, opd."),
    (f"{TRAIN_DATA} --beta 0.1", "--beta is an option of --method dpo, kto"),
    (f"{TRAIN_DATA} --model_name_or_path m", "Did you mean 'MODEL'?"),
    (f"{TRAIN_DATA} --model m", "--model m. Give MODEL without a flag."),
    (
        "train model extra --data data.jsonl --output out",
        "unrecognized arguments: extra. `ligerzoo train --help` lists the options.",
    ),
    (f"{TRAIN_DATA} --max-steps 1 --epochs 2", "error: --max-steps and --epochs: only one of them may be given"),
    (f"{TRAIN_DATA} --dora", "error: --lora-rank: is needed by the other options of adapters"),
    (f"{TRAIN_DATA} --mixed-precision", "error: --mixed-precision: needs --dtype float32; got --dtype auto"),
    (f"{TRAIN_DATA} --optimizer-in-backward", "needs --max-grad-norm 0, since gradients do not exist at one time"),
    (f"{TRAIN_DATA} --mask-fraction 0.3", "--mask-fraction is an option of --method mlm."),
    (f"{TRAIN_DATA} --method mlm", "expected MaskedLM. Train it with --method sft"),
    (f"{TRAIN_DATA} --method contrastive", "error: --pooling: it is unknown how to pool the hidden states of a text"),
    (f"{TRAIN_DATA} --config none.yaml", "option --config: none.yaml: No such file or directory"),
    (f"{TRAIN_DATA} --import none.py", "error: --import: there is no such file; got none.py"),
    ("train --data data.jsonl --output out", "the following arguments are required: MODEL"),
    (
        "train --data data.jsonl model --output out",
        "arguments are required: MODEL. --data took 'data.jsonl', 'model': give MODEL first",
    ),
    ("evaluate --data data.jsonl model", "are required: MODEL. --data took 'data.jsonl', 'model': give MODEL first"),
    ("train --config no-model.yaml --map a=b model", "required: MODEL. --map took 'a=b', 'model': give MODEL first"),
    ("train model", "the following arguments are required: --data, --output"),
    ("generate model --prompt hi --max-length 5", "Did you mean '--max-new-tokens'?"),
    ("generate model --prompt hi --max_tokens 5", "Did you mean '--max-new-tokens'?"),
    ("chat model --prompt hi", "unrecognized arguments: --prompt hi. Questions are the lines of standard input."),
    ("evaluate model --dat data.jsonl", "unrecognized arguments: --dat data.jsonl. Did you mean '--data'?"),
    ("generate model", "the arguments --prompt --batch is required"),
    ("generate model --prompt hi --adapter none", "none: no such directory"),
    ("generate model --prompt hi --adapter folder", "folder/adapter_config.json: no such file"),
    ("generate model --prompt hi --adapter other_kind", "peft_type: not supported; got 'IA3'; expected 'LORA'"),
    ("evaluate model --data data.jsonl --adapter other_kind", "peft_type: not supported; got 'IA3'"),
    ("generate other_kind --prompt hi", "peft_type: not supported; got 'IA3'"),
    ("serve model --max-model-len 5", "Did you mean '--max-context'?"),
    ("embed model --input data.jsonl --output e.jsonl --field prompt", "Pass --pooling lasttoken, or another of cls"),
    (
        "embed model --input data.jsonl --field prompt --output e.jsonl --pooling men",
        "error: --pooling: not supported; got 'men'",
    ),
    ("serv model", "argument COMMAND: got 'serv'; expected one of info, generate"),
    (f"{GRPO} none.py", "error: --reward: there is no such file"),
    (f"{GRPO} syntax.py", "syntax.py:1: cannot be imported; got SyntaxError"),
    (f"{GRPO} nothing.py", "nothing.py: the file has no such function"),
    (f"{GRPO} imports.py", "imports.py:1: cannot be imported; got ModuleNotFoundError"),
    ("train data.jsonl --data data.jsonl --output out", "data.jsonl: a file; expected a directory"),
    ("train folder --data data.jsonl --output out", "folder: there is no tokenizer.json"),
    ("generate model --prompt hi --temperature 1e-40", "temperature: invalid value; got 1e-40"),
    ("generate model --prompt hi --image none.png", "not a supported vision-language model; got 'llama'"),
    ("generate model --prompt hi --chat", "with --chat-template FILE."),
    ("generate model --batch none.jsonl --output out.jsonl", "none.jsonl: No such file or directory"),
    ("generate model --batch data.jsonl --output data.jsonl", "data.jsonl: already exists"),
    ("generate model.gguf --prompt hi", "gguf_file="),
    ("generate images --prompt hi --image none.png", "none.png): cannot read the image"),
    ("chat model", "with --chat-template FILE."),
    ("generate model --batch chat.jsonl --output out.jsonl", "with --chat-template FILE."),
    ("evaluate model", "one of the arguments --data --tasks is required"),
    ("evaluate model --data chat.jsonl", "error: chat.jsonl:1: model: the tokenizer has no chat template"),
    ("evaluate model --data chat.jsonl --kind text", "chat.jsonl:1: the field 'text' is missing"),
    ("serve model --port http", "argument --port: got 'http'"),
    ("serve folder", "folder: there is no tokenizer.json"),
    ("info model/config.json", "Pass its directory"),
    ("info other_kind", "This is an adapter, without the base model: merge them with `ligerzoo fuse BASE A"),
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
    (folder / "other_kind").mkdir()
    adapter = {"peft_type": "IA3", "base_model_name_or_path": str(folder / "model")}
    (folder / "other_kind" / "adapter_config.json").write_text(json.dumps(adapter))
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
    except SystemExit as stopped:  # of argparse
        code, is_parsed = stopped.code, False  # type: ignore[assignment]
    lines = capsys.readouterr().err.splitlines()
    assert code == (1 if is_parsed else 2)
    assert len(lines) == 1, lines
    assert problem in lines[-1]
    assert "--debug" not in lines[-1]


def test_all_mistakes_of_a_command_line_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    command = "train model --lr x --learning_rate 1 --schedule no --data data.jsonl --epochs 0"
    with pytest.raises(SystemExit, match="2"):
        cli.main(command.split())
    found = [line.partition("error: ")[2] for line in capsys.readouterr().err.splitlines()]
    problems = ["argument --lr: ", "argument --schedule: ", "argument --epochs: ", "unrecognized", "the following"]
    assert len(found) == len(problems)
    assert all(map(str.startswith, found, problems)), found


def test_an_unknown_option_is_named_with_the_missing_one(capsys: pytest.CaptureFixture[str]) -> None:
    for word, remedy in {"--prmpt": "Did you mean '--prompt'?", "x": "`ligerzoo generate --help` lists the o"}.items():
        with pytest.raises(SystemExit):
            cli.main(["generate", "model", word])
        unknown, missing = capsys.readouterr().err.splitlines()
        assert f"unrecognized arguments: {word}. {remedy}" in unknown
        assert missing.endswith("one of the arguments --prompt --batch is required")


@pytest.mark.filterwarnings("default")
def test_warnings_name_options_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings_as_lines({"special_tokens": "--special-tokens"}):
        warnings.warn('a.jsonl:1: pass special_tokens="control". No file_name.', stacklevel=1)
    assert capsys.readouterr().err == "warning: a.jsonl:1: pass --special-tokens control. No file_name.\n"


@pytest.mark.parametrize("model, data", [("none", "none.jsonl"), ("model", "none.jsonl"), ("none", "chat.jsonl")])
@pytest.mark.parametrize("template, problem", [("none.jinja", "cannot be read"), ("broken.jinja", "is malformed")])
def test_a_dry_run_names_a_bad_template_and_other_problems(
    model: str,
    data: str,
    template: str,
    problem: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    call = f"train {model} --data {data} --chat-template {template} --device cpu --output out --dry-run"
    assert cli.main(call.split()) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if problem in line]) == 1
    assert len(lines) == 1 + (model == "none") + (data == "none.jsonl")


def test_a_dry_run_names_a_missing_template_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The problems of the other records are named too."""
    monkeypatch.chdir(folder)
    (folder / "chats.jsonl").write_text(f"{FILES['chat.jsonl']}\n" * 3 + '{"messages": 3}\n')
    assert cli.main(["train", "model", "--data", "chats.jsonl", "--device", "cpu", "--output", "out", "--dry-run"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "chats.jsonl:1: model: the tokenizer has no chat template" in first
    assert "chats.jsonl:4: messages" in second


def test_a_dry_run_names_all_problems(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of options, of the data and of the evaluation data; and what it cannot open, however much else is wrong."""
    monkeypatch.chdir(folder)
    lines = ['{"prompt": 3, "completion": "c"}', '{"prompt": "a", "completion": "b"}', '{"prompt": "a"}']
    (folder / "wrong.jsonl").write_text("\n".join(lines))
    call = "train model --output . --device cpu --seq-length 64 --capture on --dry-run --epochs 2 --data wrong.jsonl"
    assert cli.main([*call.split(), "--eval-data", "none.jsonl", "--lora-rank", "2", "--lora-targets", "nothing"]) == 1
    expected = ["--capture: needs a GPU", "--output: is the working directory", "--lora-targets: matches nothing"]
    expected += ["none.jsonl: no such file", "wrong.jsonl:1: prompt: wrong", "wrong.jsonl:3: the field 'completion'"]
    captured = capsys.readouterr()
    assert all(line.startswith("ligerzoo: error: ") for line in captured.err.splitlines())
    found = [line.removeprefix("ligerzoo: error: ") for line in captured.err.splitlines()]
    assert [line[: len(start)] for line, start in zip(found, expected, strict=True)] == expected
    assert "samples of kind 'completion'" in captured.out
    call = "train model --output out --data none.jsonl --max-grad-norm 1 --dry-run"
    for options, where in {
        "--device nowhere": "--device", "--optimizer-in-backward": "--optimizer-in-backward",
        "--mesh foo": "--mesh", "--mesh tensor=2": "--mesh", "--ema 1 --epochs 2 --max-steps 2": "--ema",
    }.items():  # fmt: skip
        assert cli.main([*call.split(), *options.split()]) == 1
        starts = [line.split(": ")[2] for line in capsys.readouterr().err.splitlines()]
        assert (where in starts, starts[-1]) == (True, "none.jsonl"), starts
    call = "train nothing/here --output o --data none.jsonl --eval-data none.txt --dry-run"
    assert cli.main(call.split()) == 1
    starts = [line.split(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert starts == ["nothing/here", "none.jsonl", "none.txt"]


def test_a_plan_of_few_steps_warns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    call = "train model --data data.jsonl --output out --device cpu --dry-run --activation-budget none"
    packed = "warning: 60 records pack into 4 rows of 2,048 tokens: 3 epochs are 1 step"
    for more, warning in {
        "--epochs 3": f"{packed}; use --packing none, a smaller --batch-size or a larger --epochs",
        "--packing none --batch-size 16": "warning: 60 records: 1 epoch is 4 steps; use a smaller --batch-size or",
        "--packing none --batch-size 2": None,
        "--max-steps 1": None,
    }.items():
        assert cli.main([*call.split(), *more.split()]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
        assert len(lines) == (warning is not None)
        assert not warning or lines[0].startswith(warning)


def test_plans_with_checkpointing_and_without_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    call = ["--data", "data.jsonl", "--output", "out", "--device", "cpu", "--dry-run", "--max-steps", "1"]
    assert cli.main(["train", "model", *call, "--activation-checkpointing"]) == 0
    assert "blocks 0 to 1    everything recomputed" in capsys.readouterr().out
    bare = folder / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((folder / "model" / name).read_bytes())
    assert cli.main(["train", "bare", *call, "--lora-rank", "2"]) == 1
    printed = capsys.readouterr()
    assert "nothing recomputed" in printed.out
    assert "1,856 of them trained" in printed.out
    assert printed.err.startswith("ligerzoo: error: bare: 1 of 1 weight files missing")
    assert printed.err.count("\n") == 1


def test_home_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    call = "train ~/model --data=~/data.jsonl --eval-data=~/data.jsonl --output=~/home --tokenizer=~/model --device cpu"
    assert cli.main([*call.split(), "--max-steps", "1", "--seq-length", "64"]) == 0
    assert (folder / "home" / "model.safetensors").exists()
    evaluate, generate = "evaluate ~/home --data=~/data.jsonl", "generate ~/home --prompt a --max-new-tokens 1"
    for command in ("info ~/home", evaluate, generate, "convert ~/home ~/converted"):
        assert cli.main(command.split()) == 0
    assert not (folder / "~").exists()


def test_an_error_that_moves_keeps_its_form() -> None:
    with pytest.raises(LigerzooError) as raised:
        check("rms_norm", POSITIVE, eps=-1)
    assert str(raised.value.moved_to("file.json, eps")) == "file.json, eps=-1; expected a positive number"
    assert str(raised.value.moved_to(None)) == "invalid value; got -1; expected a positive number"

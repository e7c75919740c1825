"""The command line interface: its output, error messages and exit codes."""

import argparse
import io
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from ligerzoo import AutoModel, Processor, Tokenizer, cli, hub, info
from ligerzoo.arguments import expanded_path
from ligerzoo.cli.options import PATH, STOP
from ligerzoo.demo.drawings import draw
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.generate.speculative import DraftModel, PromptLookup
from ligerzoo.models import CausalLM, Llama, LlamaConfig
from tests.covering import representatives

ROOT = Path(__file__).parent.parent
VISION_MODEL = ROOT / "ligerzoo/demo/assets/tiny-shapes-qwen2-vl"
COMMANDS = ("info", "generate", "chat", "embed", "serve", "convert", "fuse", "demo", "doctor", "parity")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a Llama with random weights in several shards, byte tokens and a chat template."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("checkpoint")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))

    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=257,
    )
    Llama(config).save_pretrained(directory, max_shard_size=20_000)
    return directory


@pytest.fixture
def base_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """Writes the same checkpoint without a chat template."""
    directory = tmp_path / "base"
    directory.mkdir()
    for path in checkpoint.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return directory


def continuation(checkpoint: Path, prompt: list[int], **options: Any) -> str:
    """Returns the continuation of the prompt from `model.generate`."""
    model, tokenizer = AutoModel.from_pretrained(checkpoint), Tokenizer.from_pretrained(checkpoint)
    ids = model.generate(torch.tensor([prompt]), **options)
    return tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Writes three drawings of different sizes."""
    directory = tmp_path_factory.mktemp("pictures")
    paths = [directory / f"{number}.png" for number in range(3)]
    for path in paths:
        draw(f"test {path.stem}").picture.save(path)
    return paths


def user(text: str, *images: Path) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [*({"type": "image", "path": image} for image in images), {"type": "text", "text": text}],
    }


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def answer_to(messages: list[dict[str, Any]] | str, **options: Any) -> str:
    """Returns the answer to messages with images from `model.generate`."""
    model, processor = AutoModel.from_pretrained(VISION_MODEL), Processor.from_pretrained(VISION_MODEL)
    inputs = processor(messages, add_generation_prompt=True, **options)
    ids = model.generate(**inputs, max_new_tokens=8)
    return processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def standard_input(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# Help and errors


def examples(help_text: str) -> list[str]:
    """Returns the command lines of a help text, without pipes and explanations."""
    lines = [line.strip() for line in help_text.splitlines() if line.startswith("  ligerzoo ") or "| ligerzoo" in line]
    return [line[line.index("ligerzoo") :].split(" < ")[0].split("   ")[0] for line in lines]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_examples_in_the_help_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    shown = examples(capsys.readouterr().out)
    assert len(shown) >= 2
    for example in shown:
        arguments = shlex.split(example)[1:]
        if "--help" not in arguments:
            assert cli.parse(arguments).run.__name__ == (command or arguments[0])


def test_help_and_argument_errors_do_not_import_torch() -> None:
    script = "import sys, ligerzoo.cli as cli\n"
    script += "for arguments in (['--help'], ['generate', '--help'], ['info']):\n"
    script += "    try: cli.main(arguments)\n    except SystemExit: pass\n"
    script += "print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")


@pytest.mark.parametrize(
    "arguments",
    [
        "", "sing", "info", "generate model", "convert model", "generate model --prompt x --top-k many",
        "demo --seed 1", "demo --vision --text x", "generate model --batch x", "generate model --batch x --prompt y",
        "generate model --prompt x --output y", "generate model --prompt x --resume",
        "generate model --prompt x --batch-size 2", "generate model --prompt x --max-cache-tokens 9",
        "generate model --batch x --output y --image z", "generate model --batch x --output y --schema z",
        "generate model --batch x --output y --draft z", "generate model --prompt x --draft y --prompt-lookup 3",
        "generate model --prompt x --cache-dtype fp8", "serve model --cache-dtype float16",
    ],
)  # fmt: skip
def test_invalid_arguments_exit_with_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments.split())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ligerzoo")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--temprature", "0.7"], "--temprature 0.7. Did you mean '--temperature'?"),
        (["--max-tokens=5"], "--max-tokens=5. Did you mean '--max-new-tokens'?"),
        (["--system", "x"], "--system x. Did you mean '--schema'? --system is an option of `ligerzoo chat`."),
        (["--lr", "1"], "--lr 1. --lr is an option of `ligerzoo train`."),
        (["--name", "x"], "--name x. Did you mean '--image'? --name is an option of `ligerzoo serve`."),
        (["--num-beams", "4"], "--num-beams 4. `ligerzoo generate --help` lists the options."),
        (["--stop", ""], "argument --stop: got ''; expected a text that is not empty"),
    ],
)
def test_unknown_and_empty_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "model", "--prompt", "x", *arguments])
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["info", "/no/such/place"], "/no/such/place: no such directory"),
        (["generate", "{checkpoint}", "--prompt", "x", "--device", "abacus"], "--device: no such device; got abacus"),
        (["generate", "{checkpoint}", "--prompt", "x", "--device", "cuda:99"], "--device: no such device; got cuda:99"),
        (
            ["generate", "{checkpoint}", "--prompt", "x", "--device", "meta"],
            "--device: the meta device has no memory for weights",
        ),
        (
            ["chat", "{checkpoint}", "--device", "meta:0"],
            "--device: the meta device has no memory for weights; got meta:0",
        ),
        (["generate", "{checkpoint}", "--prompt", "x", "--device", ":"], "--device: no such device; got :"),
        (["generate", "{checkpoint}", "--prompt", "x", "--device", "cpu:-1"], "--device: no such device; got cpu:-1"),
        (["generate", "{checkpoint}", "--prompt", "x", "--device", "cuda:9" + "9" * 30], "--device: no such device"),
        (["generate", "{checkpoint}", "--prompt", "x\udcff"], "half of a surrogate pair; got '\\udcff' as character 1"),
        (
            ["convert", "{checkpoint}", "{tmp_path}/new", "--max-shard-size=-5GB"],
            "error: --max-shard-size: invalid size",
        ),
        (
            ["convert", "{checkpoint}", "{tmp_path}/new", "--max-shard-size", "0"],
            "error: --max-shard-size: invalid size",
        ),
        (
            ["convert", "{checkpoint}", "{tmp_path}/new", "--max-shard-size", "nanGB"],
            "error: --max-shard-size: invalid size",
        ),
        (["convert", "{checkpoint}", "{picture}/new"], "File exists"),
        (["demo", "--text", "{picture}"], "{picture}: not valid UTF-8"),
        (["demo", "--text", "{tmp_path}"], "Is a directory"),
        (
            ["generate", "{vision_model}", "--prompt", "x", "--image", "{tmp_path}"],
            "cannot read this kind of file; got a directory",
        ),
        (
            ["convert", "{checkpoint}", "{tmp_path}/new", "--max-shard-size", "big"],
            "error: --max-shard-size: invalid size",
        ),
        (["demo", "--text", "/no/such/file"], "No such file"),
        (
            ["generate", "{checkpoint}", "--prompt", "x", "--image", "{picture}"],
            "not a supported vision-language model",
        ),
        (["chat", "{checkpoint}", "--image", "{picture}"], "{picture}: the model reads text only"),
        (["generate", "{vision_model}", "--prompt", "x", "--image", "/no/such.png"], "cannot read the image"),
        (
            ["generate", "{vision_model}", "--prompt", "x", "--image", "{checkpoint}/config.json"],
            "cannot read the image",
        ),
        (["chat", "{vision_model}", "--image", "/no/such.png"], "image (/no/such.png): cannot read the image"),
        (["generate", "{checkpoint}", "--batch", "/no/such", "--output", "{tmp_path}/new"], "No such file"),
        (
            ["generate", "{checkpoint}", "--batch", "{picture}", "--output", "{picture}"],
            "{picture}: already exists; expected a new file. Continue an interrupted run with --resume",
        ),
        (
            ["generate", "{checkpoint}", "--batch", "{picture}", "--output", "{picture}", "--resume"],
            "{picture}, line 1: not a result of `ligerzoo generate --batch`",
        ),
        (["serve", "/no/such/place", "--port", "0"], "/no/such/place: no such directory"),
        (["serve", "{checkpoint}", "--host", "no.such.host.invalid"], "--host and --port: cannot listen there"),
        (["serve", "{checkpoint}", "--port", "0", "--max-context", "2049"], "expected at most 2048"),
        (
            ["serve", "{checkpoint}", "--port", "0", "--max-cache-tokens", "9", "--max-context", "10"],
            "expected at most 9",
        ),
        (["serve", "{checkpoint}", "--port", "0", "--chat-template", "/no/such"], "No such file"),
    ],
)
def test_a_failure_is_one_line_on_standard_error(
    arguments: list[str],
    problem: str,
    checkpoint: Path,
    pictures: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--image" in arguments:  # the image is read before the weights
        monkeypatch.delattr(hub, "load")
    names = {"checkpoint": checkpoint, "vision_model": VISION_MODEL, "picture": pictures[0], "tmp_path": tmp_path}
    assert cli.main([argument.format(**names) for argument in arguments]) == 1
    error_output = capsys.readouterr().err
    assert error_output.startswith("ligerzoo: error: ")
    assert problem.format(**names) in error_output
    assert error_output.count("\n") == 1
    assert "--debug" not in error_output  # only for bugs of ligerzoo


NUMBERS = {
    "--max-new-tokens": ["-1", "1e9", str(2**31), "10" * 20, "9" * 5000],
    "--top-k": ["0", "-1", "2.5", str(2**31), "10" * 20],
    "--seed": ["-1", "x", str(2**63), "1" + "0" * 30, "9" * 5000, "nan"],
    "--temperature": ["-1", "nan", "inf", "1e999", "x", ""],
    "--top-p": ["0", "-0.1", "1.1", "nan", "x"],
    "--min-p": ["-0.1", "1.1", "nan", "inf", "x"],
    "--repetition-penalty": ["0", "-1", "nan", "inf", "x"],
    "--min-new-tokens": ["-1", "2.5", "x"],
    "--no-repeat-ngram-size": ["-1", "x"],
    "--prompt-lookup": ["0", "2.5", "x"],
}
SERVER_NUMBERS = {
    "--batch-size": ["0", "-1", "2.5", str(2**31)],
    "--port": ["-1", "65536", "http", ""],
    "--max-queue": ["-1", "x"],
    "--max-cache-tokens": ["0", "x"],
    "--max-context": ["0", "x"],
    "--max-body-mib": ["0", "1.5"],
}
TRAINING_NUMBERS = {
    "--batch": ["0", "-1", "2.5", str(2**31)],
    "--seq": ["0", "x"],
    "--gpus": ["0", "1.5"],
    "--gpu-flops": ["0", "-1", "nan", "inf", "x"],
    "--gpu-bandwidth": ["0", "nan", "x"],
    "--nvlink": ["0", "inf", "x"],
    "--network": ["0", "-1", "x"],
    "--gpus-per-host": ["0", "1.5"],
    "--lora-rank": ["0", "-2"],
    "--gpu-memory": ["0", "-1", "nan", "inf", "x"],
}
EMBEDDING_NUMBERS = {
    "--batch-size": ["0", "2.5", str(2**31)],
    "--dimensions": ["0", "-1", "x"],
    "--max-length": ["0", "x"],
}
EVALUATION_NUMBERS = {
    "--seq-length": ["1", "0", "2.5", "x"],
    "--batch-size": ["0", "x"],
    "--limit": ["0", "-1", "x"],
}
PARITY_TEXTS = {"--text": [""]}
DOCTOR_NUMBERS = {"--placements": ["0", "2.5", "x"]}
TOKENIZER_NUMBERS = {"--vocab-size": ["0", "-1", "2.5", "x", str(2**31)]}
TRAINING_VALUES = {
    **{f"--{name}": [""] for name in ("data", "map", "output", "tokenizer", "eval-data", "device", "import")},
    **{
        f"--{name}": ["0", "-1", "2.5", "x"]
        for name in (
            "seq-length", "batch-size", "accumulate", "max-steps", "epochs", "eval-every", "save-every", "keep",
        )
    },
    "--seed": ["-1", "x", str(2**63)],
    "--lr": ["0", "-1", "nan", "inf", "x"],
    "--max-grad-norm": ["-1", "nan", "x"],
    "--mesh": [""],
    "--train-only": [""],
    "--lora-targets": [""],
    "--chat-template": [""],
    "--lora-alpha": ["-1", "x"],
    "--lora-dropout": ["-1", "x"],
    "--ema": ["-1", "x"],
    "--activation-budget": ["-1"],
    "--warmup": ["-0.1", "1.1", "nan", "x"],
    "--weight-decay": ["-1", "inf", "x"],
}  # fmt: skip
OPTIONS = [
    (command, option, value)
    for command in ("generate model --prompt x", "chat model", "demo --vision")
    for option, values in NUMBERS.items()
    for value in values
    if option == "--seed" or "demo" not in command
]
OPTIONS += [("info model --train", option, value) for option, values in TRAINING_NUMBERS.items() for value in values]
OPTIONS += [
    ("evaluate model --data x", option, value) for option in EVALUATION_NUMBERS for value in EVALUATION_NUMBERS[option]
]
OPTIONS += [
    ("embed model --input x --output y.jsonl", option, value)
    for option in EMBEDDING_NUMBERS
    for value in EMBEDDING_NUMBERS[option]
]
OPTIONS += [("doctor", option, value) for option, values in DOCTOR_NUMBERS.items() for value in values]
OPTIONS += [
    ("tokenizer x --output y", option, value) for option in TOKENIZER_NUMBERS for value in TOKENIZER_NUMBERS[option]
]
OPTIONS += [("parity model", option, value) for option, values in PARITY_TEXTS.items() for value in values]
OPTIONS += [("serve model", option, value) for option, values in SERVER_NUMBERS.items() for value in values]
OPTIONS += [
    ("train model --data x --output y", option, value) for option, values in TRAINING_VALUES.items() for value in values
]


@pytest.mark.parametrize("command, option, value", OPTIONS)
def test_numbers_out_of_range_are_refused_before_loading(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command.split(), f"{option}={value}"])
    error_output = capsys.readouterr().err.splitlines()[-1]
    assert f"error: argument {option}: got '{value[:50]}'; expected a" in error_output


def test_every_numeric_option_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []

    def parse(self: argparse.ArgumentParser, *_: object) -> tuple[argparse.Namespace, list[str]]:
        parsers.append(self)
        return argparse.Namespace(value=None, check=lambda options: None), []

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    cli.parse([])
    actions = [action for parser in parsers for action in parser._actions]
    subparsers = [action.choices for action in actions if isinstance(action, argparse._SubParsersAction)]
    options = [action for choices in subparsers for parser in choices.values() for action in parser._actions]
    assert {
        action.option_strings[0] for action in options if action.type not in (None, expanded_path, PATH, STOP)
    } == {
        *NUMBERS, *SERVER_NUMBERS, *TRAINING_NUMBERS, *TRAINING_VALUES, *EVALUATION_NUMBERS, *TOKENIZER_NUMBERS,
        *PARITY_TEXTS, *DOCTOR_NUMBERS, *EMBEDDING_NUMBERS,
    }  # fmt: skip


STREAMS = [
    ("generate {checkpoint} --prompt - --max-new-tokens 1 <&-", 1, "standard input is closed"),
    pytest.param("chat {checkpoint} <&-", 1, "standard input is closed", marks=pytest.mark.thorough),
    pytest.param("chat {checkpoint} <&- --max-new-tokens 1 2>&-", 1, "", marks=pytest.mark.thorough),
    pytest.param(
        "generate {checkpoint} --prompt x --max-new-tokens 1 >&-",
        1,
        "standard output is closed",
        marks=pytest.mark.thorough,
    ),
    ("info --architectures >&-", 1, "standard output is closed"),
    pytest.param("info /no/such/place 2>&-", 1, "", marks=pytest.mark.thorough),
    pytest.param("--help >&-", 0, None, marks=pytest.mark.thorough),
    ("info --architectures >/dev/full", 1, "No space left on device"),
    ("generate {checkpoint} --prompt - --max-new-tokens 1 < {picture}", 1, "half of a surrogate pair"),
    pytest.param("chat {checkpoint} < {picture}", 1, "half of a surrogate pair", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("line, code, problem", STREAMS)
def test_closed_and_full_streams(
    line: str, code: int, problem: str | None, checkpoint: Path, pictures: list[Path]
) -> None:
    """Runs in a shell. The error is one line, or none if standard error is closed."""
    command = f"{sys.executable} -m ligerzoo {line.format(checkpoint=checkpoint, picture=pictures[0])}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == code
    if problem is not None:
        assert problem in result.stderr
        assert result.stderr.count("\n") == bool(problem)
        assert "--debug" not in result.stderr


def test_a_prompt_with_tokens_outside_the_embedding_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][-1], "id": 258, "content": "<new>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    command = ["generate", str(tmp_path), "--max-new-tokens", "1", "--prompt"]
    assert cli.main([*command, "old"]) == 0
    capsys.readouterr()
    assert cli.main([*command, "<new>"]) == 1
    message = "the token '<new>' is not in the model's vocabulary; got id 258; expected an id below 258"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError("two\nlines"), RuntimeError("two\nlines")])
def test_an_unexpected_error_is_one_line_without_debug(
    error: Exception, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(info, "describe", fail)
    assert cli.main(["info", str(checkpoint)]) == 1
    error_output = capsys.readouterr().err
    assert "two lines" in error_output
    assert error_output.count("\n") == 1
    with pytest.raises(type(error), match="two\nlines"):
        cli.main(["info", str(checkpoint), "--debug"])


def exhaust_memory() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def exhaust_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def open_nothing() -> None:
    Path("none.txt").read_bytes()


@pytest.mark.parametrize("fail, problem", [
    (exhaust_memory, "error: out of memory; got [enforce fail "), (exhaust_gpu, "error: out of memory; got CUDA out"),
    (open_nothing, "error: none.txt: No such file or directory\n"),
])  # fmt: skip
def test_errors_of_the_system_have_no_traceback(
    fail: Callable[[], None], problem: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(info, "describe", lambda *_, **__: fail())
    assert cli.main(["info", str(checkpoint)]) == 1
    error_output = capsys.readouterr().err
    assert problem in error_output
    assert "--debug" not in error_output


def test_an_interruption_exits_with_130(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "describe", interrupt)
    assert cli.main(["info", str(checkpoint)]) == 130
    assert capsys.readouterr().err == "\n"


@pytest.mark.parametrize(
    "arguments",
    representatives(["info {}", "generate {} --chat --prompt x", "--help"], "generate {} --chat --prompt x"),
)
def test_a_closed_pipe_is_quiet(arguments: str, checkpoint: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ligerzoo", *arguments.format(checkpoint).split()]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=buffered, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


# info


def test_info_describes_a_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModel.from_pretrained(checkpoint)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert cli.main(["info", str(checkpoint)]) == 0
    output = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert "architecture Llama (LlamaForCausalLM)" in lines
    assert any(line.startswith(f"parameters {parameters:,} (") for line in lines)
    attention = sum(p.numel() for name, p in model.named_parameters() if "self_attn" in name)
    assert any(line.startswith(f"attention {attention:,} {attention / parameters:.1%}") for line in lines)
    assert "head tied to the embedding" in lines
    assert "dtype float32" in lines
    cached = 2 * 2 * (2 * 8) * 4  # key and value, two layers, two heads of eight, bytes
    assert f"generation {4 * parameters / 1000:.3g} kB for the weights, {cached} B per token of context" in lines
    assert f"training {16 * parameters / 1000:.3g} kB in fp32 with AdamW, plus the activations" in lines
    shards = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert len(shards) == 5
    assert any(line.startswith(f"files {len(list(model.parameters()))} tensors in 5 files") for line in lines)
    assert all(shard in output for shard in (*shards[:3], shards[-1]))
    assert "... 1 more ..." in lines
    assert "tokenizer 258 tokens; bos '<s>', eos '</s>'; chat template default" in lines


def test_info_reads_no_weights(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Checkpoint, "_read_stored")
    assert cli.main(["info", str(checkpoint)]) == 0


def test_info_of_the_hub_downloads_no_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

    assert cli.main(["info", str(checkpoint)]) == 0
    expected = capsys.readouterr().out.splitlines()[1:]

    snapshot = tmp_path / "0123abc"
    snapshot.mkdir()
    for path in checkpoint.glob("*.json"):
        (snapshot / path.name).write_bytes(path.read_bytes())
    files: dict[str, dict[str, TensorInfo]] = {}
    with Checkpoint(checkpoint) as opened:
        for tensor in opened.tensors.values():
            header = TensorInfo(dtype="F32", shape=list(tensor.shape), data_offsets=(0, tensor.nbytes))
            files.setdefault(tensor.file, {})[tensor.name] = header
    headers = {file: SafetensorsFileMetadata(metadata={}, tensors=tensors) for file, tensors in files.items()}

    def get_safetensors_metadata(self: HfApi, repo_id: str, *, revision: str) -> SafetensorsRepoMetadata:
        assert (repo_id, revision) == ("some/llama", "0123abc")
        return SafetensorsRepoMetadata(metadata=None, sharded=True, weight_map={}, files_metadata=headers)

    def locate_files(name: str, patterns: list[str], *, revision: str) -> Path:
        assert (name, revision) == ("some/llama", "main")
        assert not any("safetensors" in pattern for pattern in patterns if pattern != "model.safetensors.index.json")
        return snapshot

    monkeypatch.setattr(info, "locate_files", locate_files)
    monkeypatch.setattr(HfApi, "get_safetensors_metadata", get_safetensors_metadata)
    assert cli.main(["info", "some/llama", "--revision", "main"]) == 0
    assert capsys.readouterr().out.splitlines() == ["some/llama", *expected]


# generate


def test_generate_prints_the_prompt_and_its_continuation(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = Tokenizer.from_pretrained(checkpoint).encode("Grüße")
    assert cli.main(["generate", str(checkpoint), "--prompt", "Grüße", "--max-new-tokens", "12"]) == 0
    expected = continuation(checkpoint, ids, max_new_tokens=12)
    assert len(expected) > 3
    assert capsys.readouterr().out == f"Grüße{expected}\n"


def test_generate_reads_the_prompt_from_standard_input(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standard_input(monkeypatch, "one\ntwo")
    assert cli.main(["generate", str(checkpoint), "--prompt", "-", "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("one\ntwo")


FILE = {"do_sample": True, "temperature": 2.0, "top_k": 7, "repetition_penalty": 1.5, "max_new_tokens": 6,
        "suppress_tokens": [10, 200], "num_return_sequences": 2}  # fmt: skip


@pytest.fixture
def sampling_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint with a generation_config.json that samples."""
    directory = shutil.copytree(checkpoint, tmp_path / "sampling")
    (directory / "generation_config.json").write_text(json.dumps(FILE))
    return directory


@pytest.mark.parametrize(
    "arguments, options",
    [
        ("", FILE),
        ("--temperature 0", FILE | {"do_sample": False, "temperature": 1.0, "top_k": None}),
        ("--temperature 1 --max-new-tokens 4", FILE | {"temperature": 1.0, "max_new_tokens": 4}),
        ("--repetition-penalty 1 --top-k 2", FILE | {"repetition_penalty": 1.0, "top_k": 2}),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat", "batch"])
def test_options_of_generation_config_are_defaults(
    command: str, arguments: str, options: dict[str, Any], checkpoint: Path, sampling_checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    ids, seed = tokenizer.encode("one"), 5
    if command == "generate":
        call = ["generate", str(sampling_checkpoint), "--prompt", "one"]
    elif command == "chat":
        standard_input(monkeypatch, "one")
        call = ["chat", str(sampling_checkpoint)]
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "one"}], add_generation_prompt=True)
    else:
        write_lines(tmp_path / "prompts.jsonl", [{"prompt": "one", "seed": seed}])
        call = batch_command(sampling_checkpoint, tmp_path)
    assert cli.main([*call, "--device", "cpu", "--seed", str(seed), *arguments.split()]) == 0
    generator = torch.Generator().manual_seed(seed) if options["do_sample"] else None
    expected = continuation(checkpoint, ids, generator=generator, **options | {"num_return_sequences": 1})
    if command == "batch":
        assert read_results(tmp_path / "results.jsonl")[1]["text"] == expected
    else:
        assert capsys.readouterr().out == ("one" if command == "generate" else "") + f"{expected}\n"


def test_generate_applies_the_chat_template_on_request(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["generate", str(checkpoint), "--prompt", "Hello", "--max-new-tokens", "9"]
    assert cli.main(call) == 0
    assert (
        capsys.readouterr().err == "The prompt is continued as plain text. --chat applies the model's chat template.\n"
    )
    assert cli.main([*call, "--chat"]) == 0
    messages = [{"role": "user", "content": "Hello"}]
    ids = Tokenizer.from_pretrained(checkpoint).apply_chat_template(messages, add_generation_prompt=True)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (continuation(checkpoint, ids, max_new_tokens=9) + "\n", "")


@pytest.mark.parametrize(
    "arguments, options",
    [
        ("--temperature 2", {"temperature": 2.0}),
        ("--top-k 3", {"top_k": 3}),
        ("--top-p 0.5", {"top_p": 0.5}),
        ("--min-p 0.1", {"min_p": 0.1}),
        ("--top-k 9 --repetition-penalty 3", {"top_k": 9, "repetition_penalty": 3.0}),
    ],
)
def test_a_sampling_option_samples_and_a_seed_repeats(
    arguments: str, options: dict[str, Any], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options_of_all = ["--prompt", "x", "--max-new-tokens", "20", "--device", "cpu"]
    command = ["generate", str(checkpoint), *options_of_all, *arguments.split()]
    outputs = []
    for seed in (1, 1, 2):
        assert cli.main([*command, "--seed", str(seed)]) == 0
        outputs.append(capsys.readouterr().out)
    ids = Tokenizer.from_pretrained(checkpoint).encode("x")
    generator = torch.Generator().manual_seed(1)
    expected = continuation(checkpoint, ids, max_new_tokens=20, do_sample=True, generator=generator, **options)
    assert outputs[0] == outputs[1] == f"x{expected}\n"
    assert outputs[2] != outputs[0]


@pytest.mark.parametrize("drafts", [["--prompt-lookup", "4"], ["--draft", "{}"]], ids=str)
def test_drafts_leave_the_continuation_unchanged(
    drafts: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafters: list[type] = []
    for drafter in (PromptLookup, DraftModel):
        propose = drafter.propose

        def record(self: Any, *arguments: Any, propose: Any = propose) -> torch.Tensor:
            drafters.append(type(self))
            drafts: torch.Tensor = propose(self, *arguments)
            return drafts

        monkeypatch.setattr(drafter, "propose", record)
    command = ["generate", str(checkpoint), "--prompt", "one two one", "--max-new-tokens", "12", "--device", "cpu"]
    outputs = []
    for arguments in ([], [argument.format(checkpoint) for argument in drafts]):
        assert cli.main([*command, *arguments]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert set(drafters) == {PromptLookup if drafts[0] == "--prompt-lookup" else DraftModel}


def test_generate_writes_json_of_a_schema(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", {"no": 1}]}')
    command = ["generate", str(checkpoint), "--chat", "--prompt", "x", "--schema", str(schema)]
    assert cli.main([*command, "--max-new-tokens", "30"]) == 0
    assert json.loads(capsys.readouterr().out) in ("yes", {"no": 1})
    schema.write_text('{"type": "strin"}')
    assert cli.main(command) == 1
    assert f"{schema}: not a supported grammar; got Invalid type: strin" in capsys.readouterr().err
    schema.write_text("[]")
    assert cli.main(command) == 1
    assert f"{schema}: is not a JSON object" in capsys.readouterr().err
    assert cli.main([*command[:-1], str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_generate_warns_beyond_the_context(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Defaults end with the context; more that is asked for is generated, as by transformers."""
    context = AutoModel.from_pretrained(checkpoint).config.max_position_embeddings
    ids = Tokenizer.from_pretrained(checkpoint).encode("x")
    command = ["generate", str(checkpoint), "--prompt", "x", "--device", "cpu", "--max-new-tokens"]
    for length in (context - len(ids), context):
        assert cli.main([*command, str(length)]) == 0
        captured = capsys.readouterr()
        given = f"{len(ids):,} tokens of the prompt and {length:,} new tokens exceed"
        expected = f"warning: {given} the model's context of {context:,} tokens\n"
        assert (expected in captured.err) == (length == context)
        assert captured.out == f"x{continuation(checkpoint, ids, max_new_tokens=length)}\n"


def test_generate_has_a_chat_template_of_a_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}, {{ messages[0].content }}")
    ids = Tokenizer.from_pretrained(checkpoint).encode("x, x", add_special_tokens=False)
    expected = f"{continuation(checkpoint, ids, max_new_tokens=5)}\n"
    options = ["--chat-template", str(tmp_path / "own.jinja"), "--max-new-tokens", "5", "--device", "cpu"]
    standard_input(monkeypatch, "x")
    for command in (["generate", str(checkpoint), "--prompt", "x", "--chat"], ["chat", str(checkpoint)]):
        assert cli.main([*command, *options]) == 0
        assert capsys.readouterr().out == expected


def test_generate_stops_after_a_text(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(checkpoint), "--prompt", "x", "--max-new-tokens", "12"]
    assert cli.main(command) == 0
    everything = capsys.readouterr().out
    assert cli.main([*command, "--stop", everything[4]]) == 0
    assert capsys.readouterr().out == everything[: everything.index(everything[4], 1) + 1] + "\n"


def test_generate_runs_in_the_dtype_on_the_device(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments_used: dict[str, Any] = {}
    from_pretrained = AutoModel.from_pretrained

    def spy(name: str, **options: Any) -> CausalLM:
        arguments_used.update(options)
        return from_pretrained(name, **options)

    monkeypatch.setattr(AutoModel, "from_pretrained", spy)
    arguments = ["--prompt", "x", "--max-new-tokens", "1", "--dtype", "float64", "--device", "cpu"]
    assert cli.main(["generate", str(checkpoint), *arguments]) == 0
    assert arguments_used == {"revision": None, "dtype": "float64", "device": torch.device("cpu")}


@pytest.mark.parametrize("count", [1, 2])
def test_generate_answers_a_question_about_images(
    count: int, pictures: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    images = [word for picture in pictures[:count] for word in ("--image", str(picture))]
    assert cli.main(["generate", str(VISION_MODEL), *images, "--prompt", "What?", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == answer_to([user("What?", *pictures[:count])]) + "\n"


def test_generate_without_a_chat_template_needs_placeholders(
    pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in VISION_MODEL.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    command = ["generate", str(tmp_path), "--image", str(pictures[0]), "--max-new-tokens", "8", "--prompt"]
    assert cli.main([*command, "<|image_pad|>a red"]) == 0
    assert capsys.readouterr().out == answer_to("<|image_pad|>a red", images=[str(pictures[0])]) + "\n"
    assert cli.main([*command, "a red"]) == 1
    assert "Mark each one by a <|image_pad|> in the text" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
def test_without_pillow_the_error_names_the_extra(
    command: str, pictures: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    image = [str(VISION_MODEL), "--image", str(pictures[0])]
    arguments = {"generate": [*image, "--prompt", "x"], "chat": image, "demo": ["--vision"]}
    assert cli.main([command, *arguments[command]]) == 1
    assert "pip install ligerzoo[vision]" in capsys.readouterr().err


# generate --batch


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_results(path: Path) -> dict[int, dict[str, Any]]:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({result["line"] for result in results}) == len(results)
    return {result["line"]: result for result in results}


def batch_command(checkpoint: Path, tmp_path: Path, *options: str) -> list[str]:
    files = ["--batch", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "results.jsonl")]
    return ["generate", str(checkpoint), *files, "--device", "cpu", *options]


PROMPTS: list[Any] = [
    {"prompt": "one"},
    "",
    {"prompt": "two, longer", "id": "second", "max_new_tokens": 3},
    {"messages": [{"role": "user", "content": "Hello"}], "id": 7},
    {"prompt": "four", "temperature": 2.0, "seed": 5},
    {"prompt": "one", "temperature": 2.0},
    {"prompt": "one", "temperature": 2.0},
]


@pytest.mark.parametrize("batch_size", ["1", "3", "32"])
def test_a_batch_has_the_results_of_each_prompt_alone(
    batch_size: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "prompts.jsonl", PROMPTS)
    options = ("--max-new-tokens", "9", "--seed", "1", "--batch-size", batch_size)
    assert cli.main(batch_command(checkpoint, tmp_path, *options)) == 0
    results = read_results(tmp_path / "results.jsonl")
    assert results.keys() == {1, 3, 4, 5, 6, 7}

    tokenizer = Tokenizer.from_pretrained(checkpoint)
    chat = tokenizer.apply_chat_template(PROMPTS[3]["messages"], add_generation_prompt=True)
    assert results[1]["text"] == continuation(checkpoint, tokenizer.encode("one"), max_new_tokens=9)
    assert results[3]["text"] == continuation(checkpoint, tokenizer.encode("two, longer"), max_new_tokens=3)
    assert results[4]["text"] == continuation(checkpoint, chat, max_new_tokens=9)
    assert {key: value for key, value in results[3].items() if key != "text"} == {
        "line": 3, "id": "second", "finish_reason": "length", "prompt_tokens": 12, "new_tokens": 3,
    }  # fmt: skip
    assert (results[4]["id"], results[4]["prompt_tokens"]) == (7, len(chat))
    assert "id" not in results[1]
    assert results[6]["text"] != results[7]["text"]  # the seed of a line depends on its number

    total = sum(result["new_tokens"] for result in results.values())
    assert capsys.readouterr().out.startswith(f"{tmp_path}/results.jsonl: 6 new results, {total} tokens, ")

    again = tmp_path / "again"
    again.mkdir()
    write_lines(again / "prompts.jsonl", PROMPTS)
    assert cli.main(batch_command(checkpoint, again, *options[:-1], "2")) == 0
    assert read_results(again / "results.jsonl") == results


def test_a_batch_stops_after_a_text_like_a_prompt(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = continuation(checkpoint, Tokenizer.from_pretrained(checkpoint).encode("x"), max_new_tokens=12)[3]
    options = ["--max-new-tokens", "12", "--stop", stop]
    assert cli.main(["generate", str(checkpoint), "--prompt", "x", *options]) == 0
    printed = capsys.readouterr().out
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "x"}, {"prompt": "x", "stop": None}])
    assert cli.main(batch_command(checkpoint, tmp_path, *options)) == 0
    for result in read_results(tmp_path / "results.jsonl").values():
        assert f"x{result['text']}\n" == printed
        assert result["finish_reason"] == "stop"


def test_lines_have_the_options_of_generate(checkpoint: Path, tmp_path: Path) -> None:
    ids = Tokenizer.from_pretrained(checkpoint).encode("x")
    variants: list[dict[str, Any]] = [
        {}, {"no_repeat_ngram_size": 1}, {"bad_words_ids": [[5], [6, 7]]}, {"repetition_penalty": 5.0},
        {"min_new_tokens": 9},
    ]  # fmt: skip
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "x", **options} for options in variants])
    assert cli.main(batch_command(checkpoint, tmp_path, "--max-new-tokens", "12", "--max-cache-tokens", "40")) == 0
    results = read_results(tmp_path / "results.jsonl")
    for line, options in enumerate(variants, 1):
        assert results[line]["text"] == continuation(checkpoint, ids, max_new_tokens=12, **options)


def test_a_batch_with_a_byte_order_mark_and_carriage_returns(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\r\n\r\n{"prompt": "x"}')
    assert cli.main(batch_command(checkpoint, tmp_path, "--max-new-tokens", "3")) == 0
    results = read_results(tmp_path / "results.jsonl")
    assert results.keys() == {1, 3}
    assert results[1]["text"] == results[3]["text"]


@pytest.mark.parametrize("name, dtype", [("auto", None), ("float8_e4m3fn", torch.float8_e4m3fn)])
def test_the_dtype_of_the_kv_cache(
    name: str, dtype: torch.dtype | None, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, options = Tokenizer.from_pretrained(checkpoint).encode("x"), ["--max-new-tokens", "40", "--cache-dtype", name]
    expected, other = (
        continuation(checkpoint, ids, max_new_tokens=40, cache_dtype=cache_dtype)
        for cache_dtype in (dtype, torch.float8_e4m3fn if dtype is None else None)
    )
    assert expected != other
    assert cli.main(["generate", str(checkpoint), "--prompt", "x", "--device", "cpu", *options]) == 0
    assert capsys.readouterr().out == f"x{expected}\n"
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "x"}])
    assert cli.main(batch_command(checkpoint, tmp_path, *options)) == 0
    assert read_results(tmp_path / "results.jsonl")[1]["text"] == expected


def test_a_line_that_exceeds_the_memory_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "x"}, {"prompt": "x" * 30}])
    assert cli.main(batch_command(checkpoint, tmp_path, "--max-new-tokens", "12", "--max-cache-tokens", "40")) == 1
    message = "prompts.jsonl, line 2: prompt: the context is too long; got 31 tokens of the prompt and 12 new tokens"
    assert f"{message}; expected at most 40" in capsys.readouterr().err


def test_broken_logits_name_the_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ligerzoo.generate import BrokenLogitsError, Scheduler

    def step(scheduler: Scheduler) -> Any:
        raise BrokenLogitsError([1])

    monkeypatch.setattr(Scheduler, "step", step)
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "x"}, "", {"prompt": "y"}])
    assert cli.main(batch_command(checkpoint, tmp_path)) == 1
    assert "logits of line 3: no token can be chosen" in capsys.readouterr().err


def test_an_interrupted_batch_resumes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ligerzoo.serve.batch import Results

    write_lines(tmp_path / "prompts.jsonl", PROMPTS)
    command = batch_command(checkpoint, tmp_path, "--max-new-tokens", "9", "--seed", "1", "--batch-size", "2")
    assert cli.main(command) == 0
    output = tmp_path / "results.jsonl"
    complete = read_results(output)
    output.unlink()

    write, count = Results.write, 0

    def interrupt(self: Results, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        write(self, *arguments)

    monkeypatch.setattr(Results, "write", interrupt)
    capsys.readouterr()
    assert cli.main(command) == 130
    assert capsys.readouterr().err == f"{output} has the finished results; --resume continues.\n\n"
    assert len(read_results(output)) == 2
    with output.open("a") as file:
        file.write('{"line": 7, "te')  # as after a kill
    monkeypatch.setattr(Results, "write", write)
    assert cli.main(command) == 1
    assert "already exists" in capsys.readouterr().err
    assert cli.main([*command, "--resume"]) == 0
    assert read_results(output) == complete
    assert "4 new results" in capsys.readouterr().out
    assert cli.main([*command, "--resume"]) == 0  # nothing remains
    assert read_results(output) == complete

    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "one", "id": "other"}, *PROMPTS[1:]])
    assert cli.main([*command, "--resume"]) == 1
    assert "the result is not of this input; got line 1 with id null" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not valid JSON"),
        ('{"prompt": "x", "id": NaN}', "not valid JSON: NaN is not a JSON number"),
        ("[1]", "invalid line; got '[1]'; expected an object with"),
        ({"prompt": "x", "messages": []}, "invalid line"),
        ({"text": "x"}, "invalid line"),
        ({"prompt": 5}, "prompt: not a text; got 5"),
        ({"prompt": ["x"]}, "prompt: not a text; got"),
        ({"prompt": "x", "max_tokens": 5}, "max_tokens: unknown field. Did you mean 'max_new_tokens'?"),
        ({"prompt": "x", "top_p": 2}, "top_p: invalid value; got 2; expected a number greater than 0 and at most 1"),
        ({"messages": [{"role": "user", "content": "x"}, 5]}, "messages[1]: invalid value; got 5; expected an object"),
        (
            {"prompt": "x", "bad_words_ids": [[2**30]]},
            "bad_words_ids: invalid value; got 1073741824; expected token ids",
        ),
        ({"prompt": "x" * 2047}, "the context is too long; got 2048 tokens of the prompt and 1 new tokens"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_an_invalid_line_is_named_before_the_first_prompt_runs(
    line: Any, message: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "x"}, "", line])
    assert cli.main(batch_command(checkpoint, tmp_path, "--max-new-tokens", "1")) == 1
    error_output = capsys.readouterr().err
    assert f"error: {path}, line 3: " in error_output
    assert message in error_output
    assert error_output.count("\n") == 1
    assert not (tmp_path / "results.jsonl").exists()


def test_all_invalid_lines_are_named(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A malformed chat template is one problem, named once."""
    template = tmp_path / "broken.jinja"
    template.write_text("{% for x in %}")
    chat = {"messages": [{"role": "user", "content": "x"}]}
    path = write_lines(tmp_path / "prompts.jsonl", [chat, "{", chat, {"prompt": "x"}, *[{"prompt": 5}] * 21])
    assert cli.main(batch_command(checkpoint, tmp_path, "--chat-template", str(template))) == 1
    lines = capsys.readouterr().err.splitlines()
    starts = [f"{path}, line {line}: " for line in (1, 2, *range(5, 23))]
    assert all(line.startswith(f"ligerzoo: error: {start}") for line, start in zip(lines, starts, strict=False))
    assert lines[20:] == ["ligerzoo: error: 3 more records have problems"]


# serve


def test_without_the_packages_of_the_server_only_serve_fails(checkpoint: Path, tmp_path: Path) -> None:
    script = "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = None\n"
    script += "from ligerzoo import cli; sys.exit(cli.main(sys.argv[1:]))"
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "x"}])
    for arguments in (batch_command(checkpoint, tmp_path, "--max-new-tokens", "1"), ["serve", str(checkpoint)]):
        command = [sys.executable, "-c", script, *arguments]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if arguments[0] == "serve":
            assert result.returncode == 1
            assert "is not installed. Run `pip install ligerzoo[serve]`." in result.stderr
        else:
            assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "is_busy, cache_dtype", [pytest.param(False, "auto", marks=pytest.mark.thorough), (True, "float8_e4m3fn")]
)
def test_serve_answers_a_client_until_ctrl_c(is_busy: bool, cache_dtype: str, checkpoint: Path, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    options = ["--port", "0", "--device", "cpu", "--chat-template", str(template), "--name", "tiny"]
    options += ["--cache-dtype", cache_dtype]
    command = [sys.executable, "-m", "ligerzoo", "serve", str(checkpoint), *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            announcement = process.stdout.readline()
            assert announcement.startswith("tiny at http://127.0.0.1:")
            with openai.OpenAI(base_url=announcement.split()[2].rstrip("."), api_key="none") as client:
                stream = client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=40, temperature=0, stream=True
                )
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                if is_busy:
                    running = client.completions.create(model="tiny", prompt="x", max_tokens=2000, stream=True)
                    next(iter(running))
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 130
        finally:
            process.kill()
        assert process.stderr is not None
        assert process.stderr.read() == "\n"
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    ids, dtypes = tokenizer.encode("x", add_special_tokens=False), {"auto": None, "float8_e4m3fn": torch.float8_e4m3fn}
    texts = {name: continuation(checkpoint, ids, max_new_tokens=40, cache_dtype=x) for name, x in dtypes.items()}
    assert text == texts[cache_dtype]
    assert len(set(texts.values())) == 2


def test_serve_refuses_a_port_in_use(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", str(checkpoint), "--port", port]) == 1
    assert f"got 127.0.0.1, {port}: Address already in use" in capsys.readouterr().err


# chat


def test_chat_adds_images_to_the_next_question(
    pictures: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standard_input(monkeypatch, f"What?\n/image {pictures[1]}\n/image   {pictures[2]} \nAnd there?\nHm?\n")
    # On the device of `answer_to`: the answer to an unknown question depends on the last bits.
    command = ["chat", str(VISION_MODEL), "--image", str(pictures[0]), "--max-new-tokens", "8", "--device", "cpu"]
    assert cli.main(command) == 0
    messages, expected = [], ""
    for question in (user("What?", pictures[0]), user("And there?", *pictures[1:]), user("Hm?")):
        messages.append(question)
        messages.append(assistant(answer_to(messages)))
        expected += messages[-1]["content"] + "\n"
    assert capsys.readouterr().out == expected


def test_chat_without_images_uses_the_processor_s_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in VISION_MODEL.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    standard_input(monkeypatch, "Hello\n")
    assert cli.main(["chat", str(tmp_path), "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == answer_to([user("Hello")]) + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_mistyped_image_name_does_not_end_a_conversation(
    pictures: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = f"/image\n/image /no/such.png\n/image {pictures[0]}\nWhat?\n"
    standard_input(monkeypatch, typed)
    assert cli.main(["chat", str(VISION_MODEL), "--max-new-tokens", "8"]) == 1  # in a script it does end it
    assert "/image: no file name; expected /image FILE" in capsys.readouterr().err

    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    assert cli.main(["chat", str(VISION_MODEL), "--max-new-tokens", "8"]) == 0
    out, error_output = capsys.readouterr()
    assert out.removeprefix("you> " * 4).removesuffix("you> ") == answer_to([user("What?", pictures[0])]) + "\n"
    hint, *errors = [line for line in error_output.splitlines() if "no units for bfloat16" not in line]
    assert "/image FILE" in hint
    assert len(errors) == 2
    assert "/no/such.png" in errors[1]


def test_chat_with_a_text_model_refuses_images(
    checkpoint: Path, pictures: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standard_input(monkeypatch, f"/image {pictures[0]}\n")
    assert cli.main(["chat", str(checkpoint)]) == 1
    assert "the model reads text only" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert cli.main(["chat", str(checkpoint)]) == 0
    assert "/image" not in capsys.readouterr().err


def test_chat_answers_line_by_line_and_remembers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standard_input(monkeypatch, "Hello\n\n  \nAgain\n")
    assert cli.main(["chat", str(checkpoint), "--system", "Be kind.", "--max-new-tokens", "8"]) == 0

    tokenizer = Tokenizer.from_pretrained(checkpoint)
    messages, expected = [{"role": "system", "content": "Be kind."}], ""
    for text in ("Hello", "Again"):
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        answer = continuation(checkpoint, prompt, max_new_tokens=8)
        messages.append({"role": "assistant", "content": answer})
        expected += f"{answer}\n"
    assert capsys.readouterr().out == expected


def test_chat_reuses_its_kv_cache(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer processes the tokens that the text does not share with earlier ones."""
    processed, lengths, forward = [], [], Llama.forward

    def record(self: Llama, input_ids: torch.Tensor, *args: Any, past_key_values: Any, **options: Any) -> Any:
        if input_ids.shape[1] > 1:
            processed.append(input_ids.shape[1])
            lengths.append(past_key_values.length + input_ids.shape[1])
        return forward(self, input_ids, *args, past_key_values=past_key_values, **options)

    monkeypatch.setattr(Llama, "forward", record)
    standard_input(monkeypatch, "Hello\nAgain\nAnd again\n")
    assert cli.main(["chat", str(checkpoint), "--system", "Be kind.", "--max-new-tokens", "8", "--device", "cpu"]) == 0
    assert processed[0] == lengths[0]
    for answer in (1, 2):  # an answer of random bytes may have other tokens the next time
        assert processed[answer] <= lengths[answer] - lengths[answer - 1]


def test_chat_refuses_a_model_without_a_chat_template(
    base_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", str(base_checkpoint)]) == 1
    assert "no chat template" in capsys.readouterr().err


# convert


def stored(directory: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(directory) as opened:
        return {name: opened.read(name).clone() for name in opened.tensors}


def test_convert_copies_weights_config_and_tokenizer(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "copy"
    target.mkdir()  # an empty directory is allowed
    assert cli.main(["convert", str(checkpoint), str(target)]) == 0
    before, after = stored(checkpoint), stored(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [path.name for path in target.glob("*.safetensors")] == ["model.safetensors"]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (checkpoint / name).read_bytes()
    assert capsys.readouterr().out.startswith(f"{target}: 4 files, ")


def test_convert_copies_the_processor(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    assert cli.main(["convert", str(VISION_MODEL), str(target)]) == 0
    copied = {path.name: path.read_bytes() for path in target.iterdir()}
    assert {"preprocessor_config.json", "chat_template.jinja", "tokenizer.json"} <= copied.keys()
    assert copied == {name: (VISION_MODEL / name).read_bytes() for name in copied}


def test_convert_changes_dtype_and_shards(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    assert cli.main(["convert", str(checkpoint), str(target), "--dtype", "bfloat16", "--max-shard-size", "10KB"]) == 0
    before, after = stored(checkpoint), stored(target)
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    assert len(list(target.glob("*.safetensors"))) > 1
    assert AutoModel.from_pretrained(target).dtype == torch.bfloat16


@pytest.mark.parametrize("format_, prefix", [("hf", ""), ("native", "model.")])
def test_convert_to_either_tensor_names(format_: str, prefix: str, checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"  # a checkpoint of the decoder only has no prefix
    model = AutoModel.from_pretrained(checkpoint)
    model.save_pretrained(bare)
    names = {name.removeprefix("model."): tensor for name, tensor in load_file(bare / "model.safetensors").items()}
    save_file(names, bare / "model.safetensors")
    target = tmp_path / "new"
    assert cli.main(["convert", str(bare), str(target), "--to", format_]) == 0
    assert stored(target).keys() == {prefix + name for name in names}


def test_convert_does_not_overwrite_files(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(hub, "save")
    (tmp_path / "letter.txt").write_text("dear")
    for target in (tmp_path, tmp_path / "letter.txt"):
        assert cli.main(["convert", str(checkpoint), str(target)]) == 1
        assert "already exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_chat_template_in_another_encoding_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("some text " * 50)
    (tmp_path / "template.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    arguments = ["tokenizer", str(tmp_path / "text.txt"), "--vocab-size", "300", "--output", str(tmp_path / "new")]
    assert cli.main([*arguments, "--chat-template", str(tmp_path / "template.jinja")]) == 1
    assert "error: --chat-template: cannot be read; got " in capsys.readouterr().err

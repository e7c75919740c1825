"""Parsers of the commands that describe, run and convert models."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ligerzoo.checks import argument_type
from ligerzoo.cli import commands
from ligerzoo.cli.options import (
    AT_LEAST_1,
    COUNT,
    DEFAULT_BATCH_SIZE,
    MODEL_HELP,
    PORT,
    POSITIVE,
    SEED,
    STOP,
    Subparsers,
    add_device_option,
    add_dtype_option,
    add_image_option,
    add_model_arguments,
    add_option,
    add_parser,
    add_revision_option,
)
from ligerzoo.optimizer_table import OPTIMIZERS
from ligerzoo.sampling_options import OFFERS

TRAINING: dict[str, tuple[str, object]] = {
    "--batch": ("batch_size", 1),
    "--seq": ("seq_length", 2048),
    "--gpus": ("gpus", 1),
    "--method": ("method", "full"),
    "--lora-rank": ("lora_rank", 16),
    "--optimizer": ("optimizer", "adamw"),
    "--dtype": ("dtype", "auto"),
    "--gpu-memory": ("gpu_memory", None),
}
"""Options of `info --train`: argument of `describe_training`, and default."""


def add_info(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        commands.info,
        "show the architecture, parameters, memory, files and tokenizer of a checkpoint",
        epilog="""\
examples:
  ligerzoo info HuggingFaceTB/SmolLM2-135M
  ligerzoo info path/to/checkpoint
  ligerzoo info path/to/checkpoint --train --batch 4 --seq 8192 --gpu-memory 80
  ligerzoo info path/to/checkpoint --train --batch 1 --seq 4096 --gpus 8 --method lora
  ligerzoo info --architectures

Reads the configs, the tokenizer and the headers of the weight files only. With --train, it reads config.json only, and
counts the memory of a training step on an H100 or H200; see docs/memory.md.""",
        check=check_training,
    )
    parser.set_defaults(training=TRAINING)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    subject.add_argument("--architectures", action="store_true", help="list all supported architectures instead")
    add_revision_option(parser)
    training = parser.add_argument_group("training")
    training.add_argument("--train", action="store_true", help="predict the FLOPs and memory of training instead")
    training.add_argument("--method", choices=("full", "lora"), help="train all weights, or adapters (default full)")
    for flag, kind, metavar, description in (
        ("--batch", AT_LEAST_1, "B", "rows of a batch on one GPU (default {})"),
        ("--seq", AT_LEAST_1, "T", "tokens of a row (default {})"),
        ("--gpus", AT_LEAST_1, "N", "GPUs that share the weights, by FSDP2 (default {})"),
        ("--lora-rank", AT_LEAST_1, "R", "rank of the adapters (default {})"),
        ("--optimizer", str, "NAME", f"{', '.join(OPTIMIZERS)} (default {{}})"),
        ("--dtype", str, "DTYPE", "dtype of the weights (default: that of config.json, or else bfloat16)"),
        ("--gpu-memory", POSITIVE, "GIB", "memory of a GPU: also show the setting that fits it"),
    ):
        dest, default = TRAINING[flag]
        add_option(training, flag, kind, description.format(default), metavar=metavar, dest=dest)


def check_training(options: argparse.Namespace) -> None:
    """Completes the options of --train. Raises SystemExit if one is given without it."""
    for flag, (name, default) in TRAINING.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif not options.train:
            options.parser.error(f"argument {flag}: only allowed with --train")
    if options.train and options.model is None:
        options.parser.error("argument --train: only allowed with MODEL")


def add_generate(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        commands.generate,
        "continue a text, or answer a question about images",
        epilog="""\
examples:
  ligerzoo generate HuggingFaceTB/SmolLM2-135M --prompt "The capital of France is" --max-new-tokens 20
  ligerzoo generate HuggingFaceTB/SmolLM2-135M --prompt "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1
  ligerzoo generate path/to/checkpoint --prompt - < prompt.txt
  ligerzoo generate HuggingFaceTB/SmolLM2-360M-Instruct --chat --prompt "What is a liger?"
  ligerzoo generate Qwen/Qwen2-VL-2B-Instruct --image cat.png --prompt "What is the cat doing?"
  ligerzoo generate path/to/checkpoint --batch prompts.jsonl --output results.jsonl

Options that are left out have the values of the checkpoint's generation_config.json; many chat models sample by
default. Otherwise, and with --temperature 0, each token is the most likely one.

With --chat, the prompt is a question: the chat template formats it as a user message, and only the answer is printed.
`ligerzoo chat` continues the conversation. Without --chat, the prompt is plain text.

With --image, the prompt is a question. The chat template formats the images and the question as one user message, and
only the answer is printed. Without a chat template, the prompt must contain one placeholder token for each image.

With --batch, each line of the file is one prompt, and many are continued at a time:
  {"prompt": "The capital of France is"}
  {"messages": [{"role": "user", "content": "Hello"}], "id": "greeting", "temperature": 0.7, "max_new_tokens": 50}
A line may have an "id", and options that replace those of the command line. All lines are checked first. Results are
written in the order in which they finish, with the number of the line. After an interruption, --resume continues.""",
        check=check_batch,
    )
    add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help='text to continue; "-" reads standard input')
    prompt.add_argument("--batch", type=Path, metavar="FILE", help="JSONL file with one prompt in each line")
    parser.add_argument("--chat", action="store_true", help="apply the chat template to the prompt")
    add_image_option(parser, "image to ask about")
    add_generation_options(parser, max_new_tokens=commands.GENERATED_TOKENS)
    add_cache_dtype_option(parser)
    batch = parser.add_argument_group("batch", "Options of --batch.")
    batch.add_argument("--output", type=Path, metavar="FILE", help="new JSONL file for the results")
    batch.add_argument("--resume", action="store_true", help="continue the output file of an interrupted run")
    add_batching_options(batch, batch_size=None)


def check_batch(options: argparse.Namespace) -> None:
    """Completes the options of a batch. Raises SystemExit if one is missing, or given without --batch."""
    names = ("output", "resume", "batch_size", "max_cache_tokens"), ("chat", "image", "draft", "prompt_lookup")
    is_batch = options.batch is not None
    for name in names[is_batch]:
        if getattr(options, name):
            only = "not allowed" if is_batch else "only allowed"
            options.parser.error(f"argument --{name.replace('_', '-')}: {only} with --batch")
    if is_batch and options.output is None:
        options.parser.error("argument --output: required with --batch")
    options.batch_size = options.batch_size or DEFAULT_BATCH_SIZE


def add_chat(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        commands.chat,
        "chat with a model, one line at a time",
        epilog="""\
examples:
  ligerzoo chat HuggingFaceTB/SmolLM2-360M-Instruct
  ligerzoo chat HuggingFaceTB/SmolLM2-360M-Instruct --system "Answer in one sentence." --temperature 0.7
  printf 'What is a liger?\\nHow big is one?\\n' | ligerzoo chat HuggingFaceTB/SmolLM2-360M-Instruct
  ligerzoo chat Qwen/Qwen2-VL-2B-Instruct --image cat.png

The model must have a chat template. The conversation ends with the input. If the model reads images, the line
  /image FILE
adds an image to the next question. Repeat it to add several.""",
    )
    add_model_arguments(parser)
    add_image_option(parser, "image for the first question")
    parser.add_argument("--system", metavar="TEXT", help="system message: instructions for the whole conversation")
    add_generation_options(parser, max_new_tokens=commands.ANSWER_TOKENS)


def add_serve(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        commands.serve,
        "serve a model over HTTP, with OpenAI's API for chats and completions",
        epilog="""\
examples:
  ligerzoo serve HuggingFaceTB/SmolLM2-360M-Instruct
  ligerzoo serve path/to/checkpoint --port 8001 --name my-model --batch-size 64

The server is for a laboratory: it has no users, encryption or rate limits, so it listens on this machine only. Whoever
can reach it can use the model, unless it has a key. Needs the packages of `pip install ligerzoo[serve]`. Ctrl-C stops
it.""",
    )
    add_model_arguments(parser)
    add = partial(add_option, parser)
    add("--host", str, "address to listen on", "127.0.0.1", metavar="HOST")
    add("--port", PORT, "port; 0 finds a free one", 8000)
    allowed_host = "further name of the server that clients may use, such as lab.example.org; may be repeated"
    add("--allowed-host", str, allowed_host, metavar="NAME", repeats=True)
    add("--api-key", str, "key that clients must have (default: $LIGERZOO_API_KEY, else no key)", metavar="KEY")
    add("--name", str, "the model's name for clients (default: MODEL, of a directory its last part)", metavar="NAME")
    add("--chat-template", Path, "jinja file instead of the model's template", metavar="FILE")
    add_batching_options(parser, batch_size=DEFAULT_BATCH_SIZE)
    add("--max-queue", COUNT, "continuations that may wait; clients get status 503 for more", 256)
    add("--max-context", AT_LEAST_1, "tokens of prompt and continuation (default: the model's)")
    add("--max-body-mib", AT_LEAST_1, "largest request in MiB", 10)
    add_dtype_option(parser)
    add_cache_dtype_option(parser)
    add_device_option(parser)


def add_convert(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        commands.convert,
        "write a checkpoint with other file sizes, another dtype, or ligerzoo's tensor names",
        epilog="""\
examples:
  ligerzoo convert HuggingFaceTB/SmolLM2-135M smollm2                        copy, byte for byte
  ligerzoo convert HuggingFaceTB/SmolLM2-135M smollm2-fp32 --dtype float32
  ligerzoo convert path/to/checkpoint small-files --max-shard-size 500MB
  ligerzoo convert path/to/checkpoint native-names --to native

Also copies the tokenizer and the processor. The model's files appear at once, when all of them are complete.""",
    )
    add_model_arguments(parser)
    parser.add_argument("target", metavar="TARGET", type=Path, help="new or empty directory")
    parser.add_argument(
        "--to", choices=("hf", "native"), default="hf", help="tensor names: Hugging Face's (default) or ligerzoo's"
    )
    add_option(parser, "--max-shard-size", str, "largest size of a weight file", "5GB", metavar="SIZE")
    add_dtype_option(parser)


def add_fuse(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        commands.fuse,
        "merge a LoRA adapter into its base model",
        epilog="""\
examples:
  ligerzoo fuse meta-llama/Llama-3.2-1B path/to/adapter my-model
  ligerzoo fuse path/to/base org/adapter my-model --max-shard-size 1GB

The adapter has PEFT's files, adapter_config.json and adapter_model.safetensors. The sums are computed in fp32 and
rounded once, to the dtype of the base. Also copies the tokenizer and the processor of the base.""",
    )
    parser.add_argument("base", metavar="BASE", help=MODEL_HELP)
    parser.add_argument("adapter", metavar="ADAPTER", help="directory or hub id of an adapter of PEFT")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="new or empty directory")
    add_option(parser, "--max-shard-size", str, "largest size of a weight file", "5GB", metavar="SIZE")


def add_demo(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        commands.demo,
        "load, run, train, save and check a small model, without network or GPU",
        epilog="""\
examples:
  ligerzoo demo
  ligerzoo demo --text my_module.py
  ligerzoo demo --vision --seed 7

The models are part of the package: a Llama trained on Python's standard library and, with --vision, a Qwen2-VL trained
to describe drawings of shapes and digits. The demo checks each of its steps. The exit code is 1 if a check fails.""",
        check=check_seed,
    )
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument("--text", type=Path, metavar="FILE", help="text to train on, at least about 10,000 characters")
    subject.add_argument(
        "--vision", action="store_true", help="run the demo of a model that reads images (needs Pillow)"
    )
    parser.add_argument("--seed", type=SEED, help="seed of the drawings (with --vision)")


def check_seed(options: argparse.Namespace) -> None:
    """Raises SystemExit if --seed is given without --vision."""
    if options.seed is not None and not options.vision:
        options.parser.error("argument --seed: only allowed with --vision")


def add_cache_dtype_option(parser: argparse._ActionsContainer) -> None:
    text = "dtype of the KV cache: float8_e4m3fn has half the memory of bfloat16 (default: that of keys and values)"
    parser.add_argument("--cache-dtype", choices=("auto", "float8_e4m3fn"), default="auto", help=text)


def add_batching_options(parser: argparse._ActionsContainer, batch_size: int | None) -> None:
    size = f"prompts that are decoded at a time (default: {DEFAULT_BATCH_SIZE})"
    parser.add_argument("--batch-size", type=AT_LEAST_1, default=batch_size, metavar="N", help=size)
    tokens = "tokens for which KV caches take up memory; longer prompts wait (default: 3/4 of the GPU's free memory)"
    add_option(parser, "--max-cache-tokens", AT_LEAST_1, tokens)


def add_generation_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    length = f"largest number of new tokens (default: that of generation_config.json, or else {max_new_tokens})"
    add_option(parser, "--max-new-tokens", COUNT, length)
    add_dtype_option(parser)
    add_device_option(parser)
    parser.add_argument(
        "--stop", action="append", type=STOP, metavar="TEXT", help="stop after this text; may be repeated"
    )
    sampling = parser.add_argument_group(
        "sampling", "The first four options enable sampling. Defaults are those of generation_config.json."
    )
    for name, offer in OFFERS.items():
        if offer.values is not None:
            flag = f"--{name.replace('_', '-')}"
            add_option(sampling, flag, argument_type(offer.values), offer.help, metavar=offer.metavar)
    add_option(sampling, "--seed", SEED, "seed of the random numbers that sampling draws", metavar="SEED")
    group = parser.add_argument_group("speculative decoding", "Less time for each token, and the same result.")
    drafts = group.add_mutually_exclusive_group()
    add_option(drafts, "--draft", str, "smaller checkpoint of the same vocabulary", metavar="MODEL")
    add_option(drafts, "--prompt-lookup", AT_LEAST_1, "draft N tokens from where the last ones have occurred")

"""`ligerzoo demo`: five steps with a small Llama that is part of the package. Needs no network and no GPU.

Each step is a function as a user would write it. The demo prints its source, runs it and checks the result.
"""

from __future__ import annotations

import ast
import inspect
import shlex
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ligerzoo.demo.output import Checks, print_step, relative_path
from ligerzoo.errors import LigerzooError
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.generate import TextStreamer
from ligerzoo.models import Llama
from ligerzoo.text.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parent / "assets" / "tiny-python-llama"
"""A Llama trained on the source of Python's standard library by tools/train_embedded_model.py."""

HELD_OUT = ("configparser.py", "difflib.py", "fractions.py", "ipaddress.py", "statistics.py")
"""Modules of the standard library that were excluded from its training data."""

PROMPT = "def remove_duplicates(items):\n    seen = set()\n    for"
PROMPT_AFTER_TRAINING = "def is_valid(address):\n    if"
WINDOW = 128
STEPS, BATCH = 30, 4


def load(directory: Path) -> tuple[Llama, Tokenizer]:
    """Loads a directory in Hugging Face format. A hub id such as "org/name" works too."""
    model = Llama.from_pretrained(directory, dtype="float32")
    tokenizer = Tokenizer.from_pretrained(directory)
    return model, tokenizer


def complete(model: Llama, tokenizer: Tokenizer, prompt: str) -> str:
    """Prints the prompt and its greedy continuation during generation."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    streamer = TextStreamer(tokenizer, skip_prompt=False)
    ids = model.generate(ids, max_new_tokens=60, repetition_penalty=1.2, streamer=streamer)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def fine_tune(model: Llama, windows: Tensor, steps: int = STEPS, batch: int = BATCH) -> None:
    """Trains in a plain PyTorch loop. With labels, the model returns the fused loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    for _ in (progress := tqdm(range(steps), unit="step")):
        rows = windows[torch.randint(len(windows), (batch,), generator=generator)]
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")


def save_and_reload(model: Llama, directory: Path) -> Llama:
    """Saves atomically, in files that transformers and vLLM read too."""
    model.save_pretrained(directory, max_shard_size="5MB")
    return Llama.from_pretrained(directory)


def generate_twice(model: Llama, tokenizer: Tokenizer, prompt: str) -> tuple[Tensor, Tensor]:
    """Generates with the KV cache, and without it."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    streamer = TextStreamer(tokenizer, skip_prompt=False)
    cached = model.generate(ids, max_new_tokens=60, repetition_penalty=1.2, streamer=streamer)
    uncached = model.generate(ids, max_new_tokens=60, repetition_penalty=1.2, use_cache=False)
    return cached, uncached


def composed() -> object:
    """A decoder composed from layers."""
    from torch import nn

    from ligerzoo.layers import Attention, Decoder, GatedMLP, PreNormBlock, RMSNorm, RotaryEmbedding

    attention = Attention(64, 4, num_kv_heads=2, rotary=RotaryEmbedding(16))
    block = PreNormBlock(RMSNorm(64), attention, RMSNorm(64), GatedMLP(64, 128))
    return Decoder(nn.Embedding(100, 64), [block], RMSNorm(64))


def run(text_file: Path | None = None) -> int:
    """Runs the demo.

    Args:
        text_file: UTF-8 text to fine-tune on. None uses a module of the standard library.

    Returns:
        The exit code: 0, or 1 if a check failed.

    Raises:
        LigerzooError: the text is too short or not valid UTF-8.
        OSError: the file cannot be read.
    """
    torch.set_num_threads(1)  # a small model gains little from more threads
    text_file = text_file or Path(sysconfig.get_path("stdlib")) / "ipaddress.py"
    try:
        text = text_file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise LigerzooError("not valid UTF-8", where=text_file, got=error, remedy="Pass a text file.") from error
    checks = Checks()

    print_step("1. Load a checkpoint", load)
    model, tokenizer = load(CHECKPOINT)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    checks.add(f"{parameters:,} parameters, each tensor equal to the files", equals_files(model, CHECKPOINT))

    print_step("2. Complete a Python function", complete)
    completed = complete(model, tokenizer, PROMPT)
    lines = count_python_lines(completed)
    checks.add(f"the first {lines} lines are valid Python", lines > PROMPT.count("\n") + 1)

    print_step(f"3. Fine-tune on {text_file.name}, which is not in its training data", fine_tune)
    training, validation = split(text, tokenizer)
    before = loss_on(model, validation)
    fine_tune(model, training)
    after = loss_on(model, validation)
    checks.add(f"the validation loss fell from {before:.3f} to {after:.3f}", after < before)

    print_step("4. Save and reload", save_and_reload)
    with tempfile.TemporaryDirectory() as directory:
        reloaded = save_and_reload(model, Path(directory) / "model")
        files = len(list(Path(directory, "model").glob("*.safetensors")))
        checks.add(f"every tensor is the same, bit for bit, after {files} files", same_bytes(model, reloaded))

        print_step("5. Generate with the reloaded model", generate_twice)
        cached, uncached = generate_twice(reloaded, tokenizer, PROMPT_AFTER_TRAINING)
        checks.add("the outputs with and without the cache are equal", torch.equal(cached, uncached))

    return checks.finish(next_commands())


# Checks


def equals_files(model: Llama, directory: Path) -> bool:
    """Returns whether the model's weights equal the tensors in the files, converted to the model's dtype."""
    weights = model.state_dict()
    with Checkpoint(directory) as files:
        return all(torch.equal(files.read(name).to(weights[name].dtype), weights[name]) for name in files.tensors)


def count_python_lines(text: str) -> int:
    """Returns the number of leading lines that are valid Python."""
    lines = text.splitlines()
    for count in range(len(lines), 0, -1):
        try:
            ast.parse("\n".join(lines[:count]))
        except SyntaxError:
            continue
        return count
    return 0


def split(text: str, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Splits a text into training and validation windows (number, WINDOW), each with a BOS token first.

    Every fifth window is for validation, at most 32.

    Raises:
        LigerzooError: the text is too short.
    """
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)
    count = len(ids) // (WINDOW - 1)
    if count < 10:
        got, expected = f"{len(ids)} tokens", f"at least {10 * WINDOW} tokens"
        remedy = "Pass a longer text file, or leave it out to use modules of Python."
        raise LigerzooError("the text is too short", got=got, expected=expected, remedy=remedy)
    windows = F.pad(ids[: count * (WINDOW - 1)].view(count, -1), (1, 0), value=tokenizer.bos_token_id)
    is_validation = torch.arange(count) % 5 == 4
    return windows[~is_validation], windows[is_validation][:32]


@torch.no_grad()
def loss_on(model: Llama, windows: Tensor) -> float:
    """Returns the mean loss per token."""
    return float(model(windows, labels=windows).loss)


def same_bytes(model: Llama, other: Llama) -> bool:
    """Returns whether two models have the same tensors, bit for bit."""
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        (a := ours[name]).dtype == (b := theirs[name]).dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for name in ours
    )


def next_commands() -> list[tuple[str, str]]:
    """Returns commands to try next, with their purpose. They work in the current directory."""
    python = shlex.quote(relative_path(sys.executable))
    generate = f'{python} -m ligerzoo generate HuggingFaceTB/SmolLM2-135M --prompt "The liger is"'
    fine_tune = f"{python} -m ligerzoo demo --text {shlex.quote(relative_path(__file__))}"
    source = inspect.getsource(composed) + "print(composed())"
    compose = f"{python} -c {shlex.quote(source)}"
    return [
        ("a checkpoint from the hub (270 MB); any other Llama works too", generate),
        ("your own text (here, the source of this demo)", fine_tune),
        ("your own architecture, composed from layers", compose),
    ]

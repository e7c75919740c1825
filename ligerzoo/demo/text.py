"""`ligerzoo demo`: the library in five steps, on a model that comes along. It needs no network and no GPU.

A step is a function as a user would write it. The demo shows its source, runs it, and checks what it claims.
"""

from __future__ import annotations

import ast
import inspect
import os
import shlex
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ligerzoo.errors import LigerzooError
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.generate import TextStreamer
from ligerzoo.models import Llama
from ligerzoo.text.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parent / "assets" / "tiny-python-llama"
"""A Llama trained on the source of Python's standard library by tools/train_embedded_model.py."""

HELD_OUT = ("configparser.py", "difflib.py", "fractions.py", "ipaddress.py", "statistics.py")
"""The modules of the standard library that it was not trained on."""

PROMPT = "def remove_duplicates(items):\n    seen = set()\n    for"
PROMPT_AFTER_TRAINING = "def is_valid(address):\n    if"
WINDOW = 128
STEPS, BATCH = 30, 4

COMPOSITION = """
from torch import nn
from ligerzoo.layers import Attention, Decoder, GatedMLP, PreNormBlock, RMSNorm, RotaryEmbedding
attention = Attention(64, 4, num_kv_heads=2, rotary=RotaryEmbedding(16))
block = PreNormBlock(RMSNorm(64), attention, RMSNorm(64), GatedMLP(64, 128))
print(Decoder(nn.Embedding(100, 64), [block], RMSNorm(64)))
"""


def load(directory: Path) -> tuple[Llama, Tokenizer]:
    """A directory in Hugging Face format; an id on the hub, such as "org/name", loads in the same way."""
    model = Llama.from_pretrained(directory, dtype="float32")
    tokenizer = Tokenizer.from_pretrained(directory)
    return model, tokenizer


def complete(model: Llama, tokenizer: Tokenizer, prompt: str) -> str:
    """The prompt and the likeliest continuation, printed as it comes."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    streamer = TextStreamer(tokenizer, skip_prompt=False)
    ids = model.generate(ids, max_new_tokens=60, repetition_penalty=1.2, streamer=streamer)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def fine_tune(model: Llama, windows: Tensor, steps: int = STEPS, batch: int = BATCH) -> None:
    """Training is a PyTorch loop; given labels, the model returns the fused loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    for _ in (progress := tqdm(range(steps), unit="step")):
        chosen = windows[torch.randint(len(windows), (batch,), generator=generator)]
        loss = model(chosen, labels=chosen).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")


def save_and_reload(model: Llama, directory: Path) -> Llama:
    """What is written can be read by transformers and vLLM too; it appears at once, when it is complete."""
    model.save_pretrained(directory, max_shard_size="5MB")
    return Llama.from_pretrained(directory)


def generate_twice(model: Llama, tokenizer: Tokenizer, prompt: str) -> tuple[Tensor, Tensor]:
    """With the cache of keys and values, and computing all of them anew for every token."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    streamer = TextStreamer(tokenizer, skip_prompt=False)
    cached = model.generate(ids, max_new_tokens=60, repetition_penalty=1.2, streamer=streamer)
    uncached = model.generate(ids, max_new_tokens=60, repetition_penalty=1.2, use_cache=False)
    return cached, uncached


def run(text_file: Path | None = None) -> int:
    """Runs the demo.

    Args:
        text_file: UTF-8 text to fine-tune on, in place of a module of the standard library.

    Returns:
        The exit code: 0, or 1 when a check failed.

    Raises:
        LigerzooError: the text is too short, or is not UTF-8.
        OSError: the text cannot be read.
    """
    torch.set_num_threads(1)  # more hardly help so small a model, and cost much where others use the cores too
    text_file = text_file or Path(sysconfig.get_path("stdlib")) / "ipaddress.py"
    try:
        text = text_file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise LigerzooError("is not UTF-8 text", where=text_file, got=error) from error
    checks = Checks()

    heading("1. Load a checkpoint", load)
    model, tokenizer = load(CHECKPOINT)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    checks.tell(f"{parameters:,} parameters: every tensor is the one in the files", equals_files(model, CHECKPOINT))

    heading("2. Complete a Python function", complete)
    completed = complete(model, tokenizer, PROMPT)
    lines = count_python_lines(completed)
    checks.tell(f"its first {lines} lines are valid Python", lines > PROMPT.count("\n") + 1)

    heading(f"3. Fine-tune on {text_file.name}, which it has not seen", fine_tune)
    training, kept_aside = split(text, tokenizer)
    before = loss_on(model, kept_aside)
    fine_tune(model, training)
    after = loss_on(model, kept_aside)
    checks.tell(f"the loss on passages kept aside fell from {before:.3f} to {after:.3f}", after < before)

    heading("4. Save and load again", save_and_reload)
    with tempfile.TemporaryDirectory() as directory:
        reloaded = save_and_reload(model, Path(directory) / "model")
        files = len(list(Path(directory, "model").glob("*.safetensors")))
        checks.tell(f"every tensor went through {files} files and kept its bytes", same_bytes(model, reloaded))

        heading("5. Generate with the model that came back", generate_twice)
        cached, uncached = generate_twice(reloaded, tokenizer, PROMPT_AFTER_TRAINING)
        checks.tell("with and without the cache it writes the same", torch.equal(cached, uncached))

    print(f"\n{checks.passed} of {checks.told} checks passed.\n\n{styled('Try next', BOLD)}")
    for purpose, command in next_commands():
        print(f"\n{styled('# ' + purpose, DIM)}\n{command}")
    return 0 if checks.passed == checks.told else 1


# What the steps are checked with


class Checks:
    """Tells of each check how it went, and counts."""

    def __init__(self) -> None:
        self.told = self.passed = 0

    def tell(self, claim: str, holds: bool) -> None:
        self.told += 1
        self.passed += holds
        print(f"{styled('✓', GREEN)} {claim}" if holds else f"{styled('✗', RED)} NOT TRUE: {claim}", flush=True)


def equals_files(model: Llama, directory: Path) -> bool:
    """Whether the model's weights have the values in the files, which may be of another dtype."""
    weights = model.state_dict()
    with Checkpoint(directory) as files:
        return all(torch.equal(files.read(name).to(weights[name].dtype), weights[name]) for name in files.tensors)


def count_python_lines(text: str) -> int:
    """How many lines from the beginning are complete Python."""
    lines = text.splitlines()
    for count in range(len(lines), 0, -1):
        try:
            ast.parse("\n".join(lines[:count]))
        except SyntaxError:
            continue
        return count
    return 0


def split(text: str, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """The text in windows (windows, WINDOW) that begin with BOS: those to train on, and every fifth, kept aside."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)
    count = len(ids) // (WINDOW - 1)
    if count < 10:
        raise LigerzooError("the text is too short to learn from", got=f"{len(ids)} tokens", expected=f"{10 * WINDOW}")
    windows = F.pad(ids[: count * (WINDOW - 1)].view(count, -1), (1, 0), value=tokenizer.bos_token_id)
    is_aside = torch.arange(count) % 5 == 4
    return windows[~is_aside], windows[is_aside][:32]


@torch.no_grad()
def loss_on(model: Llama, windows: Tensor) -> float:
    return float(model(windows, labels=windows).loss)


def same_bytes(model: Llama, other: Llama) -> bool:
    """Whether both have the same tensors, bit for bit."""
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        (a := ours[name]).dtype == (b := theirs[name]).dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for name in ours
    )


def next_commands() -> list[tuple[str, str]]:
    """What each is good for, and the command, as it works in this directory."""
    python = shlex.quote(here(sys.executable))
    generate = f'{python} -m ligerzoo generate HuggingFaceTB/SmolLM2-135M --prompt "The liger is"'
    fine_tune = f"{python} -m ligerzoo demo --text {shlex.quote(here(__file__))}"
    compose = f'{python} -c "{COMPOSITION}"'
    return [
        ("a checkpoint from the hub (270 MB); any other Llama's id will do", generate),
        ("your own text, for which this demo's own source stands in", fine_tune),
        ("an architecture of your own, composed from layers", compose),
    ]


def here(path: str) -> str:
    """The path as seen from the current directory, where it is inside."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


# How it looks

BOLD, DIM, RED, GREEN = 1, 2, 31, 32


def styled(text: str, code: int) -> str:
    """The text in a style, on a terminal that did not ask for none (https://no-color.org)."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def heading(title: str, step: Callable[..., object]) -> None:
    """Announces a step and shows its source."""
    print(f"\n{styled(title, BOLD)}\n")
    print(styled(textwrap.indent(inspect.getsource(step), "    "), DIM), flush=True)

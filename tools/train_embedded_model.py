"""Trains the demo's text model: a small Llama on the source of Python's standard library.

    python tools/train_embedded_model.py --out ligerzoo/demo/assets/tiny-python-llama

trains a byte-level BPE tokenizer and the model, and writes a checkpoint of at most 8 MB in Hugging Face format. The
loss curve goes to training.json and loss.svg. Takes minutes on an H200. On a CPU:

    python tools/train_embedded_model.py --device cpu --steps 20 --batch 2 --out /tmp/tiny-python-llama

The standard library has about nine megabytes, so training runs for many epochs. Dropout limits memorization. The
checkpoint holds the moving average of the weights at its best loss on held-out modules.
"""

import argparse
import copy
import json
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

import ligerzoo
from ligerzoo.demo.text import HELD_OUT
from ligerzoo.models import Llama, LlamaConfig
from ligerzoo.train.plot import plot_svg

BOS, EOS = "<s>", "</s>"
VOCABULARY = 3072
CONTEXT = 512

# Tests, third-party packages, and tables in the form of Python code.
SKIPPED_DIRECTORIES = {
    "test", "tests", "idle_test", "site-packages", "dist-packages",
    "encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo",
}  # fmt: skip
SKIPPED_FILES = ("html/entities.py", "_sysconfigdata*.py", "config-*/*.py", "__phello__/*.py")

# A line break and the next line's indentation are one piece, so that most lines of Python begin with one token.
PIECES = Regex(r"\n+ *| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+| +(?= )|\s")

PROMPTS = (
    'def is_even(number):\n    """Return True if',
    "class Stack:\n    def __init__(self, items=None):",
    "def read_lines(path):\n    with open(path",
    "def binary_search(items, value):\n    low = 0\n    high = len(items)",
)


def source_files(root: Path) -> list[Path]:
    """Returns the source modules of the standard library, in a fixed order."""
    files = [
        path
        for path in root.rglob("*.py")
        if not SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts)
        and not any(path.relative_to(root).match(pattern) for pattern in SKIPPED_FILES)
    ]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer. Any text encodes, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


class Windows:
    """Windows of CONTEXT tokens over a token stream. A window is BOS and the tokens from the start of a line.

    Args:
        tokenizer: encodes the texts. A line break and the next line's indentation are one token.
        texts: joined by EOS and BOS.
        device: device of the stream and the windows.
    """

    def __init__(self, tokenizer: Tokenizer, texts: list[str], device: str) -> None:
        self.bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
        stream = [token for encoding in tokenizer.encode_batch(texts) for token in (*encoding.ids, eos)]
        self.stream = torch.tensor(stream, device=device)
        spellings = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
        is_break = torch.tensor([text.startswith("\n") for text in spellings], device=device)
        is_outdented = torch.tensor([text.strip("\n") == "" for text in spellings], device=device)
        breaks = is_break[self.stream[:-CONTEXT]].nonzero().flatten()
        # A window over an indented line starts with the line break, which holds the indentation.
        self.beginnings = breaks + is_outdented[self.stream[breaks]].long()

    def at(self, beginnings: Tensor) -> Tensor:
        """(B,) positions in the stream -> (B, CONTEXT) token ids."""
        tokens = self.stream[beginnings[:, None] + torch.arange(CONTEXT - 1, device=beginnings.device)]
        return F.pad(tokens, (1, 0), value=self.bos)

    def random(self, batch: int, generator: torch.Generator) -> Tensor:
        """(batch, CONTEXT) token ids."""
        chosen = torch.randint(len(self.beginnings), (batch,), device=self.stream.device, generator=generator)
        return self.at(self.beginnings[chosen])

    def all(self, batch: int) -> Iterator[Tensor]:
        """Yields the whole stream once, in batches of adjacent windows."""
        starts = torch.arange(0, len(self.stream) - CONTEXT + 1, CONTEXT - 1, device=self.stream.device)
        yield from map(self.at, starts.split(batch))


@dataclass
class Evaluation:
    """One point of the loss curve, in nats per token."""

    step: int
    train_loss: float
    held_out_loss: float


def add_dropout(model: Llama, probability: float) -> None:
    """Adds dropout to the outputs of attention and MLP in training; ligerzoo's layers have none."""
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            module.register_forward_hook(lambda module, _, out: F.dropout(out, probability, training=module.training))


def learning_rate_at(progress: float, warmup: float = 0.03, final: float = 0.02) -> float:
    """The factor on the learning rate: linear warm-up, then cosine decay to `final`."""
    if progress < warmup:
        return progress / warmup
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


@torch.no_grad()
def evaluate(model: torch.nn.Module, windows: Windows, batch: int) -> float:
    """The mean loss over the whole stream."""
    model.eval()
    losses = [(model(tokens, labels=tokens).loss, len(tokens)) for tokens in windows.all(batch)]
    return float(sum(loss * size for loss, size in losses) / sum(size for _, size in losses))


def train(
    model: Llama, training: Windows, held_out: Windows, options: argparse.Namespace
) -> tuple[dict[str, Tensor], list[Evaluation]]:
    """Trains the model. Returns the averaged weights with the best held-out loss, and the loss curve."""
    generator = torch.Generator(options.device).manual_seed(options.seed)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(min(0.998, 1 - 10 / options.steps)))
    add_dropout(model, options.dropout)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay, fused=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_at((step + 1) / options.steps))
    mixed_precision = torch.autocast("cuda", torch.bfloat16, enabled=options.device.startswith("cuda"))

    curve: list[Evaluation] = []
    best: dict[str, Tensor] = {}
    interval = max(10, options.steps // 50)
    recent = torch.zeros((), device=options.device)
    for step in (progress := tqdm(range(1, options.steps + 1), unit="step")):
        model.train()
        tokens = training.random(options.batch, generator)
        with mixed_precision:
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        averaged.update_parameters(model)
        recent += loss.detach()
        if step % interval == 0 or step == options.steps:
            with mixed_precision:
                held_out_loss = evaluate(averaged.module, held_out, options.batch)
            steps = step - (curve[-1].step if curve else 0)
            curve.append(Evaluation(step, recent.item() / steps, held_out_loss))
            recent.zero_()
            if held_out_loss == min(point.held_out_loss for point in curve):
                best = copy.deepcopy(averaged.module.state_dict())
            progress.write(f"step {step:6}   train {curve[-1].train_loss:.4f}   held out {held_out_loss:.4f}")
            progress.set_postfix(train=f"{curve[-1].train_loss:.3f}", held_out=f"{held_out_loss:.3f}")
    return best, curve


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def loss_plot(curve: Mapping[str, Sequence[float]]) -> str:
    """The loss curve as SVG."""
    names = {"train_loss": "training (with dropout)", "held_out_loss": "held-out modules (averaged weights)"}
    curves = {label: list(zip(curve["step"], curve[name], strict=True)) for name, label in names.items()}
    return plot_svg(curves, x="step", y="loss, nats per token")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=128, help=f"windows of {CONTEXT} tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")

    root = Path(sysconfig.get_path("stdlib"))
    texts = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in source_files(root)}
    seen = [text for name, text in texts.items() if name not in HELD_OUT]
    unseen = [texts[name] for name in HELD_OUT]
    tokenizer = train_tokenizer(seen)
    training, held_out = Windows(tokenizer, seen, options.device), Windows(tokenizer, unseen, options.device)

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    model = Llama(config, device=options.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    characters = sum(map(len, seen))
    print(
        f"{len(seen)} modules, {characters:,} characters, {len(training.stream):,} tokens "
        f"({characters / len(training.stream):.2f} characters each); held out {len(held_out.stream):,} tokens; "
        f"{parameters:,} parameters"
    )

    began = time.perf_counter()
    best, curve = train(model, training, held_out, options)
    seconds = time.perf_counter() - began

    stored = Llama(config, device=options.device)
    stored.load_state_dict(best)
    stored.to(torch.bfloat16)
    stored.generation_config = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    stored.save_pretrained(options.out, max_shard_size="3MB")
    write_tokenizer(tokenizer, options.out)
    record = {
        "command": " ".join(["python", *sys.argv]),
        "seed": options.seed,
        "versions": {
            "ligerzoo": ligerzoo.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.processor(),
        "modules": len(seen),
        "characters": characters,
        "tokens": len(training.stream),
        "tokens_seen": options.steps * options.batch * CONTEXT,
        "held_out": HELD_OUT,
        "held_out_loss": min(point.held_out_loss for point in curve),
        "held_out_loss_as_stored": evaluate(stored, held_out, options.batch),
        "seconds": round(seconds, 1),
        "curve": {
            field: [round(getattr(point, field), 4) for point in curve]
            for field in ("step", "train_loss", "held_out_loss")
        },
    }
    (options.out / "training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    (options.out / "loss.svg").write_text(loss_plot(record["curve"]), encoding="utf-8")
    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.out}: {size:,} bytes; held out {record['held_out_loss_as_stored']:.4f}; {seconds:.0f} s")
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids], device=options.device)
        continued = stored.generate(ids, max_new_tokens=100, do_sample=True, temperature=0.5, top_p=0.95)
        print("-" * 60, tokenizer.decode(continued[0].tolist()), sep="\n")


if __name__ == "__main__":
    main()

"""Trains the model that the package carries to show how models see: a small Qwen2-VL on drawings of shapes and digits.

    python -m tools.train_vision_model --out ligerzoo/assets/tiny-shapes-qwen2-vl

draws every picture anew (ligerzoo/drawings.py), asks what is there to see, and teaches the answer. What it writes is a
checkpoint of at most 3 MB in Hugging Face format, with its tokenizer and processor, and the loss curve in training.json
(and in loss.png, where matplotlib is installed). On an H200 that takes a few minutes. To see it run on a CPU:

    python -m tools.train_vision_model --device cpu --steps 20 --batch 8 --out /tmp/tiny-shapes

Workers on the CPU draw, and cut the pictures into patches, which travel as bytes. All pictures of a batch have one
size, so that its rows are padded behind their answers alone. What is stored is the running average of the weights where
it was best on drawings held out from training.
"""

import argparse
import copy
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # which tokenizers wants to know before the workers are forked

import numpy as np
import PIL
import torch
import torch.nn.functional as F
import triton
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import ligerzoo
from ligerzoo.demo_vision import QUESTION
from ligerzoo.drawings import COLORS, DIGITS, SHAPES, draw, random_size
from ligerzoo.images import read_image
from ligerzoo.models import Qwen2VL, Qwen2VLConfig, Qwen2VLVisionConfig
from ligerzoo.processor import Processor
from tools.train_embedded_model import learning_rate_at

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"

PIECES = Regex(r" ?\p{L}+|\p{N}|\n| ?[^\s\p{L}\p{N}]+|\s")

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- part.text if part.type == 'text' else '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

PREPROCESSING = {
    "processor_class": "Qwen2VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 80 * 80,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}

HELD_OUT = 8, 32
"""How many batches, of how many drawings, the model is judged by and never trained on."""

IGNORED = -100  # the label of what is not to be learnt


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text can be encoded, and every word of the questions and answers is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [END, IM_START, IM_END, VISION_START, VISION_END, IMAGE, VIDEO]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    answers = [f"a {color} {form} left of a {color} above" for color in COLORS for form in (*SHAPES, *DIGITS)]
    tokenizer.train_from_iterator(["system\nuser\nassistant\n", QUESTION, *answers], trainer)
    return tokenizer


def make_processor(tokenizer: Tokenizer) -> Processor:
    """The processor of the model, by way of the files that a checkpoint has."""
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": IM_END,
        "pad_token": END,
        "image_token": IMAGE,
        "video_token": VIDEO,
        "clean_up_tokenization_spaces": False,
    }
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        tokenizer.save(str(directory / "tokenizer.json"))
        for name, content in (("tokenizer_config.json", settings), ("preprocessor_config.json", PREPROCESSING)):
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        return Processor.from_pretrained(directory)


def make_config(tokenizer: Tokenizer) -> Qwen2VLConfig:
    return Qwen2VLConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mrope_section=[4, 6, 6],
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.06,  # with less, so narrow a model takes long to begin to see
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END),
        image_token_id=tokenizer.token_to_id(IMAGE),
        video_token_id=tokenizer.token_to_id(VIDEO),
        vision_start_token_id=tokenizer.token_to_id(VISION_START),
        vision_end_token_id=tokenizer.token_to_id(VISION_END),
        vision_config=Qwen2VLVisionConfig(
            depth=4,
            embed_dim=96,
            hidden_size=128,
            num_heads=3,
            mlp_ratio=4,
            patch_size=PREPROCESSING["patch_size"],
            temporal_patch_size=PREPROCESSING["temporal_patch_size"],
            spatial_merge_size=PREPROCESSING["merge_size"],
        ),
    )


@dataclass
class Batch:
    """Questions about drawings of one size, and their answers. Arrays and not tensors, so that they come from a worker
    through a pipe: of shared memory, which tensors would take, containers may have little.

    Attributes:
        tokens: (B, T) int64.
        labels: (B, T) int64, those of the answers.
        patches: (N, 3, F * P * P) uint8, of all pictures.
        grids: (B, 3) int64.
    """

    tokens: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    patches: np.ndarray[Any, Any]
    grids: np.ndarray[Any, Any]


class Drawings(Dataset[Batch]):
    """Batches of drawings, which are drawn when they are asked for.

    Args:
        processor: makes the prompts.
        kind: the first word of the drawings' seeds: other kinds are other drawings.
        batches: how many there are.
        batch: B.
    """

    def __init__(self, processor: Processor, kind: str, batches: int, batch: int) -> None:
        self.processor, self.kind, self.batches, self.batch = processor, kind, batches, batch

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Batch:
        if index >= self.batches:
            raise IndexError(index)
        size = random_size(Random(f"{self.kind} {index}"))
        drawings = [draw(f"{self.kind} {index} {number}", size) for number in range(self.batch)]
        seen = [self.processor.family.images.cut(read_image(drawing.picture)[None]) for drawing in drawings]

        question = [{"type": "image", "image": drawings[0].picture}, {"type": "text", "text": QUESTION}]
        inputs = self.processor([{"role": "user", "content": question}], add_generation_prompt=True)
        prompts = np.repeat(inputs["input_ids"].numpy(), self.batch, axis=0)
        texts = [drawing.text + IM_END for drawing in drawings]
        answers = self.processor.tokenizer(texts, padding_side="right", return_tensors="pt")
        targets = answers["input_ids"].where(answers["attention_mask"] == 1, IGNORED).numpy()
        return Batch(
            tokens=np.concatenate([prompts, answers["input_ids"].numpy()], axis=1),
            labels=np.concatenate([np.full_like(prompts, IGNORED), targets], axis=1),
            patches=torch.cat([patches for patches, _ in seen]).numpy(),
            grids=np.array([grid for _, grid in seen]),
        )


def inputs_of(batch: Batch, processor: Processor, device: str) -> dict[str, Tensor]:
    """What the model reads."""
    normalize = processor.family.images.normalization
    return {
        "input_ids": torch.from_numpy(batch.tokens).to(device),
        "pixel_values": normalize(torch.from_numpy(batch.patches).to(device)).flatten(1),
        "image_grid_thw": torch.from_numpy(batch.grids),
    }


@dataclass
class Evaluation:
    """One point of the curves: losses in nats per token of the answers, and the share of answers that are right."""

    step: int
    train_loss: float
    held_out_loss: float
    held_out_right: float


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, batches: Iterable[Batch], processor: Processor, device: str
) -> tuple[float, float]:
    """The mean loss, and the share of answers that greedy generation gets right: those of which every token is the
    likeliest after the ones before it."""
    model.eval()
    losses, right = [], []
    for batch in batches:
        labels = torch.from_numpy(batch.labels).to(device)[:, 1:]
        logits = model(**inputs_of(batch, processor, device)).logits[:, :-1].float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED))
        right.append(((logits.argmax(-1) == labels) | (labels == IGNORED)).all(1).float().mean())
    return torch.stack(losses).mean().item(), torch.stack(right).mean().item()


def train(
    model: Qwen2VL, processor: Processor, held_out: list[Batch], options: argparse.Namespace
) -> tuple[dict[str, Tensor], list[Evaluation]]:
    """Trains the model; returns the averaged weights that were best on the held-out drawings, and the curves."""
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(min(0.998, 1 - 10 / options.steps)))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        lr=options.lr, betas=(0.9, 0.98), weight_decay=options.weight_decay, fused=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_at((step + 1) / options.steps))
    drawings = Drawings(processor, f"training {options.seed}", options.steps, options.batch)
    batches = DataLoader(drawings, batch_size=None, num_workers=options.workers)

    curve: list[Evaluation] = []
    best: dict[str, Tensor] = {}
    interval = max(10, options.steps // 25)
    recent = torch.zeros((), device=options.device)
    for step, batch in enumerate(progress := tqdm(batches, unit="step"), 1):
        model.train()
        labels = torch.from_numpy(batch.labels).to(options.device)
        loss = model(**inputs_of(batch, processor, options.device), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        averaged.update_parameters(model)
        recent += loss.detach()
        if step % interval == 0 or step == options.steps:
            steps = step - (curve[-1].step if curve else 0)
            held_out_loss, right = evaluate(averaged.module, held_out, processor, options.device)
            curve.append(point := Evaluation(step, recent.item() / steps, held_out_loss, right))
            recent.zero_()
            if point.held_out_loss == min(point.held_out_loss for point in curve):
                best = copy.deepcopy(averaged.module.state_dict())
            progress.write(
                f"step {step:6}   train {point.train_loss:.4f}   held out {point.held_out_loss:.4f}   "
                f"right {point.held_out_right:.1%}"
            )
            progress.set_postfix(train=f"{point.train_loss:.3f}", right=f"{point.held_out_right:.1%}")
    return best, curve


def plot(curve: list[Evaluation], path: Path) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = [point.step for point in curve]
    axes.plot(steps, [point.train_loss for point in curve], label="loss in training")
    axes.plot(steps, [point.held_out_loss for point in curve], label="loss on held-out drawings (averaged weights)")
    axes.plot(steps, [point.held_out_right for point in curve], label="share of held-out drawings described right")
    axes.set(xlabel="step", ylabel="nats per token, or share", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=80)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=256, help="drawings in a step")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="that draw; 0 draws in between")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")

    tokenizer = train_tokenizer()
    processor, config = make_processor(tokenizer), make_config(tokenizer)
    held_out = list(Drawings(processor, "held out", *HELD_OUT))
    model = Qwen2VL(config, device=options.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters; {config.vocab_size} tokens; {options.steps * options.batch:,} drawings")

    began = time.perf_counter()
    best, curve = train(model, processor, held_out, options)
    seconds = time.perf_counter() - began

    stored = Qwen2VL(config, device=options.device)
    stored.load_state_dict(best)
    stored.to(torch.bfloat16)
    stored.generation_config = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    stored.save_pretrained(options.out)
    processor.save_pretrained(options.out)
    stored.float()  # as the demo loads it
    record = {
        "command": " ".join(["python", "-m", "tools.train_vision_model", *sys.argv[1:]]),
        "seed": options.seed,
        "versions": {
            "ligerzoo": ligerzoo.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "pillow": PIL.__version__,
        },
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.processor(),
        "parameters": parameters,
        "drawings_seen": options.steps * options.batch,
        "held_out_loss": min(point.held_out_loss for point in curve),
        "held_out_right_as_stored": evaluate(stored, held_out, processor, options.device)[1],
        "seconds": round(seconds, 1),
        "curve": {
            field: [round(getattr(point, field), 4) for point in curve]
            for field in ("step", "train_loss", "held_out_loss", "held_out_right")
        },
    }
    (options.out / "training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    plot(curve, options.out / "loss.png")
    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.out}: {size:,} bytes; {record['held_out_right_as_stored']:.1%} right; {seconds:.0f} s")


if __name__ == "__main__":
    main()

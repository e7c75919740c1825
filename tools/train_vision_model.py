"""Trains the demo's vision model: a small Qwen2-VL on drawings of shapes and digits.

    python -m tools.train_vision_model --out ligerzoo/demo/assets/tiny-shapes-qwen2-vl

generates a new drawing for every example and trains the model to describe it. It writes a checkpoint of at most 3 MB in
Hugging Face format, with tokenizer and processor. The loss curve goes to training.json and loss.svg. Takes a few
minutes on an H200. On a CPU:

    python -m tools.train_vision_model --device cpu --steps 20 --batch 8 --out /tmp/tiny-shapes

CPU workers draw the images and cut them into uint8 patches. All images of a batch have the same size, so that only the
answers need padding. The checkpoint holds the moving average of the weights at its best loss on held-out drawings.
"""

import argparse
import copy
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # must be set before workers are forked

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
from ligerzoo.demo.drawings import COLORS, DIGITS, SHAPES, draw, random_size
from ligerzoo.demo.vision import QUESTION
from ligerzoo.models import Qwen2VL, Qwen2VLConfig, Qwen2VLVisionConfig
from ligerzoo.train.plot import plot_svg
from ligerzoo.vision import read_image
from ligerzoo.vision.processor import Processor
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
"""(batches, drawings per batch) for evaluation; never used in training."""

IGNORED = -100  # label of positions without a loss


def train_tokenizer() -> Tokenizer:
    """Trains a byte-level BPE tokenizer. Any text encodes; each word of the questions and answers is one token."""
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
    """Creates the processor from the files that a checkpoint has."""
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
        initializer_range=0.06,  # with a smaller value, a model this narrow learns slowly
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
    """Questions about drawings of one size, and their answers. NumPy arrays come from workers through a pipe; tensors
    would need shared memory, which is small in containers.

    Attributes:
        tokens: (B, T) int64.
        labels: (B, T) int64, -100 outside the answers.
        patches: (N, 3, F * P * P) uint8, of all images.
        grids: (B, 3) int64.
    """

    tokens: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    patches: np.ndarray[Any, Any]
    grids: np.ndarray[Any, Any]


class Drawings(Dataset[Batch]):
    """Batches of drawings, generated on access.

    Args:
        processor: makes the prompts.
        kind: first word of the random seeds; different kinds give different drawings.
        batches: number of batches.
        batch: B, drawings per batch.
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
    """Returns the model's inputs."""
    normalize = processor.family.images.normalization
    return {
        "input_ids": torch.from_numpy(batch.tokens).to(device),
        "pixel_values": normalize(torch.from_numpy(batch.patches).to(device)).flatten(1),
        "image_grid_thw": torch.from_numpy(batch.grids),
    }


@dataclass
class Evaluation:
    """One point of the curves: losses in nats per answer token, and the share of correct answers."""

    step: int
    train_loss: float
    held_out_loss: float
    held_out_right: float


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, batches: Iterable[Batch], processor: Processor, device: str
) -> tuple[float, float]:
    """Returns the mean loss, and the share of answers that greedy generation gets right: every token is the argmax
    given the tokens before it."""
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
    """Trains the model. Returns the averaged weights with the best held-out loss, and the curves."""
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


def loss_plot(curve: Mapping[str, Sequence[float]]) -> str:
    """The curves as SVG."""
    names = {
        "train_loss": "training",
        "held_out_loss": "held-out drawings (averaged weights)",
        "held_out_right": "share described right",
    }
    curves = {label: list(zip(curve["step"], curve[name], strict=True)) for name, label in names.items()}
    return plot_svg(curves, x="step", y="loss, nats per token, or share")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=256, help="drawings per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that draw; 0: the main one")
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
    stored.float()  # the demo loads it in fp32
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
    (options.out / "loss.svg").write_text(loss_plot(record["curve"]), encoding="utf-8")
    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.out}: {size:,} bytes; {record['held_out_right_as_stored']:.1%} right; {seconds:.0f} s")


if __name__ == "__main__":
    main()

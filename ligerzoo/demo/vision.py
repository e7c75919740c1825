"""`ligerzoo demo --vision`: a small Qwen2-VL that is part of the package describes new drawings.

As in `ligerzoo.demo.text`, each step is a function as a user would write it. The demo prints its source, runs it and
checks the result.
"""

from __future__ import annotations

import math
import shlex
import sys
import tempfile
from pathlib import Path
from random import randrange

import torch

from ligerzoo.demo.drawings import draw
from ligerzoo.demo.output import Checks, print_step, relative_path
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.generate import TextStreamer
from ligerzoo.models import Qwen2VL
from ligerzoo.vision.processor import Processor

CHECKPOINT = Path(__file__).parent / "assets" / "tiny-shapes-qwen2-vl"
"""A Qwen2-VL trained on drawings by tools/train_vision_model.py."""

QUESTION = "What do you see?"
"""The only question that it was trained on."""

DRAWINGS, GOAL = 10, 9
"""Number of drawings, and of correct answers that the demo requires."""


def load(directory: Path) -> tuple[Qwen2VL, Processor]:
    """Loads a directory in Hugging Face format. A hub id such as "Qwen/Qwen2-VL-2B-Instruct" works too."""
    model = Qwen2VL.from_pretrained(directory, dtype="float32")
    processor = Processor.from_pretrained(directory)
    return model, processor


def draw_to(picture: Path, seed: str) -> str:
    """Draws a new picture and returns its description."""
    drawing = draw(seed)
    drawing.picture.save(picture)
    return drawing.text


def describe_picture(model: Qwen2VL, processor: Processor, picture: Path) -> str:
    """Asks a question about a picture and prints the answer during generation."""
    question = [{"type": "image", "path": picture}, {"type": "text", "text": QUESTION}]
    inputs = processor([{"role": "user", "content": question}], add_generation_prompt=True)
    ids = model.generate(**inputs, max_new_tokens=20, streamer=TextStreamer(processor.tokenizer))
    return processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def describe_all(model: Qwen2VL, processor: Processor, pictures: list[Path]) -> list[str]:
    """Asks about many pictures of any size in one batch: a list of conversations."""
    questions = [[{"type": "image", "path": picture}, {"type": "text", "text": QUESTION}] for picture in pictures]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    inputs = processor(conversations, add_generation_prompt=True)
    ids = model.generate(**inputs, max_new_tokens=20)
    answers = ids[:, inputs["input_ids"].shape[1] :]
    return [processor.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]


def copy(source: Path, target: Path) -> None:
    """Saves the model and the processor in files that transformers and vLLM read too."""
    Qwen2VL.from_pretrained(source).save_pretrained(target)
    Processor.from_pretrained(source).save_pretrained(target)


def run(seed: int | None = None) -> int:
    """Runs the demo.

    Args:
        seed: seed of the drawings. None draws one at random.

    Returns:
        The exit code: 0, or 1 if a check failed.

    Raises:
        ImageError: Pillow is not installed.
    """
    torch.set_num_threads(1)  # as in `ligerzoo.demo.text`
    seed = randrange(10**6) if seed is None else seed
    directory = Path(tempfile.mkdtemp(prefix="ligerzoo-drawings-"))
    pictures = [directory / f"{number}.png" for number in range(1, DRAWINGS + 1)]
    checks = Checks()

    print_step("1. Load a model that reads images", load)
    model, processor = load(CHECKPOINT)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    checks.add(f"{parameters:,} parameters, as many as in the files", parameters == count_stored(CHECKPOINT))

    print_step(f"2. Draw pictures with seed {seed}", draw_to)
    descriptions = [draw_to(picture, f"demo {seed} {picture.stem}") for picture in pictures]
    print(f"The first of {DRAWINGS} pictures: {pictures[0]}")

    print_step("3. Ask about the first picture", describe_picture)
    answer = describe_picture(model, processor, pictures[0])

    print_step("4. Ask about all pictures in one batch", describe_all)
    answers = describe_all(model, processor, pictures)
    for picture, given, expected in zip(pictures, answers, descriptions, strict=True):
        print(f"{picture}  {given}" + ("" if given == expected else f"  (drawn: {expected})"))
    checks.add("the answer for the first picture is the same alone and in the batch", answers[0] == answer)
    correct = sum(given == expected for given, expected in zip(answers, descriptions, strict=True))
    checks.add(f"{correct} of {DRAWINGS} answers are correct", correct >= GOAL)

    print_step("5. Save the model and the processor", copy)
    with tempfile.TemporaryDirectory() as target:
        copy(CHECKPOINT, Path(target, "copy"))
        files = {path.name: path.read_bytes() for path in Path(target, "copy").iterdir()}
    same = all((CHECKPOINT / name).read_bytes() == content for name, content in files.items())
    checks.add(f"all {len(files)} saved files equal the original ones, byte for byte", same)

    return checks.finish(next_commands(pictures[0]))


def count_stored(directory: Path) -> int:
    """Returns the number of elements of all tensors in the files."""
    with Checkpoint(directory) as files:
        return sum(math.prod(tensor.shape) for tensor in files.tensors.values())


def next_commands(picture: Path) -> list[tuple[str, str]]:
    """Returns commands to try next, with their purpose. They work in the current directory."""
    python, checkpoint = shlex.quote(relative_path(sys.executable)), shlex.quote(relative_path(str(CHECKPOINT)))
    ask = f'--image {picture} --prompt "{QUESTION}"'
    return [
        ("the same on the command line", f"{python} -m ligerzoo generate {checkpoint} {ask}"),
        ("other drawings", f"{python} -m ligerzoo demo --vision"),
        (
            "a chat about any picture, with a model from the hub (4.4 GB)",
            f"{python} -m ligerzoo chat Qwen/Qwen2-VL-2B-Instruct --image {picture}",
        ),
    ]

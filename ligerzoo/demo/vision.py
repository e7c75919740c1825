"""`ligerzoo demo --vision`: a model that comes along describes drawings that are made on the spot.

As in `ligerzoo.demo.text`, each step is a function as a user would write it. Its source is shown, then it runs and its
result is checked.
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
from ligerzoo.demo.text import BOLD, DIM, Checks, heading, here, styled
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.generate import TextStreamer
from ligerzoo.models import Qwen2VL
from ligerzoo.vision.processor import Processor

CHECKPOINT = Path(__file__).parent / "assets" / "tiny-shapes-qwen2-vl"
"""A Qwen2-VL trained on drawings by tools/train_vision_model.py."""

QUESTION = "What do you see?"
"""The only one that it was trained to answer."""

DRAWINGS, GOAL = 10, 9
"""How many it describes, and how many of these it should get right."""


def load(directory: Path) -> tuple[Qwen2VL, Processor]:
    """A directory in Hugging Face format; an id on the hub, such as "Qwen/Qwen2-VL-2B-Instruct", loads in the same
    way."""
    model = Qwen2VL.from_pretrained(directory, dtype="float32")
    processor = Processor.from_pretrained(directory)
    return model, processor


def draw_to(picture: Path, seed: str) -> str:
    """A picture that nobody has seen before, and what it shows, in words."""
    drawing = draw(seed)
    drawing.picture.save(picture)
    return drawing.text


def describe(model: Qwen2VL, processor: Processor, picture: Path) -> str:
    """The answer to a question about a picture, printed as it comes."""
    question = [{"type": "image", "path": picture}, {"type": "text", "text": QUESTION}]
    inputs = processor([{"role": "user", "content": question}], add_generation_prompt=True)
    ids = model.generate(**inputs, max_new_tokens=20, streamer=TextStreamer(processor.tokenizer))
    return processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def describe_all(model: Qwen2VL, processor: Processor, pictures: list[Path]) -> list[str]:
    """The same for many pictures at once, of any sizes, which only are a longer list of conversations."""
    questions = [[{"type": "image", "path": picture}, {"type": "text", "text": QUESTION}] for picture in pictures]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    inputs = processor(conversations, add_generation_prompt=True)
    ids = model.generate(**inputs, max_new_tokens=20)
    answers = ids[:, inputs["input_ids"].shape[1] :]
    return [processor.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]


def copy(source: Path, target: Path) -> None:
    """Model and processor as they are stored; what is written can be read by transformers and vLLM too."""
    Qwen2VL.from_pretrained(source).save_pretrained(target)
    Processor.from_pretrained(source).save_pretrained(target)


def run(seed: int | None = None) -> int:
    """Runs the demo.

    Args:
        seed: of the drawings; a random one when None.

    Returns:
        The exit code: 0, or 1 when a check failed.

    Raises:
        ImageError: Pillow is not installed.
    """
    torch.set_num_threads(1)  # as in `ligerzoo.demo.text`
    seed = randrange(10**6) if seed is None else seed
    directory = Path(tempfile.mkdtemp(prefix="ligerzoo-drawings-"))
    pictures = [directory / f"{number}.png" for number in range(1, DRAWINGS + 1)]
    checks = Checks()

    heading("1. Load a model that sees", load)
    model, processor = load(CHECKPOINT)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    checks.tell(f"{parameters:,} parameters, as many as the files hold", parameters == count_stored(CHECKPOINT))

    heading(f"2. Draw pictures, with the seed {seed}", draw_to)
    shown = [draw_to(picture, f"demo {seed} {picture.stem}") for picture in pictures]
    print(f"The first of {DRAWINGS} is {pictures[0]}")

    heading("3. Ask what is in the first", describe)
    answer = describe(model, processor, pictures[0])

    heading("4. Ask about all of them at once", describe_all)
    answers = describe_all(model, processor, pictures)
    for picture, told, true in zip(pictures, answers, shown, strict=True):
        print(f"{picture}  {told}" + ("" if told == true else f"  (drawn: {true})"))
    checks.tell("of the first it says the same alone and among others", answers[0] == answer)
    right = sum(told == true for told, true in zip(answers, shown, strict=True))
    checks.tell(f"{right} of {DRAWINGS} answers are right", right >= GOAL)

    heading("5. Save them", copy)
    with tempfile.TemporaryDirectory() as target:
        copy(CHECKPOINT, Path(target, "copy"))
        files = {path.name: path.read_bytes() for path in Path(target, "copy").iterdir()}
    same = all((CHECKPOINT / name).read_bytes() == content for name, content in files.items())
    checks.tell(f"the bytes of all {len(files)} files are the same", same)

    print(f"\n{checks.passed} of {checks.told} checks passed.\n\n{styled('Try next', BOLD)}")
    for purpose, command in next_commands(pictures[0]):
        print(f"\n{styled('# ' + purpose, DIM)}\n{command}")
    return 0 if checks.passed == checks.told else 1


def count_stored(directory: Path) -> int:
    """The numbers that all tensors in the files have together."""
    with Checkpoint(directory) as files:
        return sum(math.prod(tensor.shape) for tensor in files.tensors.values())


def next_commands(picture: Path) -> list[tuple[str, str]]:
    """What each is good for, and the command, as it works in this directory."""
    python, checkpoint = shlex.quote(here(sys.executable)), shlex.quote(here(str(CHECKPOINT)))
    ask = f'--image {picture} --prompt "{QUESTION}"'
    return [
        ("the same on the command line", f"{python} -m ligerzoo generate {checkpoint} {ask}"),
        ("other drawings", f"{python} -m ligerzoo demo --vision"),
        (
            "a model for pictures of all kinds, from the hub (4.4 GB), to talk with",
            f"{python} -m ligerzoo chat Qwen/Qwen2-VL-2B-Instruct --image {picture}",
        ),
    ]

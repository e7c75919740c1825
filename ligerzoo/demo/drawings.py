"""Drawings of coloured shapes and digits, and what they show in words: what the demo's vision model has learnt to see.

Training and the demo draw with the same code and never from the same seeds: a seed is a text, and training's begin with
a word of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TYPE_CHECKING

from ligerzoo.vision.io import pillow

if TYPE_CHECKING:
    from PIL.Image import Image

COLORS = {
    "red": (215, 40, 40),
    "yellow": (240, 200, 20),
    "green": (40, 160, 70),
    "blue": (40, 90, 220),
    "purple": (150, 60, 190),
}
SHAPES = {"circle": [1.0] * 60, "square": [1.0] * 4, "triangle": [1.0] * 3, "star": [1.0, 0.45] * 5}
"""For each the distances from the centre of its corners, all around."""

DIGITS = "0123456789"

_SIDES = (120, 240)  # of a picture, in pixels; the longer one may be a third longer
_SIZES = (0.32, 0.5)  # of what is drawn, in shorter sides of the picture
_STENCIL = 128  # the side in pixels of the stencils, which are scaled down


@dataclass(frozen=True)
class Thing:
    """One coloured shape or digit.

    Attributes:
        color: a name in COLORS.
        form: one in SHAPES, or a digit.
        x, y: its centre, in pixels of the picture.
        size: the diameter of the circle around it, in pixels.
    """

    color: str
    form: str
    x: float
    y: float
    size: float

    def __str__(self) -> str:
        return f"a {self.color} {self.form}"


@dataclass(frozen=True)
class Drawing:
    """A picture, and what it shows.

    Attributes:
        picture: in red, green and blue.
        text: such as "a red circle", or "a red circle left of a blue 7"; the one to the left, or above, goes first.
    """

    picture: Image
    text: str


def draw(seed: str, size: tuple[int, int] | None = None) -> Drawing:
    """One thing or two on a background; everything about them is up to the seed.

    Args:
        seed: any text.
        size: the width and the height of the picture in pixels, from 120 to 320; up to the seed when None.

    Raises:
        ImageError: Pillow is not installed.
    """
    random = Random(seed)
    width, height = size or random_size(random)
    if random.random() < 0.3:
        things, text = [thing := _random_thing(width, height, random)], str(thing)
    else:
        things, text = _random_pair(width, height, random)
    picture = _background(width, height, random)
    for thing in things:
        _put(thing, picture, random)
    return Drawing(picture, text)


def random_size(random: Random) -> tuple[int, int]:
    """The width and the height of a picture, in pixels."""
    short = random.randint(*_SIDES)
    long = round(short * random.uniform(1, 4 / 3))
    return random.choice([(short, long), (long, short)])


def _random_thing(width: int, height: int, random: Random) -> Thing:
    size = random.uniform(*_SIZES) * min(width, height)
    x, y = random.uniform(size / 2, width - size / 2), random.uniform(size / 2, height - size / 2)
    form = random.choice([random.choice(list(SHAPES)), random.choice(DIGITS)])
    return Thing(random.choice(list(COLORS)), form, x, y, size)


def _random_pair(width: int, height: int, random: Random) -> tuple[list[Thing], str]:
    """Two things that don't touch, of which one is clearly left of the other or above it, and the text."""
    while True:
        things = [_random_thing(width, height, random) for _ in range(2)]
        axis, words = random.choice([("x", "left of"), ("y", "above")])
        first, second = sorted(things, key=lambda thing: float(getattr(thing, axis)))
        across, down = second.x - first.x, second.y - first.y
        along, aside = (across, abs(down)) if axis == "x" else (down, abs(across))
        if along > 2 * aside and math.hypot(along, aside) > 0.55 * (first.size + second.size):
            return [first, second], f"{first} {words} {second}"


def _background(width: int, height: int, random: Random) -> Image:
    """A gradient between four pale shades, or four dark ones, with some grain."""
    images = pillow()
    shades = random.choice([range(60), range(195, 256)])
    corners = images.frombytes("RGB", (2, 2), bytes(random.choices(shades, k=12)))
    grain = images.frombytes("L", (width, height), random.randbytes(width * height)).convert("RGB")
    gradient = corners.resize((width, height), resample=images.Resampling.BILINEAR)
    blended: Image = images.blend(gradient, grain, random.uniform(0, 0.12))
    return blended


def _put(thing: Thing, picture: Image, random: Random) -> None:
    """Draws a thing: a shape turned at will, a digit tilted a little, in one of many shades of its colour."""
    turn = random.uniform(-12, 12) if thing.form in DIGITS else random.uniform(0, 360)
    images = pillow()
    size = round(thing.size)
    stencil = _stencil(thing.form).rotate(turn, resample=images.Resampling.BILINEAR)
    stencil = stencil.resize((size, size), resample=images.Resampling.BICUBIC)
    shade = tuple(min(255, max(0, value + random.randint(-25, 25))) for value in COLORS[thing.color])
    picture.paste(shade, (round(thing.x - size / 2), round(thing.y - size / 2)), stencil)


@cache
def _stencil(form: str) -> Image:
    """White on black, within a circle as wide as the image."""
    images = pillow()
    from PIL import ImageDraw, ImageFont

    image: Image = images.new("L", (_STENCIL, _STENCIL))
    middle, pen = _STENCIL / 2, ImageDraw.Draw(image)
    if form in SHAPES:
        pen.polygon(_corners(SHAPES[form], middle), fill=255)
        return image
    font = ImageFont.load_default(_STENCIL)
    left, top, right, bottom = font.getbbox(form)
    corner = middle - (left + right) / 2, middle - (top + bottom) / 2
    pen.text(corner, form, fill=255, font=font, stroke_width=4)
    return image


def _corners(distances: list[float], middle: float) -> list[tuple[float, float]]:
    angles = [2 * math.pi * i / len(distances) for i in range(len(distances))]
    return [
        (middle + middle * distance * math.sin(angle), middle - middle * distance * math.cos(angle))
        for distance, angle in zip(distances, angles, strict=True)
    ]

"""Drawings of coloured shapes and digits with descriptions, for the demo's vision model.

Training and the demo use the same code with different seeds: seeds are strings, and those of training begin with
another word than those of the demo.
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
"""For each shape, the distances of its corners from the centre, in order around it."""

DIGITS = "0123456789"

_SIDES = (120, 240)  # range of the short side of a picture in pixels; the long side is up to a third longer
_SIZES = (0.32, 0.5)  # range of the size of a figure, as a fraction of the short side
_STENCIL = 128  # side of the stencils in pixels, before they are scaled


@dataclass(frozen=True)
class Figure:
    """One coloured shape or digit.

    Attributes:
        color: a key of `COLORS`.
        form: a key of `SHAPES`, or a digit.
        x, y: centre in pixels.
        size: diameter of the circumscribed circle in pixels.
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
    """A picture and its description.

    Attributes:
        picture: an RGB image.
        text: such as "a red circle" or "a red circle left of a blue 7". The left or upper figure comes first.
    """

    picture: Image
    text: str


def draw(seed: str, size: tuple[int, int] | None = None) -> Drawing:
    """Draws one or two figures on a background. The seed determines everything.

    Args:
        seed: any string.
        size: width and height of the picture in pixels, 120 to 320 each. None derives them from the seed.

    Raises:
        ImageError: Pillow is not installed.
    """
    random = Random(seed)
    width, height = size or random_size(random)
    if random.random() < 0.3:
        figures, text = [figure := _random_figure(width, height, random)], str(figure)
    else:
        figures, text = _random_pair(width, height, random)
    picture = _background(width, height, random)
    for figure in figures:
        _paste(figure, picture, random)
    return Drawing(picture, text)


def random_size(random: Random) -> tuple[int, int]:
    """Returns the width and height of a picture in pixels."""
    short = random.randint(*_SIDES)
    long = round(short * random.uniform(1, 4 / 3))
    return random.choice([(short, long), (long, short)])


def _random_figure(width: int, height: int, random: Random) -> Figure:
    size = random.uniform(*_SIZES) * min(width, height)
    x, y = random.uniform(size / 2, width - size / 2), random.uniform(size / 2, height - size / 2)
    form = random.choice([random.choice(list(SHAPES)), random.choice(DIGITS)])
    return Figure(random.choice(list(COLORS)), form, x, y, size)


def _random_pair(width: int, height: int, random: Random) -> tuple[list[Figure], str]:
    """Returns two figures that don't touch, one clearly left of or above the other, and their description."""
    while True:
        figures = [_random_figure(width, height, random) for _ in range(2)]
        axis, words = random.choice([("x", "left of"), ("y", "above")])
        first, second = sorted(figures, key=lambda figure: float(getattr(figure, axis)))
        across, down = second.x - first.x, second.y - first.y
        along, aside = (across, abs(down)) if axis == "x" else (down, abs(across))
        if along > 2 * aside and math.hypot(along, aside) > 0.55 * (first.size + second.size):
            return [first, second], f"{first} {words} {second}"


def _background(width: int, height: int, random: Random) -> Image:
    """Returns a gradient between four light or four dark colours, with some noise."""
    images = pillow()
    shades = random.choice([range(60), range(195, 256)])
    corners = images.frombytes("RGB", (2, 2), bytes(random.choices(shades, k=12)))
    grain = images.frombytes("L", (width, height), random.randbytes(width * height)).convert("RGB")
    gradient = corners.resize((width, height), resample=images.Resampling.BILINEAR)
    blended: Image = images.blend(gradient, grain, random.uniform(0, 0.12))
    return blended


def _paste(figure: Figure, picture: Image, random: Random) -> None:
    """Draws a figure with a random shade of its colour. Shapes are rotated by any angle, digits by a small one."""
    angle = random.uniform(-12, 12) if figure.form in DIGITS else random.uniform(0, 360)
    images = pillow()
    size = round(figure.size)
    stencil = _stencil(figure.form).rotate(angle, resample=images.Resampling.BILINEAR)
    stencil = stencil.resize((size, size), resample=images.Resampling.BICUBIC)
    shade = tuple(min(255, max(0, value + random.randint(-25, 25))) for value in COLORS[figure.color])
    picture.paste(shade, (round(figure.x - size / 2), round(figure.y - size / 2)), stencil)


@cache
def _stencil(form: str) -> Image:
    """Returns the form in white on black, inside the largest circle of the image."""
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

"""Drawings match their descriptions."""

import re

import numpy as np
import pytest

from ligerzoo.demo.drawings import COLORS, DIGITS, SHAPES, Drawing, draw

FIGURE = rf"a ({'|'.join(COLORS)}) ({'|'.join([*SHAPES, *DIGITS])})"


@pytest.fixture(scope="module")
def drawings() -> list[Drawing]:
    return [draw(f"test {number}") for number in range(150)]


def pixels_of(color: str, drawing: Drawing) -> np.ndarray:
    """Returns the columns and rows of the pixels with this colour, (n, 2)."""
    pixels = np.asarray(drawing.picture).astype(int)
    return np.argwhere(np.abs(pixels - COLORS[color]).max(-1) < 35)[:, ::-1]


def test_a_seed_determines_the_drawing() -> None:
    one, same, other = draw("x 1"), draw("x 1"), draw("x 2")
    assert (one.text, one.picture.tobytes()) == (same.text, same.picture.tobytes())
    assert one.picture.tobytes() != other.picture.tobytes()
    assert draw("x 1", (130, 150)).picture.size == (130, 150)


def test_drawings_vary(drawings: list[Drawing]) -> None:
    words = {word for drawing in drawings for word in drawing.text.split()}
    assert words == {"a", *COLORS, *SHAPES, *DIGITS, "left", "of", "above"}
    assert all(re.fullmatch(f"{FIGURE}(?: (?:left of|above) {FIGURE})?", drawing.text) for drawing in drawings)
    assert 0.2 < np.mean([re.fullmatch(FIGURE, drawing.text) is not None for drawing in drawings]) < 0.4
    sides = {side for drawing in drawings for side in drawing.picture.size}
    assert 120 <= min(sides) < 140 < 260 < max(sides) <= 320


@pytest.mark.parametrize("words, axis", [("left of", 0), ("above", 1)])
def test_positions_match_the_description(words: str, axis: int, drawings: list[Drawing]) -> None:
    checked = 0
    for drawing in drawings:
        match = re.fullmatch(f"{FIGURE} {words} {FIGURE}", drawing.text)
        if match and match[1] != match[3]:
            first, second = (pixels_of(color, drawing).mean(0) for color in (match[1], match[3]))
            assert second[axis] - first[axis] > abs(second[1 - axis] - first[1 - axis])
            checked += 1
    assert checked > 25


def test_figures_have_the_right_size_and_are_complete(drawings: list[Drawing]) -> None:
    alone = [(drawing, match) for drawing in drawings if (match := re.fullmatch(FIGURE, drawing.text))]
    assert len(alone) > 30
    for drawing, match in alone:
        pixels = pixels_of(match[1], drawing)
        extent = np.ptp(pixels, axis=0).max()
        assert 0.2 < extent / min(drawing.picture.size) < 0.55
        if match[2] in DIGITS:
            assert (pixels.min(0) > 0).all()
            assert (pixels.max(0) < np.array(drawing.picture.size) - 1).all()

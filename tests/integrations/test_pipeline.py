"""transformers' text-generation pipeline with wrapped models."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from transformers import pipeline

from tests.integrations.clients import COMPARED, PLACEHOLDERS, ours, theirs, tokenizer

# transformers reads config.json of version 4.
pytestmark = pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")

CALLS: list[tuple[Any, dict[str, Any]]] = [
    ("w3 w4 w5", {}),
    (["w3 w4 w5", "w9"], {"batch_size": 2}),  # pads on the left
    ([{"role": "user", "content": "w3 w8"}], {}),
    ("w3 w4", {"num_beams": 2, "num_return_sequences": 2, "return_full_text": False}),
]


@pytest.mark.parametrize("model_type", COMPARED)
def test_text_generation(model_type: str, checkpoints: dict[str, Path]) -> None:
    found = []
    for load in (ours, theirs):
        words = tokenizer()
        words.padding_side = "left"
        generate = pipeline("text-generation", model=load(checkpoints[model_type]), tokenizer=words, device="cpu")
        options = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": PLACEHOLDERS}
        found.append([generate(text, **options, **more) for text, more in CALLS])
    assert found[0] == found[1]

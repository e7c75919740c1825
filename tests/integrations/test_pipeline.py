"""transformers' pipelines that generate text, with wrapped models."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from transformers import pipeline

from ligerzoo import AutoModel
from ligerzoo.errors import LigerzooError
from tests.integrations.clients import COMPARED, PLACEHOLDERS, Writer, ours, processor, theirs, tokenizer

# transformers reads config.json of version 4.
pytestmark = pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")

CALLS: list[tuple[Any, dict[str, Any]]] = [
    ("w3 w4 w5", {}),
    (["w3 w4 w5", "w9"], {"batch_size": 2}),  # pads on the left
    ([{"role": "user", "content": "w3 w8"}], {}),
    ([{"role": "user", "content": "w3 w8"}], {"stop_sequence": "w2"}),
    (["w3 w4 w5", "w9"], {"stop_sequence": ["w2", "w3"], "return_full_text": False}),
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


def test_a_model_that_is_not_wrapped_is_refused(checkpoints: dict[str, Path]) -> None:
    model = AutoModel.from_pretrained(checkpoints["llama"])
    with pytest.raises(LigerzooError, match=r"^Llama: .* cannot be used in its pipelines. Give .*wrap\(model\)"):
        pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
    model.lm_head.requires_grad_(False)
    assert model.num_parameters() == ours(checkpoints["llama"]).num_parameters()
    assert model.num_parameters(only_trainable=True) == model.num_parameters() - model.lm_head.weight.numel()


def test_an_assistant(checkpoints: dict[str, Path]) -> None:
    found = []
    for load in (ours, theirs):
        model, assistant = (load(checkpoints["llama"]) for _ in range(2))
        generate = pipeline(
            "text-generation", model=model, tokenizer=tokenizer(), device="cpu", assistant_model=assistant
        )
        found.append(generate("w3 w4 w5", max_new_tokens=8, do_sample=False))
    assert found[0] == found[1]


def test_images(checkpoints: dict[str, Path]) -> None:
    pytest.importorskip("PIL")
    content = [{"type": "image", "image": Writer().image(2)}, {"type": "text", "text": "w3 w4"}]
    options = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": PLACEHOLDERS}
    found = []
    for load in (ours, theirs):
        model = load(checkpoints["qwen2_vl"])
        generate = pipeline("image-text-to-text", model=model, processor=processor(), device="cpu")
        messages = [{"role": "user", "content": content}]
        answer = generate(text=messages, stop_sequence="w2", generate_kwargs=options)
        found.append(answer[0]["generated_text"][-1])
    assert found[0] == found[1]

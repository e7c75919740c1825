"""The vision demo passes its checks, the checks detect errors, and its model is as documented."""

import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ligerzoo import Processor, Tokenizer, cli
from ligerzoo.demo import vision as demo_vision
from ligerzoo.demo.drawings import COLORS, DIGITS, SHAPES, draw
from ligerzoo.demo.vision import CHECKPOINT, QUESTION
from ligerzoo.models import Qwen2VL
from tools import train_vision_model as script


@pytest.fixture(autouse=True)
def _threads() -> Any:
    """Restores the number of threads, which the demo sets to 1."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# The demo


def test_the_demo_passes_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--vision", "--seed", "7"]) == 0
    output = capsys.readouterr().out
    assert len([line for line in output.splitlines() if line.startswith("✓ ")]) == 4
    assert "4 of 4 checks passed." in output
    assert "with seed 7" in output
    steps = (
        demo_vision.load,
        demo_vision.draw_to,
        demo_vision.describe_picture,
        demo_vision.describe_all,
        demo_vision.copy,
    )
    assert all(f"    def {step.__name__}(" in output for step in steps)
    answers = dict(line.split("  ", 1) for line in output.splitlines() if line.startswith("/") and "  " in line)
    assert len(answers) == demo_vision.DRAWINGS
    for number, picture in enumerate(answers, 1):
        drawing = draw(f"demo 7 {number}")
        assert Image.open(picture).tobytes() == drawing.picture.tobytes()
    assert all(command in output for _, command in demo_vision.next_commands(Path(next(iter(answers)))))


def load_incomplete(directory: Path) -> tuple[Qwen2VL, Processor]:
    model, processor = load(directory)
    del model.visual.blocks[3].mlp.fc1.bias
    model.visual.blocks[3].mlp.fc1.bias = None
    return model, processor


def describe_another(model: Qwen2VL, processor: Processor, picture: Path) -> str:
    return describe_picture(model, processor, picture.with_name("2.png"))


def describe_badly(wrong: int) -> Callable[..., list[str]]:
    def step(model: Qwen2VL, processor: Processor, pictures: list[Path]) -> list[str]:
        correct = [draw(f"demo 7 {picture.stem}").text for picture in pictures]
        return correct[:-wrong] + ["a black hole"] * wrong

    return step


def copy_inexactly(source: Path, target: Path) -> None:
    copy(source, target)
    path = target / "preprocessor_config.json"
    path.write_text(path.read_text() + "\n")


load, describe_picture, copy = demo_vision.load, demo_vision.describe_picture, demo_vision.copy


@pytest.mark.parametrize(
    "step, broken, claim",
    [
        ("load", load_incomplete, "as many as in the files"),
        ("describe_picture", describe_another, "the same alone and in the batch"),
        ("describe_all", describe_badly(2), "8 of 10 answers are correct"),
        ("copy", copy_inexactly, "saved files equal the original ones"),
    ],
)
def test_the_demo_reports_failed_checks(
    step: str,
    broken: Callable[..., Any],
    claim: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo_vision, step, broken)
    assert cli.main(["demo", "--vision", "--seed", "7"]) == 1
    complaints = [line for line in capsys.readouterr().out.splitlines() if line.startswith("✗ NOT TRUE: ")]
    assert len(complaints) == 1
    assert claim in complaints[0]


def test_one_wrong_answer_is_allowed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo_vision, "describe_all", describe_badly(1))
    assert cli.main(["demo", "--vision", "--seed", "7"]) == 0
    assert "(drawn: " in capsys.readouterr().out


def test_the_default_seed_is_random(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo_vision, "randrange", lambda _: 1234)
    cli.main(["demo", "--vision"])
    assert "with seed 1234" in capsys.readouterr().out


def test_the_commands_to_try_next_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "1.png"
    text = demo_vision.draw_to(picture, "test 0")
    for (_, command), name in zip(demo_vision.next_commands(picture), ("generate", "demo", "chat"), strict=True):
        python, *words = shlex.split(command)
        assert Path(python).resolve() == Path(sys.executable).resolve()
        assert words[:2] == ["-m", "ligerzoo"]
        assert cli.parse(words[2:]).run.__name__ == name
        if name == "generate":
            assert cli.main(words[2:]) == 0
            assert capsys.readouterr().out == f"{text}\n"


# The model in the package


def test_the_model_describes_new_drawings(tmp_path: Path) -> None:
    """These seeds were used neither in training nor in validation."""
    pictures = [tmp_path / f"{number}.png" for number in range(60)]
    descriptions = [demo_vision.draw_to(picture, f"unseen {picture.stem}") for picture in pictures]
    answers = demo_vision.describe_all(*demo_vision.load(CHECKPOINT), pictures)
    correct = [given == expected for given, expected in zip(answers, descriptions, strict=True)]
    assert sum(correct) >= 0.9 * len(correct)


def test_transformers_computes_the_same_logits(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    demo_vision.draw_to(picture, "test 1")
    model, processor = demo_vision.load(CHECKPOINT)
    question = [{"type": "image", "path": picture}, {"type": "text", "text": QUESTION}]
    ours = processor([{"role": "user", "content": question}], add_generation_prompt=True)

    images = Qwen2VLImageProcessorPil.from_pretrained(CHECKPOINT)(Image.open(picture), return_tensors="pt")
    assert torch.equal(images["pixel_values"], ours["pixel_values"])
    assert torch.equal(torch.as_tensor(images["image_grid_thw"]), ours["image_grid_thw"])
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    tokens = int(ours["image_grid_thw"].prod()) // 4
    assert (
        tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * tokens))["input_ids"] == ours["input_ids"][0].tolist()
    )

    theirs = AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=torch.float32, attn_implementation="eager")
    kinds = torch.eq(ours["input_ids"], model.config.image_token_id).int()
    with torch.no_grad():
        expected = theirs.eval()(**ours, mm_token_type_ids=kinds).logits
        torch.testing.assert_close(model(**ours).logits, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


def test_the_model_is_small_and_in_hugging_face_format() -> None:
    sizes = {path.name: path.stat().st_size for path in CHECKPOINT.iterdir()}
    assert sum(sizes.values()) <= 3_000_000
    assert sizes.keys() >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "preprocessor_config.json",
        "chat_template.jinja",
    }


def test_the_training_is_recorded() -> None:
    record = json.loads((CHECKPOINT / "training.json").read_text())
    assert isinstance(record["seed"], int)
    assert record["versions"].keys() >= {"ligerzoo", "python", "torch", "triton", "pillow"}
    curve = record["curve"]
    lengths = {len(curve[name]) for name in ("step", "train_loss", "held_out_loss", "held_out_right")}
    assert lengths == {len(curve["step"])}
    assert len(curve["step"]) >= 10
    assert min(curve["held_out_loss"]) == pytest.approx(record["held_out_loss"], abs=1e-4)
    assert record["held_out_right_as_stored"] >= 0.9


# The script that trains it


@pytest.fixture(scope="module")
def processor() -> Processor:
    return script.make_processor(script.train_tokenizer())


def test_every_word_of_an_answer_is_a_token(processor: Processor) -> None:
    tokenizer: Tokenizer = processor.tokenizer
    for form in (*SHAPES, *DIGITS):
        for color in COLORS:
            text = f"a {color} {form} above a {color} {form}"
            assert len(tokenizer.encode(text)) <= len(text.split()) + 2 * (form in DIGITS)
    anything = "Grüße, 猫!\n\n  def f(x): return x\t# 1234"
    assert tokenizer.decode(tokenizer.encode(anything)) == anything


def test_training_batches_equal_the_processor_s_inputs(processor: Processor, device: str) -> None:
    batch = script.Drawings(processor, "test", 2, 3)[1]
    inputs = {name: tensor.cpu() for name, tensor in script.inputs_of(batch, processor, device).items()}
    size = script.random_size(script.Random("test 1"))
    patches = 0
    for row in range(3):
        drawing = draw(f"test 1 {row}", size)
        question = [{"type": "image", "image": drawing.picture}, {"type": "text", "text": QUESTION}]
        answer = {"role": "assistant", "content": drawing.text}
        expected = processor([{"role": "user", "content": question}, answer])
        ids = expected["input_ids"][0, :-1]  # the template adds a newline after the answer
        assert torch.equal(inputs["input_ids"][row, : len(ids)], ids)
        labels = batch.labels[row].tolist()
        answered = [label for label in labels if label != script.IGNORED]
        assert processor.tokenizer.decode(answered) == drawing.text + script.IM_END
        assert ids[-len(answered) :].tolist() == answered == labels[len(ids) - len(answered) : len(ids)]
        assert torch.equal(inputs["image_grid_thw"][row], expected["image_grid_thw"][0])
        count = len(expected["pixel_values"])
        assert torch.equal(inputs["pixel_values"][patches : patches + count], expected["pixel_values"])
        patches += count
    assert patches == len(inputs["pixel_values"])


def test_evaluation_equals_greedy_generation() -> None:
    model, processor = demo_vision.load(CHECKPOINT)
    batches = list(script.Drawings(processor, "test", 2, 8))
    right = []
    for index in range(2):
        size = script.random_size(script.Random(f"test {index}"))
        for number in range(8):
            drawing = draw(f"test {index} {number}", size)
            question = [{"type": "image", "image": drawing.picture}, {"type": "text", "text": QUESTION}]
            inputs = processor([{"role": "user", "content": question}], add_generation_prompt=True)
            ids = model.generate(**inputs, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
            right.append(processor.tokenizer.decode(ids, skip_special_tokens=True) == drawing.text)
    assert script.evaluate(model, batches, processor, "cpu")[1] == pytest.approx(sum(right) / len(right))


def test_the_trained_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "HELD_OUT", (2, 4))
    out = tmp_path / "model"
    arguments = ["--out", str(out), "--device", "cpu", "--steps", "20", "--batch", "2", "--workers", "0"]
    monkeypatch.setattr(sys, "argv", ["train_vision_model.py", *arguments])
    script.main()

    model, processor = demo_vision.load(out)
    assert len(processor.tokenizer) == model.config.vocab_size
    assert {path.name for path in CHECKPOINT.iterdir()} <= {path.name for path in out.iterdir()}
    record = json.loads((out / "training.json").read_text())
    assert record["drawings_seen"] == 40
    assert record["curve"]["step"] == [10, 20]
    assert record["held_out_loss"] < 4 < math.log(len(processor.tokenizer))
    assert "right" in capsys.readouterr().out

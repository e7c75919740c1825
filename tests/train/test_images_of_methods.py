"""Preferences and prompts with images: samples, losses, sampled completions and runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import AutoModel
from ligerzoo.errors import DataError
from ligerzoo.losses import model_sequence_logps
from ligerzoo.train.completion_batches import completion_logps, pack_completions
from ligerzoo.train.completions import CompletionSampler
from ligerzoo.train.data import PackedBatches, check_data, open_data
from ligerzoo.train.preferences import mismatched, sequences_of
from ligerzoo.vision.processor import Processor
from tests.train.data_helpers import write_lines
from tests.train.tiny_run import options, train
from tests.train.tiny_vision import conversation, picture, write_vision_checkpoint

KINDS = ("qwen2_vl", "mllama", "gemma3")
CASES = ["qwen2_vl", "mllama", pytest.param("gemma3", marks=pytest.mark.thorough)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        write_vision_checkpoint(folder / kind, kind)
    return folder


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of each kind: prompts with one image, with two, and with none."""
    folder = tmp_path_factory.mktemp("records")
    for name, size in {"a": (20, 30), "b": (12, 9)}.items():
        picture(*size).save(folder / f"{name}.png")
    questions = (["What?", "a.png"], ["b.png", "Which?", "a.png"], ["Who?"], ["b.png", "Where?"])
    prompts = [conversation(question, "")[:1] for question in questions]
    answers = [[{"role": "assistant", "content": text}] for text in ("a cat", "a large lion", "no", "here and there")]
    cases: dict[str, list[dict[str, Any]]] = {
        "dpo": [{"prompt": prompts[i], "chosen": answers[i], "rejected": answers[i - 1]} for i in range(4)],
        "kto": [{"prompt": prompts[i], "completion": answers[i], "label": i % 2 == 0} for i in range(4)],
        "grpo": [{"prompt": prompt} for prompt in prompts],
    }
    for name, lines in cases.items():
        write_lines(folder / f"{name}.jsonl", lines * 2)
    return folder


def batch_of(data: Path, kind: Any, processor: Processor) -> Any:
    stream = open_data(data, kind, processor, seq_length=256, shuffle=False, epochs=1)
    return next(PackedBatches(stream, batch_size=8, seq_length=256, pad_token_id=0))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("method, records_kind", [("dpo", "preference"), ("kto", "labelled")])
def test_packed_sequences_have_the_log_probabilities_that_they_have_alone(
    kind: str, method: str, records_kind: str, checkpoints: Path, records: Path
) -> None:
    """Also the mismatched completions of KTO, which keep the images of their prompts."""
    processor = Processor.from_pretrained(checkpoints / kind)
    model = AutoModel.from_pretrained(checkpoints / kind, dtype="float64")
    batch = batch_of(records / f"{method}.jsonl", records_kind, processor)
    for one in [batch, *(mismatched([batch]) if method == "kto" else [])]:
        inputs = {
            name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in one.inputs.items()
        }
        together = model_sequence_logps(model, **inputs, sequences=sequences_of(one))
        segments = [segment for _, segment in one.segments()]
        assert sum(len(segment.images) for segment in segments) == one.images > 0
        order = [*segments[::2], *segments[1::2]] if method == "dpo" else segments
        alone = []
        for segment in order:
            ids = torch.tensor([segment.input_ids])
            images = one.image_reader.inputs([[segment]], {"input_ids": ids})
            doubles = {
                name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in images.items()
            }
            alone.append(model_sequence_logps(model, ids, torch.tensor([segment.labels]), **doubles))
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", CASES)
def test_completions_of_prompts_with_images_have_the_log_probabilities_of_sampling(
    kind: str, checkpoints: Path, records: Path
) -> None:
    processor = Processor.from_pretrained(checkpoints / kind)
    model = AutoModel.from_pretrained(checkpoints / kind)
    stream = open_data(records / "grpo.jsonl", "prompt", processor, seq_length=256, shuffle=False, epochs=1)
    sampler = CompletionSampler(
        model, processor.tokenizer, num_samples=2, max_new_tokens=5, temperature=1.0, batch_size=8, exact=False,
        images=stream.images,
    )  # fmt: skip
    completions = sampler(list(stream)[:4], seeds=list(range(8)))  # type: ignore[arg-type]
    assert [len(one.images) for one in completions] == [1, 1, 2, 2, 0, 0, 1, 1]
    assert len({one.text for one in completions}) > 4
    batches = pack_completions(completions, batch_size=8, seq_length=256, pad_token_id=0, images=stream.images)
    for batch in batches:
        with torch.no_grad():
            logps = completion_logps(model, batch)
        torch.testing.assert_close(logps, batch.sampler_logps, rtol=1e-3, atol=1e-4)


REWARD = """def reward(completions, **fields):
    return [float(index) for index in range(len(completions))]
"""


@pytest.fixture
def given(request: pytest.FixtureRequest, checkpoints: Path, records: Path, tmp_path: Path) -> dict[str, Any]:
    """Options of a run of a method."""
    (tmp_path / "reward.py").write_text(REWARD)
    data, method = records / f"{request.param}.jsonl", {"method": request.param}
    if request.param == "grpo":
        method |= {"reward": str(tmp_path / "reward.py"), "prompts": 2, "num_samples": 2, "max_new_tokens": 4}
    sizes = {"seq_length": 256, "max_steps": 1, "schedule": "constant", "warmup": 0.0}
    return {**options(checkpoints / "qwen2_vl", data, tmp_path / "run", **sizes), **method}


@pytest.mark.parametrize("given", ["dpo", pytest.param("kto", marks=pytest.mark.thorough), "grpo"], indirect=True)
def test_a_run_trains_the_vision_tower(given: dict[str, Any]) -> None:
    assert train(given) == 0
    before, after = (AutoModel.from_pretrained(given[name]).state_dict() for name in ("model", "output"))
    assert any("visual" in name and not torch.equal(before[name], after[name]) for name in after)


@pytest.mark.thorough
@pytest.mark.parametrize("given", ["dpo", "kto", "grpo"], indirect=True)
def test_a_resumed_run_with_images_has_the_same_weights(given: dict[str, Any]) -> None:
    whole = {**given, "max_steps": 2, "output": f"{given['output']}-whole"}
    evaluated = {"eval_data": given["data"], "eval_every": 1}
    assert train(whole) == train(given | evaluated) == 0
    assert train({**given, **evaluated, "max_steps": 2, "resume": True}) == 0
    weights = [(Path(one["output"]) / "model.safetensors").read_bytes() for one in (whole, given)]
    assert weights[0] == weights[1]


def test_images_that_differ_within_a_pair_or_are_missing_are_named(
    checkpoints: Path, records: Path, tmp_path: Path
) -> None:
    processor = Processor.from_pretrained(checkpoints / "qwen2_vl")
    lines = [json.loads(line) for line in (records / "dpo.jsonl").read_text().splitlines()[:2]]
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes((records / f"{name}.png").read_bytes())
    lines[0]["chosen"] = [
        {"role": "assistant", "content": [{"type": "image", "path": "b.png"}, {"type": "text", "text": "a"}]}
    ]
    lines[1]["prompt"][0]["content"][0]["path"] = "none.png"
    file = write_lines(tmp_path / "a.jsonl", lines)
    problems = check_data(file, "preference", processor, seq_length=256, progress=False).problems.first
    assert "a.jsonl:1: chosen and rejected have different images" in str(problems[0])
    assert "a.jsonl:2: images[0]" in str(problems[1])
    with pytest.raises(DataError, match="the record has images, which this run cannot train"):
        next(open_data(records / "grpo.jsonl", "prompt", processor.tokenizer, seq_length=256, shuffle=False))

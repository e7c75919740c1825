"""Conversations with images: samples, batches, packing and runs."""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ligerzoo import AutoModel, Tokenizer
from ligerzoo.errors import DataError, ImageError, LigerzooError
from ligerzoo.models import CausalLM
from ligerzoo.text.conversation import Conversation
from ligerzoo.train.data import PackedBatches, PaddedBatches, Sample, check_data, format_sample, images, open_data
from ligerzoo.train.data.images import PixelBudget
from ligerzoo.train.data.samples import as_state, from_state
from ligerzoo.train.log import read_log
from ligerzoo.vision.processor import Processor
from tests.covering import representatives
from tests.train.tiny_run import options, train
from tests.train.tiny_vision import (
    END,
    KINDS,
    PLACEHOLDERS,
    TOKENS,
    conversation,
    data_uri,
    new_model,
    picture,
    write_conversations,
    write_processor,
    write_vision_checkpoint,
)


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("chats"))


@pytest.fixture(scope="session")
def load_processor(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Processor]:
    directory = tmp_path_factory.mktemp("processors")

    def load(kind: str) -> Processor:
        if not (directory / kind).exists():
            write_processor(directory / kind, kind)
            config = {"model_type": kind}
            (directory / kind / "config.json").write_text(json.dumps(config))
        return Processor.from_pretrained(directory / kind)

    return load


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("tiny") / "qwen2_vl", "qwen2_vl")


def samples_of(data: Any, processor: Processor | Tokenizer, **given: Any) -> list[Sample]:
    found = list(open_data(data, "auto", processor, **{"seq_length": 256, "epochs": 1, "shuffle": False, **given}))
    assert all(isinstance(sample, Sample) for sample in found)
    return found  # type: ignore[return-value]


# Samples


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_those_of_the_processor(kind: str, chats: Path, load_processor: Callable[[str], Processor]) -> None:
    processor = load_processor(kind)
    stream = open_data(chats, "auto", processor, seq_length=256, shuffle=False, epochs=1)
    batches = PaddedBatches(stream, batch_size=1, pad_token_id=0)
    images = 0
    for line, batch in zip(chats.read_text().splitlines(), batches, strict=True):
        messages = json.loads(line)["messages"]
        for part in messages[0]["content"]:
            if "path" in part:
                part["path"] = str(chats.parent / part["path"])
        expected = processor(messages)
        expected.pop("attention_mask")
        if not batch.images:
            expected = {name: tensor for name, tensor in expected.items() if not name.endswith("token_type_ids")}
        [[sample]] = batch.rows
        assert isinstance(sample, Sample)
        got = {name: tensor for name, tensor in batch.inputs.items() if name not in ("labels", "position_ids")}
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), name
        trained = [token for token, label in zip(sample.input_ids, sample.labels, strict=True) if label != -100]
        answer = messages[1]["content"][0]["text"]
        assert processor.tokenizer.decode(trained) == answer + END[kind]
        images += batch.images
    assert images == 24


def test_spellings_of_images_agree(tmp_path: Path, load_processor: Callable[[str], Processor]) -> None:
    processor = load_processor("qwen2_vl")
    picture(20, 30).save(tmp_path / "a.png")

    def record(**image: Any) -> dict[str, Any]:
        user = {"role": "user", "content": [{"type": "image", **image}, {"type": "text", "text": "What?"}]}
        return {"messages": [user, {"role": "assistant", "content": "A cat"}]}

    url = data_uri(20, 30)
    bytes_of = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    lines = [
        record(path="a.png"),
        record(url="a.png"),
        record(image="a.png", text=None),
        record(path=f"file://{tmp_path}/a.png"),
        record(type="image_url", image_url={"url": url, "detail": "low"}),
        record(image=url),
        {**record(), "images": ["a.png"]},
        {"prompt": record()["messages"][:1], "completion": record()["messages"][1:], "images": ["a.png"]},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    (tmp_path / "pairs.jsonl").write_text(json.dumps(lines[-1]) + "\n")
    rows = [record(image=picture(20, 30)), {**record(), "images": [bytes_of]}]
    found = []
    for data in (tmp_path / "data.jsonl", tmp_path / "pairs.jsonl", rows):
        stream = open_data(data, "auto", processor, seq_length=64, shuffle=False, epochs=1)
        found += list(PaddedBatches(stream, batch_size=1, pad_token_id=0))
    assert len(found) == 10
    first = found[0].inputs
    assert first["image_grid_thw"].tolist() == [[1, 4, 8]]
    for batch in found[1:]:
        assert batch.inputs.keys() == first.keys()
        assert all(torch.equal(batch.inputs[name], tensor) for name, tensor in first.items())


def test_rows_of_a_hugging_face_dataset(tmp_path: Path, load_processor: Callable[[str], Processor]) -> None:
    datasets = pytest.importorskip("datasets")
    messages = [
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat"}]},
    ]
    dataset = datasets.Dataset.from_dict({"messages": [messages], "images": [[picture(20, 30)]]})
    dataset.save_to_disk(str(tmp_path / "saved"))
    for data in (dataset, tmp_path / "saved"):
        [sample] = samples_of(data, load_processor("qwen2_vl"))
        assert [image.size for image in sample.images] == [(20, 30)]
        report = check_data(data, "auto", load_processor("qwen2_vl"), seq_length=64)
        report.raise_if_bad()
        assert report.images == 1


@pytest.mark.parametrize("kind", KINDS)
def test_image_tokens_are_never_trained(kind: str, tmp_path: Path, load_processor: Callable[[str], Processor]) -> None:
    """Not even those of an image in the answer."""
    processor = load_processor(kind)
    messages = conversation(["Draw"], "Here: ")
    messages[1]["content"] += [{"type": "image", "image": data_uri(20, 30)}, {"type": "text", "text": "done"}]
    [sample] = samples_of([{"messages": messages}], processor)
    [image] = sample.images
    assert processor.image_token_id in sample.input_ids[image.first : image.last]
    assert processor.image_token_id not in sample.labels
    assert set(sample.labels[image.first : image.last]) == {-100}
    trained = processor.tokenizer.decode([label for label in sample.labels if label != -100])
    assert "Here: " in trained
    assert f"done{END[kind]}" in trained


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_of_messages_are_text(
    kind: str, tmp_path: Path, load_processor: Callable[[str], Processor]
) -> None:
    """A chat and training encode a message alike: it cannot end itself, mark an image or replace the BOS token."""
    processor, file = load_processor(kind), tmp_path / "a.png"
    picture(20, 30).save(file)

    def ask(*questions: str) -> list[int]:
        chat = Conversation(processor.tokenizer, processor)
        chat.add_image(file)
        for question in questions:
            ids: list[int] = chat.ask(question)["input_ids"][0].tolist()
            chat.add_answer(question)
        return ids

    attack = " ".join(TOKENS[kind]) + PLACEHOLDERS[kind]
    ids = ask(attack)
    assert attack in processor.tokenizer.decode(ids)
    for asked, harmless in ((ids, ask("What?")), (ask(attack, attack), ask("What?", "And?"))):
        assert [one for one in asked if one >= 256] == [one for one in harmless if one >= 256]
    messages = conversation([str(file), attack], "No")
    with pytest.warns(UserWarning, match="encoded as text"):
        [sample] = samples_of([{"messages": messages}], processor, seq_length=512)
    assert sample.input_ids[: len(ids)] == ids
    with pytest.raises(DataError, match="another number of"):
        samples_of([{"messages": messages}], processor, special_tokens="control")
    with pytest.raises(ImageError, match="differs from the number of placeholders"):
        processor(messages[:1])


def test_truncation_keeps_whole_images(load_processor: Callable[[str], Processor]) -> None:
    processor = load_processor("qwen2_vl")
    record = {
        "images": [picture(20, 30), picture(24, 24)],
        "messages": [
            {"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "First"},
            {"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "Second"},
        ],
    }  # fmt: skip
    [whole] = samples_of([record], processor)
    for length in range(whole.images[0].last + 20, len(whole.input_ids)):
        stream = open_data([record], "auto", processor, seq_length=length, epochs=1, too_long="truncate")
        [sample] = stream
        assert isinstance(sample, Sample)
        kept = 1 if length < whole.images[1].last else 2
        assert sample.images == whole.images[:kept]
        cut = whole.images[1].first if kept == 1 and length > whole.images[1].first else length
        assert sample.input_ids == whole.input_ids[:cut]
        assert stream.images is not None
        assert len(stream.images.prompt(sample)["image_grid_thw"]) == kept


def test_samples_as_state_and_as_text(chats: Path, load_processor: Callable[[str], Processor]) -> None:
    processor = load_processor("gemma3")
    for sample in samples_of(chats, processor):
        assert from_state(json.loads(json.dumps(as_state(sample)))) == sample
        text = format_sample(sample, processor.tokenizer, color=False)
        assert text.count("[image ") == len(sample.images)
        assert "<image_soft_token>" not in text


# Malformed data


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}, {"role": "assistant", "content": "Yes"}]


IMAGE = {"type": "image"}


@pytest.mark.parametrize(
    "record, message",
    [
        ({"messages": user({**IMAGE, "path": "nowhere.png"})}, r"images\[0\] \(.*nowhere.png\).*FileNotFoundError"),
        ({"messages": user({**IMAGE, "path": "text.png"})}, r"text.png\): cannot read the image.*UnidentifiedImage"),
        ({"messages": user({**IMAGE, "path": "half.png"})}, r"half.png\): cannot read the image.*truncated"),
        ({"messages": user({**IMAGE, "path": "bomb.png"})}, r"bomb.png\).*(too many pixels|decompression bomb)"),
        ({"messages": user({**IMAGE, "path": "thin.png"})}, r"images\[0\]: the image is too long and thin"),
        ({"messages": user({**IMAGE, "path": "."})}, "got a directory; expected a regular file"),
        ({"messages": user({**IMAGE, "url": "https://a.org/b.png"})}, "images are not downloaded.*Download it first"),
        ({"messages": user({**IMAGE, "url": "data:image/png;base64,?"})}, "not valid base64"),
        ({"messages": user({**IMAGE, "image": 3})}, r"images\[0\]: not an image; got int"),
        ({"messages": user({**IMAGE, "image": "a.png", "path": "a.png"})}, r"messages\[0\]: .*more than one image"),
        ({"messages": user(IMAGE)}, "number of images differs.*got 0 images; expected 1"),
        ({"messages": user(IMAGE), "images": ["a.png", "a.png"]}, "got 2 images; expected 1"),
        ({"messages": user({**IMAGE, "path": "a.png"}), "images": ["a.png"]}, "both in the messages and in the field"),
        ({"messages": user(IMAGE), "images": "a.png"}, "images: wrong type"),
        ({"messages": user(IMAGE), "image": ["a.png"]}, "unknown field 'image'. Did you mean 'images'"),
        ({"messages": user({"type": "video", "video": "a.mp4"})}, "content of type 'video' is not supported"),
        ({"messages": user({"type": "img", "path": "a.png"})}, r"messages\[0\]: .*neither an image nor a video"),
    ],
)
def test_bad_images_are_named(
    record: dict[str, Any], message: str, tmp_path: Path, load_processor: Callable[[str], Processor]
) -> None:
    """By file and line, at the latest when everything is read before the training."""
    picture(20, 30).save(tmp_path / "a.png")
    (tmp_path / "text.png").write_text("a cat")
    (tmp_path / "half.png").write_bytes((tmp_path / "a.png").read_bytes()[:900])
    picture(4, 900).save(tmp_path / "thin.png")
    header = bytearray((tmp_path / "a.png").read_bytes())
    header[16:24] = (60_000).to_bytes(4, "big") * 2
    header[29:33] = __import__("zlib").crc32(bytes(header[12:29])).to_bytes(4, "big")
    (tmp_path / "bomb.png").write_bytes(header)
    good = {"messages": user({"type": "image", "path": "a.png"})}
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in (good, record, good)))
    report = check_data(data, "auto", load_processor("qwen2_vl"), seq_length=64)
    assert report.problems.count == 1
    assert str(report.problems.first[0]).startswith(f"{data}:2: ")
    with pytest.raises(DataError, match=message):
        report.raise_if_bad()
    stream = open_data(data, "auto", load_processor("qwen2_vl"), seq_length=64, shuffle=False, epochs=1)
    with pytest.raises(DataError, match=message):
        list(PackedBatches(stream, batch_size=1, seq_length=64, pad_token_id=0))


def test_an_image_that_changes_is_refused(tmp_path: Path, load_processor: Callable[[str], Processor]) -> None:
    picture(20, 30).save(tmp_path / "a.png")
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": user({"type": "image", "path": "a.png"})}) + "\n")
    stream = open_data(tmp_path / "data.jsonl", "auto", load_processor("qwen2_vl"), seq_length=64, epochs=1)
    [sample] = stream
    assert isinstance(sample, Sample)
    picture(30, 20).save(tmp_path / "a.png")
    assert stream.images is not None
    with pytest.raises(DataError, match=r"data.jsonl:1: an image has changed"):
        stream.images.read([sample])


@pytest.mark.parametrize(
    "record, message",
    [
        ({"text": "a", "images": ["a.png"]}, "of kind 'text'"),
        ({"prompt": "a", "completion": "b", "images": ["a.png"]}, "images need messages, not texts"),
    ],
)
def test_kinds_without_images_refuse_them(
    record: dict[str, Any], message: str, load_processor: Callable[[str], Processor]
) -> None:
    with pytest.raises(DataError, match=message):
        list(open_data([record], "auto", load_processor("qwen2_vl"), seq_length=64, epochs=1))


def test_a_tokenizer_refuses_images(chats: Path, load_processor: Callable[[str], Processor]) -> None:
    with pytest.raises(DataError, match=r"chats.jsonl:2: the record has images, which this run cannot train.*sft"):
        samples_of(chats, load_processor("qwen2_vl").tokenizer)


# Packing


def gradients(model: CausalLM, batches: Any) -> dict[str, Tensor]:
    """Returns the gradients of the summed loss over all batches."""
    model.zero_grad()
    for batch in batches:
        inputs = {
            name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in batch.inputs.items()
        }
        model(**inputs, num_items_in_batch=100).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compares the gradients of all weights together and, in fp64, of each weight.

    Those of key biases are 0 but for rounding; in fp32, sums that cancel have larger relative errors.
    """
    assert found.keys() == expected.keys()
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    errors = {name: (found[name] - gradient).norm() for name, gradient in expected.items()}
    assert torch.stack(list(errors.values())).norm() < tolerance * norm
    for name, error in errors.items():
        if error.dtype == torch.float64:
            assert error < tolerance * (expected[name].norm() + 1e-6 * norm), name


@pytest.mark.long
@pytest.mark.parametrize("kind", representatives(KINDS, "qwen2_vl", "gemma3", "qwen3_vl"))
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
def test_packed_rows_have_the_gradients_of_each_conversation(
    kind: str, dtype: torch.dtype, tolerance: float, chats: Path, load_processor: Callable[[str], Processor]
) -> None:
    model = new_model(kind).to(dtype)
    processor = load_processor(kind)

    def stream() -> Any:
        return open_data(chats, "auto", processor, seq_length=256, epochs=1)

    alone = gradients(model, PaddedBatches(stream(), batch_size=1, pad_token_id=0))
    layouts: list[PackedBatches | PaddedBatches] = [
        PackedBatches(stream(), batch_size=2, seq_length=256, pad_token_id=0),
        PaddedBatches(stream(), batch_size=3, pad_token_id=0),
    ]
    assert alone.keys() == {name for name, _ in model.named_parameters()}
    for batches in layouts:
        assert_same_gradients(gradients(model, batches), alone, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_row_of_text_and_one_with_an_image(kind: str, load_processor: Callable[[str], Processor]) -> None:
    """Rows of one segment each, without padding."""
    model, processor = new_model(kind).double(), load_processor(kind)
    with_image = {"messages": conversation(["What?", data_uri(20, 30)], "A cat")}
    with_image["messages"][0]["content"][1] = {"type": "image", "image": data_uri(20, 30)}
    [sample] = samples_of([with_image], processor)
    length = len(sample.input_ids)
    short = {"messages": conversation(["What?"], "A cat")}
    missing = length - len(samples_of([short], processor)[0].input_ids)
    text = {"messages": conversation(["What?" + "?" * missing], "A cat")}
    if missing < 0:
        with_image["messages"][0]["content"][0]["text"] += "?" * -missing
        text, length = short, length - missing
    data = [with_image, text]
    assert {len(one.input_ids) for one in samples_of(data, processor)} == {length}

    def stream() -> Any:
        return open_data(data, "auto", processor, seq_length=length, epochs=1)

    alone = gradients(model, PaddedBatches(stream(), batch_size=1, pad_token_id=0))
    for batches in (
        PackedBatches(stream(), batch_size=2, seq_length=length, pad_token_id=0),
        PaddedBatches(stream(), batch_size=2, pad_token_id=0),
    ):
        assert_same_gradients(gradients(model, batches), alone, 1e-9)


# Runs


def weights_of(directory: Path) -> dict[str, Tensor]:
    return dict(AutoModel.from_pretrained(directory).state_dict())


def test_a_run_trains_evaluates_and_saves_the_processor(qwen: Path, chats: Path, tmp_path: Path) -> None:
    given = options(
        qwen, chats, tmp_path / "run", seq_length=256, batch_size=1, max_steps=None, epochs=1, eval_data=(str(chats),)
    )
    assert train(given) == 0
    log = read_log(tmp_path / "run" / "log.jsonl")
    assert sum(entry.get("images", 0) for entry in log) == 24
    evaluation = log[-1]
    assert evaluation["eval_loss"] > 0
    assert evaluation["samples"][1]["prompt"].count("<|image_pad|>") == 1
    assert Processor.from_pretrained(tmp_path / "run").image_token_id == 260
    before, after = weights_of(qwen), weights_of(tmp_path / "run")
    assert all(not torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.thorough  # images have no state
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2, "lora_targets": ("q_proj", "visual.blocks")}], ids=str)
def test_a_run_with_images_resumes_bit_for_bit(
    changes: dict[str, Any], qwen: Path, chats: Path, tmp_path: Path
) -> None:
    def run(directory: str, **given: Any) -> None:
        full = options(qwen, chats, tmp_path / directory, seq_length=128, save_every=3, **changes, **given)
        assert train(full) == 0

    run("straight")
    run("resumed")
    for name in ("checkpoint-6", "config.json", "model.safetensors", "adapter_model.safetensors"):
        path = tmp_path / "resumed" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    run("resumed", resume=True)
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("straight", "resumed")]
    assert [entry["loss"] for entry in logs[0]] == [entry["loss"] for entry in logs[1]]
    assert [entry["images"] for entry in logs[0]] == [entry["images"] for entry in logs[1]]
    name = "adapter_model.safetensors" if changes else "model.safetensors"
    files = [(tmp_path / run / name).read_bytes() for run in ("straight", "resumed")]
    assert files[0] == files[1]


@pytest.mark.parametrize("part", ["visual", "model.layers"])
def test_parts_that_train(part: str, qwen: Path, chats: Path, tmp_path: Path) -> None:
    given = options(
        qwen, chats, tmp_path / "run", seq_length=128, max_steps=2, train_only=(part,), activation_budget="auto"
    )
    assert train(given) == 0
    before, after = weights_of(qwen), weights_of(tmp_path / "run")
    changed = {name for name, weight in before.items() if not torch.equal(after[name], weight)}
    assert changed == {name for name in before if name.startswith(part)}


def test_a_vision_tower_alone_needs_images(qwen: Path, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    messages = [{"role": "user", "content": "lion"}, {"role": "assistant", "content": "tiger"}]
    data.write_text(json.dumps({"messages": messages}) + "\n")
    given = options(qwen, data, tmp_path / "run", seq_length=128, max_steps=2, train_only=("visual",))
    with pytest.raises(LigerzooError, match=r"no weight that trains takes part in the loss.*has images"):
        train(given)


@pytest.mark.parametrize("targets, part", [(None, "layers"), (("visual.blocks",), "visual.blocks")])
def test_parts_that_lora_trains(
    targets: tuple[str, ...] | None, part: str, qwen: Path, chats: Path, tmp_path: Path
) -> None:
    """By default those of the language model."""
    given = options(
        qwen, chats, tmp_path / "run", seq_length=128, max_steps=1, lora_rank=2, lora_targets=targets,
        activation_budget="auto",
    )  # fmt: skip
    assert train(given) == 0
    names = load_file(tmp_path / "run" / "adapter_model.safetensors").keys()
    assert names
    assert all(f".{part}." in name and ("visual" in name) == (targets is not None) for name in names)


def test_a_dry_run_reads_all_images(
    qwen: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(chats.parent, tmp_path / "chats")
    data = tmp_path / "chats" / "chats.jsonl"
    given = options(qwen, data, tmp_path / "run", seq_length=256, dry_run=True)
    assert train(given) == 0
    printed = "".join(capsys.readouterr())
    assert "24 images" in printed
    assert "[image " in printed
    assert "the memory and the FLOPs of the vision tower are not predicted" in printed
    with pytest.raises(LigerzooError, match=r"option activation_budget: .*images have no budget"):
        train({**given, "activation_budget": "4"})
    broken = max((tmp_path / "chats" / "images").iterdir(), key=lambda path: path.stat().st_size)
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(DataError, match=rf"chats.jsonl:\d+: images\[\d\] \(.*{broken.name}\): cannot read the image"):
        train(given)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"activation_budget": "4"}, "option activation_budget: .*images have no budget.*activation-checkpointing"),
        ({"capture": "on"}, "option capture: needs a GPU|cannot be captured"),
    ],
)
def test_options_that_images_exclude(
    changes: dict[str, Any], message: str, qwen: Path, chats: Path, tmp_path: Path
) -> None:
    given = options(qwen, chats, tmp_path / "run", seq_length=256, **changes)
    with pytest.raises(LigerzooError, match=message):
        train(given)


def test_a_model_without_vision_refuses_images(checkpoint: Path, chats: Path, tmp_path: Path) -> None:
    given = options(checkpoint, chats, tmp_path / "run", seq_length=256)
    with pytest.raises(LigerzooError, match="the record has images"):
        train(given)


def test_activation_checkpointing_gives_the_same_losses(qwen: Path, chats: Path, tmp_path: Path) -> None:
    losses = []
    for name in ("kept", "recomputed"):
        given = options(
            qwen, chats, tmp_path / name, seq_length=128, max_steps=3, activation_checkpointing=name != "kept"
        )
        assert train(given) == 0
        losses.append([entry["loss"] for entry in read_log(tmp_path / name / "log.jsonl")])
    assert losses[0] == losses[1]


def test_a_dry_run_finds_images_after_the_first_samples(
    qwen: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "a"}]} for i in range(40)
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    data = (str(tmp_path / "texts.jsonl"), str(chats))
    given = options(qwen, chats, tmp_path / "run", seq_length=256, dry_run=True, data=data, seed=3)
    assert train(given) == 0
    assert "vision tower" not in "".join(capsys.readouterr())
    with pytest.raises(LigerzooError, match=r"option activation_budget: .*images have no budget"):
        train({**given, "activation_budget": "4"})


@pytest.mark.filterwarnings("ignore:.*the loss is exactly 0")  # the teacher is the student
@pytest.mark.parametrize("method", representatives(["dpo", "grpo", "distill"], "grpo"))
def test_other_methods_save_the_processor(method: str, qwen: Path, tmp_path: Path) -> None:
    """A vision-language model that is trained on texts still reads images."""
    given: dict[str, Any] = {"max_steps": 1, "seq_length": 128}
    record: dict[str, Any] = {"prompt": "a", "completion": " b"}
    match method:
        case "dpo":
            record = {"prompt": "a", "chosen": " b", "rejected": " c"}
        case "grpo":
            record = {"prompt": "a"}
            (tmp_path / "reward.py").write_text("def reward(completions): return [len(c) for c in completions]\n")
            given |= {"reward": str(tmp_path / "reward.py"), "prompts": 1, "num_samples": 2, "max_new_tokens": 4}
        case _:
            given["teacher"] = str(qwen)
    (tmp_path / "data.jsonl").write_text(4 * (json.dumps(record) + "\n"))
    assert train(options(qwen, tmp_path / "data.jsonl", tmp_path / "run", method=method, **given)) == 0
    saved = "preprocessor_config.json"
    assert (tmp_path / "run" / saved).read_bytes() == (qwen / saved).read_bytes()


@pytest.mark.parametrize("method", ["distill", "opd"])
def test_other_methods_refuse_images(method: str, qwen: Path, tmp_path: Path) -> None:
    picture(20, 30).save(tmp_path / "a.png")
    messages = user({"type": "image", "path": "a.png"})
    record: dict[str, Any] = {"messages": messages}
    given: dict[str, Any] = {"dry_run": True}
    match method:
        case "opd":
            record = {"prompt": messages[:1]}
            given |= {"teacher": str(qwen), "seq_length": 600}
        case _:
            given["teacher"] = str(qwen)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=r"data.jsonl:1: .*images.*--method sft"):
        train(options(qwen, data, tmp_path / "run", method=method, **given))


@pytest.mark.parametrize("count, most", [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_processes_of_a_host_share_one_bound_of_pixels(
    count: int, most: int, load_processor: Callable[[str], Processor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process decodes its share at a time; an image that is larger than the share is decoded alone."""
    read, active, found, lock = images.read_image, [0], [], threading.Lock()

    def counting(*args: Any) -> torch.Tensor:
        with lock:
            active[0] += 1
            found.append(active[0])
        time.sleep(0.02)
        with lock:
            active[0] -= 1
        return read(*args)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
    monkeypatch.setattr(images, "MAX_PIXELS", 4 * 20 * 30)
    monkeypatch.setattr(images, "read_image", counting)
    images._budget_of_process.cache_clear()
    try:
        messages = conversation([*["a.png"] * 8, "What?"], "Cats")
        for part in messages[0]["content"][:8]:
            part["path"] = data_uri(20, 30)
        stream = open_data([{"messages": messages}], "auto", load_processor("qwen2_vl"), seq_length=256, epochs=1)
        [batch] = PaddedBatches(stream, batch_size=1, pad_token_id=0)
    finally:
        images._budget_of_process.cache_clear()
    assert batch.images == len(found) == 8
    assert max(found) <= most
    assert (max(found) > 1) is (most > 1)


def test_readers_share_one_bound_of_pixels() -> None:
    """A larger image than the bound is decoded alone, and an error gives its pixels back."""
    budget, active, most = PixelBudget(10), [0, 0], [0, 0]
    lock = threading.Lock()

    def decode(pixels: int) -> None:
        with contextlib.suppress(ValueError), budget.reserved(pixels):
            for sign in (1, -1):
                with lock:
                    active[:] = active[0] + sign * pixels, active[1] + sign
                    most[:] = max(most[0], active[0] - max(0, pixels - 10)), max(most[1], active[1])
                time.sleep(0.001)
            raise ValueError

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(decode, [4, 3, 10, 1, 25, 6, 2, 5] * 4))
    assert most[0] == 10
    assert most[1] > 1

"""States of wrapped models, tied or not, that accelerate, safetensors and the Trainer save and load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate")

import accelerate
import transformers
from safetensors.torch import load_file, load_model, save_model

from tests.integrations.clients import ours
from tests.models.comparing import raw_bytes
from tests.models.tiny_gemma3 import CHECKPOINTS as GEMMA3
from tests.models.tiny_llama import CHECKPOINTS as LLAMA
from tests.models.tiny_phi3 import CHECKPOINTS as PHI3

CASES = {
    "tied": next(row for row in LLAMA if row.name.endswith("tied, only the embedding stored")),
    "untied": LLAMA[0],
    "fused": PHI3[0],
    "tied, images": GEMMA3[0],
}

pytestmark = [
    # transformers reads config.json of version 4.
    pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture(params=CASES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Directory of a tiny checkpoint."""
    CASES[request.param].write(tmp_path / "model")
    return tmp_path / "model"


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def is_tied(model: Any) -> bool:
    return model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_accelerators_resume(safe: bool, directory: Path) -> None:
    """A step after `load_state` is bit for bit that after `save_state`."""
    accelerator, model = accelerate.Accelerator(cpu=True), ours(directory).train()
    was_tied = is_tied(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def step() -> dict[str, Tensor]:
        ids = torch.arange(3, 27).view(2, 12)
        accelerator.backward(model(ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        return copied(model.state_dict())

    saved = step()
    accelerator.save_state(str(directory / "state"), safe_serialization=safe)
    expected = step()
    accelerator.load_state(str(directory / "state"))
    assert raw_bytes(model.state_dict()) == raw_bytes(saved)
    assert raw_bytes(step()) == raw_bytes(expected)
    assert is_tied(model) == was_tied


def by_accelerate(model: Any, other: Any, file: Path) -> None:
    accelerate.Accelerator(cpu=True).save_model(model, str(file.parent))
    accelerate.load_checkpoint_in_model(other, str(file.parent))


def by_safetensors(model: Any, other: Any, file: Path) -> None:
    save_model(model, str(file))
    assert load_model(other, str(file)) == (set(), [])


def by_load_state_dict(model: Any, other: Any, file: Path) -> None:
    save_model(model, str(file))
    assert not any(other.load_state_dict(load_file(file)))


def by_torch(model: Any, other: Any, file: Path) -> None:
    torch.save(model.state_dict(), file.with_suffix(".bin"))
    assert not any(other.load_state_dict(torch.load(file.with_suffix(".bin")), assign=True))


@pytest.mark.parametrize("transfer", [by_accelerate, by_safetensors, by_load_state_dict, by_torch])
def test_saved_weights_are_loaded(transfer: Callable[[Any, Any, Path], None], directory: Path) -> None:
    model, other = ours(directory), ours(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    (directory / "out").mkdir()
    transfer(model, other, directory / "out" / "model.safetensors")
    assert raw_bytes(other.state_dict()) == raw_bytes(model.state_dict())
    assert is_tied(other) == is_tied(model)


def test_one_name_of_a_tied_weight_is_saved(tmp_path: Path) -> None:
    """Whichever name other libraries keep."""
    CASES["tied"].write(tmp_path / "model")
    model = ours(tmp_path / "model")
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    for lacking in model.all_tied_weights_keys, set(model.all_tied_weights_keys.values()):
        kept = {name: tensor for name, tensor in state.items() if name not in lacking}
        model.save_pretrained(tmp_path / "out", state_dict=kept)
        assert raw_bytes(ours(tmp_path / "out").state_dict()) == raw_bytes(state)


def test_the_trainer_misses_no_weights(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It warns of names that a checkpoint lacks, when it resumes and when it loads the best model."""
    messages: list[str] = []
    monkeypatch.setattr(transformers.trainer.logger, "warning", lambda text, *_: messages.append(text))
    ids = torch.randint(3, 89, (4, 12))
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def train(resume: bool) -> Any:
        arguments = transformers.TrainingArguments(
            str(directory / "out"), max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="steps",
            eval_steps=1, load_best_model_at_end=True, use_cpu=True, report_to=[], disable_tqdm=True, seed=1,
        )  # fmt: skip
        trainer = transformers.Trainer(ours(directory), arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train(resume_from_checkpoint=str(directory / "out" / "checkpoint-1") if resume else None)
        return trainer

    expected, resumed = copied(train(False).model.state_dict()), train(True)
    assert raw_bytes(resumed.model.state_dict()) == raw_bytes(expected)
    assert not [text for text in messages if "missing" in text or "unexpected" in text]

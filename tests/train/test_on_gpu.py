"""Training on a GPU: updates without host syncs, and captured steps with the bits of eager ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ligerzoo.cli import main
from ligerzoo.models import Llama, LlamaConfig
from ligerzoo.train.captured_step import CapturedStep
from ligerzoo.train.optimizers import SkipNonFinite, clip_grad_norm, make_optimizer

pytestmark = pytest.mark.gpu

MODEL, DATA = "ligerzoo/demo/assets/tiny-python-llama", "examples/completions.jsonl"

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch": {},
    "stochastic": {"stochastic_rounding": True},
    "fp8": {"name": "adamw-fp8"},
    "muon": {"name": "muon", "stochastic_rounding": True},
}
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    return Llama(LlamaConfig(vocab_size=512, num_hidden_layers=2, **sizes), device="cuda", dtype=torch.bfloat16).train()


def packed(rows: int = 2, length: int = 128, segments: int = 4) -> dict[str, torch.Tensor]:
    """Random texts. Attention to several segments adds gradients in a fixed order, unlike cuDNN's."""
    ids = torch.randint(512, (rows, length))
    positions = (torch.arange(length) % (length // segments)).expand(rows, -1).contiguous()
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


@pytest.fixture
def without_host_sync() -> Callable[[Callable[[], object]], None]:
    def call(function: Callable[[], object]) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@every_optimizer
@pytest.mark.parametrize("skips", [False, True])
def test_updates_never_wait_for_the_gpu(
    optimizer: str, skips: bool, without_host_sync: Callable[[Callable[[], object]], None]
) -> None:
    model = new_model()
    chosen = make_optimizer(model, lr=1e-3, **OPTIMIZERS[optimizer])
    skip = SkipNonFinite(chosen) if skips else None
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def update() -> None:
        norm = clip_grad_norm(model, 1.0)
        if skip is not None:
            skip(norm)
        chosen.step()

    update()  # compiles, and creates states
    without_host_sync(update)


@every_optimizer
@pytest.mark.parametrize("skips", [False, True])
def test_captured_steps_have_the_bits_of_eager_ones(optimizer: str, skips: bool) -> None:
    trained = []
    for capture in ("off", "on"):
        model = new_model()
        chosen = make_optimizer(model, lr=1e-3, **OPTIMIZERS[optimizer])
        skip = SkipNonFinite(chosen) if skips else None
        step = CapturedStep(model, chosen, max_norm=1.0, skip=skip, capture=capture)  # type: ignore[arg-type]
        torch.manual_seed(1)
        results = [step([packed(), packed()], 4 * 124) for _ in range(6)]
        assert step.reason == ("capture is off" if capture == "off" else None)
        trained.append((model, [(loss.item(), norm.item()) for loss, norm in results if norm is not None]))
    (eager, eager_results), (captured, captured_results) = trained
    assert captured_results == eager_results
    for (name, weight), expected in zip(captured.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(weight, expected), name


@pytest.mark.parametrize("options", [[], ["--lora-rank", "4"], ["--accumulate", "2"], ["--ema", "0.9"]])
def test_the_command_captures_its_steps(options: list[str], tmp_path: Path) -> None:
    losses = {}
    for capture in ("off", "on"):
        output = tmp_path / capture
        run = [
            "--output",
            str(output),
            "--max-steps",
            "6",
            "--seq-length",
            "128",
            "--lr",
            "1e-3",
            "--dtype",
            "bfloat16",
        ]
        assert main(["train", MODEL, "--data", DATA, *run, "--capture", capture, *options]) == 0
        lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
        losses[capture] = [line["loss"] for line in lines if "loss" in line]
    assert len(losses["on"]) == 6
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-2)

"""The exponential moving average of weights."""

import copy
from typing import Any

import pytest
import torch

from ligerzoo.train.optimizers import EMA, make_optimizer
from tests.train.optimizer_cases import parameters_of, tiny_llama, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_it_computes_its_formula(dtype: torch.dtype, warmup: bool, tied: bool) -> None:
    model = tiny_llama(dtype=dtype, tie_word_embeddings=tied)
    optimizer = make_optimizer(model, lr=0.05)
    ema = EMA(model, 0.6, warmup=warmup)
    expected = [parameter.detach().double() for parameter in model.parameters()]
    for step in range(6):
        train(optimizer, parameters_of(optimizer), [step])
        ema.update()
        decay = min(0.6, (1 + step) / (10 + step)) if warmup else 0.6
        expected = [
            decay * average + (1 - decay) * parameter.detach().double()
            for average, parameter in zip(expected, model.parameters(), strict=True)
        ]
    own = copy.deepcopy(model.state_dict())
    with ema.swapped():
        for parameter, average in zip(model.parameters(), expected, strict=True):
            tolerance = 1e-6 if dtype == torch.float32 else 2**-8
            torch.testing.assert_close(parameter.double(), average, rtol=tolerance, atol=1e-6)
        assert not torch.equal(next(model.parameters()), next(iter(own.values())))
    assert all(torch.equal(weight, own[name]) for name, weight in model.state_dict().items())


def test_small_changes_of_bf16_weights_are_averaged_in_fp32() -> None:
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.ones_(model.weight)
    ema = EMA(model, 0.999, warmup=False)
    torch.nn.init.constant_(model.weight, 1.0078125)  # the next bf16 number
    for _ in range(500):
        ema.update()
    average = ema.state_dict()["averages"]["weight"].item()
    assert average == pytest.approx(1 + 0.0078125 * (1 - 0.999**500), rel=1e-4)


def test_saving_and_loading() -> None:
    def run(steps: range, saved: dict[str, Any] | None) -> tuple[EMA, dict[str, Any]]:
        torch.manual_seed(0)
        model = tiny_llama(tie_word_embeddings=True)
        optimizer, ema = make_optimizer(model, lr=0.05), EMA(model, 0.9)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            ema.load_state_dict(saved["ema"])
        for step in steps:
            train(optimizer, parameters_of(optimizer), [step])
            ema.update()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ema": ema.state_dict()}
        return ema, copy.deepcopy(states)

    whole, _ = run(range(5), None)
    _, half = run(range(2), None)
    resumed, _ = run(range(2, 5), half)
    assert whole.updates == resumed.updates == 5
    averages = resumed.state_dict()["averages"]
    assert "lm_head.weight" not in averages
    for name, average in whole.state_dict()["averages"].items():
        assert torch.equal(average, averages[name])


def test_frozen_parameters_have_no_average() -> None:
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    assert set(EMA(model).state_dict()["averages"]) == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)}


def test_wrong_uses_are_refused() -> None:
    model = tiny_llama()
    ema = EMA(model)
    with ema.swapped():
        with pytest.raises(ValueError, match=r"^EMA.update: called within EMA.swapped\(\)"):
            ema.update()
        with pytest.raises(ValueError, match=r"^EMA.swapped: called within"), ema.swapped():
            pass
    with pytest.raises(ZeroDivisionError), ema.swapped():
        raise ZeroDivisionError
    ema.update()
    saved = ema.state_dict()
    with pytest.raises(ValueError, match=r"^EMA.load_state_dict: 'lm_head.weight' is missing, unexpected or of"):
        EMA(tiny_llama(tie_word_embeddings=True)).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"^EMA.load_state_dict: 'model.layers.0.mlp.gate_proj.weight' is missing, un"):
        EMA(tiny_llama(intermediate_size=25)).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"^EMA: decay=1.5; expected a number from 0 to 1"):
        EMA(model, 1.5)
    with pytest.raises(ValueError, match=r"^the model has no parameter with requires_grad=True"):
        EMA(model.requires_grad_(False))

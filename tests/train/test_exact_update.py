"""The first update computes the log-probabilities of sampling, to the bit where the run says so."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.adapters import add_lora
from ligerzoo.errors import ConfigError
from ligerzoo.generate import rows
from ligerzoo.layers import attention_paths, decoder
from ligerzoo.losses import GRPO, model_token_logps
from ligerzoo.models import (
    CausalLM,
    Gemma3Text,
    Gemma3TextConfig,
    GptOss,
    GptOssConfig,
    Llama,
    LlamaConfig,
    Qwen3,
    Qwen3Config,
    Qwen3Moe,
    Qwen3MoeConfig,
)
from ligerzoo.models.moe import MoECausalLM
from ligerzoo.train import rollouts
from ligerzoo.train.completion_batches import completion_logps, completion_loss, pack_completions
from ligerzoo.train.completions import CompletionSampler, SampledCompletion
from ligerzoo.train.data.samples import PromptSample, Source
from ligerzoo.train.log import read_log
from tests.generate.test_exact import LARGE, SMALL_HEADS, on_hopper
from tests.train.grpo_run import grpo_options, write_prompts, write_reward
from tests.train.test_grpo import LOW_TOKENS, train
from tests.train.tiny_run import write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Options of a run with heads of 64 features, which exact decoding supports."""
    checkpoint = write_checkpoint(tmp_path / "model", head_dim=64)
    reward, prompts = write_reward(tmp_path / "reward.py", LOW_TOKENS), write_prompts(tmp_path / "prompts.jsonl")
    return lambda **changes: grpo_options(checkpoint, prompts, reward, tmp_path / "run", **changes)


def differences(given: dict[str, Any]) -> list[float]:
    """Trains, and returns the difference of each step."""
    assert train(given) == 0
    return [entry["sampler_difference"] for entry in read_log(Path(given["output"]) / "log.jsonl")]


@pytest.mark.parametrize("changes", [{"iterations": 2, "lr": 1e-1}, {"old_logps": "recomputed"}], ids=str)
def test_the_difference_from_sampling_is_logged(run: Callable[..., dict[str, Any]], changes: dict[str, Any]) -> None:
    found = differences(run(**changes))
    assert len(found) == 4
    assert max(found) < 1e-5  # of the first update: the second one is far from sampling


@pytest.mark.parametrize("changes", [{}, {"beta": 0.1}, {"lora_rank": 4, "beta": 0.1, "temperature": 0.7}], ids=str)
def test_an_exact_run(
    run: Callable[..., dict[str, Any]],
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Here with fp32 on a CPU, which would be refused: every forward of completions is packed, references too."""
    forwards: list[bool] = []
    forward, pack = CausalLM.forward, attention_paths.packed_attention
    packed: list[int] = []

    def recorded(self: CausalLM, *args: Any, **options: Any) -> Any:
        if "objective" in options:
            forwards.append(options["exact"])
        return forward(self, *args, **options)

    def recorded_pack(*args: Any, **options: Any) -> Tensor:
        packed.append(1)
        return pack(*args, **options)

    monkeypatch.setattr(CausalLM, "forward", recorded)
    monkeypatch.setattr(attention_paths, "packed_attention", recorded_pack)
    monkeypatch.setattr(attention_paths, "attention_kernel", lambda *_: "cudnn")
    monkeypatch.setattr(rollouts, "exact_obstacle", lambda *_: None)
    monkeypatch.setattr(decoder, "check_exact", lambda *_: None)
    monkeypatch.setattr(rows, "can_capture", lambda _: True)  # prompts of any lengths
    monkeypatch.setattr(rows, "model_graphs", lambda _: None)
    assert max(differences(run(exact="on", batch_size=1, **changes))) < 1e-3  # exact sampling rounds logits to bf16
    assert all(forwards)
    assert packed  # not by rows of one completion without padding, or of completions of one length
    assert "Log-probabilities of sampling are exact\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, r"model\.embed_tokens\.weight is on cpu; expected a Hopper GPU"),
        ({"exact": "off"}, "--exact off"),
        ({"dtype": "float32", "mixed_precision": True}, "--mixed-precision computes in bfloat16 under autocast"),
    ],
)
def test_the_reason_is_printed_before_the_first_step(
    run: Callable[..., dict[str, Any]], changes: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = run(dry_run=True, **changes)
    assert train(given) == 0
    assert re.search(f"Log-probabilities of sampling are not exact: {reason}", capsys.readouterr().out)
    if "exact" not in changes:
        with pytest.raises(ConfigError, match=reason):
            train({**given, "exact": "on", "output": f"{given['output']}-on"})


# On a Hopper GPU


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.1, "iterations": 2},
        {"lora_rank": 8, "lr": 1e-2, "temperature": 0.8},
        {"old_logps": "recomputed", "batch_size": 1},
    ],
    ids=str,
)
def test_a_run_has_no_difference(
    run: Callable[..., dict[str, Any]], changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert differences(run(device="cuda", dtype="bfloat16", **changes)) == [0.0] * 4
    assert "Log-probabilities of sampling are exact\n" in capsys.readouterr().out


EXPERTS = {**LARGE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
MODELS: dict[str, Callable[..., CausalLM]] = {
    "llama": lambda **options: Llama(LlamaConfig(**SMALL_HEADS), **options),
    "qwen3": lambda **options: Qwen3(Qwen3Config(**LARGE), **options),
    "qwen3_moe": lambda **options: Qwen3Moe(Qwen3MoeConfig(**EXPERTS), **options),
    "gpt_oss": lambda **options: GptOss(GptOssConfig(vocab_size=32000, num_hidden_layers=2, num_experts=8), **options),
    "gemma3": lambda **options: Gemma3Text(
        Gemma3TextConfig(**{**LARGE, "head_dim": 256, "num_hidden_layers": 6, "sliding_window": 200}), **options
    ),
}
LORA: dict[str, dict[str, Any] | None] = {
    "none": None,
    "all": {"rank": 16},
    "some": {"rank": 8, "targets": ["q_proj", "v_proj"]},
    "high": {"rank": 64, "targets": ["o_proj", "k_proj"]},
}


class Tokens:
    """Replaces a tokenizer: no token ends a completion, and none has a text."""

    eos_token_id, pad_token_id = None, 0

    def decode(self, *_: object, **__: object) -> str:
        return ""


SOURCE = Source("prompts.jsonl", 0, "byte")
PLACEMENTS = 15  # of each of 20 cases: 300, each of five kinds


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> CausalLM:
    torch.manual_seed(0)
    return MODELS[request.param](dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("lora", list(LORA))
def test_placements(model: CausalLM, lora: str) -> None:
    """Packed in random rows, padded on the left and on the right, and alone; in the loss; in batches of any size."""
    draw = random.Random(lora)
    if (given := LORA[lora]) is not None:
        given = (
            {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"], **given} if isinstance(model, MoECausalLM) else given
        )
        add_lora(model, **given)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(parameter, std=0.02)
    tokens, wrong = 0, []
    for number in range(PLACEMENTS):
        temperature = draw.choice([1.0, 0.7])
        sampler = CompletionSampler(
            model, Tokens(), num_samples=draw.choice([1, 4]), max_new_tokens=draw.choice([3, 12]),
            temperature=temperature, batch_size=draw.choice([1, 64]), exact=True,
        )  # fmt: skip
        lengths = [draw.choice([1, 5, draw.randint(2, 60), draw.randint(60, 700)]) for _ in range(draw.randint(1, 6))]
        prompts = [PromptSample([draw.randrange(3, 32000) for _ in range(n)], {}, SOURCE) for n in lengths]
        completions = [replace(one, advantage=draw.choice([-1.0, 1.0])) for one in sampler(prompts)]
        for kind in (_packed, _in_the_loss, _padded_left, _padded_right, _alone):
            for found, expected in kind(model.train(), completions, temperature, draw):
                tokens += expected.numel()
                if not torch.equal(found, expected):
                    wrong.append(f"{number}, {kind.__name__}: {int((found != expected).sum())} of {expected.numel()}")
    assert tokens > 100
    assert not wrong


Results = list[tuple[Tensor, Tensor]]
"""Log-probabilities of the update, and those of sampling."""


def _batches(completions: list[SampledCompletion], draw: random.Random) -> list[Any]:
    longest = max(len(one.input_ids) for one in completions)
    length = draw.choice([longest, longest + 300, 4096])
    return pack_completions(completions, batch_size=draw.choice([1, 2, 4]), seq_length=length, pad_token_id=0)


def _packed(model: CausalLM, completions: list[SampledCompletion], temperature: float, draw: random.Random) -> Results:
    results = []
    for batch in _batches(completions, draw):
        with torch.no_grad():
            logps = completion_logps(model, batch, temperature=temperature)
        trained = (batch.targets != -100).cuda()
        results.append((logps[trained], batch.sampler_logps.cuda()[trained]))
    return results


def _in_the_loss(
    model: CausalLM, completions: list[SampledCompletion], temperature: float, draw: random.Random
) -> Results:
    """The mean of the absolute log-ratios, of batches whose gradients accumulate."""
    results = []
    for batch in _batches(completions, draw):
        constants = {"advantages": batch.advantages.cuda(), "old_logps": batch.sampler_logps.cuda(), "num_items": 9}
        out = completion_loss(model, batch, GRPO(temperature=temperature), **constants)
        torch.autograd.backward(out.loss)
        results.append((out.metrics["log_ratio"][None], torch.zeros(1, device="cuda")))
    model.zero_grad()
    return results


def _padded(model: CausalLM, completions: list[SampledCompletion], temperature: float, on_left: bool) -> Results:
    length = max(len(one.input_ids) for one in completions) + 5
    paddings = [length - len(one.input_ids) for one in completions]
    ids, mask = torch.zeros(len(completions), length, dtype=torch.int64), torch.zeros(len(completions), length)
    for row, (one, padding) in enumerate(zip(completions, paddings, strict=True)):
        first = padding if on_left else 0
        text = slice(first, first + length - padding)
        ids[row, text], mask[row, text] = torch.tensor(one.input_ids), 1
    labels = ids.where(mask == 1, -100).cuda()
    options = {"attention_mask": mask.cuda(), "exact": True}
    logps = model_token_logps(model, ids.cuda(), labels, temperature=temperature, **options).detach()
    ends = [length if on_left else length - n for n in paddings]
    return [
        (logps[i, end - 1 - len(one.tokens) : end - 1], torch.tensor(one.logps, device="cuda"))
        for i, (one, end) in enumerate(zip(completions, ends, strict=True))
    ]


def _padded_left(
    model: CausalLM, completions: list[SampledCompletion], temperature: float, _: random.Random
) -> Results:
    return _padded(model, completions, temperature, True)


def _padded_right(
    model: CausalLM, completions: list[SampledCompletion], temperature: float, _: random.Random
) -> Results:
    return _padded(model, completions, temperature, False)


def _alone(model: CausalLM, completions: list[SampledCompletion], temperature: float, _: random.Random) -> Results:
    # Beyond windows, and with head size 256, cuDNN and FlexAttention have other bits.
    results, exact = [], isinstance(model, (GptOss, Gemma3Text))
    for one in completions:
        ids = torch.tensor([one.input_ids], device="cuda")
        logps = model_token_logps(model, ids, ids, temperature=temperature, exact=exact)[0].detach()
        expected = torch.tensor(one.logps, device="cuda")
        results.append((logps[-1 - len(one.tokens) : -1], expected))
    return results

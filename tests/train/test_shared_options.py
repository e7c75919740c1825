"""The options that all recipes share, with preferences, distillation and GRPO: resuming bit for bit, and effects."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ligerzoo import AutoModel, Tokenizer, convert
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.layers import (
    Attention,
    Decoder,
    Embedding,
    Experts,
    MoE,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
    Router,
)
from ligerzoo.memory import ActivationPlan, plan_activations
from ligerzoo.models import CausalLM
from ligerzoo.models.config import DecoderConfig
from ligerzoo.train import run_model
from ligerzoo.train.completion_options import SFTRunOptions
from ligerzoo.train.log import read_log
from ligerzoo.train.run_checkpoint import checkpoints
from ligerzoo.train.run_state import RunState
from tests.train import preference_data, tiny_run
from tests.train.grpo_run import grpo_options, opd_options, write_prompts, write_reward
from tests.train.preference_data import labelled, pairs, write
from tests.train.test_grpo import LOW_TOKENS, TIMED
from tests.train.test_resume import assert_equal, stop_after
from tests.train.tiny_run import write_checkpoint

Given = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    """Returns the options of a run of any method."""
    directory = tmp_path_factory.mktemp("shared")
    model = write_checkpoint(directory / "model", initializer_range=0.1)
    teacher = write_checkpoint(directory / "teacher", initializer_range=0.2)
    chosen = [{"prompt": one["prompt"], "completion": one["chosen"]} for one in pairs()]
    files = {
        "sft": write(directory / "chosen.jsonl", chosen), "distill": directory / "chosen.jsonl",
        "dpo": write(directory / "pairs.jsonl", pairs()), "simpo": directory / "pairs.jsonl",
        "kto": write(directory / "labelled.jsonl", labelled()), "grpo": write_prompts(directory / "prompts.jsonl"),
        "opd": directory / "prompts.jsonl",
    }  # fmt: skip
    reward = write_reward(directory / "reward.py", LOW_TOKENS)

    def options(method: str, output: Path, **changes: Any) -> dict[str, Any]:
        common = {"method": method, "max_steps": 4, "eval_data": (str(files[method]),), "eval_every": 2, **changes}
        if method == "grpo":
            return grpo_options(model, files[method], reward, output, **common)
        if method == "opd":
            return opd_options(model, files[method], teacher, output, **common)
        more = {"teacher": str(teacher)} if method == "distill" else {}
        return preference_data.options(model, files[method], output, **common, **more)

    return options


def train(options: dict[str, Any], code: int = 0) -> Path:
    assert tiny_run.train(options) == code
    return Path(options["output"])


def repeated(*methods: str) -> list[Any]:
    """Methods that share with another one what a test checks."""
    return [pytest.param(method, marks=pytest.mark.thorough) for method in methods]


def untimed(output: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k not in TIMED} for entry in read_log(output / "log.jsonl")]


BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {**BACKWARD, "dtype": "bfloat16", "ema": 0.5}),
    ("dpo", {"train_only": ("layers.1", "norm"), "optimizer": "muon", "schedule": "wsd", "precompute_reference": True}),
    ("kto", {"lora_rank": 4, "dora": True, "lora_dropout": 0.2, "ema": 0.9, "lr": 1e-2, "batch_size": 4}),
    ("simpo", {"dtype": "bfloat16", "accumulate": 2, "activation_budget": "auto", "ema": 0.5}),
    ("distill", {**BACKWARD, "ema": 0.8, "activation_budget": "1"}),
    ("distill", {"lora_rank": 2, "lora_dropout": 0.1, "lora_targets": ("mlp",), "optimizer": "muon", "lr": 1e-2}),
    (
        "opd",
        {"dtype": "bfloat16", "train_only": ("layers",), "ema": 0.5, "optimizer": "muon", "activation_budget": "1"},
    ),
    ("grpo", {"train_only": ("layers",), "ema": 0.5, "optimizer": "muon", "beta": 0.1, "schedule": "wsd"}),
    ("grpo", {"dtype": "bfloat16", "activation_budget": "1", "max_grad_norm": 0.0, "weight_decay": 0.1}),
    ("grpo", {"dtype": "float32", "mixed_precision": True, "lora_rank": 4, "dora": True, "ema": 0.9, "lr": 1e-2}),
]
EXTRA = [case for case in CASES if "dora" not in case[1]]
"""Cases whose methods and options other cases have, or other tests that stop runs."""


@pytest.mark.parametrize(
    "method, changes",
    [
        pytest.param(*case, marks=[pytest.mark.thorough] * (case in EXTRA), id="-".join([case[0], *case[1]]))
        for case in CASES
    ],
)
def test_a_stopped_run_continues_bit_for_bit(
    method: str, changes: dict[str, Any], given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(given(method, tmp_path / "whole", **changes))
    parts = given(method, tmp_path / "parts", **changes)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        train(parts, code=130)
    torch.manual_seed(1234)
    train({**parts, "resume": True})
    file = "adapter_model.safetensors" if "lora_rank" in changes else "model.safetensors"
    assert (tmp_path / "parts" / file).read_bytes() == (whole / file).read_bytes()
    assert untimed(tmp_path / "parts") == untimed(whole)
    last = [checkpoints(output)[-1] for output in (whole, tmp_path / "parts")]
    assert_equal(*(torch.load(one / "state.pt", weights_only=True) for one in last))
    assert ((last[0] / file).read_bytes() == (whole / file).read_bytes()) is ("ema" not in changes)


@pytest.mark.parametrize("method", ["dpo", "distill", "grpo"])
def test_only_the_chosen_parameters_change(method: str, given: Given, tmp_path: Path) -> None:
    options = given(method, tmp_path / "run", train_only=("layers.1.mlp",), eval_data=None, lr=1e-2)
    trained, before = load_file(train(options) / "model.safetensors"), AutoModel.from_pretrained(options["model"])
    before.save_pretrained(tmp_path / "before")
    original = load_file(tmp_path / "before" / "model.safetensors")
    changed = {name for name, weight in trained.items() if not torch.equal(weight, original[name])}
    assert changed == {name for name in trained if "layers.1.mlp" in name}


@pytest.mark.parametrize("method", ["dpo", *repeated("distill")])
def test_an_optimizer_in_backward_gives_the_same_weights(method: str, given: Given, tmp_path: Path) -> None:
    weights = [
        (train(given(method, tmp_path / str(on), max_grad_norm=0.0, optimizer_in_backward=on)) / "model.safetensors")
        for on in (False, True)
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert "grad_norm" not in read_log(tmp_path / "True" / "log.jsonl")[0]


@pytest.mark.parametrize("method", ["dpo", "grpo", "opd", *repeated("kto", "distill")])
def test_a_plan_is_printed_and_changes_no_bit(
    method: str, given: Given, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that recomputes all blocks. It leaves memory for a reference, a teacher or averages."""
    plain = train(given(method, tmp_path / "plain", activation_budget="none", ema=0.5))
    assert "activation plan" not in capsys.readouterr().out
    asked: list[dict[str, Any]] = []

    def plan_all(model: CausalLM, **options: Any) -> ActivationPlan:
        asked.append(options)
        return dataclasses.replace(plan_activations(model, **options), levels=(Recompute.BLOCK, Recompute.ELEMENTWISE))

    monkeypatch.setattr(run_model, "plan_activations", plan_all)
    planned = given(method, tmp_path / "planned", activation_budget="1", ema=0.5)
    assert (train(planned) / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert "everything recomputed" in capsys.readouterr().out
    averages = weights = 4 * sum(one.numel() for one in AutoModel.from_pretrained(planned["model"]).parameters())
    assert asked[0]["reserved"] == averages + (weights if method != "grpo" else 0)  # which has no KL term here


@dataclass(frozen=True, kw_only=True)
class CountingConfig(DecoderConfig):
    """A user's config, with another name for the number of experts of a token."""

    num_experts: int = 4


class CountingRouter(Router):
    """A user's router, which counts the tokens of its experts, as torch cannot on the meta device."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, expert_ids, weights = super().forward(x)
        assert len(torch.bincount(expert_ids.flatten())) <= 4
        return logits, expert_ids, weights


class Counting(CausalLM):
    def __init__(self, config: CountingConfig) -> None:
        h = config.hidden_size
        mlp = MoE(CountingRouter(h, config.num_experts, 2), Experts(h, 16, config.num_experts))
        block = PreNormBlock(RMSNorm(h), Attention(h, 2, rotary=RotaryEmbedding(h // 2)), RMSNorm(h), mlp)
        super().__init__(config, Decoder(Embedding(config.vocab_size, h), [block], RMSNorm(h)))


def test_a_users_class_trains_without_a_plan_if_it_does_not_run_on_meta(
    given: Given, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_REGISTERED", {})
    AutoModel.register(CountingConfig, Counting, model_type="counting")
    options = given("sft", tmp_path / "run", max_steps=2, eval_data=None)
    tokenizer = Tokenizer.from_pretrained(options["model"])
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    Counting(CountingConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "own")
    tokenizer.save_pretrained(tmp_path / "own")
    run = train({**options, "model": str(tmp_path / "own"), "activation_budget": "auto"})
    message = "Counting: does not run on the meta device, so its memory is not predicted; got aten::bincount: "
    assert message in capsys.readouterr().out
    assert type(AutoModel.from_pretrained(run)) is Counting
    with pytest.raises(LigerzooError, match=message):
        train({**options, "model": str(run), "output": str(tmp_path / "other"), "activation_budget": "1"})


@pytest.mark.parametrize("others", [True, False])
def test_weights_stay_gathered_only_if_the_plans_of_all_processes_say_so(
    others: bool, given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the budget "auto", plans depend on what is free on each GPU."""
    options = SFTRunOptions(**given("sft", tmp_path / "run"))
    model = AutoModel.from_pretrained(options.model)
    plan = plan_activations(model, batch_size=1, seq_length=8, budget=10.0, gpus=2)
    assert plan.keeps_gathered
    kept: list[CausalLM] = []
    monkeypatch.setattr(run_model, "open_model", lambda *_, **__: model)
    monkeypatch.setattr(run_model, "keep_gathered", kept.append)
    monkeypatch.setattr(run_model.processes, "gather", lambda value: [value, others])
    state = RunState(options.output, options)
    run_model.open_trained_model(options, state, torch.device("cpu"), plan)
    assert kept == [model] * others


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize("method", ["sft", *repeated("distill")])
def test_a_chat_template_is_used_and_saved(method: str, given: Given, tmp_path: Path) -> None:
    """A base model has none."""
    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8
    data = (str(write(tmp_path / "chats.jsonl", chats)),)
    options = given(method, tmp_path / "run", data=data, eval_data=None)
    with pytest.raises(LigerzooError, match="no chat template"):
        train(options)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    options["chat_template"] = str(tmp_path / "template.jinja")
    train({**options, "max_steps": 2})
    train({**options, "resume": True})
    for directory in (tmp_path / "run", checkpoints(tmp_path / "run")[-1]):
        tokenizer = Tokenizer.from_pretrained(directory)
        assert tokenizer.apply_chat_template(chats[0]["messages"], tokenize=False) == "<user>a</s><assistant>b</s>"
        assert (directory / "chat_template.jinja").read_text() == TEMPLATE
    (entry, *_) = read_log(tmp_path / "run" / "log.jsonl")
    assert entry["trained_tokens"] > 0
    for lora in {}, {"lora_rank": 2}:
        stopped = {**options, **lora, "output": str(tmp_path / f"run{len(lora)}"), "max_steps": 2}
        (tmp_path / "template.jinja").write_text(TEMPLATE)
        train(stopped)
        (tmp_path / "template.jinja").write_text(TEMPLATE.replace("<", "["))
        with pytest.raises(ConfigError, match=r"option chat_template: the file has changed since the run began; got"):
            train({**stopped, "max_steps": 3, "resume": True})
    with pytest.raises(ConfigError, match=r"option chat_template: cannot be read; got .*none.jinja"):
        train({**options, "output": str(tmp_path / "other"), "chat_template": str(tmp_path / "none.jinja")})


@pytest.mark.parametrize("method", ["sft", "dpo", "distill", "grpo"])
def test_special_tokens_of_the_data_are_text_or_control_tokens(method: str, given: Given, tmp_path: Path) -> None:
    records = [{"prompt": "a</s>", "completion": "b", "chosen": "b", "rejected": "c"}] * 8
    if method == "grpo":
        records = [{"prompt": "a</s>"}] * 8
    elif method != "dpo":
        records = [{"prompt": "a</s>", "completion": "b"}] * 8
    data = (str(write(tmp_path / "data.jsonl", records)),)
    options = given(method, tmp_path / "run", data=data, eval_data=None, dry_run=True)
    with pytest.warns(UserWarning, match="the special token '</s>' in a text is encoded as text"):
        train(options)
    train({**options, "special_tokens": "control"})  # no warning


def test_policies_are_evaluated_on_held_out_prompts(given: Given, tmp_path: Path) -> None:
    """Greedy completions of all prompts, with the averaged weights."""
    held_out = write_prompts(tmp_path / "held-out.jsonl", 7)
    options = given("grpo", tmp_path / "run", eval_data=(str(held_out),), max_steps=20, prompts=4, num_samples=8,
                    lr=1e-2, eval_every=5)  # fmt: skip
    found = [entry for entry in read_log(train(options) / "log.jsonl") if "eval_reward" in entry]
    assert [entry["step"] for entry in found] == [5, 10, 15, 20]
    assert found[-1]["eval_reward"] > 0.8
    assert {entry["eval_prompts"] for entry in found} == {7}
    assert all(0 < entry["eval_completion_length"] <= 8 for entry in found)
    assert "evaluation" in (tmp_path / "run" / "reward.svg").read_text()
    model, tokenizer = (one.from_pretrained(tmp_path / "run") for one in (AutoModel, Tokenizer))
    lines = [json.loads(line) for line in held_out.read_text().splitlines()]
    rewards = []
    for line in lines:
        ids = torch.tensor([tokenizer.encode(line["prompt"])])
        new = model.generate(ids, max_new_tokens=8)[0, ids.shape[1] :].tolist()
        rewards.append(sum(token < 64 for token in new) / len(new))
    assert found[-1]["eval_reward"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-6)
    assert len(found[-1]["samples"]) == 2

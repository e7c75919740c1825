"""On-policy distillation: its gradients, updates, log and refusals; it learns, and continues bit for bit."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import ligerzoo
from ligerzoo import AutoModel, Tokenizer, cli
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.losses import Distillation
from ligerzoo.models import CausalLM
from ligerzoo.train.completion_batches import completion_divergence, pack_completions
from ligerzoo.train.completions import CompletionSampler, SampledCompletion, completion_seeds
from ligerzoo.train.log import read_log
from ligerzoo.train.recipes import opd
from ligerzoo.train.rollout_options import OPDRunOptions
from ligerzoo.train.run_data import RunPrompts
from tests.parallel.spawning import on_all_processes
from tests.train.grpo_run import opd_options, write_prompts
from tests.train.test_grpo import TIMED, assert_continues, steps, weights
from tests.train.test_grpo_loss import relative_error, sampled, small_model
from tests.train.test_resume import stop_after
from tests.train.tiny_run import arguments, run_script, write_checkpoint, write_tokenizer

CARRIED = Path(ligerzoo.__file__).parent / "demo" / "assets" / "tiny-python-llama"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with more features, and padded rows of the vocabulary."""
    changes = {"hidden_size": 64, "initializer_range": 0.2, "vocab_size": 264}
    return write_checkpoint(tmp_path_factory.mktemp("teacher") / "llama", **changes)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Path:
    """The teacher with noise in its weights."""
    return damaged(teacher, tmp_path_factory.mktemp("student") / "llama", rows=258)


def damaged(checkpoint: Path, target: Path, *, rows: int | None = None) -> Path:
    """Writes a model in float32 with noise in its weights, and this many rows of its vocabulary."""
    torch.manual_seed(0)
    model = AutoModel.from_pretrained(checkpoint, dtype="float32")
    if rows is not None:
        model.resize_token_embeddings(rows)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.5 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(target)
    Tokenizer.from_pretrained(checkpoint).save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


def train(given: dict[str, Any]) -> int:
    return opd.main(OPDRunOptions(**given))


# It learns


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"divergence": "jsd", "beta": 0.3, "temperature": 0.9}, marks=pytest.mark.thorough),
        pytest.param({"dtype": "float32", "mixed_precision": True}, marks=pytest.mark.thorough),
        pytest.param({"lora_rank": 8, "lora_targets": ("layers", "lm_head"), "lr": 3e-2}, marks=pytest.mark.thorough),
        pytest.param({"divergence": "forward_kl", "activation_checkpointing": True}, marks=pytest.mark.thorough),
    ],
    ids=["default", "jsd", "mixed", "lora", "forward_kl"],
)
def test_the_divergence_falls(
    student: Path, prompts: Path, teacher: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    given = {"max_steps": 16, "prompts": 4, "lr": 1e-2, "eval_data": (str(prompts),), "eval_every": 16, **changes}
    assert train(opd_options(student, prompts, teacher, tmp_path / "run", **given)) == 0
    name = "jsd" if given.get("divergence") == "jsd" else "kl"
    *entries, evaluation = steps(tmp_path / "run")
    assert evaluation[f"eval_{name}"] < 0.7 * entries[0][name]
    assert sum(entry[name] for entry in entries[-3:]) < 0.65 * sum(entry[name] for entry in entries[:3])
    assert "polyline" in (tmp_path / "run" / f"{name}.svg").read_text()


def test_a_carried_model_that_was_damaged_recovers(tmp_path: Path) -> None:
    """The model of the package teaches its copy with noise in the weights, on Python prompts."""
    student = damaged(CARRIED, tmp_path / "student")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def {name}(self, "}) + "\n" for name in ("run", "add", "read", "close", "next"))
    )
    given = opd_options(
        student, tmp_path / "prompts.jsonl", CARRIED, tmp_path / "run", max_steps=8, lr=3e-4,
        num_samples=4, max_new_tokens=12, seq_length=128, dtype="float32",
    )  # fmt: skip
    assert train(given) == 0
    found = [entry["kl"] for entry in steps(tmp_path / "run")]
    assert sum(found[-3:]) < 0.65 * sum(found[:3])


# Gradients and updates


def plain_divergence(student: Tensor, teacher: Tensor, divergence: str, beta: float, temperature: float) -> Tensor:
    """Returns the divergence of each token, of (T, V) logits."""
    z, y = ((logits / temperature).log_softmax(-1) for logits in (student, teacher))

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum(-1)

    if divergence == "jsd":
        mixture = torch.logaddexp(z + math.log(1 - beta), y + math.log(beta))
        return beta * kl(y, mixture) + (1 - beta) * kl(z, mixture)
    if divergence == "tvd":
        return (z.exp() - y.exp()).abs().sum(-1) / 2
    return kl(z, y) if divergence == "reverse_kl" else kl(y, z)


def plain_loss(
    student: CausalLM, teacher: CausalLM, completion: SampledCompletion, of_logits: Callable[..., Tensor]
) -> Tensor:
    """Returns the sum of the divergences at the tokens of a completion, which has a row for itself."""
    ids, first = torch.tensor([completion.input_ids]), len(completion.prompt.input_ids) - 1
    with torch.no_grad():
        expected = teacher(ids).logits[0, first:-1]
    logits = student(ids).logits[0, first:-1]
    return of_logits(logits, expected[:, : logits.shape[-1]]).sum()


@pytest.mark.parametrize(
    "divergence, beta", [("reverse_kl", None), ("jsd", 0.5), ("jsd", 0.2), ("forward_kl", None), ("tvd", None)]
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_gradients_equal_a_plain_reference_in_fp64(
    checkpoint: Path, name: str, divergence: str, beta: float | None
) -> None:
    """Packed rows in two micro-batches against each completion alone, with all logits."""
    student = (AutoModel.from_pretrained(checkpoint) if name == "llama" else small_model(name)).double()
    torch.manual_seed(1)
    teacher = small_model("gemma2" if name == "llama" else name).double()
    with torch.no_grad():
        for weight in teacher.parameters():
            weight += 0.1 * torch.randn_like(weight)
    teacher.requires_grad_(False)
    completions = sampled()
    batches = pack_completions(completions, batch_size=2, seq_length=48, pad_token_id=0)
    assert len(batches) > 1
    items = sum(len(one.tokens) for one in completions)
    given = {"temperature": 0.8, **({} if beta is None else {"beta": beta})}
    distillation = Distillation(divergence=divergence, **given)
    total = 0.0
    for batch in batches:
        loss, metrics = completion_divergence(student, teacher, batch, distillation, num_items=items)
        loss.backward()
        total += float(loss.detach())
        assert set(metrics) == {"soft_loss"}
    got = {key: weight.grad for key, weight in student.named_parameters() if weight.grad is not None}
    student.zero_grad()
    of_logits = partial(plain_divergence, divergence=divergence, beta=beta or 0.0, temperature=0.8)
    expected = sum(plain_loss(student, teacher, one, of_logits) for one in completions) / items
    assert isinstance(expected, Tensor)
    expected.backward()
    assert total == pytest.approx(float(expected.detach()), rel=1e-9)
    plain = {key: weight.grad for key, weight in student.named_parameters() if weight.grad is not None}
    assert got.keys() == plain.keys()
    assert relative_error(got, plain) < 1e-10


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_loss_equals_that_of_trl(checkpoint: Path, beta: float) -> None:
    """TRL's beta of 0 and 1 are forward and reverse KL; ours of jsd too."""
    trl = pytest.importorskip("trl.experimental.gkd")
    model, teacher = AutoModel.from_pretrained(checkpoint).double(), small_model("gemma2").double()
    (batch,) = pack_completions(sampled(), batch_size=12, seq_length=48, pad_token_id=0)
    found = [
        completion_divergence(model, teacher, batch, Distillation(divergence=divergence, **given)).loss
        for divergence, given in (
            ("jsd", {"beta": beta}), *({0.0: [("forward_kl", {})], 1.0: [("reverse_kl", {})]}.get(beta, []))
        )
    ]  # fmt: skip
    logits, labels = [], []
    for one in batch.completions:
        ids, first = torch.tensor([one.input_ids]), len(one.prompt.input_ids) - 1
        with torch.no_grad():
            logits.append([which(ids).logits[0, first:-1] for which in (model, teacher)])
        labels += one.tokens
    student, other = (torch.cat(parts)[None] for parts in zip(*logits, strict=True))
    theirs = trl.GKDTrainer.generalized_jsd_loss(student, other, labels=torch.tensor([labels]), beta=beta)
    for ours in found:
        assert float(ours.detach()) == pytest.approx(float(theirs), rel=1e-9)


@pytest.mark.parametrize("changes", [{}, {"divergence": "jsd", "beta": 0.3, "temperature": 0.7}], ids=["kl", "jsd"])
def test_a_run_equals_a_plain_loop(
    checkpoint: Path, prompts: Path, teacher: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Sample, score all logits of each completion alone, clip, and update with torch's AdamW."""
    given = opd_options(checkpoint, prompts, teacher, tmp_path / "run", max_steps=3, batch_size=1, **changes)
    assert train(given) == 0
    log, o = steps(tmp_path / "run"), OPDRunOptions(**given)
    tokenizer, model = Tokenizer.from_pretrained(checkpoint), AutoModel.from_pretrained(checkpoint)
    other = AutoModel.from_pretrained(teacher).requires_grad_(False)
    sample = CompletionSampler(
        model, tokenizer, num_samples=4, max_new_tokens=8, temperature=o.temperature, batch_size=256, exact=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr, weight_decay=0.0)
    of_logits = partial(plain_divergence, divergence=o.divergence, beta=o.beta or 0.0, temperature=o.temperature)
    stream = iter(RunPrompts(o, tokenizer, model).training())
    for number, entry in enumerate(log, 1):
        taken: Any = [next(stream) for _ in range(2)]
        completions = sample(taken, completion_seeds(0, number, 8))
        count = sum(len(one.tokens) for one in completions)
        loss = torch.stack([plain_loss(model, other, one, of_logits) for one in completions]).sum() / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert entry["trained_tokens"] == count
        assert entry["completion_length"] == count / 8
        assert entry["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert entry["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    trained, first = (AutoModel.from_pretrained(each) for each in (tmp_path / "run", checkpoint))
    # AdamW moves a weight by lr however small its gradient is: rounding decides the sign of the smallest.
    for (name, weight), expected, old in zip(
        trained.named_parameters(), model.parameters(), first.parameters(), strict=True
    ):
        assert (weight - expected).norm() <= 1e-3 * (expected - old).norm(), name


# Stopping, and several processes


@pytest.mark.thorough  # the state is that of GRPO, without rewards
@pytest.mark.parametrize("lora_rank", [None, 4])
def test_a_stopped_run_continues_bit_for_bit(
    checkpoint: Path, prompts: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    lora_rank: int | None,
) -> None:  # fmt: skip
    changes = {"max_steps": 5, "sample_every": 2, "schedule": "linear", "lora_rank": lora_rank, "num_samples": 3}
    whole, parts = (
        opd_options(checkpoint, prompts, teacher, tmp_path / name, **changes) for name in ("whole", "parts")
    )
    assert train(whole) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(parts) == 130
    assert_continues(train, whole, parts, lora_rank, samples_per_step=6)


def train_part(rank: int, given: dict[str, Any]) -> None:
    """Trains in one of two processes."""
    assert train(given) == 0


CASES: dict[str, dict[str, Any]] = {
    "full": {"prompts": 3, "batch_size": 1, "seq_length": 128, "ema": 0.5},
    "adapters": {"prompts": 4, "lora_rank": 4, "lr": 1e-2, "divergence": "jsd", "beta": 0.2},
    "few rows": {"prompts": 1, "num_samples": 1, "seq_length": 256},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name: str, checkpoint: Path, prompts: Path, teacher: Path, tmp_path: Path) -> None:
    """The same completions, since each has its seed; the same losses and weights, up to the order of sums."""
    case = {"eval_data": (str(prompts),), "eval_every": 2, "sample_every": 1, **CASES[name]}
    one, two = (opd_options(checkpoint, prompts, teacher, tmp_path / run, **case) for run in ("one", "two"))
    assert train(one) == 0
    on_all_processes(partial(train_part, given=two))
    assert (tmp_path / "one" / "samples.jsonl").read_text() == (tmp_path / "two" / "samples.jsonl").read_text()
    logs = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert len(logs[0]) == 4 + 2
    for alone, shared in zip(*logs, strict=True):
        assert list(alone) == list(shared)
        for column, value in alone.items():
            if column not in ("padding", "mfu", "samples"):  # shorter rows have less padding
                assert shared[column] == pytest.approx(value, rel=1e-4, abs=2e-6), column
    file = "adapter_model.safetensors" if "lora_rank" in case else "model.safetensors"
    single, sharded = load_file(tmp_path / "one" / file), load_file(tmp_path / "two" / file)
    for key, weight in single.items():
        torch.testing.assert_close(sharded[key], weight, atol=5e-5, rtol=2e-3)


# What it logs and prints


def test_what_is_logged(checkpoint: Path, prompts: Path, teacher: Path, tmp_path: Path) -> None:
    given = opd_options(checkpoint, prompts, teacher, tmp_path / "run", prompts=3, sampling_batch=5, num_samples=1)
    assert train({**given, "eval_data": (str(prompts),)}) == 0
    *entries, evaluation = read_log(tmp_path / "run" / "log.jsonl")
    assert len(entries) == 4
    timed = set(TIMED) - {"reward_seconds"}
    for entry in entries:
        assert {"kl", "completion_length", "completion_length_max", "truncated", "entropy", *timed} <= entry.keys()
        assert not {"reward", "reward_seconds", "soft_loss"} & entry.keys()
        assert entry["kl"] == pytest.approx(entry["loss"], rel=1e-5)
        assert entry["sampling_seconds"] + entry["update_seconds"] <= entry["seconds"]
        assert 0 < entry["completion_length"] <= entry["completion_length_max"] <= 8
        assert entry["tokens"] > entry["trained_tokens"] > 0
    assert entries[0]["entropy"] == pytest.approx(5.5, abs=0.2)  # log 258
    assert {"eval_loss", "eval_kl", "eval_completion_length", "eval_truncated"} <= evaluation.keys()
    assert evaluation["eval_prompts"] == 20
    assert len(evaluation["samples"]) == 2
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [list(one) for one in samples] == [["step", "source", "prompt", "completion", "tokens", "finish_reason"]] * 3


def test_a_dry_run_shows_completions(
    checkpoint: Path, prompts: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = opd_options(checkpoint, prompts, teacher, tmp_path / "run")
    assert cli.main([*arguments(given), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"teacher {teacher}: leaves out the last 6 rows of its vocabulary, which no token has" in shown
    assert "4 steps of 2 prompts x 4 completions" in shown
    assert "Log-probabilities of sampling are not exact" in shown
    assert shown.count("\n  completion: ") == 2
    assert not (tmp_path / "run").exists()


def test_the_printed_recipe_gives_the_same_weights(
    checkpoint: Path, prompts: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(
        opd_options(checkpoint, prompts, teacher, tmp_path / "command", max_steps=None, epochs=1, prompts=8)
    )
    assert cli.main([*line, "--print-recipe"]) == 0
    (tmp_path / "recipe.py").write_text(capsys.readouterr().out)
    assert cli.main(line) == 0
    assert len(steps(tmp_path / "command")) == 3  # 20 prompts
    run_script(tmp_path / "recipe.py", "--output", str(tmp_path / "script"))
    assert weights(tmp_path / "script") == weights(tmp_path / "command")


# What it refuses


def test_other_tokens_are_refused(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    first = min(vocabulary["a"], vocabulary["b"])
    message = f"teacher {other}, token {first}: the teacher has another vocabulary than the student: 2 token ids differ"
    with pytest.raises(ConfigError) as raised:
        train(opd_options(checkpoint, prompts, other, tmp_path / "run"))
    assert str(raised.value).startswith(message)
    assert not (tmp_path / "run").exists()


def test_a_smaller_vocabulary_is_refused(checkpoint: Path, prompts: Path, teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"vocabulary is smaller than the student's; got vocab_size 258; expected 264"
    ):
        train(opd_options(teacher, prompts, checkpoint, tmp_path / "run"))


def test_a_missing_teacher_is_named(
    checkpoint: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LigerzooError, match=str(tmp_path / "none")):
        train(opd_options(checkpoint, prompts, tmp_path / "none", tmp_path / "run"))
    write_tokenizer(tmp_path / "tokens")
    with pytest.raises(LigerzooError, match=str(tmp_path / "tokens")):
        train(opd_options(checkpoint, prompts, tmp_path / "tokens", tmp_path / "run"))
    without = {**opd_options(checkpoint, prompts, tmp_path, tmp_path / "run"), "teacher": None}
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments(without))
    assert "--teacher" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_exact_sampling_is_refused_with_the_reason(
    checkpoint: Path, prompts: Path, teacher: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"option exact: .*Hopper GPU.*Use --exact auto"):
        train(opd_options(checkpoint, prompts, teacher, tmp_path / "run", exact="on"))


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ({"beta": 0.3}, "option divergence: Distillation: beta=0.3 with divergence='reverse_kl'"),
        ({"divergence": "cosine"}, "option divergence: invalid value; got 'cosine'; expected one of 'reverse_kl'"),
        ({"max_new_tokens": 63}, "option seq_length: too small; got 64; expected at least 65"),
        ({"temperature": 0.0}, "option temperature: invalid value; got 0.0"),
        ({"lora_alpha": 4.0}, "option lora_rank: is needed"),
    ],
)
def test_invalid_options(tmp_path: Path, wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        OPDRunOptions(**opd_options(tmp_path, tmp_path, tmp_path, tmp_path, **wrong))
    assert str(raised.value).startswith(expected)

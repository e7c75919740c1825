"""The recipe: options, the loss of a step, what it prints and writes, and what it refuses."""

import dataclasses
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ligerzoo import AutoModel, Tokenizer, cli
from ligerzoo.errors import ConfigError, DataError, LigerzooError
from ligerzoo.models import Mixtral, MixtralConfig
from ligerzoo.optimizer_table import OPTIMIZERS
from ligerzoo.train import tracking
from ligerzoo.train.completion_options import SFTRunOptions
from ligerzoo.train.data import PackedBatches
from ligerzoo.train.log import read_log
from ligerzoo.train.methods import METHODS, printed_recipe
from ligerzoo.train.optimizer_step import warn_of_rounding
from ligerzoo.train.optimizers import OPTIMIZER_NAMES
from ligerzoo.train.options import options_of
from ligerzoo.train.recipes import sft
from ligerzoo.train.run_model import check_dtype, check_tied_weights, open_model
from ligerzoo.train.run_options import RunOptions
from tests.train import tiny_run
from tests.train.grpo_run import write_reward
from tests.train.test_resume import environment
from tests.train.tiny_run import SIZES, arguments, options, run_script, write_checkpoint, write_tokenizer


def train(given: dict[str, Any]) -> Path:
    assert tiny_run.train(given) == 0
    return Path(given["output"])


def losses(output: Path) -> list[float]:
    return [entry["loss"] for entry in read_log(output / "log.jsonl") if "loss" in entry]


def weights(output: Path) -> bytes:
    return (output / "model.safetensors").read_bytes()


# Options


@pytest.mark.parametrize("method", METHODS)
def test_every_option_is_described(method: str) -> None:
    described = options_of(METHODS[method].options)
    assert all(option.description and option.group for option in described)
    groups = {option.group for option in described}
    assert {"Model", "Data", "Optimizer", "Memory"} < groups
    assert "Options of all recipes" not in groups


def test_the_names_of_optimizers_are_those_of_make_optimizer_and_of_memory() -> None:
    (accepted,) = (option.values.choices for option in options_of(RunOptions) if option.name == "optimizer")
    assert accepted == OPTIMIZER_NAMES
    assert {*OPTIMIZER_NAMES} < {*OPTIMIZERS}


def test_the_command_line_reads_options_without_torch() -> None:
    code = "import sys; from ligerzoo.cli import parse; parse(['train', '--help'])"
    code = f"try:\n {code}\nexcept SystemExit:\n assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment())
    assert "--seq-length N" in shown.stdout


def test_arguments_become_options(checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr(sft, "main", lambda options: seen.append(options) or 0)
    given = options(
        checkpoint, data, tmp_path / "run", data=("a.jsonl", "b.jsonl"), warmup=0.1, resume=True, method="pretrain",
        dtype="float32", mixed_precision=True,
    )  # fmt: skip
    assert cli.main(arguments(given)) == 0
    assert seen == [SFTRunOptions(**given)]


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ({"lr": 0.0}, "option lr: invalid value; got 0.0; expected a positive number"),
        ({"lr": float("nan")}, "option lr: invalid value"),
        ({"batch_size": True}, "option batch_size: invalid value; got True; expected an integer, 1 or more"),
        ({"max_steps": 0}, "option max_steps: invalid value"),
        ({"warmup": 1.5}, "option warmup: invalid value; got 1.5; expected a number from 0 to 1"),
        ({"schedule": "step"}, "option schedule: invalid value; got 'step'; expected one of 'constant', 'linear'"),
        ({"data": "train.jsonl"}, "option data: invalid value; got 'train.jsonl'; expected a tuple of texts"),
        ({"data": ()}, "option data: invalid value"),
        ({"resume": 1}, "option resume: invalid value"),
        ({"epochs": 2}, "options max_steps and epochs: only one of them may be given"),
        ({"mixed_precision": True}, "option mixed_precision: needs dtype=float32; got dtype=auto"),
        ({"ema": 1.0}, "option ema: is the decay of averaged weights, which would never change; got 1.0"),
        ({"device": "meta"}, "option device: has no memory for weights; got meta"),
    ],
)
def test_invalid_options(checkpoint: Path, data: Path, tmp_path: Path, wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SFTRunOptions(**options(checkpoint, data, tmp_path, **wrong))
    assert str(raised.value).startswith(expected)


@pytest.mark.parametrize(
    "wrong", [["--lr", "-1"], ["--batch-size", "many"], ["--method", "sing"], ["--batchsize", "1"]]
)
def test_invalid_arguments(
    checkpoint: Path, data: Path, tmp_path: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([*arguments(options(checkpoint, data, tmp_path)), *wrong])
    assert wrong[0] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "wrong, methods",
    [(["--variant", "ipo"], "dpo, kto, orpo, simpo, cpo"), (["--reward=reward.py"], "grpo")],
)
def test_options_of_other_methods_are_named(
    checkpoint: Path, data: Path, tmp_path: Path, wrong: list[str], methods: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([*arguments(options(checkpoint, data, tmp_path)), *wrong])
    flag = wrong[0].partition("=")[0]
    assert capsys.readouterr().err.endswith(f"{flag} is an option of --method {methods}.\n")


# The printed recipe


def test_the_printed_recipe_gives_the_same_weights(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(checkpoint, data, tmp_path / "command", max_steps=3, seed=3, weight_decay=0.1)
    assert cli.main([*arguments(given), "--print-recipe"]) == 0
    assert not (tmp_path / "command").exists()
    recipe = tmp_path / "recipe.py"
    recipe.write_text(capsys.readouterr().out)
    assert cli.main(arguments(given)) == 0
    expected = weights(tmp_path / "command")
    run_script(recipe, "--output", str(tmp_path / "script"))
    assert weights(tmp_path / "script") == expected
    run_script(recipe, "--output", str(tmp_path / "other"), "--seed", "4")
    assert weights(tmp_path / "other") != expected


@pytest.mark.parametrize("method", ["sft", "dpo", "distill", "grpo", "opd"])
def test_an_error_of_the_printed_recipe_is_one_line(
    method: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = {"reward": str(write_reward(tmp_path / "reward.py"))}
    teacher = {"teacher": str(checkpoint)}
    more = {"grpo": reward, "distill": teacher, "opd": teacher}.get(method, {})
    given = options(checkpoint, tmp_path / "none.jsonl", tmp_path / "run", method=method, seq_length=600, **more)
    assert cli.main([*arguments(given), "--print-recipe"]) == 0
    (tmp_path / "recipe.py").write_text(capsys.readouterr().out)
    for wrong, problem in (
        ([], "none.jsonl"),
        (["--dora"], "error: --lora-rank: is needed"),
        (["--model", "x/"], "x/"),
    ):
        monkeypatch.setattr(sys, "argv", ["recipe.py", *wrong])
        with pytest.raises(SystemExit, match=r"^1$"):
            runpy.run_path(str(tmp_path / "recipe.py"), run_name="__main__")
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("recipe.py: error: ")
        assert problem in line


@pytest.mark.parametrize("method", ["sft", "dpo", "distill", "grpo", "opd"])
def test_given_options_are_defaults_of_the_printed_recipe(method: str, tmp_path: Path) -> None:
    values = {"model": 'a "b"', "data": ("x", "y"), "lr": 1e-4, "resume": True, "epochs": 3, "method": method}
    (tmp_path / "recipe.py").write_text(printed_recipe(method, values))
    assert runpy.run_path(str(tmp_path / "recipe.py"))["DEFAULTS"] == values


# The step


def test_accumulated_micro_batches_train_as_one_batch(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """The loss is the mean over the trained tokens of the step, although micro-batches have different numbers."""
    one = train(options(checkpoint, data, tmp_path / "one", batch_size=4))
    many = train(options(checkpoint, data, tmp_path / "many", batch_size=1, accumulate=4))
    for a, b in zip(read_log(one / "log.jsonl"), read_log(many / "log.jsonl"), strict=True):
        assert a["trained_tokens"] == b["trained_tokens"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_the_load_balancing_loss_is_the_mean_of_the_micro_batches(data: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "moe")
    config = MixtralConfig(**{**SIZES, "num_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 10.0})
    Mixtral(config).save_pretrained(tmp_path / "moe")
    runs = [
        train(options(tmp_path / "moe", data, tmp_path / str(n), max_steps=1, batch_size=4 // n, accumulate=n))
        for n in (1, 4)
    ]
    (one,), (many,) = map(losses, runs)
    assert one > 20  # 2 layers' worth of the loss of 10, next to the cross entropy of about 5.6
    assert one == pytest.approx(many, rel=0.1)  # not four times as much


def test_mixed_precision_keeps_float32_weights(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    exact = train(options(checkpoint, data, tmp_path / "exact"))
    given = options(checkpoint, data, tmp_path / "mixed", dtype="float32", mixed_precision=True)
    mixed = train({**given, "activation_checkpointing": True})
    assert {weight.dtype for weight in AutoModel.from_pretrained(mixed).parameters()} == {torch.float32}
    assert losses(mixed) != losses(exact)
    assert losses(mixed) == pytest.approx(losses(exact), abs=0.05)


def test_epochs_count_the_steps(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    once, twice = (
        train(options(checkpoint, data, tmp_path / str(n), max_steps=None, epochs=n, batch_size=8)) for n in (1, 2)
    )
    entries = read_log(once / "log.jsonl")
    assert len(entries) > 2
    assert entries[-1]["lr"] < 0.2 * max(entry["lr"] for entry in entries)  # the schedule ends with the data
    tokens = [sum(entry["trained_tokens"] for entry in read_log(run / "log.jsonl")) for run in (once, twice)]
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=0.02)


# Pretraining


def test_random_weights_are_those_of_several_processes(tmp_path: Path) -> None:
    """`initialize_sharded` gives the weights of `init_weights`, which is tested in tests/parallel."""
    source = write_checkpoint(tmp_path / "new", tie_word_embeddings=True) / "config.json"
    torch.manual_seed(1)
    model = open_model(source, dtype="auto", device=torch.device("cpu"), new=True)
    found = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.manual_seed(1)
    model.init_weights()
    for name, weight in model.state_dict().items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("is_file", [False, True])
def test_pretraining_starts_from_a_config(data: Path, tmp_path: Path, is_file: bool) -> None:
    source = write_checkpoint(tmp_path / "new")
    if not is_file:
        (source / "model.safetensors").unlink()
    model = source / "config.json" if is_file else source
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"The number is {n}. " * 3}) + "\n" for n in range(40)))
    given = options(model, text, tmp_path / "run", method="pretrain", seed=1)
    run = train(given)
    assert losses(run)[0] == pytest.approx(5.55, abs=0.2)  # log 258: random weights
    assert losses(run)[-1] < losses(run)[0]
    other = train({**given, "output": str(tmp_path / "other"), "seed": 2})
    assert weights(other) != weights(run)
    with pytest.raises(LigerzooError):
        train({**given, "method": "sft", "output": str(tmp_path / "sft")})


# Output


def test_a_dry_run_writes_nothing(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments(options(checkpoint, data, tmp_path / "run")), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "6 steps of 1 x 2 x 64 = 128 tokens with padding; 768 in all" in shown
    assert shown.count("[[") == shown.count("]]") == shown.count(f"{data}:") == 3
    assert "60 samples" in shown
    assert not (tmp_path / "run").exists()
    assert "--resume" not in shown
    assert cli.main([*arguments(options(checkpoint, data, tmp_path / "run", resume=True)), "--dry-run"]) == 0
    assert f"768 in all; --resume found no checkpoint in {tmp_path / 'run'}, so step" in capsys.readouterr().out


def test_evaluation_is_logged_with_samples(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    given = options(checkpoint, data, tmp_path / "run", eval_data=(str(data),), eval_every=4)
    run = train(given)
    entries = [entry for entry in read_log(run / "log.jsonl") if "eval_loss" in entry]
    assert [entry["step"] for entry in entries] == [4, 6]
    assert all(len(entry["samples"]) == 2 for entry in entries)
    assert entries[0]["eval_loss"] == pytest.approx(losses(run)[3], abs=0.5)
    assert weights(run) == weights(train({**given, "output": str(tmp_path / "plain"), "eval_data": None}))


def test_the_plot_and_the_tracker(checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    reported: list[Any] = []
    given = options(checkpoint, data, tmp_path / "run", tracker="tensorboard")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
        with pytest.raises(ConfigError, match="package tensorboard is not installed"):
            train({**given, "dry_run": True})
    monkeypatch.setattr(tracking, "_import", lambda name: None)
    monkeypatch.setattr(tracking, "_open_tensorboard", lambda opened, output: reported.append)
    run = train(given)
    assert reported == read_log(run / "log.jsonl")
    assert "polyline" in (run / "loss.svg").read_text()


# What goes wrong


@pytest.mark.parametrize(
    "record, remedy",
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "Use --method dpo, orpo, simpo, cpo or reward."),
        ({"prompt": "a", "completion": "b", "label": False}, "Use --method kto."),
        ({"prompt": "a"}, "Use --method grpo or opd."),
    ],
)
@pytest.mark.parametrize("option", ["data", "eval_data"])
def test_records_of_other_methods_are_refused(
    checkpoint: Path, data: Path, tmp_path: Path, record: dict[str, Any], remedy: str, option: str
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=f"^{other}: records of kind .* are for another method.*{remedy}"):
        train(options(checkpoint, data, tmp_path / "run", **{option: (str(other),)}))
    assert not (tmp_path / "run").exists()


def test_all_evaluation_data_is_checked_before_the_first_step(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(data.read_text() + json.dumps({"prompt": "a", "completion": "b" * 200}) + "\n")
    with pytest.raises(DataError, match=r"held_out.jsonl:61: the sample is too long"):
        train(options(checkpoint, data, tmp_path / "run", eval_data=(str(held_out),)))
    assert not (tmp_path / "run").exists()


def test_adapters_of_random_weights_are_refused(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(data.read_text())
    given = options(checkpoint, text, tmp_path / "run", model=str(checkpoint / "config.json"), method="pretrain")
    with pytest.raises(ConfigError, match="option lora_rank: an adapter needs trained weights"):
        train({**given, "lora_rank": 2})


def test_an_unknown_device_is_named(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such device; got abacus"):
        train(options(checkpoint, data, tmp_path / "run", device="abacus"))


def test_a_step_without_trained_tokens_is_refused(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    packed = PackedBatches.__next__
    monkeypatch.setattr(PackedBatches, "__next__", lambda self: dataclasses.replace(packed(self), trained_tokens=0))
    with pytest.raises(LigerzooError, match=rf"step 1, {data}:\d+.*: no token is trained"):
        train(options(checkpoint, data, tmp_path / "run"))


def test_float16_is_refused(data: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny")
    AutoModel.from_pretrained(checkpoint, dtype="float16").save_pretrained(checkpoint)
    with pytest.raises(ConfigError, match=r"cannot be trained in float16.*--dtype bfloat16"):
        train(options(checkpoint, data, tmp_path / "run"))


def test_separated_tied_weights_are_refused(checkpoint: Path) -> None:
    model = AutoModel.from_pretrained(checkpoint)
    check_dtype(model)
    check_tied_weights(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    with pytest.raises(ConfigError, match=r"the head is separate from the embedding.*tie_weights"):
        check_tied_weights(model)


def test_the_tokenizer_of_a_larger_model_is_refused(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", vocab_size=200, bos_token_id=None, eos_token_id=None)
    with pytest.raises(DataError, match=rf"^{data}:\d+: .*the token '</s>' .*got id 257; expected an id below 200"):
        train(options(small, data, tmp_path / "run"))


@pytest.mark.parametrize(
    "dtype, lr, warns", [("bfloat16", 1e-6, True), ("bfloat16", 1e-2, False), ("float32", 1e-6, False)]
)
def test_updates_below_the_resolution_are_warned_of(checkpoint: Path, dtype: str, lr: float, warns: bool) -> None:
    model = AutoModel.from_pretrained(checkpoint, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if warns:
        with pytest.warns(UserWarning, match=r"1e-06 is below the resolution of bfloat16 for \d+% of the weights"):
            warn_of_rounding(optimizer, lr)
    else:
        warn_of_rounding(optimizer, lr)


def test_an_incomplete_environment_of_torchrun_is_refused(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="variables of torchrun are missing; got WORLD_SIZE=2"):
        train(options(checkpoint, data, tmp_path / "run"))


def test_errors_and_warnings_of_the_command_are_one_line(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(checkpoint, data, tmp_path / "run", max_steps=1)
    assert cli.main(arguments(given)) == 0
    capsys.readouterr()
    assert cli.main(arguments(given)) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.startswith(f"ligerzoo: error: {tmp_path / 'run'}: the output directory holds a run or a model")


def test_capture_is_an_option(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """On a CPU every step runs eagerly, unless graphs are asked for."""
    eager, auto = (
        train(options(checkpoint, data, tmp_path / capture, capture=capture, max_steps=2))
        for capture in ("off", "auto")
    )
    assert weights(eager) == weights(auto)
    with pytest.raises(LigerzooError, match="option capture: needs a GPU; got device cpu"):
        train(options(checkpoint, data, tmp_path / "on", capture="on"))


@pytest.mark.parametrize("more", [{}, {"lora_rank": 2}, {"dry_run": True}], ids=str)
def test_a_tokenizer_with_more_tokens_than_the_model(
    checkpoint: Path, data: Path, tmp_path: Path, more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """As text-only Gemma 3's `<image_soft_token>`; also the padding token may have no row."""
    model, larger = tmp_path / "model", tmp_path / "larger"
    shutil.copytree(checkpoint, model)
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["liger"])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(larger)
    assert len(tokenizer) == 260
    safe, bad = tmp_path / "safe.jsonl", tmp_path / "bad.jsonl"
    lines = data.read_text().replace("liger", "cat").splitlines(keepends=True)
    safe.write_text("".join(lines))
    bad.write_text("".join([*lines[:6], json.dumps({"prompt": "a", "completion": "liger"}) + "\n"]))
    given = options(model, safe, tmp_path / "run", tokenizer=str(larger), max_steps=2, packing="none", **more)
    assert cli.main(arguments(given)) == 0
    expected = "bad.jsonl:7: .*the token 'liger' is not in the model's vocabulary; got id 258; expected an id below 258"
    with pytest.raises(DataError, match=expected):
        train({**given, "data": (str(bad),), "output": str(tmp_path / "other"), "max_steps": 9})
    evaluate = ["evaluate", str(model), "--tokenizer", str(larger), "--device", "cpu", "--data"]
    assert cli.main([*evaluate, str(safe)]) == 0
    capsys.readouterr()
    assert cli.main([*evaluate, str(bad)]) == 1
    assert re.search(expected, capsys.readouterr().err)


@pytest.mark.parametrize("record", [
    {"prompt": "a", "completion": None}, {"prompt": None, "completion": "a"}, {"text": None},
    {"prompt": "a", "chosen": "b", "rejected": None},
])  # fmt: skip
@pytest.mark.parametrize("first", [True, False])
def test_null_is_not_missing(
    checkpoint: Path, tmp_path: Path, record: dict[str, Any], first: bool
) -> None:  # fmt: skip
    good = {name: name for name in record}
    file = tmp_path / "null.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in ([record, good] if first else [good, record])))
    (name,) = [name for name, value in record.items() if value is None]
    method = "dpo" if "chosen" in record else "sft"
    given = options(checkpoint, file, tmp_path / "run", method=method, dry_run=True)
    with pytest.raises(DataError, match=rf"null.jsonl:{2 - first}: the field '{name}' is null"):
        train(given)


@pytest.mark.parametrize("units, is_slow", [(True, False), (False, True)])
def test_a_cpu_without_units_for_bfloat16_computes_in_float32(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], units: bool,
    is_slow: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": False, "avx512_bf16": units})
    model = write_checkpoint(tmp_path / "model")
    AutoModel.from_pretrained(model, dtype="bfloat16").save_pretrained(model)
    said = "This CPU has no units for bfloat16: "
    loaded = f"{said}the weights are loaded as float32. --dtype bfloat16 keeps them."
    hint = f"{said}--dtype float32 is several times faster"
    for command in (
        ["generate", str(model), "--prompt", "a", "--max-new-tokens", "1"],
        ["evaluate", str(model), "--data", str(data)],
        ["embed", str(model), "--pooling", "mean", "--input", str(data), "--field", "prompt"],
        arguments(options(model, data, tmp_path / "run", dry_run=True)),
    ):  # fmt: skip
        for dtype, line in (("auto", loaded), ("float32", None), ("bfloat16", hint if command[0] == "train" else None)):
            more = ["--device", "cpu"] if command[0] != "train" else []
            more += ["--output", str(tmp_path / f"{dtype}.jsonl")] if command[0] == "embed" else []
            assert cli.main([*command, "--dtype", dtype, *more]) == 0
            printed = capsys.readouterr()
            lines = [one for one in (printed.out + printed.err).splitlines() if said in one]
            assert len(lines) == bool(is_slow and line)
            assert not lines or str(line) in lines[0]
            if command[0] == "train":
                is_wide = dtype == "float32" or (is_slow and dtype == "auto")
                assert f"parameters in {'float32' if is_wide else 'bfloat16'}," in printed.out

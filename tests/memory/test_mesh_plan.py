"""Predictions of steps on a mesh: what processes send and hold, how long it takes, and the mesh that fits."""

import json
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ligerzoo import cli
from ligerzoo.errors import ConfigError
from ligerzoo.hub.saving import save
from ligerzoo.layers import Experts, Mamba2Mixer
from ligerzoo.layers.plain import find_modules
from ligerzoo.memory import GPURates, Recompute, TrainingSetting, plan_training
from ligerzoo.memory.divided import divided
from ligerzoo.memory.mesh_plan import MeshPlan, SimulatedSteps
from ligerzoo.memory.network import Members, Transfer, members_of
from ligerzoo.memory.sharding import sharding_of
from ligerzoo.memory.tracker import CollectiveKind
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.models import CausalLM, Llama, LlamaConfig
from tests.memory.traffic_cases import OTHERS, QUICK, ROWS, TOKENS, build, measure_all
from tests.parallel.spawning import on_all_processes


@cache
def measured(is_quick: bool) -> dict[str, dict[str, float]]:
    """Returns what processes send and hold, for each of the cases."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "found.json"
        on_all_processes(partial(measure_all, file=file, cases=QUICK if is_quick else OTHERS), processes=4)
        found: dict[str, dict[str, float]] = json.loads(file.read_text())
    return found


def predict(model: CausalLM, sizes: str, gpus: int = 4, **rates: Any) -> tuple[MeshPlan, CausalLM]:
    setting = TrainingSetting(gpus=gpus, mesh=sizes, batch_size=ROWS, seq_length=TOKENS)
    with divided(model, setting.sizes) as one:
        steps = SimulatedSteps(one, setting, GPURates(**rates))
        return steps.plan(setting, steps.uniform(setting, Recompute.NOTHING)), one.model


@pytest.mark.parametrize("kind, sizes", [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)])
def test_processes_send_and_hold_what_is_predicted(kind: str, sizes: str) -> None:
    """Of processes with gloo, which sums gradients in fp32, as NCCL does between hosts of one GPU."""
    found = dict(measured((kind, sizes) in QUICK)[f"{kind} {sizes}"])
    plan, model = predict(build(kind, "meta"), sizes, gpus_per_host=1)
    weights = sum(group.nbytes // group.count for group in sharding_of(model, plan.setting.sizes))
    assert found.pop("weights") == pytest.approx(weights, rel=0.01)
    assert found.pop("optimizer states") == pytest.approx(plan.activations.step.optimizer_states, rel=0.01)
    assert plan.sent() == pytest.approx(found, rel=0.001)  # a CPU computes no logits of tokens without a label


@pytest.mark.every_layer
def test_every_architecture_is_predicted(tiny_model: CausalLM) -> None:
    """By its own layers, divided as in training."""
    axes = ["tensor"] if find_modules(tiny_model, Mamba2Mixer) else ["tensor", "context"]
    axes += ["expert"] if any(True for _ in find_modules(tiny_model, Experts)) else []
    for axis in axes:
        plan, _ = predict(tiny_model, f"{axis}=2", gpus=4)
        assert any(one.axis == axis and not one.when for one in plan.transfers)
        assert plan.sent()["shard"] > 0
        assert not dist.is_initialized()


def test_groups_within_blocks_are_freed_after_each_use() -> None:
    """`keep_gathered` keeps the weights of blocks until backward, but not those of experts that FSDP2 shards apart."""
    setting = TrainingSetting(gpus=4, mesh="shard=4 expert=2", batch_size=ROWS, seq_length=TOKENS)
    with divided(build("experts", "meta"), setting.sizes) as one:
        steps = SimulatedSteps(one, setting, GPURates())
        freed, kept = (steps.held(setting, keeps_gathered=keeps).gathered for keeps in (False, True))
        blocks = sharding_of(one.model, setting.sizes).blocks
    assert len(blocks) == 3
    assert all(own.of_experts and own.nbytes > block.nbytes for block, own in blocks)
    assert kept - freed == 2 * blocks[0][0].nbytes


def test_divided_layers_share_the_work() -> None:
    alone, _ = predict(build("dense", "meta"), "", gpus=1)
    for sizes in ("shard=1 tensor=2", "shard=1 context=2"):
        plan, _ = predict(build("dense", "meta"), sizes, gpus=2)
        assert plan.activations.step.flops == pytest.approx(alone.activations.step.flops / 2, rel=0.01)


def transfer(kind: CollectiveKind, gigabytes: int, members: Members) -> Transfer:
    return Transfer(axis="shard", kind=kind, when="forward", nbytes=gigabytes * 10**9, calls=0, members=members)


def test_experts_wait_for_each_other() -> None:
    """Their all-to-all takes three times as long as that of attention with `context`."""
    of_context = transfer("all-to-all", 8, Members(8, 8))
    of_experts = replace(of_context, axis="expert")
    assert of_experts.seconds(GPURates()) == pytest.approx(3 * of_context.seconds(GPURates()), rel=0.01)


@pytest.mark.parametrize(
    "transfer, seconds",
    [
        (transfer("all-gather", 8, Members(8, 8)), 7 / 337.5),
        (transfer("all-gather", 64, Members(64, 4)), 63 / 4 / 45),
        (transfer("all-reduce", 1, Members(4, 1)), 1.5 / 45),
        (transfer("all-to-all", 16, Members(16, 8)), 8 / 45),
    ],
)
def test_seconds_of_collectives(transfer: Transfer, seconds: float) -> None:
    """Within a host NVLink decides; over hosts, the network of those GPUs that the group has on a host."""
    assert transfer.seconds(GPURates()) == pytest.approx(seconds, rel=0.01)
    assert transfer.seconds(GPURates(nvlink=900, network=800)) == pytest.approx(seconds / 2, rel=0.01)


def test_neighbours_of_a_mesh_are_on_a_host() -> None:
    sizes = MeshSizes(replicate=4, shard=8, context=2, tensor=2, expert=4)
    members = members_of(sizes, 8)
    assert members["tensor"] == members["context"] == Members(2, 2)
    assert members["shard"] == Members(16, 4)
    assert members["replicate"] == Members(4, 1)
    assert members["expert"] == Members(8, 8)
    assert members["expert shard"] == Members(4, 1)


WIDE: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def wide() -> Llama:
    return Llama(LlamaConfig(**WIDE), device="meta")


def test_the_fastest_mesh_that_fits_is_proposed() -> None:
    setting = TrainingSetting(gpus=16, seq_length=256, batch_size=4)
    roomy = plan_training(wide(), setting)
    assert roomy.step is not None
    own = roomy.step.setting.sizes
    assert own.context == own.tensor == own.expert == 1
    reasons = {str(one.sizes): one.reason for one in roomy.rejected}
    assert any("tokens/s per GPU, nothing recomputed" in reason for reason in reasons.values())
    assert "has 2 heads, which 4 processes cannot share equally" in reasons["shard=4 tensor=4"]
    assert len({one.sizes for one in roomy.rejected}) == len(roomy.rejected)
    assert own not in {one.sizes for one in roomy.rejected}
    lines = str(roomy).splitlines()
    assert lines[lines.index("other meshes:") + 1].startswith("  ")
    speeds = [float(one.reason.split()[0].replace(",", "")) for one in roomy.rejected if "tokens/s" in one.reason]
    assert max(speeds) <= roomy.step.tokens_per_second * 1.01


def test_meshes_that_do_not_fit_say_what_they_need() -> None:
    setting = TrainingSetting(gpus=4, seq_length=256, batch_size=4)
    roomy = plan_training(wide(), setting)
    least = min(step.peak for step in roomy.uniform.values())
    tight = plan_training(wide(), setting, gpu_memory=1.0001 * least / 2**30)
    assert tight.step is not None
    assert any(one.reason.startswith("does not fit: 0.") for one in tight.rejected), tight.rejected
    nothing = plan_training(wide(), setting, gpu_memory=0.05)
    assert nothing.step is None
    assert "does not fit 0.05 GiB, even with batch size 1" in str(nothing)
    assert nothing.as_dict()["step"] is None


def test_a_given_mesh_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(wide().to_empty(device="cpu"), tmp_path / "model")
    command = ["info", str(tmp_path / "model"), "--train", "--gpus", "32", "--mesh", "replicate=2 shard=8 tensor=2"]
    command += ["--batch", "2", "--seq", "64"]
    assert cli.main(command) == 0
    page = capsys.readouterr().out
    assert "training with 2 x 64 tokens per 2 GPUs, 32 GPUs (mesh replicate=2 shard=8 tensor=2), full, adamw" in page
    assert "step on 32 GPUs of 4 hosts, mesh replicate=2 shard=8 tensor=2" in page
    assert "sends tensor: all-reduce" in page
    assert "tokens/s per GPU" in page
    assert cli.main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["step"]["mesh"] == {"replicate": 2, "shard": 8, "context": 1, "tensor": 2, "expert": 1}
    assert {one["axis"] for one in plan["step"]["sends"]} == {"replicate", "shard", "tensor"}
    seconds = dict(plan["step"]["seconds"])
    assert seconds.pop("step") == pytest.approx(sum(seconds.values()))
    faster = [
        "--gpu-flops",
        "2000",
        "--gpu-bandwidth",
        "8",
        "--nvlink",
        "900",
        "--network",
        "800",
        "--gpus-per-host",
        "4",
    ]
    assert cli.main([*command, *faster, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"]["seconds"]["step"] < plan["step"]["seconds"]["step"]


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(wide().to_empty(device="cpu"), tmp_path / "model")
    command = ["info", str(tmp_path / "model"), "--train", "--gpus", "8", "--mesh"]
    assert cli.main([*command, "shard=3"]) == 1
    assert "mesh: the sizes do not fit" in capsys.readouterr().err
    assert cli.main([*command, "tensor=4"]) == 1
    assert "has 2 heads, which 4 processes cannot share equally" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["info", "model", "--json"])
    assert "argument --json: only allowed with --train" in capsys.readouterr().err


def test_a_process_of_a_group_cannot_predict_divided_layers() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ConfigError, match="a mesh cannot be predicted in a process of a process group"):
            predict(wide(), "tensor=2")
        assert predict(wide(), "shard=4")[0].time.seconds > 0
    finally:
        dist.destroy_process_group()

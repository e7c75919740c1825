"""A run that several processes have saved continues on any number, as if it had not been interrupted."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ligerzoo.errors import ConfigError
from ligerzoo.parallel import stop_processes
from ligerzoo.train import processes, run_checkpoint, trained_state
from ligerzoo.train.fingerprint import fingerprint, fingerprint_of_shards
from ligerzoo.train.log import RunLog, read_log
from ligerzoo.train.run_checkpoint import checkpoints
from ligerzoo.train.run_state import RunState
from ligerzoo.train.trained_state import TrainedState
from tests.parallel.spawning import on_all_processes
from tests.train.grpo_run import grpo_options, write_prompts, write_reward
from tests.train.preference_data import labelled, pairs, write
from tests.train.preference_data import options as preference_options
from tests.train.test_grpo import LOW_TOKENS
from tests.train.test_resume import files_of, untimed_log
from tests.train.tiny_run import options, train, write_checkpoint, write_data

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

SAVED = 2
"""The step after which the runs are interrupted."""
COLUMNS = ("loss", "grad_norm", "lr", "tokens", "trained_tokens", "reward", "rewards/margins")


class Groups:
    """Process groups of 1, 2 or 4 of four processes, one after the other."""

    def __init__(self, rank: int, directory: Path) -> None:
        self._rank, self._directory, self._count = rank, directory, 0
        dist.barrier()  # a process that leaves before all have joined is missed by the others

    def run(self, count: int, work: Callable[[], object]) -> None:
        """Calls a function in the first processes, while the others wait."""
        self._count += 1
        dist.destroy_process_group()
        if self._rank < count:
            if count > 1:  # one process trains without a group
                self._join(f"group-{self._count}", count)
            work()
            stop_processes()
        self._join(f"all-{self._count}", 4)
        dist.barrier()

    def _join(self, name: str, count: int) -> None:
        file = f"file://{self._directory}/{name}"
        dist.init_process_group("gloo", init_method=file, rank=self._rank, world_size=count)


def recorded(given: Mapping[str, Any], command: Callable[[dict[str, Any]], int] = train) -> None:
    """Trains, and writes the samples of each step of this process to a file."""
    file = Path(f"{given['output']}-samples-{processes.rank()}.txt")
    log_step = RunLog.step

    def logged(self: RunLog, step: int, **values: Any) -> None:
        log_step(self, step, **values)
        mesh = processes.mesh()
        if mesh is not None and any(mesh.get_local_rank(axis) for axis in ("context", "tensor")):
            return  # another process has the same samples
        with file.open("a") as lines:
            trained = [batch for batch in values["batches"] if batch.trained_tokens]
            lines.writelines(f"{step} {source}\n" for batch in trained for source in batch.sources)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "step", logged)
        assert command(dict(given)) == 0


def samples(output: str, after: int) -> list[str]:
    """Returns the steps after one with the samples that were trained in them, in all processes."""
    files = Path(output).parent.glob(f"{Path(output).name}-samples-*.txt")
    return sorted(line for file in files for line in file.read_text().splitlines() if int(line.split()[0]) > after)


def interrupted(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Copies a run as it was after `SAVED` steps. Returns the options to continue it."""
    output = Path(f"{given['output']}-{name}")
    output.mkdir()
    shutil.copytree(Path(given["output"]) / f"checkpoint-{SAVED}", output / f"checkpoint-{SAVED}")
    shutil.copyfile(Path(given["output"]) / "log.jsonl", output / "log.jsonl")
    return {**given, "output": str(output), "resume": True}


def compare(output: str, expected: str, *, to_the_bit: bool, after: int = SAVED) -> None:
    """Compares a run that was continued after a step with one that was not interrupted."""
    assert samples(output, after) == samples(expected, after)
    logs = [read_log(Path(run) / "log.jsonl") for run in (output, expected)]
    assert [entry["step"] for entry in logs[0]] == [entry["step"] for entry in logs[1]]
    for entry, other in zip(*logs, strict=True):
        for column in filter(other.get, COLUMNS):
            assert entry[column] == pytest.approx(other[column], rel=2e-4, abs=2e-5), (column, entry["step"])
    files = [next(Path(run).glob("*model.safetensors")) for run in (output, expected)]
    if to_the_bit:
        assert files[0].read_bytes() == files[1].read_bytes()
        assert untimed_log(Path(output)) == untimed_log(Path(expected))
        last = [checkpoints(Path(run))[-1] / "optimizer" for run in (output, expected)]
        assert files_of(last[0]) == files_of(last[1]) or not last[1].exists()
    weights, others = map(load_file, files)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], atol=5e-5, rtol=2e-3)


Ways = dict[str, tuple[str, ...]]
"""On which processes a run is interrupted, and on which it continues: their number, and their mesh."""


def each_way(rank: int, given: dict[str, Any], directory: Path, ways: Ways) -> None:
    """Trains on some processes without an interruption, and continues each of these runs on others."""
    groups = Groups(rank, directory)
    accumulate = given.get("accumulate")
    for first, others in ways.items():
        count, _, mesh = first.partition(" ")
        ranks = int(count) // (2 if "tensor" in mesh or "context" in mesh else 1)
        rows = {} if accumulate is None else {"accumulate": 4 * accumulate // ranks}
        output = f"{given['output']}-{first}".replace(" ", "-")
        whole = {**given, **rows, "output": output, "save_every": SAVED, "keep": 9, "mesh": mesh or None}
        groups.run(int(count), partial(recorded, whole))
        for number, second in enumerate(others):
            if rank == 0:
                interrupted(whole, f"on-{number}")
            count, _, mesh = second.partition(" ")
            continued = {**whole, "output": f"{output}-on-{number}", "resume": True, "mesh": mesh or None}
            groups.run(int(count), partial(recorded, continued))
            if rank == 0:
                compare(continued["output"], output, to_the_bit=first == second)


WAYS: Ways = {"1": ("2",), "2": ("1", "2", "4 replicate=2 shard=2"), "4": ("2",)}
MESHES: Ways = {"2": ("4 tensor=2 shard=2", "4 context=2 shard=2"), "4 tensor=2 shard=2": ("2", "4 tensor=2 shard=2")}
CASES: list[Any] = [
    ("packing", {"2": ("1", "4 replicate=2 shard=2")}),
    pytest.param("packing", MESHES, marks=pytest.mark.slow),
    *(pytest.param(name, WAYS, marks=pytest.mark.slow) for name in ("packing", "dropout", "dpo", "kto", "grpo")),
]


def cases(directory: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns the options of a run of each kind."""
    checkpoint = write_checkpoint(directory / "tiny", initializer_range=0.1)
    shared = {"max_steps": 4, "schedule": "constant", "warmup": 0.0}
    batches = {**shared, "batch_size": 1, "accumulate": 1}

    def sft(**changes: Any) -> dict[str, Any]:
        data = write_data(directory / "data.jsonl", 40)
        return options(checkpoint, data, directory / "sft", **{**batches, **changes})

    def prefer(records: list[dict[str, Any]], method: str) -> dict[str, Any]:
        data = write(directory / f"{method}.jsonl", records)
        return preference_options(checkpoint, data, directory / method, method=method, **batches)

    def grpo() -> dict[str, Any]:
        reward = write_reward(directory / "reward.py", LOW_TOKENS)
        prompts = write_prompts(directory / "prompts.jsonl")
        sampled = {"method": "grpo", "prompts": 4, "batch_size": 1, **shared}
        return grpo_options(checkpoint, prompts, reward, directory / "grpo", **sampled)

    return {
        "packing": lambda: sft(ema=0.5, weight_decay=0.1),
        "dropout": lambda: sft(lora_rank=4, lora_dropout=0.3, lr=1e-2),
        "dpo": lambda: prefer(pairs(30), "dpo"),
        "kto": lambda: prefer(labelled(30), "kto"),
        "grpo": grpo,
    }


def as_earlier(self: RunState, step: int, trained: TrainedState) -> None:
    """Saves a checkpoint in the format of earlier versions: the states of each process, with their fingerprints."""
    save_now(self, step, trained)
    self.wait()
    checkpoint = self.output / f"checkpoint-{step}"
    own = {"data": trained.data.state_dict(), "random": {"cpu": torch.get_rng_state(), "cuda": []}}
    prints = trained.fingerprints(fingerprint_of_shards)
    if processes.world_size() == 1:
        del prints[trained_state.OPTIMIZER]
    tensors: dict[str, Any] = {"processes": processes.gather({**own, "fingerprints": prints})}
    if trained.ema is not None:
        tensors["ema_updates"] = trained.ema.updates
    if processes.world_size() == 1:
        tensors["optimizer"] = trained.optimizer.state_dict()
        shutil.rmtree(checkpoint / trained_state.OPTIMIZER)
    if processes.is_main():
        torch.save(tensors, checkpoint / run_checkpoint.TENSORS_FILE)
        state = json.loads((checkpoint / run_checkpoint.STATE_FILE).read_text())
        del state["rows"]
        of_files = {run_checkpoint.TENSORS_FILE: fingerprint_of_shards(tensors, as_on_gpu=True)}
        state["fingerprints"] = of_files | run_checkpoint.hashes(checkpoint)
        state["fingerprints"][run_checkpoint.STATE_FILE] = fingerprint(state)
        (checkpoint / run_checkpoint.STATE_FILE).write_text(json.dumps(state))


save_now = RunState.save


def of_earlier_version(rank: int, given: dict[str, Any]) -> None:
    """Saves as earlier versions did, and continues on equally many processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunState, "save", as_earlier)
        recorded(given)
    if rank == 0:
        interrupted(given, "continued")
    processes.gather(None)
    recorded({**given, "output": f"{given['output']}-continued", "resume": True})
    processes.gather(None)
    if rank == 0:
        compare(f"{given['output']}-continued", given["output"], to_the_bit=True)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_of_an_earlier_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    given = {**cases(tmp_path)["packing"](), "save_every": SAVED, "keep": 9}
    if count == 1:
        of_earlier_version(0, given)
    else:
        on_all_processes(partial(of_earlier_version, given=given), count)
    state = {"step": SAVED, "options": {}, "processes": 3}
    monkeypatch.setattr(
        run_checkpoint.RunCheckpoint, "open", lambda path: run_checkpoint.RunCheckpoint(path, state, "")
    )
    with pytest.raises(ConfigError, match="of an earlier version, from a run of another number of processes"):
        train({**given, "resume": True})


def test_rows_that_do_not_divide(tmp_path: Path) -> None:
    given = {**cases(tmp_path)["packing"](), "save_every": SAVED, "keep": 9, "batch_size": 2, "accumulate": 3}
    assert train(given) == 0
    assert train({**given, **interrupted(given, "smaller"), "batch_size": 1}) == 0  # 6 micro-batches
    log, other = (untimed_log(Path(f"{given['output']}{name}")) for name in ("", "-smaller"))
    assert [entry["tokens"] for entry in log] == [entry["tokens"] for entry in other]
    again = {**interrupted(given, "again"), "accumulate": 1, "batch_size": 6}
    assert train(again) == 0
    assert train({**again, "max_steps": 5, "accumulate": 3, "batch_size": 2}) == 0
    with pytest.raises(ConfigError, match=r"do not divide among the processes; got 6 rows, and 1 processes of 4 rows"):
        train({**interrupted(given, "4"), "batch_size": 4})
    with pytest.raises(ConfigError, match="got --accumulate 2 instead of --accumulate 3"):
        train({**interrupted(given, "2"), "accumulate": 2})


def test_fingerprints_do_not_depend_on_the_shards() -> None:
    on_all_processes(same_fingerprints)


def same_fingerprints(rank: int) -> None:
    """Rows, columns, replicas, and more elements than a chunk has."""
    mesh = init_device_mesh("cpu", (2,))
    for size in ((3, 5), (7,), (1, 4), (2, 150_001)):
        whole = torch.randn(size, generator=torch.Generator().manual_seed(0))
        placements = [Shard(dimension) for dimension in range(len(size))]
        for placement in (*placements, Replicate()):
            shared = distribute_tensor(whole.clone(), mesh, [placement])
            assert fingerprint({"a": shared, "b": 1}) == fingerprint({"a": whole, "b": 1}), (size, placement)
            cast(DTensor, shared).to_local().view(-1)[-1:] += 1  # a shard may be empty
            assert fingerprint({"a": shared, "b": 1}) != fingerprint({"a": whole, "b": 1}), (size, placement)


@pytest.mark.parametrize("name, ways", CASES)
def test_a_run_continues_on_other_processes(tmp_path: Path, name: str, ways: Ways) -> None:
    """The samples of each step, losses and weights; to the bit on equally many."""
    given = cases(tmp_path)[name]()
    on_all_processes(partial(each_way, given=given, directory=tmp_path, ways=ways), 4)

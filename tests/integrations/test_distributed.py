"""Wrapped models in two processes on a CPU, as transformers' `DistributedConfig` says: its Trainer and `generate`."""

import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("transformers.distributed.parallel_utils")  # transformers 5.21

from safetensors.torch import load_file
from transformers import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.integrations.transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from tests.integrations import distributed_cases as process
from tests.models.tiny import Tiny
from tests.models.zoo import CHECKPOINTS
from tests.parallel.spawning import on_all_processes
from tests.parallel.test_tensor import MIXTURES
from tests.test_docs import ROOT, blocks, with_small_models

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),  # raised inside PEFT
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*score.weight.*:UserWarning"),  # which the checkpoint lacks
]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FIRST = {str(tiny.config["model_type"]): tiny for tiny in reversed(CHECKPOINTS)}


def load(tiny: Tiny, directory: Path) -> Any:
    tiny.write(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def write(directory: Path) -> None:
    """Writes the checkpoints in fp32."""
    for model_type in ("llama", "phi3", "qwen3", "qwen3_moe"):
        load(FIRST[model_type], directory / "written" / model_type).save_pretrained(directory / model_type)
    classifier = AutoModelForSequenceClassification.from_pretrained(directory / "llama", num_labels=3, pad_token_id=0)
    classifier.save_pretrained(directory / "classifier")


@pytest.mark.parametrize("what", ["every kind", pytest.param("every case", marks=pytest.mark.slow)])
def test_two_processes_train_and_generate_as_one(what: str, tmp_path: Path) -> None:
    write(tmp_path)
    expected: dict[str, dict[str, Any]] = {}
    command = [sys.executable, "-m", process.__name__, str(tmp_path), what]
    cases = process.CASES.keys() if what == "every case" else set(process.EVERY_KIND)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        for model_type in ("llama", "qwen3", "qwen3_moe"):
            model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / model_type)
            before = process.generate(model)
            losses = process.train(model.train(), tmp_path / f"one {model_type}")
            expected[model_type] = {"losses": losses, "before": before, "after": process.generate(model)}
        expected["llama adapters"] = {"losses": process.train_adapters(tmp_path, tmp_path / "one adapters")}
        _, errors = worker.communicate()
    assert worker.returncode == 0, errors[-5000:]
    for rank in (0, 1):
        results = json.loads((tmp_path / f"results {rank}.json").read_text())
        assert results.keys() == cases | {"llama by accelerate", "llama adapters"}
        for name, result in results.items():
            one = expected[name if name in expected else name.partition(" ")[0]]
            assert torch.tensor(one["losses"]).diff(dim=0).abs().min() > 1e-3  # the steps differ
            torch.testing.assert_close(result["losses"], one["losses"], rtol=1e-5, atol=0, msg=name)
            for key, completions in result.items():
                assert key == "losses" or completions == one[key], f"{name}, {key}"
    for name in (*cases, "llama by accelerate"):
        model_type = name.partition(" ")[0]
        files = [tmp_path / run / "checkpoint-3" for run in (name, f"one {model_type}")]
        assert len({(path / "config.json").read_text() for path in files}) == 1
        tensors = [load_file(path / "model.safetensors") for path in files]
        torch.testing.assert_close(*tensors, rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's
def test_trl_trains_in_two_processes_as_in_one(tmp_path: Path) -> None:
    write(tmp_path)
    command = [sys.executable, "-m", process.__name__, str(tmp_path), "trl"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    expected = process.train_with_trl(tmp_path, tp_size=1)
    for rank in (0, 1):
        for sizes, result in json.loads((tmp_path / f"results {rank}.json").read_text()).items():
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=0, msg=sizes)


@pytest.mark.slow
def test_the_script_of_the_docs(tmp_path: Path) -> None:
    [script] = [block for block in blocks(ROOT / "docs/transformers.md", "python") if block.startswith("# several.py")]
    (tmp_path / "several.py").write_text(with_small_models(script))
    done = subprocess.run([*TORCHRUN, "several.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    for directory in ("trained", "out/checkpoint-3"):
        AutoModelForCausalLM.from_pretrained(tmp_path / directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2},
        {"fsdp_size": 2},
        {"fsdp_size": 2, "ep_size": 2},
        {"tp_size": 2, "ep_size": 2},
        {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
        {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version
def test_every_architecture_computes_as_one(sizes: dict[str, int], tmp_path: Path) -> None:
    processes = math.prod(size for name, size in sizes.items() if name != "ep_size")
    others = {"mllama"} if "tp_size" in sizes else set()  # cannot be divided
    names = MIXTURES if "ep_size" in sizes else FIRST.keys() - others
    for name in names if processes == 2 else ("deepseek_v3", "qwen3_moe"):
        FIRST[name].write(tmp_path / "loaded" / name)
    work = partial(process.every_architecture, directory=tmp_path / "loaded", sizes=sizes)
    on_all_processes(work, processes=processes)


EXPECTED = ("llama", "qwen3", "olmo2", "phi3", "qwen3_moe", "deepseek_v3", "qwen3_5", "mllama")
"""Norms of heads, norms over all heads, fused projections, experts, MLA, delta rule, images, what cannot be divided."""


@pytest.mark.parametrize("model_type", EXPECTED)
def test_plans(model_type: str, tmp_path: Path) -> None:
    model = load(FIRST[model_type], tmp_path)
    assert model.supports_tp_plan == bool(model.tp_plan) == (model_type != "mllama")
    assert not model.supports_pp_plan
    names = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}
    prefix = "model." if model.model.is_text_only else "model.language_model."
    plan = {rule: style.removeprefix("ligerzoo_") for rule, style in model.tp_plan.items()}
    theirs = model.config.get_text_config().base_model_tp_plan or {}
    if model_type in ("llama", "qwen3"):
        assert {rule.removeprefix(prefix): style for rule, style in plan.items()} == {
            **theirs, "embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"
        }  # fmt: skip
    if model_type == "olmo2":
        assert plan["model.layers.*.self_attn.q_norm"] == "colwise"
    if model_type == "qwen3_moe":
        assert model.ep_plan == {"model.layers.*.mlp.experts": "ligerzoo_ep_dispatch_experts"}
        assert model.ep_plan.items() <= model.tp_plan.items()
    else:
        assert bool(model.ep_plan) == (model_type == "deepseek_v3")
    if model_type != "phi3":
        for rule in (*model.tp_plan, *model.fsdp_plan):
            assert any(rule.replace("*", str(number)) in names for number in range(4)), rule
    if model_type in ("llama", "qwen3"):
        theirs = {f"{prefix}{rule}": style for rule, style in model.config.base_model_fsdp_plan.items()}
        assert model.fsdp_plan == {**theirs, "lm_head": "keep_full_weight"}
    assert model.fsdp_plan[f"{prefix}layers.*"] == "free_full_weight"


def test_transformers_cannot_apply_our_plan(tmp_path: Path) -> None:
    """Its hooks would change the forward of linear layers whose weights ours read."""
    model = load(FIRST["llama"], tmp_path)
    plan = {"model.layers.0.mlp.down_proj": model.tp_plan["model.layers.*.mlp.down_proj"]}
    with pytest.raises(LigerzooError, match="functions cannot divide a layer of ligerzoo; got Linear"):
        apply_tensor_parallelism(model, None, plan)
    model.tp_plan = dict(model.tp_plan)  # a registered style is accepted


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pp_size": 2}, r"DistributedConfig\.pp_size: not supported; got 2; expected 1.*computes no loss"),
        ({"fsdp_size": 2, "fsdp_cpu_offload": True}, "fsdp_cpu_offload: not supported; got True"),
        ({"tp_size": 2, "enable_sequence_parallel": True}, "enable_sequence_parallel: not supported"),
        ({"tp_size": 2, "tp_plan": {"lm_head": "colwise"}}, r"tp_plan: .*'colwise'.*expected None, or rules of model"),
        ({"tp_size": 2, "tp_plan": {}}, "tp_plan: not supported; got {}"),
        ({"fsdp_size": 2, "fsdp_plan": {"lm_head": "free_full_weight"}}, "fsdp_plan: not supported"),
        ({"fsdp_size": 2, "ep_size": 2}, "ep_size: not supported; got 2; expected 1. The model has no experts"),
    ],
)
def test_other_configs_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = load(FIRST["llama"], tmp_path)
    before = list(model.parameters())
    with pytest.raises(ConfigError, match=message):
        model.maybe_distribute_model(model, DistributedConfig(**options), object())
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("options", [{"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2, "ep_size": 2}])
def test_other_ways_to_the_experts_are_refused(options: dict[str, int], tmp_path: Path) -> None:
    model = load(FIRST["qwen3_moe"], tmp_path)
    other = "all_to_all" if "tp_size" in options else "all_reduce"
    config = DistributedConfig(**options, ep_implementation=other)
    with pytest.raises(ConfigError, match=rf"ep_implementation: not supported; got '{other}'; expected 'auto' or 'all"):
        model.maybe_distribute_model(model, config, object())


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    FIRST["llama"].write(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=DistributedConfig(tp_size=1))
    assert not model.is_distributed_loading_by_transformers
    with pytest.raises(ConfigError, match="arguments distributed_config and tp_plan or tp_size: given twice"):
        AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config={"tp_size": 2}, tp_plan="auto")

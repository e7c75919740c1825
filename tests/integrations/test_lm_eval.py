"""lm-evaluation-harness on wrapped models."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from ligerzoo import cli
from tests.integrations.clients import COMPARED, assert_same, ours, theirs, tokenizer

# transformers reads config.json of version 4.
pytestmark = pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {root}/rows.json}}, cache_dir: {root}/cache}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICES = """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: right
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
CONTINUATIONS = """\
output_type: generate_until
doc_to_target: answer
generation_kwargs: {until: [w5], max_gen_toks: 6, do_sample: false, suppress_tokens: [90, 91]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"w{i} w{2 * i}", "choices": [f"w{i + 3}", f"w{i + 9} w{i}"], "right": i % 2, "answer": f"w{i}"}
        for i in range(3, 13)
    ]
    (root / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    for name, kind in (("choices", CHOICES), ("continuations", CONTINUATIONS)):
        (root / f"{name}.yaml").write_text(TASK.format(name=name, root=root) + kind)
    return root


@pytest.fixture(scope="module")
def tasks(directory: Path) -> TaskManager:
    return TaskManager(include_path=str(directory), include_defaults=False)


@pytest.mark.parametrize("model_type", COMPARED)
def test_evaluation(model_type: str, checkpoints: dict[str, Path], tasks: TaskManager) -> None:
    found: list[Any] = []
    for load in (ours, theirs):
        model = HFLM(load(checkpoints[model_type]), tokenizer=tokenizer(), batch_size=4, device="cpu", max_length=64)
        results = simple_evaluate(model, tasks=["choices", "continuations"], task_manager=tasks, bootstrap_iters=0)
        assert results is not None
        found.append({n: [row["filtered_resps"] for row in rows] for n, rows in results["samples"].items()})
    assert found[0]["continuations"] == found[1]["continuations"]
    likelihoods = [[number for row in each["choices"] for number, _ in row] for each in found]
    assert_same(*likelihoods)


def test_command(
    directory: Path, checkpoints: dict[str, Path], tasks: TaskManager, capsys: Any, monkeypatch: Any
) -> None:
    """`ligerzoo evaluate --tasks` prints what lm-eval finds with transformers' model."""
    without_defaults = partial(TaskManager, include_defaults=False)  # whose index takes ten seconds
    monkeypatch.setattr("ligerzoo.integrations.tasks.TaskManager", without_defaults)
    checkpoint = checkpoints["llama"]
    given = [str(checkpoint), "--task-directory", str(directory), "--device", "cpu", "--seq-length", "64"]
    line = ["evaluate", *given, "--tasks", "choices,continuations", "--json"]
    assert cli.main(line) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]
    model = HFLM(theirs(checkpoint), tokenizer=tokenizer(), batch_size=4, device="cpu", max_length=64)
    expected = simple_evaluate(model, tasks=["choices", "continuations"], task_manager=tasks)
    assert expected is not None
    for name, metric in (("choices", "acc,none"), ("continuations", "exact_match,none")):
        assert found[name][metric] == expected["results"][name][metric]
    assert cli.main([*line[:-1], "--limit", "2"]) == 0
    assert cli.main(["evaluate", *given, "--tasks", "choises"]) == 1
    assert "--tasks: unknown task; got 'choises'. Did you mean 'choices'?" in capsys.readouterr().err

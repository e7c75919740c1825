"""lm-evaluation-harness on wrapped models, and on served ones."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from ligerzoo import AutoModel, Tokenizer, cli
from tests.covering import representatives
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
PERPLEXITY = """\
output_type: loglikelihood_rolling
doc_to_target: "{{question}} {{choices | join(' ')}}"
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"w{i} w{2 * i}", "choices": [f"w{i + 3}", f"w{i + 9} w{i}"], "right": i % 2, "answer": f"w{i}"}
        for i in range(3, 13)
    ]
    (root / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    answers = CONTINUATIONS.replace(", suppress_tokens: [90, 91]", "")  # which is not in OpenAI's API
    for name, kind in (
        ("choices", CHOICES), ("continuations", CONTINUATIONS), ("answers", answers), ("perplexity", PERPLEXITY)
    ):  # fmt: skip
        (root / f"{name}.yaml").write_text(TASK.format(name=name, root=root) + kind)
    return root


@pytest.fixture(scope="module")
def tasks(directory: Path) -> TaskManager:
    return TaskManager(include_path=str(directory), include_defaults=False)


@pytest.mark.parametrize("model_type", representatives(COMPARED, "llama", "qwen2_vl"))
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


@pytest.fixture(scope="module")
def served(checkpoints: dict[str, Path]) -> Iterator[str]:
    """The URL of a server of the tiny Llama."""
    for package in ("starlette", "uvicorn", "tenacity", "aiohttp"):
        pytest.importorskip(package)
    from tests.serve.serving import serving

    model = AutoModel.from_pretrained(checkpoints["llama"], dtype=torch.float32)
    with serving(model, Tokenizer.from_pretrained(checkpoints["llama"]), name="tiny") as running:
        yield running.url


def responses(model: Any, names: list[str], tasks: TaskManager, **options: Any) -> dict[str, list[Any]]:
    """Returns what lm-eval reads of each answer: texts, or log-likelihoods and whether a choice is greedy."""
    results = simple_evaluate(model, tasks=names, task_manager=tasks, bootstrap_iters=0, **options)
    assert results is not None
    return {name: [one for row in rows for one in row["filtered_resps"]] for name, rows in results["samples"].items()}


@pytest.mark.parametrize("batch_size, clients", [pytest.param(1, 1, marks=pytest.mark.thorough), (3, 4)])
def test_served_completions(
    served: str, checkpoints: dict[str, Path], tasks: TaskManager, batch_size: int, clients: int
) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    names, directory = ["choices", "answers", "perplexity"], str(checkpoints["llama"])
    remote = LocalCompletionsAPI(
        base_url=f"{served}/completions", model="tiny", tokenizer=directory, tokenizer_backend="huggingface",
        batch_size=batch_size, num_concurrent=clients, max_length=64, max_retries=1,
    )  # fmt: skip
    local = HFLM(theirs(checkpoints["llama"]), tokenizer=tokenizer(), batch_size=4, device="cpu", max_length=63)
    found, expected = (responses(model, names, tasks) for model in (remote, local))
    assert found["answers"] == expected["answers"]
    assert_same([number for number, _ in found["choices"]], [number for number, _ in expected["choices"]])
    assert [is_greedy for _, is_greedy in found["choices"]] == [is_greedy for _, is_greedy in expected["choices"]]
    assert_same(found["perplexity"], expected["perplexity"])


def test_served_chats(served: str, checkpoints: dict[str, Path], tasks: TaskManager) -> None:
    from lm_eval.models.openai_completions import LocalChatCompletion

    remote = LocalChatCompletion(base_url=f"{served}/chat/completions", model="tiny", max_retries=1)
    local = HFLM(theirs(checkpoints["llama"]), tokenizer=tokenizer(), batch_size=4, device="cpu", max_length=63)
    found, expected = (responses(model, ["answers"], tasks, apply_chat_template=True) for model in (remote, local))
    assert found == expected

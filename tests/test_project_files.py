"""The files that hosts and pre-commit read name commands that exist."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = {target for line in re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE) for target in line.split()}


def test_hosted_ci_runs_targets_of_make() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    found = set()
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for command in (step["run"] for step in job["steps"] if "run" in step):
            target = re.fullmatch(r"make (\S+|\$\{\{ matrix\.target \}\})( WORKERS=\d)?", command)[1]
            found |= set(matrix["target"]) if target.startswith("$") else {target}
        versions = matrix.get("python-version", ["3.11"])
        assert all(isinstance(version, str) for version in versions)
    assert {"lint", "docs", "test", "test-newest", "test-oldest"} <= found <= TARGETS


def test_pre_commit_runs_what_lint_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"].removeprefix(".venv/bin/") for repo in config["repos"] for hook in repo["hooks"]]
    lint = MAKEFILE.partition("\nlint:")[2].partition("\n\n")[0]
    for command in re.findall(r"\$\(BIN\)/(.+)", lint):
        assert any(entry.startswith(command.removesuffix(" --check")) for entry in entries), command
    for entry in entries:
        if module := re.search(r"-m tools\.(\w+)", entry):
            assert (ROOT / "tools" / f"{module[1]}.py").exists()


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_templates(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        return
    assert form["name"]
    assert form["description"]
    for element in form["body"]:
        assert element["type"] in {"input", "textarea", "checkboxes", "markdown"}
    mentioned = re.findall(r"docs/[\w-]+\.md", path.read_text(encoding="utf-8"))
    assert all((ROOT / page).exists() for page in mentioned)

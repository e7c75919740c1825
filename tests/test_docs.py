"""The code in README.md and docs/ runs, and every link has a target.

The blocks of a page run one after the other, as one script, on the small models that the package carries.
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ligerzoo import AutoModel, AutoModelForEmbedding, Tokenizer, adapters, cli
from ligerzoo.models import EmbeddingSettings, NormalizeStage, PoolingStage

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

LLAMA, QWEN2_VL = (
    next((ROOT / "ligerzoo").rglob(f"{name}/config.json")).parent
    for name in ("tiny-python-llama", "tiny-shapes-qwen2-vl")
)
MODELS = {
    "meta-llama/Llama-3.2-1B-Instruct": QWEN2_VL,  # the model with a chat template
    "meta-llama/Llama-3.2-1B": LLAMA,
    "meta-llama/Llama-3.1-8B": LLAMA,
    "Qwen/Qwen2-VL-2B-Instruct": QWEN2_VL,
    "run/checkpoint/step-1000": LLAMA,  # tests/integrations run the engines that save it, and the next
    "run/epoch_0_step_99/model": LLAMA,
}

EMBEDDING_MODEL = "Qwen/Qwen3-Embedding-0.6B"

RECIPES = ("for batch in batches:", "for prompts in batches:")
"""Lines of the blocks that tests/losses/test_examples.py runs, with the data they need."""

OTHER_METHODS = (
    "training.md",
    "preferences.md",
    "distillation.md",
    "contrastive.md",
    "coming-from.md",
    "other-engines.md",
)
"""Pages whose kinds of commands are on other pages too, or in tests/train."""

FILE = re.compile(r"# (\S+\.py)\n")
"""The first line of a block that is a file."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands_of(page: Path) -> list[str]:
    """The commands of a page that end soon. Scripts for several hosts are executed by tests/train/test_hosts.py."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if re.match("ligerzoo (?!serve|demo)", line)]


def with_small_models(code: str) -> str:
    for name, directory in MODELS.items():
        code = code.replace(name, str(directory))
    return code


@pytest.fixture
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def server_url() -> Iterator[str]:
    """A server of the demo's model with the name "llama"."""
    pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    from tests.serve.serving import load_demo, serving

    with serving(*load_demo(), name="llama") as served:
        yield served.url


@pytest.fixture
def embedding_server_url(directory: Path) -> Iterator[str]:
    """A server of a small embedding model with the name "embedding"."""
    pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    from tests.embedding.serving import serving

    with serving(AutoModelForEmbedding.from_pretrained(EMBEDDING_MODEL), name="embedding", api_key=None) as served:
        yield served.url


def write_embedding_model() -> None:
    """Writes a small embedding model into the working directory, under the name that a page has for a large one."""
    prompts = {"query": "def "}
    settings = EmbeddingSettings(stages=(PoolingStage(modes=("lasttoken",)), NormalizeStage()), prompts=prompts)
    model = AutoModelForEmbedding.from_config(AutoModel.from_pretrained(LLAMA).config, settings)
    model.tokenizer = Tokenizer.from_pretrained(LLAMA)
    model.save_pretrained(EMBEDDING_MODEL)
    Path("texts.txt").write_text("one\ntwo\n")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an image, from which modules are imported, and with the files of the repository."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "ligerzoo" / "demo").mkdir(parents=True)
    (tmp_path / "ligerzoo" / "demo" / "assets").symlink_to(ROOT / "ligerzoo" / "demo" / "assets")
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (64, 48), "red").save(tmp_path / "cat.png")
    pairs = [{"prompt": f"def f{number}(", "completion": "x):\n    return x\n"} for number in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": pair["completion"]}) + "\n" for pair in pairs))
    preferences = [{"prompt": f"f{n}", "chosen": " yes", "rejected": " no"} for n in range(40)]
    labelled = [{"prompt": f"f{n}", "completion": " yes", "label": n % 2 == 0} for n in range(40)]
    queries = [{"query": f"f{n}", "positive": f"def f{n}()", "negative": f"x = {n}"} for n in range(16)]
    for name, records in (("pairs", preferences), ("labelled", labelled), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two", "id": 2}\n')
    (tmp_path / "reward.py").write_text("def reward(completions): return [len(text) for text in completions]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # raised inside PEFT
@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning")
@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")  # config.json of transformers 4
@pytest.mark.filterwarnings("ignore:.*missing parameters, which keep their initialization:UserWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_code(
    page: Path, directory: Path, device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = blocks(page, "python")
    if any("torch.distributed" in block for block in code):
        request.getfixturevalue("one_process")
    if any(EMBEDDING_MODEL in block for block in code):
        write_embedding_model()
    if any("response_format" in block or "Grammar" in block for block in code):
        pytest.importorskip("llguidance")
    if any("OpenAI(" in block for block in code):
        url = request.getfixturevalue("embedding_server_url" if page.name == "embeddings.md" else "server_url")
        code = [block.replace("http://127.0.0.1:8000/v1", url) for block in code]
    monkeypatch.setattr("ligerzoo.kernels.loss.chunked_head._logits_budget", 512)  # restores it after set_logits_budget
    names: dict[str, object] = {}
    for block in code:
        if any(recipe in block for recipe in RECIPES):
            continue
        if file := FILE.match(block):
            if "/" not in file[1]:
                (directory / file[1]).write_text(block, encoding="utf-8")
                monkeypatch.delitem(sys.modules, Path(file[1]).stem, raising=False)
            continue
        block = with_small_models(block).replace('"cuda"', repr(device))
        exec(compile(block, page.name, "exec"), names)  # noqa: S102


def test_every_recipe_is_on_one_page() -> None:
    for recipe in RECIPES:
        assert sum(recipe in block for page in PAGES for block in blocks(page, "python")) == 1


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=pytest.mark.thorough if page.name in OTHER_METHODS else ())
        for page in PAGES
        if commands_of(page)
    ],
)
def test_commands(page: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = commands_of(page)
    if any("my-adapter" in line for line in commands):
        model = AutoModel.from_pretrained(LLAMA)
        adapters.add_lora(model)
        adapters.save_adapter(model, "my-adapter")
    if any(EMBEDDING_MODEL in line for line in commands):
        write_embedding_model()
    for line in commands:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))  # ends a chat
        _, *arguments = shlex.split(with_small_models(line).partition(" > ")[0], comments=True)
        if arguments[0] in ("generate", "chat"):
            arguments += ["--max-new-tokens", "3"]
        if arguments[0] in ("train", "evaluate") and "--batch-size" not in arguments:
            arguments += ["--batch-size", "2"]
        if arguments[0] in ("train", "evaluate") and "--dtype" not in arguments:
            arguments += ["--dtype", "float32"]  # many CPUs compute slowly in bfloat16
        if arguments[0] == "evaluate" and "--seq-length" not in arguments:
            arguments += ["--seq-length", "128"]
        if "--max-steps" in arguments:
            steps = arguments.index("--max-steps") + 1
            arguments[steps] = str(2 + int(arguments[steps]) // 6)  # a resumed run keeps more steps than the first
        assert cli.main(arguments) == 0, line


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}"


def test_the_readme_links_to_all_pages() -> None:
    """tests/test_site.py checks that docs/index.md has every page."""
    assert "](docs/index.md)" in PAGES[0].read_text(encoding="utf-8")


def insert_after(path: Path, line: str, inserted: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(line) == 1
    path.write_text(text.replace(line, line + inserted), encoding="utf-8")


@pytest.mark.slow
def test_the_architecture_of_the_guide_agrees_with_transformers(tmp_path: Path) -> None:
    """Adds the guide's files to a copy of the package, and runs the parity tests that the guide names."""
    for name in ("ligerzoo", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)  # with the bytecode, or the process compiles everything again
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    guide = ROOT / "docs" / "adding-an-architecture.md"
    files = {file[1]: block for block in blocks(guide, "python") if (file := FILE.match(block))}
    for name, content in files.items():
        path = tmp_path / (name if "/" in name else f"ligerzoo/models/{name}")
        assert not path.exists(), f"{name} exists: choose another architecture for the guide"
        path.write_text(content, encoding="utf-8")
    insert_after(tmp_path / "ligerzoo/models/registry.py", "ARCHITECTURES = {\n", '    "olmo": "Olmo",\n')
    [converter] = re.findall(r"`(Architecture\(.+?\))`", guide.read_text(encoding="utf-8"))
    insert_after(tmp_path / "ligerzoo/convert/families.py", "_FAMILIES = (\n", f"    {converter},\n")
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    parity = [*pytest_command, "tests/models/test_parity.py", "-k", "olmo-"]
    done = subprocess.run(
        parity, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 10  # type: ignore[index]


@pytest.mark.slow
def test_the_activation_of_the_guide_passes_the_tests_of_kernels(tmp_path: Path) -> None:
    """Makes the guide's changes in a copy of the package, and runs the tests that follow the table of activations."""
    for name in ("ligerzoo", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    guide = (ROOT / "docs" / "adding-a-kernel.md").read_text(encoding="utf-8")
    found = re.findall(
        r"^   ```python\n   # ligerzoo/kernels/activation.py: .*\n((?:   .*\n)+?)   ```", guide, re.MULTILINE
    )
    row, function, branch = (textwrap.dedent(block) for block in found)
    file = tmp_path / "ligerzoo/kernels/activation.py"
    text = file.read_text(encoding="utf-8").replace('"quick_gelu", "relu2"]', '"quick_gelu", "relu2", "mish"]')
    file.write_text(text.replace("@jit\ndef activate", f"{function}\n\n@jit\ndef activate"), encoding="utf-8")
    insert_after(file, "ACTIVATIONS: dict[Activation, ActivationFunction] = {\n", textwrap.indent(row, "    "))
    insert_after(file, "        return _relu2_with_slope(x)\n", textwrap.indent(branch, "    "))
    [command] = re.findall(r"^TRITON_INTERPRET=1 pytest (tests/kernels/test_activation.+)$", guide, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 250  # type: ignore[index]


def test_the_chat_template_of_the_first_fine_tune() -> None:
    source = re.search(r"```jinja\n(.*?)```", (ROOT / "docs/first-fine-tune.md").read_text(), re.DOTALL)
    assert source is not None
    tokenizer = Tokenizer.from_pretrained(ROOT / "ligerzoo/demo/assets/tiny-python-llama")
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    text = tokenizer.apply_chat_template(conversation, chat_template=source[1], tokenize=False)
    assert text == "<s>user: Hi</s>assistant: Hello</s>"

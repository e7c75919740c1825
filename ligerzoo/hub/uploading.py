"""Uploads models to the Hugging Face hub."""

import tempfile
from pathlib import Path

from ligerzoo.files.layout import INDEX_FILE, SINGLE_FILE
from ligerzoo.hub.saving import save
from ligerzoo.models.embedding import EmbeddingModel
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.masked_lm import MaskedLM
from ligerzoo.models.pretrained import Saveable
from ligerzoo.models.sequence_classifier import SequenceClassifier
from ligerzoo.models.token_classifier import TokenClassifier


def push(
    model: LanguageModel,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "Upload model",
    processor: Saveable | None = None,
) -> str:
    """Uploads a model to the hub in one commit and returns the URL of the commit.

    Adds a short model card if the repository has no README.md.

    Args:
        model: a model that `save` accepts.
        repo_id: "org/name"; created if it does not exist.
        private: whether a new repository is private.
        token: access token. Defaults to the token stored by `hf auth login`.
        commit_message: message of the commit.
        processor: `Processor` or `Tokenizer` to upload in the same commit; it replaces that of the repository. None
            keeps the repository's.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        save(model, folder)
        stale = [SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors"]  # deleted unless uploaded again
        if processor is not None:
            from ligerzoo.files.layout import PROCESSOR_INPUTS

            processor.save_pretrained(folder)
            stale += PROCESSOR_INPUTS
        if not api.file_exists(repo_id, "README.md"):
            (folder / "README.md").write_text(_model_card(model, processor, repo_id), encoding="utf-8")
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=commit_message, delete_patterns=stale
        )
        return str(commit.commit_url)


def _pipeline_tag(model: LanguageModel) -> str:
    match model:
        case SequenceClassifier():
            return "text-classification"
        case TokenClassifier():
            return "token-classification"
        case MaskedLM():
            return "fill-mask"
        case EmbeddingModel():
            return "sentence-similarity"
    return "image-text-to-text" if model.modalities else "text-generation"


def _model_card(model: LanguageModel, processor: Saveable | None, repo_id: str) -> str:
    name, module = type(model).__name__, type(model).__module__
    module = "ligerzoo.models" if module.startswith("ligerzoo.models.") else module
    parameters = sum(parameter.numel() for parameter in model.parameters())
    lines = [(f"from {module} import {name}", f'model = {name}.from_pretrained("{repo_id}")')]
    if processor is not None:
        kind = type(processor).__name__
        lines.insert(0, (f"from ligerzoo import {kind}", f'{kind.lower()} = {kind}.from_pretrained("{repo_id}")'))
    imports, calls = map("\n".join, zip(*lines, strict=True))
    return f"""---
library_name: ligerzoo
pipeline_tag: {_pipeline_tag(model)}
---
# {repo_id.split("/")[-1]}

A {name} with {parameters:,} parameters in {str(model.dtype).removeprefix("torch.")}, saved by ligerzoo in Hugging Face
format.

```python
{imports}

{calls}
```
"""

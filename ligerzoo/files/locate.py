"""Finds a checkpoint's files: in a directory, or in a repository on the Hugging Face hub, from which it downloads them.

`huggingface_hub` is imported only to download.
"""

import contextlib
import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from ligerzoo.errors import CheckpointError, first_names
from ligerzoo.files.checkpoint import weight_files
from ligerzoo.files.layout import CONFIG_FILES, MODEL_FILES
from ligerzoo.files.modules import module_files
from ligerzoo.files.transformers_options import HUB_DEFAULTS, HubOptions
from ligerzoo.files.untrusted import remedy_for

_CHECKPOINT_OF_RUN, _LOG_OF_RUN = re.compile(r"checkpoint-(\d{1,18})"), "log.jsonl"
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def find_checkpoint(name_or_path: str | Path, further: Sequence[str] = (), **hub_options: Unpack[HubOptions]) -> Path:
    """Returns the directory that holds a checkpoint's configs and weights.

    Of a repository on the hub, downloads the configs and the safetensors files of the model, all of the same commit.

    Args:
        name_or_path: directory, or id of a repository on the hub ("org/name").
        further: patterns of further files; if modules.json is among them, those of its modules as well.
        hub_options: see `HubOptions`.

    Raises:
        CheckpointError: The directory or repository doesn't exist or cannot be reached, or its index is malformed.
    """
    directory = locate_files(name_or_path, [*MODEL_FILES, *further], **hub_options)
    if os.path.isdir(name_or_path):
        return directory
    hub_options["revision"] = directory.name
    names = {*weight_files(directory), *module_files(directory)}
    return locate_files(name_or_path, sorted(map(glob.escape, names)), **hub_options)


def locate_files(name_or_path: str | Path, patterns: Sequence[str], **hub_options: Unpack[HubOptions]) -> Path:
    """Returns a given directory, or the hub's snapshot after downloading the files that match the patterns.

    Args:
        name_or_path: directory, or id of a repository on the hub.
        patterns: file names, or glob patterns such as "*.jinja"; only *.json, *.safetensors and *.jinja.
        hub_options: see `HubOptions`.

    Raises:
        CheckpointError: The directory or repository doesn't exist or cannot be reached; or the directory has the
            checkpoints of a run, but not its model.
    """
    assert all(pattern.endswith((".json", ".safetensors", ".jinja")) for pattern in patterns)
    if os.path.isdir(name_or_path):  # False for a path that is too long; Path.is_dir raises
        _refuse_unfinished_run(Path(name_or_path))
        return Path(name_or_path)
    if os.path.isfile(name_or_path) or str(name_or_path).lower().endswith((".gguf", ".safetensors")):
        what = "a file" if os.path.isfile(name_or_path) else "no such file"
        remedy = remedy_for([os.path.basename(name_or_path)], is_given=True)
        raise CheckpointError(what, where=name_or_path, expected="a directory in Hugging Face's format", remedy=remedy)
    if not _REPO_ID.fullmatch(str(name_or_path)) or ".." in str(name_or_path):
        raise CheckpointError(
            "no such directory, and not a repository id", where=name_or_path, expected='a directory or "org/name"'
        )

    from huggingface_hub import snapshot_download

    try:
        options: HubOptions = {**HUB_DEFAULTS, **hub_options}
        return Path(snapshot_download(str(name_or_path), allow_patterns=list(patterns), **options))
    except Exception as error:  # errors of the HTTP client have no common base class across versions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        what = "no such directory, and cannot be downloaded from the hub"
        where = name_or_path
        remedy = "Check the name, the network connection and, for a gated or private repository, the token."
        raise CheckpointError(what, where=where, got=f"{type(error).__name__}: {reason}", remedy=remedy) from error


def _refuse_unfinished_run(directory: Path) -> None:
    """Refuses the directory of a run, or of a Trainer of transformers, that has checkpoints but no model yet."""
    with contextlib.suppress(OSError):
        names = set(os.listdir(directory))
        steps = [int(match[1]) for match in map(_CHECKPOINT_OF_RUN.fullmatch, names) if match]
        if names.isdisjoint((*CONFIG_FILES, "tokenizer.json")) and (steps or _LOG_OF_RUN in names):
            what, got = "the directory of a run that has not finished", first_names(sorted(names))
            remedy = "Continue the run with --resume."
            if steps:
                newest = directory / f"checkpoint-{max(steps)}"
                remedy = f"Load {newest}, its newest checkpoint, or continue the run with --resume."
            raise CheckpointError(what, where=directory, got=got, expected="a model", remedy=remedy)

"""What to do with files that are not checkpoints in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

_PICKLE = (
    "Only safetensors files are read, because loading a pickle runs code. If you trust the checkpoint, convert it: "
    "load it with transformers and call save_pretrained."
)
_CONVERT = (
    "Use the repository in Hugging Face's format (the model's id on the hub, often with -hf), or convert it with "
    "transformers' conversion script, convert_{}_weights_to_hf.py."
)
_REMEDIES = {
    "adapter_model.bin": _PICKLE,
    "adapter_config.json": "This is an adapter, without the base model: load that one and call "
    "ligerzoo.adapters.load_adapter(model, directory), or merge them: `ligerzoo fuse BASE ADAPTER OUTPUT`.",
    "*.gguf": "Convert it: load it with transformers' from_pretrained(directory, gguf_file=...) and call "
    "save_pretrained, for the tokenizer too.",
    "consolidated*.safetensors": _CONVERT.format("mistral"),
    "consolidated*.pth": _CONVERT.format("llama"),
    "*.bin": _PICKLE,
    "*.pt": _PICKLE,
    "*.pth": _PICKLE,
    "*.ckpt": _PICKLE,
    "*.safetensors": "Pass its directory, which also holds config.json.",
    "*.json": "Pass its directory.",
}
"""What to do, by pattern of a file's name; the first applies."""


def remedy_for(names: Sequence[str], *, is_given: bool = False) -> str | None:
    """Returns what to do with files of other formats; None if none of the names is one.

    Args:
        names: names of files.
        is_given: the user named the file instead of its directory.
    """
    own = ("*.safetensors", "*.json")
    patterns = [pattern for pattern in _REMEDIES if is_given or pattern not in own]
    return next((_REMEDIES[p] for p in patterns if any(fnmatchcase(name.lower(), p) for name in names)), None)

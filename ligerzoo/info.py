"""What a checkpoint is and needs, told without reading its weights."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerzoo.convert import MODEL_TYPES, architecture_of
from ligerzoo.convert.architecture import Architecture, is_rotary_buffer
from ligerzoo.errors import CheckpointError
from ligerzoo.files.atomic import reading_directory
from ligerzoo.files.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, TensorInfo, read_json, read_weight_map
from ligerzoo.files.locate import CONFIG_FILE, GENERATION_FILE, locate_files
from ligerzoo.text.tokenizer import FILE_PATTERNS, Tokenizer

# Told by a piece of the tensor's name, the first that fits.
PARTS = {
    "visual.": "vision tower",
    "vision_tower.": "vision tower",
    "vision_model.": "vision tower",
    "multi_modal_projector.": "projector",
    "embed_tokens": "embedding",
    "lm_head": "head",
    "norm": "norms",
    "self_attn": "attention",
    "cross_attn": "cross-attention",
    ".experts.": "experts",
    "shared_expert": "shared expert",
    ".gate.": "router",
    "mlp": "feed-forward",
}

ADAMW_BYTES = 16
"""Bytes for each parameter in fp32 training: the weight, its gradient, and AdamW's two moments."""

COUNTS = ("", " k", " M", " B", " T")
BYTES = (" B", " kB", " MB", " GB", " TB")


@dataclass(frozen=True)
class Known:
    """An architecture as its file presents it.

    Attributes:
        model_type: the entry of config.json.
        class_name: of the model.
        checkpoints: the models that are built so, and their papers.
        distinctive: what is.
    """

    model_type: str
    class_name: str
    checkpoints: str
    distinctive: str


def architectures() -> list[Known]:
    """Every architecture there is, by what its file says at its head."""
    return [_known(architecture_of(model_type)) for model_type in MODEL_TYPES]


def _known(architecture: Architecture) -> Known:
    model_class = architecture.model_class
    paragraphs = (sys.modules[model_class.__module__].__doc__ or "").split("\n\n")
    checkpoints, *others = (" ".join(paragraph.split()).rstrip(".") for paragraph in paragraphs)
    distinctive = next(paragraph for paragraph in others if paragraph.startswith("Distinctive"))
    distinctive = re.sub(r"^Distinctive(, (.*?))?: ", lambda match: f"{match[2]}: " if match[2] else "", distinctive)
    return Known(architecture.model_type, model_class.__name__, checkpoints, distinctive)


def describe_architectures() -> str:
    """A page of text on all architectures."""
    entries = [
        f"{known.class_name} ({known.model_type})\n{_indented(known.checkpoints)}\n{_indented(known.distinctive)}"
        for known in architectures()
    ]
    return "\n\n".join(entries)


def _indented(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  ")


def describe(name_or_path: str | Path, *, revision: str | None = None) -> str:
    """A page of text on a checkpoint: architecture, parameters, memory, files and tokenizer.

    Args:
        name_or_path: a directory, or the id of a repository on the hub, of which only the configs, the tokenizer and
            the headers of the weight files are downloaded.
        revision: branch, tag or commit on the hub.

    Raises:
        ConfigError: config.json is of an architecture that is not supported, or malformed.
        CheckpointError: files are missing or damaged.
        TokenizerError: the tokenizer's files are damaged.
    """
    wanted = [CONFIG_FILE, GENERATION_FILE, INDEX_FILE, *FILE_PATTERNS]
    directory = locate_files(name_or_path, wanted, revision=revision)
    with reading_directory(directory):
        raw = read_json(directory / CONFIG_FILE)
        architecture = architecture_of(raw.get("model_type"))
        config = architecture.config_from_hf(raw)
        tensors = list(read_headers(name_or_path, directory))
        tokenizer = _tokenizer(directory)
    if not tensors:
        raise CheckpointError("no tensors", where=directory)
    lines = [
        ("architecture", f"{architecture.model_class.__name__} ({architecture.hf_class})"),
        ("shape", _shape(config)),
        *_mixtures(config),
        *_windows(config),
        *_images(config),
        ("context", f"{config.max_position_embeddings:,} tokens, {_rotary(config)}"),
        *_parameters(tensors, config),
        *_memory(tensors, config),
        *_files(tensors),
        ("tokenizer", tokenizer),
    ]
    return "\n".join([str(name_or_path), *(f"  {label:<14}{text}" for label, text in lines)])


def read_headers(name_or_path: str | Path, directory: Path) -> Iterable[TensorInfo]:
    """The checkpoint's tensors, from the weight files in the directory, else from the hub: a few kilobytes a file.

    Raises:
        CheckpointError: a header is missing, damaged or out of reach.
    """
    index = directory / INDEX_FILE
    files = set(read_weight_map(index).values()) if index.exists() else {SINGLE_FILE}
    if Path(name_or_path).is_dir() or all((directory / file).exists() for file in files):
        with Checkpoint(directory) as checkpoint:
            return checkpoint.tensors.values()

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    try:  # of the commit that the configs are of
        metadata = HfApi().get_safetensors_metadata(str(name_or_path), revision=directory.name)
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError, OSError) as error:
        raise CheckpointError("the weights' headers cannot be had", where=name_or_path, got=error) from error
    return [
        TensorInfo(name, file, tuple(tensor.shape), tensor.dtype)
        for file, header in metadata.files_metadata.items()
        for name, tensor in header.tensors.items()
    ]


def _shape(config: Any) -> str:
    heads = f"{config.num_attention_heads} heads of {config.head_size}"
    if config.kv_heads != config.num_attention_heads:
        heads += f" that share {config.kv_heads} key-value head{'s' if config.kv_heads > 1 else ''}"
    sizes = (
        f"hidden {config.hidden_size:,}, feed-forward {config.intermediate_size:,}, vocabulary {config.vocab_size:,}"
    )
    return f"{config.num_hidden_layers} layers, {sizes}; {heads}"


def _mixtures(config: Any) -> list[tuple[str, str]]:
    if not hasattr(config, "num_experts_per_tok"):
        return []
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    return [("mixtures", f"{config.num_experts} experts of {width:,}, {config.num_experts_per_tok} for each token")]


def _windows_of(config: Any) -> list[int | None]:
    """How far a token sees in each layer of self-attention; None for all before it."""
    if hasattr(config, "window"):
        return [config.window(layer) for layer in range(config.num_hidden_layers)]
    return [getattr(config, "sliding_window", None)] * (config.num_hidden_layers - len(_attending_to_images(config)))


def _attending_to_images(config: Any) -> set[int]:
    """The layers that do, in place of attending to the text."""
    return {layer for layer in getattr(config, "cross_attention_layers", ()) if layer < config.num_hidden_layers}


def _windows(config: Any) -> list[tuple[str, str]]:
    counts = Counter(window for window in _windows_of(config) if window is not None)
    return [
        ("windows", f"{count} of {config.num_hidden_layers} layers see the last {window:,} tokens")
        for window, count in counts.items()
    ]


def _images(config: Any) -> list[tuple[str, str]]:
    layers = _attending_to_images(config)
    return [("images", f"{len(layers)} of {config.num_hidden_layers} layers attend to them")] if layers else []


def _rotary(config: Any) -> str:
    scaling: Mapping[str, Any] = config.rope_scaling or {}
    kind = f", scaled by {scaling['rope_type']}" if scaling else ""
    return f"rotary positions of base {config.rope_theta:,.0f}{kind}"


def _parameters(tensors: list[TensorInfo], config: Any) -> list[tuple[str, str]]:
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if not is_rotary_buffer(tensor.name):
            part = next((part for piece, part in PARTS.items() if piece in tensor.name), "other")
            counts[part] += math.prod(tensor.shape)
    lines = [("parameters", f"{counts.total():,} ({_short(counts.total(), COUNTS)})")]
    if counts["experts"] and hasattr(config, "num_experts_per_tok"):
        idle = counts["experts"] * (config.num_experts - config.num_experts_per_tok) // config.num_experts
        lines.append(
            ("", f"{counts.total() - idle:,} of them ({_short(counts.total() - idle, COUNTS)}) for each token")
        )
    lines += [("", f"{part:<13}{count:>18,} {count / counts.total():>6.1%}") for part, count in counts.most_common()]
    if config.tie_word_embeddings and "head" not in counts:
        lines.append(("", "head         the embedding's"))
    return lines


def _memory(tensors: list[TensorInfo], config: Any) -> list[tuple[str, str]]:
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    a_token = 2 * config.kv_heads * config.head_size * tensors[0].dtype.itemsize  # in the cache of a layer
    windows = _windows_of(config)
    held = a_token * sum(window for window in windows if window is not None)
    weights = sum(tensor.nbytes for tensor in tensors)
    cached = f"{_bytes(a_token * windows.count(None))} for each token of context"
    if held:
        cached += f", and up to {_bytes(held)} for windows"
    return [
        ("dtype", " and ".join(sorted(dtypes))),
        ("memory", f"to generate {_bytes(weights)} and {cached}"),
        ("", f"to train {_bytes(ADAMW_BYTES * parameters)} and the activations (fp32, AdamW)"),
    ]


def _files(tensors: list[TensorInfo]) -> list[tuple[str, str]]:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.file] += tensor.nbytes
    shown = sorted(sizes.items())
    lines = [f"{file}  {_bytes(size)}" for file, size in shown[:4]]
    if len(shown) > 4:
        lines[3:] = [f"... {len(shown) - 4} more ...", f"{shown[-1][0]}  {_bytes(shown[-1][1])}"]
    total = f"{len(tensors)} tensors in {len(sizes)} file{'s' if len(sizes) > 1 else ''}, {_bytes(sizes.total())}"
    return [("files", total), *(("", line) for line in lines)]


def _tokenizer(directory: Path) -> str:
    if not (directory / "tokenizer.json").exists():
        return "none"
    tokenizer = Tokenizer.from_pretrained(directory)
    named = ", ".join(f"{name.removesuffix('_token')} {token!r}" for name, token in tokenizer.special_tokens.items())
    templates = (
        f"chat template {', '.join(tokenizer.chat_templates)}" if tokenizer.chat_templates else "no chat template"
    )
    return f"{len(tokenizer):,} tokens; {named or 'no special tokens'}; {templates}"


def _short(number: float, units: tuple[str, ...]) -> str:
    """Three digits and a unit: 1_234_567 of COUNTS is "1.23 M"."""
    power = 0
    while number >= 999.5 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g}{units[power]}"


def _bytes(number: int) -> str:
    return _short(number, BYTES)

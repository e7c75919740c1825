"""Describes a checkpoint and the memory it needs, from its configs and the headers of its weight files."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligerzoo.convert import architecture_of
from ligerzoo.convert.architecture import Architecture, is_rotary_buffer
from ligerzoo.convert.embedding_settings import read_settings
from ligerzoo.convert.fields import SEQUENCE_SUFFIX, is_classifier, parse_dtype, stored_dtype
from ligerzoo.errors import CheckpointError, ConfigError, first_names, quote
from ligerzoo.files.checkpoint import Checkpoint, TensorInfo, weight_files
from ligerzoo.files.layout import CONFIG_FILE, CONFIG_FILES, EMBEDDING_INPUTS, MODEL_FILES, SINGLE_FILE
from ligerzoo.files.locate import locate_files
from ligerzoo.files.modules import module_files, read_modules
from ligerzoo.files.quantized import ENTRY as QUANTIZATION_ENTRY
from ligerzoo.files.quantized import dequantized_infos, find_quantized, read_quantization
from ligerzoo.files.untrusted import read_json, reading_directory
from ligerzoo.layers.kv_cache import CacheSize, cache_size
from ligerzoo.memory import GPURates, TrainingPlan, TrainingSetting, plan_training
from ligerzoo.memory.simulation import COUNTS, with_unit
from ligerzoo.models.config import DecoderConfig, WindowedConfig
from ligerzoo.models.hybrid import LinearAttentionConfig
from ligerzoo.models.moe import RoutedConfig
from ligerzoo.models.registry import ENCODERS, MODEL_CLASSES
from ligerzoo.models.state_space import MambaConfig
from ligerzoo.optimizer_table import OPTIMIZERS
from ligerzoo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

PARTS = {
    "/": "dense modules",
    "visual.": "vision tower",
    "vision_tower.": "vision tower",
    "vision_model.": "vision tower",
    "multi_modal_projector.": "projector",
    "embed_vision.": "projector",
    "vision_embedder.": "projector",
    "vision_adapter.": "projector",
    "vision_projection.": "projector",
    "embed_tokens": "embedding",
    "_embeddings": "embedding",
    "lm_head": "head",
    "score.weight": "head",
    "head.": "head",
    "cls.": "head",
    "pooler.": "head",
    "classifier.": "head",
    "norm": "norms",
    "LayerNorm": "norms",
    "linear_attn": "linear attention",
    ".mamba.": "state spaces",
    ".conv.": "convolutions",
    "self_attn": "attention",
    ".attention.": "attention",
    ".attn.": "attention",
    "cross_attn": "cross-attention",
    ".experts.": "experts",
    "shared_expert": "shared expert",
    "shared_mlp": "shared expert",
    ".gate.": "router",
    ".router.": "router",
    "e_score_correction_bias": "router",
    "mlp": "feed-forward",
    "feed_forward": "feed-forward",
    **{f"mixer.{name}_proj": "attention" for name in "qkvo"},
    **{f"mixer.{name}_proj": "feed-forward" for name in ("up", "down", "fc1_latent", "fc2_latent")},
    ".mixer.": "state spaces",
    "intermediate.": "feed-forward",
    ".output.": "feed-forward",
}
"""Parts of a model by a substring of the tensor's name. The first match counts."""

ADAMW_BYTES = 4 * (2 + OPTIMIZERS["adamw"].tensors)
"""Bytes per parameter in fp32 training: the weight, its gradient and the moments of AdamW."""

BYTES = (" B", " kB", " MB", " GB", " TB")

Lines = list[tuple[str, str]]
"""Labels and texts of the lines to print."""


@dataclass(frozen=True)
class ArchitectureSummary:
    """What the docstring of a model's module says about an architecture.

    Attributes:
        model_type: `model_type` in config.json.
        class_name: name of the model class.
        checkpoints: released models with this architecture, and their papers.
        distinctive: how it differs from other architectures.
    """

    model_type: str
    class_name: str
    checkpoints: str
    distinctive: str


def architectures() -> list[ArchitectureSummary]:
    """Returns a summary of each architecture in ligerzoo.models."""
    return [_summarize(architecture_of(model_type)) for model_type in MODEL_CLASSES]


def _summarize(architecture: Architecture) -> ArchitectureSummary:
    model_class = architecture.model_class
    paragraphs = (sys.modules[model_class.__module__].__doc__ or "").split("\n\n")
    checkpoints, *others = (" ".join(paragraph.split()).rstrip(".") for paragraph in paragraphs)
    distinctive = next((paragraph for paragraph in others if paragraph.startswith("Distinctive")), "")
    if not distinctive:
        where = f"docstring of {model_class.__module__}"
        expected = "a first line that names the checkpoints, and a paragraph that begins with 'Distinctive: '"
        raise ConfigError("no paragraph on what is distinctive", where=where, expected=expected)
    distinctive = re.sub(r"^Distinctive(, (.*?))?: ", lambda match: f"{match[2]}: " if match[2] else "", distinctive)
    return ArchitectureSummary(architecture.model_type, model_class.__name__, checkpoints, distinctive)


def describe_architectures() -> str:
    """Returns a page of text about all architectures in ligerzoo.models."""
    entries = [
        f"{summary.class_name} ({summary.model_type})\n{_indent(summary.checkpoints)}\n{_indent(summary.distinctive)}"
        for summary in architectures()
    ]
    return "\n\n".join(entries)


def _indent(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  ")


def describe(name_or_path: str | Path, *, revision: str | None = None) -> str:
    """Returns a page of text about a checkpoint: architecture, parameters, memory, files and tokenizer.

    If the architecture is neither in ligerzoo.models nor registered, the page describes the weight files only.

    Args:
        name_or_path: directory, or id of a repository on the hub, of which only the configs, the tokenizer and the
            headers of the weight files are downloaded.
        revision: branch, tag or commit on the hub.

    Raises:
        ConfigError: config.json is malformed.
        CheckpointError: Files are missing or damaged.
        TokenizerError: The files of the tokenizer are damaged.
    """
    patterns = [*MODEL_FILES, *EMBEDDING_INPUTS]
    directory = locate_files(name_or_path, patterns, revision=revision)
    with reading_directory(directory):
        raw = read_json(directory / CONFIG_FILE)
        architecture = _find_architecture(raw)
        config = architecture.config_from_hf(raw) if architecture else None
        embeddings, folders = _describe_embeddings(name_or_path, directory, config)
        stored = list(read_headers(name_or_path, directory, folders))
        tokenizer = _describe_tokenizer(directory)
    if not stored:
        raise CheckpointError("no tensors", where=directory, expected="weights in .safetensors files")
    quantized, tensors = _describe_quantization(raw, architecture, stored, directory)
    decoder = config if isinstance(config, DecoderConfig) else None
    lines = [
        ("architecture", _describe_architecture(raw, architecture)),
        *(_describe_shape(decoder) if decoder else []),
        *quantized,
        *_describe_parameters(tensors, decoder),
        *embeddings,
        *_describe_memory(
            tensors,
            _cache_size(architecture, decoder, tensors),
            is_encoder=architecture is not None and architecture.is_encoder,
        ),
        *_describe_files(stored),
        ("tokenizer", tokenizer),
    ]
    return "\n".join([str(name_or_path), *(f"  {label:<14}{text}" for label, text in lines)])


def plan_checkpoint(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    gpu_memory: float | None = None,
    rates: GPURates | None = None,
    revision: str | None = None,
    **setting: Any,
) -> TrainingPlan:
    """Plans the training of a checkpoint, see `ligerzoo.memory.plan_training`.

    Reads config.json only, and counts on the meta device.

    Args:
        name_or_path: directory with a config.json, or id of a repository on the hub.
        dtype: dtype of the weights; "auto" means that of config.json, or else bfloat16.
        gpu_memory: GiB that a step may use of each GPU.
        rates: of the GPUs; None for those of an H100.
        revision: branch, tag or commit on the hub.
        setting: fields of `ligerzoo.memory.TrainingSetting`.

    Raises:
        ConfigError: config.json is malformed, or describes no causal language model in ligerzoo.models.
        CheckpointError: config.json is missing.
        LigerzooError: a setting is invalid.
    """
    directory = locate_files(name_or_path, CONFIG_FILES, revision=revision)
    with reading_directory(directory):
        raw = read_json(directory / CONFIG_FILE)
    architecture = architecture_of(raw.get("model_type"))
    read_quantization(raw, architecture.quantized_formats)  # raises if it cannot be loaded
    weights_dtype = stored_dtype(raw) or "bfloat16" if dtype == "auto" else dtype
    model = architecture.build(architecture.config_from_hf(raw), device="meta")
    model = model.to(parse_dtype(weights_dtype, where="argument dtype"))
    return plan_training(model, TrainingSetting(**setting), gpu_memory, rates)


def _find_architecture(raw: Mapping[str, Any]) -> Architecture | None:
    try:
        return architecture_of(raw.get("model_type"))
    except ConfigError:
        return None


def _describe_architecture(raw: Mapping[str, Any], architecture: Architecture | None) -> str:
    if architecture and is_classifier(raw):
        names = ", ".join(map(quote, raw["architectures"]))
        kind = "sequence" if is_classifier(raw, (SEQUENCE_SUFFIX,)) else "token"
        part = "encoder" if architecture.model_type in ENCODERS else "decoder"
        return f"{kind} classifier with the {part} of {architecture.model_class.__name__} ({names})"
    if architecture:
        return f"{architecture.model_class.__name__} ({architecture.hf_class})"
    return f"model_type {quote(raw.get('model_type'))}, neither in ligerzoo.models nor registered in this process"


def read_headers(name_or_path: str | Path, directory: Path, folders: Sequence[str] = ()) -> Iterable[TensorInfo]:
    """Returns the checkpoint's tensors from the headers of its weight files.

    Reads the files in the directory if they exist, or else a few kilobytes per file from the hub.

    Args:
        name_or_path: directory, or id of a repository on the hub.
        directory: the directory, or that of its snapshot.
        folders: directories in it with further weights, as in `Checkpoint`.

    Raises:
        CheckpointError: A header is missing or damaged, or cannot be downloaded.
    """
    own = [f"{folder}/{SINGLE_FILE}" for folder in folders]
    if Path(name_or_path).is_dir() or all((directory / file).exists() for file in (*weight_files(directory), *own)):
        with Checkpoint(directory, strict=False, folders=folders) as checkpoint:
            return checkpoint.tensors.values()

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    try:  # from the commit of the configs
        api, repository, commit = HfApi(), str(name_or_path), directory.name
        headers = dict(api.get_safetensors_metadata(repository, revision=commit).files_metadata)
        headers |= {file: api.parse_safetensors_file_metadata(repository, file, revision=commit) for file in own}
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError, OSError) as error:
        what = "headers of the weight files cannot be downloaded"
        remedy = "Check the network connection, and that the repository has safetensors files."
        raise CheckpointError(what, where=name_or_path, got=error, remedy=remedy) from error
    return [
        TensorInfo(file[: file.rfind("/") + 1] + name, file, tuple(tensor.shape), tensor.dtype)
        for file, header in headers.items()
        for name, tensor in header.tensors.items()
    ]


def _describe_embeddings(name_or_path: str | Path, directory: Path, config: object) -> tuple[Lines, Sequence[str]]:
    """Returns a line about the modules of sentence-transformers, if there are some, and their folders with weights."""
    try:
        configs = [name for name in module_files(directory) if name.endswith(".json")]
        if configs:
            locate_files(name_or_path, configs, revision=directory.name)
        files = read_modules(directory, {})
        size = getattr(config, "hidden_size", None)
        if not files.modules or size is None:
            return [], ()
        settings = read_settings(files, size)
    except (CheckpointError, ConfigError) as error:
        return [("embeddings", f"cannot be loaded: {error}")], ()
    texts = [", ".join(map(str, settings.stages)), settings.similarity]
    if settings.prompts:
        texts.append(f"prompts {first_names(sorted(settings.prompts))}")
    return [("embeddings", "; ".join(texts))], settings.folders


def _describe_quantization(
    raw: Mapping[str, Any], architecture: Architecture | None, stored: Sequence[TensorInfo], directory: Path
) -> tuple[Lines, Sequence[TensorInfo]]:
    """Returns a line about quantized tensors, and the tensors as loading returns them: quantized ones in bfloat16."""
    if raw.get(QUANTIZATION_ENTRY) is None:
        return [], stored
    try:
        quantization = read_quantization(raw, architecture.quantized_formats if architecture else ())
    except ConfigError as error:
        return [("quantization", f"cannot be loaded: {error}")], stored
    by_name = {tensor.name: tensor for tensor in stored}
    pairs = find_quantized(by_name, quantization, directory)
    size = sum(part.nbytes for pair in pairs.values() for part in (pair.values, pair.scales))
    text = (
        f"{len(pairs)} tensors in {raw[QUANTIZATION_ENTRY]['quant_method']}, {_bytes(size)}; loading dequantizes them"
    )
    loaded = dequantized_infos(by_name, pairs)
    return [
        ("quantization", f"{text} to bfloat16, {_bytes(sum(loaded[name].nbytes for name in pairs))}"),
    ], list(loaded.values())


def _describe_shape(config: DecoderConfig) -> Lines:
    heads = f"{config.num_attention_heads} heads of {config.key_size}"
    if config.value_size != config.key_size:
        heads += f" (values {config.value_size})"
    if config.kv_heads != config.num_attention_heads:
        heads += f" with {config.kv_heads} key-value head{'s' if config.kv_heads > 1 else ''}"
    if (size := getattr(config, "global_head_dim", config.key_size)) != config.key_size:
        heads += f", of {size} in full attention"
    mlp_size = getattr(config, "mlp_size", config.intermediate_size)
    sizes = {"hidden": config.hidden_size, "feed-forward": mlp_size, "vocabulary": config.vocab_size}
    if isinstance(config, RoutedConfig) and not config.has_dense_layers:
        del sizes["feed-forward"]
    scaling: Mapping[str, Any] = config.rope_scaling or {}
    rope = f"rotary theta {config.rope_theta:,.0f}" + (f", scaled by {scaling['rope_type']}" if scaling else "")
    rope = rope if config.has_rotary else "learned positions"
    rope = rope if getattr(config, "use_rope", True) else "no positions"
    return [
        ("shape", f"{config.num_hidden_layers} layers, {', '.join(f'{x} {n:,}' for x, n in sizes.items())}; {heads}"),
        *_describe_experts(config),
        *_describe_windows(config),
        *_describe_states(config),
        *_describe_cross_attention(config),
        ("context", f"{config.max_position_embeddings:,} tokens, {rope}"),
    ]


def _moe_layers(config: DecoderConfig) -> int:
    """Returns the number of layers with experts."""
    has_mixture: Callable[[int], bool] = getattr(config, "has_mixture", lambda layer: False)
    return sum(map(has_mixture, range(config.num_hidden_layers)))


def _experts(config: object) -> tuple[int, int]:
    """Returns the numbers of experts of a layer and of those of a token."""
    return getattr(config, "num_experts", None) or 1, getattr(config, "num_experts_per_tok", None) or 1


def _describe_experts(config: DecoderConfig) -> Lines:
    if not _moe_layers(config):
        return []
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    return [("experts", "{0} of width {width:,}, {1} per token".format(*_experts(config), width=width))]


def _windows(config: DecoderConfig) -> list[int | None]:
    """Returns the window of each self-attention layer; None for full attention."""
    match config:
        case WindowedConfig():
            return [config.window(layer) for layer in range(config.num_hidden_layers)]
        case LinearAttentionConfig():
            return [None for layer in range(config.num_hidden_layers) if not config.is_linear(layer)]
    layers = config.num_hidden_layers - len(_cross_attention_layers(config))
    window = getattr(config, "sliding_window", None)
    return [window if isinstance(window, int) else None] * layers


def _cross_attention_layers(config: DecoderConfig) -> set[int]:
    """Returns the layers that attend to images instead of the text."""
    layers = getattr(config, "cross_attention_layers", ())
    return {layer for layer in layers if layer < config.num_hidden_layers}


def _describe_windows(config: DecoderConfig) -> Lines:
    counts = Counter(window for window in _windows(config) if window is not None)
    chunk_of: Callable[[int], int | None] = getattr(config, "chunk", lambda layer: None)
    chunks = Counter(chunk for chunk in map(chunk_of, range(config.num_hidden_layers)) if chunk is not None)
    return [
        ("chunks", f"{count} of {config.num_hidden_layers} layers attend within chunks of {chunk:,} tokens")
        for chunk, count in chunks.items()
    ] + [
        ("windows", f"{count} of {config.num_hidden_layers} layers attend to the last {window:,} tokens")
        for window, count in counts.items()
    ]


def _describe_states(config: DecoderConfig) -> Lines:
    match config:
        case MambaConfig():
            sizes = f"{config.mamba_n_heads} heads of {config.mamba_inner_size // config.mamba_n_heads}"
            sizes += f" and {config.mamba_d_state} state features"
            return [("states", f"{config.mamba_layers} of {config.num_hidden_layers} layers use Mamba-2, {sizes}")]
        case LinearAttentionConfig():
            layers = sum(config.is_linear(layer) for layer in range(config.num_hidden_layers))
            text = "layers use linear attention, whose state has a fixed size"
            return [("states", f"{layers} of {config.num_hidden_layers} {text}")]
    return []


def _describe_cross_attention(config: DecoderConfig) -> Lines:
    layers = _cross_attention_layers(config)
    return [("images", f"{len(layers)} of {config.num_hidden_layers} layers attend to them")] if layers else []


def _describe_parameters(tensors: Sequence[TensorInfo], config: DecoderConfig | None) -> Lines:
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if not is_rotary_buffer(tensor.name):
            part = next((part for substring, part in PARTS.items() if substring in tensor.name), "other")
            counts[part] += math.prod(tensor.shape)
    total = counts.total()
    lines = [("parameters", f"{total:,} ({with_unit(total, COUNTS)})")]
    if counts["experts"] and config:
        experts, chosen = _experts(config)
        inactive = counts["experts"] * (experts - chosen) // experts
        lines.append(("", f"{total - inactive:,} ({with_unit(total - inactive, COUNTS)}) active per token"))
    lines += [("", f"{part:<13}{count:>18,} {count / total:>6.1%}") for part, count in counts.most_common() if count]
    if config and config.tie_word_embeddings and "head" not in counts:
        lines.append(("", "head         tied to the embedding"))
    return lines


def _cache_size(
    architecture: Architecture | None, config: DecoderConfig | None, tensors: Sequence[TensorInfo]
) -> CacheSize | None:
    """Returns the memory of the KV cache of a model on the meta device; None if the files lack most of its tensors."""
    if architecture is None or config is None or architecture.is_encoder:
        return None
    if config.all_layers > len(tensors):  # bounds the size of the model
        return None
    try:
        model = architecture.build(config, device="meta")
    except RuntimeError as error:  # the number of elements overflows
        raise ConfigError("no model can be built with these sizes", where=CONFIG_FILE, got=error) from error
    dtype = tensors[0].dtype
    return cache_size((model.to(dtype) if dtype.is_floating_point else model).model, dtype)


def _describe_memory(tensors: Sequence[TensorInfo], cache: CacheSize | None, *, is_encoder: bool) -> Lines:
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    generation = f"{_bytes(sum(tensor.nbytes for tensor in tensors))} for the weights"
    if cache:
        generation += f", {_bytes(cache.per_token[None])} per token of context"
        if in_windows := sum(size * window for window, size in cache.per_token.items() if window is not None):
            generation += f", up to {_bytes(in_windows)} for windows"
        if cache.states:
            generation += f", {_bytes(cache.states)} per sequence for states"
    return [
        ("dtype", " and ".join(sorted(dtypes))),
        ("inference" if is_encoder else "generation", generation),
        ("training", f"{_bytes(ADAMW_BYTES * parameters)} in fp32 with AdamW, plus the activations"),
    ]


def _describe_files(tensors: Sequence[TensorInfo]) -> Lines:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.file] += tensor.nbytes
    files = sorted(sizes.items())
    lines = [f"{file}  {_bytes(size)}" for file, size in files[:4]]
    if len(files) > 4:
        lines[3:] = [f"... {len(files) - 4} more ...", f"{files[-1][0]}  {_bytes(files[-1][1])}"]
    total = f"{len(tensors)} tensors in {len(sizes)} file{'s' if len(sizes) > 1 else ''}, {_bytes(sizes.total())}"
    return [("files", total), *(("", line) for line in lines)]


def _describe_tokenizer(directory: Path) -> str:
    if not (directory / "tokenizer.json").exists():
        return "none"
    tokenizer = Tokenizer.from_pretrained(directory)
    special = ", ".join(f"{name.removesuffix('_token')} {token!r}" for name, token in tokenizer.special_tokens.items())
    templates = (
        f"chat template {', '.join(tokenizer.chat_templates)}" if tokenizer.chat_templates else "no chat template"
    )
    return f"{len(tokenizer):,} tokens; {special or 'no special tokens'}; {templates}"


def _bytes(number: int) -> str:
    return with_unit(number, BYTES)

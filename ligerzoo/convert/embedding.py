"""Converter for embedding models: the decoder's entries and tensors, and the modules of sentence-transformers."""

from dataclasses import dataclass, field, fields, replace

import torch

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.embedding_settings import changed_settings, read_modes, read_settings, written_files
from ligerzoo.convert.layout import Layout, Rename
from ligerzoo.entries import Entries
from ligerzoo.errors import ConfigError, first_names
from ligerzoo.files.modules import ModuleFiles
from ligerzoo.layers.pooling import POOLING_MODES
from ligerzoo.models.building import building
from ligerzoo.models.config import LanguageModelConfig
from ligerzoo.models.embedding import EmbeddingModel, EmbeddingSettings
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.registry import ENCODERS

EMBEDDING_OPTIONS = ("pooling", "prompts", "default_prompt_name", "similarity", "max_length", "lowercase", "dimensions")
"""Arguments of `from_pretrained` that take precedence over the files of sentence-transformers."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingArchitecture(Architecture):
    """Embedding models whose decoder is that of another architecture.

    Attributes:
        base: the architecture of the language model.
        settings: what the model computes of hidden states.
        files: the files of sentence-transformers, and those of the tokenizer.
        heads: names of stored tensors of the language model's head, which is left out.
    """

    base: Architecture
    settings: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    files: ModuleFiles = field(default_factory=lambda: ModuleFiles(""))
    heads: frozenset[str] = frozenset()

    @property
    def model_class(self) -> type[EmbeddingModel]:
        return EmbeddingModel

    @property
    def unused(self) -> frozenset[str]:
        return self.heads | self.base.unused

    @property
    def folders(self) -> tuple[str, ...]:
        return self.settings.folders

    def build(
        self,
        config: LanguageModelConfig,
        model_class: type[LanguageModel] = LanguageModel,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> EmbeddingModel:
        base = self.base.build(config, device=device, dtype=dtype)
        others = [name for name in base.state_dict() if not name.startswith(("model.", "lm_head.", "head."))]
        if others or type(base).embed is not LanguageModel.embed:
            what, where = "an embedding model has a decoder only", type(base).__name__
            got = f"parameters outside the decoder, {first_names(others)}" if others else "a method `embed`"
            remedy = "Models that read images cannot be one, nor classes of your own with further parts."
            raise ConfigError(what, where=where, got=got, remedy=remedy)
        with building(device, dtype):
            model = EmbeddingModel(config, base.model, self.settings)
        model.files = self.files.contents
        return model

    def files_of(self, model: LanguageModel) -> dict[str, bytes]:
        """Returns the files of sentence-transformers as they were, except for those that the settings change."""
        files = ModuleFiles.of(self.files.directory, self.files.contents)
        contents = {**files.contents, **dict(written_files(self.settings, files, hidden_size(model)))}
        return {name: content for name, content in contents.items() if name != "config.json"}


def hidden_size(model: LanguageModel) -> int:
    """Returns the number of features of a token's hidden state."""
    return model.get_input_embeddings().weight.shape[1]


def embedding_architecture(
    base: Architecture, settings: EmbeddingSettings, files: ModuleFiles | None = None
) -> EmbeddingArchitecture:
    """Returns the architecture of embedding models with these settings and the decoder of `base`."""
    inherited = {each.name: getattr(base, each.name) for each in fields(Architecture)}
    suffix = "ForMaskedLM" if base.model_type in ENCODERS else "ForCausalLM"
    inherited["class_name"] = base.hf_class.removesuffix(suffix) + "Model"
    inherited["layouts"] = lambda config: tuple(_with_folders(layout, settings) for layout in base.layouts(config))
    inherited["extra_tensors"] = rf"(?:{base.extra_tensors})|(?:\w+\.)?pooler\..+"
    return EmbeddingArchitecture(**inherited, base=base, settings=settings, files=files or ModuleFiles(""))


def _with_folders(layout: Layout, settings: EmbeddingSettings) -> Layout:
    """Returns the layout of an embedding model: bare decoders have no prefix, and modules have directories."""
    rules = [
        Rename(f"{stage.path}/{name}", f"stages.{index}.{name}")
        for index, stage in enumerate(settings.stages)
        for name in stage.projections
    ]
    prefixes = tuple((prefix, *sorted(stored, key=bool)) for prefix, *stored in layout.prefixes)
    return replace(layout, rules=(*rules, *layout.rules), prefixes=prefixes)


def read_embedding(base: Architecture, raw: Entries, options: Entries, files: ModuleFiles) -> EmbeddingArchitecture:
    """Returns the architecture that loads a checkpoint as an embedding model.

    Args:
        base: the architecture that config.json names.
        raw: config.json.
        options: arguments of the user, of which those of `EMBEDDING_OPTIONS` count.
        files: the files of sentence-transformers.

    Raises:
        ConfigError: a file describes something that is not supported; or there is no modules.json, and the user has
            not said how to pool.
    """
    config = base.config_from_hf(raw)
    model = base.build(config, device="meta")
    given = {name: options[name] for name in EMBEDDING_OPTIONS if options.get(name) is not None}
    pooling = given.pop("pooling", None)
    if not files.modules and pooling is None:
        mode = "mean" if base.model_type in ENCODERS else "lasttoken"
        what, got = "it is unknown how to pool the hidden states of a text", "no modules.json of sentence-transformers"
        remedy = f'Pass pooling="{mode}", or another of {", ".join(POOLING_MODES)}.'
        raise ConfigError(what, where="pooling", got=got, remedy=remedy)
    settings = read_settings(files, hidden_size(model)) if files.modules else EmbeddingSettings()
    if pooling is not None:
        stage, *others = settings.stages
        modes = read_modes(pooling, "pooling")
        settings = replace(settings, stages=(replace(stage, modes=modes), *others))  # type: ignore[type-var]
    settings = changed_settings(settings, "", **given)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    outside = [name for name in shapes if not name.startswith("model.")]
    heads = {next(layout.slices_of(n, shapes)).stored_name for layout in base.layouts(config) for n in outside}
    heads |= {*base.stored_heads(config)}
    return replace(embedding_architecture(base, settings, files), heads=frozenset(heads | {"lm_head.weight"}))

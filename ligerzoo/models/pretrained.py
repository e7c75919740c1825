"""Methods of models that look up packages above the models: loading, saving and uploading (hub), and generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ligerzoo.convert.layout import Layout
    from ligerzoo.generate import Completion, GenerateOutput
    from ligerzoo.text.tokenizer import Tokenizer


class Saveable(Protocol):
    """A `Processor` or a `Tokenizer`, which can be uploaded with a model."""

    def save_pretrained(self, directory: str | Path) -> None: ...


@dataclass(frozen=True)
class LoadedFrom:
    """The checkpoint that a model was loaded from. Saving uses it to write the same names and entries again.

    Attributes:
        raw_config: content of config.json.
        config: our config as read from it; None if `from_pretrained` changed some fields.
        layout: names and shapes of the stored tensors.
        tied: the parameter that the files omit because it is tied to a stored one; empty if they store both.
        extra_tensors: tensors that are not part of the model but are saved again, such as rotary frequencies.
        missing: names of the parameters that the files lack, after `strict=False`. They keep their initialization.
        unexpected: names of the stored tensors that the model lacks, after `strict=False`. They are left out.
    """

    raw_config: Mapping[str, object]
    config: Any
    layout: Layout
    tied: frozenset[str]
    extra_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def _package(name: str) -> Any:
    """Imports a package that imports the models, when a method needs it."""
    return import_module(f"ligerzoo.{name}")


class Pretrained:
    """Checkpoints of a model in Hugging Face format.

    Attributes:
        generation_config: entries of generation_config.json: default token ids for `generate`.
        origin: where the weights were loaded from, to save them with the same names; None for a new model.
    """

    generation_config: dict[str, Any]
    origin: LoadedFrom | None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        strict: bool = True,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        **overrides: Any,
    ) -> Self:
        """Loads a checkpoint in Hugging Face format, in evaluation mode; see `ligerzoo.hub.load`.

        Args:
            name_or_path: directory, or id of a repository on the hub ("org/name").
            dtype: dtype of the weights; "auto" means that of config.json, or else that of the stored embedding. Weights
                that need fp32, such as the decay rates of linear attention, stay in fp32 if half-precision files store
                them so.
            device: device of the weights. Defaults to torch's default device.
            strict: False loads a checkpoint into an extended class. Parameters that the files lack keep the
                initialization of the constructor, and tensors that the model lacks are left out. A warning and
                `model.origin` list them. A tensor with another shape stays an error.
            revision: branch, tag or commit on the hub.
            token: access token for private and gated repositories. Defaults to the token stored by `hf auth login`.
            cache_dir: directory of the downloaded files. Defaults to the hub library's cache.
            local_files_only: use cached files only, without network access.
            overrides: values of config fields, which take precedence over config.json. Options of transformers, such as
                `torch_dtype`, `device_map` and `attn_implementation`, are accepted where they have one meaning here.
        """
        source = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        options = {"dtype": dtype, "device": device, "strict": strict, **source, **overrides}
        model: Self = _package("hub").load(name_or_path, cls, **options)
        return model

    def save_pretrained(
        self,
        directory: str | Path,
        is_main_process: bool | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        save_function: object = None,
        *,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Saves the model to `directory` in Hugging Face format; see `ligerzoo.hub.save`.

        Args:
            directory: created if it does not exist.
            is_main_process: whether this process writes; default: yes, or the lowest rank if weights are DTensors.
            state_dict: weights to save instead of the model's, by the names of `state_dict()`.
            save_function: unused; scripts for accelerate pass `accelerator.save`. Files are always written atomically.
            max_shard_size: maximum bytes of tensors per file, as a number or a string such as "5GB".
        """
        _package("hub").save(
            self, directory, max_shard_size=max_shard_size, state_dict=state_dict, is_main_process=is_main_process
        )

    def hf_state_dict(self) -> dict[str, Tensor]:
        """Returns the weights under the names and in the shapes of checkpoints; see `ligerzoo.hub.hf_state_dict`."""
        state: dict[str, Tensor] = _package("hub").hf_state_dict(self)
        return state

    def load_hf_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies weights named as in checkpoints into the parameters; see `ligerzoo.hub.load_hf_state_dict`."""
        _package("hub").load_hf_state_dict(self, state)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload model",
        processor: Saveable | None = None,
    ) -> str:
        """Uploads the model, and a processor or tokenizer, to the Hugging Face hub; see `ligerzoo.hub.push`.

        Returns:
            The URL of the commit.
        """
        url: str = _package("hub").push(
            self, repo_id, private=private, token=token, commit_message=commit_message, processor=processor
        )
        return url


class TextEmbedding:
    """Embeddings of texts; see `ligerzoo.encoding`."""

    _tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint. Assign one to a model without files, or another one: it is saved, too."""
        if self._tokenizer is None:
            self._tokenizer = _package("encoding").read_tokenizer(self)
        tokenizer: Tokenizer = self._tokenizer
        return tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Tokenizer) -> None:
        self._tokenizer = _package("encoding").set_tokenizer(self, value)

    def encode(self, texts: str | Iterable[str], **options: object) -> Tensor:
        """Returns the embeddings of texts, (n, D), or (D,) for one text; see `ligerzoo.encoding.encode_texts`."""
        embeddings: Tensor = _package("encoding").encode_texts(self, texts, **options)
        return embeddings

    def encode_tokens(self, rows: Iterable[Sequence[int]], **options: object) -> Tensor:
        """Returns the embeddings of texts as token ids, (n, D); see `ligerzoo.encoding.encode_token_ids`."""
        embeddings: Tensor = _package("encoding").encode_token_ids(self, rows, **options)
        return embeddings


class Generative:
    """Generation of text; see `ligerzoo.generate`."""

    @overload
    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        return_dict_in_generate: Literal[True],
        **options: Any,
    ) -> GenerateOutput: ...

    @overload
    def generate(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor: ...

    def generate(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor | GenerateOutput:
        """Continues the prompts; see `ligerzoo.generate.generate` for the options.

        Returns:
            Prompts and continuations, (B, T + new tokens); or a `GenerateOutput` with `return_dict_in_generate=True`.
        """
        result: Tensor | GenerateOutput = _package("generate").generate(self, input_ids, attention_mask, **options)
        return result

    def generate_many(
        self, prompts: Iterable[Tensor | Sequence[int]], *, batch_size: int, **options: Any
    ) -> Iterator[Completion]:
        """Continues each prompt and yields the results as they finish; see `ligerzoo.generate.generate_many`."""
        results: Iterator[Completion] = _package("generate").generate_many(
            self, prompts, batch_size=batch_size, **options
        )
        return results

    def release_decode_graphs(self) -> None:
        """Frees what `generate` keeps on a GPU for later calls: captured CUDA graphs and their KV caches."""
        _package("generate").release_decode_graphs(self)

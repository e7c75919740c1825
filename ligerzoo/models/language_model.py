"""Base class of models over a decoder: inputs, caches, embeddings, activation checkpointing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ligerzoo.errors import LigerzooError, did_you_mean
from ligerzoo.kernels.autograd import any_true, innermost
from ligerzoo.kernels.dispatch import DEBUG
from ligerzoo.layers import Context, Decoder, KVCache, LayerOutputs, LMHead
from ligerzoo.layers.layer_outputs import LAYER_OUTPUTS
from ligerzoo.layers.linear import INIT_STD
from ligerzoo.layers.row_parts import WHOLE_ROWS, RowParts
from ligerzoo.models.building import ModelMeta, forget_values, require_values
from ligerzoo.models.config import LanguageModelConfig
from ligerzoo.models.hf_interface import HFInterface
from ligerzoo.models.pretrained import Pretrained


class LanguageModel(Pretrained, HFInterface, metaclass=ModelMeta):
    """A decoder, to which subclasses add a head.

    Args:
        config: config of the architecture.
        model: token ids to final hidden states.
    """

    modalities: ClassVar[tuple[str, ...]] = ()
    """Names of the inputs other than text: the keyword parameters of `embed`."""

    row_parts: RowParts = WHOLE_ROWS
    """How the tokens of rows are divided over processes, see `ligerzoo.parallel.context_parallel`."""

    residual_parts: RowParts = WHOLE_ROWS
    """How blocks divide those tokens over processes, see `ligerzoo.parallel.sequence_parallel`."""

    _is_empty = False  # after `to_empty` of a model on meta

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # All classes, since one `embed` may pass its keyword arguments on to the next.
        embeds = [vars(base)["embed"] for base in cls.__mro__ if "embed" in vars(base)]
        parameters = [p for embed in embeds for p in list(inspect.signature(embed).parameters.values())[3:]]
        cls.modalities = tuple(dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD))

    def __init__(self, config: LanguageModelConfig, model: Decoder) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.generation_config = {}
        self.origin = None
        self.replaced_weights = {}

    def init_weights(self, std: float | None = None) -> None:
        """Initializes all weights again, such as those of a model built on meta after `to_empty` and `tie_weights`.

        Calls `init_weights(std)` of every submodule that has this method. Other modules keep their weights; after
        `to_empty`, when they have none, it calls their `reset_parameters`, which torch's layers have.

        Args:
            std: standard deviation of the matrices. Default: `initializer_range` of the config.

        Raises:
            LigerzooError: after `to_empty`, for parameters and buffers of modules that have neither method, or whose
                `init_weights` does not set them.
        """
        std = self.config.initializer_range if std is None else std
        if self._is_empty and (names := list(self._uninitializable())):
            what = "modules without init_weights and reset_parameters have no values after to_empty"
            got = ", ".join(names[:10]) + ", ..." * (len(names) > 10)
            remedy = "Define init_weights(self, std) in their classes, build the model on a device, or load weights."
            raise LigerzooError(what, where=f"init_weights of {type(self).__name__}", got=got, remedy=remedy)
        parts = [(name, module) for name, module in self.named_modules() if module is not self]
        if self._is_empty:
            for _, module in parts:
                forget_values(module)
        for _, module in parts:
            if hasattr(module, "init_weights"):
                module.init_weights(std)
            elif self._is_empty and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        if self._is_empty:
            for name, module in parts:
                require_values(name, module)
        self._is_empty = False

    def _uninitializable(self) -> Iterator[str]:
        """Yields the names of parameters and buffers that `init_weights` cannot initialize."""
        for name, module in self.named_modules():
            if module is self:
                has_method = type(self).init_weights is not LanguageModel.init_weights
            else:
                has_method = hasattr(module, "init_weights") or hasattr(module, "reset_parameters")
            if not has_method:
                for own, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                    yield f"{name}.{own}".lstrip(".")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Converts the module, as `to` does. Memory for a model on meta, from `to_empty`, has no values."""
        was_on_meta = any(t.is_meta for t in self.parameters())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_on_meta and not any(t.is_meta for t in self.parameters()):
            self._is_empty = True
        return self

    def run_decoder(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        past_key_values: KVCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        exact: bool = False,
        token_types: Tensor | None = None,
        **modalities: Any,
    ) -> tuple[Tensor, Context]:
        """Runs the decoder without a head. The arguments after `x` are those of `forward`.

        Args:
            x: (B, T) token ids, or (B, T, H) embeddings.
            token_types: (B, T) for an `AbsolutePositionDecoder`; None for type 0.

        Returns:
            Final hidden states (B, T, H), or those of this process, see `RowParts`; and the context, which holds what
            the layers stored and the cache.

        Raises:
            TypeError: an input has another type, such as a list instead of a tensor.
            ValueError: the inputs have inconsistent shapes or values, or no layer has an output that was requested.
        """
        self.refuse_unknown(modalities)
        stores = {"hidden_states": output_hidden_states, "attentions": output_attentions}
        stores["router_logits"] = output_router_logits
        for name, flag in {"use_cache": use_cache, **{f"output_{name}": flag for name, flag in stores.items()}}.items():
            if not (flag is None or isinstance(flag, bool)):
                raise LigerzooError("not a flag", where=name, got=repr(flag), expected="True, False or None")
        if output_router_logits is None:
            stores["router_logits"] = self._wants_router_logits()
        outputs = LayerOutputs(**{name: [] for name, flag in stores.items() if flag})
        if exact and outputs.attentions is not None:
            what = "the probabilities are of another kernel, with other bits"
            raise LigerzooError(what, where="exact", got=True, expected="False with output_attentions=True")
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        is_whole = past_key_values is not None
        parts = WHOLE_ROWS if is_whole else self.row_parts.of(x.shape[1])
        residual_parts = WHOLE_ROWS if is_whole else self.residual_parts
        if parts.count > 1 and outputs.attentions is not None:
            what, expected = "each process has those of its heads only", "False, with context parallelism"
            raise LigerzooError(what, where="output_attentions", got=True, expected=expected)
        given = attention_mask, position_ids, cu_seqlens, past_key_values, outputs
        context = Context(x, *given, exact=exact, parts=parts, residual_parts=residual_parts)
        context.token_types = token_types
        if (DEBUG or x.device.type == "cpu") and not (x.is_floating_point() or torch.compiler.is_compiling()):
            self.check_inputs(x, context.call_padding_mask(), past_key_values, **modalities)
        hidden = self.model(self.embed(x, context, **modalities), context)
        context.gather_outputs()
        for name in LAYER_OUTPUTS:  # not `vars`, which the compiler of torch 2.11 does not trace
            tensors = getattr(outputs, name)
            if tensors is not None and not tensors:
                what = f"no layer of {type(self).__name__} has {name.replace('_', ' ')}"
                remedy = f"Layers of your own append theirs to context.{name}."
                raise LigerzooError(what, where=f"output_{name}", got=True, expected="False", remedy=remedy)
        return hidden, context

    def _wants_router_logits(self) -> bool:
        """Whether the config asks for router logits, and a layer may have some."""
        has_mixture = getattr(self.config, "has_mixture", None)
        layers = range(getattr(self.config, "num_hidden_layers", 0))
        return getattr(self.config, "output_router_logits", False) and (
            has_mixture is None or any(map(has_mixture, layers))
        )

    def refuse_unknown(self, modalities: Mapping[str, Any]) -> None:
        """Raises LigerzooError, with the nearest name, if inputs other than text are not the model's."""
        for name in modalities:
            if name not in self.modalities:
                is_misspelt = self.modalities or not name.startswith(("pixel", "image", "video"))
                accepted = [*inspect.signature(self.forward).parameters, *self.modalities]
                remedy = did_you_mean(name, accepted) if is_misspelt else None
                expected = ", ".join(self.modalities) or "text inputs only, such as input_ids"
                what = f"not an input of {type(self).__name__}"
                raise LigerzooError(what, where=name, expected=None if remedy else expected, remedy=remedy)

    def aux_loss(self, context: Context) -> Tensor | None:
        """Returns an auxiliary loss from what layers stored in the context, 0-d; None if the architecture has none."""
        return None

    def embed(self, x: Tensor, context: Context) -> Tensor:
        """Returns the input of the decoder: (B, T) token ids, or (B, T, H) embeddings.

        Architectures with further inputs override it. Each input is a keyword parameter, which the method merges into
        the embeddings or stores in the context.
        """
        return x

    def check_inputs(
        self,
        input_ids: Tensor,
        padding_mask: Tensor | None = None,
        past_key_values: KVCache | None = None,
        **modalities: Any,
    ) -> None:
        """Checks the values of the inputs, which on a GPU is a host sync.

        `forward` calls it on a CPU or if LIGERZOO_DEBUG is 1, and `generate` for the prompts only.

        Args:
            input_ids: (B, T).
            padding_mask: (B, T) bool, False for padding, which may be a placeholder token; None for no padding.
            past_key_values: KV cache of earlier tokens. A single token after others may be a placeholder, since
                generation may sample any token.
            modalities: further inputs of the architecture; see its `embed`.

        Raises:
            LigerzooError: a token id has no embedding, or a placeholder lacks its input.
        """
        self.refuse_unknown(modalities)
        is_sampled = input_ids.shape[1] == 1 and past_key_values is not None and past_key_values.length > 0
        is_invalid = (input_ids < 0) | (input_ids >= self.input_vocab_size)
        for name, is_placeholder in self.placeholder_masks(input_ids, modalities.get("mm_token_type_ids")).items():
            own = is_placeholder if padding_mask is None else is_placeholder & padding_mask
            if modalities.get(name) is not None:
                is_invalid = is_invalid & ~is_placeholder
            elif not is_sampled and any_true(own):
                what, token_id = f"placeholder tokens of images or videos without {name}", _selected(input_ids, own)[0]
                remedy = "Get both from the model's processor."
                raise LigerzooError(what, where="input_ids", got=token_id, expected=f"{name} as well", remedy=remedy)
        if any_true(is_invalid):
            what, got = "token ids outside the vocabulary", _selected(input_ids, is_invalid)[:8]
            expected = f"0 to {self.input_vocab_size - 1}"
            remedy = "Use the tokenizer of this model, and pad with an id of its vocabulary."
            raise LigerzooError(what, where="input_ids", got=got, expected=expected, remedy=remedy)

    def placeholder_masks(
        self, input_ids: Tensor, token_types: Tensor | None = None, segment_start: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns which tokens are placeholders, (B, T) bool, by the name of the input that they need.

        Args:
            input_ids: (B, T).
            token_types: (B, T) `mm_token_type_ids`, if given; unused where the ids imply them.
            segment_start: see `Context`.
        """
        return {name: input_ids == token_id for token_id, name in self.placeholders.items()}

    inputs_per_token: ClassVar[tuple[str, ...]] = ()
    """Per-token model inputs, (B, T, ...); `generate` pads and slices them like `input_ids`."""

    def new_cache(
        self, capacity: int | None = None, dtype: torch.dtype | None = None, *, exact: bool = False
    ) -> KVCache:
        """Returns an empty KV cache for `past_key_values`; see `ligerzoo.layers.Decoder.new_cache`."""
        return self.model.new_cache(capacity, dtype, exact=exact)


def _selected(input_ids: Tensor, mask: Tensor) -> list[int]:
    """Returns the token ids where the mask, (B, T) bool, is true."""
    ids, selected = innermost(torch.stack([input_ids, mask.to(input_ids.dtype)], -1)).unbind(-1)
    return ids[selected.bool()].tolist()


class LanguageModelWithHead(LanguageModel):
    """A decoder and a language-model head.

    Args:
        config: config of the architecture.
        model: token ids to final hidden states.
        lm_head: hidden states to logits or loss; None for one without options. Shares the weight of the embedding if
            the config ties them.
        parts: further modules, by attribute name.
    """

    def __init__(
        self, config: LanguageModelConfig, model: Decoder, lm_head: LMHead | None = None, **parts: nn.Module
    ) -> None:
        super().__init__(config, model)
        if lm_head is None:
            lm_head = LMHead(self.get_input_embeddings().weight.shape[1], config.vocab_size)
        self.lm_head = lm_head
        for name, part in parts.items():
            self.add_module(name, part)
        self.tie_weights()
        if config.initializer_range != INIT_STD:
            LanguageModel.init_weights(self)  # a subclass that overrides it has parameters yet to come

    def tie_weights(self) -> None:
        """Shares the weight of the embedding with the head, if the config ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight  # type: ignore[assignment]

    def get_output_embeddings(self) -> LMHead:
        """Returns the language-model head."""
        return self.lm_head

    def set_output_embeddings(self, value: LMHead) -> None:
        """Replaces the language-model head."""
        self.lm_head = value

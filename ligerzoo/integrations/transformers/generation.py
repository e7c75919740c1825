"""transformers' `generate` with our KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from ligerzoo.errors import LigerzooError
from ligerzoo.integrations.transformers.backbone import Backbone
from ligerzoo.integrations.transformers.cache import GenerationCache
from ligerzoo.integrations.transformers.versions import CACHE, GENERATE_OPTIONS, takes_cache, with_cache_as
from ligerzoo.models.causal_lm import CausalLM


class Generation(GenerationMixin):
    """transformers' `generate`, which also takes `generator=` and an empty list for `eos_token_id`.

    Attributes:
        model: the model without its head.
    """

    model: Backbone[CausalLM]

    @classmethod
    def can_generate(cls) -> bool:
        """True: transformers looks for its mixin among direct bases only."""
        return True

    def generate(
        self,
        inputs: Tensor | None = None,
        *args: object,
        generator: torch.Generator | None = None,
        **options: object,
    ) -> Any:
        """Continues the prompts as `generate` of transformers, with all its options.

        Args:
            inputs: (B, T) token ids; also as `input_ids`.
            args: further positional arguments of transformers' method.
            generator: a random number generator on the model's device.
            options: its keyword arguments. `eos_token_id=[]` generates up to the maximum length.

        Placeholder tokens of images and videos are never generated.
        """
        with _drawing_from(generator):
            return super().generate(inputs, *args, **with_cache_as(CACHE, options))

    def init_continuous_batching(self, *args: object, **options: object) -> NoReturn:
        """Called by transformers' methods that generate in batches of changing size, such as `generate_batch`.

        Raises:
            LigerzooError: always.
        """
        what = "continuous batching needs a paged cache of transformers"
        where = "generate_batch or cache_implementation='paged'"
        remedy = "model.to_zoo_model().generate_many also replaces finished rows."
        raise LigerzooError(what, where=where, expected="generate", remedy=remedy)

    def _prepare_special_tokens(self, generation_config: GenerationConfig, *args: object, **kwargs: object) -> None:
        if generation_config.eos_token_id == []:
            generation_config.eos_token_id = None  # in the copy that `generate` made
        if placeholders := self.backbone.zoo_model.placeholders:  # a sampled one would need an image
            generation_config.suppress_tokens = [*(generation_config.suppress_tokens or ()), *placeholders]
        super()._prepare_special_tokens(generation_config, *args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, object], *args: object, **kwargs: object
    ) -> None:
        if (name := generation_config.cache_implementation) not in (None, "dynamic", "hybrid"):
            what = "ligerzoo models have their own cache"
            raise LigerzooError(what, where="cache_implementation", got=repr(name), expected="None")
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = cache = self.backbone.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **inputs: Any
    ) -> tuple[Tensor | None, dict[str, object]]:
        model = self.backbone.zoo_model
        modalities = {name: inputs.pop(name) for name in model.modalities if inputs.get(name) is not None}
        if expand_size > 1 and modalities:
            if input_ids is None:
                raise LigerzooError("needed with images", where="input_ids", got=None, expected="(B, T) token ids")
            modalities = model.repeat_rows(modalities, expand_size, input_ids, inputs.get("attention_mask"))
        input_ids, inputs = super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **inputs)
        return input_ids, {**inputs, **modalities}

    @takes_cache
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: GenerationCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: object,
    ) -> dict[str, object]:
        """Prepares the inputs of a step, see transformers' method."""
        kwargs = {name: value for name, value in kwargs.items() if name not in GENERATE_OPTIONS}
        if past_key_values is not None and past_key_values.get_seq_length() > 0:
            if not past_key_values.caches.is_valid_for(next_sequence_length or input_ids.shape[1]):
                past_key_values.reset()  # longer sequences use other rotary frequencies: process all tokens again
                next_sequence_length = None
            elif not is_first_iteration:  # images are in the cache
                kwargs = {
                    name: value for name, value in kwargs.items() if name not in self.backbone.zoo_model.modalities
                }
        kwargs |= {CACHE: past_key_values, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, is_first_iteration=is_first_iteration, **kwargs
        )


@contextmanager
def _drawing_from(generator: torch.Generator | None) -> Iterator[None]:
    """Lets torch's default generator draw what `generator` would, and advances `generator` instead of it."""
    if generator is None:
        yield
        return
    device = generator.device
    if device.type == "cuda":
        default = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    else:
        default = torch.default_generator
    state = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(state)

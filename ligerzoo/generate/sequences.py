"""The tokens of a batch during generation, and the model's KV cache for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.generate.model import SupportsGenerate
from ligerzoo.generate.options import invalid, require, require_bool, type_name


class Sequences:
    """The tokens of a batch, and the model's KV cache for them.

    Args:
        model: the model.
        input_ids: (B, T) prompts.
        attention_mask: (B, T), or None for no padding.
        model_inputs: further model inputs for the prompts.
        max_new_tokens: largest number of new tokens.
        use_cache: whether to keep a KV cache.

    Attributes:
        prompts: (B, L) prompts, padded on the left to the longest of them.

    Raises:
        LigerzooError: the shapes are wrong, a prompt is empty, or the model refuses the inputs.
    """

    def __init__(
        self,
        model: SupportsGenerate,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        model_inputs: dict[str, Any],
        max_new_tokens: int,
        use_cache: bool,
    ) -> None:
        _check_prompts(model, input_ids, attention_mask)
        require_bool("use_cache", use_cache)
        self.prompts, self._padding_mask = align_prompts(input_ids.long(), attention_mask)
        for name in getattr(model, "inputs_per_token", ()):
            if (value := model_inputs.get(name)) is not None:
                expected = tuple(input_ids.shape)
                shape = tuple(value.shape) if isinstance(value, Tensor) else type_name(value)
                require(shape[:2] == expected, name, shape, f"(B, T, ...) with the shape {expected} of input_ids")
                model_inputs[name] = _align(value, attention_mask, self.prompts.shape[1])
        if hasattr(model, "check_inputs"):
            model.check_inputs(self.prompts, self._padding_mask, **model_inputs)
        # Without what `model.compile()` sets: each kind of step would be compiled, beyond torch's limit for a function.
        self._model: Callable[..., Any] = model._call_impl if isinstance(model, nn.Module) else model
        self._inputs, self._use_cache = model_inputs, use_cache
        self._cache: Any = None
        self._newest = self.prompts
        self._position_ids: Tensor | None = None
        # All tokens, with spare columns. A finished row keeps reading its own tokens: padding may have no embedding.
        self._tokens = self.prompts
        self._end = self.prompts.shape[1]
        self._limit = self._end + max_new_tokens

    @property
    def continuations(self) -> Tensor:
        """The tokens after the prompts, (B, new tokens)."""
        return self._tokens[:, self.prompts.shape[1] : self._end]

    def prefill(self) -> Tensor:
        """Runs the model on the prompts and returns the logits (B, V) of the next tokens."""
        return self._forward(self.prompts, self._inputs)

    def decode(self) -> Tensor:
        """Runs the model on the newest tokens and returns the logits (B, V) of the next ones.

        Recomputes all tokens without a cache, or if the cache cannot serve another token.
        """
        if not self._use_cache or (self._cache is not None and not self._cache.is_valid_for(1)):
            self._cache = None
            return self._forward(self._tokens[:, : self._end], self._inputs)
        return self._forward(self._newest, {})

    def truncate(self, new_tokens: int) -> None:
        """Drops all but the first tokens of each continuation."""
        self._end = self.prompts.shape[1] + new_tokens

    def release(self, rows: list[int]) -> None:
        """Frees what finished rows need, where this is possible. Their logits are undefined from then on."""

    def __enter__(self) -> Sequences:
        return self

    def __exit__(self, *exception: object) -> None:
        """Releases what the model runs need."""
        self._cache = None

    def append(self, tokens: Tensor) -> None:
        """Appends one token to each row, (B, 1)."""
        self._tokens[:, self._end : self._end + 1] = tokens
        self._newest = tokens
        self._end += 1

    def _forward(self, tokens: Tensor, inputs: dict[str, Any]) -> Tensor:
        self._reserve()
        mask, position_ids = None, None
        if self._padding_mask is not None and self._position_ids is not None:
            mask = self._padding_mask[:, : self._end]
            position_ids = self._position_ids[:, self._end - tokens.shape[1] : self._end]
        output = self._model(
            tokens,
            mask,
            position_ids,
            past_key_values=self._cache,
            use_cache=self._use_cache,
            logits_to_keep=1,
            **inputs,
        )
        self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _reserve(self) -> None:
        """Adds columns for new tokens if all are used, and computes their position ids."""
        if self._end < self._tokens.shape[1]:
            return
        columns = min(self._end, self._limit - self._end)  # doubling keeps the number of copies logarithmic
        self._tokens = F.pad(self._tokens, (0, columns))
        if self._padding_mask is not None:
            self._padding_mask = F.pad(self._padding_mask, (0, columns), value=True)
            self._position_ids = (self._padding_mask.cumsum(1) - 1).clamp(min=0)


def _check_prompts(model: SupportsGenerate, input_ids: object, attention_mask: object) -> None:
    """Raises LigerzooError unless the prompts are token ids on the model's device, and the mask is a tensor."""
    if not isinstance(input_ids, Tensor):
        if isinstance(input_ids, str):
            remedy = "Encode text first: generate(**tokenizer([text], return_tensors='pt'))."
        elif isinstance(input_ids, Mapping):
            remedy = "Pass the output of a tokenizer as generate(**inputs)."
        else:
            remedy = "Use torch.tensor([ids])."
        raise invalid("input_ids", type_name(input_ids), "a (B, T) tensor of integers", remedy)
    is_integer = not (input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool)
    require(is_integer, "input_ids", input_ids.dtype, "a (B, T) tensor of integers")
    is_mask = attention_mask is None or isinstance(attention_mask, Tensor)
    require(is_mask, "attention_mask", type_name(attention_mask), "a (B, T) tensor, or None for no padding")
    # Weights on a CPU may be offloaded, so that the model computes elsewhere.
    device = getattr(model, "device", None)
    is_same = device is None or device.type == "cpu" or device == input_ids.device
    remedy = "Use input_ids.to(model.device)."
    require(is_same, "input_ids", f"a tensor on {input_ids.device}", f"one on {device}, like the model", remedy)


def align_prompts(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Moves all padding to the left, and removes the columns that only contain padding.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), 1 for a token and 0 for padding; None for no padding.

    Returns:
        Token ids (B, L), where L is the length of the longest prompt, and a boolean padding mask (B, L), or None if all
        prompts have length L. Each padding id is replaced by the prompt's last token: padding may have no embedding.

    Raises:
        LigerzooError: a shape is wrong or a prompt is empty.
    """
    shape = tuple(input_ids.shape)
    remedy = "Use input_ids[None] for a single prompt." if len(shape) == 1 else None
    is_valid = len(shape) == 2 and 0 not in shape
    require(is_valid, "input_ids", shape, "(B, T) with at least one token in each row", remedy)
    if attention_mask is None:
        return input_ids, None
    mask_shape = tuple(attention_mask.shape)
    require(mask_shape == shape, "attention_mask", mask_shape, f"{shape}, the shape of input_ids")
    mask = attention_mask.to(device=input_ids.device, dtype=torch.bool)
    lengths = mask.sum(1).tolist()
    require(0 not in lengths, "attention_mask", "a row of padding only", "at least one token in each row")
    tokens, mask = (_align(x, mask, max(lengths)) for x in (input_ids, mask))
    return (tokens, None) if min(lengths) == max(lengths) else (tokens.where(mask, tokens[:, -1:]), mask)


def _align(x: Tensor, attention_mask: Tensor | None, length: int) -> Tensor:
    """Moves the padding of (B, T, ...) to the left and returns the last columns, (B, length, ...)."""
    if attention_mask is None:
        return x
    order = attention_mask.to(x.device, torch.bool).argsort(stable=True, dim=1)[:, -length:]
    return x[torch.arange(len(x), device=x.device)[:, None], order]

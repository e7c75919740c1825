"""Base class of causal language models: a decoder and a head, called with Hugging Face's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.checks import COUNT, check
from ligerzoo.errors import LigerzooError
from ligerzoo.layers import (
    Context,
    Decoder,
    KVCache,
    LMHead,
    load_balancing_loss,
    shifted_labels,
)
from ligerzoo.models.config import LanguageModelConfig
from ligerzoo.models.inputs import tokens_or_embeddings
from ligerzoo.models.labels import check_labels
from ligerzoo.models.language_model import LanguageModelWithHead
from ligerzoo.models.output import CausalLMOutput, layer_outputs
from ligerzoo.models.pretrained import Generative

Objective = Callable[..., tuple[Tensor | None, Any]]
"""Replacement for the cross entropy.

Called as `objective(hidden, weight, target, softcap=..., logit_scale=..., logits_budget=..., backend=...)` with hidden
states (B, T, H), the weight of the head (V, H) and target token ids (B, T); also with `bias=...` (V,) if the head has
one. Returns the loss, 0-d or None, and details of any type.
"""


class CausalLM(Generative, LanguageModelWithHead):
    """A decoder and a language-model head.

    A subclass takes a config, builds both parts and passes them to this constructor. All are on the `device` and in the
    `dtype` that the call gives, `Llama(config, device=..., dtype=...)`; see `ModelMeta`. Dropout is never applied, even
    if config.json sets one.

    Args:
        config: config of the architecture.
        model: token ids to final hidden states.
        lm_head: final hidden states to logits or loss; None for one without options. Shares the weight of the embedding
            if the config ties them.
        parts: further modules, by attribute name.

    Attributes:
        aux_loss_weight: factor of `aux_loss` when it is added to the loss: the config's `router_aux_loss_coef`, or that
            of the class, 0.001.
    """

    aux_loss_weight: float = 0.001

    def __init__(
        self, config: LanguageModelConfig, model: Decoder, lm_head: LMHead | None = None, **parts: nn.Module
    ) -> None:
        super().__init__(config, model, lm_head, **parts)
        self.aux_loss_weight = getattr(config, "router_aux_loss_coef", self.aux_loss_weight)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        objective: Objective | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        exact: bool = False,
        **modalities: Any,
    ) -> CausalLMOutput:
        """Computes the logits, or the loss if labels are given.

        Args:
            input_ids: (B, T) token ids, from 0 to `input_vocab_size` - 1. Checked on a CPU; on a GPU only if the
                environment variable LIGERZOO_DEBUG is 1, see `check_inputs`. Other ids are undefined behaviour.
            attention_mask: (B, S) padding mask, 1 for a token and 0 for padding, cached tokens included; or a
                (B, 1, T, S) attention mask.
            position_ids: (B or 1, T). Default: 0 to T - 1, plus the length of the cache. Without padding and cache, a
                new segment of a packed row starts wherever an id is not its predecessor plus 1. Segments do not attend
                to each other.
            inputs_embeds: (B, T, H) embeddings, instead of `input_ids`.
            labels: (B, T) token ids aligned with `input_ids`, which this method shifts; -100 is ignored. With left
                padding, set the label of the first token to -100, or padding predicts it.
            shift_labels: (B, T) token ids, already shifted; takes precedence over `labels`.
            past_key_values: KV cache of earlier tokens; extended in place.
            use_cache: create a cache if none was passed.
            logits_to_keep: number of last tokens to compute logits for, 0 for all; or a tensor of token indices, of
                shape (n,) for all rows or (B, n) for each row.
            num_items_in_batch: divisor of the summed loss. Default: the number of labels that are not ignored.
            cu_seqlens: (n + 1,) int, boundaries of n segments packed into a single row: 0, ..., at most T. The rest of
                the row is padding.
            objective: replaces the cross entropy, such as the losses of `ligerzoo.losses`; see `Objective`. It ignores
                `num_items_in_batch`.
            output_hidden_states: return the input of the first block and the output of each block, the last one after
                the final norm.
            output_attentions: return the attention probabilities of each layer. Attention then runs in plain torch,
                which materializes them.
            output_router_logits: return the router logits of each MoE layer and add the load-balancing loss to the
                loss. Default: the config's `output_router_logits`.
            exact: give packed documents, and texts with padding at their ends, the attention that they have alone, to
                the bit, as sampling with `exact=True` does. By default they have it where that is faster.
            modalities: further inputs of the architecture; see its `embed`.

        Raises:
            TypeError: an input has another type, such as a list instead of a tensor.
            ValueError: the inputs have inconsistent shapes or values, or are missing; or no layer has an output that
                was requested.
        """
        x = tokens_or_embeddings(input_ids, inputs_embeds)
        check_labels(labels, shift_labels, x.shape[:2], self.config.vocab_size, type(self))
        if objective is not None and labels is None and shift_labels is None:
            raise ValueError("labels: got None with an objective; expected (B, T) token ids, -100 for ignored tokens")
        hidden, context = self.run_decoder(
            x, attention_mask, position_ids, past_key_values=past_key_values, use_cache=use_cache,
            cu_seqlens=cu_seqlens, output_hidden_states=output_hidden_states, output_attentions=output_attentions,
            output_router_logits=output_router_logits, exact=exact, **modalities,
        )  # fmt: skip
        if labels is not None and shift_labels is None:
            shift_labels = shifted_labels(labels, context.segment_start)
        out = CausalLMOutput(past_key_values=context.cache, aux_loss=self.aux_loss(context), **layer_outputs(context))
        if shift_labels is None:
            out.logits = self.lm_head(_kept_tokens(context.parts.gather(hidden), logits_to_keep))
            return out
        if objective is None:
            out.loss = context.parts.loss(self.lm_head, hidden, shift_labels, num_items_in_batch)
        else:
            given = hidden, shift_labels, num_items_in_batch
            out.loss, out.details = context.parts.objective(self.lm_head, *given, objective)
        if out.aux_loss is not None and out.loss is not None:
            out.loss = out.loss + self.aux_loss_weight * out.aux_loss
        return out

    def aux_loss(self, context: Context) -> Tensor | None:
        """Returns the load-balancing loss over the tokens of this forward, padding excluded.

        None unless the router logits were asked for, by `config.output_router_logits` or the argument of `forward`, and
        a layer has some.

        Raises:
            LigerzooError: the number of experts of each token is not known, see `experts_per_token`.
        """
        if not (logits := context.router_logits):
            return None
        if (chosen := self.experts_per_token) is None:
            what, got = "unknown number of experts per token", "a config without it, and routers without one number"
            expected = "the field num_experts_per_tok of the config, or one num_experts_per_token of all routers"
            remedy = f"Add one to {type(self.config).__name__} or to the router, or override aux_loss."
            raise LigerzooError(what, where="output_router_logits", got=got, expected=expected, remedy=remedy)
        return load_balancing_loss(logits, chosen, context.call_padding_mask())

    @property
    def experts_per_token(self) -> int | None:
        """Number of experts that the routers select for each token; None if it is not known, or not the same for all.

        It is the config's `num_experts_per_tok`, else the `num_experts_per_token` of the routers.
        """
        selected: int | None = getattr(self.config, "num_experts_per_tok", None)
        if selected is not None:
            return selected
        name = "num_experts_per_token"
        found: set[int] = {getattr(module, name) for module in self.modules() if hasattr(module, name)}
        return found.pop() if len(found) == 1 else None

    def repeat_rows(
        self, modalities: Mapping[str, Any], repeats: int, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        """Repeats the inputs of each row of a batch, as beam search does: rows a, b become a, a, b, b.

        Architectures whose inputs have no row dimension, such as one list of the images of all rows, override it.

        Args:
            modalities: inputs of the architecture; see `embed`.
            repeats: number of copies of each row.
            input_ids: (B, T), before repetition.
            attention_mask: (B, T) padding mask.
        """
        return {
            name: value.repeat_interleave(repeats, 0) if isinstance(value, Tensor) else value
            for name, value in modalities.items()
        }


def _kept_tokens(hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Returns the hidden states (B, n, H) of the tokens to compute logits for, see `CausalLM.forward`."""
    if not isinstance(logits_to_keep, Tensor):
        check("CausalLM", COUNT, logits_to_keep=logits_to_keep)
        return hidden[:, -logits_to_keep:]
    if logits_to_keep.ndim < 2:
        return hidden[:, logits_to_keep]
    if len(logits_to_keep) != len(hidden):
        shape = tuple(logits_to_keep.shape)
        expected = f"(n,), or ({len(hidden)}, n): one row for each row"
        raise LigerzooError(f"logits_to_keep has shape {shape}", expected=expected)
    return hidden[torch.arange(len(hidden), device=hidden.device)[:, None], logits_to_keep]

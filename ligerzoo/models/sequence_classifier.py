"""Sequence classification, regression and reward models: a decoder or encoder, and logits of labels for each text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.errors import LigerzooError
from ligerzoo.layers import Decoder, KVCache
from ligerzoo.layers.pooling import Pooling
from ligerzoo.models.classifier import Classifier, Labels, ProblemType, check_label_indices, check_problem_type
from ligerzoo.models.encoder import EncoderConfig, EncoderModel
from ligerzoo.models.inputs import tokens_or_embeddings
from ligerzoo.models.output import SequenceClassifierOutput, layer_outputs
from ligerzoo.tensor_checks import require_tensor


class SequenceClassifier(Classifier):
    """A decoder of any architecture, and a linear layer without bias on the last token that is not padding.

    With one label it is a regression or reward model. Reads and writes transformers' checkpoints, such as those of
    `LlamaForSequenceClassification`. As there, the load-balancing loss of mixtures is not part of the loss. Those of
    encoders are `EncoderSequenceClassifier`s.

    Args:
        config: config of the architecture. Its `pad_token_id` marks padding.
        model: token ids to final hidden states.
        labels: what the model predicts.

    Attributes:
        score: final hidden states to logits.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **unknown: object,
    ) -> SequenceClassifierOutput:
        """Computes one row of logits per sequence, and the loss if labels are given.

        The last token of a sequence is the last one that is not `config.pad_token_id`, as in transformers, whatever the
        mask. With `inputs_embeds`, or without `pad_token_id`, it is the last one that the padding mask does not hide.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, S) padding mask or (B, 1, T, S) attention mask; see `CausalLM.forward`.
            position_ids: (B or 1, T); see `CausalLM.forward`. Segments that it marks are not separate sequences; use
                `cu_seqlens`.
            inputs_embeds: (B, T, H) embeddings, instead of `input_ids`.
            labels: for classification, (B,) label indices, -100 is ignored; for regression (B,) or (B, N) numbers; for
                multi-label classification (B, N) numbers from 0 to 1, with N labels. See `Labels.problem_type`.
            past_key_values: KV cache of earlier tokens; extended in place.
            use_cache: create a cache if none was passed.
            cu_seqlens: (n + 1,) int, boundaries of n sequences packed into a single row; B is then n in the results.
            output_hidden_states: see `CausalLM.forward`.
            output_attentions: see `CausalLM.forward`.
            unknown: refused, with the nearest name.

        Raises:
            LigerzooError: the end of a sequence in a batch is unknown, since there is neither a `pad_token_id` nor a
                padding mask; or the labels have the wrong shape; or an input is unknown.
            ValueError: the inputs have inconsistent shapes or values, or are missing.
        """
        self.refuse_unknown(unknown)
        x = tokens_or_embeddings(input_ids, inputs_embeds)
        last = last_tokens(x, attention_mask, getattr(self.config, "pad_token_id", None), cu_seqlens)
        hidden, context = self.run_decoder(
            x, attention_mask, position_ids, past_key_values=past_key_values, use_cache=use_cache,
            cu_seqlens=cu_seqlens, output_hidden_states=output_hidden_states, output_attentions=output_attentions,
            output_router_logits=False,
        )  # fmt: skip
        logits = self.score(context.parts.gather(hidden)[last])
        loss = None if labels is None else classification_loss(logits, labels, self.labels.problem_type)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, past_key_values=context.cache, **layer_outputs(context)
        )


class EncoderSequenceClassifier(EncoderModel, SequenceClassifier):
    """An encoder that pools the hidden states of each text, and a head.

    Reads and writes transformers' checkpoints, such as those of `BertForSequenceClassification`.

    Args:
        config: config of the encoder, which says how to pool.
        model: token ids to final hidden states.
        labels: what the model predicts.
        head: pooled hidden states to those from which `score` computes logits.
    """

    config: EncoderConfig

    def __init__(self, config: EncoderConfig, model: Decoder, labels: Labels, head: nn.Module) -> None:
        Classifier.__init__(self, config, model, labels, bias=True, head=head)
        self.pooling = Pooling((config.classifier_pooling,))

    def forward(  # type: ignore[override]  # other inputs
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **unknown: object,
    ) -> SequenceClassifierOutput:
        """Computes one row of logits per text, and the loss if labels are given.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: see `EncoderModel.encode`, as for the other inputs.
            position_ids: (B or 1, T).
            inputs_embeds: (B, T, H) embeddings, instead of `input_ids`.
            token_type_ids: (B, T).
            labels: see `SequenceClassifier.forward`.
            cu_seqlens: (n + 1,) int; B is then n in the results.
            output_hidden_states: see `CausalLM.forward`.
            output_attentions: see `CausalLM.forward`.
            unknown: refused, with the nearest name.

        Raises:
            LigerzooError: the labels have the wrong shape, or an input is unknown.
            ValueError: the inputs have inconsistent shapes or values, or are missing.
        """
        self.refuse_unknown(unknown)
        encoded = self.encode(
            tokens_or_embeddings(input_ids, inputs_embeds),
            attention_mask,
            position_ids,
            token_type_ids=token_type_ids,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        logits = self.score(self.head(self.pooling(*encoded.texts())))
        loss = None if labels is None else classification_loss(logits, labels, self.labels.problem_type)
        return SequenceClassifierOutput(loss=loss, logits=logits, **layer_outputs(encoded.context))


def last_tokens(
    x: Tensor, attention_mask: Tensor | None, pad_token_id: int | None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns where sequences end, as rows and columns of `x`, int64: the last token that is not padding, or the first.

    Args:
        x: (B, T) token ids or (B, T, H) embeddings.
        attention_mask: see `SequenceClassifier.forward`, as for the other arguments.
        pad_token_id: token that marks padding.
        cu_seqlens: boundaries of packed sequences.

    Raises:
        LigerzooError: it is unknown.
    """
    rows, tokens = x.shape[:2]
    row = torch.arange(rows, device=x.device)
    if cu_seqlens is not None:
        return row, cu_seqlens.to(x.device).long()[1:] - 1
    if pad_token_id is not None and not x.is_floating_point():
        is_token = x != pad_token_id
    elif attention_mask is not None and attention_mask.ndim == 2:
        is_token = attention_mask[:, -tokens:].to(x.device, torch.bool).expand(rows, -1)
    elif rows == 1 or x.is_floating_point():
        return row, torch.full_like(row, tokens - 1)
    else:
        what = f"{rows} sequences whose last token is unknown"
        expected = "a batch of one sequence, an attention_mask, or pad_token_id in the config"
        remedy = "Load with from_pretrained(..., pad_token_id=<the tokenizer's>)."
        raise LigerzooError(what, where="input_ids", expected=expected, remedy=remedy)
    index: Tensor = torch.arange(tokens, device=x.device) * is_token
    return row, index.argmax(-1)


def default_problem_type(num_labels: int, labels: Tensor) -> ProblemType:
    """Returns the problem type that the number of labels and their dtype imply; see `Labels`."""
    if num_labels == 1:
        return "regression"
    is_index = not labels.is_floating_point() and labels.dtype != torch.bool
    return "single_label_classification" if is_index else "multi_label_classification"


def classification_loss(logits: Tensor, labels: Tensor, problem_type: ProblemType | None = None) -> Tensor:
    """Computes the mean loss of transformers' sequence classifiers in fp32.

    Args:
        logits: (B, N).
        labels: see `SequenceClassifier.forward`.
        problem_type: see `Labels`.

    Returns:
        0-d fp32.

    Raises:
        ConfigError: the problem type is unknown, or that of several labels for a single one.
        TypeError: the labels are not a tensor.
        LigerzooError: the labels have the wrong shape or dtype, or (checked on a CPU only) no label has such an index.
    """
    require_tensor("SequenceClassifier", "labels", labels)
    rows, num_labels = logits.shape
    labels, logits = labels.to(logits.device), logits.float()
    problem_type = problem_type or default_problem_type(num_labels, labels)
    check_problem_type(problem_type, num_labels)
    is_single = problem_type == "single_label_classification"
    if labels.numel() != (rows if is_single else logits.numel()) or (is_single and labels.is_floating_point()):
        what = f"labels do not fit {problem_type} with {num_labels} labels"
        got = f"{tuple(labels.shape)} {labels.dtype}"
        expected = f"({rows},) label indices" if is_single else f"{tuple(logits.shape)} numbers"
        remedy = None if is_single or num_labels == 1 else "Integers choose one label for each sequence."
        raise LigerzooError(what, where="labels", got=got, expected=expected, remedy=remedy)
    if is_single:
        check_label_indices(labels, num_labels)
        return F.cross_entropy(logits, labels.view(-1).long())
    labels = labels.view_as(logits).float()
    if problem_type == "regression":
        return F.mse_loss(logits, labels)
    return F.binary_cross_entropy_with_logits(logits, labels)

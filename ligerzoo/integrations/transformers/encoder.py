"""Encoders as `PreTrainedModel` of transformers: with a head for masked tokens, or that of a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import (
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from ligerzoo.convert.tensor_slices import shapes_of
from ligerzoo.integrations.transformers.backbone import (
    EncoderBackbone,
    EncoderOutput,
    Model,
    replace_child,
    sharing_weights,
)
from ligerzoo.integrations.transformers.classifier import WrappedClassifier
from ligerzoo.integrations.transformers.head import Head, HeadParts, LogitOptions, head_modules
from ligerzoo.integrations.transformers.model import WrappedModel
from ligerzoo.layers.input_properties import reads_values
from ligerzoo.models.encoder import Encoded
from ligerzoo.models.inputs import tokens_or_embeddings
from ligerzoo.models.labels import check_labels
from ligerzoo.models.masked_lm import MaskedLM
from ligerzoo.models.sequence_classifier import EncoderSequenceClassifier, classification_loss, default_problem_type
from ligerzoo.models.token_classifier import EncoderTokenClassifier, check_token_labels, token_loss


class WrappedEncoder(WrappedModel[Model]):
    """An encoder of ligerzoo as a `PreTrainedModel`; see `wrap`. Subclasses add the outputs of their head.

    Each architecture has a subclass with the name of its class in transformers.

    Args:
        model: the model. Its parameters are shared.
        fuses: see `Backbone`.
    """

    backbone_class = EncoderBackbone

    def __init__(self, model: Model, *, fuses: bool = True) -> None:
        super().__init__(model, fuses=fuses)
        heads = head_modules(self.head_parts(model), self.backbone.names, self.base_model_prefix)
        self._head_paths = []
        for path, head in heads:
            parent, _, name = path.rpartition(".")
            self.get_submodule(parent).add_module(name, head)
            self._head_paths.append(path)

    def head_parts(self, model: Model) -> dict[str, nn.Module]:
        """Returns copies of the modules of the head, by their names in the model."""
        raise NotImplementedError

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        inputs: Mapping[str, Any],
    ) -> tuple[Encoded, dict[str, object]]:
        """Returns final hidden states without padding, and what layers returned, by the names of fields of outputs."""
        body: EncoderOutput = self.backbone(
            input_ids, attention_mask, position_ids, inputs_embeds, keep_packed=True, **inputs
        )
        assert body.encoded is not None
        return body.encoded, {"hidden_states": body.hidden_states, "attentions": body.attentions}

    def run_head(self, x: Tensor, *arguments: object) -> Tensor:
        """(..., H) -> what the last module of the head returns, which gets the other arguments too."""
        *firsts, last = map(self.get_submodule, self._head_paths)
        for module in firsts:
            x = module(x)
        return last(x, *arguments)


class WrappedMaskedLM(WrappedEncoder[MaskedLM]):
    """An encoder with a head for masked tokens; see `WrappedEncoder`.

    Attributes:
        head_options: the loss of the head.
    """

    accepts_loss_kwargs = True

    def __init__(self, model: MaskedLM, *, fuses: bool = True) -> None:
        super().__init__(model, fuses=fuses)
        self.loss_type = "ForMaskedLM"
        self.head_options = LogitOptions(model.lm_head)
        shapes = shapes_of(model.state_dict())
        names = {
            name: next(self.backbone.names.slices_of(name, shapes)).stored_name
            for name in ("lm_head.weight", "lm_head.bias", "model.embed_tokens.weight")
            if name in shapes
        }
        self._output_embeddings = names["lm_head.weight"].removesuffix(".weight")
        self._tied_weights_keys = {}
        if model.config.tie_word_embeddings:
            self._tied_weights_keys[names["lm_head.weight"]] = names["model.embed_tokens.weight"]
        self._bias, own_bias = names.get("lm_head.bias"), f"{self._output_embeddings}.bias"
        if self._bias not in (None, own_bias):  # BERT's head has it under a second name
            self._tied_weights_keys[own_bias] = self._bias
        self._share_bias()
        self._keys_to_ignore_on_save = [*self._tied_weights_keys]
        self.post_init()
        self.train(model.training)

    def head_parts(self, model: MaskedLM) -> dict[str, nn.Module]:
        """See `WrappedEncoder.head_parts`."""
        return {"head": sharing_weights(model.head), "lm_head": Head(model.lm_head)}

    def get_output_embeddings(self) -> nn.Module:
        """Returns the linear layer of the head."""
        return self.get_submodule(self._output_embeddings)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the linear layer of the head."""
        replace_child(self, self.get_output_embeddings(), new_embeddings)
        self._share_bias()

    def _share_bias(self) -> None:
        """Gives the bias of the linear layer its second name, if it has one."""
        if self._bias in self._tied_weights_keys.values():
            parent, _, name = str(self._bias).rpartition(".")
            self.get_submodule(parent).register_parameter(name, self.get_output_embeddings().bias)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> MaskedLMOutput | tuple[object, ...]:
        """Computes the logits, the loss if labels are given, or both; in training with labels the loss only.

        Args:
            input_ids: (B, T) token ids, some of which are the tokenizer's mask token.
            attention_mask: see `EncoderBackbone.forward`, as for the arguments that are not listed here.
            labels: (B, T) the original token of each token to predict, and -100 for the others.
            inputs: `num_items_in_batch`; and `token_type_ids`, if the encoder has types.
        """
        num_items_in_batch = inputs.pop("num_items_in_batch", None)
        shape, zoo_model = tokens_or_embeddings(input_ids, inputs_embeds).shape[:2], self.backbone.zoo_model
        check_labels(labels, None, shape, zoo_model.config.vocab_size, type(self), shifts=False)
        encoded, layers = self.encode(input_ids, attention_mask, position_ids, inputs_embeds, inputs)
        loss = logits = None
        if labels is None or not self.training:
            logits = encoded.rows.unpack(self.head_options.logits(self.run_head(encoded.hidden)))
        if labels is not None:
            loss = self._loss(encoded.hidden, encoded.labels(labels), num_items_in_batch)
        output = MaskedLMOutput(loss=loss, logits=logits, **layers)
        return output.to_tuple() if return_dict is False else output

    def _loss(self, hidden: Tensor, targets: Tensor, num_items: int | Tensor | None) -> Tensor:
        if reads_values() and not targets.is_meta:  # the head computes tokens with labels only; a host sync
            is_predicted = targets != -100
            hidden, targets = hidden[is_predicted], targets[is_predicted]
        last, head = self.get_submodule(self._head_paths[-1]), self.get_output_embeddings()
        if isinstance(last, Head | HeadParts) and isinstance(head, Head) and "forward" not in vars(head):
            return self.run_head(hidden, targets, num_items)
        # Adapters and hooks replace the head or its forward: the loss must use what they compute.
        return self.head_options.loss(self.run_head(hidden), targets, num_items)


class WrappedEncoderSequenceClassifier(
    WrappedEncoder[EncoderSequenceClassifier], WrappedClassifier[EncoderSequenceClassifier]
):
    """A sequence classifier of ligerzoo over an encoder; see `WrappedEncoder`."""

    def __init__(self, model: EncoderSequenceClassifier, *, fuses: bool = True) -> None:
        super().__init__(model, fuses=fuses)
        self.num_labels = model.num_labels
        self.pooling = sharing_weights(model.pooling)
        self.post_init()
        self.train(model.training)

    def head_parts(self, model: EncoderSequenceClassifier) -> dict[str, nn.Module]:
        """See `WrappedEncoder.head_parts`."""
        return {"head": sharing_weights(model.head), "score": sharing_weights(model.score)}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutput | tuple[object, ...]:
        """Computes one row of logits per text, and the loss if labels are given.

        Reads `problem_type` of the config. As in transformers, the first labels set it if it is None.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: see `EncoderBackbone.forward`, as for the arguments that are not listed here.
            labels: indices or numbers, by `problem_type`.
            inputs: `token_type_ids`, if the encoder has types; and `cu_seqlens` or `cu_seq_lens_q`.
        """
        encoded, layers = self.encode(input_ids, attention_mask, position_ids, inputs_embeds, inputs)
        logits, loss = self.run_head(self.pooling(*encoded.texts())), None
        if labels is not None:
            if self.config.problem_type is None:
                self.config.problem_type = default_problem_type(logits.shape[1], labels)
            loss = classification_loss(logits, labels, self.config.problem_type)
        output = SequenceClassifierOutput(loss=loss, logits=logits, **layers)
        return output.to_tuple() if return_dict is False else output


class WrappedEncoderTokenClassifier(WrappedEncoder[EncoderTokenClassifier], WrappedClassifier[EncoderTokenClassifier]):
    """A token classifier of ligerzoo over an encoder; see `WrappedEncoder`."""

    accepts_loss_kwargs = True

    def __init__(self, model: EncoderTokenClassifier, *, fuses: bool = True) -> None:
        super().__init__(model, fuses=fuses)
        self.num_labels = model.num_labels
        self.post_init()
        self.train(model.training)

    def head_parts(self, model: EncoderTokenClassifier) -> dict[str, nn.Module]:
        """See `WrappedEncoder.head_parts`."""
        return {"head": sharing_weights(model.head), "score": sharing_weights(model.score)}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> TokenClassifierOutput | tuple[object, ...]:
        """Computes the logits of each token, and the loss if labels are given. Logits of padding are zeros.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: see `EncoderBackbone.forward`, as for the arguments that are not listed here.
            labels: (B, T) label index of each token, and -100 for ignored ones. Those of padding are ignored.
            inputs: `num_items_in_batch`; and `token_type_ids`, if the encoder has types.
        """
        num_items_in_batch = inputs.pop("num_items_in_batch", None)
        check_token_labels(type(self), labels, tokens_or_embeddings(input_ids, inputs_embeds), self.num_labels)
        encoded, layers = self.encode(input_ids, attention_mask, position_ids, inputs_embeds, inputs)
        logits = self.run_head(encoded.hidden)
        loss = None if labels is None else token_loss(logits, encoded.labels(labels), num_items_in_batch)
        output = TokenClassifierOutput(loss=loss, logits=encoded.rows.unpack(logits), **layers)
        return output.to_tuple() if return_dict is False else output

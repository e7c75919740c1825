"""Converter for RoBERTa checkpoints."""

from ligerzoo.convert.bert import BertArchitecture, encoder_architecture

_HEAD = {"lm_head.dense": "head.dense", "lm_head.layer_norm": "head.norm", "lm_head.bias": "lm_head.bias"}


def roberta(model_type: str, hf_class: str) -> BertArchitecture:
    """Returns the architecture of encoders with RoBERTa's names."""
    return encoder_architecture(model_type, hf_class, "roberta", _HEAD, "lm_head.decoder")


ARCHITECTURE = roberta("roberta", "RobertaForMaskedLM")

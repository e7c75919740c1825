"""Converter for RoBERTa checkpoints."""

from ligerzoo.convert.bert import bert_architecture
from ligerzoo.convert.encoder import EncoderArchitecture

_HEAD = {"lm_head.dense": "head.dense", "lm_head.layer_norm": "head.norm", "lm_head.bias": "lm_head.bias"}
_TEXT_HEAD = {"classifier.dense": "head.dense", "classifier.out_proj": "score"}


def roberta(model_type: str, hf_class: str) -> EncoderArchitecture:
    """Returns the architecture of encoders with RoBERTa's names."""
    return bert_architecture(model_type, hf_class, "roberta", _HEAD, "lm_head.decoder", _TEXT_HEAD)


ARCHITECTURE = roberta("roberta", "RobertaForMaskedLM")

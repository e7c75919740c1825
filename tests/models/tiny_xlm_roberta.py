"""Tiny XLM-RoBERTa checkpoints, with the configs and files of RoBERTa's."""

from dataclasses import replace

from tests.models.tiny import Tiny
from tests.models.tiny_roberta import CHECKPOINTS as ROBERTA


def multilingual(row: Tiny) -> Tiny:
    config = {**row.config, "architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta"}
    return replace(row, name=f"xlm-{row.name}", config=config)


CHECKPOINTS = [multilingual(row) for row in ROBERTA]

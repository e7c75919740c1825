"""Converter for XLM-RoBERTa checkpoints."""

from ligerzoo.convert.roberta import roberta

ARCHITECTURE = roberta("xlm-roberta", "XLMRobertaForMaskedLM")

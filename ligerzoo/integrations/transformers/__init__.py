"""Ligerzoo models in transformers: `wrap` and auto classes. Needs transformers, which `[integrations]` installs."""

from ligerzoo.exports import renamed
from ligerzoo.integrations.transformers.wrapping import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    wrap,
)

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "wrap",
]

__getattr__ = renamed(__name__)

"""Ligerzoo models in transformers: `wrap` and auto classes. Needs transformers, which `[integrations]` installs."""

from ligerzoo.integrations.transformers.wrapping import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    wrap,
)

__all__ = ["AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSequenceClassification", "wrap"]

"""Ligerzoo models in transformers: `wrap` and auto classes. Needs transformers, which `[integrations]` installs."""

from ligerzoo.integrations.transformers.auto import AutoModelForCausalLM as AutoModelForCausalLM
from ligerzoo.integrations.transformers.auto import AutoModelForImageTextToText as AutoModelForImageTextToText
from ligerzoo.integrations.transformers.auto import (
    AutoModelForSequenceClassification as AutoModelForSequenceClassification,
)
from ligerzoo.integrations.transformers.wrapping import wrap as wrap

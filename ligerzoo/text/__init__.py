"""Tokenizers, chat templates, incremental decoding and conversations. Knows no model."""

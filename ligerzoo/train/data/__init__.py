"""Training data: files of text, conversations, preferences or tokens as batches of packed rows.

    stream = open_data("chats.jsonl", "auto", tokenizer, seq_length=2048)
    batches = PackedBatches(stream, batch_size=8, seq_length=2048, pad_token_id=0)
    for batch in batches:
        loss = model(**batch.inputs).loss

A stream yields samples: sequences of tokens, with labels for those that are trained. Batches pack samples into rows.
Both have `state_dict` and `load_state_dict`, which continue from a position exactly.
"""

from ligerzoo.train.data.batches import Batch, PackedBatches, PaddedBatches
from ligerzoo.train.data.fields import Kind
from ligerzoo.train.data.open import open_data
from ligerzoo.train.data.read_all import DataReport, check_data, write_tokens
from ligerzoo.train.data.samples import (
    LabelledSample,
    PairSample,
    PreferenceSample,
    PromptSample,
    Sample,
    Source,
    format_sample,
)
from ligerzoo.train.data.stream import SampleStream

__all__ = [
    "Batch",
    "DataReport",
    "Kind",
    "LabelledSample",
    "PackedBatches",
    "PaddedBatches",
    "PairSample",
    "PreferenceSample",
    "PromptSample",
    "Sample",
    "SampleStream",
    "Source",
    "check_data",
    "format_sample",
    "open_data",
    "write_tokens",
]

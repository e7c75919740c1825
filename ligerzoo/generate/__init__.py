"""Text generation: prompts in, prompts with their continuations out.

    decode_loop    `generate`: prefill, then one decode step per token until all rows have finished
    step           one decode step
    captured       decode steps that run as captured CUDA graphs
    prompts        the prompts: token ids or embeddings, aligned for the model
    sequences      the tokens of a batch and the model's KV cache
    sampling       logits -> the next token
    stopping       end-of-sequence tokens, stop strings, criteria, padding of finished rows
    states         reads on the host which rows have finished
    streaming      tokens and text during generation
    result         the result with log-probabilities and reasons of finishing
    conversation_cache  reuses the KV cache in a conversation
    options        refuses unknown and invalid options

Shapes: B prompts, T tokens of the padded prompts, V tokens of the vocabulary.
"""

from ligerzoo.generate.captured import release_decode_graphs
from ligerzoo.generate.conversation_cache import ConversationCache
from ligerzoo.generate.decode_loop import generate
from ligerzoo.generate.model import SupportsGenerate
from ligerzoo.generate.prompts import align_prompts
from ligerzoo.generate.result import GenerateOutput
from ligerzoo.generate.sampling import (
    SamplingOptions,
    apply_temperature,
    filter_logits,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    sample,
)
from ligerzoo.generate.step import DecodeStep
from ligerzoo.generate.stopping import StoppingCriterion, StopStrings, SupportsDecode
from ligerzoo.generate.streaming import Streamer, SupportsPush, SupportsStream, TextStreamer

__all__ = [
    "ConversationCache",
    "DecodeStep",
    "GenerateOutput",
    "SamplingOptions",
    "StopStrings",
    "StoppingCriterion",
    "Streamer",
    "SupportsDecode",
    "SupportsGenerate",
    "SupportsPush",
    "SupportsStream",
    "TextStreamer",
    "align_prompts",
    "apply_temperature",
    "filter_logits",
    "generate",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "penalize_repetition",
    "release_decode_graphs",
    "sample",
]

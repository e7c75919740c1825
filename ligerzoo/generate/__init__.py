"""Text generation: prompts in, prompts with their continuations out.

    decode_loop    `generate`: prefill, then one decode step per token until all rows have finished
    step           one decode step
    speculative    speculative decoding: one forward verifies several draft tokens
    drafts         draft tokens: looked up in the text so far, or of a smaller model
    draft_options  the options of speculative decoding
    prompts        the prompts: token ids or embeddings, aligned for the model
    sequences      the tokens of a batch and the model's KV cache
    states         reads on the host which rows have finished
    slot_sequences sequences in a KV cache of fixed size, for captured decode steps
    slots          rows of such a cache, each with one sequence
    decode_batch   a decode step over such a cache
    cache_memory   how many tokens fit into the memory of a GPU
    captured       decode steps that run as captured CUDA graphs
    transfer       copies from the host to the device
    logps          log-probabilities of new tokens and of prompts
    many           `generate_many`: more prompts than fit into a batch
    scheduler      continuous batching: prompts take the rows of those that have finished
    request        a prompt with its options, for the scheduler
    sampling       logits -> the next token of each row: seeds, filters and log-probabilities
    sampling_options the options of sampling
    processors     repetition penalty, banned sequences and n-grams, functions of the user
    filters        functions of logits: temperature, top-k, top-p, min-p
    stopping       end-of-sequence tokens, stop strings, criteria, padding of finished rows
    streaming      tokens and text during generation
    result         the result with log-probabilities and reasons of finishing
    conversation_cache  reuses the KV cache in a conversation
    options        refuses unknown and invalid options

Shapes: B prompts, T tokens of the padded prompts, V tokens of the vocabulary.
"""

from ligerzoo.generate.captured import release_decode_graphs
from ligerzoo.generate.conversation_cache import ConversationCache
from ligerzoo.generate.decode_loop import generate
from ligerzoo.generate.draft_options import DraftOptions
from ligerzoo.generate.filters import (
    apply_temperature,
    filter_logits,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)
from ligerzoo.generate.many import Completion, generate_many
from ligerzoo.generate.model import SupportsGenerate
from ligerzoo.generate.result import GenerateOutput
from ligerzoo.generate.sampling import Sampler, draw_seeds
from ligerzoo.generate.sampling_options import LogitsProcessor, SamplingOptions
from ligerzoo.generate.scheduler import BrokenLogitsError, Scheduler, Update
from ligerzoo.generate.step import DecodeStep
from ligerzoo.generate.stopping import StoppingCriterion, StopStrings, SupportsDecode
from ligerzoo.generate.streaming import Streamer, SupportsPush, SupportsStream, TextStreamer

__all__ = [
    "BrokenLogitsError",
    "Completion",
    "ConversationCache",
    "DecodeStep",
    "DraftOptions",
    "GenerateOutput",
    "LogitsProcessor",
    "Sampler",
    "SamplingOptions",
    "Scheduler",
    "StopStrings",
    "StoppingCriterion",
    "Streamer",
    "SupportsDecode",
    "SupportsGenerate",
    "SupportsPush",
    "SupportsStream",
    "TextStreamer",
    "Update",
    "apply_temperature",
    "draw_seeds",
    "filter_logits",
    "generate",
    "generate_many",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "penalize_repetition",
    "release_decode_graphs",
]

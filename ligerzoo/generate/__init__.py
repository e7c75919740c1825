"""Text generation: prompts in, prompts with their continuations out.

    api          `generate` and `generate_many`, what they return, and the KV cache of a conversation
    engine       the loop: logits, a token of each row, what the host reads; a batch that starts together, and its end
    scheduler    the engine of a queue: requests take the rows of those that have finished
    speculative  the engine that verifies draft tokens: looked up in the text so far, or of a smaller model
    prompts      the prompts of `generate`: token ids or embeddings, aligned for the model; requests of the scheduler
    rows         the tokens of a batch and the model's KV cache, padded or in slots
    slots        rows of a KV cache of fixed size, each with one sequence
    graphs       prefills and decode steps over such a cache, as captured CUDA graphs
    sampling     logits -> the next token of each row: seeds, filters and log-probabilities
    processors   repetition penalty, banned sequences and n-grams, constraints, functions of the user
    grammar      constraints: JSON schemas and other grammars, by llguidance
    streaming    the text of new tokens: printed, and searched for stop strings
    options      options of calls: their values, generation_config.json, refusals, those of other libraries

Shapes: B prompts, T tokens of the padded prompts, V tokens of the vocabulary.
"""

from ligerzoo.exports import renamed
from ligerzoo.generate.api import Completion, ConversationCache, GenerateOutput, generate, generate_many
from ligerzoo.generate.engine import Engine, StoppingCriterion
from ligerzoo.generate.grammar import Grammar
from ligerzoo.generate.graphs import release_decode_graphs
from ligerzoo.generate.options import SupportsGenerate
from ligerzoo.generate.processors import penalize_repetition
from ligerzoo.generate.prompts import Request
from ligerzoo.generate.sampling import (
    BrokenLogitsError,
    Sampler,
    apply_temperature,
    draw_seeds,
    filter_logits,
    keep_min_p,
    keep_top_k,
    keep_top_p,
)
from ligerzoo.generate.scheduler import Scheduler, Update
from ligerzoo.generate.speculative import DraftOptions
from ligerzoo.generate.streaming import (
    StopStrings,
    Streamer,
    SupportsDecode,
    SupportsPush,
    SupportsStream,
    TextStreamer,
)
from ligerzoo.sampling_options import Constraint, ConstraintState, LogitsProcessor, SamplingOptions

__all__ = [
    "BrokenLogitsError",
    "Completion",
    "Constraint",
    "ConstraintState",
    "ConversationCache",
    "DraftOptions",
    "Engine",
    "GenerateOutput",
    "Grammar",
    "LogitsProcessor",
    "Request",
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

__getattr__ = renamed(__name__, {"DecodeStep": "Engine"})

"""Options of transformers' `generate` on wrapped models: that the model must not see, or that are refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)

from ligerzoo.errors import LigerzooError  # noqa: E402
from tests.covering import long_cases  # noqa: E402
from tests.integrations.clients import TOKENS, ours, theirs, tokenizer  # noqa: E402

# transformers reads config.json of version 4.
pytestmark = pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(9) >= torch.tensor([[0], [3]])).long()
COMMON: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [90, 91], "pad_token_id": 0}


class Streamer:
    """Collects what `generate` streams."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


class Preferred(LogitsProcessor):  # type: ignore[misc]
    """Makes a token likely."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 3.0 * (torch.arange(scores.shape[-1]) == 7)


def backwards() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with the same words under other ids."""
    words = [name for name in TOKENS if not name.startswith("<")]
    ids = {**TOKENS, **dict(zip(words, [TOKENS[name] for name in reversed(words)], strict=True))}
    reversed_words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    reversed_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=reversed_words, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def resized(model: Any) -> Any:
    """Returns a copy of the model with another vocabulary."""
    assistant = copy.deepcopy(model)
    assistant.resize_token_embeddings(104, mean_resizing=False)
    return assistant


def decode_greedily(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    steps: int = 2, **inputs: Any,
) -> Tensor:  # fmt: skip
    """A decoding loop of a user."""
    for _ in range(steps):
        inputs |= {"attention_mask": None, "position_ids": None}
        prepared = model.prepare_inputs_for_generation(input_ids, **inputs)
        scores = logits_processor(input_ids, model(**prepared).logits[:, -1])
        input_ids = torch.cat([input_ids, scores.argmax(-1, keepdim=True)], 1)
    return input_ids


OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "stop_strings": lambda model: {"stop_strings": ["w7", "w30", "w2 w"], "tokenizer": tokenizer()},
    "stop strings of beams": lambda model: {"stop_strings": "w3", "tokenizer": tokenizer(), "num_beams": 2},
    "tokenizer": lambda model: {"tokenizer": tokenizer()},
    "token_healing": lambda model: {"token_healing": True, "tokenizer": tokenizer()},
    "streamer": lambda model: {"streamer": Streamer(), "rows": 1},
    "logits_processor": lambda model: {"logits_processor": LogitsProcessorList([Preferred()])},
    "stopping_criteria": lambda model: {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1000.0)])},
    "prefix_allowed_tokens_fn": lambda model: {
        "prefix_allowed_tokens_fn": lambda row, ids: [5, 6, 7 + row], "num_beams": 2
    },
    "synced_gpus": lambda model: {"synced_gpus": False},
    "assistant_model": lambda model: {"assistant_model": copy.deepcopy(model), "rows": 1},
    "assistant_tokenizer": lambda model: {
        "assistant_model": resized(model), "tokenizer": tokenizer(), "assistant_tokenizer": backwards(), "rows": 1
    },
    "assistant_early_exit": lambda model: {"assistant_early_exit": 1, "rows": 1},
    "negative_prompt_ids": lambda model: {
        "guidance_scale": 1.7, "negative_prompt_ids": IDS[:, 2:5], "negative_prompt_attention_mask": MASK[:, 4:7]
    },
    "guidance without a cache": lambda model: {"guidance_scale": 1.7, "use_cache": False},
    "custom_generate": lambda model: {"custom_generate": decode_greedily, "steps": 4, "use_cache": False},
    "inputs_embeds": lambda model: {"inputs_embeds": 1.5 * model.get_input_embeddings()(IDS)},
    "prefill_chunk_size": lambda model: {"prefill_chunk_size": 4, "rows": 1},
    "cache_implementation": lambda model: {"cache_implementation": "dynamic"},
    "outputs": lambda model: {
        "return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True, "output_logits": True
    },
}  # fmt: skip


def generated(model: Any, rows: int = 2, **options: Any) -> tuple[Tensor, list[str], list[int]]:
    """Returns the tokens, the names of further outputs, and what was streamed."""
    out = model.generate(IDS[:rows], attention_mask=MASK[:rows], **COMMON, **options)
    names, tokens = ([], out) if isinstance(out, Tensor) else (list(out), out.sequences)
    return tokens, names, options["streamer"].tokens if options.get("streamer") else []


@pytest.mark.filterwarnings("ignore:.*assistant.*:UserWarning")
@pytest.mark.parametrize("case", long_cases({"option": tuple(OPTIONS), "model_type": ("llama", "phi3")}), ids=str)
def test_options(case: dict[str, str], checkpoints: dict[str, Path]) -> None:
    found = []
    for load in (ours, theirs):
        model = load(checkpoints[case["model_type"]]).eval()
        found.append(generated(model, **OPTIONS[case["option"]](model)))
    (tokens, *got), (expected, *others) = found
    assert torch.equal(tokens, expected)
    assert got == others


def test_all_options_together(checkpoints: dict[str, Path]) -> None:
    names = ("stop_strings", "logits_processor", "stopping_criteria", "synced_gpus", "negative_prompt_ids", "outputs")
    found = []
    for load in (ours, theirs):
        model, options = load(checkpoints["llama"]).eval(), {}
        for name in names:
            options |= OPTIONS[name](model)
        found.append(generated(model, streamer=None, trust_remote_code=False, **options))
    assert torch.equal(found[0][0], found[1][0])


def test_misspelt_options_are_refused(checkpoints: dict[str, Path]) -> None:
    model = ours(checkpoints["llama"])
    for option in ("temprature", "stop_string", "tokeniser", "assistant", "caches"):
        with pytest.raises(ValueError, match=f"not used by the model.*'{option}'"):
            model.generate(IDS, tokenizer=tokenizer(), **{option: 1}, **COMMON)
    with pytest.raises(LigerzooError, match="tokenizer: not an input of Llama"):
        model(IDS, tokenizer=tokenizer())


@pytest.mark.parametrize(
    "name", ["static", "offloaded", "offloaded_static", "quantized", "sliding_window", "hybrid_chunked", "paged"]
)
def test_caches_of_transformers_are_refused(name: str, checkpoints: dict[str, Path]) -> None:
    model = ours(checkpoints["llama"])
    with pytest.raises(LigerzooError, match="cache_implementation"):
        model.generate(IDS, cache_implementation=name, **COMMON)
    with pytest.raises(LigerzooError, match="continuous batching"):
        model.generate_batch(IDS.tolist())


@pytest.mark.parametrize("option", [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "high"}], ids=str)
def test_removed_modes_need_code_from_the_hub(option: dict[str, Any], checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="requires `trust_remote_code=True`"):
        ours(checkpoints["llama"]).generate(IDS, **option, **COMMON)

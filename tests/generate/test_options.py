"""Unknown and invalid options of `generate` are refused by name."""

import inspect
import math
import re
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import DraftOptions, SamplingOptions, Scheduler, TextStreamer, generate
from ligerzoo.generate.options import REMEDIES
from ligerzoo.models import Llama, LlamaConfig
from tests.generate.models import PROMPT, TINY, Letters, Scripted, StreamingLetters, tiny_llama

OPTIONS = {
    name: parameter
    for function in (generate, SamplingOptions, DraftOptions)
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": -1}, "max_new_tokens: .*got -1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: .*got 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens: .*got True"),
        ({"max_new_tokens": None}, "max_new_tokens: .*expected an integer"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: .*got 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty: .*got nan"),
        (
            {"repetition_penalty": 1e39},
            r"repetition_penalty: .*got 1e\+39; expected a number from 1e-30, finite in fp32",
        ),
        ({"min_new_tokens": -1}, "min_new_tokens: .*got -1; expected an integer, 0 or more, or None"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size: .*got 1.5"),
        ({"bad_words_ids": [1, 2]}, r"bad_words_ids: .*got \[1, 2\]; expected a list of lists of token ids"),
        ({"bad_words_ids": [[]]}, r"bad_words_ids: .*got \[\[\]\]; .*none of them empty"),
        ({"bad_words_ids": [[5], [7, 97]]}, "bad_words_ids: .*got 97; expected token ids below 97"),
        ({"logits_processor": max}, r"logits_processor: .* Pass logits_processor=\[processor\]"),
        ({"logits_processor": [max, 1]}, "logits_processor: .*expected a list of functions of input_ids and scores"),
        ({"do_sample": True, "temperature": 0.0}, "temperature: .*got 0.0; expected a number from 1e-30"),
        ({"do_sample": True, "temperature": 1e-40}, "temperature: .*got 1e-40; expected a number from 1e-30"),
        ({"do_sample": True, "temperature": 5e-324}, "temperature: .*got 5e-324"),
        ({"temperature": 1e-31}, "temperature: .*got 1e-31"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty: .*got 1e-39"),
        ({"do_sample": True, "temperature": math.inf}, "temperature: .*got inf"),
        ({"do_sample": True, "temperature": 10**400}, "temperature: .*got 1000"),
        ({"do_sample": True, "top_k": -1}, "top_k: .*got -1"),
        ({"suppress_tokens": 5}, "suppress_tokens: .*got 5; expected a list of token ids"),
        ({"begin_suppress_tokens": [-1]}, r"begin_suppress_tokens: .*got \[-1\]"),
        ({"forced_bos_token_id": [3]}, r"forced_bos_token_id: .*got \[3\]; expected a token id"),
        ({"forced_eos_token_id": 97}, "forced_eos_token_id: .*got 97; expected token ids below 97"),
        ({"sequence_bias": [[[5], math.inf]]}, "sequence_bias: .*expected a dict of tuples of token ids to numbers"),
        ({"sequence_bias": {(5, 97): 1.0}}, "sequence_bias: .*got 97"),
        ({"use_model_defaults": None}, "use_model_defaults: .*got None; expected True or False"),
        ({"do_sample": True, "top_p": 0.0}, "top_p: .*got 0.0"),
        ({"do_sample": True, "top_p": 1.1}, "top_p: .*got 1.1"),
        ({"do_sample": True, "min_p": -0.1}, "min_p: .*got -0.1"),
        ({"do_sample": True, "min_p": 1.1}, "min_p: .*got 1.1"),
        ({"do_sample": True, "generator": torch.Generator("cpu")}, "generator: .*got one on cpu; expected one on meta"),
        ({"eos_token_id": "</s>"}, "eos_token_id: .*got '</s>'; .* tokenizer.token_to_id"),
        ({"pad_token_id": 1.0}, "pad_token_id: .*got 1.0"),
        ({"stop_strings": ["a", ""], "tokenizer": Letters()}, "stop_strings: .*not empty"),
        ({"stop_strings": [], "tokenizer": Letters()}, "stop_strings: .*not empty"),
        ({"stop_strings": "a"}, "tokenizer: stop_strings need a tokenizer"),
        ({"stop_strings": "a", "tokenizer": Letters()}, "pad_token_id: "),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask: .*got \(2, 3\); expected \(2, 2\)"),
        ({"attention_mask": 2 * PROMPT}, "attention_mask: .*got other values; expected 1 for a token and 0 for padd"),
        ({"attention_mask": PROMPT * math.nan}, "attention_mask: .*got other values"),
    ],
)
def test_invalid_values_are_refused_before_the_model_runs(options: dict[str, Any], message: str) -> None:
    model = Scripted([[1], [1]])
    prompt = PROMPT.to("meta") if "generator" in options else PROMPT
    with pytest.raises(LigerzooError, match=message):
        generate(model, prompt, **{"max_new_tokens": 1} | options)
    assert model.calls == 0


@pytest.mark.parametrize(
    "ids, mask, message",
    [
        (torch.zeros(1, 0, dtype=torch.long), None, r"input_ids: .*got \(1, 0\); .*at least one token in each row"),
        (torch.tensor([1, 2]), None, r"input_ids: .*got \(2,\); expected \(B, T\).*\. Use input_ids\[None\]"),
        ("text", None, r"input_ids: .*got str; expected a \(B, T\) tensor of integers. Encode text first"),
        (UserDict(input_ids=PROMPT), None, r"input_ids: .*got UserDict; .* as generate\(\*\*inputs\)"),
        ([[1, 2]], None, r"input_ids: .*got list; .*Use torch.as_tensor\(input_ids\)"),
        (PROMPT.float(), None, "input_ids: .*got torch.float32; expected .* integers"),
        (PROMPT > 1, None, "input_ids: .*got torch.bool"),
        (PROMPT, [[1, 1], [1, 1]], r"attention_mask: .*got list; expected a \(B, T\) tensor"),
        (PROMPT, 20, "attention_mask: .*got int"),
        (PROMPT, torch.tensor([[1, 1], [0, 0]]), "attention_mask: .*got a row of padding only"),
    ],
)
def test_invalid_prompts_are_refused(ids: Any, mask: Any, message: str) -> None:
    with pytest.raises(LigerzooError, match=message):
        generate(Scripted([[1], [1]]), ids, mask, max_new_tokens=1)


def test_models_on_meta_and_prompts_on_another_device_are_refused() -> None:
    model, remedy = Llama(LlamaConfig(**TINY), device="meta"), "Load them with from_pretrained"
    for ids in (PROMPT, PROMPT.to("meta")):
        with pytest.raises(LigerzooError, match=f"^Llama: the weights are on the meta device, .* {remedy}"):
            model.generate(ids, max_new_tokens=1)
    with pytest.raises(LigerzooError, match=f"^Llama: the weights are on the meta device, .* {remedy}"):
        model.generate_many([[1]], batch_size=1, max_new_tokens=1)
    message = r"^input_ids: .*got a tensor on meta; expected one on cpu, like the model. Use input_ids.to\(model.device"
    with pytest.raises(LigerzooError, match=message):
        tiny_llama("cpu").generate(PROMPT.to("meta"), max_new_tokens=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.generate(PROMPT, max_new_tokens=1, top_p=0.5),
        lambda model: model.generate_many([[1]], batch_size=1, max_new_tokens=1, top_p=0.5),
        lambda model: Scheduler(model, batch_size=1, top_p=0.5),
        lambda model: SamplingOptions(top_p=0.5),
    ],
    ids=["generate", "generate_many", "Scheduler", "SamplingOptions"],
)
def test_warnings_name_the_line_of_the_caller(call: Callable[[Any], object]) -> None:
    model = tiny_llama("cpu")
    with pytest.warns(UserWarning, match="top_p=0.5 has no effect") as warnings:
        call(model)
    assert [warning.filename for warning in warnings] == [__file__]


@pytest.mark.parametrize(
    "options, named",
    [
        ({"eos_token_id": 10**20}, "eos_token_id: invalid value; got 100000000000000000000; expected a token id below"),
        ({"pad_token_id": 2**63}, "pad_token_id"),
        ({"do_sample": True, "top_k": True}, "top_k"),
        ({"do_sample": True, "top_p": "0.9"}, "top_p"),
        ({"do_sample": True, "min_p": "0.1"}, "min_p"),
        ({"do_sample": True, "temperature": "1"}, "temperature"),
        ({"repetition_penalty": "1"}, "repetition_penalty"),
    ],
)
def test_options_of_the_wrong_type_or_size(options: dict[str, Any], named: str) -> None:
    model = Llama(LlamaConfig(vocab_size=101, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                              num_attention_heads=2, num_key_value_heads=1))  # fmt: skip
    with pytest.raises(LigerzooError, match=named):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_refuses_an_object_of_another_type(name: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": True, "tokenizer": Letters(), "stop_strings": "a"}
    with pytest.raises(LigerzooError, match=f"^{name}: .*; expected "):
        generate(Scripted([[1, 2]]), PROMPT[:1], **options | {name: object()})


def test_the_number_of_new_tokens_is_required() -> None:
    with pytest.raises(
        LigerzooError, match=r"^max_new_tokens: .* expected an integer, 0 or more. Pass max_new_tokens="
    ):
        tiny_llama("cpu").generate(PROMPT)


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_options_of_sampling_warn_without_it(options: dict[str, float]) -> None:
    (name, value), *_ = options.items()
    with pytest.warns(UserWarning, match=f"^generate: {name}={value} has no effect .* Pass do_sample=True"):
        tokens = generate(Scripted([[1], [1]]), PROMPT, max_new_tokens=1, **options)
    assert tokens[:, -1].tolist() == [1, 1]


def test_options_without_effect_on_the_distribution_need_no_sampling() -> None:
    for temperature in (0, 1):
        options: dict[str, Any] = {"temperature": temperature, "top_k": None, "top_p": 1.0, "min_p": 0.0}
        assert generate(Scripted([[1], [1]]), PROMPT, max_new_tokens=1, **options)[:, -1].tolist() == [1, 1]


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("temprature", "Did you mean 'temperature'?"),
        ("max_new_token", "Did you mean 'max_new_tokens'?"),
        ("attention_masks", "Did you mean 'attention_mask'?"),
        ("max_tokens", "Use max_new_tokens."),
        ("max_time", "Use stopping_criteria=[transformers.MaxTimeCriteria(seconds)]."),
        ("stoping_criteria", "Did you mean 'stopping_criteria'?"),
        ("draft_model", "Use prompt_lookup_num_tokens=10, or assistant_model=... with num_assistant_tokens=5."),
        ("stop", "Use stop_strings=[...] with tokenizer=tokenizer."),
        ("num_beams", "Use the generate method of transformers: ligerzoo.integrations.transformers.wrap(model)"),
        ("seed", "Use generator=torch.Generator(model.device).manual_seed(seed)."),
        ("position_ids", "They are computed from attention_mask."),
        ("images", "expected text inputs only, such as input_ids. help(ligerzoo.generate.generate) lists"),
    ],
)
def test_unknown_options_are_refused_with_what_to_use_instead(name: str, remedy: str) -> None:
    message = f"^{name}: not an option of generate or input of Llama.*{re.escape(remedy)}"
    with pytest.raises(LigerzooError, match=message):
        tiny_llama("cpu").generate(PROMPT, **{name: 2})


def test_suggestions_include_the_inputs_of_the_model() -> None:
    class Captioner(Scripted):
        modalities = ("pixel_values",)

    with pytest.raises(LigerzooError, match=r"input of Captioner. Did you mean 'pixel_values'\?"):
        generate(Captioner([[1], [1]]), PROMPT, max_new_tokens=1, pixel_value=torch.ones(1))
    with pytest.raises(LigerzooError, match=r"input of Captioner; expected pixel_values. help"):
        generate(Captioner([[1], [1]]), PROMPT, max_new_tokens=1, audio=torch.ones(1))
    assert generate(Captioner([[1], [1]]), PROMPT, max_new_tokens=1, pixel_values=torch.ones(1)).shape == (2, 3)


def test_a_model_without_a_list_of_inputs_receives_all_but_foreign_options() -> None:
    assert generate(Scripted([[1], [1]]), PROMPT, max_new_tokens=1, volume=2).shape == (2, 3)
    with pytest.raises(LigerzooError, match=r"^num_beams: not an option of generate or input of Scripted"):
        generate(Scripted([[1], [1]]), PROMPT, num_beams=2)


def test_every_option_of_transformers_is_one_of_ours_or_has_a_remedy() -> None:
    config = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    parameters = set(inspect.signature(transformers.GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert {"max_new_tokens", "num_beams", "temperature"} <= config
    assert not (config | parameters) - OPTIONS.keys() - REMEDIES.keys()


def test_no_option_has_a_remedy_for_unknown_ones() -> None:
    assert not REMEDIES.keys() & OPTIONS.keys()


@pytest.mark.parametrize(
    "tokenizer, options, message",
    [
        ("path", {}, "tokenizer of TextStreamer: .*got str; expected a ligerzoo.Tokenizer"),
        (Letters(), {}, "tokenizer of TextStreamer: .*got Letters"),
        (None, {"skip_prompt": 1}, "skip_prompt: .*got 1; expected True or False"),
        (None, {"skip_special_tokens": "no"}, "skip_special_tokens: .*got 'no'"),
        (None, {"file": "out.txt"}, "file: .*got 'out.txt'; expected a text file that is open for writing"),
    ],
)
def test_arguments_of_a_text_streamer(tokenizer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LigerzooError, match=message):
        TextStreamer(tokenizer or StreamingLetters(), **options)

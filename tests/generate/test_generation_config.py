"""Options of generation_config.json are followed as transformers follows them; arguments replace them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ligerzoo import AutoModel
from ligerzoo.errors import LigerzooError
from ligerzoo.generate import rows as rows_module
from ligerzoo.generate import slots
from ligerzoo.models import Llama
from ligerzoo.train.evaluation import continue_prompts
from tests.covering import covering
from tests.generate.graphs import replace_graphs
from tests.generate.models import VOCAB, Letters, oracle, prompts, tiny_llama

GREEDY: list[int] = tiny_llama("cpu").generate(prompts("cpu", 1, 9), max_new_tokens=12, eos_token_id=[])[0, 9:].tolist()
"""What follows the first prompt without any option."""

FIRST, SECOND, THIRD, FOURTH = GREEDY[:4]

OPTIONS: dict[str, list[Any]] = {
    "repetition_penalty": [None, 1.0, 1.3],
    "no_repeat_ngram_size": [None, 0, 1, 2],
    "bad_words_ids": [None, [[SECOND], [FIRST, THIRD]], [[THIRD, FOURTH]]],
    "suppress_tokens": [None, [], [FIRST], [THIRD, FOURTH, 5000]],
    "begin_suppress_tokens": [None, [FIRST], [FIRST, 7]],
    "forced_eos_token_id": [None, 11, [11, 13]],
    "forced_bos_token_id": [None, 12],
    "sequence_bias": [None, [[[FIRST], -3.0], [[SECOND, THIRD], 2.5]]],
    "min_new_tokens": [None, 0, 4],
    "min_length": [None, 0, 13],
    "eos_token_id": [[95], [SECOND], [FIRST, FOURTH, 30]],
    "lengths": [{"max_new_tokens": 9}, {"max_length": 18}, {"max_new_tokens": 7, "max_length": 3}],
    "ignored": [{}, {"temperature": 0.2, "top_k": 3}, {"num_beams": 1, "transformers_version": "4.50.0", "mine": [1]}],
    "length": [1, 9],
}

PATHS: dict[str, dict[str, Any]] = {
    "file": {}, "arguments": {}, "uncached": {"use_cache": False}, "captured": {},
    "drafts": {"prompt_lookup_num_tokens": 3}, "scheduler": {"batch_size": 2},
}  # fmt: skip

OTHER: dict[str, Any] = {
    "repetition_penalty": 3.0, "no_repeat_ngram_size": 3, "bad_words_ids": [[FIRST]], "suppress_tokens": [SECOND],
    "begin_suppress_tokens": [FIRST], "forced_eos_token_id": 17, "forced_bos_token_id": 18,
    "sequence_bias": [[[SECOND], 9.0]], "min_new_tokens": 8, "min_length": 16, "eos_token_id": 19,
    "max_new_tokens": 3, "max_length": 20, "num_beams": 4,
}  # fmt: skip
"""Values in the file that arguments replace."""


def expected_of(model: Llama, options: dict[str, Any], ids: torch.Tensor) -> list[list[int]]:
    theirs = oracle(model, "llama2")
    theirs.generation_config = transformers.GenerationConfig.from_dict(dict(options))
    return theirs.generate(ids, do_sample=False)[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", PATHS)
def test_options_give_the_tokens_of_transformers(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of all pairs of values for each path."""
    if path == "captured":
        replace_graphs(monkeypatch)
        for module in (rows_module, slots):
            monkeypatch.setattr(module, "can_capture", lambda model: True)
    model, changed = tiny_llama("cpu"), 0
    for case in covering(OPTIONS)[[*PATHS].index(path) :: len(PATHS)]:
        named = {name: value for name, value in case.items() if name not in ("lengths", "ignored", "length")}
        options = {**named, **case["lengths"], **case["ignored"], "pad_token_id": 0}
        options = {name: value for name, value in options.items() if value is not None}
        ids = prompts("cpu", 2, 9)[: 1 if path == "drafts" else 2, : case["length"]]
        expected = expected_of(model, options, ids)
        model.generation_config, arguments = options, PATHS[path]
        if path == "arguments":
            arguments = {name: value for name, value in options.items() if name in OTHER}
            if "max_new_tokens" in arguments:
                arguments.pop("max_length", None)
            model.generation_config = {name: OTHER.get(name, value) for name, value in options.items()}
        if path == "scheduler":
            results = sorted(model.generate_many(ids, **arguments), key=lambda result: result.index)
            width = max(len(result.tokens) for result in results)
            ours = [result.tokens + [0] * (width - len(result.tokens)) for result in results]
        else:
            ours = model.generate(ids, **arguments)[:, ids.shape[1] :].tolist()
        assert ours == expected, case
        changed += expected[0] != GREEDY[: len(expected[0])]
    assert changed > 1


def test_padding_counts_as_in_transformers() -> None:
    """Lengths count the columns of the padded prompts."""
    model, ids = tiny_llama("cpu"), prompts("cpu", 2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"min_length": 14, "max_length": 16, "eos_token_id": list(range(60)), "forced_eos_token_id": 5,
               "begin_suppress_tokens": list(range(60, 90)), "pad_token_id": 0}  # fmt: skip
    theirs = oracle(model, "llama2")
    theirs.generation_config = transformers.GenerationConfig.from_dict(dict(options))
    model.generation_config = options
    expected = theirs.generate(ids, attention_mask=mask, do_sample=False)
    assert model.generate(ids, mask).tolist() == expected.tolist()
    assert expected.shape[1] >= 15


SAMPLING: dict[str, list[Any]] = {
    "temperature": [None, 0.4, 2.0],
    "top_k": [None, 0, 4],
    "top_p": [None, 1.0, 0.7],
    "min_p": [None, 0.0, 0.2],
    "typical_p": [None, 1.0],
    "repetition_penalty": [None, 1.5],
    "suppress_tokens": [None, [FIRST]],
}


@pytest.mark.parametrize("case", covering(SAMPLING), ids=str)
def test_the_distribution_is_that_of_transformers(case: dict[str, Any]) -> None:
    """Including its `top_k` of 50, where a file enables sampling without one."""
    options = {"do_sample": True, **{name: value for name, value in case.items() if value is not None}}
    model, ids = tiny_llama("cpu"), prompts("cpu", 1, 9)
    theirs = oracle(model, "llama2")
    theirs.generation_config = transformers.GenerationConfig.from_dict(dict(options))
    [scores] = theirs.generate(ids, max_new_tokens=1, return_dict_in_generate=True, output_scores=True).scores
    model.generation_config = options
    out = model.generate(ids.repeat(64, 1), max_new_tokens=1, return_dict_in_generate=True, eos_token_id=[])
    expected = scores.log_softmax(-1)[0, out.sequences[:, -1]]
    torch.testing.assert_close(out.sampling_logps[:, 0], expected, rtol=1e-4, atol=1e-4)


def test_arguments_and_use_model_defaults_replace_the_file() -> None:
    model, ids = tiny_llama("cpu"), prompts("cpu", 1, 9)
    file = {"do_sample": True, "temperature": 3.0, "top_p": 0.99, "suppress_tokens": [FIRST], "max_new_tokens": 4,
            "num_return_sequences": 2, "min_length": 30, "eos_token_id": THIRD}  # fmt: skip
    model.generation_config = dict(file)
    assert model.generate(ids).shape == (2, 13)
    arguments: dict[str, Any] = {
        "do_sample": False, "suppress_tokens": [], "num_return_sequences": 1, "min_length": 0,
    }  # fmt: skip
    assert model.generate(ids, **arguments)[0, 9:].tolist() == GREEDY[:3]
    assert model.generate(ids, max_new_tokens=12, use_model_defaults=False)[0, 9:].tolist() == GREEDY[:3]
    out = model.generate(ids, max_new_tokens=1, do_sample=True, use_model_defaults=False, return_dict_in_generate=True)
    assert torch.equal(out.logps, out.sampling_logps)
    [result] = model.generate_many(ids, batch_size=1, max_new_tokens=12, use_model_defaults=False)
    assert result.tokens == GREEDY[:3]
    assert model.generation_config == file


def test_stop_strings_of_the_file_end_a_row() -> None:
    model, ids = tiny_llama("cpu"), prompts("cpu", 1, 9)
    model.generation_config = {"stop_strings": [f"<{SECOND}>"]}

    class Numbers:
        def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
            return "".join(f"<{token}>" for token in ids)

    assert model.generate(ids, max_new_tokens=9, tokenizer=Numbers(), eos_token_id=[])[0, 9:].tolist() == GREEDY[:2]
    [result] = model.generate_many(ids, batch_size=1, max_new_tokens=9, tokenizer=Numbers(), eos_token_id=[])
    assert (result.tokens, result.finish_reason) == (GREEDY[:2], "stop")


def test_samples_of_an_evaluation_are_greedy() -> None:
    class Numbers:
        def decode(self, ids: Any) -> str:
            return str([int(token) for token in ids])

    model, ids = tiny_llama("cpu"), prompts("cpu", 1, 9)
    model.generation_config = {"do_sample": True, "temperature": 9.0, "suppress_tokens": [FIRST], "top_k": 90}
    [sample] = continue_prompts(model, Numbers(), [ids[0].tolist()], max_new_tokens=4)  # type: ignore[arg-type]
    assert sample["continuation"] == str(GREEDY[:4])


@pytest.mark.parametrize(
    "file, message",
    [
        ({"temperature": "hot", "do_sample": True}, "temperature: .*got 'hot'"),
        ({"do_sample": "yes"}, "do_sample: .*got 'yes'; .*Pass do_sample as an argument, or correct the file"),
        ({"top_k": -1, "do_sample": True}, "top_k: .*got -1"),
        ({"suppress_tokens": 3}, "suppress_tokens: "),
        ({"bad_words_ids": [[VOCAB]]}, "bad_words_ids: .*got 97"),
        ({"max_length": 9}, "max_length: .*expected more than 9"),
        ({"num_return_sequences": 2}, "num_return_sequences: .*without sampling"),
        ({"stop_strings": [""]}, "stop_strings: .*not empty"),
    ],
    ids=str,
)
def test_invalid_options_of_the_file_name_it(file: dict[str, Any], message: str) -> None:
    model, ids = tiny_llama("cpu"), prompts("cpu", 1, 9)
    model.generation_config = file
    length = {} if "max_length" in file else {"max_new_tokens": 1}
    with pytest.raises(LigerzooError, match=f"^generation_config.json, {message}"):
        model.generate(ids, tokenizer=Letters(), **length)
    if "num_return_sequences" not in file:  # a request is one sequence
        with pytest.raises(LigerzooError, match=f"^generation_config.json, {message}"):
            list(model.generate_many(ids, batch_size=1, tokenizer=Letters(), **length))


@pytest.mark.parametrize(
    "file, named",
    [
        ({"num_beams": 4}, "num_beams"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"do_sample": True, "typical_p": 0.9}, "typical_p"),
        ({"exponential_decay_length_penalty": [5, 1.1]}, "exponential_decay_length_penalty"),
    ],
    ids=str,
)
def test_options_that_are_not_implemented_cause_a_warning(file: dict[str, Any], named: str) -> None:
    model, ids = tiny_llama("cpu"), prompts("cpu", 1, 9)
    model.generation_config = file
    with pytest.warns(UserWarning, match=f"^generation_config.json: {named}=.* is not implemented and has no effect"):
        model.generate(ids, max_new_tokens=1)


@pytest.mark.parametrize("source", ["file", "arguments"])
def test_options_without_effect_are_accepted(source: str) -> None:
    model, ids = tiny_llama("cpu"), prompts("cpu", 1, 9)
    options: dict[str, Any] = {"num_beams": 1, "early_stopping": False, "length_penalty": 1.0, "typical_p": 1.0,
                               "penalty_alpha": 0, "renormalize_logits": True}  # fmt: skip
    if source == "file":
        model.generation_config = {**options, "typical_p": 0.9, "length_penalty": 2.0, "use_cache": False}
        options = {}
    else:
        model.generation_config = {"num_beams": 4, "penalty_alpha": 0.6}
    assert model.generate(ids, max_new_tokens=4, **options)[0, 9:].tolist() == GREEDY[:4]


def test_a_checkpoint_keeps_its_options(tmp_path: Path) -> None:
    tiny_llama("cpu").save_pretrained(tmp_path / "a")
    content = {"_from_model_config": False, "repetition_penalty": 1.4, "do_sample": False, "mine": {"x": [1]}}
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps(content))
    model = AutoModel.from_pretrained(tmp_path / "a", dtype="float32")
    ids = prompts("cpu", 1, 9)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    tokens = model.generate(ids, max_new_tokens=9, eos_token_id=[])
    assert tokens.tolist() == theirs.generate(ids, max_new_tokens=9, eos_token_id=None).tolist()
    model.save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text()) == content

"""Names of transformers' versions: the KV cache is `past_key_values` up to 5.23 and `cache` since 5.24."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ligerzoo.errors import LigerzooError  # noqa: E402
from ligerzoo.integrations.transformers import AutoModelForSequenceClassification, versions  # noqa: E402
from ligerzoo.integrations.transformers.versions import CACHE, takes_cache, with_cache_as  # noqa: E402
from tests.integrations.clients import ours, theirs  # noqa: E402

# transformers reads config.json of version 4.
pytestmark = pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")

NAMES = ("past_key_values", "cache")
IDS = torch.arange(3, 27).view(2, 12)
MASK = (torch.arange(12) >= torch.tensor([[0], [3]])).long()


def test_name_of_the_installed_version() -> None:
    model = transformers.LlamaForCausalLM
    assert CACHE in inspect.signature(model.forward).parameters
    assert {*NAMES} - {CACHE} == {*NAMES} - {*inspect.signature(model.prepare_inputs_for_generation).parameters}


@pytest.mark.parametrize("name", NAMES)
def test_either_name_becomes_the_asked_one(name: str) -> None:
    cache, other = object(), object()
    for given in ({"cache": cache}, {"past_key_values": cache}, dict.fromkeys(NAMES, cache)):
        assert with_cache_as(name, {"a": 1, **given}) == {"a": 1, name: cache}
    assert with_cache_as(name, {"cache": cache, "past_key_values": None}) == {name: cache}
    assert with_cache_as(name, {"cache": None, "past_key_values": None}) == {}
    given = {"cache": cache, "past_key_values": other}
    with pytest.raises(LigerzooError, match=r"past_key_values and cache: two names .* with different caches"):
        with_cache_as(name, given)
    assert given == {"cache": cache, "past_key_values": other}


@pytest.mark.parametrize("installed", NAMES)
def test_signatures_have_the_name_of_the_version(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "CACHE", installed)

    @takes_cache
    def forward(ids: int, past_key_values: Any = None, **inputs: Any) -> Any:
        return past_key_values, inputs

    assert [*inspect.signature(forward).parameters] == ["ids", installed, "inputs"]
    assert forward(1, 2) == forward(1, cache=2) == forward(1, past_key_values=2) == (2, {})
    assert forward(1, cache=2, labels=3) == (2, {"labels": 3})


def logits(model: Any, *args: Any, **inputs: Any) -> Tensor:
    output = model(*args, use_cache=True, **inputs)
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output.logits[:, -1:]


@pytest.mark.filterwarnings("ignore:.*score.weight.*:UserWarning")  # which the checkpoint lacks
@pytest.mark.parametrize("kind", ["causal", "body", "classifier"])
def test_both_names_of_an_input_mean_the_same(kind: str, checkpoints: dict[str, Path]) -> None:
    if kind == "classifier":
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            checkpoints["llama"], num_labels=3, pad_token_id=0
        ).eval()
    else:
        model = ours(checkpoints["llama"]).eval()
        model = model if kind == "causal" else model.base_model

    def prefix() -> Any:
        return getattr(model(IDS[:, :8], use_cache=True), CACHE)

    last = IDS[:, 8:]
    expected = logits(model, IDS)[:, -1:]
    for given in ({"cache": prefix()}, {"past_key_values": prefix()}, dict.fromkeys(NAMES, prefix())):
        torch.testing.assert_close(logits(model, last, **given)[:, -1:], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(model, last, None, None, prefix())[:, -1:], expected, rtol=0, atol=1e-5)
    with pytest.raises(LigerzooError, match="two names of the KV cache with different caches"):
        model(last, cache=prefix(), past_key_values=prefix())
    with pytest.raises(LigerzooError, match="past_key_values: not a cache of this model; got DynamicCache"):
        model(last, cache=transformers.DynamicCache())


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_generation_continues_a_cache(model_type: str, beams: int, checkpoints: dict[str, Path]) -> None:
    """Only tokens that are not in the cache are processed."""
    options = {"do_sample": False, "suppress_tokens": [90, 91], "num_beams": beams}
    model, lengths = ours(checkpoints[model_type]).eval(), []
    expected = theirs(checkpoints[model_type]).eval().generate(
        IDS, attention_mask=MASK, max_new_tokens=8, **options
    )  # fmt: skip
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[1]))
    for name in NAMES:
        prefix = {"attention_mask": MASK[:, :8], "max_new_tokens": 1, "return_dict_in_generate": True}
        cache = model.generate(IDS[:, :8], **prefix)[CACHE]
        cache.batch_repeat_interleave(beams)
        lengths.clear()
        got = model.generate(IDS, attention_mask=MASK, max_new_tokens=8, **{name: cache}, **options)
        assert torch.equal(got, expected)
        assert lengths == [4] + [1] * 7

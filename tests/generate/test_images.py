"""Copies and conversations of prompts with images."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ligerzoo import AutoModel
from ligerzoo.errors import LigerzooError
from ligerzoo.generate import generate
from ligerzoo.kernels.fp8 import FP8
from ligerzoo.layers import RecurrentLayerCache
from ligerzoo.models import Qwen3_5
from tests.generate.models import Recorder
from tests.models import prompts as qwen2_vl
from tests.models import (
    tiny_gemma3,
    tiny_gemma4,
    tiny_glm4v,
    tiny_mistral3,
    tiny_mllama,
    tiny_qwen2_vl,
    tiny_qwen3_5,
    tiny_qwen3_vl,
)
from tests.models.prompts import image

FAMILIES: dict[str, Any] = {
    "qwen2_vl": tiny_qwen2_vl,
    "qwen3_vl": tiny_qwen3_vl,
    "qwen3_5": tiny_qwen3_5,
    "gemma3": tiny_gemma3,
    "gemma4": SimpleNamespace(CHECKPOINTS=[row for row in tiny_gemma4.CHECKPOINTS if "untied" in row.name]),
    "mistral3": tiny_mistral3,
    "glm4v": tiny_glm4v,
    "mllama": tiny_mllama,
}


class Batch(NamedTuple):
    ids: Tensor
    mask: Tensor
    inputs: dict[str, Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    FAMILIES[request.param].CHECKPOINTS[0].write(path)
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for token in model.placeholders:  # of mean logits, so never chosen: a later call would need its image
            weight = model.lm_head.weight
            weight[min(token, len(weight) - 1)] = weight.mean(0)
    return model


def batch_of(model: Any, *, is_single: bool = False) -> Batch:
    """Returns ragged prompts, some with images, or a single one."""
    kind = "an image" if is_single else "a padded batch"
    config = model.config
    if config.__class__.__name__.startswith(("Qwen", "Gemma4", "Glm")):
        rows: Any = [[4, image(2, 4), 5, image(2, 2), 9], [7], [image(3, 2), 12]]
        p: Any = qwen2_vl.prompt(rows[:1] if is_single else rows, vars(config.vision_config))
        return Batch(p.ids, p.mask, p.vision)
    if config.__class__.__name__.startswith("Gemma3"):
        g = tiny_gemma3.prompt(tiny_gemma3.PROMPTS[kind], config)
        return Batch(g.ids, g.mask, g.images)
    if config.__class__.__name__.startswith("Mistral3"):
        n = tiny_mistral3.prompt(tiny_mistral3.PROMPTS[kind], config)
        return Batch(n.ids, n.mask, n.images)
    m = tiny_mllama.prompt(tiny_mllama.PROMPTS[kind], vars(config.vision_config))
    return Batch(m.ids, m.mask, m.vision)


@pytest.mark.parametrize("use_cache", [True, False])
def test_copies_of_prompts_with_images(model: Any, use_cache: bool) -> None:
    """With `top_k=1`, sampling is greedy."""
    ids, mask, inputs = batch_of(model)
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": [], "repetition_penalty": 1.3}
    expected = model.generate(ids, mask, **options, **inputs)
    assert len(set(expected[:, ids.shape[1] :].flatten().tolist())) > 3
    copies = model.generate(
        ids, mask, do_sample=True, top_k=1, num_return_sequences=2, use_cache=use_cache, **options, **inputs
    )
    assert torch.equal(copies, expected.repeat_interleave(2, 0))


def test_calls_after_images_process_only_the_new_text(model: Any) -> None:
    ids, mask, inputs = batch_of(model)
    recorder, cache = Recorder(model), model.new_cache()
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": []}
    new_inputs = inputs
    for _call in range(2):
        got = generate(recorder, ids, mask, past_key_values=cache, **options, **new_inputs)
        assert got.tolist() == model.generate(ids, mask, **options, **inputs).tolist()
        added = torch.full((len(ids), 4), 7)
        ids, mask = torch.cat([got, added], 1), torch.cat([mask, torch.ones(len(ids), 10, dtype=mask.dtype)], 1)
        new_inputs = {}  # the images are in the cache
        if "cross_attention_mask" in inputs:  # per token
            sees = inputs["cross_attention_mask"]
            inputs = {**inputs, "cross_attention_mask": torch.cat([sees, sees[:, -1:].expand(-1, 10, -1, -1)], 1)}
    # Prompts, then the last new token and the added ones.
    assert [tokens.shape[1] for tokens in recorder.read if tokens.shape[1] > 1] == [ids.shape[1] - 20, 5]


def test_drafts_from_text_after_images(model: Any) -> None:
    ids, mask, inputs = batch_of(model, is_single=True)
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": [], "do_sample": True, "temperature": 0.5}
    if isinstance(model, Qwen3_5):
        with pytest.raises(LigerzooError, match="recurrent layers cannot remove rejected drafts"):
            model.generate(ids, mask, prompt_lookup_num_tokens=4, **options, **inputs)
        return
    torch.manual_seed(3)
    expected = model.generate(ids, mask, **options, **inputs)
    tokens: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[1]))
    torch.manual_seed(3)
    got = model.generate(ids, mask, prompt_lookup_num_tokens=4, max_matching_ngram_size=1, **options, **inputs)
    hook.remove()
    assert torch.equal(got, expected)
    assert tokens.count(5) > 1
    with pytest.raises(LigerzooError, match="expected token ids only, which assistant_model can read"):
        model.generate(ids, mask, assistant_model=model, **options, **inputs)


def test_caches_in_fp8_hold_images_and_tokens(model: Any) -> None:
    ids, mask, inputs = batch_of(model)
    cache = model.new_cache(dtype=FP8)
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": []}
    expected = model.generate(ids, mask, past_key_values=cache, **options, **inputs)
    layers = [layer for layer in cache.layers if layer.length > 0 and not isinstance(layer, RecurrentLayerCache)]
    assert layers
    assert all(layer.dtype == FP8 and layer.read()[0].dtype == FP8 for layer in layers)
    assert torch.equal(model.generate(ids, mask, cache_dtype=FP8, **options, **inputs), expected)
    with torch.no_grad():
        cached = model(ids, mask, past_key_values=model.new_cache(dtype=FP8), **inputs).logits[mask.bool()]
        exact = model(ids, mask, **inputs).logits[mask.bool()]
    assert 0 < (cached - exact).norm() < 0.2 * exact.norm()

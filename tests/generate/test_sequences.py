"""Padded and cached sequences give the logits of single sequences without a cache."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.generate import generate
from ligerzoo.generate.prompts import Prompts
from tests.generate.models import LEFT, NO_END, RIGHT, VOCAB, Recorder, mask_of, prompts, tiny_llama


@pytest.mark.parametrize("rows", [RIGHT, ["..######.#####...", "##.#.#.#.#####.##", "................#"]])
def test_rows_with_any_padding_equal_single_rows(rows: list[str], device: str) -> None:
    model, mask = tiny_llama(device, "llama3.2"), mask_of(rows, device)
    ids = prompts(device, 3, 17).where(mask.bool(), VOCAB + 3)  # a padding token that has no embedding
    together = model.generate(ids, mask, max_new_tokens=30, repetition_penalty=1.2)
    assert together[:, :17].tolist() == ids.tolist()
    for row in range(3):
        prompt = ids[row, mask[row].bool()][None]
        alone = model.generate(prompt, max_new_tokens=30, repetition_penalty=1.2)
        assert together[row, 17:].tolist() == alone[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("rows", [None, LEFT, RIGHT])
def test_each_step_with_the_cache_has_the_logits_of_a_full_forward(rows: list[str] | None, device: str) -> None:
    cached, ids = Recorder(tiny_llama(device, "llama3.2")), prompts(device, 3, 17)
    mask = None if rows is None else mask_of(rows, device)
    out = generate(cached, ids, mask, max_new_tokens=30, eos_token_id=NO_END)
    assert [tokens.shape[1] for tokens in cached.read] == [17] + [1] * 29
    assert [logits.shape for logits in cached.logits] == [(3, 1, VOCAB)] * 30
    for row in range(3):
        prompt = ids[row] if mask is None else ids[row, mask[row].bool()]
        whole = torch.cat([prompt, out[row, 17:-1]])
        again = cached.model(whole[None]).logits[0, -30:]
        steps = torch.cat(cached.logits, 1)[row]
        torch.testing.assert_close(steps, again, rtol=1e-4, atol=2e-5)
    assert generate(cached, ids, mask, max_new_tokens=30, use_cache=False).tolist() == out.tolist()
    assert cached.read[-1].shape == (3, 17 + 29)


def test_position_ids_do_not_count_padding() -> None:
    model = Recorder(tiny_llama("cpu"))
    generate(model, prompts("cpu", 2, 5), mask_of(["..###", "####."], "cpu"), max_new_tokens=3)
    steps = [positions.tolist() for positions in model.positions if positions is not None]
    assert steps == [[[0, 0, 1, 2], [0, 1, 2, 3]], [[3], [4]], [[4], [5]]]


def test_prompts_of_one_length_need_no_mask() -> None:
    ids = torch.tensor([[9, 1, 2, 9], [3, 4, 9, 9]])
    prompts = Prompts(tiny_llama("cpu"), ids, torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]]), None, None, {})
    assert (prompts.ids.tolist(), prompts.padding_mask) == ([[1, 2], [3, 4]], None)
    prompts = Prompts(tiny_llama("cpu"), ids, torch.tensor([[0, 1, 0, 0], [1, 1, 0, 0]]), None, None, {})
    assert prompts.padding_mask is not None
    assert prompts.ids.tolist() == [[1, 1], [3, 4]]
    assert prompts.padding_mask.tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize("rows", [None, LEFT])
def test_memory_grows_with_the_generated_tokens(rows: list[str] | None, device: str) -> None:
    """It does not grow with max_new_tokens."""
    model, ids = tiny_llama(device), prompts(device, 3, 17)
    mask = None if rows is None else mask_of(rows, device)
    free = model.generate(ids, mask, max_new_tokens=60)
    end = [int(free[row, -1]) for row in range(3)]
    cut = model.generate(ids, mask, max_new_tokens=60, eos_token_id=end, pad_token_id=0)
    sizes: list[int] = []

    class SizeRecorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))
            return out

    for most in (10**9, 10**30):
        with SizeRecorder():
            got = model.generate(ids, mask, max_new_tokens=most, eos_token_id=end, pad_token_id=0)
        assert torch.equal(got, cut)
    assert max(sizes) < 3 * 128 * 80

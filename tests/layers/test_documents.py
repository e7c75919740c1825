"""Packed documents and padded texts in batches of cuDNN's attention, here of torch's kernel for a CPU."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import packed_attention
from ligerzoo.kernels.fused_attention import attend_within, has_boundaries
from ligerzoo.kernels.packing import Boundaries, boundaries_of
from ligerzoo.layers import attention_paths, documents
from ligerzoo.layers.attention_call import AttentionCall
from ligerzoo.layers.context import Context
from ligerzoo.models import (
    Gemma2,
    Gemma2Config,
    Gemma3Text,
    Gemma3TextConfig,
    GptOss,
    GptOssConfig,
    Llama,
    LlamaConfig,
    Mistral,
    MistralConfig,
)

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Lets a CPU pack; collects the batches of each call."""
    found: list[list[list[int]]] = []

    def recorded(q: Tensor, k: Tensor, v: Tensor, packing: documents.Packing, **options: object) -> Tensor:
        found.append(packing.batches.tolist())
        return packed_attention(q, k, v, packing, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_paths, "attention_kernel", lambda *_: "cudnn")
    monkeypatch.setattr(attention_paths, "packed_attention", recorded)
    return found


def packed_positions(*rows: list[int]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


@pytest.mark.parametrize("model_class, config", [(Llama, LlamaConfig), (GptOss, GptOssConfig)])
def test_packed_rows(model_class: type[Llama], config: type[LlamaConfig], calls: list[list[list[int]]]) -> None:
    more = {"num_experts": 2, "num_experts_per_tok": 1, "head_dim": 8} if model_class is GptOss else {}
    model = model_class(config(**SIZES, **more), dtype=torch.float32)
    ids = torch.randint(60, (2, 40))
    positions = packed_positions([20, 1, 19], [30, 1, 1, 1, 7])
    expected = model(ids, position_ids=positions, labels=ids).loss
    assert not calls
    loss = model(ids, position_ids=positions, labels=ids, exact=True).loss
    assert [[documents, length] for call in calls for documents, length, *_ in call] == [
        [4, 64]
    ] * 2  # documents of one token need no batch
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    weights = list(model.parameters())
    for got, want in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_one_token_with_a_mask_of_ones() -> None:
    model = Llama(LlamaConfig(**SIZES), dtype=torch.float32)
    ids = torch.ones(2, 1, dtype=torch.int64)
    assert torch.equal(model(ids, torch.ones(2, 1), exact=True).logits, model(ids, exact=True).logits)


def test_probabilities_are_not_exact() -> None:
    model = Llama(LlamaConfig(**SIZES), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^exact: .*; got True; expected False with output_attentions=True"):
        model(torch.ones(1, 3, dtype=torch.int64), exact=True, output_attentions=True)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_rows(side: str, calls: list[list[list[int]]]) -> None:
    model = Llama(LlamaConfig(**SIZES), dtype=torch.float32)
    ids, mask = torch.randint(60, (3, 20)), torch.ones(3, 20, dtype=torch.int64)
    if side != "left":
        mask[0, 12:], mask[2, 19:] = 0, 0
    if side != "right":
        mask[0, :5], mask[1, :3] = 0, 0
    expected = model(ids, mask).logits
    logits = model(ids, mask, exact=True).logits
    assert len(calls) == 2
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


def test_cu_seqlens(calls: list[list[list[int]]]) -> None:
    model, ids = Llama(LlamaConfig(**SIZES), dtype=torch.float32), torch.randint(60, (1, 20))
    bounds = torch.tensor([0, 6, 7, 17])
    logits, expected = (model(ids, cu_seqlens=bounds, exact=exact).logits[:, :17] for exact in (True, False))
    assert len(calls) == 2
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_window_of_the_longest_document_has_no_effect(calls: list[list[list[int]]]) -> None:
    model, ids = Mistral(MistralConfig(**SIZES, sliding_window=10), dtype=torch.float32), torch.randint(60, (1, 20))
    positions = packed_positions([10, 4, 6])
    logits, expected = (model(ids, position_ids=positions, exact=exact).logits for exact in (True, False))
    assert len(calls) == 2
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="a window of 10 tokens and documents of up to 11"):
        model(ids, position_ids=packed_positions([11, 9]), exact=True)


def test_what_cannot_be_exact_is_refused(calls: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    ids, positions = torch.randint(60, (1, 20)), packed_positions([10, 10])
    capped = Gemma2(Gemma2Config(**SIZES, head_dim=8), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"a soft cap of 50\.0"):
        capped(ids, position_ids=positions, exact=True)
    model, mask = Llama(LlamaConfig(**SIZES), dtype=torch.float32), torch.ones(1, 20, dtype=torch.int64)
    mask[0, 5] = 0
    with pytest.raises(ValueError, match="padding within a row"):
        model(ids, mask, exact=True)
    with pytest.raises(ValueError, match="got a 4-D mask, or packing"):
        model(ids, torch.ones(1, 1, 20, 20, dtype=torch.bool), exact=True)
    with pytest.raises(ValueError, match="got a cache that is not exact"):
        model(ids, mask, use_cache=True, exact=True)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"torch\.float32 on cpu and a head size of 8"):
        model(ids, position_ids=positions, exact=True)


def test_whole_rows_are_exact_without_packing(calls: list[list[list[int]]]) -> None:
    model, ids = Llama(LlamaConfig(**SIZES), dtype=torch.float32), torch.randint(60, (2, 20))
    assert torch.equal(model(ids, exact=True).logits, model(ids).logits)
    assert not calls
    windowed = Mistral(MistralConfig(**SIZES, sliding_window=19), dtype=torch.float32)
    with pytest.raises(ValueError, match="a window of 19 tokens and documents of up to 20"):
        windowed(ids, exact=True)


@pytest.mark.parametrize("model_class, config", [(Llama, LlamaConfig), (GptOss, GptOssConfig)])
def test_documents_of_one_length_become_rows(
    model_class: type[Llama], config: type[LlamaConfig], calls: list[list[list[int]]]
) -> None:
    more = {"num_experts": 2, "num_experts_per_tok": 1, "head_dim": 8} if model_class is GptOss else {}
    model, ids = model_class(config(**SIZES, **more), dtype=torch.float32), torch.randint(60, (2, 21))
    positions = packed_positions([7, 7, 7], [7, 7, 7])
    logits, expected = (model(ids, position_ids=positions, exact=exact).logits for exact in (True, False))
    assert not calls
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_padding_does_not_move_positions(calls: list[list[list[int]]]) -> None:
    """In exact forwards, a text has the angles that it has alone."""
    ids, mask = torch.randint(60, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    context = Context(ids, mask, exact=True)
    assert context.position_ids.tolist() == [list(range(9)), [0, 0, 0, 0, *range(5)]]
    assert Context(ids, mask).position_ids.tolist() == [list(range(9))]


@pytest.mark.parametrize("recomputes", [False, True])
def test_activation_checkpointing(recomputes: bool, calls: list[list[list[int]]]) -> None:
    """Backward recomputes blocks with the plan of the forward."""
    model, ids = Llama(LlamaConfig(**SIZES), dtype=torch.float32), torch.randint(60, (1, 40))
    if recomputes:
        model.gradient_checkpointing_enable()
    positions = packed_positions([21, 19])
    loss = model(ids, position_ids=positions, labels=ids, exact=True).loss
    loss.backward()
    assert len(calls) == (4 if recomputes else 2)
    model.gradient_checkpointing_disable()
    expected = torch.autograd.grad(model(ids, position_ids=positions, labels=ids).loss, list(model.parameters()))
    for parameter, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-6)


def test_the_faster_way_is_chosen() -> None:
    def pays(lengths: list[int], features: int = 4096) -> bool:
        starts = torch.zeros(1, sum(lengths), dtype=torch.bool)
        starts[0, torch.tensor(lengths).cumsum(0)[:-1]] = True
        found = Context(torch.zeros(1, sum(lengths)).long(), position_ids=packed_positions(lengths)).documents
        assert found is not None
        assert found.rows == documents.segments(starts, 1)
        return found.packing_pays(features)

    assert pays([2048] * 4)
    assert pays([4000, 3000, 1192])
    assert pays([100] * 82)
    assert not pays([99, 101, 17, 183] * 20)
    assert not pays([4000, 3000, 1192], 512)  # launches take longer than attention


@torch.inference_mode()
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_cpu_computes_each_document_alone(bidirectional: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows and padding after the last document: the scores of other documents are never computed."""
    sizes: dict[str, Any] = {**SIZES, "head_dim": 8, "sliding_window": 9 if bidirectional else 5}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**sizes, layer_types=kinds, use_bidirectional_attention=bidirectional)
    model, ids = Gemma3Text(config, dtype=torch.float32), torch.randint(60, (2, 20))
    alone = {
        (row, start): model(ids[row : row + 1, start:end]).logits[0]
        for row, bounds in enumerate([(0, 8, 20), (0, 15, 20)])
        for start, end in pairwise(bounds)
    }
    packed = model(ids[:1], cu_seqlens=torch.tensor([0, 8])).logits
    torch.testing.assert_close(packed[0, :8], alone[0, 0])
    sizes_seen: list[int] = []
    reference = attention_paths.reference

    def counting(call: AttentionCall) -> torch.Tensor:
        sizes_seen.append(call.scores)
        return reference(call)

    monkeypatch.setattr(attention_paths, "reference", counting)
    logits = model(ids, position_ids=packed_positions([8, 12], [15, 5])).logits
    for (row, start), want in alone.items():
        torch.testing.assert_close(logits[row, start : start + len(want)], want)
    assert set(sizes_seen) <= {8 * 8, 12 * 12, 15 * 15, 5 * 5}


def test_documents_in_parts() -> None:
    parts = documents.Documents(lambda: [[(0, 7), (8, 3)], []], 12, torch.device("cpu")).divided(3)
    assert parts.rows == [[(0, 3), (3, 3), (6, 1), (8, 3)], []]
    assert parts.longest == 3
    assert documents.Documents(lambda: None, 12, torch.device("cpu")).divided(3).rows is None


# Attention to earlier and later tokens


def within_in_torch(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Boundaries, scale: float | None = None, window: int | None = None
) -> Tensor:
    """`attend_within`, document by document."""
    bounds, group = boundaries.positions.tolist(), q.shape[2] // k.shape[2]
    assert boundaries.longest == max(stop - start for start, stop in pairwise(bounds))
    outputs = []
    for start, stop in pairwise(bounds):
        parts = (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
        a, b, c = (x.flatten(0, 1)[start:stop].transpose(0, 1) for x in parts)
        index = torch.arange(stop - start, device=q.device)
        is_far = (index - index[:, None]).abs() >= (stop if window is None else window)
        scores = (a @ b.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(is_far, -torch.inf)
        outputs.append((scores.softmax(-1) @ c).transpose(0, 1))
    return torch.cat(outputs).view(q.shape)


@pytest.mark.parametrize("packing", ["cu_seqlens", "position_ids"])
def test_bidirectional_documents(packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows, grouped queries, and tokens after the last document: the other path of a GPU computes the same."""
    config = Gemma3TextConfig(
        **SIZES,  # type: ignore[arg-type]
        head_dim=8,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
    )
    model = Gemma3Text(config, dtype=torch.float32)
    inputs: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 14, 14, 15, 27])}
    ids = torch.randint(60, (1, 30))
    if packing == "position_ids":
        ids, inputs = torch.randint(60, (2, 30)), {"position_ids": packed_positions([14, 1, 15], [30])}
    weights = list(model.parameters())

    def results() -> list[Tensor]:
        logits = model(ids, **inputs).logits
        return [logits, *torch.autograd.grad(logits.logsumexp(-1).sum(), weights, allow_unused=True)]

    expected, windows = results(), []

    def recorded(*arguments: Any) -> Tensor:
        windows.append(arguments[-1])
        return within_in_torch(*arguments)

    monkeypatch.setattr(attention_paths, "has_boundaries", lambda *_: True)
    monkeypatch.setattr(attention_paths, "attend_within", recorded)
    for got, want in zip(results(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(windows) == 2
    assert windows.count(None) == 1


def test_boundaries_of_documents() -> None:
    positions, longest = boundaries_of([[(0, 7), (7, 0), (8, 3)], [], [(2, 10)]], 12)
    assert positions.tolist() == [0, 7, 8, 11, 12, 24, 26, 36]
    assert (positions.dtype, longest) == (torch.int32, 12)
    assert boundaries_of([], 12).longest == 0


def test_torch_computes_gradients_within_documents() -> None:
    """As far as shapes go."""
    q, k, v = (torch.empty(2, 30, n, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (4, 2, 2))
    boundaries = boundaries_of([[(0, 30)], [(0, 9), (9, 21)]], 30, "meta")
    out = attend_within(q, k, v, boundaries, window=5)
    assert out.shape == q.shape
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]
    assert not has_boundaries(q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 65])
@pytest.mark.parametrize("head_dim, heads", [(64, (4, 4)), (128, (4, 2)), (40, (2, 1))])
def test_bidirectional_documents_on_a_gpu(head_dim: int, heads: tuple[int, int], window: int | None) -> None:
    """Outputs and gradients have at most twice the error of the reference in bf16."""
    spans = [[(0, 300), (300, 1), (301, 640)], [(0, 128), (128, 872)]]
    boundaries = boundaries_of(spans, 1000, "cuda")
    exact = [torch.randn(2, 1000, n, head_dim, device="cuda").bfloat16() for n in (*heads, heads[1])]
    upstream = torch.randn_like(exact[0])

    def results(attention: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in exact]
        out = attention(*inputs, boundaries, None, window)
        return [out, *torch.autograd.grad(out, inputs, upstream.to(dtype))]

    assert has_boundaries(*exact)
    kinds = (attend_within, torch.bfloat16), (within_in_torch, torch.bfloat16), (within_in_torch, torch.float64)
    for got, plain, truth in zip(*(results(*kind) for kind in kinds), strict=True):
        error, allowed = ((x - truth).norm() for x in (got, plain))
        assert error <= 2 * allowed

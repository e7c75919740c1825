"""Attention masks as matrices and block masks, against plain loops over the definition."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from ligerzoo.layers import (
    Context,
    Decoder,
    KVCache,
    Mask,
    RollingLayerCache,
    RotaryEmbedding,
    StaticLayerCache,
    TokenCache,
)
from ligerzoo.layers import flex_attention as flex_attention_file
from ligerzoo.layers.attention_call import AttentionCall
from ligerzoo.layers.input_properties import InputProperties, assuming_inputs
from ligerzoo.layers.plain_attention import reference
from tests.kernels.op_recorder import Recorder


def after(past: int) -> KVCache | None:
    """A cache of `past` tokens; None for 0."""
    if past == 0:
        return None
    cache = TokenCache()
    cache.append(torch.zeros(3, past, 1, 1), torch.zeros(3, past, 1, 1))
    return KVCache([cache])


def mask_of(
    attention_mask: Tensor | None, queries: int, keys: int, window: int | None = None, is_causal: bool = True
) -> Mask | Tensor | None:
    context = Context(torch.zeros(3, queries), attention_mask, cache=after(keys - queries))
    return context.mask(keys, window=window, is_causal=is_causal)


def expected(
    rows: int, queries: int, keys: int, sees: Callable[[int, int, int], bool]
) -> Tensor:  # of (row, index of the query, key)
    past = keys - queries
    return torch.tensor(
        [[[[sees(r, past + q, k) for k in range(keys)] for q in range(queries)]] for r in range(rows)]
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 8), (1, 6)])
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float32])
def test_causal_mask_with_padding(queries: int, keys: int, dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    attention_mask = torch.ones(3, keys)
    attention_mask[1, :2], attention_mask[2, -1] = 0, 0
    mask = mask_of(attention_mask.to(mask_dtype), queries, keys)
    assert isinstance(mask, Mask)
    visible = expected(3, queries, keys, lambda r, q, k: k <= q and attention_mask[r, k] == 1)
    assert torch.equal(mask.visible(), visible)
    added = mask.additive(dtype)
    assert added.dtype == dtype
    assert torch.equal(added, torch.where(visible, 0, torch.finfo(dtype).min).to(dtype))


@pytest.mark.parametrize("window", [1, 2, 4, 7, 20])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("queries, keys", [(9, 9), (3, 9), (1, 9)])
@pytest.mark.parametrize("padded", [True, False])
def test_windows(window: int, is_causal: bool, queries: int, keys: int, padded: bool) -> None:
    padding_mask = torch.ones(3, keys, dtype=torch.bool)
    if padded:
        padding_mask[0, :3] = False
    mask = mask_of(padding_mask, queries, keys, window, is_causal)
    reach = (lambda q, k: q - window < k <= q) if is_causal else (lambda q, k: abs(q - k) < window)
    visible = expected(3, queries, keys, lambda r, q, k: reach(q, k) and bool(padding_mask[r, k]))
    if mask is None:
        assert not padded
        assert visible.all() or (visible == expected(3, queries, keys, lambda r, q, k: k <= q)).all()
    else:
        assert isinstance(mask, Mask)
        assert torch.equal(mask.visible().expand_as(visible), visible)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_segments_do_not_attend_to_each_other(window: int | None, is_causal: bool) -> None:
    segment = [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]  # the last one is padding
    contexts = [
        Context(torch.zeros(1, 10), cu_seqlens=torch.tensor([0, 4, 6])),
        Context(torch.zeros(1, 10), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]])),
        Context(torch.zeros(1, 10), position_ids=torch.tensor([[5, 6, 7, 8, 3, 4, 0, 1, 2, 3]])),
    ]

    def sees(row: int, q: int, k: int) -> bool:
        near = window is None or (q - k < window and (is_causal or k - q < window))
        return segment[q] == segment[k] and near and (k <= q or not is_causal)

    for context in contexts:
        mask = context.mask(10, window=window, is_causal=is_causal)
        assert isinstance(mask, Mask)
        assert torch.equal(mask.visible(), expected(1, 10, 10, sees))
    assert contexts[0].position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_with_different_segments(window: int | None, is_causal: bool) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
    mask = Context(torch.zeros(2, 9), position_ids=positions).mask(9, window=window, is_causal=is_causal)
    assert isinstance(mask, Mask)
    for row, visible in zip(positions, mask.visible(), strict=True):
        alone = Context(torch.zeros(1, 9), position_ids=row[None]).mask(9, window=window, is_causal=is_causal)
        assert isinstance(alone, Mask)
        assert torch.equal(visible[None], alone.visible())


SPANS = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1], [0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1]]) == 1


def same_span(row: int, q: int, k: int) -> bool:
    return bool(SPANS[row, min(q, k) : max(q, k) + 1].all())


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("padded", [True, False])
def test_tokens_of_a_span_attend_to_each_other(window: int | None, padded: bool) -> None:
    """Ahead up to the end of the span, back up to the window."""
    padding_mask = torch.ones_like(SPANS)
    if padded:
        padding_mask[0, :2] = False
    context = Context(torch.zeros(2, 11), padding_mask)
    context.allow_bidirectional_spans(SPANS)
    mask = context.mask(11, window=window)
    assert isinstance(mask, Mask)

    def sees(row: int, q: int, k: int) -> bool:
        near = window is None or q - k < window
        return near and (k <= q or same_span(row, q, k)) and bool(padding_mask[row, k])

    assert torch.equal(mask.visible(), expected(2, 11, 11, sees))


@pytest.mark.parametrize("is_rolling", [True, False])
def test_spans_after_a_cache(is_rolling: bool) -> None:
    """Spans of the chunk, for any offset of the layer's keys."""
    cache = RollingLayerCache(4) if is_rolling else TokenCache()
    first, second = (torch.zeros(2, tokens, 1, 1) for tokens in (5, 6))
    cache.append(first, first)
    context = Context(second[..., 0, 0], cache=KVCache([cache]))
    context.allow_bidirectional_spans(SPANS[:, 5:])
    keys, _ = cache.append(second, second)
    assert keys.shape[1] == (9 if is_rolling else 11)
    mask = context.mask(keys.shape[1], window=4, cache=cache)
    assert isinstance(mask, Mask)
    visible = expected(2, 11, 11, lambda r, q, k: q - k < 4 and (k <= q or (q > 4 and same_span(r, q, k))))
    assert torch.equal(mask.visible(), visible[:, :, 5:, cache.offset :])


def test_span_ends_with_its_segment() -> None:
    in_span, segment = torch.ones(1, 9, dtype=torch.bool), [0, 0, 0, 0, 1, 1, 2, 2, 2]
    context = Context(torch.zeros(1, 9), cu_seqlens=torch.tensor([0, 4, 6, 9]))
    context.allow_bidirectional_spans(in_span)
    mask = context.mask(9)
    assert isinstance(mask, Mask)
    assert torch.equal(mask.visible(), expected(1, 9, 9, lambda r, q, k: segment[q] == segment[k]))


def test_spans_of_one_token_need_no_mask() -> None:
    for tokens in (1, 7):
        context = Context(torch.zeros(1, tokens))
        context.allow_bidirectional_spans(torch.arange(tokens)[None] % 2 == 0)
        assert context.mask(tokens) is None


def test_spans_change_masks_that_were_created_before() -> None:
    context = Context(torch.zeros(2, 11))
    assert context.mask(11) is None
    context.allow_bidirectional_spans(SPANS)
    mask = context.mask(11)
    assert isinstance(mask, Mask)
    assert mask.visible()[0, 0, 0, :4].tolist() == [True, True, True, False]


def test_spans_when_compiled() -> None:
    def visible(x: Tensor, in_span: Tensor) -> Tensor:
        context = Context(x)
        context.allow_bidirectional_spans(in_span)
        mask = context.mask(x.shape[1], window=3)
        assert isinstance(mask, Mask)
        return mask.visible()

    torch._dynamo.reset()
    compiled = torch.compile(visible, backend="aot_eager", fullgraph=True)
    for in_span in (SPANS, torch.zeros_like(SPANS)):
        assert torch.equal(*torch.broadcast_tensors(compiled(SPANS.float(), in_span), visible(SPANS.float(), in_span)))


@pytest.mark.parametrize("wrong", [{"attention_mask": torch.ones(1, 10)}, {"cache": KVCache([TokenCache()])}])
def test_packing_requires_one_row(wrong: dict[str, object]) -> None:
    for x, options in ((torch.zeros(1, 10), wrong), (torch.zeros(2, 10), {})):
        with pytest.raises(
            ValueError, match="cu_seqlens needs batch size 1, no attention_mask and no cache; got batch"
        ):
            Context(x, cu_seqlens=torch.tensor([0, 4]), **options)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 5, 128, 200])
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "padded",
        "padded on the right",
        "packed",
        "positions",
        "spans",
        "spans, padded",
        "spans, packed",
        "spans, positions",
    ],
)
def test_block_mask_agrees_with_the_matrix(kind: str, window: int | None, is_causal: bool, device: str) -> None:
    tokens = 300
    options: dict[str, Tensor] = {}
    if "padded" in kind:
        options["attention_mask"] = torch.ones(2, tokens, dtype=torch.bool)
        options["attention_mask"][0, slice(160, None) if "right" in kind else slice(140)] = False
    if "packed" in kind:
        options["cu_seqlens"] = torch.tensor([0, 7, 130, 260])
    if "positions" in kind:
        options["position_ids"] = torch.arange(tokens) % torch.tensor([[140], [70]])
    rows = 1 if "packed" in kind else 2
    context = Context(torch.zeros(rows, tokens, device=device), **{k: t.to(device) for k, t in options.items()})
    if "spans" in kind:
        in_span = torch.arange(tokens, device=device) % torch.tensor([[190], [30]], device=device)[:rows] > 20
        context.allow_bidirectional_spans(in_span)
    mask = context.mask(tokens, window=window, is_causal=is_causal, force=True)
    assert isinstance(mask, Mask)
    blocks, visible = mask.block_mask(), mask.visible()[:, 0].cpu()
    rows = len(visible)
    padded = torch.nn.functional.pad(visible, (0, 84, 0, 84)).view(rows, 3, 128, 3, 128)
    dense = blocks.to_dense()[:, 0].bool().cpu()
    assert torch.equal(dense | padded.any(4).any(2), dense)  # every visible key is computed
    full = torch.zeros_like(dense)
    for b, q in torch.cartesian_prod(torch.arange(rows), torch.arange(3)).tolist():
        count = blocks.full_kv_num_blocks[b, 0, q]
        full[b, q, blocks.full_kv_indices[b, 0, q, :count].cpu().long()] = True
    fully_visible = padded[:, :, : tokens % 128].all(4).all(2)  # the queries that exist in the last block
    assert torch.equal(full & fully_visible, full)

    q, k, v = (torch.randn(2, tokens, 2, 16, device=device) for _ in "qkv")
    out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks)
    expected = reference(AttentionCall(q, k, v, mask.additive(q.dtype)))
    if mask.fallback is not None:  # on a CPU, the matrix lets a query without visible keys attend to all equally
        expected = torch.where(mask.fallback[..., None, None] >= 0, v, expected)
    assert (out.transpose(1, 2) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("packed, loads", [(False, 0), (True, 1)])
@pytest.mark.parametrize("window", [None, 5])
def test_causal_masks_load_only_the_starts_of_segments(packed: bool, window: int | None, loads: int) -> None:
    """FlexAttention evaluates the mask for each query and key."""
    mask = Context(torch.zeros(1, 300), cu_seqlens=torch.tensor([0, 7, 130, 260]) if packed else None).mask(
        300, window=window, force=True
    )
    assert isinstance(mask, Mask)
    sees, index = mask.block_mask().mask_mod, torch.tensor([3])
    with Recorder() as recorder:
        assert sees(index, index, index, index).item()
    assert recorder.names.count("index") == loads


PADDED, PACKED = torch.arange(40)[None] > 2, torch.tensor([0, 7, 40])


@pytest.mark.parametrize("skips_defaults", [False, pytest.param(True, id="as before torch 2.12")])
def test_flex_attention_is_compiled_once_for_each_kind_of_mask_and_window(
    monkeypatch: pytest.MonkeyPatch, skips_defaults: bool
) -> None:
    """By default, torch compiles a function at most 8 times, and then runs FlexAttention without a kernel."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, backend=counter)
    monkeypatch.setattr(flex_attention_file, "_compiled_flex_attention", lambda: compiled)
    with torch._dynamo.config.patch(skip_guards_on_constant_func_defaults=skips_defaults):
        for (inputs, window), dtype in 2 * list(
            product(
                product([{}, {"attention_mask": PADDED}, {"cu_seqlens": PACKED}], [5, 7]),
                [torch.float32, torch.float64],
            )
        ):
            x = torch.randn(1, 40, 1, 16, dtype=dtype)
            mask = Context(torch.zeros(1, 40), **inputs).mask(40, window=window)
            assert isinstance(mask, Mask)
            out = flex_attention_file.run_flex_attention(AttentionCall(x, x, x, mask, None, None, True, None))
            torch.testing.assert_close(out[:, 3:], reference(AttentionCall(x, x, x, mask.additive(dtype)))[:, 3:])
    assert counter.frame_count == 12
    torch._dynamo.reset()


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["alone", "after a cache", "after a rolling cache", "spans"])
def test_only_queries_without_visible_keys_fall_back_to_their_own(
    kind: str, window: int | None, is_causal: bool
) -> None:
    """Left padding; right or inner padding only if it is longer than the window."""
    padding = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0, 0, 0]]) == 1
    layer = RollingLayerCache(3) if "rolling" in kind else TokenCache()
    past = 5 if "cache" in kind else 0
    if past:
        layer.append(*2 * [torch.zeros(3, past, 1, 1)])
    new = torch.zeros(3, 9 - past, 1, 1)
    context = Context(new[..., 0, 0], ~padding, cache=KVCache([layer]) if past else None)
    if kind == "spans":
        context.allow_bidirectional_spans(torch.arange(9)[None].expand(3, -1) < 4)
    keys = layer.append(new, new)[0].shape[1]
    mask = context.mask(keys, window=window, is_causal=is_causal, cache=layer if past else None)
    assert isinstance(mask, Mask)
    assert mask.fallback is not None
    sees_nothing = ~mask.visible()[:, 0].any(-1)
    own = torch.arange(9 - past) + keys - (9 - past)
    assert torch.equal(mask.fallback, own.where(sees_nothing, -1))
    if kind == "alone" and is_causal:
        assert sees_nothing.tolist()[0] == [True] * 2 + [False] * 7
        assert sees_nothing[1:].any() == (window is not None and window < 4)


@pytest.mark.gpu
def test_on_a_gpu_left_padding_attends_to_itself() -> None:
    attention_mask = torch.tensor([[0, 0, 1], [1, 1, 0]], device="cuda")
    mask = Context(torch.zeros(2, 3, device="cuda"), attention_mask).mask(3)
    assert isinstance(mask, Mask)
    left = [[True, False, False], [False, True, False], [False, False, True]]
    right = [[True, False, False], [True, True, False], [True, True, False]]
    assert mask.visible()[:, 0].tolist() == [left, right]


def test_no_mask_if_none_is_needed() -> None:
    assert mask_of(None, 5, 5) is None
    assert mask_of(None, 1, 5) is None
    assert mask_of(torch.ones(3, 5), 5, 5) is None
    assert mask_of(None, 5, 5, window=5) is None
    assert mask_of(None, 5, 5, is_causal=False) is None


def test_masks_are_created_once() -> None:
    context = Context(torch.zeros(2, 9))
    assert context.mask(9, window=3) is context.mask(9, window=3)
    assert context.mask(9, window=3) is not context.mask(9, window=4)


def test_full_mask_is_used_unchanged() -> None:
    for mask in (torch.rand(3, 1, 3, 5) < 0.5, torch.randn(3, 1, 3, 5)):
        got = mask_of(mask, 3, 5)
        assert isinstance(got, Tensor)
        assert torch.equal(got, mask)


@pytest.mark.parametrize("mask", [torch.ones(3, 4), torch.ones(5), torch.ones(3, 5, 5), torch.ones(2, 5)])
def test_mask_of_wrong_shape(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected \(3, 5\)"):
        mask_of(mask, 5, 5)


@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (2, 1, 5, 4)])
def test_full_mask_for_fewer_queries_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \(batch, 1, 5, 5\)"):
        mask_of(torch.ones(shape, dtype=torch.bool), 5, 5)


def test_full_mask_of_integers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got torch\.int64; expected bool, or a floating dtype to be added"):
        mask_of(torch.ones(2, 1, 5, 5, dtype=torch.int64), 5, 5)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"attention_mask": [[1] * 6]}, r"attention_mask is a list; expected a tensor of shape \(B, S\)"),
        ({"position_ids": list(range(6))}, "position_ids is a list; expected a tensor of integers"),
        ({"cu_seqlens": [0, 3, 6]}, "cu_seqlens is a list; expected a tensor of integers"),
        ({"x": [1, 2]}, "x is a list; expected a tensor of"),
    ],
    ids=str,
)
def test_lists_are_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=rf"^Context: {message}.*\. Convert it with torch\.tensor$"):
        Context(**{"x": torch.zeros(1, 6), **inputs})


@pytest.mark.parametrize(
    "position_ids, got",
    [
        (torch.arange(5)[None], r"\(1, 5\) and torch.int64"),
        (torch.arange(6), r"\(6,\) and torch.int64"),
        (torch.zeros(3, 6).long(), r"\(3, 6\) and torch.int64"),
        (torch.zeros(3, 3, 6).long(), r"\(3, 3, 6\) and torch.int64"),
        (torch.zeros(2, 6), r"\(2, 6\) and torch.float32"),
    ],
    ids=["tokens", "dimensions", "rows", "rows of axes", "dtype"],
)
def test_position_ids_of_another_shape_or_dtype(position_ids: Tensor, got: str) -> None:
    with pytest.raises(ValueError, match=rf"position_ids: got shape {got}; expected integers of shape \(2 or 1, 6\)"):
        Context(torch.zeros(2, 6), position_ids=position_ids)


def test_full_mask_hides_unwritten_slots() -> None:
    cache = KVCache([StaticLayerCache(9)])
    x = torch.zeros(2, 4, 1, 1)
    Context(x[..., 0, 0], cache=cache)
    cache.layers[0].append(x, x)
    full = torch.rand(2, 1, 1, 5) < 0.5
    for mask, hidden in ((full, False), (torch.where(full, 0.0, -1.0), torch.finfo(torch.float32).min)):
        got = Context(torch.zeros(2, 1), mask, cache=cache).mask(9, cache=cache.layers[0])
        assert isinstance(got, Tensor)
        assert torch.equal(got[..., :5], mask)
        assert (got[..., 5:] == hidden).all()


def test_position_ids_mark_segments_only_without_a_cache() -> None:
    """A cache does not store the starts of segments."""
    restarting = torch.tensor([[0, 1, 2, 0, 1]])
    assert Context(torch.zeros(1, 5), position_ids=restarting).segment_start is not None
    assert Context(torch.zeros(1, 5), position_ids=restarting, cache=KVCache([TokenCache()])).segment_start is None


def test_fork_has_all_attributes() -> None:
    context = Context(torch.zeros(1, 3, dtype=torch.int64))
    fork = context.fork()
    assert vars(fork).keys() == vars(context).keys()
    assert fork.router_logits is not context.router_logits
    assert fork.position_ids is context.position_ids


def test_replace_leaves_the_context_unchanged() -> None:
    rotary, context = RotaryEmbedding(4), Context(torch.zeros(1, 3))
    angles = context.rotation(rotary, torch.float32)
    moved = context.replace(position_ids=context.position_ids + 5)
    assert vars(moved).keys() == vars(context).keys()
    assert context.position_ids.tolist() == [[0, 1, 2]]
    assert context.rotation(rotary, torch.float32) is angles
    assert not torch.equal(moved.rotation(rotary, torch.float32)[0], angles[0])
    assert moved.outputs is context.outputs


def test_a_decoder_that_skips_padding_writes_no_position_ids() -> None:
    x = torch.zeros(1, 3, dtype=torch.int64)
    context = Context(x, torch.tensor([[0, 1, 1]]))
    Decoder(torch.nn.Embedding(2, 4), [], torch.nn.Identity(), positions_skip_padding=True)(x, context)
    assert context.position_ids.tolist() == [[0, 1, 2]]


def test_what_a_thread_assumes_of_its_inputs_is_not_assumed_in_another() -> None:
    def has_padding() -> bool:
        return Context(torch.zeros(1, 4), torch.tensor([[0, 0, 1, 1]])).padding_mask is not None

    with assuming_inputs(InputProperties(has_padding=False, has_segments=False)), ThreadPoolExecutor(1) as other:
        assert not has_padding()
        assert other.submit(has_padding).result()
    assert has_padding()

"""Which keys each query sees: as a matrix, and in blocks, against a loop that knows the words only."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from ligerzoo.layers import Context, KVCache, LayerCache, Mask, RollingLayerCache, StaticLayerCache
from ligerzoo.layers.attention import reference


def after(past: int) -> KVCache | None:
    """A cache that has seen so many tokens."""
    if past == 0:
        return None
    cache = LayerCache()
    cache.append(torch.zeros(3, past, 1, 1), torch.zeros(3, past, 1, 1))
    return KVCache([cache])


def mask_of(
    attention_mask: Tensor | None, queries: int, keys: int, window: int | None = None, is_causal: bool = True
) -> Mask | Tensor | None:
    context = Context(torch.zeros(3, queries), attention_mask, cache=after(keys - queries))
    return context.mask(keys, window=window, is_causal=is_causal)


def expected(
    rows: int, queries: int, keys: int, sees: Callable[[int, int, int], bool]
) -> Tensor:  # of (row, place of the query, key)
    past = keys - queries
    return torch.tensor(
        [[[[sees(r, past + q, k) for k in range(keys)] for q in range(queries)]] for r in range(rows)]
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 8), (1, 6)])
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float32])
def test_a_token_sees_the_real_tokens_up_to_itself(
    queries: int, keys: int, dtype: torch.dtype, mask_dtype: torch.dtype
) -> None:
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
    real = torch.ones(3, keys, dtype=torch.bool)
    if padded:
        real[0, :3] = False
    mask = mask_of(real, queries, keys, window, is_causal)
    reach = (lambda q, k: q - window < k <= q) if is_causal else (lambda q, k: abs(q - k) < window)
    visible = expected(3, queries, keys, lambda r, q, k: reach(q, k) and bool(real[r, k]))
    if mask is None:
        assert not padded
        assert visible.all() or (visible == expected(3, queries, keys, lambda r, q, k: k <= q)).all()
    else:
        assert isinstance(mask, Mask)
        assert torch.equal(mask.visible().expand_as(visible), visible)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_texts_do_not_see_each_other(window: int | None, is_causal: bool) -> None:
    text = [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]  # the last is padding
    contexts = [
        Context(torch.zeros(1, 10), cu_seqlens=torch.tensor([0, 4, 6])),
        Context(torch.zeros(1, 10), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]])),
        Context(torch.zeros(1, 10), position_ids=torch.tensor([[5, 6, 7, 8, 3, 4, 0, 1, 2, 3]])),
    ]

    def sees(row: int, q: int, k: int) -> bool:
        near = window is None or (q - k < window and (is_causal or k - q < window))
        return text[q] == text[k] and near and (k <= q or not is_causal)

    for context in contexts:
        mask = context.mask(10, window=window, is_causal=is_causal)
        assert isinstance(mask, Mask)
        assert torch.equal(mask.visible(), expected(1, 10, 10, sees))
    assert contexts[0].position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]]


RUNS = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1], [0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1]]) == 1


def same_run(row: int, q: int, k: int, here: Tensor = RUNS) -> bool:
    return bool(here[row, min(q, k) : max(q, k) + 1].all())


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("padded", [True, False])
def test_tokens_in_a_run_see_each_other(window: int | None, padded: bool) -> None:
    """Ahead as far as the run goes, and back as far as the window."""
    real = torch.ones_like(RUNS)
    if padded:
        real[0, :2] = False
    context = Context(torch.zeros(2, 11), real)
    context.allow_bidirectional_spans(RUNS)
    mask = context.mask(11, window=window)
    assert isinstance(mask, Mask)

    def sees(row: int, q: int, k: int) -> bool:
        near = window is None or q - k < window
        return near and (k <= q or same_run(row, q, k)) and bool(real[row, k])

    assert torch.equal(mask.visible(), expected(2, 11, 11, sees))


@pytest.mark.parametrize("is_rolling", [True, False])
def test_runs_after_a_cache(is_rolling: bool) -> None:
    """The chunk's own, wherever the layer's keys begin."""
    cache = RollingLayerCache(4) if is_rolling else LayerCache()
    first, second = (torch.zeros(2, tokens, 1, 1) for tokens in (5, 6))
    cache.append(first, first)
    context = Context(second[..., 0, 0], cache=KVCache([cache]))
    context.allow_bidirectional_spans(RUNS[:, 5:])
    keys, _ = cache.append(second, second)
    assert keys.shape[1] == (9 if is_rolling else 11)
    mask = context.mask(keys.shape[1], window=4, cache=cache)
    assert isinstance(mask, Mask)
    visible = expected(2, 11, 11, lambda r, q, k: q - k < 4 and (k <= q or (q > 4 and same_run(r, q, k))))
    assert torch.equal(mask.visible(), visible[:, :, 5:, cache.offset :])


def test_a_run_ends_with_its_text() -> None:
    here, text = torch.ones(1, 9, dtype=torch.bool), [0, 0, 0, 0, 1, 1, 2, 2, 2]
    context = Context(torch.zeros(1, 9), cu_seqlens=torch.tensor([0, 4, 6, 9]))
    context.allow_bidirectional_spans(here)
    mask = context.mask(9)
    assert isinstance(mask, Mask)
    assert torch.equal(mask.visible(), expected(1, 9, 9, lambda r, q, k: text[q] == text[k]))


def test_runs_of_one_token_need_no_mask() -> None:
    for tokens in (1, 7):
        context = Context(torch.zeros(1, tokens))
        context.allow_bidirectional_spans(torch.arange(tokens)[None] % 2 == 0)
        assert context.mask(tokens) is None


def test_runs_when_compiled() -> None:
    def visible(x: Tensor, here: Tensor) -> Tensor:
        context = Context(x)
        context.allow_bidirectional_spans(here)
        mask = context.mask(x.shape[1], window=3)
        assert isinstance(mask, Mask)
        return mask.visible()

    torch._dynamo.reset()
    compiled = torch.compile(visible, backend="aot_eager", fullgraph=True)
    for here in (RUNS, torch.zeros_like(RUNS)):
        assert torch.equal(*torch.broadcast_tensors(compiled(RUNS.float(), here), visible(RUNS.float(), here)))


@pytest.mark.parametrize("wrong", [{"attention_mask": torch.ones(1, 10)}, {"cache": KVCache([LayerCache()])}])
def test_packing_is_for_one_row_alone(wrong: dict[str, object]) -> None:
    for x, options in ((torch.zeros(1, 10), wrong), (torch.zeros(2, 10), {})):
        with pytest.raises(
            ValueError, match="cu_seqlens needs batch size 1, no attention_mask and no cache; got batch"
        ):
            Context(x, cu_seqlens=torch.tensor([0, 4]), **options)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 5, 128, 200])
@pytest.mark.parametrize(
    "kind", ["plain", "padded", "padded on the right", "packed", "runs", "runs, padded", "runs, packed"]
)
def test_blocks_agree_with_the_matrix(kind: str, window: int | None, is_causal: bool, device: str) -> None:
    tokens = 300
    options: dict[str, Tensor] = {}
    if "padded" in kind:
        options["attention_mask"] = torch.ones(2, tokens, dtype=torch.bool)
        options["attention_mask"][0, slice(160, None) if "right" in kind else slice(140)] = False
    if "packed" in kind:
        options["cu_seqlens"] = torch.tensor([0, 7, 130, 260])
    rows = 1 if "packed" in kind else 2
    context = Context(torch.zeros(rows, tokens, device=device), **{k: t.to(device) for k, t in options.items()})
    if "runs" in kind:
        here = torch.arange(tokens, device=device) % torch.tensor([[190], [30]], device=device)[:rows] > 20
        context.allow_bidirectional_spans(here)
    mask = context.mask(tokens, window=window, is_causal=is_causal, force=True)
    assert isinstance(mask, Mask)
    blocks, visible = mask.block_mask(), mask.visible()[:, 0].cpu()
    rows = len(visible)
    padded = torch.nn.functional.pad(visible, (0, 84, 0, 84)).view(rows, 3, 128, 3, 128)
    dense = blocks.to_dense()[:, 0].bool().cpu()
    assert torch.equal(dense | padded.any(4).any(2), dense)  # whatever is seen is computed
    full = torch.zeros_like(dense)
    for b, q in torch.cartesian_prod(torch.arange(rows), torch.arange(3)).tolist():
        count = blocks.full_kv_num_blocks[b, 0, q]
        full[b, q, blocks.full_kv_indices[b, 0, q, :count].cpu().long()] = True
    seen_in_full = padded[:, :, : tokens % 128].all(4).all(2)  # of the last block of queries, those there are
    assert torch.equal(full & seen_in_full, full)

    q, k, v = (torch.randn(2, tokens, 2, 16, device=device) for _ in "qkv")
    out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks)
    expected = reference(q, k, v, mask.additive(q.dtype))
    if mask.fallback is not None:  # on a CPU the matrix lets a query that sees nothing attend to all keys equally
        expected = torch.where(mask.fallback[..., None, None] >= 0, v, expected)
    assert (out.transpose(1, 2) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["alone", "after a cache", "after a rolling cache", "runs"])
def test_only_a_query_that_sees_nothing_falls_back_to_its_own_key(
    kind: str, window: int | None, is_causal: bool
) -> None:
    """Padding on the left; not padding on the right or in the middle, unless the window is shorter."""
    padding = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0, 0, 0]]) == 1
    layer = RollingLayerCache(3) if "rolling" in kind else LayerCache()
    past = 5 if "cache" in kind else 0
    if past:
        layer.append(*2 * [torch.zeros(3, past, 1, 1)])
    new = torch.zeros(3, 9 - past, 1, 1)
    context = Context(new[..., 0, 0], ~padding, cache=KVCache([layer]) if past else None)
    if kind == "runs":
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
def test_on_a_gpu_padding_that_sees_nothing_sees_itself() -> None:
    attention_mask = torch.tensor([[0, 0, 1], [1, 1, 0]], device="cuda")
    mask = Context(torch.zeros(2, 3, device="cuda"), attention_mask).mask(3)
    assert isinstance(mask, Mask)
    left = [[True, False, False], [False, True, False], [False, False, True]]
    right = [[True, False, False], [True, True, False], [True, True, False]]
    assert mask.visible()[:, 0].tolist() == [left, right]


def test_no_mask_where_none_is_needed() -> None:
    assert mask_of(None, 5, 5) is None
    assert mask_of(None, 1, 5) is None
    assert mask_of(torch.ones(3, 5), 5, 5) is None
    assert mask_of(None, 5, 5, window=5) is None
    assert mask_of(None, 5, 5, is_causal=False) is None


def test_a_mask_is_made_once() -> None:
    context = Context(torch.zeros(2, 9))
    assert context.mask(9, window=3) is context.mask(9, window=3)
    assert context.mask(9, window=3) is not context.mask(9, window=4)


def test_a_ready_mask_is_taken_as_it_is() -> None:
    for mask in (torch.rand(3, 1, 3, 5) < 0.5, torch.randn(3, 1, 3, 5)):
        got = mask_of(mask, 3, 5)
        assert isinstance(got, Tensor)
        assert torch.equal(got, mask)


@pytest.mark.parametrize("mask", [torch.ones(3, 4), torch.ones(5), torch.ones(3, 5, 5), torch.ones(2, 5)])
def test_a_mask_of_another_shape(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected \(3, 5\)"):
        mask_of(mask, 5, 5)


@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (2, 1, 5, 4)])
def test_a_ready_mask_for_fewer_queries_would_show_the_future(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \(batch, 1, 5, 5\)"):
        mask_of(torch.ones(shape, dtype=torch.bool), 5, 5)


def test_a_ready_mask_of_ones_and_zeros_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got torch\.int64; expected bool, or a floating dtype to be added"):
        mask_of(torch.ones(2, 1, 5, 5, dtype=torch.int64), 5, 5)


def test_a_ready_mask_is_hidden_where_nothing_has_been_written() -> None:
    cache = KVCache([StaticLayerCache(9)])
    x = torch.zeros(2, 4, 1, 1)
    Context(x[..., 0, 0], cache=cache)
    cache.layers[0].append(x, x)
    ready = torch.rand(2, 1, 1, 5) < 0.5
    for mask, hidden in ((ready, False), (torch.where(ready, 0.0, -1.0), torch.finfo(torch.float32).min)):
        got = Context(torch.zeros(2, 1), mask, cache=cache).mask(9, cache=cache.layers[0])
        assert isinstance(got, Tensor)
        assert torch.equal(got[..., :5], mask)
        assert (got[..., 5:] == hidden).all()


def test_texts_are_told_apart_without_a_cache_alone() -> None:
    """For a cache does not remember where they began."""
    again = torch.tensor([[0, 1, 2, 0, 1]])
    assert Context(torch.zeros(1, 5), position_ids=again).segment_start is not None
    assert Context(torch.zeros(1, 5), position_ids=again, cache=KVCache([LayerCache()])).segment_start is None


def test_a_fork_has_all_that_its_context_has() -> None:
    context = Context(torch.zeros(1, 3, dtype=torch.int64))
    fork = context.fork()
    assert vars(fork).keys() == vars(context).keys()
    assert fork.router_logits is not context.router_logits
    assert fork.position_ids is context.position_ids

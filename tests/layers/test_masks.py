import pytest
import torch
from torch import Tensor

from ligerzoo.layers import causal_mask


def mask_of(
    attention_mask: Tensor | None, queries: int, keys: int, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    return causal_mask(attention_mask, queries, keys, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 8), (1, 6)])
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float32])
def test_a_token_sees_the_real_tokens_up_to_itself(
    queries: int, keys: int, dtype: torch.dtype, mask_dtype: torch.dtype
) -> None:
    attention_mask = torch.ones(3, keys)
    attention_mask[1, :2], attention_mask[2, -1] = 0, 0
    mask = mask_of(attention_mask.to(mask_dtype), queries, keys, dtype)
    assert mask is not None
    assert (mask.shape, mask.dtype) == ((3, 1, queries, keys), dtype)
    for row in range(3):
        for query in range(queries):
            for key in range(keys):
                itself = keys - queries + query
                visible = key <= itself and attention_mask[row, key] == 1
                assert mask[row, 0, query, key] == (0 if visible else torch.finfo(dtype).min)


@pytest.mark.gpu
def test_on_a_gpu_padding_sees_itself() -> None:
    attention_mask = torch.tensor([[0, 0, 1]], device="cuda")
    mask = causal_mask(attention_mask, 3, 3, dtype=torch.float32, device=attention_mask.device)
    assert mask is not None
    visible = [[True, False, False], [False, True, False], [False, False, True]]
    assert (mask == 0).tolist() == [[visible]]


def test_no_mask_where_none_is_needed() -> None:
    assert mask_of(None, 5, 5) is None
    assert mask_of(None, 1, 5) is None
    assert mask_of(torch.ones(2, 5), 5, 5) is None


def test_new_tokens_after_cached_ones_need_one() -> None:
    mask = mask_of(None, 2, 4)
    assert mask is not None
    assert (mask == 0).tolist() == [[[[True, True, True, False], [True, True, True, True]]]]


def test_a_ready_mask_is_taken_as_it_is() -> None:
    visible = torch.rand(2, 1, 3, 5) < 0.5
    added = torch.randn(2, 1, 3, 5)
    assert torch.equal(mask_of(visible, 3, 5), torch.where(visible, 0.0, torch.finfo(torch.float32).min))
    assert mask_of(added, 3, 5) is added


@pytest.mark.parametrize("mask", [torch.ones(2, 4), torch.ones(5), torch.ones(2, 5, 5), torch.ones(2, 1, 5, 4)])
def test_a_mask_of_another_shape(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected \(batch, 5\)"):
        mask_of(mask, 5, 5)


def test_a_ready_mask_for_fewer_queries_would_show_the_future() -> None:
    with pytest.raises(ValueError, match="expected"):
        mask_of(torch.ones(2, 1, 1, 5, dtype=torch.bool), 5, 5)


def test_a_ready_mask_of_ones_and_zeros_is_refused() -> None:
    with pytest.raises(ValueError, match="boolean or to be added; got torch"):
        mask_of(torch.ones(2, 1, 5, 5, dtype=torch.int64), 5, 5)

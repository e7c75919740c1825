"""Sampling on a CPU needs no more memory than in transformers."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ligerzoo.generate import Sampler, SamplingOptions
from ligerzoo.kernels.row_chunks import _ELEMENTS

ROWS, VOCAB = 128, 32768
LOGITS = ROWS * VOCAB * 4


class PeakMemory(TorchDispatchMode):
    """The largest number of bytes of tensors that operations within it have allocated and that exist together."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self._storages = 0, list[tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        of_inputs = {StorageWeakRef(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (storage := StorageWeakRef(x.untyped_storage())) not in of_inputs:
                self._storages.append((storage, x.untyped_storage().nbytes()))
        self._storages = [(storage, size) for storage, size in self._storages if not storage.expired()]
        self.bytes = max(self.bytes, sum(size for _, size in self._storages))
        return result


@pytest.mark.parametrize(
    "options",
    [
        {}, {"do_sample": True}, pytest.param({"do_sample": True, "top_k": 50}, marks=pytest.mark.thorough),
        pytest.param({"do_sample": True, "top_p": 0.9, "min_p": 0.1}, marks=pytest.mark.thorough),
        {"do_sample": True, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2, "suppress_tokens": [1, 2]},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_needs_no_more_memory_than_in_transformers(options: dict[str, Any]) -> None:
    assert LOGITS // 4 >= 16 * _ELEMENTS
    logits, ids = torch.randn(ROWS, VOCAB), torch.randint(VOCAB, (ROWS, 20))
    config = transformers.GenerationConfig(**options)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                 num_attention_heads=1)
    )  # fmt: skip
    processors = model._get_logits_processor(config, input_ids_seq_length=20)
    sampler = Sampler(ROWS, VOCAB, torch.device("cpu"))
    sampler.assign(range(ROWS), ids, SamplingOptions(**options))
    with PeakMemory() as ours:
        sampler.choose(logits)
    with PeakMemory() as theirs:
        scores = processors(ids, logits.clone())
        if options:
            torch.multinomial(scores.softmax(-1), 1)
        else:
            scores.argmax(-1)
    assert ours.bytes <= theirs.bytes
